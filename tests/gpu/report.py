"""What is printed: a table on stderr for people, one JSON object on stdout for programs."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from tests.gpu.bench import Bench
from tests.gpu.sections import Result

SCHEMA_VERSION: Final = 1
_PACKAGES: Final = ("numpy", "torch", "cuda-bindings", "cuda-python", "anyio", "uvloop", "prometheus-client")


def describe_machine(bench: Bench, *, driver: str) -> dict[str, Any]:
    """Versions and limits: which machine this was."""
    with bench.driver.current():
        name = bench.call("cuDeviceGetName", 256, 0)
        memory = int(bench.call("cuDeviceTotalMem", 0))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "driver": driver,
        "driver_version": bench.driver.version,
        "device": bytes(name).partition(b"\0")[0].decode(),
        "device_bytes": memory,
        "device_numa_node": bench.driver.device_numa_node(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memlock_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "packages": {name: _version_of(name) for name in _PACKAGES},
    }


def print_report(machine: Mapping[str, Any], results: Sequence[Result]) -> bool:
    """Both; whether all sections that judge are fine."""
    is_ok = all(result.is_ok for result in results if result.section.is_judged)
    for line in _lines(machine, results):
        print(line, file=sys.stderr)
    answer = {"schema_version": SCHEMA_VERSION, "ok": is_ok, "machine": dict(machine)}
    sections = {result.section.name: result.as_json() for result in results}
    print(json.dumps(answer | {"sections": sections}), flush=True)
    return is_ok


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(machine: Mapping[str, Any], results: Sequence[Result]) -> Iterator[str]:
    yield from (f"{name:<18} {value}" for name, value in machine.items())
    for result in results:
        verdict = "skipped: " + result.skipped if result.skipped else "ok" if result.is_ok else "FAILED"
        judged = ", judged" if result.section.is_judged else ""
        yield f"\n{result.section.name} ({result.seconds:.1f} s{judged}): {verdict}"
        for name, value in result.found.figures.items():
            if name == "rows":
                yield from _table(value)
            else:
                yield f"  {name:<22} {_text(value)}"
        yield from (f"  ! {fault}" for fault in result.found.faults)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(rows[0]) if rows else []
    cells = [names, *([_text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)
