// ---- a GGUF file as a model folder --------------------------------------------------------------

// The architecture of a file, and what its tensors need.
typedef struct qlora__gguf_facts {
    const qlora__arch* arch;
    const char* prefix; // of the keys of its architecture, not terminated
    size_t prefix_size;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t layers;
    int64_t unused;  // layers that follow them and predict further tokens
    int64_t experts; // of a layer that has them
    int64_t dense;   // layers without experts, which are the first
    bool permuted;
    bool bias[QLORA__GROUPS]; // of the stacks; only with the tensors
} qlora__gguf_facts;

// The full name of a key of the architecture: "llama" and "block_count" give "llama.block_count".
typedef struct qlora__gguf_key {
    char text[128];
} qlora__gguf_key;

static qlora__gguf_key qlora__gguf_key_of(const qlora__gguf_facts* facts, const char* name) {
    qlora__gguf_key key;
    snprintf(key.text, sizeof key.text, "%.*s.%s", (int)facts->prefix_size, facts->prefix, name);
    return key;
}

// The row of the architecture: the first of that name, whose tensors are stored in the way that
// such files have them, unless the file has something that only another row of that name has:
// windows, or an MLP beside its experts.
static const qlora__arch* qlora__gguf_arch(const qlora__gguf* g, const qlora__gguf_facts* facts) {
    qlora__gguf_key key = qlora__gguf_key_of(facts, "attention.sliding_window");
    qlora__gguf_key beside = qlora__gguf_key_of(facts, "expert_shared_feed_forward_length");
    bool windows = qlora__gguf_find(g, key.text) != NULL;
    bool shared = qlora__gguf_find(g, beside.text) != NULL;
    const qlora__arch* found = NULL;
    for (int i = 0; i < QLORA__ARCH_COUNT; i++) {
        const qlora__arch* arch = &qlora__archs[i];
        const char* name = qlora__arch_gguf_of(arch, facts->experts > 0);
        if (name == NULL || !qlora__gguf_is(facts->prefix, facts->prefix_size, name)) {
            continue;
        }
        bool needs = (arch->gguf_rule.flags & QLORA__GGUF_NEEDS_WINDOW) != 0;
        bool has = facts->experts > 0 && arch->experts->groups[QLORA__DOWN].count > 0;
        bool better = facts->experts > 0 ? shared == has : needs && windows;
        found = found == NULL || better ? arch : found;
    }
    return found;
}

static qlora_result qlora__gguf_get_arch(qlora__env* env, const qlora__gguf* g,
                                         qlora__gguf_facts* facts) {
    const char* type = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__gguf_get_string(env, g, "general.type", false, &type, &size));
    if (type != NULL && !qlora__gguf_is(type, size, "model")) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: general.type is \"%.*s\"; only a \"model\" can be opened",
                               g->label, qlora__gguf_shown(size), type);
    }
    QLORA__TRY(qlora__gguf_get_string(env, g, "general.architecture", true, &facts->prefix,
                                      &facts->prefix_size));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "expert_count").text, 0, 0,
                                   QLORA__MAX_EXPERTS, &facts->experts));
    facts->arch = qlora__gguf_arch(g, facts);
    if (facts->arch != NULL) {
        facts->permuted = (facts->arch->has & QLORA__HAS_PERMUTED_GGUF) != 0;
        return QLORA_OK;
    }
    bool experts = facts->experts > 0;
    char names[400];
    size_t used = 0;
    const char* last = "";
    names[0] = '\0';
    for (int i = 0; i < QLORA__ARCH_COUNT; i++) {
        const char* name = qlora__arch_gguf_of(&qlora__archs[i], experts);
        if (name != NULL && strcmp(name, last) != 0) {
            qlora__append(names, sizeof names, &used, "%s %s", used > 0 ? "," : "", name);
            last = name;
        }
    }
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "%s: general.architecture \"%.*s\" is not supported %s experts; "
                           "supported are%s",
                           g->label, qlora__gguf_shown(facts->prefix_size), facts->prefix,
                           experts ? "with" : "without", names);
}

