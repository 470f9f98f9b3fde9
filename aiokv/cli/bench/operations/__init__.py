"""The operations of the synchronous core, one by one, on a cache with full pools: what each takes, and of what.

`timing.py` a round and its clock · `prompts.py` tokens and keys · `world.py` the cache · `measured.py` the prompts of a
case, and the requests of a round · `hashing.py` `lookup.py` `release.py` `copies.py` `lifecycle.py` the operations ·
`runner.py` all cases of one command.
"""

from __future__ import annotations

from typing import assert_never

from aiokv.cli.bench.cases import Case, Collector, Operation
from aiokv.cli.bench.operations.copies import Load, Store
from aiokv.cli.bench.operations.hashing import Hashing
from aiokv.cli.bench.operations.lifecycle import Lifecycle
from aiokv.cli.bench.operations.lookup import Lookup
from aiokv.cli.bench.operations.measured import Batch
from aiokv.cli.bench.operations.release import Release
from aiokv.cli.bench.operations.timing import Bench, Rounds, TimedOperation, Times
from aiokv.cli.bench.operations.world import BenchWorld
from aiokv.errors import ConfigError

__all__ = ["Bench", "BenchWorld", "Times", "open_case"]


def open_case(case: Case, *, world: BenchWorld | None = None, collector: Collector = Collector.OFF) -> Bench:
    """Have everything ready to time `case`: in `world`, which cases may share, or in a new one with full pools.

    Python's garbage collector is as `collector` says while an operation is timed.
    """
    if case.operation is Operation.HASH:
        return Rounds(Hashing(case), requests=case.requests, collector=collector)
    return Rounds(_operation_of(case, world=world), requests=case.requests, collector=collector)


def _operation_of(case: Case, *, world: BenchWorld | None) -> TimedOperation[Batch]:
    if world is None:
        world = BenchWorld(case.model, pool_slots=case.pool_slots)
        world.fill(lambda _done: None)
    if (world.model, world.pool_slots) != (case.model, case.pool_slots):
        raise ConfigError(f"{case} is of another model or another size than the cache")
    match case.operation:
        case Operation.LOOKUP | Operation.RESERVE:
            return Lookup(case, world=world)
        case Operation.RELEASE:
            return Release(case, world=world)
        case Operation.STORE:
            return Store(case, world=world)
        case Operation.LOAD:
            return Load(case, world=world)
        case Operation.LIFECYCLE:
            return Lifecycle(case, world=world)
        case Operation.HASH:
            raise ConfigError("hashing needs no cache")
        case _:
            assert_never(case.operation)
