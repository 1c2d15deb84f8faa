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

SUITE(stream_suite) {
    RUN_TEST(prepared_scales_keep_the_values);
    RUN_TEST(scales_that_cannot_be_prepared);
}
