/* What the driver tells about pointers. */
#include "fake.h"

#include <string.h>

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_pointer, void *pointer, unsigned int flags) {
    ENTER(cuMemHostGetDevicePointer_v2);
    const struct range *range = range_at((uintptr_t)pointer, NULL);
    if (!device_pointer || flags || !range || range->kind == RANGE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    *device_pointer = (uintptr_t)pointer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *pointer) {
    ENTER(cuMemHostGetFlags);
    const struct range *range = range_at((uintptr_t)pointer, NULL);
    if (!flags || !range || range->kind == RANGE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = range->flags;
    return CUDA_SUCCESS;
}

enum attribute { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, ORDINAL = 9, START = 11, SIZE };

static CUresult tell(void *data, int attribute, uint64_t pointer) {
    const struct range *range = range_at(pointer, NULL);
    if (!data || !range)
        return CUDA_ERROR_INVALID_VALUE;
    bool device = range->kind == RANGE_DEVICE;
    switch (attribute) {
    case CONTEXT:
        *(CUcontext *)data = context_of(range->device);
        return CUDA_SUCCESS;
    case MEMORY_TYPE: /* 1 host, 2 device */
        *(unsigned *)data = device ? 2 : 1;
        return CUDA_SUCCESS;
    case DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case HOST_POINTER:
        if (device)
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case ORDINAL:
        *(int *)data = range->device;
        return CUDA_SUCCESS;
    case START:
        *(CUdeviceptr *)data = range->base;
        return CUDA_SUCCESS;
    case SIZE:
        *(size_t *)data = range->length;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
    ENTER(cuPointerGetAttribute);
    return tell(data, attribute, pointer);
}

/* Unlike the single question, memory that is not known gets zeros and no error. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr pointer) {
    ENTER(cuPointerGetAttributes);
    if (!count || !attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        bool wide = attributes[i] != MEMORY_TYPE && attributes[i] != ORDINAL;
        if (tell(data[i], attributes[i], pointer))
            memset(data[i], 0, wide ? 8 : 4);
    }
    return CUDA_SUCCESS;
}
