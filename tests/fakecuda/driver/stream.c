/* Streams: handles, properties, waits.
 *
 * A handle names a slot and its generation, so that a handle from before a destruction or a reset is refused instead of
 * followed. A slot's sequence goes on when it is used again: clocks of the past stay true. */
#include "fake.h"

#include <stdlib.h>

static const uint64_t HANDLE_MARK = 0x05ULL << 56;

CUstream handle_of(int slot) {
    if (slot < FIRST_STREAM)
        return (CUstream)(uintptr_t)(slot == LEGACY ? 0 : ADDRESS_PER_THREAD);
    return (CUstream)(uintptr_t)(HANDLE_MARK | (uint64_t)fake.streams[slot]->generation << 16 | (uint64_t)slot);
}

int slot_of(CUstream handle) {
    uint64_t value = (uintptr_t)handle;
    if (value <= ADDRESS_PER_THREAD)
        return value == ADDRESS_PER_THREAD ? PER_THREAD : LEGACY;
    int slot = value & 0xffff;
    if (slot < FIRST_STREAM || slot >= fake.num_slots || !fake.streams[slot]->live || handle_of(slot) != handle)
        return -1;
    return slot;
}

bool is_blocking(int slot) { return !(fake.streams[slot]->flags & STREAM_NON_BLOCKING); }

/* Only the slots are made; what they were before is kept, see above. */
void init_streams(void) {
    while (fake.num_slots < FIRST_STREAM)
        fake.streams[fake.num_slots++] = calloc(1, sizeof(struct stream));
    fake.streams[LEGACY]->live = fake.streams[PER_THREAD]->live = true;
}

void forget_streams(void) {
    for (int slot = 0; slot < fake.num_slots; slot++) {
        struct stream *stream = fake.streams[slot];
        stream->live = slot < FIRST_STREAM;
        stream->closing = stream->held = false;
        stream->fail_next = 0;
        stream->free_at_ns = 0;
    }
}

void release_slot_if_drained(int slot) {
    struct stream *stream = fake.streams[slot];
    if (stream->closing && !stream->head) {
        stream->closing = stream->held = false;
        stream->fail_next = 0;
    }
}

static int free_slot(void) {
    for (int slot = FIRST_STREAM; slot < fake.num_slots; slot++)
        if (!fake.streams[slot]->live && !fake.streams[slot]->closing)
            return slot;
    if (fake.num_slots == MAX_STREAMS)
        return -1;
    fake.streams[fake.num_slots] = calloc(1, sizeof(struct stream));
    return fake.num_slots++;
}

static CUresult create_stream(CUstream *handle, unsigned flags, int priority) {
    if (!handle || flags > STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    int slot = free_slot();
    if (slot < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct stream *stream = fake.streams[slot];
    stream->live = true;
    stream->generation++;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->device = device_of(current_context());
    stream->free_at_ns = 0;
    for (int other = 0; other < MAX_STREAMS; other++)
        stream->clock[other] = 0;
    *handle = handle_of(slot);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
    ENTER(cuStreamCreate);
    return create_stream(handle, flags, 0);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
    ENTER(cuStreamCreateWithPriority);
    return create_stream(handle, flags, priority);
}

/* Queued work runs on; the slot is free again after it. */
EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(cuStreamDestroy_v2);
    int slot = slot_of(handle);
    if (slot < FIRST_STREAM)
        return CUDA_ERROR_INVALID_HANDLE;
    struct stream *stream = fake.streams[slot];
    if (stream->capture) {
        invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    stream->live = false;
    stream->closing = stream->head != NULL;
    return CUDA_SUCCESS;
}

/* What every submission begins with. `captured`: the work goes into a graph, not to the device. */
CUresult prepare_submission(CUstream handle, int *slot, bool *captured) {
    *slot = slot_of(handle);
    if (*slot >= 0)
        wait_for_room(*slot);
    *slot = slot_of(handle);
    return *slot < 0 ? CUDA_ERROR_INVALID_HANDLE : capture_work(*slot, captured);
}

/* What is asked of a stream as a whole cannot be asked of one that captures. */
static CUresult open_stream(CUstream handle, int *slot) {
    *slot = slot_of(handle);
    if (*slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    struct capture *capture = fake.streams[*slot]->capture;
    if (!capture)
        return CUDA_SUCCESS;
    invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER(cuStreamQuery);
    int slot;
    CUresult result = open_stream(handle, &slot);
    if (result)
        return result;
    return fake.streams[slot]->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(cuStreamSynchronize);
    int slot;
    CUresult result = open_stream(handle, &slot);
    return result ? result : wait_until_complete(slot, fake.streams[slot]->sequence, "cuStreamSynchronize");
}

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    ENTER(cuStreamGetPriority);
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = fake.streams[slot]->priority;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    ENTER(cuStreamGetFlags);
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = fake.streams[slot]->flags;
    return CUDA_SUCCESS;
}

static CUresult context_of_stream(CUstream handle, CUcontext *context) {
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = slot < FIRST_STREAM ? current_context() : context_of(fake.streams[slot]->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    ENTER(cuStreamGetCtx);
    return context_of_stream(handle, context);
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, void **green_context) {
    ENTER(cuStreamGetCtx_v2);
    if (green_context)
        *green_context = NULL;
    return context_of_stream(handle, context);
}

EXPORT CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    ENTER(cuStreamGetDevice);
    CUcontext context;
    CUresult result = context_of_stream(handle, &context);
    if (!result && device)
        *device = device_of(context);
    return result ? result : device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
