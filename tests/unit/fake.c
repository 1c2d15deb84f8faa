// fake.c - the rules of the fake CUDA driver and the fake cuBLAS (tests/fakecuda), one by one.
//
// The conclusions that other tests draw from the fake are only as good as the fake itself. Every
// test here makes the mistake that a rule exists for and verifies that it is caught, then does it
// correctly and verifies that it passes.

#include "fakecuda/fake.h"
#include "test.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static const fake_api* fake;
static fake_cu cu;

// ---- kernels ----

// Each does one thing to the integer that its first parameter points to.
#define KERNEL_HEAD(name, extra)                                                                   \
    ".visible .entry " name "(\n.param .u64 " name "_param_0,\n.param .u32 " name                  \
    "_param_1\n)\n" extra "{\n.reg .b32 %r<4>;\n.reg .b64 %rd<3>;\n"                               \
    "ld.param.u64 %rd1, [" name "_param_0];\nld.param.u32 %r1, [" name "_param_1];\n"              \
    "cvta.to.global.u64 %rd2, %rd1;\nld.global.u32 %r2, [%rd2];\n"

// clang-format off
#define KERNELS                                                                                    \
    ".address_size 64\n"                                                                           \
    KERNEL_HEAD("add", "") "add.s32 %r3, %r2, %r1;\nst.global.u32 [%rd2], %r3;\nret;\n}\n"         \
    KERNEL_HEAD("mul", "") "mul.lo.s32 %r3, %r2, %r1;\nst.global.u32 [%rd2], %r3;\nret;\n}\n"      \
    KERNEL_HEAD("mis", "") "st.global.u32 [%rd2+1], %r1;\nret;\n}\n"                               \
    KERNEL_HEAD("hang", "") "$L__BB3_1:\nbra.uni $L__BB3_1;\n}\n"                                  \
    KERNEL_HEAD("tight", ".maxntid 64, 1, 1\n") ".shared .align 4 .b8 room[1024];\n"               \
    "st.shared.u32 [room], %r1;\nst.global.u32 [%rd2], %r1;\nret;\n}\n"
// clang-format on

static const char ptx_80[] = ".version 7.0\n.target sm_80\n" KERNELS;

// ---- helpers ----

// A fresh default machine with its primary context current; false if a call failed.
static bool begin_with(const fake_config* config) {
    void* ctx = NULL;
    int device = -1;
    fake->reset(config);
    return !cu.cuInit(0) && !cu.cuDeviceGet(&device, 0) &&
           !cu.cuDevicePrimaryCtxRetain(&ctx, device) && !cu.cuCtxPushCurrent_v2(ctx);
}

static bool begin(void) {
    return begin_with(NULL);
}

static bool end(void) {
    return !cu.cuCtxPopCurrent_v2(NULL) && !cu.cuDevicePrimaryCtxRelease_v2(0);
}

// True if a rule was broken and the message names it; clears it.
static bool caught(const char* part) {
    const char* text = fake->check();
    bool found = text && strstr(text, part);
    if (!found) {
        printf("wanted \"%s\", got \"%s\"\n", part, text ? text : "nothing");
    }
    fake->forgive();
    return found;
}

static uint64_t device_int(int value) {
    uint64_t address = 0;
    if (cu.cuMemAlloc_v2(&address, sizeof value) ||
        cu.cuMemcpyHtoD_v2(address, &value, sizeof value)) {
        return 0;
    }
    return address;
}

static int read_int(uint64_t address) {
    int value = -12345;
    return cu.cuMemcpyDtoH_v2(&value, address, sizeof value) ? -54321 : value;
}

typedef struct kernels {
    void* module;
    void* add;
    void* mul;
    void* mis;
    void* hang;
    void* tight;
} kernels;

static bool load_kernels(kernels* k) {
    return !cu.cuModuleLoadData(&k->module, ptx_80) &&
           !cu.cuModuleGetFunction(&k->add, k->module, "add") &&
           !cu.cuModuleGetFunction(&k->mul, k->module, "mul") &&
           !cu.cuModuleGetFunction(&k->mis, k->module, "mis") &&
           !cu.cuModuleGetFunction(&k->hang, k->module, "hang") &&
           !cu.cuModuleGetFunction(&k->tight, k->module, "tight");
}

static int launch(void* function, uint64_t address, int value, void* stream) {
    void* args[2];
    args[0] = &address;
    args[1] = &value;
    int code = cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL);
    address = 0; // the values were copied at the call
    value = 1000000;
    return code;
}

#define NEED_FAKE()                                                                                \
    do {                                                                                           \
        if (!fake) {                                                                               \
            SKIPm("the fake driver is not loaded");                                                \
        }                                                                                          \
    } while (0)

// ---- machine and contexts ----

TEST machine_is_what_was_asked_for(void) {
    NEED_FAKE();
    static const int rows[][2] = {{75, 64},   {80, 163},  {86, 99},  {87, 163},
                                  {88, 163},  {89, 99},   {90, 227}, {100, 227},
                                  {103, 227}, {110, 227}, {120, 99}, {121, 99}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int value = 0;
        char name[32];
        fake->machine(rows[i][0], 12080);
        ASSERT_EQ(0, cu.cuInit(0));
        ASSERT_EQ(0, cu.cuDriverGetVersion(&value));
        ASSERT_EQ(12080, value);
        ASSERT_EQ(0, cu.cuDeviceGetAttribute(&value, 75, 0));
        ASSERT_EQ(rows[i][0] / 10, value);
        ASSERT_EQ(0, cu.cuDeviceGetAttribute(&value, 76, 0));
        ASSERT_EQ(rows[i][0] % 10, value);
        ASSERT_EQ(0, cu.cuDeviceGetAttribute(&value, 97, 0));
        ASSERT_EQ(rows[i][1] * 1024, value);
        ASSERT_EQ(0, cu.cuDeviceGetName(name, sizeof name, 0));
        ASSERT(strstr(name, "Fake GPU"));
        ASSERT_EQ(101, cu.cuDeviceGetName(name, sizeof name, 1));
    }
    PASS();
}

TEST machine_without_device_or_init(void) {
    NEED_FAKE();
    fake_config config = fake->defaults();
    int count = -1;
    config.devices = 0;
    fake->reset(&config);
    ASSERT_EQ(3, cu.cuDeviceGetCount(&count));
    ASSERT_EQ(100, cu.cuInit(0));
    config.devices = 8;
    config.init_result = 803;
    fake->reset(&config);
    ASSERT_EQ(803, cu.cuInit(0));
    config.init_result = 0;
    fake->reset(&config);
    ASSERT_EQ(0, cu.cuInit(0));
    ASSERT_EQ(0, cu.cuDeviceGetCount(&count));
    ASSERT_EQ(8, count);
    PASS();
}

static void* thread_context(void* out) {
    uint64_t address = 0;
    *(int*)out = cu.cuMemAlloc_v2(&address, 4);
    return NULL;
}

TEST contexts_are_per_thread(void) {
    NEED_FAKE();
    uint64_t address = 0;
    void* other = NULL;
    void* seen = NULL;
    int in_thread = -1;
    int device = -1;
    pthread_t thread;
    fake->reset(NULL);
    ASSERT_EQ(0, cu.cuInit(0));
    ASSERT_EQ(201, cu.cuMemAlloc_v2(&address, 4));
    ASSERT_EQ(201, cu.cuCtxGetDevice(&device));
    ASSERT(begin());
    ASSERT_EQ(0, pthread_create(&thread, NULL, thread_context, &in_thread));
    ASSERT_EQ(0, pthread_join(thread, NULL));
    ASSERT_EQ(201, in_thread);
    ASSERT_EQ(0, cu.cuCtxCreate_v2(&other, 0, 0));
    ASSERT_EQ(0, cu.cuCtxGetCurrent(&seen));
    ASSERT_EQ(other, seen);
    ASSERT_EQ(0, cu.cuCtxPopCurrent_v2(&seen));
    ASSERT_EQ(0, cu.cuCtxPushCurrent_v2(other));
    ASSERT(fake->leaks());
    ASSERT_EQ(0, cu.cuCtxDestroy_v2(other));
    ASSERT_EQ(201, cu.cuCtxPushCurrent_v2(other));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    PASS();
}

TEST contexts_are_counted_and_die(void) {
    NEED_FAKE();
    void* ctx = NULL;
    void* again = NULL;
    uint64_t address = 0;
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuCtxGetCurrent(&ctx));
    ASSERT_EQ(0, cu.cuDevicePrimaryCtxRetain(&again, 0));
    ASSERT_EQ(ctx, again);
    ASSERT_EQ(0, cu.cuDevicePrimaryCtxRelease_v2(0));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 4));
    ASSERT_EQ(0, cu.cuDevicePrimaryCtxRelease_v2(0)); // the last one, with memory left behind
    ASSERT_EQ(709, cu.cuMemAlloc_v2(&address, 4));
    ASSERT_EQ(201, cu.cuDevicePrimaryCtxRelease_v2(0));
    ASSERT(strstr(fake->leaks(), "1 memory"));
    ASSERT(caught("ended with 1 memory"));
    PASS();
}

