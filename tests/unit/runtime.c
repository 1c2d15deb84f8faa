// runtime.c - contexts, tensors, kernel cache, clip and graphs: the contracts of the runtime.
#define _POSIX_C_SOURCE 200809L

#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define REFUSED(RESULT, NEEDLE, CALL)                                                              \
    do {                                                                                           \
        ASSERT_EQ_FMT((int)(RESULT), (int)(CALL), "%d");                                           \
        if (strstr(qlora_last_error(ctx), (NEEDLE)) == NULL) {                                     \
            fprintf(stderr, "message: %s\n", qlora_last_error(ctx));                               \
            FAILm("the message lacks: " NEEDLE);                                                   \
        }                                                                                          \
    } while (0)

// ---- contexts -----------------------------------------------------------------------------------

TEST results_are_unique(void) {
    static const qlora_result all[] = {
#define X(name, value, text) QLORA_##name,
        QLORA_RESULTS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ASSERT(qlora_result_name(all[i])[0] != '\0');
        ASSERT(qlora_result_text(all[i])[0] != '\0');
        for (size_t j = 0; j < i; j++) {
            ASSERT(all[i] != all[j]);
        }
    }
    ASSERT_STR_EQ("unknown", qlora_result_name((qlora_result)-9999));
    ASSERT_EQ(QLORA_VERSION, qlora_version());
    PASS();
}

TEST ctx_null_is_safe(void) {
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    ASSERT(qlora_last_error(NULL)[0] != '\0');
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_ctx_sync(NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_tensor_create(NULL, QLORA_F32, 1, 1, &t));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_prewarm(NULL, NULL));
    ASSERT_EQ(QLORA_BACKEND_ANY, qlora_ctx_backend(NULL));
    ASSERT_STR_EQ("cpu", qlora_ctx_target(NULL));
    ASSERT(qlora_ctx_reason(NULL)[0] != '\0');
    char text[64];
    ASSERT(qlora_describe(NULL, text, sizeof text) > 10);
    ASSERT_EQ(qlora_describe(NULL, text, sizeof text), qlora_describe(NULL, NULL, 0));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_ctx_create(NULL, NULL));
    PASS();
}

static int some_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    (void)path;
    (void)mode;
    (void)file;
    (void)user;
    return 1;
}

static void* some_alloc(size_t bytes, size_t align, void* user) {
    (void)bytes;
    (void)align;
    (void)user;
    return NULL;
}

static void* some_device_alloc(size_t bytes, void* user) {
    (void)bytes;
    (void)user;
    return NULL;
}

TEST ctx_bad_desc(void) {
    char why[256];
    static const char* const expected[] = {"reserved field of desc",
                                           "reserved field of desc",
                                           "desc.allocator.free is NULL",
                                           "desc.device_allocator.free is NULL",
                                           "desc.files has 1 of 12",
                                           "desc.require_backend is 7",
                                           "desc.math is 9",
                                           "desc.threads is -1",
                                           "desc.threads is 1000",
                                           "desc.workspace_bytes is 0"};
    for (int i = 0; i < 10; i++) {
        qlora_ctx_desc d;
        memset(&d, 0, sizeof d);
        d.error_text = why;
        d.error_text_size = sizeof why;
        d.reserved_must_be_zero0 = i == 0;
        d.reserved_must_be_zero1 = i == 1;
        d.allocator.alloc = i == 2 ? some_alloc : NULL;
        d.device_allocator.alloc = i == 3 ? some_device_alloc : NULL;
        d.files.open = i == 4 ? some_open : NULL;
        d.require_backend = i == 5 ? (qlora_backend)7 : QLORA_BACKEND_ANY;
        d.math = i == 6 ? (qlora_math)9 : QLORA_MATH_F32;
        d.threads = i == 7 ? -1 : i == 8 ? 1000 : 0;
        d.workspace = i == 9 ? (void*)(uintptr_t)4096 : NULL;
        qlora_ctx* ctx = NULL;
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_ctx_create(&d, &ctx));
        ASSERT_EQ(NULL, ctx);
        if (strstr(why, expected[i]) == NULL) {
            fprintf(stderr, "case %d: %s\n", i, why);
            FAILm("the message does not name the field");
        }
    }
    PASS();
}

static void with_defaults(qlora_ctx_desc* desc) {
    desc->threads = 0;
    desc->scratch_bytes = 0;
}

TEST ctx_defaults_are_documented(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, with_defaults);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_ctx_info info;
    ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
    const qlora_ctx_desc d = *info.desc;
    bool cpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU;
    ASSERT(d.threads >= 1 && d.threads <= 64);
    ASSERT_EQ((size_t)32 << 20, d.workspace_bytes);
    ASSERT_EQ((size_t)(cpu ? 16 : 64) << 20, d.scratch_bytes);
    ASSERT_EQ(QLORA_MATH_F32, d.math);
    ASSERT(d.files.open != NULL && d.allocator.alloc != NULL);
    ASSERT_EQ(0u, d.reserved_must_be_zero0);
    char text[2048];
    size_t needed = qlora_describe(ctx, text, sizeof text);
    ASSERT_EQ(strlen(text) + 1, needed);
    ASSERT(strstr(text, QLORA_VERSION_STRING) != NULL);
    ASSERT(strstr(text, cpu ? "CPU" : "CUDA") != NULL);
    ASSERT(strstr(text, qlora_ctx_reason(ctx)) != NULL);
    if (!cpu) {
        ASSERT(strstr(text, "driver") != NULL);
        ASSERT(strstr(text, "cuBLAS") != NULL);
        ASSERT(strstr(text, qlora_ctx_target(ctx)) != NULL);
    }
    char small[16];
    ASSERT_EQ(needed, qlora_describe(ctx, small, sizeof small));
    ASSERT_EQ(15u, strlen(small));
    qlora_native native;
    ASSERT_EQ(QLORA_OK, qlora_ctx_native(ctx, &native));
    ASSERT_EQ(cpu, native.cu_context == NULL);
    ASSERT_EQ(!machine->cublas, native.cublas == NULL);
    ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Obstacles between a program and the GPU: each has its own message, and the CPU is used instead.
typedef struct obstacle {
    const char* needle;
    int init;
    int devices;
    int cc;
    int driver;
    int32_t ordinal;
} obstacle;

TEST ctx_falls_back_and_says_why(const test_machine* machine) {
    (void)machine;
    static const obstacle obstacles[] = {
        {"stub", 34, 1, 90, 13000, 0},
        {"NO_DEVICE", 100, 1, 90, 13000, 0},
        {"NO_DEVICE", 0, 0, 90, 13000, 0},
        {"cuInit", 803, 1, 90, 13000, 0},
        {"device is 3, but", 0, 2, 90, 13000, 3},
        {"7.0", 0, 1, 70, 13000, 0},
        {"too old", 0, 1, 90, 9020, 0},
    };
    for (size_t i = 0; i < sizeof obstacles / sizeof obstacles[0]; i++) {
        for (int required = 0; required < 2; required++) {
            const obstacle* o = &obstacles[i];
            fake_config config = test_fake()->defaults();
            config.init_result = o->init;
            config.devices = o->devices;
            config.device[0].cc = o->cc;
            config.driver_version = o->driver;
            test_fake()->reset(&config);
            char why[512] = "";
            qlora_ctx_desc d;
            memset(&d, 0, sizeof d);
            d.device = o->ordinal;
            d.require_backend = required ? QLORA_BACKEND_CUDA : QLORA_BACKEND_ANY;
            d.error_text = why;
            d.error_text_size = sizeof why;
            qlora_ctx* ctx = NULL;
            qlora_result r = qlora_ctx_create(&d, &ctx);
            if (required || o->ordinal != 0) { // a device that was asked for is required
                ASSERT_EQ(QLORA_ERR_BACKEND, r);
                ASSERT_EQ(NULL, ctx);
            } else {
                ASSERT_EQ(QLORA_OK, r);
                ASSERT_EQ(QLORA_BACKEND_CPU, qlora_ctx_backend(ctx));
                snprintf(why, sizeof why, "%s", qlora_ctx_reason(ctx));
                ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
            }
            if (strstr(why, o->needle) == NULL) {
                fprintf(stderr, "case %d: %s\n", (int)i, why);
                FAILm("the reason does not name the obstacle");
            }
            ASSERT_EQ(NULL, test_fake()->done());
        }
    }
    PASS();
}

static const char* with_library; // path for the next context
static void with_cuda_library(qlora_ctx_desc* desc) {
    desc->cuda_library = with_library;
}
static void with_cublas_library(qlora_ctx_desc* desc) {
    desc->cublas_library = with_library;
}

