/* Annotations of the CUDA headers for gcc: the CUDA wheel ships the headers without this one. */
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __host__
#define __device__
#define __global__
#define __specialization_static static
#define __forceinline__ inline
#define __no_return__
#define __noinline__
#define __location__(a)
#define __annotate__(a)
#define __thread__ __thread
#define __import__
#define __export__
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
