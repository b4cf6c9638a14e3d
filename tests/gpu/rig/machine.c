/* Cards, MIG slices, and which of them CUDA enumerates. */
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* eighths of the memory and sevenths of the multiprocessors: the smallest slice of an H100 */
enum { MEMORY_SLICES = 8, SM_SLICES = 7, LONGEST = 1024 };

const char *text_of(const char *variable, int card, const char *otherwise) {
    static __thread char entries[8][256];
    static __thread int next;
    const char *list = getenv(variable);
    if (!list) return otherwise;
    for (const char *end; card > 0 && (end = strchr(list, ';')); card--) list = end + 1;
    char *entry = entries[next++ % 8];
    snprintf(entry, sizeof entries[0], "%.*s", (int)strcspn(list, ";"), list);
    return entry;
}

long number_of(const char *variable, int card, long otherwise) {
    const char *text = text_of(variable, card, NULL);
    return text ? atol(text) : otherwise;
}

int cards(void) {
    long number = number_of("RIG_CARDS", 0, 1);
    return number < MAX_CARDS ? (int)number : MAX_CARDS;
}

int slices_of(int card) { return (int)number_of("RIG_SLICES", card, -1); }
int is_lost(int card) { return number_of("RIG_LOST", card, 0) == 1; }
int cuda_of_driver(void) { return (int)number_of("RIG_CUDA", 0, 13000); }

void name_of(Place at, char *name) {
    const char *card = text_of("RIG_NAME", at.card, "NVIDIA H100 80GB HBM3");
    sprintf(name, at.slice < 0 ? "%s" : "%s MIG 1g", card);
}

void uuid_bytes(Place at, unsigned char bytes[16]) {
    memset(bytes, at.slice < 0 ? 0x11 : 0x22, 16);
    bytes[14] = at.slice < 0 ? 0x11 : (unsigned char)at.slice;
    bytes[15] = (unsigned char)at.card;
}

void uuid_of(Place at, char *text) {
    unsigned char bytes[16];
    uuid_bytes(at, bytes);
    text += sprintf(text, at.slice < 0 ? "GPU-" : "MIG-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

void capability_of(int card, int *major, int *minor) {
    sscanf(text_of("RIG_CAPABILITY", card, "9.0"), "%d.%d", major, minor);
}

long memory_of(Place at) {
    return number_of("RIG_MEMORY", at.card, 85000000000) / (at.slice < 0 ? 1 : MEMORY_SLICES);
}

int sms_of(Place at) {
    return (int)number_of("RIG_SMS", at.card, 132) / (at.slice < 0 ? 1 : SM_SLICES);
}

/* Cards in CUDA's order: by default the fastest first. */
static void in_order(int order[MAX_CARDS]) {
    const char *by = getenv("CUDA_DEVICE_ORDER");
    int number = cards();
    for (int i = 0; i < number; i++) order[i] = i;
    if (by && !strcmp(by, "PCI_BUS_ID")) return;
    for (int i = 1; i < number; i++)
        for (int j = i; j > 0; j--) {
            int major, minor, other, least, card = order[j];
            capability_of(card, &major, &minor);
            capability_of(order[j - 1], &other, &least);
            if (major * 10 + minor <= other * 10 + least) break;
            order[j] = order[j - 1], order[j - 1] = card;
        }
}

/* Whether an entry of CUDA_VISIBLE_DEVICES is a place: an index, or the beginning of a UUID. */
static int is_named(const char *entry, const int order[MAX_CARDS], Place *found) {
    char *end, uuid[64];
    long index = strtol(entry, &end, 10);
    if (end != entry && !*end) {
        if (index < 0 || index >= cards()) return 0;
        *found = (Place){order[index], slices_of(order[index]) > 0 ? 0 : -1};
        return slices_of(order[index]) != 0; /* MIG without slices: nothing to compute on */
    }
    for (int card = 0; card < cards(); card++)
        for (int slice = -1; slice < 0 || slice < slices_of(card); slice++) {
            uuid_of((Place){card, slice}, uuid);
            if (strlen(entry) < 5 || strncmp(uuid, entry, strlen(entry))) continue;
            *found = (Place){card, slice < 0 && slices_of(card) > 0 ? 0 : slice};
            return slice >= 0 || slices_of(card) != 0;
        }
    return 0;
}

int visible(Place found[MAX_CARDS]) {
    int order[MAX_CARDS], number = 0;
    in_order(order);
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    char list[LONGEST] = "", *rest = list;
    if (variable) snprintf(list, sizeof list, "%s", variable);
    else
        for (int i = 0; i < cards(); i++)
            if (slices_of(order[i]) != 0) sprintf(list + strlen(list), *list ? ",%d" : "%d", i);
    for (char *entry; number < MAX_CARDS && (entry = strsep(&rest, ",")); number++)
        if (!is_named(entry + strspn(entry, " "), order, &found[number])) break;
    for (int i = 0; i < number; i++)
        if (is_lost(found[i].card)) return -1;
    for (int i = 0; i < number; i++)
        if (found[i].slice >= 0) { /* one slice, and then no card */
            found[0] = found[i];
            return 1;
        }
    return number;
}
