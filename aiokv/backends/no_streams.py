"""What a backend says of compute streams where there are none: the host's own calls order compute and copies."""

from __future__ import annotations

__all__ = ["NoStreams"]


class NoStreams:
    """The part of `EngineStreams`, for backends whose blocks lie in host memory, or nowhere."""

    __slots__ = ()

    needs_fences = False

    def fence(self, stream: object) -> object | None:
        """None: there is nothing to wait for."""
        return None

    def fence_done(self, fence: object) -> bool:
        """Nobody has a fence that is not."""
        return True

    def wait(self, stream: object, fence_or_event: object) -> None:
        """No stream can wait, and none has to."""
