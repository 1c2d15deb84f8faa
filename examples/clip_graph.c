// clip_graph.c - the gradients of a low-rank pair, clipped to a common norm, captured as a graph
// and replayed. max_norm lives on the device, so a replay sees its newest value. On the CPU the
// same program runs: there a replay calls the step again.
//
//     cc -O2 -I. examples/clip_graph.c -o clip_graph -ldl -lm -lpthread
//     ./clip_graph
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>

enum { TOKENS = 24, WIDTH = 32, RANK = 4 };
enum { X, A, B, H, DY, DH, DA, DB, COUNT };

static const int64_t SHAPES[COUNT][2] = {
    {TOKENS, WIDTH}, {WIDTH, RANK},  {RANK, WIDTH}, {TOKENS, RANK}, // x, A, B, h = x A
    {TOKENS, WIDTH}, {TOKENS, RANK}, {WIDTH, RANK}, {RANK, WIDTH},  // dy, dh, dA, dB
};

typedef struct step_state {
    qlora_tensor t[COUNT];
    qlora_clip* clip;
} step_state;

// y = h B, so dB = h^T dy, dh = dy B^T, dA = x^T dh. Only work on the device: nothing here waits,
// allocates or copies to the host.
static qlora_result step(qlora_ctx* ctx, void* user) {
    step_state* s = (step_state*)user;
    qlora_tensor* t = s->t;
    qlora_result r = qlora_gemm_forward(ctx, &t[X], &t[A], &t[H], 0);
    r = r == QLORA_OK ? qlora_gemm_backward_b(ctx, &t[H], &t[DY], &t[DB], 0) : r;
    r = r == QLORA_OK ? qlora_gemm_backward_a(ctx, &t[DY], &t[B], &t[DH], 0) : r;
    r = r == QLORA_OK ? qlora_gemm_backward_b(ctx, &t[X], &t[DH], &t[DA], 0) : r;
    return r == QLORA_OK ? qlora_clip_apply(s->clip) : r;
}

static qlora_result prepare(qlora_ctx* ctx, step_state* s) {
    static float values[TOKENS * WIDTH]; // the largest
    uint32_t random = 1;
    for (int i = 0; i < COUNT; i++) {
        size_t n = (size_t)(SHAPES[i][0] * SHAPES[i][1]);
        for (size_t j = 0; j < n; j++) {
            random = random * 1664525u + 1013904223u;
            values[j] = (float)(random >> 8) / 8388608.0f - 1.0f;
        }
        qlora_result r = qlora_tensor_create(ctx, QLORA_F32, SHAPES[i][0], SHAPES[i][1], &s->t[i]);
        r = r == QLORA_OK ? qlora_tensor_write(ctx, &s->t[i], values, n * sizeof(float)) : r;
        if (r != QLORA_OK) {
            return r;
        }
    }
    const qlora_tensor* gradients[] = {&s->t[DA], &s->t[DB]};
    return qlora_clip_create(ctx, gradients, NULL, 2, &s->clip);
}

static qlora_result report(qlora_ctx* ctx, step_state* s, const char* what) {
    qlora_clip_info info;
    qlora_result r = qlora_clip_query(s->clip, 0, &info); // waits for the device
    if (r == QLORA_OK) {
        printf("%-28s norm %.6f  scale %.6f\n", what, (double)info.norm, (double)info.scale);
    }
    return r;
}

static qlora_result run(qlora_ctx* ctx, step_state* s, qlora_graph** graph) {
    const uint64_t key = 1; // what the graph is for; replay demands the same
    static const float limits[] = {1.0f, 100.0f, 1e6f};
    qlora_result r = prepare(ctx, s);
    r = r == QLORA_OK ? step(ctx, s) : r; // once without a graph: compiles what it needs
    r = r == QLORA_OK ? report(ctx, s, "plain step, max_norm 1") : r;
    r = r == QLORA_OK ? qlora_graph_capture(ctx, key, step, s, graph) : r; // also runs it
    r = r == QLORA_OK ? report(ctx, s, "captured step, max_norm 1") : r;
    for (size_t i = 0; r == QLORA_OK && i < sizeof limits / sizeof limits[0]; i++) {
        char what[64];
        snprintf(what, sizeof what, "replay, max_norm %g", (double)limits[i]);
        r = qlora_clip_set(s->clip, limits[i]);
        r = r == QLORA_OK ? qlora_graph_replay(*graph, key) : r;
        r = r == QLORA_OK ? report(ctx, s, what) : r;
    }
    qlora_graph_info info;
    r = r == QLORA_OK ? qlora_graph_query(*graph, &info) : r;
    if (r == QLORA_OK) {
        printf("graph: %d nodes, %d replays\n", (int)info.nodes, (int)info.replays);
    }
    return r;
}

int main(void) {
    char why[512] = "";
    qlora_ctx_desc desc = {0};
    desc.log = qlora_log_stderr; // shows what is compiled and captured
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "no context: %s\n", why);
        return 1;
    }
    step_state s = {0};
    qlora_graph* graph = NULL;
    qlora_result r = run(ctx, &s, &graph);
    if (r != QLORA_OK) {
        fprintf(stderr, "%s: %s\n", qlora_result_name(r), qlora_last_error(ctx));
    }
    qlora_graph_destroy(graph); // NULL is fine, as is a zeroed tensor
    qlora_clip_destroy(s.clip);
    for (int i = 0; i < COUNT; i++) {
        qlora_tensor_destroy(ctx, &s.t[i]);
    }
    return qlora_ctx_destroy(ctx) == QLORA_OK && r == QLORA_OK ? 0 : 1;
}
