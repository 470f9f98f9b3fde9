"""`aiokv bench replay`: what is hit where is recomputed from the trace; a bad trace, or no peer, is told clearly."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiokv.cli.bench.replay.figures import complaints_about
from tests.cli.bench.fake_peer import lives_on
from tests.cli.test_main import run

CHUNK, BLOCK = 512, 16

Line = dict[str, Any]


def line(hash_ids: Sequence[int], *, tail: int = CHUNK, output: int = 1) -> Line:
    """One request of these ids, the last of which stands for `tail` tokens."""
    length = CHUNK * (len(hash_ids) - 1) + tail
    return {"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": list(hash_ids)}


def written(path: Path, lines: Sequence[Line]) -> str:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(file)


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run("bench", "replay", *arguments, "--json") == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def hits_without_forgetting(lines: Sequence[Line]) -> int:
    """Tokens of whole blocks at the beginning of each prompt that some prompt before had, the last token never.

    A block is where it lies in the prompt, with the ids up to it; two requests may share a tail and cut it differently.
    """
    seen: set[tuple[Any, ...]] = set()
    total = 0
    for each in lines:
        ids, length = each["hash_ids"], each["input_length"]
        blocks = [(place, *ids[: place * BLOCK // CHUNK + 1]) for place in range(length // BLOCK)]
        leading = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        total += BLOCK * min(leading, (length - 1) // BLOCK)
        seen.update(blocks)
    return total


def conversations(rounds: int) -> list[Line]:
    """Five users who take turns by chance: each prompt is what they had said before, and more."""
    source = random.Random(4)
    said: dict[int, list[int]] = {user: [0] for user in range(5)}
    lines = []
    for fresh in range(100, 100 + 2 * rounds, 2):
        user = source.randrange(5)
        lines.append(line([*said[user], fresh], tail=source.randrange(1, CHUNK), output=source.randrange(80)))
        said[user] = said[user] + [fresh + 1] if len(said[user]) < 12 else [0]
    return lines


def test_both_tiers_together_hit_whatever_any_prompt_before_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU pool keeps everything, the GPU pool little of it."""
    lines = conversations(150)
    pools = ("--gpu-blocks", "1200", "--cpu-blocks", "60000", "--in-flight", "3", "--slice", "40")
    report = replayed(capsys, written(tmp_path, lines), *pools)
    side, attributed = report["aiokv"], report["attributed"]
    assert (report["schema_version"], report["ok"], side["requests"]) == (1, True, len(lines))
    assert side["gpu_hit_tokens"] + side["cpu_hit_tokens"] == hits_without_forgetting(lines)
    assert side["gpu_hit_tokens"] > 0
    assert side["cpu_hit_tokens"] > 0
    assert side["prompt_tokens"] == sum(each["input_length"] for each in lines) == sum(attributed.values())
    assert (
        report["metrics"]
        == attributed
        == {
            "gpu": side["gpu_hit_tokens"],
            "cpu": side["cpu_hit_tokens"],
            "compute": side["prompt_tokens"] - side["gpu_hit_tokens"] - side["cpu_hit_tokens"],
        }
    )
    assert 0.0 < report["hold"]["ms_p50"] <= report["hold"]["ms_p99"] <= report["hold"]["ms_longest"]


def test_what_the_gpu_pool_forgot_comes_from_the_cpu_pool_and_then_from_the_gpu_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = line([1, 2, 3, 4], tail=100)
    others = [line([10 * number, 10 * number + 1]) for number in range(10, 40)]  # 1,920 blocks
    pools = ("--gpu-blocks", "1000", "--cpu-blocks", "10000", "--in-flight", "1")
    report = replayed(capsys, written(tmp_path, [conversation, *others, conversation, conversation]), *pools)
    whole = (3 * CHUNK + 100) // BLOCK * BLOCK
    assert (report["aiokv"]["cpu_hit_tokens"], report["aiokv"]["gpu_hit_tokens"]) == (whole, whole)


