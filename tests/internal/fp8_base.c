// fp8_base.c - frozen weights in FP8: quantising and dequantising against plain loops in f64, their
// products in every tier and on the GPU, and models with such a base, made here or published.
#include <sys/stat.h>

// ---- weights

enum { BASE_ROWS = 150, BASE_COLS = 272, BASE_T = 5 };

// The weight by the definition: codes by search, values rounded to f32 and then to bf16.
static void base_expect(const float* w, int rows, int cols, uint8_t* codes, float* scales,
                        float* values) {
    int across = (cols + 127) / 128;
    for (int i = 0; i < (rows + 127) / 128 * across; i++) {
        int first = i / across * 128;
        int left = i % across * 128;
        double most = 0.0;
        for (int r = first; r < first + 128 && r < rows; r++) {
            for (int c = left; c < left + 128 && c < cols; c++) {
                most = fmax(most, fabs((double)w[r * cols + c]));
            }
        }
        float scale = (float)(most * (double)(1.0f / 448.0f));
        scale = scale < 1e-30f ? 1e-30f : scale;
        float inverse = (float)(1.0 / (double)scale);
        scales[i] = scale;
        for (int r = first; r < first + 128 && r < rows; r++) {
            for (int c = left; c < left + 128 && c < cols; c++) {
                float x = (float)((double)w[r * cols + c] * (double)inverse);
                int code = fp8_nearest(fabs((double)x));
                double value = fp8_value(code) * (double)scale;
                codes[r * cols + c] = (uint8_t)(code | (signbit(x) ? 0x80 : 0));
                values[r * cols + c] =
                    qlora__bf16_to(qlora__bf16_from((float)(signbit(x) ? -value : value)));
            }
        }
    }
}

typedef struct base_weight {
    float w[BASE_ROWS * BASE_COLS];
    uint8_t codes[BASE_ROWS * BASE_COLS];
    float scales[6];
    float values[BASE_ROWS * BASE_COLS];
    qlora_tensor memory;
    qlora__fp8_weight own;
} base_weight;

// Blocks of very different sizes, one of them zero; f16 holds the values exactly.
static void base_fill(base_weight* b, int rows, int cols, const char* name) {
    static const int exponents[6] = {-3, 2, -8, 3, -5, 0};
    test_random random = test_random_start(name);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            int block = r / 128 * ((cols + 127) / 128) + c / 128;
            float x = (float)ldexp(test_random_normal(&random), exponents[block]);
            b->w[r * cols + c] = block == 5 ? 0.0f : qlora__f16_to(qlora__f16_from(x));
        }
    }
}

static qlora_result base_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                  const qlora__fp8_weight* w) {
    QLORA__ENTER(ctx, "base_quantise");
    return qlora__leave(ctx, qlora__fp8_weight_quantise(ctx, source, w));
}

static qlora_result base_read(qlora_ctx* ctx, void* to, const void* from, size_t bytes) {
    QLORA__ENTER(ctx, "base_read");
    return qlora__leave(ctx, qlora__copy_out(ctx, to, from, bytes));
}

static qlora_result base_window(qlora_ctx* ctx, const qlora__fp8_weight* w, int64_t row,
                                int64_t col, const qlora_tensor* out) {
    QLORA__ENTER(ctx, "base_window");
    return qlora__leave(ctx, qlora__fp8_weight_window(ctx, w, row, col, out));
}

static qlora_result base_check(qlora_ctx* ctx, const qlora__fp8_weight* w) {
    QLORA__ENTER(ctx, "base_check");
    return qlora__leave(ctx, qlora__load_fp8_check(ctx, "W", w));
}

static bool base_make(qlora_ctx* ctx, qlora_dtype dtype, int rows, int cols, base_weight* b) {
    qlora_tensor source;
    for (int i = 0; i < rows * cols && dtype == QLORA_BF16; i++) {
        b->w[i] = qlora__bf16_to(qlora__bf16_from(b->w[i]));
    }
    base_expect(b->w, rows, cols, b->codes, b->scales, b->values);
    size_t bytes = qlora__fp8_weight_bytes(rows, cols);
    bool ok = qlora_tensor_create(ctx, QLORA_U8, 1, (int64_t)bytes, &b->memory) == QLORA_OK &&
              test_tensor(ctx, dtype, rows, cols, b->w, &source) == QLORA_OK;
    if (!ok) {
        return false;
    }
    qlora__fp8_weight_wrap(ctx, rows, cols, &b->memory, &b->own);
    return base_quantise(ctx, &source, &b->own) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &source) == QLORA_OK;
}

TEST fp8_base_widens_every_code(void) {
    static const float scales[] = {1.0f, 0.00123f, 1e30f, 3e-39f, 0.0f, 1e-44f};
    uint8_t codes[256];
    float got[256];
    int count = 0;
    for (int code = 0; code < 256; code++) {
        if ((code & 0x7f) != 0x7f) {
            codes[count++] = (uint8_t)code;
        }
    }
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
        float both[2] = {scales[s], scales[s]};
        qlora__fp8_weight w;
        memset(&w, 0, sizeof w);
        w.codes = codes;
        w.scales = both;
        w.rows = 1;
        w.cols = count;
        for (int first = 0; first < 20; first++) {
            qlora__fp8_widen(&w, 0, first, count - 2 * first, got);
            for (int i = 0; i < count - 2 * first; i++) {
                int code = codes[first + i];
                double value = fp8_value(code & 0x7f) * (double)scales[s];
                float f32 = (float)(code >= 0x80 ? -value : value);
                uint32_t bits = (uint32_t)qlora__bf16_from(f32) << 16;
                ASSERT_EQ_FMT(bits, qlora__bits(got[i]), "%#x");
            }
        }
    }
    PASS();
}

