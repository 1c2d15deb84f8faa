// experts_gpu.c - the kernels of experts: routing against the CPU's, products of all experts
// against plain loops, with experts that have no rows, one, and more than a tile.

#include "machines.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

SUITE_EXTERN(experts_gpu_suite);

#ifndef QLORA_NO_CUDA

enum { MANY_TOKENS = 150, MANY_EXPERTS = 70, MANY_CHOSEN = 5 };
enum { MANY = MANY_TOKENS * MANY_CHOSEN, MANY_SCORES = MANY_TOKENS * MANY_EXPERTS };
enum { MANY_CHUNKS = MANY / 256 + 1, MANY_TILES = 1 + 2 * (MANY / 128 + MANY_EXPERTS) };

// A route on the host, and what of it is on the device.
typedef struct many_routes {
    float scores[MANY_SCORES];
    float correction[MANY_EXPERTS];
    float weights[MANY];
    float dw[MANY];
    float dz[MANY_SCORES];
    int32_t choice[MANY];
    int32_t place[MANY];
    int32_t tokens[MANY];
    int32_t starts[MANY_EXPERTS + 1];
    int32_t tiles[MANY_TILES];
    qlora_tensor t;
    qlora__route route;
} many_routes;

static void many_make(many_routes* r, qlora__router score, bool renormalise, bool groups) {
    test_random random = test_random_start("routes");
    memset(r, 0, sizeof *r);
    for (int i = 0; i < MANY_SCORES; i++) {
        r->scores[i] = (float)test_random_normal(&random);
    }
    for (int i = 0; i < MANY_EXPERTS; i++) { // the last experts are equal, and so are many tokens
        r->correction[i] = i < 60 ? (float)(0.3 * test_random_normal(&random)) : 0.5f;
        for (int t = 0; t < MANY_TOKENS && i >= 60; t++) {
            r->scores[t * MANY_EXPERTS + i] = t % 3 == 0 ? 2.0f : 0.25f;
        }
    }
    for (int i = 0; i < MANY; i++) {
        r->dw[i] = (float)test_random_normal(&random);
    }
    r->t.dtype = QLORA_F32;
    r->t.rows = MANY_TOKENS;
    r->t.cols = MANY_EXPERTS;
    r->t.ld = MANY_EXPERTS;
    r->t.data = r->scores;
    r->route.rule.score = score;
    r->route.rule.experts = MANY_EXPERTS;
    r->route.rule.chosen = MANY_CHOSEN;
    r->route.rule.groups = groups ? 7 : 1;
    r->route.rule.groups_used = groups ? 3 : 1;
    r->route.rule.renormalise = renormalise;
    r->route.rule.scale = 1.7;
    r->route.rows = MANY_TOKENS;
    r->route.scores = &r->t;
    r->route.choice = r->choice;
    r->route.weights = r->weights;
    r->route.place = r->place;
    r->route.tokens = r->tokens;
    r->route.starts = r->starts;
    r->route.rule.correction = score == QLORA__ROUTER_SIGMOID ? r->correction : NULL;
}

// Memory of the device, one piece after the other.
typedef struct many_device {
    qlora_tensor all;
    size_t used;
} many_device;

static void* many_take(many_device* d, size_t bytes) {
    void* p = (char*)d->all.data + d->used;
    d->used += (bytes + 255) / 256 * 256;
    return p;
}

