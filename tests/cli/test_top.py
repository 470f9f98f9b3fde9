"""`aiokv top` from outside: what it prints where, how it ends, and how it leaves the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from aiokv.cli.main import main
from tests.cli.top_server import LIVE, Answer, answering, body, changed, document, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["top", *arguments])
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


def growing(server_states: list[dict[str, Any]]) -> Answer:
    """Answer with one state after the other, then with the last one again and again."""
    left = list(server_states)

    def answer(request: BaseHTTPRequestHandler) -> None:
        document(left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_without_a_terminal_it_prints_one_plain_picture(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(LIVE) as server:
        assert run(server.url, *arguments) == 0
        assert len(server.paths) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert captured.out.splitlines()[0].rstrip() == f"aiokv 0.1.0 host  {server.url}"
    assert all(len(line) <= 80 for line in captured.out.splitlines())


def test_colour_that_is_forced_makes_no_terminal_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with serving(LIVE) as server:
        assert run(server.url) == 0
        assert len(server.paths) == 1


def test_json_is_one_object_with_the_rates_between_two_looks(capsys: pytest.CaptureFixture[str]) -> None:
    later = changed(uptime_s=14.5, prompt_tokens__gpu=3500)
    with answering(growing([LIVE, later])) as server:
        assert run(server.url, "--json", "--interval", "0.5") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert next(iter(report)) == "schema_version"
    assert report["schema_version"] == 1
    assert report["url"] == f"{server.url}/live.json"
    assert report["state"]["prompt_tokens"] == later["prompt_tokens"]
    assert report["state"]["tiers"]["gpu"]["cells"] == LIVE["tiers"]["gpu"]["cells"]
    assert report["rates"]["interval_s"] == 2.0
    assert report["rates"]["prompt_tokens"] == {"gpu": 250.0, "cpu": 0.0, "compute": 0.0}


def test_json_of_one_look_has_no_rates(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(LIVE) as server:
        assert run(server.url, "--json", "--once") == 0
        assert len(server.paths) == 1
    assert json.loads(capsys.readouterr().out)["rates"] is None


def test_json_across_a_restart_of_the_server_has_no_rates(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(growing([LIVE, changed(uptime_s=0.5, prompt_tokens__gpu=1)])) as server:
        assert run(server.url, "--json", "--interval", "0.5") == 0
    assert json.loads(capsys.readouterr().out)["rates"] is None


@pytest.mark.parametrize("arguments", [(), ("--once",), ("--json",), ("--json", "--once")])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (body(b"<html></html>", kind="text/html"), "is it an aiokv server?"),
        (document({"status": "ok"}), "is it an aiokv server?"),
        (document({}, status=404), "404 Not Found"),
        (document(changed(schema_version=2)), "version 2"),
        (document(changed(leases__active="[red]many[/]")), "'active'"),
    ],
)
def test_what_is_no_aiokv_server_is_one_line_and_status_1(
    answer: Answer, said: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as server:
        assert run(server.url, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"aiokv: {server.url}/live.json: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_server_that_has_never_answered_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(LIVE) as server:
        url = server.url
    assert run(url) == 1
    assert capsys.readouterr().err == f"aiokv: {url}/live.json: Connection refused\n"


def test_silent_server_costs_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    def hang(request: BaseHTTPRequestHandler) -> None:
        server.until_released.wait(30)

    with answering(hang) as server:
        assert run(server.url, "--timeout", "0.5") == 1
    assert "no answer within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("127.0.0.1:8000",), ("ftp://127.0.0.1/",), ("http://u:p@127.0.0.1/",), ("",), (), ("http://127.0.0.1", "more"),
        ("http://127.0.0.1:1", "--interval", "0"), ("http://127.0.0.1:1", "--interval", "nan"),
        ("http://127.0.0.1:1", "--interval", "inf"), ("http://127.0.0.1:1", "--timeout", "-1"),
        ("http://127.0.0.1:1", "--interval", "soon"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_status_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().out == ""


def test_no_command_of_an_integration_is_loaded_for_it() -> None:
    program = "import sys; from aiokv.cli.main import main; sys.argv = ['aiokv', 'top', '--help']\n"
    program += "try: main()\nfinally: print(sorted(n for n in sys.modules if n in ('torch', 'aiokv_engine')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
