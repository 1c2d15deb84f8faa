// ---- routing ------------------------------------------------------------------------------------
//
// From the scores z of a router, a row per token, to the experts of every token and their weights:
//
//   softmax           p = softmax(z);     the k largest;  w = p
//   softmax, chosen                       the k largest;  w = softmax of those
//   sigmoid           p = sigmoid(z);     the k largest p + correction, from the groups whose two
//                                         best have the largest sums;  w = p
//
// If asked for, w is divided by its sum; then it is multiplied by a factor. Among equals, the
// expert with the lower number is taken. The rows of the tokens are sorted by expert: those of
// expert e are rows [starts[e], starts[e + 1]), in the order of their tokens. On the CPU only.

#define QLORA__ROUTE_FLOOR 1e-20 // is added to a sum of sigmoids

// What a router does with scores.
typedef struct qlora__route_rule {
    qlora__router score;
    int64_t experts;
    int64_t chosen;
    int64_t groups;
    int64_t groups_used;
    bool renormalise;
    double scale;
    const QLORA__REAL* correction; // NULL = none
} qlora__route_rule;

// Where it goes.
typedef struct qlora__route {
    qlora__route_rule rule;
    int64_t rows;
    const qlora_tensor* scores; // [rows, experts]
    int32_t* choice;            // [rows, chosen], the best first; on a GPU, ascending
    QLORA__REAL* weights;       // [rows, chosen]
    int32_t* place;             // [rows, chosen]: the row after sorting
    int32_t* tokens;            // [rows * chosen]: the token of such a row
    int32_t* starts;            // [experts + 1]
    const QLORA__REAL* slopes;  // [experts] of the load-balancing loss (balance.h); NULL = none
    const int32_t* bound;       // on a GPU: how many rows of the pass have a token
    int64_t first;              // row of the pass
} qlora__route;

static const QLORA__REAL* qlora__route_scores(const qlora__route* r, int64_t row) {
    return (const QLORA__REAL*)r->scores->data + row * r->scores->ld;
}

// The best of the experts of a group, after `above`, the one before in this order; -1 if there is
// none left.
static int64_t qlora__route_next(const double* values, int64_t first, int64_t end, int64_t above) {
    int64_t best = -1;
    for (int64_t e = first; e < end; e++) {
        bool later =
            above < 0 || values[e] < values[above] || (!(values[e] > values[above]) && e > above);
        if (later && (best < 0 || values[e] > values[best])) {
            best = e;
        }
    }
    return best;
}

// Sets the experts outside of the best groups to minus infinity.
static void qlora__route_groups(const qlora__route_rule* rule, double* values) {
    double sums[QLORA__MAX_EXPERTS];
    int64_t each = rule->experts / rule->groups;
    for (int64_t g = 0; g < rule->groups; g++) {
        int64_t a = qlora__route_next(values, g * each, (g + 1) * each, -1);
        int64_t b = qlora__route_next(values, g * each, (g + 1) * each, a);
        sums[g] = values[a] + values[b];
    }
    bool used[QLORA__MAX_EXPERTS] = {false};
    int64_t group = -1;
    for (int64_t i = 0; i < rule->groups_used; i++) {
        group = qlora__route_next(sums, 0, rule->groups, group);
        used[group] = true;
    }
    for (int64_t e = 0; e < rule->experts; e++) {
        values[e] = used[e / each] ? values[e] : -1e300;
    }
}

static double qlora__route_sigmoid(double z) {
    return 1.0 / (1.0 + exp(-z));
}

// The softmax of a row of scores: value e is exp(z[e] - *most) / *sum.
static void qlora__route_softmax(const qlora__route_rule* rule, const QLORA__REAL* z, double* most,
                                 double* sum) {
    *most = (double)z[0];
    *sum = 0.0;
    for (int64_t e = 1; e < rule->experts; e++) {
        *most = (double)z[e] > *most ? (double)z[e] : *most;
    }
    for (int64_t e = 0; e < rule->experts; e++) {
        *sum += exp((double)z[e] - *most);
    }
}

