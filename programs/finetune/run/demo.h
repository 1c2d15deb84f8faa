// demo.h - the demo's model and text.
#ifndef FINETUNE_DEMO_H
#define FINETUNE_DEMO_H

#define DEMO_SAMPLES 1500
#define DEMO_STD 0.15

// The defaults of a demo, for options that were not given.
static void demo_defaults(options* o) {
    o->output.folder = o->output.folder != NULL ? o->output.folder : "demo-out";
    o->data.template_name = o->data.template_name != NULL ? o->data.template_name : "plain";
    o->sampling.prompt = o->sampling.prompt != NULL ? o->sampling.prompt : "3 and 4 is";
    if (!samples_wanted(o)) {
        o->sampling.prompts.items[o->sampling.prompts.count++] = o->sampling.prompt; // for the page
    }
    whole_default(&o->sampling.tokens, 0, 32);
    o->adapter.train_norms = true;
    whole_default(&o->adapter.rank, 0,
                  64); // the model's width: the adapters can become any weights
    real_default(&o->adapter.alpha, 0.0, 64.0);
    real_default(&o->optimizer.lr, -1.0, 1e-2);
    real_default(&o->optimizer.beta2, -1.0, 0.98);
    whole_default(&o->training.steps, 0, o->training.epochs > 0.0 ? 0 : 200);
    whole_default(&o->optimizer.warmup, -1, 10);
    whole_default(&o->data.length, 0, 64);
    whole_default(&o->training.tokens, 0, o->data.length > 512 ? o->data.length : 512);
    whole_default(&o->training.accumulate, 0, 1);
    real_default(&o->eval.share, -1.0, 20.0);
    whole_default(&o->eval.every, 0, 40);
}

static void demo_config(qlora_model_config* c) {
    memset(c, 0, sizeof *c);
    c->family = QLORA_FAMILY_LLAMA;
    c->vocab = 257; // the bytes and an end token
    c->hidden = 64;
    c->intermediate = 128;
    c->layers = 2;
    c->heads = 4;
    c->kv_heads = 4;
    c->head_dim = 16;
    c->max_positions = 256;
    c->rms_eps = 1e-5;
    c->rope.theta = 10000.0;
    c->rope.factor = 1.0;
    c->tied = true;
    c->dtype = QLORA_F32;
    c->bos_id = -1;
    c->pad_id = -1;
    c->stop_count = 1;
    c->stop_ids[0] = 256;
}

// A tokenizer.json whose tokens are the 256 bytes, spelled as in byte-level BPE: printable Latin-1
// bytes represent themselves, the others are mapped to code points from 256 on.
static void demo_tokenizer_json(blob* json) {
    int other = 256;
    put(json, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        put(json, "%s\"\\u%04x\":%d", byte > 0 ? "," : "", (unsigned)(printable ? byte : other++),
            byte);
    }
    put(json, "}},\"added_tokens\":[{\"id\":256,\"content\":\"<|endoftext|>\",\"special\":true}],"
              "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
              "\"decoder\":{\"type\":\"ByteLevel\"}}");
}

static bool demo_tokenizer(app* a) {
    blob json;
    memset(&json, 0, sizeof json);
    demo_tokenizer_json(&json);
    bool ok = text_open(a) && (qlora_text_tok_load(a->text, "demo/tokenizer.json", json.data,
                                                   json.count, &a->tok) == QLORA_OK ||
                               text_fail(a, ""));
    blob_free(&json);
    return ok;
}

static bool demo_data(app* a) {
    static const char* const kinds[] = {"red", "old", "shy", "big"};
    static const char* const animals[] = {"hen", "cat", "dog", "owl"};
    blob json;
    memset(&json, 0, sizeof json);
    for (uint64_t i = 0; i < DEMO_SAMPLES; i++) {
        uint64_t r = mix(i + 1000 * (uint64_t)a->o.training.seed);
        int first = 1 + (int)(r % 4);
        int second = 1 + (int)(r / 4 % 4);
        put(&json, "{\"text\": \"%d and %d is %d, said the %s %s.\"}\n", first, second,
            first + second, kinds[r / 16 % 4], animals[r / 64 % 4]);
    }
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = "demo.jsonl";
    desc.chat = a->chat;
    bool ok = input_add(a, &a->data.inputs, desc.path, 1.0) &&
              (qlora_text_data_load(a->text, &desc, json.data, json.count,
                                    &a->data.inputs.data[0].data) == QLORA_OK ||
               text_fail(a, ""));
    blob_free(&json);
    return ok;
}

// ---- the model's files ----

#define DEMO_MARK "finetune --demo"

static void demo_tensor(blob* header, blob* data, const char* name, int64_t rows, int64_t cols,
                        uint64_t seed) {
    char shape[64];
    snprintf(shape, sizeof shape, cols > 0 ? "%lld,%lld" : "%lld", (long long)rows,
             (long long)cols);
    size_t begin = data->count;
    for (int64_t i = 0; i < rows * (cols > 0 ? cols : 1); i++) {
        // Box and Muller's normal deviates; norms are 1.
        uint64_t r = mix(mix(seed ^ (uint64_t)begin) + (uint64_t)i);
        double u = ((double)(r >> 40) + 0.5) / 16777216.0;
        double v = (double)(r & 0xffffff) / 16777216.0;
        double normal = sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
        float value = cols > 0 ? (float)(DEMO_STD * normal) : 1.0f;
        blob_add(data, &value, sizeof value);
    }
    put(header, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
        header->count > 1 ? "," : "", name, shape, begin, data->count);
}

