/* The part of the CUDA driver API that the fake implements: types and constants, declared by hand.
 *
 * Written from the documentation of the driver API; NVIDIA's own header is neither needed nor used. */
#ifndef FAKE_CU_H
#define FAKE_CU_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext;
typedef void *CUstream;
typedef void *CUevent;
typedef void *CUgraph;
typedef void (*CUhostFn)(void *user_data);

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

typedef struct {
    char bytes[16];
} CUuuid;

enum source_order { ORDER_STREAM = 1, ORDER_DURING_API_CALL = 2, ORDER_ANY = 3 };

enum capture_mode { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

enum capture_status { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

enum { STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2 };

enum { ADDRESS_LEGACY = 1, ADDRESS_PER_THREAD = 2 };

/* X(name without its prefix, value): the results the fake gives by itself; a test may inject any other number. */
#define RESULTS(X)                           \
    X(SUCCESS, 0)                            \
    X(ERROR_INVALID_VALUE, 1)                \
    X(ERROR_OUT_OF_MEMORY, 2)                \
    X(ERROR_NOT_INITIALIZED, 3)              \
    X(ERROR_DEINITIALIZED, 4)                \
    X(ERROR_NO_DEVICE, 100)                  \
    X(ERROR_INVALID_DEVICE, 101)             \
    X(ERROR_INVALID_CONTEXT, 201)            \
    X(ERROR_ECC_UNCORRECTABLE, 214)          \
    X(ERROR_INVALID_HANDLE, 400)             \
    X(ERROR_ILLEGAL_STATE, 401)              \
    X(ERROR_NOT_FOUND, 500)                  \
    X(ERROR_NOT_READY, 600)                  \
    X(ERROR_ILLEGAL_ADDRESS, 700)            \
    X(ERROR_LAUNCH_TIMEOUT, 702)             \
    X(ERROR_CONTEXT_IS_DESTROYED, 709)       \
    X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
    X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713) \
    X(ERROR_LAUNCH_FAILED, 719)              \
    X(ERROR_NOT_PERMITTED, 800)              \
    X(ERROR_NOT_SUPPORTED, 801)              \
    X(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
    X(ERROR_STREAM_CAPTURE_INVALIDATED, 901) \
    X(ERROR_STREAM_CAPTURE_MERGE, 902)       \
    X(ERROR_STREAM_CAPTURE_UNMATCHED, 903)   \
    X(ERROR_STREAM_CAPTURE_UNJOINED, 904)    \
    X(ERROR_STREAM_CAPTURE_ISOLATION, 905)   \
    X(ERROR_STREAM_CAPTURE_IMPLICIT, 906)    \
    X(ERROR_CAPTURED_EVENT, 907)             \
    X(ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) \
    X(ERROR_UNKNOWN, 999)

#define RESULT_CONSTANT(name, value) CUDA_##name = value,
enum { RESULTS(RESULT_CONSTANT) CUDA_RESULTS_END };

#endif
