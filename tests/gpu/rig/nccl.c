/* NCCL: a collective acts as if all ranks gave what this one gives; calls and bytes are counted.

   RIG_NCCL_FAILS: if 1, communicators cannot be made, as without a network between the cards */
#include <stdlib.h>
#include <string.h>

#include "rig.h"

int cudaMalloc(void **out, size_t bytes);
int cudaFree(void *start);

typedef struct {
    char bytes[128];
} UniqueId;

typedef struct {
    int ranks, rank;
} Communicator;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, LARGEST_COPY = 65536 };

static int make(Communicator **communicator, int ranks, int rank) {
    if (number_of("RIG_NCCL_FAILS", 0, 0)) return SYSTEM_ERROR;
    *communicator = calloc(1, 256);
    **communicator = (Communicator){ranks, rank};
    return SUCCESS;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclGetUniqueId(UniqueId *id) {
    memset(id, 7, sizeof *id);
    return 0;
}

const char *ncclGetErrorString(int result) { return result ? "unhandled system error" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclCommInitRank(Communicator **communicator, int ranks, UniqueId id, int rank) {
    return make(communicator, ranks, rank);
}

int ncclCommInitRankConfig(Communicator **communicator, int ranks, UniqueId id, int rank,
                           void *config) {
    return make(communicator, ranks, rank);
}

int ncclCommInitRankScalable(Communicator **communicator, int ranks, int rank, int ids, void *id,
                             void *config) {
    return make(communicator, ranks, rank);
}

int ncclCommSplit(Communicator *from, int color, int key, Communicator **communicator,
                  void *config) {
    return make(communicator, from->ranks, from->rank);
}

int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = 0;
    return 0;
}

int ncclCommCount(Communicator *communicator, int *number) {
    *number = communicator->ranks;
    return 0;
}

int ncclCommUserRank(Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

int ncclCommCuDevice(void *communicator, int *device) {
    *device = current_device();
    return 0;
}

int ncclMemAlloc(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
int ncclMemFree(void *start) { return cudaFree(start); }

/* Bytes per element of ncclDataType_t. */
static size_t width(int type) {
    switch (type) {
    case 0: case 1: case 10: case 11: return 1; /* int8, uint8, float8 */
    case 6: case 9: return 2;                   /* float16, bfloat16 */
    case 2: case 3: case 7: return 4;           /* int32, uint32, float32 */
    default: return 8;
    }
}

/* Copy what is small, which may be sizes or flags. */
static int exchange(const void *from, void *to, size_t bytes, int copies) {
    COUNT(collectives);
    for (int i = 0; bytes <= LARGEST_COPY && i < copies; i++)
        memmove((char *)to + (size_t)i * bytes, from, bytes);
    return SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation,
                  Communicator *communicator, void *stream) {
    ADD(reduce_bytes, number * width(type));
    return exchange(from, to, number * width(type), 1);
}

int ncclAllGather(const void *from, void *to, size_t number, int type, Communicator *communicator,
                  void *stream) {
    ADD(gather_bytes, number * width(type));
    return exchange(from, to, number * width(type), communicator->ranks);
}

int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation,
                      Communicator *communicator, void *stream) {
    size_t bytes = number * width(type);
    ADD(scatter_bytes, bytes);
    return exchange((const char *)from + (size_t)communicator->rank * bytes, to, bytes, 1);
}

int ncclBroadcast(const void *from, void *to, size_t number, int type, int root,
                  Communicator *communicator, void *stream) {
    return exchange(from, to, number * width(type), communicator->rank == root);
}

int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root,
               Communicator *communicator, void *stream) {
    return exchange(from, to, number * width(type), communicator->rank == root);
}

int ncclBcast(void) { return exchange(NULL, NULL, 0, 0); }
int ncclSend(void) { return exchange(NULL, NULL, 0, 0); }
int ncclRecv(void) { return exchange(NULL, NULL, 0, 0); }
