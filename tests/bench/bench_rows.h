// bench_rows.h - the operators on rows, as a share of the copy bandwidth, and attention, as a share
// of the peak; part of `build/bench cpu`.
#ifndef QLORA_BENCH_ROWS_H
#define QLORA_BENCH_ROWS_H

// The shapes of smollm2-135m with 4 x 256 tokens.
enum { ROW_TOKENS = 1024, ROW_HIDDEN = 576, ROW_WIDE = 1536, ROW_VOCAB = 49152, ROW_LOGITS = 64 };
enum { ROW_PARAMETERS = 4884480 }; // of adapters of rank 16

typedef struct row_set {
    qlora_tensor wide[6];   // [tokens, wide]
    qlora_tensor hidden[5]; // [tokens, hidden]
    qlora_tensor kv[4];     // [tokens, 3 heads]
    qlora_tensor weight;    // [1, hidden]
    qlora_tensor half;      // [tokens, wide], bf16
    qlora_tensor logits;
    qlora_tensor losses;
    qlora_tensor lse;       // [9, tokens]
    qlora_tensor table;     // of rope
    qlora_tensor positions; // also the sequence of each row
    qlora_tensor labels;
    qlora_tensor seqs;
    qlora_tensor state;
    qlora_nf4 nf4; // [wide, hidden]
    qlora_tensor plain;
    qlora_clip* clip;
    qlora_tensor moments[4]; // parameters, gradients and moments of AdamW
    qlora_tensor ranges;
    qlora_tensor update;
    qlora_adamw_range range;
    qlora_adamw_state adamw;
    int32_t numbers[ROW_TOKENS];
    int32_t offsets[5];
    int32_t seed[4];
} row_set;

static qlora_result row_norm(qlora_ctx* c, row_set* s) {
    return qlora_rmsnorm_residual_forward(c, &s->hidden[0], &s->hidden[1], &s->weight, 1e-5f,
                                          &s->hidden[2], &s->hidden[3]);
}

static qlora_result row_norm_back(qlora_ctx* c, row_set* s) {
    return qlora_rmsnorm_backward(c, &s->hidden[0], &s->hidden[1], &s->weight, 1e-5f, &s->hidden[2],
                                  &s->hidden[3], NULL);
}

static qlora_result row_rope(qlora_ctx* c, row_set* s) {
    return qlora_rope_forward(c, &s->hidden[0], 9, &s->positions, &s->table, NULL, NULL);
}

static qlora_result row_swiglu(qlora_ctx* c, row_set* s) {
    return qlora_swiglu_forward(c, &s->wide[0], &s->wide[1], &s->wide[2]);
}

static qlora_result row_geglu(qlora_ctx* c, row_set* s) {
    return qlora_geglu_forward(c, &s->wide[0], &s->wide[1], &s->wide[2]);
}

static qlora_result row_swiglu_back(qlora_ctx* c, row_set* s) {
    return qlora_swiglu_backward(c, &s->wide[0], &s->wide[1], &s->wide[2], &s->wide[3], &s->wide[4],
                                 &s->wide[5]);
}

static qlora_result row_add(qlora_ctx* c, row_set* s) {
    return qlora_add(c, &s->wide[0], &s->wide[1], &s->wide[2]);
}

static qlora_result row_softmax(qlora_ctx* c, row_set* s) {
    return qlora_softmax_forward(c, &s->wide[0], &s->wide[1]);
}

static qlora_result row_cast(qlora_ctx* c, row_set* s) {
    return qlora_cast(c, &s->wide[0], &s->half);
}

static qlora_result row_nf4(qlora_ctx* c, row_set* s) {
    return qlora_nf4_dequantise(c, &s->nf4, &s->plain, false);
}

static qlora_result row_clip(qlora_ctx* c, row_set* s) {
    (void)c;
    return qlora_clip_measure(s->clip);
}

static qlora_result row_adamw(qlora_ctx* c, row_set* s) {
    qlora_adamw_desc d;
    memset(&d, 0, sizeof d);
    d.param = &s->moments[0];
    d.grad = &s->moments[1];
    d.m = &s->moments[2];
    d.v = &s->moments[3];
    d.ranges = &s->ranges;
    d.state = &s->update;
    return qlora_adamw_step(c, &d);
}

static qlora_result row_dropout(qlora_ctx* c, row_set* s) {
    qlora_dropout_desc d;
    memset(&d, 0, sizeof d);
    d.x = &s->hidden[0];
    d.y = &s->hidden[1];
    d.positions = &s->positions;
    d.sequences = &s->positions;
    d.state = &s->state;
    d.p = 0.1f;
    return qlora_dropout(c, &d);
}

static qlora_result row_loss(qlora_ctx* c, row_set* s) {
    qlora_cross_entropy_desc d;
    memset(&d, 0, sizeof d);
    d.logits = &s->logits;
    d.labels = &s->labels;
    d.losses = &s->losses;
    return qlora_cross_entropy(c, &d);
}

static qlora_attention_desc row_heads(void) {
    qlora_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 9;
    d.kv_heads = 3;
    d.head_dim = 64;
    return d;
}

