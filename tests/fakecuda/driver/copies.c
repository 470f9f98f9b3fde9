/* Copies, fills and host functions, as the driver's API has them. */
#include "fake.h"

#include <stdlib.h>

static CUresult fill_copy(struct segment *segment, uint64_t dst, uint64_t src, size_t length) {
    segment->dst = dst;
    segment->src = src;
    segment->length = length;
    segment->kind = SEGMENT_COPY;
    if (!length || resolve(dst, length, &segment->dst_range) || resolve(src, length, &segment->src_range))
        return CUDA_ERROR_INVALID_VALUE;
    fake.pageable_copies += !segment->dst_range + !segment->src_range;
    return CUDA_SUCCESS;
}

/* Every copy has an attribute: those from one index to the next share it. */
static bool attributes_valid(const CUmemcpyAttributes *attributes, const size_t *first, size_t number, size_t count) {
    if (!attributes || !first || !number || number > count || first[0])
        return false;
    for (size_t k = 0; k < number; k++) {
        bool in_order = !k || (first[k] > first[k - 1] && first[k] < count);
        int order = attributes[k].srcAccessOrder;
        if (!in_order || order < ORDER_STREAM || order > ORDER_ANY || attributes[k].flags > 1)
            return false;
    }
    return true;
}

struct batch {
    const CUdeviceptr *dsts, *srcs;
    const size_t *sizes;
    size_t count;
    const CUmemcpyAttributes *attributes;
    const size_t *first;
    size_t number;
};

