"""The races of law 5, with what orders them and without: with it nothing may be corrupt, without it something is.

Without, the copies are early on purpose: kernels that take longer than a submission stand before those that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count, islice
from typing import Final, final

import numpy as np

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_batch import Copier, choose_copier
from aiokv.backends.cuda_copies import Copies
from aiokv.backends.cuda_events import stream_handle
from aiokv.backends.mapping import address_of
from aiokv.model.ids import Direction
from tests.gpu.bench import Bench, Found, batch, opened, slots, spin
from tests.gpu.engine import Rows

_SLOTS: Final = 7
_ROW_BYTES: Final = 64 << 10
_ROOM: Final = 1 + _SLOTS


class Order(Enum):
    """Whether the fence is given."""

    FENCED = "fenced"
    UNFENCED = "unfenced"


@final
class Races:
    """One pool of blocks, two streams of the engine's, and a log of what its kernels read, a row each round."""

    def __init__(self, bench: Bench, backend: CudaBackend, *, rows: Rows) -> None:
        self.engine = bench.engine
        self.bench = bench
        self.backend = backend
        self.rows = rows
        self.log = bench.engine.rows(bench.sizes.races, _ROW_BYTES)
        self.compute, self.late = bench.engine.stream(), bench.engine.stream()
        self.complaints: list[str] = []
        """Of the driver; a real one has none."""

    def store(self, number: int, order: Order) -> bool:
        """A kernel writes a block late; the store must take what it writes."""
        slot, value = _slot(number), _value(number)
        self._work(self.compute)
        self.engine.fill(self.compute, self.rows, row=slot, value=value)
        spin(self.backend.submit(batch(Direction.STORE, gpu=slots(slot), cpu=slots(0), after=self._fence(order))))
        is_right = bool((self.backend.cpu_slot(0) == value).all())
        self._settle()
        return is_right

    def load(self, number: int, order: Order) -> bool:
        """A kernel reads a block late; a load into it must not be seen by that kernel, and must stay."""
        slot, old, new = _slot(number), _value(number), _value(number + 100)
        self.engine.fill(self.compute, self.rows, row=slot, value=old)
        self._settle()
        self.backend.cpu_slot(1)[:] = new
        self._work(self.compute)
        self.engine.copy(self.compute, self.rows, row=slot, target=self.log, target_row=self._row(number))
        spin(self.backend.submit(batch(Direction.LOAD, gpu=slots(slot), cpu=slots(1), after=self._fence(order))))
        self._settle()
        is_loaded = bool((self.rows.read()[slot] == new).all())
        return is_loaded and bool((self.log.read()[self._row(number)] == old).all())

    def wait(self, number: int, order: Order) -> bool:
        """A load is late; a kernel that was made to wait for it must see what it loads."""
        slot, new = _slot(number), _value(number)
        self.backend.cpu_slot(1)[:] = new
        self._work(self.late)
        late = self.backend.fence(self.late)
        event = self.backend.submit(batch(Direction.LOAD, gpu=slots(slot), cpu=slots(1), after=late))
        if order is Order.FENCED:
            self.backend.wait(self.compute, event)
        self.engine.copy(self.compute, self.rows, row=slot, target=self.log, target_row=self._row(number))
        spin(event)
        self._settle()
        return bool((self.log.read()[self._row(number)] == new).all())

    def _row(self, number: int) -> int:
        """Of the log."""
        return number % self.bench.sizes.races

    def _settle(self) -> None:
        self.complaints += self.engine.settle()

    def _work(self, stream: object) -> None:
        self.engine.work(stream, micros=self.bench.sizes.race_micros)

    def _fence(self, order: Order) -> object:
        return self.backend.fence(self.compute) if order is Order.FENCED else None


@final
class EarlySources:
    """Stores behind the fence, but in the order ANY: whether this driver reads sources before their turn."""

    def __init__(self, bench: Bench, races: Races) -> None:
        self._bench = bench
        self._races = races
        self._stream = bench.engine.stream()
        self._copier: Copier = choose_copier(bench.driver, direction=Direction.LOAD)

    def store(self, number: int) -> bool:
        """See `Races.store`."""
        races, slot, value = self._races, _slot(number), _value(number)
        races.engine.work(races.compute, micros=self._bench.sizes.race_micros)
        races.engine.fill(races.compute, races.rows, row=slot, value=value)
        fence = races.backend.fence(races.compute)
        target = races.backend.cpu_slot(0)
        source_address = races.rows.tensor.__cuda_array_interface__["data"][0] + slot * _ROW_BYTES
        columns = (address_of(target), source_address, _ROW_BYTES)
        copies = Copies(*(np.array([column], np.uint64) for column in columns))
        with self._bench.driver.current():
            self._bench.driver.wait_event(stream_handle(self._stream), fence.event)
            self._copier.enqueue(copies, stream=stream_handle(self._stream))
        races.engine.settle()
        return bool((target == value).all())


def check_races(bench: Bench) -> Found:
    """All of them, in both ways."""
    found, rounds, numbers = Found(), bench.sizes.races, count()
    rows = bench.engine.rows(_ROOM, _ROW_BYTES)
    with opened([rows.tensor], gpu_blocks=_ROOM, cpu_blocks=2) as backend:
        races = Races(bench, backend, rows=rows)
        for name, race in (("store", races.store), ("load", races.load), ("wait", races.wait)):
            fenced = _corrupt(race, Order.FENCED, numbers=islice(numbers, rounds))
            complaints, races.complaints = races.complaints, []
            found.require(not fenced, f"{name}: {fenced} of {rounds} are corrupt, though they are fenced")
            found.require(not complaints, f"{name}, fenced: {'; '.join(complaints[:3])}")
            unfenced = _corrupt(race, Order.UNFENCED, numbers=islice(numbers, rounds))
            races.complaints = []
            found.require(unfenced, f"{name}: none of {rounds} is corrupt without fences, so that this shows nothing")
            found.figures[name] = {"rounds": rounds, "corrupt_fenced": fenced, "corrupt_unfenced": unfenced}
        early = EarlySources(bench, races)
        found.figures["store_any_order"] = {
            "rounds": rounds,
            "corrupt_fenced": sum(not early.store(number) for number in islice(numbers, rounds)),
        }
        bench.engine.settle()
    return found


def _corrupt(race: Callable[[int, Order], bool], order: Order, *, numbers: Iterable[int]) -> int:
    return sum(not race(number, order) for number in numbers)


def _slot(number: int) -> int:
    return 1 + number % _SLOTS


def _value(number: int) -> int:
    """Another one than that of the round before on the same slot."""
    return 1 + number % 251
