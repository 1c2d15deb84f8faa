// A C++ program's view: the declarations and every public macro, in a unit without implementations.
#include "qlora.h"
#include "qlora_text.h"

#define NAMES(name, value, text) QLORA_##name,
#define TEXTS(name, text) text,
static const qlora_result results[] = {QLORA_RESULTS(NAMES)};
static const char* const items[] = {QLORA_LOG_ITEMS(TEXTS)};

int main() {
    const int sizes[] = {QLORA_LINEAR_PARTS,  QLORA_LR_FACTORS,       QLORA_LR_NORMS,
                         QLORA_LR_EMBEDDINGS, QLORA_MAX_LAYERS,       QLORA_MAX_STOP_IDS,
                         QLORA_NCCL_ID_BYTES, QLORA_MAX_ROPE_FACTORS, QLORA_VERSION,
                         QLORA_VERSION_MAJOR, QLORA_VERSION_MINOR,    QLORA_VERSION_PATCH};
    const uint64_t abi = QLORA_ABI;
    qlora_ctx_desc desc = {};
    qlora_ctx* ctx = nullptr;
    const qlora_result r = qlora_ctx_create(&desc, &ctx);
    return r == results[0] && items[0] != nullptr && abi > 0 && sizes[0] > 0 &&
                   qlora_ctx_destroy(ctx) == QLORA_OK && QLORA_VERSION_STRING[0] != '\0'
               ? 0
               : 1;
}
