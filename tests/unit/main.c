// main.c - runs the suites of suites.h.
//
//   build/tests [greatest's options] [--backend cpu|fake|cuda] [--suites A,B,...] [--seed N]
//               [--probe-cuda]
//
// --probe-cuda runs no tests and exits with 0 if a real NVIDIA driver with a device is present. The
// last line is always `P passed, F failed, S skipped`; the exit status is 1 if a test failed, if
// none passed, or if one was skipped while QLORA_TEST_REQUIRE_CUDA=1.

#define GREATEST_LITE_IMPLEMENTATION
#include "test.h"
#include "suites.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <process.h>
#define getpid _getpid
#else
#include <dlfcn.h>
#include <unistd.h>
#endif

GREATEST_MAIN_DEFS();

#define X(name, words) SUITE_EXTERN(name);
TEST_SUITES(X)
#undef X

static const char* option_backend;
static const char* option_suites; // separated by commas; NULL: all
static uint64_t option_seed = 20240607u;
static bool option_list;
static bool quiet;

void test_quiet(bool on) {
    quiet = on;
}

const char* test_backend(void) {
    return option_backend;
}

// Queries the driver itself, not qlora.h: the answer must not depend on the code under test. The
// test double is recognised by a symbol that NVIDIA's library does not have.
static bool cuda_answers(void) {
#ifdef _WIN32
    return false;
#else
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library || dlsym(library, "fake_get_api")) {
        return false;
    }
    int (*init)(unsigned int);
    int (*count)(int*);
    void* init_address = dlsym(library, "cuInit");
    void* count_address = dlsym(library, "cuDeviceGetCount");
    if (!init_address || !count_address) {
        return false;
    }
    memcpy(&init, &init_address, sizeof(init));
    memcpy(&count, &count_address, sizeof(count));
    int devices = 0;
    return init(0) == 0 && count(&devices) == 0 && devices > 0;
#endif
}

// Without --backend, a missing GPU is simply not tested; with it, its tests report that it
// is missing.
bool test_wants(const char* backend) {
    static int there = -1;
    if (option_backend) {
        return strcmp(option_backend, backend) == 0;
    }
    if (there < 0) {
        there = cuda_answers() ? 1 : 0;
    }
    return strcmp(backend, "cuda") != 0 || there == 1;
}

bool test_brief(void) {
    return getenv("QLORA_TEST_BRIEF") != NULL;
}

const char* test_path(const char* name) {
    static char paths[32][64];
    char path[64];
    int at = 0;
    (void)snprintf(path, sizeof(path), "build/test-%ld-%s", (long)getpid(), name);
    while (at < 31 && paths[at][0] != '\0' && strcmp(paths[at], path) != 0) {
        at++;
    }
    memcpy(paths[at], path, sizeof(path));
    return paths[at];
}

// ---- random numbers ----

test_random test_random_start(const char* name) {
    uint64_t h = 14695981039346656037u ^ option_seed;
    for (; *name; name++) {
        h = (h ^ (unsigned char)*name) * 1099511628211u;
    }
    test_random random = {h ? h : 1};
    for (int i = 0; i < 8; i++) {
        test_random_u64(&random);
    }
    return random;
}

uint64_t test_random_u64(test_random* random) {
    uint64_t x = random->state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    random->state = x;
    return x * 2685821657736338717u;
}

uint64_t test_random_below(test_random* random, uint64_t limit) {
    return limit ? (test_random_u64(random) >> 11) % limit : 0;
}

double test_random_uniform(test_random* random) {
    return (double)(test_random_u64(random) >> 11) / 9007199254740992.0;
}

double test_random_normal(test_random* random) {
    double u = 1.0 - test_random_uniform(random); // not 0
    double v = test_random_uniform(random);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

void test_random_fill(test_random* random, float* out, size_t n, float scale) {
    for (size_t i = 0; i < n; i++) {
        out[i] = (float)test_random_normal(random) * scale;
    }
}

// ---- comparisons; NaN and infinity are found by their bits, so -ffast-math cannot hide them ----

typedef enum number_kind { NUMBER_FINITE, NUMBER_NAN, NUMBER_INF, NUMBER_MINUS_INF } number_kind;

static number_kind kind_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    if ((bits >> 52 & 0x7ff) != 0x7ff) {
        return NUMBER_FINITE;
    }
    if (bits << 12 != 0) {
        return NUMBER_NAN;
    }
    return bits >> 63 ? NUMBER_MINUS_INF : NUMBER_INF;
}

// One of the two arrays is given.
typedef struct numbers {
    const float* f;
    const double* d;
} numbers;

static double number_at(numbers a, size_t i) {
    return a.f ? (double)a.f[i] : a.d[i];
}

static bool is_close(double expected, double got, double atol, double rtol) {
    number_kind kind = kind_of(expected);
    if (kind != NUMBER_FINITE || kind_of(got) != NUMBER_FINITE) {
        return kind == kind_of(got);
    }
    return fabs(expected - got) <= atol + rtol * fabs(expected);
}

