// modes.c - mode BF16 on the CPU: training follows F32 and repeats to the bit, in every tier.
#define _POSIX_C_SOURCE 200809L // mkdtemp

#include "model_rig.h"

#include <sys/stat.h>
#include <unistd.h>

enum { MODE_STEPS = 20, MODE_HALF = 10 };

static qlora_cpu_tier mode_tier;
static int32_t mode_threads;
static char mode_notes[4096];

static void mode_note(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                      const char* file, int line) {
    size_t length = strlen(mode_notes);
    (void)user;
    (void)level;
    (void)item;
    (void)file;
    (void)line;
    snprintf(mode_notes + length, sizeof mode_notes - length, "%s\n", text);
}

static void mode_change(qlora_ctx_desc* desc) {
    desc->cpu_tier = mode_tier;
    desc->threads = mode_threads;
    desc->log = mode_note;
}

static setup mode_setup(const test_machine* machine, qlora_mode mode, qlora_cpu_tier tier,
                        int32_t threads) {
    setup s = setup_make(machine);
    s.change = mode_change;
    s.config.hidden = 36; // no multiple of 8
    s.model.rank = 6;     // nor of 4
    s.model.mode = mode;
    mode_tier = tier;
    mode_threads = threads;
    mode_notes[0] = '\0';
    return s;
}

// The losses of some steps, and the trained tensors after them; the caller frees those.
typedef struct mode_run {
    double losses[MODE_STEPS];
    float* values;
    size_t count;
} mode_run;

// Trains steps [first, last); loads a checkpoint before, or saves one after, if a folder is given.
static bool mode_train(const setup* s, int first, int last, const char* load, const char* save,
                       mode_run* out) {
    rig r;
    bool ok = rig_open(&r, s) &&
              (load == NULL || qlora_checkpoint_load(r.trainer, load, NULL, NULL) == QLORA_OK);
    for (int step = first; ok && step < last; step++) {
        data d;
        char name[32];
        qlora_train_info info;
        snprintf(name, sizeof name, "mode %d", step % 3);
        data_make(&d, name, run_lengths[1], 3);
        ok = qlora_train_step(r.trainer, &d.batch, 1, &info) == QLORA_OK;
        out->losses[step] = info.loss;
    }
    ok = ok && (save == NULL || qlora_checkpoint_save(r.trainer, save, NULL, 0) == QLORA_OK);
    ok = ok || rig_says(&r, "mode");
    out->values = ok ? rig_read(&r, false, &out->count) : NULL;
    return ok && out->values != NULL && rig_close(&r, s);
}

static bool mode_same(const mode_run* a, const mode_run* b) {
    return a->count == b->count && memcmp(a->losses, b->losses, sizeof a->losses) == 0 &&
           memcmp(a->values, b->values, a->count * sizeof *a->values) == 0;
}

// 20 steps stay as near to those in F32 as golden folders must in bf16, without being the same, and
// do not depend on the threads.
TEST bf16_follows_f32(const test_machine* machine) {
    for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
        qlora_cpu_tier tier = (qlora_cpu_tier)t;
        mode_run exact;
        mode_run one;
        mode_run three;
        if (!qlora_cpu_tier_usable(tier)) {
            continue;
        }
        setup s = mode_setup(machine, QLORA_MODE_F32, tier, 1);
        ASSERT(mode_train(&s, 0, MODE_STEPS, NULL, NULL, &exact));
        s = mode_setup(machine, QLORA_MODE_BF16, tier, 1);
        ASSERT(mode_train(&s, 0, MODE_STEPS, NULL, NULL, &one));
        s = mode_setup(machine, QLORA_MODE_BF16, tier, 3);
        ASSERT(mode_train(&s, 0, MODE_STEPS, NULL, NULL, &three));
        ASSERTm(qlora_cpu_tier_name(tier), mode_same(&one, &three));
        ASSERT(!mode_same(&one, &exact));
        ASSERT(exact.losses[MODE_STEPS - 1] < 0.8 * exact.losses[0]);
        ASSERT_EQ(exact.count, one.count);
        for (int i = 0; i < MODE_STEPS; i++) {
            ASSERT_IN_RANGE(exact.losses[i], one.losses[i],
                            (i == 0 ? 0.003 : 0.02) * fmax(1.0, exact.losses[i]));
        }
        ASSERT_REL_L2(exact.values, one.values, exact.count, 0.05);
        free(exact.values);
        free(one.values);
        free(three.values);
    }
    PASS();
}

static void mode_folder_remove(const char* dir) {
    static const char* const files[] = {"step-10/adapter_model.safetensors",
                                        "step-10/adapter_config.json",
                                        "step-10/state.safetensors",
                                        "step-10/trained_norms.safetensors",
                                        "step-10",
                                        "latest",
                                        ""};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        (void)remove(path);
    }
}

