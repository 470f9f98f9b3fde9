/* What the files of the fake driver share: the state behind one lock, and what each file offers the others.
 *
 * Everything below is read and written with `fake.lock` held; only the bytes of a running operation are moved without
 * it (`run_segments`). A function that gives the lock back in between says so. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>

#include "apis.h"
#include "cu.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MAX_DEVICES = 8,
    MAX_STREAMS = 512,
    MAX_RANGES = 4096,
    MAX_DEPTH = 32,
    LEGACY = 0,     /* the slot of the legacy default stream */
    PER_THREAD = 1, /* of the per-thread default stream: one for all threads here */
    FIRST_STREAM = 2,
};

enum range_kind { RANGE_FREE = 0, RANGE_DEVICE, RANGE_HOST_ALLOC, RANGE_REGISTERED };

/* A piece of a range: how many pending accesses touch it, and how many of them write. Too coarse to judge by, but zero
 * spares the exact look. */
struct granule {
    uint32_t touched, written;
};

/* Memory the driver knows. `alias` is where the device's bytes can be read; their own addresses allow no access. */
struct range {
    enum range_kind kind;
    uintptr_t base;
    size_t length;
    char *alias;
    int device;
    unsigned flags, shift;
    bool dead;       /* freed while pending: the bytes stay, no new copy finds them */
    uint64_t pending; /* accesses of queued and running operations */
    struct granule *granules;
};

enum segment_kind { SEGMENT_COPY, SEGMENT_FILL, SEGMENT_WRITE, SEGMENT_READ };

/* One access of an operation. `own` bytes: SEGMENT_WRITE's source, SEGMENT_READ's destination, or a copy's source as it
 * was at the call. Range 0 is memory that the driver does not know (pageable). */
struct segment {
    uint64_t dst, src;
    size_t length;
    uint16_t dst_range, src_range;
    uint8_t kind, order, width;
};

static inline bool reads_memory(const struct segment *segment) {
    return segment->kind == SEGMENT_COPY || segment->kind == SEGMENT_READ;
}

static inline bool writes_memory(const struct segment *segment) { return segment->kind != SEGMENT_READ; }

/* A sorted set of address intervals, half-open, with the greatest end so far: overlap in O(log n). */
struct interval {
    uint64_t low, high, furthest;
};

struct intervals {
    size_t count;
    struct interval *items;
};

enum op_kind { OP_COPY, OP_KERNEL, OP_HOST, OP_RECORD, OP_WAIT };

struct dependency {
    int slot;
    uint64_t sequence;
};

struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t sequence;
    int64_t enqueued_ns, finish_ns, duration_ns;
    bool started, poisoned, indexed;
    size_t count, capacity;
    struct segment *segments;
    char **own;  /* per segment, only where one has bytes of its own */
    char *bytes; /* what `own` points into, except for readings */
    struct intervals reads, writes;
    uint64_t shuffle_seed;
    size_t num_dependencies;
    struct dependency *dependencies;
    uint32_t event;        /* OP_RECORD */
    uint64_t event_record; /* OP_RECORD: which recording of the event */
    CUhostFn function;     /* OP_HOST */
    void *user_data;
    struct reading *reading; /* OP_KERNEL: where its SEGMENT_READs go */
};

/* What a fake kernel has read, for the test that launched it. Lives until the reset. */
struct reading {
    struct reading *next;
    uint64_t id;
    bool done;
    size_t length;
    char *bytes;
};

struct capture {
    int status, mode;
    pthread_t thread;
    int origin;
    uint64_t id, nodes;
    int members;
};

struct stream {
    bool live, closing, busy, held;
    uint32_t generation;
    int device, priority;
    unsigned flags;
    struct op *head, *tail;
    uint64_t queued, sequence, completed;
    int64_t free_at_ns;
    int fail_next;
    uint64_t clock[MAX_STREAMS]; /* what the next operation comes after, per stream */
    struct capture *capture;
    uint64_t captured_nodes;
    bool unjoined; /* the capture's origin does not wait for what this stream has captured last */
};

struct event {
    bool live, recorded;
    uint32_t generation, next_free;
    unsigned flags;
    int device, slot;
    uint64_t sequence, record, capture_id, capture_nodes;
    int64_t done_ns;
    int clock_length;
    uint64_t *clock; /* of the stream at the recording */
};

struct injection {
    int nth, code;
};

struct fake {
    pthread_mutex_t lock;
    pthread_cond_t work, progress;
    bool started, initialised, forked, absent, virtual_time, hold, lock_host_functions;
    int driver_version, num_devices;
    int64_t virtual_ns;

