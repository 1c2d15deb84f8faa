// owners.c - what adapters that stand side by side need: every row keeps the columns of its own
// adapter, every adapter gets its share of the gradients, and the loss of its own rows.

#include "machines.h"

SUITE_EXTERN(owners_suite);

enum { OWNED_ROWS = 19, OWNED_COLUMNS = 272, OWNERS = 3 };

static bool ints_in(qlora_ctx* ctx, const int32_t* values, int64_t n, qlora_tensor* out) {
    return qlora_tensor_create(ctx, QLORA_I32, 1, n, out) == QLORA_OK &&
           qlora_tensor_write(ctx, out, values, (size_t)n * sizeof *values) == QLORA_OK;
}

static qlora_result keep_own(qlora_ctx* ctx, const qlora__linear_owners* owners,
                             const qlora_tensor* inner, const qlora_tensor* x) {
    QLORA__ENTER(ctx, "keep_own");
    return qlora__leave(ctx, qlora__keep_own(ctx, owners, inner, x));
}

// Columns of z: adapters of ranks that are and are not multiples of 8, and two without an owner.
static int32_t owner_of_column(int64_t c) {
    return c < 8 ? 0 : c < 19 ? 1 : c < 22 ? 2 : c < 24 ? -2 : (int32_t)(c / 40 % OWNERS);
}

static int32_t owner_of_row(int64_t r) {
    return r == 7 ? -1 : (int32_t)(r * 5 % OWNERS);
}

// x has columns in front of those of z, which stay as they are. NaN in what belongs to others must
// vanish. Then two rows, of adapters 1 and 2, have values of their own that are not finite: without
// a state they stay, with one they are zero.
static bool is_bad(int round, int64_t r) {
    return round >= 8 && (r == 5 || r == 4);
}

TEST rows_keep_their_own(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    static const int64_t fronts[] = {8, 5};
    static const int64_t widths[] = {24, OWNED_COLUMNS};
    for (int round = 0; round < 24; round++) {
        bool cleans = round >= 16;
        qlora_dtype dtype = round % 2 == 0 ? QLORA_F32 : QLORA_BF16;
        int64_t front = fronts[round / 2 % 2];
        int64_t cols = widths[round / 4 % 2];
        int64_t all = front + cols;
        static float in[OWNED_ROWS * (OWNED_COLUMNS + 8)];
        static float out[OWNED_ROWS * (OWNED_COLUMNS + 8)];
        int32_t rows_of[OWNED_ROWS];
        int32_t columns[OWNED_COLUMNS];
        if (dtype == QLORA_BF16 && !test_has_bf16(machine)) {
            continue;
        }
        for (int64_t r = 0; r < OWNED_ROWS; r++) {
            rows_of[r] = owner_of_row(r);
            for (int64_t c = 0; c < all; c++) {
                bool own = c < front || owner_of_column(c - front) == rows_of[r];
                in[r * all + c] = own ? (float)(r + 1) : (float)NAN;
                if (is_bad(round, r) && c >= front && own) {
                    in[r * all + c] = r == 5 ? -INFINITY : INFINITY;
                }
            }
        }
        for (int64_t c = 0; c < cols; c++) {
            columns[c] = owner_of_column(c);
        }
        qlora_tensor x;
        qlora_tensor tail;
        qlora_tensor inner;
        qlora_tensor state;
        qlora__linear_owners owners;
        int32_t states[OWNERS] = {1, 1, 0};
        ASSERT(ints_in(ctx, states, OWNERS, &state));
        owners.state = cleans ? &state : NULL;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, OWNED_ROWS, all, in, &x));
        ASSERT(ints_in(ctx, rows_of, OWNED_ROWS, &owners.rows));
        ASSERT(ints_in(ctx, columns, cols, &owners.columns));
        ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &x, 0, OWNED_ROWS, front, cols, &tail));
        ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &x, 0, OWNED_ROWS, 0, front, &inner));
        ASSERT_EQ(QLORA_OK, keep_own(ctx, &owners, &inner, &tail));
        ASSERT(test_read(ctx, &x, out));
        for (int64_t i = 0; i < OWNED_ROWS * all; i++) {
            bool own = in[i] == in[i] && !(cleans && is_bad(round, i / all));
            ASSERT(own ? out[i] == in[i] : out[i] == 0.0f && !signbit(out[i]));
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_read(ctx, &state, states, sizeof states));
        ASSERT_EQ_FMT(1, states[0], "%d");
        ASSERT_EQ_FMT(cleans ? 2 : 1, states[1], "%d");
        ASSERT_EQ_FMT(cleans ? 2 : 0, states[2], "%d");
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &state));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &x));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &owners.rows));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &owners.columns));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static qlora_result collect(qlora_ctx* ctx, const qlora_tensor* shares, int64_t count,
                            const qlora_tensor* states) {
    QLORA__ENTER(ctx, "collect");
    return qlora__leave(ctx, qlora__collect(ctx, shares, count, 40 * 16, states));
}

