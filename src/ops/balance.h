// ---- the load of experts ------------------------------------------------------------------------
//
// How often routers choose each expert, and the loss that balances it, as transformers computes it.
// Of the R rows of all layers with experts, c_e have chosen expert e; P_e is the sum of its
// probabilities p = softmax(z), over all experts whatever the router makes of the scores z:
//
//   loss = experts sum_e (c_e / R) (P_e / R)
//   dz_e += factor p_e (g_e - sum_i p_i g_i),   g_e = experts c_e / R^2
//
// The counts have no gradient, so the loss is known after the forward pass, and its gradients are
// those of each row alone. Rows that fill a micro-batch up do not count. The rows of a layer are
// divided into ranges, each of which has a slot; slots are summed in their order.

#define QLORA__BALANCE_RANGES 32 // of the rows of a tile, at most
#define QLORA__BALANCE_ROWS 64   // of a range, at least

enum { QLORA__LOAD_LEAST, QLORA__LOAD_MOST, QLORA__LOAD_ENTROPY, QLORA__LOADS };

typedef struct qlora__balance {
    double coefficient; // of the loss, as the trainer has it; 0 = none
    int64_t layers; // with experts
    int64_t experts;
    int64_t chosen;
    int64_t ranges;       // of the rows of a tile
    int64_t slots;        // of a layer: the ranges of all tiles
    qlora_tensor sums;    // f32 [layers * slots, experts] of probabilities
    qlora_tensor counts;  // I32, the same shape: of choices
    qlora_tensor weights; // f32 [1, experts]: P
    qlora_tensor taken;   // I32 [1, experts]: c
    qlora_tensor slopes;  // f32 [1, experts]: factor g
    qlora_tensor load;    // I32 [layers, experts] choices of a step
    qlora_tensor report;  // f32 [1, QLORA__LOADS] of a step, relative to an even load
} qlora__balance;

// The rows of a tile of one layer.
typedef struct qlora__balance_tile {
    const qlora__balance* balance;
    const qlora__route* route;
    int64_t slot; // the first of the tile
    bool weighs;  // probabilities are summed as well
} qlora__balance_tile;

static void qlora__balance_ranges(void* user, int64_t begin, int64_t end) {
    const qlora__balance_tile* t = (const qlora__balance_tile*)user;
    const qlora__route* r = t->route;
    int64_t experts = t->balance->experts;
    int64_t each = qlora__ceil_div(r->rows, t->balance->ranges);
    for (int64_t range = begin; range < end; range++) {
        double sums[QLORA__MAX_EXPERTS];
        QLORA__REAL* to =
            (QLORA__REAL*)t->balance->sums.data + (t->slot + range) * t->balance->sums.ld;
        int32_t* counts =
            (int32_t*)t->balance->counts.data + (t->slot + range) * t->balance->counts.ld;
        int64_t stop = qlora__min((range + 1) * each, r->rows);
        memset(sums, 0, (size_t)experts * sizeof *sums);
        memset(counts, 0, (size_t)experts * sizeof *counts);
        for (int64_t row = range * each; row < stop; row++) {
            const QLORA__REAL* z = qlora__route_scores(r, row);
            double most = 0.0;
            double sum = 1.0;
            if (t->weighs) {
                qlora__route_softmax(&r->rule, z, &most, &sum);
            }
            for (int64_t e = 0; e < experts && t->weighs; e++) {
                sums[e] += exp((double)z[e] - most) / sum;
            }
            for (int64_t j = 0; j < r->rule.chosen; j++) {
                counts[r->choice[row * r->rule.chosen + j]]++;
            }
        }
        for (int64_t e = 0; e < experts; e++) {
            to[e] = (QLORA__REAL)sums[e];
        }
    }
}

// Counts the choices of a tile, and sums its probabilities.
static qlora_result qlora__balance_count(qlora_ctx* ctx, qlora__balance_tile* t) {
    const qlora__balance* b = t->balance;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, b->ranges, 1, qlora__balance_ranges, t);
        return QLORA_OK;
    }
#ifndef QLORA_NO_CUDA
    qlora__route r = *t->route; // parameters are passed by address
    qlora_tensor scores = *r.scores;
    float* sums = (float*)b->sums.data + t->slot * b->sums.ld;
    int32_t* counts = (int32_t*)b->counts.data + t->slot * b->counts.ld;
    int32_t experts = (int32_t)b->experts;
    int32_t chosen = (int32_t)b->chosen;
    int32_t weighs = t->weighs ? 1 : 0;
    void* args[] = {&scores.data, &scores.ld, &r.choice, &r.rows, (void*)&r.bound,
                    &r.first,     &experts,   &chosen,   &weighs, &sums,
                    &counts};
    return qlora__launch(ctx, QLORA__K_balance_rows, b->ranges, 1, 1, 128,
                         (uint32_t)(20 * b->experts), args);
#else
    return QLORA_OK;
#endif
}

