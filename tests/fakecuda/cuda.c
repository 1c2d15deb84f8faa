// cuda.c - a CUDA driver without a GPU: the test double that qlora.h loads as libcuda.so.1.
//
// It keeps contexts, memory, streams, events, modules and graphs by the rules of the real driver,
// runs kernels in the PTX interpreter (ptx.h), and is stricter than hardware wherever a program
// could get away with a mistake. Tests configure and inspect it through fake.h.
//
// What the variants of the library differ in is in variant.c.
#define _GNU_SOURCE
#include "fake.h"
#include "mutate.h"
#include "ptx.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

//@@ EXPORTS - one list generates the prototypes, the counters and the table for cuGetProcAddress

#define FAKE_PROTOTYPE(name, kind, release, args) int name args;
FAKE_CU_FUNCTIONS(FAKE_PROTOTYPE)

const fake_api* fake_get_api(void);
const fake_inside* fake_get_inside(void);

typedef enum fault_class {
    CLASS_NONE,
    CLASS_ALLOC,
    CLASS_LOAD,
    CLASS_LAUNCH,
    CLASS_COPY,
    CLASS_SYNC,
    CLASS_STREAM,
    CLASS_EVENT,
    CLASS_GRAPH,
    CLASS_CAPTURE,
    CLASS_CUBLAS,
    CLASS_NCCL,
    CLASS_CTX,
    CLASS_ANY,
    CLASS_RUN,
    CLASSES
} fault_class;

static const char* const class_names[CLASSES] = {"NONE",   "ALLOC",  "LOAD",  "LAUNCH", "COPY",
                                                 "SYNC",   "STREAM", "EVENT", "GRAPH",  "CAPTURE",
                                                 "CUBLAS", "NCCL", "CTX",    "ANY",   "RUN"};

enum {
#define FAKE_ID(name, kind, release, args) F_##name,
    FAKE_CU_FUNCTIONS(FAKE_ID) FAKE_CUBLAS_FUNCTIONS(FAKE_ID) FAKE_CUBLASLT_FUNCTIONS(FAKE_ID)
        FAKE_NCCL_FUNCTIONS(FAKE_ID)
#undef FAKE_ID
        FUNCTIONS
};

typedef struct function_row {
    const char* name;
    fault_class kind;
    bool release;
} function_row;

#define FAKE_N false
#define FAKE_R true
static const function_row function_rows[FUNCTIONS] = {
#define FAKE_ROW(name, kind, release, args) {#name, CLASS_##kind, FAKE_##release},
    FAKE_CU_FUNCTIONS(FAKE_ROW) FAKE_CUBLAS_FUNCTIONS(FAKE_ROW)
        FAKE_CUBLASLT_FUNCTIONS(FAKE_ROW) FAKE_NCCL_FUNCTIONS(FAKE_ROW)
#undef FAKE_ROW
};

//@@ STATE - everything is protected by one lock

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    STUB_LIBRARY = 34,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908
};

