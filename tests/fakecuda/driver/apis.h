/* Every function of the driver that the fake has: X(name, symbol, first driver version, traits).
 *
 * `cuGetProcAddress(name, version)` gives the newest symbol of that name whose first version is at most the one asked
 * for. Traits say what a call means for the rules the fake enforces:
 *
 *   BLOCKS    waits for the device, or pins or frees memory: a violation on a watched thread (the event loop's)
 *   UNSAFE    prohibited while a capture is going on, unless the thread has exchanged its mode to relaxed
 *   STICKY    answers the context's error once a kernel or copy has failed
 *   NEEDS_CTX needs a current context
 *   EARLY     allowed before cuInit
 *
 * UNSAFE is wider than what NVIDIA documents, on purpose: memory, registration, queries and waits are known to break a
 * capture; creating and destroying streams may allocate, so it counts as well. Recording events, waiting for them on a
 * stream and copying on a stream that does not capture are safe on a real driver and are so here. */
#ifndef FAKE_APIS_H
#define FAKE_APIS_H

enum traits { BLOCKS = 1, UNSAFE = 2, STICKY = 4, NEEDS_CTX = 8, EARLY = 16 };

#define DEVICE_CALL (STICKY | NEEDS_CTX)
#define MEMORY_CALL (BLOCKS | UNSAFE | STICKY | NEEDS_CTX)
#define WAITING_CALL (BLOCKS | UNSAFE | STICKY)

#define APIS(X)                                                                              \
    X(cuInit, cuInit, 2000, EARLY)                                                           \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, EARLY)                                   \
    X(cuGetErrorName, cuGetErrorName, 6000, EARLY)                                           \
    X(cuGetErrorString, cuGetErrorString, 6000, EARLY)                                       \
    X(cuGetProcAddress, cuGetProcAddress, 11030, EARLY)                                      \
    X(cuGetProcAddress, cuGetProcAddress_v2, 12000, EARLY)                                   \
    X(cuDeviceGet, cuDeviceGet, 2000, 0)                                                     \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000, 0)                                           \
    X(cuDeviceGetName, cuDeviceGetName, 2000, 0)                                             \
    X(cuDeviceGetUuid, cuDeviceGetUuid, 9020, 0)                                             \
    X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, 0)                                         \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, 0)                                   \
    X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, 0)                                     \
    X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, 0)                                        \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 0)                           \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, 0)                     \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, 0)                       \
    X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, 0)                                             \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, 0)                                             \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, 0)                                        \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, 0)                                          \
    X(cuCtxGetDevice, cuCtxGetDevice, 2000, NEEDS_CTX)                                       \
    X(cuCtxGetDevice, cuCtxGetDevice_v2, 13000, 0)                                           \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000, WAITING_CALL | NEEDS_CTX)                    \
    X(cuCtxSynchronize, cuCtxSynchronize_v2, 13000, WAITING_CALL)                            \
    X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050, NEEDS_CTX)             \
    X(cuMemGetInfo, cuMemGetInfo_v2, 3020, DEVICE_CALL)                                      \
    X(cuMemAlloc, cuMemAlloc_v2, 3020, MEMORY_CALL)                                          \
    X(cuMemFree, cuMemFree_v2, 3020, MEMORY_CALL)                                            \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020, MEMORY_CALL)                                     \
    X(cuMemAllocHost, cuMemAllocHost_v2, 3020, MEMORY_CALL)                                  \
    X(cuMemFreeHost, cuMemFreeHost, 2000, MEMORY_CALL)                                       \
    X(cuMemHostRegister, cuMemHostRegister_v2, 6050, MEMORY_CALL)                            \
    X(cuMemHostUnregister, cuMemHostUnregister, 4000, MEMORY_CALL)                           \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, DEVICE_CALL)            \
    X(cuMemHostGetFlags, cuMemHostGetFlags, 2030, DEVICE_CALL)                               \
    X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, 0)                                 \
    X(cuPointerGetAttributes, cuPointerGetAttributes, 7000, 0)                               \
    X(cuMemcpy, cuMemcpy, 4000, MEMORY_CALL)                                                 \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, MEMORY_CALL)                                      \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, MEMORY_CALL)                                      \
    X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020, MEMORY_CALL)                                      \
    X(cuMemsetD8, cuMemsetD8_v2, 3020, MEMORY_CALL)                                          \
    X(cuMemcpyAsync, cuMemcpyAsync, 4000, DEVICE_CALL)                                       \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, DEVICE_CALL)                            \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, DEVICE_CALL)                            \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020, DEVICE_CALL)                            \
    X(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080, DEVICE_CALL)                            \
    X(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, 13000, DEVICE_CALL)                         \
    X(cuMemsetD8Async, cuMemsetD8Async, 3020, DEVICE_CALL)                                   \
    X(cuMemsetD32Async, cuMemsetD32Async, 3020, DEVICE_CALL)                                 \
    X(cuStreamWriteValue32, cuStreamWriteValue32_v2, 11070, DEVICE_CALL)                     \
    X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, DEVICE_CALL)                                \
    X(cuStreamCreate, cuStreamCreate, 2000, DEVICE_CALL | UNSAFE)                            \
    X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050, DEVICE_CALL | UNSAFE)    \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000, UNSAFE)                                     \
    X(cuStreamQuery, cuStreamQuery, 2000, STICKY | UNSAFE)                                   \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000, WAITING_CALL)                          \
    X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, STICKY)                                    \
    X(cuStreamGetPriority, cuStreamGetPriority, 5050, 0)                                     \
    X(cuStreamGetFlags, cuStreamGetFlags, 5050, 0)                                           \
    X(cuStreamGetCtx, cuStreamGetCtx, 9020, 0)                                               \
    X(cuStreamGetCtx, cuStreamGetCtx_v2, 12050, 0)                                           \
    X(cuStreamGetDevice, cuStreamGetDevice, 12080, 0)                                        \
    X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, 0)                                    \
    X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, 11030, 0)                           \
    X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030, 0)                           \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, STICKY)                          \
    X(cuStreamEndCapture, cuStreamEndCapture, 10000, 0)                                      \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, 0)        \
    X(cuGraphDestroy, cuGraphDestroy, 10000, 0)                                              \
    X(cuEventCreate, cuEventCreate, 2000, DEVICE_CALL)                                       \
    X(cuEventDestroy, cuEventDestroy_v2, 4000, 0)                                            \
    X(cuEventRecord, cuEventRecord, 2000, STICKY)                                            \
    X(cuEventRecordWithFlags, cuEventRecordWithFlags, 11010, STICKY)                         \
    X(cuEventQuery, cuEventQuery, 2000, STICKY | UNSAFE)                                     \
    X(cuEventSynchronize, cuEventSynchronize, 2000, WAITING_CALL)                            \
    X(cuEventElapsedTime, cuEventElapsedTime, 2000, 0)                                       \
    X(cuEventElapsedTime, cuEventElapsedTime_v2, 12080, 0)

#define API_ID(name, symbol, since, traits) API_##symbol,
enum api { APIS(API_ID) API_COUNT };

#endif