def test_a_prompt_that_is_all_known_computes_its_last_block_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = replayed(capsys, written(tmp_path, [line([1, 2]), line([1, 2])]))
    assert report["aiokv"]["gpu_hit_tokens"] == 2 * CHUNK - BLOCK


def test_output_is_hit_by_nobody_and_a_request_may_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line([1], output=600), line([1, 2], output=0), line([3], output=1)]
    report = replayed(capsys, written(tmp_path, lines), "--in-flight", "1")
    assert report["attributed"] == {"gpu": CHUNK, "cpu": 0, "compute": 3 * CHUNK}


def test_prompts_in_either_form_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, conversations(20))
    lists, arrays = (replayed(capsys, trace, "--tokens", form)["attributed"] for form in ("list", "array"))
    assert lists == arrays


def test_only_the_first_requests_are_replayed_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line([number]) for number in range(9)]
    report = replayed(capsys, written(tmp_path, lines), "--requests", "4", "--slice", "3")
    assert report["aiokv"]["requests"] == 4


BAD_LINES = {
    "no json": "{",
    "no object": "[1]",
    "a name missing": '{"input_length": 5, "output_length": 1}',
    "too few ids": json.dumps(line([1, 2]) | {"hash_ids": [1]}),
    "too many ids": json.dumps(line([1]) | {"hash_ids": [1, 2]}),
    "an id that is no number": json.dumps(line([1]) | {"hash_ids": ["1"]}),
    "an id that is negative": json.dumps(line([1]) | {"hash_ids": [-1]}),
    "a length that is none": json.dumps(line([1]) | {"input_length": True}),
    "no input": '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
    "negative output": json.dumps(line([1], output=-1)),
    "an absurd length": json.dumps(line([1]) | {"input_length": 10**12}),
    "ids in no list": json.dumps(line([1]) | {"hash_ids": 7}),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_line_that_cannot_be_used_is_named(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(line([1]))}\n\n{bad}\n")
    assert run("bench", "replay", str(file), "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file}, line 3: " in captured.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the trace {} has no requests"),
        (b"\n\n", "the trace {} has no requests"),
        (b"\xff\xfe\x00", "cannot read the trace {}: it is not UTF-8 text"),
    ],
)
def test_a_trace_without_requests_is_refused(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    assert run("bench", "replay", str(file), "--json") == 2
    assert capsys.readouterr().err == f"aiokv: {reason.format(file)}\n"


def test_a_trace_that_cannot_be_opened_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none"
    assert run("bench", "replay", str(missing), "--json") == 2
    assert capsys.readouterr().err == f"aiokv: cannot read the trace {missing}: No such file or directory\n"
    assert run("bench", "replay", str(tmp_path), "--json") == 2
    assert capsys.readouterr().err == f"aiokv: cannot read the trace {tmp_path}: Is a directory\n"


def test_a_request_that_never_fits_is_told_before_anything_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path, [line([1]), line([1, 2])])
    assert run("bench", "replay", trace, "--gpu-blocks", "60", "--json") == 2
    assert "request 1 of the trace needs 65 GPU blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("python", "told"),
    [("/nowhere/python", "/nowhere/python: No such file or directory\n"), (sys.executable, "No module named 'vllm'")],
)
def test_a_peer_that_cannot_run_is_told(
    python: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path, [line([1])])
    assert run("bench", "replay", trace, "--peer-python", python, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


FAKE_PEER = """#!{python}
import subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
open({log!r}, "w").write(str(child.pid))
for number, line in enumerate(sys.stdin):
    {answer}
"""
GREET = """print('{"peer": "a fake"}' if number == 0 else ANSWER, flush=True)"""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("time.sleep(300)", "no answer within 3 s"),
        ("sys.exit('out of tea')", "it said last: out of tea"),
        ("print('{}', flush=True)", "does not say what it is"),
        ("print('[1]', flush=True)", "no answer, but"),
        ("print('tea', flush=True)", "no answer, but"),
        (GREET.replace("ANSWER", "'{}'"), "cannot be used"),
        (GREET.replace("ANSWER", """'{"hits": [[1]], "seconds": 1, "cpu_seconds": 1}'"""), "cannot be used"),
        (GREET.replace("ANSWER", """'{"hits": [], "seconds": 1, "cpu_seconds": 1}'"""), "0 requests, not 1"),
        (GREET.replace("ANSWER", "sys.exit('no milk')"), "it said last: no milk"),
    ],
)
def test_a_peer_that_answers_what_nobody_can_use_is_told_and_leaves_no_process(
    answer: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, log = tmp_path / "python", tmp_path / "child"
    python.write_text(FAKE_PEER.format(python=sys.executable, log=str(log), answer=answer))
    python.chmod(0o755)
    trace = written(tmp_path, [line([1])])
    timeout = "3" if "within" in told else "50"
    assert run("bench", "replay", trace, "--peer-python", str(python), "--timeout", timeout, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert not lives_on(int(log.read_text()))


def test_a_peer_that_reads_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has closed its stdin before it is asked."""
    trace = written(tmp_path, [line([1])])
    assert run("bench", "replay", trace, "--peer-python", "/bin/cat", "--json") == 2
    assert "no answer, but" in capsys.readouterr().err


def test_a_block_that_no_keys_can_hash_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fails within the runtime comes out as it is, not as a group of errors."""
    trace = written(tmp_path, [line([1])])
    assert run("bench", "replay", trace, "--block-size", str(2**24 + 1), "--gpu-blocks", "10", "--json") == 2
    assert "hash_block_size must be" in capsys.readouterr().err


def test_a_token_too_few_a_metric_apart_and_a_peer_too_near_are_complaints() -> None:
    figures: dict[str, Any] = {
        "aiokv": {"prompt_tokens": 60},
        "attributed": {"gpu": 16, "cpu": 0, "compute": 44},
        "metrics": {"gpu": 16, "compute": 44},
        "scrapes": {"failed": 0},
        "ratio": {"requests_per_second": 4.0},
    }
    assert complaints_about(figures) == ()
    assert complaints_about(figures | {"ratio": {"requests_per_second": 3.9}}) == (
        "3.9 times the peer's requests per second, not 4",
    )
    assert complaints_about(figures | {"metrics": {"gpu": 15, "compute": 44}, "scrapes": {"failed": 1}}) == (
        "the metrics count {'gpu': 15, 'compute': 44}, the requests were given {'gpu': 16, 'cpu': 0, 'compute': 44}",
        "1 scrapes of the metrics failed",
    )
    assert complaints_about(figures | {"aiokv": {"prompt_tokens": 61}}) == (
        "60 tokens were attributed, the prompts have 61",
    )


def real_trace() -> str:
    path = os.environ.get("AIOKV_TRACE", "")
    if not path:
        pytest.skip("AIOKV_TRACE does not name the Mooncake conversation trace")
    return path


def test_the_public_trace_hits_what_it_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    """The first hours fit into the CPU pool, so that nothing is forgotten."""
    trace = real_trace()
    lines = [json.loads(text) for text in Path(trace).read_text().splitlines()[:300]]
    side = replayed(capsys, trace, "--requests", "300")["aiokv"]
    assert side["requests"] == 300
    assert side["gpu_hit_tokens"] + side["cpu_hit_tokens"] == hits_without_forgetting(lines)


def test_the_peer_hits_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trace = real_trace()
    python = os.environ.get("AIOKV_PEER_PYTHON", "")
    if not python:
        pytest.skip("AIOKV_PEER_PYTHON does not name a Python with vLLM")
    run("bench", "replay", trace, "--requests", "200", "--slice", "50", "--peer-python", python, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["ratio"]["requests_with_same_hits"] == report["peer"]["requests"] == 200
    assert report["peer"]["cpu_hit_tokens"] == report["aiokv"]["cpu_hit_tokens"] > 0