static CUresult fill_batch(struct op *op, const struct batch *batch, size_t *failed) {
    for (size_t i = 0, k = 0; i < batch->count; i++) {
        k += k + 1 < batch->number && batch->first[k + 1] == i;
        op->segments[i].order = (uint8_t)batch->attributes[k].srcAccessOrder;
        op->segments[i].dst_range = i ? op->segments[i - 1].dst_range : 0;
        op->segments[i].src_range = i ? op->segments[i - 1].src_range : 0;
        if (fill_copy(&op->segments[i], batch->dsts[i], batch->srcs[i], batch->sizes[i])) {
            *failed = i;
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult submit_batch(CUstream handle, const struct batch *batch, size_t *failed) {
    *failed = SIZE_MAX;
    int slot = slot_of(handle);
    if (slot < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (slot == LEGACY || !batch->dsts || !batch->srcs || !batch->sizes || !batch->count ||
        !attributes_valid(batch->attributes, batch->first, batch->number, batch->count))
        return CUDA_ERROR_INVALID_VALUE;
    bool captured;
    CUresult result = prepare_submission(handle, &slot, &captured);
    if (result)
        return result;
    if (captured) { /* batches have no node of a graph */
        invalidate(fake.streams[slot]->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    struct op *op = new_op(OP_COPY, batch->count);
    result = fill_batch(op, batch, failed);
    if (!result)
        return submit(slot, op);
    free_op(op);
    return result;
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *first, size_t number, size_t *failed,
                                   CUstream stream) {
    ENTER(cuMemcpyBatchAsync);
    size_t ignored;
    struct batch batch = {dsts, srcs, sizes, count, attributes, first, number};
    return submit_batch(stream, &batch, failed ? failed : &ignored);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *first, size_t number, CUstream stream) {
    ENTER(cuMemcpyBatchAsync_v2);
    size_t ignored;
    struct batch batch = {dsts, srcs, sizes, count, attributes, first, number};
    return submit_batch(stream, &batch, &ignored);
}

static bool is_device(uint16_t range) { return range && fake.ranges[range]->kind == RANGE_DEVICE; }

enum side { ANYWHERE, ON_DEVICE, ON_HOST };

static bool lies(uint16_t range, enum side side) { return side == ANYWHERE || is_device(range) == (side == ON_DEVICE); }

/* One copy in the order of its stream. A length of zero is allowed and does nothing. */
static CUresult copy(CUstream handle, uint64_t dst, uint64_t src, size_t length, const enum side sides[2]) {
    int slot;
    bool captured;
    CUresult result = prepare_submission(handle, &slot, &captured);
    if (result || captured || !length)
        return result;
    struct op *op = new_op(OP_COPY, 1);
    op->segments[0] = (struct segment){.order = ORDER_STREAM};
    result = fill_copy(&op->segments[0], dst, src, length);
    if (!result && lies(op->segments[0].dst_range, sides[0]) && lies(op->segments[0].src_range, sides[1]))
        return submit(slot, op);
    free_op(op);
    return CUDA_ERROR_INVALID_VALUE;
}

static const enum side unified[] = {ANYWHERE, ANYWHERE}, to_device[] = {ON_DEVICE, ON_HOST},
                       to_host[] = {ON_HOST, ON_DEVICE}, within[] = {ON_DEVICE, ON_DEVICE};

EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t length, CUstream stream) {
    ENTER(cuMemcpyAsync);
    return copy(stream, dst, src, length, unified);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t length, CUstream stream) {
    ENTER(cuMemcpyHtoDAsync_v2);
    return copy(stream, dst, (uintptr_t)src, length, to_device);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t length, CUstream stream) {
    ENTER(cuMemcpyDtoHAsync_v2);
    return copy(stream, (uintptr_t)dst, src, length, to_host);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t length, CUstream stream) {
    ENTER(cuMemcpyDtoDAsync_v2);
    return copy(stream, dst, src, length, within);
}

static CUresult finish(CUresult submitted) {
    return submitted ? submitted : wait_until_complete(LEGACY, fake.streams[LEGACY]->sequence, "a synchronous copy");
}

EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t length) {
    ENTER(cuMemcpy);
    return finish(copy(NULL, dst, src, length, unified));
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t length) {
    ENTER(cuMemcpyHtoD_v2);
    return finish(copy(NULL, dst, (uintptr_t)src, length, to_device));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t length) {
    ENTER(cuMemcpyDtoH_v2);
    return finish(copy(NULL, (uintptr_t)dst, src, length, to_host));
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t length) {
    ENTER(cuMemcpyDtoD_v2);
    return finish(copy(NULL, dst, src, length, within));
}

static CUresult set_bytes(CUstream handle, uint64_t dst, uint32_t value, size_t length, uint8_t width) {
    int slot;
    bool captured;
    CUresult result = prepare_submission(handle, &slot, &captured);
    if (result || captured || !length)
        return result;
    struct op *op = new_op(OP_KERNEL, 1);
    op->segments[0] =
        (struct segment){.dst = dst, .src = value, .length = length, .kind = SEGMENT_FILL, .width = width};
    if (!resolve(dst, length, &op->segments[0].dst_range))
        return submit(slot, op);
    free_op(op);
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count) {
    ENTER(cuMemsetD8_v2);
    return finish(set_bytes(NULL, dst, value, count, 1));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    ENTER(cuMemsetD8Async);
    return set_bytes(stream, dst, value, count, 1);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count, CUstream stream) {
    ENTER(cuMemsetD32Async);
    return dst % 4 ? CUDA_ERROR_INVALID_VALUE : set_bytes(stream, dst, value, 4 * count, 4);
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr dst, uint32_t value, unsigned int flags) {
    ENTER(cuStreamWriteValue32_v2);
    return dst % 4 || flags > 1 ? CUDA_ERROR_INVALID_VALUE : set_bytes(stream, dst, value, 4, 4);
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *user_data) {
    ENTER(cuLaunchHostFunc);
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    int slot;
    bool captured;
    CUresult result = prepare_submission(handle, &slot, &captured);
    if (result || captured)
        return result;
    struct op *op = new_op(OP_HOST, 0);
    op->function = function;
    op->user_data = user_data;
    return submit(slot, op);
}