// Values whose products and sums are not rounded: a compiler may join the two operations.
static void coarse(float* values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = floorf(values[i] * 256.0f) / 256.0f;
    }
}

// Columns of three adapters of ranks 4, 3 and 16; the second one has no rows.
TEST shares_are_added(const test_machine* machine) {
    enum { OUT = 40, WIDE = 28, SHARES = 4, TO = OUT * (4 + 3 + 16 + 16) };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    static float from[OUT * WIDE];
    static float to[TO];
    static float got[TO];
    static const int32_t states[OWNERS] = {1, 0, 1};
    static const int64_t ranks[SHARES] = {4, 3, 16, 16};
    static const int64_t firsts[SHARES] = {0, 4, 8, 3};
    static const int32_t adapters[SHARES] = {0, 1, 2, 2};
    test_random random = test_random_start("shares");
    test_random_fill(&random, from, OUT * WIDE, 1.0f);
    test_random_fill(&random, to, TO, 1.0f);
    coarse(from, OUT * WIDE);
    coarse(to, TO);
    qlora_tensor wide;
    qlora_tensor sums;
    qlora_tensor flags;
    qlora_tensor table;
    qlora__share shares[SHARES];
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, OUT, WIDE, from, &wide));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, TO, to, &sums));
    ASSERT(ints_in(ctx, states, OWNERS, &flags));
    int64_t at = 0;
    for (int i = 0; i < SHARES; i++) {
        bool last = i == SHARES - 1;
        shares[i].to = (float*)sums.data + at;
        shares[i].from = (const float*)wide.data + firsts[i];
        shares[i].rows = last ? 0 : OUT; // the last one is empty
        shares[i].cols = ranks[i];
        shares[i].ld = WIDE;
        shares[i].scale = 0.75f + (float)i;
        shares[i].adapter = adapters[i];
        for (int64_t r = 0; r < OUT && !last; r++) {
            for (int64_t c = 0; c < ranks[i] && states[adapters[i]] != 0; c++) {
                float product = shares[i].scale * from[r * WIDE + firsts[i] + c];
                to[at + r * ranks[i] + c] = to[at + r * ranks[i] + c] + product;
            }
        }
        at += OUT * ranks[i];
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_U8, 1, (int64_t)sizeof shares, &table));
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &table, shares, sizeof shares));
    ASSERT_EQ(QLORA_OK, collect(ctx, &table, SHARES, &flags));
    ASSERT(test_read(ctx, &sums, got));
    ASSERT_MEM_EQ(to, got, sizeof got);
    // A row that was not finite makes the gradients of its adapter NaN, and no others.
    static const int32_t bad[OWNERS] = {2, 0, 1};
    ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &flags, bad, sizeof bad));
    ASSERT_EQ(QLORA_OK, collect(ctx, &table, SHARES, &flags));
    ASSERT(test_read(ctx, &sums, got));
    for (int i = 0; i < OUT * (4 + 3 + 16); i++) {
        ASSERT_EQ(i < OUT * 4, got[i] != got[i]);
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &wide));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &sums));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &flags));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &table));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static qlora_result loss_each(qlora_ctx* ctx, const qlora_cross_entropy_desc* a,
                              const qlora__loss_owners* owners) {
    QLORA__ENTER(ctx, "loss_each");
    return qlora__leave(ctx, qlora__cross_entropy(ctx, a, owners));
}

