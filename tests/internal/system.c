// system.c - white-box tests of the operating system's side: files that are created, the memory
// that is left for a plan, threads and cores.
#include "test.h"

#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void text_put(const char* path, const char* text) {
    FILE* file = fopen(path, "w");
    if (file != NULL) {
        fputs(text, file);
        fclose(file);
    }
}

static bool text_is(const char* path, const char* text) {
    char got[64] = "";
    FILE* file = fopen(path, "r");
    if (file != NULL) {
        got[fread(got, 1, sizeof got - 1, file)] = '\0';
        fclose(file);
    }
    return file != NULL && strcmp(got, text) == 0;
}

// The temporary file of a write is a new one: a link that waits under its name is removed and never
// followed, and what a crash left there does not stay in the way.
TEST temporary_files_are_new(void) {
    char dir[] = "build/test-files-XXXXXX";
    char path[4][128];
    ASSERT(mkdtemp(dir) != NULL);
    static const char* const names[4] = {"out", "out.tmp", "victim", "none"};
    for (int i = 0; i < 4; i++) {
        snprintf(path[i], sizeof path[i], "%s/%s", dir, names[i]);
    }
    qlora__env env;
    memset(&env, 0, sizeof env);
    qlora__hooks_default(&env.allocator, &env.files);
    // a link to a file, a link to nothing, a file; on Windows, links need privileges
#ifdef _WIN32
    for (int i = 2; i < 3; i++) {
#else
    for (int i = 0; i < 3; i++) {
#endif
        text_put(path[2], "keep");
        if (i == 2) {
            text_put(path[1], "left by a crash, and longer than the new text");
        } else {
            ASSERT_EQ(0, symlink(path[2 + i], path[1]));
        }
        ASSERT_EQ(QLORA_OK, qlora__file_write(&env, path[0], "new", 3));
        struct stat info;
        ASSERT_EQ(0, lstat(path[0], &info));
        ASSERT(S_ISREG(info.st_mode));
        ASSERT(text_is(path[0], "new"));
        ASSERT(text_is(path[2], "keep"));
        ASSERT(access(path[3], F_OK) != 0);
        ASSERT(access(path[1], F_OK) != 0);
    }
    void* file = NULL;
    ASSERT_EQ(EEXIST, qlora__os_open(path[0], QLORA_FILE_CREATE, &file, NULL));
    // A folder under the temporary name cannot be removed when it is not empty: an error, no loss.
    char inside[160];
    ASSERT_EQ(0, mkdir(path[1], 0777));
    snprintf(inside, sizeof inside, "%s/x", path[1]);
    text_put(inside, "mine");
    ASSERT_EQ(QLORA_ERR_FILE, qlora__file_write(&env, path[0], "newer", 5));
    ASSERT(text_is(path[0], "new") && text_is(inside, "mine"));
    remove(inside);
    for (int i = 0; i < 4; i++) {
        qlora__os_remove(path[i], NULL);
    }
    ASSERT_EQ(0, qlora__os_remove(dir, NULL));
    ASSERT_EQ_FMT(0, (int)env.host_bytes, "%d");
    PASS();
}

#ifdef _WIN32
// Names are UTF-8 whatever the code page is, and a fault has its own errno value.
TEST names_are_utf8(void) {
    const char name[] = "build/test-\xc3\xa4\xe6\xbc\xa2.txt";
    const char other[] = "build/test-\xf0\x9f\x90\x8e.txt";
    void* file = NULL;
    const void* data = NULL;
    uint64_t bytes = 0;
    void* handle = NULL;
    (void)qlora__os_remove(name, NULL);
    (void)qlora__os_remove(other, NULL);
    for (int i = 0; i < 2; i++) { // the second one replaces a file that exists
        ASSERT_EQ(0, qlora__os_open(name, QLORA_FILE_CREATE, &file, NULL));
        ASSERT(qlora__os_write(file, "new\n", 4, NULL) == 4);
        ASSERT_EQ(0, qlora__os_sync(file, NULL));
        ASSERT_EQ(0, qlora__os_close(file, NULL));
        ASSERT_EQ(0, qlora__os_rename(name, other, NULL));
    }
    ASSERT_EQ(ENOENT, qlora__os_open(name, QLORA_FILE_READ, &file, NULL));
    ASSERT_EQ(ENOENT, qlora__os_rename(name, other, NULL));
    ASSERT_EQ(ENOENT, qlora__os_map(name, &data, &bytes, &handle, NULL));
    ASSERT_EQ(EACCES, qlora__os_map("build", &data, &bytes, &handle, NULL));
    ASSERT_EQ(0, qlora__os_map(other, &data, &bytes, &handle, NULL));
    ASSERT(bytes == 4 && memcmp(data, "new\n", 4) == 0);
    qlora__os_unmap(data, bytes, handle, NULL);
    ASSERT_EQ(0, qlora__os_remove(other, NULL));
    ASSERT_EQ(EISDIR, qlora__os_open("build", QLORA_FILE_READ, &file, NULL));
    ASSERT_EQ(0, qlora__os_make_dir("build/test-\xc3\xa4", NULL));
    ASSERT_EQ(0, qlora__os_remove("build/test-\xc3\xa4", NULL)); // also a folder, as elsewhere
    ASSERT_EQ(EILSEQ, qlora__os_open("build/\xe4", QLORA_FILE_READ, &file, NULL));
    char far_away[2000];
    memset(far_away, 'a', sizeof far_away);
    far_away[sizeof far_away - 1] = '\0';
    ASSERT_EQ(ENAMETOOLONG, qlora__os_open(far_away, QLORA_FILE_READ, &file, NULL));
    ASSERT(qlora__os_memory("") > 0 && qlora__core_count() > 0);
    PASS();
}
#else
// One machine: the files of /proc and /sys under a root of its own, and the bytes that are left.
typedef struct memory_case {
    const char* name;
    const char* files[8][2];
    uint64_t left;
} memory_case;

#define MEMINFO "MemTotal:   1000 kB\nMemFree:  100 kB\nMemAvailable:   800 kB\n"

static const memory_case memory_cases[] = {
    {"nothing to read", {{NULL, NULL}}, 0},
    {"no cgroup", {{"proc/meminfo", MEMINFO}}, 800 * 1024},
    {"a cgroup without a limit",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "0::/a/b\n"},
      {"sys/fs/cgroup/a/b/memory.max", "max\n"},
      {"sys/fs/cgroup/a/b/memory.current", "5\n"}},
     800 * 1024},
    {"a limit less what is used, but not less the file cache",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "0::/a/b\n"},
      {"sys/fs/cgroup/a/b/memory.max", "500000\n"},
      {"sys/fs/cgroup/a/b/memory.current", "200000\n"},
      {"sys/fs/cgroup/a/b/memory.stat", "anon 7\nfile 9\ninactive_file 50000\nactive_file 1\n"}},
     350000},
    {"the limit of an outer group",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "0::/a/b\n"},
      {"sys/fs/cgroup/a/b/memory.max", "500000\n"},
      {"sys/fs/cgroup/a/b/memory.current", "200000\n"},
      {"sys/fs/cgroup/a/memory.max", "300000\n"},
      {"sys/fs/cgroup/a/memory.current", "299999\n"}},
     1},
    {"a container: the group is the root",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "0::/\n"},
      {"sys/fs/cgroup/memory.max", "4096\n"},
      {"sys/fs/cgroup/memory.current", "96\n"}},
     4000},
    {"used up",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "0::/\n"},
      {"sys/fs/cgroup/memory.max", "4096\n"},
      {"sys/fs/cgroup/memory.current", "4097\n"}},
     1},
    {"the first version of cgroups",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/docker/id\n0::/y\n"},
      {"sys/fs/cgroup/memory/memory.limit_in_bytes", "70000\n"},
      {"sys/fs/cgroup/memory/memory.usage_in_bytes", "30000\n"},
      {"sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 10000\n"}},
     50000},
    {"the first version without a limit",
     {{"proc/meminfo", MEMINFO},
      {"proc/self/cgroup", "5:memory:/\n"},
      {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
      {"sys/fs/cgroup/memory/memory.usage_in_bytes", "30000\n"}},
     800 * 1024},
};