static qlora_result row_attention(qlora_ctx* c, row_set* s) {
    qlora_attention_desc d = row_heads();
    return qlora_attention_forward(c, &d, &s->hidden[0], &s->kv[0], &s->kv[1], &s->seqs,
                                   &s->hidden[1], &s->lse);
}

static qlora_result row_attention_back(qlora_ctx* c, row_set* s) {
    qlora_attention_desc d = row_heads();
    return qlora_attention_backward(c, &d, &s->hidden[0], &s->kv[0], &s->kv[1], &s->seqs,
                                    &s->hidden[1], &s->lse, &s->hidden[2], &s->hidden[3], &s->kv[2],
                                    &s->kv[3]);
}

typedef struct row_operator {
    const char* name;
    qlora_result (*run)(qlora_ctx* ctx, row_set* s);
    double bytes; // read and written; 0: counted in flops
    double flops;
} row_operator;

#define ROW_BYTES(rows, cols, tensors) (4.0 * (rows) * (cols) * (tensors))
// Pairs of a query and a key it sees, times heads and their size.
#define ROW_PAIRS (4.0 * 256 * 257 / 2 * 9 * 64)

static const row_operator row_operators[] = {
    {"norm, residual", row_norm, ROW_BYTES(ROW_TOKENS, ROW_HIDDEN, 4), 0},
    {"norm backward", row_norm_back, ROW_BYTES(ROW_TOKENS, ROW_HIDDEN, 4), 0},
    {"rope", row_rope, ROW_BYTES(ROW_TOKENS, ROW_HIDDEN, 2), 0},
    {"swiglu", row_swiglu, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 3), 0},
    {"geglu", row_geglu, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 3), 0},
    {"swiglu backward", row_swiglu_back, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 6), 0},
    {"add", row_add, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 3), 0},
    {"softmax", row_softmax, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 2), 0},
    {"cast to bf16", row_cast, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 1.5), 0},
    {"dropout", row_dropout, ROW_BYTES(ROW_TOKENS, ROW_HIDDEN, 2), 0},
    {"cross-entropy", row_loss, ROW_BYTES(ROW_LOGITS, ROW_VOCAB, 2), 0},
    {"sum of squares", row_clip, ROW_BYTES(ROW_TOKENS, ROW_WIDE, 1), 0},
    {"AdamW", row_adamw, ROW_BYTES(1, ROW_PARAMETERS, 8), 0},
    {"NF4 to f32", row_nf4, ROW_BYTES(ROW_WIDE, ROW_HIDDEN, 1.14), 0},
    {"attention 4 x 256", row_attention, 0, 4 * ROW_PAIRS},
    {"attention backward 4 x 256", row_attention_back, 0, 14 * ROW_PAIRS},
};

static bool row_numbers(cpu_bench* b, const int32_t* data, int64_t n, qlora_tensor* t) {
    return qlora_tensor_wrap(b->ctx, (void*)data, (size_t)n * sizeof *data, QLORA_I32, 1, n, 0,
                             t) == QLORA_OK;
}

// Bytes in host memory as a tensor.
static bool row_bytes(cpu_bench* b, void* data, size_t bytes, qlora_tensor* t) {
    return qlora_tensor_wrap(b->ctx, data, bytes, QLORA_U8, 1, (int64_t)bytes, 0, t) == QLORA_OK;
}

static bool row_adamw_make(cpu_bench* b, row_set* s) {
    bool ok = true;
    for (int i = 0; i < 4; i++) {
        ok = ok && cpu_fill(b, QLORA_F32, 1, ROW_PARAMETERS, &s->moments[i]);
    }
    s->range.count = ROW_PARAMETERS;
    s->range.decay = 1.0f;
    s->range.shadow_scale = 1.0f;
    s->adamw.lr = 1e-4;
    s->adamw.beta1 = 0.9;
    s->adamw.beta2 = 0.999;
    s->adamw.eps = 1e-8;
    return ok && qlora_tensor_zero(b->ctx, &s->moments[3]) == QLORA_OK &&
           row_bytes(b, &s->range, sizeof s->range, &s->ranges) &&
           row_bytes(b, &s->adamw, sizeof s->adamw, &s->update);
}

