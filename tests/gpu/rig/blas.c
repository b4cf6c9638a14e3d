/* cuBLAS and cuBLASLt: matrix products that are counted. The generated stubs count the others. */
#include <stdlib.h>

#include "rig.h"

int cublasCreate_v2(void **handle) {
    *handle = calloc(1, 64);
    return 0;
}

int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

int cublasGetVersion_v2(void *handle, int *version) {
    *version = 130100;
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetStream_v2(void *handle, void **stream) {
    *stream = NULL;
    return 0;
}

const char *cublasGetStatusString(int status) { return "stand-in for cuBLAS"; }

size_t cublasLtGetVersion(void) { return 130100; }

int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int wanted, void *results,
                                   int *number) {
    *number = 1;
    return 0;
}

int cublasLtMatmul(void) {
    COUNT(gemms);
    count_launch();
    return 0;
}