TEST ctx_broken_libraries(const test_machine* machine) {
    char path[1024];
    ASSERT(getcwd(path, sizeof path - 40) != NULL);
    strcat(path, "/build/not-a-library-XXXXXX");
    int fd = mkstemp(path);
    ASSERT(fd >= 0);
    ASSERT_EQ(4, (int)write(fd, "oops", 4));
    close(fd);
    with_library = path;
    qlora_ctx* ctx = test_open(machine, with_cuda_library);
    ASSERT_EQ(NULL, ctx); // the backend is required
    ASSERT(strstr(test_open_reason(), "no CUDA driver") != NULL);
    with_library = "/there-is-no-such-file.so";
    ASSERT_EQ(NULL, test_open(machine, with_cuda_library));
    ASSERT(strstr(test_open_reason(), "there-is-no-such-file") != NULL);
    // Nothing is loaded from the current folder, even if it is there.
    with_library = strstr(path, "build/not-a-library");
    ASSERT_EQ(NULL, test_open(machine, with_cuda_library));
    ASSERT(strstr(test_open_reason(), "relative path") != NULL);
    with_library = "libm.so.6"; // a library, but not a driver
    ASSERT_EQ(NULL, test_open(machine, with_cuda_library));
    ASSERT(strstr(test_open_reason(), "lacks cuInit") != NULL);
    // A broken cuBLAS is not used, and that is reported.
    static const char* const notes[] = {"not found", "lacks cublasCreate_v2"};
    for (int i = 0; i < 2; i++) {
        with_library = i == 0 ? path : "libm.so.6";
        ctx = test_open(machine, with_cublas_library);
        ASSERT(ctx != NULL);
        char text[2048];
        qlora_describe(ctx, text, sizeof text);
        ASSERT(strstr(text, notes[i]) != NULL);
        ASSERT(test_close_ctx(machine, ctx));
    }
    remove(path);
    PASS();
}

typedef struct step_state {
    qlora_tensor a;
    qlora_tensor b;
    qlora_tensor c;
    const qlora_tensor* list[1];
    qlora_clip* clip;
    const void* host; // for steps that do what a capture cannot
    int mode;
} step_state;

// c = a b, then c clipped: a GEMM, three kernels.
static qlora_result step(qlora_ctx* ctx, void* user) {
    step_state* s = (step_state*)user;
    qlora_result r = qlora_gemm_forward(ctx, &s->a, &s->b, &s->c, 0);
    qlora_tensor t;
    float host[16];
    switch (s->mode) {
    case 1:
        qlora_ctx_sync(ctx); // the callback overlooks the error: the capture must fail all the same
        break;
    case 2:
        return qlora_tensor_read(ctx, &s->c, host, 64);
    case 3:
        return qlora_tensor_create(ctx, QLORA_F32, 1, 1, &t);
    case 4:
        return QLORA_ERR_STOPPED;
    case 5:
        return qlora_gemm_forward(ctx, &s->a, NULL, &s->c, 0);
    default:
        break;
    }
    return r == QLORA_OK ? qlora_clip_apply(s->clip) : r;
}

static bool step_make(qlora_ctx* ctx, step_state* s) {
    float values[16];
    for (int i = 0; i < 16; i++) {
        values[i] = (float)(i * 5 % 7 - 3);
    }
    memset(s, 0, sizeof *s);
    s->list[0] = &s->c;
    return test_tensor(ctx, QLORA_F32, 4, 4, values, &s->a) == QLORA_OK &&
           test_tensor(ctx, QLORA_F32, 4, 4, values, &s->b) == QLORA_OK &&
           test_tensor(ctx, QLORA_F32, 4, 4, values, &s->c) == QLORA_OK &&
           qlora_clip_create(ctx, s->list, NULL, 1, &s->clip) == QLORA_OK;
}

static void step_free(qlora_ctx* ctx, step_state* s) {
    qlora_clip_destroy(s->clip);
    qlora_tensor_destroy(ctx, &s->a);
    qlora_tensor_destroy(ctx, &s->b);
    qlora_tensor_destroy(ctx, &s->c);
}

static qlora_result do_nothing(qlora_ctx* ctx, void* user) {
    return qlora_tensor_zero(ctx, (const qlora_tensor*)user);
}

TEST ctx_children_first(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_tensor t;
    qlora_tensor u;
    qlora_clip* clip = NULL;
    qlora_graph* graph = NULL;
    qlora_ctx_info info;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 2, &t));
    REFUSED(QLORA_ERR_STATE, "exist: 1 tensor;", qlora_ctx_destroy(ctx));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &t)); // nothing was freed
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 2, &u));
    const qlora_tensor* list[] = {&t};
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, list, NULL, 1, &clip));
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, do_nothing, &t, &graph));
    REFUSED(QLORA_ERR_STATE, "2 tensors, 1 clip, 1 graph; destroy them first",
            qlora_ctx_destroy(ctx));
    ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
    ASSERT(info.tensors == 2 && info.clips == 1 && info.graphs == 1);
    ASSERT(info.models == 0 && info.trainers == 0);
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    ASSERT_EQ(QLORA_OK, qlora_clip_destroy(clip));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &u));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
    ASSERT(info.tensors == 0 && info.clips == 0 && info.graphs == 0);
    REFUSED(QLORA_ERR_ARGUMENT, "out is NULL", qlora_ctx_query(ctx, NULL));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST rope_table_says_why(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    float out[8];
    qlora_rope_desc d;
    memset(&d, 0, sizeof d);
    REFUSED(QLORA_ERR_ARGUMENT, "head_dim is 3", qlora_rope_table(ctx, &d, 3, 2, out));
    REFUSED(QLORA_ERR_ARGUMENT, "desc is NULL", qlora_rope_table(ctx, NULL, 4, 2, out));
    REFUSED(QLORA_ERR_ARGUMENT, "out is NULL", qlora_rope_table(ctx, &d, 4, 2, NULL));
    d.type = QLORA_ROPE_YARN;
    REFUSED(QLORA_ERR_ARGUMENT, "desc.original_max_position is 0",
            qlora_rope_table(ctx, &d, 4, 2, out));
    d.type = QLORA_ROPE_DEFAULT;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(ctx, &d, 4, 2, out));
    ASSERT_STR_EQ("", qlora_last_error(ctx));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// What a program built with another header gets: no context, and the reason in its own buffer.
TEST ctx_of_another_header(void) {
    char why[256] = "";
    qlora_ctx_desc d;
    qlora_ctx* ctx = NULL;
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.error_text = why;
    d.error_text_size = sizeof why;
    ASSERT_EQ(QLORA_ERR_VERSION, qlora_ctx_create_abi(&d, &ctx, 31402, QLORA_ABI));
    ASSERT(strstr(why, "qlora.h 3.14.2, this library with " QLORA_VERSION_STRING) != NULL);
    ASSERT_EQ(QLORA_ERR_VERSION, qlora_ctx_create_abi(&d, &ctx, QLORA_VERSION, QLORA_ABI + 1));
    ASSERT(strstr(why, "struct sizes") != NULL);
    ASSERT_EQ(QLORA_ERR_VERSION, qlora_ctx_create_abi(NULL, &ctx, 1, QLORA_ABI));
    ASSERT_EQ(NULL, ctx);
    ASSERT_EQ(QLORA_OK, qlora_ctx_create_abi(&d, &ctx, QLORA_VERSION, QLORA_ABI));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

static void urgent(qlora_ctx_desc* desc) {
    desc->stream_priority = -2;
}

TEST ctx_stream_priority(const test_machine* machine) {
    const fake_api* fake = test_fake();
    qlora_ctx* ctx = test_open(machine, urgent);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT_EQ(0u, fake->calls("cuStreamCreate"));
    ASSERT_EQ(2u, fake->calls("cuStreamCreateWithPriority")); // both lines of work
    ASSERT(strstr(fake->log(), "priority -2") != NULL);
    ASSERT(test_close_ctx(machine, ctx));
    ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    ASSERT_EQ(2u, fake->calls("cuStreamCreate"));
    ASSERT_EQ(0u, fake->calls("cuStreamCreateWithPriority"));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The workspace can change at any time: products go on, graphs of the old one are not replayed, the
// old memory is given back.
TEST ctx_workspace_changes(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    enum { BYTES = 1 << 16 };
    step_state s;
    qlora_tensor memory;
    qlora_graph* graph = NULL;
    qlora_ctx_info info;
    float expected[16];
    float got[16];
    ASSERT(step_make(ctx, &s));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_U8, 1, BYTES, &memory));
    ASSERT_EQ(QLORA_OK, step(ctx, &s));
    ASSERT(test_read(ctx, &s.c, expected));
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, step, &s, &graph));
    REFUSED(QLORA_ERR_ARGUMENT, "aligned",
            qlora_ctx_set_workspace(ctx, (char*)memory.data + 16, 4096));
    bool cpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU;
    if (cpu) {
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_workspace(ctx, NULL, 0));
    } else {
        REFUSED(QLORA_ERR_ARGUMENT, "bytes", qlora_ctx_set_workspace(ctx, memory.data, 0));
        ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
        uint64_t before = info.memory.device_bytes;
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_workspace(ctx, memory.data, BYTES));
        ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
        ASSERT_EQ(memory.data, info.desc->workspace);
        ASSERT_EQ((size_t)BYTES, info.desc->workspace_bytes);
        if (machine->cublas) {
            // Two of 32 MiB are gone, and the second stream has one of the new size.
            ASSERT_EQ_FMT((long long)before - ((long long)64 << 20) + BYTES,
                          (long long)info.memory.device_bytes, "%lld");
            REFUSED(QLORA_ERR_STATE, "workspace", qlora_graph_replay(graph, 1));
        }
        ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
        ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &s.c));
        ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, step, &s, &graph));
        ASSERT(test_read(ctx, &s.c, got));
        ASSERT_CLOSE(expected, got, 16, 0, 0);
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_workspace(ctx, NULL, 0));
        ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
        ASSERT_EQ((size_t)32 << 20, info.desc->workspace_bytes);
        ASSERT_EQ_FMT((long long)before, (long long)info.memory.device_bytes, "%lld");
        ASSERT_EQ(QLORA_OK, step(ctx, &s)); // the caller's memory is no longer in use
    }
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &memory));
    step_free(ctx, &s);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Our calls do not change the host's current context, whatever it is.
