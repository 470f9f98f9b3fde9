"""What all requests share: the engine, its model, the gate and the counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.defaults import MAX_QUEUE
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.gate import Gate
from aiokv_engine.server.metrics import ServerMetrics
from aiokv_engine.server.prompts import Prompts
from aiokv_engine.serving import Serving

__all__ = ["Service", "make_service"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One served model. `name` is what clients call it."""

    name: str
    loaded: LoadedModel
    serving: Serving
    prompts: Prompts
    gate: Gate
    metrics: ServerMetrics

    def check_model(self, name: str) -> None:
        """Raises `ApiError` for every name but that of the served model; nothing is looked up anywhere."""
        if name != self.name:
            raise ApiError.unknown_model()


def make_service(
    serving: Serving, *, loaded: LoadedModel, name: str | None = None, max_queue: int = MAX_QUEUE
) -> Service:
    """Returns the service of an open engine; without a `name` the model is called as its file."""
    config = serving.kv.config
    slots = config.gpu_blocks - 1  # slot 0 is never handed out
    limit = min(loaded.llama.config.max_positions, slots * config.geometry.hash_block_size)
    gate = Gate(max_queue=max_queue)
    return Service(
        name=name or loaded.name,
        loaded=loaded,
        serving=serving,
        prompts=Prompts(loaded, limit=limit),
        gate=gate,
        metrics=ServerMetrics(gate),
    )