// Runs the kernels on the scores of r, and reads what they leave into `out`.
static bool many_run_in(qlora_ctx* ctx, many_device d, const many_routes* r, many_routes* out) {
    qlora__routing own;
    qlora_tensor scores = r->t;
    qlora_tensor dz = r->t;
    qlora__route route = r->route;
    scores.data = many_take(&d, sizeof r->scores);
    dz.data = many_take(&d, sizeof r->dz);
    route.scores = &scores;
    route.choice = (int32_t*)many_take(&d, sizeof r->choice);
    route.place = (int32_t*)many_take(&d, sizeof r->place);
    route.tokens = (int32_t*)many_take(&d, sizeof r->tokens);
    route.starts = (int32_t*)many_take(&d, sizeof r->starts);
    own.weights = (float*)many_take(&d, sizeof r->weights);
    own.sorted = (float*)many_take(&d, sizeof r->weights);
    own.counts = (int32_t*)many_take(&d, sizeof(int32_t) * MANY_CHUNKS * MANY_EXPERTS);
    own.tiles = (int32_t*)many_take(&d, sizeof r->tiles);
    void* correction = many_take(&d, sizeof r->correction);
    void* dw = many_take(&d, sizeof r->dw);
    route.rule.correction =
        r->route.rule.correction != NULL ? (const QLORA__REAL*)correction : NULL;
    return qlora__tensor_zero(ctx, &d.all) == QLORA_OK && // lists are read as a whole
           qlora__copy_in(ctx, scores.data, r->scores, sizeof r->scores) == QLORA_OK &&
           qlora__copy_in(ctx, correction, r->correction, sizeof r->correction) == QLORA_OK &&
           qlora__copy_in(ctx, dw, r->dw, sizeof r->dw) == QLORA_OK &&
           qlora__routing_choose(ctx, &route, &own) == QLORA_OK &&
           qlora__routing_backward(ctx, &route, dw, &dz) == QLORA_OK &&
           qlora__copy_out(ctx, out->choice, route.choice, sizeof r->choice) == QLORA_OK &&
           qlora__copy_out(ctx, out->weights, own.weights, sizeof r->weights) == QLORA_OK &&
           qlora__copy_out(ctx, out->place, route.place, sizeof r->place) == QLORA_OK &&
           qlora__copy_out(ctx, out->tokens, route.tokens, sizeof r->tokens) == QLORA_OK &&
           qlora__copy_out(ctx, out->starts, route.starts, sizeof r->starts) == QLORA_OK &&
           qlora__copy_out(ctx, out->tiles, own.tiles, sizeof r->tiles) == QLORA_OK &&
           qlora__copy_out(ctx, out->dz, dz.data, sizeof r->dz) == QLORA_OK;
}

static qlora_result many_enter(qlora_ctx* ctx, const many_device* d, const many_routes* r,
                               many_routes* out) {
    QLORA__ENTER(ctx, "routing");
    return qlora__leave(ctx, many_run_in(ctx, *d, r, out) ? QLORA_OK : QLORA_ERR_STATE);
}

static bool many_run(qlora_ctx* ctx, const many_routes* r, many_routes* out) {
    many_device d;
    memset(&d, 0, sizeof d);
    *out = *r;
    return qlora_tensor_create(ctx, QLORA_U8, 1, 1 << 20, &d.all) == QLORA_OK &&
           many_enter(ctx, &d, r, out) == QLORA_OK && qlora_tensor_destroy(ctx, &d.all) == QLORA_OK;
}

// Where the CPU has an expert of a token among its choices; -1 if nowhere.
static int many_find(const many_routes* r, int token, int32_t expert) {
    int at = -1;
    for (int j = 0; j < MANY_CHOSEN; j++) {
        int i = token * MANY_CHOSEN + j;
        at = r->choice[i] == expert ? i : at;
    }
    return at;
}

// Tiles cover the rows of every expert, in order.
static bool many_tiles_are_right(const many_routes* r) {
    int32_t at = 0;
    int32_t expert = 0;
    for (int32_t i = 0; i < r->tiles[0]; i++) {
        while (at == r->starts[expert + 1]) {
            expert++;
        }
        if (r->tiles[2 * i + 1] != expert || r->tiles[2 * i + 2] != at) {
            return false;
        }
        at = at + 128 < r->starts[expert + 1] ? at + 128 : r->starts[expert + 1];
    }
    return at == MANY;
}

