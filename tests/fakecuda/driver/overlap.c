/* Which pending operations touch the same bytes, and whether anything orders them.
 *
 * Orders are vector clocks taken at the call: what the host has merely waited for has ended, it needs none. */
#include "fake.h"

#include <stdlib.h>

static int by_low(const void *a, const void *b) {
    const struct interval *left = a, *right = b;
    return left->low < right->low ? -1 : left->low > right->low;
}

static void finish_set(struct intervals *set) {
    qsort(set->items, set->count, sizeof *set->items, by_low);
    uint64_t furthest = 0;
    for (size_t i = 0; i < set->count; i++) {
        if (set->items[i].high > furthest)
            furthest = set->items[i].high;
        set->items[i].furthest = furthest;
    }
}

/* Made when somebody looks closer, not at every submission. */
void index_op(struct op *op) {
    if (op->indexed)
        return;
    op->indexed = true;
    op->reads.items = malloc(sizeof(struct interval) * (op->count + 1));
    op->writes.items = malloc(sizeof(struct interval) * (op->count + 1));
    for (size_t i = 0; i < op->count; i++) {
        const struct segment *segment = &op->segments[i];
        if (reads_memory(segment))
            op->reads.items[op->reads.count++] =
                (struct interval){segment->src, segment->src + segment->length, 0};
        if (writes_memory(segment))
            op->writes.items[op->writes.count++] =
                (struct interval){segment->dst, segment->dst + segment->length, 0};
    }
    finish_set(&op->reads);
    finish_set(&op->writes);
}

void free_intervals(struct op *op) {
    free(op->reads.items);
    free(op->writes.items);
}

bool overlaps(const struct intervals *set, uint64_t low, uint64_t high) {
    size_t first = 0, last = set->count; /* of those that start below `high`, the one that reaches furthest decides */
    while (first < last) {
        size_t middle = (first + last) / 2;
        if (set->items[middle].low < high)
            first = middle + 1;
        else
            last = middle;
    }
    return first && set->items[first - 1].furthest > low;
}

bool sets_overlap(const struct intervals *a, const struct intervals *b) {
    const struct intervals *few = a->count < b->count ? a : b, *many = few == a ? b : a;
    for (size_t i = 0; i < few->count; i++)
        if (overlaps(many, few->items[i].low, few->items[i].high))
            return true;
    return false;
}

/* Copies of one batch run in any order, so none may depend on another or write what another writes. */
void check_batch(struct op *op) {
    index_op(op);
    bool twice = false;
    for (size_t i = 1; i < op->writes.count && !twice; i++)
        twice = op->writes.items[i].low < op->writes.items[i - 1].furthest;
    if (twice || sets_overlap(&op->reads, &op->writes))
        violation("a batch of %zu copies: one %s", op->count,
                  twice ? "writes where another writes" : "reads what another writes");
}

uint64_t pending_copies_in(uint64_t address, size_t length) {
    uint64_t found = 0;
    if (looks_untouched(address, length))
        return 0;
    for (int slot = 0; slot < fake.num_slots; slot++)
        for (struct op *op = fake.streams[slot]->head; op; op = op->next) {
            if (op->kind != OP_COPY)
                continue;
            index_op(op);
            uint64_t end = address + length;
            found += overlaps(&op->writes, address, end) || overlaps(&op->reads, address, end);
        }
    return found;
}

/* Whether the host may touch these bytes now: it comes after nothing that is still pending. */
bool any_pending_in(uint64_t address, size_t length, bool only_writers) {
    if (looks_untouched(address, length))
        return false;
    for (int slot = 0; slot < fake.num_slots; slot++)
        for (struct op *op = fake.streams[slot]->head; op; op = op->next) {
            index_op(op);
            if (overlaps(&op->writes, address, address + length) ||
                (!only_writers && overlaps(&op->reads, address, address + length)))
                return true;
        }
    return false;
}

static bool in_conflict(const struct op *a, const struct op *b) {
    return sets_overlap(&a->writes, &b->writes) || sets_overlap(&a->writes, &b->reads) ||
           sets_overlap(&a->reads, &b->writes);
}

/* `op` is about to be queued: is it in conflict with one that no event, no wait and no stream puts before it? */
void check_hazards(int slot, struct op *op) {
    const struct stream *stream = fake.streams[slot];
    if (looks_free(op))
        return;
    index_op(op);
    for (int other = 0; other < fake.num_slots; other++) {
        if (other == slot)
            continue;
        for (struct op *pending = fake.streams[other]->head; pending; pending = pending->next) {
            if (!pending->count || pending->sequence <= stream->clock[other])
                continue;
            index_op(pending);
            if (!in_conflict(op, pending))
                continue;
            violation("hazard: a %s on stream %d and a %s on stream %d touch the same bytes and nothing orders them",
                      op->kind == OP_COPY ? "copy" : "kernel", slot, pending->kind == OP_COPY ? "copy" : "kernel",
                      other);
            return;
        }
    }
}