TEST handles_of_another_context_are_refused(void) {
    NEED_FAKE();
    kernels k;
    void* other = NULL;
    void* stream = NULL;
    void* event = NULL;
    void* owner = NULL;
    ASSERT(begin());
    uint64_t mine = device_int(1);
    ASSERT_EQ(0, cu.cuCtxCreate_v2(&other, 0, 0));
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 0));
    ASSERT_EQ(0, cu.cuEventCreate(&event, 0));
    ASSERT(load_kernels(&k));
    int value = 0;
    ASSERT_EQ(1, cu.cuMemcpyDtoH_v2(&value, mine, 4));
    ASSERT(caught("not inside one live allocation"));
    ASSERT_EQ(0, cu.cuCtxPopCurrent_v2(NULL));
    ASSERT_EQ(400, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(400, cu.cuEventRecord(event, NULL));
    ASSERT_EQ(400, launch(k.add, mine, 1, NULL));
    ASSERT_EQ(400, cu.cuModuleUnload(k.module));
    ASSERT_EQ(0, cu.cuStreamGetCtx(stream, &owner));
    ASSERT_EQ(other, owner);
    ASSERT_EQ(400, cu.cuStreamSynchronize(&value)); // not a handle at all
    PASS();
}

// ---- memory ----

TEST memory_is_poisoned_and_exact(void) {
    NEED_FAKE();
    uint64_t address = 0;
    uint64_t base = 0;
    size_t bytes = 0;
    unsigned char got[10];
    ASSERT(begin());
    ASSERT_EQ(1, cu.cuMemAlloc_v2(&address, 0));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 10));
    ASSERT_EQ(0, address % 256);
    ASSERT(address % 512);
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(got, address, 10));
    for (int i = 0; i < 10; i++) {
        ASSERT_EQ(0xCB, got[i]);
    }
    ASSERT_EQ(0, cu.cuMemGetAddressRange_v2(&base, &bytes, address + 9));
    ASSERT_EQ(address, base);
    ASSERT_EQ(10, bytes);
    ASSERT_EQ(500, cu.cuMemGetAddressRange_v2(&base, &bytes, address + 10));
    ASSERT_EQ(1, cu.cuMemcpyDtoH_v2(got, address + 1, 10));
    ASSERT(caught("not inside one live allocation"));
    ASSERT_EQ(0, cu.cuMemFree_v2(address));
    ASSERT_EQ(1, cu.cuMemcpyDtoH_v2(got, address, 10));
    ASSERT(caught("not inside one live allocation"));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    PASS();
}

TEST memory_mistakes_are_caught(void) {
    NEED_FAKE();
    uint64_t address = 0;
    void* pinned = NULL;
    int local = 0;
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 64));
    ASSERT_EQ(0, cu.cuMemFree_v2(address));
    ASSERT_EQ(1, cu.cuMemFree_v2(address));
    ASSERT(caught("not the start of a live allocation"));
    ASSERT_EQ(1, cu.cuMemFree_v2((uint64_t)(uintptr_t)&local));
    ASSERT(caught("cuMemFree of host"));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 64));
    ASSERT_EQ(1, cu.cuMemcpyHtoD_v2((uint64_t)(uintptr_t)&local, &local, 4));
    ASSERT(caught("not inside one live allocation"));
    ASSERT_EQ(1, cu.cuMemcpyHtoD_v2(address, (void*)(uintptr_t)address, 4));
    ASSERT(caught("where a host pointer belongs"));
    ASSERT_EQ(0, cu.cuMemHostAlloc(&pinned, 100, 0));
    ASSERT_EQ(0xCB, ((unsigned char*)pinned)[99]);
    ASSERT_EQ(1, cu.cuMemcpyHtoD_v2(address, (char*)pinned + 90, 11));
    ASSERT(caught("past the end of pinned#1"));
    ASSERT_EQ(NULL, fake->check());
    ((unsigned char*)pinned)[100] = 0;
    ASSERT(caught("pinned#1 (100 bytes): written outside"));
    ((unsigned char*)pinned)[100] = 0xA5;
    ((unsigned char*)pinned)[-1] = 0;
    ASSERT_EQ(0, cu.cuMemFreeHost(pinned));
    ASSERT(caught("written outside"));
    ASSERT_EQ(1, cu.cuMemFreeHost(pinned));
    ASSERT(caught("not the start of pinned"));
    ASSERT(strstr(fake->leaks(), "1 memory"));
    PASS();
}

TEST memory_runs_out(void) {
    NEED_FAKE();
    fake_config config = fake->defaults();
    uint64_t a = 0;
    uint64_t b = 0;
    size_t free_bytes = 0;
    size_t total = 0;
    config.device[0].total_bytes = 2000;
    config.device[0].free_bytes = 1000;
    ASSERT(begin_with(&config));
    ASSERT_EQ(2, cu.cuMemAlloc_v2(&a, 1001));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&a, 600));
    ASSERT_EQ(2, cu.cuMemAlloc_v2(&b, 401));
    ASSERT_EQ(0, cu.cuMemGetInfo_v2(&free_bytes, &total));
    ASSERT_EQ(400, free_bytes);
    ASSERT_EQ(2000, total);
    ASSERT_EQ(0, cu.cuMemFree_v2(a));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&b, 1000));
    ASSERT_EQ(1000, fake->stats().peak_bytes);
    ASSERT_EQ(0, cu.cuMemFree_v2(b));
    PASS();
}

TEST memory_attributes(void) {
    NEED_FAKE();
    uint64_t address = 0;
    uint64_t start = 0;
    void* ctx = NULL;
    void* owner = NULL;
    unsigned type = 0;
    int local = 0;
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 64));
    ASSERT_EQ(0, cu.cuPointerGetAttribute(&type, 2, address + 5));
    ASSERT_EQ(2, type);
    ASSERT_EQ(0, cu.cuPointerGetAttribute(&start, 11, address + 5));
    ASSERT_EQ(address, start);
    ASSERT_EQ(0, cu.cuCtxGetCurrent(&ctx));
    ASSERT_EQ(0, cu.cuPointerGetAttribute(&owner, 1, address));
    ASSERT_EQ(ctx, owner);
    ASSERT_EQ(1, cu.cuPointerGetAttribute(&type, 2, (uint64_t)(uintptr_t)&local));
    PASS();
}

// ---- streams and copies ----

TEST pinned_copies_happen_late(void) {
    NEED_FAKE();
    int* pinned = NULL;
    void* stream = NULL;
    ASSERT(begin());
    uint64_t address = device_int(0);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuMemHostAlloc((void**)&pinned, 8, 0));
    pinned[0] = 1;
    ASSERT_EQ(0, cu.cuMemcpyHtoDAsync_v2(address, pinned, 4, stream));
    pinned[0] = 2; // too early: the copy has not run
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(2, read_int(address));
    pinned[1] = 7;
    ASSERT_EQ(0, cu.cuMemcpyDtoHAsync_v2(&pinned[1], address, 4, stream));
    ASSERT_EQ(7, pinned[1]);
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(2, pinned[1]);
    PASS();
}

TEST pageable_copies_happen_now(void) {
    NEED_FAKE();
    void* stream = NULL;
    int source = 1;
    int target = 7;
    ASSERT(begin());
    uint64_t address = device_int(0);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuMemcpyHtoDAsync_v2(address, &source, 4, stream));
    source = 2;
    ASSERT_EQ(0, read_int(address)); // staged but not yet written: the copy is in another stream
    ASSERT_EQ(0, cu.cuMemcpyDtoHAsync_v2(&target, address, 4, stream));
    ASSERT_EQ(1, target);
    PASS();
}

TEST legacy_stream_orders_blocking_streams_only(void) {
    NEED_FAKE();
    void* blocking = NULL;
    void* other = NULL;
    ASSERT(begin());
    uint64_t a = device_int(1);
    uint64_t b = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&blocking, 0));
    ASSERT_EQ(0, cu.cuStreamCreate(&other, 1));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 5, 1, blocking));
    ASSERT_EQ(0, cu.cuMemsetD32Async(b, 5, 1, other));
    ASSERT_EQ(5, read_int(a));
    ASSERT_EQ(1, read_int(b)); // a missing synchronize is visible
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 6, 1, NULL));
    ASSERT_EQ(0, cu.cuMemcpyDtoDAsync_v2(b, a, 4, blocking)); // after the legacy stream's work
    ASSERT_EQ(0, cu.cuStreamSynchronize(blocking));
    ASSERT_EQ(0, cu.cuStreamSynchronize(other));
    ASSERT_EQ(5, read_int(b));
    ASSERT_EQ(6, read_int(a));
    PASS();
}

TEST events_order_streams(void) {
    NEED_FAKE();
    void* first = NULL;
    void* second = NULL;
    void* event = NULL;
    ASSERT(begin());
    uint64_t a = device_int(1);
    uint64_t b = device_int(0);
    ASSERT_EQ(0, cu.cuStreamCreate(&first, 1));
    ASSERT_EQ(0, cu.cuStreamCreate(&second, 1));
    ASSERT_EQ(0, cu.cuEventCreate(&event, 0));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 5, 1, first));
    ASSERT_EQ(0, cu.cuMemcpyDtoDAsync_v2(b, a, 4, second)); // no wait: sees the old value
    ASSERT_EQ(0, cu.cuStreamSynchronize(second));
    ASSERT_EQ(1, read_int(b));
    ASSERT_EQ(0, cu.cuEventRecord(event, first));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 9, 1, first)); // after the event
    ASSERT_EQ(0, cu.cuStreamWaitEvent(second, event, 0));
    ASSERT_EQ(0, cu.cuMemcpyDtoDAsync_v2(b, a, 4, second));
    ASSERT_EQ(0, cu.cuStreamSynchronize(second));
    ASSERT_EQ(5, read_int(b));
    ASSERT_EQ(0, cu.cuEventSynchronize(event));
    ASSERT_EQ(5, read_int(a)); // the work after the event has not run
    PASS();
}