TEST fp8_base_finds_nans(void) {
    uint8_t codes[40];
    memset(codes, 0x7e, sizeof codes);
    ASSERT_EQ(40u, qlora__fp8_first_nan(codes, 40));
    for (size_t at = 0; at < 40; at++) {
        codes[at] = at % 2 == 0 ? 0x7f : 0xff;
        ASSERT_EQ_FMT((unsigned)at, (unsigned)qlora__fp8_first_nan(codes, 40), "%u");
        codes[at] = 0xfe;
    }
    PASS();
}

TEST fp8_base_is_the_definition(const test_machine* machine) {
    static const struct {
        int rows;
        int cols;
        qlora_dtype dtype;
    } cases[] = {{BASE_ROWS, BASE_COLS, QLORA_F32},
                 {BASE_ROWS, BASE_COLS, QLORA_BF16},
                 {BASE_ROWS, BASE_COLS, QLORA_F16},
                 {130, 261, QLORA_F32},
                 {3, 7, QLORA_BF16}};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    base_weight* b = (base_weight*)malloc(sizeof *b);
    float* got = (float*)malloc(sizeof b->values);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int rows = cases[i].rows;
        int cols = cases[i].cols;
        size_t n = (size_t)rows * (size_t)cols;
        base_fill(b, rows, cols, "fp8 base");
        ASSERT(base_make(ctx, cases[i].dtype, rows, cols, b));
        uint8_t* codes = (uint8_t*)malloc(n);
        float scales[6];
        size_t count = qlora__fp8_weight_scales(rows, cols);
        ASSERT_EQ(QLORA_OK, base_read(ctx, codes, b->own.codes, n));
        ASSERT_EQ(QLORA_OK, base_read(ctx, scales, b->own.scales, count));
        ASSERT_MEM_EQ(b->scales, scales, count);
        ASSERT_MEM_EQ(b->codes, codes, n);
        free(codes);
        for (int type = 0; type < 2; type++) {
            // The whole, and a window whose rows do not start at a multiple of eight.
            const int window[2][4] = {{0, 0, rows, cols}, {1, 3, rows - 2, cols - 4}};
            for (int k = 0; k < 2; k++) {
                const int* at = window[k];
                qlora_tensor out;
                qlora_dtype dtype = type == 0 ? QLORA_F32 : QLORA_BF16;
                if (dtype == QLORA_BF16 && !test_has_bf16(machine)) {
                    continue;
                }
                ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, dtype, at[2], at[3], &out));
                ASSERT_EQ(QLORA_OK, base_window(ctx, &b->own, at[0], at[1], &out));
                ASSERT(test_read(ctx, &out, got));
                for (int e = 0; e < at[2] * at[3]; e++) {
                    float want = b->values[(at[0] + e / at[3]) * cols + at[1] + e % at[3]];
                    ASSERT_EQ_FMT(qlora__bits(want), qlora__bits(got[e]), "%#x");
                }
                ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &out));
            }
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &b->memory));
    }
    free(got);
    free(b);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST fp8_base_marks_what_is_not_finite(const test_machine* machine) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    base_weight* b = (base_weight*)malloc(sizeof *b);
    for (size_t i = 0; i < 3; i++) {
        float scales[6];
        qlora_tensor source;
        base_fill(b, BASE_ROWS, BASE_COLS, "fp8 base");
        b->w[140 * BASE_COLS + 260] = bad[i]; // in the last block
        ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_U8, 1,
                                                (int64_t)qlora__fp8_weight_bytes(150, BASE_COLS),
                                                &b->memory));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, BASE_ROWS, BASE_COLS, b->w, &source));
        qlora__fp8_weight_wrap(ctx, BASE_ROWS, BASE_COLS, &b->memory, &b->own);
        ASSERT_EQ(QLORA_OK, base_quantise(ctx, &source, &b->own));
        ASSERT_EQ(QLORA_OK, base_read(ctx, scales, b->own.scales, sizeof scales));
        for (int k = 0; k < 6; k++) {
            ASSERT_EQ(k != 5, qlora__finite(scales[k]));
        }
        ASSERT_EQ(QLORA_ERR_FORMAT, base_check(ctx, &b->own));
        ASSERTm(qlora_last_error(ctx),
                strstr(qlora_last_error(ctx), "not finite between [128,256] and [149,271]"));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &b->memory));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &source));
    }
    free(b);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- products

static qlora_cpu_tier base_tier;

static void base_with_tier(qlora_ctx_desc* desc) {
    desc->cpu_tier = base_tier;
}

// y = x W^T and dx = dy W by loops in f64, and their largest magnitudes.
static double base_loops(const base_weight* b, const float* x, int t, bool backward, float* y) {
    int n = backward ? BASE_COLS : BASE_ROWS;
    int k = backward ? BASE_ROWS : BASE_COLS;
    double most = 0.0;
    for (int i = 0; i < t * n; i++) {
        double sum = 0.0;
        for (int j = 0; j < k; j++) {
            int row = backward ? j : i % n;
            int col = backward ? i % n : j;
            sum += (double)x[i / n * k + j] * (double)b->values[row * BASE_COLS + col];
        }
        y[i] = (float)sum;
        most = fmax(most, fabs(sum));
    }
    return most;
}

static qlora_result base_product(qlora_ctx* ctx, bool backward, const qlora_tensor* x,
                                 const qlora__fp8_weight* w, const qlora_tensor* y) {
    const qlora__coded_way way = {QLORA_MATH_F32, backward, 0, 1.0f, NULL};
    qlora__coded coded = qlora__coded_of(NULL, w);
    QLORA__ENTER(ctx, "base_product"); // frees the scratch on return
    return qlora__leave(ctx, qlora__coded_product(ctx, &way, x, coded, y));
}

