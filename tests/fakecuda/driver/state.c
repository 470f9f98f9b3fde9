/* The one lock, what every call goes through, violations, the clock.
 *
 * `enter` is the gate of each driver call: forked children, injected faults, sticky errors, missing contexts, captures
 * and watched threads are dealt with here, so that the functions themselves only say what they do. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct fake fake = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .driver_version = 13000,
    .num_devices = 1,
};

static const struct {
    const char *symbol;
    int traits;
} apis[API_COUNT] = {
#define API_ROW(name, symbol, since, traits) [API_##symbol] = {#symbol, (traits)},
    APIS(API_ROW)};

const char *api_name(enum api api) { return apis[api].symbol; }

int find_api(const char *symbol) {
    for (int api = 0; api < API_COUNT; api++)
        if (!strcmp(apis[api].symbol, symbol))
            return api;
    return -1;
}

static void mark_child_as_forked(void) {
    pthread_mutex_init(&fake.lock, NULL); /* whoever held it does not exist here */
    fake.forked = true;
}

__attribute__((constructor)) static void prepare(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.work, &monotonic);
    pthread_cond_init(&fake.progress, &monotonic);
    pthread_atfork(NULL, NULL, mark_child_as_forked);
}

static CUresult check_entry(enum api api) {
    int traits = apis[api].traits;
    struct injection *injection = &fake.injections[api];
    fake.calls[api]++;
    if (fake.forked) {
        violation("%s: called in a forked child", api_name(api));
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (injection->nth > 0 && --injection->nth == 0)
        return injection->code;
    if (!(traits & EARLY) && !fake.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((traits & BLOCKS) && fake.watching && pthread_equal(fake.watched, pthread_self()))
        violation("%s: called on a thread that must not wait", api_name(api));
    if (fake.captures && (traits & UNSAFE)) {
        CUresult refused = check_capture();
        if (refused)
            return refused;
    }
    if ((traits & NEEDS_CTX) && !current_context())
        return CUDA_ERROR_INVALID_CONTEXT;
    return (traits & STICKY) ? fake.sticky : CUDA_SUCCESS;
}

static _Thread_local bool in_host_function;

void set_in_host_function(bool now) { in_host_function = now; }

CUresult enter(struct entry *entry, enum api api) {
    if (in_host_function) { /* it may hold the lock: never wait for it here */
        __atomic_fetch_add(&fake.calls[api], 1, __ATOMIC_RELAXED);
        return CUDA_ERROR_NOT_PERMITTED;
    }
    pthread_mutex_lock(&fake.lock);
    entry->locked = true;
    return check_entry(api);
}

void leave(struct entry *entry) {
    if (entry->locked)
        pthread_mutex_unlock(&fake.lock);
}

void violation(const char *format, ...) {
    size_t kept = sizeof fake.violations / sizeof *fake.violations;
    uint64_t index = fake.num_violations++;
    if (index >= kept)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fake.violations[index], sizeof *fake.violations, format, arguments);
    va_end(arguments);
}

/* xorshift64*: the adversaries' choices, the same for the same seed. */
uint64_t draw(void) {
    fake.random ^= fake.random >> 12;
    fake.random ^= fake.random << 25;
    fake.random ^= fake.random >> 27;
    return fake.random * 2685821657736338717ULL;
}

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int64_t clock_ns(void) { return fake.virtual_time ? fake.virtual_ns : monotonic_ns(); }

int64_t end_of_wait(void) { return monotonic_ns() + fake.patience_ns; }

/* Gives the lock back until something has completed; false if that took until `deadline_ns` of the real clock. */
bool wait_for_progress(int64_t deadline_ns) {
    struct timespec until = {deadline_ns / 1000000000LL, deadline_ns % 1000000000LL};
    return pthread_cond_timedwait(&fake.progress, &fake.lock, &until) != ETIMEDOUT;
}
