// nf4.c - NF4: bytes identical to those of bitsandbytes, dequantising, products, on every machine.
//
// The CPU's bytes are checked against bitsandbytes' own; every other machine must give the CPU's
// bytes. Vectors and models in ../shared (or $QLORA_SHARED) are used if present; a few vectors
// are committed.
#include "machines.h"

#include "golden/nf4_vectors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static float bf16_round(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return from_bits((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// ---- one weight with all its parts on the host --------------------------------------------------

typedef struct parts {
    uint8_t* codes;
    float* absmax; // plain
    uint8_t* q;
    float* scales;
    float offset;
    int64_t n;
    int64_t blocks;
    int64_t groups;
} parts;

static parts parts_make(int64_t n, int32_t block, int32_t block2) {
    parts p;
    memset(&p, 0, sizeof p);
    p.n = n;
    p.blocks = (n + block - 1) / block;
    p.groups = (p.blocks + block2 - 1) / block2;
    p.codes = (uint8_t*)calloc((size_t)(n + 1) / 2 + 1, 1);
    p.absmax = (float*)calloc((size_t)p.blocks + 1, 4);
    p.q = (uint8_t*)calloc((size_t)p.blocks + 1, 1);
    p.scales = (float*)calloc((size_t)p.groups + 1, 4);
    return p;
}

static void parts_free(parts* p) {
    free(p->codes);
    free(p->absmax);
    free(p->q);
    free(p->scales);
}

static bool parts_equal(const parts* a, const parts* b) {
    bool equal = true;
    equal = equal && memcmp(a->codes, b->codes, (size_t)(a->n + 1) / 2) == 0;
    equal = equal && memcmp(a->absmax, b->absmax, (size_t)a->blocks * 4) == 0;
    equal = equal && memcmp(a->q, b->q, (size_t)a->blocks) == 0;
    equal = equal && memcmp(a->scales, b->scales, (size_t)a->groups * 4) == 0;
    return equal && memcmp(&a->offset, &b->offset, 4) == 0;
}

// Quantises twice, with plain and with double-quantised scales; the codes must be identical.
static const char* quantise(qlora_ctx* ctx, const qlora_tensor* source, int32_t block,
                            int32_t block2, const float* map, parts* out) {
    parts plain = parts_make(out->n, block, block2);
    const char* wrong = NULL;
    for (int pass = 0; pass < 2 && wrong == NULL; pass++) {
        qlora_nf4_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.rows = source->rows;
        desc.cols = source->cols;
        desc.block = block;
        desc.block2 = block2;
        desc.plain_scales = pass == 0;
        qlora_nf4 w;
        if (qlora_nf4_create(ctx, &desc, &w) != QLORA_OK) {
            return "create";
        }
        qlora_nf4_parts maps;
        memset(&maps, 0, sizeof maps);
        maps.map = (float*)(uintptr_t)map;
        qlora_nf4_parts parts_out;
        memset(&parts_out, 0, sizeof parts_out);
        parts_out.codes = pass == 0 ? plain.codes : out->codes;
        if (pass == 0) {
            parts_out.absmax = out->absmax;
        } else {
            parts_out.absmax_codes = out->q;
            parts_out.absmax_scales = out->scales;
            parts_out.offset = &out->offset;
        }
        if ((map != NULL && qlora_nf4_write(ctx, &w, &maps) != QLORA_OK) ||
            qlora_nf4_quantise(ctx, source, &w) != QLORA_OK ||
            qlora_nf4_read(ctx, &w, &parts_out) != QLORA_OK) {
            fprintf(stderr, "%s\n", qlora_last_error(ctx));
            wrong = "quantise";
        }
        if (qlora_nf4_destroy(ctx, &w) != QLORA_OK) {
            wrong = "destroy";
        }
    }
    if (wrong == NULL && memcmp(plain.codes, out->codes, (size_t)(out->n + 1) / 2) != 0) {
        wrong = "codes depend on the kind of scales";
    }
    parts_free(&plain);
    return wrong;
}

// ---- against bitsandbytes -----------------------------------------------------------------------

