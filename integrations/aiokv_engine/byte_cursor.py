"""A bounds-checked reader over untrusted little-endian bytes.

Nothing is allocated before the bytes it will be filled from are known to be there.
"""

import struct
from mmap import mmap
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["ByteCursor", "MalformedBytes"]


class MalformedBytes(Exception):
    """The bytes do not hold what their own counts promise. Translated by the reader that knows the file's name."""


@final
class ByteCursor:
    """Reads values one after another from `data[position:limit]`; every method raises `MalformedBytes` past the end."""

    __slots__ = ("_data", "limit", "position")

    def __init__(self, data: bytes | mmap, *, limit: int) -> None:
        self._data = data
        self.limit = limit
        self.position = 0

    def u32(self) -> int:
        """Reads an unsigned number of 32 bits."""
        return int(self.number("I"))

    def u64(self) -> int:
        """Reads an unsigned number of 64 bits."""
        return int(self.number("Q"))

    def number(self, code: str) -> int | float:
        """Reads one number; `code` is its letter in the `struct` module."""
        layout = struct.Struct("<" + code)
        at = self._advance(layout.size, what="a number")
        found: int | float = layout.unpack_from(self._data, at)[0]
        return found

    def text(self, what: str, *, longest: int) -> str:
        """Reads a string of at most `longest` bytes: its length as 64 bits, then UTF-8. `what` names it in errors."""
        length = self.u64()
        if length > longest:
            raise MalformedBytes(
                f"the text of {what!r} at byte {self.position} has {length} bytes, at most {longest} fit"
            )
        at = self._advance(length, what=f"the text of {what!r}")
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise MalformedBytes(f"the text of {what!r} at byte {at} is not UTF-8") from error

    def count(self, what: str, *, smallest: int) -> int:
        """Reads how many entries follow, as 64 bits; refuses more than the rest could hold at `smallest` bytes each."""
        count = self.u64()
        if count * smallest > self.limit - self.position:
            raise MalformedBytes(f"it announces {count} entries of {what!r}, more than the file can hold")
        return count

    def array(self, code: str, *, count: int) -> npt.NDArray[Any]:
        """Reads `count` numbers into an array of its own, shape [count]; `code` as in `number`."""
        dtype = np.dtype(code).newbyteorder("<")
        at = self._advance(count * dtype.itemsize, what=f"an array of {count} numbers")
        return np.frombuffer(self._data[at : at + count * dtype.itemsize], dtype=dtype)

    def _advance(self, size: int, *, what: str) -> int:
        """Moves over `size` bytes; returns the position before them."""
        if size > self.limit - self.position:
            raise MalformedBytes(f"{what} at byte {self.position} needs {size} bytes; the file is cut short")
        self.position += size
        return self.position - size