TEST many_routes_agree(const test_machine* machine, const many_routes* made) {
    static many_routes host;
    static many_routes device;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    host = *made;
    host.route.rule.correction = made->route.rule.correction != NULL ? host.correction : NULL;
    host.route.scores = &host.t;
    host.route.choice = host.choice;
    host.route.weights = host.weights;
    host.route.place = host.place;
    host.route.tokens = host.tokens;
    host.route.starts = host.starts;
    host.t.data = host.scores;
    qlora__route_rows(&host.route, 0, MANY_TOKENS);
    qlora__route_sort(&host.route);
    ASSERTm(qlora_last_error(ctx), many_run(ctx, &host, &device));
    ASSERT(memcmp(host.starts, device.starts, sizeof host.starts) == 0);
    ASSERT(memcmp(host.tokens, device.tokens, sizeof host.tokens) == 0);
    ASSERT(many_tiles_are_right(&device));
    for (int i = 0; i < MANY; i++) {
        int token = i / MANY_CHOSEN;
        int at = many_find(&host, token, device.choice[i]);
        ASSERT(at >= 0 && host.place[at] == device.place[i]);
        ASSERT(i % MANY_CHOSEN == 0 || device.choice[i] > device.choice[i - 1]);
        ASSERT(fabs((double)host.weights[at] - (double)device.weights[i]) <=
               2e-6 * (double)host.weights[at]);
    }
    qlora__route_back back = {&host.route, host.dw, NULL};
    static float dz[MANY_SCORES];
    qlora_tensor t = host.t;
    t.data = dz;
    back.dz = &t;
    qlora__route_back_rows(&back, 0, MANY_TOKENS);
    for (int i = 0; i < MANY_SCORES; i++) {
        ASSERT(fabs((double)dz[i] - (double)device.dz[i]) <= 3e-6);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST routing_agrees(const test_machine* machine) {
    static many_routes made;
    static const struct {
        qlora__router score;
        bool renormalise;
        bool groups;
    } cases[] = {{QLORA__ROUTER_SOFTMAX, false, false},
                 {QLORA__ROUTER_SOFTMAX, true, false},
                 {QLORA__ROUTER_SOFTMAX_CHOSEN, false, false},
                 {QLORA__ROUTER_SIGMOID, true, true},
                 {QLORA__ROUTER_SIGMOID, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        many_make(&made, cases[i].score, cases[i].renormalise, cases[i].groups);
        CHECK_CALL(many_routes_agree(machine, &made));
    }
    PASS();
}

// Scores that are not finite choose the first experts, with weights that are NaN.
TEST bad_scores_are_seen_there(const test_machine* machine) {
    static many_routes made;
    static many_routes device;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    many_make(&made, QLORA__ROUTER_SIGMOID, true, true);
    made.scores[3 * MANY_EXPERTS + 65] = (float)NAN;
    made.scores[8 * MANY_EXPERTS] = -INFINITY;
    ASSERTm(qlora_last_error(ctx), many_run(ctx, &made, &device));
    for (int i = 0; i < MANY; i++) {
        int token = i / MANY_CHOSEN;
        bool bad = token == 3 || token == 8;
        ASSERT((device.weights[i] != device.weights[i]) == bad);
        ASSERT(!bad || device.choice[i] == i % MANY_CHOSEN);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- the load of experts

enum { LOAD_TOKENS = 131, LOAD_RANGES = 3, LOAD_LAYERS = 2, LOAD_SLOTS = 5 };

// Sums of the host, or those of the device as they are read back.
typedef struct loads {
    float sums[LOAD_LAYERS * LOAD_SLOTS * MANY_EXPERTS];
    int32_t counts[LOAD_LAYERS * LOAD_SLOTS * MANY_EXPERTS];
    float weights[MANY_EXPERTS];
    int32_t taken[MANY_EXPERTS];
    float slopes[MANY_EXPERTS];
    int32_t load[LOAD_LAYERS * MANY_EXPERTS];
    float report[QLORA__LOADS];
    float shares[2];
    float total;
} loads;

static qlora_tensor loads_view(void* at, int64_t rows, int64_t cols, qlora_dtype type) {
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    t.data = at;
    t.rows = rows;
    t.cols = cols;
    t.ld = cols;
    t.dtype = type;
    return t;
}

// The views of such a block in the memory of either.
static qlora__balance loads_balance(loads* at) {
    qlora__balance b;
    memset(&b, 0, sizeof b);
    b.layers = LOAD_LAYERS;
    b.experts = MANY_EXPERTS;
    b.chosen = MANY_CHOSEN;
    b.ranges = LOAD_RANGES;
    b.slots = LOAD_SLOTS;
    b.sums = loads_view(at->sums, LOAD_LAYERS * LOAD_SLOTS, MANY_EXPERTS, QLORA_F32);
    b.counts = loads_view(at->counts, LOAD_LAYERS * LOAD_SLOTS, MANY_EXPERTS, QLORA_I32);
    b.weights = loads_view(at->weights, 1, MANY_EXPERTS, QLORA_F32);
    b.taken = loads_view(at->taken, 1, MANY_EXPERTS, QLORA_I32);
    b.slopes = loads_view(at->slopes, 1, MANY_EXPERTS, QLORA_F32);
    b.load = loads_view(at->load, LOAD_LAYERS, MANY_EXPERTS, QLORA_I32);
    b.report = loads_view(at->report, 1, QLORA__LOADS, QLORA_F32);
    return b;
}

static void loads_start(loads* l) {
    memset(l, 0, sizeof *l);
    for (int i = 0; i < LOAD_LAYERS * LOAD_SLOTS * MANY_EXPERTS; i++) {
        l->sums[i] = 1e9f; // of an earlier micro-batch: those in use are written
        l->counts[i] = 1000;
    }
    for (int i = 0; i < LOAD_LAYERS * MANY_EXPERTS; i++) {
        l->load[i] = i % 7; // of an earlier micro-batch
    }
    l->shares[0] = 0.75f;
    l->shares[1] = 40.0f;
    l->total = 0.5f;
}

// Two layers with the same scores, of which the second has half of the rows. The device also has
// those that fill the first one up.
static qlora_result loads_run(qlora_ctx* ctx, const qlora__route* made, loads* at) {
    qlora__balance b = loads_balance(at);
    qlora_tensor shares = loads_view(at->shares, 1, 2, QLORA_F32);
    qlora_tensor total = loads_view(&at->total, 1, 1, QLORA_F32);
    qlora__balance_use use = {&shares, &total, LOAD_RANGES};
    for (int l = 0; l < LOAD_LAYERS; l++) {
        qlora__route route = *made;
        qlora__balance_tile tile = {&b, &route, l * LOAD_SLOTS, true};
        route.rows = l > 0 ? MANY_TOKENS / 2 : made->bound == NULL ? LOAD_TOKENS : MANY_TOKENS;
        if (made->bound == NULL) {
            qlora__balance_ranges(&tile, 0, LOAD_RANGES);
        } else {
            QLORA__TRY(qlora__balance_count(ctx, &tile));
        }
    }
    if (made->bound == NULL) {
        qlora__balance_close_host(&b, &use);
        qlora__balance_report_host(&b);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__balance_close(ctx, &b, &use));
    return qlora__balance_report(ctx, &b);
}

// On the device, where the pass begins at row 10 and has LOAD_TOKENS + 10 rows with tokens, and the
// gradients of scores.
static qlora_result loads_there(qlora_ctx* ctx, const many_device* given, many_routes* r,
                                loads* out) {
    many_device d = *given;
    qlora_tensor scores = r->t;
    qlora_tensor dz = r->t;
    qlora__route route = r->route;
    int32_t bound = LOAD_TOKENS + 10;
    loads* at = (loads*)many_take(&d, sizeof *at);
    QLORA__ENTER(ctx, "loads");
    scores.data = many_take(&d, sizeof r->scores);
    dz.data = many_take(&d, sizeof r->dz);
    route.scores = &scores;
    route.choice = (int32_t*)many_take(&d, sizeof r->choice);
    route.place = (int32_t*)many_take(&d, sizeof r->place);
    route.bound = (const int32_t*)many_take(&d, sizeof bound);
    route.first = 10;
    route.slopes = at->slopes;
    void* dw = many_take(&d, sizeof r->dw);
    bool ok = qlora__copy_in(ctx, at, out, sizeof *out) == QLORA_OK &&
              qlora__copy_in(ctx, scores.data, r->scores, sizeof r->scores) == QLORA_OK &&
              qlora__copy_in(ctx, route.choice, r->choice, sizeof r->choice) == QLORA_OK &&
              qlora__copy_in(ctx, route.place, r->place, sizeof r->place) == QLORA_OK &&
              qlora__copy_in(ctx, (void*)route.bound, &bound, sizeof bound) == QLORA_OK &&
              qlora__copy_in(ctx, dw, r->dw, sizeof r->dw) == QLORA_OK &&
              loads_run(ctx, &route, at) == QLORA_OK &&
              qlora__routing_backward(ctx, &route, dw, &dz) == QLORA_OK &&
              qlora__copy_out(ctx, out, at, sizeof *out) == QLORA_OK &&
              qlora__copy_out(ctx, r->dz, dz.data, sizeof r->dz) == QLORA_OK;
    return qlora__leave(ctx, ok ? QLORA_OK : QLORA_ERR_STATE);
}

static bool loads_near(const float* a, const float* b, int count) {
    double most = 0.0;
    for (int i = 0; i < count; i++) {
        most = fabs((double)a[i]) > most ? fabs((double)a[i]) : most;
    }
    for (int i = 0; i < count; i++) {
        if (!(fabs((double)a[i] - (double)b[i]) <= 3e-6 * most)) {
            return false;
        }
    }
    return true;
}

static bool loads_run_there(qlora_ctx* ctx, many_routes* r, loads* out) {
    many_device d;
    memset(&d, 0, sizeof d);
    return qlora_tensor_create(ctx, QLORA_U8, 1, 1 << 20, &d.all) == QLORA_OK &&
           loads_there(ctx, &d, r, out) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &d.all) == QLORA_OK;
}

// The load-balancing loss, its gradients and loads are those of the CPU; rows that fill a
// micro-batch up do not count.
TEST loads_agree(const test_machine* machine, qlora__router score, bool renormalise) {
    static many_routes r;
    static loads host;
    static loads device;
    static float dz[MANY_SCORES];
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    many_make(&r, score, renormalise, false);
    qlora__route_rows(&r.route, 0, MANY_TOKENS);
    qlora__route_sort(&r.route);
    loads_start(&host);
    loads_start(&device);
    ASSERT_EQ(QLORA_OK, loads_run(ctx, &r.route, &host));
    ASSERTm(qlora_last_error(ctx), loads_run_there(ctx, &r, &device));
    ASSERT_MEM_EQ(host.taken, device.taken, sizeof host.taken);
    ASSERT_MEM_EQ(host.load, device.load, sizeof host.load);
    ASSERT(loads_near(host.slopes, device.slopes, MANY_EXPERTS));
    ASSERT(loads_near(host.report, device.report, QLORA__LOADS));
    ASSERT(fabs((double)host.total - (double)device.total) <= 1e-6 * (double)host.total);
    qlora_tensor t = r.t;
    qlora__route_back back = {&r.route, r.dw, &t};
    t.data = dz;
    r.route.slopes = host.slopes;
    qlora__route_back_rows(&back, 0, LOAD_TOKENS);
    r.route.slopes = NULL;
    qlora__route_back_rows(&back, LOAD_TOKENS, MANY_TOKENS);
    ASSERT(loads_near(dz, r.dz, MANY_SCORES));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST balance_agrees(const test_machine* machine) {
    CHECK_CALL(loads_agree(machine, QLORA__ROUTER_SOFTMAX, false));
    CHECK_CALL(loads_agree(machine, QLORA__ROUTER_SOFTMAX, true));
    CHECK_CALL(loads_agree(machine, QLORA__ROUTER_SOFTMAX_CHOSEN, false));
    PASS();
}

// ---- products

enum { GROUPS = 6, GROUP_ROWS = 2 + 131 + 64 + 3, GROUP_TILES = 16 };

static const int32_t group_starts[GROUPS + 1] = {0, 0, 2, 133, 133, 197, 200};

typedef struct product_case {
    qlora_dtype type;
    int64_t in;
    int64_t out;
    int64_t apart; // rows of B from one expert to the next, or columns of it, more than it has
} product_case;

// Wide and narrow results, rows that are not aligned, and a K that ends within a slice.
static const product_case product_cases[] = {{QLORA_F32, 40, 72, 0},   {QLORA_F32, 37, 9, 3},
                                             {QLORA_BF16, 72, 264, 8}, {QLORA_BF16, 136, 24, 0},
                                             {QLORA_BF16, 64, 300, 4}, {QLORA_BF16, 37, 70, 0},
                                             {QLORA_BF16, 16, 152, 8}, {QLORA_BF16, 136, 8, 0},
                                             {QLORA_BF16, 32, 72, 0},  {QLORA_BF16, 48, 56, 8}};

typedef struct product_rig {
    qlora_tensor x;   // [rows, in]
    qlora_tensor w;   // [out + apart, in], a batch
    qlora_tensor y;   // [rows, out]
    qlora_tensor sum; // f32 [out, in], a batch
    qlora_tensor lists;
    qlora_tensor list; // the rows of x in `turned`, which has them from the last to the first
    qlora_tensor turned;
    float* values[4];
    qlora__groups groups;
} product_rig;

// Values that are exact in bf16.
static float* product_values(const char* name, int64_t count) {
    test_random random = test_random_start(name);
    float* v = (float*)malloc((size_t)count * sizeof *v);
    for (int64_t i = 0; v != NULL && i < count; i++) {
        v[i] = (float)((int)(test_random_normal(&random) * 32.0)) / 32.0f;
    }
    return v;
}

static qlora_result product_lists(qlora_ctx* ctx, const qlora_tensor* to, const int32_t* lists,
                                  size_t bytes) {
    QLORA__ENTER(ctx, "lists");
    return qlora__leave(ctx, qlora__copy_in(ctx, to->data, lists, bytes));
}

static bool product_open(qlora_ctx* ctx, const product_case* c, product_rig* r) {
    int32_t lists[GROUPS + 1 + 1 + 2 * GROUP_TILES];
    int64_t height = c->out + c->apart;
    memset(r, 0, sizeof *r);
    memcpy(lists, group_starts, sizeof group_starts);
    int32_t* tiles = lists + GROUPS + 1;
    tiles[0] = 0;
    for (int32_t e = 0; e < GROUPS; e++) {
        for (int32_t at = group_starts[e]; at < group_starts[e + 1]; at += 128) {
            tiles[2 * tiles[0] + 1] = e;
            tiles[2 * tiles[0] + 2] = at;
            tiles[0]++;
        }
    }
    r->values[0] = product_values("x", GROUP_ROWS * c->in);
    r->values[1] = product_values("w", GROUPS * height * c->in);
    r->values[2] = product_values("y", GROUP_ROWS * c->out);
    r->values[3] = product_values("sum", GROUPS * c->out * c->in);
    bool ok =
        r->values[0] != NULL && r->values[1] != NULL && r->values[2] != NULL &&
        r->values[3] != NULL &&
        test_tensor(ctx, c->type, GROUP_ROWS, c->in, r->values[0], &r->x) == QLORA_OK &&
        test_tensor(ctx, c->type, GROUPS * height, c->in, r->values[1], &r->w) == QLORA_OK &&
        test_tensor(ctx, c->type, GROUP_ROWS, c->out, r->values[2], &r->y) == QLORA_OK &&
        test_tensor(ctx, QLORA_F32, GROUPS * c->out, c->in, r->values[3], &r->sum) == QLORA_OK &&
        qlora_tensor_create(ctx, QLORA_I32, 1, sizeof lists / sizeof lists[0], &r->lists) ==
            QLORA_OK &&
        product_lists(ctx, &r->lists, lists, sizeof lists) == QLORA_OK;
    r->groups.starts = (const int32_t*)r->lists.data;
    r->groups.tiles = r->groups.starts + GROUPS + 1;
    r->groups.experts = GROUPS;
    r->groups.rows = GROUP_ROWS;
    return ok;
}

static bool product_turn(qlora_ctx* ctx, const product_case* c, product_rig* r) {
    int32_t list[GROUP_ROWS];
    float* turned = (float*)malloc((size_t)(GROUP_ROWS * c->in) * sizeof *turned);
    for (int i = 0; i < GROUP_ROWS && turned != NULL; i++) {
        list[i] = GROUP_ROWS - 1 - i;
        memcpy(turned + list[i] * c->in, r->values[0] + i * c->in, (size_t)c->in * sizeof *turned);
    }
    bool ok = turned != NULL &&
              test_tensor(ctx, c->type, GROUP_ROWS, c->in, turned, &r->turned) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_I32, 1, GROUP_ROWS, &r->list) == QLORA_OK &&
              product_lists(ctx, &r->list, list, sizeof list) == QLORA_OK;
    free(turned);
    return ok;
}

static bool product_close(qlora_ctx* ctx, product_rig* r) {
    bool ok = qlora_tensor_destroy(ctx, &r->list) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->turned) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->x) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->w) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->y) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->sum) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &r->lists) == QLORA_OK;
    for (int i = 0; i < 4; i++) {
        free(r->values[i]);
    }
    return ok;
}

