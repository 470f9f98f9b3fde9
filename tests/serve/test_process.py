"""`aiokv serve` as a process of its own: its address, signals, drain, second signal, and the report of leaks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from aiokv import ConfigError
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.command import register
from aiokv_engine.server.process import listening, open_socket
from tests.serve.cases import PATIENCE, error_of, running

ROOT = Path(__file__).resolve().parents[2]
MAIN = (
    "import typer; from aiokv_engine.server.command import register; app = typer.Typer(pretty_exceptions_enable=False)"
)
RUN = "app.command('x', hidden=True)(lambda: None); register(app); app()"
SLOW = {"model": "served", "prompt": "the", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Process:
    """A running server and a client of it."""

    def __init__(
        self, popen: subprocess.Popen[str], *, errors: Path, client: httpx.Client, announced: dict[str, Any]
    ) -> None:
        self.popen = popen
        self.announced = announced
        self._errors = errors
        self.client = client

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> tuple[int, str]:
        """The exit status, and what was written to stderr."""
        status = self.popen.wait(PATIENCE)
        return status, self._errors.read_text()


@contextmanager
def serving(model: Path, directory: Path, *options: str, prelude: str = "", **environ: str) -> Iterator[Process]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}", "OMP_NUM_THREADS": "1"}
    code = "\n".join((MAIN, prelude, RUN))
    command = [sys.executable, "-W", "always", "-c", code, "serve"]
    command += ["--model", str(model), "--port", "0", "--json", "--served-model-name", "served"]
    command += ["--gpu-blocks", "129", "--cpu-blocks", "256", *options]
    errors = directory / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment | environ, cwd=directory
        ) as popen,
    ):
        try:
            found = _read_announcement(popen.stdout, errors=errors)
            with httpx.Client(base_url=found["url"], timeout=PATIENCE) as client:
                yield Process(popen, errors=errors, client=client, announced=found)
        finally:
            popen.kill()


def told(*, running: int = 0, grace: int = 30, model: str = "tiny.gguf") -> str:
    """What stands on stderr when nothing had to be cut off."""
    return f"{told_until_drain(running=running, grace=grace, model=model)}ended, nothing was cut off\n"


def told_until_drain(*, running: int, grace: int, model: str = "tiny.gguf") -> str:
    return (
        f"loading {model} ...\n"
        f"draining, {running} running, at most {grace} s; another signal ends the process at once\n"
    )


def _read_announcement(stdout: IO[str] | None, *, errors: Path) -> dict[str, Any]:
    assert stdout is not None
    lines = []
    for line in stdout:
        lines.append(line)
        if line == "}\n":
            found: dict[str, Any] = json.loads("".join(lines))
            return found
    pytest.fail(f"the server did not start: {errors.read_text()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(tiny_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tiny_path, tmp_path) as server:
        assert server.client.get("/ready").status_code == 200
        assert server.client.get("/v1/models", headers={"host": "evil.net"}).status_code == 400
        answer = server.client.post("/v1/completions", json={"model": "served", "prompt": "the"})
        assert answer.status_code == 200
        server.signal(number)
        assert server.end() == (0, told())


def test_running_requests_are_drained_while_new_ones_are_told_to_go_elsewhere(tiny_path: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_path, tmp_path, "--grace", "60") as server,
        server.client.stream("POST", "/v1/completions", json=SLOW | {"max_tokens": 300}) as running,
    ):
        pieces = running.iter_text()
        text = next(pieces) + next(pieces)
        server.signal(signal.SIGTERM)
        while (ready := server.client.get("/ready")).status_code == 200:
            text += next(pieces)
        refused = server.client.post("/v1/completions", json={"model": "served", "prompt": "the"})
        health = server.client.get("/health")
        metrics = server.client.get("/metrics")
        text += "".join(pieces)
        assert server.end() == (0, told(running=1, grace=60))
    assert ready.status_code == 503
    assert ready.json()["status"] == "draining"
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "draining"
    assert (health.status_code, metrics.status_code) == (200, 200)
    assert text.endswith("data: [DONE]\n\n")


def test_a_request_that_is_still_coming_at_the_signal_is_told_to_go_elsewhere(tiny_path: Path, tmp_path: Path) -> None:
    """Its body would come too late anyhow, and nothing waits for it: neither the grace, nor that of connections."""
    with serving(tiny_path, tmp_path, "--grace", "60") as server:
        url = server.client.base_url
        with socket.create_connection((url.host, url.port), timeout=PATIENCE) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
            )
            assert slow.recv(1000).startswith(b"HTTP/1.1 100 ")  # its body is read now
            server.signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: slow.recv(1000), b""))
            assert server.end() == (0, told(grace=60))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in answer


def test_what_does_not_end_within_the_grace_is_cut_off_and_told_so(tiny_path: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_path, tmp_path, "--grace", "0.2") as server,
        server.client.stream("POST", "/v1/completions", json=SLOW) as running,
    ):
        pieces = running.iter_text()
        text = next(pieces) + next(pieces)
        server.signal(signal.SIGTERM)
        text += "".join(pieces)
        status, errors = server.end()
    assert status == 0
    assert '"code":"cut_off"' in text
    assert "DONE" not in text
    assert "draining, 1 running, at most 0.2 s; " in errors
    assert errors.endswith("\nended, 1 cut off\n")
    assert "Traceback" not in errors
    assert "destroyed" not in errors


def test_a_client_that_reads_nothing_does_not_hold_the_end(tiny_path: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_path, tmp_path, "--grace", "0.2") as server,
        server.client.stream("POST", "/v1/completions", json=SLOW),
    ):
        server.signal(signal.SIGTERM)
        status, errors = server.end()
    assert status == 0
    assert "Traceback" not in errors


def test_a_second_signal_ends_it_at_once(tiny_path: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_path, tmp_path, "--grace", "60") as server,
        server.client.stream("POST", "/v1/completions", json=SLOW) as running,
    ):
        pieces = running.iter_text()  # kept: without it the client has left
        next(pieces)
        server.signal(signal.SIGTERM)
        while server.client.get("/ready").status_code == 200:
            continue
        server.signal(signal.SIGTERM)
        assert server.end() == (-signal.SIGTERM, told_until_drain(running=1, grace=60))


@pytest.mark.parametrize("grace", ["0", "60"])
def test_a_signal_amid_many_clients_that_come_and_go_leaves_nothing(
    tiny_path: Path, tmp_path: Path, grace: str
) -> None:
    """Every answer is whole, an error of ours, or a connection that was not accepted any more."""
    statuses: list[object] = []
    with serving(tiny_path, tmp_path, "--grace", grace, "--max-queue", "20") as server:
        threads = [
            threading.Thread(target=_come_and_go, args=(str(server.client.base_url), number, statuses))
            for number in range(40)
        ]
        for thread in threads:
            thread.start()
        while statuses.count(200) < 10:
            server.client.get("/health")
        server.signal(signal.SIGTERM)
        status, errors = server.end()
        for thread in threads:
            thread.join(PATIENCE)
    assert status == 0
    assert "Traceback" not in errors
    assert "destroyed" not in errors
    assert set(statuses) <= {200, 429, 503, "left", "refused"}


def _come_and_go(url: str, number: int, statuses: list[object]) -> None:
    """Every third client leaves within its answer, whole or streamed; the others ask until nobody answers any more."""
    said = {"model": "served", "prompt": f"{number} the the", "max_tokens": 20, "stream": number % 2 == 0}
    timeout = 0.2 if number % 3 == 0 else PATIENCE
    with httpx.Client(base_url=url) as client:
        for _ in range(50):
            try:
                statuses.append(client.post("/v1/completions", json=said, timeout=timeout).status_code)
            except httpx.TimeoutException:
                statuses.append("left")
            except httpx.TransportError:
                statuses.append("refused")
                return


LEAK = """
from aiokv_engine.scheduler import Engine
original = Engine.__init__
def leak(engine, model, *, kv, **options):
    original(engine, model, kv=kv, **options)
    global leaked
    leaked = kv.try_acquire("leaked on purpose", [1, 2, 3])