TEST nf4_matches_committed_vectors(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    float map[256];
    for (int i = 0; i < 256; i++) {
        map[i] = from_bits(nf4_golden_map[i]);
    }
    for (size_t i = 0; i < sizeof nf4_goldens / sizeof nf4_goldens[0]; i++) {
        const nf4_golden* g = &nf4_goldens[i];
        float* x = (float*)malloc((size_t)g->n * 4);
        for (int64_t k = 0; k < g->n; k++) {
            x[k] = from_bits(g->x[k]);
        }
        qlora_tensor source;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, g->n, x, &source));
        parts p = parts_make(g->n, 64, 256);
        const char* wrong = quantise(ctx, &source, 64, 256, map, &p);
        if (wrong != NULL) {
            FAILm(wrong);
        }
        ASSERT_EQm(g->name, 0, memcmp(p.codes, g->packed, (size_t)(g->n + 1) / 2));
        ASSERT_EQm(g->name, 0, memcmp(p.absmax, g->absmax, (size_t)p.blocks * 4));
        ASSERT_EQm(g->name, 0, memcmp(p.q, g->codes, (size_t)p.blocks));
        ASSERT_EQm(g->name, 0, memcmp(p.scales, &g->scale, 4));
        ASSERT_EQm(g->name, 0, memcmp(&p.offset, &g->offset, 4));
        parts_free(&p);
        free(x);
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &source));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- files in ../shared -------------------------------------------------------------------------

typedef struct file {
    char* data;
    size_t size;
} file;

static bool file_read(const char* folder, const char* name, file* out) {
    const char* shared = getenv("QLORA_SHARED");
    char path[1024];
    snprintf(path, sizeof path, "%s/%s/%s", shared != NULL ? shared : "../shared", folder, name);
    FILE* f = fopen(path, "rb");
    if (f == NULL) {
        return false;
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    out->data = (char*)malloc((size_t)size + 1);
    out->size = fread(out->data, 1, (size_t)size, f);
    out->data[out->size] = '\0';
    fclose(f);
    return out->size == (size_t)size;
}

// The bytes of a tensor in a safetensors file, or NULL if it does not exist.
static const char* tensor_find(const file* f, const char* name, char dtype[8], size_t* bytes) {
    uint64_t header = 0;
    memcpy(&header, f->data, 8);
    char key[512];
    snprintf(key, sizeof key, "\"%s\":{", name);
    const char* end = f->data + 8 + header;
    const char* p = strstr(f->data + 8, key);
    if (p == NULL || p >= end) {
        return NULL;
    }
    const char* type = strstr(p, "\"dtype\":\"");
    const char* offsets = strstr(p, "\"data_offsets\":[");
    unsigned long long from = 0;
    unsigned long long to = 0;
    if (type == NULL || offsets == NULL || sscanf(type + 9, "%7[A-Z0-9]", dtype) != 1 ||
        sscanf(offsets + 16, "%llu,%llu", &from, &to) != 2) {
        return NULL;
    }
    *bytes = (size_t)(to - from);
    return end + from;
}

// Quantises the bf16 form of one weight of a model and compares it with the 4-bit model's parts.
static const char* compare_tensor(qlora_ctx* ctx, const file* dense, const file* packed,
                                  const char* name) {
    char dtype[8] = "";
    size_t bytes = 0;
    size_t size[5];
    char key[600];
    const char* w = tensor_find(dense, name, dtype, &bytes);
    if (w == NULL) {
        return "the dense model has no such tensor";
    }
    bool wide = strcmp(dtype, "F32") == 0;
    int64_t n = (int64_t)(bytes / (wide ? 4 : 2));
    float* values = (float*)malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) { // the f32 model was cast to bf16 before it was quantised
        uint16_t h = 0;
        if (wide) {
            memcpy(&values[i], w + 4 * i, 4);
            values[i] = bf16_round(values[i]);
        } else {
            memcpy(&h, w + 2 * i, 2);
            values[i] = from_bits((uint32_t)h << 16);
        }
    }
    static const char* const suffixes[5] = {"", ".absmax", ".nested_absmax", ".nested_quant_map",
                                            ".quant_state.bitsandbytes__nf4"};
    const char* part[5];
    for (int i = 0; i < 5; i++) {
        snprintf(key, sizeof key, "%s%s", name, suffixes[i]);
        part[i] = tensor_find(packed, key, dtype, &size[i]);
        if (part[i] == NULL) {
            free(values);
            return "the 4-bit model lacks a part";
        }
    }
    char state[1024];
    snprintf(state, sizeof state, "%.*s", (int)size[4], part[4]);
    const char* text = strstr(state, "\"nested_offset\":");
    float offset = text != NULL ? (float)strtod(text + 16, NULL) : NAN;
    float map[256];
    memcpy(map, part[3], sizeof map);
    qlora_tensor source;
    parts p = parts_make(n, 64, 256);
    const char* wrong = "upload";
    if (test_tensor(ctx, QLORA_BF16, 1, n, values, &source) == QLORA_OK) {
        wrong = quantise(ctx, &source, 64, 256, map, &p);
        qlora_tensor_destroy(ctx, &source);
    }
    if (wrong == NULL) {
        wrong = memcmp(p.codes, part[0], size[0]) != 0    ? "codes"
                : memcmp(p.q, part[1], size[1]) != 0      ? "codes of the scales"
                : memcmp(p.scales, part[2], size[2]) != 0 ? "scales of the scales"
                : memcmp(&p.offset, &offset, 4) != 0      ? "offset"
                : size[0] != (size_t)(n + 1) / 2 || size[1] != (size_t)p.blocks ? "sizes"
                                                                                : NULL;
    }
    parts_free(&p);
    free(values);
    return wrong;
}