TEST ctx_leaves_current_context_alone(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    const fake_cu* cu = &test_fake()->cu;
    void* mine = NULL;
    void* now = NULL;
    ASSERT_EQ(0, cu->cuCtxCreate_v2(&mine, 0, 0));
    qlora_tensor t;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 2, &t));
    ASSERT_EQ(0, cu->cuCtxGetCurrent(&now));
    ASSERT_EQ(mine, now);
    REFUSED(QLORA_ERR_ARGUMENT, "NULL", qlora_tensor_create(ctx, QLORA_F32, 2, 2, NULL));
    ASSERT_EQ(0, cu->cuCtxGetCurrent(&now));
    ASSERT_EQ(mine, now);
    // A stream of another context is rejected, and so is the legacy stream.
    void* foreign = NULL;
    ASSERT_EQ(0, cu->cuStreamCreate(&foreign, 1));
    REFUSED(QLORA_ERR_ARGUMENT, "another CUDA context", qlora_ctx_set_stream(ctx, foreign));
    REFUSED(QLORA_ERR_ARGUMENT, "legacy", qlora_ctx_set_stream(ctx, (void*)(uintptr_t)1));
    REFUSED(QLORA_ERR_ARGUMENT, "per-thread", qlora_ctx_set_stream(ctx, (void*)(uintptr_t)2));
    ASSERT_EQ(0, cu->cuStreamDestroy_v2(foreign));
    ASSERT_EQ(0, cu->cuCtxDestroy_v2(mine));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A caller's context and stream are used as they are and outlive ours.
static void* given_context;
static void with_context(qlora_ctx_desc* desc) {
    const fake_cu* cu = &test_fake()->cu;
    void* popped = NULL;
    cu->cuInit(0);
    cu->cuCtxCreate_v2(&given_context, 0, 0);
    cu->cuCtxPopCurrent_v2(&popped);
    desc->cu_context = given_context;
}

TEST ctx_uses_a_given_context(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, with_context);
    if (!ctx)
        SKIPm(test_open_reason());
    const fake_cu* cu = &test_fake()->cu;
    qlora_native native;
    ASSERT_EQ(QLORA_OK, qlora_ctx_native(ctx, &native));
    ASSERT_EQ(given_context, native.cu_context);
    void* stream = NULL;
    void* popped = NULL;
    ASSERT_EQ(0, cu->cuCtxPushCurrent_v2(given_context));
    ASSERT_EQ(0, cu->cuStreamCreate(&stream, 1));
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, stream));
    ASSERT_EQ(QLORA_OK, qlora_ctx_native(ctx, &native));
    ASSERT_EQ(stream, native.cu_stream);
    const float values[4] = {1, 2, 3, 4};
    const float expected[4] = {7, 10, 15, 22};
    float got[4];
    qlora_tensor a, c;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 2, values, &a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 2, NULL, &c));
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    ASSERT(test_read(ctx, &c, got));
    ASSERT_CLOSE(expected, got, 4, 0, 0);
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &c));
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, NULL));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    ASSERT_EQ(0, cu->cuStreamDestroy_v2(stream)); // still exists
    ASSERT_EQ(0, cu->cuCtxPopCurrent_v2(&popped));
    ASSERT_EQ(0, cu->cuCtxDestroy_v2(given_context));
    ASSERT_EQ(NULL, test_fake()->done());
    PASS();
}

// ---- tensors ------------------------------------------------------------------------------------

TEST tensor_rules(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_tensor t, v, w;
    REFUSED(QLORA_ERR_ARGUMENT, "rows is -1; it must not be negative",
            qlora_tensor_create(ctx, QLORA_F32, -1, 4, &t));
    REFUSED(QLORA_ERR_ARGUMENT, "dtype is 77", qlora_tensor_create(ctx, (qlora_dtype)77, 1, 4, &t));
    REFUSED(QLORA_ERR_LIMIT, "overflow",
            qlora_tensor_create(ctx, QLORA_F32, INT64_MAX / 2, INT64_MAX / 2, &t));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 0, 7, &t)); // empty is fine
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t)); // zeroed by the first
    float values[12];
    for (int i = 0; i < 12; i++) {
        values[i] = (float)i;
    }
    float got[12];
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 3, 4, values, &t));
    REFUSED(QLORA_ERR_ARGUMENT, "bytes is 44; the tensor has 48",
            qlora_tensor_write(ctx, &t, values, 44));
    REFUSED(QLORA_ERR_ARGUMENT, "is NULL", qlora_tensor_read(ctx, &t, NULL, 48));
    REFUSED(QLORA_ERR_ARGUMENT, "2 rows from row 2 on are not inside",
            qlora_tensor_view(ctx, &t, 2, 2, 0, 4, &v));
    ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &t, 1, 2, 1, 2, &v));
    REFUSED(QLORA_ERR_ARGUMENT, "ld", qlora_tensor_read(ctx, &v, got, 16));
    REFUSED(QLORA_ERR_ARGUMENT, "views", qlora_tensor_destroy(ctx, &v));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &v));
    ASSERT(test_read(ctx, &t, got));
    for (int i = 0; i < 12; i++) {
        bool inside = i / 4 >= 1 && (i % 4 == 1 || i % 4 == 2);
        ASSERT_EQ_FMT((double)(inside ? 0 : i), (double)got[i], "%g");
    }
    REFUSED(QLORA_ERR_ARGUMENT, "bytes is 47; a tensor of 3 x 4 f32 with ld 4 needs 48",
            qlora_tensor_wrap(ctx, t.data, 47, QLORA_F32, 3, 4, 0, &w));
    REFUSED(QLORA_ERR_ARGUMENT, "aligned",
            qlora_tensor_wrap(ctx, (char*)t.data + 2, 44, QLORA_F32, 1, 4, 0, &w));
    ASSERT_EQ(QLORA_OK, qlora_tensor_wrap(ctx, t.data, 48, QLORA_F32, 3, 2, 4, &w));
    ASSERT_EQ(4, w.ld);
    qlora_memory_info memory;
    ASSERT_EQ(QLORA_OK, test_memory(ctx, &memory));
    ASSERT(qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU ? memory.device_bytes == 0
                                                       : memory.device_bytes > 48);
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- kernel cache -------------------------------------------------------------------------------

static const char USER_PTX[] = ".version 6.3\n"
                               ".target sm_75\n"
                               ".address_size 64\n"
                               "// adds one to every element\n"
                               ".visible .entry add_one(.param .u64 p, .param .u32 n)\n"
                               "{\n"
                               ".reg .pred %p<2>;\n"
                               ".reg .f32 %f<3>;\n"
                               ".reg .b32 %r<3>;\n"
                               ".reg .b64 %rd<5>;\n"
                               "ld.param.u64 %rd1, [p];\n"
                               "ld.param.u32 %r1, [n];\n"
                               "mov.u32 %r2, %tid.x;\n"
                               "setp.ge.u32 %p1, %r2, %r1;\n"
                               "@%p1 bra DONE;\n"
                               "cvta.to.global.u64 %rd2, %rd1;\n"
                               "mul.wide.u32 %rd3, %r2, 4;\n"
                               "add.s64 %rd4, %rd2, %rd3;\n"
                               "ld.global.f32 %f1, [%rd4];\n"
                               "add.f32 %f2, %f1, 0f3F800000;\n"
                               "st.global.f32 [%rd4], %f2;\n"
                               "DONE:\n"
                               "ret;\n"
                               "}\n";

