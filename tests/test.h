// test.h - the test macros and our comparisons; every test file includes it after qlora.h.
#ifndef QLORA_TEST_H
#define QLORA_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Uses the system's greatest.h if the compiler finds one; -DQLORA_TEST_LITE always selects ours.
#if defined(__has_include) && !defined(QLORA_TEST_LITE)
#if __has_include(<greatest.h>)
#include <greatest.h>
#define QLORA_TEST_SYSTEM_GREATEST
#endif
#endif
#ifndef QLORA_TEST_SYSTEM_GREATEST
#include "greatest_lite.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// From the command line: "cpu", "fake" or "cuda", or NULL for every available backend.
const char* test_backend(void);
// Returns true if tests on that backend were requested.
bool test_wants(const char* backend);

// Returns true if QLORA_TEST_BRIEF is set: a sanitizer or an emulator slows the run down. Tests
// that run the same code again and again, for a statement about numbers, then do less of it.
bool test_brief(void);

// The name of a scratch file or folder under build/, one per process: gates that run at the same
// time do not share it. The same name gives the same pointer.
const char* test_path(const char* name);

// xorshift64*; a stream depends on --seed (printed at the start of a run) and on its name.
typedef struct test_random {
    uint64_t state;
} test_random;

test_random test_random_start(const char* name);
uint64_t test_random_u64(test_random* random);
uint64_t test_random_below(test_random* random, uint64_t limit); // 0 .. limit - 1
double test_random_uniform(test_random* random);                 // 0 <= x < 1
double test_random_normal(test_random* random);
void test_random_fill(test_random* random, float* out, size_t n, float scale); // normal * scale

// Passes if |expected - got| <= atol + rtol * |expected| for every element. NaN matches only NaN,
// and an infinity only itself, whatever the tolerances. Comparing zero elements fails. On failure,
// prints the first bad index and the largest absolute and relative error.
bool test_close(const float* expected, const float* got, size_t n, double atol, double rtol);
bool test_close_double(const double* expected, const double* got, size_t n, double atol,
                       double rtol);
// Compares |expected - got| / |expected| in the 2-norm; fails on any value that is not finite.
bool test_rel_l2(const float* expected, const float* got, size_t n, double limit);
bool test_rel_l2_double(const double* expected, const double* got, size_t n, double limit);

// Silences the comparisons, for tests that expect one to fail.
void test_quiet(bool on);

#define ASSERT_CLOSE(EXP, GOT, N, ATOL, RTOL)                                                      \
    ASSERTm("not close: " #EXP " and " #GOT, test_close((EXP), (GOT), (N), (ATOL), (RTOL)))
#define ASSERT_CLOSE_DOUBLE(EXP, GOT, N, ATOL, RTOL)                                               \
    ASSERTm("not close: " #EXP " and " #GOT, test_close_double((EXP), (GOT), (N), (ATOL), (RTOL)))
#define ASSERT_REL_L2(EXP, GOT, N, LIMIT)                                                          \
    ASSERTm("too far apart: " #EXP " and " #GOT, test_rel_l2((EXP), (GOT), (N), (LIMIT)))
#define ASSERT_REL_L2_DOUBLE(EXP, GOT, N, LIMIT)                                                   \
    ASSERTm("too far apart: " #EXP " and " #GOT, test_rel_l2_double((EXP), (GOT), (N), (LIMIT)))

#ifdef __cplusplus
}
#endif

#endif