// The layers of a mixture: the first may have no experts, and block_count includes those that
// predict further tokens, which are not used.
static qlora_result qlora__gguf_get_dense(qlora__env* env, const qlora__gguf* g,
                                          qlora__gguf_facts* facts) {
    bool leads = facts->arch->experts->experts->score == QLORA__ROUTER_SIGMOID;
    QLORA__TRY(qlora__gguf_get_int(env, g,
                                   qlora__gguf_key_of(facts, "leading_dense_block_count").text, 0,
                                   0, leads ? INT32_MAX : 0, &facts->dense));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "nextn_predict_layers").text,
                                   0, 0, leads ? facts->layers - 1 : 0, &facts->unused));
    facts->layers -= facts->unused;
    return QLORA_OK;
}

// The projections of a layer, without those of its experts.
static const qlora__layout* qlora__gguf_layout(const qlora__gguf_facts* facts, int64_t layer) {
    const qlora__arch* arch = facts->arch;
    bool dense = facts->experts == 0 || layer < facts->dense;
    return dense && arch->layout != NULL ? arch->layout : arch->experts;
}

static qlora_result qlora__gguf_get_facts(qlora__env* env, const qlora__gguf* g,
                                          qlora__gguf_facts* facts) {
    int64_t hidden = 0;
    int64_t value = 0;
    memset(facts, 0, sizeof *facts);
    QLORA__TRY(qlora__gguf_get_arch(env, g, facts));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "embedding_length").text, -1,
                                   1, 1 << 20, &hidden));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "block_count").text, -1, 1,
                                   QLORA_MAX_LAYERS, &facts->layers));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "attention.head_count").text,
                                   -1, 1, 1 << 14, &facts->heads));
    QLORA__TRY(qlora__gguf_get_int(env, g,
                                   qlora__gguf_key_of(facts, "attention.head_count_kv").text,
                                   facts->heads, 1, 1 << 14, &facts->kv_heads));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "attention.key_length").text,
                                   hidden / facts->heads, 1, 1 << 14, &facts->head_dim));
    QLORA__TRY(qlora__gguf_get_int(env, g, qlora__gguf_key_of(facts, "attention.value_length").text,
                                   facts->head_dim, 1, 1 << 14, &value));
    if (value != facts->head_dim || facts->head_dim % 2 != 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: key_length is %lld and value_length %lld; they must be equal "
                               "and even",
                               g->label, (long long)facts->head_dim, (long long)value);
    }
    return facts->experts > 0 ? qlora__gguf_get_dense(env, g, facts) : QLORA_OK;
}

// Which stacks have biases: those whose tensors the first layer has.
static void qlora__gguf_get_biases(const qlora__gguf_model* m, qlora__gguf_facts* facts) {
    facts->bias[QLORA__QKV] = qlora__gguf_model_find(m, "blk.0.attn_q.bias") != NULL ||
                              qlora__gguf_model_find(m, "blk.0.attn_qkv.bias") != NULL;
    facts->bias[QLORA__O] = qlora__gguf_model_find(m, "blk.0.attn_output.bias") != NULL;
    facts->bias[QLORA__DOWN] = qlora__gguf_model_find(m, "blk.0.ffn_down.bias") != NULL;
    facts->bias[QLORA__GATE_UP] = facts->bias[QLORA__DOWN];
}

// ---- names --------------------------------------------------------------------------------------

