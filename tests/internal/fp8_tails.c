// fp8_tails.c - operands of FP8 products with what adapters make of them: codes and scales are
// compared bit for bit, u with sums in double precision.

SUITE_EXTERN(fp8_tails_suite);

enum { CODED_MOST = 130000, CODED_ROWS = 1100 };

typedef struct coded_case {
    int64_t rows;
    int64_t cols;     // of gate, and of up
    int64_t ranks[2]; // gate, up
    bool joined;      // gate and up are one projection
} coded_case;

// More rows than a block has, and than all blocks have at once; more columns than a step, and than
// a piece; codes that are filled up.
static const coded_case coded_cases[] = {{17, 136, {16, 16}, false},
                                         {9, 1064, {16, 8}, false},
                                         {3, 1544, {8, 8}, true},
                                         {2, 4616, {8, 16}, false},
                                         {1100, 24, {0, 8}, false},
                                         {150, 40, {16, 16}, true},
                                         {1, 8, {8, 0}, false}};

typedef struct coded_data {
    float gu[2 * CODED_MOST];
    float s[CODED_MOST];
    float b[2 * 16 * 9400]; // as the kernel reads it
    float u[32 * CODED_ROWS];
    float most[CODED_ROWS];
    float scales[2][CODED_ROWS];
    uint8_t codes[2][2 * CODED_MOST + 16 * CODED_ROWS];
} coded_data;

static coded_data coded_room;

static const float coded_factor = 3.0f;

// What the specification makes of rows: codes and scales, and the largest magnitudes.
static void coded_expect(const float* x, int64_t rows, int64_t cols, coded_data* d) {
    for (int64_t r = 0; r < rows; r++) {
        uint8_t* to = d->codes[0] + r * qlora__fp8_pitch(cols);
        float most = 0.0f;
        for (int64_t c = 0; c < cols; c++) {
            most = fmaxf(most, fabsf(x[r * cols + c]));
        }
        float scale = qlora__fp8_scale(most);
        memset(to, 0, (size_t)qlora__fp8_pitch(cols));
        for (int64_t c = 0; c < cols; c++) {
            to[c] = qlora__e4m3_from(x[r * cols + c] * (1.0f / scale));
        }
        d->most[r] = most;
        d->scales[0][r] = scale * coded_factor;
    }
}

static bool coded_open(qlora_ctx* ctx, int64_t rows, int64_t cols, qlora__fp8* f) {
    memset(f, 0, sizeof *f);
    return qlora_tensor_create(ctx, QLORA_U8, 1, rows * qlora__fp8_pitch(cols), &f->codes) ==
               QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_F32, 1, rows, &f->scales) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_F32, 1, 2, &f->factors) == QLORA_OK &&
           qlora_fill(ctx, coded_factor, &f->factors) == QLORA_OK;
}

// Whether the codes and scales are the expected ones.
static bool coded_same(qlora_ctx* ctx, int64_t rows, qlora__fp8* f, coded_data* d) {
    bool ok = qlora_tensor_read(ctx, &f->codes, d->codes[1], f->codes.bytes) == QLORA_OK &&
              test_read(ctx, &f->scales, d->scales[1]) &&
              memcmp(d->codes[0], d->codes[1], f->codes.bytes) == 0 &&
              memcmp(d->scales[0], d->scales[1], (size_t)rows * sizeof(float)) == 0;
    qlora_tensor_destroy(ctx, &f->codes);
    qlora_tensor_destroy(ctx, &f->scales);
    qlora_tensor_destroy(ctx, &f->factors);
    return ok;
}

static qlora_result coded_u(qlora_ctx* ctx, const qlora__fp8* f, const qlora_tensor* x,
                            const qlora_tensor* sb, const coded_case* c, const qlora_tensor* u,
                            void* sums) {
    QLORA__ENTER(ctx, "fp8_tails");
    return qlora__leave(
        ctx, qlora__fp8_u(ctx, f, x, sb, c->ranks, c->joined ? 1 : 2, u, sums));
}