static int compare_models(qlora_ctx* ctx, const char* dense_folder, const char* packed_folder,
                          int limit) {
    file dense = {NULL, 0};
    file packed = {NULL, 0};
    int compared = -1;
    if (file_read(dense_folder, "model.safetensors", &dense) &&
        file_read(packed_folder, "model.safetensors", &packed)) {
        compared = 0;
        const char* p = packed.data + 8;
        const char* mark = ".quant_state.bitsandbytes__nf4\"";
        while ((p = strstr(p, mark)) != NULL && compared != -2 && compared < limit) {
            const char* start = p;
            while (start[-1] != '"') {
                start--;
            }
            char name[512];
            snprintf(name, sizeof name, "%.*s", (int)(p - start), start);
            const char* wrong = compare_tensor(ctx, &dense, &packed, name);
            if (wrong != NULL) {
                fprintf(stderr, "%s %s: %s differ\n", packed_folder, name, wrong);
                compared = -2;
            } else {
                compared++;
            }
            p += strlen(mark);
        }
    }
    free(dense.data);
    free(packed.data);
    return compared;
}

static const char* const FIXTURES[] = {"llama", "llama-hd128", "llama3-rope", "mistral",
                                       "qwen2", "qwen3",       "stories260K"};

TEST nf4_matches_models(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    // The interpreter would take minutes for all of them.
    int limit = strcmp(machine->backend, "fake") == 0 ? 1 : 1000;
    int total = 0;
    int models = 0;
    for (size_t i = 0; i < sizeof FIXTURES / sizeof FIXTURES[0]; i++) {
        char dense[256];
        char packed[256];
        snprintf(dense, sizeof dense, "fixtures/%s/model", FIXTURES[i]);
        snprintf(packed, sizeof packed, "fixtures/%s/model-bnb4", FIXTURES[i]);
        int n = compare_models(ctx, dense, packed, limit);
        ASSERT(n != -2);
        total += n > 0 ? n : 0;
        models += n > 0;
    }
    int n = compare_models(ctx, "models/stories260K", "models/stories260K-bnb-nf4", limit);
    ASSERT(n != -2);
    total += n > 0 ? n : 0;
    models += n > 0;
    ASSERT(test_close_ctx(machine, ctx));
    if (models == 0) {
        SKIPm("../shared not found (set QLORA_SHARED)");
    }
    ASSERT_EQ_FMT(8, models, "%d");
    ASSERT_EQ_FMT(limit == 1 ? 8 : 154, total, "%d");
    PASS();
}

// ---- against the CPU ----------------------------------------------------------------------------

typedef struct quantise_case {
    int64_t rows;
    int64_t cols;
    int32_t block;
    int32_t block2;
    qlora_dtype dtype;
} quantise_case;

static const quantise_case CASES[] = {
    {1, 1, 64, 256, QLORA_F32},    {0, 7, 64, 256, QLORA_F32},   {3, 64, 64, 256, QLORA_BF16},
    {5, 13, 64, 256, QLORA_F16},   {17, 40, 32, 4, QLORA_F32},   {2, 4097, 4096, 256, QLORA_BF16},
    {40, 136, 64, 16, QLORA_BF16}, {300, 64, 128, 2, QLORA_F16}, {70, 260, 64, 256, QLORA_F32},
};
#define CASE_COUNT (sizeof CASES / sizeof CASES[0])

