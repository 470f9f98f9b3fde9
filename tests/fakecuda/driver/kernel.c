/* Fake kernels: the engine's compute. Steps that read and write ranges of the device at their place in the stream. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum step_kind { STEP_FILL, STEP_COPY, STEP_WRITE, STEP_READ };

/* As the Python side lays it out. `bytes` is read at the launch, as the parameters of a kernel are. */
struct step {
    uint64_t kind, dst, src, length;
    const char *bytes;
};

static CUresult take_step(struct segment *segment, const struct step *step) {
    static const uint8_t kinds[] = {SEGMENT_FILL, SEGMENT_COPY, SEGMENT_WRITE, SEGMENT_READ};
    if (step->kind > STEP_READ || !step->length)
        return CUDA_ERROR_INVALID_VALUE;
    *segment = (struct segment){.dst = step->dst, .src = step->src, .length = step->length, .width = 1};
    segment->kind = kinds[step->kind];
    segment->order = ORDER_STREAM;
    if (step->kind != STEP_READ && resolve(step->dst, step->length, &segment->dst_range))
        return CUDA_ERROR_INVALID_VALUE;
    if ((step->kind == STEP_READ || step->kind == STEP_COPY) && resolve(step->src, step->length, &segment->src_range))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static struct reading *new_reading(size_t length) {
    struct reading *reading = calloc(1, sizeof *reading);
    reading->id = ++fake.next_id;
    reading->length = length;
    reading->bytes = malloc(length + 1);
    reading->next = fake.readings;
    fake.readings = reading;
    return reading;
}

static void give_bytes(struct op *op, const struct step *steps) {
    size_t written = 0, read = 0;
    for (size_t i = 0; i < op->count; i++) {
        written += steps[i].kind == STEP_WRITE ? steps[i].length : 0;
        read += steps[i].kind == STEP_READ ? steps[i].length : 0;
    }
    op->own = calloc(op->count, sizeof *op->own);
    op->bytes = malloc(written + 1);
    op->reading = new_reading(read);
    char *source = op->bytes, *target = op->reading->bytes;
    for (size_t i = 0; i < op->count; i++) {
        if (steps[i].kind == STEP_WRITE) {
            op->own[i] = memcpy(source, steps[i].bytes, steps[i].length);
            source += steps[i].length;
        } else if (steps[i].kind == STEP_READ) {
            op->own[i] = target;
            target += steps[i].length;
        }
    }
}

static CUresult submit_kernel(int slot, const struct step *steps, size_t count, int64_t duration_ns) {
    struct op *op = new_op(OP_KERNEL, count);
    for (size_t i = 0; i < count; i++)
        if (take_step(&op->segments[i], &steps[i])) {
            free_op(op);
            return CUDA_ERROR_INVALID_VALUE;
        }
    give_bytes(op, steps);
    op->duration_ns = duration_ns;
    return submit(slot, op);
}

/* `reading`: what `fake_reading` wants to know; 0 where the kernel went into a graph and does not run. */
EXPORT CUresult fake_launch(CUstream handle, const struct step *steps, size_t count, int64_t duration_ns,
                            uint64_t *reading) {
    LOCKED;
    int slot;
    bool captured;
    *reading = 0;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = fake.sticky ? fake.sticky : prepare_submission(handle, &slot, &captured);
    if (result || captured)
        return result;
    result = submit_kernel(slot, steps, count, duration_ns);
    if (!result)
        *reading = fake.next_id;
    return result;
}

/* What a kernel has read, in the order of its steps: the number of bytes, or -1 while it has not run, -2 if unknown. */
EXPORT int64_t fake_reading(uint64_t id, char *bytes, size_t length) {
    LOCKED;
    for (struct reading *reading = fake.readings; reading; reading = reading->next) {
        if (reading->id != id)
            continue;
        if (!reading->done)
            return -1;
        memcpy(bytes, reading->bytes, reading->length < length ? reading->length : length);
        return (int64_t)reading->length;
    }
    return -2;
}
