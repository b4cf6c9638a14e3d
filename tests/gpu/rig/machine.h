/* The machine that the stand-in libraries show, as the environment describes it.

   A list has an entry per card, separated by semicolons; its last entry holds for the other cards.

   RIG_CARDS        number of cards in the order of the PCI bus (1)
   RIG_NAME         list of names (NVIDIA H100 80GB HBM3)
   RIG_CAPABILITY   list of compute capabilities (9.0)
   RIG_MEMORY       list of bytes (85 * 10^9)
   RIG_SMS          list of numbers of multiprocessors (132)
   RIG_CONTEXT      bytes that a context takes (520 MiB)
   RIG_PINNED       bytes of host memory that can be pinned (no limit)
   RIG_DRIVER       version of the driver (580.65.06)
   RIG_CUDA         newest CUDA of the driver (13000 for 13.0)
   RIG_LOST         list: 1 if the card has fallen off the bus (0)
   RIG_SLICES       list of MIG slices, -1 if MIG is disabled (-1)
   RIG_NO_MEMORY    list: 1 if NVML does not report the card's memory (0)
   RIG_SHARED       if set, other processes compute on every card */
#pragma once

enum { MAX_CARDS = 16 };

/* A card, or the slice of a card. */
typedef struct {
    int card;  /* position on the PCI bus */
    int slice; /* -1: the whole card */
} Place;

int cards(void);
/* The card's entry of a list; `otherwise` if the variable is not set. Both are valid for good. */
const char *text_of(const char *variable, int card, const char *otherwise);
long number_of(const char *variable, int card, long otherwise);

void name_of(Place at, char *name);
void uuid_of(Place at, char *text);
void uuid_bytes(Place at, unsigned char bytes[16]);
void capability_of(int card, int *major, int *minor);
long memory_of(Place at);
int sms_of(Place at);
int slices_of(int card); /* -1: MIG is disabled */
int is_lost(int card);
int cuda_of_driver(void);

/* Return the places that CUDA enumerates, by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
   -1: one of them is a lost card. */
int visible(Place found[MAX_CARDS]);