TEST cache_users_kernel(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    const qlora_kernel* kernel = NULL;
    qlora_launch_desc launch = {{1, 1, 1}, {32, 1, 1}, 0};
    size_t needed = 0;
    if (qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU) {
        REFUSED(QLORA_ERR_UNSUPPORTED, "CPU",
                qlora_cache_get_or_compile(ctx, "mine", USER_PTX, "add_one", &kernel));
        REFUSED(QLORA_ERR_UNSUPPORTED, "CPU", qlora_kernel_launch(ctx, kernel, &launch, NULL));
        REFUSED(QLORA_ERR_UNSUPPORTED, "CPU", qlora_cache_get(ctx, "clip_squares", &kernel));
        REFUSED(QLORA_ERR_UNSUPPORTED, "CPU", qlora_cache_compile(ctx, "clip_squares", &kernel));
        REFUSED(QLORA_ERR_UNSUPPORTED, "CPU", qlora_ptx_emit(ctx, USER_PTX, NULL, 0, &needed));
        ASSERT(test_close_ctx(machine, ctx));
        PASS();
    }
    char ptx[1024];
    ASSERT_EQ(QLORA_OK, qlora_ptx_emit(ctx, USER_PTX, NULL, 0, &needed));
    ASSERT(needed < sizeof ptx);
    REFUSED(QLORA_ERR_ARGUMENT, "size is 20; the text needs",
            qlora_ptx_emit(ctx, USER_PTX, ptx, 20, &needed));
    ASSERT_EQ(QLORA_OK, qlora_ptx_emit(ctx, USER_PTX, ptx, sizeof ptx, &needed));
    ASSERT_EQ(strlen(ptx) + 1, needed);
    if (strcmp(qlora_ctx_target(ctx), "sm_75") != 0) { // PTX must name the context's target
        REFUSED(QLORA_ERR_TARGET, "qlora_ptx_emit",
                qlora_cache_get_or_compile(ctx, "mine", USER_PTX, "add_one", &kernel));
    }
    REFUSED(QLORA_ERR_TARGET, "no .target",
            qlora_cache_get_or_compile(ctx, "mine", ".version 7.0\n", "add_one", &kernel));
    char garbage[256];
    snprintf(garbage, sizeof garbage,
             ".version 9.0\n.target %s\n.address_size 64\nthis is no PTX\n", qlora_ctx_target(ctx));
    ASSERT(qlora_cache_get_or_compile(ctx, "mine", garbage, "add_one", &kernel) ==
           QLORA_ERR_KERNEL);
    ASSERT(strlen(qlora_last_error(ctx)) > 30);
    REFUSED(QLORA_ERR_KERNEL, "no kernel named",
            qlora_cache_get_or_compile(ctx, "mine", ptx, "nope", &kernel));
    REFUSED(QLORA_ERR_ARGUMENT, "library",
            qlora_cache_get_or_compile(ctx, "clip_squares", ptx, "add_one", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_get_or_compile(ctx, "mine", ptx, "add_one", &kernel));
    const qlora_kernel* again = NULL;
    ASSERT_EQ(QLORA_OK, qlora_cache_get_or_compile(ctx, "mine", ptx, "add_one", &again));
    ASSERT_EQ(kernel, again);
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "mine", &again));
    ASSERT_EQ(kernel, again);
    REFUSED(QLORA_ERR_KERNEL, "no kernel is named", qlora_cache_get(ctx, "other", &again));
    // Looking never compiles; another call does.
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    uint32_t modules = info.modules;
    REFUSED(QLORA_ERR_KERNEL, "clip_squares is not compiled",
            qlora_cache_get(ctx, "clip_squares", &again));
    ASSERT_EQ(kernel, again); // outputs are written only on success
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(modules, info.modules);
    REFUSED(QLORA_ERR_KERNEL, "no kernel of the library", qlora_cache_compile(ctx, "mine", NULL));
    ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", NULL));
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "clip_squares", &again));
    ASSERT(again != kernel);
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(modules + 1, info.modules);
    const float values[5] = {1, 2, 3, 4, 5};
    const float expected[5] = {2, 3, 4, 5, 6};
    float got[5];
    qlora_tensor t;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, 5, values, &t));
    uint32_t n = 5;
    void* args[] = {&t.data, &n};
    ASSERT_EQ(QLORA_OK, qlora_kernel_launch(ctx, kernel, &launch, args));
    ASSERT(test_read(ctx, &t, got));
    ASSERT_CLOSE(expected, got, 5, 0, 0);
    launch.block[0] = 2000;
    REFUSED(QLORA_ERR_ARGUMENT, "launch.block is 2000 x 1 x 1",
            qlora_kernel_launch(ctx, kernel, &launch, args));
    launch.block[0] = 32;
    launch.grid[1] = 70000;
    REFUSED(QLORA_ERR_ARGUMENT, "launch.grid[1] is 70000; the maximum is 65535",
            qlora_kernel_launch(ctx, kernel, &launch, args));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST cache_text_is_refused_when_it_goes_backward(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    size_t needed = 0;
    REFUSED(QLORA_ERR_TARGET, "sm_130",
            qlora_ptx_emit(ctx, ".version 9.0\n.target sm_130\n", NULL, 0, &needed));
    REFUSED(QLORA_ERR_TARGET, "sm_90a",
            qlora_ptx_emit(ctx, ".version 8.0\n.target sm_90a\n", NULL, 0, &needed));
    REFUSED(QLORA_ERR_TARGET, ".version", qlora_ptx_emit(ctx, ".target sm_75\n", NULL, 0, &needed));
    REFUSED(QLORA_ERR_TARGET, "no .target",
            qlora_ptx_emit(ctx, ".version 6.3\n", NULL, 0, &needed));
    REFUSED(QLORA_ERR_TARGET, "driver",
            qlora_ptx_emit(ctx, ".version 9.9\n.target sm_75\n", NULL, 0, &needed));
    // A directive inside a comment is ignored.
    char out[160];
    ASSERT_EQ(QLORA_OK,
              qlora_ptx_emit(ctx,
                             "/* .target sm_10 */\n// .version 1.0\n.version 6.3\n  .target "
                             "sm_75\nrest",
                             out, sizeof out, &needed));
    ASSERT(strstr(out, "/* .target sm_10 */\n// .version 1.0\n.version ") == out);
    char target[32];
    snprintf(target, sizeof target, ".target %s\nrest", qlora_ctx_target(ctx));
    ASSERT(strstr(out, target) != NULL);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static const qlora_prewarm_desc SMALL_SHAPE = {64,        96,   4, 2, 16, 8, 4, QLORA_BASE_NF4,
                                               QLORA_F32, NULL, 0};

// Pre-warm loads everything that the shape needs and seals the cache; nothing is
// compiled afterwards.
TEST cache_prewarm_and_seal(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &SMALL_SHAPE));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    if (qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU) {
        ASSERT_EQ(0u, info.modules);
        ASSERT(test_close_ctx(machine, ctx));
        PASS();
    }
    ASSERT(info.sealed);
    ASSERT(info.modules > 0 && info.kernels > 10);
    ASSERT_EQ(machine->cublas, info.cublas_shapes > 0);
    uint32_t modules = info.modules;
    qlora_prewarm_desc other = SMALL_SHAPE;
    other.rank = 0; // a second model without LoRA: nothing new to compile, and no early return
    other.base = QLORA_BASE_32BIT;
    ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &other));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(modules, info.modules);
    ASSERT(info.sealed);
    // A kernel outside the plan is an error that names it, until the cache is unsealed.
    const qlora_kernel* kernel = NULL;
    if (machine->cublas) {
        REFUSED(QLORA_ERR_SEALED, "gemm_big_f32",
                qlora_cache_compile(ctx, "gemm_big_f32", &kernel));
    }
    char ptx[1024];
    size_t needed = 0;
    ASSERT_EQ(QLORA_OK, qlora_ptx_emit(ctx, USER_PTX, ptx, sizeof ptx, &needed));
    REFUSED(QLORA_ERR_SEALED, "qlora_cache_unseal",
            qlora_cache_get_or_compile(ctx, "mine", ptx, "add_one", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_unseal(ctx));
    ASSERT_EQ(QLORA_OK, qlora_cache_get_or_compile(ctx, "mine", ptx, "add_one", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_seal(ctx));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(0u, info.jit_after_seal);
    ASSERT_EQ(modules + 1, info.modules);
    // A cuBLAS shape outside the plan works and is counted.
    qlora_tensor a, c;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 5, 5, NULL, &a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 5, 5, NULL, &c));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &a));
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(machine->cublas, info.cublas_unplanned == 1);
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &c));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A kernel is compiled without the others of its module, and never twice; pre-warm adds the rest.
TEST cache_compiles_what_is_wanted(const test_machine* machine) {
    static const char* const names[] = {"softmax_fwd_f32", "softmax_bwd_f32"};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_cache_info info;
    const qlora_kernel* kernel = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        REFUSED(QLORA_ERR_KERNEL, "is not compiled", qlora_cache_get(ctx, names[i], &kernel));
        for (int again = 0; again < 2; again++) {
            ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, names[i], &kernel));
            ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
            ASSERT_EQ(i + 1, info.modules);
            ASSERT_EQ(i + 1, info.kernels);
            ASSERT_EQ(i + 1, (uint32_t)info.misses);
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &SMALL_SHAPE));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(info.modules, (uint32_t)info.misses);
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "softmax_scores_f32", &kernel));
    uint32_t ready = 0;
    for (size_t i = 0; qlora_kernel_name(i) != NULL; i++) {
        ready += qlora_cache_get(ctx, qlora_kernel_name(i), &kernel) == QLORA_OK ? 1 : 0;
    }
    ASSERT_EQ(ready, info.kernels);
    // Those of any operator.
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "elementwise_silu_bwd_f32", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "preference_factors", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "methods_dot_columns_f32", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "cast_f16_bf16", &kernel));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST cache_prewarm_bad_shapes(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_prewarm_desc s = SMALL_SHAPE;
    s.hidden = 0;
    REFUSED(QLORA_ERR_ARGUMENT, "shape.hidden is 0", qlora_prewarm(ctx, &s));
    s = SMALL_SHAPE;
    s.kv_heads = 3;
    REFUSED(QLORA_ERR_ARGUMENT, "multiple of shape.kv_heads (3)", qlora_prewarm(ctx, &s));
    s = SMALL_SHAPE;
    s.rank = -1;
    REFUSED(QLORA_ERR_ARGUMENT, "shape.rank is -1; it must be from 0 to 4096",
            qlora_prewarm(ctx, &s));
    s = SMALL_SHAPE;
    s.compute = QLORA_U8;
    REFUSED(QLORA_ERR_ARGUMENT, "compute", qlora_prewarm(ctx, &s));
    REFUSED(QLORA_ERR_ARGUMENT, "NULL", qlora_prewarm(ctx, NULL));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Fewer modules if cuBLAS is bound, with the same numbers.
TEST cache_fewer_modules_with_cublas(const test_machine* machine) {
    uint32_t modules[2];
    float got[2][12 * 12];
    for (int i = 0; i < 2; i++) {
        test_machine m = *machine;
        m.cublas = i == 1;
        qlora_ctx* ctx = test_open(&m, NULL);
        if (!ctx)
            SKIPm(test_open_reason());
        ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &SMALL_SHAPE));
        qlora_cache_info info;
        ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
        modules[i] = info.modules;
        float a_values[12 * 12];
        for (int j = 0; j < 12 * 12; j++) {
            a_values[j] = (float)(j * 7 % 13 - 6);
        }
        qlora_tensor a, c;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 12, 12, a_values, &a));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 12, 12, NULL, &c));
        ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
        ASSERT(test_read(ctx, &c, got[i]));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &a));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &c));
        ASSERT(test_close_ctx(&m, ctx));
    }
    ASSERT(modules[1] < modules[0]);
    ASSERT_CLOSE(got[0], got[1], 12 * 12, 0, 0); // integers: exact on both
    PASS();
}

