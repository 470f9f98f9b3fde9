"""What goes to stdout and what to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rich.progress import Progress

from aiokv.cli.output import (
    exit_status,
    new_progress,
    new_still_progress,
    print_error,
    print_json,
    stdout_kept_clean,
)
from aiokv.errors import AcquireTimeout, CapacityError, ConfigError, InvalidTransition, UsageError


def test_json_is_alone_on_stdout_whatever_the_work_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_kept_clean(), new_progress() as progress:
        for _ in progress.track(range(3), description="working"):
            print("a library that talks")  # the print is the point
    print_json({"runs": [1.5, None, "ü"]}, schema_version=2)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema_version": 2, "runs": [1.5, None, "ü"]}
    assert captured.err.count("a library that talks") == 3


@pytest.mark.parametrize("start", [new_progress, new_still_progress])
def test_progress_leaves_nothing_where_nobody_watches_it(
    start: Callable[[], Progress], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError), start() as progress:
        progress.update(progress.add_task("working", total=2), advance=1, refresh=True)
        raise ConfigError("too few blocks")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_json_refuses_what_json_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"ratio": float("nan")}, schema_version=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("message", ["one\ntwo", "[red]not markup[/red] [/]", "x" * 1000])
def test_an_error_is_one_line_as_written(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error(message)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"aiokv: {' '.join(message.split())}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (UsageError("x"), 2),
        (InvalidTransition("lease", state="HELD", event="confirm"), 2),
        (CapacityError("req-1", needed=3, capacity=2), 1),
        (AcquireTimeout("req-1", timeout=1.0), 1),
        (ZeroDivisionError(), 1),
    ],
)
def test_only_what_the_caller_can_change_is_status_2(error: Exception, status: int) -> None:
    assert exit_status(error) == status
