/* The bytes of an operation: taken early, torn, moved. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { POISON = 0xdb };

static bool taken_at_call(const struct segment *segment) {
    if (segment->kind != SEGMENT_COPY)
        return false;
    return segment->order == ORDER_DURING_API_CALL || (segment->order == ORDER_ANY && fake.snapshot_sources);
}

/* A source that may be read at any time is read now: whoever writes it later, or has it written by work that is still
 * queued, gets old bytes. A source to be read during the call always is. */
void snapshot_sources(struct op *op) {
    size_t total = 0;
    for (size_t i = 0; i < op->count; i++)
        if (taken_at_call(&op->segments[i]))
            total += op->segments[i].length;
    if (!total)
        return;
    op->own = calloc(op->count, sizeof *op->own);
    op->bytes = malloc(total);
    char *place = op->bytes;
    for (size_t i = 0; i < op->count; i++) {
        struct segment *segment = &op->segments[i];
        if (!taken_at_call(segment))
            continue;
        op->own[i] = place;
        memcpy(place, alias_of(segment->src, segment->src_range), segment->length);
        place += segment->length;
    }
}

/* Until a copy has ended its destination holds anything. Not while earlier work may still use it: see `submit`. */
void poison(struct op *op) {
    op->poisoned = true;
    for (size_t i = 0; i < op->count; i++) {
        const struct segment *segment = &op->segments[i];
        const struct range *range = fake.ranges[segment->dst_range];
        bool host = !range || range->kind == RANGE_REGISTERED;
        if (writes_memory(segment) && (!host || is_mapped(segment->dst, segment->length)))
            memset(alias_of(segment->dst, segment->dst_range), POISON, segment->length);
    }
}

static void report_unmapped(uint64_t address, size_t length) {
    pthread_mutex_lock(&fake.lock);
    violation("%#lx, %zu bytes, was unmapped while a copy was in flight", address, length);
    pthread_mutex_unlock(&fake.lock);
}

/* Host memory may have gone meanwhile. One look per registered range and operation, one per pageable piece. */
static bool is_there(uint64_t address, size_t length, uint16_t index, uint16_t *checked) {
    const struct range *range = fake.ranges[index];
    if (index && (range->kind != RANGE_REGISTERED || *checked == index))
        return true;
    if (index ? is_mapped(range->base, range->length) : is_mapped(address, length)) {
        *checked = index ? index : *checked;
        return true;
    }
    if (index && is_mapped(address, length))
        return true; /* another part of the range is gone */
    report_unmapped(address, length);
    return false;
}

static void check_source(const struct op *op, size_t i) {
    const struct segment *segment = &op->segments[i];
    if (segment->order != ORDER_ANY || !memcmp(op->own[i], alias_of(segment->src, segment->src_range), segment->length))
        return;
    pthread_mutex_lock(&fake.lock);
    violation("the source %#lx, %zu bytes, of a copy that may read it at any time changed while it was in flight",
              (unsigned long)segment->src, segment->length);
    pthread_mutex_unlock(&fake.lock);
}

static void fill(char *target, const struct segment *segment) {
    if (segment->width == 1) {
        memset(target, (int)segment->src, segment->length);
        return;
    }
    uint32_t value = (uint32_t)segment->src;
    for (size_t at = 0; at + sizeof value <= segment->length; at += sizeof value)
        memcpy(target + at, &value, sizeof value);
}

static void run_segment(struct op *op, size_t i, uint16_t *checked) {
    struct segment *segment = &op->segments[i];
    char *own = op->own ? op->own[i] : NULL;
    bool reads = segment->kind == SEGMENT_READ || (segment->kind == SEGMENT_COPY && !own);
    bool compares = segment->kind == SEGMENT_COPY && own && segment->order == ORDER_ANY;
    if (writes_memory(segment) && !is_there(segment->dst, segment->length, segment->dst_range, &checked[0]))
        return;
    if ((reads || compares) && !is_there(segment->src, segment->length, segment->src_range, &checked[1]))
        return;
    if (compares)
        check_source(op, i);
    char *target = writes_memory(segment) ? alias_of(segment->dst, segment->dst_range) : own;
    if (segment->kind == SEGMENT_FILL)
        fill(target, segment);
    else
        memmove(target, reads ? alias_of(segment->src, segment->src_range) : own, segment->length);
}

static uint32_t *shuffled(size_t count, uint64_t random) {
    uint32_t *order = malloc(sizeof *order * count);
    for (size_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    for (size_t i = count; i > 1; i--) {
        random = random * 6364136223846793005ULL + 1442695040888963407ULL;
        size_t other = (random >> 33) % i;
        uint32_t kept = order[i - 1];
        order[i - 1] = order[other];
        order[other] = kept;
    }
    return order;
}

/* Without the lock. A kernel's steps keep their order; a batch has none to keep. */
void run_segments(struct op *op) {
    uint16_t checked[2] = {0, 0};
    uint32_t *order = op->kind == OP_COPY && op->shuffle_seed ? shuffled(op->count, op->shuffle_seed) : NULL;
    for (size_t i = 0; i < op->count; i++)
        run_segment(op, order ? order[i] : i, checked);
    free(order);
}
