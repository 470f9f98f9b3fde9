/* How a program gets in: versions, functions by name, errors by name, devices. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

/* Only the addresses are taken here; each file gives its own functions their true types. */
#define DECLARE(name, symbol, since, traits) extern char symbol##_address[] __asm__(#symbol);
APIS(DECLARE)

static const struct {
    const char *name;
    int since;
    void *function;
} entries[] = {
#define ENTRY(name, symbol, since, traits) {#name, since, symbol##_address},
    APIS(ENTRY)};

static CUresult find_function(const char *name, void **function, int version, int *status) {
    if (!name || !function || version < 2000 || version > fake.driver_version)
        return CUDA_ERROR_INVALID_VALUE;
    int newest = 0;
    bool known = false;
    *function = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(entries[i].name, name))
            continue;
        known = true;
        if (entries[i].since <= version && entries[i].since > newest) {
            newest = entries[i].since;
            *function = entries[i].function;
        }
    }
    if (status)
        *status = newest ? 0 : known ? 2 : 1; /* found, version not sufficient, symbol not found */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    ENTER(cuGetProcAddress_v2);
    return flags > 2 ? CUDA_ERROR_INVALID_VALUE : find_function(name, function, version, status);
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    ENTER(cuGetProcAddress);
    if (flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find_function(name, function, version, NULL);
    return result ? result : *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuInit(unsigned int flags) {
    ENTER(cuInit);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake.absent || !fake.num_devices)
        return CUDA_ERROR_NO_DEVICE;
    fake.initialised = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    ENTER(cuDriverGetVersion);
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = fake.driver_version;
    return CUDA_SUCCESS;
}

static const char *name_of_result(CUresult result) {
    switch (result) {
#define NAME(name, value) \
    case value:           \
        return "CUDA_" #name;
        RESULTS(NAME)
    }
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult result, const char **name) {
    ENTER(cuGetErrorName);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = name_of_result(result);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult result, const char **text) {
    ENTER(cuGetErrorString);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = name_of_result(result) ? "an error of the fake driver" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_device(CUdevice device) { return device >= 0 && device < fake.num_devices; }

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = fake.num_devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(cuDeviceGetName);
    if (!name || length < 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return CUDA_SUCCESS;
}

static CUresult write_uuid(CUuuid *uuid, CUdevice device) {
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0xfa, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid);
    return write_uuid(uuid, device);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid_v2);
    return write_uuid(uuid, device);
}

/* What a test has set comes first; what is not listed is 0, as an unsupported feature is. */
static int attribute_value(int attribute, CUdevice device) {
    for (int i = 0; i < fake.num_attributes; i++)
        if (fake.attribute_ids[i] == attribute)
            return fake.attribute_values[i];
    switch (attribute) {
    case 16: /* multiprocessors */
        return 132;
    case 19: /* can map host memory */
    case 41: /* unified addressing */
    case 78: /* stream priorities */
    case 91: /* host pointers of registered memory */
    case 99: /* host registration */
    case 115: /* memory pools */
        return 1;
    case 33: /* PCI bus */
        return device + 1;
    case 40: /* copy engines */
        return 3;
    case 75: /* compute capability 9.0 */
        return 9;
    case 134: /* NUMA node of the host memory next to it: no NUMA */
        return -1;
    default:
        return 0;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute);
    if (!value || attribute < 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_value(attribute, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER(cuDeviceGetPCIBusId);
    if (!text || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02x:00.0", attribute_value(33, device));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem_v2);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = fake.device_limit;
    return CUDA_SUCCESS;
}