// What becomes of the sums of a micro-batch.
typedef struct qlora__balance_use {
    const qlora_tensor* shares; // f32 [1, 2]: of the micro-batch in the loss of the step; the same
                                // times the coefficient
    const qlora_tensor* total;  // f32 [1, 1], to which the loss is added; NULL: only loads count
    int64_t used;               // slots of each layer
} qlora__balance_use;

static void qlora__balance_close_host(const qlora__balance* b, const qlora__balance_use* use) {
    int32_t* taken = (int32_t*)b->taken.data;
    double rows = 0.0;
    double loss = 0.0;
    for (int64_t e = 0; e < b->experts; e++) {
        double sum = 0.0;
        taken[e] = 0;
        for (int64_t l = 0; l < b->layers; l++) {
            int32_t* load = (int32_t*)b->load.data + l * b->load.ld;
            for (int64_t s = l * b->slots; s < l * b->slots + use->used; s++) {
                int32_t count = ((const int32_t*)b->counts.data)[s * b->counts.ld + e];
                sum += (double)((const QLORA__REAL*)b->sums.data)[s * b->sums.ld + e];
                load[e] += count;
                taken[e] += count;
            }
        }
        rows += (double)taken[e] / (double)b->chosen;
        loss += (double)taken[e] * sum;
    }
    if (use->total == NULL) {
        return;
    }
    double factor = rows > 0.0 ? (double)b->experts / (rows * rows) : 0.0;
    double before = (double)qlora__at(use->total, 0, 0);
    qlora__put(use->total, 0, 0,
               (QLORA__REAL)(before + (double)qlora__at(use->shares, 0, 0) * factor * loss));
    for (int64_t e = 0; e < b->experts; e++) {
        double slope = (double)qlora__at(use->shares, 0, 1) * factor * (double)taken[e];
        qlora__put(&b->slopes, 0, e, (QLORA__REAL)slope);
    }
}

// After the last layer: the load, the loss, and what its gradients need.
static qlora_result qlora__balance_close(qlora_ctx* ctx, const qlora__balance* b,
                                         const qlora__balance_use* use) {
    if (qlora__on_cpu(ctx)) {
        qlora__balance_close_host(b, use);
        return QLORA_OK;
    }
#ifndef QLORA_NO_CUDA
    qlora__balance own = *b;
    int64_t used = use->used;
    int32_t experts = (int32_t)b->experts;
    int32_t chosen = (int32_t)b->chosen;
    void* gather[] = {&own.sums.data, &own.counts.data, &own.layers,     &own.slots,       &used,
                      &experts,       &own.load.data,   &own.taken.data, &own.weights.data};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_balance_gather, qlora__ceil_div(b->experts, 8), 1, 1,
                             256, 0, gather));
    if (use->total == NULL) {
        return QLORA_OK;
    }
    void* shares = use->shares->data;
    void* total = use->total->data;
    void* loss[] = {&own.taken.data, &own.weights.data, &experts, &chosen, &shares, &total,
                    &own.slopes.data};
    return qlora__launch(ctx, QLORA__K_balance_loss, 1, 1, 1, 1024, 0, loss);
#else
    return QLORA_OK;
#endif
}

static void qlora__balance_report_host(const qlora__balance* b) {
    double least = 1e300;
    double most = 0.0;
    double entropy = 0.0;
    for (int64_t l = 0; l < b->layers; l++) {
        const int32_t* load = (const int32_t*)b->load.data + l * b->load.ld;
        double all = 0.0;
        for (int64_t e = 0; e < b->experts; e++) {
            all += (double)load[e];
        }
        for (int64_t e = 0; e < b->experts; e++) {
            double share = all > 0.0 ? (double)load[e] / all : 0.0;
            least = share < least ? share : least;
            most = share > most ? share : most;
            entropy -= share > 0.0 ? share * log(share) : 0.0;
        }
    }
    double even = b->experts > 1 ? log((double)b->experts) : 1.0;
    qlora__put(&b->report, 0, QLORA__LOAD_LEAST, (QLORA__REAL)(least * (double)b->experts));
    qlora__put(&b->report, 0, QLORA__LOAD_MOST, (QLORA__REAL)(most * (double)b->experts));
    qlora__put(&b->report, 0, QLORA__LOAD_ENTROPY,
               (QLORA__REAL)(entropy / (even * (double)b->layers)));
}

// The load of a step, relative to an even one: the least and the most of any expert of a layer, and
// the entropy of a layer, as the mean of the layers.
static qlora_result qlora__balance_report(qlora_ctx* ctx, const qlora__balance* b) {
    if (b->layers == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        qlora__balance_report_host(b);
        return QLORA_OK;
    }
#ifndef QLORA_NO_CUDA
    qlora__balance own = *b;
    int32_t layers = (int32_t)b->layers;
    int32_t experts = (int32_t)b->experts;
    void* args[] = {&own.load.data, &layers, &experts, &own.report.data};
    return qlora__launch(ctx, QLORA__K_balance_report, 1, 1, 1, 256, 0, args);
#else
    return QLORA_OK;
#endif
}