enum { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

typedef enum object_kind {
    KIND_CONTEXT,
    KIND_STREAM,
    KIND_EVENT,
    KIND_MODULE,
    KIND_FUNCTION,
    KIND_GRAPH,
    KIND_EXEC,
    KIND_CAPTURE,
    KIND_CUBLAS,
    KIND_MEMORY,
    KIND_PINNED,
    KINDS
} object_kind;

static const char* const kind_names[KINDS] = {"context",  "stream", "event", "module",
                                              "function", "graph",  "exec",  "capture",
                                              "cublas",   "memory", "pinned"};

typedef struct context context;
typedef struct stream stream;
typedef struct capture capture;

// First member of every object that a caller holds a handle to. The memory is kept until reset, so
// that a stale handle is recognised and never mistaken for a newer object.
typedef struct object {
    object_kind kind;
    bool live;
    uint32_t id; // n-th of its kind since reset
    context* owner;
    struct object* next;
} object;

struct context {
    object base;
    int device;
    bool primary;
    int refs;
    int sticky;
    stream* legacy;
    stream* streams; // the live ones, newest first, without the legacy stream
};

typedef struct entry_point entry_point;

typedef struct module {
    object base;
    ptx_module* ptx;
} module;

struct entry_point {
    object base;
    module* from;
    const ptx_kernel* kernel;
    ptx_kernel_info info;
    int max_dynamic;
    size_t counter;
};

typedef struct event {
    object base;
    unsigned flags;
    bool recorded;
    bool done;
    stream* where;
    uint64_t seq;
    uint64_t time;
    capture* in; // last recorded in this capture
    int* deps;
    size_t dep_count;
} event;

typedef enum work_kind {
    WORK_LAUNCH,
    WORK_COPY,
    WORK_SET,
    WORK_RECORD,
    WORK_WAIT,
    WORK_GRAPH,
    WORK_CALL
} work_kind;

typedef struct endpoint {
    bool device;
    uint64_t address;
    unsigned char* host;
    size_t pitch;
} endpoint;

typedef struct exec exec;

// One piece of device work. Immutable; queues, graphs and executable graphs share it.
typedef struct work {
    work_kind kind;
    int refs;
    entry_point* function; // LAUNCH
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    bool early;    // it may begin before the kernel before it has ended
    bool together; // its blocks wait for each other
    unsigned char* params;
    void** args;
    endpoint dst; // COPY, SET
    endpoint src;
    size_t width;
    size_t height;
    unsigned char* staged; // pageable source, copied at the call
    unsigned element;      // SET
    uint32_t value;
    event* event; // RECORD
    stream* on;   // WAIT
    uint64_t until;
    exec* graph;                                // GRAPH
    int (*run)(void* ctx, const void* payload); // CALL
    void* payload;
} work;

typedef struct entry {
    work* what;
    uint64_t seq;
    struct entry* next;
} entry;

struct stream {
    object base;
    bool legacy;
    bool blocking;
    entry* first;
    entry* last;
    size_t depth;
    capture* in;
    int* deps; // nodes the next captured work depends on
    size_t dep_count;
    stream* next;
};

typedef struct node {
    work* what; // NULL: destroyed
    int* deps;
    size_t dep_count;
    struct graph* in;
} node;

typedef struct graph {
    object base;
    node* nodes;
    size_t count; // including destroyed ones
    size_t room;
} graph;

// Same layout as CUDA_MEMSET_NODE_PARAMS and CUDA_KERNEL_NODE_PARAMS_v2.
typedef struct fake_memset_node {
    uint64_t address;
    size_t pitch;
    unsigned value;
    unsigned element;
    size_t width;
    size_t height;
} fake_memset_node;

typedef struct fake_kernel_node {
    void* function;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    void** args;
    void** extra;
    void* kernel;
    void* context;
} fake_kernel_node;

struct exec {
    object base;
    work** order; // in execution order
    size_t count;
    uint64_t* before; // bit j of row i: number j of the order ends before number i begins
    int pending; // launches queued
};

// Which nodes of the graph that runs have used 2 bytes, as their numbers in the order + 1.
typedef struct race_cell {
    uint16_t writer;
    uint16_t readers[3];
} race_cell;

struct capture {
    object base;
    stream* origin;
    pthread_t thread;
    int mode;
    bool broken;
    bool ended;
    graph* into;
    capture* next;
};

typedef struct block {
    uint64_t address; // pinned: the host address
    size_t bytes;
    unsigned char* host;
    unsigned char* base;
    size_t front; // bytes of guard band before host
    context* owner;
    uint32_t id;
    bool mapped;      // pinned: kernels and graphs may use it
    uint64_t* writes; // per 8 bytes: number of the launch that wrote them last; NULL = not watched
    race_cell* cells; // per 2 bytes, of graph launch number `raced`
    uint64_t raced;
} block;

#define HOST_MAPPED 2u // CU_MEMHOSTALLOC_DEVICEMAP

typedef struct blocks {
    block* list; // sorted by address
    size_t count;
    size_t room;
} blocks;

#define MAX_FAULTS 16

typedef struct fault {
    fault_class kind;
    int function; // -1: the class
    uint64_t left;
    bool forever;
    bool sticky;
    int code;
} fault;

typedef struct kernel_counter {
    char* name;
    uint64_t runs;
} kernel_counter;

typedef struct text {
    char* data;
    size_t length;
    size_t room;
} text;

static struct {
    pthread_mutex_t lock;
    bool ready;
    bool initialised;
    uint64_t generation;
    fake_config config;
    object* objects;
    object** slots; // hash table of live and dead objects by address
    size_t slot_count;
    size_t object_count;
    uint32_t ids[KINDS];
    uint32_t lost[KINDS];
    context* primary[FAKE_MAX_DEVICES];
    uint64_t used[FAKE_MAX_DEVICES];
    capture* captures; // the active ones
    blocks memory;
    blocks pinned;
    size_t hot[64]; // by address: the index in memory of the block that was found there
    uint64_t range_base;
    uint64_t range_end;
    uint64_t range_next;
    uint64_t seq;
    uint64_t clock;
    uint64_t launches; // kernels run
    uint64_t chain;    // the first of those that may still run when the next one begins early
    bool watched;      // a kernel has been launched that begins early
    const exec* racing; // the graph that runs, if races are looked for
    size_t racer;       // the number of its node that runs
    uint64_t races;     // launches of graphs that were looked at
    uint64_t random;
    fault faults[MAX_FAULTS];
    size_t fault_count;
    int late; // error to report after a release
    uint64_t calls[FUNCTIONS];
    kernel_counter* kernels;
    size_t kernel_count;
    fake_stats stats;
    text log;
    bool log_full;
    char broken[512];
    char trap[512];
    char answer[1024];
    char tags[16][48];
    unsigned tag;
} g = {.lock = PTHREAD_MUTEX_INITIALIZER};

#define MAX_STACK 64

typedef struct thread_state {
    uint64_t generation;
    int depth;
    context* stack[MAX_STACK];
    int capture_mode;
} thread_state;

static __thread thread_state this_thread;

#define GUARD 256u
#define POISON 0xCB
#define GUARD_BYTE 0xA5
#define LOG_LIMIT (1u << 20)
#define QUEUE_LIMIT 65536u

static void* must_alloc(size_t bytes) {
    void* memory = calloc(1, bytes ? bytes : 1);
    if (!memory) {
        fprintf(stderr, "fake driver: out of host memory\n");
        abort();
    }
    return memory;
}

static void* must_grow(void* old, size_t bytes) {
    void* memory = realloc(old, bytes ? bytes : 1);
    if (!memory) {
        fprintf(stderr, "fake driver: out of host memory\n");
        abort();
    }
    return memory;
}

static uint64_t random_next(void) {
    uint64_t x = g.random += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

//@@ TEXTS - broken rules, the log, numbered names for handles

__attribute__((format(printf, 1, 2))) static void broken(const char* format, ...) {
    if (g.broken[0]) {
        return; // the first one is the most useful
    }
    va_list list;
    va_start(list, format);
    vsnprintf(g.broken, sizeof g.broken, format, list);
    va_end(list);
}

static void log_add(const char* line) {
    size_t length = strlen(line);
    if (g.log_full) {
        return;
    }
    if (g.log.length + length > LOG_LIMIT) {
        line = "... log full\n";
        length = strlen(line);
        g.log_full = true;
    }
    if (g.log.length + length + 1 > g.log.room) {
        g.log.room = (g.log.length + length + 1) * 2;
        g.log.data = (char*)must_grow(g.log.data, g.log.room);
    }
    memcpy(g.log.data + g.log.length, line, length + 1);
    g.log.length += length;
}

static char* tag_room(void) {
    g.tag = (g.tag + 1) % 16;
    return g.tags[g.tag];
}

static object* object_find(const void* handle);
static const block* block_at(const blocks* in, uint64_t address);

// "stream#2"; "NULL", "legacy", or "?" for a foreign handle.
static const char* tag(const void* handle) {
    if (!handle) {
        return "NULL";
    }
    const object* found = object_find(handle);
    if (!found) {
        return handle == (const void*)1 ? "legacy" : "?";
    }
    char* out = tag_room();
    snprintf(out, sizeof g.tags[0], "%s#%u%s", kind_names[found->kind], found->id,
             found->live ? "" : "(dead)");
    return out;
}

// "memory#3+64", "pinned#1", "host" or "?".
static const char* tag_address(uint64_t address) {
    const block* found = block_at(&g.memory, address);
    const char* kind = "memory";
    if (!found) {
        found = block_at(&g.pinned, address);
        kind = "pinned";
    }
    if (!found) {
        return !address ? "NULL" : address >= g.range_base && address < g.range_end ? "?" : "host";
    }
    char* out = tag_room();
    if (address == found->address) {
        snprintf(out, sizeof g.tags[0], "%s#%u", kind, found->id);
    } else {
        snprintf(out, sizeof g.tags[0], "%s#%u+%llu", kind, found->id,
                 (unsigned long long)(address - found->address));
    }
    return out;
}

static const char* tag_pointer(const void* pointer) {
    return tag_address((uint64_t)(uintptr_t)pointer);
}

//@@ OBJECTS - handles

static size_t slot_of(const void* handle, size_t slots) {
    uint64_t x = (uint64_t)(uintptr_t)handle >> 4;
    return (size_t)((x * 0x9E3779B97F4A7C15u) >> 20) & (slots - 1);
}

static void slot_put(object** slots, size_t count, object* o) {
    size_t i = slot_of(o, count);
    while (slots[i]) {
        i = (i + 1) & (count - 1);
    }
    slots[i] = o;
}

static object* object_find(const void* handle) {
    if (!handle || !g.slot_count) {
        return NULL;
    }
    size_t i = slot_of(handle, g.slot_count);
    while (g.slots[i]) {
        if (g.slots[i] == handle) {
            return g.slots[i];
        }
        i = (i + 1) & (g.slot_count - 1);
    }
    return NULL;
}

static void* object_make(object_kind kind, size_t bytes, context* owner) {
    object* o = (object*)must_alloc(bytes);
    o->kind = kind;
    o->live = true;
    o->id = ++g.ids[kind];
    o->owner = owner;
    o->next = g.objects;
    g.objects = o;
    if ((g.object_count + 1) * 2 > g.slot_count) {
        size_t count = g.slot_count ? g.slot_count * 2 : 256;
        object** slots = (object**)must_alloc(count * sizeof *slots);
        for (size_t i = 0; i < g.slot_count; i++) {
            if (g.slots[i]) {
                slot_put(slots, count, g.slots[i]);
            }
        }
        free(g.slots);
        g.slots = slots;
        g.slot_count = count;
    }
    slot_put(g.slots, g.slot_count, o);
    g.object_count++;
    return o;
}

// The live object of that kind for a handle, or NULL. Owner NULL: of any context.
static void* object_get(const void* handle, object_kind kind, const context* owner) {
    object* o = object_find(handle);
    if (!o || !o->live || o->kind != kind || (owner && o->owner != owner)) {
        return NULL;
    }
    return o;
}

//@@ MEMORY - device addresses in a range that the host cannot access, backed elsewhere

static void range_reserve(void) {
    static const uint64_t sizes[] = {1ull << 40, 1ull << 36, 1ull << 33, 1ull << 31};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && !g.range_base; i++) {
        void* p = mmap(NULL, (size_t)sizes[i], PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) {
            g.range_base = (uint64_t)(uintptr_t)p;
            g.range_end = g.range_base + sizes[i];
        }
    }
    if (!g.range_base) {
        fprintf(stderr, "fake driver: no address range\n");
        abort();
    }
    g.range_next = g.range_base;
}

static bool is_device_address(uint64_t address) {
    return address >= g.range_base && address < g.range_end;
}

// Index of the first block that starts above address.
static size_t block_above(const blocks* in, uint64_t address) {
    size_t low = 0;
    size_t high = in->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (in->list[middle].address <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// The block that contains address, or NULL. One past the end does not count.
static const block* block_at(const blocks* in, uint64_t address) {
    size_t i = block_above(in, address);
    if (!i || address - in->list[i - 1].address >= in->list[i - 1].bytes) {
        return NULL;
    }
    return &in->list[i - 1];
}

static block* block_insert(blocks* into, uint64_t address) {
    if (into->count == into->room) {
        into->room = into->room ? into->room * 2 : 64;
        into->list = (block*)must_grow(into->list, into->room * sizeof(block));
    }
    size_t i = block_above(into, address);
    memmove(&into->list[i + 1], &into->list[i], (into->count - i) * sizeof(block));
    into->count++;
    memset(&into->list[i], 0, sizeof(block));
    into->list[i].address = address;
    memset(g.hot, 0, sizeof g.hot);
    return &into->list[i];
}

// Allocates memory with a guard band on both sides, filled with poison. Returns false if the host
// is out of memory.
#define HUGE_BLOCK ((size_t)1 << 32)

static bool block_back(block* b, size_t bytes, size_t front) {
    void* base = NULL;
    if (bytes > SIZE_MAX - front - GUARD || posix_memalign(&base, front, front + bytes + GUARD)) {
        return false;
    }
    b->base = (unsigned char*)base;
    b->host = b->base + front;
    b->front = front;
    b->bytes = bytes;
    memset(b->base, GUARD_BYTE, front);
    if (bytes < HUGE_BLOCK) { // a larger one exists only where it is used
        memset(b->host, POISON, bytes);
    }
    memset(b->host + bytes, GUARD_BYTE, GUARD);
    return true;
}

static bool guards_whole(const block* b) {
    if (!b->base) { // the caller's memory
        return true;
    }
    for (size_t i = 0; i < b->front; i++) {
        if (b->base[i] != GUARD_BYTE) {
            return false;
        }
    }
    for (size_t i = 0; i < GUARD; i++) {
        if (b->host[b->bytes + i] != GUARD_BYTE) {
            return false;
        }
    }
    return true;
}

static void guards_check(const blocks* in, const char* kind) {
    for (size_t i = 0; i < in->count; i++) {
        if (!guards_whole(&in->list[i])) {
            broken("%s#%u (%zu bytes): written outside its bounds", kind, in->list[i].id,
                   in->list[i].bytes);
        }
    }
}

static void block_remove(blocks* from, size_t i, const char* kind) {
    block* b = &from->list[i];
    if (!guards_whole(b)) {
        broken("%s#%u (%zu bytes): written outside its bounds", kind, b->id, b->bytes);
    }
    if (b->bytes < HUGE_BLOCK && b->base) {
        memset(b->host, POISON, b->bytes);
    }
    free(b->base);
    free(b->writes);
    free(b->cells);
    from->count--;
    memmove(b, b + 1, (from->count - i) * sizeof(block));
    memset(g.hot, 0, sizeof g.hot);
}

// An address is not reused until the range is exhausted, so that stale pointers stay stale. It is a
// multiple of 256 but not of 512: exactly what the driver guarantees.
static uint64_t address_pick(size_t bytes) {
    uint64_t room = ((uint64_t)bytes + 511) / 512 * 512 + 1024;
    if (room <= g.range_end - g.range_next) {
        uint64_t address = g.range_next + 256;
        g.range_next += room;
        return address;
    }
    uint64_t start = g.range_base;
    for (size_t i = 0; i <= g.memory.count; i++) {
        const block* b = i < g.memory.count ? &g.memory.list[i] : NULL;
        if ((b ? b->address - 256 : g.range_end) - start >= room) {
            return start + 256;
        }
        if (b) {
            start = (b->address + b->bytes + 511) / 512 * 512 + 512;
        }
    }
    return 0;
}

static int memory_alloc(context* ctx, uint64_t* address, size_t bytes) {
    const fake_device* d = &g.config.device[ctx->device];
    uint64_t available = d->free_bytes ? d->free_bytes : d->total_bytes;
    if (!address || !bytes) {
        return INVALID_VALUE;
    }
    if (g.used[ctx->device] > available || bytes > available - g.used[ctx->device] ||
        g.stats.live_bytes + bytes > g.config.host_bytes) {
        return OUT_OF_MEMORY;
    }
    uint64_t picked = address_pick(bytes);
    if (!picked) {
        return OUT_OF_MEMORY;
    }
    block* b = block_insert(&g.memory, picked);
    if (!block_back(b, bytes, GUARD)) {
        size_t i = (size_t)(b - g.memory.list);
        g.memory.count--;
        memmove(b, b + 1, (g.memory.count - i) * sizeof *b);
        return OUT_OF_MEMORY;
    }
    b->owner = ctx;
    b->id = ++g.ids[KIND_MEMORY];
    g.used[ctx->device] += bytes;
    g.stats.live_bytes += bytes;
    if (g.stats.live_bytes > g.stats.peak_bytes) {
        g.stats.peak_bytes = g.stats.live_bytes;
    }
    *address = picked;
    return OK;
}

static void memory_drop(size_t i) {
    g.used[g.memory.list[i].owner->device] -= g.memory.list[i].bytes;
    g.stats.live_bytes -= g.memory.list[i].bytes;
    block_remove(&g.memory, i, "memory");
}

static int pinned_alloc(context* ctx, void** pointer, size_t bytes, unsigned flags) {
    block made;
    memset(&made, 0, sizeof made);
    if (!pointer || !bytes) {
        return INVALID_VALUE;
    }
    if (bytes > g.config.host_bytes || !block_back(&made, bytes, 4096)) {
        return OUT_OF_MEMORY;
    }
    made.address = (uint64_t)(uintptr_t)made.host;
    made.owner = ctx;
    made.id = ++g.ids[KIND_PINNED];
    made.mapped = (flags & HOST_MAPPED) != 0;
    *block_insert(&g.pinned, made.address) = made;
    g.stats.live_pinned += bytes;
    *pointer = made.host;
    return OK;
}

static void pinned_drop(size_t i) {
    g.stats.live_pinned -= g.pinned.list[i].bytes;
    block_remove(&g.pinned, i, "pinned");
}

// The device memory that contains an address, or NULL. The interpreter asks for every access, hence
// the shortcut.
static block* block_hot(uint64_t address) {
    size_t* hot = &g.hot[(address >> 12) % (sizeof g.hot / sizeof g.hot[0])];
    block* b = *hot < g.memory.count ? &g.memory.list[*hot] : NULL;
    if (!b || address < b->address || address - b->address >= b->bytes) {
        size_t i = block_above(&g.memory, address);
        b = i ? &g.memory.list[i - 1] : NULL;
        if (!b || address - b->address >= b->bytes) {
            return NULL;
        }
        *hot = i - 1;
    }
    return b;
}

// Host memory for a range of device addresses, or NULL if it is not inside one live allocation of
// this context; mapped pinned memory has the same address on the device.
static void* resolve(void* user, uint64_t address, size_t bytes, bool write) {
    const context* ctx = (const context*)user;
    (void)write;
    const block* b = block_hot(address);
    if (!b) {
        b = block_at(&g.pinned, address);
        if (!b || !b->mapped) {
            return NULL;
        }
    }
    uint64_t offset = address - b->address;
    if (b->owner != ctx || bytes > b->bytes - offset) {
        return NULL;
    }
    return b->host + offset;
}

// Kernels that begin early: notes who writes where, and refuses to read what a kernel of the chain
// has written before its end was awaited.
static bool watch(void* user, uint64_t address, size_t bytes, bool write, bool waited) {
    (void)user;
    block* b = waited && !write ? NULL : block_hot(address);
    if (!b || bytes > b->bytes - (address - b->address)) {
        return true; // one out of bounds is reported elsewhere
    }
    uint64_t offset = address - b->address;
    if (!b->writes) {
        b->writes = (uint64_t*)must_alloc((b->bytes / 8 + 1) * sizeof *b->writes);
    }
    bool good = true;
    for (uint64_t at = offset / 8; at <= (offset + bytes - 1) / 8; at++) {
        good = good && (waited || b->writes[at] < g.chain);
        b->writes[at] = write ? g.launches : b->writes[at];
    }
    return good;
}

//@@ RACES - nodes of a graph that use the same memory need an order

static const char* work_name(const work* w) {
    return w->kind == WORK_LAUNCH ? w->function->info.name
           : w->kind == WORK_COPY ? "a copy"
           : w->kind == WORK_SET  ? "a memset"
                                  : "a GEMM";
}

// Whether the node with this number + 1 ends before the one that runs, or is it.
static bool race_ordered(uint16_t other) {
    const exec* e = g.racing;
    size_t words = (e->count + 63) / 64;
    size_t j = (size_t)other - 1;
    return other == 0 || j == g.racer || (e->before[g.racer * words + j / 64] >> j % 64 & 1) != 0;
}

static void race_note(uint16_t other, bool write, const char* what) {
    broken("a race: %s (node %u) %s what %s (node %u) %s, and nothing puts them in order",
           work_name(g.racing->order[g.racer]), (unsigned)g.racer, write ? "writes" : "reads",
           work_name(g.racing->order[other - 1]), (unsigned)other - 1, what);
}

// Notes a read: in place of one that ends before it, which it stands for.
static void race_read(race_cell* cell, uint16_t self) {
    for (int i = 0; i < 3; i++) {
        if (race_ordered(cell->readers[i])) {
            cell->readers[i] = self;
            return;
        }
    }
}

// Compares an access of the node that runs with those of the nodes before it in the order.
static void race_touch(void* user, uint64_t address, size_t bytes, bool write) {
    (void)user;
    block* b = g.racing ? block_hot(address) : NULL;
    if (!b || bytes > b->bytes - (address - b->address) || bytes == 0) {
        return;
    }
    if (b->raced != g.races) {
        free(b->cells);
        b->cells = (race_cell*)must_alloc((b->bytes / 2 + 1) * sizeof *b->cells);
        b->raced = g.races;
    }
    uint16_t self = (uint16_t)(g.racer + 1);
    uint64_t offset = address - b->address;
    for (uint64_t at = offset / 2; at <= (offset + bytes - 1) / 2; at++) {
        race_cell* cell = &b->cells[at];
        if (!race_ordered(cell->writer)) {
            race_note(cell->writer, write, "writes");
        }
        for (int i = 0; i < 3 && write; i++) {
            if (!race_ordered(cell->readers[i])) {
                race_note(cell->readers[i], true, "reads");
            }
        }
        if (write) {
            memset(cell, 0, sizeof *cell);
            cell->writer = self;
        } else {
            race_read(cell, self);
        }
    }
}

static void race_rows(uint64_t address, size_t bytes, size_t rows, size_t pitch, bool write) {
    for (size_t row = 0; row < rows && g.racing; row++) {
        race_touch(NULL, address + row * pitch, bytes, write);
    }
}

//@@ FAULTS - the n-th call of a kind fails

static void queue_drop(stream* s);

// The context is dead: its queued work is dropped and every call returns the code.
static void context_kill(context* ctx, int code) {
    if (ctx->sticky) {
        return;
    }
    ctx->sticky = code;
    queue_drop(ctx->legacy);
    for (stream* s = ctx->streams; s; s = s->next) {
        queue_drop(s);
    }
}

static bool fault_matches(const fault* f, int function) {
    if (f->function >= 0) {
        return f->function == function;
    }
    if (f->kind == CLASS_ANY) {
        return function_rows[function].kind != CLASS_NONE;
    }
    return f->kind == function_rows[function].kind;
}

// Counts down one fault; returns true if it fires now.
static bool fault_due(fault* f) {
    if (!f->left) {
        return f->forever;
    }
    f->left--;
    return !f->left;
}

static const fault* fault_take(int function, bool run) {
    const fault* fired = NULL;
    for (size_t i = 0; i < g.fault_count; i++) {
        fault* f = &g.faults[i];
        bool matches = run ? f->kind == CLASS_RUN && f->function < 0 : fault_matches(f, function);
        if (matches && fault_due(f) && !fired) {
            fired = f;
        }
    }
    if (fired) {
        g.stats.faults++;
    }
    return fired;
}

static thread_state* here(void) {
    if (this_thread.generation != g.generation) {
        memset(&this_thread, 0, sizeof this_thread);
        this_thread.generation = g.generation;
    }
    return &this_thread;
}

static context* current(void) {
    thread_state* t = here();
    return t->depth ? t->stack[t->depth - 1] : NULL;
}

//@@ CALLS - the common start and end of every exported function

static fake_config config_defaults(void);
static void reset_to(const fake_config* config);

typedef enum need { NEED_NOTHING, NEED_INIT, NEED_CONTEXT } need;

static int function_id(const char* name) {
    for (int i = 0; i < FUNCTIONS; i++) {
        if (!strcmp(function_rows[i].name, name)) {
            return i;
        }
    }
    return -1;
}

static void lock(void) {
    pthread_mutex_lock(&g.lock);
    if (!g.ready) {
        g.ready = true;
        fake_config config = config_defaults();
        reset_to(&config);
    }
}

static void unlock(void) {
    pthread_mutex_unlock(&g.lock);
}

static int context_state(const context* ctx) {
    if (!ctx) {
        return INVALID_CONTEXT;
    }
    return ctx->base.live ? ctx->sticky : CONTEXT_IS_DESTROYED;
}

// Locks, counts the call, and returns 0 or the error that this call gets before it does anything.
static int enter(int function, need needs) {
    lock();
    g.late = 0;
    g.calls[function]++;
    if (fake_is_stub && function != F_cuGetErrorName && function != F_cuGetErrorString) {
        return STUB_LIBRARY;
    }
    const fault* f = fault_take(function, false);
    if (f) {
        context* ctx = current();
        if (f->sticky && !context_state(ctx)) {
            context_kill(ctx, f->code);
        }
        if (!function_rows[function].release) {
            return f->code;
        }
        g.late = f->code;
    }
    if (needs >= NEED_INIT && !g.initialised) {
        return NOT_INITIALIZED;
    }
    if (needs == NEED_CONTEXT) {
        int code = context_state(current());
        if (code && code == (current() ? current()->sticky : 0) &&
            function_rows[function].release) {
            g.late = code;
            return OK;
        }
        return code;
    }
    return OK;
}

__attribute__((format(printf, 3, 4))) static int leave(int function, int code, const char* format,
                                                       ...) {
    char line[512];
    if (!code) {
        code = g.late;
    }
    int length = snprintf(line, sizeof line, "%s(", function_rows[function].name);
    va_list list;
    va_start(list, format);
    length += vsnprintf(line + length, sizeof line - (size_t)length - 16, format, list);
    va_end(list);
    if (length > (int)sizeof line - 16) {
        length = (int)sizeof line - 16;
    }
    snprintf(line + length, sizeof line - (size_t)length, ") = %d\n", code);
    log_add(line);
    unlock();
    return code;
}

//@@ WORK - pieces of device work and their execution

static work* work_make(work_kind kind) {
    work* w = (work*)must_alloc(sizeof *w);
    w->kind = kind;
    w->refs = 1;
    return w;
}

static void work_drop(work* w) {
    if (--w->refs) {
        return;
    }
    if (w->kind == WORK_GRAPH) {
        w->graph->pending--;
    }
    free(w->params);
    free(w->args);
    free(w->staged);
    free(w->payload);
    free(w);
}

static void trap(context* ctx, int code, const char* what) {
    snprintf(g.trap, sizeof g.trap, "%s", what);
    broken("device error %d: %s", code, what);
    context_kill(ctx, code);
}

static int launch_run(context* ctx, const work* w) {
    static const int codes[] = {
        OK, ILLEGAL_ADDRESS, MISALIGNED_ADDRESS, LAUNCH_FAILED, LAUNCH_FAILED, LAUNCH_FAILED};
    static const ptx_order orders[] = {PTX_ORDER_FORWARD, PTX_ORDER_REVERSE, PTX_ORDER_RANDOM};
    char why[384] = "";
    char line[512];
    if (!w->function->base.live) {
        trap(ctx, ILLEGAL_ADDRESS, "a kernel of an unloaded module was run");
        return ILLEGAL_ADDRESS;
    }
    ptx_env env;
    memset(&env, 0, sizeof env);
    env.resolve = resolve;
    env.user = ctx;
    env.order = orders[g.config.order];
    env.seed = g.config.order == FAKE_RANDOM ? random_next() : g.config.seed;
    env.max_steps = g.config.max_steps;
    g.launches++;
    g.chain = w->early ? g.chain : g.launches;
    env.early = w->early;
    env.together = w->together;
    env.watch = g.watched ? watch : NULL;
    env.touch = g.racing ? race_touch : NULL;
    ptx_stats stats;
    memset(&stats, 0, sizeof stats);
    ptx_result result = ptx_launch(w->function->kernel, &env, w->grid, w->block, w->shared, w->args,
                                   &stats, why, sizeof why);
    g.stats.kernels++;
    g.stats.warp_instructions += stats.warp_instructions;
    g.stats.mma += stats.mma;
    g.kernels[w->function->counter].runs++;
    if (result == PTX_OK) {
        return OK;
    }
    int code = result <= PTX_TRAP_OTHER ? codes[result] : LAUNCH_FAILED;
    snprintf(line, sizeof line, "%s: %s", w->function->info.name, why);
    trap(ctx, code, line);
    return code;
}

static unsigned char* endpoint_span(context* ctx, const endpoint* e, size_t width, size_t height) {
    if (!e->device) {
        return e->host;
    }
    return (unsigned char*)resolve(ctx, e->address, (height - 1) * e->pitch + width, true);
}

static int copy_run(context* ctx, const work* w) {
    unsigned char* dst = endpoint_span(ctx, &w->dst, w->width, w->height);
    unsigned char* src = w->staged;
    if (!src) {
        src = endpoint_span(ctx, &w->src, w->width, w->height);
    }
    if (!dst || !src) {
        trap(ctx, ILLEGAL_ADDRESS, "a copy reads or writes memory that was freed");
        return ILLEGAL_ADDRESS;
    }
    if (w->dst.device) {
        race_rows(w->dst.address, w->width, w->height, w->dst.pitch, true);
    }
    if (!w->staged && w->src.device) {
        race_rows(w->src.address, w->width, w->height, w->src.pitch, false);
    }
    for (size_t row = 0; row < w->height; row++) {
        memmove(dst + row * w->dst.pitch, src + row * (w->staged ? w->width : w->src.pitch),
                w->width);
    }
    g.stats.copies++;
    return OK;
}

static int set_run(context* ctx, const work* w) {
    size_t bytes = (w->height - 1) * w->dst.pitch + w->width * w->element;
    unsigned char* dst = (unsigned char*)resolve(ctx, w->dst.address, bytes, true);
    uint8_t value8 = (uint8_t)w->value;
    uint16_t value16 = (uint16_t)w->value;
    const void* value = w->element == 1   ? (const void*)&value8
                        : w->element == 2 ? (const void*)&value16
                                          : (const void*)&w->value;
    if (!dst) {
        trap(ctx, ILLEGAL_ADDRESS, "a memset writes memory that was freed");
        return ILLEGAL_ADDRESS;
    }
    race_rows(w->dst.address, w->width * w->element, w->height, w->dst.pitch, true);
    for (size_t row = 0; row < w->height; row++) {
        for (size_t i = 0; i < w->width; i++) {
            memcpy(dst + row * w->dst.pitch + i * w->element, value, w->element);
        }
    }
    return OK;
}

static void stream_run(stream* s, uint64_t until);

// Kernels and GEMMs can be set to fail when they run, later than the call that queued them.
static bool run_fault(context* ctx) {
    const fault* f = fault_take(0, true);
    if (f) {
        snprintf(g.trap, sizeof g.trap, "injected error %d", f->code);
        context_kill(ctx, f->code);
    }
    return f != NULL;
}

static void work_run(context* ctx, const work* w, uint64_t seq) {
    g.clock++;
    if (w->kind != WORK_LAUNCH) { // only a kernel can be overtaken by the next one
        g.chain = g.launches + 1;
    }
    switch (w->kind) {
    case WORK_LAUNCH:
        if (!run_fault(ctx)) {
            launch_run(ctx, w);
        }
        break;
    case WORK_COPY:
        copy_run(ctx, w);
        break;
    case WORK_SET:
        set_run(ctx, w);
        break;
    case WORK_RECORD:
        if (w->event->seq == seq) {
            w->event->done = true;
            w->event->time = g.clock;
        }
        break;
    case WORK_WAIT:
        stream_run(w->on, w->until);
        break;
    case WORK_GRAPH:
        g.racing = g.config.races && w->graph->count < UINT16_MAX ? w->graph : NULL;
        g.races++;
        for (size_t i = 0; i < w->graph->count && !ctx->sticky; i++) {
            g.racer = i;
            work_run(ctx, w->graph->order[i], 0);
        }
        g.racing = NULL;
        break;
    case WORK_CALL:
        if (!run_fault(ctx)) {
            int code = w->run(ctx, w->payload);
            if (code) {
                trap(ctx, code, "a GEMM accesses memory that is not allocated");
            }
        }
        break;
    }
}

//@@ STREAMS - queues that run when something waits for them

static void queue_drop(stream* s) {
    while (s->first) {
        entry* e = s->first;
        s->first = e->next;
        work_drop(e->what);
        free(e);
    }
    s->last = NULL;
    s->depth = 0;
}

// Enforces the implicit order between the legacy stream and blocking streams, up to but
// excluding seq.
static void stream_run_legacy_rule(stream* s, uint64_t seq) {
    context* ctx = s->base.owner;
    if (s->legacy) {
        for (stream* other = ctx->streams; other; other = other->next) {
            if (other->blocking) {
                stream_run(other, seq - 1);
            }
        }
    } else if (s->blocking) {
        stream_run(ctx->legacy, seq - 1);
    }
}

// Runs every entry with a sequence number up to `until`. An entry only waits for smaller numbers,
// so the recursion ends.
static void stream_run(stream* s, uint64_t until) {
    context* ctx = s->base.owner;
    while (!ctx->sticky && s->first && s->first->seq <= until) {
        entry* e = s->first;
        stream_run_legacy_rule(s, e->seq);
        if (ctx->sticky) {
            return; // the queue no longer exists
        }
        s->first = e->next;
        if (!s->first) {
            s->last = NULL;
        }
        s->depth--;
        work_run(ctx, e->what, e->seq);
        work_drop(e->what);
        free(e);
    }
}

static void context_run(context* ctx) {
    size_t count = 0;
    for (stream* s = ctx->streams; s; s = s->next) {
        count++;
    }
    stream** list = (stream**)must_alloc((count + 1) * sizeof *list);
    size_t i = count;
    for (stream* s = ctx->streams; s; s = s->next) {
        list[i--] = s; // newest first becomes oldest first
    }
    list[0] = ctx->legacy;
    for (i = 0; i <= count; i++) {
        size_t pick = i;
        if (g.config.order == FAKE_REVERSE) {
            pick = count - i;
        } else if (g.config.order == FAKE_RANDOM) {
            size_t other = i + (size_t)(random_next() % (count + 1 - i));
            stream* swap = list[i];
            list[i] = list[other];
            list[other] = swap;
        }
        stream_run(list[pick], UINT64_MAX);
    }
    free(list);
}

static stream* stream_make(context* ctx, bool legacy, bool blocking) {
    stream* s = (stream*)object_make(KIND_STREAM, sizeof *s, ctx);
    s->legacy = legacy;
    s->blocking = blocking;
    return s;
}

static stream* stream_get(void* handle, context* ctx) {
    if (!handle || handle == (void*)1) {
        return ctx->legacy;
    }
    return (stream*)object_get(handle, KIND_STREAM, ctx);
}

//@@ CAPTURE - streams that record instead of queueing

static void capture_break(capture* c, const char* why, int code) {
    c->broken = true;
    broken("%s (%d) breaks the capture of stream#%u", why, code, c->origin->base.id);
}

static void capture_end(capture* c) {
    c->ended = true;
    c->base.live = false;
    for (capture** link = &g.captures; *link; link = &(*link)->next) {
        if (*link == c) {
            *link = c->next;
            break;
        }
    }
    context* ctx = c->base.owner;
    for (stream* s = ctx->streams; s; s = s->next) {
        if (s->in == c) {
            s->in = NULL;
            s->dep_count = 0;
        }
    }
}

// Calls that a capture forbids on this thread: returns 0, or 900 after breaking the
// captures concerned.
static int capture_forbids(int function) {
    int mode = here()->capture_mode;
    int code = OK;
    for (capture* c = g.captures; c && mode != CAPTURE_RELAXED; c = c->next) {
        bool own = pthread_equal(c->thread, pthread_self()) != 0;
        if (own ? c->mode != CAPTURE_RELAXED
                : c->mode == CAPTURE_GLOBAL && mode == CAPTURE_GLOBAL) {
            capture_break(c, function_rows[function].name, CAPTURE_UNSUPPORTED);
            code = CAPTURE_UNSUPPORTED;
        }
    }
    return code;
}

// Work on the legacy stream would depend on every blocking stream, including captured ones: returns
// 0 or 906.
static int capture_forbids_legacy(const context* ctx, const char* what) {
    int code = OK;
    for (stream* s = ctx->streams; s; s = s->next) {
        if (s->in && s->blocking) {
            capture_break(s->in, what, CAPTURE_IMPLICIT);
            code = CAPTURE_IMPLICIT;
        }
    }
    return code;
}

static int* deps_copy(const int* deps, size_t count) {
    int* copy = (int*)must_alloc(count * sizeof *copy);
    if (count) {
        memcpy(copy, deps, count * sizeof *copy);
    }
    return copy;
}

static void deps_set(int** deps, size_t* count, const int* from, size_t from_count) {
    int* copy = deps_copy(from, from_count);
    free(*deps);
    *deps = copy;
    *count = from_count;
}

static void deps_union(int** deps, size_t* count, const int* from, size_t from_count) {
    *deps = (int*)must_grow(*deps, (*count + from_count) * sizeof **deps);
    for (size_t i = 0; i < from_count; i++) {
        bool have = false;
        for (size_t j = 0; j < *count; j++) {
            have = have || (*deps)[j] == from[i];
        }
        if (!have) {
            (*deps)[(*count)++] = from[i];
        }
    }
}

static void graph_add(graph* into, work* w, const int* deps, size_t dep_count) {
    if (into->count == into->room) {
        into->room = into->room ? into->room * 2 : 64;
        into->nodes = (node*)must_grow(into->nodes, into->room * sizeof *into->nodes);
    }
    node* n = &into->nodes[into->count++];
    n->what = w;
    n->deps = deps_copy(deps, dep_count);
    n->dep_count = dep_count;
    n->in = into;
}

// Node handles are addresses, so the array must not move: a recorded graph gets room for as many
// nodes again.
static void graph_settle(graph* done) {
    done->room = 2 * done->count + 16;
    done->nodes = (node*)must_grow(done->nodes, done->room * sizeof *done->nodes);
}

// Mapped pinned memory is for graphs; other host memory is reused by the host.
static bool has_host_memory(const work* w) {
    const endpoint* ends[] = {&w->dst, &w->src};
    for (int i = 0; i < 2 && w->kind == WORK_COPY; i++) {
        const block* b = block_at(&g.pinned, (uint64_t)(uintptr_t)ends[i]->host);
        if (!ends[i]->device && (!b || !b->mapped)) {
            return true;
        }
    }
    return false;
}

// Takes ownership of the work: adds it to the stream's queue, or to the graph being recorded.
static int submit(stream* s, work* w) {
    if (s->in) {
        if (s->in->broken) {
            work_drop(w);
            return CAPTURE_INVALIDATED;
        }
        if (has_host_memory(w) && !g.config.allow_host_nodes) {
            broken("a copy from or to host memory is captured in stream#%u", s->base.id);
        }
        int index = (int)s->in->into->count;
        graph_add(s->in->into, w, s->deps, s->dep_count);
        deps_set(&s->deps, &s->dep_count, &index, 1);
        return OK;
    }
    int code = s->legacy ? capture_forbids_legacy(s->base.owner, "work on the legacy stream") : OK;
    if (code) {
        work_drop(w);
        return code;
    }
    entry* e = (entry*)must_alloc(sizeof *e);
    e->what = w;
    e->seq = ++g.seq;
    if (s->last) {
        s->last->next = e;
    } else {
        s->first = e;
    }
    s->last = e;
    if (++s->depth > QUEUE_LIMIT) {
        stream_run(s, s->first->seq); // the real queue is finite as well
    }
    return OK;
}

// True if every node of `need` is in `have` or comes before a node that is.
static bool deps_reached(const graph* in, const int* have, size_t have_count, const int* needed,
                         size_t need_count) {
    bool* seen = (bool*)must_alloc(in->count * sizeof *seen);
    bool all = true;
    for (size_t i = 0; i < have_count; i++) {
        seen[have[i]] = true;
    }
    for (size_t i = in->count; i-- > 0;) { // a node depends only on earlier ones
        for (size_t j = 0; seen[i] && j < in->nodes[i].dep_count; j++) {
            seen[in->nodes[i].deps[j]] = true;
        }
    }
    for (size_t i = 0; i < need_count; i++) {
        all = all && seen[needed[i]];
    }
    free(seen);
    return all;
}

static void graph_clear(graph* old) {
    for (size_t i = 0; i < old->count; i++) {
        if (old->nodes[i].what) {
            work_drop(old->nodes[i].what);
        }
        free(old->nodes[i].deps);
    }
    free(old->nodes);
    old->nodes = NULL;
    old->count = 0;
    old->room = 0;
    old->base.live = false;
}

// Number `place` of an order waits for number `other`, and so for all that it waits for.
static void order_after(exec* to, size_t place, size_t other, size_t words) {
    uint64_t* row = to->before + place * words;
    for (size_t i = 0; i < words; i++) {
        row[i] |= to->before[other * words + i];
    }
    row[other / 64] |= (uint64_t)1 << other % 64;
}

// An order of the nodes that respects their dependencies: at each point, picks the first, the last
// or a random one of the nodes that could run next.
static void graph_schedule(const graph* from, exec* to) {
    size_t* places = (size_t*)must_alloc(from->count * sizeof *places);
    bool* done = (bool*)must_alloc(from->count * sizeof *done);
    size_t* ready = (size_t*)must_alloc(from->count * sizeof *ready);
    to->order = (work**)must_alloc(from->count * sizeof *to->order);
    to->count = 0;
    for (size_t i = 0; i < from->count; i++) {
        done[i] = !from->nodes[i].what;
        to->count += done[i] ? 0 : 1;
    }
    size_t words = (to->count + 63) / 64;
    to->before = (uint64_t*)must_alloc(g.config.races ? to->count * words * sizeof(uint64_t) : 0);
    for (size_t place = 0; place < to->count; place++) {
        size_t count = 0;
        for (size_t i = 0; i < from->count; i++) {
            bool free_to_run = !done[i];
            for (size_t j = 0; free_to_run && j < from->nodes[i].dep_count; j++) {
                free_to_run = done[from->nodes[i].deps[j]];
            }
            if (free_to_run) {
                ready[count++] = i;
                if (g.config.order == FAKE_FORWARD) {
                    break;
                }
            }
        }
        size_t pick = g.config.order == FAKE_FORWARD   ? 0
                      : g.config.order == FAKE_REVERSE ? count - 1
                                                       : (size_t)(random_next() % count);
        const node* next = &from->nodes[ready[pick]];
        done[ready[pick]] = true;
        places[ready[pick]] = place;
        to->order[place] = next->what;
        to->order[place]->refs++;
        for (size_t j = 0; g.config.races && j < next->dep_count; j++) {
            if (from->nodes[next->deps[j]].what) {
                order_after(to, place, places[next->deps[j]], words);
            }
        }
    }
    free(places);
    free(done);
    free(ready);
}

static void exec_clear(exec* old) {
    for (size_t i = 0; i < old->count; i++) {
        work_drop(old->order[i]);
    }
    free(old->order);
    free(old->before);
    old->order = NULL;
    old->before = NULL;
    old->count = 0;
    old->base.live = false;
}

//@@ CONTEXTS

static context* context_make(int device, bool primary) {
    context* ctx = (context*)object_make(KIND_CONTEXT, sizeof *ctx, NULL);
    ctx->device = device;
    ctx->primary = primary;
    ctx->legacy = stream_make(ctx, true, false);
    ctx->refs = 1;
    return ctx;
}

static void module_clear(module* old) {
    for (object* o = g.objects; o; o = o->next) {
        if (o->kind == KIND_FUNCTION && ((entry_point*)(void*)o)->from == old) {
            o->live = false;
        }
    }
    if (old->ptx) {
        ptx_free(old->ptx);
        old->ptx = NULL;
    }
    old->base.live = false;
}

static void object_clear(object* o) {
    switch (o->kind) {
    case KIND_MODULE:
        module_clear((module*)(void*)o);
        break;
    case KIND_GRAPH:
        graph_clear((graph*)(void*)o);
        break;
    case KIND_EXEC:
        exec_clear((exec*)(void*)o);
        break;
    case KIND_EVENT:
        free(((event*)(void*)o)->deps);
        ((event*)(void*)o)->deps = NULL;
        ((event*)(void*)o)->dep_count = 0;
        break;
    case KIND_STREAM:
        queue_drop((stream*)(void*)o);
        free(((stream*)(void*)o)->deps);
        ((stream*)(void*)o)->deps = NULL;
        ((stream*)(void*)o)->dep_count = 0;
        break;
    default:
        break;
    }
    o->live = false;
}

static bool is_counted(const object* o) {
    if (o->kind == KIND_STREAM) {
        return !((const stream*)(const void*)o)->legacy;
    }
    return o->kind != KIND_FUNCTION && o->kind != KIND_CAPTURE && o->kind != KIND_CONTEXT;
}

// The end of a context: objects that its owner has not destroyed are counted as leaked.
static void context_end(context* ctx) {
    context_run(ctx);
    uint32_t lost[KINDS] = {0};
    for (object* o = g.objects; o; o = o->next) {
        if (o->live && o->owner == ctx) {
            lost[o->kind] += is_counted(o) ? 1 : 0;
            if (o->kind == KIND_CAPTURE) {
                capture_end((capture*)(void*)o);
            }
        }
    }
    for (size_t i = g.memory.count; i-- > 0;) {
        if (g.memory.list[i].owner == ctx) {
            lost[KIND_MEMORY]++;
            memory_drop(i);
        }
    }
    for (size_t i = g.pinned.count; i-- > 0;) {
        if (g.pinned.list[i].owner == ctx) {
            lost[KIND_PINNED]++;
            pinned_drop(i);
        }
    }
    // Queues come first because their work refers to the objects.
    queue_drop(ctx->legacy);
    for (stream* s = ctx->streams; s; s = s->next) {
        queue_drop(s);
    }
    for (object* o = g.objects; o; o = o->next) {
        if (o->live && o->owner == ctx) {
            object_clear(o);
        }
    }
    for (int kind = 0; kind < KINDS; kind++) {
        g.lost[kind] += lost[kind];
        if (lost[kind]) {
            broken("context#%u ended with %u %s object(s) alive", ctx->base.id, lost[kind],
                   kind_names[kind]);
        }
    }
    ctx->streams = NULL;
    ctx->base.live = false;
    if (ctx->primary) {
        g.primary[ctx->device] = NULL;
    }
}

static bool device_known(int device) {
    return device >= 0 && device < g.config.devices;
}

int cuInit(unsigned flags) {
    int code = enter(F_cuInit, NEED_NOTHING);
    if (!code && flags) {
        code = INVALID_VALUE;
    }
    if (!code) {
        code = g.config.init_result ? g.config.init_result : g.config.devices ? OK : NO_DEVICE;
    }
    g.initialised = g.initialised || !code;
    return leave(F_cuInit, code, "%u", flags);
}

int cuDriverGetVersion(int* version) {
    int code = enter(F_cuDriverGetVersion, NEED_NOTHING);
    if (!code && !version) {
        code = INVALID_VALUE;
    }
    if (!code) {
        *version = g.config.driver_version;
    }
    return leave(F_cuDriverGetVersion, code, "%d", g.config.driver_version);
}

int cuDeviceGetCount(int* count) {
    int code = enter(F_cuDeviceGetCount, NEED_INIT);
    if (!code && !count) {
        code = INVALID_VALUE;
    }
    if (!code) {
        *count = g.config.devices;
    }
    return leave(F_cuDeviceGetCount, code, "%d", g.config.devices);
}

int cuDeviceGet(int* device, int ordinal) {
    int code = enter(F_cuDeviceGet, NEED_INIT);
    if (!code) {
        code = !device ? INVALID_VALUE : device_known(ordinal) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        *device = ordinal;
    }
    return leave(F_cuDeviceGet, code, "%d", ordinal);
}

int cuDeviceGetName(char* name, int bytes, int device) {
    int code = enter(F_cuDeviceGetName, NEED_INIT);
    if (!code) {
        code = !name || bytes <= 0 ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        const fake_device* d = &g.config.device[device];
        if (d->name[0]) {
            snprintf(name, (size_t)bytes, "%s", d->name);
        } else {
            snprintf(name, (size_t)bytes, "Fake GPU %d.%d", d->cc / 10, d->cc % 10);
        }
    }
    return leave(F_cuDeviceGetName, code, "%d", device);
}

static uint32_t shared_optin(const fake_device* d) {
    static const struct {
        int cc;
        uint32_t kilobytes;
    } rows[] = {{121, 99}, {120, 99}, {110, 227}, {103, 227}, {100, 227}, {90, 227},
                {89, 99},  {88, 163}, {87, 163},  {86, 99},   {80, 163},  {75, 64}};
    if (d->shared_optin) {
        return d->shared_optin;
    }
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].cc == d->cc) {
            return rows[i].kilobytes * 1024;
        }
    }
    return 227 * 1024; // an unknown newer device
}