static float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// One cast of n raw elements from `in` to `out`.
static bool cast_bytes(qlora_ctx* ctx, qlora_dtype from, qlora_dtype to, const void* in, void* out,
                       int64_t n) {
    qlora_tensor x, y;
    bool ok = qlora_tensor_create(ctx, from, 1, n, &x) == QLORA_OK &&
              qlora_tensor_create(ctx, to, 1, n, &y) == QLORA_OK &&
              qlora_tensor_write(ctx, &x, in, (size_t)n * qlora_dtype_bytes(from)) == QLORA_OK &&
              qlora_cast(ctx, &x, &y) == QLORA_OK &&
              qlora_tensor_read(ctx, &y, out, (size_t)n * qlora_dtype_bytes(to)) == QLORA_OK;
    return qlora_tensor_destroy(ctx, &x) == QLORA_OK && qlora_tensor_destroy(ctx, &y) == QLORA_OK &&
           ok;
}

// Every rounding of f32 to 16 bits against the definition, with all 65536 patterns in both
// directions: the midpoint between two neighbours goes to the even one, any other value to the
// nearer one.
TEST cast_rounds_to_nearest_even(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    enum { N = 65536 };
    static uint16_t all[N];
    static uint16_t again[N];
    static float wide[N];
    static float middle[N];
    for (int type = 0; type < 2; type++) {
        qlora_dtype dtype = type == 0 ? QLORA_BF16 : QLORA_F16;
        uint16_t infinity = type == 0 ? 0x7f80 : 0x7c00;
        for (int i = 0; i < N; i++) {
            all[i] = (uint16_t)i;
        }
        ASSERT(cast_bytes(ctx, dtype, QLORA_F32, all, wide, N));
        ASSERT(cast_bytes(ctx, QLORA_F32, dtype, wide, again, N));
        for (int i = 0; i < N; i++) {
            bool is_nan = (i & 0x7fff) > infinity;
            ASSERT(is_nan ? wide[i] != wide[i] && (again[i] & 0x7fff) > infinity : again[i] == i);
        }
        for (int side = -1; side <= 1; side++) { // just below the midpoint, at it, just above it
            for (int i = 0; i < N; i++) {
                bool finite = (i & 0x7fff) + 1 < infinity;
                double between =
                    finite ? ((double)wide[i] + (double)wide[i + 1]) / 2.0 : 0.0; // exact in f32
                uint32_t bits;
                float value = (float)between;
                memcpy(&bits, &value, sizeof bits);
                middle[i] = finite ? bits_float(bits + (uint32_t)side) : 0.0f;
            }
            ASSERT(cast_bytes(ctx, QLORA_F32, dtype, middle, again, N));
            for (int i = 0; i < N; i++) {
                bool finite = (i & 0x7fff) + 1 < infinity;
                int expected = side < 0 ? i : side > 0 ? i + 1 : i + i % 2;
                ASSERT_EQ_FMT(finite ? expected : 0, (int)again[i], "%d");
            }
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The registry is the only table of kernels: every row loads and resolves on every machine that has
// its module.
TEST cache_every_kernel_loads(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    size_t count = 0;
    size_t refused = 0;
    for (const char* name = qlora_kernel_name(0); name != NULL; name = qlora_kernel_name(++count)) {
        const qlora_kernel* kernel = NULL;
        qlora_result r = qlora_cache_compile(ctx, name, &kernel);
        bool product = strncmp(name, "fp8_", 4) == 0 && strncmp(name, "fp8_base_", 9) != 0;
        bool hopper = product || strstr(name, "_wg") != NULL || strstr(name, "many_head") != NULL;
        const char* reason =
            hopper ? "runs only on compute capability 9.0" : "needs compute capability 8.0";
        bool may = machine->cc == 75 || (hopper && machine->cc > 0 && machine->cc != 90);
        if (r != QLORA_OK && may && strstr(qlora_last_error(ctx), reason)) {
            refused++;
        } else if (r != QLORA_OK) {
            fprintf(stderr, "%s: %s\n", name, qlora_last_error(ctx));
            FAILm("a kernel does not load");
        }
    }
    ASSERT(count > 20);
    ASSERT_EQ(machine->cc > 0 && machine->cc != 90, refused > 0);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The emitted target, and the version that goes with it, for devices that are not available for
// testing: PTX must name the target that qlora_ctx_target returns.
TEST cache_emits_for_the_device(const test_machine* machine) {
    (void)machine;
    static const struct {
        int cc;
        int driver;
        const char* target;
        const char* version;
    } cases[] = {
        {75, 11000, "sm_75", "6.3"},   {80, 11000, "sm_80", "7.0"},   {86, 11010, "sm_86", "7.1"},
        {87, 11040, "sm_87", "7.4"},   {89, 11080, "sm_89", "7.8"},   {90, 12000, "sm_90", "7.8"},
        {100, 12070, "sm_100", "8.6"}, {103, 12090, "sm_103", "8.8"}, {110, 13000, "sm_110", "9.0"},
        {120, 12080, "sm_120", "8.7"}, {121, 12090, "sm_121", "8.8"}, {130, 13000, "sm_121", "8.8"},
        {89, 11040, "sm_87", "7.4"},   {121, 12080, "sm_120", "8.7"}, {86, 11000, "sm_80", "7.0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        test_machine m = {"any", "fake", cases[i].cc, cases[i].driver, FAKE_FORWARD, true, 0};
        qlora_ctx* ctx = test_open(&m, NULL);
        ASSERT(ctx != NULL);
        ASSERT_STR_EQ(cases[i].target, qlora_ctx_target(ctx));
        char ptx[1024];
        char line[64];
        size_t needed = 0;
        ASSERT_EQ(QLORA_OK, qlora_ptx_emit(ctx, USER_PTX, ptx, sizeof ptx, &needed));
        snprintf(line, sizeof line, ".version %s\n.target %s\n", cases[i].version, cases[i].target);
        ASSERT_EQ(ptx, strstr(ptx, line));
        const qlora_kernel* kernel = NULL;
        ASSERT_EQ(QLORA_OK,
                  qlora_cache_compile(ctx, "clip_squares", &kernel)); // the fake checks the header
        ASSERT(test_close_ctx(&m, ctx));
    }
    PASS();
}

// The environment can lower the target, for measuring the kernels of older devices on a newer one.
TEST targets_are_limited_by_the_environment(const test_machine* machine) {
    static const struct {
        const char* setting;
        const char* target;
    } cases[] = {{"sm_80", "sm_80"}, {"sm_75", "sm_75"}, {"sm_121", "sm_90"}, {"", "sm_90"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setenv("QLORA_GPU_TARGET", cases[i].setting, 1);
        qlora_ctx* ctx = test_open(machine, NULL);
        unsetenv("QLORA_GPU_TARGET");
        ASSERT(ctx != NULL);
        ASSERT_STR_EQ(cases[i].target, qlora_ctx_target(ctx));
        char text[2048];
        qlora_describe(ctx, text, sizeof text);
        bool limited = strstr(text, "limited by the environment variable QLORA_GPU_TARGET") != NULL;
        ASSERT_EQ(i < 2, limited);
        const qlora_kernel* kernel = NULL;
        ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", &kernel));
        char why[80];
        snprintf(why, sizeof why, "has 9.0, but QLORA_GPU_TARGET limits it to %s",
                 cases[i].target);
        ASSERT_EQ(limited ? QLORA_ERR_UNSUPPORTED : QLORA_OK,
                  qlora_cache_compile(ctx, "decode_many_head", &kernel));
        ASSERT_EQ(limited, strstr(qlora_last_error(ctx), why) != NULL);
        ASSERT(test_close_ctx(machine, ctx));
    }
    setenv("QLORA_GPU_TARGET", "sm_81", 1);
    qlora_ctx* unknown = test_open(machine, NULL);
    unsetenv("QLORA_GPU_TARGET");
    ASSERT_EQ(NULL, unknown);
    ASSERT(strstr(test_open_reason(), "QLORA_GPU_TARGET is \"sm_81\"; it must be one of sm_75, "
                                      "sm_80, sm_86") != NULL);
    PASS();
}

// ---- clip ---------------------------------------------------------------------------------------

enum { CLIP_TENSORS = 5 };
static const int64_t CLIP_SHAPES[CLIP_TENSORS][2] = {{3, 5}, {1, 20000}, {0, 4}, {7, 1}, {70, 130}};

typedef struct clip_fixture {
    qlora_tensor tensors[CLIP_TENSORS];
    const qlora_tensor* list[CLIP_TENSORS];
    float* values[CLIP_TENSORS];
    double squares[CLIP_TENSORS];
} clip_fixture;

static bool clip_make(qlora_ctx* ctx, clip_fixture* f, float scale) {
    test_random random = test_random_start("clip");
    for (int i = 0; i < CLIP_TENSORS; i++) {
        size_t n = (size_t)(CLIP_SHAPES[i][0] * CLIP_SHAPES[i][1]);
        f->values[i] = (float*)malloc(n * 4 + 4);
        test_random_fill(&random, f->values[i], n, scale);
        f->squares[i] = 0.0;
        for (size_t j = 0; j < n; j++) {
            f->squares[i] += (double)f->values[i][j] * (double)f->values[i][j];
        }
        if (test_tensor(ctx, QLORA_F32, CLIP_SHAPES[i][0], CLIP_SHAPES[i][1], f->values[i],
                        &f->tensors[i]) != QLORA_OK) {
            return false;
        }
        f->list[i] = &f->tensors[i];
    }
    return true;
}

static void clip_free(qlora_ctx* ctx, clip_fixture* f) {
    for (int i = 0; i < CLIP_TENSORS; i++) {
        qlora_tensor_destroy(ctx, &f->tensors[i]);
        free(f->values[i]);
    }
}

// Whether tensor i holds its original values times scale.
static bool clip_scaled(qlora_ctx* ctx, const clip_fixture* f, int i, double scale) {
    size_t n = (size_t)(CLIP_SHAPES[i][0] * CLIP_SHAPES[i][1]);
    if (n == 0) {
        return true;
    }
    float* got = (float*)malloc(n * 4);
    float* expected = (float*)malloc(n * 4);
    for (size_t j = 0; j < n; j++) {
        expected[j] = (float)((double)f->values[i][j] * scale);
    }
    bool ok = test_read(ctx, &f->tensors[i], got) &&
              test_close(expected, got, n, 0.0, scale == 1.0 ? 0.0 : 1e-6);
    free(got);
    free(expected);
    return ok;
}

TEST clip_one_norm(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    static const float scales[] = {1.0f, 1e-8f, 1e17f};
    for (int s = 0; s < 3; s++) {
        clip_fixture f;
        ASSERT(clip_make(ctx, &f, scales[s]));
        double norm = 0.0;
        for (int i = 0; i < CLIP_TENSORS; i++) {
            norm += f.squares[i];
        }
        norm = sqrt(norm);
        qlora_clip* clip = NULL;
        ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, f.list, NULL, CLIP_TENSORS, &clip));
        const double limits[] = {2.0, 0.5, -1.0}; // above the norm, below it, off
        double total = 1.0;                       // effect of the passes so far on the gradients
        for (int l = 0; l < 3; l++) {
            double now = norm * total;
            float limit = limits[l] < 0 ? -1.0f : (float)(limits[l] * now);
            double ratio = (double)limit / (now + 1e-6);
            double expected = limit >= 0.0f && ratio < 1.0 ? ratio : 1.0;
            ASSERT_EQ(QLORA_OK, qlora_clip_set(clip, limit));
            ASSERT_EQ(QLORA_OK, qlora_clip_apply(clip));
            qlora_clip_info info;
            ASSERT_EQ(QLORA_OK, qlora_clip_query(clip, 0, &info));
            ASSERT(info.finite);
            ASSERT(fabs((double)info.norm - now) <= 1e-6 * now);
            ASSERT(fabs((double)info.scale - expected) <= 1e-6 * expected);
            total *= expected;
            for (int i = 0; i < CLIP_TENSORS; i++) {
                ASSERT(clip_scaled(ctx, &f, i, total));
            }
        }
        ASSERT_EQ(QLORA_OK, qlora_clip_destroy(clip));
        clip_free(ctx, &f);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST clip_groups_and_infinity(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    clip_fixture f;
    ASSERT(clip_make(ctx, &f, 1.0f));
    f.values[4][77] = INFINITY;
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &f.tensors[4], f.values[4], 70 * 130 * 4));
    const int32_t groups[CLIP_TENSORS] = {1, 0, 0, 3, 2}; // unordered
    qlora_clip* clip = NULL;
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, f.list, groups, CLIP_TENSORS, &clip));
    ASSERT_EQ(QLORA_OK, qlora_clip_set(clip, 1.0f));
    ASSERT_EQ(QLORA_OK, qlora_clip_apply(clip));
    for (int i = 0; i < CLIP_TENSORS; i++) {
        qlora_clip_info info;
        ASSERT_EQ(QLORA_OK, qlora_clip_query(clip, groups[i], &info));
        if (i == 4) {
            ASSERT(!info.finite);
            ASSERT_EQ_FMT(1.0, (double)info.scale, "%g");
            ASSERT(clip_scaled(ctx, &f, i, 1.0)); // unchanged
        } else if (i != 2) {
            double norm = sqrt(f.squares[i]);
            ASSERT(info.finite);
            ASSERT(fabs((double)info.norm - norm) <= 1e-6 * norm);
            ASSERT(clip_scaled(ctx, &f, i, norm > 1.0 ? 1.0 / (norm + 1e-6) : 1.0));
        }
    }
    qlora_clip_info info;
    REFUSED(QLORA_ERR_ARGUMENT, "group", qlora_clip_query(clip, 4, &info));
    REFUSED(QLORA_ERR_ARGUMENT, "not a number", qlora_clip_set(clip, NAN));
    ASSERT_EQ(QLORA_OK, qlora_clip_destroy(clip));
    const int32_t bad[CLIP_TENSORS] = {0, 1, 2, 3, 9};
    REFUSED(QLORA_ERR_ARGUMENT, "group 9",
            qlora_clip_create(ctx, f.list, bad, CLIP_TENSORS, &clip));
    // An empty list of gradients is valid: the norm is 0.
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, NULL, NULL, 0, &clip));
    ASSERT_EQ(QLORA_OK, qlora_clip_apply(clip));
    ASSERT_EQ(QLORA_OK, qlora_clip_query(clip, 0, &info));
    ASSERT(info.finite && info.norm == 0.0f && info.scale == 1.0f);
    ASSERT_EQ(QLORA_OK, qlora_clip_destroy(clip));
    // Rows with gaps between them: the gaps are neither read nor written.
    qlora_tensor view;
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &f.tensors[4], f.values[4], 70 * 130 * 4));
    ASSERT_EQ(QLORA_OK,
              qlora_tensor_view(ctx, &f.tensors[4], 2, 60, 1, 50, &view)); // infinity is outside
    const qlora_tensor* one[] = {&view};
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, one, NULL, 1, &clip));
    ASSERT_EQ(QLORA_OK, qlora_clip_apply(clip));
    ASSERT_EQ(QLORA_OK, qlora_clip_query(clip, 0, &info));
    double sum = 0.0;
    for (int i = 2; i < 62; i++) {
        for (int j = 1; j < 51; j++) {
            sum += (double)f.values[4][i * 130 + j] * (double)f.values[4][i * 130 + j];
        }
    }
    ASSERT(fabs((double)info.norm - sqrt(sum)) <= 1e-6 * sqrt(sum));
    float* got = (float*)malloc(70 * 130 * 4);
    ASSERT(test_read(ctx, &f.tensors[4], got));
    for (int i = 0; i < 70 * 130; i++) {
        bool inside = i / 130 >= 2 && i / 130 < 62 && i % 130 >= 1 && i % 130 < 51;
        ASSERT_EQ(inside, memcmp(&got[i], &f.values[4][i], 4) != 0);
    }
    free(got);
    ASSERT_EQ(QLORA_OK, qlora_clip_destroy(clip));
    clip_free(ctx, &f);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