// Products of few rows (decoding) and of many, in both directions.
TEST fp8_base_multiplies(const test_machine* machine) {
    static const int rows[] = {1, 3, 7, 20};
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    base_weight* b = (base_weight*)malloc(sizeof *b);
    float x[20 * BASE_COLS];
    float want[20 * BASE_COLS];
    float got[20 * BASE_COLS];
    for (int tier = 0; tier < (cpu ? (int)QLORA_CPU_TIER_COUNT : 1); tier++) {
        if (!qlora_cpu_tier_usable((qlora_cpu_tier)tier)) {
            continue;
        }
        base_tier = (qlora_cpu_tier)tier;
        qlora_ctx* ctx = test_open(machine, base_with_tier);
        if (!ctx)
            SKIPm(test_open_reason());
        base_fill(b, BASE_ROWS, BASE_COLS, "fp8 base");
        ASSERT(base_make(ctx, QLORA_F32, BASE_ROWS, BASE_COLS, b));
        for (int i = 0; i < 16; i++) {
            bool backward = i % 2 == 1;
            int t = rows[i / 4];
            qlora_dtype dtype = i / 2 % 2 == 0 ? QLORA_F32 : QLORA_BF16;
            int n = backward ? BASE_COLS : BASE_ROWS;
            int k = backward ? BASE_ROWS : BASE_COLS;
            qlora_tensor in;
            qlora_tensor out;
            if (dtype == QLORA_BF16 && !test_has_bf16(machine)) {
                continue;
            }
            test_random random = test_random_start("fp8 base x");
            test_random_fill(&random, x, (size_t)(t * k), 1.0f);
            for (int e = 0; e < t * k; e++) {
                x[e] = qlora__bf16_to(qlora__bf16_from(x[e]));
            }
            double most = base_loops(b, x, t, backward, want);
            ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, t, k, x, &in));
            ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, dtype, t, n, &out));
            ASSERT_EQ(QLORA_OK, base_product(ctx, backward, &in, &b->own, &out));
            ASSERT(test_read(ctx, &out, got));
            ASSERT_CLOSE(want, got, (size_t)(t * n), most * 1e-6,
                         dtype == QLORA_F32 ? 1e-6 : 1.0 / 256);
            ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &in));
            ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &out));
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &b->memory));
        ASSERT(test_close_ctx(machine, ctx));
    }
    free(b);
    PASS();
}

// ---- FP8 products of FP8 weights

enum { STACK_COLS = 272, STACK_ROWS = BASE_ROWS + 130 };

typedef struct base_forms {
    float factors[2];
    uint8_t weights[STACK_ROWS * STACK_COLS];
    uint8_t transposed[STACK_COLS * (STACK_ROWS + 16)];
} base_forms;

static qlora_result base_place(qlora_ctx* ctx, const qlora_linear_desc* l) {
    QLORA__ENTER(ctx, "base_place");
    qlora_result r = qlora__fp8_measure(ctx, l);
    r = r == QLORA_OK ? qlora__fp8_place(ctx, l, false) : r;
    return qlora__leave(ctx, r == QLORA_OK ? qlora__fp8_place(ctx, l, true) : r);
}

// Both forms of a stack of two weights with `cols` columns.
static bool base_stack(const test_machine* machine, int cols, base_weight* w, base_forms* out) {
    static const int rows[2] = {BASE_ROWS, 130};
    qlora_ctx* ctx = test_open(machine, NULL);
    qlora_linear_desc l;
    qlora__fp8 f;
    bool ok = ctx != NULL;
    memset(&l, 0, sizeof l);
    memset(&f, 0, sizeof f);
    memset(out, 0, sizeof *out);
    l.in = cols;
    l.count = 2;
    l.fp8 = &f;
    for (int i = 0; i < 2 && ok; i++) {
        base_fill(&w[i], rows[i], cols, i == 0 ? "fp8 base" : "fp8 stack");
        ok = base_make(ctx, QLORA_F32, rows[i], cols, &w[i]);
        l.parts[i].out = rows[i];
        l.parts[i].fp8 = &w[i].own;
    }
    int64_t across = qlora__fp8_pitch(STACK_ROWS);
    ok = ok &&
         qlora_tensor_create(ctx, QLORA_U8, STACK_ROWS, qlora__fp8_pitch(cols), &f.weights) ==
             QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_U8, cols, across, &f.transposed) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_F32, 1, 2, &f.factors) == QLORA_OK &&
         base_place(ctx, &l) == QLORA_OK &&
         qlora_tensor_read(ctx, &f.factors, out->factors, sizeof out->factors) == QLORA_OK &&
         qlora_tensor_read(ctx, &f.weights, out->weights, f.weights.bytes) == QLORA_OK &&
         qlora_tensor_read(ctx, &f.transposed, out->transposed, f.transposed.bytes) == QLORA_OK;
    ok = ok && qlora_tensor_destroy(ctx, &f.weights) == QLORA_OK &&
         qlora_tensor_destroy(ctx, &f.transposed) == QLORA_OK &&
         qlora_tensor_destroy(ctx, &f.factors) == QLORA_OK;
    for (int i = 0; i < 2 && ok; i++) {
        ok = qlora_tensor_destroy(ctx, &w[i].memory) == QLORA_OK;
    }
    return ok && test_close_ctx(machine, ctx);
}