// The module of a tensor of a layer, NULL if the architecture has none; `name` is what follows
// "blk.N." and has `size` characters. *norm: it is a norm.
static const char* qlora__gguf_module(const qlora__arch* arch, const qlora__layout* layout,
                                      const char* name, size_t size, bool* norm) {
    *norm = false;
    const qlora__expert_rows* experts = layout->experts;
    if (experts != NULL && qlora__gguf_is(name, size, experts->router.gguf)) {
        return experts->router.module;
    }
    if (experts != NULL && experts->shared_gate.module != NULL &&
        qlora__gguf_is(name, size, experts->shared_gate.gguf)) {
        return experts->shared_gate.module;
    }
    for (int i = 0; i < layout->count; i++) {
        const qlora__projection_row* row = &layout->rows[i];
        if (row->gguf_second == NULL && qlora__gguf_is(name, size, row->gguf)) {
            return row->module;
        }
    }
    *norm = true;
    for (int i = 0; i < 4; i++) {
        if (arch->norms->gguf[i] != NULL && qlora__gguf_is(name, size, arch->norms->gguf[i])) {
            return arch->norms->module[i];
        }
    }
    bool has = (arch->has & QLORA__HAS_QK_NORM) != 0 || (arch->reads & QLORA__READS_QK_NORM) != 0;
    return has && qlora__gguf_is(name, size, "attn_q_norm")   ? "self_attn.q_norm"
           : has && qlora__gguf_is(name, size, "attn_k_norm") ? "self_attn.k_norm"
                                                              : NULL;
}

static qlora_result qlora__gguf_unknown(qlora__env* env, const qlora__folder* f,
                                        const qlora__gguf_facts* facts, const char* name) {
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "%s: the tensor %s is not known in the architecture %.*s", f->dir, name,
                           (int)facts->prefix_size, facts->prefix);
}

// Starts an entry for rows [first, first + rows) of a tensor.
static qlora__folder_made* qlora__gguf_entry_add(qlora__folder* f, const qlora__gguf_tensor* t,
                                                 int64_t first, int64_t rows) {
    qlora__folder_made* made = &f->made[f->count];
    memset(made, 0, sizeof *made);
    made->view.parts[0] = t;
    made->view.count = 1;
    made->view.first = first;
    made->view.rows = rows;
    made->view.cols = t->rank == 1 ? 1 : (int64_t)t->shape[0];
    return made;
}

// Ends an entry: its type, shape and size follow from the view.
static void qlora__gguf_entry_end(qlora__folder* f, qlora__folder_made* made) {
    const qlora__gguf_tensor* t = made->view.parts[0];
    qlora__st_tensor* out = &made->tensor;
    bool plain = qlora__gguf_view_is_plain(&made->view);
    bool vector = t->rank == 1 && made->view.cols == 1;
    out->name = made->name;
    out->shape = made->shape;
    out->rank = vector                                                                        ? 1
                : made->view.rows > made->view.each * made->view.count && made->view.each > 0 ? 3
                                                                                              : 2;
    made->shape[0] = made->view.rows;
    made->shape[1] = made->view.cols;
    if (out->rank == 3) {
        made->shape[1] = made->view.each * made->view.count;
        made->shape[0] = made->view.rows / made->shape[1];
        made->shape[2] = made->view.cols;
    }
    bool mixed = made->view.count > 1 && made->view.parts[1]->type != t->type;
    out->dtype = t->type->block > 1 || made->view.minus_one || mixed ? QLORA__ST_F32
                 : strcmp(t->type->name, "F32") == 0                 ? QLORA__ST_F32
                 : strcmp(t->type->name, "F16") == 0                 ? QLORA__ST_F16
                                                                     : QLORA__ST_BF16;
    out->bytes =
        (uint64_t)(made->view.rows * made->view.cols) * (qlora__st_dtypes[out->dtype].bits / 8);
    if (plain && t->type->block == 1) {
        out->data = qlora__gguf_view_bytes(&made->view, 0);
    } else {
        out->view = &made->view;
    }
    qlora__folder_add(f, out);
}

