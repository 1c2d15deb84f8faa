// greatest_lite.h - our own implementation of the part of greatest's interface that our tests use.
//
// test.h includes the system's greatest.h if the compiler finds one, and this file otherwise; tests
// must compile with both. Define GREATEST_LITE_IMPLEMENTATION in the file that contains main.
// Differences: no shuffling, no timing, and ASSERT_IN_RANGE fails if a value is NaN.
#ifndef GREATEST_H
#define GREATEST_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum greatest_test_res {
    GREATEST_TEST_RES_PASS = 0,
    GREATEST_TEST_RES_FAIL = -1,
    GREATEST_TEST_RES_SKIP = 1
} greatest_test_res;

struct greatest_report_t {
    unsigned int passed;
    unsigned int failed;
    unsigned int skipped;
    unsigned int assertions;
};

typedef void greatest_suite_cb(void);
typedef void greatest_setup_cb(void* udata);
typedef void greatest_teardown_cb(void* udata);

// Called by the macros below, not by tests.
bool greatest_lite_begin(const char* test);
void greatest_lite_end(greatest_test_res res);
void greatest_lite_suite(greatest_suite_cb* suite, const char* name);
void greatest_lite_count(void);
greatest_test_res greatest_lite_note(greatest_test_res res, const char* text, const char* file,
                                     int line);
bool greatest_lite_same_bytes(const void* expected, const void* got, size_t size);
bool greatest_lite_same_text(const char* expected, const char* got, size_t size);
void greatest_lite_hooks(greatest_setup_cb* setup, void* setup_user, greatest_teardown_cb* teardown,
                         void* teardown_user, bool set_setup, bool set_teardown);
void greatest_lite_print_report(void);
int greatest_all_passed(void);

// The public functions of the interface.
void greatest_init(void);
void greatest_parse_options(int argc, char** argv);
void greatest_get_report(struct greatest_report_t* report);
void greatest_set_test_suffix(const char* suffix);
void greatest_set_suite_filter(const char* filter);
void greatest_set_test_filter(const char* filter);
void greatest_set_test_exclude(const char* filter);
void greatest_set_exact_name_match(void);
void greatest_stop_at_first_fail(void);
void greatest_list_only(void);
unsigned int greatest_get_verbosity(void);
void greatest_set_verbosity(unsigned int verbosity);

#define GREATEST_STDOUT stdout
#define GREATEST_FPRINTF fprintf

// A test runs once: compiled for size, which takes less time than for speed.
#if defined(__GNUC__)
#define GREATEST_LITE_COLD __attribute__((cold))
#else
#define GREATEST_LITE_COLD
#endif
#define TEST static GREATEST_LITE_COLD greatest_test_res
#define SUITE(NAME)                                                                                \
    void NAME(void);                                                                               \
    void NAME(void)
#define SUITE_EXTERN(NAME) void NAME(void)
#define RUN_SUITE(NAME) greatest_lite_suite(NAME, #NAME)

