"""What a slot of vLLM's GPU pool costs, for `aiokv bench compare`: run by the peer's interpreter, one pool a process.

Imports nothing of aiokv. Asked `{"memory": SLOTS}` on stdin it answers one JSON line on stdout, how much resident
memory has grown per slot: by a `BlockPool` of so many blocks, whose `KVCacheBlock`s are all free; and with a hash in
every one of them and an entry in `cached_block_hash_to_block`, as requests leave them. Whatever else is printed goes
to stderr.
"""

# ruff: noqa: ANN401, E402  # vLLM's types are not known where this is checked; it prints while it is imported

import gc
import json
import os
import platform
import sys
import traceback
from typing import Any, Final

_ANSWERS: Final = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import numpy as np
import psutil
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK: Final = 16
VOCABULARY: Final = 50_000
PROMPT_BLOCKS: Final = 8_192
HASHER: Final = get_request_block_hasher(BLOCK, sha256)  # vLLM's default algorithm


def new_pool(slots: int) -> Any:
    """Its null block is none of the slots."""
    return BlockPool(slots + 1, enable_caching=True, hash_block_size=BLOCK)


def fill(pool: Any) -> int:
    """Requests with new prompts come and go until every slot holds a block; how many can be found then."""
    source = np.random.default_rng(0)
    left = pool.get_num_free_blocks()
    while left:
        blocks = min(left, PROMPT_BLOCKS)
        serve(pool, source.integers(VOCABULARY, size=blocks * BLOCK).tolist())
        left -= blocks
    return len(pool.cached_block_hash_to_block)


def serve(pool: Any, tokens: list[int]) -> None:
    """A request of whole blocks: they are allocated, registered under their hashes, and freed with their tail first."""
    request = Request("a prompt", tokens, SamplingParams(max_tokens=1), None, block_hasher=HASHER)
    blocks = pool.get_new_blocks(len(tokens) // BLOCK)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK, 0)
    pool.free_blocks(reversed(blocks))


def resident_bytes() -> int:
    """Of this process, when nobody holds garbage."""
    gc.collect()
    resident: int = psutil.Process().memory_info().rss
    return resident


def measure(slots: int) -> dict[str, float]:
    """Bytes by which the process has grown per slot, for a pool of empty slots, then for a full one.

    A small pool comes before, for what the interpreter and vLLM take once, and stays: what it gave back would be taken
    again and not counted.
    """
    first = new_pool(2 * PROMPT_BLOCKS)
    fill(first)
    before = resident_bytes()
    pool = new_pool(slots)
    empty = resident_bytes()
    resident = fill(pool)
    full = resident_bytes()
    del first
    return {
        "slots": slots,
        "resident": resident,
        "bytes_per_empty_slot": round((empty - before) / slots, 2),
        "bytes_per_resident_slot": round((full - before) / slots, 2),
    }


def answer(**values: object) -> None:
    """One line."""
    print(json.dumps(values), file=_ANSWERS, flush=True)


def main() -> None:
    """Answer what is asked until stdin ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    init_none_hash(sha256)
    answer(system=f"vllm {vllm.__version__}", python=platform.python_version())
    for line in sys.stdin:
        try:
            answer(memory=measure(json.loads(line)["memory"]))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
