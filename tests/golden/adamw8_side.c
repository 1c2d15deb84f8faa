// adamw8_side.c - steps of AdamW with 8-bit moments on given gradients, for tests/adamw8_check.py.
//
//     build/adamw8_side IN OUT
//
// IN: int64 n, int64 steps; double lr, beta1, beta2, eps, decay; float parameters[n]; float
// gradients[steps][n]. OUT: float map[2][256]; float parameters[n]; then m and v: n codes each and
// the scales of their blocks, or n floats each.

#ifndef QLORA_IMPLEMENTATION
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#endif
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct side {
    qlora_ctx* ctx;
    qlora_adamw_desc args;
    qlora_tensor param;
    qlora_tensor grad;
    qlora_tensor ranges;
    qlora_tensor state;
    qlora_tensor memory;
    int64_t n;
    int64_t steps;
    size_t bytes;
    qlora__moments moments;
} side;

static bool ok(const side* s, qlora_result r) {
    if (r != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(s->ctx));
    }
    return r == QLORA_OK;
}

static bool side_memory(side* s) {
    size_t at = qlora__moments_head(1);
    s->moments = qlora__moments_place(at, s->n);
    s->bytes = s->moments.end;
    char* image = (char*)calloc(1, s->bytes);
    if (image == NULL) {
        return false;
    }
    int64_t place = (int64_t)at;
    qlora__moments_map(true, (float*)(void*)image);
    qlora__moments_map(false, (float*)(void*)image + 256);
    memcpy(image + 2048, &place, sizeof place);
    bool made = ok(s, qlora_tensor_create(s->ctx, QLORA_U8, 1, (int64_t)s->bytes, &s->memory)) &&
                ok(s, qlora_tensor_write(s->ctx, &s->memory, image, s->bytes));
    free(image);
    return made;
}

static bool side_open(side* s, const double numbers[5]) {
    qlora_ctx_desc desc;
    qlora_adamw_range range;
    qlora_adamw_state state;
    memset(&desc, 0, sizeof desc);
    memset(&range, 0, sizeof range);
    memset(&state, 0, sizeof state);
    desc.require_backend = QLORA_BACKEND_CPU;
    range.count = s->n;
    range.decay = 1.0f;
    state.lr = numbers[0];
    state.beta1 = numbers[1];
    state.beta2 = numbers[2];
    state.eps = numbers[3];
    state.weight_decay = numbers[4];
    if (qlora_ctx_create(&desc, &s->ctx) != QLORA_OK) {
        return false;
    }
    s->args.param = &s->param;
    s->args.grad = &s->grad;
    s->args.ranges = &s->ranges;
    s->args.state = &s->state;
    return ok(s, qlora_tensor_create(s->ctx, QLORA_F32, 1, s->n, &s->param)) &&
           ok(s, qlora_tensor_create(s->ctx, QLORA_F32, 1, s->n, &s->grad)) &&
           ok(s, qlora_tensor_create(s->ctx, QLORA_U8, 1, sizeof range, &s->ranges)) &&
           ok(s, qlora_tensor_create(s->ctx, QLORA_U8, 1, sizeof state, &s->state)) &&
           ok(s, qlora_tensor_write(s->ctx, &s->ranges, &range, sizeof range)) &&
           ok(s, qlora_tensor_write(s->ctx, &s->state, &state, sizeof state)) && side_memory(s);
}

static bool side_run(side* s, FILE* in, float* values) {
    size_t bytes = (size_t)s->n * sizeof *values;
    for (int64_t step = -1; step < s->steps; step++) { // the parameters, then the gradients
        if (fread(values, 1, bytes, in) != bytes ||
            !ok(s, qlora_tensor_write(s->ctx, step < 0 ? &s->param : &s->grad, values, bytes))) {
            return false;
        }
        if (step >= 0 &&
            (!ok(s, qlora__enter(s->ctx, "step")) ||
             !ok(s, qlora__leave(s->ctx, qlora__adamw8_step(s->ctx, &s->args, &s->memory))))) {
            return false;
        }
    }
    return ok(s, qlora_tensor_read(s->ctx, &s->param, values, bytes));
}

static bool side_write(side* s, FILE* out, const float* values) {
    const qlora__moments* p = &s->moments;
    char* image = (char*)malloc(s->bytes);
    bool good = image != NULL && ok(s, qlora_tensor_read(s->ctx, &s->memory, image, s->bytes)) &&
                fwrite(image, 1, 2048, out) == 2048 &&
                fwrite(values, sizeof *values, (size_t)s->n, out) == (size_t)s->n;
    for (int k = 0; k < 2 && good; k++) {
        size_t size = (size_t)s->n * (p->coded ? 1 : 4);
        size_t scales = p->coded ? (size_t)p->blocks * 4 : 0;
        good = fwrite(image + p->values[k], 1, size, out) == size &&
               fwrite(image + p->scales[k], 1, scales, out) == scales;
    }
    free(image);
    return good;
}

int main(int argc, char** argv) {
    side s;
    double numbers[5];
    memset(&s, 0, sizeof s);
    FILE* in = argc == 3 ? fopen(argv[1], "rb") : NULL;
    FILE* out = in != NULL ? fopen(argv[2], "wb") : NULL;
    if (out == NULL) {
        fprintf(stderr, "usage: adamw8_side IN OUT\n");
        return 2;
    }
    bool good = fread(&s.n, 1, 8, in) == 8 && fread(&s.steps, 1, 8, in) == 8 &&
                fread(numbers, 1, sizeof numbers, in) == sizeof numbers && s.n > 0 &&
                side_open(&s, numbers);
    float* values = good ? (float*)malloc((size_t)s.n * sizeof *values) : NULL;
    good = values != NULL && side_run(&s, in, values) && side_write(&s, out, values);
    free(values);
    fclose(in);
    good = fclose(out) == 0 && good;
    return good ? 0 : 1; // the operating system frees the rest
}