static int product_expert(int row) {
    int e = 0;
    while (row >= group_starts[e + 1]) {
        e++;
    }
    return e;
}

// A number, and its plain sum: a result in bf16 is rounded once.
static bool product_near(const product_case* c, float got, double sum, double size) {
    double rounding = c->type == QLORA_BF16 ? 0x1p-8 * fabs(sum) : 0.0;
    return fabs((double)got - sum) <= rounding + 1e-6 * size;
}

// y = x W^T of every expert, or dx = y W.
static bool product_rows_right(const product_case* c, const product_rig* r, bool turned,
                               const float* got) {
    int64_t height = c->out + c->apart;
    int64_t cols = turned ? c->out : c->in;
    int64_t K = turned ? c->in : c->out;
    for (int i = 0; i < GROUP_ROWS; i++) {
        const float* w = r->values[1] + product_expert(i) * height * c->in;
        const float* x = r->values[turned ? 0 : 2] + i * K;
        for (int64_t n = 0; n < cols; n++) {
            double sum = 0.0;
            double size = 0.0;
            for (int64_t k = 0; k < K; k++) {
                double p = (double)x[k] * (double)w[turned ? n * c->in + k : k * c->in + n];
                sum += p;
                size += fabs(p);
            }
            if (!product_near(c, got[i * cols + n], sum, size)) {
                return false;
            }
        }
    }
    return true;
}

