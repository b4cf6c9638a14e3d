/* Device memory: counted and refused above a card's capacity. Pages exist once they are written. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rig.h"

typedef struct Range {
    char *start;
    size_t bytes;
    int device;
    struct Range *next;
} Range;

enum { GRANULE = 2 << 20, PAGE = 4096, LARGEST_COPY = 65536 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long used[MAX_CARDS], pinned;
static Range *ranges;

static size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t total_bytes(int device) {
    Place found[MAX_CARDS];
    return device < visible(found) ? (size_t)memory_of(found[device]) : 0;
}

size_t free_bytes(int device) {
    long left = (long)total_bytes(device) - number_of("RIG_CONTEXT", 0, 520L << 20) - used[device];
    return left > 0 ? (size_t)left : 0;
}

int take(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    long limit = number_of("RIG_PINNED", 0, -1);
    int fits = device == PINNED ? limit < 0 || pinned + (long)bytes <= limit
                                : bytes <= free_bytes(device);
    if (fits) *(device == PINNED ? &pinned : &used[device]) += (long)bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

void give_back(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    *(device == PINNED ? &pinned : &used[device]) -= (long)bytes;
    pthread_mutex_unlock(&lock);
}

void note_range(void *start, size_t bytes, int device) {
    Range *range = malloc(sizeof *range);
    pthread_mutex_lock(&lock);
    *range = (Range){start, bytes, device, ranges};
    ranges = range;
    pthread_mutex_unlock(&lock);
}

size_t forget_range(void *start, int *device) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (Range **link = &ranges; *link; link = &(*link)->next)
        if ((*link)->start == start) {
            Range *range = *link;
            *link = range->next, bytes = range->bytes, *device = range->device;
            free(range);
            break;
        }
    pthread_mutex_unlock(&lock);
    return bytes;
}

static Range found(const void *address) {
    Range range = {NULL, 0, UNKNOWN, NULL};
    pthread_mutex_lock(&lock);
    for (Range *each = ranges; each && !range.start; each = each->next)
        if ((char *)address >= each->start && (char *)address < each->start + each->bytes)
            range = *each;
    pthread_mutex_unlock(&lock);
    return range;
}

int device_of(const void *address) { return found(address).device; }

int range_of(const void *address, void **start, size_t *bytes) {
    Range range = found(address);
    if (start) *start = range.start;
    if (bytes) *bytes = range.bytes;
    return range.start != NULL;
}

static cudaError_t allocate(void **out, size_t bytes, int device) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (device == PINNED ? 0 : MAP_NORESERVE);
    *out = NULL;
    bytes = rounded(bytes ? bytes : 1, device == PINNED ? PAGE : GRANULE);
    if (!take(device, bytes)) return failed(cudaErrorMemoryAllocation);
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) {
        give_back(device, bytes);
        return failed(cudaErrorMemoryAllocation);
    }
    note_range(start, bytes, device);
    *out = start;
    return cudaSuccess;
}

static cudaError_t release(void *start) {
    int device;
    size_t bytes = forget_range(start, &device);
    if (bytes) {
        give_back(device, bytes);
        munmap(start, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    COUNT(mallocs);
    cudaError_t error = allocate(out, bytes, current_device());
    if (error) COUNT(ooms);
    return error;
}

cudaError_t cudaFree(void *start) {
    if (!start) return cudaSuccess;
    COUNT(frees);
    return release(start);
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    return allocate(out, bytes, PINNED);
}

cudaError_t cudaFreeHost(void *start) { return release(start); }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = total_bytes(current_device());
    *available = free_bytes(current_device());
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *about, const void *address) {
    int device = device_of(address);
    memset(about, 0, sizeof *about);
    about->device = device >= 0 ? device : current_device();
    if (device >= 0) {
        about->type = cudaMemoryTypeDevice;
        about->devicePointer = (void *)address;
    } else if (device == PINNED) {
        about->type = cudaMemoryTypeHost;
        about->hostPointer = (void *)address;
    }
    return cudaSuccess;
}

/* Kernels wrote nothing, so a result that is read is made up: ones, so that losses are finite. */
static void make_up(void *to, const void *from, size_t bytes) {
    const char *source = from;
    int written = 0;
    if (bytes <= LARGEST_COPY)
        for (size_t i = 0; i < bytes && !written; i++) written = source[i] != 0;
    if (written)
        memcpy(to, from, bytes);
    else if (bytes % sizeof(double) == 0)
        for (size_t i = 0; i < bytes / sizeof(double); i++) ((double *)to)[i] = 1.0;
    else
        memset(to, bytes == 1, bytes);
}

/* Copy what is small, which may be indexes or flags; of larger blocks count the bytes only. */
static cudaError_t copy(void *to, const void *from, size_t bytes) {
    int target = device_of(to), source = device_of(from);
    if (target >= 0 && source >= 0) {
        COUNT(d2d);
        if (bytes <= LARGEST_COPY) memmove(to, from, bytes);
    } else if (target >= 0) {
        COUNT(h2d), ADD(h2d_bytes, bytes);
        if (bytes <= LARGEST_COPY) memcpy(to, from, bytes);
    } else if (source >= 0) {
        COUNT(d2h), ADD(d2h_bytes, bytes);
        make_up(to, from, bytes);
    } else {
        memmove(to, from, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    COUNT(syncs);
    await_exchanges(exchanges());
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int target, const void *from, int source, size_t bytes,
                                cudaStream_t stream) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    return cudaSuccess;
}

cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    COUNT(memsets);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    COUNT(memsets);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static char memory[PAGE];
    *out = memory;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = fresh_handle();
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                    void *value) {
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}