static bool row_set_make(cpu_bench* b, row_set* s) {
    memset(s, 0, sizeof *s);
    bool ok = true;
    for (int i = 0; i < 6; i++) {
        ok = ok && cpu_fill(b, QLORA_F32, ROW_TOKENS, ROW_WIDE, &s->wide[i]) &&
             (i > 4 || cpu_fill(b, QLORA_F32, ROW_TOKENS, ROW_HIDDEN, &s->hidden[i])) &&
             (i > 3 || cpu_fill(b, QLORA_F32, ROW_TOKENS, 192, &s->kv[i]));
    }
    ok = ok && cpu_fill(b, QLORA_F32, 1, ROW_HIDDEN, &s->weight) &&
         cpu_fill(b, QLORA_BF16, ROW_TOKENS, ROW_WIDE, &s->half) &&
         cpu_fill(b, QLORA_F32, ROW_LOGITS, ROW_VOCAB, &s->logits) &&
         cpu_fill(b, QLORA_F32, 1, ROW_LOGITS, &s->losses) &&
         cpu_fill(b, QLORA_F32, 9, ROW_TOKENS, &s->lse) &&
         cpu_fill(b, QLORA_F32, 256, 64, &s->table) &&
         cpu_fill(b, QLORA_F32, ROW_WIDE, ROW_HIDDEN, &s->plain);
    for (int i = 0; i < ROW_TOKENS; i++) {
        s->numbers[i] = i % 256;
    }
    for (int i = 0; i < 5; i++) {
        s->offsets[i] = 256 * i;
    }
    ok = ok && row_numbers(b, s->numbers, ROW_TOKENS, &s->positions) &&
         row_numbers(b, s->numbers, ROW_LOGITS, &s->labels) &&
         row_numbers(b, s->offsets, 5, &s->seqs) && row_numbers(b, s->seed, 4, &s->state);
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = ROW_WIDE;
    desc.cols = ROW_HIDDEN;
    const qlora_tensor* gradients[1];
    gradients[0] = &s->wide[0];
    return ok && row_adamw_make(b, s) && qlora_nf4_create(b->ctx, &desc, &s->nf4) == QLORA_OK &&
           qlora_nf4_quantise(b->ctx, &s->plain, &s->nf4) == QLORA_OK &&
           qlora_clip_create(b->ctx, gradients, NULL, 1, &s->clip) == QLORA_OK;
}

static void row_set_free(cpu_bench* b, row_set* s) {
    qlora_clip_destroy(s->clip);
    qlora_nf4_destroy(b->ctx, &s->nf4);
    for (int i = 0; i < 6; i++) {
        qlora_tensor_destroy(b->ctx, &s->wide[i]);
        qlora_tensor_destroy(b->ctx, i < 5 ? &s->hidden[i] : &s->weight);
        if (i < 4) {
            qlora_tensor_destroy(b->ctx, &s->kv[i]);
            qlora_tensor_destroy(b->ctx, &s->moments[i]);
        }
    }
    qlora_tensor_destroy(b->ctx, &s->half);
    qlora_tensor_destroy(b->ctx, &s->logits);
    qlora_tensor_destroy(b->ctx, &s->losses);
    qlora_tensor_destroy(b->ctx, &s->lse);
    qlora_tensor_destroy(b->ctx, &s->table);
    qlora_tensor_destroy(b->ctx, &s->plain);
}

static void row_print(cpu_bench* b, const char* name, double seconds, double bytes) {
    qlora_ctx_info info;
    memset(&info, 0, sizeof info);
    const char* tier =
        qlora_ctx_query(b->ctx, &info) == QLORA_OK ? qlora_cpu_tier_name(info.desc->cpu_tier) : "-";
    double share = bytes / seconds / (2.0 * b->copy * b->on); // a copy reads and writes
    if (b->json) {
        printf("%s\n{\"name\": \"%s\", \"tier\": \"%s\", \"threads\": %d, \"us\": %.2f, "
               "\"gb_per_s\": %.2f, \"copy_percent\": %.1f}",
               b->started ? "," : "", name, tier, b->on, seconds * 1e6, bytes / seconds * 1e-9,
               100.0 * share);
        b->started = true;
    } else {
        printf("  %-9s %2d  %-38s %10.1f us %8.2f GB/s    %5.1f %% of a copy\n", tier, b->on, name,
               seconds * 1e6, bytes / seconds * 1e-9, 100.0 * share);
    }
    fflush(stdout);
}

// The best seconds of an operator.
static bool row_best(cpu_bench* b, row_set* s, const row_operator* o, int rounds, double* best) {
    bool ok = true;
    *best = 1e30;
    for (int r = 0; ok && r < rounds; r++) {
        double start = cpu_seconds(b->on > 1);
        ok = o->run(b->ctx, s) == QLORA_OK;
        double seconds = cpu_seconds(b->on > 1) - start;
        *best = r > 0 && seconds < *best ? seconds : *best; // the first touches the pages
    }
    if (!ok) {
        fprintf(stderr, "bench cpu: %s: %s\n", o->name, qlora_last_error(b->ctx));
    }
    return ok;
}

// All operators on the context of b.
static bool cpu_rows_run(cpu_bench* b) {
    row_set* s = (row_set*)malloc(sizeof *s);
    bool ok = s != NULL && row_set_make(b, s);
    for (size_t i = 0; ok && i < sizeof row_operators / sizeof row_operators[0]; i++) {
        const row_operator* o = &row_operators[i];
        double best = 0.0;
        ok = row_best(b, s, o, b->quick ? 4 : 16, &best);
        if (!ok) {
            break;
        }
        if (o->bytes > 0) {
            row_print(b, o->name, best, o->bytes);
        } else {
            cpu_print(b, o->name, best, o->flops);
        }
    }
    if (s != NULL) {
        row_set_free(b, s);
    }
    free(s);
    return ok;
}

#endif