// Scores of chosen experts -> their values before they are divided by a sum.
static void qlora__route_values(const qlora__route* r, int64_t row, double* out) {
    const qlora__route_rule* rule = &r->rule;
    const QLORA__REAL* z = qlora__route_scores(r, row);
    const int32_t* choice = r->choice + row * rule->chosen;
    double most = 0.0;
    double sum = 1.0;
    if (rule->score != QLORA__ROUTER_SIGMOID) {
        qlora__route_softmax(rule, z, &most, &sum);
    }
    for (int64_t j = 0; j < rule->chosen; j++) {
        double at = (double)z[choice[j]];
        out[j] =
            rule->score == QLORA__ROUTER_SIGMOID ? qlora__route_sigmoid(at) : exp(at - most) / sum;
    }
}

// What the values of a row are divided by.
static double qlora__route_sum(const qlora__route_rule* rule, const double* values) {
    double sum = rule->score == QLORA__ROUTER_SIGMOID ? QLORA__ROUTE_FLOOR : 0.0;
    for (int64_t j = 0; j < rule->chosen; j++) {
        sum += values[j];
    }
    return rule->renormalise || rule->score == QLORA__ROUTER_SOFTMAX_CHOSEN ? sum : 1.0;
}

static void qlora__route_rows(void* user, int64_t begin, int64_t end) {
    const qlora__route* r = (const qlora__route*)user;
    const qlora__route_rule* rule = &r->rule;
    for (int64_t row = begin; row < end; row++) {
        const QLORA__REAL* z = qlora__route_scores(r, row);
        double values[QLORA__MAX_EXPERTS];
        double own[QLORA__MAX_EXPERTS];
        bool finite = true;
        double bad = 0.0;
        for (int64_t e = 0; e < rule->experts; e++) {
            bool sigmoid = rule->score == QLORA__ROUTER_SIGMOID;
            values[e] = sigmoid ? qlora__route_sigmoid((double)z[e]) : (double)z[e];
            values[e] += rule->correction != NULL ? (double)rule->correction[e] : 0.0;
            bool good = qlora__finite((float)z[e]) && qlora__finite((float)values[e]);
            bad = good ? bad : (double)z[e] - (double)z[e] + (values[e] - values[e]);
            finite = finite && good;
        }
        if (finite && rule->groups > 1) {
            qlora__route_groups(rule, values);
        }
        int64_t expert = -1;
        for (int64_t j = 0; j < rule->chosen; j++) {
            expert = finite ? qlora__route_next(values, 0, rule->experts, expert) : j;
            r->choice[row * rule->chosen + j] = (int32_t)expert;
        }
        qlora__route_values(r, row, own);
        double sum = qlora__route_sum(rule, own);
        for (int64_t j = 0; j < rule->chosen; j++) {
            double w = finite ? own[j] / sum * rule->scale : bad; // NaN
            r->weights[row * rule->chosen + j] = (QLORA__REAL)w;
        }
    }
}

// Sorts the rows by expert.
static void qlora__route_sort(const qlora__route* r) {
    int64_t all = r->rows * r->rule.chosen;
    memset(r->starts, 0, (size_t)(r->rule.experts + 1) * sizeof *r->starts);
    for (int64_t i = 0; i < all; i++) {
        r->starts[r->choice[i] + 1]++;
    }
    for (int64_t e = 0; e < r->rule.experts; e++) {
        r->starts[e + 1] += r->starts[e];
    }
    for (int64_t i = 0; i < all; i++) {
        int32_t at = r->starts[r->choice[i]]++;
        r->place[i] = at;
        r->tokens[at] = (int32_t)(i / r->rule.chosen);
    }
    for (int64_t e = r->rule.experts; e > 0; e--) {
        r->starts[e] = r->starts[e - 1];
    }
    r->starts[0] = 0;
}

