// tails.c - a gated activation with z of the adapter after it and u of those before it: the
// activation and its gradients are compared bit for bit, the others with sums in double precision.

SUITE_EXTERN(tails_suite);

enum { TAILS_ROWS = 37, TAILS_COLS = 1064, TAILS_MOST = 40000, TAILS_ROOM = 40 };

typedef struct tails_case {
    int64_t rows;
    int64_t cols;
    int64_t ranks[3]; // gate, up, down
    bool joined;      // gate and up are one projection
} tails_case;

// More rows than a block has, and more columns than it takes in a step.
static const tails_case tails_cases[] = {
    {17, 136, {16, 16, 16}, false}, {37, 1064, {16, 8, 8}, false}, {16, 32, {0, 16, 16}, false},
    {9, 72, {8, 0, 8}, false},      {33, 40, {16, 16, 8}, true},   {1, 8, {8, 8, 16}, true},
    {35, 512, {8, 8, 8}, false}};

typedef struct tails_data {
    float ds[TAILS_MOST];
    float gu[3 * TAILS_MOST + TAILS_ROWS * TAILS_ROOM];
    float tiles[4][TAILS_MOST]; // s forward; then dgate, dup and s
    float a[16 * TAILS_COLS];
    float b[2][16 * TAILS_COLS];
    float got[3 * TAILS_MOST + TAILS_ROWS * TAILS_ROOM];
    float again[TAILS_MOST + TAILS_ROWS * TAILS_ROOM];
} tails_data;

static tails_data tails_room;

// What the public functions make of the same values.
static bool tails_expect(qlora_ctx* ctx, const tails_case* c, bool gelu, tails_data* d) {
    qlora_tensor in[3];
    qlora_tensor out[4];
    int64_t ld = 2 * c->cols + TAILS_ROOM;
    static float part[TAILS_MOST];
    bool ok = true;
    for (int i = 0; i < 4; i++) {
        for (int64_t k = 0; k < c->rows * c->cols && i < 3; k++) {
            int64_t at = k / c->cols * ld + k % c->cols;
            part[k] = i == 0 ? d->ds[k] : d->gu[at + (i == 1 ? 0 : c->cols)];
        }
        ok = ok &&
             (i == 3 || test_tensor(ctx, QLORA_BF16, c->rows, c->cols, part, &in[i]) == QLORA_OK) &&
             qlora_tensor_create(ctx, QLORA_BF16, c->rows, c->cols, &out[i]) == QLORA_OK;
    }
    ok = ok && (gelu ? qlora_geglu_forward : qlora_swiglu_forward)(ctx, &in[1], &in[2], &out[0]) ==
                   QLORA_OK;
    ok = ok && (gelu ? qlora_geglu_backward : qlora_swiglu_backward)(
                   ctx, &in[0], &in[1], &in[2], &out[1], &out[2], &out[3]) == QLORA_OK;
    for (int i = 0; i < 4; i++) {
        ok = ok && test_read(ctx, &out[i], d->tiles[i]);
        qlora_tensor_destroy(ctx, &out[i]);
        if (i < 3) {
            qlora_tensor_destroy(ctx, &in[i]);
        }
    }
    return ok;
}

// Whether a number, rounded to bf16, is that sum; size: of the sum of the terms' sizes.
static bool tails_near(double want, double size, float got) {
    return fabs((double)got - want) <= fabs(want) / 256.0 + size * 1e-5 + 1e-30;
}

static qlora_result tails_forward(qlora_ctx* ctx, bool gelu, const qlora_tensor* gate,
                                  const qlora_tensor* up, const qlora_tensor* s,
                                  const qlora_tensor* a, const qlora_tensor* z) {
    QLORA__ENTER(ctx, "tails");
    return qlora__leave(ctx, qlora__tails_forward(ctx, gelu, gate, up, s, a, z));
}

static qlora_result tails_backward(qlora_ctx* ctx, bool gelu, const qlora_linear_desc* l,
                                   const qlora_tensor* ds, const qlora_tensor* gate,
                                   const qlora_tensor* up, const qlora_tensor* u) {
    QLORA__ENTER(ctx, "tails");
    return qlora__leave(ctx, qlora__tails_backward(ctx, gelu, l, ds, gate, up, ds, u));
}

