"""What `aiokv serve` tells whoever has started it: a line each on stderr, but for the address, which is the result.

Only what is quick to import is imported here: the first line comes before torch does.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Final

from aiokv.cli.output import print_json, stdout

if TYPE_CHECKING:
    from aiokv_engine.server.process import Draining, Listening

__all__ = ["show_address", "tell_draining", "tell_end", "tell_loading", "warn_of_network", "warn_of_token_file"]

_SCHEMA_VERSION: Final = 1
_OTHERS: Final = 0o077  # group and others, to read, write or search


def tell_loading(model: str) -> None:
    """The model is looked for and loaded now, which takes a while."""
    _tell(f"loading {model} ...")


def warn_of_network(host: str) -> None:
    """The address is not loopback."""
    _tell(
        f"warning: --host {host} is not loopback: whoever reaches it may use the API and read /live and /metrics; "
        "only /kv/* asks for a token"
    )


def warn_of_token_file(file: Path) -> None:
    """Warns if more than its owner may open the file, if it is there still."""
    with contextlib.suppress(OSError):
        mode = S_IMODE(file.stat().st_mode)
        if not mode & _OTHERS:
            return
        _tell(f"warning: others than its owner may open the token file {file} (mode {mode:04o}): chmod 600 {file}")


def show_address(listening: Listening, *, as_json: bool) -> None:
    """Requests are answered from now on."""
    places = {"api": f"{listening.url}/v1", "live": f"{listening.url}/live", "metrics": f"{listening.url}/metrics"}
    if as_json:
        print_json({"url": listening.url, "model": listening.model, **places}, schema_version=_SCHEMA_VERSION)
        return
    shown = f"serving {listening.model}: API {places['api']}, live page {places['live']}, metrics {places['metrics']}"
    stdout().print(shown, markup=False, soft_wrap=True)


def tell_draining(draining: Draining) -> None:
    """The first signal has come."""
    _tell(
        f"draining, {draining.running} running, at most {draining.grace_s:g} s; another signal ends the process at once"
    )


def tell_end(*, cut_off: int) -> None:
    """Every request has ended."""
    _tell(f"ended, {cut_off} cut off" if cut_off else "ended, nothing was cut off")


def _tell(line: str) -> None:
    """Serving and draining go on when nobody reads the lines any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
