/* What the parts of the CUDA library share: counters, errors, memory. */
#pragma once

#include <stddef.h>

#include "machine.h"

/* counters.py reads the names from here */
typedef struct {
    long launches, gemms, syncs, event_syncs, h2d, d2h, d2d, h2d_bytes, d2h_bytes, mallocs, frees,
        ooms, collectives, memsets, gather_bytes, scatter_bytes, reduce_bytes,
        send_bytes;
} Counters;

extern Counters rig_counters;
#define ADD(counter, amount) __sync_fetch_and_add(&rig_counters.counter, (long)(amount))
#define COUNT(counter) ADD(counter, 1)

/* Count a kernel launch, or a node of the graph that is captured. */
void count_launch(void);

/* Return the error of this call and keep it for cudaGetLastError. */
int failed(int error);
/* The device of this thread. */
int current_device(void);
/* The error with which a kernel launch on the current device fails; 0 if it succeeds. */
int launch_error(void);
/* A handle that is not NULL and unlike the others. */
void *fresh_handle(void);

enum { PINNED = -1, UNKNOWN = -2 };

/* Reserve bytes of a device's (or of PINNED) memory; 0 if they exceed what it has. */
int take(int device, size_t bytes);
void give_back(int device, size_t bytes);
size_t total_bytes(int device);
size_t free_bytes(int device);
/* Note that [start, start + bytes) is memory of a device; forget it and return its size. */
void note_range(void *start, size_t bytes, int device);
size_t forget_range(void *start, int *device);
/* The device of an address, PINNED, or UNKNOWN. */
int device_of(const void *address);
/* The range that an address lies in; 0 if none. */
int range_of(const void *address, void **start, size_t *bytes);

/* The number of collectives that this process has begun, and whether the first `number` of them have
   ended; wait until they have. */
long exchanges(void);
int is_exchanged(long number);
void await_exchanges(long number);