// Codes are rounded again, to the largest scale of the stack: by search on the CPU, and the same on
// a GPU.
TEST fp8_base_feeds_fp8_products(const test_machine* machine) {
    static const int widths[] = {STACK_COLS, 261};
    if (strcmp(machine->backend, "cpu") != 0 && !test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    base_weight* w = (base_weight*)malloc(2 * sizeof *w);
    base_forms* got = (base_forms*)malloc(sizeof *got);
    for (int k = 0; k < 2; k++) {
        int cols = widths[k];
        int pitch = (int)qlora__fp8_pitch(cols);
        int across = (int)qlora__fp8_pitch(STACK_ROWS);
        ASSERT(base_stack(machine, cols, w, got));
        float most = 0.0f;
        for (int i = 0; i < 12; i++) {
            most = fmaxf(most, w[i / 6].scales[i % 6]);
        }
        ASSERT_CLOSE(&most, &got->factors[0], 1, 0.0, 1e-6);
        for (int r = 0; r < STACK_ROWS; r++) {
            const base_weight* own = &w[r < BASE_ROWS ? 0 : 1];
            int row = r < BASE_ROWS ? r : r - BASE_ROWS;
            for (int c = 0; c < pitch; c++) {
                int code = got->weights[r * pitch + c];
                int want = 0;
                if (c < cols) {
                    int from = own->codes[row * cols + c];
                    float scale = own->scales[row / 128 * 3 + c / 128] * got->factors[1];
                    want = fp8_nearest((double)((float)fp8_value(from & 0x7f) * scale));
                    want |= from & 0x80;
                    ASSERT_EQ_FMT(code, (int)got->transposed[c * across + r], "%#x");
                }
                ASSERT_EQ_FMT(want, code, "%#x");
            }
        }
        for (int c = 0; c < cols; c++) {
            for (int r = STACK_ROWS; r < across; r++) {
                ASSERT_EQ(0, got->transposed[c * across + r]);
            }
        }
    }
    free(got);
    free(w);
    PASS();
}

// The error of a weight as models have it, beside NF4's: relative, root of the mean square.
TEST fp8_base_is_near(void) {
    enum { N = 256 };
    qlora_ctx_desc desc;
    qlora_ctx* ctx = NULL;
    double sums[3] = {0.0, 0.0, 0.0};
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    float* w = (float*)malloc(N * N * sizeof *w);
    float* got = (float*)malloc(N * N * sizeof *got);
    test_random random = test_random_start("fp8 base error");
    test_random_fill(&random, w, N * N, 0.02f);
    qlora_tensor source;
    qlora_tensor out;
    qlora_tensor memory;
    qlora_nf4_desc four;
    qlora_nf4 nf4;
    qlora__fp8_weight fp8;
    memset(&four, 0, sizeof four);
    four.rows = N;
    four.cols = N;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, N, N, w, &source));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, N, N, &out));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_U8, 1,
                                            (int64_t)qlora__fp8_weight_bytes(N, N), &memory));
    qlora__fp8_weight_wrap(ctx, N, N, &memory, &fp8);
    ASSERT_EQ(QLORA_OK, qlora_nf4_create(ctx, &four, &nf4));
    ASSERT_EQ(QLORA_OK, qlora_nf4_quantise(ctx, &source, &nf4));
    ASSERT_EQ(QLORA_OK, base_quantise(ctx, &source, &fp8));
    for (int k = 0; k < 2; k++) {
        ASSERT_EQ(QLORA_OK, k == 0 ? qlora_nf4_dequantise(ctx, &nf4, &out, true)
                                   : base_window(ctx, &fp8, 0, 0, &out));
        ASSERT(test_read(ctx, &out, got));
        for (int i = 0; i < N * N; i++) {
            double off = (double)got[i] - (double)w[i];
            sums[k] += off * off;
        }
    }
    for (int i = 0; i < N * N; i++) {
        sums[2] += (double)w[i] * (double)w[i];
    }
    double four_off = sqrt(sums[0] / sums[2]);
    double eight_off = sqrt(sums[1] / sums[2]);
    char text[96];
    snprintf(text, sizeof text, "NF4 is %.4f away, FP8 %.4f", four_off, eight_off);
    // Gaussian weights: 9.2 % and 2.7 %.
    ASSERTm(text, four_off > 0.085 && four_off < 0.1 && eight_off > 0.024 && eight_off < 0.029);
    ASSERT_EQ(QLORA_OK, qlora_nf4_destroy(ctx, &nf4));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &source));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &out));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &memory));
    free(w);
    free(got);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- folders

#define BASE_DIR test_path("fp8")
#define BASE_CONFIG                                                                                \
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":160,"      \
    "\"intermediate_size\":200,\"num_hidden_layers\":2,\"num_attention_heads\":4,"                 \
    "\"num_key_value_heads\":2,\"head_dim\":32,\"vocab_size\":64,\"rms_norm_eps\":1e-5,"           \
    "\"max_position_embeddings\":64,\"rope_theta\":10000.0,\"tie_word_embeddings\":false,"         \
    "\"dtype\":\"bfloat16\""
#define BASE_QUANTIZED                                                                             \
    ",\"quantization_config\":{\"activation_scheme\":\"dynamic\",\"fmt\":\"e4m3\","                \
    "\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"modules_to_not_convert\":"         \
    "[\"lm_head\"],\"modules_to_convert\":null,\"scale_fmt\":\"float\",\"expert_dtype\":\"fp8\"}"

// The forms of one model.
typedef enum base_form {
    BASE_ORIGINAL,  // random bf16 weights
    BASE_PUBLISHED, // their FP8 codes and scales
    BASE_WIDENED,   // the values of these codes in bf16
    BASE_HALF,      // codes as published, scales rounded to bf16
    BASE_PARTLY     // published, but for one projection in bf16
} base_form;

// A change that makes a folder wrong.
typedef enum base_fault {
    BASE_GOOD,
    BASE_NO_SCALES,
    BASE_WIDE_SCALES,
    BASE_CODE_NAN,
    BASE_SCALE_NAN,
    BASE_SCALE_NEGATIVE,
    BASE_INT_SCALES,
    BASE_WEIGHT_NAN, // of the original
    BASE_NO_CONFIG
} base_fault;

enum { BASE_TENSORS = 40, BASE_MOST = 200 * 160 };