TEST memory_that_is_left(const memory_case* c) {
    char root[] = "build/test-memory-XXXXXX";
    char command[256];
    ASSERT(mkdtemp(root) != NULL);
    for (int i = 0; i < 8 && c->files[i][0] != NULL; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", root, c->files[i][0]);
        for (char* at = path + strlen(root) + 1; *at != '\0'; at++) {
            if (*at == '/') {
                *at = '\0';
                mkdir(path, 0777);
                *at = '/';
            }
        }
        text_put(path, c->files[i][1]);
    }
    uint64_t left = qlora__os_memory(root);
    snprintf(command, sizeof command, "rm -rf %s", root);
    ASSERT_EQ(0, system(command));
    if (left != c->left) {
        fprintf(stderr, "%s: %llu, not %llu\n", c->name, (unsigned long long)left,
                (unsigned long long)c->left);
    }
    ASSERT(left == c->left);
    PASS();
}
#endif

// ---- threads ------------------------------------------------------------------------------------

static void count_calls(void* user, int64_t begin, int64_t end) {
    int* calls = (int*)user;
    for (int64_t i = begin; i < end; i++) {
        calls[i]++;
    }
}

// Threads look for work for a moment, with and without pauses between the jobs, and then sleep.
TEST threads_sleep_when_idle(void) {
    enum { ITEMS = 64 };
    int calls[ITEMS] = {0};
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 4;
    qlora_ctx* ctx = NULL;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    qlora__mutex_lock(&ctx->pool->mutex);
    ctx->pool->spins = 2000; // also where there are fewer cores
    qlora__mutex_unlock(&ctx->pool->mutex);
    struct timespec pause = {0, 200000};
    for (int i = 0; i < 200; i++) {
        qlora__parallel(ctx, ITEMS, 1 + i % 7, count_calls, calls);
        if (i % 50 == 0) {
            nanosleep(&pause, NULL);
        }
    }
    for (int i = 0; i < ITEMS; i++) {
        ASSERT_EQ_FMT(200, calls[i], "%d");
    }
    int asleep = 0;
    pause.tv_nsec = 2000000;
    for (int i = 0; i < 2500 && asleep < 3; i++) {
        nanosleep(&pause, NULL);
        qlora__mutex_lock(&ctx->pool->mutex);
        asleep = ctx->pool->asleep;
        qlora__mutex_unlock(&ctx->pool->mutex);
    }
    ASSERT_EQ_FMT(3, asleep, "%d");
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- errands ------------------------------------------------------------------------------------

// A product with several pieces of K, and attention that is long enough for a turn to end between
// its blocks, into one array.
enum {
    ERRAND_M = 70,
    ERRAND_N = 200,
    ERRAND_K = 3000,
    ERRAND_T = 300,
    ERRAND_WIDE = 64, // 4 heads
    ERRAND_SIDE = ERRAND_T * ERRAND_WIDE,
    ERRAND_IN = ERRAND_M * ERRAND_K + ERRAND_N * ERRAND_K + 2 * ERRAND_SIDE,
    ERRAND_OUT = ERRAND_M * ERRAND_N + 5 * ERRAND_SIDE
};

typedef struct errand_work {
    qlora_ctx* ctx;
    float* in;
    float* out;
} errand_work;

// The next `rows` by `cols` floats of an array.
static qlora_tensor errand_tensor(qlora_ctx* ctx, float** at, int64_t rows, int64_t cols) {
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    (void)qlora_tensor_wrap(ctx, *at, (size_t)(rows * cols) * 4, QLORA_F32, rows, cols, 0, &t);
    *at += rows * cols;
    return t;
}

static qlora_result errand_product(const errand_work* w) {
    float* in = w->in;
    float* out = w->out;
    qlora_tensor a = errand_tensor(w->ctx, &in, ERRAND_M, ERRAND_K);
    qlora_tensor b = errand_tensor(w->ctx, &in, ERRAND_K, ERRAND_N);
    qlora_tensor c = errand_tensor(w->ctx, &out, ERRAND_M, ERRAND_N);
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.alpha = 1.0f;
    return qlora_gemm(w->ctx, &gemm, &a, &b, &c);
}

static qlora_result errand_all(void* user) {
    static int32_t offsets[2] = {0, ERRAND_T};
    const errand_work* w = (const errand_work*)user;
    float* in = w->in + ERRAND_M * ERRAND_K + ERRAND_N * ERRAND_K;
    float* out = w->out + ERRAND_M * ERRAND_N;
    qlora_tensor t[7]; // x, d_o, o, lse, dq, dk, dv
    qlora_tensor seqs;
    qlora_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 4;
    d.head_dim = ERRAND_WIDE / 4;
    for (int i = 0; i < 7; i++) {
        t[i] = i == 3 ? errand_tensor(w->ctx, &out, 4, ERRAND_T)
                      : errand_tensor(w->ctx, i < 2 ? &in : &out, ERRAND_T, ERRAND_WIDE);
    }
    QLORA__TRY(
        qlora_tensor_wrap(w->ctx, offsets, sizeof offsets, QLORA_I32, 1, 2, 0, &seqs));
    QLORA__TRY(errand_product(w));
    QLORA__TRY(qlora_attention_forward(w->ctx, &d, &t[0], &t[0], &t[0], &seqs, &t[2], &t[3]));
    return qlora_attention_backward(w->ctx, &d, &t[0], &t[0], &t[0], &seqs, &t[2], &t[3], &t[1],
                                    &t[4], &t[5], &t[6]);
}

// Work in turns of nothing, between which other work uses the context, gives the same bits, also
// when some of the turns are long; one that is dropped ends at once.
TEST errands_give_the_same_bits(int32_t threads) {
    qlora_ctx_desc desc;
    qlora_ctx* ctx = NULL;
    qlora__errand* e = NULL;
    test_random random = test_random_start("errands");
    float* all = (float*)malloc((ERRAND_IN * 2 + ERRAND_OUT * 3) * sizeof *all);
    ASSERT(all != NULL);
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = threads;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    errand_work plain = {ctx, all, all + 2 * ERRAND_IN};
    errand_work other = {ctx, all + ERRAND_IN, all + 2 * ERRAND_IN + ERRAND_OUT};
    errand_work sliced = {ctx, all, all + 2 * ERRAND_IN + 2 * ERRAND_OUT};
    test_random_fill(&random, all, ERRAND_IN * 2, 1.0f);
    memset(plain.out, 0, ERRAND_OUT * 3 * sizeof *all);
    ASSERT_EQ(QLORA_OK, errand_all(&plain));
    for (int way = 0; way < 3; way++) { // turns of nothing; long ones in between; dropped
        int turns = 0;
        ASSERT_EQ(QLORA_OK, qlora__errand_take(ctx, errand_all, &sliced, &e));
        ASSERT(e != NULL);
        while (e->under_way) {
            e->dropped = way == 2 && turns == 2;
            qlora__errand_slice(ctx, e, qlora__clock_ms() + (way == 1 && turns % 3 == 2 ? 60 : 0));
            ASSERT(ctx->depth == 0 && ctx->scratch_used == 0 && ctx->errand == NULL);
            ASSERT_EQ(QLORA_OK, errand_product(&other));
            turns++;
        }
        ASSERT_EQ(QLORA_OK, e->result);
        // a fast processor needs fewer turns: a range takes about 0.1 ms on any
        ASSERT(way == 2 ? turns == 3 : turns >= (way == 0 ? 6 : 3));
        ASSERT(e->longest > 0.0);
        e->taken = false;
        if (way < 2) {
            ASSERT_MEM_EQ(plain.out, sliced.out, ERRAND_OUT * sizeof *all);
        }
        memset(sliced.out, 0, ERRAND_OUT * sizeof *all);
    }
    ASSERT(ctx->errands == e && e->next == NULL); // one for all of them
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    free(all);
    PASS();
}

// ---- how threads compute

// Computes as a program may that has set its own ways: rounds up, takes tiny numbers for zero.
static void floating_odd(void) {
    (void)fesetround(FE_UPWARD);
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u);
#elif defined(__GNUC__) && defined(__aarch64__)
    uint64_t word;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(word));
    __asm__ __volatile__("msr fpcr, %0" ::"r"(word | 1u << 24));
