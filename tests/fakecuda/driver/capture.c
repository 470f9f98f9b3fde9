/* Stream capture, as far as it concerns those who do not capture: what is prohibited meanwhile, and what breaks it.
 *
 * Captured work goes nowhere: the graph is a handle that can only be destroyed. A stream that waits for an event of the
 * capture joins it and must be joined back before the end. */
#include "fake.h"

#include <stdlib.h>

static _Thread_local int thread_mode = MODE_GLOBAL;

static struct capture *capture_by_id(uint64_t id) {
    for (int slot = 0; id && slot < fake.num_slots; slot++)
        if (fake.streams[slot]->capture && fake.streams[slot]->capture->id == id)
            return fake.streams[slot]->capture;
    return NULL;
}

void invalidate(struct capture *capture) { capture->status = CAPTURE_INVALIDATED; }

static bool prohibits(const struct capture *capture) {
    if (thread_mode == MODE_RELAXED || capture->status != CAPTURE_ACTIVE)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return capture->mode != MODE_RELAXED;
    return thread_mode == MODE_GLOBAL && capture->mode == MODE_GLOBAL;
}

/* An unsafe call: refused, and every capture it is unsafe for is lost. */
CUresult check_capture(void) {
    CUresult result = CUDA_SUCCESS;
    for (int slot = 0; slot < fake.num_slots; slot++) {
        struct capture *capture = fake.streams[slot]->capture;
        if (!capture || capture->origin != slot || !prohibits(capture))
            continue;
        invalidate(capture);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* Work on the legacy stream would wait for every blocking stream, those that capture among them. */
static CUresult check_legacy_use(int slot) {
    for (int other = LEGACY + 1; slot == LEGACY && fake.captures && other < fake.num_slots; other++) {
        struct capture *capture = fake.streams[other]->capture;
        if (!capture || !is_blocking(other) || capture->mode == MODE_RELAXED)
            continue;
        invalidate(capture);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return CUDA_SUCCESS;
}

CUresult capture_work(int slot, bool *captured) {
    struct stream *stream = fake.streams[slot];
    *captured = stream->capture != NULL;
    if (!*captured)
        return check_legacy_use(slot);
    if (stream->capture->status == CAPTURE_INVALIDATED)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->nodes++;
    stream->captured_nodes++;
    return CUDA_SUCCESS;
}

void capture_record(int slot, struct event *event) {
    event->recorded = false;
    event->slot = slot;
    event->capture_id = fake.streams[slot]->capture->id;
    event->capture_nodes = fake.streams[slot]->captured_nodes;
}

/* Whether an event last recorded in a capture is asked for its state: it has none. */
CUresult check_captured_event(const struct event *event) {
    struct capture *capture = capture_by_id(event->capture_id);
    if (!event->capture_id)
        return CUDA_SUCCESS;
    if (capture)
        invalidate(capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

static void join(int slot, struct capture *capture) {
    fake.streams[slot]->capture = capture;
    fake.streams[slot]->captured_nodes = 0;
    fake.streams[slot]->unjoined = true;
    capture->members++;
}

CUresult capture_wait(int slot, const struct event *event, bool *captured) {
    struct stream *stream = fake.streams[slot];
    struct capture *capture = capture_by_id(event->capture_id);
    *captured = stream->capture || event->capture_id;
    if (!*captured)
        return check_legacy_use(slot);
    if (stream->capture && stream->capture->status == CAPTURE_INVALIDATED)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!capture) { /* the event is no part of this capture, or of one that is over */
        if (stream->capture)
            invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!stream->capture)
        join(slot, capture);
    if (stream->capture != capture) {
        invalidate(stream->capture);
        invalidate(capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    struct stream *other = fake.streams[event->slot];
    if (event->slot != slot && event->capture_nodes == other->captured_nodes)
        other->unjoined = false;
    return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, int mode) {
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (slot == LEGACY)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (fake.streams[slot]->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = calloc(1, sizeof *capture);
    capture->status = CAPTURE_ACTIVE;
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->origin = slot;
    capture->id = ++fake.next_id;
    join(slot, capture);
    fake.captures++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    ENTER(cuStreamBeginCapture_v2);
    return begin(handle, mode);
}

static bool leave_capture(struct capture *capture) {
    bool unjoined = false;
    for (int slot = 0; slot < fake.num_slots; slot++) {
        struct stream *stream = fake.streams[slot];
        if (stream->capture != capture)
            continue;
        unjoined |= slot != capture->origin && stream->unjoined;
        stream->capture = NULL;
    }
    fake.captures--;
    free(capture);
    return unjoined;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    ENTER(cuStreamEndCapture);
    int slot = slot_of(handle);
    if (slot < 0 || !graph)
        return slot < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    struct capture *capture = fake.streams[slot]->capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != slot)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool lost = capture->status == CAPTURE_INVALIDATED;
    uint64_t id = capture->id;
    bool unjoined = leave_capture(capture);
    if (lost)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (unjoined)
        return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = (CUgraph)(uintptr_t)(0x06ULL << 56 | id);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    ENTER(cuGraphDestroy);
    return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult tell_status(CUstream handle, int *status, uint64_t *id) {
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    const struct capture *capture = fake.streams[slot]->capture;
    *status = capture ? capture->status : CAPTURE_NONE;
    if (id)
        *id = capture ? capture->id : 0;
    return check_legacy_use(slot);
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    ENTER(cuStreamIsCapturing);
    return tell_status(handle, status, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                                          const void **dependencies, size_t *count) {
    ENTER(cuStreamGetCaptureInfo_v2);
    if (graph)
        *graph = NULL;
    if (dependencies)
        *dependencies = NULL;
    if (count)
        *count = 0;
    return tell_status(handle, status, id);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                                          const void **dependencies, const void **edges, size_t *count) {
    ENTER(cuStreamGetCaptureInfo_v3);
    if (graph)
        *graph = NULL;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return tell_status(handle, status, id);
}

void forget_captures(void) {
    for (int slot = 0; slot < fake.num_slots; slot++)
        if (fake.streams[slot]->capture)
            leave_capture(fake.streams[slot]->capture);
}
