// tree.c - the sums of a step: in a fixed order that depends only on the number of its
// micro-batches.

#include "model_rig.h"

SUITE_EXTERN(tree_suite);

enum { TREE_LEAVES = 7 };

// The expected sum of leaves [begin, end) of `count`, from its definition.
static void tree_expect(float leaves[TREE_LEAVES][4096], size_t n, int begin, int width, int count,
                        float* out) {
    if (width == 1) {
        memcpy(out, leaves[begin], n * sizeof *out);
        return;
    }
    int half = width / 2;
    tree_expect(leaves, n, begin, half, count, out);
    if (begin + half < count) {
        float* right = (float*)malloc(n * sizeof *right);
        tree_expect(leaves, n, begin + half, half, count, right);
        for (size_t i = 0; i < n; i++) {
            out[i] = out[i] + right[i];
        }
        free(right);
    }
}

static void tree_data(data* d, qlora_batch* batches, int count) {
    static const int32_t lengths[TREE_LEAVES] = {9, 3, 12, 7, 2, 11, 5};
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "leaf %d", i);
        data_make(&d[i], name, &lengths[i], 1);
        d[i].sequences[0] = 40 + i;
        batches[i] = d[i].batch;
    }
}

// Adds up what is on the stack, as an update does first.
static qlora_result tree_finish(rig* r, int64_t count) {
    QLORA__ENTER(r->ctx, "tree_finish");
    return qlora__leave(r->ctx, qlora__tree_fold(r->trainer, count));
}

// The fake GPU is slow.
static bool tree_skips(const test_machine* machine, int count) {
    return strcmp(machine->backend, "fake") == 0 && count != 3 && count != TREE_LEAVES;
}

