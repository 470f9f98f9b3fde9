/* Memory the driver knows: device memory, its own host memory, registered host memory.
 *
 * Device memory is one memory file mapped twice: the address handed out allows no access, so that code that takes it
 * for host memory dies at once; copies use the alias. Every range counts the pending accesses per granule. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MAX_GRANULES = 1 << 18, SMALLEST_GRANULE = 8 };

static uint64_t page_down(uint64_t address) { return address & ~(uint64_t)(PAGE - 1); }
static uint64_t page_up(uint64_t address) { return page_down(address + PAGE - 1); }

/* The place of the first live range that starts above `address`. */
static int place_above(uint64_t address) {
    int low = 0, high = fake.num_ordered;
    while (low < high) {
        int middle = (low + high) / 2;
        if (fake.ranges[fake.order[middle]]->base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct range *range_at(uint64_t address, int *index) {
    int place = place_above(address);
    if (!place)
        return NULL;
    struct range *range = fake.ranges[fake.order[place - 1]];
    if (address - range->base >= range->length)
        return NULL;
    if (index)
        *index = fake.order[place - 1];
    return range;
}

/* Range 0 for memory that the driver does not know. What runs over the edge of a range is refused. `found` comes in as
 * a guess: copies of one batch mostly lie in the same ranges. */
CUresult resolve(uint64_t address, size_t length, uint16_t *found) {
    const struct range *range = fake.ranges[*found];
    if (!range || range->dead || address - range->base >= range->length) {
        int index = 0;
        range = range_at(address, &index);
        *found = (uint16_t)index;
    }
    if (range)
        return length <= range->length - (address - range->base) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    int above = place_above(address);
    bool runs_into = above < fake.num_ordered && fake.ranges[fake.order[above]]->base < address + length;
    return !address || address + length < address || runs_into ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

char *alias_of(uint64_t address, uint16_t index) {
    struct range *range = fake.ranges[index];
    return index ? range->alias + (address - range->base) : (char *)(uintptr_t)address;
}

/* An msync that has nothing to write still looks whether every page is mapped. */
bool is_mapped(uint64_t address, size_t length) {
    uint64_t low = page_down(address);
    return !msync((void *)(uintptr_t)low, page_up(address + length) - low, MS_ASYNC) || errno != ENOMEM;
}

static int add_range(const struct range *values) {
    int index = 1;
    while (index < MAX_RANGES && fake.ranges[index])
        index++;
    struct range *range = index < MAX_RANGES ? malloc(sizeof *range) : NULL;
    if (!range)
        return 0;
    *range = *values;
    range->shift = SMALLEST_GRANULE;
    while ((range->length >> range->shift) >= MAX_GRANULES)
        range->shift++;
    range->granules = calloc((range->length >> range->shift) + 1, sizeof *range->granules);
    fake.ranges[index] = range;
    int place = place_above(range->base);
    memmove(fake.order + place + 1, fake.order + place, sizeof *fake.order * (size_t)(fake.num_ordered - place));
    fake.order[place] = (uint16_t)index;
    fake.num_ordered++;
    return index;
}

static void destroy_range(int index) {
    struct range *range = fake.ranges[index];
    if (range->kind == RANGE_DEVICE)
        munmap((void *)range->base, page_up(range->length));
    if (range->kind == RANGE_DEVICE || range->kind == RANGE_HOST_ALLOC)
        munmap(range->alias, page_up(range->length));
    free(range->granules);
    free(range);
    fake.ranges[index] = NULL;
}

/* With operations pending the bytes stay for good, so that the violation is told instead of a crash. */
static void remove_range(int index, const char *api) {
    struct range *range = fake.ranges[index];
    int place = place_above(range->base) - 1;
    fake.num_ordered--;
    memmove(fake.order + place, fake.order + place + 1, sizeof *fake.order * (size_t)(fake.num_ordered - place));
    range->dead = true;
    *(range->kind == RANGE_DEVICE ? &fake.device_bytes : &fake.pinned_bytes) -= range->length;
    if (range->pending)
        violation("%s: %#lx, %zu bytes, has %lu accesses in flight", api, range->base, range->length, range->pending);
    else
        destroy_range(index);
}

void forget_ranges(void) {
    for (int index = 1; index < MAX_RANGES; index++)
        if (fake.ranges[index])
            destroy_range(index);
    fake.num_ordered = 0;
    fake.pinned_bytes = fake.device_bytes = fake.pageable_pending = 0;
}

void check_mappings(void) {
    for (int place = 0; place < fake.num_ordered; place++) {
        struct range *range = fake.ranges[fake.order[place]];
        if (range->kind == RANGE_REGISTERED && !is_mapped(range->base, range->length))
            violation("%#lx, %zu bytes, is registered and no longer mapped", range->base, range->length);
    }
}

static void mark_one(uint16_t index, uint64_t address, size_t length, int written, int sign) {
    if (!index) {
        fake.pageable_pending += (uint64_t)sign;
        return;
    }
    struct range *range = fake.ranges[index];
    uint64_t low = (address - range->base) >> range->shift;
    uint64_t high = (address - range->base + length - 1) >> range->shift;
    range->pending += (uint64_t)sign;
    for (; low <= high; low++) {
        range->granules[low].touched += (uint32_t)sign;
        range->granules[low].written += (uint32_t)(sign * written);
    }
}

/* `sign` 1 when `op` becomes pending, -1 when it has ended. */
void mark(const struct op *op, int sign) {
    for (size_t i = 0; i < op->count; i++) {
        const struct segment *segment = &op->segments[i];
        if (writes_memory(segment))
            mark_one(segment->dst_range, segment->dst, segment->length, 1, sign);
        if (reads_memory(segment))
            mark_one(segment->src_range, segment->src, segment->length, 0, sign);
    }
}

static bool is_idle(uint16_t index, uint64_t address, size_t length, bool writing) {
    if (!index)
        return !fake.pageable_pending;
    const struct range *range = fake.ranges[index];
    uint64_t low = (address - range->base) >> range->shift;
    uint64_t high = (address - range->base + length - 1) >> range->shift;
    for (; low <= high; low++)
        if (writing ? range->granules[low].touched : range->granules[low].written)
            return false;
    return true;
}

/* True if nothing pending can be in conflict with `op`; false says nothing. */
bool looks_free(const struct op *op) {
    for (size_t i = 0; i < op->count; i++) {
        const struct segment *segment = &op->segments[i];
        if (writes_memory(segment) && !is_idle(segment->dst_range, segment->dst, segment->length, true))
            return false;
        if (reads_memory(segment) && !is_idle(segment->src_range, segment->src, segment->length, false))
            return false;
    }
    return true;
}

/* True if nothing pending touches these bytes; false says nothing. */
bool looks_untouched(uint64_t address, size_t length) {
    uint16_t index = 0;
    if (!fake.pending_ops)
        return true;
    if (!length || resolve(address, length, &index) || !index)
        return false;
    return is_idle(index, address, length, true);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(cuMemGetInfo_v2);
    if (available)
        *available = fake.device_limit - fake.device_bytes;
    if (total)
        *total = fake.device_limit;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t length) {
    ENTER(cuMemAlloc_v2);
    if (!pointer || !length)
        return CUDA_ERROR_INVALID_VALUE;
    if (length > fake.device_limit - fake.device_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)page_up(length)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *address = mmap(NULL, page_up(length), PROT_NONE, MAP_SHARED, file, 0);
    char *alias = mmap(NULL, page_up(length), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    struct range range = {.kind = RANGE_DEVICE, .base = (uintptr_t)address, .length = length, .alias = alias};
    range.device = device_of(current_context());
    if (address == MAP_FAILED || alias == MAP_FAILED || !add_range(&range))
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.device_bytes += length;
    *pointer = (uintptr_t)address;
    return CUDA_SUCCESS;
}

static CUresult give_back(uint64_t address, enum range_kind kind, const char *api) {
    int index = 0;
    struct range *range = range_at(address, &index);
    if (!range || range->kind != kind || range->base != address)
        return kind == RANGE_REGISTERED ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    if (kind == RANGE_REGISTERED && !is_mapped(range->base, range->length))
        violation("%s: %#lx, %zu bytes, was unmapped before", api, range->base, range->length);
    remove_range(index, api);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER(cuMemFree_v2);
    return pointer ? give_back(pointer, RANGE_DEVICE, "cuMemFree") : CUDA_SUCCESS;
}

static CUresult allocate_host(void **pointer, size_t length, unsigned flags) {
    if (!pointer || !length || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    if (length > fake.pinned_limit - fake.pinned_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *address = mmap(NULL, page_up(length), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct range range = {.kind = RANGE_HOST_ALLOC, .base = (uintptr_t)address, .length = length, .alias = address};
    range.device = device_of(current_context());
    range.flags = flags;
    if (address == MAP_FAILED || !add_range(&range))
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.pinned_bytes += length;
    *pointer = address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t length, unsigned int flags) {
    ENTER(cuMemHostAlloc);
    return allocate_host(pointer, length, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t length) {
    ENTER(cuMemAllocHost_v2);
    return allocate_host(pointer, length, 0);
}

EXPORT CUresult cuMemFreeHost(void *pointer) {
    ENTER(cuMemFreeHost);
    return give_back((uintptr_t)pointer, RANGE_HOST_ALLOC, "cuMemFreeHost");
}

/* The driver pins whole pages, so two ranges that share one overlap. */
static CUresult overlap_of_pages(uint64_t low, uint64_t high) {
    for (int place = 0; place < fake.num_ordered; place++) {
        const struct range *range = fake.ranges[fake.order[place]];
        if (page_down(range->base) < high && low < page_up(range->base + range->length))
            return range->kind == RANGE_DEVICE ? CUDA_ERROR_INVALID_VALUE
                                               : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t length, unsigned int flags) {
    ENTER(cuMemHostRegister_v2);
    uint64_t address = (uintptr_t)pointer;
    if (!pointer || !length || address + length < address || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    if (length >= 512ULL << 30 || length > fake.pinned_limit - fake.pinned_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY; /* recent drivers refuse 512 GiB in one call whatever is free */
    CUresult overlap = overlap_of_pages(page_down(address), page_up(address + length));
    if (overlap)
        return overlap;
    if (!is_mapped(address, length))
        return CUDA_ERROR_INVALID_VALUE;
    struct range range = {.kind = RANGE_REGISTERED, .base = address, .length = length, .alias = pointer};
    range.device = device_of(current_context());
    range.flags = flags;
    if (!add_range(&range))
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.pinned_bytes += length;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *pointer) {
    ENTER(cuMemHostUnregister);
    return pointer ? give_back((uintptr_t)pointer, RANGE_REGISTERED, "cuMemHostUnregister") : CUDA_ERROR_INVALID_VALUE;
}