typedef struct base_file {
    qlora__st_entry entries[BASE_TENSORS];
    char names[BASE_TENSORS][80];
    int64_t shapes[BASE_TENSORS][2];
    unsigned char* data[BASE_TENSORS];
    size_t bytes[BASE_TENSORS];
    uint32_t count;
} base_file;

static void base_add(base_file* f, const char* name, qlora__st_dtype dtype, int rows, int cols,
                     const void* content, size_t bytes) {
    uint32_t i = f->count++;
    snprintf(f->names[i], sizeof f->names[i], "%s", name);
    f->shapes[i][0] = rows;
    f->shapes[i][1] = cols;
    f->entries[i].name = f->names[i];
    f->entries[i].shape = f->shapes[i];
    f->entries[i].dtype = dtype;
    f->entries[i].rank = cols > 0 ? 2 : 1;
    f->data[i] = (unsigned char*)malloc(bytes);
    memcpy(f->data[i], content, bytes);
    f->bytes[i] = bytes;
}

static void base_add_bf16(base_file* f, const char* name, int rows, int cols, const float* w) {
    static uint16_t half[BASE_MOST];
    int n = rows * (cols > 0 ? cols : 1);
    for (int i = 0; i < n; i++) {
        half[i] = qlora__bf16_from(w[i]);
    }
    base_add(f, name, QLORA__ST_BF16, rows, cols, half, (size_t)n * 2);
}

// A projection. The fault is in the last one.
static void base_add_weight(base_file* f, const char* name, int rows, int cols, float* w,
                            base_form form, base_fault fault) {
    static uint8_t codes[BASE_MOST];
    static float values[BASE_MOST];
    float scales[4];
    uint16_t half[4];
    char full[96];
    int down = (rows + 127) / 128;
    int across = (cols + 127) / 128;
    base_expect(w, rows, cols, codes, scales, values);
    if (form == BASE_ORIGINAL) {
        w[130 * cols + 7] = fault == BASE_WEIGHT_NAN ? NAN : w[130 * cols + 7];
        base_add_bf16(f, name, rows, cols, w);
        return;
    }
    if (form == BASE_WIDENED) {
        base_add_bf16(f, name, rows, cols, values);
        return;
    }
    codes[131 * cols + 5] = fault == BASE_CODE_NAN ? 0xff : codes[131 * cols + 5];
    base_add(f, name, QLORA__ST_F8_E4M3, rows, cols, codes, (size_t)(rows * cols));
    scales[down * across - 1] = fault == BASE_SCALE_NAN        ? NAN
                                : fault == BASE_SCALE_NEGATIVE ? -1.0f
                                                               : scales[down * across - 1];
    snprintf(full, sizeof full, "%s_scale_inv", name);
    for (int i = 0; i < down * across; i++) {
        half[i] = qlora__bf16_from(scales[i]);
    }
    if (fault == BASE_NO_SCALES) {
        return;
    }
    bool narrow = form == BASE_HALF;
    qlora__st_dtype dtype = fault == BASE_INT_SCALES ? QLORA__ST_I32
                            : narrow                 ? QLORA__ST_BF16
                                                     : QLORA__ST_F32;
    bool wide = fault == BASE_WIDE_SCALES;
    base_add(f, full, dtype, wide ? 1 : down, wide ? down * across : across,
             narrow ? (const void*)half : scales, (size_t)(down * across) * (narrow ? 2 : 4));
}

static void base_tensors(base_file* f, base_form form, base_fault fault) {
    static const struct {
        const char* name;
        int rows;
        int cols;
    } modules[] = {{"self_attn.q_proj", 128, 160}, {"self_attn.k_proj", 64, 160},
                   {"self_attn.v_proj", 64, 160},  {"self_attn.o_proj", 160, 128},
                   {"mlp.gate_proj", 200, 160},    {"mlp.up_proj", 200, 160},
                   {"mlp.down_proj", 160, 200}};
    static float w[BASE_MOST];
    test_random random = test_random_start("fp8 folder");
    char name[80];
    for (int k = 0; k < 2; k++) {
        test_random_fill(&random, w, 64 * 160, 0.05f);
        base_add_bf16(f, k == 0 ? "model.embed_tokens.weight" : "lm_head.weight", 64, 160, w);
    }
    for (int i = 0; i < 160; i++) {
        w[i] = 1.0f + 0.002f * (float)i;
    }
    base_add_bf16(f, "model.norm.weight", 160, 0, w);
    for (int l = 0; l < 2; l++) {
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", l);
        base_add_bf16(f, name, 160, 0, w);
        snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", l);
        base_add_bf16(f, name, 160, 0, w);
    }
    for (int i = 0; i < 14; i++) {
        int rows = modules[i % 7].rows;
        int cols = modules[i % 7].cols;
        test_random_fill(&random, w, (size_t)(rows * cols), 0.1f);
        for (int e = 0; e < rows * cols; e++) {
            w[e] = qlora__bf16_to(qlora__bf16_from(w[e]));
        }
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", i / 7, modules[i % 7].name);
        base_form own = form != BASE_PARTLY ? form : i == 0 ? BASE_WIDENED : BASE_PUBLISHED;
        base_add_weight(f, name, rows, cols, w, own, i == 13 ? fault : BASE_GOOD);
    }
}

static const char* base_path(const char* name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", BASE_DIR, name);
    return path;
}

static bool base_write_text(const char* path, const char* text) {
    FILE* f = fopen(path, "wb");
    bool ok = f != NULL && fputs(text, f) >= 0;
    return f != NULL && fclose(f) == 0 && ok;
}