// The codes and scales of the gradients of gate and up, and u.
TEST coded_gradients_are_right(qlora_ctx* ctx, const coded_case* c, coded_data* d,
                               const qlora_tensor* gu) {
    int64_t cols = 2 * c->cols;
    int64_t ranks = c->joined ? c->ranks[0] : c->ranks[0] + c->ranks[1];
    int64_t room = qlora__fp8_u_room(c->rows, c->joined ? cols : c->cols, c->joined ? 1 : 2);
    qlora_tensor sb;
    qlora_tensor u;
    qlora_tensor sums;
    qlora__fp8 f;
    for (int64_t k = 0; k < cols * ranks && !c->joined; k++) { // along the diagonal
        d->b[k] = (k / ranks < c->cols) == (k % ranks < c->ranks[0]) ? d->b[k] : 0.0f;
    }
    coded_expect(d->gu, c->rows, cols, d);
    ASSERT(coded_open(ctx, c->rows, cols, &f));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, c->rows, d->most, &f.most));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, cols, ranks, d->b, &sb));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_BF16, c->rows, ranks, &u));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, room, &sums));
    ASSERT_EQ(QLORA_OK, coded_u(ctx, &f, gu, &sb, c, &u, sums.data));
    ASSERT(coded_same(ctx, c->rows, &f, d));
    ASSERT(test_read(ctx, &u, d->u));
    for (int64_t k = 0; k < c->rows * ranks; k++) {
        double sum = 0.0;
        double size = 0.0;
        for (int64_t i = 0; i < cols; i++) {
            double term =
                (double)d->gu[k / ranks * cols + i] * (double)d->b[i * ranks + k % ranks];
            sum += term;
            size += fabs(term);
        }
        ASSERT(tails_near(sum, size, d->u[k]));
    }
    qlora_tensor_destroy(ctx, &f.most);
    qlora_tensor_destroy(ctx, &sb);
    qlora_tensor_destroy(ctx, &u);
    qlora_tensor_destroy(ctx, &sums);
    PASS();
}

TEST coded_tails_are_right(const test_machine* machine) {
    coded_data* d = &coded_room;
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < sizeof coded_cases / sizeof coded_cases[0]; i++) {
        const coded_case* c = &coded_cases[i];
        test_random random = test_random_start("fp8 tails");
        qlora_tensor gu;
        gated_fill(d->gu, c->rows * 2 * c->cols, 2.0, &random);
        gated_fill(d->b, 2 * 16 * 2 * c->cols, 1.0, &random);
        for (int64_t r = 1; r < c->rows; r++) { // every column has the largest number of a row
            d->gu[r * 2 * c->cols + r % (2 * c->cols)] *= 16.0f;
        }
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, 2 * c->cols, d->gu, &gu));
        CHECK_CALL(coded_gradients_are_right(ctx, c, d, &gu));
        qlora_tensor_destroy(ctx, &gu);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static qlora_result coded_gated(qlora_ctx* ctx, const qlora__fp8* f, bool gelu,
                                const qlora_tensor* gate, const qlora_tensor* up,
                                const qlora_tensor* a, const qlora_tensor* z) {
    QLORA__ENTER(ctx, "fp8_tails");
    return qlora__leave(ctx, qlora__fp8_gated(ctx, f, gelu, gate, up, a, z));
}

// An activation of which only codes are stored has those of the one that is stored, and the bits of
// its z. What comes after z, and gate and up, stay.
TEST coded_activation_is_right(qlora_ctx* ctx, int64_t rows, int64_t cols, int64_t rank, bool gelu,
                               coded_data* d) {
    test_random random = test_random_start("fp8 activations");
    qlora_tensor gu;
    qlora_tensor a;
    qlora_tensor s;
    qlora_tensor z[2];
    qlora__fp8 f;
    gated_fill(d->gu, rows * 2 * cols, 2.0, &random);
    gated_fill(d->b, rank * cols, 1.0, &random);
    for (int64_t r = 0; r < rows; r++) { // from the last column on, each has the largest number
        int64_t at = cols - 1 - r * 37 % cols;
        d->gu[r * 2 * cols + cols + at] = r % 2 == 0 ? 24.0f : -40.0f;
        d->gu[r * 2 * cols + at] = 8.0f;
    }
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, rows, 2 * cols, d->gu, &gu));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, rank, cols, d->b, &a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_BF16, rows, cols, &s));
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_BF16, rows, 24, &z[i]));
        ASSERT_EQ(QLORA_OK, qlora_fill(ctx, 7.0f, &z[i]));
    }
    ASSERT(coded_open(ctx, rows, cols, &f));
    qlora_tensor gate = qlora__window(&gu, rows, 0, cols);
    qlora_tensor up = qlora__window(&gu, rows, cols, cols);
    qlora_tensor own[2];
    own[0] = qlora__window(&z[0], rows, 0, rank);
    own[1] = qlora__window(&z[1], rows, 0, rank);
    ASSERT_EQ(QLORA_OK, tails_forward(ctx, gelu, &gate, &up, &s, &a, &own[0]));
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK,
               coded_gated(ctx, &f, gelu, &gate, &up, &a, &own[1]));
    ASSERT(test_read(ctx, &s, d->s));
    coded_expect(d->s, rows, cols, d);
    ASSERT(coded_same(ctx, rows, &f, d));
    ASSERT(test_read(ctx, &z[0], d->s) && test_read(ctx, &z[1], d->u));
    ASSERT(memcmp(d->s, d->u, (size_t)(rows * 24) * sizeof(float)) == 0);
    ASSERT(test_read(ctx, &gu, d->b));
    ASSERT(memcmp(d->gu, d->b, (size_t)(rows * 2 * cols) * sizeof(float)) == 0);
    qlora_tensor_destroy(ctx, &gu);
    qlora_tensor_destroy(ctx, &a);
    qlora_tensor_destroy(ctx, &s);
    qlora_tensor_destroy(ctx, &z[0]);
    qlora_tensor_destroy(ctx, &z[1]);
    PASS();
}

