"""What the demo found: values, their JSON form, what is wrong with them, and the tables people read."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

__all__ = ["SCHEMA_VERSION", "AuditFindings", "Concurrent", "Report", "Run", "find_faults", "print_report"]

COLD, GPU_HIT, CPU_HIT, INTERLEAVED = "cold", "gpu_hit", "cpu_hit", "interleaved"
_LEAST_SWITCHES: Final = 3
SCHEMA_VERSION: Final = 1

_EXPLANATIONS: Final = {
    COLD: "nothing cached",
    GPU_HIT: "the prefix is in the GPU pool",
    CPU_HIT: "GPU pool evicted and overwritten, the prefix comes from the CPU pool",
    INTERLEAVED: "every other run of blocks evicted by name (LRU alone never leaves such holes)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the long prompt. Times are in seconds, `load_bytes` is what the CPU tier delivered.

    `tokens_equal` and `logits_equal` compare the answer with one computed without any cache.
    """

    name: str
    prompt_tokens: int
    gpu_tokens: int
    cpu_tokens: int
    compute_tokens: int
    ttft_s: float
    load_bytes: int
    load_s: float
    source_switches: int
    tokens_equal: bool
    logits_equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrent:
    """All conversations at once. Tokens are summed over all turns; `tokens_equal` compares with each one alone."""

    requests: int
    turns: int
    gpu_tokens: int
    cpu_tokens: int
    compute_tokens: int
    tokens_equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFindings:
    """Who still held blocks at the end, and which invariants were violated: nobody and none, if all is well."""

    leases: tuple[str, ...]
    pins: tuple[str, ...]
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole demo. `answer` is what the model wrote, `block_bytes` the size of one block in all layers."""

    model: str
    dtype: str
    block_size: int
    gpu_blocks: int
    cpu_blocks: int
    block_bytes: int
    runs: tuple[Run, ...]
    comparison: str
    concurrent: Concurrent
    audit: AuditFindings
    answer: str

    def run(self, name: str) -> Run:
        """Returns the run of that name."""
        return next(run for run in self.runs if run.name == name)

    @property
    def speedup(self) -> dict[str, float]:
        """How many times faster each warm run had its first token than the cold one."""
        cold = self.run(COLD).ttft_s
        return {run.name: cold / run.ttft_s for run in self.runs if run.name != COLD}

    def as_json(self) -> dict[str, object]:
        """Returns the report as `aiokv demo --json` prints it."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "gpu_blocks": self.gpu_blocks,
            "cpu_blocks": self.cpu_blocks,
            "runs": [asdict(run) for run in self.runs],
            "comparison": self.comparison,
            "speedup": self.speedup,
            "concurrent": asdict(self.concurrent),
            "audit": asdict(self.audit),
        }


def find_faults(report: Report, *, min_speedup: float) -> list[str]:
    """Returns everything that is not as it must be, in words; pure."""
    faults = [fault for run in report.runs for fault in _run_faults(run, report=report)]
    faults += _source_faults(report)
    speedup = report.speedup[CPU_HIT]
    if speedup < min_speedup:
        faults.append(f"the CPU hit is {speedup:.1f} times faster to the first token than cold, not {min_speedup:g}")
    if not report.concurrent.tokens_equal:
        faults.append("a conversation beside others had another answer than alone")
    if not report.concurrent.cpu_tokens:
        faults.append("the conversations loaded nothing from the CPU pool: the GPU pool is large enough for them")
    held = (*report.audit.leases, *report.audit.pins)
    faults += [f"still held at the end: {holder}" for holder in held]
    return faults + [f"invariant violated: {violation}" for violation in report.audit.violations]


def _run_faults(run: Run, *, report: Report) -> Iterable[str]:
    if not run.tokens_equal:
        yield f"{run.name}: the answer's tokens differ from those computed without a cache"
    if not run.logits_equal:
        yield f"{run.name}: the answer's logits differ from those computed without a cache ({report.comparison})"
    if run.gpu_tokens + run.cpu_tokens + run.compute_tokens != run.prompt_tokens:
        yield f"{run.name}: the sources do not sum to the prompt"
    expected = run.cpu_tokens // report.block_size * report.block_bytes
    if run.load_bytes != expected:
        yield f"{run.name}: {run.load_bytes} bytes were loaded, {expected} expected"