// A run that stops and goes on has the bits of one that does not; F32 cannot continue it.
TEST bf16_resumes(const test_machine* machine) {
    char dir[] = "build/test-modes-XXXXXX";
    mode_run whole;
    mode_run parts;
    mode_run rest;
    ASSERT(mkdtemp(dir) != NULL);
    setup s = mode_setup(machine, QLORA_MODE_BF16, QLORA_CPU_TIER_BEST, 1);
    ASSERT(mode_train(&s, 0, MODE_STEPS, NULL, NULL, &whole));
    ASSERT(mode_train(&s, 0, MODE_HALF, NULL, dir, &parts));
    free(parts.values);
    ASSERT(mode_train(&s, MODE_HALF, MODE_STEPS, dir, NULL, &parts));
    ASSERT(mode_same(&whole, &parts));
    ASSERT(strstr(mode_notes, "CPU tier") == NULL);
    s = mode_setup(machine, QLORA_MODE_F32, QLORA_CPU_TIER_BEST, 1);
    rig r;
    ASSERT(rig_open(&r, &s));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
    ASSERT(strstr(qlora_last_error(r.ctx), "mode = 3, but this trainer has 1") != NULL);
    ASSERT(rig_close(&r, &s));
    // Another tier rounds differently, which is noted.
    s = mode_setup(machine, QLORA_MODE_BF16, QLORA_CPU_TIER_PORTABLE, 1);
    ASSERT(mode_train(&s, MODE_HALF, MODE_STEPS, dir, NULL, &rest));
    qlora_cpu_tier best = QLORA_CPU_TIER_PORTABLE;
    for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
        best = qlora_cpu_tier_usable((qlora_cpu_tier)t) ? (qlora_cpu_tier)t : best;
    }
    const char* forced = getenv("QLORA_CPU_TIER");
    best = forced != NULL && strcmp(forced, "portable") == 0 ? QLORA_CPU_TIER_PORTABLE : best;
    ASSERT_EQ(best != QLORA_CPU_TIER_PORTABLE, strstr(mode_notes, "CPU tier") != NULL);
    free(whole.values);
    free(parts.values);
    free(rest.values);
    mode_folder_remove(dir);
    PASS();
}

// In F32, tiers that differ in BF16 only have the same bits, and one continues what the other has
// saved without a note. In BF16 they have not. Returns false if a check fails.
static bool mode_tiers_agree(const test_machine* machine, qlora_mode mode, qlora_cpu_tier tier,
                             qlora_cpu_tier other) {
    char dir[] = "build/test-modes-XXXXXX";
    char note[96];
    mode_run one;
    mode_run two;
    memset(&one, 0, sizeof one);
    memset(&two, 0, sizeof two);
    snprintf(note, sizeof note, "the CPU tier %s, this trainer has %s", qlora_cpu_tier_name(tier),
             qlora_cpu_tier_name(other));
    setup s = mode_setup(machine, mode, tier, 1);
    bool ok = mkdtemp(dir) != NULL && mode_train(&s, 0, MODE_STEPS, NULL, NULL, &one) &&
              mode_train(&s, 0, MODE_HALF, NULL, dir, &two);
    free(two.values);
    two.values = NULL;
    s = mode_setup(machine, mode, other, 1);
    ok = ok && mode_train(&s, MODE_HALF, MODE_STEPS, dir, NULL, &two) &&
         mode_same(&one, &two) == (mode == QLORA_MODE_F32) &&
         (strstr(mode_notes, note) != NULL) == (mode == QLORA_MODE_BF16);
    free(one.values);
    free(two.values);
    mode_folder_remove(dir);
    return ok;
}

TEST tiers_agree_in_f32(const test_machine* machine) {
    static const qlora_cpu_tier pairs[][2] = {
        {QLORA_CPU_TIER_NEON, QLORA_CPU_TIER_NEON_BF16},
        {QLORA_CPU_TIER_AVX512, QLORA_CPU_TIER_AVX512_BF16},
        {QLORA_CPU_TIER_AVX512, QLORA_CPU_TIER_AMX},
    };
    bool any = false;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (qlora_cpu_tier_usable(pairs[i][1])) {
            any = true;
            ASSERT(mode_tiers_agree(machine, QLORA_MODE_F32, pairs[i][0], pairs[i][1]));
            ASSERT(mode_tiers_agree(machine, QLORA_MODE_BF16, pairs[i][0], pairs[i][1]));
        }
    }
    if (!any) {
        SKIPm("needs a processor with BF16");
    }
    PASS();
}

// A plan for the CPU has the mode; its memory is that of F32, and AUTO stays F32.
TEST modes_are_planned(const test_machine* machine) {
    setup s = setup_make(machine);
    qlora_plan plans[3];
    static const qlora_mode modes[] = {QLORA_MODE_AUTO, QLORA_MODE_F32, QLORA_MODE_BF16};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    s.model.config = &s.config;
    for (int i = 0; i < 3; i++) {
        s.model.mode = modes[i];
        ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &s.model, NULL, &plans[i]));
        ASSERT_EQ(i == 2 ? QLORA_MODE_BF16 : QLORA_MODE_F32, plans[i].mode);
        ASSERT_EQ(plans[0].total, plans[i].total);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(modes_suite) {
    RUN_ON(TEST_CPU, modes_are_planned);
    RUN_ON(TEST_CPU, bf16_follows_f32);
    RUN_ON(TEST_CPU, bf16_resumes);
    RUN_ON(TEST_CPU, tiers_agree_in_f32);
}