// sum += 0.5 y^T x of every expert.
static bool product_sums_right(const product_case* c, const product_rig* r, const float* got) {
    for (int64_t i = 0; i < GROUPS * c->out * c->in; i++) {
        int64_t e = i / (c->out * c->in);
        int64_t o = i / c->in % c->out;
        double sum = (double)r->values[3][i];
        double size = fabs(sum);
        for (int row = group_starts[e]; row < group_starts[e + 1]; row++) {
            double p = 0.5 * (double)r->values[2][row * c->out + o] *
                       (double)r->values[0][row * c->in + i % c->in];
            sum += p;
            size += fabs(p);
        }
        if (!(fabs((double)got[i] - sum) <= 1e-6 * (size + 1.0))) {
            return false;
        }
    }
    return true;
}

static qlora_result product_rows(qlora_ctx* ctx, const product_rig* r, bool turned,
                                 const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* c) {
    QLORA__ENTER(ctx, "rows");
    return qlora__leave(ctx, qlora__grouped_rows(ctx, &r->groups, turned, a, b, c));
}

// With x, or, where the kernels can, with its rows by a list.
static qlora_result product_sums(qlora_ctx* ctx, const product_rig* r, const qlora_tensor* c) {
    QLORA__ENTER(ctx, "sums");
    bool listed = qlora__grouped_takes_list(ctx, &r->y, &r->x);
    const int32_t* list = listed ? (const int32_t*)r->list.data : NULL;
    return qlora__leave(ctx, qlora__grouped_sums(ctx, &r->groups, 0.5f, list, &r->y,
                                                 listed ? &r->turned : &r->x, c));
}