static float* case_values(size_t index) {
    const quantise_case* c = &CASES[index];
    test_random random = test_random_start("nf4 values");
    size_t n = (size_t)(c->rows * c->cols);
    float* x = (float*)malloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++) {
        int64_t b = (int64_t)i / c->block;
        x[i] = (float)test_random_normal(&random) * (float)(1 + b % 5) * (b == 1 ? 0.0f : 0.05f);
    }
    return x;
}

static const char* quantise_on(const test_machine* machine, size_t index, parts* out) {
    const quantise_case* c = &CASES[index];
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        return "open";
    }
    float* x = case_values(index);
    qlora_tensor source;
    *out = parts_make(c->rows * c->cols, c->block, c->block2);
    const char* wrong = test_tensor(ctx, c->dtype, c->rows, c->cols, x, &source) != QLORA_OK
                            ? "tensor"
                            : quantise(ctx, &source, c->block, c->block2, NULL, out);
    free(x);
    qlora_tensor_destroy(ctx, &source);
    return wrong == NULL && !test_close_ctx(machine, ctx) ? "close" : wrong;
}

TEST nf4_bytes_equal_the_cpus(const test_machine* machine) {
    for (size_t i = 0; i < CASE_COUNT; i++) {
        parts expected;
        parts got;
        const char* wrong = quantise_on(test_machine_at(0), i, &expected);
        if (wrong == NULL) {
            wrong = quantise_on(machine, i, &got);
        }
        if (wrong != NULL) {
            FAILm(wrong);
        }
        if (CASES[i].rows > 1) { // also a block of zeros
            ASSERT(expected.blocks < 2 || expected.absmax[1] == 0.0f);
            ASSERT(expected.absmax[0] > 0.0f);
        }
        ASSERT(parts_equal(&expected, &got));
        parts_free(&expected);
        parts_free(&got);
    }
    PASS();
}

// A weight quantised on the machine, and its elements in f32 as the test itself decodes the parts.
typedef struct weight {
    qlora_nf4 w;
    float* exact;   // level * absmax
    float* rounded; // rounded to bf16
} weight;

static bool weight_make(qlora_ctx* ctx, test_random* random, int64_t rows, int64_t cols, bool plain,
                        weight* out) {
    size_t n = (size_t)(rows * cols);
    float* x = (float*)malloc(n * 4 + 4);
    test_random_fill(random, x, n, 0.05f);
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = rows;
    desc.cols = cols;
    desc.plain_scales = plain;
    parts p = parts_make((int64_t)n, 64, 256);
    qlora_nf4_parts host;
    memset(&host, 0, sizeof host);
    float levels[16];
    float map[256];
    host.codes = p.codes;
    host.absmax = plain ? p.absmax : NULL;
    host.absmax_codes = plain ? NULL : p.q;
    host.absmax_scales = plain ? NULL : p.scales;
    host.offset = plain ? NULL : &p.offset;
    host.levels = levels;
    host.map = map;
    qlora_tensor source;
    bool ok = test_tensor(ctx, QLORA_F32, rows, cols, x, &source) == QLORA_OK &&
              qlora_nf4_create(ctx, &desc, &out->w) == QLORA_OK &&
              qlora_nf4_quantise(ctx, &source, &out->w) == QLORA_OK &&
              qlora_nf4_read(ctx, &out->w, &host) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &source) == QLORA_OK;
    out->exact = (float*)malloc(n * 4 + 4);
    out->rounded = (float*)malloc(n * 4 + 4);
    for (size_t e = 0; ok && e < n; e++) {
        int code = e % 2 != 0 ? p.codes[e / 2] & 15 : p.codes[e / 2] >> 4;
        float scale = p.absmax[e / 64];
        if (!plain) {
            volatile float product = map[p.q[e / 64]] * p.scales[e / 64 / 256];
            scale = product + p.offset;
        }
        out->exact[e] = levels[code] * scale;
        out->rounded[e] = bf16_round(out->exact[e]);
        // It must also match the input as closely as 4 bits allow: within half the widest gap
        // between levels.
        ok = fabsf(out->exact[e] - x[e]) <= scale * 0.155f + fabsf(x[e]) * 0.1f;
    }
    parts_free(&p);
    free(x);
    return ok;
}

