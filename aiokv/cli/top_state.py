"""What a server says of its cache, as values for `aiokv top`: read from its live state, and how fast it changes.

What does not have the shape of a live state is refused as a whole; members that this version does not know are ignored.
The document is that of `aiokv.observe.live`, version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, TypeVar, final

from aiokv.errors import AiokvError

__all__ = [
    "SCHEMA_VERSION",
    "SLOT_STATES",
    "Flow",
    "NotLiveState",
    "OldLease",
    "Rates",
    "ServerState",
    "TierState",
    "find_rates",
    "parse_state",
]

SCHEMA_VERSION: Final = 1
"""Of the live states that are understood."""
SLOT_STATES: Final = ("free", "reserved", "resident", "quarantined")
_TIERS: Final = ("gpu", "cpu")
_SOURCES: Final = ("gpu", "cpu", "compute")
_DIRECTIONS: Final = ("load", "store")
_ERRORS: Final = ("error", "corrupt", "lost")
_MOST_LEASES: Final = 64
_TOO_MANY: Final = 1 << 63
_SHORTEST_S: Final = 0.0005
"""A server tells its time in milliseconds: what is shorter is no time between two looks."""

T = TypeVar("T")


@final
class NotLiveState(AiokvError):
    """A document is no live state, or one of a version that is not understood."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """One pool: slots by state, `pinned` of the resident ones, and one letter per `cell_slots` adjacent slots."""

    slots: int
    states: Mapping[str, int]
    pinned: int
    cells: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One direction of transfers: blocks that wait and that are copied, and what has ended, since the start."""

    queued_blocks: int
    inflight_blocks: int
    ok_blocks: int
    failed_blocks: int
    num_bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OldLease:
    """One of the leases that are held longest."""

    request_id: str
    age_s: float
    state: str
    blocks: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """All that is shown of one moment. Totals count since the server started, `uptime_s` seconds ago."""

    version: str
    backend: str
    block_tokens: int
    uptime_s: float
    degraded: tuple[str, ...]
    is_accepting: bool
    tiers: Mapping[str, TierState]
    prompt_tokens: Mapping[str, int]
    transfers: Mapping[str, Flow]
    evictions: Mapping[str, int]
    active: int
    overdue: int
    waiting: int
    oldest: tuple[OldLease, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What has happened per second in `interval_s` seconds."""

    interval_s: float
    prompt_tokens: Mapping[str, float]
    transfer_bytes: Mapping[str, float]
    transfer_blocks: Mapping[str, float]
    failed_blocks: Mapping[str, float]
    evictions: Mapping[str, float]


def find_rates(before: ServerState, after: ServerState) -> Rates | None:
    """The rates between two states of one server; None if time stood still or the server has started anew between."""
    interval = after.uptime_s - before.uptime_s
    totals = list(zip(_totals(before), _totals(after), strict=True))
    if interval < _SHORTEST_S or any(
        later.get(name, -1) < count for counts, later in totals for name, count in counts.items()
    ):
        return None
    rates = [{name: (later[name] - count) / interval for name, count in counts.items()} for counts, later in totals]
    tokens, num_bytes, blocks, failed, evictions = rates
    return Rates(
        interval_s=interval,
        prompt_tokens=tokens,
        transfer_bytes=num_bytes,
        transfer_blocks=blocks,
        failed_blocks=failed,
        evictions=evictions,
    )


def _totals(state: ServerState) -> tuple[Mapping[str, int], ...]:
    """The counts that only grow, in the order of the fields of `Rates`."""
    transfers = state.transfers.items()
    return (
        state.prompt_tokens,
        {name: flow.num_bytes for name, flow in transfers},
        {name: flow.ok_blocks for name, flow in transfers},
        {name: flow.failed_blocks for name, flow in transfers},
        state.evictions,
    )


def parse_state(document: object) -> ServerState:
    """Read a live state; `NotLiveState` says in one line why it cannot be."""
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not _is_count(version):
        raise NotLiveState("it answers JSON that is no live state: is it an aiokv server?")
    if version != SCHEMA_VERSION:
        raise NotLiveState(f"it speaks version {version} of the live state, this aiokv {SCHEMA_VERSION}: update one")
    root = _Part(document)
    leases = root.part("leases")
    tiers, transfers = root.part("tiers"), root.part("transfers")
    tiers.part("gpu")  # no runtime is without it
    return ServerState(
        version=root.text("version"),
        backend=root.text("backend"),
        block_tokens=root.count("block_tokens"),
        uptime_s=root.number("uptime_s"),
        degraded=tuple(str(reason) for reason in root.get("degraded", list)),
        is_accepting=root.get("is_accepting", bool),
        tiers={name: _parse_tier(tiers.part(name)) for name in _TIERS if name in tiers},
        prompt_tokens=root.part("prompt_tokens").counts(_SOURCES),
        transfers={name: _parse_flow(transfers.part(name)) for name in _DIRECTIONS if name in transfers},
        evictions=root.part("evictions").counts(_TIERS),
        active=leases.count("active"),
        overdue=leases.count("overdue"),
        waiting=leases.count("waiting"),
        oldest=tuple(_parse_lease(_Part(lease)) for lease in leases.get("oldest", list)[:_MOST_LEASES]),
    )


def _parse_tier(tier: _Part) -> TierState:
    return TierState(
        slots=tier.count("slots"),
        states={state: tier.part("states").count(state) for state in SLOT_STATES},
        pinned=tier.count("pinned"),
        cells=tier.text("cells"),
    )


def _parse_flow(flow: _Part) -> Flow:
    ended = flow.part("ended_blocks")
    return Flow(
        queued_blocks=flow.count("queued_blocks"),
        inflight_blocks=flow.count("inflight_blocks"),
        ok_blocks=ended.count("ok"),
        failed_blocks=sum(ended.counts(_ERRORS).values()),
        num_bytes=flow.count("bytes"),
    )


def _parse_lease(lease: _Part) -> OldLease:
    return OldLease(
        request_id=lease.text("request_id"),
        age_s=lease.number("age_s"),
        state=lease.text("state"),
        blocks=lease.count("blocks"),
    )


@final
class _Part:
    """An object within the document; every member is asked for with its type."""

    __slots__ = ("_members",)

    def __init__(self, members: object) -> None:
        if not isinstance(members, dict):
            raise NotLiveState("it answers a live state with something else than an object in it")
        self._members: dict[str, Any] = members

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str, kind: type[T]) -> T:
        """A member of this type; `NotLiveState` where there is none."""
        value = self._members.get(name)
        if not isinstance(value, kind):
            raise NotLiveState(f"it answers a live state without a {name!r} that can be read")
        return value

    def part(self, name: str) -> _Part:
        return _Part(self.get(name, dict))

    def text(self, name: str) -> str:
        return self.get(name, str)

    def count(self, name: str) -> int:
        """A whole number, zero or more."""
        value = self._members.get(name)
        if not _is_count(value):
            raise NotLiveState(f"it answers a live state whose {name!r} is no count")
        return value

    def counts(self, names: tuple[str, ...]) -> dict[str, int]:
        """Those of these members that there are."""
        return {name: self.count(name) for name in names if name in self}

    def number(self, name: str) -> float:
        """A number, zero or more."""
        value = self._members.get(name)
        return float(self.count(name)) if not isinstance(value, float) or value < 0 else value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _TOO_MANY
