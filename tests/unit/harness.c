// harness.c - the comparisons of test.h must be able to fail.

#include "test.h"

#include <math.h>
#include <string.h>

static float nan_float(void) {
    uint32_t bits = 0x7fc00000u;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static float inf_float(void) {
    uint32_t bits = 0x7f800000u;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

TEST close_accepts_what_is_close(void) {
    float a[3] = {1.0f, -2.0f, 0.0f};
    float b[3] = {1.001f, -2.001f, 0.0005f};
    ASSERT_CLOSE(a, a, 3, 0.0, 0.0);
    ASSERT_CLOSE(a, b, 3, 1e-3, 1e-3);
    float special[2] = {inf_float(), nan_float()};
    ASSERT_CLOSE(special, special, 2, 0.0, 0.0);
    PASS();
}

TEST close_refuses(float expected, float got, double atol, double rtol) {
    double e = (double)expected;
    double g = (double)got;
    ASSERT_FALSE(test_close(&expected, &got, 1, atol, rtol));
    ASSERT_FALSE(test_close_double(&e, &g, 1, atol, rtol));
    PASS();
}

TEST close_refuses_nothing(void) {
    float a = 1.0f;
    ASSERT_FALSE(test_close(&a, &a, 0, 1.0, 1.0));
    ASSERT_FALSE(test_rel_l2(&a, &a, 0, 1.0));
    PASS();
}

TEST rel_l2_measures(void) {
    float a[2] = {3.0f, 4.0f};
    float b[2] = {3.0f, 4.5f};
    float c[2] = {3.0f, nan_float()};
    double ad[2] = {3.0, 4.0};
    double bd[2] = {3.0, 4.5};
    ASSERT_REL_L2(a, b, 2, 0.1001);
    ASSERT_REL_L2_DOUBLE(ad, bd, 2, 0.1001);
    ASSERT_FALSE(test_rel_l2(a, b, 2, 0.0999));
    ASSERT_FALSE(test_rel_l2(a, c, 2, 1e9));
    ASSERT_FALSE(test_rel_l2(c, c, 2, 1e9));
    PASS();
}

TEST random_repeats(void) {
    test_random a = test_random_start("one");
    test_random b = test_random_start("one");
    test_random c = test_random_start("two");
    ASSERT_EQ(test_random_u64(&a), test_random_u64(&b));
    ASSERT_NEQ(test_random_u64(&a), test_random_u64(&c));
    double sum = 0.0;
    double squares = 0.0;
    for (int i = 0; i < 20000; i++) {
        double x = test_random_normal(&a);
        sum += x;
        squares += x * x;
        ASSERT_LT(test_random_below(&b, 7), 7u);
    }
    ASSERT(fabs(sum / 20000) < 0.03);
    ASSERT(fabs(squares / 20000 - 1.0) < 0.05);
    PASS();
}

SUITE(harness_suite) {
    test_quiet(true);
    RUN_TEST(close_accepts_what_is_close);
    RUN_TESTp(close_refuses, 1.0f, 1.1f, 0.05, 0.0);
    RUN_TESTp(close_refuses, 1.0f, 1.1f, 0.0, 0.05);
    RUN_TESTp(close_refuses, 1.0f, nan_float(), 1e30, 1e30);
    RUN_TESTp(close_refuses, nan_float(), 1.0f, 1e30, 1e30);
    RUN_TESTp(close_refuses, 1.0f, inf_float(), 1e30, 1e30);
    RUN_TESTp(close_refuses, inf_float(), -inf_float(), 1e30, 1e30);
    RUN_TEST(close_refuses_nothing);
    RUN_TEST(rel_l2_measures);
    RUN_TEST(random_repeats);
    test_quiet(false);
}