static uint32_t shared_block(const fake_device* d) {
    return d->shared_block ? d->shared_block : 48 * 1024;
}

static int device_attribute(const fake_device* d, int device, int attribute, int* value) {
    const struct {
        int attribute;
        int value;
    } rows[] = {{1, 1024},
                {2, 1024},
                {3, 1024},
                {4, 64},
                {5, 2147483647},
                {6, 65535},
                {7, 65535},
                {8, (int)shared_block(d)},
                {9, 65536},
                {10, 32},
                {11, 2147483647},
                {12, 65536},
                {13, 1980000},
                {14, 512},
                {15, 1},
                {16, d->sms},
                {17, 0},
                {18, 0},
                {19, 1},
                {20, 0},
                {31, 1},
                {32, 1},
                {33, device + 1},
                {34, 0},
                {36, 3201000},
                {37, 6144},
                {38, 60 * 1024 * 1024},
                {39, d->cc == 75                      ? 1024
                     : d->cc % 10 == 0 && d->cc < 120 ? 2048
                                                      : 1536},
                {40, 3},
                {41, 1},
                {50, 0},
                {75, d->cc / 10},
                {76, d->cc % 10},
                {78, 1},
                {81, (int)shared_optin(d) + 1024},
                {82, 65536},
                {83, 1},
                {91, 1},
                {95, 1},
                {97, (int)shared_optin(d)},
                {106, 32},
                {111, d->cc >= 80 ? 1024 : 0},
                {115, 1}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].attribute == attribute) {
            *value = rows[i].value;
            return OK;
        }
    }
    return INVALID_VALUE;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    int code = enter(F_cuDeviceGetAttribute, NEED_INIT);
    if (!code) {
        code = !value ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        code = device_attribute(&g.config.device[device], device, attribute, value);
    }
    return leave(F_cuDeviceGetAttribute, code, "%d, %d", attribute, device);
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    int code = enter(F_cuDeviceTotalMem_v2, NEED_INIT);
    if (!code) {
        code = !bytes ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        *bytes = (size_t)g.config.device[device].total_bytes;
    }
    return leave(F_cuDeviceTotalMem_v2, code, "%d", device);
}

