"""The demo's work, from a loaded model to a report.

Every answer is compared with one computed by the same engine, alone and with the same padding, in a runtime of its own
where nothing is ever reused.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from aiokv import ConfigError, KVRuntime
from aiokv_engine.demo_prompt import LongPrompt, Moment, Reference, answer_from_every_tier, ignore_moment
from aiokv_engine.demo_report import AuditFindings, Report
from aiokv_engine.demo_talks import Talks, compare_talks
from aiokv_engine.demo_texts import CONVERSATIONS, QUESTION, STORY
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.scheduler import Request
from aiokv_engine.selfcheck import Comparison, check_numerics
from aiokv_engine.serving import Sizes, open_serving

__all__ = ["STEPS", "DemoSettings", "run_demo"]

_LONGEST_PROMPT: Final = 1_100  # tokens; of a longer one the end is taken
_SHORTEST_PROMPT: Final = 600  # tokens; a shorter one gives no interleaved run
_SPARE_NUMERATOR: Final = 5
_SPARE_DENOMINATOR: Final = 4
STEPS: Final = 1 + 1 + len(CONVERSATIONS) + 4 + 1  # how often `run_demo` calls `step`


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demo runs with. `new_tokens` is the length of the long prompt's answer, `turn_tokens` of each turn's."""

    sizes: Sizes
    new_tokens: int = 24
    turn_tokens: int = 8
    torch_threads: int = 1


async def run_demo(
    loaded: LoadedModel,
    *,
    settings: DemoSettings,
    step: Callable[[str], None],
    observe: Callable[[Moment], None] = ignore_moment,
) -> Report:
    """Runs the whole demo; calls `step` with what begins, and `observe` in every run of the long prompt.

    Raises `ConfigError` for a model or sizes that the demo cannot run with.
    """
    request = _long_request(loaded, settings=settings)
    without_cpu = replace(settings.sizes, cpu_blocks=None)
    async with open_serving(loaded.llama, sizes=without_cpu, torch_threads=settings.torch_threads) as alone:
        step("checking this CPU's arithmetic")
        comparison = await alone.engine.run(partial(check_numerics, loaded.llama))
        _check_comparison(comparison, dtype=loaded.llama.dtype)
        step("answering the long prompt without a cache")
        answer = await alone.engine.generate(replace(request, salt="never reused"))
        talks = Talks(alone.engine, loaded=loaded, new_tokens=settings.turn_tokens)
        expected = await talks.hold_alone(step=step)
    async with open_serving(loaded.llama, sizes=settings.sizes, torch_threads=settings.torch_threads) as serving:
        reference = Reference(answer=answer, comparison=comparison)
        prompt = LongPrompt(serving, request=request, reference=reference, observe=observe)
        runs = await answer_from_every_tier(prompt, step=step)
        step("all conversations at once")
        talks = Talks(serving.engine, loaded=loaded, new_tokens=settings.turn_tokens)
        found = await talks.hold_together()
        await serving.kv.drain()
        return Report(
            model=loaded.name,
            dtype=str(loaded.llama.dtype).removeprefix("torch."),
            block_size=settings.sizes.block_size,
            gpu_blocks=settings.sizes.gpu_blocks,
            cpu_blocks=settings.sizes.cpu_blocks or 0,
            block_bytes=serving.block_bytes,
            runs=runs,
            comparison=comparison.value,
            concurrent=compare_talks(found, expected=expected),
            audit=_audit(serving.kv),
            answer=loaded.tokenizer.decode(answer.token_ids),
        )


def _long_request(loaded: LoadedModel, *, settings: DemoSettings) -> Request:
    """Returns the request for the long prompt, once it is clear that model and pools can take it."""
    text = loaded.template.render([{"role": "user", "content": f"{STORY}\n\n{QUESTION}"}])
    room = min(_LONGEST_PROMPT, loaded.llama.config.max_positions - settings.new_tokens)
    prompt = loaded.tokenizer.encode(text)[-max(1, room) :]
    if len(prompt) < _SHORTEST_PROMPT:
        raise ConfigError(
            f"the demo's prompt has {len(prompt)} tokens in this model, at least {_SHORTEST_PROMPT} needed"
        )
    sizes = settings.sizes
    gpu_blocks = -(-(len(prompt) + settings.new_tokens) // sizes.block_size) + 1
    cpu_blocks = len(prompt) // sizes.block_size
    if sizes.gpu_blocks < gpu_blocks or (sizes.cpu_blocks or 0) < cpu_blocks:
        raise ConfigError(f"the demo's prompt needs at least {gpu_blocks} GPU blocks and {cpu_blocks} CPU blocks")
    most = gpu_blocks * _SPARE_NUMERATOR // _SPARE_DENOMINATOR
    if sizes.gpu_blocks > most:
        raise ConfigError(f"the demo shows a GPU pool too small for its conversations: {most} GPU blocks at most")
    return Request(
        request_id="long prompt",
        token_ids=prompt,
        max_new_tokens=settings.new_tokens,
        stop_ids=loaded.tokenizer.stop_ids,
    )


def _check_comparison(comparison: Comparison, *, dtype: torch.dtype) -> None:
    """Refuses to compare by tolerance where rounding alone is larger than any tolerance that means something."""
    if comparison is Comparison.TOLERANCE and dtype is not torch.float32:
        raise ConfigError("this CPU does not repeat bfloat16 results bit for bit: use --dtype float32")


def _audit(kv: KVRuntime) -> AuditFindings:
    audit = kv.audit()
    return AuditFindings(
        leases=tuple(f"{lease.request_id} ({lease.state})" for lease in audit.leases),
        pins=tuple(f"{pin.blocks} {pin.tier.value} blocks by {pin.holder}" for pin in audit.pins),
        violations=audit.violations,
    )