enum { UPDATED = 500 };

// What a clipped update of one arena needs, and the device-side numbers that tie the two together.
typedef struct update_state {
    qlora_tensor t[4]; // parameters, gradients, both moments
    qlora_tensor ranges;
    qlora_tensor state;
    qlora_tensor scale;
    qlora_tensor not_finite;
    qlora_clip* clip;
    bool apply; // the clip scales the gradients; otherwise AdamW does
} update_state;

static qlora_result update(qlora_ctx* ctx, void* user) {
    update_state* s = (update_state*)user;
    qlora_adamw_desc d;
    memset(&d, 0, sizeof d);
    d.param = &s->t[0];
    d.grad = &s->t[1];
    d.m = &s->t[2];
    d.v = &s->t[3];
    d.ranges = &s->ranges;
    d.state = &s->state;
    d.clip_scale = s->apply ? NULL : &s->scale;
    d.not_finite = &s->not_finite;
    qlora_result r = s->apply ? qlora_clip_apply(s->clip) : qlora_clip_measure(s->clip);
    return r == QLORA_OK ? qlora_adamw_step(ctx, &d) : r;
}

static bool update_make(qlora_ctx* ctx, update_state* s, int32_t group, bool apply) {
    float values[UPDATED];
    test_random random = test_random_start("update");
    memset(s, 0, sizeof *s);
    s->apply = apply;
    bool ok = true;
    for (int i = 0; i < 4; i++) {
        test_random_fill(&random, values, UPDATED, i == 0 ? 1.0f : 0.0f);
        ok = ok && test_tensor(ctx, QLORA_F32, 1, UPDATED, values, &s->t[i]) == QLORA_OK;
    }
    qlora_adamw_range range = {0, UPDATED, 1.0f, 1.0f, NULL, 0, 0, 0.0};
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = 1e-2;
    state.beta1 = 0.9;
    state.beta2 = 0.999;
    state.eps = 1e-8;
    state.weight_decay = 0.1;
    const qlora_tensor* list[] = {&s->t[1]};
    return ok && qlora_tensor_create(ctx, QLORA_U8, 1, sizeof range, &s->ranges) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_U8, 1, sizeof state, &s->state) == QLORA_OK &&
           qlora_tensor_write(ctx, &s->ranges, &range, sizeof range) == QLORA_OK &&
           qlora_tensor_write(ctx, &s->state, &state, sizeof state) == QLORA_OK &&
           qlora_clip_create(ctx, list, NULL, 1, &s->clip) == QLORA_OK &&
           qlora_clip_set(s->clip, 0.5f) == QLORA_OK &&
           qlora_clip_device(s->clip, group, apply ? NULL : &s->scale, &s->not_finite) == QLORA_OK;
}