int cuDeviceGetUuid_v2(void* uuid, int device) {
    int code = enter(F_cuDeviceGetUuid_v2, NEED_INIT);
    if (!code) {
        code = !uuid ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        for (int i = 0; i < 16; i++) {
            ((unsigned char*)uuid)[i] = (unsigned char)(0xF0 + i + 16 * device);
        }
    }
    return leave(F_cuDeviceGetUuid_v2, code, "%d", device);
}

int cuDevicePrimaryCtxRetain(void** ctx, int device) {
    int code = enter(F_cuDevicePrimaryCtxRetain, NEED_INIT);
    if (!code) {
        code = !ctx ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        if (g.primary[device]) {
            g.primary[device]->refs++;
        } else {
            g.primary[device] = context_make(device, true);
        }
        *ctx = g.primary[device];
    }
    return leave(F_cuDevicePrimaryCtxRetain, code, "%d", device);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int code = enter(F_cuDevicePrimaryCtxRelease_v2, NEED_INIT);
    if (!code) {
        code = !device_known(device) ? INVALID_DEVICE : g.primary[device] ? OK : INVALID_CONTEXT;
    }
    if (!code && --g.primary[device]->refs == 0) {
        context_end(g.primary[device]);
    }
    return leave(F_cuDevicePrimaryCtxRelease_v2, code, "%d", device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    int code = enter(F_cuDevicePrimaryCtxGetState, NEED_INIT);
    if (!code) {
        code = !flags || !active ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        *flags = 0;
        *active = g.primary[device] != NULL;
    }
    return leave(F_cuDevicePrimaryCtxGetState, code, "%d", device);
}

static int context_push(context* ctx) {
    thread_state* t = here();
    if (t->depth == MAX_STACK) {
        broken("the stack of current contexts grows without end");
        return INVALID_CONTEXT;
    }
    t->stack[t->depth++] = ctx;
    return OK;
}

int cuCtxCreate_v2(void** ctx, unsigned flags, int device) {
    int code = enter(F_cuCtxCreate_v2, NEED_INIT);
    if (!code) {
        code = !ctx ? INVALID_VALUE : device_known(device) ? OK : INVALID_DEVICE;
    }
    if (!code) {
        context* made = context_make(device, false);
        *ctx = made;
        code = context_push(made);
    }
    return leave(F_cuCtxCreate_v2, code, "%u, %d", flags, device);
}

int cuCtxDestroy_v2(void* ctx) {
    int code = enter(F_cuCtxDestroy_v2, NEED_INIT);
    context* old = (context*)object_get(ctx, KIND_CONTEXT, NULL);
    const char* name = tag(ctx);
    if (!code && (!old || old->primary)) {
        code = INVALID_CONTEXT;
    }
    if (!code) {
        context_end(old);
        thread_state* t = here();
        if (t->depth && t->stack[t->depth - 1] == old) {
            t->depth--;
        }
    }
    return leave(F_cuCtxDestroy_v2, code, "%s", name);
}

int cuCtxGetDevice(int* device) {
    int code = enter(F_cuCtxGetDevice, NEED_INIT);
    context* ctx = current();
    if (!code) {
        code = !device ? INVALID_VALUE : !ctx ? INVALID_CONTEXT : OK;
    }
    if (!code && !ctx->base.live) {
        code = CONTEXT_IS_DESTROYED;
    }
    if (!code) {
        *device = ctx->device;
    }
    return leave(F_cuCtxGetDevice, code, " ");
}

int cuCtxGetCurrent(void** ctx) {
    int code = enter(F_cuCtxGetCurrent, NEED_INIT);
    if (!code && !ctx) {
        code = INVALID_VALUE;
    }
    if (!code) {
        *ctx = current();
    }
    return leave(F_cuCtxGetCurrent, code, "%s", tag(current()));
}

int cuCtxSetCurrent(void* ctx) {
    int code = enter(F_cuCtxSetCurrent, NEED_INIT);
    context* wanted = (context*)object_get(ctx, KIND_CONTEXT, NULL);
    thread_state* t = here();
    if (!code && ctx && !wanted) {
        code = INVALID_CONTEXT;
    }
    if (!code && wanted && t->depth) {
        t->stack[t->depth - 1] = wanted;
    } else if (!code && wanted) {
        code = context_push(wanted);
    } else if (!code && t->depth) {
        t->depth--;
    }
    return leave(F_cuCtxSetCurrent, code, "%s", tag(ctx));
}

int cuCtxPushCurrent_v2(void* ctx) {
    int code = enter(F_cuCtxPushCurrent_v2, NEED_INIT);
    context* wanted = (context*)object_get(ctx, KIND_CONTEXT, NULL);
    if (!code) {
        code = wanted ? context_push(wanted) : INVALID_CONTEXT;
    }
    return leave(F_cuCtxPushCurrent_v2, code, "%s", tag(ctx));
}

int cuCtxPopCurrent_v2(void** ctx) {
    int code = enter(F_cuCtxPopCurrent_v2, NEED_INIT);
    thread_state* t = here();
    context* old = current();
    if (!code && !old) {
        code = INVALID_CONTEXT;
    }
    if (!code) {
        t->depth--;
        if (ctx) {
            *ctx = old;
        }
    }
    return leave(F_cuCtxPopCurrent_v2, code, "%s", tag(old));
}

int cuCtxSynchronize(void) {
    int code = enter(F_cuCtxSynchronize, NEED_CONTEXT);
    if (!code) {
        context* ctx = current();
        for (stream* s = ctx->streams; s; s = s->next) {
            if (s->in) {
                capture_break(s->in, "cuCtxSynchronize", CAPTURE_UNSUPPORTED);
                code = CAPTURE_UNSUPPORTED;
            }
        }
        if (!code) {
            context_run(ctx);
            code = ctx->sticky;
        }
    }
    return leave(F_cuCtxSynchronize, code, " ");
}

//@@ STREAM CALLS

static int stream_add(void** out, unsigned flags) {
    if (!out || flags > 1) {
        return INVALID_VALUE;
    }
    context* ctx = current();
    stream* s = stream_make(ctx, false, flags == 0);
    s->next = ctx->streams;
    ctx->streams = s;
    *out = s;
    return 0;
}

int cuStreamCreate(void** out, unsigned flags) {
    int code = enter(F_cuStreamCreate, NEED_CONTEXT);
    code = code ? code : stream_add(out, flags);
    return leave(F_cuStreamCreate, code, "%u -> %s", flags, tag(code ? NULL : *out));
}

// Priorities are written to the log and change nothing else.
int cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
    int code = enter(F_cuStreamCreateWithPriority, NEED_CONTEXT);
    code = code ? code : stream_add(out, flags);
    return leave(F_cuStreamCreateWithPriority, code, "%u priority %d -> %s", flags, priority,
                 tag(code ? NULL : *out));
}

int cuStreamDestroy_v2(void* handle) {
    int code = enter(F_cuStreamDestroy_v2, NEED_CONTEXT);
    const char* name = tag(handle);
    stream* s = code ? NULL : (stream*)object_get(handle, KIND_STREAM, current());
    if (!code && (!s || s->legacy)) {
        code = INVALID_HANDLE;
    }
    if (!code) {
        if (s->in) {
            capture* c = s->in;
            capture_break(c, "cuStreamDestroy", CAPTURE_UNSUPPORTED);
            if (c->origin == s) {
                graph_clear(c->into);
                capture_end(c);
            }
        }
        stream_run(s, UINT64_MAX);
        for (stream** link = &current()->streams; *link; link = &(*link)->next) {
            if (*link == s) {
                *link = s->next;
                break;
            }
        }
        object_clear(&s->base);
        code = g.late ? OK : current()->sticky;
    }
    return leave(F_cuStreamDestroy_v2, code, "%s", name);
}

int cuStreamSynchronize(void* handle) {
    int code = enter(F_cuStreamSynchronize, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code && !s) {
        code = INVALID_HANDLE;
    }
    if (!code && s->in) {
        capture_break(s->in, "cuStreamSynchronize", CAPTURE_UNSUPPORTED);
        code = CAPTURE_UNSUPPORTED;
    }
    if (!code && s->legacy) {
        code = capture_forbids_legacy(s->base.owner, "cuStreamSynchronize of the legacy stream");
    }
    if (!code) {
        code = capture_forbids(F_cuStreamSynchronize);
    }
    if (!code) {
        stream_run(s, UINT64_MAX);
        if (s->legacy) {
            stream_run_legacy_rule(s, UINT64_MAX);
        }
        code = s->base.owner->sticky;
    }
    return leave(F_cuStreamSynchronize, code, "%s", tag(handle));
}

// A query that finds unfinished work completes one piece of it, so that polling ends.
int cuStreamQuery(void* handle) {
    int code = enter(F_cuStreamQuery, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code && !s) {
        code = INVALID_HANDLE;
    }
    if (!code && s->in) {
        capture_break(s->in, "cuStreamQuery", CAPTURE_UNSUPPORTED);
        code = CAPTURE_UNSUPPORTED;
    }
    if (!code) {
        code = capture_forbids(F_cuStreamQuery);
    }
    if (!code && s->first) {
        stream_run(s, s->first->seq);
        code = s->base.owner->sticky ? s->base.owner->sticky : NOT_READY;
    }
    return leave(F_cuStreamQuery, code, "%s", tag(handle));
}

int cuStreamGetCtx(void* handle, void** ctx) {
    int code = enter(F_cuStreamGetCtx, NEED_INIT);
    context* now = current();
    stream* s = (stream*)object_get(handle, KIND_STREAM, NULL);
    if (!code && !s && (!handle || handle == (void*)1)) {
        code = now ? OK : INVALID_CONTEXT;
        s = now ? now->legacy : NULL;
    }
    if (!code) {
        code = !ctx ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code) {
        *ctx = s->base.owner;
    }
    return leave(F_cuStreamGetCtx, code, "%s", tag(handle));
}

static int wait_in_capture(stream* s, event* e) {
    capture* c = e->in;
    if (c->ended) {
        return CAPTURE_ISOLATION;
    }
    if (c->broken || (s->in && s->in->broken)) {
        return CAPTURE_INVALIDATED;
    }
    if (s->legacy) {
        capture_break(c, "a captured event waited for by the legacy stream", CAPTURE_IMPLICIT);
        return CAPTURE_IMPLICIT;
    }
    if (!s->in) {
        s->in = c; // the fork: this stream now also records
        s->dep_count = 0;
    }
    if (s->in != c) {
        capture_break(c, "cuStreamWaitEvent across two captures", CAPTURE_MERGE);
        capture_break(s->in, "cuStreamWaitEvent across two captures", CAPTURE_MERGE);
        return CAPTURE_MERGE;
    }
    deps_union(&s->deps, &s->dep_count, e->deps, e->dep_count);
    return OK;
}

int cuStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
    int code = enter(F_cuStreamWaitEvent, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    event* e = code ? NULL : (event*)object_get(event_handle, KIND_EVENT, NULL);
    if (!code && (!s || !e)) {
        code = INVALID_HANDLE;
    }
    if (!code && e->in) {
        code = wait_in_capture(s, e);
    } else if (!code && s->in) {
        code = CAPTURE_INVALIDATED;
        if (!s->in->broken) {
            code = CAPTURE_ISOLATION;
            capture_break(s->in, "cuStreamWaitEvent for an event from outside", code);
        }
    } else if (!code && e->recorded && !e->done) {
        work* w = work_make(WORK_WAIT);
        w->on = e->where;
        w->until = e->seq;
        code = submit(s, w);
    }
    return leave(F_cuStreamWaitEvent, code, "%s, %s, %u", tag(handle), tag(event_handle), flags);
}

//@@ CAPTURE CALLS

static int capture_status(const stream* s) {
    return !s->in ? 0 : s->in->broken ? 2 : 1;
}

int cuStreamIsCapturing(void* handle, int* status) {
    int code = enter(F_cuStreamIsCapturing, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code) {
        code = !status ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code && s->legacy) {
        code = capture_forbids_legacy(s->base.owner, "a query of the legacy stream");
    }
    if (!code) {
        *status = capture_status(s);
    }
    return leave(F_cuStreamIsCapturing, code, "%s", tag(handle));
}

int cuStreamGetCaptureInfo_v2(void* handle, int* status, uint64_t* id, void** out,
                              const void** deps, size_t* count) {
    int code = enter(F_cuStreamGetCaptureInfo_v2, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code) {
        code = !status ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code && s->legacy) {
        code = capture_forbids_legacy(s->base.owner, "a query of the legacy stream");
    }
    if (!code) {
        *status = capture_status(s);
        bool active = *status == 1;
        if (id && active) {
            *id = s->in->base.id;
        }
        if (out && active) {
            *out = s->in->into;
        }
        if (deps) {
            *deps = NULL; // node handles are not exposed
        }
        if (count) {
            *count = active ? s->dep_count : 0;
        }
    }
    return leave(F_cuStreamGetCaptureInfo_v2, code, "%s", tag(handle));
}

