/* Primary contexts and each thread's stack of current ones. */
#include "fake.h"

static char contexts[MAX_DEVICES]; /* a context's handle is its place here */
static uint64_t generation;        /* of all contexts: a reset empties every thread's stack */

static _Thread_local struct {
    uint64_t generation;
    int depth;
    CUcontext items[MAX_DEPTH];
} stack;

static void empty_stale_stack(void) {
    if (stack.generation != generation)
        stack.depth = 0;
    stack.generation = generation;
}

void forget_contexts(void) {
    generation++;
    for (int device = 0; device < MAX_DEVICES; device++)
        fake.primary[device] = 0;
}

CUcontext current_context(void) {
    empty_stale_stack();
    return stack.depth ? stack.items[stack.depth - 1] : NULL;
}

int context_depth(void) {
    empty_stale_stack();
    return stack.depth;
}

CUcontext context_of(int device) { return &contexts[device]; }

/* -1 where the handle is none, or that of a context nobody retains. */
int device_of(CUcontext context) {
    for (int device = 0; device < fake.num_devices; device++)
        if (context == &contexts[device] && fake.primary[device])
            return device;
    return -1;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain);
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= fake.num_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    fake.primary[device]++;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease_v2);
    if (device < 0 || device >= fake.num_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!fake.primary[device])
        return CUDA_ERROR_INVALID_CONTEXT;
    if (fake.primary[device] == 1 && fake.pending_ops)
        violation("the primary context was released for good with %lu operations pending",
                  (unsigned long)fake.pending_ops);
    fake.primary[device]--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState);
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= fake.num_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = fake.primary[device] > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent);
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent);
    empty_stale_stack();
    if (context && device_of(context) < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!context)
        stack.depth -= stack.depth > 0;
    else if (stack.depth)
        stack.items[stack.depth - 1] = context;
    else
        stack.items[stack.depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(cuCtxPushCurrent_v2);
    empty_stale_stack();
    if (device_of(context) < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.depth == MAX_DEPTH) {
        violation("%d contexts were pushed on one thread and not popped", stack.depth);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stack.items[stack.depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(cuCtxPopCurrent_v2);
    empty_stale_stack();
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext popped = stack.items[--stack.depth];
    if (context)
        *context = popped;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = device_of(current_context());
    return *device < 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    ENTER(cuCtxGetDevice_v2);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = device_of(context ? context : current_context());
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

static CUresult wait_for_everything(void) {
    int64_t deadline = end_of_wait();
    while (fake.pending_ops && !fake.sticky)
        if (!wait_for_progress(deadline)) {
            violation("cuCtxSynchronize waited in vain");
            return CUDA_ERROR_LAUNCH_TIMEOUT;
        }
    return fake.sticky;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize);
    return wait_for_everything();
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) {
    ENTER(cuCtxSynchronize_v2);
    if (device_of(context ? context : current_context()) < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    return wait_for_everything();
}
