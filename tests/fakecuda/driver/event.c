/* Events: a recording is a place in the sequence of a stream, and its vector clock. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t HANDLE_MARK = 0x0eULL << 56;
enum { NONE = 0 }; /* event 0 is never handed out */

static CUevent handle_of_event(uint32_t index) {
    return (CUevent)(uintptr_t)(HANDLE_MARK | (uint64_t)(fake.events[index].generation & 0xffffff) << 32 | index);
}

struct event *event_of(CUevent handle) {
    uint32_t index = (uint32_t)(uintptr_t)handle;
    if (index == NONE || index >= fake.num_events || !fake.events[index].live || handle_of_event(index) != handle)
        return NULL;
    return &fake.events[index];
}

static uint32_t new_index(void) {
    if (fake.free_event == NONE) {
        uint32_t grown = fake.num_events ? 2 * fake.num_events : 1024;
        fake.events = realloc(fake.events, sizeof *fake.events * grown);
        memset(fake.events + fake.num_events, 0, sizeof *fake.events * (grown - fake.num_events));
        for (uint32_t index = grown - 1; index >= (fake.num_events ? fake.num_events : 1); index--) {
            fake.events[index].next_free = fake.free_event;
            fake.free_event = index;
        }
        fake.num_events = grown;
    }
    uint32_t index = fake.free_event;
    fake.free_event = fake.events[index].next_free;
    return index;
}

static void give_back(struct event *event) {
    event->live = event->recorded = false;
    event->generation++;
    event->next_free = fake.free_event;
    fake.free_event = (uint32_t)(event - fake.events);
}

void forget_events(void) {
    for (uint32_t index = 1; index < fake.num_events; index++)
        if (fake.events[index].live)
            give_back(&fake.events[index]);
}

/* The event may have been destroyed or recorded again since. */
void note_recorded(uint32_t index, uint64_t record, int64_t when_ns) {
    if (fake.events[index].record == record)
        fake.events[index].done_ns = when_ns;
}

bool event_is_done(const struct event *event) {
    return !event->recorded || is_complete(event->slot, event->sequence);
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
    ENTER(cuEventCreate);
    if (!handle || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t index = new_index();
    struct event *event = &fake.events[index];
    event->live = true;
    event->flags = flags;
    event->done_ns = 0;
    event->record++;
    event->capture_id = 0;
    event->device = device_of(current_context());
    *handle = handle_of_event(index);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER(cuEventDestroy_v2);
    struct event *event = event_of(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    give_back(event);
    return CUDA_SUCCESS;
}

static void remember_clock(struct event *event, const struct stream *stream) {
    if (event->clock_length < fake.num_slots) {
        event->clock = realloc(event->clock, sizeof *event->clock * (size_t)fake.num_slots);
        event->clock_length = fake.num_slots;
    }
    memset(event->clock, 0, sizeof *event->clock * (size_t)event->clock_length);
    memcpy(event->clock, stream->clock, sizeof *event->clock * (size_t)fake.num_slots);
}

static CUresult record(CUevent handle, CUstream stream_handle) {
    int slot;
    bool captured;
    CUresult result = prepare_submission(stream_handle, &slot, &captured);
    struct event *event = event_of(handle);
    if (result || !event)
        return result ? result : CUDA_ERROR_INVALID_HANDLE;
    struct stream *stream = fake.streams[slot];
    if (slot >= FIRST_STREAM && stream->device != event->device)
        return CUDA_ERROR_INVALID_HANDLE;
    if (captured) {
        capture_record(slot, event);
        return CUDA_SUCCESS;
    }
    struct op *op = new_op(OP_RECORD, 0);
    op->event = (uint32_t)(event - fake.events);
    op->event_record = ++event->record;
    event->recorded = true;
    event->capture_id = 0;
    event->slot = slot;
    event->sequence = stream->sequence + 1;
    event->done_ns = 0;
    result = submit(slot, op);
    remember_clock(event, stream);
    return result;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(cuEventRecord);
    return record(event, stream);
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    ENTER(cuEventRecordWithFlags);
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : record(event, stream);
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    ENTER(cuEventQuery);
    struct event *event = event_of(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_captured_event(event);
    return result ? result : event_is_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    ENTER(cuEventSynchronize);
    struct event *event = event_of(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_captured_event(event);
    if (result || event_is_done(event))
        return result;
    return wait_until_complete(event->slot, event->sequence, "cuEventSynchronize");
}

/* The device waits, not the host: for the recording as it is now, whatever is recorded later. */
EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
    ENTER(cuStreamWaitEvent);
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    int slot = slot_of(handle);
    if (slot >= 0)
        wait_for_room(slot);
    slot = slot_of(handle);
    struct event *event = event_of(event_handle);
    if (slot < 0 || !event)
        return CUDA_ERROR_INVALID_HANDLE;
    bool captured;
    CUresult result = capture_wait(slot, event, &captured);
    if (result || captured || !event->recorded || event->slot == slot)
        return result;
    struct stream *stream = fake.streams[slot];
    for (int i = 0; i < event->clock_length; i++)
        if (stream->clock[i] < event->clock[i])
            stream->clock[i] = event->clock[i];
    struct op *op = new_op(OP_WAIT, 0);
    add_dependency(op, event->slot, event->sequence);
    return submit(slot, op);
}

static CUresult elapsed(float *milliseconds, CUevent from_handle, CUevent to_handle) {
    struct event *from = event_of(from_handle), *to = event_of(to_handle);
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!from || !to || !from->recorded || !to->recorded || ((from->flags | to->flags) & EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_is_done(from) || !event_is_done(to))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)(to->done_ns - from->done_ns) / 1e6f;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    ENTER(cuEventElapsedTime);
    return elapsed(milliseconds, from, to);
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to) {
    ENTER(cuEventElapsedTime_v2);
    return elapsed(milliseconds, from, to);
}
