"""The admin token: read from a file or the environment, never from the command line, which every process can see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiokv import ConfigError

__all__ = ["TOKEN_VARIABLE", "check_token", "read_token"]

TOKEN_VARIABLE: Final = "AIOKV_ADMIN_TOKEN"
_MIN_LENGTH: Final = 16
_MAX_FILE_BYTES: Final = 4096
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
"""Printable ASCII without spaces: what a header carries unchanged."""


def read_token(*, file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token in `file`, else that in `AIOKV_ADMIN_TOKEN`; None if there is neither, which switches the routes off.

    Raises:
        ConfigError: the file cannot be read or is too large, or the token is empty, short or not printable. It does not
            show the token.
    """
    if file is not None:
        return check_token(_read_file(file), origin=str(file))
    if TOKEN_VARIABLE in environ:
        return check_token(environ[TOKEN_VARIABLE], origin=TOKEN_VARIABLE)
    return None


def check_token(token: str, *, origin: str) -> str:
    """The token, without white space around it."""
    token = token.strip()
    if len(token) < _MIN_LENGTH or not _TOKEN.fullmatch(token):
        raise ConfigError(f"{origin}: an admin token has at least {_MIN_LENGTH} printable ASCII characters, no spaces")
    return token


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as secret:
            content = secret.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the admin token from {file}: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:  # a part of it would be another token than the one that is meant
        raise ConfigError(f"{file}: an admin token takes at most {_MAX_FILE_BYTES} bytes")
    return content.decode("ascii", "replace")
