/* The CUDA driver's functions that torch, Triton and Inductor need; the others are stubs. */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rig.h"

int cudaGetDevice(int *device);
int cudaGetDeviceCount(int *number);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaStreamIsCapturing(void *stream, int *status);

static void *object(void) { return calloc(1, 16); }

/* ---- devices and contexts ---- */

CUresult cuInit(unsigned flags) {
    int number;
    return (CUresult)cudaGetDeviceCount(&number);
}

CUresult cuDriverGetVersion(int *version) {
    *version = cuda_of_driver();
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unknown error";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *number) { return (CUresult)cudaGetDeviceCount(number); }

CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *value = 1;
        return CUDA_SUCCESS;
    }
    return (CUresult)cudaDeviceGetAttribute(value, (int)attribute, device);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    Place found[MAX_CARDS];
    char text[256] = "";
    if (device < visible(found)) name_of(found[device], text);
    snprintf(name, (size_t)length, "%s", text);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = total_bytes(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { return (CUresult)cudaGetDevice(device); }

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)0x100;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return cuCtxGetCurrent(context);
}

/* ---- modules and kernels, as compiled by Triton ---- */

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    *module = object();
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = object();
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned number,
                            CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = object();
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options,
                           void **values, unsigned number, CUlibraryOption *library_options,
                           void **library_values, unsigned library_number) {
    *library = object();
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    *kernel = object();
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = object();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 32
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                    : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *number, CUfunction function, int block,
                                                     size_t shared) {
    *number = 2;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function,
                                      const CUlaunchConfig *config) {
    *number = 64;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **arguments, void **extra) {
    count_launch();
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
    count_launch();
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing(stream, (int *)status);
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = address;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)value = device_of((void *)address);
    else
        *(int *)value = device_of((void *)address) == PINNED ? CU_MEMORYTYPE_HOST
                                                             : CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* Functions that NVRTC, which compiles some kernels of torch, does without. */
CUresult cuGetExportTable(const void **table, const CUuuid *name) {
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- virtual memory: the expandable segments of torch's allocator ---- */

typedef struct {
    size_t bytes;
    int device;
} Physical;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *about,
                                       CUmemAllocationGranularity_flags option) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    munmap((void *)address, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *about, unsigned long long flags) {
    COUNT(mallocs);
    if (!take(about->location.id, bytes)) {
        COUNT(ooms);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Physical *physical = malloc(sizeof *physical);
    *physical = (Physical){bytes, about->location.id};
    *handle = (CUmemGenericAllocationHandle)physical;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Physical *physical = (Physical *)handle;
    COUNT(frees);
    give_back(physical->device, physical->bytes);
    free(physical);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    note_range((void *)address, bytes, ((Physical *)handle)->device);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    int device;
    for (size_t done = 0, size; done < bytes; done += size) {
        size = forget_range((char *)address + done, &device);
        if (!size) return CUDA_ERROR_INVALID_VALUE;
        madvise((char *)address + done, size, MADV_DONTNEED);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    return range_of((void *)address, (void **)start, bytes) ? CUDA_SUCCESS
                                                            : CUDA_ERROR_INVALID_VALUE;
}