// More rows than a block has; 8 columns less than a step, and 8 more; one that ends in its second
// half; more steps than fit in shared memory, and as many as there are places for.
TEST coded_activations_are_right(const test_machine* machine) {
    static const int64_t shapes[][3] = {{33, 24, 8},  {17, 504, 16},  {5, 520, 16},
                                        {33, 400, 16}, {35, 768, 8},   {2, 7168, 8},
                                        {17, 7176, 16}, {2, 9216, 16}, {1, 8, 16}};
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t* shape = shapes[i / 2];
        CHECK_CALL(coded_activation_is_right(ctx, shape[0], shape[1], shape[2], i % 2 == 1,
                                             &coded_room));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static qlora_result coded_norm(qlora_ctx* ctx, qlora__norm_job* job, bool backward) {
    QLORA__ENTER(ctx, "fp8_tails");
    return qlora__leave(ctx, backward ? qlora__norm_backward(ctx, job)
                                      : qlora__norm_forward(ctx, job));
}

// A norm that writes codes as well has the bits of one that does not, and the codes of its result.
TEST coded_norm_is_right(qlora_ctx* ctx, int64_t rows, int64_t cols, int way, coded_data* d) {
    bool backward = way / 2 == 1;
    bool adds = way % 2 == 1; // delta, or dres
    test_random random = test_random_start("fp8 norms");
    qlora_tensor t[4];
    qlora_tensor out[2][2]; // with codes or not: y or dx, and x + delta
    qlora_tensor rstd[2];
    qlora__fp8 f;
    for (int i = 0; i < 4; i++) {
        gated_fill(d->gu, rows * cols, i == 3 ? 0.5 : 2.0, &random);
        d->gu[0] *= 32.0f;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, i == 3 ? QLORA_F32 : QLORA_BF16, i == 3 ? 1 : rows,
                                        cols, d->gu, &t[i]));
    }
    ASSERT(coded_open(ctx, rows, cols, &f));
    for (int coded = 0; coded < 2; coded++) {
        qlora__norm_job job;
        memset(&job, 0, sizeof job);
        for (int i = 0; i < 2; i++) {
            ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_BF16, rows, cols, &out[coded][i]));
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, rows, &rstd[coded]));
        job.x = &t[0];
        job.w = &t[3];
        job.eps = 1e-5f;
        job.fp8 = coded == 1 ? &f : NULL;
        if (backward) {
            job.dy = &t[1];
            job.dres = adds ? &t[2] : NULL;
            job.dx = &out[coded][0];
            job.rstd_out = &rstd[coded];
        } else {
            job.delta = adds ? &t[1] : NULL;
            job.sum = adds ? &out[coded][1] : NULL;
            job.y = &out[coded][0];
        }
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, coded_norm(ctx, &job, backward));
    }
    for (int i = 0; i < (adds && !backward ? 2 : 1); i++) {
        ASSERT(test_read(ctx, &out[0][i], d->gu) && test_read(ctx, &out[1][i], d->s));
        ASSERT(memcmp(d->gu, d->s, (size_t)(rows * cols) * sizeof(float)) == 0);
    }
    ASSERT(!backward || (test_read(ctx, &rstd[0], d->most) && test_read(ctx, &rstd[1], d->u) &&
                         memcmp(d->most, d->u, (size_t)rows * sizeof(float)) == 0));
    ASSERT(test_read(ctx, &out[0][0], d->s));
    coded_expect(d->s, rows, cols, d);
    ASSERT(coded_same(ctx, rows, &f, d));
    for (int i = 0; i < 4; i++) {
        qlora_tensor_destroy(ctx, &t[i]);
        qlora_tensor_destroy(ctx, &out[i / 2][i % 2]);
    }
    qlora_tensor_destroy(ctx, &rstd[0]);
    qlora_tensor_destroy(ctx, &rstd[1]);
    PASS();
}