TEST queries_make_progress(void) {
    NEED_FAKE();
    void* stream = NULL;
    void* start = NULL;
    void* stop = NULL;
    float ms = -1.0f;
    ASSERT(begin());
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuEventCreate(&start, 0));
    ASSERT_EQ(0, cu.cuEventCreate(&stop, 0));
    ASSERT_EQ(0, cu.cuStreamQuery(stream));
    ASSERT_EQ(0, cu.cuEventQuery(stop)); // never recorded
    ASSERT_EQ(0, cu.cuEventRecord(start, stream));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 5, 1, stream));
    ASSERT_EQ(0, cu.cuEventRecord(stop, stream));
    ASSERT_EQ(600, cu.cuEventElapsedTime(&ms, start, stop));
    ASSERT_EQ(600, cu.cuEventQuery(stop));
    ASSERT_EQ(0, cu.cuEventQuery(start));
    ASSERT_EQ(600, cu.cuStreamQuery(stream));
    ASSERT_EQ(600, cu.cuStreamQuery(stream));
    ASSERT_EQ(0, cu.cuStreamQuery(stream));
    ASSERT_EQ(0, cu.cuEventElapsedTime(&ms, start, stop));
    ASSERT(ms > 0.0f);
    ASSERT_EQ(0, cu.cuEventRecord(stop, stream));
    ASSERT_EQ(0, cu.cuEventRecord(stop, stream)); // the later record counts
    ASSERT_EQ(600, cu.cuStreamQuery(stream));
    ASSERT_EQ(600, cu.cuEventQuery(stop));
    ASSERT_EQ(0, cu.cuEventQuery(stop));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 6, 1, stream));
    ASSERT_EQ(1, fake->stats().queued);
    ASSERT_EQ(0, cu.cuStreamDestroy_v2(stream)); // finishes first
    ASSERT_EQ(6, read_int(a));
    ASSERT_EQ(400, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(0, cu.cuEventDestroy_v2(start));
    ASSERT_EQ(400, cu.cuEventDestroy_v2(start));
    PASS();
}

TEST rectangles_are_copied_and_set(void) {
    NEED_FAKE();
    unsigned char host[12];
    uint64_t address = 0;
    fake_copy2d copy;
    memset(&copy, 0, sizeof copy);
    for (int i = 0; i < 12; i++) {
        host[i] = (unsigned char)i;
    }
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&address, 10));
    ASSERT_EQ(0, cu.cuMemsetD8Async(address, 0, 10, NULL));
    copy.src_type = 1;
    copy.src_host = host;
    copy.src_pitch = 4;
    copy.src_x = 1;
    copy.dst_type = 2;
    copy.dst_device = address;
    copy.dst_pitch = 4;
    copy.width = 2;
    copy.height = 3; // rows of 2 at 0, 4, 8: exactly 10 bytes
    ASSERT_EQ(0, cu.cuMemcpy2DAsync_v2(&copy, NULL));
    ASSERT_EQ(0, cu.cuMemsetD2D8Async(address + 2, 4, 77, 2, 2, NULL));
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(host, address, 10));
    static const unsigned char expected[10] = {1, 2, 77, 77, 5, 6, 77, 77, 9, 10};
    ASSERT_MEM_EQ(expected, host, 10);
    copy.width = 3;
    ASSERT_EQ(1, cu.cuMemcpy2DAsync_v2(&copy, NULL));
    ASSERT(caught("cuMemcpy2DAsync_v2: 11 bytes"));
    ASSERT_EQ(1, cu.cuMemsetD2D8Async(address, 4, 1, 3, 3, NULL));
    ASSERT(caught("cuMemsetD2D8Async: 11 bytes"));
    PASS();
}

// ---- modules and launches ----

typedef struct load_case {
    int cc;
    int driver;
    const char* version;
    const char* target;
    int code;
} load_case;

TEST modules_are_accepted_by_version_and_target(void) {
    NEED_FAKE();
    static const load_case cases[] = {
        {90, 13000, "7.0", "sm_80", 0},      {80, 11000, "7.0", "sm_80", 0},
        {80, 10020, "7.0", "sm_80", 222},    {75, 10000, "6.3", "sm_75", 0},
        {75, 13000, "6.2", "sm_75", 218},    {75, 13000, "7.0", "sm_80", 218},
        {90, 11040, "7.4", "sm_90", 218},    {90, 11040, "7.8", "sm_90", 222},
        {90, 12000, "7.8", "sm_90", 0},      {90, 12000, "8.0", "sm_90a", 0},
        {90, 12000, "7.8", "sm_90a", 218},   {100, 12080, "8.0", "sm_90a", 209},
        {80, 12080, "8.0", "sm_90a", 218},   {121, 12090, "8.8", "sm_121", 0},
        {121, 12080, "8.8", "sm_121", 222},  {121, 13000, "8.8", "sm_120f", 0},
        {103, 13000, "8.6", "sm_100a", 209}, {103, 13000, "8.8", "sm_100f", 0},
        {88, 13000, "9.0", "sm_88", 0},      {88, 12090, "8.8", "sm_88", 218},
        {110, 13000, "9.0", "sm_110", 0},    {130, 13000, "8.7", "sm_120", 0},
        {130, 13000, "9.0", "sm_130", 218},  {90, 13000, "7.0", "sm_81", 218},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const load_case* c = &cases[i];
        static char text[sizeof ptx_80 + 64];
        void* module = NULL;
        fake_config config = fake->defaults();
        config.device[0].cc = c->cc;
        config.driver_version = c->driver;
        ASSERT(begin_with(&config));
        snprintf(text, sizeof text, "// made here\n.version %s\n.target %s\n%s", c->version,
                 c->target, KERNELS);
        int code = cu.cuModuleLoadData(&module, text);
        if (code != c->code) {
            printf("device %d driver %d text %s %s\n", c->cc, c->driver, c->version, c->target);
        }
        ASSERT_EQ(c->code, code);
    }
    PASS();
}

TEST modules_say_why_not(void) {
    NEED_FAKE();
    char log[256] = "old";
    char info[64] = "old";
    int options[4] = {5, 6, 3, 4};
    void* values[4];
    void* module = NULL;
    values[0] = log;
    values[1] = (void*)(uintptr_t)sizeof log;
    values[2] = info;
    values[3] = (void*)(uintptr_t)sizeof info;
    ASSERT(begin());
    ASSERT_EQ(222,
              cu.cuModuleLoadDataEx(&module, ".version 9.9\n.target sm_80\n", 4, options, values));
    ASSERT(strstr(log, "Unsupported .version 9.9; current version is '9.0'"));
    ASSERT_EQ(strlen(log), (size_t)(uintptr_t)values[1]);
    ASSERT_STR_EQ("", info);
    values[1] = (void*)(uintptr_t)20; // a small buffer is truncated and terminated
    ASSERT_EQ(218, cu.cuModuleLoadDataEx(&module, "no ptx", 4, options, values));
    ASSERT_EQ(19, strlen(log));
    values[1] = (void*)(uintptr_t)sizeof log;
    ASSERT_EQ(218, cu.cuModuleLoadDataEx(&module, ".version 7.0\n.target sm_80\ngarbage\n", 4,
                                         options, values));
    ASSERT(strstr(log, "error   : "));
    ASSERT(strstr(log, "Ptx assembly aborted due to errors"));
    ASSERT_EQ(200, cu.cuModuleLoadData(&module, "\177ELF machine code"));
    ASSERT_EQ(NULL, fake->check());
    ASSERT_EQ(0, cu.cuModuleLoadDataEx(&module, ptx_80, 4, options, values));
    ASSERT_EQ(500, cu.cuModuleGetFunction(values, module, "nobody"));
    options[2] = 9;
    ASSERT_EQ(0, cu.cuModuleLoadDataEx(&module, ptx_80, 3, options, values));
    ASSERT(caught("CU_JIT_TARGET"));
    fake_config config = fake->defaults();
    config.device[0].cc = 120;
    ASSERT(begin_with(&config));
    ASSERT_EQ(0, cu.cuModuleLoadData(&module, ptx_80));
    ASSERT_EQ(NULL, fake->check());
    ASSERT_EQ(0, cu.cuModuleLoadDataEx(&module, ptx_80, 0, NULL, NULL));
    ASSERT(caught("compute capability 12"));
    PASS();
}