// The loss, the gradient and the sums of rows of three adapters are those of each adapter alone.
TEST losses_are_those_of_each(const test_machine* machine) {
    enum { ROWS = 300, COLS = 12, STRIDE = 64 };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    static float logits[ROWS * COLS];
    static float weights[ROWS];
    static float gradients[2][ROWS * COLS];
    float totals[2][OWNERS * STRIDE];
    int32_t labels[2][ROWS];
    int32_t owners_of[ROWS];
    static const float scales[OWNERS] = {0.25f, 3.0f, 0.01f};
    test_random random = test_random_start("losses");
    test_random_fill(&random, logits, ROWS * COLS, 3.0f);
    test_random_fill(&random, weights, ROWS, 1.0f);
    memset(totals, 0, sizeof totals);
    for (int i = 0; i < ROWS; i++) {
        weights[i] = fabsf(weights[i]);
        owners_of[i] = i * 7 / 50 % OWNERS;
        labels[0][i] = i % 5 == 4 ? -100 : (int32_t)test_random_below(&random, COLS);
    }
    for (int k = -1; k < OWNERS; k++) { // all at once, then one after another
        qlora_tensor t[6];
        qlora_tensor rows_of;
        qlora_tensor label;
        qlora_cross_entropy_desc a;
        memset(&a, 0, sizeof a);
        for (int i = 0; i < ROWS; i++) {
            labels[1][i] = k < 0 || owners_of[i] == k ? labels[0][i] : -100;
        }
        int which = k < 0 ? 0 : 1;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, ROWS, COLS, logits, &t[0]));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, ROWS, weights, &t[1]));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, k < 0 ? OWNERS : 1,
                                        scales + (k < 0 ? 0 : k), &t[2]));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, OWNERS * STRIDE, totals[which], &t[3]));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, ROWS, weights, &t[4]));
        ASSERT(ints_in(ctx, owners_of, ROWS, &rows_of));
        ASSERT(ints_in(ctx, labels[1], ROWS, &label));
        qlora_tensor total;
        ASSERT_EQ(QLORA_OK,
                  qlora_tensor_view(ctx, &t[3], 0, 1, k < 0 ? 0 : k * STRIDE, 3, &total));
        const qlora__loss_owners owners = {&rows_of, OWNERS, STRIDE};
        a.logits = &t[0];
        a.labels = &label;
        a.weights = &t[1];
        a.scale = &t[2];
        a.losses = &t[4];
        a.total = &total;
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, loss_each(ctx, &a, k < 0 ? &owners : NULL));
        ASSERT(test_read(ctx, &t[3], totals[which]));
        static float rows[ROWS * COLS];
        ASSERT(test_read(ctx, &t[0], rows));
        for (int i = 0; i < ROWS * COLS; i++) {
            bool own = k < 0 || owners_of[i / COLS] == k;
            gradients[which][i] = own ? rows[i] : gradients[which][i];
        }
        for (int i = 0; i < 5; i++) {
            ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t[i]));
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &rows_of));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &label));
    }
    ASSERT_MEM_EQ(gradients[1], gradients[0], sizeof gradients[0]);
    ASSERT_MEM_EQ(totals[1], totals[0], sizeof totals[0]);
    ASSERT(totals[0][0] > 0.0f && totals[0][STRIDE] > 0.0f);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(owners_suite) {
    RUN_ON(TEST_EVERYWHERE, rows_keep_their_own);
    RUN_ON(TEST_EVERYWHERE, shares_are_added);
    RUN_ON(TEST_EVERYWHERE, losses_are_those_of_each);
}
