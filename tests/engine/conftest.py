"""Models for the engine's tests: a tiny random one, and the real one fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from aiokv_engine.gguf import GgufFile, read_gguf
from aiokv_engine.llama import LlamaModel
from aiokv_engine.llama_gguf import load_llama
from aiokv_engine.selfcheck import Comparison, check_numerics
from aiokv_engine.weights import find_weights
from tests.engine.cases import Gate
from tests.engine.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_file(tiny: TinyModel) -> GgufFile:
    return read_gguf(tiny.path)


@pytest.fixture(scope="session")
def tiny_llama(tiny_file: GgufFile) -> LlamaModel:
    return load_llama(tiny_file)


@pytest.fixture(scope="session")
def comparison(tiny_llama: LlamaModel) -> Comparison:
    """How strictly this CPU lets results be compared."""
    return check_numerics(tiny_llama)


@pytest.fixture(scope="session")
def real_path() -> Path:
    return find_weights(console=Console(stderr=True))


@pytest.fixture(scope="session")
def real_file(real_path: Path) -> GgufFile:
    return read_gguf(real_path)


@pytest.fixture(scope="session")
def real_llama(real_file: GgufFile) -> LlamaModel:
    return load_llama(real_file)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)
