// machines.h - the machines that a test runs on: the CPU, fake GPUs of several generations, the
// real GPU.
//
//     TEST gemm_is_right(const test_machine* machine) {
//         qlora_ctx* ctx = test_open(machine, NULL);
//         if (!ctx) SKIPm(test_open_reason());
//         ...
//         ASSERT(test_close_ctx(machine, ctx)); // destroys it; a fake machine must be clean then
//         PASS();
//     }
//     SUITE(gemm_suite) { RUN_ON(TEST_EVERYWHERE, gemm_is_right); }
#ifndef QLORA_TEST_MACHINES_H
#define QLORA_TEST_MACHINES_H

#include "qlora.h"

#include "fakecuda/fake.h"
#include "test.h"

typedef struct test_machine {
    const char* name;
    const char* backend; // "cpu", "fake", "cuda"
    int cc;              // compute capability of the fake device
    int driver;
    fake_order order;
    bool cublas;
    unsigned sets; // the sets below that it belongs to
} test_machine;

// Aligned memory, which Windows frees in its own way.
void* test_alloc_aligned(size_t bytes, size_t align);
void test_free_aligned(void* pointer);

enum {
    TEST_EVERYWHERE = 1, // CPU, every fake machine, the real GPU
    TEST_ONE_EACH = 2,   // CPU, one fake machine, the real GPU: for slow tests
    TEST_GPUS = 4,       // every fake machine and the real GPU
    TEST_FAKES = 8,      // fake machines only: for tests that inject faults or inspect calls
    TEST_CPU = 16,
    TEST_ONE_FAKE = 32,
    TEST_TENSOR_CORES = 64, // machines with compute capability 8.0 or higher
    TEST_BRIEF = 128,       // machines of a brief run; the host's code is the same on the others
    TEST_ONE_GPU = 256      // one fake machine and the real GPU: for slow tests of kernels
};

size_t test_machine_count(void);
const test_machine* test_machine_at(size_t index);
// The fake driver hides the real one, so a process has either fake GPUs or the real GPU;
// tests/run.sh runs both.
bool test_machine_wanted(const test_machine* machine);

// Opens a context on a machine; NULL if that fails, with the reason in test_open_reason. `change`
// may edit the desc; NULL keeps the default.
qlora_ctx* test_open(const test_machine* machine, void (*change)(qlora_ctx_desc* desc));
const char* test_open_reason(void);
// Destroys the context. Returns false if that fails, if the fake machine detected a violation or a
// leak, or if host memory was not freed.
bool test_close_ctx(const test_machine* machine, qlora_ctx* ctx);

// bf16 kernels need compute capability 8.0. True for the CPU and for the real GPU.
bool test_has_bf16(const test_machine* machine);
// Whether a machine has FP8 products: compute capability 9.0 and cuBLASLt.
bool test_has_fp8(const test_machine* machine);
// Returns true for a GPU in a brief run: under compute-sanitizer, every launch takes milliseconds.
bool test_checked(const test_machine* machine);

const fake_api* test_fake(void); // NULL if the fake driver is not in use

// Create a tensor from a float array and read one back, converted to and from the tensor's dtype.
// Batch 1, any ld.
qlora_result test_tensor(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                         const float* values, qlora_tensor* out);
bool test_read(qlora_ctx* ctx, const qlora_tensor* tensor, float* out); // contiguous tensors

// Parts of what qlora_ctx_query gives.
qlora_result test_memory(qlora_ctx* ctx, qlora_memory_info* out);
qlora_path test_last_path(qlora_ctx* ctx);

#define RUN_ON(SETS, TEST)                                                                         \
    do {                                                                                           \
        for (size_t machine_ = 0; machine_ < test_machine_count(); machine_++) {                   \
            const test_machine* m_ = test_machine_at(machine_);                                    \
            if ((m_->sets & (unsigned)(SETS)) != 0 && test_machine_wanted(m_)) {                   \
                greatest_set_test_suffix(m_->name);                                                \
                RUN_TESTp(TEST, m_);                                                               \
            }                                                                                      \
        }                                                                                          \
    } while (0)

#endif
