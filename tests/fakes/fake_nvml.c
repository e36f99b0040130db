/* A stand-in for libnvidia-ml.so.1, driven by the text file that the environment variable FAKE_NVML names.
 * It is read again on every call, so a test changes the machine by writing the file:
 *
 *   gpu INDEX UUID TOTAL_BYTES USED_BYTES MIG_MODE NAME       MIG_MODE: 1 on, 0 off, -1 the card has none
 *   mig GPU SLOT UUID TOTAL_BYTES USED_BYTES GI CI NAME
 *   proc GPU SLOT_OR_-1 PID BYTES                             BYTES -1: the driver does not say
 *   fail CODE                                                 every call after nvmlInit returns this (15: GPU lost)
 *   failgpu INDEX CODE                                        calls about that GPU return this
 *   nomemory                                                  memory questions are not supported (unified memory)
 *
 * No file: the driver is not loaded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9
};
enum { DEVICES_MAX = 64, PROCESSES_MAX = 256, SLOTS = 7, WHOLE = -1 };
#define NO_INSTANCE 0xffffffffu

typedef unsigned long long Bytes;
typedef void *Handle;

typedef struct {
    int gpu, slot, mig_mode, gi, ci;
    Bytes total, used;
    char uuid[96], name[96];
} Device;

typedef struct {
    int gpu, slot;
    unsigned pid;
    long long bytes;
} Running;

typedef struct { Bytes total, free, used; } Memory;
typedef struct { unsigned pid; Bytes bytes; unsigned gi, ci; } ProcessInfo;

static Device devices[DEVICES_MAX];
static Running processes[PROCESSES_MAX];
static int devices_len, processes_len, failure, no_memory, users;
static int gpu_failure[DEVICES_MAX];

static int load(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    if (!users) { if (file) fclose(file); return UNINITIALIZED; }
    if (!file) return DRIVER_NOT_LOADED;
    devices_len = processes_len = failure = no_memory = 0;
    memset(gpu_failure, 0, sizeof gpu_failure);
    while (fgets(line, sizeof line, file) && devices_len < DEVICES_MAX && processes_len < PROCESSES_MAX) {
        Device device = {.slot = WHOLE};
        Running *running = &processes[processes_len];
        int gpu, code;
        if (sscanf(line, "gpu %d %95s %llu %llu %d %95[^\n]", &device.gpu, device.uuid, &device.total, &device.used,
                   &device.mig_mode, device.name) == 6)
            devices[devices_len++] = device;
        else if (sscanf(line, "mig %d %d %95s %llu %llu %d %d %95[^\n]", &device.gpu, &device.slot, device.uuid,
                        &device.total, &device.used, &device.gi, &device.ci, device.name) == 8)
            devices[devices_len++] = device;
        else if (sscanf(line, "proc %d %d %u %lld", &running->gpu, &running->slot, &running->pid, &running->bytes) == 4)
            processes_len++;
        else if (sscanf(line, "failgpu %d %d", &gpu, &code) == 2 && gpu >= 0 && gpu < DEVICES_MAX)
            gpu_failure[gpu] = code;
        else if (!strncmp(line, "nomemory", 8))
            no_memory = 1;
        else
            sscanf(line, "fail %d", &failure);
    }
    fclose(file);
    return failure;
}

static Device *find(int gpu, int slot) {
    for (int i = 0; i < devices_len; i++)
        if (devices[i].gpu == gpu && devices[i].slot == slot) return &devices[i];
    return NULL;
}

/* A handle is a number: which GPU, and which MIG slot of it (0 = the whole GPU). */
static Handle handle_of(const Device *device) { return (Handle)(size_t)(0x1000 + device->gpu * 64 + device->slot + 1); }

static int resolve(Handle handle, Device **device) {
    int result = load(), number = (int)((size_t)handle - 0x1000);
    if (result) return result;
    if (!(*device = find(number / 64, number % 64 - 1))) return INVALID_ARGUMENT;
    return gpu_failure[(*device)->gpu];
}
#define DEVICE(handle) Device *device; int result_ = resolve(handle, &device); if (result_) return result_

static int belongs(const Running *running, const Device *device) {
    return running->gpu == device->gpu && (device->slot == WHOLE || running->slot == device->slot);
}

static int copy(char *to, unsigned len, const char *text) {
    if (strlen(text) + 1 > len) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    users++;
    int result = load();
    if (result == DRIVER_NOT_LOADED) { users--; return result; }
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (users) users--; return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int result = load();
    *count = 0;
    for (int i = 0; !result && i < devices_len; i++) *count += devices[i].slot == WHOLE;
    return result;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out) {
    int result = load();
    if (result) return result;
    Device *device = find((int)index, WHOLE);
    if (!device) return INVALID_ARGUMENT;
    *out = handle_of(device);
    return gpu_failure[index];
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *out) {
    int result = load();
    if (result) return result;
    for (int i = 0; i < devices_len; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *out = handle_of(&devices[i]); return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Handle handle, char *out, unsigned len) { DEVICE(handle); return copy(out, len, device->name); }
int nvmlDeviceGetUUID(Handle handle, char *out, unsigned len) { DEVICE(handle); return copy(out, len, device->uuid); }

int nvmlDeviceGetMemoryInfo(Handle handle, Memory *out) {
    DEVICE(handle);
    if (no_memory) return NOT_SUPPORTED;
    out->total = device->total;
    out->used = device->used;
    for (int i = 0; i < processes_len; i++)
        if (belongs(&processes[i], device) && processes[i].bytes > 0) out->used += (Bytes)processes[i].bytes;
    out->free = out->total - out->used;
    return OK;
}

int nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending) {
    DEVICE(handle);
    if (device->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig_mode;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned *count) {
    DEVICE(handle);
    *count = device->mig_mode > 0 ? SLOTS : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned slot, Handle *out) {
    DEVICE(handle);
    Device *part = find(device->gpu, (int)slot);
    if (!part) return NOT_FOUND;
    *out = handle_of(part);
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, ProcessInfo *out) {
    DEVICE(handle);
    unsigned room = out ? *count : 0, found = 0;
    for (int i = 0; i < processes_len; i++) {
        if (!belongs(&processes[i], device)) continue;
        if (found < room) {
            Device *part = find(processes[i].gpu, processes[i].slot);
            int inside = processes[i].slot != WHOLE && part;
            out[found] = (ProcessInfo){processes[i].pid, (Bytes)processes[i].bytes, inside ? (unsigned)part->gi : NO_INSTANCE,
                                       inside ? (unsigned)part->ci : NO_INSTANCE};
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *count, ProcessInfo *out) {
    DEVICE(handle);
    (void)out;
    *count = 0;
    return device->slot == WHOLE ? OK : NOT_SUPPORTED;
}