TEST products_of(const test_machine* machine, const product_case* c) {
    product_rig r;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    ASSERTm(qlora_last_error(ctx), product_open(ctx, c, &r));
    ASSERTm(qlora_last_error(ctx), product_turn(ctx, c, &r));
    int64_t most = GROUPS * (c->out + c->apart) * c->in + GROUP_ROWS * (c->out + c->in);
    float* got = (float*)malloc((size_t)most * sizeof *got);
    ASSERT(got != NULL);
    qlora_tensor w = r.w;
    w.rows = c->out;
    w.batch = GROUPS;
    w.batch_stride = (c->out + c->apart) * c->in;
    ASSERT_EQ(QLORA_OK, product_rows(ctx, &r, false, &r.y, &w, &r.x)); // over x
    ASSERT(test_read(ctx, &r.x, got));
    ASSERT(product_rows_right(c, &r, false, got));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &r.x));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, c->type, GROUP_ROWS, c->in, r.values[0], &r.x));
    qlora_tensor sum = r.sum;
    sum.rows = c->out;
    sum.batch = GROUPS;
    sum.batch_stride = c->out * c->in;
    ASSERT_EQ(QLORA_OK, product_sums(ctx, &r, &sum));
    ASSERT(test_read(ctx, &r.sum, got));
    ASSERT(product_sums_right(c, &r, got));
    ASSERT_EQ(QLORA_OK, product_rows(ctx, &r, true, &r.x, &w, &r.y)); // over y
    ASSERT(test_read(ctx, &r.y, got));
    ASSERT(product_rows_right(c, &r, true, got));
    free(got);
    ASSERT(product_close(ctx, &r));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST products_of_experts(const test_machine* machine) {
    for (size_t i = 0; i < sizeof product_cases / sizeof product_cases[0]; i++) {
        if (product_cases[i].type == QLORA_F32 || test_has_bf16(machine)) {
            CHECK_CALL(products_of(machine, &product_cases[i]));
        }
    }
    PASS();
}

SUITE(experts_gpu_suite) {
    RUN_ON(TEST_GPUS, routing_agrees);
    RUN_ON(TEST_GPUS, balance_agrees);
    RUN_ON(TEST_GPUS, bad_scores_are_seen_there);
    RUN_ON(TEST_GPUS, products_of_experts);
}

#else

SUITE(experts_gpu_suite) {
}

#endif