    uint64_t calls[API_COUNT];
    struct injection injections[API_COUNT];
    int sticky;
    bool watching;
    pthread_t watched;

    double bytes_per_ns;
    int64_t latency_ns, patience_ns;
    uint64_t queue_depth, blocked_submissions;

    bool snapshot_sources, tear, shuffle, check_hazards;
    uint64_t random;

    uint64_t num_violations;
    char violations[64][320];

    /* index 0 stays empty: memory that no range covers */
    struct range *ranges[MAX_RANGES];
    uint16_t order[MAX_RANGES]; /* live ranges by address */
    int num_ordered;
    uint64_t pageable_pending, pageable_copies, pinned_bytes, pinned_limit, device_bytes, device_limit;

    struct stream *streams[MAX_STREAMS];
    int num_slots;
    uint64_t pending_ops, pending_copies;

    struct event *events;
    uint32_t num_events, free_event;

    int primary[MAX_DEVICES];
    int attribute_ids[64], attribute_values[64], num_attributes;
    int captures;
    uint64_t next_id;
    struct reading *readings;
};

extern struct fake fake;

/* state.c */
struct entry {
    bool locked;
};
CUresult enter(struct entry *entry, enum api api);
void leave(struct entry *entry);
#define ENTER(symbol)                                              \
    struct entry entry __attribute__((cleanup(leave))) = {false};  \
    do {                                                           \
        CUresult refused = enter(&entry, API_##symbol);            \
        if (refused)                                               \
            return refused;                                        \
    } while (0)
#define LOCKED                                                               \
    struct entry entry __attribute__((cleanup(leave))) = {true};             \
    pthread_mutex_lock(&fake.lock)
const char *api_name(enum api api);
int find_api(const char *symbol);
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t draw(void);
int64_t clock_ns(void);
int64_t end_of_wait(void);
bool wait_for_progress(int64_t deadline_ns);
void set_in_host_function(bool now);

/* context.c */
CUcontext current_context(void);
int device_of(CUcontext context);
CUcontext context_of(int device);
void forget_contexts(void);
int context_depth(void);

/* memory.c */
struct range *range_at(uint64_t address, int *index);
CUresult resolve(uint64_t address, size_t length, uint16_t *range);
char *alias_of(uint64_t address, uint16_t range);
bool is_mapped(uint64_t address, size_t length);
void mark(const struct op *op, int sign);
bool looks_free(const struct op *op);
bool looks_untouched(uint64_t address, size_t length);
void forget_ranges(void);
void check_mappings(void);

/* overlap.c */
void index_op(struct op *op);
void free_intervals(struct op *op);
bool overlaps(const struct intervals *set, uint64_t low, uint64_t high);
bool sets_overlap(const struct intervals *a, const struct intervals *b);
void check_batch(struct op *op);
uint64_t pending_copies_in(uint64_t address, size_t length);
bool any_pending_in(uint64_t address, size_t length, bool only_writers);
void check_hazards(int slot, struct op *op);

/* queue.c */
struct op *new_op(enum op_kind kind, size_t segments);
void free_op(struct op *op);
void wait_for_room(int slot);
CUresult submit(int slot, struct op *op);
bool is_work(const struct op *op);
void add_dependency(struct op *op, int slot, uint64_t sequence);
bool is_complete(int slot, uint64_t sequence);
CUresult wait_until_complete(int slot, uint64_t sequence, const char *who);
bool dependencies_met(const struct op *op);
void drop_everything_pending(void);

/* scheduler.c */
void start_scheduler(void);
bool run_next(int64_t *next_ns);
uint64_t step_stream(int slot, uint64_t count);
void settle(void);
bool anything_running(void);
void complete(int slot, struct op *op);

/* segments.c */
void snapshot_sources(struct op *op);
void poison(struct op *op);
void run_segments(struct op *op);

/* stream.c */
int slot_of(CUstream handle);
CUstream handle_of(int slot);
bool is_blocking(int slot);
void init_streams(void);
void forget_streams(void);
void release_slot_if_drained(int slot);

CUresult prepare_submission(CUstream handle, int *slot, bool *captured);

/* event.c */
struct event *event_of(CUevent handle);
void note_recorded(uint32_t event, uint64_t record, int64_t when_ns);
void forget_events(void);
bool event_is_done(const struct event *event);

/* capture.c */
CUresult check_capture(void);
CUresult capture_work(int slot, bool *captured);
CUresult capture_wait(int slot, const struct event *event, bool *captured);
void capture_record(int slot, struct event *event);
CUresult check_captured_event(const struct event *event);
void invalidate(struct capture *capture);
void forget_captures(void);

#endif
