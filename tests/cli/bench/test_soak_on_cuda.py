"""`aiokv bench soak --backend cuda`: in a checkout the fake driver judges what loads, stores and compute do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from aiokv import CopyBatch
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.backends.cuda_events import CudaFence
from aiokv.backends.cuda_session import CudaSession
from tests.cli.test_main import run
from tests.fakecuda import FakeDriver

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'aiokv[test]'")
ZEROS = ("leases", "pins", "reservations", "orphans", "hints", "violations", "corrupt", "errors", "hung", "leaked")
ENOUGH = {
    "requests": 15, "granted": 8, "compared_blocks": 200, "computed_tokens": 1000, "stores": 50, "gpu_tokens": 200,
    "loaded_blocks": 20, "copies_failed": 1, "compared_states": 20,
}  # fmt: skip


def soaked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run("bench", "soak", "--backend", "cuda", "--json", *arguments)
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return status, report


@pytest.mark.usefixtures("fake_driver")
def test_a_short_soak_on_a_device_finds_nothing_and_tries_much(capsys: pytest.CaptureFixture[str]) -> None:
    """Laws 2 to 5, on the bytes of the device, with every adversary of the fake driver."""
    status, report = soaked(capsys, "--seconds", "3", "--seed", "0")
    assert (status, report["complaints"], report["notes"]) == (0, [], [])
    assert (report["backend"], report["driver"]) == ("cuda", "fake")
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert not {name: report[name] for name, least in ENOUGH.items() if report[name] < least}


def test_a_soak_finds_copies_that_wait_for_no_fence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fake_driver: FakeDriver
) -> None:
    submit = CudaSession.submit

    def submit_at_once(session: CudaSession, batch: CopyBatch, *, fences: Sequence[CudaFence]) -> CudaEvent:
        return submit(session, batch, fences=())

    monkeypatch.setattr(CudaSession, "submit", submit_at_once)
    status, report = soaked(capsys, "--seconds", "2", "--seed", "1")
    assert status == 1
    assert report["violations"] > 0
    assert any("hazard" in text for text in fake_driver.violations())
