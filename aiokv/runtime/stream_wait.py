"""`lease.wait_on(stream)`: compute of a lease is queued behind its loads on the device, while they still run.

Rules
- All loads of the lease are handed to the backend first, before others that wait for room in the queue of their stream:
  a stream can only wait for what has been submitted.
- Until the lease is ready nobody knows whether its loads end well. If one does not, the lease is planned again: its
  blocks change, and what kernels have made of them is void.
"""

from __future__ import annotations

from aiokv.core.inflight import TransferState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import InvalidTransition, UsageError
from aiokv.runtime.offload import Offloader

__all__ = ["wait_on"]


def wait_on(offloader: Offloader, record: LeaseRecord, *, stream: object) -> None:
    """See `Lease.wait_on`."""
    if offloader.is_quiet:
        raise UsageError("no stream can be made to wait inside quiesce(): wait before the capture")
    fencing, name = offloader.fencing, offloader.backend.name
    if not fencing.is_needed:
        record.check_ready(f"be waited for on a stream of backend {name!r}, which has none: await ready()")
        return
    fencing.check_stream(stream)  # before it is noted: its fences are asked for when the lease ends
    _submit_loads(offloader, record)
    if not offloader.transfers.settle_fences():
        raise UsageError("no stream can be made to wait while the engine's streams are being captured or refused")
    if stream not in record.streams:
        record.streams.append(stream)
    if record.waiting:
        _wait_for_loads(offloader, record, stream=stream)
    fencing.make_wait(stream, record)


def _submit_loads(offloader: Offloader, record: LeaseRecord) -> None:
    """Name all blocks, and hand over all loads; those of a new plan too, where the backend refuses some."""
    while True:
        offloader.core.block_ids(record, group=0)
        offloader.progress()
        if record.failed or record.state is LeaseState.HELD:
            raise _failed(record)
        if not offloader.transfers.submit_now(record.waiting):
            return


def _wait_for_loads(offloader: Offloader, record: LeaseRecord, *, stream: object) -> None:
    """Let `stream` wait for the copies of all loads of a lease; those that are over are only registered still."""
    for transfer in offloader.core.transfers():
        if transfer.transfer_id not in record.waiting:
            continue
        event = offloader.transfers.find_event(transfer.transfer_id)
        if event is not None:
            offloader.backend.wait(stream, event)
        elif transfer.state is not TransferState.DONE:
            raise _failed(record)


def _failed(record: LeaseRecord) -> InvalidTransition:
    return InvalidTransition(record.name, state="being planned again after a failed load", event="be waited for")