def _source_faults(report: Report) -> Iterable[str]:
    """Checks that every run had its tokens from where its name says."""
    reusable = report.run(GPU_HIT).gpu_tokens
    found = {run.name: (run.gpu_tokens, run.cpu_tokens) for run in report.runs}
    for name, expected in {COLD: (0, 0), GPU_HIT: (reusable, 0), CPU_HIT: (0, reusable)}.items():
        if found[name] != expected:
            yield f"{name}: {found[name]} tokens came from GPU and CPU, {expected} expected"
    mixed = report.run(INTERLEAVED)
    if mixed.gpu_tokens + mixed.cpu_tokens != reusable or mixed.source_switches < _LEAST_SWITCHES:
        yield f"{INTERLEAVED}: {found[INTERLEAVED]} tokens with {mixed.source_switches} switches"
    if not reusable:
        yield "nothing was reused"


def print_report(report: Report, *, console: Console) -> None:
    """Prints the report for people."""
    console.print(
        f"\n[bold]{escape(report.model)}[/] in {report.dtype}, blocks of {report.block_size} tokens "
        f"({report.block_bytes / 1e6:.2f} MB), {report.gpu_blocks} in the GPU pool, {report.cpu_blocks} in the CPU "
        "pool. Both pools lie in this machine's memory: no GPU is used.\n"
    )
    console.print(_runs_table(report))
    console.print(
        Panel(escape(report.answer.strip()), title="what the model wrote, computed without a cache", expand=False)
    )
    talk = report.concurrent
    console.print(
        f"\n[bold]{talk.requests} conversations at once[/], {talk.turns} turns each, too many for the GPU pool: "
        f"{talk.gpu_tokens:,} prompt tokens from GPU, {talk.cpu_tokens:,} from CPU, {talk.compute_tokens:,} computed; "
        f"answers {_verdict(talk.tokens_equal)} each conversation alone without a cache."
    )
    console.print(f"Compared {_how(report)}. Audit: {_audit_words(report.audit)}.")


def _runs_table(report: Report) -> Table:
    """The runs of the long prompt, at most 80 columns wide; what each run is stands below the table."""
    title = f"a prompt of {report.run(COLD).prompt_tokens:,} tokens, by where its KV blocks come from"
    notes = "\n".join(f"{run.name}: {_explanation(run)}" for run in report.runs)
    table = Table(title=title, caption=notes, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.add_column("run", no_wrap=True)
    for column in ("GPU", "CPU", "compute", "first token", "faster", "loaded"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    for run in report.runs:
        speedup = "" if run.name == COLD else f"{report.speedup[run.name]:.1f}x"
        loaded = f"{run.load_bytes / 1e6:.0f} MB, {run.load_s * 1e3:.0f} ms" if run.load_bytes else "–"
        table.add_row(
            run.name, f"{run.gpu_tokens:,}", f"{run.cpu_tokens:,}", f"{run.compute_tokens:,}", f"{run.ttft_s:.3f} s",
            speedup, loaded, _mark(run.tokens_equal and run.logits_equal),
        )  # fmt: skip
    return table


def _explanation(run: Run) -> str:
    switches = f"; {run.source_switches} switches between the tiers" if run.source_switches else ""
    return _EXPLANATIONS[run.name] + switches


def _mark(equal: bool) -> str:  # noqa: FBT001  # formats one boolean
    return "[green]yes[/]" if equal else "[bold red]NO[/]"


def _verdict(equal: bool) -> str:  # noqa: FBT001  # formats one boolean
    return "[green]the same as[/]" if equal else "[bold red]DIFFERENT from[/]"


def _how(report: Report) -> str:
    if report.comparison == "bitwise":
        return "bit for bit with answers computed without any cache"
    return "[yellow]by tokens and a tolerance on logits: this CPU does not repeat its results bit for bit[/]"


def _audit_words(audit: AuditFindings) -> str:
    if audit.leases or audit.pins or audit.violations:
        return f"[bold red]{len(audit.leases)} leases, {len(audit.pins)} pins, {len(audit.violations)} violations[/]"
    return "[green]nothing left behind[/]"