// Refuses a tensor of a layer that the model would not use.
static qlora_result qlora__gguf_check_use(qlora__env* env, const qlora__folder* f,
                                          const qlora__gguf_facts* facts, const char* tensor,
                                          const char* module, int64_t layer, bool bias) {
    static const char* const first[QLORA__GROUPS] = {"attn_q.bias", "attn_output.bias",
                                                     "ffn_down.bias", "ffn_down.bias"};
    if (layer >= facts->layers) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s: the tensor %s: block_count is %lld",
                               f->dir, tensor, (long long)facts->layers);
    }
    int group = -1;
    const qlora__layout* layout = qlora__gguf_layout(facts, layer);
    for (int i = 0; i < layout->count; i++) {
        const qlora__projection_row* row = &layout->rows[i];
        group = strcmp(row->module, module) == 0 ? row->group : group;
    }
    if (bias && group < 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s: the tensor %s: norms have no bias",
                               f->dir, tensor);
    }
    if (bias && !facts->bias[group]) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s: the tensor %s: blk.0 has no %s",
                               f->dir, tensor, first[group]);
    }
    return QLORA_OK;
}

// ---- experts ------------------------------------------------------------------------------------

// What a tensor of a layer with experts is called.
typedef struct qlora__gguf_stack {
    const qlora__layout* layout;
    unsigned layer;
    const char* name; // what follows "blk.N.", not terminated
    size_t size;
} qlora__gguf_stack;

// The lower half of the rows of what is one matrix for us, NULL if the file has no such tensor of
// the same shape.
static const qlora__gguf_tensor* qlora__gguf_second(const qlora__folder* f,
                                                    const qlora__gguf_tensor* t, unsigned layer,
                                                    const char* second) {
    char name[QLORA__GGUF_NAME];
    snprintf(name, sizeof name, "blk.%u.%s.weight", layer, second);
    const qlora__gguf_tensor* other = qlora__gguf_model_find(&f->gguf, name);
    bool same = other != NULL && other->rank == t->rank &&
                memcmp(other->shape, t->shape, sizeof t->shape) == 0;
    return same ? other : NULL;
}

// One entry per expert for the tensor `t` of the projection `row`, or one if it is a matrix, or if
// folders of the family have a tensor of all experts, `stacked`. The rows of the second tensor
// follow those of the first, in each expert.
static qlora_result qlora__gguf_add_stack(qlora__env* env, qlora__folder* f,
                                          const qlora__gguf_tensor* t, unsigned layer,
                                          const qlora__projection_row* row, const char* stacked) {
    const qlora__gguf_tensor* second = NULL;
    int64_t rows = (int64_t)t->shape[1];
    int64_t count = t->rank == 3 ? (int64_t)t->shape[2] : 1;
    if (row->gguf_second != NULL) {
        second = qlora__gguf_second(f, t, layer, row->gguf_second);
        if (second == NULL) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: blk.%u.%s.weight must exist and have the shape of %s",
                                   f->dir, layer, row->gguf_second, t->name);
        }
    }
    const char* star = strchr(row->module, '*');
    int before = star != NULL ? (int)(star - row->module) : (int)strlen(row->module);
    int64_t entries = stacked != NULL ? 1 : count;
    for (int64_t e = 0; e < entries; e++) {
        qlora__folder_made* made =
            qlora__gguf_entry_add(f, t, e * rows, stacked != NULL ? count * rows : rows);
        made->view.each = rows;
        if (second != NULL) {
            made->view.parts[1] = second;
            made->view.count = 2;
            made->view.rows *= 2;
        }
        char number[24];
        snprintf(number, sizeof number, "%lld", (long long)e);
        if (stacked != NULL) {
            snprintf(made->name, sizeof made->name, "model.layers.%u.%s", layer, stacked);
        } else {
            snprintf(made->name, sizeof made->name, "model.layers.%u.%.*s%s%s.weight", layer,
                     before, row->module, star != NULL ? number : "", star != NULL ? star + 1 : "");
        }
        qlora__gguf_entry_end(f, made);
    }
    return QLORA_OK;
}