static void weight_free(qlora_ctx* ctx, weight* w) {
    qlora_nf4_destroy(ctx, &w->w);
    free(w->exact);
    free(w->rounded);
}

TEST nf4_widens(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    static const int64_t sizes[][2] = {{1, 1}, {5, 13}, {9, 64}, {6, 2056}, {70, 72}, {0, 4}};
    test_random random = test_random_start("nf4_widens");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int form = 0; form < 8; form++) {
            int64_t rows = sizes[i][0];
            int64_t cols = sizes[i][1];
            qlora_dtype dtype = form % 4 == 3 ? QLORA_F32 : (qlora_dtype)(form % 4);
            bool via_bf16 = form % 4 == 3;
            if (dtype != QLORA_F32 && !test_has_bf16(machine)) {
                continue;
            }
            int64_t ld = cols + (form < 4 ? 0 : 8 + (8 - cols % 8) % 8);
            weight w;
            ASSERT(weight_make(ctx, &random, rows, cols, form % 2 == 0, &w));
            size_t n = (size_t)(rows * ld);
            float* image = (float*)malloc(n * 4 + 4);
            for (size_t k = 0; k < n; k++) {
                image[k] = 12345.0f;
            }
            qlora_tensor whole;
            qlora_tensor view;
            ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, rows, ld, image, &whole));
            ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &whole, 0, rows, 0, cols, &view));
            ASSERT_EQ(QLORA_OK, qlora_nf4_dequantise(ctx, &w.w, &view, via_bf16));
            ASSERT(test_read(ctx, &whole, image));
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t c = 0; c < ld; c++) {
                    float got = image[r * ld + c];
                    if (c >= cols) {
                        ASSERT(fabsf(got - 12345.0f) < 60.0f);
                        continue;
                    }
                    float exact = w.exact[r * cols + c];
                    float expected =
                        dtype == QLORA_BF16 || via_bf16 ? w.rounded[r * cols + c] : exact;
                    if (dtype == QLORA_F16) {
                        ASSERT(fabsf(got - exact) <= fabsf(exact) / 2048.0f + 3e-8f);
                    } else {
                        ASSERT_EQ(0, memcmp(&expected, &got, 4));
                    }
                }
            }
            free(image);
            weight_free(ctx, &w);
            ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &whole));
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- products -----------------------------------------------------------------------------------

// out[rows, n] = x W^T (or x W), W[w_rows, w_cols] as bf16 values; in float64, rounded once.
static void product(const float* x, int64_t rows, const weight* w, bool backward, float* out) {
    int64_t K = backward ? w->w.rows : w->w.cols;
    int64_t N = backward ? w->w.cols : w->w.rows;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < N; j++) {
            double sum = 0.0;
            for (int64_t k = 0; k < K; k++) {
                double v = (double)w->rounded[backward ? k * w->w.cols + j : j * w->w.cols + k];
                sum += (double)x[i * K + k] * v;
            }
            out[i * N + j] = (float)sum;
        }
    }
}

// A matrix with NaN after its columns that must not leak into results.
static bool with_nan(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols, int64_t pad,
                     const float* values, qlora_tensor* whole, qlora_tensor* view) {
    int64_t ld = cols + pad;
    float* image = (float*)malloc((size_t)(rows * ld) * 4 + 4);
    for (int64_t i = 0; i < rows * ld; i++) {
        image[i] = i % ld < cols && values != NULL ? values[i / ld * cols + i % ld] : NAN;
    }
    bool ok = test_tensor(ctx, dtype, rows, ld, image, whole) == QLORA_OK &&
              qlora_tensor_view(ctx, whole, 0, rows, 0, cols, view) == QLORA_OK;
    free(image);
    return ok;
}

static bool read_view(qlora_ctx* ctx, const qlora_tensor* whole, const qlora_tensor* view,
                      float* out) {
    float* image = (float*)malloc((size_t)(whole->rows * whole->cols) * 4 + 4);
    bool ok = test_read(ctx, whole, image);
    for (int64_t i = 0; ok && i < whole->rows * whole->cols; i++) {
        int64_t c = i % whole->cols;
        if (c < view->cols) {
            out[i / whole->cols * view->cols + c] = image[i];
        } else {
            ok = image[i] != image[i]; // still the original NaN
        }
    }
    free(image);
    return ok;
}

