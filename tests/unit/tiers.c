// tiers.c - the CPU tiers: which one a context uses, and that each computes what the portable one
// does.
#define _POSIX_C_SOURCE 200809L // setenv

#include "machines.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qlora_cpu_tier wanted;

static void with_tier(qlora_ctx_desc* desc) {
    desc->cpu_tier = wanted;
}

// Runs with the environment variable set to `value`; NULL = not set. The caller restores it.
static void set_variable(const char* value) {
    if (value != NULL) {
        setenv("QLORA_CPU_TIER", value, 1);
    } else {
        unsetenv("QLORA_CPU_TIER");
    }
}

static bool describes(qlora_ctx* ctx, const char* name) {
    char text[2048];
    char line[64];
    snprintf(line, sizeof line, "CPU tier: %s", name);
    qlora_describe(ctx, text, sizeof text);
    return strstr(text, line) != NULL;
}

TEST tiers_are_chosen_and_named(const test_machine* machine) {
    ASSERT(qlora_cpu_tier_usable(QLORA_CPU_TIER_BEST));
    ASSERT(qlora_cpu_tier_usable(QLORA_CPU_TIER_PORTABLE));
    ASSERT_FALSE(qlora_cpu_tier_usable(QLORA_CPU_TIER_COUNT));
    ASSERT_STR_EQ("unknown", qlora_cpu_tier_name(QLORA_CPU_TIER_COUNT));
    for (int i = 1; i < QLORA_CPU_TIER_COUNT; i++) {
        wanted = (qlora_cpu_tier)i;
        qlora_ctx* ctx = test_open(machine, with_tier);
        ASSERT_EQ(qlora_cpu_tier_usable(wanted), ctx != NULL);
        if (ctx == NULL) {
            ASSERT(strstr(test_open_reason(), "desc.cpu_tier is ") != NULL);
            ASSERT(strstr(test_open_reason(), qlora_cpu_tier_name(wanted)) != NULL);
            continue;
        }
        qlora_ctx_info info;
        ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
        ASSERT_EQ(wanted, info.desc->cpu_tier);
        ASSERT(describes(ctx, qlora_cpu_tier_name(wanted)));
        ASSERT(test_close_ctx(machine, ctx));
    }
    wanted = QLORA_CPU_TIER_COUNT;
    ASSERT_EQ(NULL, test_open(machine, with_tier));
    ASSERT(strstr(test_open_reason(), "desc.cpu_tier is 5") != NULL);
    PASS();
}

TEST tiers_come_from_the_environment(const test_machine* machine) {
    const char* before = getenv("QLORA_CPU_TIER");
    char kept[32];
    snprintf(kept, sizeof kept, "%s", before != NULL ? before : "");
    set_variable("sse9");
    qlora_ctx* unknown = test_open(machine, NULL);
    bool told = strstr(test_open_reason(), "QLORA_CPU_TIER is \"sse9\"") != NULL &&
                strstr(test_open_reason(), "portable") != NULL;
    set_variable("portable");
    qlora_ctx* portable = test_open(machine, NULL);
    set_variable("sse9"); // not read if the desc names a tier
    wanted = QLORA_CPU_TIER_PORTABLE;
    qlora_ctx* named = test_open(machine, with_tier);
    set_variable(qlora_cpu_tier_usable(QLORA_CPU_TIER_NEON) ? "avx2" : "neon");
    qlora_ctx* missing = test_open(machine, NULL);
    bool refused = strstr(test_open_reason(), "usable here: portable") != NULL;
    set_variable("best");
    qlora_ctx* best = test_open(machine, NULL);
    set_variable(kept[0] != '\0' ? kept : NULL);
    ASSERT(unknown == NULL && told);
    ASSERT(missing == NULL && refused);
    ASSERT(portable != NULL && describes(portable, "portable"));
    ASSERT(named != NULL && describes(named, "portable"));
    ASSERT(best != NULL);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(portable));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(named));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(best));
    PASS();
}

SUITE(tiers_suite) {
    RUN_ON(TEST_CPU, tiers_are_chosen_and_named);
    RUN_ON(TEST_CPU, tiers_come_from_the_environment);
}
