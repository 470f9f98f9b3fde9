"""`aiokv bench soak`: it tries everything, finds nothing, and would find what is broken on purpose.

The runs are short, so that what is judged are counts: the command itself judges the mix and memory from 30 s on.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiokv import Checksum, ConfigError
from aiokv.cli.bench.soak.findings import complaints_about
from aiokv.cli.bench.soak.settings import Sabotage, SoakBackend, SoakSettings
from tests.cli.test_main import run

ZEROS = ("leases", "pins", "reservations", "orphans", "hints", "violations", "corrupt", "errors", "hung", "leaked")
ENOUGH = {
    "requests": 40, "granted": 20, "cancelled": 3, "compared_blocks": 500, "computed_tokens": 2000, "stores": 100,
    "gpu_tokens": 500, "extended": 10, "copies_failed": 1, "audits": 1, "audits_sliced": 2, "steps": 1000,
    "harvested_gpu_tokens": 100, "harvested_cpu_tokens": 100, "hints_kept": 3, "hints_checked": 1,
}  # fmt: skip


def soaked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run("bench", "soak", "--json", *arguments)
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return status, report


def test_a_short_soak_finds_nothing_and_tries_much(capsys: pytest.CaptureFixture[str]) -> None:
    """Laws 2 to 4, invariants 2, 9, 12 and 13, on real bytes, in groups that keep KV by position."""
    status, report = soaked(capsys, "--seconds", "2", "--seed", "1")
    assert (status, report["complaints"], report["ok"]) == (0, [], True)
    assert report["schema_version"] == 1
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert report["pools_conserved"]
    assert report["whole_pool"]
    assert report["hold_ms_max"] >= report["hold_ms_p99"] > 0.0
    assert not {name: report[name] for name, least in ENOUGH.items() if report[name] < least}


@pytest.mark.parametrize(
    ("sabotage", "found"),
    [("byte", {"corrupt"}), ("lease", {"leases", "pins"}), ("copy", {"orphans", "pins"})],
)
def test_a_soak_finds_what_was_broken_on_purpose(
    sabotage: str, found: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = soaked(capsys, "--seconds", "1", "--grace", "0.5", "--seed", "1", "--sabotage", sabotage)
    assert status == 1
    assert not report["ok"]
    assert {name for name in ZEROS if report[name]} == found


def test_people_get_a_table_and_the_complaints_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    status = run("bench", "soak", "--seconds", "0.3", "--clients", "2", "--sabotage", "lease")
    captured = capsys.readouterr()
    assert status == 1
    assert "compared_blocks" in captured.out
    assert "not as promised" in captured.out
    assert "leases must be 0 at the end, it is 1" in captured.err


def figures(**changed: object) -> dict[str, object]:
    from aiokv.cli.bench.soak.findings import MIX

    well = dict.fromkeys(MIX, 1) | dict.fromkeys(ZEROS, 0) | {"found": 2, "flipped_loaded": 2}
    return well | {"pools_conserved": True, "whole_pool": True, "rss_slope_percent": 0.5} | changed


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"resumed": 0, "forked": 0}, "too little was tried: no forked, no resumed"),
        ({"rss_slope_percent": 2.5}, "memory grew by 2.5 % after the warm-up, the limit is 2.0 %"),
        ({"pools_conserved": False}, "pools_conserved is not so"),
        ({"found": 1}, "2 changed blocks were loaded, 1 were found"),
        ({"pins": None}, "pins cannot be told"),
    ],
)
def test_a_long_run_is_judged_by_its_mix_and_its_memory_too(changed: dict[str, object], complaint: str) -> None:
    settings = SoakSettings(seconds=60, groups=("full", "window"))
    assert complaints_about(figures(), settings=settings) == ()
    assert complaints_about(figures(**changed), settings=settings) == (complaint,)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (SoakSettings(seconds=60, groups=("full", "state")), "no captured, no compared_states"),
        (SoakSettings(seconds=60, groups=("full",), checksum=Checksum.FULL), "no flipped"),
        (SoakSettings(seconds=60, groups=("full",), remote_ranks=1), "no rank_reports, no rank_failures"),
    ],
)
def test_what_must_have_happened_depends_on_what_was_asked_for(settings: SoakSettings, missing: str) -> None:
    nothing = {"captured": 0, "compared_states": 0, "flipped": 0, "rank_reports": 0, "rank_failures": 0}
    complaints = complaints_about(figures(**nothing), settings=settings)
    assert complaints == (f"too little was tried: {missing}",)


def test_pools_that_are_too_small_for_one_request_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "soak", "--gpu-blocks", "50", "--json") == 2
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="at least 121 GPU blocks"):
        SoakSettings(gpu_blocks=50, groups=("full", "window", "chunk"))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ("full,fool", "there is no 'fool'"),
        ("full,full", "names a group twice"),
        ("state", "besides state there must be"),
    ],
)
def test_groups_that_make_no_model_are_refused(groups: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "soak", "--groups", groups, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert why in captured.err


def test_the_seed_chooses_the_groups_and_the_first_takes_all() -> None:
    assert SoakSettings().groups == ("full", "window", "chunk", "state")
    assert len({SoakSettings(seed=seed).groups for seed in range(4)}) == 4
    assert SoakSettings(seed=5).groups == SoakSettings(seed=1).groups
    assert SoakSettings(seed=5, groups=("full",)).groups == ("full",)


def test_a_backend_that_cannot_be_soaked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "soak", "--backend", "tape", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tape" in captured.err


@pytest.mark.parametrize("sabotage", [Sabotage.BYTE, Sabotage.COPY])
def test_what_only_the_host_backend_can_break_is_refused_on_a_device(sabotage: Sabotage) -> None:
    with pytest.raises(ConfigError, match="--backend host"):
        SoakSettings(backend=SoakBackend.CUDA, sabotage=sabotage)