static bool update_free(qlora_ctx* ctx, update_state* s) {
    bool ok = qlora_clip_destroy(s->clip) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &s->ranges) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &s->state) == QLORA_OK;
    for (int i = 0; i < 4; i++) {
        ok = qlora_tensor_destroy(ctx, &s->t[i]) == QLORA_OK && ok;
    }
    return ok;
}

// Steps 0, 2 and 3 have ordinary gradients, step 1 a NaN, which must leave no trace but the count.
static const char* update_run(qlora_ctx* ctx, update_state* s, bool graphs, float* out) {
    float gradients[UPDATED];
    float before[3][UPDATED];
    float after[UPDATED];
    qlora_graph* graph = NULL;
    const char* wrong = NULL;
    test_random random = test_random_start("update gradients");
    for (int step = 0; step < 4 && wrong == NULL; step++) {
        test_random_fill(&random, gradients, UPDATED, 1.0f);
        gradients[step == 1 ? 77 : 0] *= step == 1 ? NAN : 1.0f;
        for (int i = 0; i < 3; i++) {
            test_read(ctx, &s->t[i == 0 ? 0 : i + 1], before[i]);
        }
        bool ok = qlora_tensor_write(ctx, &s->t[1], gradients, sizeof gradients) == QLORA_OK;
        qlora_result r = !graphs         ? update(ctx, s)
                         : step < 1      ? update(ctx, s) // compiles
                         : graph == NULL ? qlora_graph_capture(ctx, 5, update, s, &graph)
                                         : qlora_graph_replay(graph, 5);
        wrong = ok && r == QLORA_OK ? NULL : "a call failed";
        for (int i = 0; i < 3 && wrong == NULL; i++) {
            test_read(ctx, &s->t[i == 0 ? 0 : i + 1], after);
            bool same = memcmp(before[i], after, sizeof after) == 0;
            wrong = same == (step == 1) ? NULL : same ? "nothing moved" : "the NaN was used";
        }
        test_read(ctx, &s->t[1], after);
        for (int i = 0; i < UPDATED && wrong == NULL; i++) {
            wrong = after[i] == 0.0f ? NULL : "a gradient was not zeroed";
        }
    }
    test_read(ctx, &s->t[0], out);
    return qlora_graph_destroy(graph) == QLORA_OK ? wrong : "destroying the graph failed";
}

TEST clip_tells_adamw(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    float results[4][UPDATED];
    for (int i = 0; i < 4; i++) {
        update_state s;
        qlora_adamw_state state;
        bool apply = i >= 2;
        ASSERT(update_make(ctx, &s, apply ? -1 : 0, apply));
        const char* wrong = update_run(ctx, &s, i % 2 == 1, results[i]);
        ASSERTm(wrong, wrong == NULL);
        ASSERT_EQ(QLORA_OK, qlora_tensor_read(ctx, &s.state, &state, sizeof state));
        ASSERT_EQ_FMT(3, (int)state.updates, "%d");
        ASSERT_EQ_FMT(1, (int)state.skipped, "%d");
        ASSERT_EQ_FMT(0, (int)state.skip, "%d");
        qlora_tensor none;
        REFUSED(QLORA_ERR_ARGUMENT, "group 1 does not exist; use 0 to 0",
                qlora_clip_device(s.clip, 1, &none, NULL));
        REFUSED(QLORA_ERR_ARGUMENT, "group -1", qlora_clip_device(s.clip, -1, &none, NULL));
        ASSERT(update_free(ctx, &s));
        // Graph or not: the same bits. Scaled by the clip or by AdamW: the same up to rounding.
        ASSERT_EQ(0, memcmp(results[i], results[i - i % 2], sizeof results[i]));
        ASSERT_CLOSE(results[0], results[i], UPDATED, 1e-6, 1e-5);
    }
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_clip_device(NULL, 0, NULL, NULL));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- graphs -------------------------------------------------------------------------------------