// What a layer with experts has besides the projections of its layout, and of those, the matrices
// that the file splits. *done is false if the tensor is none of them.
static qlora_result qlora__gguf_add_experts(qlora__env* env, qlora__folder* f,
                                            const qlora__gguf_facts* facts,
                                            const qlora__gguf_tensor* t,
                                            const qlora__gguf_stack* stack, bool* done) {
    const qlora__layout* layout = stack->layout;
    const qlora__expert_rows* experts = layout->experts;
    bool weight = strcmp(t->name + strlen(t->name) - 7, ".weight") == 0;
    *done = true;
    if (experts->correction != NULL && qlora__gguf_is(stack->name, stack->size, "exp_probs_b") &&
        t->rank == 1) {
        qlora__folder_made* made = qlora__gguf_entry_add(f, t, 0, qlora__gguf_rows(t));
        snprintf(made->name, sizeof made->name, "model.layers.%u.%s", stack->layer,
                 experts->correction);
        qlora__gguf_entry_end(f, made);
        return QLORA_OK;
    }
    for (int i = 0; i < layout->count + experts->count; i++) {
        bool of_expert = i >= layout->count;
        const qlora__projection_row* row =
            of_expert ? &experts->rows[i - layout->count] : &layout->rows[i];
        bool first = qlora__gguf_is(stack->name, stack->size, row->gguf);
        bool second =
            row->gguf_second != NULL && qlora__gguf_is(stack->name, stack->size, row->gguf_second);
        if (!weight || !(first || second) || (!of_expert && row->gguf_second == NULL)) {
            continue;
        }
        if (t->rank != (of_expert ? 3u : 2u) ||
            (of_expert && t->shape[2] != (uint64_t)facts->experts)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s must be %s of %lld experts",
                                   f->dir, t->name,
                                   of_expert ? "the matrices" : "one matrix beside the matrices",
                                   (long long)facts->experts);
        }
        // the second half is read with the first, which must exist
        bool one = of_expert && experts->count == 2; // such folders have one tensor for all
        const char* all = one ? experts->stacked[i - layout->count].names[0] : NULL;
        return first ? qlora__gguf_add_stack(env, f, t, stack->layer, row, all)
               : qlora__gguf_second(f, t, stack->layer, row->gguf) != NULL
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                     "%s: blk.%u.%s.weight must exist and have the shape of %s",
                                     f->dir, stack->layer, row->gguf, t->name);
    }
    *done = false;
    return QLORA_OK;
}

// A norm or a projection of the layout; some files have q, k and v in one tensor where the model
// has three.
static qlora_result qlora__gguf_add_rows(qlora__env* env, qlora__folder* f,
                                         const qlora__gguf_facts* facts,
                                         const qlora__gguf_tensor* t,
                                         const qlora__gguf_stack* stack) {
    static const char* const three[] = {"attn_q", "attn_k", "attn_v"};
    const qlora__layout* layout = stack->layout;
    const char* last = strrchr(t->name, '.');
    bool norm = false;
    bool fused = qlora__gguf_is(stack->name, stack->size, "attn_qkv") &&
                 qlora__gguf_module(facts->arch, layout, stack->name, stack->size, &norm) == NULL;
    int64_t all = qlora__gguf_rows(t);
    int64_t first = 0;
    for (int i = 0; i < (fused ? 3 : 1); i++) {
        const char* module = qlora__gguf_module(facts->arch, layout, fused ? three[i] : stack->name,
                                                fused ? 6 : stack->size, &norm);
        if (module == NULL || t->rank > 2) {
            return qlora__gguf_unknown(env, f, facts, t->name);
        }
        QLORA__TRY(qlora__gguf_check_use(env, f, facts, t->name, module, stack->layer,
                                         strcmp(last, ".bias") == 0));
        bool is_q = strcmp(module, "self_attn.q_proj") == 0;
        bool rotated = is_q || strcmp(module, "self_attn.k_proj") == 0;
        int64_t rows = !fused ? all : (i == 0 ? facts->heads : facts->kv_heads) * facts->head_dim;
        if (first + rows > all || (fused && i == 2 && first + rows != all) ||
            (rotated && facts->permuted && rows % facts->head_dim != 0)) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT, "%s: %s has %lld rows, which do not fit %lld heads of %lld",
                f->dir, t->name, (long long)all, (long long)(is_q ? facts->heads : facts->kv_heads),
                (long long)facts->head_dim);
        }
        qlora__folder_made* made = qlora__gguf_entry_add(f, t, first, rows);
        if (t->rank == 1 && layout->experts != NULL &&
            module == layout->experts->shared_gate.module) {
            made->view.cols = rows; // a matrix of one row
            made->view.rows = 1;
        }
        made->view.minus_one = norm && (facts->arch->has & QLORA__HAS_NORM_OFFSET) != 0;
        made->view.head_dim = rotated && facts->permuted ? facts->head_dim : 0;
        snprintf(made->name, sizeof made->name, "model.layers.%u.%s%s", stack->layer, module, last);
        qlora__gguf_entry_end(f, made);
        first += rows;
    }
    return QLORA_OK;
}

