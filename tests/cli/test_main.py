"""The `aiokv` command from outside: what it prints where, and the status it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from aiokv.cli.main import main


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AIOKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"{version('aiokv')}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert "demo" in shown


def test_an_unknown_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("docter") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "docter" in captured.err


def test_doctor_prints_one_json_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    status = run("doctor", "--backend", "host", "--json")
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["schema_version"] == 1
    assert report["exit_status"] == status == {"fine": 0, "degraded": 1, "unusable": 2}[report["status"]]
    assert {"CUDA driver", "cuda-bindings", "torch", "uvloop", "memory", "memlock", "huge pages", "NUMA"} <= {
        check["check"] for check in report["checks"]
    }
    assert report["settings"]["backend"] == "host"
    assert report["machine"]["packages"]["torch"] == version("torch")


def test_doctor_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor", "--backend", "host")
    shown = capsys.readouterr().out
    assert "This machine is" in shown
    assert "memlock" in shown


def test_doctor_prints_the_memory_plan_for_people_and_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("doctor", "--backend", "cuda", "--cpu-blocks", "64", "--block-bytes", "2MiB")
    run(*arguments)
    shown = capsys.readouterr().out
    assert "128 MiB" in next(line for line in shown.splitlines() if line.startswith("CPU arena"))
    run(*arguments, "--json")
    plan = json.loads(capsys.readouterr().out)["memory_plan"]
    assert plan["arena_size"] == "known"
    sizes = {part["name"]: part["num_bytes"] for part in plan["parts"]}
    assert sizes["CPU arena"] == 128 * 1024**2
    assert plan["total_bytes"] == sum(part["num_bytes"] for part in plan["parts"] if not part["only_while"])
    assert plan["registration"] == {"calls": 1, "largest_bytes": 128 * 1024**2, "slots_per_call": 64 * 1024**3 // 2**21}
    assert plan["fits"] == all(limit["is_kept"] for limit in plan["limits"] if limit["kind"] != "pinning")


def test_doctor_says_what_it_cannot_plan_without_a_block_size(capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor", "--backend", "host", "--cpu-blocks", "64")
    shown = capsys.readouterr().out
    arena = next(line for line in shown.splitlines() if line.startswith("CPU arena"))
    assert arena.split() == ["CPU", "arena", "unknown", "give", "--block-bytes"]
    assert shown.endswith("for aiokv, as far as can be told without --block-bytes.\n")
    run("doctor", "--backend", "host", "--cpu-blocks", "64", "--json")
    plan = json.loads(capsys.readouterr().out)["memory_plan"]
    assert (plan["arena_size"], plan["fits"]) == ("unknown", None)


def test_doctor_refuses_blocks_of_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--cpu-blocks", "64", "--block-bytes", "0") == 2
    assert "more than zero" in capsys.readouterr().err


def test_doctor_says_unusable_if_the_cpu_pool_can_never_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--cpu-bytes", "900TiB", "--json") == 2
    assert json.loads(capsys.readouterr().out)["status"] == "unusable"


def test_doctor_reads_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "aiokv.toml"
    file.write_text('cpu_blocks = 7\nbackend = "host"')
    monkeypatch.setenv("AIOKV_WATERMARK", "0.5")
    assert run("doctor", "--config", str(file), "--cpu-bytes", "1GiB", "--print-config", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["settings"] | {"gpu_blocks": 0} == {
        "gpu_blocks": 0,
        "cpu_blocks": None,
        "cpu_bytes": 1024**3,
        "store_policy": "eager",
        "checksum": "off",
        "watermark": 0.5,
        "backend": "host",
        "lease_age_limit_s": None,
        "hint_quota": 0.1,
    }
    assert report["sources"]["cpu_bytes"] == "argument"
    assert report["sources"]["watermark"] == "environment"
    assert report["sources"]["backend"] == "file"


def test_printed_configuration_is_a_file_that_loads_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", "--cpu-bytes", "3GiB", "--backend", "host", "--print-config") == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["cpu_bytes"] == 3 * 1024**3
    file = tmp_path / "aiokv.toml"
    file.write_text(printed)
    assert run("doctor", "--config", str(file), "--print-config") == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "gpu"], "aiokv: --backend: backend must be one of auto, cuda, host, not 'gpu'\n"),
        (
            ["--config", "missing.toml"],
            "aiokv: cannot read the configuration file missing.toml: No such file or directory\n",
        ),
    ],
)
def test_a_configuration_error_is_one_line_on_stderr_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", *arguments, "--json") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_a_long_error_stays_on_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AIOKV_BACKEND", "x" * 500 + "[bold]\n" + "y" * 10)
    assert run("doctor") == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "[bold]" in captured.err


def test_memory_that_there_is_not_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "convoy", "--clients", str(10**12)) == 1
    assert "there is not enough memory" in capsys.readouterr().err


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOKV_DEBUG", "1")
    with pytest.raises(Exception, match="backend must be one of"):
        main(["doctor", "--backend", "gpu"])


def test_debugging_false_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOKV_DEBUG", "false")
    assert run("doctor", "--backend", "gpu") == 2


VERSION_WITHOUT_TORCH = """
import sys
from aiokv.cli.main import main
try:
    main(["--version"])
finally:
    assert "torch" not in sys.modules
"""


def test_the_command_starts_without_loading_torch() -> None:
    done = subprocess.run([sys.executable, "-c", VERSION_WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{version('aiokv')}\n"), done.stderr