#endif
}

// What floating_odd() changes, kept and set again. fesetenv() of some Windows libraries leaves the
// control word of the vector instructions as it is.
typedef struct floating_way {
    fenv_t all;
    unsigned int vectors;
} floating_way;

static bool floating_keep(floating_way* way) {
    way->vectors = 0;
#if defined(__GNUC__) && defined(__x86_64__)
    way->vectors = __builtin_ia32_stmxcsr();
#endif
    return fegetenv(&way->all) == 0;
}

static void floating_set(const floating_way* way) {
    (void)fesetenv(&way->all);
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_ia32_ldmxcsr(way->vectors);
#endif
}

// Whether the calling thread does: 1 if it rounds up, and 2 if tiny numbers are zero.
static int floating_look(void) {
    volatile float one = 1.0f;
    volatile float small = 1e-40f;
    return (one + 1e-10f > one ? 1 : 0) + (small * 0.5f > 0.0f ? 0 : 2);
}

static void floating_range(void* user, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        ((int*)user)[i] = floating_look();
    }
}

// A product and attention, whole or as an errand with turns of nothing.
static qlora_result floating_run(errand_work* w, bool sliced) {
    qlora__errand* e = NULL;
    if (!sliced) {
        return errand_all(w);
    }
    QLORA__TRY(qlora__errand_take(w->ctx, errand_all, w, &e));
    while (e->under_way) {
        qlora__errand_slice(w->ctx, e, qlora__clock_ms());
    }
    e->taken = false;
    return e->result;
}

