/* libnvidia-ml: what NVML reports of the machine. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "machine.h"

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15
};
enum { USED_BYTES = 1 << 30, POWER_MW = 300000, UTIL_PERCENT = 42 };

typedef void *Handle;
typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;
typedef struct {
    unsigned gpu, memory;
} Utilization;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

/* handles: 256 * (card + 1) + slice + 1 */
static Handle handle_of(Place at) {
    return (Handle)(uintptr_t)(256 * (at.card + 1) + at.slice + 1);
}

static Place place_of(Handle handle) {
    int number = (int)(uintptr_t)handle;
    return (Place){number / 256 - 1, number % 256 - 1};
}

static int give(Place at, Handle *handle) {
    if (is_lost(at.card)) return GPU_IS_LOST;
    *handle = handle_of(at);
    return SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "%s", text_of("RIG_DRIVER", 0, "580.65.06"));
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = cuda_of_driver();
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* ---- devices ---- */

int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = (unsigned)cards();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    return (int)index < cards() ? give((Place){(int)index, -1}, handle) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, Handle *handle) {
    char uuid[64];
    for (int card = 0; card < cards(); card++)
        for (int slice = -1; slice < 0 || slice < slices_of(card); slice++) {
            uuid_of((Place){card, slice}, uuid);
            if (!strcmp(uuid, wanted)) return give((Place){card, slice}, handle);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Handle *handle) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2 || number < 1) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}

int nvmlDeviceGetUUID(Handle handle, char *text, unsigned length) {
    char uuid[64];
    uuid_of(place_of(handle), uuid);
    snprintf(text, length, "%s", uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(Handle handle, char *text, unsigned length) {
    char name[256];
    name_of(place_of(handle), name);
    snprintf(text, length, "%s", name);
    return SUCCESS;
}

int nvmlDeviceGetIndex(Handle handle, unsigned *index) {
    *index = (unsigned)place_of(handle).card;
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(Handle handle, unsigned *number) {
    return nvmlDeviceGetIndex(handle, number);
}

int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) {
    capability_of(place_of(handle).card, major, minor);
    return SUCCESS;
}

/* ---- MIG ---- */

int nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending) {
    *current = *pending = slices_of(place_of(handle).card) >= 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned *number) {
    *number = slices_of(place_of(handle).card) >= 0 ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *slice) {
    Place at = place_of(handle);
    if ((int)index >= slices_of(at.card)) return NOT_FOUND;
    return give((Place){at.card, (int)index}, slice);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle slice, Handle *handle) {
    return give((Place){place_of(slice).card, -1}, handle);
}

int nvmlDeviceIsMigDeviceHandle(Handle handle, unsigned *is_slice) {
    *is_slice = place_of(handle).slice >= 0;
    return SUCCESS;
}

/* ---- readings; of a slice, NVML reports its memory alone ---- */

static int is_slice(Handle handle) { return place_of(handle).slice >= 0; }

int nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory) {
    if (number_of("RIG_NO_MEMORY", place_of(handle).card, 0)) return NOT_SUPPORTED;
    memory->total = (unsigned long long)memory_of(place_of(handle));
    memory->used = USED_BYTES;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2 *memory) {
    Memory plain;
    int result = nvmlDeviceGetMemoryInfo(handle, &plain);
    if (result == SUCCESS)
        memory->total = plain.total, memory->free = plain.free, memory->used = plain.used,
        memory->reserved = 0;
    return result;
}

int nvmlDeviceGetUtilizationRates(Handle handle, Utilization *rates) {
    if (is_slice(handle)) return NOT_SUPPORTED;
    *rates = (Utilization){UTIL_PERCENT, 7};
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Handle handle, unsigned *milliwatts) {
    if (is_slice(handle)) return NOT_SUPPORTED;
    *milliwatts = POWER_MW;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(Handle handle, unsigned long long *millijoules) {
    struct timespec now;
    if (is_slice(handle)) return NOT_SUPPORTED;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (unsigned long long)(((double)now.tv_sec + now.tv_nsec / 1e9) * POWER_MW);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *number, Process *processes) {
    unsigned running = number_of("RIG_SHARED", 0, 0) ? 2 : 0, room = *number;
    *number = running;
    if (room < running) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < running; i++) processes[i] = (Process){1000 + i, USED_BYTES, 0, 0};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle handle, unsigned *number, Process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, number, processes);
}

/* the first version, which torch looks up and the newer ones replace */
int nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned *number, void *processes) {
    *number = 0;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Handle one, Handle other, int *level) {
    *level = 30;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Handle handle, unsigned link, unsigned *type) {
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle handle, unsigned link, void *info) {
    return NOT_SUPPORTED;
}

/* no NVLink fabric: the caller's structure keeps its state, "not supported" */
int nvmlDeviceGetGpuFabricInfo(Handle handle, void *info) { return SUCCESS; }
int nvmlDeviceGetGpuFabricInfoV(Handle handle, void *info) { return SUCCESS; }
