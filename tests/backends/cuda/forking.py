"""A backend in a forked child, for a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fakecuda import FakeDriver

WATCHED = ("cuCtxPushCurrent_v2", "cuEventQuery", "cuEventRecord", "cuMemcpyBatchAsync", "cuStreamDestroy_v2")


def main() -> None:
    fake = FakeDriver.load()

    from aiokv.errors import UsageError
    from aiokv.model.ids import Direction
    from tests.backends.cuda.rig import Rig
    from tests.backends.support import end_of, store

    rig = Rig(fake)
    backend = rig.open({"full": [rig.dense(4, 16)]}, gpu_blocks=4)
    fence = backend.fence(0)
    fake.hold()
    event = backend.submit(store({1: 0}))
    before = [fake.calls(api) for api in WATCHED]
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], object]] = [
            lambda: backend.submit(store({1: 1})),
            lambda: backend.fence(0),
            lambda: backend.wait(0, fence),
            lambda: backend.eta_seconds(Direction.LOAD, 1),
            lambda: backend.close(deadline_s=1.0),
            event.query,
        ]
        refused = 0
        for call in calls:
            try:
                call()
            except UsageError:
                refused += 1
        del fence
        quiet = [fake.calls(api) for api in WATCHED] == before
        print(f"child: {refused} refused, event lost or refused, {'no' if quiet else 'a'} driver call", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    fake.release()
    print(f"parent: {end_of(event).value}, closed {backend.close(deadline_s=10.0)}")


if __name__ == "__main__":
    main()