// The bits of a call do not depend on how its thread computes, which is given back.
TEST calls_compute_alike(int32_t threads) {
    enum { LOOKS = 64 };
    floating_way usual;
    qlora_ctx_desc desc;
    qlora_ctx* ctx = NULL;
    int seen[LOOKS];
    int after[3];
    qlora_result r[3];
    test_random random = test_random_start("floating");
    float* all = (float*)malloc((ERRAND_IN + ERRAND_OUT * 3) * sizeof *all);
    ASSERT(all != NULL);
    test_random_fill(&random, all, ERRAND_IN, 1.0f);
    memset(all + ERRAND_IN, 0, ERRAND_OUT * 3 * sizeof *all);
    memset(seen, 0, sizeof seen);
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = threads;
    ASSERT(floating_keep(&usual));
    floating_odd();
    int odd = floating_look();
    qlora_result made = qlora_ctx_create(&desc, &ctx); // threads may begin as those who start them
    for (int way = 0; made == QLORA_OK && way < 3; way++) { // usual, odd, odd and in turns
        errand_work w = {ctx, all, all + ERRAND_IN + way * ERRAND_OUT};
        floating_set(&usual);
        if (way > 0) {
            floating_odd();
        }
        r[way] = floating_run(&w, way == 2);
        after[way] = floating_look();
    }
    if (made == QLORA_OK && qlora__enter(ctx, "calls_compute_alike") == QLORA_OK) {
        qlora__parallel(ctx, LOOKS, 1, floating_range, seen);
        made = qlora__leave(ctx, made);
    }
    floating_set(&usual);
    ASSERT_EQ(QLORA_OK, made);
    ASSERT(odd & 1);
    for (int way = 0; way < 3; way++) {
        ASSERT_EQ(QLORA_OK, r[way]);
        ASSERT_EQ_FMT(way > 0 ? odd : 0, after[way], "%d");
        ASSERT_MEM_EQ(all + ERRAND_IN, all + ERRAND_IN + way * ERRAND_OUT,
                      ERRAND_OUT * sizeof *all);
    }
    for (int i = 0; i < LOOKS; i++) {
        ASSERT_EQ_FMT(0, seen[i], "%d");
    }
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    free(all);
    PASS();
}

