"""The demo with a tiny random model: what it compares, what it refuses, and what it prints."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from aiokv import ConfigError
from aiokv_engine.demo import register
from aiokv_engine.demo_prompt import LongPrompt, Moment, Reference, answer_from_every_tier
from aiokv_engine.demo_report import CPU_HIT, AuditFindings, Concurrent, Report, Run, find_faults, print_report
from aiokv_engine.demo_runs import STEPS, DemoSettings, run_demo
from aiokv_engine.gguf import GgufError
from aiokv_engine.model_file import LoadedModel, load_model
from aiokv_engine.scheduler import GROUP, Request
from aiokv_engine.selfcheck import Comparison
from aiokv_engine.serving import Sizes, open_serving
from tests.engine.cases import prompt_of
from tests.engine.tiny_model import TinyModel

SETTINGS = DemoSettings(sizes=Sizes(gpu_blocks=72, cpu_blocks=320), new_tokens=4, turn_tokens=2)
BLOCK_OF_BOTH_HITS = 35  # loaded for the CPU hit, and not evicted before the interleaved run

one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])  # seconds each; what differs by loop is tested elsewhere


@pytest.fixture(scope="module")
def loaded(tiny: TinyModel) -> LoadedModel:
    return load_model(tiny.path)


def no_step(_: str) -> None:
    pass


def a_run(name: str, *, gpu: int = 0, cpu: int = 0, switches: int = 0) -> Run:
    return Run(
        name=name,
        prompt_tokens=1100,
        gpu_tokens=gpu,
        cpu_tokens=cpu,
        compute_tokens=1100 - gpu - cpu,
        ttft_s=4.0 if name == "cold" else 0.25,
        load_bytes=cpu // 16 * 1000,
        load_s=0.001,
        source_switches=switches,
        tokens_equal=True,
        logits_equal=True,
    )


COLD, GPU, CPU, MIXED = (
    a_run("cold"),
    a_run("gpu_hit", gpu=1088),
    a_run("cpu_hit", cpu=1088),
    a_run("interleaved", gpu=576, cpu=512, switches=8),
)
CONCURRENT = Concurrent(requests=8, turns=3, gpu_tokens=10, cpu_tokens=20, compute_tokens=30, tokens_equal=True)
CLEAN = AuditFindings(leases=(), pins=(), violations=())
REPORT = Report(
    model="tiny",
    dtype="float32",
    block_size=16,
    gpu_blocks=72,
    cpu_blocks=320,
    block_bytes=1000,
    runs=(COLD, GPU, CPU, MIXED),
    comparison="bitwise",
    concurrent=CONCURRENT,
    audit=CLEAN,
    answer="It is [slow] but not lost.",
)


@one_loop
async def test_all_runs_equal_the_uncached_answer_and_nothing_is_left(loaded: LoadedModel) -> None:
    steps: list[str] = []
    report = await run_demo(loaded, settings=SETTINGS, step=steps.append)
    assert find_faults(report, min_speedup=0) == []
    assert len(steps) == STEPS
    sources = {run.name: (run.gpu_tokens, run.cpu_tokens, run.compute_tokens) for run in report.runs}
    assert sources == {
        "cold": (0, 0, 1100),
        "gpu_hit": (1088, 0, 12),
        "cpu_hit": (0, 1088, 12),
        "interleaved": (576, 512, 12),
    }
    assert [run.load_bytes // report.block_bytes for run in report.runs] == [0, 0, 68, 32]
    assert [run.source_switches for run in report.runs] == [0, 0, 0, 8]
    assert report.concurrent.cpu_tokens > 0


@one_loop
async def test_one_corrupt_loaded_block_is_found(loaded: LoadedModel, comparison: Comparison) -> None:
    def corrupt(moment: Moment) -> None:
        if moment.run == CPU_HIT:
            block = moment.ready.lease.block_table(GROUP)[BLOCK_OF_BOTH_HITS]
            for arena in moment.serving.arenas:
                arena[:, block] = 5.0

    request = Request(request_id="long prompt", token_ids=prompt_of(1100), max_new_tokens=8)
    async with open_serving(loaded.llama, sizes=SETTINGS.sizes) as serving:
        answer = await serving.engine.generate(replace(request, salt="never reused"))
        reference = Reference(answer=answer, comparison=comparison)
    async with open_serving(loaded.llama, sizes=SETTINGS.sizes) as serving:
        prompt = LongPrompt(serving, request=request, reference=reference, observe=corrupt)
        runs = await answer_from_every_tier(prompt, step=no_step)
    assert [run.logits_equal for run in runs] == [True, True, False, False]  # it stays in the GPU pool
    assert [run.tokens_equal for run in runs] == [True, True, False, False]
    faults = find_faults(replace(REPORT, runs=runs), min_speedup=0)
    assert "cpu_hit: the answer's tokens differ from those computed without a cache" in faults


def test_the_json_object_has_the_promised_keys() -> None:
    document = json.loads(json.dumps(REPORT.as_json()))
    assert set(document) == set(
        "model dtype block_size gpu_blocks cpu_blocks runs comparison speedup concurrent audit".split()
    )
    assert set(document["runs"][0]) == set(
        "name prompt_tokens gpu_tokens cpu_tokens compute_tokens ttft_s load_bytes load_s source_switches tokens_equal "
        "logits_equal".split()
    )
    assert document["speedup"] == {"gpu_hit": 16, "cpu_hit": 16, "interleaved": 16}
    assert set(document["concurrent"]) == set(
        "requests turns gpu_tokens cpu_tokens compute_tokens tokens_equal".split()
    )
    assert document["audit"] == {"leases": [], "pins": [], "violations": []}


def test_a_report_as_promised_has_no_fault() -> None:
    assert find_faults(REPORT, min_speedup=16) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (replace(REPORT, runs=(replace(COLD, tokens_equal=False), GPU, CPU, MIXED)), "cold: the answer's tokens"),
        (replace(REPORT, runs=(COLD, replace(GPU, logits_equal=False), CPU, MIXED)), "gpu_hit: the answer's logits"),
        (replace(REPORT, runs=(COLD, GPU, replace(CPU, load_bytes=1), MIXED)), "cpu_hit: 1 bytes were loaded"),
        (replace(REPORT, runs=(COLD, GPU, replace(CPU, compute_tokens=0), MIXED)), "cpu_hit: the sources"),
        (replace(REPORT, runs=(COLD, GPU, replace(GPU, name="cpu_hit"), MIXED)), "cpu_hit: (1088, 0) tokens"),
        (replace(REPORT, runs=(replace(GPU, name="cold"), GPU, CPU, MIXED)), "cold: (1088, 0) tokens"),
        (replace(REPORT, runs=(COLD, GPU, CPU, replace(MIXED, source_switches=2))), "interleaved: (576, 512) tokens"),
        (replace(REPORT, concurrent=replace(CONCURRENT, tokens_equal=False)), "a conversation beside others"),
        (replace(REPORT, concurrent=replace(CONCURRENT, cpu_tokens=0)), "the conversations loaded nothing"),
        (replace(REPORT, audit=replace(CLEAN, leases=("a (ready)",))), "still held at the end: a (ready)"),
        (replace(REPORT, audit=replace(CLEAN, pins=("2 gpu blocks",))), "still held at the end: 2 gpu blocks"),
        (replace(REPORT, audit=replace(CLEAN, violations=("b",))), "invariant violated: b"),
    ],
)
def test_every_deviation_is_a_fault(wrong: Report, problem: str) -> None:
    assert any(fault.startswith(problem) for fault in find_faults(wrong, min_speedup=0))


def test_a_cpu_hit_that_is_not_fast_enough_is_a_fault() -> None:
    assert find_faults(REPORT, min_speedup=16.1) == [
        "the CPU hit is 16.0 times faster to the first token than cold, not 16.1"
    ]


def test_people_see_sources_times_and_the_answer() -> None:
    output = io.StringIO()
    print_report(REPORT, console=Console(file=output, width=200))
    text = output.getvalue()
    for expected in ("cpu_hit", "1,088", "yes", "16.0x", "It is [slow] but not lost.", "nothing left behind"):
        assert expected in text
    assert "NO" not in text
    assert "bit for bit" in text


def test_people_see_a_comparison_by_tolerance_and_what_differs() -> None:
    output = io.StringIO()
    runs = (COLD, GPU, CPU, replace(MIXED, logits_equal=False))
    print_report(replace(REPORT, comparison="tolerance", runs=runs), console=Console(file=output, width=200))
    assert "by tokens and a tolerance" in output.getvalue()
    (line,) = (
        line for line in output.getvalue().splitlines() if "interleaved" in line and "x" in line and "MB" in line
    )
    assert line.split()[-1] == "NO"


def test_the_table_fits_eighty_columns() -> None:
    output = io.StringIO()
    slow = replace(MIXED, ttft_s=116.964, load_bytes=123_000_000, load_s=0.112)
    print_report(replace(REPORT, runs=(COLD, GPU, CPU, slow)), console=Console(file=output, width=80))
    assert "…" not in output.getvalue()


@pytest.mark.parametrize("sizes", [Sizes(gpu_blocks=69, cpu_blocks=320), Sizes(gpu_blocks=72, cpu_blocks=60)])
async def test_pools_too_small_for_the_prompt_are_refused(sizes: Sizes, loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="needs at least 70 GPU blocks and 68 CPU blocks"):
        await run_demo(loaded, settings=replace(SETTINGS, sizes=sizes), step=no_step)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    register(app)
    return app


def test_the_command_prints_one_json_object_and_nothing_else_on_stdout(app: typer.Typer, tiny: TinyModel) -> None:
    result = CliRunner().invoke(app, ["demo", "--model", str(tiny.path), "--json", "--min-speedup", "0"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert all(run["tokens_equal"] and run["logits_equal"] for run in document["runs"])


def test_the_command_fails_visibly_if_anything_is_not_as_promised(
    app: typer.Typer, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def already_run(*_: object, **__: object) -> Report:
        return REPORT

    monkeypatch.setattr("aiokv_engine.demo_runs.run_demo", already_run)
    command = ["demo", "--model", str(tiny.path), "--min-speedup"]
    assert CliRunner().invoke(app, [*command, "16"]).exit_code == 0
    result = CliRunner().invoke(app, [*command, "17"])
    assert result.exit_code == 1
    assert "not 17" in result.stderr
    assert "It is [slow] but not lost." in result.stdout


def test_a_foreign_model_file_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_text("this is no model")
    result = CliRunner().invoke(app, ["demo", "--model", str(path)])
    assert isinstance(result.exception, GgufError)


def test_settings_come_from_the_environment_and_the_effective_ones_are_shown(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["demo", "--print-config"], env={"AIOKV_GPU_BLOCKS": "99"})
    assert "gpu_blocks = 99" in result.stdout
    assert "cpu_blocks = 320" in result.stdout


def test_a_pool_size_the_demo_does_not_understand_is_refused(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["demo"], env={"AIOKV_CPU_BYTES": "1GiB"})
    assert isinstance(result.exception, ConfigError)


async def test_a_pool_that_is_too_large_for_the_demo_is_refused_before_anything_runs(loaded: LoadedModel) -> None:
    sizes = Sizes(gpu_blocks=128, cpu_blocks=320)
    with pytest.raises(ConfigError, match="too small for its conversations: 87 GPU blocks at most"):
        await run_demo(loaded, settings=replace(SETTINGS, sizes=sizes), step=no_step)