TEST coded_norms_are_right(const test_machine* machine) {
    static const int64_t shapes[][2] = {{9, 8}, {5, 136}, {3, 520}, {2, 2056}, {2, 8192}};
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < 4 * sizeof shapes / sizeof shapes[0]; i++) {
        CHECK_CALL(coded_norm_is_right(ctx, shapes[i / 4][0], shapes[i / 4][1], (int)(i % 4),
                                       &coded_room));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static qlora_result coded_rope(qlora_ctx* ctx, const qlora_tensor* x, int64_t heads,
                               const qlora_tensor* positions, const qlora_tensor* table,
                               const qlora_tensor* flag, const qlora__fp8* f) {
    QLORA__ENTER(ctx, "fp8_tails");
    return qlora__leave(ctx, qlora__rope_coded(ctx, x, heads, positions, table, flag, f));
}

// A rotation that writes codes as well has the bits of one that does not, the codes of its result,
// and the columns after those that it rotates. A row whose position does not exist is not changed.
TEST coded_rope_is_right(qlora_ctx* ctx, int64_t rows, int64_t heads, int64_t rest, int64_t dim,
                         coded_data* d) {
    int64_t cols = heads * dim + rest;
    int32_t at[CODED_ROWS];
    int32_t bad = 0;
    test_random random = test_random_start("fp8 rope");
    qlora_tensor x[2];
    qlora_tensor positions;
    qlora_tensor table;
    qlora_tensor flag;
    qlora__fp8 f;
    gated_fill(d->gu, rows * cols, 2.0, &random);
    for (int64_t r = 0; r < rows; r++) { // every column has the largest number of a row
        d->gu[r * cols + r * 8 % cols + r % 8] *= 16.0f;
        at[r] = r == rows / 2 ? 7 : (int32_t)(r * 5 % 7);
    }
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, rows, cols, d->gu, &x[i]));
    }
    gated_fill(d->s, 7 * dim, 1.0, &random);
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 7, dim, d->s, &table));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_I32, 1, rows, &positions));
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &positions, at, positions.bytes));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_I32, 1, 1, &flag));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &flag));
    ASSERT(coded_open(ctx, rows, cols, &f));
    qlora_tensor turned = qlora__window(&x[0], rows, 0, heads * dim);
    ASSERT_EQ(QLORA_OK,
              qlora_rope_backward(ctx, &turned, heads, &positions, &table, &flag));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &flag));
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK,
               coded_rope(ctx, &x[1], heads, &positions, &table, &flag, &f));
    ASSERT_EQ(QLORA_OK, qlora_tensor_read(ctx, &flag, &bad, sizeof bad));
    ASSERT_EQ(1, bad);
    ASSERT(test_read(ctx, &x[0], d->gu) && test_read(ctx, &x[1], d->s));
    ASSERT(memcmp(d->gu, d->s, (size_t)(rows * cols) * sizeof(float)) == 0);
    coded_expect(d->s, rows, cols, d);
    ASSERT(coded_same(ctx, rows, &f, d));
    qlora_tensor_destroy(ctx, &x[0]);
    qlora_tensor_destroy(ctx, &x[1]);
    qlora_tensor_destroy(ctx, &positions);
    qlora_tensor_destroy(ctx, &table);
    qlora_tensor_destroy(ctx, &flag);
    PASS();
}

// Heads of several widths; as many pairs, and as many other columns, as a block has threads for.
TEST coded_ropes_are_right(const test_machine* machine) {
    static const int64_t shapes[][4] = {{9, 3, 64, 64},  {5, 1, 24, 16},   {3, 5, 256, 128},
                                        {2, 2, 0, 48},   {3, 32, 1032, 256}, {2, 1, 4088, 32},
                                        {300, 1, 8, 16}};
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        CHECK_CALL(coded_rope_is_right(ctx, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3],
                                       &coded_room));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Whether a model whose activation is stored has these gradients to the bit.
static bool coded_has_the_bits(const setup* s, const gated_gradients* got) {
    gated_gradients stored;
    test_coded_width = 0;
    bool same = gated_micro(s, true, &stored) && stored.count == got->count &&
                memcmp(stored.values, got->values, got->count * sizeof(float)) == 0;
    test_coded_width = 9216;
    free(stored.values);
    return same;
}

