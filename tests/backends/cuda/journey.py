"""A journey on a driver of the version given, for a process of its own: `python journey.py 12080`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fakecuda import FakeDriver


def main(version: int) -> None:
    fake = FakeDriver.load(version)
    fake.adversaries()

    from tests.backends.cuda.rig import Rig
    from tests.backends.support import end_of, load, store

    rig = Rig(fake)
    tensor = rig.dense(2, 9, 16)
    backend = rig.open({"full": [tensor]}, gpu_blocks=9)
    before = tensor.blocks(axis=1)
    end_of(backend.submit(store({1: 5, 2: 6, 7: 0})))
    end_of(backend.submit(load({5: 3, 0: 4})))
    after = tensor.blocks(axis=1)
    words = "as they went" if (after[3], after[4]) == (before[1], before[7]) else "and are wrong"
    api = next(name for name in ("cuMemcpyBatchAsync", "cuMemcpyAsync") if fake.calls(name))
    rig.close()
    print(f"driver {rig.driver.version}, copies by {api}, {words}, {len(fake.violations())} violations")


if __name__ == "__main__":
    main(int(sys.argv[1]))