Engine.__init__ = leak
"""


def test_what_is_still_held_at_the_end_is_reported(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path, prelude=LEAK) as server:
        server.signal(signal.SIGTERM)
        status, errors = server.end()
    assert status == 1
    assert "lease leaked on purpose: 1 blocks" in errors
    assert "Traceback" not in errors


def test_admin_routes_need_the_token_of_the_file(tiny_path: Path, tmp_path: Path) -> None:
    token = "a-token-of-enough-letters"
    (tmp_path / "token").write_text(token + "\n")
    (tmp_path / "token").chmod(0o600)
    with serving(tiny_path, tmp_path, "--admin-token-file", "token") as server:
        assert server.client.get("/kv/audit").status_code == 401
        audit = server.client.get("/kv/audit", headers={"authorization": f"Bearer {token}"})
        assert audit.status_code == 200
        server.signal(signal.SIGTERM)
        assert server.end() == (0, told())


def test_the_token_may_come_from_the_environment_and_a_host_be_allowed(tiny_path: Path, tmp_path: Path) -> None:
    token = "a-token-of-enough-letters"
    with serving(tiny_path, tmp_path, "--allowed-host", "example.org", AIOKV_ADMIN_TOKEN=token) as server:
        audit = server.client.get("/kv/audit", headers={"authorization": f"Bearer {token}"})
        assert audit.status_code == 200
        for host, status in (("example.org", 200), ("localhost", 200), ("evil.net", 400)):
            assert server.client.get("/v1/models", headers={"host": host}).status_code == status, host
            assert server.client.get("/health", headers={"host": host}).status_code == status, host


def test_settings_come_from_arguments_the_environment_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "aiokv.toml").write_text('gpu_blocks = 7\ncpu_blocks = 9\nstore_policy = "lazy"\n')
    result = _invoke("--config", str(tmp_path / "aiokv.toml"), "--cpu-blocks", "5", AIOKV_GPU_BLOCKS="6")
    shown = json.loads(result)
    assert {key: shown["settings"][key] for key in ("gpu_blocks", "cpu_blocks", "store_policy")} == {
        "gpu_blocks": 6, "cpu_blocks": 5, "store_policy": "lazy",
    }  # fmt: skip
    assert [shown["sources"][key] for key in ("gpu_blocks", "cpu_blocks", "store_policy")] == [
        "environment", "argument", "file",
    ]  # fmt: skip


def test_a_port_that_is_taken_is_an_error_in_one_line(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path) as server:
        port = server.client.base_url.port
        result = CliRunner().invoke(new_app(), ["serve", "--model", str(tiny_path), "--port", str(port)])
    assert "cannot listen on 127.0.0.1" in str(result.exception)


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "256.1.1.1", "/tmp/socket", ""])
def test_an_address_that_is_none_is_an_error_in_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on "):
        open_socket(host, port=0)


async def test_who_has_bound_a_port_first_does_not_keep_it_from_who_listens_first(tiny: LoadedModel) -> None:
    """Both may bind it while neither listens: that is how long a model is loaded."""
    async with running(tiny) as server:
        with open_socket("127.0.0.1", port=0) as first:
            port = first.getsockname()[1]
            with open_socket("127.0.0.1", port=port) as second:
                async with listening(server.server_app, listener=second):
                    with pytest.raises(ConfigError, match=f"cannot listen on http://127.0.0.1:{port}"):
                        async with listening(server.server_app, listener=first):
                            pytest.fail("two servers listen on one port")
                    async with httpx.AsyncClient() as client:
                        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


@pytest.mark.parametrize("option", ["--grace=nan", "--grace=inf", "--grace=-1", "--max-queue=0", "--port=70000"])
def test_what_no_server_can_be_started_with_is_refused(option: str) -> None:
    result = CliRunner().invoke(new_app(), ["serve", "--model", "missing.gguf", option])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError | SystemExit)


def test_an_ipv6_loopback_is_announced_as_one(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path, "--host", "::1") as server:
        assert str(server.client.base_url).startswith("http://[::1]:")
        assert server.client.get("/ready").status_code == server.client.get("/v1/models").status_code == 200


def _invoke(*arguments: str, **environ: str) -> str:
    result = CliRunner().invoke(new_app(), ["serve", "--print-config", "--json", *arguments], env=environ)
    assert result.exit_code == 0, result.output
    return result.stdout


def new_app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("other", hidden=True)(lambda: None)
    register(app)
    return app