typedef struct product_case {
    int64_t rows; // rows of x
    int64_t out;
    int64_t in;
    qlora_dtype x;
    qlora_dtype y;
    uint32_t flags;
    bool backward;
    bool plain;
    qlora_path path; // expected on a GPU with tensor cores; AUTO: not checked
} product_case;

static const product_case PRODUCTS[] = {
    {5, 70, 96, QLORA_F32, QLORA_F32, 0, false, false, QLORA_PATH_AUTO},
    {5, 70, 96, QLORA_F32, QLORA_F32, 0, true, true, QLORA_PATH_AUTO},
    {1, 64, 64, QLORA_BF16, QLORA_BF16, 0, false, false, QLORA_PATH_NF4},
    {16, 72, 160, QLORA_BF16, QLORA_F32, QLORA_PRODUCT_FUSED, false, true, QLORA_PATH_NF4},
    {17, 130, 96, QLORA_BF16, QLORA_BF16, 0, false, false, QLORA_PATH_NF4},
    {32, 5, 1056, QLORA_BF16, QLORA_F32, 0, false, false, QLORA_PATH_NF4},
    {7, 20, 4160, QLORA_BF16, QLORA_F32, 0, false, false, QLORA_PATH_NF4}, // in two ranges of K
    {16, 64, 128, QLORA_BF16, QLORA_BF16, QLORA_PRODUCT_UNFUSED | QLORA_PRODUCT_PTX, false, false,
     QLORA_PATH_PTX},
    {33, 40, 96, QLORA_BF16, QLORA_BF16, QLORA_PRODUCT_PTX, false, false, QLORA_PATH_PTX},
    {3, 30, 50, QLORA_BF16, QLORA_F32, 0, false, false, QLORA_PATH_AUTO}, // 50: no fused kernel
    {18, 72, 40, QLORA_BF16, QLORA_BF16, 0, true, false, QLORA_PATH_AUTO},
    {0, 8, 64, QLORA_BF16, QLORA_BF16, 0, false, false, QLORA_PATH_AUTO},
};

static bool is_gpu(const test_machine* machine) {
    return strcmp(machine->backend, "cpu") != 0;
}

static const char* run_product(qlora_ctx* ctx, const test_machine* machine, test_random* random,
                               const product_case* c) {
    weight w;
    bool gpu = is_gpu(machine);
    int64_t K = c->backward ? c->out : c->in;
    int64_t N = c->backward ? c->in : c->out;
    if (!weight_make(ctx, random, c->out, c->in, c->plain, &w)) {
        return "weight";
    }
    size_t n = (size_t)(c->rows * N);
    float* x = (float*)malloc((size_t)(c->rows * K) * 4 + 4);
    float* expected = (float*)malloc(n * 4 + 4);
    float* got = (float*)malloc(n * 4 + 4);
    test_random_fill(random, x, (size_t)(c->rows * K), 1.0f);
    for (int64_t i = 0; c->x == QLORA_BF16 && i < c->rows * K; i++) {
        x[i] = bf16_round(x[i]);
    }
    product(x, c->rows, &w, c->backward, expected);
    qlora_tensor xs, xv, ys, yv;
    const char* wrong = NULL;
    if (!with_nan(ctx, c->x, c->rows, K, 8, x, &xs, &xv) ||
        !with_nan(ctx, c->y, c->rows, N, 3, NULL, &ys, &yv)) {
        return "tensors";
    }
    uint32_t flags = gpu ? c->flags : 0;
    qlora_result r = c->backward ? qlora_nf4_gemm_backward(ctx, &xv, &w.w, &yv, flags)
                                 : qlora_nf4_gemm_forward(ctx, &xv, &w.w, &yv, flags);
    bool cores = (machine->sets & TEST_TENSOR_CORES) != 0;
    if (gpu && !cores && (flags & QLORA_PRODUCT_FUSED) != 0) {
        wrong = r == QLORA_ERR_UNSUPPORTED ? NULL : "the fused kernel ran without tensor cores";
    } else if (r == QLORA_ERR_UNSUPPORTED && !test_has_bf16(machine) && c->x == QLORA_BF16) {
        wrong = strstr(qlora_last_error(ctx), "8.0") != NULL ? NULL : "the message lacks 8.0";
    } else if (r != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        wrong = "the call failed";
    } else if (!read_view(ctx, &ys, &yv, got)) {
        wrong = "written outside the matrix, or not read back";
    } else if (n > 0 && !test_rel_l2(expected, got, n, c->y == QLORA_BF16 ? 4e-3 : 2e-6)) {
        wrong = "wrong numbers";
    } else if (gpu && cores && c->path != QLORA_PATH_AUTO && test_last_path(ctx) != c->path) {
        wrong = "not the reported path";
    }
    qlora_tensor_destroy(ctx, &xs);
    qlora_tensor_destroy(ctx, &ys);
    weight_free(ctx, &w);
    free(x);
    free(expected);
    free(got);
    return wrong;
}

