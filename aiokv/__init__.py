"""aiokv keeps LLM KV-cache blocks in two tiers, GPU and CPU memory, and lets an asyncio program await them."""

from aiokv.core.hint_table import HintState
from aiokv.core.lease_table import LeaseState
from aiokv.errors import (
    AcquireTimeout,
    AiokvError,
    BackendLost,
    CapacityError,
    ConfigError,
    CopyFailed,
    ForeignBlock,
    InvalidTransition,
    LeaseReleased,
    StreamCaptured,
    TransferError,
    UsageError,
)
from aiokv.model.events import BlockRemoved, BlockStored, EventsDropped, TierCleared
from aiokv.model.ids import Direction, Tier
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.pinning import PinState, PinStatus
from aiokv.model.plan import (
    Checksum,
    CopyBatch,
    Declined,
    DeclineReason,
    DeferReason,
    Deferred,
    Hit,
    Outcome,
    RankTransfer,
    StorePolicy,
)
from aiokv.model.spec import (
    CacheGeometry,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
)
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.hint import ResidenceHint
from aiokv.runtime.lease import Lease
from aiokv.runtime.preempted import Preempted
from aiokv.runtime.run import run
from aiokv.runtime.runtime import KVRuntime

__all__ = [
    "AcquireTimeout",
    "AiokvError",
    "BackendLost",
    "BlockKeys",
    "BlockRemoved",
    "BlockStored",
    "CacheGeometry",
    "CapacityError",
    "Checksum",
    "ChunkedLocal",
    "ConfigError",
    "CopyBatch",
    "CopyFailed",
    "DeclineReason",
    "Declined",
    "DeferReason",
    "Deferred",
    "Direction",
    "EventsDropped",
    "ForeignBlock",
    "FullAttention",
    "GroupSpec",
    "HintState",
    "Hit",
    "InvalidTransition",
    "KVRuntime",
    "Lease",
    "LeaseReleased",
    "LeaseState",
    "MediaSpan",
    "Outcome",
    "PinState",
    "PinStatus",
    "Preempted",
    "RankTransfer",
    "RecurrentState",
    "ResidenceHint",
    "RuntimeConfig",
    "SlidingWindow",
    "StorePolicy",
    "StreamCaptured",
    "Tier",
    "TierCleared",
    "TransferError",
    "UsageError",
    "run",
]

__version__ = "0.1.0"
