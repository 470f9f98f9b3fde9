"""`aiokv serve`: an OpenAI-compatible server on the engine, both tiers in this machine's memory.

The command is registered whenever `aiokv` lists its commands, so torch, FastAPI and the rest are imported when it runs.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from aiokv import run
from aiokv.cli.output import JsonOption, print_error, print_json, stderr, stdout
from aiokv.cli.settings_options import (
    ConfigFileOption,
    CpuBlocksOption,
    CpuBytesOption,
    GpuBlocksOption,
    PrintConfigOption,
    print_config,
)
from aiokv.runtime.config_file import LoadedSettings, Settings, SettingSource, load_settings_with_sources
from aiokv_engine.demo import Dtype, DtypeOption, ModelOption, ThreadsOption

if TYPE_CHECKING:
    from aiokv_engine.server.process import Leaks, Listening, ServeOptions

__all__ = ["register"]

_NAME: Final = "serve"
_HOST: Final = "127.0.0.1"
_PORT: Final = 8000
_CPU_BLOCKS: Final = 8192
_MAX_QUEUE: Final = 256
_GRACE_S: Final = 30.0
_SCHEMA_VERSION: Final = 1

HostOption = Annotated[str, typer.Option(help="Address to listen on; others than loopback ones are open to a network.")]
PortOption = Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")]
NameOption = Annotated[str | None, typer.Option("--served-model-name", help="What clients call the model.")]
QueueOption = Annotated[int, typer.Option(min=1, help="Prompts that may wait; more get 429.")]
GraceOption = Annotated[float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")]
TokenOption = Annotated[
    Path | None,
    typer.Option("--admin-token-file", metavar="FILE", help="Token for /kv/* (else AIOKV_ADMIN_TOKEN; else no /kv/*)."),
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="A host name that requests may be for; by default loopback, or any elsewhere."),
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(_NAME)(_serve)


def _serve(
    *,
    host: HostOption = _HOST,
    port: PortOption = _PORT,
    model: ModelOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    served_model_name: NameOption = None,
    config: ConfigFileOption = None,
    gpu_blocks: GpuBlocksOption = None,
    cpu_blocks: CpuBlocksOption = None,
    cpu_bytes: CpuBytesOption = None,
    max_queue: QueueOption = _MAX_QUEUE,
    grace: GraceOption = _GRACE_S,
    admin_token_file: TokenOption = None,
    allowed_host: AllowedHostOption = None,
    torch_threads: ThreadsOption = 1,
    show_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a language model over OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, beside /metrics,
    /health, /ready and the page /live.

    Runs on the CPU: both pools lie in this machine's memory. SIGTERM ends intake and lets running requests finish; exit
    status 0, or 1 if anything was still held afterwards. The address is printed once requests are answered.
    """
    settings = _load_settings(
        config, arguments={"gpu_blocks": gpu_blocks, "cpu_blocks": cpu_blocks, "cpu_bytes": cpu_bytes}
    )
    if show_config:
        print_config(settings, as_json=as_json)
        return
    from aiokv_asgi import read_token

    from aiokv_engine.server.app import Access
    from aiokv_engine.server.process import ServeOptions, open_socket

    token = read_token(file=admin_token_file, environ=os.environ)
    options = ServeOptions(
        name=served_model_name,
        access=Access(allowed_hosts=_hosts(host, given=allowed_host), admin_token=token),
        max_queue=max_queue,
        grace_s=grace,
    )
    leaks = _run(...)


def _load_settings(file: Path | None, *, arguments: dict[str, object]) -> LoadedSettings:
    """The settings, with a CPU tier where nobody has said how large it is."""
    loaded = load_settings_with_sources(file=file, environ=os.environ, arguments=arguments)
    given = {key for key, source in loaded.sources.items() if source is not SettingSource.DEFAULT}
    if given & {"cpu_blocks", "cpu_bytes"}:
        return loaded
    return LoadedSettings(settings=replace(loaded.settings, cpu_blocks=_CPU_BLOCKS), sources=loaded.sources)
