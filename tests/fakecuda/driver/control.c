/* How tests steer the fake: everything here is `fake_...`, reached by ctypes. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

static void set_defaults(void) {
    fake.absent = fake.virtual_time = fake.hold = fake.lock_host_functions = false;
    fake.initialised = false;
    fake.num_devices = 1;
    fake.sticky = 0;
    fake.watching = false;
    fake.bytes_per_ns = 0;
    fake.latency_ns = 0;
    fake.patience_ns = 20000000000LL;
    fake.queue_depth = 1024;
    fake.blocked_submissions = 0;
    fake.snapshot_sources = fake.tear = fake.shuffle = fake.check_hazards = false;
    fake.random = 1;
    fake.num_violations = 0;
    fake.pageable_copies = 0;
    fake.pinned_limit = fake.device_limit = 64ULL << 30;
    fake.num_attributes = 0;
    memset(fake.calls, 0, sizeof fake.calls);
    memset(fake.injections, 0, sizeof fake.injections);
}

__attribute__((constructor)) static void set_up(void) {
    set_defaults();
    init_streams();
}

static void forget_readings(void) {
    while (fake.readings) {
        struct reading *reading = fake.readings;
        fake.readings = reading->next;
        free(reading->bytes);
        free(reading);
    }
}

/* As if just loaded; the version stays. Returns the operations still pending: then nothing has changed. */
EXPORT uint64_t fake_reset(void) {
    LOCKED;
    if (fake.pending_ops || anything_running())
        return fake.pending_ops + 1;
    forget_captures();
    forget_events();
    forget_streams();
    forget_ranges();
    forget_contexts();
    forget_readings();
    set_defaults();
    return 0;
}

EXPORT void fake_set_driver_version(int version) {
    LOCKED;
    fake.driver_version = version;
}

EXPORT void fake_set_devices(int count) {
    LOCKED;
    fake.num_devices = count < MAX_DEVICES ? count : MAX_DEVICES;
}

EXPORT void fake_set_absent(int absent) {
    LOCKED;
    fake.absent = absent;
    fake.initialised &= !absent;
}

EXPORT int fake_set_attribute(int attribute, int value) {
    LOCKED;
    if (fake.num_attributes == sizeof fake.attribute_ids / sizeof *fake.attribute_ids)
        return -1;
    for (int i = fake.num_attributes++; i > 0; i--) { /* the latest first */
        fake.attribute_ids[i] = fake.attribute_ids[i - 1];
        fake.attribute_values[i] = fake.attribute_values[i - 1];
    }
    fake.attribute_ids[0] = attribute;
    fake.attribute_values[0] = value;
    return 0;
}

EXPORT void fake_set_limits(uint64_t device_bytes, uint64_t pinned_bytes) {
    LOCKED;
    fake.device_limit = device_bytes;
    fake.pinned_limit = pinned_bytes;
}

EXPORT void fake_set_timing(double gigabytes_per_s, double latency_us) {
    LOCKED;
    fake.bytes_per_ns = gigabytes_per_s;
    fake.latency_ns = (int64_t)(latency_us * 1e3);
}

EXPORT void fake_use_virtual_time(void) {
    LOCKED;
    fake.virtual_time = true;
    fake.virtual_ns = 0;
    for (int slot = 0; slot < fake.num_slots; slot++)
        fake.streams[slot]->free_at_ns = 0;
}

/* Moves the clock from one completion to the next, in the caller, and returns the time it is then. */
EXPORT int64_t fake_advance(int64_t by_ns) {
    LOCKED;
    int64_t target = fake.virtual_ns + by_ns;
    for (;;) {
        settle();
        int64_t next_ns = INT64_MAX;
        if (run_next(&next_ns))
            continue;
        if (next_ns > target || fake.sticky)
            break;
        fake.virtual_ns = next_ns;
    }
    fake.virtual_ns = target;
    return target;
}

EXPORT void fake_set_patience(double seconds) {
    LOCKED;
    fake.patience_ns = (int64_t)(seconds * 1e9);
}

EXPORT void fake_set_queue_depth(uint64_t depth) {
    LOCKED;
    fake.queue_depth = depth;
}

EXPORT uint64_t fake_blocked_submissions(void) {
    LOCKED;
    return fake.blocked_submissions;
}

EXPORT void fake_hold_all(int hold) {
    LOCKED;
    fake.hold = hold;
    for (int slot = 0; !hold && slot < fake.num_slots; slot++)
        fake.streams[slot]->held = false;
    pthread_cond_signal(&fake.work);
}

