// ---- writing GGUF adapters ----------------------------------------------------------------------

#define QLORA__GGUF_ALIGN 32u

// A matrix of `rows` x `cols` floats, row-major: A as [rank, in], B as [out, rank]. Those of
// experts follow each other.
typedef struct qlora__gguf_entry {
    char name[QLORA__GGUF_NAME];
    int64_t rows;
    int64_t cols;
    int64_t experts; // 0 = it is one matrix
} qlora__gguf_entry;

typedef struct qlora__gguf_writer {
    qlora__out out;
    const qlora__gguf_entry* entries; // owned by the caller; must outlive the writer
    uint32_t count;
    uint32_t current;
    uint64_t left; // remaining bytes of the current tensor
} qlora__gguf_writer;

// The name of a matrix of a layer: 0, "attn_q" and 'a' give "blk.0.attn_q.weight.lora_a".
static QLORA__UNUSED void qlora__gguf_name(int64_t layer, const char* tensor, char which,
                                           char out[QLORA__GGUF_NAME]) {
    snprintf(out, QLORA__GGUF_NAME, "blk.%lld.%s.weight.lora_%c", (long long)layer, tensor, which);
}

// For some of its architectures, llama.cpp rotates pairs of neighbours where Hugging Face files
// rotate the two halves of a head. Returns the row of our matrix that becomes row `row` of a q or k
// matrix.
static QLORA__UNUSED int64_t qlora__gguf_source_row(const qlora__arch* arch, int64_t row,
                                                    int64_t head_dim) {
    if ((arch->has & QLORA__HAS_PERMUTED_GGUF) == 0) {
        return row;
    }
    int64_t in_head = row % head_dim;
    return row - in_head + in_head % 2 * (head_dim / 2) + in_head / 2;
}

// llama.cpp scales by alpha / rank and does not support rsLoRA. Returns the alpha to write so that
// its scale equals ours.
static QLORA__UNUSED double qlora__gguf_alpha(double alpha, int64_t rank, bool rslora) {
    return rslora ? alpha * sqrt((double)rank) : alpha;
}

// The file has a single alpha. Returns the factor for B of a module whose scale differs.
static QLORA__UNUSED double qlora__gguf_fold(double scale, double file_alpha, int64_t rank) {
    return scale * (double)rank / file_alpha;
}

static void qlora__gguf_u32(qlora__string* t, uint32_t value) {
    uint8_t bytes[8];
    qlora__store_u64(bytes, value);
    qlora__string_add(t, bytes, 4);
}

static void qlora__gguf_u64(qlora__string* t, uint64_t value) {
    uint8_t bytes[8];
    qlora__store_u64(bytes, value);
    qlora__string_add(t, bytes, 8);
}

static void qlora__gguf_string(qlora__string* t, const char* string) {
    qlora__gguf_u64(t, strlen(string));
    qlora__string_puts(t, string);
}

static void qlora__gguf_pair(qlora__string* t, const char* key, const char* value) {
    qlora__gguf_string(t, key);
    qlora__gguf_u32(t, 8); // type: string
    qlora__gguf_string(t, value);
}

static uint64_t qlora__gguf_bytes(const qlora__gguf_entry* e) {
    uint64_t count = e->experts > 0 ? (uint64_t)e->experts : 1;
    return (uint64_t)e->rows * (uint64_t)e->cols * count * 4;
}

static uint64_t qlora__gguf_padded(uint64_t bytes) {
    return (bytes + QLORA__GGUF_ALIGN - 1) / QLORA__GGUF_ALIGN * QLORA__GGUF_ALIGN;
}

