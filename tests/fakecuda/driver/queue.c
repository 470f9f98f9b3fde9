/* Operations on their way: made, ordered, queued, dropped. */
#include "fake.h"

#include <stdlib.h>

bool is_work(const struct op *op) { return op->kind != OP_RECORD && op->kind != OP_WAIT; }

/* The last array of segments is kept: a large one costs more to map than to fill. */
static struct segment *spare;
static size_t spare_capacity;

static void take_segments(struct op *op, size_t count) {
    op->count = count;
    if (spare && spare_capacity >= count && spare_capacity <= 2 * count + 64) {
        op->segments = spare;
        op->capacity = spare_capacity;
        spare = NULL;
    } else {
        op->segments = malloc(sizeof *op->segments * count);
        op->capacity = count;
    }
}

static void give_segments(struct op *op) {
    if (spare && spare_capacity > op->capacity) {
        free(op->segments);
        return;
    }
    free(spare);
    spare = op->segments;
    spare_capacity = op->capacity;
}

struct op *new_op(enum op_kind kind, size_t segments) {
    struct op *op = calloc(1, sizeof *op);
    op->kind = kind;
    if (segments)
        take_segments(op, segments);
    return op;
}

void free_op(struct op *op) {
    if (op->segments)
        give_segments(op);
    free_intervals(op);
    free(op->own);
    free(op->bytes);
    free(op->dependencies);
    free(op);
}

void add_dependency(struct op *op, int slot, uint64_t sequence) {
    op->dependencies = realloc(op->dependencies, sizeof *op->dependencies * (op->num_dependencies + 1));
    op->dependencies[op->num_dependencies++] = (struct dependency){slot, sequence};
}

bool is_complete(int slot, uint64_t sequence) { return fake.streams[slot]->completed >= sequence; }

/* Makes the caller wait, not for ever: it gives the lock back until an operation has ended. `who` waits is told. */
CUresult wait_until_complete(int slot, uint64_t sequence, const char *who) {
    int64_t deadline = end_of_wait();
    while (!fake.sticky && !is_complete(slot, sequence))
        if (!wait_for_progress(deadline)) {
            violation("%s waited in vain for stream %d", who, slot);
            return CUDA_ERROR_LAUNCH_TIMEOUT;
        }
    return fake.sticky;
}

bool dependencies_met(const struct op *op) {
    for (size_t i = 0; i < op->num_dependencies; i++)
        if (!is_complete(op->dependencies[i].slot, op->dependencies[i].sequence))
            return false;
    return true;
}

static void follow(struct op *op, int slot, int other) {
    struct stream *before = fake.streams[other];
    if (other == slot || !before->head || !is_blocking(other))
        return;
    add_dependency(op, other, before->sequence);
    for (int i = 0; i < fake.num_slots; i++)
        if (fake.streams[slot]->clock[i] < before->clock[i])
            fake.streams[slot]->clock[i] = before->clock[i];
    fake.streams[slot]->clock[other] = before->sequence;
}

/* The legacy default stream and the blocking streams wait for each other. */
static void keep_legacy_order(struct op *op, int slot) {
    if (slot != LEGACY && is_blocking(slot))
        follow(op, slot, LEGACY);
    for (int other = LEGACY + 1; slot == LEGACY && other < fake.num_slots; other++)
        follow(op, slot, other);
}

/* A full queue makes the caller wait, as a real one does; not for ever, so that a test may see it. Gives the lock back
 * meanwhile: what a caller knew of streams and events before may have changed. */
void wait_for_room(int slot) {
    struct stream *stream = fake.streams[slot];
    if (!fake.queue_depth || stream->queued < fake.queue_depth || stream->capture)
        return;
    int64_t deadline = end_of_wait();
    fake.blocked_submissions++;
    while (stream->queued >= fake.queue_depth && !fake.sticky)
        if (!wait_for_progress(deadline)) {
            violation("a submission waited in vain on a queue of %lu operations", (unsigned long)stream->queued);
            return;
        }
}

static void set_duration(struct op *op) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < op->count; i++)
        bytes += op->segments[i].length;
    if (op->kind == OP_COPY)
        op->duration_ns = fake.latency_ns + (fake.bytes_per_ns > 0 ? (int64_t)((double)bytes / fake.bytes_per_ns) : 0);
}

static void meet_adversaries(int slot, struct op *op) {
    bool disturbs_nobody = fake.tear && looks_free(op);
    if (fake.check_hazards)
        check_hazards(slot, op);
    if (op->kind != OP_COPY)
        return;
    snapshot_sources(op);
    if (fake.shuffle) {
        check_batch(op);
        op->shuffle_seed = draw();
    }
    if (disturbs_nobody)
        poison(op);
}

static void append(struct stream *stream, struct op *op) {
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    stream->queued++;
    fake.pending_ops++;
    if (op->kind == OP_COPY)
        fake.pending_copies += op->count;
}

/* Takes `op` over. */
CUresult submit(int slot, struct op *op) {
    struct stream *stream = fake.streams[slot];
    if (fake.sticky) {
        free_op(op);
        return fake.sticky;
    }
    keep_legacy_order(op, slot);
    op->enqueued_ns = clock_ns();
    if (op->count) {
        set_duration(op);
        meet_adversaries(slot, op);
        mark(op, 1);
    }
    op->sequence = ++stream->sequence;
    stream->clock[slot] = op->sequence;
    bool idle = !stream->head;
    append(stream, op);
    if (idle && !is_work(op) && dependencies_met(op)) {
        complete(slot, op);
        return CUDA_SUCCESS;
    }
    start_scheduler();
    pthread_cond_signal(&fake.work);
    return CUDA_SUCCESS;
}

/* After an error of the context nothing runs any more; only a reset takes the queues away. */
void drop_everything_pending(void) {
    for (int slot = 0; slot < fake.num_slots; slot++) {
        struct stream *stream = fake.streams[slot];
        while (stream->head) {
            stream->head->reading = NULL; /* nobody has read anything */
            complete(slot, stream->head);
        }
        stream->fail_next = 0;
    }
}