// Every gradient of a model in FP8 mode is that of the path for dropout, which has none of these
// kernels: it rounds the gradient of x twice, after which other codes are the nearest. It is nearer
// to that of a model whose u comes apart, unless ds gets the share of the adapter of down later,
// with another rounding. One that is recomputed has the same bits as one that is not, although not
// all codes come from the same kernels.
TEST coded_models_have_the_gradients(const test_machine* machine) {
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    bool few = test_checked(machine);
    size_t kinds = sizeof gated_kinds / sizeof gated_kinds[0];
    for (size_t i = few ? 1 : 0; i < kinds; i += few ? 2 : 1) {
        setup s = setup_make(machine);
        gated_gradients expected;
        gated_gradients apart;
        gated_gradients first;
        s.model.mode = QLORA_MODE_FP8;
        s.model.rank = 8;
        s.model.dropout = 1e-9f;
        gated_kinds[i].vary(&s);
        ASSERTm(gated_kinds[i].name, gated_micro(&s, false, &expected));
        s.model.dropout = 0.0f;
        apart.values = NULL;
        test_gated_from = INT64_MAX;
        bool made = few || gated_micro(&s, false, &apart);
        test_gated_from = 1;
        ASSERTm(gated_kinds[i].name, made);
        first.values = NULL;
        for (int n = few ? 3 : 0; n < (few ? 5 : 6); n++) {
            int way = n % 3;
            gated_gradients got;
            s.model.recompute = way == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
            s.model.tile = way == 2 ? 8 : 0;
            test_gated_share = n >= 3 ? 1 : 0;
            made = gated_micro(&s, true, &got);
            test_gated_share = 1;
            ASSERTm(gated_kinds[i].name, made);
            ASSERT(gated_within(gated_kinds[i].name, &expected, &got, 0.1));
            ASSERT(n >= 3 || gated_close(gated_kinds[i].name, &apart, &got));
            ASSERT(n != 3 || coded_has_the_bits(&s, &got));
            if (way == 0) {
                free(first.values);
                first = got;
                continue;
            }
            ASSERT(way == 2 || memcmp(first.values, got.values, got.count * sizeof(float)) == 0);
            free(got.values);
        }
        free(first.values);
        free(apart.values);
        free(expected.values);
    }
    PASS();
}

static qlora_result coded_copy(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "fp8_tails");
    return qlora__leave(ctx, qlora__copy_narrow(ctx, x, y));
}

// A few columns of many rows, whether their kernel takes them or not: what is beside them stays.
TEST narrow_copies_are_copies(const test_machine* machine) {
    static const int64_t shapes[][2] = {{300, 48}, {17, 8}, {5, 13}};
    coded_data* d = &coded_room;
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        int64_t rows = shapes[i][0];
        int64_t cols = shapes[i][1];
        test_random random = test_random_start("narrow copies");
        qlora_tensor t[2];
        gated_fill(d->gu, rows * 64, 1.0, &random);
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, rows, 64, d->gu, &t[0]));
        ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_BF16, rows, 56, &t[1]));
        ASSERT_EQ(QLORA_OK, qlora_fill(ctx, 7.0f, &t[1]));
        qlora_tensor from = qlora__window(&t[0], rows, 16, cols);
        qlora_tensor to = qlora__window(&t[1], rows, 0, cols);
        ASSERT_EQ(QLORA_OK, coded_copy(ctx, &from, &to));
        ASSERT(test_read(ctx, &t[1], d->s));
        for (int64_t k = 0; k < rows * 56; k++) {
            float want = k % 56 < cols ? d->gu[k / 56 * 64 + 16 + k % 56] : 7.0f;
            ASSERT(memcmp(&want, &d->s[k], sizeof want) == 0);
        }
        qlora_tensor_destroy(ctx, &t[0]);
        qlora_tensor_destroy(ctx, &t[1]);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// How columns are divided.
TEST coded_shapes_are_chosen(void) {
    ASSERT_EQ(2 * 9 * 100 * 16, qlora__fp8_u_room(100, 8960, 2));
    PASS();
}

SUITE(fp8_tails_suite) {
    RUN_ON(TEST_ONE_GPU, coded_tails_are_right);
    RUN_ON(TEST_ONE_GPU, coded_activations_are_right);
    RUN_ON(TEST_ONE_GPU, coded_norms_are_right);
    RUN_ON(TEST_ONE_GPU, coded_ropes_are_right);
    RUN_ON(TEST_ONE_EACH, narrow_copies_are_copies);
    RUN_ON(TEST_ONE_GPU, coded_models_have_the_gradients);
    RUN_TEST(coded_shapes_are_chosen);
}
