"""The options of `aiokv bench replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiokv.cli.bench.replay.settings import ReplaySettings, TokenForm
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = ReplaySettings(trace=Path())

TraceArgument = Annotated[
    Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids (one per 512 tokens).")
]
PeerOption = Annotated[
    Path | None, typer.Option(help="A Python with vLLM 0.32: replay the same through it, in turns on the same core.")
]
RequestsOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests of the trace.")]
GpuBlocksOption = Annotated[int, typer.Option(min=2, help="Blocks of the GPU tier, its null block included.")]
CpuBlocksOption = Annotated[int, typer.Option(min=1, help="Blocks of the CPU tier.")]
BlockSizeOption = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
InFlightOption = Annotated[int, typer.Option(min=1, help="Most requests in flight at once.")]
TokensOption = Annotated[TokenForm, typer.Option(help="Prompts as int32 arrays or as lists; a peer takes lists.")]
SliceOption = Annotated[int, typer.Option("--slice", min=1, help="Requests of one turn.")]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer of the peer.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("replay")(_replay)


def _replay(
    trace: TraceArgument,
    *,
    peer_python: PeerOption = None,
    requests: RequestsOption = None,
    gpu_blocks: GpuBlocksOption = _DEFAULTS.gpu_blocks,
    cpu_blocks: CpuBlocksOption = _DEFAULTS.cpu_blocks,
    block_size: BlockSizeOption = _DEFAULTS.block_size,
    in_flight: InFlightOption = _DEFAULTS.in_flight,
    tokens: TokensOption = _DEFAULTS.tokens,
    slice_requests: SliceOption = _DEFAULTS.slice_requests,
    timeout: TimeoutOption = _DEFAULTS.timeout_s,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace through the asyncio runtime, with copies that end at once and metrics that are scraped.

    Requests come in the order of the trace, without waiting for its timestamps; each is admitted, loaded and confirmed
    before the next one comes, and the oldest ends, with all its output, when the next one would be too many. Exits 0
    only if every prompt token was attributed once, the metrics agree, and, with a peer, at least four times its
    requests per second were served. Other figures are reported, not judged.
    """
    from aiokv.cli.bench.replay.runner import replay
    from aiokv.cli.bench.report import answer

    settings = ReplaySettings(
        trace=trace,
        peer_python=peer_python,
        requests=requests,
        gpu_blocks=gpu_blocks,
        cpu_blocks=cpu_blocks,
        block_size=block_size,
        in_flight=in_flight,
        tokens=tokens,
        slice_requests=slice_requests,
        timeout_s=timeout,
    )
    answer(lambda: replay(settings), as_json=as_json)
