"""What the benchmarks are tested on: a fake peer, made as a test wants it, and the fake driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.bench.fake_peer import AGES, FAKE, GREET, Fake
from tests.fakecuda import FakeDriver
from tests.fakecuda.fixtures import fake_driver

__all__ = ["fake_driver"]


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Fake]:
    def make(
        *,
        name: str = "peer",
        greeting: str = GREET,
        on_open: str = "say(opened=True)",
        on_rounds: str = f"say(ns=[{AGES}] * question['rounds'])",
        on_memory: str = "os._exit(4)",
    ) -> Fake:
        made = Fake(path=tmp_path / name, log=tmp_path / "log")
        parts = {"greeting": greeting, "on_open": on_open, "on_rounds": on_rounds, "on_memory": on_memory}
        made.path.write_text(FAKE.format(python=sys.executable, log=str(made.log), name=name, **parts))
        made.path.chmod(0o755)
        return made

    return make


@pytest.fixture
def fake_device(fake_driver: FakeDriver) -> Iterator[FakeDriver]:
    """The fake driver, which a command finds by itself; a test that ends with violations fails."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'aiokv[test]'")
    yield fake_driver
    assert fake_driver.violations() == []