TEST nf4_products(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("nf4_products");
    for (size_t i = 0; i < sizeof PRODUCTS / sizeof PRODUCTS[0]; i++) {
        const char* wrong = run_product(ctx, machine, &random, &PRODUCTS[i]);
        if (wrong != NULL) {
            fprintf(stderr, "product %d\n", (int)i);
            FAILm(wrong);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static void small_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = 64 * 1024;
}

// Too large for the scratch buffer at once: processed in slices, with the same result.
TEST nf4_products_in_slices(const test_machine* machine) {
    static const product_case cases[] = {
        {3, 300, 160, QLORA_F32, QLORA_F32, QLORA_PRODUCT_UNFUSED, false, false, QLORA_PATH_AUTO},
        {3, 160, 300, QLORA_F32, QLORA_F32, QLORA_PRODUCT_UNFUSED, true, false, QLORA_PATH_AUTO},
        {3, 300, 160, QLORA_BF16, QLORA_BF16, QLORA_PRODUCT_UNFUSED, false, true, QLORA_PATH_AUTO},
        {3, 160, 300, QLORA_BF16, QLORA_F32, QLORA_PRODUCT_UNFUSED, true, true, QLORA_PATH_AUTO},
    };
    qlora_ctx* ctx = test_open(machine, small_scratch);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("nf4_products_in_slices");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char* wrong = run_product(ctx, machine, &random, &cases[i]);
        if (wrong != NULL) {
            fprintf(stderr, "product %d\n", (int)i);
            FAILm(wrong);
        }
    }
    // Less scratch memory than one slice: a clear error. CPU tiers with kernels of their own
    // dequantise while they pack and need none.
    product_case big = {1, 8, 40000, QLORA_F32, QLORA_F32, 0, false, false, QLORA_PATH_AUTO};
    weight w;
    ASSERT(weight_make(ctx, &random, big.out, big.in, false, &w));
    qlora_tensor x, y;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, big.in, &x));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, big.out, &y));
    qlora_ctx_info info;
    ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
    if (qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA ||
        info.desc->cpu_tier == QLORA_CPU_TIER_PORTABLE) {
        ASSERT_EQ(QLORA_ERR_LIMIT, qlora_nf4_gemm_forward(ctx, &x, &w.w, &y, 0));
        ASSERT(strstr(qlora_last_error(ctx), "scratch_bytes") != NULL);
    }
    qlora_tensor_destroy(ctx, &x);
    qlora_tensor_destroy(ctx, &y);
    weight_free(ctx, &w);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST nf4_two_weights_at_once(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("nf4_two_weights_at_once");
    enum { ROWS = 6, IN = 160, OUT1 = 70, OUT2 = 33 };
    weight w1, w2;
    ASSERT(weight_make(ctx, &random, OUT1, IN, false, &w1));
    ASSERT(weight_make(ctx, &random, OUT2, IN, true, &w2));
    float x[ROWS * IN];
    float expected1[ROWS * OUT1], expected2[ROWS * OUT2], got1[ROWS * OUT1], got2[ROWS * OUT2];
    test_random_fill(&random, x, ROWS * IN, 1.0f);
    for (int i = 0; i < ROWS * IN; i++) {
        x[i] = bf16_round(x[i]);
    }
    product(x, ROWS, &w1, false, expected1);
    product(x, ROWS, &w2, false, expected2);
    for (int form = 0; form < 2; form++) {
        uint32_t flags = form == 1 ? QLORA_PRODUCT_UNFUSED : 0;
        qlora_tensor xs, xv, y1, v1, y2, v2;
        ASSERT(with_nan(ctx, QLORA_BF16, ROWS, IN, 8, x, &xs, &xv));
        ASSERT(with_nan(ctx, QLORA_F32, ROWS, OUT1, 5, NULL, &y1, &v1));
        ASSERT(with_nan(ctx, QLORA_F32, ROWS, OUT2, 1, NULL, &y2, &v2));
        ASSERT_EQ(QLORA_OK, qlora_nf4_gemm_forward2(ctx, &xv, &w1.w, &w2.w, &v1, &v2, flags));
        bool fused = (machine->sets & TEST_TENSOR_CORES) != 0 && is_gpu(machine) && form == 0;
        ASSERT_EQ(fused, test_last_path(ctx) == QLORA_PATH_NF4);
        ASSERT(read_view(ctx, &y1, &v1, got1));
        ASSERT(read_view(ctx, &y2, &v2, got2));
        ASSERT_REL_L2(expected1, got1, ROWS * OUT1, 2e-6);
        ASSERT_REL_L2(expected2, got2, ROWS * OUT2, 2e-6);
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &xs));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &y1));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &y2));
    }
    weight_free(ctx, &w1);
    weight_free(ctx, &w2);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST nf4_refuses(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_nf4 w;
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = 4;
    desc.cols = 64;
    static const int32_t blocks[] = {16, 48, 8192, -64};
    for (size_t i = 0; i < 4; i++) {
        desc.block = blocks[i];
        ASSERT_EQ((size_t)0, qlora_nf4_bytes(&desc));
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_create(ctx, &desc, &w));
    }
    desc.block = 0;
    ASSERT(qlora_nf4_bytes(&desc) >= 128 + 4 + 4 + 4 + 272 * 4);
    ASSERT_EQ(QLORA_OK, qlora_nf4_create(ctx, &desc, &w));
    float plain[4];
    qlora_nf4_parts parts_given;
    memset(&parts_given, 0, sizeof parts_given);
    parts_given.absmax = plain; // this weight does not have it
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_read(ctx, &w, &parts_given));
    qlora_tensor x, y, small;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 64, &x));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 2, 4, &y));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_U8, 1, 100, &small));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_gemm_forward(ctx, &y, &w, &x, 0)); // shapes
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_gemm_forward(ctx, NULL, &w, &y, 0));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_gemm_forward(ctx, &x, NULL, &y, 0));
    static const uint32_t apart[] = {
        QLORA_PRODUCT_FUSED | QLORA_PRODUCT_UNFUSED, QLORA_PRODUCT_FUSED | QLORA_PRODUCT_ACCUMULATE,
        QLORA_PRODUCT_FUSED | QLORA_PRODUCT_PTX,     QLORA_PRODUCT_FUSED | QLORA_PRODUCT_CUBLAS,
        QLORA_PRODUCT_PTX | QLORA_PRODUCT_CUBLAS,    32};
    for (size_t i = 0; i < sizeof apart / sizeof apart[0]; i++) {
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_gemm_forward(ctx, &x, &w, &y, apart[i]));
        ASSERT(strstr(qlora_last_error(ctx), "flags") != NULL);
    }
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED,
              qlora_nf4_gemm_forward(ctx, &x, &w, &y, QLORA_PRODUCT_FUSED)); // f32
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_quantise(ctx, &y, &w));      // shape
    qlora_nf4 wrapped;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_wrap(ctx, &desc, &small, &wrapped));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &x));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &y));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &small));
    ASSERT_EQ(QLORA_OK, qlora_nf4_destroy(ctx, &w));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_nf4_dequantise(ctx, &w, &x, false)); // destroyed
    ASSERT_EQ(QLORA_OK, qlora_nf4_destroy(ctx, &w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(nf4_suite) {
    RUN_ON(TEST_EVERYWHERE, nf4_matches_committed_vectors);
    RUN_ON(TEST_ONE_EACH, nf4_matches_models);
    RUN_ON(TEST_GPUS, nf4_bytes_equal_the_cpus);
    RUN_ON(TEST_EVERYWHERE, nf4_widens);
    RUN_ON(TEST_EVERYWHERE, nf4_products);
    RUN_ON(TEST_EVERYWHERE, nf4_products_in_slices);
    RUN_ON(TEST_CPU | TEST_TENSOR_CORES, nf4_two_weights_at_once);
    RUN_ON(TEST_EVERYWHERE, nf4_refuses);
}