int cuStreamBeginCapture_v2(void* handle, int mode) {
    int code = enter(F_cuStreamBeginCapture_v2, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code) {
        code = mode < 0 || mode > 2 ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code) {
        code = s->legacy ? CAPTURE_UNSUPPORTED : s->in ? ILLEGAL_STATE : OK;
    }
    if (!code) {
        capture* c = (capture*)object_make(KIND_CAPTURE, sizeof *c, s->base.owner);
        c->origin = s;
        c->thread = pthread_self();
        c->mode = mode;
        c->into = (graph*)object_make(KIND_GRAPH, sizeof *c->into, s->base.owner);
        c->next = g.captures;
        g.captures = c;
        s->in = c;
        s->dep_count = 0;
    }
    return leave(F_cuStreamBeginCapture_v2, code, "%s, %d", tag(handle), mode);
}

static bool capture_joined(const capture* c) {
    const stream* origin = c->origin;
    for (const stream* s = c->base.owner->streams; s; s = s->next) {
        if (s->in == c && s != origin &&
            !deps_reached(c->into, origin->deps, origin->dep_count, s->deps, s->dep_count)) {
            return false;
        }
    }
    return true;
}

int cuStreamEndCapture(void* handle, void** out) {
    int code = enter(F_cuStreamEndCapture, NEED_INIT);
    int injected = code;
    context* ctx = current();
    stream* s = ctx ? stream_get(handle, ctx) : NULL;
    if (out) {
        *out = NULL;
    }
    code = !out ? INVALID_VALUE : !ctx ? INVALID_CONTEXT : !s ? INVALID_HANDLE : OK;
    if (!code && !s->in) {
        code = ILLEGAL_STATE;
    }
    capture* c = code ? NULL : s->in;
    if (!code && c->origin != s) {
        code = CAPTURE_UNMATCHED;
        capture_break(c, "cuStreamEndCapture on another stream", code);
    } else if (!code && c->mode != CAPTURE_RELAXED && !pthread_equal(c->thread, pthread_self())) {
        code = CAPTURE_WRONG_THREAD;
        broken("cuStreamEndCapture on another thread (908)");
    } else if (!code) {
        code = injected ? injected : c->broken ? CAPTURE_INVALIDATED : ctx->sticky;
        if (!code && !capture_joined(c)) {
            code = CAPTURE_UNJOINED;
            broken("a forked stream was not joined (904) when the capture of stream#%u ended",
                   s->base.id);
        }
        capture_end(c);
        if (code) {
            graph_clear(c->into);
        } else {
            graph_settle(c->into);
            *out = c->into;
        }
    }
    code = injected ? injected : code;
    return leave(F_cuStreamEndCapture, code, "%s -> %s", tag(handle), tag(out ? *out : NULL));
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
    int code = enter(F_cuThreadExchangeStreamCaptureMode, NEED_INIT);
    if (!code && (!mode || *mode < 0 || *mode > 2)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        int old = here()->capture_mode;
        here()->capture_mode = *mode;
        *mode = old;
    }
    return leave(F_cuThreadExchangeStreamCaptureMode, code, "%d", here()->capture_mode);
}

//@@ GRAPH CALLS

int cuGraphInstantiateWithFlags(void** out, void* handle, unsigned long long flags) {
    int code = enter(F_cuGraphInstantiateWithFlags, NEED_CONTEXT);
    graph* from = code ? NULL : (graph*)object_get(handle, KIND_GRAPH, NULL);
    exec* made = NULL;
    if (!code) {
        code = !out || !from ? INVALID_VALUE : OK;
    }
    for (capture* c = g.captures; !code && c; c = c->next) {
        if (c->into == from) {
            code = INVALID_VALUE; // still being recorded
        }
    }
    if (!code) {
        made = (exec*)object_make(KIND_EXEC, sizeof *made, current());
        graph_schedule(from, made);
        *out = made;
    }
    return leave(F_cuGraphInstantiateWithFlags, code, "%s, %llu -> %s", tag(handle), flags,
                 tag(made));
}

int cuGraphLaunch(void* handle, void* stream_handle) {
    int code = enter(F_cuGraphLaunch, NEED_CONTEXT);
    exec* what = code ? NULL : (exec*)object_get(handle, KIND_EXEC, current());
    stream* s = code ? NULL : stream_get(stream_handle, current());
    if (!code) {
        code = !what ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code && s->in) {
        code = s->in->broken ? CAPTURE_INVALIDATED : CAPTURE_UNSUPPORTED;
        capture_break(s->in, "cuGraphLaunch", code); // child graphs are not supported
    }
    if (!code) {
        work* w = work_make(WORK_GRAPH);
        w->graph = what;
        what->pending++;
        code = submit(s, w);
    }
    return leave(F_cuGraphLaunch, code, "%s, %s", tag(handle), tag(stream_handle));
}

int cuGraphUpload(void* handle, void* stream_handle) {
    int code = enter(F_cuGraphUpload, NEED_CONTEXT);
    exec* what = code ? NULL : (exec*)object_get(handle, KIND_EXEC, current());
    stream* s = code ? NULL : stream_get(stream_handle, current());
    if (!code) {
        code = !what ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    return leave(F_cuGraphUpload, code, "%s, %s", tag(handle), tag(stream_handle));
}

int cuGraphGetNodes(void* handle, void** nodes, size_t* count) {
    int code = enter(F_cuGraphGetNodes, NEED_INIT);
    graph* from = code ? NULL : (graph*)object_get(handle, KIND_GRAPH, NULL);
    if (!code && (!from || !count)) {
        code = INVALID_VALUE;
    }
    size_t live = 0;
    for (size_t i = 0; !code && i < from->count; i++) {
        if (from->nodes[i].what) {
            if (nodes && live < *count) {
                nodes[live] = &from->nodes[i];
            }
            live++;
        }
    }
    for (size_t i = live; !code && nodes && i < *count; i++) {
        nodes[i] = NULL;
    }
    if (!code && (!nodes || *count > live)) {
        *count = live;
    }
    return leave(F_cuGraphGetNodes, code, "%s -> %zu", tag(handle), live);
}

// A node that was handed out and not destroyed, otherwise NULL.
static node* node_get(void* handle) {
    for (object* o = g.objects; o; o = o->next) {
        graph* in = o->kind == KIND_GRAPH && o->live ? (graph*)(void*)o : NULL;
        if (in && (uintptr_t)handle >= (uintptr_t)in->nodes &&
            (uintptr_t)handle < (uintptr_t)(in->nodes + in->count)) {
            node* n = (node*)handle;
            return n->what ? n : NULL;
        }
    }
    return NULL;
}

int cuGraphNodeGetType(void* handle, int* type) {
    static const int types[] = {0, 1, 2, 7, 6, 4, 0}; // by work_kind; calls of cuBLAS are kernels
    int code = enter(F_cuGraphNodeGetType, NEED_INIT);
    node* n = code ? NULL : node_get(handle);
    if (!code) {
        code = n && type ? OK : INVALID_VALUE;
    }
    if (!code) {
        *type = types[n->what->kind];
    }
    return leave(F_cuGraphNodeGetType, code, "%d", code ? -1 : *type);
}

int cuGraphMemsetNodeGetParams(void* handle, void* params) {
    int code = enter(F_cuGraphMemsetNodeGetParams, NEED_INIT);
    node* n = code ? NULL : node_get(handle);
    if (!code) {
        code = n && params && n->what->kind == WORK_SET ? OK : INVALID_VALUE;
    }
    if (!code) {
        fake_memset_node out;
        memset(&out, 0, sizeof out);
        out.address = n->what->dst.address;
        out.pitch = n->what->dst.pitch;
        out.value = n->what->value;
        out.element = n->what->element;
        out.width = n->what->width;
        out.height = n->what->height;
        memcpy(params, &out, sizeof out);
    }
    return leave(F_cuGraphMemsetNodeGetParams, code, "%s", code ? "?" : "a memset");
}

// The nodes that n waits for, or those that wait for n, in the driver's order.
static int neighbours(node* n, bool before, void** list, size_t* count) {
    size_t found = 0;
    int self = (int)(n - n->in->nodes);
    for (size_t i = 0; i < n->in->count; i++) {
        node* other = &n->in->nodes[i];
        const node* later = before ? n : other;
        int wanted = before ? (int)i : self;
        for (size_t j = 0; j < later->dep_count; j++) {
            if (later->deps[j] == wanted) {
                if (list && found < *count) {
                    list[found] = other;
                }
                found++;
            }
        }
    }
    for (size_t i = found; list && i < *count; i++) {
        list[i] = NULL;
    }
    if (!list || *count > found) {
        *count = found;
    }
    return OK;
}

int cuGraphNodeGetDependencies_v2(void* handle, void** list, void* edges, size_t* count) {
    int code = enter(F_cuGraphNodeGetDependencies_v2, NEED_INIT);
    node* n = code ? NULL : node_get(handle);
    if (!code) {
        code = n && count && !edges ? neighbours(n, true, list, count) : INVALID_VALUE;
    }
    return leave(F_cuGraphNodeGetDependencies_v2, code, "%zu", code ? 0 : *count);
}

int cuGraphNodeGetDependentNodes_v2(void* handle, void** list, void* edges, size_t* count) {
    int code = enter(F_cuGraphNodeGetDependentNodes_v2, NEED_INIT);
    node* n = code ? NULL : node_get(handle);
    if (!code) {
        code = n && count && !edges ? neighbours(n, false, list, count) : INVALID_VALUE;
    }
    return leave(F_cuGraphNodeGetDependentNodes_v2, code, "%zu", code ? 0 : *count);
}

int cuGraphAddDependencies_v2(void* handle, void* const* from, void* const* to, const void* edges,
                              size_t count) {
    int code = enter(F_cuGraphAddDependencies_v2, NEED_INIT);
    graph* in = code ? NULL : (graph*)object_get(handle, KIND_GRAPH, NULL);
    if (!code && (!in || !from || !to || edges)) {
        code = INVALID_VALUE;
    }
    for (size_t i = 0; !code && i < count; i++) {
        node* a = node_get(from[i]);
        node* b = node_get(to[i]);
        if (!a || !b || a->in != in || b->in != in) {
            code = INVALID_VALUE;
        } else {
            int index = (int)(a - in->nodes);
            deps_union(&b->deps, &b->dep_count, &index, 1);
        }
    }
    return leave(F_cuGraphAddDependencies_v2, code, "%s, %zu", tag(handle), count);
}

int cuGraphDestroyNode(void* handle) {
    int code = enter(F_cuGraphDestroyNode, NEED_INIT);
    node* n = code ? NULL : node_get(handle);
    if (!code && !n) {
        code = INVALID_VALUE;
    }
    if (!code) {
        int self = (int)(n - n->in->nodes);
        for (size_t i = 0; i < n->in->count; i++) {
            node* other = &n->in->nodes[i];
            size_t kept = 0;
            for (size_t j = 0; j < other->dep_count; j++) {
                if (other->deps[j] != self) {
                    other->deps[kept++] = other->deps[j];
                }
            }
            other->dep_count = kept;
        }
        work_drop(n->what);
        n->what = NULL;
        n->dep_count = 0;
    }
    return leave(F_cuGraphDestroyNode, code, "%s", code ? "?" : "a node");
}

int cuGraphDestroy(void* handle) {
    int code = enter(F_cuGraphDestroy, NEED_INIT);
    const char* name = tag(handle);
    graph* old = code ? NULL : (graph*)object_get(handle, KIND_GRAPH, NULL);
    if (!code && !old) {
        code = INVALID_VALUE;
    }
    if (!code) {
        graph_clear(old);
    }
    return leave(F_cuGraphDestroy, code, "%s", name);
}

int cuGraphExecDestroy(void* handle) {
    int code = enter(F_cuGraphExecDestroy, NEED_INIT);
    const char* name = tag(handle);
    exec* old = code ? NULL : (exec*)object_get(handle, KIND_EXEC, NULL);
    if (!code && !old) {
        code = INVALID_VALUE;
    }
    if (!code) {
        if (old->pending) {
            context_run(old->base.owner); // queued work still runs
        }
        exec_clear(old);
    }
    return leave(F_cuGraphExecDestroy, code, "%s", name);
}

//@@ EVENT CALLS

int cuEventCreate(void** out, unsigned flags) {
    int code = enter(F_cuEventCreate, NEED_CONTEXT);
    event* e = NULL;
    if (!code && (!out || flags > 7)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        e = (event*)object_make(KIND_EVENT, sizeof *e, current());
        e->flags = flags;
        *out = e;
    }
    return leave(F_cuEventCreate, code, "%u -> %s", flags, tag(e));
}

int cuEventRecord(void* handle, void* stream_handle) {
    int code = enter(F_cuEventRecord, NEED_CONTEXT);
    event* e = code ? NULL : (event*)object_get(handle, KIND_EVENT, current());
    stream* s = code ? NULL : stream_get(stream_handle, current());
    if (!code && (!e || !s)) {
        code = INVALID_HANDLE;
    }
    if (!code && s->in) {
        code = s->in->broken ? CAPTURE_INVALIDATED : OK;
        if (!code) {
            e->in = s->in;
            e->recorded = true;
            deps_set(&e->deps, &e->dep_count, s->deps, s->dep_count);
        }
    } else if (!code) {
        work* w = work_make(WORK_RECORD);
        w->event = e;
        uint64_t seq = g.seq + 1; // the number that submit is about to assign
        code = submit(s, w);
        if (!code) {
            e->in = NULL;
            e->recorded = true;
            e->done = false;
            e->where = s;
            e->seq = seq;
        }
    }
    return leave(F_cuEventRecord, code, "%s, %s", tag(handle), tag(stream_handle));
}

static int event_ask(void* handle, int function, event** out) {
    event* e = (event*)object_get(handle, KIND_EVENT, current());
    *out = e;
    if (!e) {
        return INVALID_HANDLE;
    }
    if (e->in) {
        broken("%s of an event recorded in a capture (907)", function_rows[function].name);
        return CAPTURED_EVENT;
    }
    return capture_forbids(function);
}

int cuEventQuery(void* handle) {
    int code = enter(F_cuEventQuery, NEED_CONTEXT);
    event* e = NULL;
    if (!code) {
        code = event_ask(handle, F_cuEventQuery, &e);
    }
    if (!code && e->recorded && !e->done) {
        if (e->where->first) {
            stream_run(e->where, e->where->first->seq);
        }
        code = current()->sticky ? current()->sticky : NOT_READY;
    }
    return leave(F_cuEventQuery, code, "%s", tag(handle));
}

int cuEventSynchronize(void* handle) {
    int code = enter(F_cuEventSynchronize, NEED_CONTEXT);
    event* e = NULL;
    if (!code) {
        code = event_ask(handle, F_cuEventSynchronize, &e);
    }
    if (!code && e->recorded && !e->done) {
        stream_run(e->where, e->seq);
        code = current()->sticky;
    }
    return leave(F_cuEventSynchronize, code, "%s", tag(handle));
}

int cuEventElapsedTime(float* ms, void* start, void* end) {
    int code = enter(F_cuEventElapsedTime, NEED_CONTEXT);
    event* a = code ? NULL : (event*)object_get(start, KIND_EVENT, current());
    event* b = code ? NULL : (event*)object_get(end, KIND_EVENT, current());
    if (!code) {
        code = !ms ? INVALID_VALUE : !a || !b ? INVALID_HANDLE : OK;
    }
    if (!code && (!a->recorded || !b->recorded || ((a->flags | b->flags) & 2))) {
        code = INVALID_HANDLE;
    }
    if (!code && (a->in || b->in)) {
        code = CAPTURED_EVENT;
    }
    if (!code && (!a->done || !b->done)) {
        code = NOT_READY;
    }
    if (!code) {
        *ms = ((float)b->time - (float)a->time) * 0.001f; // every piece of work takes a microsecond
    }
    return leave(F_cuEventElapsedTime, code, "%s, %s", tag(start), tag(end));
}

int cuEventDestroy_v2(void* handle) {
    int code = enter(F_cuEventDestroy_v2, NEED_CONTEXT);
    const char* name = tag(handle);
    event* e = code ? NULL : (event*)object_get(handle, KIND_EVENT, current());
    if (!code && !e) {
        code = INVALID_HANDLE;
    }
    if (!code) {
        object_clear(&e->base);
    }
    return leave(F_cuEventDestroy_v2, code, "%s", name);
}

//@@ MODULE CALLS - the driver's compiler: which PTX it accepts, and its messages when it does not

typedef struct ptx_header {
    int version; // 70 = 7.0
    int target;  // 80 = sm_80
    char suffix; // 'a', 'f' or 0
    int line;
    char name[24]; // "sm_90a"
} ptx_header;

static const char* ptx_skip(const char* p, int* line) {
    for (;;) {
        if (*p == '/' && p[1] == '/') {
            while (*p && *p != '\n') {
                p++;
            }
        } else if (*p == '/' && p[1] == '*') {
            for (p += 2; *p && !(*p == '*' && p[1] == '/'); p++) {
                *line += *p == '\n';
            }
            p += *p ? 2 : 0;
        } else if (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n') {
            *line += *p++ == '\n';
        } else {
            return p;
        }
    }
}

// Reads .version and .target from the start of the text; returns 0, or 218 with the reason in log.
static int ptx_header_read(const char* image, ptx_header* h, char* log, size_t room) {
    int minor = 0;
    int used = 0;
    h->line = 1;
    const char* p = ptx_skip(image, &h->line);
    if (sscanf(p, ".version %d.%d%n", &h->version, &minor, &used) != 2) {
        snprintf(
            log, room,
            "ptxas application ptx input, line %d; fatal   : Missing .version directive at start "
            "of file\n",
            h->line);
        return INVALID_PTX;
    }
    h->version = h->version * 10 + minor;
    p = ptx_skip(p + used, &h->line);
    if (sscanf(p, ".target %23[a-z0-9_]", h->name) != 1 ||
        sscanf(h->name, "sm_%d%c", &h->target, &h->suffix) < 1) {
        snprintf(log, room,
                 "ptxas application ptx input, line %d; fatal   : Missing .target directive\n",
                 h->line);
        return INVALID_PTX;
    }
    return OK;
}

static int driver_ptx_version(int driver) {
    static const int rows[][2] = {{13000, 90}, {12090, 88}, {12080, 87}, {12070, 86}, {12060, 85},
                                  {12050, 85}, {12040, 84}, {12030, 83}, {12020, 82}, {12010, 81},
                                  {12000, 80}, {11080, 78}, {11070, 77}, {11060, 76}, {11050, 75},
                                  {11040, 74}, {11030, 73}, {11020, 72}, {11010, 71}, {11000, 70},
                                  {10020, 65}, {10010, 64}, {10000, 63}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (driver >= rows[i][0]) {
            return rows[i][1];
        }
    }
    return 60;
}

// The first .version that supports a target; 0 if no version does.
static int target_ptx_version(int target, char suffix) {
    static const int rows[][2] = {{75, 63},  {80, 70},  {86, 71},  {87, 74},  {88, 90},
                                  {89, 78},  {90, 78},  {100, 86}, {103, 88}, {110, 90},
                                  {120, 87}, {121, 88}, {50, 40},  {52, 41},  {53, 42},
                                  {60, 50},  {61, 50},  {62, 50},  {70, 60},  {72, 61}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i][0] == target) {
            int base = rows[i][1];
            return suffix == 'f' ? (base > 88 ? base : 88) : target == 90 && suffix ? 80 : base;
        }
    }
    return 0;
}

