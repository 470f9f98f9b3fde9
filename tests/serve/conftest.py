"""Models for the server's tests: the engine's tiny random one, loaded as a served one, and the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from aiokv_engine.model_file import LoadedModel, load_model
from aiokv_engine.weights import find_weights
from tests.engine.cases import Gate
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf").path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    return load_model(tiny_path)


@pytest.fixture(scope="session")
def real_path() -> Path:
    return find_weights(console=Console(stderr=True))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds the forward steps while it is closed."""
    return Gate(monkeypatch)