TEST graph_replays_what_it_captured(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    step_state s;
    ASSERT(step_make(ctx, &s));
    float eager[16];
    float got[16];
    ASSERT_EQ(QLORA_OK, step(ctx, &s)); // also compiles
    ASSERT(test_read(ctx, &s.c, eager));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &s.c));
    qlora_graph* graph = NULL;
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 42, step, &s, &graph));
    ASSERT(test_read(ctx, &s.c, got)); // the captured step was also executed
    ASSERT_CLOSE(eager, got, 16, 0, 0);
    // A replay sees the current values: inputs and max_norm are in device memory.
    float twice[16];
    for (int i = 0; i < 16; i++) {
        twice[i] = (float)(i % 5);
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &s.a, twice, 64));
    ASSERT_EQ(QLORA_OK, qlora_clip_set(s.clip, 3.0f));
    ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 42));
    ASSERT(test_read(ctx, &s.c, got));
    ASSERT_EQ(QLORA_OK, step(ctx, &s));
    ASSERT(test_read(ctx, &s.c, eager));
    ASSERT_CLOSE(eager, got, 16, 0, 0);
    REFUSED(QLORA_ERR_STATE, "key 42", qlora_graph_replay(graph, 43));
    qlora_graph_info info;
    ASSERT_EQ(QLORA_OK, qlora_graph_query(graph, &info));
    ASSERT_EQ(1u, info.replays);
    ASSERT(info.valid);
    ASSERT_EQ(qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, info.nodes >= 4);
    // Freeing a buffer that the graph uses invalidates it; freeing another one does not.
    qlora_tensor unrelated;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 4, 4, &unrelated));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &unrelated));
    ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 42));
    if (qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &s.b));
        REFUSED(QLORA_ERR_STATE, "freed", qlora_graph_replay(graph, 42));
        ASSERT_EQ(QLORA_OK, qlora_graph_query(graph, &info));
        ASSERT(!info.valid);
    }
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    step_free(ctx, &s);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

typedef struct clear_state {
    qlora_tensor small;
    qlora_tensor large;
    qlora_tensor sum;
} clear_state;

// 3, cleared in between, 5: clearing too early or too late would show.
static qlora_result clear_step(qlora_ctx* ctx, void* user) {
    clear_state* s = (clear_state*)user;
    qlora_result r = qlora_fill(ctx, 3.0f, &s->small);
    r = r == QLORA_OK ? qlora_tensor_zero(ctx, &s->small) : r;
    r = r == QLORA_OK ? qlora_tensor_zero(ctx, &s->large) : r;
    r = r == QLORA_OK ? qlora_add(ctx, &s->small, &s->sum, &s->sum) : r;
    return r == QLORA_OK ? qlora_fill(ctx, 5.0f, &s->small) : r;
}

// A small memset in a graph becomes a kernel node (a large one stays a memset). The driver calls
// for this are also made to fail one after another: the memset stays, or the capture fails cleanly.
TEST graph_clears_are_kernels(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    const fake_api* fake = strcmp(machine->backend, "fake") == 0 ? test_fake() : NULL;
    clear_state s;
    float sum[6] = {1, 2, 3, 4, 5, 6};
    float got[6];
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 3, &s.small));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 64, 512, &s.large));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 3, sum, &s.sum));
    ASSERT_EQ(QLORA_OK, clear_step(ctx, &s)); // also compiles
    qlora_graph* graph = NULL;
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, clear_step, &s, &graph));
    ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
    uint64_t fills = fake ? fake->kernel_runs("qlora_elementwise_fill_f32") : 0;
    ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 1));
    ASSERT(test_read(ctx, &s.sum, got));
    ASSERT_CLOSE(sum, got, 6, 0, 0);
    ASSERT(test_read(ctx, &s.small, got));
    ASSERT_EQ(5.0f, got[0]);
    qlora_graph_info info;
    ASSERT_EQ(QLORA_OK, qlora_graph_query(graph, &info));
    ASSERT_EQ(5u, info.nodes);
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    if (fake) {
        ASSERT_EQ(fills + 3, fake->kernel_runs("qlora_elementwise_fill_f32"));
    }
    static const char* const calls[] = {
        "cuGraphNodeGetType",      "cuGraphMemsetNodeGetParams",
        "cuGraphGetNodes",         "cuGraphNodeGetDependencies_v2",
        "cuGraphAddKernelNode_v2", "cuGraphNodeGetDependentNodes_v2",
        "cuGraphDestroyNode",      "cuGraphAddDependencies_v2"};
    for (size_t i = 0; fake && i < 3 * sizeof calls / sizeof calls[0]; i++) {
        fake->fail_at(calls[i / 3], i % 3 + 1, 1, false);
        qlora_result r = qlora_graph_capture(ctx, 1, clear_step, &s, &graph);
        fake->fail_clear();
        if (r == QLORA_OK) {
            ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 1));
            ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
        }
        ASSERT(test_read(ctx, &s.sum, got));
        ASSERT_CLOSE(sum, got, 6, 0, 0);
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &s.small));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &s.large));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &s.sum));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST graph_capture_fails_clearly(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    step_state s;
    ASSERT(step_make(ctx, &s));
    qlora_graph* graph = NULL;
    // Nothing is compiled yet: the error names the kernel that would be compiled.
    if (!machine->cublas) {
        REFUSED(QLORA_ERR_CAPTURE, "compiling kernel module gemm",
                qlora_graph_capture(ctx, 1, step, &s, &graph));
    }
    ASSERT_EQ(QLORA_OK, step(ctx, &s));
    static const char* const needles[] = {"waiting for the device", "copying to host memory",
                                          "allocating memory", "without a message", "B is NULL"};
    float before[16];
    float after[16];
    ASSERT(test_read(ctx, &s.c, before));
    for (int mode = 1; mode <= 5; mode++) {
        s.mode = mode;
        REFUSED(QLORA_ERR_CAPTURE, "was not captured",
                qlora_graph_capture(ctx, 1, step, &s, &graph));
        if (strstr(qlora_last_error(ctx), needles[mode - 1]) == NULL) {
            fprintf(stderr, "mode %d: %s\n", mode, qlora_last_error(ctx));
            FAILm("the call that broke the capture is not named");
        }
        ASSERT_EQ(NULL, graph);
        s.mode = 0;
        ASSERT(test_read(ctx, &s.c, after)); // nothing ran, and the stream is usable
        ASSERT_CLOSE(before, after, 16, 0, 0);
    }
    REFUSED(QLORA_ERR_ARGUMENT, "fn is NULL", qlora_graph_capture(ctx, 1, NULL, &s, &graph));
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, step, &s, &graph));
    ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 1));
    // Another stream: the graph is invalid.
    if (strcmp(machine->backend, "fake") == 0) {
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, NULL));
        REFUSED(QLORA_ERR_STATE, "stream", qlora_graph_replay(graph, 1));
        test_fake()->forgive(); // the library rejected modes 1 to 3 before they reached the driver
    }
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    step_free(ctx, &s);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(runtime_suite) {
    RUN_TEST(results_are_unique);
    RUN_TEST(ctx_null_is_safe);
    RUN_TEST(ctx_bad_desc);
    RUN_ON(TEST_EVERYWHERE, ctx_defaults_are_documented);
    RUN_ON(TEST_ONE_FAKE, ctx_falls_back_and_says_why);
    RUN_ON(TEST_ONE_FAKE, ctx_broken_libraries);
    RUN_ON(TEST_EVERYWHERE, ctx_children_first);
    RUN_TEST(ctx_of_another_header);
    RUN_ON(TEST_CPU, rope_table_says_why);
    RUN_ON(TEST_ONE_FAKE, ctx_stream_priority);
    RUN_ON(TEST_EVERYWHERE, ctx_workspace_changes);
    RUN_ON(TEST_ONE_FAKE, ctx_leaves_current_context_alone);
    RUN_ON(TEST_ONE_FAKE, ctx_uses_a_given_context);
    RUN_ON(TEST_EVERYWHERE, tensor_rules);
    RUN_ON(TEST_EVERYWHERE, cache_users_kernel);
    RUN_ON(TEST_GPUS, cache_text_is_refused_when_it_goes_backward);
    RUN_ON(TEST_EVERYWHERE, cache_prewarm_and_seal);
    RUN_ON(TEST_GPUS, cache_compiles_what_is_wanted);
    RUN_ON(TEST_ONE_EACH, cache_prewarm_bad_shapes);
    RUN_ON(TEST_ONE_FAKE, cache_fewer_modules_with_cublas);
    RUN_ON(TEST_GPUS, cache_every_kernel_loads);
    RUN_ON(TEST_ONE_FAKE, cache_emits_for_the_device);
    RUN_ON(TEST_ONE_FAKE, targets_are_limited_by_the_environment);
    RUN_ON(TEST_EVERYWHERE, cast_rounds_to_nearest_even);
    RUN_ON(TEST_EVERYWHERE, clip_one_norm);
    RUN_ON(TEST_EVERYWHERE, clip_groups_and_infinity);
    RUN_ON(TEST_EVERYWHERE, clip_tells_adamw);
    RUN_ON(TEST_EVERYWHERE, graph_replays_what_it_captured);
    RUN_ON(TEST_GPUS, graph_clears_are_kernels);
    RUN_ON(TEST_GPUS, graph_capture_fails_clearly);
}