// A tensor of a layer: "blk.N.NAME.weight" or ".bias".
static qlora_result qlora__gguf_add_layer(qlora__env* env, qlora__folder* f,
                                          const qlora__gguf_facts* facts,
                                          const qlora__gguf_tensor* t) {
    const char* at = t->name + 4;
    unsigned layer = 0;
    for (; *at >= '0' && *at <= '9' && layer < 100000; at++) {
        layer = layer * 10 + (unsigned)(*at - '0');
    }
    const char* last = strrchr(t->name, '.');
    bool bias = strcmp(last, ".bias") == 0;
    if (*at != '.' || at == t->name + 4 || last <= at || (!bias && strcmp(last, ".weight") != 0)) {
        return qlora__gguf_unknown(env, f, facts, t->name);
    }
    if (layer >= facts->layers && layer < facts->layers + facts->unused) {
        return QLORA_OK;
    }
    qlora__gguf_stack stack;
    bool done = false;
    stack.layout = qlora__gguf_layout(facts, layer);
    stack.layer = layer;
    stack.name = at + 1;
    stack.size = (size_t)(last - at - 1);
    if (stack.layout->experts != NULL && layer < facts->layers) {
        QLORA__TRY(qlora__gguf_add_experts(env, f, facts, t, &stack, &done));
    }
    return done ? QLORA_OK : qlora__gguf_add_rows(env, f, facts, t, &stack);
}

static qlora_result qlora__gguf_add(qlora__env* env, qlora__folder* f,
                                    const qlora__gguf_facts* facts, const qlora__gguf_tensor* t) {
    static const struct {
        const char* gguf;
        const char* name;
    } names[] = {{"token_embd.weight", "model.embed_tokens.weight"},
                 {"output_norm.weight", "model.norm.weight"},
                 {"output.weight", "lm_head.weight"}};
    bool layers = strncmp(t->name, "blk.", 4) == 0;
    if (t->rank > (layers && facts->experts > 0 ? 3u : 2u) ||
        (t->rank == 1 && t->type->block > 1)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s has %u dimensions and type %s, which is not supported",
                               f->dir, t->name, t->rank, t->type->name);
    }
    if (layers) {
        return qlora__gguf_add_layer(env, f, facts, t);
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(t->name, names[i].gguf) == 0) {
            qlora__folder_made* made = qlora__gguf_entry_add(f, t, 0, qlora__gguf_rows(t));
            made->view.minus_one = i == 1 && (facts->arch->has & QLORA__HAS_NORM_OFFSET) != 0;
            snprintf(made->name, sizeof made->name, "%s", names[i].name);
            qlora__gguf_entry_end(f, made);
            return QLORA_OK;
        }
    }
    // the divisors of the rotation are part of the config
    bool rope = strcmp(t->name, "rope_freqs.weight") == 0 ||
                strcmp(t->name, "rope_factors_long.weight") == 0 ||
                strcmp(t->name, "rope_factors_short.weight") == 0;
    return rope ? QLORA_OK : qlora__gguf_unknown(env, f, facts, t->name);
}