// A range or a piece during which another program had the core changes no expectation.
TEST one_long_piece_is_forgotten(void) {
    qlora__errand e;
    qlora__sliced s;
    memset(&e, 0, sizeof e);
    memset(&s, 0, sizeof s);
    ASSERT(!(qlora__slice_expected(&s, QLORA__PIECE_HEAD) > 0.0));
    for (int i = 0; i < 60; i++) {
        double took = i % 20 == 9 ? 250.0 : 1.0 + 0.01 * (double)(i % 3);
        qlora__slice_time(&s, QLORA__PIECE_HEAD, took);
        e.firsts[i % QLORA__FIRSTS] = i < 40 ? 1.0 : took;
        ASSERT(qlora__slice_expected(&s, QLORA__PIECE_HEAD) < 1.1);
        ASSERT(i < 2 || qlora__slice_expected(&s, QLORA__PIECE_HEAD) >= 1.0);
        ASSERT(qlora__errand_first(&e) < 1.1);
    }
    ASSERT_EQ_FMT(250.0, s.longest, "%g");
    PASS();
}

#ifndef _WIN32
// The cores in the mask of a process.
TEST cores_follow_the_mask(void) {
    static const struct {
        const char* status;
        int32_t cores;
    } cases[] = {{"Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n", 2},
                 {"Name:\tx\nCpus_allowed:\tff,0000000c\n", 10},
                 {"Name:\tCpus_allowed:\tff\nThreads:\t7\n", 0}};
    char root[] = "build/test-cores-XXXXXX";
    char path[256];
    ASSERT(mkdtemp(root) != NULL);
    snprintf(path, sizeof path, "mkdir -p %s/proc/self", root);
    ASSERT_EQ(0, system(path));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(path, sizeof path, "%s/proc/self/status", root);
        text_put(path, cases[i].status);
        ASSERT_EQ_FMT(cases[i].cores, qlora__os_cores(root), "%d");
    }
    snprintf(path, sizeof path, "rm -rf %s", root);
    ASSERT_EQ(0, system(path));
    PASS();
}
#endif

SUITE(system_suite) {
    RUN_TEST(temporary_files_are_new);
    RUN_TEST(threads_sleep_when_idle);
    RUN_TEST1(errands_give_the_same_bits, 1);
    RUN_TEST1(errands_give_the_same_bits, 3);
    RUN_TEST1(calls_compute_alike, 1);
    RUN_TEST1(calls_compute_alike, 3);
    RUN_TEST(one_long_piece_is_forgotten);
#ifdef _WIN32
    RUN_TEST(names_are_utf8);
#else
    RUN_TEST(cores_follow_the_mask);
    for (size_t i = 0; i < sizeof memory_cases / sizeof memory_cases[0]; i++) {
        RUN_TEST1(memory_that_is_left, &memory_cases[i]);
    }
#endif
}