EXPORT int fake_hold_stream(CUstream handle, int hold) {
    LOCKED;
    int slot = slot_of(handle);
    if (slot < 0)
        return -1;
    fake.streams[slot]->held = hold;
    pthread_cond_signal(&fake.work);
    return 0;
}

EXPORT int64_t fake_step(CUstream handle, uint64_t count) {
    LOCKED;
    int slot = slot_of(handle);
    return slot < 0 ? -1 : (int64_t)step_stream(slot, count);
}

EXPORT void fake_settle(void) {
    LOCKED;
    settle();
}

/* Waits for the real clock where timing wants it. True if nothing is left. */
EXPORT int fake_drain(double seconds) {
    LOCKED;
    int64_t deadline = end_of_wait() - fake.patience_ns + (int64_t)(seconds * 1e9);
    while (fake.pending_ops && !fake.sticky)
        if (!wait_for_progress(deadline))
            break;
    return !fake.pending_ops;
}

EXPORT int fake_inject(const char *symbol, int nth, int code) {
    LOCKED;
    int api = find_api(symbol);
    if (api < 0)
        return -1;
    fake.injections[api] = (struct injection){nth, code};
    return 0;
}

EXPORT int fake_fail_next_copy(CUstream handle, int code) {
    LOCKED;
    int slot = slot_of(handle);
    if (slot < 0)
        return -1;
    fake.streams[slot]->fail_next = code;
    return 0;
}

/* Drops what the error has left behind: nothing of it has run. */
EXPORT void fake_reset_error(void) {
    LOCKED;
    int64_t deadline = end_of_wait();
    while (anything_running() && wait_for_progress(deadline))
        ;
    if (!anything_running() && fake.sticky)
        drop_everything_pending();
    fake.sticky = 0;
}

EXPORT void fake_set_adversaries(int snapshot_sources, int tear, int shuffle, int check_hazards, uint64_t seed) {
    LOCKED;
    fake.snapshot_sources = snapshot_sources;
    fake.tear = tear;
    fake.shuffle = shuffle;
    fake.check_hazards = check_hazards;
    fake.random = seed ? seed : 1;
}

EXPORT void fake_lock_host_functions(int lock) {
    LOCKED;
    fake.lock_host_functions = lock;
}

EXPORT uint64_t fake_num_violations(void) {
    LOCKED;
    check_mappings();
    return fake.num_violations;
}

EXPORT int fake_violation(uint64_t index, char *text, size_t length) {
    LOCKED;
    if (index >= fake.num_violations || index >= sizeof fake.violations / sizeof *fake.violations || !length)
        return -1;
    strncpy(text, fake.violations[index], length - 1);
    text[length - 1] = 0;
    return 0;
}

EXPORT void fake_forget_violations(void) {
    LOCKED;
    fake.num_violations = 0;
}

EXPORT void fake_watch_thread(int watch) {
    LOCKED;
    fake.watching = watch;
    fake.watched = pthread_self();
}

EXPORT int64_t fake_calls(const char *symbol) {
    LOCKED;
    int api = find_api(symbol);
    return api < 0 ? -1 : (int64_t)fake.calls[api];
}

EXPORT uint64_t fake_inflight(void) {
    LOCKED;
    return fake.pending_copies;
}

EXPORT uint64_t fake_pending(void) {
    LOCKED;
    return fake.pending_ops;
}

EXPORT uint64_t fake_inflight_range(uint64_t address, size_t length) {
    LOCKED;
    return pending_copies_in(address, length);
}

EXPORT uint64_t fake_pageable(void) {
    LOCKED;
    return fake.pageable_copies;
}

EXPORT uint64_t fake_registered_bytes(void) {
    LOCKED;
    return fake.pinned_bytes;
}

EXPORT int64_t fake_event_done_ns(CUevent handle) {
    LOCKED;
    const struct event *event = event_of(handle);
    return !event ? -1 : event->recorded && event_is_done(event) ? event->done_ns : 0;
}

EXPORT int fake_context_depth(void) {
    LOCKED;
    return context_depth();
}

/* The address under which the host may look at memory of the device; 0 if it does not lie in one range. */
EXPORT uint64_t fake_alias(uint64_t address, size_t length) {
    LOCKED;
    uint16_t range = 0;
    if (resolve(address, length, &range) || !range)
        return 0;
    return (uintptr_t)alias_of(address, range);
}

/* The host says that it uses these bytes now. */
EXPORT void fake_host_access(uint64_t address, size_t length, int writes) {
    LOCKED;
    if (any_pending_in(address, length, !writes))
        violation("hazard: the host %s %#lx, %zu bytes, with an operation on them pending",
                  writes ? "writes" : "reads", (unsigned long)address, length);
}
