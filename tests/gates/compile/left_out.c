// Calls that need kernels, in a build with modules left out; prints the result and error of each.
// Status 0: there is a GPU, and a call whose kernels are there still works at the end.
//
//     left_out get KERNEL | attention HEAD_SIZE | prewarm HEAD_SIZE ...
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 8, HEADS = 2 };

// bf16, so that tensor cores would be used.
static qlora_result attention(qlora_ctx* ctx, int64_t head) {
    const int32_t offsets[2] = {0, TOKENS};
    qlora_attention_desc desc;
    qlora_tensor x;
    qlora_tensor lse;
    qlora_tensor seqs;
    memset(&desc, 0, sizeof desc);
    desc.heads = HEADS;
    desc.head_dim = head;
    qlora_result r = qlora_tensor_create(ctx, QLORA_BF16, 4 * TOKENS, HEADS * head, &x);
    if (r != QLORA_OK) {
        return r;
    }
    qlora_tensor part[4]; // q, k, v, o
    for (int i = 0; i < 4; i++) {
        qlora_tensor_view(ctx, &x, i * TOKENS, TOKENS, 0, HEADS * head, &part[i]);
    }
    memset(&lse, 0, sizeof lse);
    memset(&seqs, 0, sizeof seqs);
    r = qlora_tensor_zero(ctx, &x);
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_F32, HEADS, TOKENS, &lse) : r;
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_I32, 1, 2, &seqs) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, &seqs, offsets, sizeof offsets) : r;
    r = r == QLORA_OK ? qlora_attention_forward(ctx, &desc, &part[0], &part[1], &part[2], &seqs,
                                                &part[3], &lse)
                      : r;
    printf("attention %d: %s: %s\n", (int)head, qlora_result_name(r), qlora_last_error(ctx));
    qlora_tensor_destroy(ctx, &seqs);
    qlora_tensor_destroy(ctx, &lse);
    qlora_tensor_destroy(ctx, &x);
    return r;
}

static qlora_result prewarm(qlora_ctx* ctx, int64_t head) {
    qlora_prewarm_desc shape;
    memset(&shape, 0, sizeof shape);
    shape.hidden = HEADS * head;
    shape.intermediate = 2 * HEADS * head;
    shape.heads = HEADS;
    shape.max_tokens = TOKENS;
    shape.rank = 8;
    shape.compute = QLORA_BF16;
    qlora_result r = qlora_prewarm(ctx, &shape);
    printf("prewarm %d: %s: %s\n", (int)head, qlora_result_name(r), qlora_last_error(ctx));
    return r;
}

int main(int argc, char** argv) {
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        printf("no GPU: %s\n", why);
        return 1;
    }
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "attention") == 0) {
            attention(ctx, atoi(argv[i + 1]));
        } else if (strcmp(argv[i], "prewarm") == 0) {
            prewarm(ctx, atoi(argv[i + 1]));
        } else {
            const qlora_kernel* kernel = NULL;
            qlora_result r = qlora_cache_compile(ctx, argv[i + 1], &kernel);
            printf("get %s: %s: %s\n", argv[i + 1], qlora_result_name(r), qlora_last_error(ctx));
        }
    }
    qlora_result r = qlora_ctx_sync(ctx);
    return qlora_ctx_destroy(ctx) == QLORA_OK && r == QLORA_OK ? 0 : 1;
}