TEST launches_are_checked(void) {
    NEED_FAKE();
    kernels k;
    void* args[2];
    int value = 3;
    fake_config config = fake->defaults();
    config.device[0].cc = 86;
    ASSERT(begin_with(&config));
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(4);
    args[0] = &a;
    args[1] = &value;
    static const unsigned bad[][7] = {{0, 1, 1, 1, 1, 1, 0},     {1, 65536, 1, 1, 1, 1, 0},
                                      {1, 1, 65536, 1, 1, 1, 0}, {1, 1, 1, 1025, 1, 1, 0},
                                      {1, 1, 1, 1, 1, 65, 0},    {1, 1, 1, 32, 33, 1, 0},
                                      {1, 1, 1, 0, 1, 1, 0},     {1, 1, 1, 1, 1, 1, 49153}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const unsigned* b = bad[i];
        ASSERT_EQ(1, cu.cuLaunchKernel(k.add, b[0], b[1], b[2], b[3], b[4], b[5], b[6], NULL, args,
                                       NULL));
    }
    ASSERT_EQ(1, cu.cuLaunchKernel(k.add, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    ASSERT_EQ(1, cu.cuLaunchKernel(k.tight, 1, 1, 1, 65, 1, 1, 0, NULL, args, NULL));
    ASSERT_EQ(0, cu.cuLaunchKernel(k.tight, 1, 1, 1, 1, 1, 1, 48 * 1024 - 1024, NULL, args, NULL));
    ASSERT_EQ(1, cu.cuLaunchKernel(k.tight, 1, 1, 1, 1, 1, 1, 48 * 1024 - 1023, NULL, args, NULL));
    ASSERT_EQ(1, cu.cuFuncSetAttribute(k.tight, 8, 99 * 1024 - 1023));
    ASSERT_EQ(0, cu.cuFuncSetAttribute(k.tight, 8, 99 * 1024 - 1024));
    ASSERT_EQ(0, cu.cuLaunchKernel(k.tight, 1, 1, 1, 1, 1, 1, 98 * 1024, NULL, args, NULL));
    ASSERT_EQ(0, cu.cuFuncGetAttribute(&value, 8, k.tight));
    ASSERT_EQ(98 * 1024, value);
    ASSERT_EQ(0, cu.cuFuncGetAttribute(&value, 1, k.tight));
    ASSERT_EQ(1024, value);
    ASSERT_EQ(0, cu.cuFuncGetAttribute(&value, 0, k.tight));
    ASSERT_EQ(64, value);
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(2, fake->kernel_runs("tight"));
    PASS();
}

// Of a cooperative launch, all blocks have to be resident; and it cannot begin early.
TEST cooperative_launches_are_checked(void) {
    NEED_FAKE();
    struct {
        unsigned grid[3];
        unsigned block[3];
        unsigned shared;
        void* stream;
        void* attributes;
        unsigned count;
    } launch;
    struct {
        int id;
        char pad[4];
        int value[16];
    } attributes[2];
    kernels k;
    int value = 3;
    fake_config config = fake->defaults();
    config.device[0].cc = 90;
    config.device[0].sms = 2;
    ASSERT(begin_with(&config));
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(4);
    void* args[2] = {&a, &value};
    memset(&launch, 0, sizeof launch);
    memset(attributes, 0, sizeof attributes);
    for (int i = 0; i < 3; i++) {
        launch.grid[i] = 1;
        launch.block[i] = 1;
    }
    attributes[0].id = 2;
    attributes[0].value[0] = 1;
    attributes[1].id = 6;
    attributes[1].value[0] = 1;
    launch.block[0] = 512;
    launch.attributes = attributes;
    launch.count = 1;
    launch.grid[0] = 4;
    ASSERT_EQ(0, cu.cuLaunchKernelEx(&launch, k.add, args, NULL));
    launch.grid[0] = 5;
    ASSERT_EQ(720, cu.cuLaunchKernelEx(&launch, k.add, args, NULL));
    attributes[0].value[0] = 0;
    ASSERT_EQ(0, cu.cuLaunchKernelEx(&launch, k.add, args, NULL));
    attributes[0].value[0] = 1;
    launch.grid[0] = 1;
    launch.count = 2;
    ASSERT_EQ(1, cu.cuLaunchKernelEx(&launch, k.add, args, NULL));
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    PASS();
}

TEST launches_run_in_order_with_their_values(void) {
    NEED_FAKE();
    kernels k;
    void* stream = NULL;
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(4);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, launch(k.add, a, 3, stream));
    ASSERT_EQ(0, launch(k.mul, a, 10, stream));
    ASSERT_EQ(0, launch(k.add, a, 1, stream));
    ASSERT_EQ(0, fake->kernel_runs(NULL));
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(71, read_int(a));
    ASSERT_EQ(2, fake->kernel_runs("add"));
    ASSERT_EQ(3, fake->kernel_runs(NULL));
    ASSERT_EQ(0, launch(k.add, a, 1, stream));
    ASSERT_EQ(0, cu.cuModuleUnload(k.module)); // waits
    ASSERT_EQ(72, read_int(a));
    ASSERT_EQ(400, launch(k.add, a, 1, stream));
    ASSERT_EQ(0, cu.cuStreamDestroy_v2(stream));
    ASSERT_EQ(0, cu.cuMemFree_v2(a));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    PASS();
}

// kernel_name: which kernel; offset: where it writes.
TEST traps_are_late_and_sticky(const char* name, uint64_t offset, int expected) {
    NEED_FAKE();
    kernels k;
    void* function = NULL;
    uint64_t other = 0;
    fake_config config = fake->defaults();
    config.max_steps = 100000;
    ASSERT(begin_with(&config));
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(4);
    ASSERT_EQ(0, cu.cuModuleGetFunction(&function, k.module, name));
    ASSERT_EQ(0, launch(function, a + offset, 3, NULL));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&other, 4)); // the error is not known yet
    ASSERT_EQ(expected, cu.cuCtxSynchronize());
    ASSERT_EQ(expected, cu.cuMemAlloc_v2(&other, 4));
    ASSERT_EQ(expected, launch(k.add, a, 3, NULL));
    ASSERT(fake->trap()[0]);
    ASSERT(caught("device error"));
    ASSERT_EQ(expected, cu.cuMemFree_v2(a)); // freed, and reported
    ASSERT_EQ(expected, cu.cuMemFree_v2(other));
    ASSERT_EQ(expected, cu.cuModuleUnload(k.module));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    void* ctx = NULL;
    ASSERT_EQ(0, cu.cuDevicePrimaryCtxRetain(&ctx, 0)); // a new context works again
    ASSERT_EQ(0, cu.cuCtxPushCurrent_v2(ctx));
    ASSERT_EQ(9, read_int(device_int(9)));
    PASS();
}

// ---- capture and graphs ----

TEST graphs_replay_captured_values(void) {
    NEED_FAKE();
    kernels k;
    void* stream = NULL;
    void* graph = NULL;
    void* exec = NULL;
    size_t count = 0;
    int status = -1;
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, cu.cuStreamIsCapturing(stream, &status));
    ASSERT_EQ(1, status);
    ASSERT_EQ(401, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, launch(k.add, a, 3, stream));
    ASSERT_EQ(0, launch(k.mul, a, 2, stream));
    ASSERT_EQ(0, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(401, cu.cuStreamEndCapture(stream, &exec));
    ASSERT_EQ(0, cu.cuGraphGetNodes(graph, NULL, &count));
    ASSERT_EQ(2, count);
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, cu.cuGraphDestroy(graph));
    ASSERT_EQ(1, read_int(a)); // captured, not run
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(22, read_int(a)); // ((1 + 3) * 2 + 3) * 2
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuGraphExecDestroy(exec)); // queued work still runs
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(50, read_int(a));
    ASSERT_EQ(1, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(NULL, fake->check());
    PASS();
}

// Nodes of a recorded graph: their types, their neighbours, and replacing one by another.
TEST graphs_can_be_edited(void) {
    NEED_FAKE();
    kernels k;
    void* stream = NULL;
    void* graph = NULL;
    void* exec = NULL;
    void* nodes[4] = {NULL, NULL, NULL, NULL};
    void* beside[4] = {NULL, NULL, NULL, NULL};
    size_t count = 4;
    int type = -1;
    int value = 7;
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(4);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 1));
    ASSERT_EQ(0, launch(k.add, a, 3, stream));
    ASSERT_EQ(0, cu.cuMemsetD32Async(a, 0, 1, stream));
    ASSERT_EQ(0, launch(k.mul, a, 2, stream));
    ASSERT_EQ(0, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(0, cu.cuGraphGetNodes(graph, nodes, &count));
    ASSERT_EQ(3, count);
    ASSERT_EQ(NULL, nodes[3]);
    ASSERT_EQ(0, cu.cuGraphNodeGetType(nodes[1], &type));
    ASSERT_EQ(2, type);
    ASSERT_EQ(1, cu.cuGraphNodeGetType(&type, &type)); // not a node
    struct {
        uint64_t address;
        size_t pitch;
        unsigned value;
        unsigned element;
        size_t width;
        size_t height;
    } set;
    ASSERT_EQ(1, cu.cuGraphMemsetNodeGetParams(nodes[0], &set)); // a kernel
    ASSERT_EQ(0, cu.cuGraphMemsetNodeGetParams(nodes[1], &set));
    ASSERT(set.address == a && set.element == 4 && set.width == 1 && set.height == 1);
    count = 4;
    ASSERT_EQ(0, cu.cuGraphNodeGetDependencies_v2(nodes[1], beside, NULL, &count));
    ASSERT(count == 1 && beside[0] == nodes[0] && beside[1] == NULL);
    ASSERT_EQ(0, cu.cuGraphNodeGetDependentNodes_v2(nodes[1], NULL, NULL, &count));
    ASSERT_EQ(1, count);
    void* args[2] = {&a, &value};
    struct {
        void* function;
        unsigned sizes[7];
        void** args;
        void* none[3];
    } kernel = {k.add, {1, 1, 1, 1, 1, 1, 0}, args, {NULL, NULL, NULL}};
    void* made = NULL;
    ASSERT_EQ(1, cu.cuGraphAddKernelNode_v2(&made, graph, &graph, 1, &kernel)); // not a node
    ASSERT_EQ(0, cu.cuGraphAddKernelNode_v2(&made, graph, nodes, 1, &kernel));
    ASSERT_EQ(0, cu.cuGraphAddDependencies_v2(graph, &made, &nodes[2], NULL, 1));
    ASSERT_EQ(0, cu.cuGraphDestroyNode(nodes[1]));
    ASSERT_EQ(1, cu.cuGraphDestroyNode(nodes[1]));
    ASSERT_EQ(0, cu.cuGraphGetNodes(graph, NULL, &count));
    ASSERT_EQ(3, count);
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, cu.cuGraphDestroy(graph));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ((4 + 3 + 7) * 2, read_int(a)); // if the memset still ran: 0
    ASSERT_EQ(0, cu.cuGraphExecDestroy(exec));
    ASSERT_EQ(0, cu.cuStreamDestroy_v2(stream));
    ASSERT_EQ(0, cu.cuModuleUnload(k.module));
    ASSERT_EQ(0, cu.cuMemFree_v2(a));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    PASS();
}

