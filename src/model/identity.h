// ---- the identity of a base model ---------------------------------------------------------------

// A checkpoint continues only on the base that it was trained on. Two hashes stand for that base:
// one of what its config means for the computation, one of its weights. They are compared, never
// the paths: a folder may move, and another folder may take its place.

#define QLORA__IDENTITY_WHOLE ((uint64_t)1 << 20) // tensors up to this size are hashed entirely
#define QLORA__IDENTITY_BLOCKS 64                 // of a larger one, as many blocks, evenly spread
#define QLORA__IDENTITY_BLOCK 4096

static void qlora__identity_rope(qlora__hash* h, const qlora_rope_desc* r) {
    double numbers[QLORA__ROPE_NUMBERS + 1]; // the last is 0: the hashes of checkpoints contain it
    qlora__rope_numbers(r, numbers);
    numbers[QLORA__ROPE_NUMBERS] = 0.0;
    qlora__hash_add(h, numbers, sizeof numbers);
    qlora__hash_add(h, r->short_factor, sizeof r->short_factor);
    qlora__hash_add(h, r->long_factor, sizeof r->long_factor);
}

// Every field that changes what the model computes. The ids of special tokens, the declared length
// and the type of the weights in the files do not.
static uint64_t qlora__identity_config(const qlora_model_config* c) {
    const int64_t sizes[] = {(int64_t)c->family, c->vocab,  c->hidden,   c->intermediate,
                             c->layers,          c->heads,  c->kv_heads, c->head_dim,
                             c->window,          c->tied,   c->qkv_bias, c->o_bias,
                             c->mlp_bias,        c->qk_norm};
    qlora__hash h;
    qlora__hash_begin(&h);
    const double factors[] = {c->rms_eps,         c->embedding_scale,  c->residual_scale,
                              c->attention_scale, c->logits_divisor,   c->attention_cap,
                              c->logits_cap,      c->query_beta,       c->query_period,
                              c->norm_offset,     (double)c->rope_dims};
    qlora__hash_add(&h, sizes, sizeof sizes);
    qlora__hash_add(&h, factors, sizeof factors);
    qlora__identity_rope(&h, &c->rope);
    qlora__identity_rope(&h, &c->rope_sliding);
    qlora__hash_add(&h, c->sliding, (size_t)c->layers);
    qlora__hash_add(&h, c->no_rope, (size_t)c->layers);
    if (c->experts > 0) {
        const int64_t experts[] = {
            c->experts,       c->experts_per_token,  c->expert_intermediate, c->shared_intermediate,
            c->expert_groups, c->expert_groups_used, c->renormalise};
        qlora__hash_add(&h, experts, sizeof experts);
        qlora__hash_add(&h, &c->routed_scale, sizeof c->routed_scale);
        qlora__hash_add(&h, c->dense, (size_t)c->layers);
    }
    return qlora__hash_end(&h);
}

static void qlora__identity_bytes(qlora__hash* h, const uint8_t* data, uint64_t bytes) {
    if (bytes <= QLORA__IDENTITY_WHOLE) {
        qlora__hash_add(h, data, (size_t)bytes);
        return;
    }
    uint64_t last = bytes - QLORA__IDENTITY_BLOCK;
    for (uint64_t i = 0; i < QLORA__IDENTITY_BLOCKS; i++) {
        uint64_t at = last / (QLORA__IDENTITY_BLOCKS - 1) * i;
        at = i == QLORA__IDENTITY_BLOCKS - 1 ? last : at;
        qlora__hash_add(h, data + at, QLORA__IDENTITY_BLOCK);
    }
}

static void qlora__identity_tensor(qlora__hash* h, const char* name, const qlora__st_tensor* t) {
    uint64_t facts[2] = {(uint64_t)t->dtype, t->bytes};
    qlora__hash_add(h, name, strlen(name) + 1);
    qlora__hash_add(h, facts, sizeof facts);
    qlora__hash_add(h, t->shape, t->rank * sizeof t->shape[0]);
    if (t->view == NULL) {
        qlora__identity_bytes(h, t->data, t->bytes);
        return;
    }
    // of a GGUF file: as it stores them
    for (uint32_t i = 0; i < t->view->count; i++) {
        const qlora__gguf_tensor* part = t->view->parts[i];
        uint64_t rows = (uint64_t)(t->view->rows / t->view->count);
        bool some = t->view->each > 0; // the matrices of some experts
        uint64_t bytes = some ? part->bytes / (uint64_t)qlora__gguf_rows(part) : 0; // of a row
        qlora__identity_bytes(h, part->data + (uint64_t)t->view->first * bytes,
                              some ? rows * bytes : part->bytes);
    }
}

// The tensors in the order of their names: how they are spread over files does not matter.
static uint64_t qlora__identity_folder(const qlora__folder* folder) {
    qlora__hash h;
    qlora__hash_begin(&h);
    for (uint32_t i = 0; i < folder->count; i++) {
        const qlora__folder_entry* entry = &folder->entries[folder->by_name[i]];
        qlora__identity_tensor(&h, entry->name, entry->tensor);
    }
    return qlora__hash_end(&h);
}

// Weights that are generated are as good as the numbers they come from.
static uint64_t qlora__identity_random(uint64_t seed, float deviation) {
    qlora__hash h;
    qlora__hash_begin(&h);
    qlora__hash_add(&h, &seed, sizeof seed);
    qlora__hash_add(&h, &deviation, sizeof deviation);
    return qlora__hash_end(&h);
}
