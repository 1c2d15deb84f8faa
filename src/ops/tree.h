// ---- the tree that sums micro-batches -----------------------------------------------------------
//
// The gradients of a step are summed in an order that depends only on the number P of its
// micro-batches, its leaves: not on how many calls, processes or devices take part. A node covers
// the leaves [k 2^j, (k + 1) 2^j) below P and is the sum of its halves; an empty half is left out,
// never added as zero. Each leaf is computed from zero. Partial sums that wait for their right half
// are on a stack, whose entries are contiguous: as in a binary counter, there are few of them.
// The totals of the loss and the sums of DPO and KTO follow the same tree, except kl, which a step
// needs before its first gradient.

// A stack that is this high holds more leaves than anyone can compute.
#define QLORA__TREE_LEVELS 64

// The leaves [begin, end) of a step.
typedef struct qlora__node {
    int64_t begin;
    int64_t end;
} qlora__node;

typedef struct qlora__tree {
    qlora__node stack[QLORA__TREE_LEVELS];
    int levels;
    qlora__node last; // in the gradients themselves; empty before the first leaf
} qlora__tree;

// Whether left and right are the two halves of one node of a tree with `count` leaves.
static bool qlora__node_joins(const qlora__node* left, const qlora__node* right, int64_t count) {
    int64_t width = left->end - left->begin;
    bool whole = width > 0 && (width & (width - 1)) == 0 && left->begin % (2 * width) == 0;
    return whole && right->begin == left->end && right->end > right->begin &&
           right->end == qlora__min(left->begin + 2 * width, count);
}

// What one step of the tree does with an entry s of the stack and the gradients g.
typedef enum qlora__tree_mode {
    QLORA__TREE_PUSH, // s = g, g = 0
    QLORA__TREE_ADD,  // s = s + g, g = 0
    QLORA__TREE_FOLD, // g = s + g
    QLORA__TREE_TAKE  // g = s
} qlora__tree_mode;

// The small numbers of an entry; on the GPU in f32, as in kernels/train/optim.cu.
typedef struct qlora__tree_small {
    double sums[QLORA__PREFERENCE_VALUES];
    QLORA__REAL totals[4];
} qlora__tree_small;

typedef struct qlora__tree_job {
    QLORA__REAL* g;
    QLORA__REAL* s;
    qlora__tree_mode mode;
} qlora__tree_job;

static void qlora__tree_elements(void* user, int64_t begin, int64_t end) {
    const qlora__tree_job* job = (const qlora__tree_job*)user;
    QLORA__REAL* g = job->g;
    QLORA__REAL* s = job->s;
    for (int64_t i = begin; i < end && job->mode == QLORA__TREE_FOLD; i++) {
        g[i] = s[i] + g[i];
    }
    for (int64_t i = begin; i < end && job->mode == QLORA__TREE_ADD; i++) {
        s[i] = s[i] + g[i];
    }
    if (job->mode == QLORA__TREE_TAKE) {
        memcpy(g + begin, s + begin, (size_t)(end - begin) * sizeof *g);
        return;
    }
    if (job->mode == QLORA__TREE_PUSH) {
        memcpy(s + begin, g + begin, (size_t)(end - begin) * sizeof *g);
    }
    if (job->mode != QLORA__TREE_FOLD) {
        memset(g + begin, 0, (size_t)(end - begin) * sizeof *g);
    }
}

// The same for the small numbers: those of the entry, and those of the step so far.
static void qlora__tree_small_add(qlora__tree_mode mode, qlora__tree_small* s, double* sums,
                                  QLORA__REAL* totals) {
    if (mode == QLORA__TREE_TAKE) {
        memcpy(sums, s->sums, sizeof s->sums);
        memcpy(totals, s->totals, sizeof s->totals);
        return;
    }
    for (int i = 0; i < QLORA__PREFERENCE_VALUES; i++) {
        double sum = mode == QLORA__TREE_PUSH ? sums[i] : s->sums[i] + sums[i];
        s->sums[i] = mode == QLORA__TREE_FOLD ? s->sums[i] : sum;
        sums[i] = mode == QLORA__TREE_FOLD ? sum : 0.0;
    }
    QLORA__REAL result[4] = {totals[0], totals[1], totals[2], totals[3]};
    if (mode != QLORA__TREE_PUSH) { // the exact error of a sum of two
        QLORA__REAL a = s->totals[0];
        QLORA__REAL b = totals[0];
        QLORA__REAL sum = a + b;
        QLORA__REAL rest = sum - a;
        result[0] = sum;
        result[1] = s->totals[1] + totals[1] + ((a - (sum - rest)) + (b - rest));
        result[2] = s->totals[2] + totals[2];
        result[3] = s->totals[3] + totals[3];
    }
    for (int i = 0; i < 4; i++) {
        s->totals[i] = mode == QLORA__TREE_FOLD ? s->totals[i] : result[i];
        totals[i] = mode == QLORA__TREE_FOLD ? result[i] : 0;
    }
}

// One step of the tree for n elements, without small numbers if `few` is NULL.
static qlora_result qlora__tree_run(qlora_ctx* ctx, qlora__tree_mode mode, void* g, void* s,
                                    int64_t n, void* few, const qlora_tensor* totals,
                                    const qlora_tensor* sums) {
    void* small_totals = few != NULL ? totals->data : NULL;
    void* small_sums = few != NULL ? sums->data : NULL;
    if (qlora__on_cpu(ctx)) {
        qlora__tree_job job;
        job.g = (QLORA__REAL*)g;
        job.s = (QLORA__REAL*)s;
        job.mode = mode;
        qlora__parallel(ctx, n, 8192, qlora__tree_elements, &job);
        if (few != NULL) {
            qlora__tree_small_add(mode, (qlora__tree_small*)few, (double*)small_sums,
                                  (QLORA__REAL*)small_totals);
        }
        return QLORA_OK;
    }
    int32_t number = (int32_t)mode;
    int64_t blocks = qlora__min(qlora__max(qlora__ceil_div(n, 1024), 1), 8192);
    void* args[] = {&g, &s, &n, &number, &small_totals, &small_sums, &few};
    return qlora__launch(ctx, QLORA__K_optim_tree, blocks, 1, 1, 256, 0, args);
}
