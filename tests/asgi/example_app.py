"""The README's example of an async frontend: `uvicorn app:app`."""

import torch
from fastapi import FastAPI

from aiokv import CacheGeometry, FullAttention, KVRuntime, RuntimeConfig
from aiokv_asgi import KvRoutes

geometry = CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16)
layers = [torch.zeros(2, 64, 16, 4, 32) for _ in range(2)]
kv = KVRuntime(RuntimeConfig(geometry=geometry, gpu_blocks=64, cpu_bytes="8MiB"), arenas={"full": layers})
kv_routes = KvRoutes(kv)  # admin_token=read_token(...) adds /kv/snapshot, /kv/audit and /kv/reset

app = FastAPI(lifespan=kv_routes.lifespan)  # opens the runtime with the app, closes it with the app
app.router.routes.extend(kv_routes.routes)  # /metrics, /health, /ready, /live


@app.post("/generate")
async def generate(request_id: str, prompt: list[int]) -> dict[str, int]:
    """Your forward pass goes where the comment is."""
    async with kv.acquire(request_id, prompt, reserve_tokens=32, timeout=5.0) as lease:
        # compute prompt[lease.prefix_tokens:] into lease.block_table("full") here
        lease.confirm(len(prompt))
        return {"gpu": lease.hit.gpu_tokens, "cpu": lease.hit.cpu_tokens, "computed": lease.hit.compute_tokens}
