/* CUDA graphs: what is launched while a stream is captured becomes one launch of the graph. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "rig.h"

typedef struct {
    size_t nodes;
} Graph;

static cudaStream_t captured; /* one stream at a time */
static int capturing;
static unsigned long long number;
static size_t nodes;

void count_launch(void) {
    if (capturing)
        __sync_fetch_and_add(&nodes, 1);
    else
        COUNT(launches);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (capturing) return failed(cudaErrorIllegalState);
    captured = stream, nodes = 0, number++;
    capturing = 1;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!capturing || stream != captured) return failed(cudaErrorIllegalState);
    Graph *made = malloc(sizeof *made);
    *made = (Graph){nodes};
    *graph = (cudaGraph_t)made;
    capturing = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing && stream == captured ? cudaStreamCaptureStatusActive
                                              : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *edge_number) {
    if (id) *id = number;
    if (edge_number) *edge_number = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *found, size_t *count) {
    *count = ((Graph *)graph)->nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags) {
    *executable = fresh_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    COUNT(launches);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}
