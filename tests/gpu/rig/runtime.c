/* Devices, streams, events and launches: kernels do nothing, and are counted. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rig.h"

/* RIG_ARCHITECTURES, from the build: what torch has kernels for, such as "sm_80 compute_90" */
#ifndef RIG_ARCHITECTURES
#error "RIG_ARCHITECTURES is not defined"
#endif

Counters rig_counters;
static __thread int device, last_error;

int failed(int error) { return last_error = error; }
int current_device(void) { return device; }

void *fresh_handle(void) {
    static long number = 0x1000;
    return (void *)__sync_fetch_and_add(&number, 64);
}

/* ---- devices ---- */

static cudaError_t enumerate(Place found[MAX_CARDS], int *number) {
    *number = 0;
    if (cuda_of_driver() / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
    int places = visible(found);
    if (places < 0) return cudaErrorUnknown;
    *number = places;
    return places ? cudaSuccess : cudaErrorNoDevice;
}

static Place place_of(int index) {
    Place found[MAX_CARDS] = {{0, -1}};
    visible(found);
    return found[index];
}

cudaError_t cudaGetDeviceCount(int *number) {
    Place found[MAX_CARDS];
    cudaError_t error = enumerate(found, number);
    return error ? failed(error) : cudaSuccess;
}

cudaError_t cudaGetDevice(int *out) {
    *out = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int wanted) {
    int number;
    cudaError_t error = cudaGetDeviceCount(&number);
    if (error) return error;
    if (wanted < 0 || wanted >= number) return failed(cudaErrorInvalidDevice);
    device = wanted;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *about, int index) {
    Place at = place_of(index);
    memset(about, 0, sizeof *about);
    name_of(at, about->name);
    uuid_bytes(at, (unsigned char *)about->uuid.bytes);
    capability_of(at.card, &about->major, &about->minor);
    about->pciBusID = at.card + 1;
    about->totalGlobalMem = (size_t)memory_of(at);
    about->multiProcessorCount = sms_of(at);
    about->warpSize = 32;
    about->maxThreadsPerBlock = 1024;
    about->maxThreadsPerMultiProcessor = 2048;
    about->maxBlocksPerMultiProcessor = 32;
    about->sharedMemPerBlock = 49152;
    about->sharedMemPerBlockOptin = about->major >= 9 ? 232448 : 101376;
    about->sharedMemPerMultiprocessor = 233472;
    about->regsPerBlock = about->regsPerMultiprocessor = 65536;
    about->maxGridSize[0] = 2147483647;
    about->maxGridSize[1] = about->maxGridSize[2] = 65535;
    about->maxThreadsDim[0] = about->maxThreadsDim[1] = 1024;
    about->maxThreadsDim[2] = 64;
    about->l2CacheSize = 50 << 20;
    about->memoryBusWidth = 5120;
    about->totalConstMem = 65536;
    about->memPitch = 2147483647;
    about->textureAlignment = 512;
    about->concurrentKernels = about->unifiedAddressing = about->managedMemory = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
    struct cudaDeviceProp about;
    cudaGetDeviceProperties(&about, index);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = about.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = about.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = about.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = about.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = about.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = about.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = about.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)about.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)about.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)about.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrMaxRegistersPerBlock: *value = about.regsPerBlock; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = about.regsPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = about.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = about.maxGridSize[1]; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int index) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", place_of(index).card + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) {
    *can = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    COUNT(syncs);
    await_exchanges(exchanges());
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = cuda_of_driver();
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* The newest version of a function, as with the macros of cuda.h. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newest);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void) {
    int error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    default: return "unknown error";
    }
}

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

/* ---- streams and events: all there is to wait for are collectives ---- */

typedef struct {
    struct timespec at;
    long exchanges; /* that were begun before it */
} Event;

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = fresh_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    COUNT(syncs);
    await_exchanges(exchanges());
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return is_exchanged(exchanges()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, &((Event *)event)->at);
    ((Event *)event)->exchanges = exchanges();
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    COUNT(event_syncs);
    await_exchanges(((Event *)event)->exchanges);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return is_exchanged(((Event *)event)->exchanges) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct timespec *from = &((Event *)start)->at, *to = &((Event *)end)->at;
    double seconds = (double)(to->tv_sec - from->tv_sec) + (to->tv_nsec - from->tv_nsec) / 1e9;
    *milliseconds = (float)(1e3 * seconds);
    return cudaSuccess;
}

/* ---- kernels ---- */

/* Whether torch has code for a card: of its generation and not newer, or PTX of any older one. */
static int has_kernels(int major, int minor) {
    char list[512] = RIG_ARCHITECTURES, *rest = list;
    for (char *entry; (entry = strsep(&rest, " "));) {
        int number = atoi(entry + strcspn(entry, "0123456789"));
        if (!strncmp(entry, "sm_", 3) && number / 10 == major && number % 10 <= minor) return 1;
        if (!strncmp(entry, "compute_", 8) && number <= 10 * major + minor) return 1;
    }
    return 0;
}

int launch_error(void) {
    static __thread int checked = -1, error;
    if (checked != device) {
        int major, minor;
        capability_of(place_of(device).card, &major, &minor);
        error = has_kernels(major, minor) ? cudaSuccess : cudaErrorNoKernelImageForDevice;
        checked = device;
    }
    return error;
}

static cudaError_t launch(void) {
    count_launch();
    return launch_error() ? failed(launch_error()) : cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
    return launch();
}

int __cudaLaunchKernel(void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                       cudaStream_t stream) {
    return launch();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments) {
    return launch();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                  unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *about, const void *function) {
    int major, minor;
    memset(about, 0, sizeof *about);
    if (launch_error()) return failed(launch_error());
    capability_of(place_of(device).card, &major, &minor);
    about->ptxVersion = about->binaryVersion = 10 * major + minor;
    about->maxThreadsPerBlock = 1024;
    about->numRegs = 32;
    about->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number,
                                                                   const void *function, int block,
                                                                   size_t shared, unsigned flags) {
    *number = 2;
    return cudaSuccess;
}

/* ---- registration of kernels when a library is loaded ---- */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *symbol, const char *name,
                            int limit, void *thread, void *block, void *size, void *grid,
                            int *warp) {}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external,
                       size_t bytes, int constant, int global) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    return cudaSuccess;
}

int __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return 0;
}
