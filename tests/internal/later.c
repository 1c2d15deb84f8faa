// later.c - attention of queries that are not the first of their text: keys precede them, as when a
// prompt is run in pieces or a conversation goes on.
#include "machines.h"

#include <stdio.h>
#include <string.h>

enum { LATER_TOKENS = 301, LATER_WIDEST = 512 };

typedef struct later_case {
    qlora_dtype dtype;
    int64_t hd;
    int64_t heads;
    int64_t kv_heads;
    int64_t window;
    float cap;
} later_case;

static const later_case later_cases[] = {
    {QLORA_BF16, 64, 4, 2, 0, 0.0f},  {QLORA_BF16, 128, 4, 1, 70, 0.0f},
    {QLORA_BF16, 80, 2, 2, 0, 0.0f},  {QLORA_BF16, 256, 2, 1, 0, 20.0f},
    {QLORA_BF16, 12, 3, 1, 40, 0.0f}, {QLORA_F32, 64, 2, 1, 0, 0.0f},
    {QLORA_F32, 20, 4, 2, 33, 5.0f},
};

// q, k, v of all tokens on the device, and the outputs there.
typedef struct later_rig {
    qlora_ctx* ctx;
    const later_case* c;
    qlora_tensor in[3];
    qlora_tensor o;
    qlora_tensor lse;
    qlora_tensor seqs;
    float got[LATER_TOKENS * LATER_WIDEST];
    float all[LATER_TOKENS * LATER_WIDEST];
} later_rig;

static qlora_tensor later_rows(const qlora_tensor* t, int64_t first, int64_t rows) {
    qlora_tensor part = *t;
    size_t offset = (size_t)(first * t->ld) * qlora_dtype_bytes(t->dtype);
    part.data = (char*)t->data + offset;
    part.bytes -= offset;
    part.rows = rows;
    return part;
}

static bool later_open(later_rig* r, float* values) {
    const later_case* c = r->c;
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

static qlora_result later_attend(later_rig* r, const qlora_attention_desc* d, qlora__attention* a) {
    QLORA__ENTER(r->ctx, "later_attend");
    return qlora__leave(r->ctx, qlora__attention_forward(r->ctx, d, a));
}

// The outputs of `rows` queries after `before` others, whose keys are there, too.
static bool later_run(later_rig* r, int64_t before, int64_t rows, float* out) {
    const later_case* c = r->c;
    int32_t offsets[2] = {0, (int32_t)rows};
    qlora_tensor q = later_rows(&r->in[0], before, rows);
    qlora_tensor k = later_rows(&r->in[1], 0, before + rows);
    qlora_tensor v = later_rows(&r->in[2], 0, before + rows);
    qlora_tensor o = later_rows(&r->o, before, rows);
    qlora_tensor lse = r->lse;
    qlora_attention_desc d;
    qlora__attention a;
    memset(&d, 0, sizeof d);
    memset(&a, 0, sizeof a);
    d.heads = c->heads;
    d.kv_heads = c->kv_heads;
    d.head_dim = c->hd;
    d.window = c->window;
    d.cap = c->cap;
    lse.cols = rows;
    lse.ld = rows;
    a.before = before;
    a.q = &q;
    a.k = &k;
    a.v = &v;
    a.seqs = &r->seqs;
    a.o = &o;
    a.lse = &lse;
    return qlora_tensor_write(r->ctx, &r->seqs, offsets, sizeof offsets) == QLORA_OK &&
           later_attend(r, &d, &a) == QLORA_OK &&
           test_read(r->ctx, &r->o, out);
}

// Whether outputs have the bits of one pass: if the same kernels run, and none whose rounding
// depends on the other queries of a tile of up to 128, or if tiles have the same queries.
static bool later_is_alike(const later_rig* r, int64_t before) {
    const later_case* c = r->c;
    if (qlora__on_cpu(r->ctx)) {
        return true;
    }
    uint32_t need = qlora__attention_need(r->ctx, c->dtype, c->hd, c->cap > 0.0f, true);
    return need == qlora__attention_need(r->ctx, c->dtype, c->hd, c->cap > 0.0f, false) &&
           (need == QLORA__NEED_HEADANY || before % 128 == 0);
}

// Queries after a cut have what they have in one pass.
static bool later_is_cut(later_rig* r, int64_t before, int64_t rows) {
    const later_case* c = r->c;
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