TEST graphs_trap_on_freed_memory(bool unload) {
    NEED_FAKE();
    kernels k;
    void* stream = NULL;
    void* graph = NULL;
    void* exec = NULL;
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, launch(k.add, a, 3, stream));
    ASSERT_EQ(0, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, unload ? cu.cuModuleUnload(k.module) : cu.cuMemFree_v2(a));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(700, cu.cuStreamSynchronize(stream));
    ASSERT(caught(unload ? "unloaded module" : "device error 700: add"));
    PASS();
}

// Calls that break a capture, by number.
static int forbidden_call(int which, void* stream, uint64_t memory, void* module, void* event) {
    void* out = NULL;
    uint64_t address = 0;
    int local = 0;
    switch (which) {
    case 0:
        return cu.cuMemAlloc_v2(&address, 4);
    case 1:
        return cu.cuMemFree_v2(memory);
    case 2:
        return cu.cuMemHostAlloc(&out, 4, 0);
    case 3:
        return cu.cuModuleLoadData(&out, ptx_80);
    case 4:
        return cu.cuModuleUnload(module);
    case 5:
        return cu.cuStreamSynchronize(stream);
    case 6:
        return cu.cuStreamQuery(stream);
    case 7:
        return cu.cuCtxSynchronize();
    case 8:
        return cu.cuEventQuery(event);
    case 9:
        return cu.cuEventSynchronize(event);
    case 10:
        return cu.cuMemcpyDtoH_v2(&local, memory, 4);
    default:
        return cu.cuModuleLoadDataEx(&out, ptx_80, 0, NULL, NULL);
    }
}
#define FORBIDDEN_CALLS 12

TEST captures_break_on_forbidden_calls(int which) {
    NEED_FAKE();
    kernels k;
    void* stream = NULL;
    void* event = NULL;
    void* graph = &k;
    int status = 0;
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuEventCreate(&event, 0));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, launch(k.add, a, 3, stream));
    ASSERT_EQ(900, forbidden_call(which, stream, a, k.module, event));
    ASSERT(caught("breaks the capture of stream#"));
    ASSERT_EQ(901, launch(k.add, a, 3, stream));
    ASSERT_EQ(0, cu.cuStreamIsCapturing(stream, &status));
    ASSERT_EQ(2, status);
    ASSERT_EQ(901, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(NULL, graph);
    ASSERT_EQ(0, launch(k.add, a, 3, stream)); // the stream is usable again
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(4, read_int(a));
    ASSERT_EQ(NULL, fake->check());
    PASS();
}

TEST captures_in_other_modes(void) {
    NEED_FAKE();
    void* stream = NULL;
    void* graph = NULL;
    uint64_t a = 0;
    int mode = 2;
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 2));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(0, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, cu.cuThreadExchangeStreamCaptureMode(&mode));
    ASSERT_EQ(0, mode);
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(0, cu.cuThreadExchangeStreamCaptureMode(&mode));
    ASSERT_EQ(2, mode);
    ASSERT_EQ(900, cu.cuMemAlloc_v2(&a, 4));
    fake->forgive();
    PASS();
}

static void* thread_capture(void* data) {
    void** stream = (void**)data;
    void* graph = NULL;
    void* ctx = NULL;
    uint64_t address = 0;
    static int codes[2];
    cu.cuStreamGetCtx(*stream, &ctx);
    cu.cuCtxPushCurrent_v2(ctx);
    codes[0] = cu.cuStreamEndCapture(*stream, &graph);
    codes[1] = cu.cuMemAlloc_v2(&address, 4);
    return codes;
}

// mode: global (an allocation on another thread also breaks it) or thread-local (it does not).
TEST captures_belong_to_a_thread(int mode) {
    NEED_FAKE();
    void* stream = NULL;
    void* graph = NULL;
    void* codes = NULL;
    pthread_t thread;
    ASSERT(begin());
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, mode));
    ASSERT_EQ(0, pthread_create(&thread, NULL, thread_capture, &stream));
    ASSERT_EQ(0, pthread_join(thread, &codes));
    ASSERT_EQ(908, ((int*)codes)[0]);
    ASSERT_EQ(mode ? 0 : 900, ((int*)codes)[1]);
    ASSERT_EQ(mode ? 0 : 901, cu.cuStreamEndCapture(stream, &graph));
    ASSERT(caught("on another thread (908)"));
    PASS();
}

TEST captures_fork_and_join(bool join, fake_order order) {
    NEED_FAKE();
    kernels k;
    void* s[2] = {NULL, NULL};
    void* fork = NULL;
    void* back = NULL;
    void* graph = NULL;
    void* exec = NULL;
    fake_config config = fake->defaults();
    config.order = order;
    ASSERT(begin_with(&config));
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(1);
    uint64_t b = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&s[0], 1));
    ASSERT_EQ(0, cu.cuStreamCreate(&s[1], 1));
    ASSERT_EQ(0, cu.cuEventCreate(&fork, 2));
    ASSERT_EQ(0, cu.cuEventCreate(&back, 2));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(0, launch(k.add, a, 4, s[0]));
    ASSERT_EQ(0, cu.cuEventRecord(fork, s[0]));
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[1], fork, 0));
    ASSERT_EQ(0, cu.cuMemcpyDtoDAsync_v2(b, a, 4, s[1]));
    ASSERT_EQ(0, launch(k.mul, b, 10, s[1]));
    ASSERT_EQ(0, cu.cuEventRecord(back, s[1]));
    if (!join) {
        ASSERT_EQ(904, cu.cuStreamEndCapture(s[0], &graph));
        ASSERT(caught("not joined (904)"));
        ASSERT_EQ(0, launch(k.add, b, 1, s[1])); // both streams are free again
        PASS();
    }
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[0], back, 0));
    ASSERT_EQ(0, launch(k.add, b, 7, s[0]));
    ASSERT_EQ(903, cu.cuStreamEndCapture(s[1], &graph)); // not the one that began
    fake->forgive();
    ASSERT_EQ(901, cu.cuStreamEndCapture(s[0], &graph));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(0, launch(k.add, a, 4, s[0]));
    ASSERT_EQ(0, cu.cuEventRecord(fork, s[0]));
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[1], fork, 0));
    ASSERT_EQ(0, launch(k.add, a, 100, s[0]));
    ASSERT_EQ(0, launch(k.mul, b, 10, s[1]));
    ASSERT_EQ(0, cu.cuEventRecord(back, s[1]));
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[0], back, 0));
    ASSERT_EQ(0, launch(k.add, b, 7, s[0]));
    ASSERT_EQ(0, cu.cuStreamEndCapture(s[0], &graph));
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, s[1]));
    ASSERT_EQ(0, cu.cuStreamSynchronize(s[1]));
    ASSERT_EQ(105, read_int(a));
    ASSERT_EQ(17, read_int(b));
    ASSERT_EQ(NULL, fake->check());
    PASS();
}

// Two unordered branches run in the order the machine is set to.
TEST graph_branches_show_a_race(fake_order order, int expected) {
    NEED_FAKE();
    kernels k;
    void* s[2] = {NULL, NULL};
    void* event = NULL;
    void* back = NULL;
    void* graph = NULL;
    void* exec = NULL;
    fake_config config = fake->defaults();
    config.order = order;
    ASSERT(begin_with(&config));
    ASSERT(load_kernels(&k));
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&s[0], 1));
    ASSERT_EQ(0, cu.cuStreamCreate(&s[1], 1));
    ASSERT_EQ(0, cu.cuEventCreate(&event, 2));
    ASSERT_EQ(0, cu.cuEventCreate(&back, 2));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(0, cu.cuEventRecord(event, s[0]));
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[1], event, 0));
    ASSERT_EQ(0, launch(k.add, a, 4, s[0]));
    ASSERT_EQ(0, launch(k.mul, a, 10, s[1]));
    ASSERT_EQ(0, cu.cuEventRecord(back, s[1]));
    ASSERT_EQ(0, cu.cuStreamWaitEvent(s[0], back, 0));
    ASSERT_EQ(0, cu.cuStreamEndCapture(s[0], &graph));
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, s[0]));
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(expected, read_int(a));
    PASS();
}