static bool base_folder(qlora_ctx* ctx, base_form form, base_fault fault) {
    base_file* f = (base_file*)calloc(1, sizeof *f);
    qlora__st_writer w;
    bool codes = form != BASE_ORIGINAL && form != BASE_WIDENED && fault != BASE_NO_CONFIG;
    mkdir(BASE_DIR, 0777);
    base_tensors(f, form, fault);
    bool ok = qlora__st_write_begin(&ctx->env, base_path("model.safetensors"), f->entries,
                                    f->count, NULL, false, &w) == QLORA_OK;
    for (uint32_t i = 0; i < f->count && ok; i++) {
        ok = qlora__st_write(&ctx->env, &w, f->data[w.order[i]], f->bytes[w.order[i]]) == QLORA_OK;
    }
    ok = ok && qlora__st_write_commit(&ctx->env, &w) == QLORA_OK &&
         base_write_text(base_path("config.json"),
                         codes ? BASE_CONFIG BASE_QUANTIZED "}" : BASE_CONFIG "}");
    for (uint32_t i = 0; i < f->count; i++) {
        free(f->data[i]);
    }
    free(f);
    return ok;
}

static qlora_model_desc base_desc(qlora_base_format base, qlora_mode mode) {
    qlora_model_desc d;
    memset(&d, 0, sizeof d);
    d.dir = BASE_DIR;
    d.base = base;
    d.mode = mode;
    d.rank = 4;
    d.tokens = 24;
    d.max_sequences = 2;
    d.seed = 3;
    return d;
}

typedef struct base_run {
    double loss[3];  // of three steps
    double eval;     // after them
    int32_t text[6]; // greedy
    qlora_plan plan;
} base_run;

// A greedy continuation of six tokens.
static bool base_generate(qlora_model* model, const int32_t* prompt, int32_t* out) {
    static const int32_t none = -1;
    qlora_generate_desc d;
    qlora_generation* text = NULL;
    memset(&d, 0, sizeof d);
    d.prompt = prompt;
    d.prompt_tokens = 5;
    d.stops = &none;
    d.stop_count = 1;
    bool ok = qlora_generate_begin(model, &d, &text) == QLORA_OK;
    for (int i = 0; i < 6 && ok; i++) {
        bool stopped = false;
        ok = qlora_generate_next(text, &out[i], &stopped) == QLORA_OK && !stopped;
    }
    return qlora_generate_end(text) == QLORA_OK && ok;
}

// Trains, evaluates and generates.
static bool base_train(qlora_ctx* ctx, const qlora_model_desc* wanted, base_run* out) {
    static const int32_t ids[24] = {3, 1, 4, 1,  5, 9, 2, 6,  5, 35, 8, 9,
                                    7, 9, 3, 23, 8, 4, 6, 26, 4, 33, 8, 3};
    static const int32_t lengths[2] = {14, 10};
    qlora_model_desc d = *wanted;
    qlora_train_desc t;
    qlora_model* model = NULL;
    qlora_trainer* trainer = NULL;
    qlora_model_info info;
    qlora_eval_info eval;
    qlora_batch batch;
    memset(&t, 0, sizeof t);
    memset(out, 0, sizeof *out);
    memset(&batch, 0, sizeof batch);
    memset(&eval, 0, sizeof eval);
    t.lr = 1e-3;
    t.schedule = QLORA_SCHEDULE_CONSTANT;
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = lengths;
    batch.count = 2;
    d.generate_tokens = 16;
    bool ok = qlora_model_open(ctx, &d, &model) == QLORA_OK &&
              qlora_model_query(model, &info) == QLORA_OK &&
              qlora_trainer_create(model, &t, &trainer) == QLORA_OK;
    for (int i = 0; i < 3 && ok; i++) {
        qlora_train_info step;
        ok = qlora_train_step(trainer, &batch, 1, &step) == QLORA_OK;
        out->loss[i] = ok ? step.loss : (double)NAN;
    }
    ok = ok && qlora_eval(model, &batch, &eval) == QLORA_OK;
    out->eval = ok ? eval.loss : (double)NAN;
    if (ok) {
        out->plan = *info.plan;
    }
    ok = ok && base_generate(model, ids, out->text);
    ok = qlora_trainer_destroy(trainer) == QLORA_OK && ok;
    return qlora_model_close(model) == QLORA_OK && ok;
}

static bool base_same(const base_run* a, const base_run* b) {
    return memcmp(a->loss, b->loss, sizeof a->loss) == 0 && a->eval > 0.0 && a->eval == b->eval &&
           memcmp(a->text, b->text, sizeof a->text) == 0;
}

static bool base_close(const base_run* a, const base_run* b, double part) {
    bool ok = fabs(a->eval - b->eval) <= part * fabs(b->eval);
    for (int i = 0; i < 3; i++) {
        ok = ok && fabs(a->loss[i] - b->loss[i]) <= part * fabs(b->loss[i]);
    }
    return ok;
}

#define BASE_TRAIN(form, desc, run)                                                                \
    ASSERT(base_folder(ctx, form, BASE_GOOD));                                                     \
    ASSERTm(qlora_last_error(ctx), base_train(ctx, desc, run))

