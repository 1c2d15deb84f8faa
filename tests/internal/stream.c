// stream.c - white-box tests of the scales that decoding prepares: the kernel that rounds ties away
// from zero must give the values that NF4 is defined by, in every tier that this processor has.
#include "test.h"

#include <string.h>

// A weight of one block whose codes are 0 ... 15, again and again.
typedef struct one_block {
    float maps[QLORA__NF4_MAPS];
    uint8_t codes[QLORA__STREAM_STEP / 2];
    float scale;
    qlora_nf4 w;
} one_block;

static void one_block_make(one_block* b, float scale) {
    memset(b, 0, sizeof *b);
    qlora__nf4_default_maps(b->maps);
    for (int i = 0; i < QLORA__STREAM_STEP / 2; i++) {
        b->codes[i] = (uint8_t)((2 * i % 16) << 4 | (2 * i + 1) % 16);
    }
    b->scale = scale;
    b->w.maps = b->maps;
    b->w.codes = b->codes;
    b->w.absmax = &b->scale;
    b->w.rows = 1;
    b->w.cols = QLORA__STREAM_STEP;
    b->w.block = QLORA__STREAM_STEP;
}

// Whether the kernel shows all 16 values to the bit.
static bool block_shows(const qlora__cpu_stream* stream, const one_block* b, const float* scale) {
    qlora__nf4_line lines[QLORA__STREAM_LINES];
    bool same = true;
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        lines[i].codes = b->codes;
        lines[i].scales = scale;
    }
    for (int at = 0; at < QLORA__STREAM_STEP; at++) {
        float x[QLORA__STREAM_STEP];
        float sums[QLORA__STREAM_LINES];
        memset(x, 0, sizeof x);
        x[at] = 1.0f;
        stream->ready(b->maps, lines, 1, x, sums);
        float want = qlora__bf16_to(qlora__bf16_from(b->maps[stream->order[at] % 16] * b->scale));
        for (int i = 0; i < QLORA__STREAM_LINES; i++) {
            same = same && sums[i] == want;
        }
    }
    return same;
}

// Whether a product lies between two bf16 numbers of which the even one is nearer to zero.
static bool has_tie(float scale) {
    for (int i = 0; i < 16; i++) {
        if ((qlora__bits(qlora__nf4_levels[i] * scale) & 0x1ffffu) == 0x8000u) {
            return true;
        }
    }
    return false;
}

TEST prepared_scales_keep_the_values(void) {
    test_random random = test_random_start("prepared_scales_keep_the_values");
    int ties = test_brief() ? 5 : 50;
    for (int found = 0, tries = 0; found < ties;) {
        float scale = 0.0f;
        test_random_fill(&random, &scale, 1, 0.2f);
        scale = fabsf(scale);
        bool tie = has_tie(scale);
        if (!tie && tries++ % 4096 != 0) {
            continue;
        }
        found += tie;
        for (int t = 1; t < QLORA__CPU_TABLES; t++) {
            const qlora__cpu_stream* stream = qlora__cpu_tables[t].stream;
            float ready = 0.0f;
            one_block b;
            if (!qlora__cpu_tables[t].present()) {
                continue;
            }
            one_block_make(&b, scale);
            ASSERT(qlora__stream_prepare(stream, &b.w, 0, 1, &ready));
            ASSERT_EQ(tie, ready != scale);
            ASSERT(block_shows(stream, &b, &ready));
            ASSERT_EQ(!tie, block_shows(stream, &b, &scale));
        }
    }
    PASS();
}

TEST scales_that_cannot_be_prepared(void) {
    const float scales[] = {0.0f, 1e-45f, 3e38f, (float)INFINITY, (float)NAN};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (int t = 1; t < QLORA__CPU_TABLES; t++) {
            const qlora__cpu_stream* stream = qlora__cpu_tables[t].stream;
            float ready = 0.0f;
            one_block b;
            if (!qlora__cpu_tables[t].present()) {
                continue;
            }
            one_block_make(&b, scales[i]);
            ASSERT_EQ(i < 3, qlora__stream_prepare(stream, &b.w, 0, 1, &ready));
            ASSERT(i >= 3 || block_shows(stream, &b, &ready));
        }
    }
    PASS();
}

enum { DENSE_MOST = 600 };

// Lines of 16 or 32 bits, which no other suite reads with the instructions of every processor.
TEST dense_lines_are_summed(const qlora__cpu_stream* stream, qlora_dtype dtype, int64_t n) {
    static uint16_t half[QLORA__STREAM_LINES][DENSE_MOST];
    static float full[QLORA__STREAM_LINES][DENSE_MOST];
    static float x[DENSE_MOST];
    const void* lines[QLORA__STREAM_LINES];
    float sums[QLORA__STREAM_LINES];
    test_random random = test_random_start("dense lines");
    test_random_fill(&random, x, (size_t)n, 1.0f);
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        test_random_fill(&random, full[i], (size_t)n, 1.0f);
        for (int64_t k = 0; k < n && dtype != QLORA_F32; k++) {
            bool wide = dtype == QLORA_BF16;
            half[i][k] = wide ? qlora__bf16_from(full[i][k]) : qlora__f16_from(full[i][k]);
            full[i][k] = wide ? qlora__bf16_to(half[i][k]) : qlora__f16_to(half[i][k]);
        }
        lines[i] = dtype == QLORA_F32 ? (const void*)full[i] : (const void*)half[i];
    }
    stream->dense(lines, dtype, n, x, sums);
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        double want = 0.0;
        double size = 0.0;
        for (int64_t k = 0; k < n; k++) {
            want += (double)x[k] * (double)full[i][k];
            size += fabs((double)x[k] * (double)full[i][k]);
        }
        ASSERT(fabs((double)sums[i] - want) <= 1e-6 * size);
    }
    PASS();
}

TEST dense_lines_of_every_type(void) {
    static const qlora_dtype types[] = {QLORA_F32, QLORA_BF16, QLORA_F16};
    static const int64_t lengths[] = {1, 3, 8, 17, 64, 100, 255, 256, 300, DENSE_MOST};
    for (int t = 1; t < QLORA__CPU_TABLES; t++) {
        for (int i = 0; i < 30 && qlora__cpu_tables[t].present(); i++) {
            CHECK_CALL(
                dense_lines_are_summed(qlora__cpu_tables[t].stream, types[i % 3], lengths[i / 3]));
        }
    }
    PASS();
}

SUITE(stream_suite) {
    RUN_TEST(dense_lines_of_every_type);
    RUN_TEST(prepared_scales_keep_the_values);
    RUN_TEST(scales_that_cannot_be_prepared);
}
