// kept.c - weights that are not made again: 4-bit weights kept in a file, and weights that are used
// where the files of the model are mapped.
#define _POSIX_C_SOURCE 200809L // mkdtemp

#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODEL "tests/golden/tiny/model"
#define OTHER "tests/golden/granite4/model"

static char logged[2048]; // what the library said about the model

static void keep_log(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                     const char* file, int line) {
    (void)user;
    (void)level;
    (void)file;
    (void)line;
    if (item == QLORA_LOG_ITEM_MODEL) {
        size_t used = strlen(logged);
        snprintf(logged + used, sizeof logged - used, "%s\n", text);
    }
}

static void with_log(qlora_ctx_desc* desc) {
    desc->log = keep_log;
}

static qlora_model_desc desc_of(const char* dir) {
    qlora_model_desc d;
    memset(&d, 0, sizeof d);
    d.dir = dir;
    d.rank = -1;
    d.tokens = 16;
    d.mode = QLORA_MODE_F32;
    d.purpose = QLORA_PURPOSE_EVALUATE;
    d.generate_tokens = 32;
    return d;
}

// Opens a model and evaluates it; NaN if that fails. `plan` may be NULL.
static double loss_of(qlora_ctx* ctx, const qlora_model_desc* desc, qlora_plan* plan) {
    static const int32_t ids[12] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9};
    const int32_t length = 12;
    qlora_model* model = NULL;
    qlora_model_info info;
    qlora_batch batch;
    qlora_eval_info result;
    logged[0] = '\0';
    memset(&batch, 0, sizeof batch);
    memset(&result, 0, sizeof result);
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    bool ok = qlora_model_open(ctx, desc, &model) == QLORA_OK &&
              qlora_model_query(model, &info) == QLORA_OK &&
              qlora_eval(model, &batch, &result) == QLORA_OK;
    if (ok && plan != NULL) {
        *plan = *info.plan;
    }
    return ok && qlora_model_close(model) == QLORA_OK ? result.loss : (double)NAN;
}

static bool said(const char* text) {
    return strstr(logged, text) != NULL;
}

// ---- 4-bit weights in a file --------------------------------------------------------------------

typedef struct bytes {
    unsigned char* data;
    size_t size;
} bytes;

static bool read_bytes(const char* path, bytes* out) {
    FILE* f = fopen(path, "rb");
    memset(out, 0, sizeof *out);
    if (f == NULL || fseek(f, 0, SEEK_END) != 0) {
        return false;
    }
    out->size = (size_t)ftell(f);
    out->data = (unsigned char*)malloc(out->size + 1);
    rewind(f);
    bool ok = fread(out->data, 1, out->size, f) == out->size;
    return fclose(f) == 0 && ok;
}

static bool write_bytes(const char* path, const unsigned char* data, size_t size) {
    FILE* f = fopen(path, "wb");
    bool ok = f != NULL && fwrite(data, 1, size, f) == size;
    return f != NULL && fclose(f) == 0 && ok;
}

enum { HEADER = 56 };

// The checksum of the data, which ends the file: eight bytes at a time.
static void seal(bytes* b) {
    uint64_t state = 0x9E3779B97F4A7C15u;
    uint64_t n = b->size - HEADER - 8;
    uint64_t tail[2] = {0, n};
    for (uint64_t at = 0; at < n + 16; at += 8) {
        uint64_t word = 0;
        memcpy(&word, at < n ? b->data + HEADER + at : (unsigned char*)&tail[(at - n) / 8], 8);
        state = (state ^ word) * 0xD6E8FEB86659FD93u;
        state ^= state >> 32;
    }
    memcpy(b->data + b->size - 8, &state, 8);
}

