"""Checks the CUDA path on a GPU in less than four minutes: `python tests/gpu/check.py`.

It needs a driver, torch with CUDA, numpy and cuda-bindings, nothing else, and no network; sections that need more are
left out where that is missing. A table goes to stderr, one JSON object to stdout. Exits 0 if the bytes are right
everywhere, 1 if not, 2 where it cannot run, in one line that says why.

`--fake-driver` runs it on the fake driver of this checkout, in small sizes: its figures then say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from tests.gpu.engine import Engine

ROOT: Final = Path(__file__).resolve().parents[2]
_TOTAL_S: Final = 220.0
_NEEDED: Final = ("numpy", "cuda.bindings")


class CannotRun(Exception):
    """Why, in one line."""


def main() -> NoReturn:
    """See the module."""
    arguments = _parse()
    sys.path.insert(0, str(ROOT))
    try:
        status = _check(arguments)
    except CannotRun as error:
        print(f"check.py cannot run: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a section that is stuck in the driver would keep the interpreter


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the CUDA path of aiokv on this machine's GPU.")
    parser.add_argument("--fake-driver", action="store_true", help="on the fake driver of this checkout, small sizes")
    parser.add_argument("--only", action="append", metavar="SECTION", help="this section; may be given several times")
    return parser.parse_args()


def _check(arguments: argparse.Namespace) -> int:
    from tests.gpu.modules import FOR_REQUESTS, find_missing, import_aiokv_without_its_runtime

    if missing := find_missing(_NEEDED if arguments.fake_driver else (*_NEEDED, "torch")):
        raise CannotRun(f"not installed: {', '.join(missing)}")
    if find_missing(FOR_REQUESTS):
        import_aiokv_without_its_runtime()
    from tests.gpu.bench import TINY, Bench, Sizes
    from tests.gpu.report import describe_machine, print_report
    from tests.gpu.sections import SECTIONS, run_sections

    chosen = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]
    if not chosen:
        raise CannotRun(f"there are only the sections {', '.join(section.name for section in SECTIONS)}")
    engine = _fake_engine() if arguments.fake_driver else _torch_engine()
    bench = Bench(
        engine=engine,
        driver=import_module("aiokv.backends.cuda_driver").CudaDriver.load(),
        api=import_module("cuda.bindings.driver"),
        sizes=TINY if arguments.fake_driver else Sizes(),
    )
    machine = describe_machine(bench, driver="fake" if arguments.fake_driver else "cuda")
    results = []
    for result in run_sections(bench, sections=chosen, total_s=_TOTAL_S):
        results.append(result)
        print(f"{result.section.name}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return 0 if print_report(machine, results) else 1


def _torch_engine() -> Engine:
    from aiokv.backends.cuda_driver import CudaDriver
    from aiokv.errors import ConfigError
    from tests.gpu.engine import TorchEngine

    try:
        CudaDriver.load()
    except ConfigError as error:
        raise CannotRun(str(error)) from error
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise CannotRun(f"torch {torch.__version__} sees no CUDA device")
    try:
        return TorchEngine()
    except RuntimeError as error:  # its memory is full, say
        raise CannotRun(f"torch cannot compute here: {error}") from error


def _fake_engine() -> Engine:
    from tests.fakecuda import FakeDriver, NoCompiler
    from tests.gpu.engine import FakeEngine

    try:
        return FakeEngine(FakeDriver.load())
    except NoCompiler as error:
        raise CannotRun(str(error)) from error


if __name__ == "__main__":
    main()
