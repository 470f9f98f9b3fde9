/* Who runs when: one thread for all streams, or the caller that steps by hand.
 *
 * A stream is a queue. Its head runs once what it depends on is complete, its time has come (a copy takes latency plus
 * bytes by bandwidth, on the timeline of its stream) and nobody holds it. Recordings and waits are no work: they take
 * no time, are never held and are never counted by a step. */
#define _GNU_SOURCE
#include "fake.h"

#include <sys/prctl.h>

bool anything_running(void) {
    for (int slot = 0; slot < fake.num_slots; slot++)
        if (fake.streams[slot]->busy)
            return true;
    return false;
}

void complete(int slot, struct op *op) {
    struct stream *stream = fake.streams[slot];
    stream->head = op->next;
    if (!stream->head)
        stream->tail = NULL;
    stream->queued--;
    stream->completed = op->sequence;
    fake.pending_ops--;
    if (op->kind == OP_COPY)
        fake.pending_copies -= op->count;
    mark(op, -1);
    if (is_work(op))
        stream->free_at_ns = op->finish_ns;
    else if (op->num_dependencies && clock_ns() > stream->free_at_ns)
        stream->free_at_ns = clock_ns();
    if (op->kind == OP_RECORD)
        note_recorded(op->event, op->event_record, clock_ns());
    if (op->reading)
        op->reading->done = true;
    free_op(op);
    release_slot_if_drained(slot);
    pthread_cond_broadcast(&fake.progress);
    pthread_cond_signal(&fake.work);
}

static void start(struct stream *stream, struct op *op) {
    int64_t from = op->enqueued_ns > stream->free_at_ns ? op->enqueued_ns : stream->free_at_ns;
    if (op->num_dependencies && clock_ns() > from)
        from = clock_ns();
    op->started = true;
    op->finish_ns = from + op->duration_ns;
    if (op->kind == OP_COPY && fake.tear && !op->poisoned)
        poison(op);
}

static void fail(struct stream *stream) {
    fake.sticky = stream->fail_next;
    stream->fail_next = 0;
    pthread_cond_broadcast(&fake.progress);
}

/* Gives the lock back while the operation runs, except where a host function is to run under the driver's lock. */
static void run(int slot, struct op *op) {
    struct stream *stream = fake.streams[slot];
    if (op->kind == OP_COPY && stream->fail_next) {
        fail(stream);
        return;
    }
    bool keep_lock = op->kind == OP_HOST && fake.lock_host_functions;
    stream->busy = true;
    if (!keep_lock)
        pthread_mutex_unlock(&fake.lock);
    if (op->kind == OP_HOST) {
        set_in_host_function(true);
        op->function(op->user_data);
        set_in_host_function(false);
    } else {
        run_segments(op);
    }
    if (!keep_lock)
        pthread_mutex_lock(&fake.lock);
    stream->busy = false;
    complete(slot, op);
}

/* The head of a stream, once nothing but time and a hold keep it. */
static struct op *ready_head(int slot) {
    struct stream *stream = fake.streams[slot];
    struct op *op = stream->head;
    if (!op || stream->busy || fake.sticky || !dependencies_met(op))
        return NULL;
    if (is_work(op) && !op->started)
        start(stream, op);
    return op;
}

/* Runs one operation; if none can run, false and in `next_ns` when one will. */
bool run_next(int64_t *next_ns) {
    int first = fake.shuffle && fake.num_slots ? (int)(draw() % (uint64_t)fake.num_slots) : 0;
    for (int i = 0; i < fake.num_slots; i++) {
        int slot = (first + i) % fake.num_slots;
        struct op *op = ready_head(slot);
        if (!op)
            continue;
        if (!is_work(op)) {
            complete(slot, op);
            return true;
        }
        if (fake.hold || fake.streams[slot]->held)
            continue;
        if (op->finish_ns <= clock_ns()) {
            run(slot, op);
            return true;
        }
        if (op->finish_ns < *next_ns)
            *next_ns = op->finish_ns;
    }
    return false;
}

/* Runs in the caller all that can run now, and sees to the end what runs elsewhere. */
void settle(void) {
    int64_t next_ns = INT64_MAX, deadline = end_of_wait();
    while (run_next(&next_ns) || anything_running())
        if (anything_running() && !wait_for_progress(deadline))
            return;
}

/* Runs the next `count` pieces of work of one stream, hold and time notwithstanding; stops where it must wait for
 * another stream. Says how many it ran. */
uint64_t step_stream(int slot, uint64_t count) {
    uint64_t done = 0;
    while (done < count) {
        settle();
        struct op *op = ready_head(slot);
        if (!op || !is_work(op))
            break;
        if (op->finish_ns > clock_ns())
            op->finish_ns = clock_ns();
        run(slot, op);
        done += !fake.sticky;
    }
    settle();
    return done;
}

static void *schedule(void *unused) {
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1UL);
    pthread_mutex_lock(&fake.lock);
    for (;;) {
        int64_t next_ns = INT64_MAX;
        if (run_next(&next_ns))
            continue;
        struct timespec until = {next_ns / 1000000000LL, next_ns % 1000000000LL};
        if (next_ns == INT64_MAX || fake.virtual_time)
            pthread_cond_wait(&fake.work, &fake.lock);
        else
            pthread_cond_timedwait(&fake.work, &fake.lock, &until);
    }
    return NULL;
}

void start_scheduler(void) {
    if (fake.started)
        return;
    pthread_t thread;
    fake.started = true;
    if (!pthread_create(&thread, NULL, schedule, NULL))
        pthread_detach(thread);
}
