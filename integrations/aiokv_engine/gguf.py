"""Reads GGUF files that may be truncated, foreign or hostile.

Every count, length, offset and alignment is checked against the file before it is used, so a bad file costs no more
memory or time than its own size and ends in a `GgufError` that names the file and what is wrong with it. The metadata
and the tensor table are read once, in `read_gguf`; tensor data is read when asked for. Dequantisation is the `gguf`
package's. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from aiokv.errors import ConfigError
from aiokv_engine.byte_cursor import ByteCursor, MalformedBytes

__all__ = ["GgufError", "GgufFile", "TensorInfo", "Value", "read_gguf"]

Value: TypeAlias = "int | float | bool | str | tuple[str, ...] | npt.NDArray[Any]"
T = TypeVar("T", int, float, bool, str)

_MAGIC: Final = 0x46554747  # "GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_METADATA_BYTES: Final = 256 * 2**20
_MAX_DIMENSIONS: Final = 4
_MAX_KEY_BYTES: Final = 2**16 - 1
_MAX_NAME_BYTES: Final = 64
_DEQUANTIZE_BLOCKS: Final = 2**15  # quantisation blocks handled at once: bounds the temporary memory

_SCALARS: Final[Mapping[GGUFValueType, str]] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_SMALLEST_ENTRY: Final = 8 + 4 + 1  # bytes of a metadata entry: key length, value type, value
_SMALLEST_TENSOR: Final = 8 + 4 + 8 + 4 + 8  # bytes of a tensor table entry: name length, dimensions, type, offset


class GgufError(ConfigError):
    """A GGUF file that cannot be used. `path` names the file, `problem` says what is wrong with it."""

    def __init__(self, *, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. `shape` is outermost first (torch order), `offset` counts bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@final
class GgufFile:
    """The checked contents of one GGUF file: `metadata` by key, `tensors` by name; data is read by `read_tensor`."""

    __slots__ = ("metadata", "path", "tensors")

    def __init__(self, path: Path, *, metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    def error(self, problem: str) -> GgufError:
        """Builds the error that names this file; the caller raises it."""
        return GgufError(path=self.path, problem=problem)

    def require(self, key: str, kind: type[T]) -> T:
        """Returns the metadata value under `key`; raises `GgufError` if it is missing or not a `kind`."""
        value = self.metadata.get(key)
        if value is None:
            raise self.error(f"the metadata key {key!r} is missing")
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise self.error(f"the metadata key {key!r} must be a {kind.__name__}, not a {type(value).__name__}")
        return value

    def get(self, key: str, *, default: T) -> T:
        """Returns the metadata value under `key`, or `default` if there is none; raises `GgufError` on another type."""
        return self.require(key, type(default)) if key in self.metadata else default

    def strings(self, key: str) -> tuple[str, ...]:
        """Returns the array of strings under `key`; raises `GgufError` if there is none."""
        value = self.metadata.get(key)
        if not isinstance(value, tuple):
            raise self.error(f"the metadata key {key!r} must be an array of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """Returns the array of integers under `key`; raises `GgufError` if there is none."""
        value = self.metadata.get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(f"the metadata key {key!r} must be an array of integers")
        return [int(item) for item in value]

    def read_tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Returns tensor `name` as finite float32 values in its shape; raises `GgufError` if that cannot be done."""
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"the tensor {name!r} is missing")
        raw = np.fromfile(self.path, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        if raw.size != info.num_bytes:
            raise self.error(f"the tensor {name!r} has {info.num_bytes} bytes, but only {raw.size} could be read")
        try:
            values = _dequantize(raw, info=info)
        except NotImplementedError as error:
            raise self.error(f"the tensor {name!r} has the type {info.kind.name}, which cannot be read") from error
        if not np.isfinite(values).all():
            raise self.error(f"the tensor {name!r} holds values that are not finite")
        return values


def read_gguf(path: str | PathLike[str]) -> GgufFile:
    """Reads and checks the metadata and the tensor table of the GGUF file at `path`; raises `GgufError`."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise GgufError(path=path, problem="not a file")
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise MalformedBytes("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, cursor=ByteCursor(data, limit=len(data)))
    except MalformedBytes as error:
        raise GgufError(path=path, problem=f"not a usable GGUF file: {error}") from error
    except OSError as error:
        raise GgufError(path=path, problem=f"cannot be read: {error.strerror}") from error


def _parse(path: Path, *, cursor: ByteCursor) -> GgufFile:
    _check_header(cursor)
    tensor_count = cursor.count("tensor", smallest=_SMALLEST_TENSOR)
    entry_count = cursor.count("metadata entry", smallest=_SMALLEST_ENTRY)
    metadata: dict[str, Value] = {}
    for _ in range(entry_count):
        key = cursor.text("metadata key", longest=_MAX_KEY_BYTES)
        if key in metadata:
            raise MalformedBytes(f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, key=key)
        if cursor.position > _MAX_METADATA_BYTES:
            raise MalformedBytes(f"its metadata is larger than {_MAX_METADATA_BYTES} bytes")
    alignment = _find_alignment(metadata)
    infos = [_read_info(cursor) for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(infos, start=start, alignment=alignment, size=cursor.limit)
    return GgufFile(path, metadata=metadata, tensors=tensors)


def _check_header(cursor: ByteCursor) -> None:
    if cursor.u32() != _MAGIC:
        raise MalformedBytes("it does not start with the letters GGUF")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise MalformedBytes(f"its version is {version}, supported are {_VERSIONS} in little endian")


def _find_alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise MalformedBytes(f"general.alignment must be a power of two, not {alignment!r}")
    return alignment


def _read_value(cursor: ByteCursor, *, key: str) -> Value:
    kind = _find_kind(cursor.u32(), key=key)
    if kind is GGUFValueType.STRING:
        return cursor.text(key, longest=cursor.limit)
    if kind is GGUFValueType.ARRAY:
        return _read_array(cursor, key=key)
    if kind is GGUFValueType.BOOL:
        return bool(_check_bools(cursor.array("B", count=1), key=key)[0])
    return cursor.number(_SCALARS[kind])


def _read_array(cursor: ByteCursor, *, key: str) -> Value:
    kind = _find_kind(cursor.u32(), key=key)
    if kind is GGUFValueType.ARRAY:
        raise MalformedBytes(f"the metadata key {key!r} holds an array of arrays, which is not supported")
    if kind is GGUFValueType.STRING:
        return tuple([cursor.text(key, longest=cursor.limit) for _ in range(cursor.count(key, smallest=8))])
    if kind is GGUFValueType.BOOL:
        return _check_bools(cursor.array("B", count=cursor.count(key, smallest=1)), key=key)
    code = _SCALARS[kind]
    return cursor.array(code, count=cursor.count(key, smallest=np.dtype(code).itemsize))


def _find_kind(number: int, *, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise MalformedBytes(f"the metadata key {key!r} has the unknown value type {number}") from error


def _check_bools(values: npt.NDArray[Any], *, key: str) -> npt.NDArray[np.bool_]:
    if (values > 1).any():
        raise MalformedBytes(f"the metadata key {key!r} holds a boolean that is neither 0 nor 1")
    return values.astype(np.bool_)


def _read_info(cursor: ByteCursor) -> TensorInfo:
    """Reads one entry of the tensor table; its `offset` still counts from the start of the data section."""
    name = cursor.text("tensor name", longest=_MAX_NAME_BYTES)
    dimensions = cursor.u32()
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise MalformedBytes(f"the tensor {name!r} has {dimensions} dimensions, supported are 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    number = cursor.u32()
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise MalformedBytes(f"the tensor {name!r} has the unknown type {number}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise MalformedBytes(f"the tensor {name!r} has the impossible shape {shape} for the type {kind.name}")
    num_bytes = math.prod(shape) // block * block_bytes
    return TensorInfo(name=name, shape=shape, kind=kind, offset=cursor.u64(), num_bytes=num_bytes)


def _place_tensors(infos: list[TensorInfo], *, start: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """Checks that all tensors lie in the file, aligned, apart from each other; returns them with absolute offsets."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset % alignment:
            raise MalformedBytes(f"the tensor {info.name!r} is not aligned to {alignment} bytes")
        if info.offset < end:
            raise MalformedBytes(f"the tensor {info.name!r} overlaps the one before it")
        end = info.offset + info.num_bytes
        if start + end > size:
            raise MalformedBytes(
                f"the tensor {info.name!r} ends at byte {start + end} of {size}; the file is cut short"
            )
        if info.name in tensors:
            raise MalformedBytes(f"the tensor {info.name!r} occurs twice")
        tensors[info.name] = TensorInfo(
            name=info.name, shape=info.shape, kind=info.kind, offset=start + info.offset, num_bytes=info.num_bytes
        )
    return tensors


def _dequantize(raw: npt.NDArray[np.uint8], *, info: TensorInfo) -> npt.NDArray[np.float32]:
    """Dequantises in runs of blocks: blocks are independent, so long rows give the same values in fewer passes."""
    _, block_bytes = GGML_QUANT_SIZES[info.kind]
    step = _DEQUANTIZE_BLOCKS * block_bytes
    with np.errstate(all="ignore"):
        parts = [dequantize(raw[None, at : at + step], info.kind) for at in range(0, raw.size, step)]
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(info.shape)
