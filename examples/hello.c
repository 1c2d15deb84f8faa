// hello.c - opens a context, prints the device it uses, and adds and multiplies two small matrices.
//
//     cc -I. examples/hello.c -o hello -ldl -lm -lpthread
//     ./hello
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>

enum { ROWS = 2, COLS = 3 };

static qlora_result hello(qlora_ctx* ctx, qlora_tensor* a, qlora_tensor* b, float* sum,
                          float* product) {
    const float ones[ROWS * COLS] = {1, 1, 1, 1, 1, 1};
    const float numbers[ROWS * COLS] = {1, 2, 3, 4, 5, 6};
    const size_t bytes = sizeof numbers;
    qlora_result r = qlora_tensor_create(ctx, QLORA_F32, ROWS, COLS, a);
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_F32, ROWS, COLS, b) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, a, ones, bytes) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, b, numbers, bytes) : r;
    r = r == QLORA_OK ? qlora_add(ctx, a, b, a) : r; // a = a + b; does not wait for the device
    r = r == QLORA_OK ? qlora_tensor_read(ctx, a, sum, bytes) : r;
    r = r == QLORA_OK ? qlora_mul(ctx, a, b, a) : r; // a = (a + b) b
    r = r == QLORA_OK ? qlora_tensor_read(ctx, a, product, bytes) : r;
    return r;
}

static void print_matrix(const char* name, const float* x) {
    for (int i = 0; i < ROWS; i++) {
        printf("%-8s", i == 0 ? name : "");
        for (int j = 0; j < COLS; j++) {
            printf("%6g", (double)x[i * COLS + j]);
        }
        printf("\n");
    }
}

int main(void) {
    char why[512] = "";
    qlora_ctx_desc desc = {0}; // zero selects the default for every field
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "cannot create a context: %s\n", why);
        return 1;
    }
    char text[2048];
    qlora_describe(ctx, text, sizeof text);
    printf("%s\n", text);

    float sum[ROWS * COLS];
    float product[ROWS * COLS];
    qlora_tensor a = {0};
    qlora_tensor b = {0};
    qlora_result r = hello(ctx, &a, &b, sum, product);
    if (r == QLORA_OK) {
        print_matrix("a+b", sum);
        print_matrix("(a+b)b", product);
    } else {
        fprintf(stderr, "%s: %s\n", qlora_result_name(r), qlora_last_error(ctx));
    }
    qlora_tensor_destroy(ctx, &a); // a zeroed tensor is allowed here
    qlora_tensor_destroy(ctx, &b);
    return qlora_ctx_destroy(ctx) == QLORA_OK && r == QLORA_OK ? 0 : 1;
}