static void qlora__gguf_write_header(qlora__string* t, const char* architecture, float alpha,
                                     const qlora__gguf_entry* entries, uint32_t count) {
    uint32_t bits = 0;
    uint64_t at = 0;
    memcpy(&bits, &alpha, 4);
    qlora__string_puts(t, "GGUF");
    qlora__gguf_u32(t, 3);
    qlora__gguf_u64(t, count);
    qlora__gguf_u64(t, 5);
    qlora__gguf_pair(t, "general.architecture", architecture);
    qlora__gguf_pair(t, "general.type", "adapter");
    qlora__gguf_pair(t, "adapter.type", "lora");
    qlora__gguf_string(t, "adapter.lora.alpha");
    qlora__gguf_u32(t, 6); // type: float32
    qlora__gguf_u32(t, bits);
    qlora__gguf_string(t, "general.alignment");
    qlora__gguf_u32(t, 4); // type: uint32
    qlora__gguf_u32(t, QLORA__GGUF_ALIGN);
    for (uint32_t i = 0; i < count; i++) {
        qlora__gguf_string(t, entries[i].name);
        qlora__gguf_u32(t, entries[i].experts > 0 ? 3 : 2);
        qlora__gguf_u64(t, (uint64_t)entries[i].cols); // innermost first
        qlora__gguf_u64(t, (uint64_t)entries[i].rows);
        if (entries[i].experts > 0) {
            qlora__gguf_u64(t, (uint64_t)entries[i].experts);
        }
        qlora__gguf_u32(t, 0); // type: F32
        qlora__gguf_u64(t, at);
        at += qlora__gguf_padded(qlora__gguf_bytes(&entries[i]));
    }
    while (t->result == QLORA_OK && t->size % QLORA__GGUF_ALIGN != 0) {
        qlora__string_add(t, "", 1);
    }
}

static void qlora__gguf_abort(qlora__env* env, qlora__gguf_writer* w) {
    qlora__out_abort(env, &w->out);
    memset(w, 0, sizeof *w);
}

// Starts a LoRA file. Then write the floats of each entry in turn, in pieces of any size, and
// commit or abort. `alpha` is the result of qlora__gguf_alpha.
static QLORA__UNUSED qlora_result qlora__gguf_begin(qlora__env* env, const char* path,
                                                    const char* architecture, double alpha,
                                                    const qlora__gguf_entry* entries,
                                                    uint32_t count, qlora__gguf_writer* w) {
    qlora__string text;
    memset(w, 0, sizeof *w);
    qlora__string_begin(env, &text);
    qlora__gguf_write_header(&text, architecture, (float)alpha, entries, count);
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__out_begin(env, path, &w->out);
    }
    if (result == QLORA_OK) {
        result = qlora__out_write(env, &w->out, text.data, text.size);
    }
    qlora__string_free(&text);
    if (result != QLORA_OK) {
        qlora__gguf_abort(env, w);
        return result;
    }
    w->entries = entries;
    w->count = count;
    w->left = count > 0 ? qlora__gguf_bytes(&entries[0]) : 0;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_write(qlora__env* env, qlora__gguf_writer* w,
                                                    const void* bytes, size_t size) {
    uint8_t zeros[QLORA__GGUF_ALIGN];
    const uint8_t* p = (const uint8_t*)bytes;
    memset(zeros, 0, sizeof zeros);
    while (size > 0) {
        if (w->current == w->count) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                   "GGUF: more bytes than the header declares");
        }
        size_t piece = size < w->left ? size : (size_t)w->left;
        QLORA__TRY(qlora__out_write(env, &w->out, p, piece));
        p += piece;
        size -= piece;
        w->left -= piece;
        if (w->left == 0) {
            uint64_t total = qlora__gguf_bytes(&w->entries[w->current]);
            size_t pad = (size_t)(qlora__gguf_padded(total) - total);
            QLORA__TRY(qlora__out_write(env, &w->out, zeros, pad));
            w->current++;
            w->left = w->current < w->count ? qlora__gguf_bytes(&w->entries[w->current]) : 0;
        }
    }
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_commit(qlora__env* env, qlora__gguf_writer* w) {
    qlora_result result = QLORA_OK;
    if (w->current != w->count) {
        result = qlora__env_fail(env, QLORA_ERR_ARGUMENT, "GGUF: %s was not written completely",
                                 w->entries[w->current].name);
    } else {
        result = qlora__out_commit(env, &w->out);
    }
    qlora__gguf_abort(env, w);
    return result;
}
