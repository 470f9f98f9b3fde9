"""Configuration from outside the program: command-line argument > `AIOKV_*` environment > TOML file > default.

Every value is typed where it enters: the environment's "false" is false and its "1024" a number, while a TOML file must
already use the right type. A key that does not exist is an error that names the one that may be meant, so that a
misspelt setting never goes unnoticed. The result is a frozen value; nothing here touches torch or a device.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from aiokv.core.hints import HINT_QUOTA
from aiokv.errors import ConfigError
from aiokv.model.numbers import is_number, is_whole
from aiokv.model.plan import Checksum, StorePolicy

__all__ = [
    "ENVIRONMENT_PREFIX",
    "LoadedSettings",
    "SettingSource",
    "Settings",
    "load_settings",
    "load_settings_with_sources",
    "parse_bool",
    "parse_bytes",
]

ENVIRONMENT_PREFIX: Final = "AIOKV_"

_SWITCHES: Final = frozenset({"AIOKV_ADMIN_TOKEN", "AIOKV_CACHE_DIR", "AIOKV_DEBUG", "AIOKV_PEER_PYTHON"})
"""Variables with the prefix that steer the command line and are no settings."""

_Member = TypeVar("_Member", bound=Enum)

_BACKENDS: Final = ("auto", "cuda", "host")
_CPU_SIZES: Final = frozenset({"cpu_blocks", "cpu_bytes"})
_MAX_BLOCKS: Final = 2**31 - 1  # slot ids are int32
_MAX_BYTES: Final = 2**63 - 1
_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_UNITS: Final = {
    unit.lower(): factor
    for exponent, prefix in enumerate("KMGT", start=1)
    for unit, factor in ((f"{prefix}iB", 1024**exponent), (f"{prefix}B", 1000**exponent))
} | {"": 1, "b": 1}
_BOOLEANS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may set without writing code. `RuntimeConfig` adds the geometry, which the model dictates.

    `cpu_blocks` and `cpu_bytes` are two ways to say one size: at most one of them is given; neither means no CPU tier.
    `gpu_blocks` counts slots, the null block included; `cpu_bytes` is in bytes; `watermark` is a fraction of the GPU
    pool, `hint_quota` one of each pool; a lease that is held longer than `lease_age_limit_s` seconds is reported, none
    without.
    """

    gpu_blocks: int = 1024
    cpu_blocks: int | None = None
    cpu_bytes: int | None = None
    store_policy: StorePolicy = StorePolicy.EAGER
    watermark: float = 0.01
    checksum: Checksum = Checksum.OFF
    backend: str = "auto"
    lease_age_limit_s: float | None = None
    hint_quota: float = HINT_QUOTA

    def __post_init__(self) -> None:
        """Refuse what no pool could be built from; raises `ConfigError`."""
        _check_whole("gpu_blocks", self.gpu_blocks, allowed=range(2, _MAX_BLOCKS + 1))
        if self.cpu_blocks is not None:
            _check_whole("cpu_blocks", self.cpu_blocks, allowed=range(_MAX_BLOCKS + 1))
        if self.cpu_bytes is not None:
            _check_whole("cpu_bytes", self.cpu_bytes, allowed=range(_MAX_BYTES + 1))
        if self.cpu_blocks is not None and self.cpu_bytes is not None:
            raise ConfigError("cpu_blocks and cpu_bytes are two ways to say the same size: give one of them")
        if not isinstance(self.store_policy, StorePolicy):
            raise ConfigError(f"store_policy must be a StorePolicy, not {self.store_policy!r}")
        _check_number("watermark", self.watermark)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be at least 0 and less than 1, not {self.watermark!r}")
        _check_number("hint_quota", self.hint_quota)
        if not 0.0 <= self.hint_quota <= 1.0:
            raise ConfigError(f"hint_quota must be at least 0 and at most 1, not {self.hint_quota!r}")
        if not isinstance(self.checksum, Checksum):
            raise ConfigError(f"checksum must be a Checksum, not {self.checksum!r}")
        if self.backend not in _BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, not {self.backend!r}")
        if self.lease_age_limit_s is not None:
            _check_seconds("lease_age_limit_s", self.lease_age_limit_s)


class SettingSource(StrEnum):
    """Where the value of one setting comes from; a later one overrides an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    ARGUMENT = "argument"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """The effective settings, and for each field the layer that decided it (`--print-config` shows both)."""

    settings: Settings
    sources: Mapping[str, SettingSource]


def load_settings(*, file: Path | None, environ: Mapping[str, str], arguments: Mapping[str, object]) -> Settings:
    """Merge the layers into `Settings`.

    An argument that is `None` was not given. Within one layer `cpu_blocks` and `cpu_bytes` exclude each other; given in
    a higher layer, one of them replaces the other of a lower one.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong type or range; it names where the value came from.
    """
    return load_settings_with_sources(file=file, environ=environ, arguments=arguments).settings


def load_settings_with_sources(
    *, file: Path | None, environ: Mapping[str, str], arguments: Mapping[str, object]
) -> LoadedSettings:
    """`load_settings`, with the source of every value beside it."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_KEYS, SettingSource.DEFAULT)
    layers = (
        (SettingSource.FILE, {} if file is None else _read_file(file)),
        (SettingSource.ENVIRONMENT, _read_environment(environ)),
        (SettingSource.ARGUMENT, _read_arguments(arguments)),
    )
    for source, layer in layers:
        if _CPU_SIZES & layer.keys():
            for key in _CPU_SIZES & values.keys():
                del values[key]
                sources[key] = SettingSource.DEFAULT
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return LoadedSettings(settings=Settings(**values), sources=sources)


