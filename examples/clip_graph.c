// clip_graph.c - a training step in one graph: gradients of a low-rank pair, their common norm, and
// AdamW, which reads the scale and the flag of the clip on the device. One replay meets a NaN: that
// step changes nothing. On the CPU the program runs the same; there a replay calls the step again.
//
//     cc -O2 -I. examples/clip_graph.c -o clip_graph -ldl -lm -lpthread
//     ./clip_graph
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <math.h>
#include <stdio.h>

enum { TOKENS = 24, WIDTH = 32, RANK = 4, N = 2 * WIDTH * RANK };
enum { X, H, DY, DH, PARAM, GRAD, M, V, COUNT }; // A and B, dA and dB lie one after the other
static const int64_t ROWS[COUNT] = {TOKENS, TOKENS, TOKENS, TOKENS, 1, 1, 1, 1};
static const int64_t COLUMNS[COUNT] = {WIDTH, RANK, WIDTH, RANK, N, N, N, N};

typedef struct state {
    qlora_tensor t[COUNT];
    qlora_tensor a, b, da, db; // views of PARAM and GRAD as matrices
    qlora_tensor ranges, adamw, scale, not_finite;
    qlora_clip* clip;
} state;

// y = x A B, so dB = (x A)^T dy, dA = x^T (dy B^T). Only work on the device: nothing here waits,
// allocates or copies to the host.
static qlora_result step(qlora_ctx* ctx, void* user) {
    state* s = (state*)user;
    qlora_tensor* t = s->t;
    qlora_adamw_desc d = {0};
    d.param = &t[PARAM];
    d.grad = &t[GRAD];
    d.m = &t[M];
    d.v = &t[V];
    d.ranges = &s->ranges;
    d.state = &s->adamw;
    d.clip_scale = &s->scale;
    d.not_finite = &s->not_finite;
    qlora_result r = qlora_gemm_forward(ctx, &t[X], &s->a, &t[H], 0);
    r = r == QLORA_OK ? qlora_gemm_backward_b(ctx, &t[H], &t[DY], &s->db, 0) : r;
    r = r == QLORA_OK ? qlora_gemm_backward_a(ctx, &t[DY], &s->b, &t[DH], 0) : r;
    r = r == QLORA_OK ? qlora_gemm_backward_b(ctx, &t[X], &t[DH], &s->da, 0) : r;
    r = r == QLORA_OK ? qlora_clip_measure(s->clip) : r;
    return r == QLORA_OK ? qlora_adamw_step(ctx, &d) : r;
}

static qlora_result matrix(qlora_ctx* ctx, const qlora_tensor* arena, int half, qlora_tensor* out) {
    float* data = (float*)arena->data + half * (N / 2); // an address of the device: not read here
    return qlora_tensor_wrap(ctx, data, N / 2 * sizeof(float), QLORA_F32, half ? RANK : WIDTH,
                             half ? WIDTH : RANK, 0, out);
}

static qlora_result prepare(qlora_ctx* ctx, state* s) {
    static float values[TOKENS * WIDTH]; // the largest
    qlora_adamw_range range = {0, N, 1.0f, 1.0f, NULL, 0, 0, 0.0};
    qlora_adamw_state adamw = {1e-2, 0.9, 0.999, 1e-8, 0.0, 0, 0, 0, {0}};
    qlora_result r = qlora_tensor_create(ctx, QLORA_U8, 1, sizeof range, &s->ranges);
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_U8, 1, sizeof adamw, &s->adamw) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, &s->ranges, &range, sizeof range) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, &s->adamw, &adamw, sizeof adamw) : r;
    for (int i = 0; r == QLORA_OK && i < COUNT; i++) {
        size_t n = (size_t)(ROWS[i] * COLUMNS[i]);
        for (size_t j = 0; j < n; j++) {
            values[j] = i <= PARAM ? (float)sin((double)(j * j + 1)) : 0.0f; // M and V start at 0
        }
        r = qlora_tensor_create(ctx, QLORA_F32, ROWS[i], COLUMNS[i], &s->t[i]);
        r = r == QLORA_OK ? qlora_tensor_write(ctx, &s->t[i], values, n * sizeof(float)) : r;
    }
    const qlora_tensor* gradients[] = {&s->t[GRAD]};
    r = r == QLORA_OK ? matrix(ctx, &s->t[PARAM], 0, &s->a) : r;
    r = r == QLORA_OK ? matrix(ctx, &s->t[PARAM], 1, &s->b) : r;
    r = r == QLORA_OK ? matrix(ctx, &s->t[GRAD], 0, &s->da) : r;
    r = r == QLORA_OK ? matrix(ctx, &s->t[GRAD], 1, &s->db) : r;
    r = r == QLORA_OK ? qlora_clip_create(ctx, gradients, NULL, 1, &s->clip) : r;
    return r == QLORA_OK ? qlora_clip_device(s->clip, 0, &s->scale, &s->not_finite) : r;
}

static qlora_result run(qlora_ctx* ctx, state* s, qlora_graph** graph) {
    static float dy[TOKENS * WIDTH];
    float param[N];
    qlora_clip_info clip;
    qlora_result r = prepare(ctx, s);
    for (int i = 0; r == QLORA_OK && i < 5; i++) {
        for (int j = 0; j < TOKENS * WIDTH; j++) {
            dy[j] = i == 3 && j == 5 ? NAN : (float)sin((double)(i + j));
        }
        r = qlora_tensor_write(ctx, &s->t[DY], dy, sizeof dy);
        // First without a graph, which compiles; then captured, which also runs it; then replayed.
        r = r != QLORA_OK ? r : i == 0 ? step(ctx, s)
                            : i == 1 ? qlora_graph_capture(ctx, 1, step, s, graph)
                                     : qlora_graph_replay(*graph, 1);
        r = r == QLORA_OK ? qlora_clip_query(s->clip, 0, &clip) : r; // waits for the device
        r = r == QLORA_OK ? qlora_tensor_read(ctx, &s->t[PARAM], param, sizeof param) : r;
        if (r == QLORA_OK) {
            printf("step %d: norm %9.4f  scale %.6f  A[0] %+.6f%s\n", i, (double)clip.norm,
                   (double)clip.scale, (double)param[0], clip.finite ? "" : "  (left out)");
        }
    }
    for (int i = 0; r == QLORA_OK && i < N; i++) { // a NaN would have stayed
        r = isfinite(param[i]) ? r : QLORA_ERR_STATE;
    }
    return r;
}

int main(void) {
    qlora_ctx* ctx = NULL;
    state s = {0};
    qlora_graph* graph = NULL;
    qlora_result r = qlora_ctx_create(NULL, &ctx);
    r = r == QLORA_OK ? run(ctx, &s, &graph) : r;
    if (r != QLORA_OK) {
        fprintf(stderr, "%s: %s\n", qlora_result_name(r), qlora_last_error(ctx));
    }
    qlora_graph_destroy(graph); // NULL is fine, as is a zeroed tensor
    qlora_clip_destroy(s.clip);
    for (int i = 0; i < COUNT + 2 && ctx != NULL; i++) {
        qlora_tensor_destroy(ctx, i < COUNT ? &s.t[i] : i == COUNT ? &s.ranges : &s.adamw);
    }
    return qlora_ctx_destroy(ctx) == QLORA_OK && r == QLORA_OK ? 0 : 1;
}
