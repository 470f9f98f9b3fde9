"""What `aiokv serve` tells whoever has started it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aiokv_engine.server import notices
from aiokv_engine.server.defaults import CPU_BLOCKS, GPU_BLOCKS
from aiokv_engine.server.process import Draining, Listening
from tests.serve.test_process import new_app, serving

TOKEN = "a-token-of-enough-letters"
ADDRESS = Listening(url="http://127.0.0.1:81", model="tiny [x]")


def test_it_is_told_what_is_loaded_before_anything_can_fail(tmp_path: Path) -> None:
    result = invoke("--model", str(tmp_path / "missing.gguf"), "--port", "0")
    assert result.exit_code != 0
    assert result.stderr.startswith("loading missing.gguf ...\n")
    assert result.stdout == ""


def test_the_address_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    notices.show_address(ADDRESS, as_json=False)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out == (
        "serving tiny [x]: API http://127.0.0.1:81/v1, live page http://127.0.0.1:81/live, "
        "metrics http://127.0.0.1:81/metrics\n"
    )


def test_the_address_as_json_stands_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    notices.tell_loading("tiny")
    notices.show_address(ADDRESS, as_json=True)
    notices.tell_draining(Draining(running=1, grace_s=30.0))
    notices.tell_end(cut_off=1)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "schema_version": 1,
        "url": "http://127.0.0.1:81",
        "model": "tiny [x]",
        "api": "http://127.0.0.1:81/v1",
        "live": "http://127.0.0.1:81/live",
        "metrics": "http://127.0.0.1:81/metrics",
    }
    assert len(shown.err.splitlines()) == 3


def test_what_was_announced_is_answered(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path) as server:
        assert server.announced.keys() == {"schema_version", "url", "model", "api", "live", "metrics"}
        paths = (server.announced["live"], server.announced["metrics"], server.announced["api"] + "/models")
        assert [server.client.get(path).status_code for path in paths] == [200, 200, 200]


@pytest.mark.parametrize(
    ("host", "is_open"), [("127.0.0.1", False), ("127.0.0.2", False), ("::1", False), ("localhost", False),
                          ("0.0.0.0", True), ("::", True), ("192.0.2.1", True)],
)  # fmt: skip
def test_an_address_that_a_network_reaches_is_warned_of(tmp_path: Path, host: str, *, is_open: bool) -> None:
    result = invoke("--model", str(tmp_path / "missing.gguf"), "--port", "0", "--host", host)
    assert (f"warning: --host {host} is not loopback" in result.stderr) is is_open


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_token_file_that_others_may_open_is_warned_of(tmp_path: Path, mode: int, *, is_open: bool) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    result = invoke("--model", str(tmp_path / "missing.gguf"), "--port", "0", "--admin-token-file", str(file))
    assert (f"(mode {mode:04o}): chmod 600 {file}\n" in result.stderr) is is_open
    assert TOKEN not in result.output


class NobodyReads(io.StringIO):
    """The pipe behind it is closed."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_lines_that_nobody_reads_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", NobodyReads())
        notices.tell_draining(Draining(running=1, grace_s=30.0))
        notices.tell_end(cut_off=0)


def test_the_help_tells_the_sizes_of_the_pools() -> None:
    shown = re.sub(r"[\s\u2502]+", " ", invoke("--help").stdout)
    assert f"Slots of the GPU pool. [default: ({GPU_BLOCKS})]" in shown
    assert f"Slots of the CPU pool. [default: ({CPU_BLOCKS})]" in shown
    configured = json.loads(invoke("--print-config", "--json").stdout)["settings"]
    assert (configured["gpu_blocks"], configured["cpu_blocks"]) == (GPU_BLOCKS, CPU_BLOCKS)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(new_app(), ["serve", *arguments])