TEST captures_refuse_what_is_outside(void) {
    NEED_FAKE();
    void* s[2] = {NULL, NULL};
    void* blocking = NULL;
    void* event = NULL;
    void* graph = NULL;
    int local = 0;
    int* pinned = NULL;
    ASSERT(begin());
    uint64_t a = device_int(1);
    ASSERT_EQ(0, cu.cuStreamCreate(&s[0], 1));
    ASSERT_EQ(0, cu.cuStreamCreate(&s[1], 1));
    ASSERT_EQ(0, cu.cuStreamCreate(&blocking, 0));
    ASSERT_EQ(0, cu.cuEventCreate(&event, 2));
    ASSERT_EQ(0, cu.cuMemHostAlloc((void**)&pinned, 4, 0));
    ASSERT_EQ(900, cu.cuStreamBeginCapture_v2(NULL, 0)); // the legacy stream

    ASSERT_EQ(0, cu.cuEventRecord(event, s[1]));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(905, cu.cuStreamWaitEvent(s[0], event, 0));
    ASSERT(caught("from outside (905)"));
    ASSERT_EQ(901, cu.cuStreamEndCapture(s[0], &graph));

    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[1], 0));
    ASSERT_EQ(0, cu.cuEventRecord(event, s[0]));
    ASSERT_EQ(907, cu.cuEventQuery(event));
    ASSERT_EQ(907, cu.cuEventSynchronize(event));
    ASSERT(caught("(907)"));
    ASSERT_EQ(902, cu.cuStreamWaitEvent(s[1], event, 0));
    ASSERT(caught("across two captures (902)"));
    ASSERT_EQ(901, cu.cuStreamEndCapture(s[0], &graph));
    ASSERT_EQ(901, cu.cuStreamEndCapture(s[1], &graph));

    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(blocking, 0));
    ASSERT_EQ(906, cu.cuMemsetD32Async(a, 1, 1, NULL));
    ASSERT(caught("legacy stream (906)"));
    ASSERT_EQ(901, cu.cuStreamEndCapture(blocking, &graph));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(blocking, 0));
    ASSERT_EQ(906, cu.cuMemcpyDtoH_v2(&local, a, 4));
    ASSERT(caught("cuMemcpyDtoH_v2 (906)"));
    ASSERT_EQ(901, cu.cuStreamEndCapture(blocking, &graph));

    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(s[0], 0));
    ASSERT_EQ(0, cu.cuMemcpyHtoDAsync_v2(a, pinned, 4, s[0]));
    ASSERT(caught("host memory is captured"));
    ASSERT_EQ(0, cu.cuStreamEndCapture(s[0], &graph));
    PASS();
}

// ---- faults, counters, log ----