def parse_bytes(value: str | int) -> int:
    """Bytes of a size such as `"8GiB"`, `"512 MB"`, `"1.5GiB"`, `"4096"` or `4096`.

    KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB powers of 1000; case is ignored.

    Raises:
        ConfigError: not such a size, negative, no whole number of bytes, or over 2**63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f'a size is a number of bytes or a text such as "8GiB", not {value!r}')
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{value!r} is not a size: use bytes or a unit, as in 512MiB, 8GiB or 16GB")
    size = Fraction(match[1]) * _UNITS[match[2].lower()]
    if size.denominator != 1:
        raise ConfigError(f"{value!r} is not a whole number of bytes")
    if size > _MAX_BYTES:
        raise ConfigError(f"{value!r} is more than 2**63 - 1 bytes")
    return int(size)


def parse_bool(text: str) -> bool:
    """Truth of an environment value: 1/true/yes/on or 0/false/no/off, in any case; anything else is a `ConfigError`."""
    truth = _BOOLEANS.get(text.strip().lower())
    if truth is None:
        raise ConfigError(f"{text!r} is neither true nor false")
    return truth


def _read_file(file: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except ValueError as error:  # tomllib's own error, a number too long for Python, or no UTF-8
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    _refuse_unknown(raw, known=_KEYS, origin=str(file))
    return {key: _read_value(key, value, origin=f"{key} in {file}") for key, value in raw.items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    raw = {
        name: text for name, text in environ.items() if name.startswith(ENVIRONMENT_PREFIX) and name not in _SWITCHES
    }
    keys = {f"{ENVIRONMENT_PREFIX}{key.upper()}": key for key in _KEYS}
    _refuse_unknown(raw, known=keys, origin="the environment")
    return {keys[name]: _read_value(keys[name], _typed(keys[name], text), origin=name) for name, text in raw.items()}


def _read_arguments(arguments: Mapping[str, object]) -> dict[str, Any]:
    raw = {key: value for key, value in arguments.items() if value is not None}
    _refuse_unknown(raw, known=_KEYS, origin="the arguments")
    return {key: _read_value(key, value, origin=f"--{key.replace('_', '-')}") for key, value in raw.items()}


def _refuse_unknown(keys: Iterable[str], *, known: Collection[str], origin: str) -> None:
    for key in keys:
        if key not in known:
            close = "".join(f": did you mean {name!r}?" for name in _find_close(key, known=known))
            raise ConfigError(f"unknown setting {key!r} in {origin}{close}")


def _find_close(key: str, *, known: Collection[str]) -> list[str]:
    """The known name that `key` may be a misspelling of, or none; the prefix, which all share, makes nothing alike."""
    by_word = {name.removeprefix(ENVIRONMENT_PREFIX).lower(): name for name in known}
    words = difflib.get_close_matches(key.removeprefix(ENVIRONMENT_PREFIX).lower(), by_word, n=1)
    return [by_word[word] for word in words]


def _read_value(key: str, value: object, *, origin: str) -> object:
    """The value in the field's own type, valid taken by itself; `origin` is named in the error."""
    try:
        read = _CONVERTERS[key](value) if key in _CONVERTERS else value
        Settings(**{key: read})  # type: ignore[arg-type]  # a wrong type is what it refuses
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    return read


def _typed(key: str, text: str) -> object:
    """What an environment text means in TOML; a text that is no number stays one, for `Settings` to refuse."""
    try:
        return _NUMBERS[key](text.strip()) if key in _NUMBERS else text.strip()
    except ValueError:
        return text


def _read_size(value: object) -> int:
    return parse_bytes(value)  # type: ignore[arg-type]  # it refuses every other type itself


def _read_member(value: object, *, of: type[_Member], key: str) -> _Member:
    try:
        return of(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in of)
        raise ConfigError(f"{key} must be one of {known}, not {value!r}") from None


def _check_whole(key: str, value: object, *, allowed: range) -> None:
    if not is_whole(value):
        raise ConfigError(f"{key} must be a whole number, not {value!r}")
    if value not in allowed:
        raise ConfigError(f"{key} must be between {allowed.start} and {allowed.stop - 1}, not {value}")


def _check_number(key: str, value: object) -> None:
    if not is_number(value):
        raise ConfigError(f"{key} must be a number, not {value!r}")


def _check_seconds(key: str, value: object) -> None:
    if not is_number(value) or not 0.0 < value <= sys.float_info.max:
        raise ConfigError(f"{key} must be a number of seconds, more than zero, not {value!r}")


_KEYS: Final = tuple(field.name for field in fields(Settings))
_NUMBERS: Final[Mapping[str, Callable[[str], object]]] = {
    "gpu_blocks": int, "cpu_blocks": int, "watermark": float, "lease_age_limit_s": float, "hint_quota": float,
}  # fmt: skip
_CONVERTERS: Final[Mapping[str, Callable[[object], object]]] = {
    "cpu_bytes": _read_size,
    "store_policy": partial(_read_member, of=StorePolicy, key="store_policy"),
    "checksum": partial(_read_member, of=Checksum, key="checksum"),
}
