// internal_model.c - the committed golden folder, figure by figure, on every kind of machine.
#define GOLDEN_NO_MAIN
#include "golden.c"

#include "test.h"

#include "fakecuda/fake.h"

// The folder lies beside this file; make and the tests run from the repository's root.
static const char* const tiny = "tests/golden/tiny";

enum { NO_MACHINE = -2 };

static int judge(qlora_backend backend, qlora_mode mode, bool graph, int* figures) {
    char why[1024] = "";
    options opt = {backend, mode, graph, true};
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = backend;
    desc.threads = 1;
    desc.scratch_bytes = (size_t)4 << 20;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "%s\n", why);
        return NO_MACHINE;
    }
    int failures = run_fixture(ctx, &opt, tiny, figures);
    if (qlora_ctx_destroy(ctx) != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        return -1;
    }
    return failures;
}

// 1 logits and 1 loss of the base; then twice 2 + 1 + 1 + 3 + adapter + text + the text by decoding.
enum { FIGURES = 2 + 2 * 10, FIGURES_BF16 = 2 + 2 * 8 };

TEST golden_on_the_cpu(void) {
    int figures = 0;
    ASSERT_EQ_FMT(0, judge(QLORA_BACKEND_CPU, QLORA_MODE_F32, false, &figures), "%d");
    ASSERT_EQ_FMT((int)FIGURES, figures, "%d");
    PASS();
}

// The real GPU, or the fake one: the process has one of them.
TEST golden_on_a_gpu(const char* name) {
    bool bf16 = strcmp(name, "bf16") == 0;
    int figures = 0;
    const fake_api* fake = fake_open();
    if (fake != NULL) {
        fake->reset(NULL);
    }
    qlora_mode mode = bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32;
    int failures = judge(QLORA_BACKEND_CUDA, mode, true, &figures);
    if (failures == NO_MACHINE && fake == NULL) {
        SKIPm("no GPU");
    }
    ASSERT_EQ_FMT(0, failures, "%d");
    ASSERT_EQ_FMT(bf16 ? (int)FIGURES_BF16 : (int)FIGURES, figures, "%d");
    if (fake != NULL) {
        const char* wrong = fake->done();
        ASSERTm(wrong, wrong == NULL);
    }
    PASS();
}

SUITE(golden_suite) {
    static const char* const names[] = {"f32", "bf16"};
    if (test_wants("cpu")) {
        RUN_TEST(golden_on_the_cpu);
    }
    const char* kind = fake_open() != NULL ? "fake" : "cuda";
    for (int i = 0; i < 2 && test_wants(kind); i++) {
        greatest_set_test_suffix(names[i]);
        RUN_TESTp(golden_on_a_gpu, names[i]);
    }
}