#define RUN_TEST(NAME)                                                                             \
    do {                                                                                           \
        if (greatest_lite_begin(#NAME)) {                                                          \
            greatest_lite_end(NAME());                                                             \
        }                                                                                          \
    } while (0)
#define RUN_TESTp(NAME, ...)                                                                       \
    do {                                                                                           \
        if (greatest_lite_begin(#NAME)) {                                                          \
            greatest_lite_end(NAME(__VA_ARGS__));                                                  \
        }                                                                                          \
    } while (0)
#define RUN_TEST1(NAME, ENV) RUN_TESTp(NAME, ENV)

#define SET_SETUP(CB, UDATA) greatest_lite_hooks((CB), (UDATA), NULL, NULL, true, false)
#define SET_TEARDOWN(CB, UDATA) greatest_lite_hooks(NULL, NULL, (CB), (UDATA), false, true)

// The ways to end a test.
#define PASSm(MSG)                                                                                 \
    do {                                                                                           \
        return greatest_lite_note(GREATEST_TEST_RES_PASS, (MSG), __FILE__, __LINE__);              \
    } while (0)
#define FAILm(MSG)                                                                                 \
    do {                                                                                           \
        return greatest_lite_note(GREATEST_TEST_RES_FAIL, (MSG), __FILE__, __LINE__);              \
    } while (0)
#define SKIPm(MSG)                                                                                 \
    do {                                                                                           \
        return greatest_lite_note(GREATEST_TEST_RES_SKIP, (MSG), __FILE__, __LINE__);              \
    } while (0)
#define PASS() PASSm(NULL)
#define FAIL() FAILm(NULL)
#define SKIP() SKIPm(NULL)

#define CHECK_CALL(RES)                                                                            \
    do {                                                                                           \
        greatest_test_res check_call_res = (RES);                                                  \
        if (check_call_res != GREATEST_TEST_RES_PASS) {                                            \
            return check_call_res;                                                                 \
        }                                                                                          \
    } while (0)

#define ASSERTm(MSG, COND)                                                                         \
    do {                                                                                           \
        greatest_lite_count();                                                                     \
        if (!(COND)) {                                                                             \
            FAILm(MSG);                                                                            \
        }                                                                                          \
    } while (0)
#define ASSERT(COND) ASSERTm(#COND, COND)
#define ASSERT_FALSEm(MSG, COND) ASSERTm(MSG, !(COND))
#define ASSERT_FALSE(COND) ASSERTm("not false: " #COND, !(COND))
#define ASSERT_EQm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) == (GOT))
#define ASSERT_NEQm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) != (GOT))
#define ASSERT_GTm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) > (GOT))
#define ASSERT_GTEm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) >= (GOT))
#define ASSERT_LTm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) < (GOT))
#define ASSERT_LTEm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) <= (GOT))
#define ASSERT_EQ(EXP, GOT) ASSERT_EQm(#EXP " != " #GOT, EXP, GOT)
#define ASSERT_NEQ(EXP, GOT) ASSERT_NEQm(#EXP " == " #GOT, EXP, GOT)
#define ASSERT_GT(EXP, GOT) ASSERT_GTm(#EXP " <= " #GOT, EXP, GOT)
#define ASSERT_GTE(EXP, GOT) ASSERT_GTEm(#EXP " < " #GOT, EXP, GOT)
#define ASSERT_LT(EXP, GOT) ASSERT_LTm(#EXP " >= " #GOT, EXP, GOT)
#define ASSERT_LTE(EXP, GOT) ASSERT_LTEm(#EXP " > " #GOT, EXP, GOT)

// Like ASSERT_EQ, but prints both values with FMT if they differ.
#define ASSERT_EQ_FMTm(MSG, EXP, GOT, FMT)                                                         \
    do {                                                                                           \
        greatest_lite_count();                                                                     \
        if ((EXP) != (GOT)) {                                                                      \
            fprintf(GREATEST_STDOUT, "\nExpected: " FMT "\n     Got: " FMT "\n", EXP, GOT);        \
            FAILm(MSG);                                                                            \
        }                                                                                          \
    } while (0)
#define ASSERT_EQ_FMT(EXP, GOT, FMT) ASSERT_EQ_FMTm(#EXP " != " #GOT, EXP, GOT, FMT)

#define ASSERT_IN_RANGEm(MSG, EXP, GOT, TOL)                                                       \
    ASSERTm(MSG, (EXP) - (GOT) <= (TOL) && (GOT) - (EXP) <= (TOL))
#define ASSERT_IN_RANGE(EXP, GOT, TOL)                                                             \
    ASSERT_IN_RANGEm(#GOT " not within " #TOL " of " #EXP, EXP, GOT, TOL)

#define ASSERT_STR_EQm(MSG, EXP, GOT) ASSERTm(MSG, greatest_lite_same_text(EXP, GOT, (size_t)-1))
#define ASSERT_STR_EQ(EXP, GOT) ASSERT_STR_EQm(#EXP " != " #GOT, EXP, GOT)
#define ASSERT_STRN_EQm(MSG, EXP, GOT, N) ASSERTm(MSG, greatest_lite_same_text(EXP, GOT, N))
#define ASSERT_STRN_EQ(EXP, GOT, N) ASSERT_STRN_EQm(#EXP " != " #GOT, EXP, GOT, N)
#define ASSERT_MEM_EQm(MSG, EXP, GOT, SIZE) ASSERTm(MSG, greatest_lite_same_bytes(EXP, GOT, SIZE))
#define ASSERT_MEM_EQ(EXP, GOT, SIZE) ASSERT_MEM_EQm(#EXP " != " #GOT, EXP, GOT, SIZE)

#define GREATEST_MAIN_DEFS() struct greatest_lite_state greatest_lite
#define GREATEST_INIT() greatest_init()
#define GREATEST_MAIN_BEGIN()                                                                      \
    do {                                                                                           \
        greatest_init();                                                                           \
        greatest_parse_options(argc, argv);                                                        \
    } while (0)
#define GREATEST_PRINT_REPORT() greatest_lite_print_report()
#define GREATEST_MAIN_END()                                                                        \
    do {                                                                                           \
        greatest_lite_print_report();                                                              \
        return greatest_all_passed() ? EXIT_SUCCESS : EXIT_FAILURE;                                \
    } while (0)

#define GREATEST_TEST TEST
#define GREATEST_SUITE SUITE
#define GREATEST_SUITE_EXTERN SUITE_EXTERN
#define GREATEST_RUN_TEST RUN_TEST
#define GREATEST_RUN_TESTp RUN_TESTp
#define GREATEST_RUN_SUITE RUN_SUITE
#define GREATEST_ASSERT ASSERT
#define GREATEST_ASSERTm ASSERTm
#define GREATEST_FAILm FAILm
#define GREATEST_CHECK_CALL CHECK_CALL

struct greatest_lite_state {
    struct greatest_report_t report;
    unsigned int suite_tests;
    unsigned int verbosity;
    bool list_only;
    bool stop_at_failure;
    bool abort_at_failure;
    bool exact;
    const char* suite_filter;
    const char* test_filter;
    const char* test_exclude;
    const char* note;
    const char* note_file;
    int note_line;
    char suffix[64];
    char test[160]; // with its suffix
    greatest_setup_cb* setup;
    void* setup_user;
    greatest_teardown_cb* teardown;
    void* teardown_user;
};
extern struct greatest_lite_state greatest_lite;

#ifdef GREATEST_LITE_IMPLEMENTATION
#include <time.h>

static clock_t greatest_lite_began; // the test that runs

void greatest_init(void) {
    memset(&greatest_lite, 0, sizeof(greatest_lite));
}

static void greatest_lite_usage(const char* program) {
    printf("usage: %s [-hlfaev] [-s SUITE] [-t TEST] [-x EXCLUDE]\n"
           "  -h  show this help     -l  list, do not run    -f  stop after the first failure\n"
           "  -a  abort at a failure -e  match names exactly -v  print a line per test\n"
           "      with its processor time\n",
           program);
}

void greatest_parse_options(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const char* a = argv[i];
        const char** value = NULL;
        if (strcmp(a, "-s") == 0) {
            value = &greatest_lite.suite_filter;
        } else if (strcmp(a, "-t") == 0) {
            value = &greatest_lite.test_filter;
        } else if (strcmp(a, "-x") == 0) {
            value = &greatest_lite.test_exclude;
        } else if (strcmp(a, "-v") == 0) {
            greatest_lite.verbosity++;
        } else if (strcmp(a, "-l") == 0) {
            greatest_lite.list_only = true;
        } else if (strcmp(a, "-f") == 0) {
            greatest_lite.stop_at_failure = true;
        } else if (strcmp(a, "-a") == 0) {
            greatest_lite.abort_at_failure = true;
        } else if (strcmp(a, "-e") == 0) {
            greatest_lite.exact = true;
        } else if (strcmp(a, "--") == 0) {
            return;
        } else {
            greatest_lite_usage(argv[0]);
            exit(strcmp(a, "-h") == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
        }
        if (value) {
            if (++i == argc) {
                greatest_lite_usage(argv[0]);
                exit(EXIT_FAILURE);
            }
            *value = argv[i];
        }
    }
}

static bool greatest_lite_match(const char* name, const char* filter) {
    return greatest_lite.exact ? strcmp(name, filter) == 0 : strstr(name, filter) != NULL;
}

static bool greatest_lite_stopped(void) {
    return greatest_lite.stop_at_failure && greatest_lite.report.failed > 0;
}

bool greatest_lite_begin(const char* test) {
    snprintf(greatest_lite.test, sizeof(greatest_lite.test), "%s%s%s", test,
             greatest_lite.suffix[0] ? "_" : "", greatest_lite.suffix);
    greatest_lite.suffix[0] = 0; // it applies to one test only
    const char* filter = greatest_lite.test_filter;
    const char* exclude = greatest_lite.test_exclude;
    if (greatest_lite_stopped() || (filter && !greatest_lite_match(greatest_lite.test, filter)) ||
        (exclude && greatest_lite_match(greatest_lite.test, exclude))) {
        return false;
    }
    if (greatest_lite.list_only) {
        printf("  %s\n", greatest_lite.test);
        return false;
    }
    greatest_lite.note = NULL;
    greatest_lite.suite_tests++;
    greatest_lite_began = clock();
    if (greatest_lite.setup) {
        greatest_lite.setup(greatest_lite.setup_user);
    }
    return true;
}

void greatest_lite_end(greatest_test_res res) {
    if (greatest_lite.teardown) {
        greatest_lite.teardown(greatest_lite.teardown_user);
    }
    const char* note = greatest_lite.note ? greatest_lite.note : "";
    if (res == GREATEST_TEST_RES_FAIL) {
        greatest_lite.report.failed++;
        printf("\nFAIL %s: %s (%s:%d)\n", greatest_lite.test, note, greatest_lite.note_file,
               greatest_lite.note_line);
    } else if (res == GREATEST_TEST_RES_SKIP) {
        greatest_lite.report.skipped++;
        printf("%sSKIP %s: %s\n", greatest_lite.verbosity ? "" : "\n", greatest_lite.test, note);
    } else {
        greatest_lite.report.passed++;
        if (greatest_lite.verbosity) {
            double seconds = (double)(clock() - greatest_lite_began) / CLOCKS_PER_SEC;
            printf("PASS %s%s%s (%.2f s)\n", greatest_lite.test, note[0] ? ": " : "", note,
                   seconds);
        } else {
            printf(".");
        }
    }
    fflush(stdout);
    if (res == GREATEST_TEST_RES_FAIL && greatest_lite.abort_at_failure) {
        abort();
    }
}

void greatest_lite_suite(greatest_suite_cb* suite, const char* name) {
    const char* filter = greatest_lite.suite_filter;
    if (greatest_lite_stopped() || (filter && !greatest_lite_match(name, filter))) {
        return;
    }
    printf("\n* Suite %s:\n", name);
    fflush(stdout);
    greatest_lite.suite_tests = 0;
    greatest_lite.setup = NULL;
    greatest_lite.teardown = NULL;
    suite();
    if (!greatest_lite.list_only) {
        printf("%s%u tests\n", greatest_lite.verbosity ? "" : "\n", greatest_lite.suite_tests);
    }
}

void greatest_lite_count(void) {
    greatest_lite.report.assertions++;
}

greatest_test_res greatest_lite_note(greatest_test_res res, const char* text, const char* file,
                                     int line) {
    greatest_lite.note = text;
    greatest_lite.note_file = file;
    greatest_lite.note_line = line;
    return res;
}

bool greatest_lite_same_bytes(const void* expected, const void* got, size_t size) {
    const unsigned char* e = (const unsigned char*)expected;
    const unsigned char* g = (const unsigned char*)got;
    for (size_t i = 0; i < size; i++) {
        if (e[i] != g[i]) {
            printf("\nByte %lu of %lu: expected %02x, got %02x\n", (unsigned long)i,
                   (unsigned long)size, e[i], g[i]);
            return false;
        }
    }
    return true;
}

bool greatest_lite_same_text(const char* expected, const char* got, size_t size) {
    if (expected && got && strncmp(expected, got, size) == 0) {
        return true;
    }
    printf("\nExpected: \"%s\"\n     Got: \"%s\"\n", expected ? expected : "(null)",
           got ? got : "(null)");
    return false;
}

void greatest_lite_hooks(greatest_setup_cb* setup, void* setup_user, greatest_teardown_cb* teardown,
                         void* teardown_user, bool set_setup, bool set_teardown) {
    if (set_setup) {
        greatest_lite.setup = setup;
        greatest_lite.setup_user = setup_user;
    }
    if (set_teardown) {
        greatest_lite.teardown = teardown;
        greatest_lite.teardown_user = teardown_user;
    }
}

void greatest_lite_print_report(void) {
    if (!greatest_lite.list_only) {
        const struct greatest_report_t* r = &greatest_lite.report;
        printf("\nTotal: %u tests, %u assertions\nPass: %u, fail: %u, skip: %u.\n",
               r->passed + r->failed + r->skipped, r->assertions, r->passed, r->failed, r->skipped);
    }
}

int greatest_all_passed(void) {
    return greatest_lite.report.failed == 0;
}

void greatest_get_report(struct greatest_report_t* report) {
    *report = greatest_lite.report;
}

void greatest_set_test_suffix(const char* suffix) {
    snprintf(greatest_lite.suffix, sizeof(greatest_lite.suffix), "%s", suffix);
}

void greatest_set_suite_filter(const char* filter) {
    greatest_lite.suite_filter = filter;
}

void greatest_set_test_filter(const char* filter) {
    greatest_lite.test_filter = filter;
}

void greatest_set_test_exclude(const char* filter) {
    greatest_lite.test_exclude = filter;
}

void greatest_set_exact_name_match(void) {
    greatest_lite.exact = true;
}

void greatest_stop_at_first_fail(void) {
    greatest_lite.stop_at_failure = true;
}

void greatest_list_only(void) {
    greatest_lite.list_only = true;
}

unsigned int greatest_get_verbosity(void) {
    return greatest_lite.verbosity;
}

void greatest_set_verbosity(unsigned int verbosity) {
    greatest_lite.verbosity = verbosity;
}

#endif // GREATEST_LITE_IMPLEMENTATION
#endif // GREATEST_H
