// ---- 4-bit and FP8 weights that are kept in a file ----------------------------------------------
//
// Quantising takes seconds at every start, so its result can be kept:
//
//   header     qlora__keep_header
//   data       the memory of every weight that was quantised here, in the order of the layers
//   checksum   of the data, 8 bytes
//
// The file is used only if it was made from the same config and weights (by the hashes that
// checkpoints compare), in this format, for the same block sizes, and is undamaged. Otherwise it is
// made again.

#define QLORA__KEEP_ORDER 0x01020304u // the data has the byte order of the machine
#define QLORA__KEEP_FORMAT 1u // raise it when quantising gives other bits, or the file changes

// What differs between the formats.
typedef struct qlora__keep_kind {
    char magic[9];
    const char* suffix;
    const char* what;
} qlora__keep_kind;

static const qlora__keep_kind qlora__keep_kinds[2] = {{"qloraNF4", ".qlora-nf4", "4-bit"},
                                                      {"qloraFP8", ".qlora-fp8", "FP8"}};

static const qlora__keep_kind* qlora__keep_kind_of(const qlora_model* m) {
    return &qlora__keep_kinds[m->desc.base == QLORA_BASE_FP8 ? 1 : 0];
}

typedef struct qlora__keep_header {
    char magic[8];
    uint32_t order;
    uint32_t format;
    uint64_t config; // identity of the base model
    uint64_t weights;
    uint64_t shapes; // hash of sizes and block sizes of all weights
    uint64_t bytes;  // of the data
    uint64_t check;  // hash of the header up to here
} qlora__keep_header;

typedef struct qlora__keep {
    bool wanted;
    bool usable; // the file has the weights
    qlora__keep_header header;
    qlora__map map;
    uint64_t at; // bytes of the data that were read
    char path[QLORA__PATH_ROOM];
} qlora__keep;

// Whether this weight is quantised when it is loaded.
static bool qlora__keep_takes(const qlora__projection* p) {
    return qlora__is_coded(p) && !p->stored;
}

// In the model folder, next to the GGUF file, or in the folder that the desc names, under the name
// of the model.
static qlora_result qlora__keep_path(qlora_ctx* ctx, const qlora_model* m, char* out) {
    const char* folder = m->desc.quantised_dir;
    char name[256] = "model";
    bool gguf = qlora__gguf_path(m->dir);
    size_t end = strlen(m->dir);
    while (end > 1 && (m->dir[end - 1] == '/' || m->dir[end - 1] == '\\')) {
        end--;
    }
    size_t start = end;
    while (start > 0 && m->dir[start - 1] != '/' && m->dir[start - 1] != '\\') {
        start--;
    }
    bool dots = start == end || m->dir[start] == '.';
    if ((gguf || folder != NULL) && !dots) {
        snprintf(name, sizeof name, "%.*s", (int)qlora__min(200, (int64_t)(end - start)),
                 m->dir + start);
    }
    char file[280];
    char parent[QLORA__PATH_ROOM];
    snprintf(file, sizeof file, "%s%s", name, qlora__keep_kind_of(m)->suffix);
    if (folder == NULL && gguf) {
        snprintf(parent, sizeof parent, "%.*s", (int)start, m->dir);
        folder = start > 0 ? parent : ".";
    }
    return qlora__path_join(&ctx->env, folder != NULL ? folder : m->dir, file, out);
}

static uint64_t qlora__keep_check(const qlora__keep_header* h) {
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, h, offsetof(qlora__keep_header, check));
    return qlora__hash_end(&hash);
}

// The header that a file for this model must have.
static qlora__keep_header qlora__keep_header_of(const qlora_model* m) {
    qlora__keep_header h;
    qlora__hash shapes;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, qlora__keep_kind_of(m)->magic, sizeof h.magic);
    h.order = QLORA__KEEP_ORDER;
    h.format = QLORA__KEEP_FORMAT;
    h.config = m->base.base_config;
    h.weights = m->base.base_weights;
    qlora__hash_begin(&shapes);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            const int64_t facts[] = {qlora__keep_takes(p), p->out,        p->in,
                                     p->nf4.block,         p->nf4.block2, p->nf4.absmax != NULL};
            qlora__hash_add(&shapes, facts, sizeof facts);
            h.bytes += qlora__keep_takes(p) ? qlora__codes_memory(p)->bytes : 0;
        }
    }
    h.shapes = qlora__hash_end(&shapes);
    h.check = qlora__keep_check(&h);
    return h;
}

static uint64_t qlora__keep_checksum(const uint8_t* data, uint64_t bytes) {
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, data, (size_t)bytes);
    return qlora__hash_end(&hash);
}

