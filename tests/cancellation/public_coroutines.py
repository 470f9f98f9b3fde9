"""Which coroutines the public API has: found in the API itself, so that a new one cannot be forgotten.

Public is what `aiokv.__all__` names, and what the methods of those classes return. A coroutine is whatever may suspend
its caller: a coroutine function, an async generator, an async context manager, a method that returns an object that is
awaited, entered or iterated, and the methods by which that object is; a function that runs an event loop.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

import aiokv

__all__ = ["find_public_coroutines"]

_SUSPENDING: Final = frozenset({"__await__", "__aenter__", "__aexit__", "__anext__", "aclose", "asend", "athrow"})


def find_public_coroutines() -> Mapping[str, types.CodeType]:
    """By name, the code that runs when one is called or awaited."""
    named = [getattr(aiokv, name) for name in aiokv.__all__]
    found = {function.__name__: function.__code__ for function in named if inspect.isfunction(function)}
    waiting = [cls for cls in named if inspect.isclass(cls)]
    known = set(waiting)
    while waiting:
        cls = waiting.pop()
        for name, function in _methods(cls):
            returned = _returned(function)
            if _suspends(name, function) or _may_be_awaited(returned):
                found[f"{cls.__name__}.{name}"] = inspect.unwrap(function).__code__
            if _may_be_awaited(returned) and returned not in known:
                known.add(returned)
                waiting.append(returned)
    return found


def _methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, member in vars(cls).items():
        is_public = not name.startswith("_") or name in _SUSPENDING
        if is_public and isinstance(member, types.FunctionType):
            yield name, member


def _suspends(name: str, function: types.FunctionType) -> bool:
    inner = inspect.unwrap(function)
    return name in _SUSPENDING or inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)


def _returned(function: types.FunctionType) -> Any:  # noqa: ANN401  # an annotation may be anything
    scope = {name: getattr(aiokv, name) for name in aiokv.__all__} | {"Any": Any}
    return typing.get_type_hints(function, localns=scope).get("return")


def _may_be_awaited(returned: object) -> bool:
    is_ours = inspect.isclass(returned) and returned.__module__.startswith("aiokv.")
    return is_ours and not _SUSPENDING.isdisjoint(dir(returned)) and returned is not aiokv.KVRuntime