TEST gradients_are_summed_in_a_fixed_order(const test_machine* machine) {
    static float leaves[TREE_LEAVES][4096];
    setup s = setup_make(machine);
    data d[TREE_LEAVES];
    qlora_batch batches[TREE_LEAVES];
    rig r;
    qlora_parameter_info info;
    s.model.accumulate = 3; // one entry of the stack is planned, the other is not
    ASSERT(rig_open(&r, &s));
    ASSERT_EQ_FMT(1, (int)r.model->partials.rows, "%d");
    tree_data(d, batches, TREE_LEAVES);
    ASSERT_EQ(QLORA_OK, qlora_parameter_query(r.model, 1, &info));
    size_t n = (size_t)(info.rows * info.cols);
    ASSERT(n > 0 && n <= 4096);
    for (int i = 0; i < TREE_LEAVES; i++) {
        ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &batches[i], 50.0));
        ASSERT_EQ(QLORA_OK, qlora_gradient_read(r.trainer, 1, leaves[i]));
        ASSERT_EQ(QLORA_OK, qlora_train_cancel(r.trainer));
    }
    float* expected = (float*)malloc(n * sizeof *expected);
    float* got = (float*)malloc(n * sizeof *got);
    for (int count = 1; count <= TREE_LEAVES; count++) {
        if (tree_skips(machine, count)) {
            continue;
        }
        for (int i = 0; i < count; i++) {
            ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &batches[i], 50.0));
        }
        tree_expect(leaves, n, 0, 8, count, expected);
        ASSERT_EQ(QLORA_OK, qlora_gradient_read(r.trainer, 1, got)); // summed by the host
        ASSERT_MEM_EQ(expected, got, n * sizeof *got);
        ASSERT_EQ(QLORA_OK, tree_finish(&r, count));
        ASSERT_EQ_FMT(0, r.trainer->tree.levels, "%d");
        ASSERT_EQ(QLORA_OK, qlora_gradient_read(r.trainer, 1, got)); // summed by the device
        ASSERT_MEM_EQ(expected, got, n * sizeof *got);
        ASSERT_EQ(QLORA_OK, qlora_train_cancel(r.trainer));
    }
    free(expected);
    free(got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// Loss and labels of a step are those of its micro-batches, whatever their number.
TEST totals_follow_the_tree(const test_machine* machine) {
    setup s = setup_make(machine);
    data d[TREE_LEAVES];
    qlora_batch batches[TREE_LEAVES];
    rig r;
    qlora_train_info info;
    s.train.lr = -1.0; // the parameters stay as they are
    s.model.dropout = -1.0f;
    ASSERT(rig_open(&r, &s));
    tree_data(d, batches, TREE_LEAVES);
    double loss = 0.0;
    double labels = 0.0;
    int64_t tokens = 0;
    for (int i = 0; i < TREE_LEAVES; i++) {
        qlora_eval_info one;
        ASSERT_EQ(QLORA_OK, qlora_eval(r.model, &batches[i], &one));
        loss += one.loss;
        labels += one.labels;
        tokens += one.tokens;
        if (tree_skips(machine, i + 1)) {
            continue;
        }
        ASSERT_EQ(QLORA_OK, qlora_train_step(r.trainer, batches, i + 1, &info));
        ASSERT_EQ_FMT((int)labels, (int)info.labels, "%d");
        ASSERT_EQ_FMT((int)tokens, (int)info.tokens, "%d");
        ASSERT(fabs(info.loss - loss / labels) < 1e-6 * info.loss);
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

static bool link_silent(const qlora_message* messages, int64_t count, void* stream, char* why,
                        size_t why_size, void* user) {
    (void)messages;
    (void)count;
    (void)stream;
    (void)why;
    (void)why_size;
    (void)user;
    return true;
}

static bool link_down(char* why, size_t why_size, void* user) {
    (void)user;
    snprintf(why, why_size, "the link is down");
    return false;
}

// When an exchange between GPUs fails, the update after it has been queued: what it made of the
// parameters is neither trained further nor saved.
TEST a_failed_exchange_spoils_the_parameters(const test_machine* machine) {
    setup s = setup_make(machine);
    data d[TREE_LEAVES];
    qlora_batch batches[TREE_LEAVES];
    qlora_train_info info;
    rig r;
    ASSERT(rig_open(&r, &s));
    tree_data(d, batches, 2);
    r.trainer->world = 2; // as if another process had joined
    r.trainer->comm.world = 2;
    r.trainer->comm.device = true;
    r.trainer->comm.exchange = link_silent;
    r.trainer->comm.alive = link_down;
    ASSERT_EQ(QLORA_ERR_COMM, qlora_train_step(r.trainer, batches, 2, &info));
    ASSERT(strstr(qlora_last_error(r.ctx), "rank 0 of 2: the link is down") != NULL);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, batches, 2, &info));
    ASSERT(strstr(qlora_last_error(r.ctx), "the parameters are not valid") != NULL);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_save(r.trainer, "never", NULL, 0));
    ASSERT(strstr(qlora_last_error(r.ctx), "the parameters are not valid") != NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A provider whose limit is a number of questions whether it is alive.
typedef struct link_clock {
    int asked; // since the limit began
    int limit;
} link_clock;

static bool link_clock_swap(const qlora_message* messages, int64_t count, void* stream, char* why,
                            size_t why_size, void* user) {
    (void)messages;
    (void)count;
    (void)stream;
    (void)why;
    (void)why_size;
    ((link_clock*)user)->asked = 0;
    return true;
}

static bool link_clock_alive(char* why, size_t why_size, void* user) {
    link_clock* l = (link_clock*)user;
    if (++l->asked > l->limit) {
        snprintf(why, why_size, "the limit is over");
        return false;
    }
    return true;
}

static void link_clock_join(rig* r, link_clock* l) {
    r->trainer->world = 2;
    r->trainer->comm.world = 2;
    r->trainer->comm.device = true;
    r->trainer->comm.exchange = link_clock_swap;
    r->trainer->comm.alive = link_clock_alive;
    r->trainer->comm.user = l;
}

// The time that this process computes does not count: the fake device does one piece of work when
// it is asked, and a step has many more of them than the limit allows.
TEST the_limit_begins_with_the_exchange(const test_machine* machine) {
    setup s = setup_make(machine);
    data d[TREE_LEAVES];
    qlora_batch batches[TREE_LEAVES];
    qlora_train_info info;
    link_clock clock = {0, 8}; // the exchange itself needs 5
    rig r;
    ASSERT(rig_open(&r, &s));
    tree_data(d, batches, 2);
    ASSERT_EQ(QLORA_OK, qlora__enter(r.ctx, "test"));
    for (int i = 0; i < 2 * QLORA__RECORDS; i++) {
        void** event = &r.trainer->reports[i / 2].exchange_events[i % 2];
        ASSERT_EQ(QLORA_OK, qlora__event_create_timed(r.ctx, event));
    }
    ASSERT_EQ(QLORA_OK, qlora__leave(r.ctx, QLORA_OK));
    link_clock_join(&r, &clock);
    for (int i = 0; i < 3; i++) {
        ASSERT_EQ(QLORA_OK, qlora_train_step(r.trainer, batches, 2, i == 1 ? NULL : &info));
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A program that never asks for results waits in a later step, and hears of a lost peer there.
TEST a_step_without_results_notices_a_lost_peer(const test_machine* machine) {
    setup s = setup_make(machine);
    data d[TREE_LEAVES];
    qlora_batch batches[TREE_LEAVES];
    link_clock clock = {0, 1000};
    rig r;
    ASSERT(rig_open(&r, &s));
    tree_data(d, batches, 2);
    link_clock_join(&r, &clock);
    ASSERT_EQ(QLORA_OK, qlora_train_step(r.trainer, batches, 2, NULL));
    r.trainer->comm.alive = link_down;
    qlora_result result = QLORA_OK;
    for (int i = 0; i < 2 * QLORA__RING_SLOTS && result == QLORA_OK; i++) {
        result = qlora_train_step(r.trainer, batches, 2, NULL);
    }
    ASSERT_EQ(QLORA_ERR_COMM, result);
    ASSERT(strstr(qlora_last_error(r.ctx), "the link is down") != NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

SUITE(tree_suite) {
    RUN_ON(TEST_ONE_EACH, gradients_are_summed_in_a_fixed_order);
    RUN_ON(TEST_ONE_EACH, totals_follow_the_tree);
    RUN_ON(TEST_ONE_FAKE, a_failed_exchange_spoils_the_parameters);
    RUN_ON(TEST_ONE_FAKE, the_limit_begins_with_the_exchange);
    RUN_ON(TEST_ONE_FAKE, a_step_without_results_notices_a_lost_peer);
}