static bool close_all(numbers expected, numbers got, size_t n, double atol, double rtol) {
    size_t bad = 0;
    size_t first = 0;
    double max_abs = 0.0;
    double max_rel = 0.0;
    for (size_t i = 0; i < n; i++) {
        double e = number_at(expected, i);
        double g = number_at(got, i);
        if (!is_close(e, g, atol, rtol)) {
            first = bad == 0 ? i : first;
            bad++;
        }
        if (kind_of(e) == NUMBER_FINITE && kind_of(g) == NUMBER_FINITE) {
            double diff = fabs(e - g);
            max_abs = diff > max_abs ? diff : max_abs;
            double rel = e != 0.0 ? diff / fabs(e) : 0.0;
            max_rel = rel > max_rel ? rel : max_rel;
        }
    }
    if (n == 0 && !quiet) {
        printf("\nnothing was compared (n = 0)\n");
    }
    if (bad > 0 && !quiet) {
        printf("\n%lu of %lu differ; first at [%lu]: expected %.9g, got %.9g; "
               "largest error %.3g absolute (limit %.3g), %.3g relative (limit %.3g)\n",
               (unsigned long)bad, (unsigned long)n, (unsigned long)first,
               number_at(expected, first), number_at(got, first), max_abs, atol, max_rel, rtol);
    }
    return n > 0 && bad == 0;
}

static bool rel_l2(numbers expected, numbers got, size_t n, double limit) {
    double error = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        double e = number_at(expected, i);
        double g = number_at(got, i);
        if (kind_of(e) != NUMBER_FINITE || kind_of(g) != NUMBER_FINITE) {
            if (!quiet) {
                printf("\nnot finite at [%lu]: expected %.9g, got %.9g\n", (unsigned long)i, e, g);
            }
            return false;
        }
        error += (e - g) * (e - g);
        norm += e * e;
    }
    double rel = norm > 0.0 ? sqrt(error / norm) : sqrt(error);
    bool ok = n > 0 && rel <= limit;
    if (!ok && !quiet) {
        printf("\nrelative L2 error %.3g of %lu values, limit %.3g\n", rel, (unsigned long)n,
               limit);
    }
    return ok;
}

bool test_close(const float* expected, const float* got, size_t n, double atol, double rtol) {
    numbers e = {expected, NULL};
    numbers g = {got, NULL};
    return close_all(e, g, n, atol, rtol);
}

bool test_close_double(const double* expected, const double* got, size_t n, double atol,
                       double rtol) {
    numbers e = {NULL, expected};
    numbers g = {NULL, got};
    return close_all(e, g, n, atol, rtol);
}

bool test_rel_l2(const float* expected, const float* got, size_t n, double limit) {
    numbers e = {expected, NULL};
    numbers g = {got, NULL};
    return rel_l2(e, g, n, limit);
}

bool test_rel_l2_double(const double* expected, const double* got, size_t n, double limit) {
    numbers e = {NULL, expected};
    numbers g = {NULL, got};
    return rel_l2(e, g, n, limit);
}

// ---- main ----

static bool suite_chosen(const char* name) {
    size_t length = strlen(name);
    for (const char* at = option_suites; at;) {
        const char* comma = strchr(at, ',');
        if ((comma ? (size_t)(comma - at) : strlen(at)) == length &&
            memcmp(at, name, length) == 0) {
            return true;
        }
        at = comma ? comma + 1 : NULL;
    }
    return !option_suites;
}

// Removes our options from argv and leaves those of greatest. Returns the new argc, or 0 on a
// bad option.
static int options_take(int argc, char** argv, bool* probe) {
    int kept = 1;
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--probe-cuda") == 0) {
            *probe = true;
        } else if (strcmp(argv[i], "--backend") == 0 && has_value) {
            option_backend = argv[++i];
            if (strcmp(option_backend, "cpu") != 0 && strcmp(option_backend, "fake") != 0 &&
                strcmp(option_backend, "cuda") != 0) {
                return 0;
            }
        } else if (strcmp(argv[i], "--suites") == 0 && has_value) {
            option_suites = argv[++i];
        } else if (strcmp(argv[i], "--seed") == 0 && has_value) {
            option_seed = strtoull(argv[++i], NULL, 0);
        } else {
            option_list = option_list || strcmp(argv[i], "-l") == 0;
            argv[kept++] = argv[i];
        }
    }
    return kept;
}

int main(int argc, char** argv) {
    bool probe = false;
    argc = options_take(argc, argv, &probe);
    if (argc == 0) {
        fprintf(stderr, "--backend must be cpu, fake or cuda\n");
        return 2;
    }
    if (probe) {
        return cuda_answers() ? 0 : 1;
    }
    GREATEST_MAIN_BEGIN();
    printf("seed %llu (repeat with --seed)\n", (unsigned long long)option_seed);
#define X(name, words)                                                                             \
    if (suite_chosen(#name)) {                                                                     \
        RUN_SUITE(name);                                                                           \
    }
    TEST_SUITES(X)
#undef X
    if (option_list) {
        return 0;
    }
#ifdef QLORA_TEST_SYSTEM_GREATEST
    GREATEST_PRINT_REPORT(); // only this adds the last suite to the counts
#endif
    struct greatest_report_t report;
    greatest_get_report(&report);
    const char* need_cuda = getenv("QLORA_TEST_REQUIRE_CUDA");
    bool skips_fail = need_cuda && strcmp(need_cuda, "1") == 0;
    printf("\nbackend %s, %u assertions\n", option_backend ? option_backend : "all available",
           report.assertions);
    printf("%u passed, %u failed, %u skipped\n", report.passed, report.failed, report.skipped);
    bool bad = report.failed > 0 || report.passed == 0 || (skips_fail && report.skipped > 0);
    return bad ? 1 : 0;
}