TEST faults_hit_the_nth_call(void) {
    NEED_FAKE();
    uint64_t a = 0;
    void* stream = NULL;
    ASSERT(begin());
    fake->fail_at("ALLOC", 2, 2, false);
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(2, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(1, fake->stats().faults);
    fake->fail_at("cuStreamSynchronize", 1, 719, false);
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(719, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    fake->fail_at("ANY", 3, 999, false);
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    ASSERT_EQ(0, cu.cuStreamQuery(stream));
    ASSERT_EQ(999, cu.cuCtxSynchronize());
    fake->fail_from("SYNC", 2, 719);
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(719, cu.cuCtxSynchronize());
    ASSERT_EQ(719, cu.cuStreamSynchronize(stream));
    fake->fail_clear();
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    fake->fail_at("cuMemFree_v2", 1, 700, false); // a release is carried out all the same
    ASSERT_EQ(700, cu.cuMemFree_v2(a));
    ASSERT_EQ(1, cu.cuMemFree_v2(a));
    ASSERT(caught("not the start"));
    fake->fail_at("nonsense", 1, 1, false);
    ASSERT(caught("an invalid fault"));
    PASS();
}

TEST faults_can_stick_or_come_late(void) {
    NEED_FAKE();
    kernels k;
    uint64_t a = 0;
    ASSERT(begin());
    fake->fail_at("cuMemAlloc_v2", 1, 719, true);
    ASSERT_EQ(719, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(719, cu.cuMemAlloc_v2(&a, 4));
    ASSERT_EQ(719, cu.cuCtxSynchronize());
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    ASSERT(begin());
    ASSERT(load_kernels(&k));
    a = device_int(1);
    fake->fail_at("RUN", 2, 702, false);
    ASSERT_EQ(0, launch(k.add, a, 1, NULL));
    ASSERT_EQ(0, launch(k.add, a, 1, NULL));
    ASSERT_EQ(702, cu.cuCtxSynchronize());
    ASSERT_EQ(702, cu.cuCtxSynchronize());
    PASS();
}

TEST faults_at_every_call_leave_no_trace(void) {
    NEED_FAKE();
    uint64_t n = 0;
    bool clean = false;
    for (n = 1; n < 100 && !clean; n++) { // a small program that undoes what it did
        kernels k;
        void* ctx = NULL;
        void* stream = NULL;
        uint64_t a = 0;
        memset(&k, 0, sizeof k);
        fake->reset(NULL);
        fake->fail_at("ANY", n, 999, false);
        if (!cu.cuInit(0) && !cu.cuDevicePrimaryCtxRetain(&ctx, 0)) {
            if (!cu.cuCtxPushCurrent_v2(ctx)) {
                if (!cu.cuStreamCreate(&stream, 1) && !cu.cuMemAlloc_v2(&a, 4) &&
                    load_kernels(&k) && !launch(k.add, a, 1, stream)) {
                    cu.cuStreamSynchronize(stream);
                }
                if (k.module) {
                    cu.cuModuleUnload(k.module);
                }
                if (a) {
                    cu.cuMemFree_v2(a);
                }
                if (stream) {
                    cu.cuStreamDestroy_v2(stream);
                }
                cu.cuCtxPopCurrent_v2(NULL);
            }
            cu.cuDevicePrimaryCtxRelease_v2(0);
        }
        clean = !fake->stats().faults;
        const char* wrong = fake->done();
        if (wrong) {
            printf("call %llu: %s\n", (unsigned long long)n, wrong);
        }
        ASSERT_EQ(NULL, wrong);
    }
    ASSERT(n > 15 && n < 100);
    PASS();
}

static void small_program(char* out, size_t room) {
    kernels k;
    void* stream = NULL;
    if (begin() && load_kernels(&k)) {
        fake->log_clear();
        uint64_t a = device_int(1);
        cu.cuStreamCreate(&stream, 1);
        launch(k.add, a, 2, stream);
        cu.cuMemsetD8Async(a + 1, 3, 2, stream);
        cu.cuStreamSynchronize(stream);
    }
    snprintf(out, room, "%s", fake->log());
}

TEST log_repeats(void) {
    NEED_FAKE();
    char first[1024];
    char second[1024];
    small_program(first, sizeof first);
    ASSERT_EQ(1, fake->calls("cuLaunchKernel"));
    ASSERT_EQ(1, fake->calls("SYNC"));
    small_program(second, sizeof second);
    ASSERT_STR_EQ(first, second);
    ASSERT_STR_EQ("cuMemAlloc_v2(4 -> memory#1) = 0\n"
                  "cuMemcpyHtoD_v2(memory#1, host, 4) = 0\n"
                  "cuStreamCreate(1 -> stream#2) = 0\n"
                  "cuLaunchKernel(add, 1 1 1, 1 1 1, 0, stream#2) = 0\n"
                  "cuMemsetD8Async(memory#1+1, 3, 2 x 1, stream#2) = 0\n"
                  "cuStreamSynchronize(stream#2) = 0\n",
                  first);
    PASS();
}

TEST names_and_symbols(void) {
    NEED_FAKE();
    const char* name = NULL;
    void* address = NULL;
    int status = -1;
    fake->reset(NULL);
    ASSERT_EQ(0, cu.cuGetErrorName(222, &name));
    ASSERT_STR_EQ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", name);
    ASSERT_EQ(1, cu.cuGetErrorName(12345, &name));
    ASSERT_EQ(0, cu.cuGetProcAddress_v2("cuMemAlloc", &address, 13000, 0, &status));
    ASSERT_EQ(0, memcmp(&address, &cu.cuMemAlloc_v2, sizeof address));
    ASSERT_EQ(500, cu.cuGetProcAddress_v2("cuNobody", &address, 13000, 0, &status));
    ASSERT_EQ(1, status);
    PASS();
}

// ---- cuBLAS ----

typedef struct cublas {
#define CUBLAS_MEMBER(name, kind, release, args) int(*name) args;
    FAKE_CUBLAS_FUNCTIONS(CUBLAS_MEMBER)
#undef CUBLAS_MEMBER
} cublas;

static cublas blas;
static bool blas_loaded;

static void load_cublas(void) {
    void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
    blas_loaded = library != NULL;
#define CUBLAS_LOAD(name, kind, release, args)                                                     \
    if (blas_loaded) {                                                                             \
        void* symbol = dlsym(library, #name);                                                      \
        blas_loaded = symbol != NULL;                                                              \
        memcpy(&blas.name, &symbol, sizeof symbol);                                                \
    }
    FAKE_CUBLAS_FUNCTIONS(CUBLAS_LOAD)
#undef CUBLAS_LOAD
}

#define NEED_CUBLAS()                                                                              \
    do {                                                                                           \
        NEED_FAKE();                                                                               \
        if (!blas_loaded) {                                                                        \
            SKIPm("the fake cuBLAS is not loaded");                                                \
        }                                                                                          \
    } while (0)

static void* device(uint64_t address) {
    return (void*)(uintptr_t)address;
}

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t device_bytes(const void* data, size_t bytes) {
    uint64_t address = 0;
    return cu.cuMemAlloc_v2(&address, bytes) || cu.cuMemcpyHtoD_v2(address, data, bytes) ? 0
                                                                                         : address;
}

// One element as stored in the type: small integers are exact in all three.
static size_t put_small(void* out, size_t index, int type, int value) {
    float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t half = (uint16_t)(bits >> 16);
    if (type == 2 && value) {
        half = (uint16_t)(((bits >> 16) & 0x8000u) | (((bits & 0x7FFFFFFFu) >> 13) - (112u << 10)));
    }
    if (type == 0) {
        memcpy((char*)out + index * 4, &x, 4);
        return 4;
    }
    memcpy((char*)out + index * 2, &half, 2);
    return 2;
}

static int small_at(size_t i) {
    return (int)((i * 7 + i / 5) % 7) - 3;
}

TEST gemm_multiplies(int ta, int tb, int in, int out, int beta_on) {
    NEED_CUBLAS();
    enum { M = 5, N = 6, K = 7, LDA = 9, LDB = 8, LDC = 6, BATCH = 2, ROOM = 200 };
    unsigned char a[ROOM * 4];
    unsigned char b[ROOM * 4];
    unsigned char c[ROOM * 4];
    unsigned char expected[ROOM * 4];
    size_t size = in ? 2 : 4;
    size_t out_size = out ? 2 : 4;
    void* handle = NULL;
    float alpha = 2.0f;
    float beta = beta_on ? 1.0f : 0.0f;
    memset(c, 0xFF, sizeof c); // NaN: with beta 0 it must not be read
    for (size_t i = 0; i < ROOM; i++) {
        put_small(a, i, in, small_at(i));
        put_small(b, i, in, small_at(i + 3));
        if (beta_on) {
            put_small(c, i, out, small_at(i + 1));
        }
    }
    memcpy(expected, c, sizeof c);
    for (int batch = 0; batch < BATCH; batch++) {
        for (int i = 0; i < M; i++) {
            for (int j = 0; j < N; j++) {
                int sum = 0;
                for (int k = 0; k < K; k++) {
                    int at = batch * 70 + (ta ? i * LDA + k : k * LDA + i);
                    int bt = batch * 60 + (tb ? k * LDB + j : j * LDB + k);
                    sum += small_at((size_t)at) * small_at((size_t)bt + 3);
                }
                size_t to = (size_t)(batch * 40 + j * LDC + i);
                put_small(expected, to, out, 2 * sum + (beta_on ? small_at(to + 1) : 0));
            }
        }
    }
    ASSERT(begin());
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    uint64_t da = device_bytes(a, 140 * size); // more than needed; exact ends are tested elsewhere
    uint64_t db = device_bytes(b, 120 * size);
    uint64_t dc = device_bytes(c, (40 + 5 * LDC + 5) * out_size);
    ASSERT_EQ(0, blas.cublasGemmStridedBatchedEx(handle, ta, tb, M, N, K, &alpha, device(da), in,
                                                 LDA, 70, device(db), in, LDB, 60, &beta,
                                                 device(dc), out, LDC, 40, BATCH, 68, -1));
    alpha = 0.0f; // host scalars were copied at the call
    ASSERT_EQ(0, fake->stats().gemms);
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(1, fake->stats().gemms);
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(c, dc, (40 + 5 * LDC + 5) * out_size));
    ASSERT_MEM_EQ(expected, c, (40 + 5 * LDC + 5) * out_size);
    ASSERT_EQ(0, blas.cublasDestroy_v2(handle));
    ASSERT_EQ(NULL, fake->check());
    PASS();
}

// 1x1x1 products in each compute type: the constant shows in the result.
TEST gemm_rounds_as_its_compute_type(int compute, int math, float a, float expected) {
    NEED_CUBLAS();
    void* handle = NULL;
    float one = 1.0f;
    float zero = 0.0f;
    float got = -1.0f;
    ASSERT(begin());
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    ASSERT_EQ(0, blas.cublasSetMathMode(handle, math));
    uint64_t da = device_bytes(&a, 4);
    uint64_t db = device_bytes(&one, 4);
    uint64_t dc = device_bytes(&zero, 4);
    ASSERT_EQ(0, blas.cublasGemmEx(handle, 0, 0, 1, 1, 1, &one, device(da), 0, 1, device(db), 0, 1,
                                   &zero, device(dc), 0, 1, compute, -1));
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(&got, dc, 4));
    ASSERT_MEM_EQ(&expected, &got, 4);
    PASS();
}

TEST gemm_refuses(void) {
    NEED_CUBLAS();
    void* handle = NULL;
    void* h = NULL;
    float one = 1.0f;
    ASSERT(begin());
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    h = handle;
    uint64_t address = device_bytes(&one, 4);
    void* d = device(address);
#define GEMM(m, n, k, at, bt, ct, lda, ldb, ldc, compute)                                          \
    blas.cublasGemmEx(h, 0, 0, m, n, k, &one, d, at, lda, d, bt, ldb, &one, d, ct, ldc, compute, -1)
    ASSERT_EQ(0, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    ASSERT_EQ(15, GEMM(1, 1, 1, 0, 14, 0, 1, 1, 1, 68));
    ASSERT_EQ(15, GEMM(1, 1, 1, 0, 0, 14, 1, 1, 1, 68));
    ASSERT_EQ(15, GEMM(1, 1, 1, 14, 14, 0, 1, 1, 1, 77));
    ASSERT_EQ(15, GEMM(1, 1, 1, 14, 14, 2, 1, 1, 1, 68));
    ASSERT_EQ(15, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 70));
    ASSERT_EQ(7, GEMM(2, 1, 1, 0, 0, 0, 1, 1, 2, 68));
    ASSERT_EQ(7, GEMM(1, 1, 2, 0, 0, 0, 1, 1, 1, 68));
    ASSERT_EQ(7, GEMM(2, 1, 1, 0, 0, 0, 2, 1, 1, 68));
    ASSERT_EQ(7, GEMM(-1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    ASSERT_EQ(7, GEMM(1, 1, 1, 0, 0, 0, 0, 1, 1, 68));
    ASSERT_EQ(7,
              blas.cublasGemmEx(h, 1, 0, 1, 1, 2, &one, d, 0, 1, d, 0, 2, &one, d, 0, 1, 68, -1));
    ASSERT_EQ(0,
              blas.cublasGemmEx(h, 1, 0, 0, 1, 1, &one, d, 0, 1, d, 0, 1, &one, d, 0, 1, 68, -1));
    ASSERT_EQ(7,
              blas.cublasGemmEx(h, 0, 1, 1, 2, 1, &one, d, 0, 1, d, 0, 1, &one, d, 0, 1, 68, -1));
    ASSERT_EQ(0, GEMM(0, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    ASSERT_EQ(0, GEMM(1, 1, 0, 0, 0, 0, 1, 1, 1, 68));
    h = &one;
    ASSERT_EQ(1, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    h = handle;
    d = NULL;
    ASSERT_EQ(7, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    ASSERT_EQ(0, cu.cuCtxSynchronize());
    ASSERT_EQ(NULL, fake->check());
    d = device(address);
    void* other = NULL;
    ASSERT_EQ(0, cu.cuCtxCreate_v2(&other, 0, 0));
    ASSERT_EQ(14, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
    ASSERT(caught("handle belongs to another context"));
    ASSERT_EQ(0, cu.cuCtxDestroy_v2(other));
    ASSERT_EQ(0, GEMM(2, 1, 1, 0, 0, 0, 2, 1, 2, 68)); // reads past the four bytes that exist
    ASSERT_EQ(700, cu.cuCtxSynchronize());
    ASSERT_EQ(13, GEMM(1, 1, 1, 0, 0, 0, 1, 1, 1, 68));
#undef GEMM
    PASS();
}

TEST gemm_takes_device_scalars_and_empty_sums(void) {
    NEED_CUBLAS();
    void* handle = NULL;
    float values[4] = {3.0f, 2.0f, 5.0f, 0.0f};
    float got = 0.0f;
    ASSERT(begin());
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    uint64_t d = device_bytes(values, sizeof values);
    ASSERT_EQ(0, blas.cublasSetPointerMode_v2(handle, 1));
    ASSERT_EQ(0,
              blas.cublasGemmEx(handle, 0, 0, 1, 1, 1, device(d), device(d + 4), 0, 1,
                                device(d + 4), 0, 1, device(d + 4), device(d + 8), 0, 1, 68, -1));
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(&got, d + 8, 4));
    ASSERT_EQ(22.0f, got); // 3 * 2 * 2 + 2 * 5
    ASSERT_EQ(0, blas.cublasGemmEx(handle, 0, 0, 1, 1, 0, device(d), NULL, 0, 1, NULL, 0, 1,
                                   device(d + 4), device(d + 8), 0, 1, 68, -1));
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(&got, d + 8, 4));
    ASSERT_EQ(44.0f, got); // no products: C times beta
    ASSERT_EQ(0, blas.cublasGemmEx(handle, 0, 0, 1, 1, 1, &got, device(d + 4), 0, 1, device(d + 4),
                                   0, 1, &got, device(d + 8), 0, 1, 68,
                                   -1)); // host scalars in device mode
    ASSERT_EQ(700, cu.cuCtxSynchronize());
    PASS();
}

TEST gemm_needs_its_stream_and_workspace(void) {
    NEED_CUBLAS();
    void* handle = NULL;
    void* stream = NULL;
    void* graph = NULL;
    uint64_t space = 0;
    float one = 1.0f;
    ASSERT(begin());
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    ASSERT_EQ(0, cu.cuStreamCreate(&stream, 1));
    ASSERT_EQ(0, cu.cuMemAlloc_v2(&space, 1024));
    uint64_t address = device_bytes(&one, 4);
    void* d = device(address);
#define GEMM()                                                                                     \
    blas.cublasGemmEx(handle, 0, 0, 1, 1, 1, &one, d, 0, 1, d, 0, 1, &one, d, 0, 1, 68, -1)
    ASSERT_EQ(7, blas.cublasSetWorkspace_v2(handle, device(space + 128), 512));
    ASSERT(caught("256-byte boundary"));
    ASSERT_EQ(7, blas.cublasSetWorkspace_v2(handle, device(space), 1025));
    fake->forgive();
    ASSERT_EQ(0, blas.cublasSetWorkspace_v2(handle, device(space), 1024));
    ASSERT_EQ(0, blas.cublasSetStream_v2(handle, stream)); // discards the workspace
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(14, GEMM());
    ASSERT(caught("captured without a caller-provided workspace"));
    ASSERT_EQ(901, cu.cuStreamEndCapture(stream, &graph));
    ASSERT_EQ(0, blas.cublasSetWorkspace_v2(handle, device(space), 1024));
    ASSERT_EQ(0, cu.cuStreamBeginCapture_v2(stream, 0));
    ASSERT_EQ(0, GEMM());
    ASSERT_EQ(0, cu.cuStreamEndCapture(stream, &graph));
    void* exec = NULL;
    ASSERT_EQ(0, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    ASSERT_EQ(0, cu.cuMemsetD8Async(space, 1, 1024, stream));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuGraphLaunch(exec, stream));
    ASSERT_EQ(0, cu.cuStreamSynchronize(stream));
    float got = 0.0f;
    ASSERT_EQ(0, cu.cuMemcpyDtoH_v2(&got, address, 4));
    ASSERT_EQ(6.0f, got);                         // 1*1+1 = 2, 2*2+2 = 6
    ASSERT_EQ((int)0xD5D5D5D5u, read_int(space)); // the workspace is scratch
    ASSERT_EQ((int)0xD5D5D5D5u, read_int(space + 1020));
    ASSERT_EQ(NULL, fake->check());
    ASSERT_EQ(0, cu.cuStreamDestroy_v2(stream));
    ASSERT_EQ(13, GEMM());
    ASSERT(caught("stream is destroyed"));
    ASSERT_EQ(0, blas.cublasSetStream_v2(handle, NULL));
    ASSERT_EQ(0, blas.cublasSetWorkspace_v2(handle, device(space), 1024));
    ASSERT_EQ(0, cu.cuMemFree_v2(space));
    ASSERT_EQ(0, GEMM());
    ASSERT_EQ(700, cu.cuCtxSynchronize());
    ASSERT(caught("workspace was freed"));
#undef GEMM
    PASS();
}

TEST cublas_handles_fail_and_leak(void) {
    NEED_CUBLAS();
    void* handle = NULL;
    int version = 0;
    fake_config config = fake->defaults();
    config.cublas_create = 3;
    config.cublas_version = 120402;
    ASSERT(begin_with(&config));
    ASSERT_EQ(3, blas.cublasCreate_v2(&handle));
    ASSERT(begin());
    fake->fail_at("CUBLAS", 1, 1, false);
    ASSERT_EQ(1, blas.cublasCreate_v2(&handle));
    ASSERT_EQ(0, blas.cublasCreate_v2(&handle));
    ASSERT(strstr(fake->leaks(), "1 cublas"));
    ASSERT_EQ(0, blas.cublasGetVersion_v2(handle, &version));
    ASSERT_EQ(130100, version);
    fake->fail_at("ANY", 1, 2, false);
    ASSERT_EQ(3, blas.cublasSetMathMode(handle, 0)); // reported as a cuBLAS status
    ASSERT_EQ(0, blas.cublasSetAtomicsMode(handle, 0));
    fake->fail_at("cublasDestroy_v2", 1, 14, false);
    ASSERT_EQ(14, blas.cublasDestroy_v2(handle)); // destroyed all the same
    ASSERT_EQ(1, blas.cublasDestroy_v2(handle));
    ASSERT(end());
    ASSERT_EQ(NULL, fake->done());
    ASSERT_EQ(1, blas.cublasCreate_v2(&handle)); // no context
    PASS();
}

// ---- all ----

static void run_captures(void) {
    RUN_TEST(graphs_replay_captured_values);
    RUN_TEST(graphs_can_be_edited);
    RUN_TESTp(graphs_trap_on_freed_memory, false);
    RUN_TESTp(graphs_trap_on_freed_memory, true);
    for (int which = 0; which < FORBIDDEN_CALLS; which++) {
        RUN_TESTp(captures_break_on_forbidden_calls, which);
    }
    RUN_TEST(captures_in_other_modes);
    RUN_TESTp(captures_belong_to_a_thread, 0);
    RUN_TESTp(captures_belong_to_a_thread, 1);
    RUN_TESTp(captures_fork_and_join, false, FAKE_FORWARD);
    RUN_TESTp(captures_fork_and_join, true, FAKE_FORWARD);
    RUN_TESTp(captures_fork_and_join, true, FAKE_REVERSE);
    RUN_TESTp(captures_fork_and_join, true, FAKE_RANDOM);
    RUN_TESTp(graph_branches_show_a_race, FAKE_FORWARD, 50);
    RUN_TESTp(graph_branches_show_a_race, FAKE_REVERSE, 14);
    RUN_TEST(captures_refuse_what_is_outside);
}

static void run_cublas(void) {
    for (int mask = 0; mask < 8; mask++) {
        RUN_TESTp(gemm_multiplies, mask & 1, (mask >> 1) & 1, 0, 0, mask >> 2);
        RUN_TESTp(gemm_multiplies, mask & 1, (mask >> 1) & 1, 14, 0, mask >> 2);
        RUN_TESTp(gemm_multiplies, mask & 1, (mask >> 1) & 1, 14, 14, mask >> 2);
        RUN_TESTp(gemm_multiplies, mask & 1, (mask >> 1) & 1, 2, 2, mask >> 2);
        RUN_TESTp(gemm_multiplies, mask & 1, (mask >> 1) & 1, 2, 0, mask >> 2);
    }
    float fine = from_bits(0x3F801801u); // 1 + 3 * 2^-11 + 2^-23
    RUN_TESTp(gemm_rounds_as_its_compute_type, 68, 0, fine, fine);
    RUN_TESTp(gemm_rounds_as_its_compute_type, 77, 0, fine, from_bits(0x3F802000u));
    RUN_TESTp(gemm_rounds_as_its_compute_type, 77, 0, from_bits(0x3F801000u),
              1.0f); // ties: to even
    RUN_TESTp(gemm_rounds_as_its_compute_type, 77, 0, from_bits(0x3F803000u),
              from_bits(0x3F804000u));
    RUN_TESTp(gemm_rounds_as_its_compute_type, 68, 3, fine, from_bits(0x3F802000u));
    RUN_TESTp(gemm_rounds_as_its_compute_type, 75, 0, fine, 1.0f);
    RUN_TESTp(gemm_rounds_as_its_compute_type, 74, 0, fine, from_bits(0x3F802000u));
    RUN_TESTp(gemm_rounds_as_its_compute_type, 77, 0, 2.56e5f, 2.56e5f);
    RUN_TESTp(gemm_rounds_as_its_compute_type, 74, 0, 2.56e5f, from_bits(0x7F800000u));
    RUN_TESTp(gemm_rounds_as_its_compute_type, 74, 0, from_bits(0x33400000u), // 0.75 * 2^-24
              from_bits(0x33800000u));
    RUN_TEST(gemm_refuses);
    RUN_TEST(gemm_takes_device_scalars_and_empty_sums);
    RUN_TEST(gemm_needs_its_stream_and_workspace);
    RUN_TEST(cublas_handles_fail_and_leak);
}

SUITE(fake_suite) {
    fake = test_wants("fake") ? fake_open() : NULL;
    if (fake) {
        cu = fake->cu;
        load_cublas();
    }
    RUN_TEST(machine_is_what_was_asked_for);
    RUN_TEST(machine_without_device_or_init);
    RUN_TEST(contexts_are_per_thread);
    RUN_TEST(contexts_are_counted_and_die);
    RUN_TEST(handles_of_another_context_are_refused);
    RUN_TEST(memory_is_poisoned_and_exact);
    RUN_TEST(memory_mistakes_are_caught);
    RUN_TEST(memory_runs_out);
    RUN_TEST(memory_attributes);
    RUN_TEST(pinned_copies_happen_late);
    RUN_TEST(pageable_copies_happen_now);
    RUN_TEST(legacy_stream_orders_blocking_streams_only);
    RUN_TEST(events_order_streams);
    RUN_TEST(queries_make_progress);
    RUN_TEST(rectangles_are_copied_and_set);
    RUN_TEST(modules_are_accepted_by_version_and_target);
    RUN_TEST(modules_say_why_not);
    RUN_TEST(launches_are_checked);
    RUN_TEST(cooperative_launches_are_checked);
    RUN_TEST(launches_run_in_order_with_their_values);
    RUN_TESTp(traps_are_late_and_sticky, "add", 4, 700);
    RUN_TESTp(traps_are_late_and_sticky, "mis", 0, 716);
    RUN_TESTp(traps_are_late_and_sticky, "hang", 0, 719);
    run_captures();
    RUN_TEST(faults_hit_the_nth_call);
    RUN_TEST(faults_can_stick_or_come_late);
    RUN_TEST(faults_at_every_call_leave_no_trace);
    RUN_TEST(log_repeats);
    RUN_TEST(names_and_symbols);
    run_cublas();
    if (fake) {
        fake->reset(NULL);
    }
}
