/* NCCL: a collective acts as if all ranks gave what this one gives; calls and bytes are counted.

   RIG_NCCL_FAILS    if 1, communicators cannot be made, as without a network between the cards
   RIG_NCCL_MEETING  folder in which ranks meet that are processes: a collective ends once all ranks
                     have called it. Without, it ends at once, and a process can be a rank of many */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rig.h"

int cudaMalloc(void **out, size_t bytes);
int cudaFree(void *start);

typedef struct {
    char bytes[128];
} UniqueId;

typedef struct {
    int ranks, rank, splits, is_aborted;
    UniqueId id;
    volatile long *calls; /* of each rank, in memory of all processes; NULL: ranks do not wait */
} Communicator;

typedef struct Exchange {
    Communicator *communicator;
    long call;
    struct Exchange *next;
} Exchange;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, LARGEST_COPY = 65536, POLL_US = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Exchange *oldest, **newest = &oldest;
static long begun, ended;

static int make(Communicator **communicator, int ranks, int rank, const UniqueId *id) {
    if (number_of("RIG_NCCL_FAILS", 0, 0)) return SYSTEM_ERROR;
    *communicator = malloc(sizeof **communicator);
    **communicator = (Communicator){ranks, rank, 0, 0, *id, NULL};
    char path[512];
    size_t bytes = (size_t)ranks * sizeof(long);
    if (!getenv("RIG_NCCL_MEETING")) return SUCCESS;
    snprintf(path, sizeof path, "%s/%s", getenv("RIG_NCCL_MEETING"), id->bytes);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return SYSTEM_ERROR;
    void *calls = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (calls == MAP_FAILED) return SYSTEM_ERROR;
    (*communicator)->calls = calls;
    return SUCCESS;
}

static int is_over(const Exchange *exchange) {
    const Communicator *among = exchange->communicator;
    for (int rank = 0; rank < among->ranks && !among->is_aborted; rank++)
        if (among->calls[rank] < exchange->call) return 0;
    return 1;
}

long exchanges(void) { return __sync_fetch_and_add(&begun, 0); }

int is_exchanged(long number) {
    pthread_mutex_lock(&lock);
    while (oldest && is_over(oldest)) {
        Exchange *over = oldest;
        oldest = over->next, ended++;
        if (!oldest) newest = &oldest;
        free(over);
    }
    int is = ended >= number;
    pthread_mutex_unlock(&lock);
    return is;
}

void await_exchanges(long number) {
    while (!is_exchanged(number)) usleep(POLL_US);
}

/* Begin a collective, which ends once all ranks have called it. */
static void begin(Communicator *communicator) {
    COUNT(collectives);
    if (!communicator || !communicator->calls) return;
    Exchange *made = malloc(sizeof *made);
    pthread_mutex_lock(&lock);
    long call = ++communicator->calls[communicator->rank];
    *made = (Exchange){communicator, call, NULL};
    *newest = made, newest = &made->next, begun++;
    pthread_mutex_unlock(&lock);
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "nccl-%d-%p", getpid(), fresh_handle());
    return 0;
}

const char *ncclGetErrorString(int result) { return result ? "unhandled system error" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclCommInitRank(Communicator **communicator, int ranks, UniqueId id, int rank) {
    return make(communicator, ranks, rank, &id);
}

int ncclCommInitRankConfig(Communicator **communicator, int ranks, UniqueId id, int rank,
                           void *config) {
    return make(communicator, ranks, rank, &id);
}

int ncclCommInitRankScalable(Communicator **communicator, int ranks, int rank, int ids,
                             UniqueId *id, void *config) {
    return make(communicator, ranks, rank, id);
}

int ncclCommSplit(Communicator *from, int color, int key, Communicator **communicator,
                  void *config) {
    UniqueId id;
    snprintf(id.bytes, sizeof id.bytes, "%.90s-%d-%d", from->id.bytes, from->splits++, color);
    return make(communicator, from->ranks, from->rank, &id);
}

int ncclCommAbort(Communicator *communicator) {
    communicator->is_aborted = 1;
    return SUCCESS;
}

int ncclCommFinalize(Communicator *communicator) {
    await_exchanges(exchanges());
    return SUCCESS;
}

int ncclCommDestroy(Communicator *communicator) { return ncclCommFinalize(communicator); }

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
static int exchange(Communicator *among, const void *from, void *to, size_t bytes, int copies) {
    begin(among);
    for (int i = 0; bytes <= LARGEST_COPY && i < copies; i++)
        memmove((char *)to + (size_t)i * bytes, from, bytes);
    return SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation,
                  Communicator *communicator, void *stream) {
    ADD(reduce_bytes, number * width(type));
    return exchange(communicator, from, to, number * width(type), 1);
}

int ncclAllGather(const void *from, void *to, size_t number, int type, Communicator *communicator,
                  void *stream) {
    ADD(gather_bytes, number * width(type));
    return exchange(communicator, from, to, number * width(type), communicator->ranks);
}

int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation,
                      Communicator *communicator, void *stream) {
    size_t bytes = number * width(type);
    ADD(scatter_bytes, bytes);
    from = (const char *)from + (size_t)communicator->rank * bytes;
    return exchange(communicator, from, to, bytes, 1);
}

int ncclBroadcast(const void *from, void *to, size_t number, int type, int root,
                  Communicator *communicator, void *stream) {
    return exchange(communicator, from, to, number * width(type), communicator->rank == root);
}

int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root,
               Communicator *communicator, void *stream) {
    return exchange(communicator, from, to, number * width(type), communicator->rank == root);
}

int ncclBcast(void) { return exchange(NULL, NULL, NULL, 0, 0); }

/* Messages arrive nowhere, and ranks do not wait for them; those to other ranks are counted. */
int ncclSend(const void *from, size_t number, int type, int to, Communicator *communicator,
             void *stream) {
    if (to != communicator->rank) ADD(send_bytes, number * width(type));
    return exchange(NULL, NULL, NULL, 0, 0);
}

int ncclRecv(void) { return exchange(NULL, NULL, NULL, 0, 0); }