// A published folder computes what its dequantised values compute, and what a base that is
// quantised here computes, however the weights are kept.
TEST fp8_base_trains(const test_machine* machine) {
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    for (int k = test_checked(machine) ? 1 : 0; k < (test_has_bf16(machine) ? 2 : 1); k++) {
        qlora_mode mode = k == 0 ? QLORA_MODE_F32 : QLORA_MODE_BF16;
        qlora_model_desc stored = base_desc(QLORA_BASE_NF4, mode); // what the folder has counts
        qlora_model_desc eight = base_desc(QLORA_BASE_FP8, mode);
        qlora_model_desc plain = base_desc(QLORA_BASE_16BIT, mode);
        base_run published;
        base_run other;
        BASE_TRAIN(BASE_PUBLISHED, &stored, &published);
        ASSERT(base_train(ctx, &eight, &other) && base_same(&published, &other));
        ASSERT(base_train(ctx, &plain, &other) && base_same(&published, &other));
        BASE_TRAIN(BASE_WIDENED, &plain, &other);
        ASSERT(base_close(&published, &other, k == 0 ? 1e-5 : 2e-2));
        // The portable loops widen a quantised weight in slices, which changes the order of the
        // sums of dx, so that only the first loss has the same bits.
        bool packed = ctx->cpu->tier != QLORA_CPU_TIER_PORTABLE;
        size_t losses = packed ? sizeof other.loss : sizeof other.loss[0];
        ASSERT(!cpu || memcmp(published.loss, other.loss, losses) == 0);
        ASSERT(k != 0 || memcmp(published.text, other.text, sizeof other.text) == 0);
        BASE_TRAIN(BASE_PARTLY, &stored, &other); // what is not quantised stays so
        ASSERT(base_close(&published, &other, k == 0 ? 1e-5 : 2e-2));
        BASE_TRAIN(BASE_HALF, &stored, &other);
        ASSERT(!base_same(&published, &other) && base_close(&published, &other, 2e-2));
        BASE_TRAIN(BASE_ORIGINAL, &eight, &other);
        ASSERT(base_same(&published, &other));
        ASSERT(base_train(ctx, &plain, &other));
        ASSERT(!base_same(&published, &other) && base_close(&published, &other, 3e-2));
        eight.cache = QLORA_CHOICE_ON;
        eight.recompute = QLORA_CHOICE_ON;
        ASSERT(base_train(ctx, &eight, &other));
        ASSERT(memcmp(published.loss, other.loss, sizeof other.loss) == 0);
        eight.cache = QLORA_CHOICE_OFF;
        eight.recompute = QLORA_CHOICE_OFF;
        eight.keep_quantised = true; // written, then read
        for (int again = 0; again < 2; again++) {
            ASSERT(base_train(ctx, &eight, &other) && base_same(&published, &other));
        }
        ASSERT(remove(base_path("model.qlora-fp8")) == 0);
        eight.keep_quantised = false;
        eight.dora = true;
        BASE_TRAIN(BASE_PUBLISHED, &eight, &other);
        ASSERT(base_close(&published, &other, 0.2));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// In FP8 mode, from a folder and from weights that are quantised here.
TEST fp8_base_trains_in_fp8(const test_machine* machine) {
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    if (!cpu && !test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_model_desc eight = base_desc(QLORA_BASE_FP8, QLORA_MODE_FP8);
    qlora_model_desc wide = base_desc(QLORA_BASE_FP8, cpu ? QLORA_MODE_F32 : QLORA_MODE_BF16);
    base_run published;
    base_run other;
    BASE_TRAIN(BASE_PUBLISHED, &eight, &published);
    ASSERT(base_train(ctx, &wide, &other));
    ASSERT(!base_same(&published, &other) && base_close(&published, &other, 2e-2));
    eight.cache = QLORA_CHOICE_OFF;
    BASE_TRAIN(BASE_ORIGINAL, &eight, &other);
    ASSERT(memcmp(published.loss, other.loss, sizeof other.loss) == 0);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// One byte per weight and four per block.
TEST fp8_base_is_planned(void) {
    qlora_ctx_desc desc;
    qlora_ctx* ctx = NULL;
    qlora_plan plans[4];
    qlora_plan_desc machine;
    memset(&desc, 0, sizeof desc);
    memset(&machine, 0, sizeof machine);
    machine.capability = 80;
    desc.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    ASSERT(base_folder(ctx, BASE_ORIGINAL, BASE_GOOD));
    for (int base = 0; base < 4; base++) {
        qlora_model_desc d = base_desc((qlora_base_format)base, QLORA_MODE_BF16);
        ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &d, &machine, &plans[base]));
    }
    int64_t weights = 2 * (2 * 128 * 160 + 2 * 64 * 160 + 3 * 200 * 160);
    int64_t blocks = 2 * (2 + 2 + 2 + 2 + 4 + 4 + 4);
    int64_t saved = (int64_t)plans[QLORA_BASE_16BIT].base - (int64_t)plans[QLORA_BASE_FP8].base;
    ASSERT(saved <= weights - 4 * blocks && saved > weights - 14 * 2 * 256);
    ASSERT(plans[QLORA_BASE_FP8].base > plans[QLORA_BASE_NF4].base);
    // The first projection has no codes, the others are worth a cache.
    ASSERT(base_folder(ctx, BASE_PARTLY, BASE_GOOD));
    machine.bytes = (uint64_t)1 << 30;
    qlora_model_desc d = base_desc(QLORA_BASE_FP8, QLORA_MODE_BF16);
    ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &d, &machine, &plans[0]));
    ASSERT_EQ(2, plans[0].cached_layers);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

static void base_empty(const char* dir) {
    static const char* const names[] = {"config.json", "model.safetensors", "model.gguf",
                                        "adapter_config.json", "adapter_model.safetensors"};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        remove(path);
    }
    remove(dir);
}