static int ptx_accept(const ptx_header* h, int cc, char* log, size_t room) {
    int newest = driver_ptx_version(g.config.driver_version);
    if (h->version > newest) {
        snprintf(
            log, room,
            "ptxas application ptx input, line %d; fatal   : Unsupported .version %d.%d; current "
            "version is '%d.%d'\n",
            h->line, h->version / 10, h->version % 10, newest / 10, newest % 10);
        return UNSUPPORTED_PTX_VERSION;
    }
    int least = target_ptx_version(h->target, h->suffix);
    if (!least || h->version < least ||
        (h->suffix && (h->target < 90 || (h->suffix != 'a' && h->suffix != 'f')))) {
        snprintf(
            log, room,
            "ptxas application ptx input, line %d; error   : PTX .version %d.%d does not support "
            ".target %s\nptxas fatal   : Ptx assembly aborted due to errors\n",
            h->line, h->version / 10, h->version % 10, h->name);
        return INVALID_PTX;
    }
    if (h->target > cc) {
        snprintf(
            log, room,
            "ptxas application ptx input, line %d; fatal   : SM version specified by .target is "
            "higher than default SM version assumed\n",
            h->line);
        return INVALID_PTX;
    }
    bool family = h->suffix == 'f' && h->target / 10 == cc / 10;
    if (h->suffix && h->target != cc && !family) {
        snprintf(log, room, "ptxas fatal   : PTX with .target '%s' cannot be compiled to 'sm_%d'\n",
                 h->name, cc);
        return NO_BINARY_FOR_GPU;
    }
    return OK;
}

static int module_load(context* ctx, void** out, const void* image, char* log, size_t room) {
    char why[512] = "";
    ptx_header header;
    memset(&header, 0, sizeof header);
    log[0] = 0;
    if (!out || !image) {
        return INVALID_VALUE;
    }
    if (!memcmp(image, "\177ELF", 4) || !memcmp(image, "\x50\xed\x55\xba", 4)) {
        return INVALID_IMAGE; // machine code cannot be run here
    }
    int code = ptx_header_read((const char*)image, &header, log, room);
    if (!code) {
        code = ptx_accept(&header, g.config.device[ctx->device].cc, log, room);
    }
    if (code) {
        return code;
    }
    char* edited = mutate_text((const char*)image);
    ptx_module* loaded = ptx_load(edited ? edited : (const char*)image, why, sizeof why);
    free(edited);
    if (!loaded) {
        int line = 0;
        int used = 0;
        bool numbered = sscanf(why, "line %d: %n", &line, &used) == 1;
        snprintf(log, room,
                 "ptxas application ptx input, line %d; error   : %s\n"
                 "ptxas fatal   : Ptx assembly aborted due to errors\n",
                 line, numbered ? why + used : why);
        return INVALID_PTX;
    }
    module* made = (module*)object_make(KIND_MODULE, sizeof *made, ctx);
    made->ptx = loaded;
    *out = made;
    return OK;
}

int cuModuleLoadData(void** out, const void* image) {
    char log[1024];
    int code = enter(F_cuModuleLoadData, NEED_CONTEXT);
    if (!code) {
        code = capture_forbids(F_cuModuleLoadData);
    }
    if (!code) {
        code = module_load(current(), out, image, log, sizeof log);
    }
    return leave(F_cuModuleLoadData, code, "-> %s", code ? "NULL" : tag(*out));
}

enum { JIT_INFO_LOG = 3, JIT_INFO_SIZE = 4, JIT_ERROR_LOG = 5, JIT_ERROR_SIZE = 6, JIT_TARGET = 9 };

// The caller's log buffer: its size is passed by value in the void* of another option, and the
// number of bytes written is returned there.
static void jit_log(unsigned count, const int* options, void** values, int buffer_option,
                    const char* log) {
    char* buffer = NULL;
    void** size = NULL;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == buffer_option) {
            buffer = (char*)values[i];
        } else if (options[i] == buffer_option + 1) {
            size = &values[i];
        }
    }
    if (buffer && size && *size) {
        size_t room = (size_t)(uintptr_t)*size;
        size_t length = strlen(log);
        length = length < room - 1 ? length : room - 1;
        memcpy(buffer, log, length);
        buffer[length] = 0;
        *size = (void*)(uintptr_t)length;
    }
}

int cuModuleLoadDataEx(void** out, const void* image, unsigned count, int* options, void** values) {
    char log[1024] = "";
    int code = enter(F_cuModuleLoadDataEx, NEED_CONTEXT);
    if (!code && count && (!options || !values)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        code = capture_forbids(F_cuModuleLoadDataEx);
    }
    if (!code) {
        if (g.config.device[current()->device].cc >= 120) {
            broken("cuModuleLoadDataEx on compute capability 12 or newer");
        }
        for (unsigned i = 0; i < count; i++) {
            if (options[i] == JIT_TARGET) {
                broken("CU_JIT_TARGET was given");
            }
        }
        code = module_load(current(), out, image, log, sizeof log);
        jit_log(count, options, values, JIT_ERROR_LOG, log);
        jit_log(count, options, values, JIT_INFO_LOG, "");
    }
    return leave(F_cuModuleLoadDataEx, code, "-> %s", code ? "NULL" : tag(*out));
}

static size_t kernel_counter_of(const char* name) {
    for (size_t i = 0; i < g.kernel_count; i++) {
        if (!strcmp(g.kernels[i].name, name)) {
            return i;
        }
    }
    g.kernels = (kernel_counter*)must_grow(g.kernels, (g.kernel_count + 1) * sizeof *g.kernels);
    size_t length = strlen(name) + 1;
    g.kernels[g.kernel_count].name = (char*)must_alloc(length);
    memcpy(g.kernels[g.kernel_count].name, name, length);
    g.kernels[g.kernel_count].runs = 0;
    return g.kernel_count++;
}

static entry_point* function_of(module* from, const ptx_kernel* kernel) {
    for (object* o = g.objects; o; o = o->next) {
        entry_point* f = (entry_point*)(void*)o;
        if (o->kind == KIND_FUNCTION && o->live && f->from == from && f->kernel == kernel) {
            return f;
        }
    }
    entry_point* made = (entry_point*)object_make(KIND_FUNCTION, sizeof *made, from->base.owner);
    made->from = from;
    made->kernel = kernel;
    made->info = ptx_describe(kernel);
    uint32_t limit = shared_block(&g.config.device[from->base.owner->device]);
    uint32_t taken = made->info.static_shared;
    made->max_dynamic = taken < limit ? (int)(limit - taken) : 0;
    made->counter = kernel_counter_of(made->info.name);
    return made;
}

int cuModuleGetFunction(void** out, void* handle, const char* name) {
    int code = enter(F_cuModuleGetFunction, NEED_CONTEXT);
    module* from = code ? NULL : (module*)object_get(handle, KIND_MODULE, current());
    if (!code) {
        code = !out || !name ? INVALID_VALUE : from ? OK : INVALID_HANDLE;
    }
    if (!code) {
        const ptx_kernel* kernel = ptx_find(from->ptx, name);
        if (kernel) {
            *out = function_of(from, kernel);
        } else {
            code = NOT_FOUND;
        }
    }
    return leave(F_cuModuleGetFunction, code, "%s, %s", tag(handle), name ? name : "NULL");
}

int cuModuleUnload(void* handle) {
    int code = enter(F_cuModuleUnload, NEED_CONTEXT);
    const char* name = tag(handle);
    module* old = code ? NULL : (module*)object_get(handle, KIND_MODULE, current());
    if (!code && !old) {
        code = INVALID_HANDLE;
    }
    if (!code) {
        code = capture_forbids(F_cuModuleUnload);
    }
    if (!code) {
        context_run(current());
        module_clear(old);
        code = g.late ? OK : current()->sticky;
    }
    return leave(F_cuModuleUnload, code, "%s", name);
}

enum { TENSOR_BF16 = 9, TENSOR_SWIZZLE_128B = 3, TENSOR_PROMOTION_MAX = 3 };

// Matrices of bf16 with the 128-byte swizzle only, which is all that the kernels use; the limits
// are the driver's.
static int tensor_map_check(const void* map, int type, unsigned rank, const void* base,
                            const uint64_t* size, const uint64_t* strides, const unsigned* box,
                            const unsigned* steps) {
    if (!map || !base || !size || !strides || !box || !steps || type != TENSOR_BF16 || rank != 2 ||
        (uintptr_t)map % 64 != 0 || (uintptr_t)base % 16 != 0) {
        return INVALID_VALUE;
    }
    for (unsigned i = 0; i < rank; i++) {
        if (size[i] == 0 || size[i] > (uint64_t)1 << 32 || box[i] == 0 || box[i] > 256 ||
            steps[i] != 1) {
            return INVALID_VALUE;
        }
    }
    bool fits = strides[0] % 16 == 0 && strides[0] < (uint64_t)1 << 40 && box[0] * 2 <= 128 &&
                strides[0] >= size[0] * 2;
    return fits ? OK : INVALID_VALUE;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* size,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
    int code = enter(F_cuTensorMapEncodeTiled, 0);
    bool other = interleave != 0 || swizzle != TENSOR_SWIZZLE_128B || promotion < 0 ||
                 promotion > TENSOR_PROMOTION_MAX || fill != 0;
    if (!code) {
        code = other ? INVALID_VALUE
                     : tensor_map_check(map, type, rank, base, size, strides, box, steps);
    }
    if (!code) {
        ptx_tensor_map m;
        memset(&m, 0, sizeof m);
        m.magic = PTX_TENSOR_MAP_MAGIC;
        m.base = (uint64_t)(uintptr_t)base;
        m.size[0] = size[0];
        m.size[1] = size[1];
        m.stride = strides[0];
        m.box[0] = box[0];
        m.box[1] = box[1];
        m.element = 2;
        memset(map, 0, PTX_TENSOR_MAP_BYTES);
        memcpy(map, &m, sizeof m);
    }
    return leave(F_cuTensorMapEncodeTiled, code, "%s", code ? "?" : "tensor map");
}

enum {
    FUNCTION_MAX_DYNAMIC = 8,
    FUNCTION_CARVEOUT = 9,
    LAUNCH_COOPERATIVE = 2,
    LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
};

int cuFuncSetAttribute(void* handle, int attribute, int value) {
    int code = enter(F_cuFuncSetAttribute, NEED_CONTEXT);
    entry_point* f = code ? NULL : (entry_point*)object_get(handle, KIND_FUNCTION, current());
    if (!code) {
        code = f ? OK : INVALID_HANDLE;
    }
    if (!code && attribute == FUNCTION_MAX_DYNAMIC) {
        uint32_t limit = shared_optin(&g.config.device[current()->device]);
        if (value < 0 || (uint32_t)value + f->info.static_shared > limit) {
            code = INVALID_VALUE;
        } else {
            f->max_dynamic = value;
        }
    } else if (!code && attribute != FUNCTION_CARVEOUT) {
        code = INVALID_VALUE;
    }
    return leave(F_cuFuncSetAttribute, code, "%s, %d, %d", f ? f->info.name : "?", attribute,
                 value);
}

int cuFuncGetAttribute(int* value, int attribute, void* handle) {
    int code = enter(F_cuFuncGetAttribute, NEED_CONTEXT);
    entry_point* f = code ? NULL : (entry_point*)object_get(handle, KIND_FUNCTION, current());
    if (!code) {
        code = !value ? INVALID_VALUE : f ? OK : INVALID_HANDLE;
    }
    if (!code) {
        int cc = g.config.device[current()->device].cc;
        const int values[] = {f->info.max_threads ? (int)f->info.max_threads : 1024,
                              (int)f->info.static_shared,
                              0,
                              0,
                              32,
                              ptx_version(f->from->ptx),
                              cc,
                              0,
                              f->max_dynamic,
                              -1};
        if (attribute < 0 || attribute >= (int)(sizeof values / sizeof values[0])) {
            code = INVALID_VALUE;
        } else {
            *value = values[attribute];
        }
    }
    return leave(F_cuFuncGetAttribute, code, "%s, %d", f ? f->info.name : "?", attribute);
}

static int launch_check(const entry_point* f, const uint32_t grid[3], const uint32_t shape[3],
                        uint32_t shared) {
    uint64_t threads = (uint64_t)shape[0] * shape[1] * shape[2];
    if (!grid[0] || !grid[1] || !grid[2] || !threads || grid[0] > 2147483647u || grid[1] > 65535 ||
        grid[2] > 65535 || shape[0] > 1024 || shape[1] > 1024 || shape[2] > 64 || threads > 1024) {
        return INVALID_VALUE;
    }
    if ((f->info.max_threads && threads > f->info.max_threads) ||
        shared > (uint32_t)f->max_dynamic) {
        return INVALID_VALUE;
    }
    return OK;
}

// Copies the parameter values now, as the driver does: the caller may reuse its variables at once.
static int launch_take_args(work* w, const ptx_kernel* kernel, uint32_t params, void** args) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < params; i++) {
        bytes += (ptx_param_size(kernel, i) + 15) / 16 * 16;
    }
    if (params && !args) {
        return INVALID_VALUE;
    }
    w->params = (unsigned char*)must_alloc(bytes);
    w->args = (void**)must_alloc((params + 1) * sizeof *w->args);
    unsigned char* to = w->params;
    for (uint32_t i = 0; i < params; i++) {
        size_t size = ptx_param_size(kernel, i);
        if (!args[i]) {
            return INVALID_VALUE;
        }
        memcpy(to, args[i], size);
        w->args[i] = to;
        to += (size + 15) / 16 * 16;
    }
    return OK;
}

static int launch_make(entry_point* f, const uint32_t grid[3], const uint32_t shape[3],
                       uint32_t shared, void** args, work** out) {
    int code = launch_check(f, grid, shape, shared);
    if (code) {
        return code;
    }
    work* w = work_make(WORK_LAUNCH);
    w->function = f;
    memcpy(w->grid, grid, 3 * sizeof *grid);
    memcpy(w->block, shape, 3 * sizeof *shape);
    w->shared = shared;
    code = launch_take_args(w, f->kernel, f->info.params, args);
    if (code) {
        work_drop(w);
        return code;
    }
    *out = w;
    return OK;
}

int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream_handle, void** args, void** extra) {
    int code = enter(F_cuLaunchKernel, NEED_CONTEXT);
    const uint32_t grid[3] = {gx, gy, gz};
    const uint32_t shape[3] = {bx, by, bz};
    entry_point* f = code ? NULL : (entry_point*)object_get(handle, KIND_FUNCTION, current());
    stream* s = code ? NULL : stream_get(stream_handle, current());
    if (!code) {
        code = !f || !s ? INVALID_HANDLE : extra ? INVALID_VALUE : OK;
    }
    work* w = NULL;
    if (!code) {
        code = launch_make(f, grid, shape, shared, args, &w);
    }
    if (!code) {
        code = submit(s, w);
    }
    return leave(F_cuLaunchKernel, code, "%s, %u %u %u, %u %u %u, %u, %s", f ? f->info.name : "?",
                 gx, gy, gz, bx, by, bz, shared, tag(stream_handle));
}

