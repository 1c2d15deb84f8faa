// machines.c - opens contexts on the machines of machines.h.
#define _POSIX_C_SOURCE 200809L // posix_memalign

#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define SETS_GPU (TEST_EVERYWHERE | TEST_GPUS)

static const test_machine machines[] = {
    {"cpu", "cpu", 0, 0, FAKE_FORWARD, false,
     TEST_EVERYWHERE | TEST_ONE_EACH | TEST_CPU | TEST_BRIEF},
    {"sm_90", "fake", 90, 13000, FAKE_FORWARD, true,
     SETS_GPU | TEST_ONE_EACH | TEST_FAKES | TEST_ONE_FAKE | TEST_ONE_GPU | TEST_TENSOR_CORES |
         TEST_BRIEF},
    {"sm_90_reversed", "fake", 90, 13000, FAKE_REVERSE, true, SETS_GPU | TEST_TENSOR_CORES},
    {"sm_80_no_cublas", "fake", 80, 11040, FAKE_FORWARD, false,
     SETS_GPU | TEST_FAKES | TEST_TENSOR_CORES},
    {"sm_75_no_cublas", "fake", 75, 12040, FAKE_RANDOM, false, SETS_GPU | TEST_FAKES | TEST_BRIEF},
    {"sm_121", "fake", 121, 13000, FAKE_FORWARD, true, SETS_GPU | TEST_FAKES | TEST_TENSOR_CORES},
    {"gpu", "cuda", 0, 0, FAKE_FORWARD, true,
     SETS_GPU | TEST_ONE_EACH | TEST_ONE_GPU | TEST_TENSOR_CORES | TEST_BRIEF},
    {"gpu_no_cublas", "cuda", 0, 0, FAKE_FORWARD, false, SETS_GPU | TEST_TENSOR_CORES},
};

// What takes the place of "gpu" with QLORA_TEST_NO_CUBLAS: our own products, where
// compute-sanitizer would report on the kernels of cuBLAS, which we cannot change.
static const test_machine gpu_alone = {
    "gpu_no_cublas", "cuda", 0, 0, FAKE_FORWARD, false,
    SETS_GPU | TEST_ONE_EACH | TEST_ONE_GPU | TEST_TENSOR_CORES | TEST_BRIEF};

static char reason[512];
static int64_t host_live; // bytes handed out by the counting allocator

size_t test_machine_count(void) {
    return sizeof machines / sizeof machines[0];
}

const test_machine* test_machine_at(size_t index) {
    bool alone = getenv("QLORA_TEST_NO_CUBLAS") != NULL && strcmp(machines[index].name, "gpu") == 0;
    return alone ? &gpu_alone : &machines[index];
}

const char* test_open_reason(void) {
    return reason;
}

const fake_api* test_fake(void) {
    static const fake_api* fake;
    static bool asked;
    if (!asked) {
        asked = true;
        fake = fake_open();
    }
    return fake;
}

bool test_machine_wanted(const test_machine* machine) {
    const char* hidden = test_fake() != NULL ? "cuda" : "fake";
    if (test_brief() && (machine->sets & TEST_BRIEF) == 0) {
        return false;
    }
    if (getenv("QLORA_TEST_NO_CUBLAS") != NULL && strcmp(machine->backend, "cuda") == 0 &&
        machine != &gpu_alone) {
        return false; // gpu_alone does the same
    }
    return test_wants(machine->backend) && strcmp(machine->backend, hidden) != 0;
}

bool test_checked(const test_machine* machine) {
    return test_brief() && strcmp(machine->backend, "cuda") == 0;
}

bool test_has_bf16(const test_machine* machine) {
    return (machine->sets & (TEST_CPU | TEST_TENSOR_CORES)) != 0;
}

bool test_has_fp8(const test_machine* machine) {
    qlora_ctx* ctx = machine->cublas ? test_open(machine, NULL) : NULL;
    bool has = ctx != NULL && strcmp(qlora_ctx_target(ctx), "sm_90") == 0;
    return (ctx == NULL || test_close_ctx(machine, ctx)) && has;
}

void* test_alloc_aligned(size_t bytes, size_t align) {
#ifdef _WIN32
    return _aligned_malloc(bytes, align);
#else
    void* p = NULL;
    return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
#endif
}

void test_free_aligned(void* pointer) {
#ifdef _WIN32
    _aligned_free(pointer);
#else
    free(pointer);
#endif
}

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    (void)user;
    void* p = test_alloc_aligned(bytes, align);
    if (p == NULL) {
        return NULL;
    }
    memset(p, 0xCB, bytes);
    host_live += (int64_t)bytes;
    return p;
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    memset(pointer, 0xCB, bytes);
    host_live -= (int64_t)bytes;
    test_free_aligned(pointer);
}