// Scores that are not finite choose the first experts, with weights that are NaN.
static void qlora__route_tokens(qlora_ctx* ctx, qlora__route* r) {
    qlora__parallel(ctx, r->rows, 1 + 4096 / (1 + r->rule.experts), qlora__route_rows, r);
    qlora__route_sort(r);
}

// What the load-balancing loss adds.
static void qlora__route_slopes(const qlora__route* r, int64_t row, QLORA__REAL* dz) {
    const qlora__route_rule* rule = &r->rule;
    const QLORA__REAL* z = qlora__route_scores(r, row);
    double most = 0.0;
    double sum = 1.0;
    double mean = 0.0; // of the slopes, by the probabilities
    qlora__route_softmax(rule, z, &most, &sum);
    for (int64_t e = 0; e < rule->experts; e++) {
        mean += exp((double)z[e] - most) / sum * (double)r->slopes[e];
    }
    for (int64_t e = 0; e < rule->experts; e++) {
        double p = exp((double)z[e] - most) / sum;
        dz[e] += (QLORA__REAL)(p * ((double)r->slopes[e] - mean));
    }
}

typedef struct qlora__route_back {
    const qlora__route* route;
    const QLORA__REAL* dw;  // by sorted row
    const qlora_tensor* dz; // [rows, experts]
} qlora__route_back;

static void qlora__route_back_rows(void* user, int64_t begin, int64_t end) {
    const qlora__route_back* job = (const qlora__route_back*)user;
    const qlora__route* r = job->route;
    const qlora__route_rule* rule = &r->rule;
    for (int64_t row = begin; row < end; row++) {
        const int32_t* choice = r->choice + row * rule->chosen;
        QLORA__REAL* dz = (QLORA__REAL*)job->dz->data + row * job->dz->ld;
        double values[QLORA__MAX_EXPERTS];
        double dp[QLORA__MAX_EXPERTS];
        double mean = 0.0; // of dw with the weights as they are divided
        qlora__route_values(r, row, values);
        double sum = qlora__route_sum(rule, values);
        bool divided = rule->renormalise || rule->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
        for (int64_t j = 0; j < rule->chosen; j++) {
            dp[j] = (double)job->dw[r->place[row * rule->chosen + j]] * rule->scale;
            mean += dp[j] * values[j] / sum;
        }
        for (int64_t j = 0; j < rule->chosen; j++) {
            dp[j] = divided ? (dp[j] - mean) / sum : dp[j];
        }
        memset(dz, 0, (size_t)rule->experts * sizeof *dz);
        bool others = rule->score == QLORA__ROUTER_SOFTMAX && !divided;
        double most = 0.0;
        double all = 1.0;
        if (others) {
            const QLORA__REAL* z = qlora__route_scores(r, row);
            qlora__route_softmax(rule, z, &most, &all);
            for (int64_t e = 0; e < rule->experts; e++) {
                dz[e] = (QLORA__REAL)(-exp((double)z[e] - most) / all * mean);
            }
        }
        for (int64_t j = 0; j < rule->chosen; j++) {
            double slope =
                rule->score == QLORA__ROUTER_SIGMOID ? values[j] * (1.0 - values[j]) : values[j];
            dz[choice[j]] += (QLORA__REAL)(dp[j] * slope);
        }
        if (r->slopes != NULL) {
            qlora__route_slopes(r, row, dz);
        }
    }
}

// The gradients of the weights -> those of the scores.
static void qlora__route_backward(qlora_ctx* ctx, const qlora__route* r, const QLORA__REAL* dw,
                                  const qlora_tensor* dz) {
    qlora__route_back job;
    job.route = r;
    job.dw = dw;
    job.dz = dz;
    qlora__parallel(ctx, r->rows, 1 + 4096 / (1 + r->rule.experts), qlora__route_back_rows, &job);
}

// ---- rows of experts ----------------------------------------------------------------------------