// CUlaunchAttribute and CUlaunchConfig
typedef struct fake_launch_attribute {
    int id;
    char pad[4];
    int value[16];
} fake_launch_attribute;

typedef struct fake_launch_config {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    void* stream;
    const fake_launch_attribute* attributes;
    unsigned attribute_count;
} fake_launch_config;

// Blocks of a cooperative launch that are resident at once: threads and shared memory limit them.
static bool launch_fits(const fake_device* d, const entry_point* f,
                        const fake_launch_config* config) {
    uint64_t threads = (uint64_t)config->block[0] * config->block[1] * config->block[2];
    uint64_t wanted = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2];
    uint64_t shared = (uint64_t)config->shared + f->info.static_shared + 1024;
    uint64_t each = threads > 0 ? 1024 / threads : 0; // what every device has room for
    uint64_t most = (shared_optin(d) + 1024) / shared;
    return wanted <= (uint64_t)d->sms * (each < most ? each : most);
}

int cuLaunchKernelEx(const void* given, void* handle, void** args, void** extra) {
    const fake_launch_config* config = (const fake_launch_config*)given;
    int code = enter(F_cuLaunchKernelEx, NEED_CONTEXT);
    entry_point* f = code ? NULL : (entry_point*)object_get(handle, KIND_FUNCTION, current());
    stream* s = code || !config ? NULL : stream_get(config->stream, current());
    if (!code) {
        code = !config || extra ? INVALID_VALUE : !f || !s ? INVALID_HANDLE : OK;
    }
    bool early = false;
    bool together = false;
    for (unsigned i = 0; !code && i < config->attribute_count; i++) {
        const fake_launch_attribute* a = &config->attributes[i];
        bool cooperative = a->id == LAUNCH_COOPERATIVE;
        together = together || (cooperative && a->value[0] != 0);
        early = early || (!cooperative && a->value[0] != 0);
        code = cooperative || a->id == LAUNCH_PROGRAMMATIC_SERIALIZATION ? OK : INVALID_VALUE;
    }
    const fake_device* d = code ? NULL : &g.config.device[current()->device];
    if (!code && early && (d->cc < 90 || together)) {
        code = INVALID_VALUE;
    }
    if (!code && together && !launch_fits(d, f, config)) {
        code = COOPERATIVE_LAUNCH_TOO_LARGE;
    }
    work* w = NULL;
    if (!code) {
        code = launch_make(f, config->grid, config->block, config->shared, args, &w);
    }
    if (!code) {
        w->early = early;
        w->together = together;
        g.watched = g.watched || early;
        code = submit(s, w);
    }
    return leave(F_cuLaunchKernelEx, code, "%s%s%s", f ? f->info.name : "?",
                 early ? ", early" : "", together ? ", together" : "");
}

int cuGraphAddKernelNode_v2(void** out, void* handle, void* const* before, size_t count,
                            const void* params) {
    int code = enter(F_cuGraphAddKernelNode_v2, NEED_CONTEXT);
    graph* in = code ? NULL : (graph*)object_get(handle, KIND_GRAPH, NULL);
    fake_kernel_node p;
    memset(&p, 0, sizeof p);
    if (!code) {
        code = in && out && params && (before || !count) ? OK : INVALID_VALUE;
    }
    if (!code && in->count == in->room) {
        code = OUT_OF_MEMORY; // nodes must not move
    }
    int* deps = (int*)must_alloc((count + 1) * sizeof *deps);
    for (size_t i = 0; !code && i < count; i++) {
        node* n = node_get(before[i]);
        code = n && n->in == in ? OK : INVALID_VALUE;
        deps[i] = code ? 0 : (int)(n - in->nodes);
    }
    work* w = NULL;
    if (!code) {
        memcpy(&p, params, sizeof p);
        entry_point* f = (entry_point*)object_get(p.function, KIND_FUNCTION, current());
        code = !f        ? INVALID_HANDLE
               : p.extra ? INVALID_VALUE
                         : launch_make(f, p.grid, p.block, p.shared, p.args, &w);
    }
    if (!code) {
        graph_add(in, w, deps, count);
        *out = &in->nodes[in->count - 1];
    }
    free(deps);
    return leave(F_cuGraphAddKernelNode_v2, code, "%s, %zu", tag(handle), count);
}

//@@ MEMORY CALLS

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    int code = enter(F_cuMemAlloc_v2, NEED_CONTEXT);
    if (!code) {
        code = capture_forbids(F_cuMemAlloc_v2);
    }
    if (!code) {
        code = memory_alloc(current(), address, bytes);
    }
    return leave(F_cuMemAlloc_v2, code, "%zu -> %s", bytes, code ? "NULL" : tag_address(*address));
}

// Like the real functions, frees wait for all work of the context.
int cuMemFree_v2(uint64_t address) {
    int code = enter(F_cuMemFree_v2, NEED_CONTEXT);
    const char* name = tag_address(address);
    if (!code) {
        code = capture_forbids(F_cuMemFree_v2);
    }
    if (!code) {
        context_run(current());
        size_t i = block_above(&g.memory, address);
        if (!i || g.memory.list[i - 1].address != address ||
            g.memory.list[i - 1].owner != current()) {
            broken("cuMemFree of %s: not the start of a live allocation of this context", name);
            code = INVALID_VALUE;
        } else {
            memory_drop(i - 1);
            code = g.late ? OK : current()->sticky;
        }
    }
    return leave(F_cuMemFree_v2, code, "%s", name);
}

static int host_alloc_call(int function, void** pointer, size_t bytes, unsigned flags) {
    int code = enter(function, NEED_CONTEXT);
    if (!code) {
        code = capture_forbids(function);
    }
    if (!code) {
        code = pinned_alloc(current(), pointer, bytes, flags);
    }
    return leave(function, code, "%zu -> %s", bytes, code ? "NULL" : tag_pointer(*pointer));
}

int cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
    return host_alloc_call(F_cuMemHostAlloc, pointer, bytes, flags);
}

int cuMemAllocHost_v2(void** pointer, size_t bytes) {
    return host_alloc_call(F_cuMemAllocHost_v2, pointer, bytes, 0);
}

// Ends the use of pinned memory that was allocated, or of memory that was registered.
static int pinned_end(int function, const char* call, void* pointer, bool registered) {
    int code = enter(function, NEED_CONTEXT);
    const char* name = tag_pointer(pointer);
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    if (!code) {
        code = capture_forbids(function);
    }
    if (!code) {
        context_run(current());
        size_t i = block_above(&g.pinned, address);
        const block* b = i ? &g.pinned.list[i - 1] : NULL;
        if (!b || b->address != address || registered != !b->base) {
            broken("%s of %s: not the start of %s memory", call, name,
                   registered ? "registered" : "pinned");
            code = INVALID_VALUE;
        } else {
            pinned_drop(i - 1);
            code = g.late ? OK : current()->sticky;
        }
    }
    return leave(function, code, "%s", name);
}

int cuMemFreeHost(void* pointer) {
    return pinned_end(F_cuMemFreeHost, "cuMemFreeHost", pointer, false);
}

int cuMemHostUnregister(void* pointer) {
    return pinned_end(F_cuMemHostUnregister, "cuMemHostUnregister", pointer, true);
}

int cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
    int code = enter(F_cuMemHostRegister_v2, NEED_CONTEXT);
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    if (!code) {
        code = capture_forbids(F_cuMemHostRegister_v2);
    }
    if (!code && (!pointer || !bytes || address % 4096)) {
        code = INVALID_VALUE;
    }
    if (!code && (bytes > g.config.host_bytes || block_at(&g.pinned, address))) {
        code = OUT_OF_MEMORY;
    }
    if (!code) {
        block made;
        memset(&made, 0, sizeof made);
        made.address = address;
        made.bytes = bytes;
        made.host = (unsigned char*)pointer;
        made.owner = current();
        made.id = ++g.ids[KIND_PINNED];
        made.mapped = (flags & HOST_MAPPED) != 0;
        *block_insert(&g.pinned, made.address) = made;
        g.stats.live_pinned += bytes;
    }
    return leave(F_cuMemHostRegister_v2, code, "%zu", bytes);
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    int code = enter(F_cuMemGetInfo_v2, NEED_CONTEXT);
    if (!code && (!free_bytes || !total_bytes)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        const fake_device* d = &g.config.device[current()->device];
        uint64_t available = d->free_bytes ? d->free_bytes : d->total_bytes;
        uint64_t used = g.used[current()->device];
        *free_bytes = (size_t)(available > used ? available - used : 0);
        *total_bytes = (size_t)d->total_bytes;
    }
    return leave(F_cuMemGetInfo_v2, code, " ");
}

int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
    int code = enter(F_cuMemGetAddressRange_v2, NEED_CONTEXT);
    const block* b = code ? NULL : block_at(&g.memory, address);
    if (!code && !b) {
        code = NOT_FOUND;
    }
    if (!code && base) {
        *base = b->address;
    }
    if (!code && bytes) {
        *bytes = b->bytes;
    }
    return leave(F_cuMemGetAddressRange_v2, code, "%s", tag_address(address));
}

static int pointer_attribute(const block* b, bool device, int attribute, void* value) {
    uint64_t address = b->address;
    unsigned type = device ? 2 : 1;
    int ordinal = b->owner->device;
    unsigned managed = 0;
    size_t bytes = b->bytes;
    uint64_t id = b->id + (device ? 0 : 1ull << 32);
    switch (attribute) {
    case 1:
        memcpy(value, &b->owner, sizeof b->owner);
        return OK;
    case 2:
        memcpy(value, &type, sizeof type);
        return OK;
    case 7:
        memcpy(value, &id, sizeof id);
        return OK;
    case 8:
        memcpy(value, &managed, 1);
        return OK;
    case 9:
        memcpy(value, &ordinal, sizeof ordinal);
        return OK;
    case 11:
        memcpy(value, &address, sizeof address);
        return OK;
    case 12:
        memcpy(value, &bytes, sizeof bytes);
        return OK;
    default:
        return INVALID_VALUE;
    }
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    int code = enter(F_cuPointerGetAttribute, NEED_INIT);
    const block* device = block_at(&g.memory, address);
    const block* b = device ? device : block_at(&g.pinned, address);
    if (!code && (!value || !b)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        bool pointer = attribute == 3 || (attribute == 4 && !device);
        if (pointer) {
            memcpy(value, &address, sizeof address);
        } else {
            code = pointer_attribute(b, device != NULL, attribute, value);
        }
    }
    return leave(F_cuPointerGetAttribute, code, "%d, %s", attribute, tag_address(address));
}

//@@ COPY CALLS

static size_t span_of(const endpoint* e, size_t width, size_t height) {
    return (height - 1) * e->pitch + width;
}

// Checks that an endpoint is what it claims to be: device memory of this context, or host memory.
static bool endpoint_valid(context* ctx, const endpoint* e, size_t width, size_t height,
                           const char* call) {
    size_t bytes = span_of(e, width, height);
    if (e->device) {
        if (!resolve(ctx, e->address, bytes, true)) {
            broken("%s: %zu bytes at %s are not inside one live allocation of this context", call,
                   bytes, tag_address(e->address));
            return false;
        }
        return true;
    }
    uint64_t address = (uint64_t)(uintptr_t)e->host;
    const block* b = block_at(&g.pinned, address);
    if (is_device_address(address)) {
        broken("%s: a device address where a host pointer belongs", call);
        return false;
    }
    if (b && bytes > b->bytes - (address - b->address)) {
        broken("%s: runs past the end of pinned#%u", call, b->id);
        return false;
    }
    return e->host != NULL;
}

static bool is_pageable(const endpoint* e) {
    return !e->device && !block_at(&g.pinned, (uint64_t)(uintptr_t)e->host);
}

// A copy in a stream. A pageable source is read now, because the driver stages it; a pageable
// destination makes the call wait. Pinned memory is read and written later, when the stream gets
// there.
static int copy_queue(stream* s, endpoint dst, endpoint src, size_t width, size_t height,
                      const char* call) {
    context* ctx = s->base.owner;
    if (!width || !height) {
        return OK;
    }
    if (!endpoint_valid(ctx, &dst, width, height, call) ||
        !endpoint_valid(ctx, &src, width, height, call)) {
        return INVALID_VALUE;
    }
    work* w = work_make(WORK_COPY);
    w->dst = dst;
    w->src = src;
    w->width = width;
    w->height = height;
    if (is_pageable(&src) && !s->in) {
        w->staged = (unsigned char*)must_alloc(width * height);
        for (size_t row = 0; row < height; row++) {
            memcpy(w->staged + row * width, src.host + row * src.pitch, width);
        }
    }
    bool wait = is_pageable(&dst) && !s->in;
    int code = submit(s, w);
    if (!code && wait) {
        stream_run(s, g.seq);
        code = ctx->sticky;
    }
    return code;
}

static endpoint at_device(uint64_t address, size_t pitch) {
    endpoint e = {true, address, NULL, pitch};
    return e;
}

static endpoint at_host(const void* pointer, size_t pitch) {
    endpoint e = {false, 0, NULL, pitch};
    memcpy(&e.host, &pointer, sizeof pointer);
    return e;
}

static int copy_call(int function, endpoint dst, endpoint src, size_t bytes, void* handle) {
    int code = enter(function, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(handle, current());
    if (!code && !s) {
        code = INVALID_HANDLE;
    }
    if (!code) {
        code = copy_queue(s, dst, src, bytes, 1, function_rows[function].name);
    }
    return leave(function, code, "%s, %s, %zu, %s",
                 dst.device ? tag_address(dst.address) : tag_pointer(dst.host),
                 src.device ? tag_address(src.address) : tag_pointer(src.host), bytes, tag(handle));
}

// The synchronous copies go through the legacy stream and wait only for it.
static int copy_sync_call(int function, endpoint dst, endpoint src, size_t bytes) {
    int code = enter(function, NEED_CONTEXT);
    const char* name = function_rows[function].name;
    if (!code) {
        code = capture_forbids_legacy(current(), name);
    }
    if (!code) {
        code = capture_forbids(function);
    }
    if (!code) {
        code = copy_queue(current()->legacy, dst, src, bytes, 1, name);
    }
    if (!code) {
        stream_run(current()->legacy, UINT64_MAX);
        code = current()->sticky;
    }
    return leave(function, code, "%s, %s, %zu",
                 dst.device ? tag_address(dst.address) : tag_pointer(dst.host),
                 src.device ? tag_address(src.address) : tag_pointer(src.host), bytes);
}

int cuMemcpyHtoD_v2(uint64_t dst, const void* src, size_t bytes) {
    return copy_sync_call(F_cuMemcpyHtoD_v2, at_device(dst, bytes), at_host(src, bytes), bytes);
}

int cuMemcpyDtoH_v2(void* dst, uint64_t src, size_t bytes) {
    return copy_sync_call(F_cuMemcpyDtoH_v2, at_host(dst, bytes), at_device(src, bytes), bytes);
}

int cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t bytes, void* stream_handle) {
    return copy_call(F_cuMemcpyHtoDAsync_v2, at_device(dst, bytes), at_host(src, bytes), bytes,
                     stream_handle);
}

int cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t bytes, void* stream_handle) {
    return copy_call(F_cuMemcpyDtoHAsync_v2, at_host(dst, bytes), at_device(src, bytes), bytes,
                     stream_handle);
}

int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, void* stream_handle) {
    return copy_call(F_cuMemcpyDtoDAsync_v2, at_device(dst, bytes), at_device(src, bytes), bytes,
                     stream_handle);
}

static bool copy2d_side(int type, const void* host, uint64_t device, size_t x, size_t y,
                        size_t pitch, endpoint* out) {
    size_t offset = y * pitch + x;
    if (type == 1 && host) {
        *out = at_host((const unsigned char*)host + offset, pitch);
        return true;
    }
    *out = at_device(device + offset, pitch);
    return type == 2;
}