// What is wrong with a file; NULL if it can be used.
static const char* qlora__keep_fault(const qlora__keep* k) {
    qlora__keep_header h;
    const qlora__keep_header* want = &k->header;
    uint64_t sum = 0;
    if (k->map.size < sizeof h + sizeof sum) {
        return "it is too short";
    }
    memcpy(&h, k->map.data, sizeof h);
    if (memcmp(h.magic, want->magic, sizeof h.magic) != 0) {
        return "it is not a file of such weights";
    }
    if (h.order != want->order || h.format != want->format) {
        return "it has another format or byte order";
    }
    if (h.check != qlora__keep_check(&h)) {
        return "its header is damaged";
    }
    if (h.config != want->config || h.weights != want->weights) {
        return "it was made from another model";
    }
    if (h.shapes != want->shapes || h.bytes != want->bytes) {
        return "it was made with other block sizes";
    }
    if (k->map.size != sizeof h + h.bytes + sizeof sum) {
        return "its size is wrong";
    }
    memcpy(&sum, k->map.data + sizeof h + h.bytes, sizeof sum);
    return sum == qlora__keep_checksum(k->map.data + sizeof h, h.bytes) ? NULL
                                                                        : "its data is damaged";
}

// Looks for a file; one that cannot be used is reported and made again later.
static qlora_result qlora__keep_open(qlora_ctx* ctx, const qlora_model* m, qlora__keep* k) {
    bool exists = false;
    memset(k, 0, sizeof *k);
    if (!m->desc.keep_quantised && m->desc.quantised_dir == NULL) {
        return QLORA_OK;
    }
    k->header = qlora__keep_header_of(m);
    k->wanted = k->header.bytes > 0;
    if (!k->wanted) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__keep_path(ctx, m, k->path));
    QLORA__TRY(qlora__file_exists(&ctx->env, k->path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__map_open(&ctx->env, k->path, &k->map));
    const char* fault = qlora__keep_fault(k);
    k->usable = fault == NULL;
    if (fault != NULL) {
        QLORA__LOG(ctx, WARN, MODEL, "%s is not used: %s; it is made again", k->path, fault);
        qlora__map_close(&ctx->env, &k->map);
    } else {
        QLORA__LOG(ctx, INFO, MODEL, "%s weights from %s", qlora__keep_kind_of(m)->what, k->path);
    }
    return QLORA_OK;
}

// The next weight of the file.
static const uint8_t* qlora__keep_next(qlora__keep* k, uint64_t bytes) {
    const uint8_t* data = k->map.data + sizeof k->header + k->at;
    k->at += bytes;
    return data;
}

// Writes the memory of one weight, in pieces, and adds it to the checksum.
static qlora_result qlora__keep_put(qlora_ctx* ctx, qlora__out* out, const qlora_tensor* memory,
                                    char* room, size_t piece, qlora__hash* hash) {
    for (size_t at = 0; at < memory->bytes; at += piece) {
        size_t n = memory->bytes - at < piece ? memory->bytes - at : piece;
        const char* data = (const char*)memory->data + at;
        if (!qlora__on_cpu(ctx)) {
            qlora_result r = qlora__copy_out(ctx, room, data, n);
            if (r != QLORA_OK) {
                qlora__out_abort(&ctx->env, out);
                return r;
            }
            data = room;
        }
        qlora__hash_add(hash, data, n);
        QLORA__TRY(qlora__out_write(&ctx->env, out, data, n));
    }
    return QLORA_OK;
}

static qlora_result qlora__keep_fill(qlora_ctx* ctx, const qlora_model* m, const qlora__keep* k,
                                     char* room, size_t piece, qlora__out* out) {
    qlora__hash hash;
    qlora__hash_begin(&hash);
    QLORA__TRY(qlora__out_write(&ctx->env, out, &k->header, sizeof k->header));
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            if (qlora__keep_takes(p)) {
                QLORA__TRY(qlora__keep_put(ctx, out, qlora__codes_memory(p), room, piece, &hash));
            }
        }
    }
    uint64_t sum = qlora__hash_end(&hash);
    QLORA__TRY(qlora__out_write(&ctx->env, out, &sum, sizeof sum));
    return qlora__out_commit(&ctx->env, out);
}

// Writes the file, if it is wanted and there was none to use.
static qlora_result qlora__keep_write(qlora_ctx* ctx, const qlora_model* m, const qlora__keep* k) {
    const size_t piece = (size_t)4 << 20;
    qlora__out out;
    if (!k->wanted || k->usable) {
        return QLORA_OK;
    }
    qlora_result r = qlora__out_begin(&ctx->env, k->path, &out);
    if (r == QLORA_ERR_FILE) {
        char why[QLORA__ERROR_SIZE];
        memcpy(why, ctx->env.error, sizeof why);
        return qlora__fail(ctx, r, "%s; desc.quantised_dir can name another folder", why);
    }
    QLORA__TRY(r);
    char* room = (char*)qlora__alloc(ctx, piece);
    if (room == NULL) {
        qlora__out_abort(&ctx->env, &out);
        return QLORA_ERR_MEMORY;
    }
    r = qlora__keep_fill(ctx, m, k, room, piece, &out);
    qlora__free(ctx, room, piece);
    if (r == QLORA_OK) {
        const char* what = qlora__keep_kind_of(m)->what;
        QLORA__LOG(ctx, INFO, MODEL, "%s weights kept in %s", what, k->path);
    }
    return r;
}

static void qlora__keep_close(qlora_ctx* ctx, qlora__keep* k) {
    qlora__map_close(&ctx->env, &k->map);
}
