"""What the pools look like in memory: `Layout`, and `CpuArena`, the memory of the CPU tier.

A slot id is valid in every group's tensors. On the GPU side the engine owns the memory; a group's block is the
fragments of all its tensors at that index. On the CPU side a slot is `cpu_block_bytes` long, as large as the largest
group's block, and a group's fragments lie in it one behind the other, in the order of `Layout.fragments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.base import BackendLayout
from aiokv.backends.mapping import map_bytes, touch
from aiokv.backends.strides import Fragment, TensorView, find_fragments, require_shared_blocks_agree, view_tensor
from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.numbers import is_whole
from aiokv.model.plan import Checksum, CopyBatch
from aiokv.model.spec import CacheGeometry, GroupSpec, RecurrentState

__all__ = ["ByteRows", "CpuArena", "Fragment", "Layout"]

ByteRows = NDArray[np.uint8]
"""Bytes, one block a row, shape `[blocks, bytes]`; rows need not be adjacent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The pools and the tensors behind them, checked.

    `arenas` names each group's tensors: `[gpu_blocks, ...]` or `[2, gpu_blocks, ...]`; a recurrent layer may be a list
    of tensors. It is empty for a backend without memory, otherwise it names every group. Raises `ConfigError`, naming
    the tensor. Only shapes, strides and addresses are read, so it may be built on the loop.
    """

    geometry: CacheGeometry
    gpu_blocks: int
    cpu_blocks: int
    arenas: Mapping[str, Sequence[object]] = field(default_factory=dict)
    checksum: Checksum = Checksum.OFF
    device: str = field(init=False)
    """Where all tensors live, as torch spells it ("cpu", "cuda:0"); empty without arenas."""
    fragments: Mapping[str, tuple[Fragment, ...]] = field(init=False)
    """Per group, in the order in which they fill a CPU slot; none without arenas."""

    def __post_init__(self) -> None:
        _require_count("gpu_blocks", self.gpu_blocks, at_least=1)
        _require_count("cpu_blocks", self.cpu_blocks, at_least=0)
        _require_groups(self.geometry, self.arenas)
        tensors = {g.name: tuple(_view_group(g, self.arenas[g.name])) for g in self.geometry.groups if self.arenas}
        fragments = {name: self._cut(views) for name, views in tensors.items()}
        require_shared_blocks_agree((f for own in fragments.values() for f in own), gpu_blocks=self.gpu_blocks)
        object.__setattr__(self, "device", _find_device([view for views in tensors.values() for view in views]))
        object.__setattr__(self, "fragments", MappingProxyType(fragments))

    @classmethod
    def of(cls, layout: BackendLayout) -> Layout:
        """`layout` itself if it is one, otherwise a checked one with its values."""
        if isinstance(layout, cls):
            return layout
        return cls(
            geometry=layout.geometry,
            gpu_blocks=layout.gpu_blocks,
            cpu_blocks=layout.cpu_blocks,
            arenas=layout.arenas,
            checksum=layout.checksum,
        )

    def block_bytes(self, group: str) -> int:
        """Bytes of one block of `group` over all its tensors; 0 without arenas."""
        self.geometry.group_index(group)
        return sum(fragment.num_bytes for fragment in self.fragments.get(group, ()))

    @property
    def cpu_block_bytes(self) -> int:
        """Bytes of one CPU slot: the largest group's block. To size the pool by bytes, ask a layout of 0 CPU blocks."""
        return max(self.block_bytes(group.name) for group in self.geometry.groups)

    @property
    def gpu_block_bytes(self) -> int:
        """Bytes behind one GPU slot over all groups, memory that groups share counted once; 0 without arenas."""
        return sum(fragment.num_bytes for fragment in {f for own in self.fragments.values() for f in own})

    def require_places(self, batch: CopyBatch) -> None:
        """`ConfigError` for an unknown group, `UsageError` for slots that a pool does not have."""
        self.geometry.group_index(batch.group)
        for tier, blocks in ((Tier.GPU, self.gpu_blocks), (Tier.CPU, self.cpu_blocks)):
            slots = batch.slots(tier)
            if len(slots) and not (0 <= slots.min() and slots.max() < blocks):
                named = f"{tier.value.upper()} slots {slots.min()} to {slots.max()}"
                raise UsageError(f"{named} were named, the pool has {blocks}")

    def _cut(self, tensors: Sequence[TensorView]) -> tuple[Fragment, ...]:
        """The fragments of one group; memory named twice in it (layers that share their KV) is copied once."""
        return tuple(dict.fromkeys(f for view in tensors for f in find_fragments(view, gpu_blocks=self.gpu_blocks)))


@final
class CpuArena:
    """The CPU tier's memory: one anonymous mapping of exactly `blocks * block_bytes` bytes, not inherited by forks.

    Pages are touched at construction, so build it in a worker thread. The mapping is freed with the last reference to
    it or to a row.
    """

    __slots__ = ("rows",)

    def __init__(self, *, blocks: int, block_bytes: int) -> None:
        flat = map_bytes(blocks * block_bytes)
        for _ in touch(flat):
            continue
        self.rows: ByteRows = flat.reshape(blocks, block_bytes)
        """All slots, shape `[blocks, block_bytes]`."""

    @property
    def num_bytes(self) -> int:
        """Length of the mapping."""
        return self.rows.nbytes


# Helpers, in reading order.


def _require_count(name: str, value: object, *, at_least: int) -> None:
    if not is_whole(value) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, not {value!r}")


def _require_groups(geometry: CacheGeometry, arenas: Mapping[str, Sequence[object]]) -> None:
    if not isinstance(arenas, Mapping):
        raise ConfigError(f"arenas must map each group's name to its tensors, not be a {type(arenas).__name__}")
    names = [group.name for group in geometry.groups]
    if arenas and (missing := [name for name in names if name not in arenas]):
        raise ConfigError(f"arenas has no tensors for {_quoted(missing)}")
    if unknown := [name for name in arenas if name not in names]:
        raise ConfigError(f"arenas names {_quoted(unknown)}, but the geometry has {_quoted(names)}")


def _view_group(group: GroupSpec, tensors: object) -> Iterator[TensorView]:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ConfigError(f"group {group.name!r}: its arena must be a list of at least one tensor")
    for position, tensor in enumerate(tensors):
        label = f"group {group.name!r}, tensor {position}"
        if not isinstance(tensor, (list, tuple)):
            yield view_tensor(tensor, label=label)
        elif not isinstance(group, RecurrentState) or not tensor:
            raise ConfigError(f"{label} is a {type(tensor).__name__}; only a recurrent layer may be several tensors")
        else:
            for part, inner in enumerate(tensor):
                yield view_tensor(inner, label=f"{label}.{part}")


def _find_device(tensors: Sequence[TensorView]) -> str:
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            tensor.reject(f"it is on {tensor.device}, but {tensors[0].label} is on {tensors[0].device}")
    return tensors[0].device if tensors else ""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