TEST quantised_weights_are_kept(const test_machine* machine) {
    char dir[] = "build/test-kept-XXXXXX";
    char path[64];
    bytes good;
    qlora_ctx* ctx = test_open(machine, with_log);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/model.qlora-nf4", dir);
    qlora_model_desc plain = desc_of(MODEL);
    qlora_model_desc kept = plain;
    kept.quantised_dir = dir;
    double expected = loss_of(ctx, &plain, NULL);
    ASSERT(expected > 0.0);
    ASSERT(access(path, F_OK) != 0);
    ASSERT(loss_of(ctx, &kept, NULL) == expected && said("weights kept in"));
    ASSERT(read_bytes(path, &good));
    ASSERT(loss_of(ctx, &kept, NULL) == expected && said("weights from"));

    // The file is what is computed with: other codes give another loss.
    bytes changed = good;
    changed.data = (unsigned char*)malloc(good.size);
    memcpy(changed.data, good.data, good.size);
    changed.data[HEADER + 5] ^= 0x77;
    seal(&changed);
    ASSERT(write_bytes(path, changed.data, changed.size));
    double other = loss_of(ctx, &kept, NULL);
    ASSERT(said("weights from") && other > 0.0 && other != expected);

    // Damage anywhere is found, and the file is made again.
    static const long places[] = {0, 9, 13, 17, 25, 33, 41, 49, HEADER, HEADER + 4000, -9, -1};
    bool brief = test_brief() || qlora_ctx_backend(ctx) != QLORA_BACKEND_CPU; // the same code
    for (size_t i = brief ? 9 : 0; i < (brief ? 10 : sizeof places / sizeof places[0]); i++) {
        size_t at = places[i] < 0 ? good.size - (size_t)-places[i] : (size_t)places[i];
        good.data[at] ^= 0x10;
        ASSERT(write_bytes(path, good.data, good.size));
        good.data[at] ^= 0x10;
        ASSERT(loss_of(ctx, &kept, NULL) == expected && said("is not used") && said("kept in"));
        ASSERT(loss_of(ctx, &kept, NULL) == expected && said("weights from"));
    }
    static const size_t sizes[] = {0, 20, HEADER, HEADER + 100};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && !brief; i++) {
        ASSERT(write_bytes(path, good.data, sizes[i]));
        ASSERT(loss_of(ctx, &kept, NULL) == expected && said("is not used"));
    }
    free(changed.data);
    free(good.data);
    ASSERT(unlink(path) == 0 && rmdir(dir) == 0);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST kept_weights_belong_to_a_model(const test_machine* machine) {
    char dir[] = "build/test-kept-XXXXXX";
    char path[64];
    qlora_ctx* ctx = test_open(machine, with_log);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/model.qlora-nf4", dir);
    qlora_model_desc kept = desc_of(MODEL);
    kept.quantised_dir = dir;
    ASSERT(loss_of(ctx, &kept, NULL) > 0.0);
    kept.single_quant = true;
    ASSERT(loss_of(ctx, &kept, NULL) > 0.0 && said("other block sizes"));
    kept.dir = OTHER;
    ASSERT(loss_of(ctx, &kept, NULL) > 0.0 && said("another model"));
    ASSERT(loss_of(ctx, &kept, NULL) > 0.0 && said("weights from"));
    kept.base = QLORA_BASE_16BIT; // nothing is quantised, so nothing is kept
    ASSERT(loss_of(ctx, &kept, NULL) > 0.0 && !said("qlora-nf4"));
    kept.base = QLORA_BASE_NF4;
    kept.quantised_dir = "build/no-such-folder";
    ASSERT(isnan(loss_of(ctx, &kept, NULL)));
    ASSERT(strstr(qlora_last_error(ctx), "cannot create build/no-such-folder/model.qlora-nf4"));
    ASSERT(strstr(qlora_last_error(ctx), "desc.quantised_dir can name another folder"));
    ASSERT(unlink(path) == 0 && rmdir(dir) == 0);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- mapped weights -----------------------------------------------------------------------------

static bool copy_file(const char* dir, const char* name) {
    char from[128];
    char to[128];
    bytes b;
    snprintf(from, sizeof from, MODEL "/%s", name);
    snprintf(to, sizeof to, "%s/%s", dir, name);
    bool ok = read_bytes(from, &b) && write_bytes(to, b.data, b.size);
    free(b.data);
    return ok;
}

// The plan does not count what the files hold, and the numbers are those of copies.
TEST mapped_weights_are_not_copied(const test_machine* machine) {
    enum { EMBED = 96 * 64, LAYER = 2 * 96 * 64 + 2 * 48 * 64 + 3 * 104 * 64 }; // head like embed
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_plan plan[3];
    double loss[3];
    char text[4096];
    for (int base = 0; base < 3; base++) {
        qlora_model_desc d = desc_of(MODEL);
        d.base = (qlora_base_format)base;
        loss[base] = loss_of(ctx, &d, &plan[base]);
    }
    ASSERT_EQ_FMT((long long)2 * 2 * EMBED, (long long)plan[QLORA_BASE_NF4].mapped, "%lld");
    ASSERT_EQ_FMT((long long)2 * (2 * EMBED + 2 * LAYER), (long long)plan[QLORA_BASE_16BIT].mapped,
                  "%lld");
    ASSERT_EQ_FMT(0LL, (long long)plan[QLORA_BASE_32BIT].mapped, "%lld");
    ASSERT(plan[QLORA_BASE_32BIT].base - plan[QLORA_BASE_16BIT].base >=
           2 * plan[QLORA_BASE_16BIT].mapped);
    ASSERT(loss[QLORA_BASE_16BIT] > 0.0 && loss[QLORA_BASE_16BIT] == loss[QLORA_BASE_32BIT]);
    qlora_plan_describe(&plan[QLORA_BASE_16BIT], text, sizeof text);
    ASSERT(strstr(text, "mapped weights") != NULL);
    qlora_plan_describe(&plan[QLORA_BASE_32BIT], text, sizeof text);
    ASSERT(strstr(text, "mapped weights") == NULL);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A model that was opened does not need the names of its files.
TEST mapped_files_may_be_deleted(const test_machine* machine) {
    char dir[] = "build/test-mapped-XXXXXX";
    char path[2][64];
    int32_t prompt[2] = {3, 1};
    int32_t tokens[2][8];
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT(mkdtemp(dir) != NULL);
    snprintf(path[0], sizeof path[0], "%s/config.json", dir);
    snprintf(path[1], sizeof path[1], "%s/model.safetensors", dir);
    ASSERT(copy_file(dir, "config.json") && copy_file(dir, "model.safetensors"));
    for (int i = 0; i < 2; i++) {
        qlora_model* model = NULL;
        qlora_generation* text = NULL;
        qlora_generate_desc g;
        qlora_model_desc d = desc_of(i == 0 ? dir : MODEL);
        d.base = QLORA_BASE_16BIT;
        memset(&g, 0, sizeof g);
        g.prompt = prompt;
        g.prompt_tokens = 2;
        ASSERT_EQ(QLORA_OK, qlora_model_open(ctx, &d, &model));
#ifdef _WIN32 // there, a mapped file cannot be deleted, but under wine it can
        (void)(i == 0 && unlink(path[1]) == 0);
#else
        ASSERT(i != 0 || (unlink(path[0]) == 0 && unlink(path[1]) == 0 && rmdir(dir) == 0));
#endif
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(model, &g, &text));
        for (int k = 0; k < 8; k++) {
            bool stopped = false;
            ASSERT_EQ(QLORA_OK, qlora_generate_next(text, &tokens[i][k], &stopped));
            ASSERT_FALSE(stopped);
        }
        ASSERT_EQ(QLORA_OK, qlora_generate_end(text));
        ASSERT_EQ(QLORA_OK, qlora_model_close(model));
#ifdef _WIN32
        (void)(i == 0 && unlink(path[1]) == 0);
        ASSERT(i != 0 || (unlink(path[0]) == 0 && rmdir(dir) == 0));
#endif
    }
    ASSERT_MEM_EQ(tokens[0], tokens[1], sizeof tokens[0]);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(kept_suite) {
    RUN_ON(TEST_ONE_EACH, quantised_weights_are_kept);
    RUN_ON(TEST_CPU, kept_weights_belong_to_a_model);
    RUN_ON(TEST_CPU, mapped_weights_are_not_copied);
    RUN_ON(TEST_CPU, mapped_files_may_be_deleted);
}
