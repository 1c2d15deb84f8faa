// ---- what a part of a layer costs ---------------------------------------------------------------
//
// Each kind of part has a function that fills one of these in; model/work.h adds them up. All
// numbers are doubles: they are estimates of time, and no result depends on them but the choice of
// what is copied to the host.

// Matrices that read the same rows.
typedef struct qlora__stack_cost {
    double used;     // frozen weights that a token is multiplied with
    double adapters; // the same of A and B
    double held;     // all frozen weights
    double coded;    // of these, those that products dequantise
} qlora__stack_cost;

typedef struct qlora__part_cost {
    qlora__stack_cost in;
    qlora__stack_cost out; // what a recomputed layer leaves out, if it is the last part
    double routed;         // of the frozen weights, those of which a token uses some
    double uncached;       // of the coded ones, those without a copy in a cached layer
    double pair;           // FLOPs for two tokens of which one sees the other, forward
    double moved;          // elements read and written beside products, for each token: forward,
    double moved_back;     // and backward
} qlora__part_cost;

// Adds `count` matrices like `p`, of which a token uses `chosen`.
static void qlora__cost_add(const qlora__projection* p, double count, double chosen,
                            qlora__stack_cost* to) {
    double weights = (double)p->in * (double)p->out;
    to->used += chosen * weights;
    to->adapters += chosen * (double)p->rank * (double)(p->in + p->out);
    to->held += count * weights;
    to->coded += qlora__is_coded(p) ? count * weights : 0.0;
}

// The projections of a stack that all tokens use.
static void qlora__cost_stack(const qlora__layer* layer, int group, qlora__stack_cost* to) {
    for (int i = 0; i < layer->layout->groups[group].count; i++) {
        qlora__cost_add(&layer->projections[layer->layout->groups[group].first + i], 1.0, 1.0, to);
    }
}

static void qlora__cost_join(const qlora__stack_cost* from, qlora__stack_cost* to) {
    to->used += from->used;
    to->adapters += from->adapters;
    to->held += from->held;
    to->coded += from->coded;
}