static qlora_result qlora__gguf_fill(qlora__env* env, qlora__folder* f) {
    qlora__gguf_facts facts;
    uint64_t count = 0;
    QLORA__TRY(qlora__gguf_get_facts(env, &f->gguf.files[0].meta, &facts));
    qlora__gguf_get_biases(&f->gguf, &facts);
    for (uint32_t i = 0; i < f->gguf.count; i++) {
        for (uint32_t k = 0; k < f->gguf.files[i].count; k++) {
            const qlora__gguf_tensor* t = &f->gguf.files[i].tensors[k];
            bool stack = t->rank == 3 && t->shape[2] == (uint64_t)facts.experts;
            count += stack ? t->shape[2] : 3; // a fused tensor is three
        }
    }
    if (count > UINT32_MAX / sizeof *f->made) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many tensors", f->dir);
    }
    QLORA__TRY(qlora__folder_reserve(env, f, (uint32_t)count));
    f->made = (qlora__folder_made*)qlora__env_alloc(env, (size_t)count * sizeof *f->made);
    f->cache = (qlora__folder_cache*)qlora__env_alloc_zero(env, sizeof *f->cache);
    if (f->cache == NULL || f->made == NULL) {
        f->made_room = f->made != NULL ? (uint32_t)count : 0;
        return QLORA_ERR_MEMORY;
    }
    f->made_room = (uint32_t)count;
    for (uint32_t i = 0; i < f->gguf.count; i++) {
        for (uint32_t k = 0; k < f->gguf.files[i].count; k++) {
            QLORA__TRY(qlora__gguf_add(env, f, &facts, &f->gguf.files[i].tensors[k]));
        }
    }
    return qlora__folder_sort(env, f);
}

static qlora_result qlora__folder_open_gguf(qlora__env* env, const char* path, qlora__folder* f) {
    memset(f, 0, sizeof *f);
    QLORA__TRY(qlora__path_join(env, "", path, f->dir));
    QLORA__TRY(qlora__gguf_model_open(env, path, &f->gguf));
    qlora_result result = qlora__gguf_fill(env, f);
    if (result != QLORA_OK) {
        qlora__folder_close(env, f);
    }
    return result;
}

// In a build without GGUF files.
static QLORA__UNUSED qlora_result qlora__gguf_refuse(qlora__env* env, const char* path) {
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "%s: GGUF files are not in this build: they were left out by "
                           "QLORA_NO_GGUF",
                           path);
}

// Opens the weights of a model: those of a folder, or of a GGUF file.
static QLORA__UNUSED qlora_result qlora__folder_open(qlora__env* env, const char* dir,
                                                     qlora__folder* f) {
    if (!qlora__gguf_path(dir)) {
        return qlora__folder_open_dir(env, dir, f);
    }
    return QLORA__GGUF ? qlora__folder_open_gguf(env, dir, f) : qlora__gguf_refuse(env, dir);
}

// The values of a tensor. If they must be made first, they are valid until the next call.
static QLORA__UNUSED qlora_result qlora__folder_make(qlora__env* env, const qlora__folder* f,
                                                     const qlora__st_tensor** tensor) {
    const qlora__st_tensor* t = *tensor;
    qlora__folder_cache* cache = f->cache;
    if (!QLORA__GGUF || t->view == NULL) {
        return QLORA_OK;
    }
    if (cache->bytes < t->bytes) {
        qlora__env_free(env, cache->data, cache->bytes);
        cache->bytes = 0;
        cache->data = (uint8_t*)qlora__env_alloc(env, (size_t)t->bytes);
        if (cache->data == NULL) {
            return QLORA_ERR_MEMORY;
        }
        cache->bytes = (size_t)t->bytes;
    }
    if (t->dtype == QLORA__ST_F32) {
        qlora__gguf_view_read(t->view, 0, qlora__st_elements(t), (float*)(void*)cache->data);
    } else {
        size_t row = (size_t)t->view->cols * 2;
        for (int64_t i = 0; i < t->view->rows; i++) {
            memcpy(cache->data + (size_t)i * row, qlora__gguf_view_bytes(t->view, i), row);
        }
    }
    cache->tensor = *t;
    cache->tensor.view = NULL;
    cache->tensor.data = cache->data;
    *tensor = &cache->tensor;
    return QLORA_OK;
}