// z follows s in its rows; what comes after stays.
TEST tails_z_is_right(qlora_ctx* ctx, const tails_case* c, bool gelu, tails_data* d,
                      const qlora_tensor* gu) {
    int64_t rank = c->ranks[2];
    int64_t ld = c->cols + TAILS_ROOM;
    qlora_tensor x;
    qlora_tensor a;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, ld, d->gu, &x));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, rank, c->cols, d->a, &a));
    qlora_tensor gate = qlora__window(gu, c->rows, 0, c->cols);
    qlora_tensor up = qlora__window(gu, c->rows, c->cols, c->cols);
    qlora_tensor s = qlora__window(&x, c->rows, 0, c->cols);
    qlora_tensor z = qlora__window(&x, c->rows, c->cols, rank);
    ASSERT_EQ(QLORA_OK, tails_forward(ctx, gelu, &gate, &up, &s, &a, &z));
    ASSERT(test_read(ctx, &x, d->got));
    for (int64_t k = 0; k < c->rows * ld; k++) {
        int64_t row = k / ld;
        int64_t col = k % ld;
        if (col < c->cols) {
            ASSERT(memcmp(&d->tiles[0][row * c->cols + col], &d->got[k], sizeof(float)) == 0);
        } else if (col < c->cols + rank) {
            double sum = 0.0;
            double size = 0.0;
            for (int64_t i = 0; i < c->cols; i++) {
                double term = (double)d->tiles[0][row * c->cols + i] *
                              (double)d->a[(col - c->cols) * c->cols + i];
                sum += term;
                size += fabs(term);
            }
            ASSERT(tails_near(sum, size, d->got[k]));
        } else {
            ASSERT(memcmp(&d->gu[k], &d->got[k], sizeof(float)) == 0);
        }
    }
    // From s alone, the same bits.
    ASSERT_EQ(QLORA_OK, qlora_fill(ctx, 3.0f, &z));
    ASSERT_EQ(QLORA_OK, tails_forward(ctx, gelu, NULL, NULL, &s, &a, &z));
    ASSERT(test_read(ctx, &x, d->again));
    ASSERT(memcmp(d->got, d->again, (size_t)(c->rows * ld) * sizeof(float)) == 0);
    qlora_tensor_destroy(ctx, &x);
    qlora_tensor_destroy(ctx, &a);
    PASS();
}

// Number `col` of u of a row: the columns of gate, then those of up, or their sum.
static double tails_u(const tails_case* c, const tails_data* d, int64_t row, int64_t col,
                      double* size) {
    double sum = 0.0;
    *size = 0.0;
    for (int side = 0; side < 2; side++) {
        int64_t r = c->joined || side == 0 ? col : col - c->ranks[0];
        for (int64_t i = 0; i < c->cols && r >= 0 && r < c->ranks[side]; i++) {
            double term = (double)d->tiles[1 + side][row * c->cols + i] *
                          (double)d->b[side][i * c->ranks[side] + r];
            sum += term;
            *size += fabs(term);
        }
    }
    return sum;
}

// gu becomes its gradient, with u after it, and ds the activation.
TEST tails_u_is_right(qlora_ctx* ctx, const tails_case* c, bool gelu, tails_data* d,
                      const qlora_tensor* gu) {
    static float both[2 * 16 * TAILS_COLS];
    int64_t ld = 2 * c->cols + TAILS_ROOM;
    int64_t width = c->joined ? c->ranks[0] : c->ranks[0] + c->ranks[1];
    qlora_tensor ds;
    qlora_tensor b[2];
    qlora_linear_desc l;
    memset(&l, 0, sizeof l);
    l.count = c->joined ? 1 : 2;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, c->cols, d->ds, &ds));
    for (int i = 0; i < l.count; i++) {
        int64_t n = c->cols * c->ranks[i];
        memcpy(both, d->b[i], (size_t)n * sizeof(float));
        if (c->joined) {
            memcpy(both + n, d->b[1], (size_t)n * sizeof(float));
        }
        l.parts[i].rank = c->ranks[i];
        l.parts[i].sb = &b[i];
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, (c->joined ? 2 : 1) * c->cols,
                                        qlora__max(c->ranks[i], 8), both, &b[i]));
    }
    qlora_tensor gate = qlora__window(gu, c->rows, 0, c->cols);
    qlora_tensor up = qlora__window(gu, c->rows, c->cols, c->cols);
    qlora_tensor u = qlora__window(gu, c->rows, 2 * c->cols, width);
    ASSERT_EQ(QLORA_OK, tails_backward(ctx, gelu, &l, &ds, &gate, &up, &u));
    ASSERT(test_read(ctx, gu, d->got));
    ASSERT(test_read(ctx, &ds, d->again));
    ASSERT(memcmp(d->tiles[3], d->again, (size_t)(c->rows * c->cols) * sizeof(float)) == 0);
    for (int64_t k = 0; k < c->rows * ld; k++) {
        int64_t row = k / ld;
        int64_t col = k % ld;
        double size = 0.0;
        if (col < 2 * c->cols) {
            float want = d->tiles[1 + col / c->cols][row * c->cols + col % c->cols];
            ASSERT(memcmp(&want, &d->got[k], sizeof want) == 0);
        } else if (col < 2 * c->cols + width) {
            double want = tails_u(c, d, row, col - 2 * c->cols, &size);
            ASSERT(tails_near(want, size, d->got[k]));
        } else {
            ASSERT(memcmp(&d->gu[k], &d->got[k], sizeof(float)) == 0);
        }
    }
    for (int i = 0; i < l.count; i++) {
        qlora_tensor_destroy(ctx, &b[i]);
    }
    qlora_tensor_destroy(ctx, &ds);
    PASS();
}