qlora_ctx* test_open(const test_machine* machine, void (*change)(qlora_ctx_desc* desc)) {
    bool is_fake = strcmp(machine->backend, "fake") == 0;
    bool is_cpu = strcmp(machine->backend, "cpu") == 0;
    const fake_api* fake = test_fake();
    if (is_fake) {
        fake_config config = fake->defaults();
        config.device[0].cc = machine->cc;
        config.driver_version = machine->driver;
        config.order = machine->order;
        config.seed = 7;
        fake->reset(&config);
    }
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = is_cpu ? QLORA_BACKEND_CPU : QLORA_BACKEND_CUDA;
    desc.threads = 2;
    desc.scratch_bytes = (size_t)4 << 20;
    desc.cublas_library = machine->cublas ? NULL : "none";
    desc.allocator.alloc = counted_alloc;
    desc.allocator.free = counted_free;
    desc.error_text = reason;
    desc.error_text_size = sizeof reason;
    if (change != NULL) {
        change(&desc);
    }
    host_live = 0;
    qlora_ctx* ctx = NULL;
    return qlora_ctx_create(&desc, &ctx) == QLORA_OK ? ctx : NULL;
}

bool test_close_ctx(const test_machine* machine, qlora_ctx* ctx) {
    if (qlora_ctx_destroy(ctx) != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        return false;
    }
    if (host_live != 0) {
        fprintf(stderr, "%lld bytes of host memory were not freed\n", (long long)host_live);
        return false;
    }
    if (strcmp(machine->backend, "fake") == 0) {
        const char* wrong = test_fake()->done();
        if (wrong != NULL) {
            fprintf(stderr, "the fake driver reports: %s\n", wrong);
            return false;
        }
    }
    return true;
}

// Conversions written for the tests, so that a fault in the library's cannot hide itself.
static uint16_t half_from(float x, qlora_dtype dtype) {
    if (dtype == QLORA_BF16) {
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        if (x != x) {
            return 0x7fff;
        }
        return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    int exponent = 0;
    double a = fabs((double)x);
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (x != x) {
        return 0x7fff;
    }
    if (a >= 65520.0) {
        return (uint16_t)(sign | 0x7c00);
    }
    frexp(a, &exponent);
    int least = exponent - 1 < -14 ? -14 : exponent - 1;
    double step = ldexp(1.0, least - 10);
    double units = nearbyint(a / step);
    if (units >= 2048.0) {
        units /= 2.0;
        least++;
    }
    uint16_t biased = units >= 1024.0 ? (uint16_t)(least + 15) : 0;
    return (uint16_t)(sign | (uint16_t)(biased << 10) | ((uint16_t)units & 0x3ffu));
}

static float half_to(uint16_t h, qlora_dtype dtype) {
    if (dtype == QLORA_BF16) {
        uint32_t u = (uint32_t)h << 16;
        float x;
        memcpy(&x, &u, sizeof x);
        return x;
    }
    int exponent = (h >> 10) & 31;
    double mantissa = h & 0x3ff;
    double a = exponent == 31  ? (mantissa > 0 ? (double)NAN : (double)INFINITY)
               : exponent == 0 ? ldexp(mantissa, -24)
                               : ldexp(mantissa + 1024.0, exponent - 25);
    return (float)((h & 0x8000) != 0 ? -a : a);
}

qlora_result test_tensor(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                         const float* values, qlora_tensor* out) {
    qlora_result r = qlora_tensor_create(ctx, dtype, rows, cols, out);
    size_t n = (size_t)(rows * cols);
    if (r != QLORA_OK || values == NULL || n == 0) {
        return r;
    }
    if (dtype == QLORA_F32) {
        return qlora_tensor_write(ctx, out, values, n * 4);
    }
    uint16_t* half = (uint16_t*)malloc(n * 2);
    for (size_t i = 0; i < n; i++) {
        half[i] = half_from(values[i], dtype);
    }
    r = qlora_tensor_write(ctx, out, half, n * 2);
    free(half);
    return r;
}

bool test_read(qlora_ctx* ctx, const qlora_tensor* tensor, float* out) {
    size_t n = (size_t)(tensor->rows * tensor->cols * tensor->batch);
    if (tensor->dtype == QLORA_F32) {
        return qlora_tensor_read(ctx, tensor, out, n * 4) == QLORA_OK;
    }
    uint16_t* half = (uint16_t*)malloc(n * 2 + 1);
    bool ok = qlora_tensor_read(ctx, tensor, half, n * 2) == QLORA_OK;
    for (size_t i = 0; ok && i < n; i++) {
        out[i] = half_to(half[i], tensor->dtype);
    }
    free(half);
    return ok;
}

qlora_result test_memory(qlora_ctx* ctx, qlora_memory_info* out) {
    qlora_ctx_info info;
    qlora_result r = qlora_ctx_query(ctx, &info);
    if (r == QLORA_OK) {
        *out = info.memory;
    }
    return r;
}

qlora_path test_last_path(qlora_ctx* ctx) {
    qlora_ctx_info info;
    return qlora_ctx_query(ctx, &info) == QLORA_OK ? info.last_path : QLORA_PATH_AUTO;
}