int cuMemcpy2DAsync_v2(const fake_copy2d* c, void* stream_handle) {
    int code = enter(F_cuMemcpy2DAsync_v2, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(stream_handle, current());
    endpoint dst = at_device(0, 0);
    endpoint src = at_device(0, 0);
    if (!code) {
        code = !c ? INVALID_VALUE : s ? OK : INVALID_HANDLE;
    }
    if (!code && (!copy2d_side(c->src_type, c->src_host, c->src_device, c->src_x, c->src_y,
                               c->src_pitch, &src) ||
                  !copy2d_side(c->dst_type, c->dst_host, c->dst_device, c->dst_x, c->dst_y,
                               c->dst_pitch, &dst))) {
        code = INVALID_VALUE;
    }
    if (!code && c->height > 1 &&
        (c->src_x + c->width > c->src_pitch || c->dst_x + c->width > c->dst_pitch)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        code = copy_queue(s, dst, src, c->width, c->height, "cuMemcpy2DAsync_v2");
    }
    return leave(F_cuMemcpy2DAsync_v2, code, "%zu x %zu, %s", c ? c->width : 0, c ? c->height : 0,
                 tag(stream_handle));
}

static int set_call(int function, uint64_t dst, unsigned element, uint32_t value, size_t width,
                    size_t pitch, size_t height, void* stream_handle) {
    int code = enter(function, NEED_CONTEXT);
    stream* s = code ? NULL : stream_get(stream_handle, current());
    if (!code) {
        code = !s                                               ? INVALID_HANDLE
               : dst % element || (height > 1 && pitch < width) ? INVALID_VALUE
                                                                : OK;
    }
    if (!code && width && height) {
        endpoint to = at_device(dst, pitch);
        if (width > SIZE_MAX / element || !endpoint_valid(s->base.owner, &to, width * element,
                                                          height, function_rows[function].name)) {
            code = INVALID_VALUE;
        } else {
            work* w = work_make(WORK_SET);
            w->dst = to;
            w->element = element;
            w->value = value;
            w->width = width;
            w->height = height;
            code = submit(s, w);
        }
    }
    return leave(function, code, "%s, %u, %zu x %zu, %s", tag_address(dst), value, width, height,
                 tag(stream_handle));
}

int cuMemsetD8Async(uint64_t dst, unsigned char value, size_t count, void* stream_handle) {
    return set_call(F_cuMemsetD8Async, dst, 1, value, count, 0, 1, stream_handle);
}

int cuMemsetD16Async(uint64_t dst, unsigned short value, size_t count, void* stream_handle) {
    return set_call(F_cuMemsetD16Async, dst, 2, value, count, 0, 1, stream_handle);
}

int cuMemsetD32Async(uint64_t dst, unsigned value, size_t count, void* stream_handle) {
    return set_call(F_cuMemsetD32Async, dst, 4, value, count, 0, 1, stream_handle);
}

int cuMemsetD2D8Async(uint64_t dst, size_t pitch, unsigned char value, size_t width, size_t height,
                      void* stream_handle) {
    return set_call(F_cuMemsetD2D8Async, dst, 1, value, width, pitch, height, stream_handle);
}

//@@ NAMES - error texts, symbols by name

#define FAKE_ERRORS(X)                                                                             \
    X(0, "CUDA_SUCCESS", "no error")                                                               \
    X(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")                                           \
    X(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")                                              \
    X(3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error")                                     \
    X(34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library")                              \
    X(46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device is busy or unavailable")                        \
    X(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")                           \
    X(101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")                                  \
    X(200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")                           \
    X(201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")                                 \
    X(209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device")          \
    X(214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error")                              \
    X(218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed")                               \
    X(221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found")              \
    X(222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX version is too new for this driver")         \
    X(400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle")                                 \
    X(401, "CUDA_ERROR_ILLEGAL_STATE", "not in a state to do this")                                \
    X(500, "CUDA_ERROR_NOT_FOUND", "named symbol not found")                                       \
    X(600, "CUDA_ERROR_NOT_READY", "device not ready")                                             \
    X(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")               \
    X(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch")        \
    X(702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out")                                    \
    X(709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed")                              \
    X(710, "CUDA_ERROR_ASSERT", "device-side assert triggered")                                    \
    X(714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error")                              \
    X(715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered")             \
    X(716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address")                                  \
    X(717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on this address space")    \
    X(718, "CUDA_ERROR_INVALID_PC", "invalid program counter")                                     \
    X(719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure")                               \
    X(720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch")     \
    X(801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported")                                  \
    X(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver / cuda driver pair")   \
    X(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted when stream is capturing")      \
    X(901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier call invalidated the capture")     \
    X(902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "two captures would be merged")                      \
    X(903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not begun in this stream")          \
    X(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "a forked stream was not joined")                 \
    X(905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency on work outside the capture")        \
    X(906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "implicit dependency on the legacy stream")       \
    X(907, "CUDA_ERROR_CAPTURED_EVENT", "event was last recorded in a capturing stream")           \
    X(908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture ended in another thread")            \
    X(999, "CUDA_ERROR_UNKNOWN", "unknown error")

static const struct {
    int code;
    const char* name;
    const char* text;
} error_rows[] = {
#define FAKE_ERROR_ROW(code, name, text) {code, name, text},
    FAKE_ERRORS(FAKE_ERROR_ROW)
#undef FAKE_ERROR_ROW
};

static int error_row(int code) {
    for (size_t i = 0; i < sizeof error_rows / sizeof error_rows[0]; i++) {
        if (error_rows[i].code == code) {
            return (int)i;
        }
    }
    return -1;
}

int cuGetErrorName(int code, const char** name) {
    int row = error_row(code);
    if (!name) {
        return INVALID_VALUE;
    }
    *name = row < 0 ? NULL : error_rows[row].name;
    return row < 0 ? INVALID_VALUE : OK;
}

int cuGetErrorString(int code, const char** string) {
    int row = error_row(code);
    if (!string) {
        return INVALID_VALUE;
    }
    *string = row < 0 ? NULL : error_rows[row].text;
    return row < 0 ? INVALID_VALUE : OK;
}

static const fake_cu functions = {
#define FAKE_MEMBER(name, kind, release, args) name,
    FAKE_CU_FUNCTIONS(FAKE_MEMBER)
#undef FAKE_MEMBER
};

// The newest of symbol, symbol_v2, symbol_v3, as the index of its row; -1 if there is none.
static int symbol_row(const char* symbol) {
    char name[80];
    int found = -1;
    static const char* const endings[] = {"", "_v2", "_v3"};
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
        int id = function_id(name);
        if (id >= 0 && id < F_cublasCreate_v2 && !fake_omits(name)) {
            found = id;
        }
    }
    return found;
}

int cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t flags,
                        int* status) {
    int code = enter(F_cuGetProcAddress_v2, NEED_NOTHING);
    (void)version;
    (void)flags;
    if (!code && (!symbol || !address)) {
        code = INVALID_VALUE;
    }
    if (!code) {
        int row = symbol_row(symbol);
        *address = NULL;
        if (row >= 0) {
            memcpy(address, (const unsigned char*)&functions + (size_t)row * sizeof(void (*)(void)),
                   sizeof *address);
        } else {
            code = NOT_FOUND;
        }
        if (status) {
            *status = code ? 1 : 0;
        }
    }
    return leave(F_cuGetProcAddress_v2, code, "%s", symbol ? symbol : "NULL");
}

//@@ API - the interface for tests

static fake_config config_defaults(void) {
    fake_config config;
    memset(&config, 0, sizeof config);
    config.driver_version = 13000;
    config.devices = 1;
    for (int i = 0; i < FAKE_MAX_DEVICES; i++) {
        config.device[i].cc = 90;
        config.device[i].sms = 132;
        config.device[i].total_bytes = 139ull << 30;
    }
    config.seed = 1;
    config.max_steps = 4000000000u;
    config.host_bytes = 3ull << 30;
    config.cublas_version = 130100;
    // For programs that are run unchanged: examples, command-line tools.
    const char* cc = getenv("FAKECUDA_CC");
    const char* driver = getenv("FAKECUDA_DRIVER");
    const char* order = getenv("FAKECUDA_ORDER");
    if (cc) {
        config.device[0].cc = atoi(cc);
    }
    if (driver) {
        config.driver_version = atoi(driver);
    }
    if (order) {
        config.order = !strcmp(order, "reverse")  ? FAKE_REVERSE
                       : !strcmp(order, "random") ? FAKE_RANDOM
                                                  : FAKE_FORWARD;
    }
    config.races = getenv("FAKECUDA_RACES") != NULL; // any value: on
    return config;
}

static void reset_objects(void) {
    while (g.memory.count) {
        memory_drop(g.memory.count - 1);
    }
    while (g.pinned.count) {
        pinned_drop(g.pinned.count - 1);
    }
    for (object* o = g.objects; o; o = o->next) {
        if (o->kind == KIND_STREAM) {
            queue_drop((stream*)(void*)o);
        }
    }
    for (object* o = g.objects; o; o = o->next) {
        if (o->live) {
            object_clear(o);
        }
    }
    while (g.objects) {
        object* o = g.objects;
        g.objects = o->next;
        free(o);
    }
    free(g.slots);
    g.slots = NULL;
    g.slot_count = 0;
    g.object_count = 0;
}

static void reset_to(const fake_config* config) {
    reset_objects();
    for (size_t i = 0; i < g.kernel_count; i++) {
        free(g.kernels[i].name);
    }
    free(g.kernels);
    g.kernels = NULL;
    g.kernel_count = 0;
    g.config = *config;
    g.generation++;
    g.initialised = false;
    memset(g.ids, 0, sizeof g.ids);
    memset(g.lost, 0, sizeof g.lost);
    memset(g.primary, 0, sizeof g.primary);
    memset(g.used, 0, sizeof g.used);
    memset(g.calls, 0, sizeof g.calls);
    memset(&g.stats, 0, sizeof g.stats);
    g.captures = NULL;
    g.fault_count = 0;
    g.seq = 0;
    g.clock = 0;
    g.random = config->seed;
    g.log.length = 0;
    g.log_full = false;
    g.broken[0] = 0;
    g.trap[0] = 0;
    if (!g.range_base) {
        range_reserve();
    }
}

static void api_reset(const fake_config* config) {
    fake_config defaults = config_defaults();
    lock();
    reset_to(config ? config : &defaults);
    unlock();
}

static void api_machine(int cc, int driver_version) {
    fake_config config = config_defaults();
    config.device[0].cc = cc;
    config.driver_version = driver_version;
    api_reset(&config);
}

static bool what_parse(const char* what, fault_class* kind, int* function) {
    *function = function_id(what);
    *kind = CLASS_NONE;
    for (int i = 1; i < CLASSES && *function < 0; i++) {
        if (!strcmp(class_names[i], what)) {
            *kind = (fault_class)i;
        }
    }
    return *function >= 0 || *kind != CLASS_NONE;
}

static void fault_add(const char* what, uint64_t nth, int code, bool sticky, bool forever) {
    lock();
    fault f = {CLASS_NONE, -1, nth, forever, sticky, code};
    if (!what_parse(what, &f.kind, &f.function) || !nth || g.fault_count == MAX_FAULTS) {
        broken("the test asked for an invalid fault: %s", what);
    } else {
        g.faults[g.fault_count++] = f;
    }
    unlock();
}

static void api_fail_at(const char* what, uint64_t nth, int code, bool sticky) {
    fault_add(what, nth, code, sticky, false);
}

static void api_fail_from(const char* what, uint64_t nth, int code) {
    fault_add(what, nth, code, false, true);
}

static void api_fail_clear(void) {
    lock();
    g.fault_count = 0;
    unlock();
}

static uint64_t api_calls(const char* what) {
    fault f = {CLASS_NONE, -1, 0, false, false, 0};
    uint64_t sum = 0;
    lock();
    if (!what_parse(what, &f.kind, &f.function)) {
        broken("the test asked for calls of an unknown function: %s", what);
    }
    for (int i = 0; i < FUNCTIONS; i++) {
        sum += fault_matches(&f, i) ? g.calls[i] : 0;
    }
    unlock();
    return sum;
}

static uint64_t api_kernel_runs(const char* name) {
    uint64_t sum = 0;
    lock();
    for (size_t i = 0; i < g.kernel_count; i++) {
        if (!name || !strcmp(name, g.kernels[i].name)) {
            sum += g.kernels[i].runs;
        }
    }
    unlock();
    return sum;
}

static fake_stats api_stats(void) {
    lock();
    fake_stats stats = g.stats;
    for (object* o = g.objects; o; o = o->next) {
        if (o->kind == KIND_STREAM) {
            stats.queued += ((stream*)(void*)o)->depth;
        }
    }
    unlock();
    return stats;
}

static const char* api_log(void) {
    lock();
    log_add("");
    const char* log = g.log.data;
    unlock();
    return log ? log : "";
}

static void api_log_clear(void) {
    lock();
    g.log.length = 0;
    g.log_full = false;
    log_add("");
    unlock();
}

static const char* api_check(void) {
    lock();
    guards_check(&g.memory, "memory");
    guards_check(&g.pinned, "pinned");
    bool bad = g.broken[0] != 0;
    snprintf(g.answer, sizeof g.answer, "%s", g.broken);
    unlock();
    return bad ? g.answer : NULL;
}

static const char* api_leaks(void) {
    uint32_t held[KINDS];
    size_t length = 0;
    lock();
    memcpy(held, g.lost, sizeof held);
    for (const object* o = g.objects; o; o = o->next) {
        held[o->kind] += o->live && is_counted(o) ? 1 : 0;
        if (o->live && o->kind == KIND_CONTEXT) {
            held[KIND_CONTEXT] += (uint32_t)((const context*)(const void*)o)->refs;
        }
    }
    held[KIND_MEMORY] += (uint32_t)g.memory.count;
    held[KIND_PINNED] += (uint32_t)g.pinned.count;
    for (int kind = 0; kind < KINDS; kind++) {
        if (held[kind]) {
            length += (size_t)snprintf(g.answer + length, sizeof g.answer - length, "%s%u %s",
                                       length ? ", " : "held: ", held[kind], kind_names[kind]);
        }
    }
    unlock();
    return length ? g.answer : NULL;
}

static const char* api_done(void) {
    const char* wrong = api_check();
    return wrong ? wrong : api_leaks();
}

static const char* api_trap(void) {
    return g.trap;
}

static void api_forgive(void) {
    lock();
    g.broken[0] = 0;
    memset(g.lost, 0, sizeof g.lost);
    unlock();
}

const fake_api* fake_get_api(void) {
    static fake_api api = {config_defaults, api_reset, api_machine,     api_fail_at, api_fail_from,
                           api_fail_clear,  api_calls, api_kernel_runs, api_stats,   api_log,
                           api_log_clear,   api_check, api_leaks,       api_done,    api_trap,
                           api_forgive,     {0}};
    lock();
    api.cu = functions;
    unlock();
    return &api;
}

//@@ INSIDE - the interface for cublas.c

static int inside_status(const fault* f) {
    if (f->kind == CLASS_ANY) {
        return f->code == OUT_OF_MEMORY ? 3 : 13; // ALLOC_FAILED, EXECUTION_FAILED
    }
    return f->code;
}

static int inside_enter(const char* name, int* late) {
    int function = function_id(name);
    lock();
    g.late = 0;
    g.calls[function]++;
    *late = 0;
    const fault* f = fault_take(function, false);
    if (f) {
        context* ctx = current();
        if (f->sticky && !context_state(ctx)) {
            context_kill(ctx, f->kind == CLASS_ANY ? f->code : LAUNCH_FAILED);
        }
        *late = inside_status(f);
    }
    if (*late && !function_rows[function].release) {
        return *late;
    }
    return 0;
}

static int inside_leave(const char* name, int status, const char* said) {
    return leave(function_id(name), status, "%s", said);
}

static const fake_config* inside_config(void) {
    return &g.config;
}

static int inside_current(void** ctx) {
    *ctx = current();
    return context_state(current());
}

static int inside_unsafe(const char* name) {
    return capture_forbids(function_id(name));
}

static void* inside_object_make(size_t bytes, void* ctx) {
    object* o = (object*)object_make(KIND_CUBLAS, sizeof(object) + 16 + bytes, (context*)ctx);
    return o;
}

static void* inside_object_data(void* handle) {
    object* o = (object*)object_get(handle, KIND_CUBLAS, NULL);
    return o ? (unsigned char*)o + (sizeof(object) + 15) / 16 * 16 : NULL;
}

static void* inside_object_owner(void* handle) {
    return ((object*)handle)->owner;
}

static const char* inside_tag(const void* handle) {
    return tag(handle);
}

static const char* inside_tag_address(uint64_t address) {
    return tag_address(address);
}

static void inside_object_drop(void* handle) {
    context* ctx = ((object*)handle)->owner;
    if (ctx->base.live) {
        context_run(ctx);
    }
    object_clear((object*)handle);
}

static bool inside_stream_valid(void* ctx, void* handle, bool* capturing) {
    stream* s = stream_get(handle, (context*)ctx);
    *capturing = s && s->in;
    return s != NULL;
}

static void inside_capture_break(void* ctx, void* handle, const char* why) {
    stream* s = stream_get(handle, (context*)ctx);
    if (s && s->in) {
        capture_break(s->in, why, CAPTURE_UNSUPPORTED);
    }
}

static int inside_submit(void* ctx, void* handle, int (*run)(void* ctx, const void* payload),
                         const void* payload, size_t bytes) {
    stream* s = stream_get(handle, (context*)ctx);
    if (!s) {
        return INVALID_HANDLE;
    }
    work* w = work_make(WORK_CALL);
    w->run = run;
    w->payload = must_alloc(bytes);
    memcpy(w->payload, payload, bytes);
    return submit(s, w);
}

static void inside_broken(const char* said) {
    broken("%s", said);
}

static void inside_count_gemm(void) {
    g.stats.gemms++;
}

const fake_inside* fake_get_inside(void) {
    static const fake_inside inside = {
        inside_enter,         inside_leave,        inside_config,
        inside_current,       inside_unsafe,       inside_object_make,
        inside_object_data,   inside_object_owner, inside_object_drop,
        inside_tag,           inside_tag_address,  inside_stream_valid,
        inside_capture_break, inside_submit,       resolve,
        inside_broken,        inside_count_gemm,   race_rows};
    return &inside;
}
