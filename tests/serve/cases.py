"""A server on a free loopback port, in the test's own loop, and what must be true when its clients are gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.app import Access, ServerApp, make_app
from aiokv_engine.server.process import listening, open_socket
from aiokv_engine.server.service import make_service
from aiokv_engine.serving import Serving, Sizes, open_serving

PATIENCE = 20  # seconds; only a test that fails waits that long
MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers at `url`, and a client of it."""

    url: str
    port: int
    serving: Serving
    server_app: ServerApp
    client: httpx.AsyncClient

    async def complete(self, prompt: object, **said: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **said})

    async def chat(self, messages: object, **said: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **said})

    @contextmanager
    def background(self, prompt: object, **said: object) -> Iterator[asyncio.Task[httpx.Response]]:
        """A request in a task of its own, which leaving cancels."""
        task = asyncio.create_task(self.complete(prompt, **said))
        try:
            yield task
        finally:
            task.cancel()

    async def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        text = (await self.client.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise LookupError(name)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Lets the loop turn until it is."""
        async with asyncio.timeout(PATIENCE):
            while not is_true():  # noqa: ASYNC110  # looked at from outside
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Waits until every request has ended and its step as well."""
        async with asyncio.timeout(PATIENCE):
            await self.server_app.service.gate.wait_idle()
            await self.serving.engine.wait_idle()
            await self.serving.kv.drain()

    async def assert_all_given_back(self) -> None:
        await self.until_idle()
        audit = self.serving.kv.audit()
        assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())


@asynccontextmanager
async def running(
    loaded: LoadedModel,
    *,
    gpu_blocks: int = 129,
    cpu_blocks: int = 256,
    max_queue: int = 256,
    access: Access | None = None,
    buffers: int | None = None,
) -> AsyncIterator[Running]:
    sizes = Sizes(gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
    async with open_serving(loaded.llama, sizes=sizes) as serving:
        service = make_service(serving, loaded=loaded, name=MODEL, max_queue=max_queue)
        server_app = make_app(service, access=access)
        with open_socket("127.0.0.1", port=0) as listener:
            if buffers is not None:  # connections inherit them
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
            port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with (
                listening(server_app, listener=listener),
                httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
            ):
                yield Running(url=url, port=port, serving=serving, server_app=server_app, client=client)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in a response, which has nothing else."""
    body: dict[str, Any] = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
