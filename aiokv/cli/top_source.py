"""Asks a server for its live state over HTTP, for `aiokv top`: the JSON document behind `URL/live.json`.

Rules
- A question is answered within its patience or not at all: the answer is read in a thread of its own, since a name that
  is not resolved, or headers that come a byte at a time, are bounded by no timeout of a socket.
- At most one such thread is left behind: while it waits nothing else is asked.
- An answer is bounded in bytes, and redirects stay with HTTP. A loopback address is never asked through a proxy.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import IO, Any, Final, final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from aiokv.cli.top_text import make_inert
from aiokv.errors import AiokvError, UsageError

__all__ = ["LiveSource", "NoLiveState", "find_live_url"]

_SCHEMES: Final = ("http", "https")
_PATH: Final = "/live.json"
_MOST_BYTES: Final = 1 << 20
"""Of one answer; that of a server with all its tiers takes a few thousand."""
_CHUNK_BYTES: Final = 1 << 16
_HINTS: Final = {400: "does it allow this host name?", 503: "its runtime is not open"}


@final
class NoLiveState(AiokvError):
    """A server has not answered, or what it has answered is no live state that can be read."""

    def __init__(self, url: str, *, detail: str) -> None:
        self.url = url
        self.detail = make_inert(detail)
        super().__init__(f"{url}: {self.detail}")


def find_live_url(url: str) -> str:
    """Where the live state of the server at `url` is; `UsageError` for what cannot be asked."""
    parts = _split(url)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


def _split(url: str) -> SplitResult:
    if not url.isprintable() or not url.isascii() or " " in url:
        raise UsageError(f"{url!r} is no URL")
    try:
        parts = urlsplit(url)
        _ = parts.port  # is checked when it is read
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server: it begins with http:// or https:// and a host")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a URL with a password is seen by every user of the machine, and is not needed here")
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} is more than the address of a server: leave out what follows its path")
    return parts


@final
class LiveSource:
    """The live state of one server, to be asked again and again from one thread."""

    __slots__ = ("_opener", "_patience_s", "_running", "address", "url")

    def __init__(self, url: str, *, patience_s: float) -> None:
        self.url = find_live_url(url)
        self.address = self.url.removesuffix(_PATH)
        """Of the server, for people."""
        self._patience_s = patience_s
        self._opener = _make_opener(self.url)
        self._running: threading.Thread | None = None

    def read(self) -> object:
        """The document that the server answers now; `NoLiveState` if there is none within the patience."""
        if self._running is not None and self._running.is_alive():
            self._running.join(self._patience_s)
            if self._running.is_alive():
                raise self._no_answer()
        answers: queue.SimpleQueue[bytes | NoLiveState] = queue.SimpleQueue()
        self._running = threading.Thread(target=self._ask, args=(answers,), name="aiokv top", daemon=True)
        self._running.start()
        try:
            answer = answers.get(timeout=self._patience_s)
        except queue.Empty:
            raise self._no_answer() from None
        if isinstance(answer, NoLiveState):
            raise answer
        return self._parse(answer)

    def _ask(self, answers: queue.SimpleQueue[bytes | NoLiveState]) -> None:
        try:
            answers.put(self._fetch())
        except NoLiveState as error:
            answers.put(error)
        except urllib.error.HTTPError as error:
            error.close()
            meaning = _HINTS.get(error.code, "is it an aiokv server?")
            detail = f"it answers {error.code} {http.client.responses.get(error.code, '')}: {meaning}"
            answers.put(NoLiveState(self.url, detail=detail))
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = isinstance(getattr(error, "reason", error), TimeoutError)
            answers.put(self._no_answer() if is_late else NoLiveState(self.url, detail=_describe(error)))

    def _fetch(self) -> bytes:
        """Read the body, as far as patience and bounds allow."""
        deadline = time.monotonic() + self._patience_s
        request = urllib.request.Request(self.url, headers={"Accept": "application/json"})
        with self._opener.open(request, timeout=self._patience_s) as response:
            chunks, size = [], 0
            while chunk := response.read1(_CHUNK_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                if size > _MOST_BYTES:
                    raise NoLiveState(self.url, detail=f"it answers more than {_MOST_BYTES >> 20} MiB, no live state")
                if time.monotonic() > deadline:
                    raise self._no_answer()
        return b"".join(chunks)

    def _parse(self, body: bytes) -> object:
        try:
            return json.loads(body, parse_constant=_refuse, parse_float=_parse_finite)
        except (ValueError, RecursionError):
            raise NoLiveState(self.url, detail="it answers something else than JSON: is it an aiokv server?") from None

    def _no_answer(self) -> NoLiveState:
        return NoLiveState(self.url, detail=f"no answer within {self._patience_s:g} s")


@final
class _HttpOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirect that stays with HTTP, and from https with https."""

    def redirect_request(  # noqa: PLR0917  # as urllib calls it
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Refuse every other one: the redirect itself is then the answer."""
        scheme = urlsplit(newurl).scheme
        if scheme not in _SCHEMES or (req.type == "https" and scheme != "https"):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _make_opener(url: str) -> urllib.request.OpenerDirector:
    """An opener without the handlers of files, FTP and data URLs; https certificates are verified."""
    opener = urllib.request.OpenerDirector()
    proxies = urllib.request.ProxyHandler({} if _is_loopback(url) else None)
    for handler in (
        proxies,
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _HttpOnly(),
    ):
        opener.add_handler(handler)
    return opener


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def _describe(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return f"{type(error).__name__}: {reason}" if isinstance(error, http.client.HTTPException) else str(reason)


def _refuse(constant: str) -> Any:  # noqa: ANN401  # as json calls it
    raise ValueError(f"{constant} is no JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number