// Merging writes the dequantised weights in 16 bits: from a folder, with and without its weights in
// memory, and from a base that was quantised here.
TEST fp8_base_is_merged(const test_machine* machine) {
#define BASE_MERGED test_path("fp8-merged")
    static const struct {
        base_form form;
        qlora_base_format base;
        qlora_purpose purpose;
        qlora_merge_base into;
    } cases[] = {{BASE_PUBLISHED, QLORA_BASE_NF4, QLORA_PURPOSE_EVALUATE, QLORA_MERGE_ORIGINAL},
                 {BASE_PUBLISHED, QLORA_BASE_FP8, QLORA_PURPOSE_EVALUATE, QLORA_MERGE_TRAINED},
                 {BASE_PUBLISHED, QLORA_BASE_NF4, QLORA_PURPOSE_ADAPTER, QLORA_MERGE_ORIGINAL},
                 {BASE_ORIGINAL, QLORA_BASE_FP8, QLORA_PURPOSE_EVALUATE, QLORA_MERGE_TRAINED}};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT(base_folder(ctx, BASE_WIDENED, BASE_GOOD));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_model_desc d = base_desc(cases[i].base, QLORA_MODE_F32);
        qlora_merge_desc merge;
        qlora_model* model = NULL;
        memset(&merge, 0, sizeof merge);
        base_empty(BASE_MERGED);
        mkdir(BASE_MERGED, 0777);
        merge.dir = BASE_MERGED;
        merge.dtype = QLORA_BF16;
        merge.base = cases[i].into;
        d.purpose = cases[i].purpose;
        ASSERT(base_folder(ctx, cases[i].form, BASE_GOOD));
        if (d.purpose == QLORA_PURPOSE_ADAPTER) { // which comes from a folder
            qlora_model_desc whole = base_desc(QLORA_BASE_NF4, QLORA_MODE_F32);
            ASSERT_EQ(QLORA_OK, qlora_model_open(ctx, &whole, &model));
            ASSERT_EQ(QLORA_OK, qlora_adapter_save(model, test_path("fp8-adapter"), NULL));
            ASSERT_EQ(QLORA_OK, qlora_model_close(model));
            d.adapter = test_path("fp8-adapter");
            d.rank = 0;
        }
        ASSERTm(qlora_last_error(ctx), qlora_model_open(ctx, &d, &model) == QLORA_OK);
        ASSERTm(qlora_last_error(ctx), qlora_merge_save(model, &merge) == QLORA_OK);
        ASSERT_EQ(QLORA_OK, qlora_model_close(model));
        qlora__folder got;
        qlora__folder want;
        ASSERT(base_folder(ctx, BASE_WIDENED, BASE_GOOD));
        ASSERT_EQ(QLORA_OK, qlora__folder_open(&ctx->env, BASE_MERGED, &got));
        ASSERT_EQ(QLORA_OK, qlora__folder_open(&ctx->env, BASE_DIR, &want));
        ASSERT_EQ_FMT(want.count, got.count, "%u"); // without the scales
        for (uint32_t k = 0; k < want.count; k++) {
            const qlora__st_tensor* a = want.entries[want.by_name[k]].tensor;
            const qlora__st_tensor* b = got.entries[got.by_name[k]].tensor;
            ASSERT_STR_EQ(a->name, b->name);
            ASSERT(a->dtype == b->dtype && a->bytes == b->bytes);
            for (uint64_t e = 0; e < a->bytes / 2; e++) { // -0 + 0 = 0
                float x = 0.0f;
                float y = 0.0f;
                qlora__st_read_f32(a, e, 1, &x);
                qlora__st_read_f32(b, e, 1, &y);
                ASSERTm(a->name, x == y);
            }
        }
        qlora__folder_close(&ctx->env, &got);
        qlora__folder_close(&ctx->env, &want);
        qlora_model_config config;
        ASSERT_EQ(QLORA_OK, qlora_config_read(ctx, BASE_MERGED, &config));
        ASSERT_FALSE(config.quantized);
    }
    base_empty(BASE_MERGED);
    base_empty(test_path("fp8-adapter"));
    base_empty(BASE_DIR);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST fp8_base_folders_are_checked(const test_machine* machine) {
    static const struct {
        base_form form;
        base_fault fault;
        const char* text;
    } cases[] = {
        {BASE_PUBLISHED, BASE_NO_SCALES, "layers.1.mlp.down_proj.weight_scale_inv is missing"},
        {BASE_PUBLISHED, BASE_WIDE_SCALES,
         "mlp.down_proj.weight_scale_inv has shape [1,4]; it must be [2,2]"},
        {BASE_PUBLISHED, BASE_INT_SCALES, "weight_scale_inv has dtype I32"},
        {BASE_PUBLISHED, BASE_CODE_NAN, "mlp.down_proj.weight[131,5] is a NaN"},
        {BASE_PUBLISHED, BASE_SCALE_NAN, "mlp.down_proj.weight_scale_inv[1,1] is nan"},
        {BASE_PUBLISHED, BASE_SCALE_NEGATIVE, "mlp.down_proj.weight_scale_inv[1,1] is -1"},
        {BASE_PUBLISHED, BASE_NO_CONFIG, "is in FP8, but config.json has no quantization_config"},
        {BASE_ORIGINAL, BASE_WEIGHT_NAN,
         "mlp.down_proj.weight has a value that is not finite between [128,0] and [159,127]"}};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_model_desc d = base_desc(QLORA_BASE_FP8, QLORA_MODE_F32);
        qlora_model* model = NULL;
        ASSERT(base_folder(ctx, cases[i].form, cases[i].fault));
        ASSERTm(cases[i].text, qlora_model_open(ctx, &d, &model) != QLORA_OK);
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), cases[i].text) != NULL);
    }
    base_empty(BASE_DIR);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(fp8_base_suite) {
    RUN_TEST(fp8_base_widens_every_code);
    RUN_TEST(fp8_base_finds_nans);
    RUN_ON(TEST_EVERYWHERE, fp8_base_is_the_definition);
    RUN_ON(TEST_ONE_EACH, fp8_base_marks_what_is_not_finite);
    RUN_ON(TEST_ONE_EACH, fp8_base_multiplies);
    RUN_ON(TEST_ONE_EACH, fp8_base_feeds_fp8_products);
    RUN_TEST(fp8_base_is_near);
    RUN_ON(TEST_ONE_EACH, fp8_base_trains);
    RUN_ON(TEST_ONE_EACH, fp8_base_trains_in_fp8);
    RUN_TEST(fp8_base_is_planned);
    RUN_ON(TEST_ONE_EACH, fp8_base_is_merged);
    RUN_ON(TEST_ONE_EACH, fp8_base_folders_are_checked);
}