static void demo_layer(const qlora_model_config* c, int64_t layer, uint64_t seed, blob* header,
                       blob* data) {
    const struct {
        const char* name;
        int64_t rows;
        int64_t cols;
    } rows[] = {
        {"self_attn.q_proj", c->hidden, c->hidden},    {"self_attn.k_proj", c->hidden, c->hidden},
        {"self_attn.v_proj", c->hidden, c->hidden},    {"self_attn.o_proj", c->hidden, c->hidden},
        {"mlp.gate_proj", c->intermediate, c->hidden}, {"mlp.up_proj", c->intermediate, c->hidden},
        {"mlp.down_proj", c->hidden, c->intermediate}, {"input_layernorm", c->hidden, 0},
        {"post_attention_layernorm", c->hidden, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)layer, rows[i].name);
        demo_tensor(header, data, name, rows[i].rows, rows[i].cols, seed);
    }
}

static bool demo_weights_write(app* a) {
    const qlora_model_config* c = &a->config;
    blob header;
    blob data;
    blob file;
    memset(&header, 0, sizeof header);
    memset(&data, 0, sizeof data);
    memset(&file, 0, sizeof file);
    put(&header, "{");
    demo_tensor(&header, &data, "model.embed_tokens.weight", c->vocab, c->hidden,
                (uint64_t)a->o.training.seed);
    for (int64_t i = 0; i < c->layers; i++) {
        demo_layer(c, i, (uint64_t)a->o.training.seed, &header, &data);
    }
    demo_tensor(&header, &data, "model.norm.weight", c->hidden, 0, 0);
    put(&header, "}");
    unsigned char size[8];
    for (int i = 0; i < 8; i++) {
        size[i] = (unsigned char)((uint64_t)header.count >> (8 * i));
    }
    bool ok = blob_add(&file, size, 8) && blob_add(&file, header.data, header.count) &&
              blob_add(&file, data.data, data.count);
    ok = ok ? file_replace(a, "model/model.safetensors", file.data, file.count)
            : error_set(a->error, "out of memory");
    blob_free(&header);
    blob_free(&data);
    blob_free(&file);
    return ok;
}

static bool demo_config_write(app* a) {
    const qlora_model_config* c = &a->config;
    blob json;
    memset(&json, 0, sizeof json);
    put(&json,
        "{\"_name_or_path\": \"" DEMO_MARK "\",\n \"architectures\": [\"LlamaForCausalLM\"], "
        "\"model_type\": \"llama\",\n \"hidden_size\": %lld, \"intermediate_size\": %lld, "
        "\"num_hidden_layers\": %lld,\n",
        (long long)c->hidden, (long long)c->intermediate, (long long)c->layers);
    put(&json,
        " \"num_attention_heads\": %lld, \"num_key_value_heads\": %lld, \"vocab_size\": %lld,\n "
        "\"max_position_embeddings\": %lld, \"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0,\n",
        (long long)c->heads, (long long)c->kv_heads, (long long)c->vocab,
        (long long)c->max_positions);
    put(&json,
        " \"hidden_act\": \"silu\", \"tie_word_embeddings\": true, \"bos_token_id\": null,\n "
        "\"eos_token_id\": 256, \"torch_dtype\": \"float32\"}\n");
    bool ok = file_replace(a, "model/config.json", json.data, json.count);
    blob_free(&json);
    return ok;
}

static bool demo_tokenizer_write(app* a) {
    blob json;
    memset(&json, 0, sizeof json);
    demo_tokenizer_json(&json);
    bool ok = file_replace(a, "model/tokenizer.json", json.data, json.count);
    blob_free(&json);
    return ok;
}

// A model in OUT/model that is not the demo's is not overwritten. The config identifies it and is
// written first.
static bool demo_model_ours(app* a, bool* there) {
    char path[PATH_SIZE];
    blob config;
    memset(&config, 0, sizeof config);
    out_path(a, "model/config.json", path);
    bool ok = file_read(a, path, &config);
    *there = config.data != NULL;
    bool ours = *there && strstr(config.data, DEMO_MARK) != NULL;
    blob_free(&config);
    for (size_t i = 0; i < sizeof demo_files / sizeof demo_files[0]; i++) {
        if (ok && !ours && !file_missing(a->o.output.folder, demo_files[i])) {
            return error_set(a->error, "--out %s: %s is not the demo's; choose another folder",
                             a->o.output.folder, demo_files[i]);
        }
    }
    return ok;
}

// Keeps the demo's model in OUT/model, so that `generate` can use it with the adapter, and trains
// from there. A run that is resumed finds it there.
static bool demo_model_write(app* a) {
    bool there = false;
    if (!demo_model_ours(a, &there)) {
        return false;
    }
    out_path(a, "model", a->demo_dir);
    if (!a->resuming || !there) {
        int code = a->files.make_dir(a->demo_dir, a->files.user);
        if (code != 0) {
            return error_set(a->error, "cannot create %s: %s", a->demo_dir, strerror(code));
        }
        a->folder.demo_made = !a->resuming && a->folder.out_empty;
        if (!demo_config_write(a) || !demo_tokenizer_write(a) || !demo_weights_write(a)) {
            return false;
        }
    }
    a->model_desc.dir = a->demo_dir;
    a->model_desc.config = NULL;
    return true;
}

#endif
