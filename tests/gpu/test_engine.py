"""What torch is asked to do in the check, on the CPU: its streams are stood in for, its kernels are its own."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import numpy as np
import pytest

from tests.gpu.engine import TorchEngine

torch = pytest.importorskip("torch")


class Stream:
    """A stream of a device that does everything at once."""

    handles = count(1)

    def __init__(self) -> None:
        self.cuda_stream = next(self.handles)


class Event:
    """Ten milliseconds after the one before."""

    milliseconds = count(0, 10)

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _: Stream) -> None:
        self.at = next(self.milliseconds)

    def elapsed_time(self, later: Event) -> float:
        return float(later.at - self.at)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return TorchEngine(device="cpu", matrix=8)


def test_rows_are_what_was_written(engine: TorchEngine) -> None:
    rows = engine.rows(2, 3, 5)
    assert not rows.read().any()
    content = np.arange(30, dtype=np.uint8).reshape(2, 3, 5)
    rows.write(content)
    assert np.array_equal(rows.read(), content)
    assert tuple(rows.tensor.shape) == (2, 3, 5)


def test_kernels_write_and_read_whole_rows(engine: TorchEngine) -> None:
    stream, rows, log = engine.stream(), engine.rows(3, 4), engine.rows(2, 4)
    engine.fill(stream, rows, row=1, value=250)
    engine.copy(stream, rows, row=1, target=log, target_row=0)
    assert rows.read().tolist() == [[0] * 4, [250] * 4, [0] * 4]
    assert log.read().tolist() == [[250] * 4, [0] * 4]
    assert engine.settle() == []


def test_work_is_as_many_products_as_take_so_long(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty of them took ten milliseconds when it was measured: half a millisecond each."""
    stream, asked = engine.stream(), []
    monkeypatch.setattr(torch, "matmul", lambda *factors, out: asked.append((factors, out)))
    engine.work(stream, micros=2250)
    assert len(asked) == 5
    assert len({id(out) for _, out in asked}) == 1
