"""Renders the chat template that a GGUF file carries.

The template is foreign code: it runs in jinja's immutable sandbox, which keeps it away from Python's internals. The
sandbox does not bound its running time, so a hostile template may still hang: load model files you trust.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Never, TypeAlias, final

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aiokv.errors import UsageError
from aiokv_engine.gguf import GgufFile

__all__ = ["ChatTemplate", "Message"]

Message: TypeAlias = Mapping[str, str]  # "role" ("system", "user" or "assistant") and "content"


@final
class ChatTemplate:
    """Turns a conversation into the text of a prompt that asks the model for its next message."""

    __slots__ = ("_specials", "_template")

    def __init__(self, file: GgufFile) -> None:
        """Compiles the template of `file`; raises `GgufError` if the file has none or a broken one."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=_format_now)
        try:
            self._template = environment.from_string(file.require("tokenizer.chat_template", str))
        except (TemplateError, RecursionError) as error:
            raise file.error(f"its chat template is broken: {error}") from error
        self._specials = _special_tokens(file)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the prompt for the assistant's answer to `messages`; raises `UsageError` if the template refuses."""
        variables: dict[str, Any] = {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
        try:
            return self._template.render(variables | self._specials)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the model's chat template cannot render these messages: {error}") from error


def _special_tokens(file: GgufFile) -> dict[str, str]:
    """Returns the texts that templates know as `bos_token` and `eos_token`, as far as the file names them."""
    tokens = file.strings("tokenizer.ggml.tokens")
    found = {}
    for name in ("bos", "eos"):
        token_id = file.get(f"tokenizer.ggml.{name}_token_id", default=len(tokens))
        if 0 <= token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


def _refuse(message: str) -> Never:
    raise TemplateError(message)


def _format_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
