"""The options of `aiokv bench soak`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.soak.settings import Sabotage, SoakBackend, SoakSettings, parse_groups
from aiokv.cli.output import JsonOption
from aiokv.model.plan import Checksum, StorePolicy

__all__ = ["register"]

_DEFAULTS = SoakSettings()

SecondsOption = Annotated[float, typer.Option(min=0.1, help="How long the load lasts.")]
SeedOption = Annotated[int, typer.Option(help="The same seed takes the same decisions.")]
ClientsOption = Annotated[int, typer.Option(min=1, help="Clients at once.")]
GpuBlocksOption = Annotated[int, typer.Option("--gpu-blocks", min=1, help="Slots of the GPU pool.")]
CpuBlocksOption = Annotated[int, typer.Option("--cpu-blocks", min=1, help="Slots of the CPU pool.")]
BackendOption = Annotated[
    SoakBackend,
    typer.Option("--backend", help="What copies. For cuda a checkout without a driver builds a fake one."),
]
FaultsOption = Annotated[float, typer.Option(min=0.0, max=0.3, help="Fraction of copies that fail; as many are late.")]
StorePolicyOption = Annotated[StorePolicy, typer.Option(help="When blocks are copied to the CPU tier.")]
GroupsOption = Annotated[
    str, typer.Option(help="Kinds of attention: full,window,chunk,state. By default the seed chooses, 0 takes all.")
]
ChecksumOption = Annotated[
    Checksum, typer.Option(help="What is checked of CPU blocks. With sampled or full some are changed, to be found.")
]
RemoteRanksOption = Annotated[
    int, typer.Option("--remote-ranks", min=0, max=64, help="Ranks beside the first, which only report.")
]
GraceOption = Annotated[float, typer.Option(min=0.1, help="Seconds to wait at the end for what must come to rest.")]
SabotageOption = Annotated[
    Sabotage, typer.Option(help="Break something on purpose: the run must find it, and so exit with 1.")
]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("soak")(_soak)


def _soak(  # noqa: PLR0913  # one per option
    *,
    seconds: SecondsOption = _DEFAULTS.seconds,
    seed: SeedOption = _DEFAULTS.seed,
    clients: ClientsOption = _DEFAULTS.clients,
    gpu_blocks: GpuBlocksOption = _DEFAULTS.gpu_blocks,
    cpu_blocks: CpuBlocksOption = _DEFAULTS.cpu_blocks,
    faults: FaultsOption = _DEFAULTS.faults,
    backend: BackendOption = _DEFAULTS.backend,
    store_policy: StorePolicyOption = _DEFAULTS.store_policy,
    groups: GroupsOption = "",
    checksum: ChecksumOption = _DEFAULTS.checksum,
    remote_ranks: RemoteRanksOption = _DEFAULTS.remote_ranks,
    grace: GraceOption = _DEFAULTS.grace_s,
    sabotage: SabotageOption = _DEFAULTS.sabotage,
    as_json: JsonOption = False,
) -> None:
    """Run mixed load over real memory, with cancellations, faults, preemptions and resets, and count what is wrong.

    Many clients of several tenants talk at once over pools that are far too small, and compare every block they are
    given, byte for byte, with what it must hold. Tenants keep beginnings resident, and check that they are. The books
    are audited all the while. At the end nothing may be held, orphaned, violated or corrupt. From 30 seconds on also:
    everything in the mix has happened, and memory after the warm-up third grows by less than 2 %. Garbage collection is
    this command's: it freezes what exists when the load begins, and collects once a second.
    """
    from aiokv.cli.bench.report import answer
    from aiokv.cli.bench.soak.runner import soak

    settings = SoakSettings(
        seconds=seconds,
        seed=seed,
        clients=clients,
        gpu_blocks=gpu_blocks,
        cpu_blocks=cpu_blocks,
        faults=faults,
        store_policy=store_policy,
        groups=parse_groups(groups),
        checksum=checksum,
        remote_ranks=remote_ranks,
        grace_s=grace,
        sabotage=sabotage,
        backend=backend,
    )
    answer(lambda: soak(settings), as_json=as_json)
