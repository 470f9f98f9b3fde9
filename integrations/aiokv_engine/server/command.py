"""`aiokv serve`: an OpenAI-compatible server on the engine, both tiers in this machine's memory.

The command is registered whenever `aiokv` lists its commands, so torch, FastAPI and the rest are imported when it runs.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from aiokv import run
from aiokv.cli.output import JsonOption, print_error, stderr
from aiokv.cli.settings_options import ConfigFileOption, CpuBytesOption, PrintConfigOption, print_config
from aiokv.runtime.config_file import LoadedSettings, Settings, SettingSource, load_settings_with_sources
from aiokv_engine.demo import Dtype, DtypeOption, ModelOption, ThreadsOption
from aiokv_engine.server import notices
from aiokv_engine.server.defaults import CPU_BLOCKS, GPU_BLOCKS, GRACE_S, HOST, MAX_QUEUE, PORT

if TYPE_CHECKING:
    from aiokv_engine.server.app import Access
    from aiokv_engine.server.process import Draining, Leaks, Listening, ServeOptions

__all__ = ["register"]

_NAME: Final = "serve"

HostOption = Annotated[str, typer.Option(help="Address to listen on; others than loopback ones are open to a network.")]
PortOption = Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")]
NameOption = Annotated[str | None, typer.Option("--served-model-name", help="What clients call the model.")]
GpuBlocksOption = Annotated[
    int | None, typer.Option("--gpu-blocks", help="Slots of the GPU pool.", show_default=str(GPU_BLOCKS))
]
CpuBlocksOption = Annotated[
    int | None, typer.Option("--cpu-blocks", help="Slots of the CPU pool.", show_default=str(CPU_BLOCKS))
]
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


def _serve(  # noqa: PLR0913  # one per option
    *,
    host: HostOption = HOST,
    port: PortOption = PORT,
    model: ModelOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    served_model_name: NameOption = None,
    config: ConfigFileOption = None,
    gpu_blocks: GpuBlocksOption = None,
    cpu_blocks: CpuBlocksOption = None,
    cpu_bytes: CpuBytesOption = None,
    max_queue: QueueOption = MAX_QUEUE,
    grace: GraceOption = GRACE_S,
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
    sizes: dict[str, object] = {"gpu_blocks": gpu_blocks, "cpu_blocks": cpu_blocks, "cpu_bytes": cpu_bytes}
    settings = _load_settings(config, arguments=sizes)
    if show_config:
        print_config(settings, as_json=as_json)
        return
    notices.tell_loading(_model_name(model))
    access = _access(host, allowed=allowed_host, token_file=admin_token_file)
    with _listen(host, port=port) as listener:
        leaks = _run(
            _find_model(model),
            dtype=dtype,
            settings=settings.settings,
            torch_threads=torch_threads,
            listener=listener,
            options=_options(served_model_name, access=access, max_queue=max_queue, grace_s=grace),
            tell=partial(_tell, as_json=as_json),
        )
    notices.tell_end(cut_off=leaks.cut_off)
    for line in leaks.lines:
        print_error(f"still held at the end: {line}")
    raise typer.Exit(1 if leaks.lines else 0)


def _run(
    path: Path,
    *,
    dtype: Dtype,
    settings: Settings,
    torch_threads: int,
    listener: socket.socket,
    options: "ServeOptions",
    tell: "Callable[[Listening | Draining], None]",
) -> "Leaks":
    """Load the model and serve it until a signal comes."""
    import torch

    from aiokv_engine.model_file import load_model
    from aiokv_engine.server.process import serve
    from aiokv_engine.serving import Sizes, open_serving

    loaded = load_model(path, dtype=torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16)
    sizes = Sizes(gpu_blocks=settings.gpu_blocks, cpu_blocks=settings.cpu_blocks, cpu_bytes=settings.cpu_bytes)

    async def main() -> "Leaks":
        async with open_serving(loaded.llama, sizes=sizes, torch_threads=torch_threads, settings=settings) as serving:
            return await serve(serving, loaded=loaded, listener=listener, options=options, tell=tell)

    return run(main)


def _model_name(model: Path | None) -> str:
    from aiokv_engine.weights import SMOLLM2

    return SMOLLM2.file_name if model is None else model.name


def _find_model(model: Path | None) -> Path:
    if model is not None:
        return model
    from aiokv_engine.weights import find_weights

    return find_weights(console=stderr())


def _listen(host: str, *, port: int) -> socket.socket:
    from aiokv_engine.server.process import open_socket

    return open_socket(host, port=port)


def _options(name: str | None, *, access: "Access", max_queue: int, grace_s: float) -> "ServeOptions":
    from aiokv_engine.server.process import ServeOptions

    return ServeOptions(name=name, access=access, max_queue=max_queue, grace_s=grace_s)


def _access(host: str, *, allowed: Sequence[str] | None, token_file: Path | None) -> "Access":
    """Who listens on loopback only is asked for as loopback; elsewhere any name may be ours, unless some are given."""
    from aiokv_asgi import LOOPBACK_HOSTS, read_token
    from aiokv_engine.server.app import Access

    hosts: Sequence[str] = LOOPBACK_HOSTS
    if not _is_loopback(host):
        notices.warn_of_network(host)
        hosts = ("*",)
    if allowed:
        hosts = (*allowed, *LOOPBACK_HOSTS)
    access = Access(allowed_hosts=hosts, admin_token=read_token(file=token_file, environ=os.environ))
    if token_file is not None:
        notices.warn_of_token_file(token_file)
    return access


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _tell(happened: "Listening | Draining", *, as_json: bool) -> None:
    from aiokv_engine.server.process import Listening

    if isinstance(happened, Listening):
        notices.show_address(happened, as_json=as_json)
    else:
        notices.tell_draining(happened)


def _load_settings(file: Path | None, *, arguments: dict[str, object]) -> LoadedSettings:
    """The settings, with sizes that a laptop has where nobody has given others."""
    loaded = load_settings_with_sources(file=file, environ=os.environ, arguments=arguments)
    given = {key for key, source in loaded.sources.items() if source is not SettingSource.DEFAULT}
    settings = loaded.settings
    if "gpu_blocks" not in given:
        settings = replace(settings, gpu_blocks=GPU_BLOCKS)
    if not given & {"cpu_blocks", "cpu_bytes"}:
        settings = replace(settings, cpu_blocks=CPU_BLOCKS)
    return LoadedSettings(settings=settings, sources=loaded.sources)
