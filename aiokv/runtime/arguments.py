"""What callers hand over, checked before anything happens: counts, names, tokens and what else is in their hashes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiokv.errors import UsageError
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.numbers import is_whole
from aiokv.model.tokens import TokenIds
from aiokv.runtime.hashing import KeyOptions

__all__ = ["Prompt", "check_name", "check_whole"]


def check_whole(name: str, value: object, *, at_least: int = 0) -> None:
    """`UsageError` unless the argument called `name` is an integer and large enough."""
    if not is_whole(value) or value < at_least:
        raise UsageError(f"{name} must be a whole number of at least {at_least}, not {value!r}")


def check_name(name: str, value: object) -> None:
    """`UsageError` unless the argument called `name` names something."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a non-empty string, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Tokens and their identity, or keys, which have theirs already; `UsageError` names what is wrong."""

    token_ids: TokenIds | BlockKeys
    salt: str | None = None
    adapter: str | None = None
    media: Iterable[MediaSpan] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.media, Iterable):
            raise UsageError(f"media must be MediaSpan values, not {self.media!r}")
        object.__setattr__(self, "media", tuple(self.media))
        has_identity = self.salt is not None or self.adapter is not None or bool(self.media)
        if isinstance(self.token_ids, BlockKeys) and has_identity:
            raise UsageError("salt, adapter and media belong to the BlockKeys: give them to kv.keys()")

    @property
    def identity(self) -> KeyOptions:
        """What the hashes depend on beside the tokens."""
        return {"salt": self.salt, "adapter": self.adapter, "media": self.media}
