// gemm.c - computes a product C = A B and its gradient dB = A^T dC on the CPU, with the built-in
// PTX kernels and with cuBLAS, as available, and prints how far each result is from the CPU's.
//
//     cc -O2 -I. examples/gemm.c -o gemm -ldl -lm -lpthread
//     ./gemm
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>

enum { M = 65, N = 48, K = 130 };

static const struct {
    const char* name;
    qlora_backend backend;
    uint32_t flags;
} PATHS[] = {
    {"CPU", QLORA_BACKEND_CPU, 0},
    {"PTX", QLORA_BACKEND_CUDA, QLORA_PRODUCT_PTX},
    {"cuBLAS", QLORA_BACKEND_CUDA, QLORA_PRODUCT_CUBLAS},
};

typedef struct matrices {
    float a[M * K];
    float b[K * N];
    float c[M * N];
    float db[K * N];
} matrices;

// Computes c = a b and db = a^T c back to back; the second waits for the first on the device.
static qlora_result multiply(qlora_ctx* ctx, uint32_t flags, matrices* m) {
    qlora_tensor a = {0};
    qlora_tensor b = {0};
    qlora_tensor c = {0};
    qlora_result r = qlora_tensor_create(ctx, QLORA_F32, M, K, &a);
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_F32, K, N, &b) : r;
    r = r == QLORA_OK ? qlora_tensor_create(ctx, QLORA_F32, M, N, &c) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, &a, m->a, sizeof m->a) : r;
    r = r == QLORA_OK ? qlora_tensor_write(ctx, &b, m->b, sizeof m->b) : r;
    r = r == QLORA_OK ? qlora_gemm_forward(ctx, &a, &b, &c, flags) : r;
    r = r == QLORA_OK ? qlora_gemm_backward_b(ctx, &a, &c, &b, flags) : r;
    r = r == QLORA_OK ? qlora_tensor_read(ctx, &c, m->c, sizeof m->c) : r;
    r = r == QLORA_OK ? qlora_tensor_read(ctx, &b, m->db, sizeof m->db) : r;
    if (r != QLORA_OK) {
        fprintf(stderr, "%s: %s\n", qlora_result_name(r), qlora_last_error(ctx));
    }
    qlora_tensor_destroy(ctx, &a);
    qlora_tensor_destroy(ctx, &b);
    qlora_tensor_destroy(ctx, &c);
    return r;
}

// The largest difference relative to the largest value. A NaN gives a huge result, so that it is
// noticed.
static double difference(const float* expected, const float* got, int n) {
    double largest = 0.0;
    double worst = 0.0;
    for (int i = 0; i < n; i++) {
        double value = expected[i] < 0.0f ? -(double)expected[i] : (double)expected[i];
        double d = (double)got[i] - (double)expected[i];
        d = d < 0.0 ? -d : d;
        largest = value > largest ? value : largest;
        worst = d <= worst ? worst : (d == d ? d : 1e300);
    }
    return largest > 0.0 ? worst / largest : worst;
}

int main(void) {
    static matrices cpu;
    static matrices other;
    uint32_t random = 1;
    for (int i = 0; i < M * K + K * N; i++) {
        random = random * 1664525u + 1013904223u;
        float x = (float)(random >> 8) / 8388608.0f - 1.0f;
        *(i < M * K ? &cpu.a[i] : &cpu.b[i - M * K]) = x;
    }
    other = cpu;
    int status = 0;
    for (size_t i = 0; i < sizeof PATHS / sizeof PATHS[0]; i++) {
        char why[512] = "";
        qlora_ctx_desc desc = {0};
        desc.require_backend = PATHS[i].backend;
        desc.error_text = why;
        desc.error_text_size = sizeof why;
        qlora_ctx* ctx = NULL;
        qlora_native native = {0};
        matrices* result = i == 0 ? &cpu : &other;
        if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
            printf("%-7s not available: %s\n", PATHS[i].name, why);
            status = i == 0 ? 1 : status; // the CPU is always available
            continue;
        }
        qlora_ctx_native(ctx, &native);
        if ((PATHS[i].flags & QLORA_PRODUCT_CUBLAS) != 0 && native.cublas == NULL) {
            printf("%-7s not available: cuBLAS not found\n", PATHS[i].name);
        } else if (multiply(ctx, PATHS[i].flags, result) != QLORA_OK) {
            status = 1;
        } else {
            double forward = difference(cpu.c, result->c, M * N);
            double backward = difference(cpu.db, result->db, K * N);
            qlora_ctx_info info;
            bool known = qlora_ctx_query(ctx, &info) == QLORA_OK;
            printf("%-7s ran as %-6s  max relative difference: A B %.1e, A^T dC %.1e\n",
                   PATHS[i].name, known ? qlora_path_name(info.last_path) : "?", forward, backward);
            status = forward <= 1e-5 && backward <= 1e-5 ? status : 1;
        }
        qlora_ctx_destroy(ctx);
    }
    return status;
}
