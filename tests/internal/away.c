// away.c - pinned host memory: large memory is registered, and the driver's where that fails.
#include "machines.h"

#include <string.h>

enum { AWAY_COUNT = 1000 };

static qlora_result away_copy(qlora_ctx* ctx, bool back, const qlora_tensor* t, void* host) {
    QLORA__ENTER(ctx, "away_copy");
    QLORA__TRY(qlora__away_open(ctx));
    QLORA__TRY(qlora__away_copy(ctx, 0, back, t, host));
    return qlora__leave(ctx, qlora__away_wait(ctx, 1));
}

// Copies numbers from the device to the end of the memory and back.
static bool away_copies(qlora_ctx* ctx, char* end) {
    float values[AWAY_COUNT];
    float got[AWAY_COUNT];
    qlora_tensor there;
    qlora_tensor back;
    for (int i = 0; i < AWAY_COUNT; i++) {
        values[i] = (float)i;
    }
    memset(got, 0, sizeof got);
    char* host = end - sizeof values;
    bool ok = qlora_tensor_create(ctx, QLORA_F32, 1, AWAY_COUNT, &there) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, AWAY_COUNT, &back) == QLORA_OK &&
              qlora_tensor_write(ctx, &there, values, sizeof values) == QLORA_OK;
    ok = ok && away_copy(ctx, false, &there, host) == QLORA_OK &&
         away_copy(ctx, true, &back, host) == QLORA_OK;
    ok = ok && qlora_tensor_read(ctx, &back, got, sizeof got) == QLORA_OK &&
         memcmp(values, got, sizeof got) == 0;
    return qlora_tensor_destroy(ctx, &there) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &back) == QLORA_OK && ok;
}

static qlora_result away_alloc(qlora_ctx* ctx, size_t bytes, qlora__away_memory* out) {
    QLORA__ENTER(ctx, "away_alloc");
    return qlora__leave(ctx, qlora__away_alloc(ctx, bytes, out));
}

static qlora_result away_free(qlora_ctx* ctx, qlora__away_memory* memory) {
    QLORA__ENTER(ctx, "away_free");
    qlora__away_free(ctx, memory);
    return qlora__leave(ctx, QLORA_OK);
}

TEST large_memory_is_registered(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    static const struct {
        size_t bytes;
        const char* fails[2]; // calls that fail
        bool own;
        qlora_result result;
    } cases[] = {{QLORA__AWAY_LARGE, {NULL, NULL}, true, QLORA_OK},
                 {QLORA__AWAY_LARGE + 100, {NULL, NULL}, true, QLORA_OK},
                 {QLORA__AWAY_LARGE - 1, {NULL, NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE, {"cuMemHostRegister_v2", NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE, {"cuDeviceGetAttribute", NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE,
                  {"cuMemHostRegister_v2", "cuMemHostAlloc"},
                  false,
                  QLORA_ERR_MEMORY}};
    const fake_api* fake = strcmp(machine->backend, "fake") == 0 ? test_fake() : NULL;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < (fake != NULL ? sizeof cases / sizeof cases[0] : 3); i++) {
        qlora__away_memory memory;
        uint64_t pinned = fake != NULL ? fake->stats().live_pinned : 0;
        for (int k = 0; k < 2 && cases[i].fails[k] != NULL; k++) {
            fake->fail_at(cases[i].fails[k], 1, 2, false);
        }
        ASSERT_EQ(cases[i].result, away_alloc(ctx, cases[i].bytes, &memory));
        if (fake != NULL) {
            fake->fail_clear();
        }
        if (cases[i].result != QLORA_OK) {
            ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), "were refused") != NULL);
            ASSERT(memory.data == NULL && memory.own == NULL);
            continue;
        }
        ASSERT_EQ(cases[i].own, memory.own != NULL);
        ASSERT(fake == NULL || fake->stats().live_pinned - pinned == cases[i].bytes);
        ASSERT(away_copies(ctx, (char*)memory.data + cases[i].bytes));
        ASSERT_EQ(QLORA_OK, away_free(ctx, &memory));
        ASSERT(fake == NULL || fake->stats().live_pinned == pinned);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(away_suite) {
    RUN_ON(TEST_ONE_EACH, large_memory_is_registered);
}