// Rows of one matrix that are those of another by a list.
typedef struct qlora__listed_rows {
    const qlora_tensor* from;
    const qlora_tensor* to;
    const int32_t* list;
    const QLORA__REAL* factors;
    QLORA__REAL* dots;
} qlora__listed_rows;

static void qlora__listed_gather(void* user, int64_t begin, int64_t end) {
    const qlora__listed_rows* job = (const qlora__listed_rows*)user;
    for (int64_t i = begin; i < end; i++) {
        memcpy((QLORA__REAL*)job->to->data + i * job->to->ld,
               (const QLORA__REAL*)job->from->data + job->list[i] * job->from->ld,
               (size_t)job->to->cols * sizeof(QLORA__REAL));
    }
}

// to[i] = from[list[i]]
static void qlora__rows_gather(qlora_ctx* ctx, const qlora_tensor* from, const int32_t* list,
                               const qlora_tensor* to) {
    qlora__listed_rows job;
    memset(&job, 0, sizeof job);
    job.from = from;
    job.to = to;
    job.list = list;
    qlora__parallel(ctx, to->rows, 1 + 4096 / (1 + to->cols), qlora__listed_gather, &job);
}

static void qlora__listed_add(void* user, int64_t begin, int64_t end) {
    const qlora__listed_rows* job = (const qlora__listed_rows*)user;
    for (int64_t i = begin; i < end; i++) {
        const QLORA__REAL* from = (const QLORA__REAL*)job->from->data + i * job->from->ld;
        QLORA__REAL* to = (QLORA__REAL*)job->to->data + job->list[i] * job->to->ld;
        for (int64_t c = 0; c < job->from->cols; c++) {
            to[c] += from[c];
        }
    }
}

// to[list[i]] += from[i]; no row is in the list twice.
static void qlora__rows_spread_add(qlora_ctx* ctx, const qlora_tensor* from, const int32_t* list,
                                   const qlora_tensor* to) {
    qlora__listed_rows job;
    memset(&job, 0, sizeof job);
    job.from = from;
    job.to = to;
    job.list = list;
    qlora__parallel(ctx, from->rows, 1 + 4096 / (1 + from->cols), qlora__listed_add, &job);
}

static void qlora__listed_scale(void* user, int64_t begin, int64_t end) {
    const qlora__listed_rows* job = (const qlora__listed_rows*)user;
    for (int64_t i = begin; i < end; i++) {
        QLORA__REAL* to = (QLORA__REAL*)job->to->data + i * job->to->ld;
        for (int64_t c = 0; c < job->to->cols; c++) {
            to[c] *= job->factors[i];
        }
    }
}

// Row i times factors[i].
static void qlora__rows_scale(qlora_ctx* ctx, const QLORA__REAL* factors, const qlora_tensor* t) {
    qlora__listed_rows job;
    memset(&job, 0, sizeof job);
    job.to = t;
    job.factors = factors;
    qlora__parallel(ctx, t->rows, 1 + 4096 / (1 + t->cols), qlora__listed_scale, &job);
}

static void qlora__listed_dot(void* user, int64_t begin, int64_t end) {
    const qlora__listed_rows* job = (const qlora__listed_rows*)user;
    for (int64_t i = begin; i < end; i++) {
        const QLORA__REAL* a = (const QLORA__REAL*)job->from->data + i * job->from->ld;
        const QLORA__REAL* b = (const QLORA__REAL*)job->to->data + i * job->to->ld;
        double sum = 0.0;
        for (int64_t c = 0; c < job->from->cols; c++) {
            sum += (double)a[c] * (double)b[c];
        }
        job->dots[i] = (QLORA__REAL)sum;
    }
}

// dots[i] = the product of the rows i of a and b.
static void qlora__rows_dot(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                            QLORA__REAL* dots) {
    qlora__listed_rows job;
    memset(&job, 0, sizeof job);
    job.from = a;
    job.to = b;
    job.dots = dots;
    qlora__parallel(ctx, a->rows, 1 + 4096 / (1 + a->cols), qlora__listed_dot, &job);
}
