// demo.h - the demo's model and text.
#ifndef FINETUNE_DEMO_H
#define FINETUNE_DEMO_H

#define DEMO_SAMPLES 1500

static void demo_defaults(options* o) {
    o->out = "demo-out";
    o->rank = 64; // the model's width: the adapters can turn random weights into any others
    o->alpha = 64.0;
    o->train_norms = true;
    o->lr = 1e-2;
    o->beta2 = 0.98;
    o->steps = 200;
    o->warmup = 10;
    o->length = 64;
    o->tokens = 512;
    o->accumulate = 1;
    o->eval = 20;
    o->eval_every = 40;
    o->resume = RESUME_NEVER;
    o->template_name = "plain";
    o->prompt = "3 and 4 is";
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
static bool demo_tokenizer(app* a) {
    blob json;
    int other = 256;
    memset(&json, 0, sizeof json);
    put(&json, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        put(&json, "%s\"\\u%04x\":%d", byte > 0 ? "," : "", (unsigned)(printable ? byte : other++),
            byte);
    }
    put(&json, "}},\"added_tokens\":[{\"id\":256,\"content\":\"<|endoftext|>\",\"special\":true}],"
               "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
               "\"decoder\":{\"type\":\"ByteLevel\"}}");
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
        uint64_t r = mix(i + 1000 * (uint64_t)a->o.seed);
        int first = 1 + (int)(r % 4);
        int second = 1 + (int)(r / 4 % 4);
        put(&json, "{\"text\": \"%d and %d is %d, said the %s %s.\"}\n", first, second,
            first + second, kinds[r / 16 % 4], animals[r / 64 % 4]);
    }
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = "demo.jsonl";
    desc.chat = a->chat;
    bool ok = qlora_text_data_load(a->text, &desc, json.data, json.count, &a->data) == QLORA_OK ||
              text_fail(a, "");
    blob_free(&json);
    return ok;
}

#endif
