"""`aiokv bench submit`: each batch is handed over, timed, and copied."""

from __future__ import annotations

import json

import pytest

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_batch import BatchCopier
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.model.plan import CopyBatch
from tests.cli.test_main import run


def test_each_size_is_told_in_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("bench", "submit", "--copies", "1", "--copies", "300", "--repeats", "3", "--json", "--backend", "host") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["driver"], report["repeats"]) == (2, True, "host", 3)
    assert {(case["direction"], case["slots"], case["copies"]) for case in report["cases"]} == {
        (direction, slots, copies)
        for direction in ("load", "store")
        for slots in ("adjacent", "scattered")
        for copies in (1, 300)
    }
    for case in report["cases"]:
        assert case["us"]["median"] == pytest.approx(case["copies"] * case["us_per_block"], rel=0.01)
        assert case["us"]["median"] > 0.0


@pytest.mark.usefixtures("fake_device")
def test_a_device_is_measured_beside_the_bindings_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "submit", "--copies", "8192", "--copies", "300", "--repeats", "9", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["driver"], report["copies"]) == ("fake", 8192)
    assert [case["copies"] for case in report["cases"]] == [300, 8192]
    assert report["ratio"] == pytest.approx(report["bindings_list_ms"] / report["ours_ms"], rel=0.02)
    assert report["ratio"] >= 8
    for case in report["cases"]:
        assert 0 < case["ours"]["median"] <= case["handed_over"]["median"]


@pytest.mark.usefixtures("fake_device")
def test_a_submission_that_takes_as_long_as_lists_do_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = CudaBackend.submit

    def wrap_addresses_and_submit(backend: CudaBackend, batch: CopyBatch) -> CudaEvent:
        assert [str(number) for number in range(32 * len(batch))]
        return submit(backend, batch)

    monkeypatch.setattr(CudaBackend, "submit", wrap_addresses_and_submit)
    assert run("bench", "submit", "--copies", "8192", "--repeats", "3", "--json", "--backend", "cuda") == 1
    (complaint,) = json.loads(capsys.readouterr().out)["complaints"]
    assert "times the bindings' lists" in complaint


@pytest.mark.usefixtures("fake_device")
def test_bytes_that_have_not_arrived_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchCopier, "enqueue", lambda _copier, _copies, *, stream: None)
    assert run("bench", "submit", "--copies", "64", "--repeats", "3", "--json", "--backend", "cuda") == 1
    (complaint,) = json.loads(capsys.readouterr().out)["complaints"]
    assert "has not arrived" in complaint


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "submit", "--backend", "tape", "--json") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "says"), [(("--copies", str(10**12)), "are available"), (("--repeats", str(10**20)), "--repeats")]
)
def test_what_no_machine_can_hold_is_refused(
    arguments: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "submit", *arguments, "--json", "--backend", "host") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.split())
