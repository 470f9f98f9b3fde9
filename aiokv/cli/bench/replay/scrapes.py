"""A Prometheus of its own: reads the runtime's metrics over HTTP again and again, as an operator's would."""

from __future__ import annotations

import threading
import urllib.request
from typing import Final, Self, final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from aiokv.observe.metrics import Collector

__all__ = ["Scraper"]

_TOKENS: Final = "aiokv_prompt_tokens_total"
_TIMEOUT_S: Final = 30.0


@final
class Scraper:
    """Serves the collector from a thread and reads it from another, every `every_s` seconds. A context manager."""

    __slots__ = ("_port", "_server", "_serving", "_stop", "_thread", "count", "failed")

    def __init__(self, collector: Collector, *, every_s: float) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self._server, self._serving = start_http_server(0, addr="127.0.0.1", registry=registry)
        self._port = self._server.server_port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_s,), daemon=True, name="scraper")
        self.count = 0
        self.failed = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens as the metrics count them now."""
        samples = (sample for family in text_string_to_metric_families(self._read()) for sample in family.samples)
        return {s.labels["source"]: int(s.value) for s in samples if s.name == _TOKENS and s.value}

    def _run(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self._read()
            except OSError:
                self.failed += 1
            else:
                self.count += 1

    def _read(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read()).decode()
