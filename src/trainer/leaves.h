// ---- the leaves of a step -----------------------------------------------------------------------
//
// The gradients of a model hold those of the last micro-batch, or of a node that ends with it, and
// the stack the partial sums before it. A step of one micro-batch does nothing here.

// Zeroes the sums of a step, besides gradients.
static qlora_result qlora__sums_clear(qlora_ctx* ctx, const qlora_model* m) {
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 4);
    if (qlora__balances(m)) {
        QLORA__TRY(qlora__tensor_zero(ctx, &m->work.experts.balance.load));
    }
    QLORA__TRY(qlora__tensor_zero(ctx, &m->work.preference.sums));
    return qlora__tensor_zero(ctx, &totals);
}

static void qlora__tree_reset(qlora_trainer* t) {
    memset(&t->tree, 0, sizeof t->tree);
    t->leaf = 0;
    t->leaves = 0;
}

// Entry number `level` of the stack.
static qlora_result qlora__tree_entry(qlora_trainer* t, int level, QLORA__REAL** out) {
    const qlora_model* m = t->m;
    int64_t stride = qlora__partial_stride(m);
    QLORA_ASSERT(level < QLORA__TREE_LEVELS);
    if (level < m->partials.rows) {
        *out = (QLORA__REAL*)m->partials.data + level * stride;
        return QLORA_OK;
    }
    if (t->more[level] == NULL) {
        size_t bytes = (size_t)stride * sizeof(QLORA__REAL);
        QLORA__TRY(qlora__buffer_create(t->ctx, bytes, &t->more[level]));
    }
    *out = (QLORA__REAL*)t->more[level]->data;
    return QLORA_OK;
}

static qlora_result qlora__tree_step(qlora_trainer* t, qlora__tree_mode mode, int level) {
    qlora_model* m = t->m;
    QLORA__REAL* entry = NULL;
    QLORA__TRY(qlora__tree_entry(t, level, &entry));
    return qlora__tree_run(t->ctx, mode, m->gradients.data, entry, m->elements,
                           entry + qlora__partial_small(m), &m->totals, &m->work.preference.sums);
}

// Joins the gradients with the entries of the stack that are the left halves of the same nodes of a
// tree of `count` leaves.
static qlora_result qlora__tree_fold(qlora_trainer* t, int64_t count) {
    qlora__tree* tree = &t->tree;
    while (tree->levels > 0 &&
           qlora__node_joins(&tree->stack[tree->levels - 1], &tree->last, count)) {
        QLORA__TRY(qlora__tree_step(t, QLORA__TREE_FOLD, tree->levels - 1));
        tree->levels--;
        tree->last.begin = tree->stack[tree->levels].begin;
    }
    return QLORA_OK;
}

// Moves the gradients to the stack, and joins them there with the last left half.
static qlora_result qlora__tree_push(qlora_trainer* t) {
    qlora__tree* tree = &t->tree;
    qlora__node last = tree->last;
    // All but the last of several sums are made in the gradients.
    while (tree->levels > 1 &&
           qlora__node_joins(&tree->stack[tree->levels - 1], &last, INT64_MAX)) {
        qlora__node joined = {tree->stack[tree->levels - 1].begin, last.end};
        if (!qlora__node_joins(&tree->stack[tree->levels - 2], &joined, INT64_MAX)) {
            break;
        }
        QLORA__TRY(qlora__tree_step(t, QLORA__TREE_FOLD, --tree->levels));
        last = joined;
    }
    if (tree->levels > 0 && qlora__node_joins(&tree->stack[tree->levels - 1], &last, INT64_MAX)) {
        QLORA__TRY(qlora__tree_step(t, QLORA__TREE_ADD, tree->levels - 1));
        tree->stack[tree->levels - 1].end = last.end;
    } else {
        QLORA__TRY(qlora__tree_step(t, QLORA__TREE_PUSH, tree->levels));
        tree->stack[tree->levels++] = last;
    }
    memset(&tree->last, 0, sizeof tree->last);
    return QLORA_OK;
}

// Before the gradients of leaf t->leaf are computed.
static qlora_result qlora__leaf_begin(qlora_trainer* t) {
    qlora__tree* tree = &t->tree;
    if (tree->last.end > tree->last.begin) {
        QLORA__TRY(qlora__tree_push(t));
    }
    tree->last.begin = t->leaf;
    tree->last.end = ++t->leaf;
    return QLORA_OK;
}

// Mismatched sequences have no gradients.
static bool qlora__batch_is_leaf(const qlora_trainer* t, const qlora_batch* batch) {
    return !t->method->mismatched || batch->count == 0 || batch->roles[0] != QLORA_ROLE_MISMATCHED;
}

// Whether the next leaf of a step belongs to another process; it is then counted and passed over.
// Batches without gradients are computed by every process.
static bool qlora__leaf_skip(qlora_trainer* t, const qlora_batch* batch) {
    if (t->world <= 1 || !qlora__batch_is_leaf(t, batch)) {
        return false;
    }
    if (t->leaf >= t->share.begin && t->leaf < t->share.end) {
        return false;
    }
    t->leaf++;
    for (int64_t i = 0; i < batch->count; i++) {
        t->tokens += batch->lengths[i];
    }
    return true;
}

// Parameters that were updated with incomplete gradients must not be used or saved.
static qlora_result qlora__trainer_sound(qlora_ctx* ctx, const qlora_trainer* t) {
    return !t->spoilt ? QLORA_OK
                      : qlora__fail(ctx, QLORA_ERR_STATE,
                                    "an exchange with other processes failed in the middle of a "
                                    "step, so the parameters are not valid; load the last "
                                    "checkpoint in a new trainer");
}
