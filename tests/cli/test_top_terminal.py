"""`aiokv top` on a terminal of its own: what it draws, how it survives its server, how it leaves."""

from __future__ import annotations

import codecs
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final, final

import pytest

from tests.cli.top_server import LIVE, LiveServer, answering, body, changed, document, serving

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_S: Final = 40.0
CTRL_C: Final = b"\x03"
ALT_SCREEN, MAIN_SCREEN, SHOW_CURSOR, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h", "\x1b[H"

# The first thing a new session opens becomes its terminal, so that Ctrl-C reaches it as a signal.
_IN_A_SESSION: Final = """
import os, sys
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.execv(sys.executable, [sys.executable, "-m", "aiokv.cli.main", "top", *sys.argv[2:]])
"""


@final
class Terminal:
    """A terminal in which `aiokv top` runs."""

    def __init__(self, *arguments: str, size: tuple[int, int], environ: Mapping[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        rows, columns = size
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._settings: list[Any] = termios.tcgetattr(self._slave)
        path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.written = ""
        # A read may end within a character, and Ctrl-C throws away what the terminal has not shown yet.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_SESSION, os.ttyname(self._slave), *arguments],
            env={**clean, "PYTHONPATH": path, "TERM": "xterm-256color", **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def wait_for(self, pattern: str) -> str:
        """What was written from the last wait up to a match."""
        start, deadline = len(self.written), time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.written[start:], flags=re.DOTALL):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.written[start:]!r}"
            assert self._read() or self.process.poll() is None, f"ended without {pattern!r}: {self.written[start:]!r}"
        return self.written[start:]

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """Its status, once it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        while self._read(seconds=0.0):
            pass
        return self.process.wait(timeout=1)

    def is_as_before(self) -> bool:
        """Whether the terminal is left as it was: its settings, the main screen, the cursor."""
        tail = self.written[self.written.rindex(ALT_SCREEN) :]
        is_main = MAIN_SCREEN in tail and SHOW_CURSOR in tail
        return is_main and termios.tcgetattr(self._slave) == self._settings

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self, *, seconds: float = 0.1) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        self.written += self._decoder.decode(os.read(self._master, 1 << 16))
        return True


@contextmanager
def showing(
    server: LiveServer, *arguments: str, size: tuple[int, int] = (24, 80), environ: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """`aiokv top` of this server, looking twice a second."""
    terminal = Terminal(server.url, "--interval", "0.5", "--timeout", "5", *arguments, size=size, environ=environ or {})
    try:
        yield terminal
    finally:
        terminal.close()


def test_ctrl_c_ends_it_with_status_0_and_the_terminal_as_it_was() -> None:
    with serving(LIVE) as server, showing(server) as terminal:
        terminal.wait_for("req-5")
        terminal.wait_for("req-5")
        terminal.type(CTRL_C)
        assert terminal.end() == 0
        assert terminal.is_as_before()
    assert "Traceback" not in terminal.written
    assert "Aborted" not in terminal.written


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_the_terminal_as_it_was(number: signal.Signals) -> None:
    with serving(LIVE) as server, showing(server) as terminal:
        terminal.wait_for("req-5")
        terminal.process.send_signal(number)
        assert terminal.end() == 0
        assert terminal.is_as_before()


def test_ctrl_c_is_heard_while_a_server_is_silent() -> None:
    def hang(request: BaseHTTPRequestHandler) -> None:
        server.until_released.wait(PATIENCE_S)

    with serving(LIVE) as server, showing(server, "--timeout", "3600") as terminal:
        terminal.wait_for("req-5")
        server.answer = hang
        asked = len(server.paths)
        deadline = time.monotonic() + PATIENCE_S
        while len(server.paths) == asked and time.monotonic() < deadline:
            server.until_released.wait(0.02)
        terminal.type(CTRL_C)
        assert terminal.end() == 0
        assert terminal.is_as_before()


def test_screen_of_24_by_80_does_not_scroll() -> None:
    with serving(LIVE) as server, showing(server) as terminal:
        first = terminal.wait_for("req-5")
        terminal.type(CTRL_C)
        terminal.end()
    page = first[first.index("aiokv") :].partition(HOME)[0]
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", page).split("\r\n")
    assert len(lines) == 24
    assert lines[-1].startswith("req-5")
    assert all(len(line) == 80 for line in lines[:-1])


def test_server_that_goes_is_told_and_asked_until_it_is_back() -> None:
    with serving(LIVE) as server, showing(server) as terminal:
        terminal.wait_for("accepting")
        server.answer = body(b"<html>bad gateway</html>", status=502)
        gone = terminal.wait_for("gone for .*req-5")
        assert "502 Bad Gateway" in gone
        assert "789" in gone
        server.answer = document(changed(uptime_s=0.5, prompt_tokens__gpu=1))
        back = terminal.wait_for(r"up 0\.5 s.*req-5")
        assert "-" in back
        assert not re.search(r" -\d", back)
        terminal.type(CTRL_C)
        assert terminal.end() == 0


def test_no_rate_is_told_while_a_server_is_gone_nor_across_that_time() -> None:
    looks = itertools.count(1)

    def grow(request: BaseHTTPRequestHandler) -> None:
        look = next(looks)
        document(changed(uptime_s=12.5 + 2 * look, prompt_tokens__gpu=3000 + 2 * 1234 * look))(request)

    with answering(grow) as server, showing(server) as terminal:
        terminal.wait_for("1,234")
        server.answer = body(b"", status=502)
        gone = terminal.wait_for("gone for .*req-5")
        assert "1,234" not in gone[gone.index("gone for") :]
        server.answer = grow
        back = terminal.wait_for("accepting.*req-5")
        assert "1,234" not in back[back.index("accepting") :].partition("req-5")[0]
        terminal.wait_for("1,234")
        terminal.type(CTRL_C)
        assert terminal.end() == 0


def test_server_that_has_never_answered_is_status_1_and_no_screen() -> None:
    with serving(LIVE) as server:
        pass
    with showing(server) as terminal:
        assert terminal.end() == 1
    assert ALT_SCREEN not in terminal.written
    assert "Connection refused" in terminal.written


def test_no_color_is_heard() -> None:
    with serving(LIVE) as server, showing(server, environ={"NO_COLOR": "1"}) as terminal:
        terminal.wait_for("req-5")
        terminal.type(CTRL_C)
        assert terminal.end() == 0
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3|9)\d", terminal.written)
    assert "█" in terminal.written


def test_terminal_that_cannot_move_its_cursor_gets_one_picture() -> None:
    with serving(LIVE) as server, showing(server, environ={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 0
    assert "\x1b" not in terminal.written
    assert "req-5" in terminal.written


def test_once_on_a_terminal_leaves_the_picture_where_it_is() -> None:
    with serving(LIVE) as server, showing(server, "--once") as terminal:
        assert terminal.end() == 0
    assert ALT_SCREEN not in terminal.written
    assert "req-5" in terminal.written