TEST tails_are_right(const test_machine* machine) {
    tails_data* d = &tails_room;
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < 2 * sizeof tails_cases / sizeof tails_cases[0]; i++) {
        const tails_case* c = &tails_cases[i / 2];
        test_random random = test_random_start("tails");
        qlora_tensor gu;
        gated_fill(d->ds, c->rows * c->cols, 1.0, &random);
        gated_fill(d->gu, c->rows * (2 * c->cols + TAILS_ROOM), 2.0, &random);
        gated_fill(d->a, 16 * c->cols, 1.0, &random);
        gated_fill(d->b[0], 16 * c->cols, 1.0, &random);
        gated_fill(d->b[1], 16 * c->cols, 1.0, &random);
        ASSERT(tails_expect(ctx, c, i % 2 == 1, d));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, 2 * c->cols + TAILS_ROOM, d->gu,
                                        &gu));
        CHECK_CALL(tails_z_is_right(ctx, c, i % 2 == 1, d, &gu));
        CHECK_CALL(tails_u_is_right(ctx, c, i % 2 == 1, d, &gu));
        qlora_tensor_destroy(ctx, &gu);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Adapters that the kernels take.
TEST tails_ranks_are_chosen(void) {
    static const struct {
        int64_t ranks[3];
        int32_t count;
        bool taken;
    } cases[] = {{{16, 0, 0}, 1, true},  {{8, 16, 0}, 2, true}, {{0, 8, 0}, 2, true},
                 {{0, 0, 0}, 1, false},  {{24, 8, 0}, 2, false}, {{16, 4, 0}, 2, false},
                 {{8, 8, 8}, 3, false}};
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    t.dtype = QLORA_BF16;
    t.cols = 8;
    t.ld = 8;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; i++) {
        qlora_linear_desc l;
        memset(&l, 0, sizeof l);
        l.count = cases[i / 2].count;
        t.data = (void*)(uintptr_t)(i % 2 == 0 ? 256 : 264); // not a multiple of 16 bytes
        for (int k = 0; k < 3; k++) {
            l.parts[k].rank = cases[i / 2].ranks[k];
            l.parts[k].a = &t;
            l.parts[k].sb = &t;
        }
        ASSERT_EQ(i % 2 == 0 && cases[i / 2].taken, qlora__tails_takes(&l));
    }
    PASS();
}

// Tokens whose blocks fill a large GPU.
TEST tails_rows_are_chosen(void) {
    static const struct {
        int64_t rows;
        bool full;
    } cases[] = {{1024, false}, {1680, false}, {1696, true},  {2048, true}, {2112, true},
                 {2128, false}, {3072, false}, {4096, true}, {8192, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ASSERT_EQ(cases[i].full, qlora__tails_full(cases[i].rows, 80));
    }
    ASSERT(qlora__tails_full(1, 0));
    PASS();
}

// Every gradient of a model without the kernel of gated.c is that of the path for dropout.
TEST tails_models_have_the_gradients(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    for (size_t i = 0; i < sizeof gated_kinds / sizeof gated_kinds[0]; i++) {
        setup s = setup_make(machine);
        gated_gradients expected;
        s.model.mode = QLORA_MODE_BF16;
        s.model.rank = 8;
        s.model.dropout = 1e-9f;
        gated_kinds[i].vary(&s);
        ASSERTm(gated_kinds[i].name, gated_micro(&s, false, &expected));
        gated_gradients first;
        for (int way = 0; way < 3; way++) {
            gated_gradients got;
            s.model.dropout = 0.0f;
            s.model.recompute = way == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
            s.model.tile = way == 2 ? 8 : 0;
            test_gated_from = INT64_MAX;
            bool made = gated_micro(&s, false, &got);
            test_gated_from = 1;
            ASSERTm(gated_kinds[i].name, made);
            ASSERT(gated_close(gated_kinds[i].name, &expected, &got));
            if (way == 0) {
                first = got;
                continue;
            }
            // A recomputed layer has the same bits.
            ASSERT(way == 2 || memcmp(first.values, got.values, got.count * sizeof(float)) == 0);
            free(got.values);
        }
        free(first.values);
        free(expected.values);
    }
    PASS();
}

SUITE(tails_suite) {
    RUN_ON(TEST_ONE_EACH, tails_are_right);
    RUN_ON(TEST_ONE_EACH, tails_models_have_the_gradients);
    RUN_TEST(tails_ranks_are_chosen);
    RUN_TEST(tails_rows_are_chosen);
}
