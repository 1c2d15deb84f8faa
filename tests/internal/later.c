// later.c - attention of queries that are not the first of their text: keys precede them, as when a
// prompt is run in pieces or a conversation goes on. It uses what rows.c defines.
#include "machines.h"

#include <stdio.h>
#include <string.h>

enum { LATER_TOKENS = 301, LATER_WIDEST = 512 };

static const attention_shape later_cases[] = {
    {4, 2, 64, 0, 0.0f, QLORA_BF16, {0}},   {4, 1, 128, 70, 0.0f, QLORA_BF16, {0}},
    {2, 2, 80, 0, 0.0f, QLORA_BF16, {0}},   {2, 1, 256, 0, 20.0f, QLORA_BF16, {0}},
    {3, 1, 12, 40, 0.0f, QLORA_BF16, {0}},  {2, 1, 64, 0, 0.0f, QLORA_F32, {0}},
    {4, 2, 20, 33, 5.0f, QLORA_F32, {0}},
};

// q, k, v of all tokens on the device, and the outputs there.
typedef struct later_rig {
    qlora_ctx* ctx;
    const attention_shape* c;
    qlora_tensor in[3];
    qlora_tensor o;
    qlora_tensor lse;
    qlora_tensor seqs;
    float got[LATER_TOKENS * LATER_WIDEST];
    float all[LATER_TOKENS * LATER_WIDEST];
} later_rig;

static bool later_open(later_rig* r, float* values) {
    const attention_shape* c = r->c;
    test_random random = test_random_start("later");
    bool ok = qlora_tensor_create(r->ctx, c->dtype, LATER_TOKENS, c->heads * c->hd, &r->o) ==
                  QLORA_OK &&
              qlora_tensor_create(r->ctx, QLORA_F32, c->heads, LATER_TOKENS, &r->lse) == QLORA_OK &&
              qlora_tensor_create(r->ctx, QLORA_I32, 1, 2, &r->seqs) == QLORA_OK;
    for (int i = 0; i < 3; i++) {
        int64_t cols = (i == 0 ? c->heads : c->kv_heads) * c->hd;
        test_random_fill(&random, values, (size_t)(LATER_TOKENS * cols), 1.0f);
        ok = ok &&
             test_tensor(r->ctx, c->dtype, LATER_TOKENS, cols, values, &r->in[i]) == QLORA_OK;
    }
    return ok;
}

static bool later_close(later_rig* r) {
    qlora_tensor* all[] = {&r->in[0], &r->in[1], &r->in[2], &r->o, &r->lse, &r->seqs};
    bool ok = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ok = qlora_tensor_destroy(r->ctx, all[i]) == QLORA_OK && ok;
    }
    return ok;
}

// The outputs of `rows` queries after `before` others, whose keys are there, too.
static bool later_run(later_rig* r, int64_t before, int64_t rows, float* out) {
    int32_t offsets[2] = {0, (int32_t)rows};
    qlora_tensor q = attention_part(&r->in[0], before, rows);
    qlora_tensor k = attention_part(&r->in[1], 0, before + rows);
    qlora_tensor v = attention_part(&r->in[2], 0, before + rows);
    qlora_tensor o = attention_part(&r->o, before, rows);
    return qlora_tensor_write(r->ctx, &r->seqs, offsets, sizeof offsets) == QLORA_OK &&
           attention_later(r->ctx, r->c, before, &q, &k, &v, &r->seqs, &o, &r->lse) == QLORA_OK &&
           test_read(r->ctx, &r->o, out);
}

// Whether outputs have the bits of one pass: if the same kernels run, and none whose rounding
// depends on the other queries of a tile of up to 128, or if tiles have the same queries.
static bool later_is_alike(const later_rig* r, int64_t before) {
    const attention_shape* c = r->c;
    if (qlora__on_cpu(r->ctx)) {
        return true;
    }
    qlora__needs need = qlora__attention_need(r->ctx, c->dtype, c->hd, c->cap > 0.0f, true);
    return need == qlora__attention_need(r->ctx, c->dtype, c->hd, c->cap > 0.0f, false) &&
           (need == QLORA__NEED_HEADANY || before % 128 == 0);
}

// Queries after a cut have what they have in one pass.
static bool later_is_cut(later_rig* r, int64_t before, int64_t rows) {
    const attention_shape* c = r->c;
    int64_t cols = c->heads * c->hd;
    int64_t first = before * cols;
    size_t count = (size_t)(rows * cols);
    memset(r->got, 0, sizeof r->got);
    bool ok = qlora_tensor_write(r->ctx, &r->o, r->got, r->o.bytes) == QLORA_OK &&
              later_run(r, before, rows, r->got) &&
              test_rel_l2(r->all + first, r->got + first, count,
                          c->dtype == QLORA_BF16 ? 4e-3 : 1e-6);
    for (int64_t j = 0; ok && j < LATER_TOKENS * cols; j++) { // nothing else is written
        bool own = j >= first && j < first + rows * cols;
        ok = own || r->got[j] == 0.0f;
    }
    return ok && (!later_is_alike(r, before) ||
                  memcmp(r->all + first, r->got + first, count * sizeof *r->got) == 0);
}

static bool later_holds(later_rig* r) {
    static const int64_t cuts[][2] = {{1, 300}, {37, 64}, {128, 173}, {200, 2}, {255, 46}};
    bool ok = later_run(r, 0, LATER_TOKENS, r->all);
    for (size_t i = 0; ok && i < sizeof cuts / sizeof cuts[0]; i++) {
        ok = later_is_cut(r, cuts[i][0], cuts[i][1]);
        if (!ok) {
            printf("hd %d, queries %d to %d\n", (int)r->c->hd, (int)cuts[i][0],
                   (int)(cuts[i][0] + cuts[i][1]));
        }
    }
    return ok;
}

TEST keys_may_precede_the_queries(const test_machine* machine) {
    static later_rig r;
    static float values[LATER_TOKENS * LATER_WIDEST];
    for (size_t i = 0; i < sizeof later_cases / sizeof later_cases[0]; i++) {
        r.c = &later_cases[i];
        if (r.c->dtype == QLORA_BF16 && !test_has_bf16(machine)) {
            continue;
        }
        r.ctx = test_open(machine, NULL);
        if (!r.ctx) {
            SKIPm(test_open_reason());
        }
        ASSERT(later_open(&r, values) && later_holds(&r) && later_close(&r));
        ASSERT(test_close_ctx(machine, r.ctx));
    }
    PASS();
}

SUITE(later_suite) {
    RUN_ON(TEST_EVERYWHERE, keys_may_precede_the_queries);
}
