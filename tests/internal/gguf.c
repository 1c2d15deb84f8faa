// gguf.c - reading GGUF files: built in memory, and, if the shared folder is present, real ones.
// Included after formats.c, whose helpers it uses.

SUITE_EXTERN(gguf_suite);

// ---- a small file, piece by piece ----

typedef struct gguf_bytes {
    uint8_t data[8192];
    size_t size;
} gguf_bytes;

static void gguf_put(gguf_bytes* b, const void* data, size_t size) {
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void gguf_put_number(gguf_bytes* b, uint64_t value, size_t size) {
    for (size_t i = 0; i < size; i++) {
        b->data[b->size++] = (uint8_t)(value >> (8 * i));
    }
}

static void gguf_put_text(gguf_bytes* b, const char* text) {
    gguf_put_number(b, strlen(text), 8);
    gguf_put(b, text, strlen(text));
}

static void gguf_put_head(gguf_bytes* b, uint64_t tensors, uint64_t values) {
    b->size = 0;
    gguf_put(b, "GGUF", 4);
    gguf_put_number(b, 3, 4);
    gguf_put_number(b, tensors, 8);
    gguf_put_number(b, values, 8);
}

static void gguf_put_value(gguf_bytes* b, const char* key, uint32_t kind, uint64_t value,
                           size_t size) {
    gguf_put_text(b, key);
    gguf_put_number(b, kind, 4);
    gguf_put_number(b, value, size);
}

static void gguf_put_tensor(gguf_bytes* b, const char* name, uint64_t cols, uint64_t rows,
                            uint32_t type, uint64_t offset) {
    gguf_put_text(b, name);
    gguf_put_number(b, 2, 4);
    gguf_put_number(b, cols, 8);
    gguf_put_number(b, rows, 8);
    gguf_put_number(b, type, 4);
    gguf_put_number(b, offset, 8);
}

static void gguf_pad(gguf_bytes* b, size_t align) {
    while (b->size % align != 0) {
        b->data[b->size++] = 0;
    }
}

// One value of every kind.
static void gguf_every_kind(gguf_bytes* b) {
    gguf_put_head(b, 0, 13);
    gguf_put_value(b, "a.u8", 0, 200, 1);
    gguf_put_value(b, "a.i8", 1, 0xFE, 1);
    gguf_put_value(b, "a.u16", 2, 65535, 2);
    gguf_put_value(b, "a.i16", 3, 0x8000, 2);
    gguf_put_value(b, "a.u32", 4, 4000000000u, 4);
    gguf_put_value(b, "a.i32", 5, 0xFFFFFFFFu, 4);
    gguf_put_value(b, "a.f32", 6, 0x3FC00000, 4);
    gguf_put_value(b, "a.bool", 7, 1, 1);
    gguf_put_text(b, "a.string");
    gguf_put_number(b, 8, 4);
    gguf_put_text(b, "words");
    gguf_put_value(b, "a.u64", 10, UINT64_MAX, 8);
    gguf_put_value(b, "a.i64", 11, 1ull << 63, 8);
    gguf_put_value(b, "a.f64", 12, 0x4004000000000000u, 8);
    gguf_put_text(b, "a.array");
    gguf_put_number(b, 9, 4);
    gguf_put_number(b, 8, 4);
    gguf_put_number(b, 3, 8);
    gguf_put_text(b, "one");
    gguf_put_text(b, "");
    gguf_put_text(b, "three");
}

TEST gguf_values_are_read(void) {
    static gguf_bytes b;
    static const struct {
        const char* key;
        int64_t value;
    } whole[] = {{"a.u8", 200},         {"a.i8", -2},  {"a.u16", 65535},    {"a.i16", -32768},
                 {"a.u32", 4000000000}, {"a.i32", -1}, {"a.i64", INT64_MIN}};
    world w;
    qlora__gguf g;
    const char* text = NULL;
    size_t size = 0;
    uint64_t at = 0;
    int64_t number = 0;
    double real = 0.0;
    bool flag = false;
    world_begin(&w);
    gguf_every_kind(&b);
    ASSERT_EQ(QLORA_OK, qlora__gguf_parse(&w.env, "f", b.data, b.size, &g));
    ASSERT_EQ(13, g.count);
    ASSERT_EQ(b.size, g.table);
    ASSERT_EQ(32, g.alignment);
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        const qlora__gguf_value* v = qlora__gguf_find(&g, whole[i].key);
        ASSERT(v != NULL);
        ASSERTm(whole[i].key, qlora__gguf_integer(v, 0, &number));
        ASSERT_EQm(whole[i].key, whole[i].value, number);
        ASSERTm(whole[i].key, !qlora__gguf_real(v, 0, &real));
    }
    ASSERT(!qlora__gguf_integer(qlora__gguf_find(&g, "a.u64"), 0, &number)); // more than 63 bits
    ASSERT_EQ(QLORA_OK, qlora__gguf_get_positive(&w.env, &g, "a.f32", -1.0, &real));
    ASSERT_EQ(1.5, real);
    ASSERT_EQ(QLORA_OK, qlora__gguf_get_positive(&w.env, &g, "a.f64", -1.0, &real));
    ASSERT_EQ(2.5, real);
    ASSERT_EQ(QLORA_OK, qlora__gguf_get_bool(&w.env, &g, "a.bool", false, &flag));
    ASSERT(flag);
    ASSERT_EQ(QLORA_OK, qlora__gguf_get_string(&w.env, &g, "a.string", true, &text, &size));
    ASSERT(qlora__gguf_is(text, size, "words"));
    const qlora__gguf_value* array = NULL;
    ASSERT_EQ(QLORA_OK,
              qlora__gguf_get_array(&w.env, &g, "a.array", QLORA__GGUF_STRING, true, &array));
    static const char* const words[] = {"one", "", "three"};
    for (int i = 0; i < 3; i++) {
        text = qlora__gguf_next_string(array, &at, &size);
        ASSERT(qlora__gguf_is(text, size, words[i]));
    }
    ASSERT_EQ(array->bytes, at);
    qlora__gguf_free(&w.env, &g);
    ASSERT(world_end(&w));
    PASS();
}

TEST gguf_values_of_the_wrong_kind_are_refused(void) {
    static gguf_bytes b;
    world w;
    qlora__gguf g;
    int64_t number = 0;
    double real = 0.0;
    bool flag = false;
    const char* text = NULL;
    size_t size = 0;
    const qlora__gguf_value* array = NULL;
    world_begin(&w);
    gguf_every_kind(&b);
    ASSERT_EQ(QLORA_OK, qlora__gguf_parse(&w.env, "f", b.data, b.size, &g));
    ASSERT(refused(&w, qlora__gguf_get_int(&w.env, &g, "a.f32", 1, 0, 9, &number),
                   "f: a.f32 has type F32; it must be an integer"));
    ASSERT(refused(&w, qlora__gguf_get_int(&w.env, &g, "a.u8", 1, 0, 9, &number),
                   "f: a.u8 is 200; it must be an integer from 0 to 9"));
    ASSERT(refused(&w, qlora__gguf_get_int(&w.env, &g, "a.none", -1, 0, 9, &number),
                   "f: a.none is missing"));
    ASSERT(refused(&w, qlora__gguf_get_positive(&w.env, &g, "a.u8", 1.0, &real), "type U8"));
    ASSERT(refused(&w, qlora__gguf_get_bool(&w.env, &g, "a.u8", true, &flag), "must be BOOL"));
    ASSERT(refused(&w, qlora__gguf_get_string(&w.env, &g, "a.u8", false, &text, &size),
                   "must be STRING"));
    ASSERT(refused(&w, qlora__gguf_get_string(&w.env, &g, "a.array", false, &text, &size),
                   "has type ARRAY of STRING"));
    ASSERT(refused(&w, qlora__gguf_get_array(&w.env, &g, "a.array", QLORA__GGUF_F32, true, &array),
                   "must be ARRAY of F32"));
    qlora__gguf_free(&w.env, &g);
    ASSERT(world_end(&w));
    PASS();
}

// Two tensors, F32 [4 x 2] and Q8_0 [32 x 1].
static void gguf_two_tensors(gguf_bytes* b) {
    gguf_put_head(b, 2, 1);
    gguf_put_value(b, "general.alignment", 4, 64, 4);
    gguf_put_tensor(b, "first", 4, 2, 0, 0);
    gguf_put_tensor(b, "second", 32, 1, 8, 64);
    gguf_pad(b, 64);
    for (uint32_t i = 0; i < 8; i++) {
        gguf_put_number(b, qlora__bits((float)i), 4);
    }
    gguf_pad(b, 64);
    gguf_put_number(b, qlora__f16_from(0.5f), 2);
    for (int i = 0; i < 32; i++) {
        gguf_put_number(b, (uint64_t)(i - 16) & 255, 1);
    }
}

TEST gguf_tensors_are_read(void) {
    static gguf_bytes b;
    static qlora__gguf_file f;
    world w;
    float out[32];
    world_begin(&w);
    gguf_two_tensors(&b);
    ASSERT_EQ(QLORA_OK, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f));
    ASSERT_EQ(2, f.count);
    const qlora__gguf_tensor* t = qlora__gguf_tensor_find(&f, "first");
    ASSERT(t != NULL && t->shape[0] == 4 && t->shape[1] == 2 && t->elements == 8);
    qlora__gguf_widen(t->type, t->data, 8, out);
    ASSERT_EQ(7.0f, out[7]);
    t = qlora__gguf_tensor_find(&f, "second");
    ASSERT(t != NULL && t->bytes == 34);
    qlora__gguf_widen(t->type, t->data, 32, out);
    ASSERT_EQ(-8.0f, out[0]);
    ASSERT_EQ(7.5f, out[31]);
    ASSERT_EQ(NULL, qlora__gguf_tensor_find(&f, "third"));
    qlora__gguf_close(&w.env, &f);
    ASSERT(world_end(&w));
    PASS();
}

// Every prefix of a valid file is refused, with a message, and without reading past its end (the
// copy has exactly that size, so that a sanitizer would see it).
TEST gguf_truncated_files_are_refused(void) {
    static gguf_bytes b;
    static qlora__gguf_file f;
    world w;
    world_begin(&w);
    gguf_two_tensors(&b);
    for (size_t size = 0; size < b.size; size++) {
        uint8_t* copy = (uint8_t*)malloc(size + 1);
        ASSERT(copy != NULL);
        memcpy(copy, b.data, size);
        ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", copy, size, &f), "f: "));
        free(copy);
    }
    ASSERT(world_end(&w));
    PASS();
}

// Each file differs from the one above in one place.
TEST gguf_faults_are_named(void) {
    static gguf_bytes b;
    static qlora__gguf_file f;
    static const struct {
        size_t at; // the first byte that is changed
        uint64_t value;
        size_t size;
        const char* message;
    } faults[] = {
        {0, 'X', 1, "does not begin with \"GGUF\""},
        {4, 1, 4, "version 1 is not supported"},
        {4, 0x03000000, 4, "big-endian"},
        {8, 1ull << 62, 8, "4611686018427387904 tensors are announced"},
        {8, 3, 8, "the name of a tensor has 0 bytes"},
        {16, 1ull << 63, 8, "9223372036854775808 keys are announced"},
        {24, UINT64_MAX, 8, "a key has 18446744073709551615 bytes"},
        {24, 0, 8, "a key has 0 bytes"},
        {49, 99, 4, "general.alignment: type 99 does not exist"},
        {49, 5, 4, "general.alignment has type I32"},
        {53, 0, 4, "general.alignment is 0"},
        {53, 48, 4, "general.alignment is 48"},
        {57, 64, 8, "the name of a tensor has 64 bytes"},
        {70, 5, 4, "first has 5 dimensions"},
        {70, 0, 4, "first has 0 dimensions"},
        {74, 0, 8, "first: dimension 0 is 0"},
        {82, 1ull << 62, 8, "first: dimension 1 is 4611686018427387904"},
        {90, 777, 4, "first: tensor type 777 does not exist"},
        {90, 16, 4, "first has type IQ2_XXS, which is not supported"},
        {90, 8, 4, "first has rows of 4 values; Q8_0 needs a multiple of 32"},
        {94, 32, 8, "first begins at 32, which is not a multiple of the alignment (64)"},
        {94, 128, 8, "second begins at 64, leaving a gap after 0"},
        {140, 0, 8, "second begins at 0, before the previous tensor ends at 64"},
        {140, UINT64_MAX - 63, 8, "the file has only"},
    };
    world w;
    world_begin(&w);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        gguf_two_tensors(&b);
        size_t end = b.size;
        b.size = faults[i].at;
        gguf_put_number(&b, faults[i].value, faults[i].size);
        b.size = end;
        ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f),
                       faults[i].message));
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST gguf_duplicates_and_nesting_are_refused(void) {
    static gguf_bytes b;
    static qlora__gguf_file f;
    world w;
    world_begin(&w);
    gguf_put_head(&b, 0, 2);
    gguf_put_value(&b, "a", 0, 1, 1);
    gguf_put_value(&b, "a", 0, 2, 1);
    ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f),
                   "the key a occurs twice"));
    gguf_put_head(&b, 2, 0);
    gguf_put_tensor(&b, "t", 1, 1, 0, 0);
    gguf_put_tensor(&b, "t", 1, 1, 0, 32);
    gguf_pad(&b, 32);
    gguf_put(&b, "0000", 4);
    gguf_pad(&b, 32);
    gguf_put(&b, "0000", 4);
    ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f),
                   "two tensors are named t"));
    gguf_put_head(&b, 0, 1);
    gguf_put_value(&b, "a", 9, 9, 4);
    gguf_put_number(&b, 1, 8);
    gguf_put_number(&b, 0, 4);
    gguf_put_number(&b, 0, 8);
    ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f),
                   "a is an array of arrays"));
    gguf_put_head(&b, 0, 1);
    gguf_put_value(&b, "a", 7, 2, 1);
    ASSERT(refused(&w, qlora__gguf_file_parse(&w.env, "f", b.data, b.size, &f), "a: a BOOL is 2"));
    ASSERT(world_end(&w));
    PASS();
}

// ---- split models ----

static void gguf_part(world* w, const char* name, uint64_t number, uint64_t parts, uint64_t total,
                      const char* tensor) {
    static gguf_bytes b;
    gguf_put_head(&b, 1, 3);
    gguf_put_value(&b, "split.no", 2, number, 2);
    gguf_put_value(&b, "split.count", 2, parts, 2);
    gguf_put_value(&b, "split.tensors.count", 5, total, 4);
    gguf_put_tensor(&b, tensor, 1, 1, 0, 0);
    gguf_pad(&b, 32);
    gguf_put_number(&b, qlora__bits((float)number), 4);
    world_put(w, name, b.data, b.size);
}

TEST gguf_split_models(void) {
    world w;
    qlora__gguf_model m;
    float x = 0.0f;
    world_begin(&w);
    gguf_part(&w, "d/m-00001-of-00003.gguf", 0, 3, 3, "a");
    gguf_part(&w, "d/m-00002-of-00003.gguf", 1, 3, 3, "b");
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/m-00001-of-00003.gguf", &m),
                   "part 3 does not exist"));
    gguf_part(&w, "d/m-00003-of-00003.gguf", 2, 3, 3, "c");
    ASSERT_EQ(QLORA_OK, qlora__gguf_model_open(&w.env, "d/m-00001-of-00003.gguf", &m));
    ASSERT_EQ(3, m.count);
    const qlora__gguf_tensor* t = qlora__gguf_model_find(&m, "c");
    ASSERT(t != NULL);
    qlora__gguf_widen(t->type, t->data, 1, &x);
    ASSERT_EQ(2.0f, x);
    qlora__gguf_model_close(&w.env, &m);
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/m-00002-of-00003.gguf", &m),
                   "this is part 2 of 3; give part 1"));
    gguf_part(&w, "d/m-00003-of-00003.gguf", 2, 3, 3, "b");
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/m-00001-of-00003.gguf", &m),
                   "b is also in d/m-00002-of-00003.gguf"));
    gguf_part(&w, "d/m-00003-of-00003.gguf", 1, 3, 3, "c");
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/m-00001-of-00003.gguf", &m),
                   "split.no is 1; it must be 2"));
    gguf_part(&w, "d/m-00003-of-00003.gguf", 2, 3, 3, "c");
    gguf_part(&w, "d/m-00001-of-00003.gguf", 0, 3, 4, "a");
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/m-00001-of-00003.gguf", &m),
                   "split.tensors.count is 4, but the 3 parts have 3 tensors"));
    gguf_part(&w, "d/model.gguf", 0, 3, 3, "a");
    ASSERT(refused(&w, qlora__gguf_model_open(&w.env, "d/model.gguf", &m),
                   "its name must end in -00001-of-00003.gguf"));
    ASSERT(world_end(&w));
    PASS();
}

static qlora_result do_read_split(world* w) {
    qlora__gguf_model m;
    gguf_part(w, "d/m-00001-of-00002.gguf", 0, 2, 2, "a");
    gguf_part(w, "d/m-00002-of-00002.gguf", 1, 2, 2, "b");
    QLORA__TRY(qlora__gguf_model_open(&w->env, "d/m-00001-of-00002.gguf", &m));
    qlora__gguf_model_close(&w->env, &m);
    return QLORA_OK;
}

// ---- small models ----

// A model of one head; `extra` holds `values` more values, and `tensor` is there besides the
// embedding.
static void gguf_small(world* w, const char* arch, uint64_t layers, const gguf_bytes* extra,
                       uint64_t values, const char* tensor) {
    static const char* const keys[] = {"embedding_length", "feed_forward_length", "context_length",
                                       "attention.head_count", "block_count"};
    const uint64_t numbers[] = {4, 4, 64, 1, layers};
    static gguf_bytes b;
    char key[64];
    gguf_put_head(&b, tensor != NULL ? 2 : 1, 7 + values);
    gguf_put_text(&b, "general.architecture");
    gguf_put_number(&b, QLORA__GGUF_STRING, 4);
    gguf_put_text(&b, arch);
    for (int i = 0; i < 5; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, keys[i]);
        gguf_put_value(&b, key, QLORA__GGUF_U32, numbers[i], 4);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    gguf_put_value(&b, key, QLORA__GGUF_F32, qlora__bits(1e-5f), 4);
    if (values > 0) {
        gguf_put(&b, extra->data, extra->size);
    }
    gguf_put_tensor(&b, "token_embd.weight", 4, 8, 0, 0);
    if (tensor != NULL) {
        gguf_put_tensor(&b, tensor, 4, 4, 0, 128);
    }
    gguf_pad(&b, 32);
    for (int i = 0; i < 128 + 64; i++) {
        gguf_put_number(&b, 0, 1);
    }
    world_put(w, "m.gguf", b.data, b.size);
}

// A tensor that no part of the model would read is refused, not left out.
TEST gguf_tensors_without_a_use_are_refused(void) {
    static const struct {
        const char* tensor;
        const char* refusal; // NULL: none
    } rows[] = {{"blk.1.attn_q.weight", NULL},
                {"blk.0.attn_q.bias", NULL},
                {"blk.0.attn_output.bias", NULL},
                {"blk.0.ffn_down.bias", NULL},
                {"blk.2.attn_q.weight", "blk.2.attn_q.weight: block_count is 2"},
                {"blk.0.attn_norm.bias", "blk.0.attn_norm.bias: norms have no bias"},
                {"blk.0.attn_k.bias", "blk.0.attn_k.bias: blk.0 has no attn_q.bias"},
                {"blk.1.attn_q.bias", "blk.1.attn_q.bias: blk.0 has no attn_q.bias"},
                {"blk.1.attn_output.bias", "blk.0 has no attn_output.bias"},
                {"blk.0.ffn_up.bias", "blk.0 has no ffn_down.bias"}};
    world w;
    qlora__folder f;
    world_begin(&w);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        gguf_small(&w, "llama", 2, NULL, 0, rows[i].tensor);
        qlora_result r = qlora__folder_open(&w.env, "m.gguf", &f);
        if (rows[i].refusal == NULL) {
            ASSERT_EQm(rows[i].tensor, QLORA_OK, r);
            qlora__folder_close(&w.env, &f);
        } else {
            ASSERTm(rows[i].tensor, refused(&w, r, rows[i].refusal));
        }
    }
    ASSERT(world_end(&w));
    PASS();
}

// The pattern as a list of booleans.
static void gguf_pattern(gguf_bytes* b, const char* arch, const char* slides) {
    char key[64];
    b->size = 0;
    snprintf(key, sizeof key, "%s.attention.sliding_window_pattern", arch);
    gguf_put_text(b, key);
    gguf_put_number(b, QLORA__GGUF_ARRAY, 4);
    gguf_put_number(b, QLORA__GGUF_BOOL, 4);
    gguf_put_number(b, strlen(slides), 8);
    for (const char* at = slides; *at != '\0'; at++) {
        gguf_put_number(b, *at == '1', 1);
    }
}

// llama.cpp has a window of its own where these files name none, and its own pattern, whatever a
// list says.
TEST gguf_windows_are_those_of_llama_cpp(void) {
    world w;
    qlora_model_config c;
    static gguf_bytes extra;
    world_begin(&w);
    gguf_small(&w, "gemma2", 4, NULL, 0, NULL);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m.gguf", &c));
    ASSERT_EQ(4096, c.window);
    ASSERT(c.sliding[0] && !c.sliding[1] && c.sliding[2] && !c.sliding[3]);
    gguf_small(&w, "exaone4", 64, NULL, 0, NULL);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m.gguf", &c));
    ASSERT(c.window == 4096 && c.sliding[62] && !c.sliding[63] && c.no_rope[63]);
    gguf_small(&w, "exaone4", 32, NULL, 0, NULL);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m.gguf", &c));
    ASSERT_EQ(0, c.window);
    gguf_small(&w, "gemma3", 4, NULL, 0, NULL);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m.gguf", &c));
    ASSERT_EQ(0, c.window);
    gguf_pattern(&extra, "gemma2", "1010");
    gguf_small(&w, "gemma2", 4, &extra, 1, NULL);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m.gguf", &c));
    ASSERT(c.sliding[0] && !c.sliding[1] && c.sliding[2] && !c.sliding[3]);
    gguf_pattern(&extra, "gemma2", "1110");
    gguf_small(&w, "gemma2", 4, &extra, 1, NULL);
    ASSERT(refused(&w, qlora__config_read(&w.env, "m.gguf", &c),
                   "gemma2.attention.sliding_window_pattern[1] is true"));
    ASSERT(world_end(&w));
    PASS();
}

// ---- tensor types ----

// The same random blocks give the same values, bit for bit, with every compiler; the sums were
// taken from values that had been compared with llama.cpp's.
TEST gguf_blocks_widen_the_same_everywhere(void) {
    static const struct {
        const char* name;
        uint64_t sum;
    } sums[] = {
        {"F32", 0x6a864c1ee0cefc46u},    {"F16", 0xeb4cb907cb4f9cabu},
        {"BF16", 0xab7d64e1daa684abu},   {"Q8_0", 0xd66bda4c3f9e181du},
        {"Q4_0", 0x4a815f6541123d50u},   {"Q4_1", 0x990e41878a655ee9u},
        {"Q5_0", 0x3c2c7d2eb36652fcu},   {"Q5_1", 0xda8f61440a4ba2fcu},
        {"Q2_K", 0x965f31be44228f60u},   {"Q3_K", 0x25d0af9e3f78aa04u},
        {"Q4_K", 0xc464370be0827741u},   {"Q5_K", 0x219399a86adf9fc9u},
        {"Q6_K", 0x19b96d097ab217cfu},   {"IQ4_NL", 0x0c94a68825768f9au},
        {"IQ4_XS", 0xc7dc4bf2ae8c0e7au}, {"MXFP4", 0x83533efb8714d4e7u},
    };
    for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
        const qlora__gguf_type* type = qlora__gguf_type_named(sums[i].name);
        uint8_t block[256];
        float out[256];
        uint32_t state = 12345;
        uint64_t sum = 0;
        ASSERT(type != NULL && type->widen != NULL);
        for (int k = 0; k < 200; k++) {
            for (uint32_t j = 0; j < type->bytes; j++) {
                state = state * 1664525u + 1013904223u;
                block[j] = (uint8_t)(state >> 24);
            }
            type->widen(block, out);
            for (uint32_t j = 0; j < type->block; j++) {
                uint32_t bits = qlora__bits(out[j]);
                bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits; // any NaN
                sum = qlora__fnv(&bits, 4, sum);
            }
        }
        ASSERT_EQm(type->name, sums[i].sum, sum);
    }
    PASS();
}

// Quantised and widened again, a value is at most half a step away, and the codes follow
// llama.cpp's rules.
TEST gguf_blocks_are_packed(void) {
    static const char* const names[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0"};
    static const float limits[] = {0.0f, 0.0005f, 0.004f, 0.0045f, 0.13f};
    test_random random = test_random_start("gguf_blocks_are_packed");
    for (int i = 0; i < 5; i++) {
        const qlora__gguf_type* type = qlora__gguf_type_named(names[i]);
        float in[32];
        float out[32];
        uint8_t bytes[128];
        ASSERT(type != NULL && type->pack != NULL);
        for (int k = 0; k < 100; k++) {
            float most = 0.0f;
            test_random_fill(&random, in, 32, 1.0f);
            for (int j = 0; j < 32; j++) {
                in[j] = k == 0 ? 0.0f : in[j];
                most = fabsf(in[j]) > most ? fabsf(in[j]) : most;
            }
            qlora__gguf_pack(type, in, 32, bytes);
            qlora__gguf_widen(type, bytes, 32, out);
            for (int j = 0; j < 32; j++) {
                ASSERTm(names[i], fabsf(in[j] - out[j]) <= limits[i] * most);
            }
        }
    }
    // The value of largest magnitude sets the scale of Q4_0, with its sign; a half rounds away
    // from zero in Q8_0.
    float in[32];
    uint8_t bytes[34];
    memset(in, 0, sizeof in);
    in[3] = -2.0f;
    in[20] = 1.9f;
    qlora__gguf_pack(qlora__gguf_type_named("Q4_0"), in, 32, bytes);
    ASSERT_EQ(0x34, bytes[1]); // 0.25 as a half
    ASSERT_EQ(0x80, bytes[2 + 3] & 0x8F);
    ASSERT_EQ(15, bytes[2 + 4] >> 4);
    in[3] = 127.0f;
    in[20] = -2.5f;
    qlora__gguf_pack(qlora__gguf_type_named("Q8_0"), in, 32, bytes);
    ASSERT_EQ(127, bytes[2 + 3]);
    ASSERT_EQ(-3, (int8_t)bytes[2 + 20]);
    // The reciprocal of the scale of such values is no finite number.
    for (int i = 0; i < 32; i++) {
        in[i] = i == 0 ? 0.0f : 1e-38f;
    }
    qlora__gguf_pack(qlora__gguf_type_named("Q4_0"), in, 32, bytes);
    for (int i = 0; i < 18; i++) {
        ASSERT_EQ(i < 2 ? 0 : 0x88, bytes[i] & (i == 1 ? 0x7F : 0xFF)); // the sign of zero is free
    }
    qlora__gguf_pack(qlora__gguf_type_named("Q8_0"), in, 32, bytes);
    for (int i = 0; i < 34; i++) {
        ASSERT_EQ(0, bytes[i]);
    }
    PASS();
}

// ---- the shared folder ----

#ifndef _WIN32

TEST gguf_blocks_equal_the_reference(void) {
    world w;
    char path[512];
    char name[64];
    int64_t values = 0;
    static qlora__gguf_file f;
    static qlora__st st;
    world_real(&w);
    for (size_t i = 0; i < QLORA__GGUF_TYPES && qlora__gguf_types[i].widen != NULL; i++) {
        snprintf(name, sizeof name, "gguf/blocks/%s.gguf", qlora__gguf_types[i].name);
        bool exists = false;
        ASSERT_EQ(QLORA_OK,
                  qlora__file_exists(&w.env, shared_path(path, sizeof path, name), &exists));
        if (!exists) {
            ASSERT(world_end(&w));
            SKIPm("the shared folder was not found");
        }
        ASSERT_EQ(QLORA_OK, qlora__gguf_file_open(&w.env, path, &f));
        snprintf(name, sizeof name, "gguf/blocks/%s.f32.safetensors", qlora__gguf_types[i].name);
        ASSERT_EQ(QLORA_OK, qlora__st_open(&w.env, shared_path(path, sizeof path, name), &st));
        ASSERT_EQ(st.count, f.count);
        for (uint32_t k = 0; k < f.count; k++) {
            const qlora__gguf_tensor* t = &f.tensors[k];
            const qlora__st_tensor* want = qlora__st_find(&st, t->name);
            ASSERT(want != NULL && want->bytes == t->elements * 4);
            float* got = (float*)malloc((size_t)want->bytes);
            ASSERT(got != NULL);
            qlora__gguf_widen(t->type, t->data, t->elements, got);
            ASSERT_EQm(t->type->name, 0, memcmp(got, want->data, (size_t)want->bytes));
            free(got);
            values += (int64_t)t->elements;
        }
        qlora__st_close(&w.env, &st);
        qlora__gguf_close(&w.env, &f);
    }
    ASSERT_EQ(231527, values);
    ASSERT(world_end(&w));
    PASS();
}

// ---- models ----

// The logits of a model from a file, for the first `count` sequences of the golden input; compared
// with `want`. Returns the largest difference as a share of the largest logit, or -1.
static double gguf_logits_error(qlora_ctx* ctx, const char* path, const qlora__st_tensor* ids,
                                const qlora__st_tensor* want, int64_t count) {
    qlora_model_desc desc;
    qlora_model* model = NULL;
    int32_t lengths[8];
    double worst = 0.0;
    double most = 0.0;
    int64_t seq = ids->shape[2];
    size_t values = (size_t)(count * seq * want->shape[2]);
    memset(&desc, 0, sizeof desc);
    desc.dir = path;
    desc.base = QLORA_BASE_32BIT;
    desc.mode = QLORA_MODE_F32;
    desc.rank = -1;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = count * seq;
    if (qlora_model_open(ctx, &desc, &model) != QLORA_OK) {
        printf("\n%s\n", qlora_last_error(ctx));
        return -1.0;
    }
    float* got = (float*)malloc(values * sizeof *got);
    int32_t* input = (int32_t*)malloc((size_t)(count * seq) * sizeof *input);
    memcpy(input, ids->data, (size_t)(count * seq) * sizeof *input);
    for (int64_t i = 0; i < count; i++) {
        lengths[i] = (int32_t)seq;
    }
    qlora_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.ids = input;
    batch.labels = input;
    batch.lengths = lengths;
    batch.count = count;
    bool ran = got && qlora_eval_logits(model, &batch, got) == QLORA_OK;
    for (size_t i = 0; i < values && ran; i++) {
        float x = 0.0f;
        qlora__st_read_f32(want, i, 1, &x);
        double off = fabs((double)x - (double)got[i]);
        worst = off > worst || off != off ? off : worst;
        most = fabs((double)x) > most ? fabs((double)x) : most;
    }
    free(got);
    free(input);
    qlora_model_close(model);
    return ran ? worst / most : -1.0;
}

TEST gguf_models_give_the_golden_logits(void) {
    static const struct {
        const char* file;
        const char* folder;
        const char* logits; // NULL: base_logits of the folder
        double limit;
    } rows[] = {
        {"models/llama-q8_0", "llama", NULL, 0.02},
        {"models/stories260K-bf16", "stories260K", NULL, 1e-5},
        {"models/qwen2-f16", "qwen2", NULL, 1e-5},
        {"models/qwen3-bf16-00001-of-00002", "qwen3", NULL, 1e-5},
        {"models/llama3-rope-bf16", "llama3-rope", NULL, 1e-5},
        {"models/phi3-longrope-bf16", "phi3-longrope", NULL, 1e-5},
        {"models/gemma-bf16", "gemma", NULL, 1e-5},
        {"models/smollm3-bf16", "smollm3", NULL, 1e-5},
        {"models/olmo2-bf16", "olmo2", NULL, 1e-5},
        {"models/seed_oss-bf16", "seed_oss", NULL, 1e-5},
        {"extra/gemma2-bf16", "gemma2", "extra/gemma2-bf16", 1e-5},
        {"extra/gemma3-bf16", "gemma3", "extra/gemma3-bf16", 1e-5},
        {"extra/llama-hd128-mixed", "llama-hd128", "extra/llama-hd128-mixed", 1e-5},
    };
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    world w;
    static qlora__st golden;
    static qlora__st extra;
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    world_real(&w);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[200];
        char path[512];
        bool exists = false;
        snprintf(name, sizeof name, "fixtures/%s/golden.safetensors", rows[i].folder);
        shared_path(path, sizeof path, name);
        ASSERT_EQ(QLORA_OK, qlora__file_exists(&w.env, path, &exists));
        if (!exists) {
            qlora_ctx_destroy(ctx);
            SKIPm("the shared folder was not found");
        }
        ASSERT_EQ(QLORA_OK, qlora__st_open(&w.env, path, &golden));
        const qlora__st_tensor* want = qlora__st_find(&golden, "base_logits");
        if (rows[i].logits) {
            snprintf(name, sizeof name, "gguf/%s.logits.safetensors", rows[i].logits);
            ASSERT_EQ(QLORA_OK,
                      qlora__st_open(&w.env, shared_path(path, sizeof path, name), &extra));
            want = qlora__st_find(&extra, "logits");
        }
        snprintf(name, sizeof name, "gguf/%s.gguf", rows[i].file);
        double error =
            gguf_logits_error(ctx, shared_path(path, sizeof path, name),
                              qlora__st_find(&golden, "input_ids"), want, want->shape[0]);
        if (!(error >= 0.0 && error <= rows[i].limit)) {
            printf("\n%s: error %g, limit %g\n", rows[i].file, error, rows[i].limit);
        }
        ASSERTm(rows[i].file, error >= 0.0 && error <= rows[i].limit);
        qlora__st_close(&w.env, &golden);
        if (rows[i].logits) {
            qlora__st_close(&w.env, &extra);
        }
    }
    qlora_ctx_destroy(ctx);
    ASSERT(world_end(&w));
    PASS();
}

static bool gguf_eval(qlora_model* model, float* out) {
    static const int32_t ids[16] = {1, 5, 9, 200, 7, 7, 30, 31, 2, 99, 100, 101, 64, 50, 3, 4};
    const int32_t length = 16;
    qlora_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    return qlora_eval_logits(model, &batch, out) == QLORA_OK;
}

static void gguf_eval_desc(qlora_model_desc* desc, const char* path) {
    memset(desc, 0, sizeof *desc);
    desc->dir = path;
    desc->base = QLORA_BASE_32BIT;
    desc->mode = QLORA_MODE_F32;
    desc->rank = -1;
    desc->purpose = QLORA_PURPOSE_EVALUATE;
    desc->tokens = 16;
}

// Random values for the adapter of a model, the same for every model of its shape.
static bool gguf_scramble(qlora_model* model) {
    test_random random = test_random_start("gguf_scramble");
    qlora_model_info info;
    bool good = qlora_model_query(model, &info) == QLORA_OK;
    for (int64_t i = 0; good && i < info.parameters; i++) {
        qlora_parameter_info p;
        good = qlora_parameter_query(model, i, &p) == QLORA_OK;
        float* values = (float*)malloc((size_t)(p.rows * p.cols) * sizeof *values);
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.1f);
        good = good && qlora_parameter_write(model, i, values) == QLORA_OK;
        free(values);
    }
    return good;
}

// The merged file gives the logits of the model with its adapter; permuted rows are stored in the
// order that such files have.
TEST gguf_models_are_merged(void) {
    static const struct {
        const char* name;
        qlora_dtype dtype;
        qlora_gguf_format format;
        double limit; // on the largest difference, as a share of the largest logit
    } kinds[] = {{"F32", QLORA_F32, QLORA_GGUF_AS_DTYPE, 1e-5},
                 {"BF16", QLORA_BF16, QLORA_GGUF_AS_DTYPE, 0.05},
                 {"F16", QLORA_F16, QLORA_GGUF_AS_DTYPE, 0.02},
                 {"Q8_0", QLORA_F32, QLORA_GGUF_Q8_0, 0.15},
                 {"Q4_0", QLORA_F32, QLORA_GGUF_Q4_0, 1.5}};
    const char* out = test_path("merged.gguf");
    static float want[16 * 1024];
    static float got[16 * 1024];
    char path[512];
    qlora_ctx_desc machine;
    qlora_model_desc desc;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    shared_path(path, sizeof path, "gguf/models/llama-q8_0.gguf");
    FILE* file = fopen(path, "rb");
    if (!file) {
        SKIPm("the shared folder was not found");
    }
    fclose(file);
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    gguf_eval_desc(&desc, path);
    desc.rank = 4;
    desc.purpose = QLORA_PURPOSE_TRAIN;
    ASSERT_EQ(QLORA_OK, qlora_model_open(ctx, &desc, &model));
    qlora_model_info info;
    ASSERT_EQ(QLORA_OK, qlora_model_query(model, &info));
    size_t n = 16 * (size_t)info.plan->config.vocab;
    ASSERT(n <= sizeof want / sizeof want[0]);
    ASSERT(gguf_scramble(model));
    ASSERT(gguf_eval(model, want));
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        qlora_merge_desc merge;
        qlora_model* merged = NULL;
        double worst = 0.0;
        double most = 0.0;
        memset(&merge, 0, sizeof merge);
        merge.dir = out;
        merge.dtype = kinds[k].dtype;
        merge.gguf = kinds[k].format;
        remove(out);
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_merge_save(model, &merge));
        static qlora__gguf_file f;
        ASSERT_EQ(QLORA_OK, qlora__gguf_file_open(&ctx->env, out, &f));
        const qlora__gguf_tensor* t = qlora__gguf_tensor_find(&f, "blk.0.attn_q.weight");
        ASSERT(t != NULL);
        ASSERT_STR_EQ(kinds[k].name, t->type->name);
        ASSERT_STR_EQ("F32", qlora__gguf_tensor_find(&f, "output_norm.weight")->type->name);
        ASSERT(qlora__gguf_find(&f.meta, "tokenizer.ggml.tokens") != NULL);
        qlora__gguf_close(&ctx->env, &f);
        gguf_eval_desc(&desc, out);
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_model_open(ctx, &desc, &merged));
        ASSERT(gguf_eval(merged, got));
        for (size_t i = 0; i < n; i++) {
            double off = fabs((double)want[i] - (double)got[i]);
            worst = off > worst ? off : worst;
            most = fabs((double)want[i]) > most ? fabs((double)want[i]) : most;
        }
        if (!(worst <= kinds[k].limit * most)) {
            printf("\n%s: %g\n", kinds[k].name, worst / most);
        }
        ASSERTm(kinds[k].name, worst <= kinds[k].limit * most);
        ASSERT_EQ(QLORA_OK, qlora_model_close(merged));
        ASSERT(qlora_merge_save(model, &merge) == QLORA_ERR_ARGUMENT);
        ASSERT(strstr(qlora_last_error(ctx), "already exists; choose another name"));
    }
    qlora_merge_desc merge;
    memset(&merge, 0, sizeof merge);
    merge.dir = test_path("merged");
    merge.gguf = QLORA_GGUF_Q8_0;
    ASSERT(qlora_merge_save(model, &merge) == QLORA_ERR_ARGUMENT);
    remove(out);
    ASSERT_EQ(QLORA_OK, qlora_model_close(model));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- folders from files ----

static const char* const gguf_folder_files[] = {"config.json", "model.safetensors",
                                                "tokenizer.json", "tokenizer_config.json",
                                                "chat_template.jinja"};

static const char* gguf_in_folder(const char* dir, const char* name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void gguf_folder_drop(const char* dir) {
    for (size_t i = 0; i < sizeof gguf_folder_files / sizeof gguf_folder_files[0]; i++) {
        remove(gguf_in_folder(dir, gguf_folder_files[i]));
    }
    remove(dir);
}

// Opens a model with a random adapter and merges it into a folder; `logits` is what it gives, and
// may be NULL.
static qlora_result gguf_unpack(qlora_ctx* ctx, const char* path, const char* dir, float* logits) {
    qlora_model_desc desc;
    qlora_merge_desc merge;
    qlora_model* model = NULL;
    gguf_eval_desc(&desc, path);
    desc.rank = 4;
    desc.purpose = QLORA_PURPOSE_TRAIN;
    QLORA__TRY(qlora_model_open(ctx, &desc, &model));
    memset(&merge, 0, sizeof merge);
    merge.dir = dir;
    bool good = gguf_scramble(model) && (logits == NULL || gguf_eval(model, logits));
    qlora_result r = good ? qlora_merge_save(model, &merge) : QLORA_ERR_STATE;
    qlora_model_close(model);
    return r;
}

// The difference of the logits of a folder from those wanted, as a share of the largest.
static double gguf_folder_error(qlora_ctx* ctx, const char* dir, const float* want, float* got) {
    qlora_model_desc desc;
    qlora_model* model = NULL;
    qlora_model_info info;
    double worst = 0.0;
    double most = 0.0;
    gguf_eval_desc(&desc, dir);
    if (qlora_model_open(ctx, &desc, &model) != QLORA_OK) {
        return -1.0;
    }
    bool good = gguf_eval(model, got) && qlora_model_query(model, &info) == QLORA_OK;
    for (int64_t i = 0; good && i < 16 * info.plan->config.vocab; i++) {
        double off = fabs((double)want[i] - (double)got[i]);
        worst = off > worst ? off : worst;
        most = fabs((double)want[i]) > most ? fabs((double)want[i]) : most;
    }
    qlora_model_close(model);
    return good ? worst / most : -1.0;
}

static bool gguf_same_bytes(qlora__env* env, const char* a, const char* b) {
    qlora__map x;
    qlora__map y;
    if (qlora__map_open(env, a, &x) != QLORA_OK) {
        return false;
    }
    bool good = qlora__map_open(env, b, &y) == QLORA_OK;
    bool same = good && x.size == y.size && memcmp(x.data, y.data, (size_t)x.size) == 0;
    if (good) {
        qlora__map_close(env, &y);
    }
    qlora__map_close(env, &x);
    return same;
}

// The tokenizer's files for an adapter are those of a merged folder; a model in a folder has them.
TEST gguf_tokenizers_are_saved(void) {
    static const char* const files[] = {"tokenizer.json", "tokenizer_config.json"};
    static char dir[512];
    static char other[512];
    static char path[512];
    static float want[16 * 1024];
    qlora_ctx_desc machine;
    qlora_model_desc d;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    bool exists = false;
    snprintf(dir, sizeof dir, "%s", test_path("unpacked"));
    snprintf(other, sizeof other, "%s", test_path("unpacked_too"));
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    shared_path(path, sizeof path, "gguf/models/llama-q8_0.gguf");
    ASSERT_EQ(QLORA_OK, qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        qlora_ctx_destroy(ctx);
        SKIPm("the shared folder was not found");
    }
    gguf_folder_drop(dir);
    gguf_folder_drop(other);
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, gguf_unpack(ctx, path, dir, want));
    memset(&d, 0, sizeof d);
    d.tokens = 16;
    for (int i = 0; i < 2; i++) {
        d.dir = i == 0 ? path : dir;
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_model_open(ctx, &d, &model));
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_save_tokenizer(model, NULL));
        ASSERT_EQ(i == 0 ? QLORA_OK : QLORA_ERR_UNSUPPORTED,
                  qlora_adapter_save_tokenizer(model, other));
        ASSERT_EQ(QLORA_OK, qlora_model_close(model));
    }
    for (int i = 0; i < 2; i++) {
        char one[512];
        snprintf(one, sizeof one, "%s", gguf_in_folder(dir, files[i]));
        ASSERT(gguf_same_bytes(&ctx->env, one, gguf_in_folder(other, files[i])));
    }
    gguf_folder_drop(dir);
    gguf_folder_drop(other);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// A file becomes a folder with the logits of the model with its adapter. Where the file holds the
// weights of a folder, the merged weights are those of the merged folder, bit for bit.
TEST gguf_models_become_folders(void) {
    static const struct {
        const char* file;
        const char* folder; // with the same weights; NULL: none
    } rows[] = {{"models/llama-q8_0", NULL},
                {"models/stories260K-bf16", "stories260K"},
                {"models/qwen2-f16", NULL},
                {"models/qwen3-bf16-00001-of-00002", "qwen3"},
                {"models/llama3-rope-bf16", "llama3-rope"},
                {"models/phi3-longrope-bf16", "phi3-longrope"},
                {"models/gemma-bf16", "gemma"},
                {"models/smollm3-bf16", "smollm3"},
                {"models/olmo2-bf16", "olmo2"},
                {"models/seed_oss-bf16", "seed_oss"},
                {"extra/gemma2-bf16", "gemma2"},
                {"extra/gemma3-bf16", "gemma3"},
                {"extra/llama-hd128-mixed", NULL}};
    static char dir[512];
    static char other[512];
    static float want[16 * 1024];
    static float got[16 * 1024];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    snprintf(dir, sizeof dir, "%s", test_path("unpacked"));
    snprintf(other, sizeof other, "%s", test_path("unpacked_too"));
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[200];
        char path[512];
        bool exists = false;
        snprintf(name, sizeof name, "gguf/%s.gguf", rows[i].file);
        shared_path(path, sizeof path, name);
        ASSERT_EQ(QLORA_OK, qlora__file_exists(&ctx->env, path, &exists));
        if (!exists) {
            qlora_ctx_destroy(ctx);
            SKIPm("the shared folder was not found");
        }
        gguf_folder_drop(dir);
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, gguf_unpack(ctx, path, dir, want));
        double error = gguf_folder_error(ctx, dir, want, got);
        if (!(error >= 0.0 && error <= 1e-5)) {
            printf("\n%s: error %g\n", rows[i].file, error);
        }
        ASSERTm(rows[i].file, error >= 0.0 && error <= 1e-5);
        for (size_t k = 0; k < sizeof gguf_folder_files / sizeof gguf_folder_files[0]; k++) {
            const char* file = gguf_in_folder(dir, gguf_folder_files[k]);
            ASSERT_EQ(QLORA_OK, qlora__file_exists(&ctx->env, file, &exists));
            ASSERTm(file, exists);
        }
        ASSERT(gguf_unpack(ctx, path, dir, NULL) == QLORA_ERR_ARGUMENT);
        if (rows[i].folder) {
            snprintf(name, sizeof name, "fixtures/%s/model", rows[i].folder);
            gguf_folder_drop(other);
            ASSERT_EQm(qlora_last_error(ctx), QLORA_OK,
                       gguf_unpack(ctx, shared_path(path, sizeof path, name), other, NULL));
            snprintf(path, sizeof path, "%s", gguf_in_folder(dir, "model.safetensors"));
            ASSERTm(rows[i].file,
                    gguf_same_bytes(&ctx->env, path, gguf_in_folder(other, "model.safetensors")));
        }
    }
    gguf_folder_drop(dir);
    gguf_folder_drop(other);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// A folder becomes a file that gives the same logits, or is refused because GGUF cannot express it.
// The file becomes a folder with these logits again.
TEST gguf_files_from_folders(void) {
    static const struct {
        const char* folder;
        const char* refusal; // NULL: none
    } rows[] = {{"llama", NULL},
                {"llama3-rope", NULL},
                {"stories260K", NULL},
                {"qwen2", NULL},
                {"qwen3", NULL},
                {"gemma", NULL},
                {"phi3-longrope", NULL},
                {"smollm3", NULL},
                {"olmo2", NULL},
                {"olmo3", "(the rotation)"},
                {"granite", NULL},
                {"glm4", NULL},
                {"glm", NULL},
                {"ministral3", NULL},
                {"seed_oss", NULL},
                {"../blocks/arcee", NULL},
                {"../blocks/cohere2", NULL},
                {"../experts/mixtral", NULL},
                {"../experts/qwen2moe", NULL},
                {"../experts/qwen3moe", "(layers without experts)"},
                {"../experts/olmoe", NULL},
                {"../experts/granitemoe", NULL},
                {"../experts/granite4moe", NULL},
                {"../experts/glm4moe", NULL},
                {"gemma2", "(the attention scale)"},
                {"gemma3", "(the attention scale)"}};
    const char* out = test_path("folder.gguf");
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    world w;
    static qlora__st golden;
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    world_real(&w);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[200];
        char path[512];
        bool exists = false;
        qlora_model_desc desc;
        qlora_model* model = NULL;
        qlora_merge_desc merge;
        snprintf(name, sizeof name, "fixtures/%s/golden.safetensors", rows[i].folder);
        shared_path(path, sizeof path, name);
        ASSERT_EQ(QLORA_OK, qlora__file_exists(&w.env, path, &exists));
        if (!exists) {
            qlora_ctx_destroy(ctx);
            SKIPm("the shared folder was not found");
        }
        ASSERT_EQ(QLORA_OK, qlora__st_open(&w.env, path, &golden));
        snprintf(name, sizeof name, "fixtures/%s/model", rows[i].folder);
        gguf_eval_desc(&desc, shared_path(path, sizeof path, name));
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_model_open(ctx, &desc, &model));
        memset(&merge, 0, sizeof merge);
        merge.dir = out;
        remove(out);
        qlora_result r = qlora_merge_save(model, &merge);
        if (rows[i].refusal) {
            ASSERTm(rows[i].folder, r == QLORA_ERR_UNSUPPORTED);
            ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), rows[i].refusal));
            ASSERTm(rows[i].folder, fopen(out, "rb") == NULL);
        } else {
            ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, r);
            const qlora__st_tensor* want = qlora__st_find(&golden, "base_logits");
            double error = gguf_logits_error(ctx, out, qlora__st_find(&golden, "input_ids"), want,
                                             want->shape[0]);
            if (!(error >= 0.0 && error <= 1e-5)) {
                printf("\n%s: error %g\n", rows[i].folder, error);
            }
            ASSERTm(rows[i].folder, error >= 0.0 && error <= 1e-5);
            qlora_model* file = NULL;
            snprintf(path, sizeof path, "%s", test_path("repacked"));
            gguf_eval_desc(&desc, out);
            ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_model_open(ctx, &desc, &file));
            merge.dir = path;
            gguf_folder_drop(path);
            ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_merge_save(file, &merge));
            ASSERT_EQ(QLORA_OK, qlora_model_close(file));
            error = gguf_logits_error(ctx, path, qlora__st_find(&golden, "input_ids"), want,
                                      want->shape[0]);
            ASSERTm(rows[i].folder, error >= 0.0 && error <= 1e-5);
            gguf_folder_drop(path);
        }
        ASSERT_EQ(QLORA_OK, qlora_model_close(model));
        qlora__st_close(&w.env, &golden);
    }
    remove(out);
    qlora_ctx_destroy(ctx);
    ASSERT(world_end(&w));
    PASS();
}

typedef struct gguf_log {
    char text[4096];
    char error[1024];
} gguf_log;

static void gguf_log_add(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                         const char* file, int line) {
    gguf_log* log = (gguf_log*)user;
    size_t used = strlen(log->text);
    (void)item;
    (void)file;
    (void)line;
    if (level == QLORA_LOG_WARN) {
        snprintf(log->text + used, sizeof log->text - used, "%s\n", text);
    }
}

// Opens a fixture, lets `change` change its config, merges it, and reads the config of the file.
static qlora_result gguf_changed(qlora_ctx* ctx, const char* folder,
                                 void (*change)(qlora_model_config*), qlora_model_config* got,
                                 char* error, size_t size) {
    const char* out = test_path("changed.gguf");
    char name[200];
    char path[512];
    qlora_model_desc desc;
    qlora_model* model = NULL;
    qlora_merge_desc merge;
    snprintf(name, sizeof name, "fixtures/%s/model", folder);
    gguf_eval_desc(&desc, shared_path(path, sizeof path, name));
    QLORA__TRY(qlora_model_open(ctx, &desc, &model));
    change(&model->plan.config);
    memset(&merge, 0, sizeof merge);
    merge.dir = out;
    remove(out);
    qlora_result r = qlora_merge_save(model, &merge);
    r = r == QLORA_OK ? qlora__config_read(&ctx->env, out, got) : r;
    snprintf(error, size, "%s", qlora_last_error(ctx));
    qlora_model_close(model);
    remove(out);
    return r;
}

static void change_query_period(qlora_model_config* c) {
    c->rope.type = QLORA_ROPE_DEFAULT;
    c->rope.factor = 1.0;
    c->rope.original_max_position = 0.0;
    c->rope_sliding = c->rope;
    c->query_period = 32.0;
}

static void change_windows(qlora_model_config* c) {
    c->attention_scale = 1.0 / sqrt((double)c->head_dim);
    memset(c->sliding, 1, (size_t)c->layers);
}

static void change_windows_oddly(qlora_model_config* c) {
    change_windows(c);
    c->sliding[0] = 0;
}

static void change_window(qlora_model_config* c) {
    c->window = 7;
    memset(c->sliding, 1, (size_t)c->layers);
}

static void change_stops(qlora_model_config* c) {
    c->bos_id = 5;
    c->stop_count = 2;
    c->stop_ids[0] = 6;
    c->stop_ids[1] = 9;
}

static void change_stops_to_three(qlora_model_config* c) {
    change_stops(c);
    c->stop_count = 3;
    c->stop_ids[2] = 11;
}

static void change_stops_to_four(qlora_model_config* c) {
    change_stops_to_three(c);
    c->stop_count = 4;
    c->stop_ids[3] = 12;
}

static void change_wrapped(qlora_model_config* c) {
    c->wrapped = true;
}

typedef struct gguf_change {
    const char* name;
    const char* folder;
    void (*change)(qlora_model_config*);
    bool (*holds)(const qlora_model_config*); // of the config of the file; NULL = no check
    const char* refusal;                      // NULL: none
    const char* warning;                      // NULL: none about windows
} gguf_change;

static bool has_query_period(const qlora_model_config* c) {
    return fabs(c->query_period - 32.0) < 1e-9;
}

static bool has_windows_everywhere(const qlora_model_config* c) {
    return c->window > 0 && memchr(c->sliding, 0, (size_t)c->layers) == NULL;
}

static bool has_stops(const qlora_model_config* c) {
    return c->bos_id == 5 && c->stop_count == 2 && c->stop_ids[0] == 6 && c->stop_ids[1] == 9;
}

static bool has_three_stops(const qlora_model_config* c) {
    return c->stop_count == 3 && c->stop_ids[1] == 9 && c->stop_ids[2] == 11;
}

static bool has_the_wrappers_name(const qlora_model_config* c) {
    return c->family == QLORA_FAMILY_MINISTRAL3; // the row of "mistral3", not of "llama"
}

static const gguf_change gguf_changes[] = {
    {"period", "ministral3", change_query_period, has_query_period, NULL, NULL},
    {"windows", "gemma2", change_windows, has_windows_everywhere, NULL, NULL},
    {"odd_windows", "gemma2", change_windows_oddly, NULL, "(layers with a window)", NULL},
    {"stops", "llama", change_stops, has_stops, NULL, NULL},
    {"three_stops", "llama", change_stops_to_three, has_three_stops, NULL, NULL},
    {"four_stops", "llama", change_stops_to_four, has_three_stops, NULL, "has 4 stop ids"},
    {"wrapped", "mistral", change_wrapped, has_the_wrappers_name, NULL, "architecture (mistral3)"},
    {"ignored_window", "mistral", change_window, NULL, NULL, "ignores the window of 7 tokens"}};

// What the config says is in the file, or the merge is refused, or it warns.
TEST gguf_files_keep_the_config(const gguf_change* row) {
    static gguf_log log;
    char path[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora_model_config c;
    FILE* file = fopen(shared_path(path, sizeof path, "fixtures/llama/model/config.json"), "rb");
    if (!file) {
        SKIPm("the shared folder was not found");
    }
    fclose(file);
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    machine.log = gguf_log_add;
    machine.log_user = &log;
    memset(&log, 0, sizeof log);
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    qlora_result r = gguf_changed(ctx, row->folder, row->change, &c, log.error, sizeof log.error);
    ASSERT_EQm(log.error, row->refusal == NULL ? QLORA_OK : QLORA_ERR_UNSUPPORTED, r);
    ASSERTm(log.error, row->refusal == NULL || strstr(log.error, row->refusal));
    ASSERT(row->holds == NULL || row->holds(&c));
    ASSERTm(log.text, strstr(log.text, row->warning != NULL ? row->warning : "") != NULL);
    ASSERTm(log.text, row->warning != NULL || strstr(log.text, "window") == NULL);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- config.json of a folder from a file ----

static void family_set(qlora_model* m, qlora_family family) {
    m->plan.config.family = family;
    m->arch = qlora__arch_of(family);
}

static void rope_set(qlora_model* m, qlora_rope_type type, double theta) {
    qlora_rope_desc* rope = &m->plan.config.rope;
    memset(rope, 0, sizeof *rope);
    rope->type = type;
    rope->theta = theta;
    rope->factor = 4.0;
    rope->original_max_position = 64.0;
    rope->beta_fast = 32.0;
    rope->beta_slow = 1.0;
    m->plan.config.rope_sliding = *rope;
}

static void to_qwen2_vl(qlora_model* m) {
    family_set(m, QLORA_FAMILY_QWEN2_5_VL);
}

static void to_qwen3_vl(qlora_model* m) {
    family_set(m, QLORA_FAMILY_QWEN3_VL);
}

static void to_mistral3(qlora_model* m) {
    family_set(m, QLORA_FAMILY_MINISTRAL3);
}

static void to_ministral3(qlora_model* m) {
    family_set(m, QLORA_FAMILY_MINISTRAL3);
    m->plan.config.query_beta = (double)0.1f;
    m->plan.config.query_period = 64.0;
}

// Its layers with a window have a base of their own, which the older keys cannot say.
static void to_olmo3(qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    family_set(m, QLORA_FAMILY_OLMO3);
    rope_set(m, QLORA_ROPE_YARN, 2e5);
    memset(&c->rope_sliding, 0, sizeof c->rope_sliding);
    c->rope_sliding.factor = 1.0;
    c->rope_sliding.theta = 2e5;
    c->window = 11;
    memset(c->sliding, 1, (size_t)c->layers);
    c->sliding[1] = 0;
}

static void to_exaone4(qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    family_set(m, QLORA_FAMILY_EXAONE4);
    c->window = 13;
    c->sliding[0] = 1;
    memset(c->no_rope + 1, 1, (size_t)c->layers - 1);
}

static void to_exaone4_without(qlora_model* m) {
    family_set(m, QLORA_FAMILY_EXAONE4);
}

static void to_no_window(qlora_model* m) {
    m->plan.config.window = 0;
    memset(m->plan.config.sliding, 0, (size_t)m->plan.config.layers);
}

static void to_linear(qlora_model* m) {
    rope_set(m, QLORA_ROPE_LINEAR, 10000.0);
}

static void to_yarn(qlora_model* m) {
    rope_set(m, QLORA_ROPE_YARN, 10000.0);
    m->plan.config.rope.mscale = 1.0;
    m->plan.config.rope.mscale_all_dim = (double)0.7f;
}

static void to_louder(qlora_model* m) {
    m->plan.config.rope.attention_factor = 2.5;
}

static void to_stops(qlora_model* m) {
    change_stops(&m->plan.config);
    m->plan.config.rms_eps = (double)1e-6f;
}

static void to_no_stops(qlora_model* m) {
    m->plan.config.stop_count = 0;
    m->plan.config.bos_id = -1;
    m->plan.config.tied = true;
}

static void to_other_divisors(qlora_model* m) {
    m->plan.config.rope.short_factor[9] *= 1.01f;
    m->plan.config.rope.long_factor[9] *= 1.01f;
}

static void to_no_bias(qlora_model* m) {
    m->plan.config.qkv_bias = false;
}

static void to_out_bias(qlora_model* m) {
    m->plan.config.o_bias = true;
}

static void to_mlp_bias(qlora_model* m) {
    m->plan.config.mlp_bias = true;
}

static void to_no_rotation(qlora_model* m) {
    m->plan.config.no_rope[1] = 1;
}

static void to_window(qlora_model* m) {
    m->plan.config.window = 7;
    m->plan.config.sliding[0] = 1;
}

static void to_cap(qlora_model* m) {
    m->plan.config.attention_cap = 50.0;
}

static void to_embedding_scale(qlora_model* m) {
    m->plan.config.embedding_scale = 2.0;
}

static void to_later_switch(qlora_model* m) {
    m->plan.config.rope.original_max_position += 0.5;
}

#define SAME_SECTIONS                                                                              \
    "\"layer_types\": [\n    \"full_attention\",\n    \"full_attention\",\n    "                   \
    "\"full_attention\"\n  ]"

typedef struct gguf_made {
    const char* name;
    const char* file;
    void (*change)(qlora_model*); // NULL: none
    const char* has[3];           // in config.json
    const char* refusal;          // NULL: none
    const char* warning;          // NULL: none
} gguf_made;

static const gguf_made gguf_mades[] = {
    {"llama3",
     "models/llama3-rope-bf16",
     NULL,
     {"\"rope_type\": \"llama3\"", "\"factor\": 32.0",
      "\"original_max_position_embeddings\": 32\n"},
     NULL,
     NULL},
    {"longrope",
     "models/phi3-longrope-bf16",
     NULL,
     {"\"type\": \"longrope\"", "1.0103,", "\"partial_rotary_factor\": 0.75"},
     NULL,
     NULL},
    {"louder",
     "models/phi3-longrope-bf16",
     to_louder,
     {"\"attention_factor\": 2.5", "", ""},
     NULL,
     NULL},
    {"caps",
     "extra/gemma2-bf16",
     NULL,
     {"\"attn_logit_softcapping\": 50.0", "\"final_logit_softcapping\": 30.0",
      "\"query_pre_attn_scalar\": 128"},
     NULL,
     NULL},
    {"gemma3",
     "extra/gemma3-bf16",
     NULL,
     {"\"model_type\": \"gemma3_text\"", "\"rope_local_base_freq\": 10000.0",
      "\"rope_type\": \"linear\""},
     NULL,
     NULL},
    {"no_window",
     "extra/gemma3-bf16",
     to_no_window,
     {"\"sliding_window\": 4096", SAME_SECTIONS, "\"final_logit_softcapping\": null"},
     NULL,
     NULL},
    {"nope",
     "models/smollm3-bf16",
     NULL,
     {"\"no_rope_layers\": [\n    1,\n    1,\n    1,\n    0,\n    1\n  ]",
      "\"use_sliding_window\": false", "\"mlp_bias\": false"},
     NULL,
     NULL},
    {"biases",
     "models/seed_oss-bf16",
     NULL,
     {"\"attention_bias\": true", "\"attention_out_bias\": false", "\"head_dim\": 128"},
     NULL,
     NULL},
    {"qwen2_vl",
     "models/qwen2-f16",
     to_qwen2_vl,
     {"\"model_type\": \"qwen2\"", "\"Qwen2ForCausalLM\"", "\"sliding_window\": null"},
     NULL,
     "only the language part of a model: the folder is a qwen2"},
    {"qwen3_vl",
     "models/qwen3-bf16-00001-of-00002",
     to_qwen3_vl,
     {"\"model_type\": \"qwen3\"", "\"Qwen3ForCausalLM\"", ""},
     NULL,
     "the folder is a qwen3"},
    {"mistral3",
     "models/llama-q8_0",
     to_mistral3,
     {"\"MistralForCausalLM\"", "", ""},
     NULL,
     "the folder is a mistral"},
    {"ministral3",
     "models/llama-q8_0",
     to_ministral3,
     {"\"Ministral3ForCausalLM\"", "\"llama_4_scaling_beta\": 0.1,", "\"rope_parameters\""},
     NULL,
     NULL},
    {"olmo3",
     "models/olmo2-bf16",
     to_olmo3,
     {"\"sliding_attention\": {\n      \"rope_type\": \"default\",\n      \"rope_theta\": 200000.0",
      "\"rope_type\": \"yarn\"", "\"sliding_window\": 11"},
     NULL,
     NULL},
    {"exaone4",
     "models/qwen3-bf16-00001-of-00002",
     to_exaone4,
     {"\"sliding_window\": 13", "\"sliding_attention\",\n    \"full_attention\"", ""},
     NULL,
     NULL},
    {"exaone4_without",
     "models/qwen3-bf16-00001-of-00002",
     to_exaone4_without,
     {"\"sliding_window\": null", "\"full_attention\"", ""},
     NULL,
     NULL},
    {"linear",
     "models/llama-q8_0",
     to_linear,
     {"\"rope_type\": \"linear\"", "\"factor\": 4.0", "\"rope_theta\": 10000.0"},
     NULL,
     NULL},
    {"yarn",
     "models/llama-q8_0",
     to_yarn,
     {"\"beta_fast\": 32.0", "\"mscale_all_dim\": 0.7\n",
      "\"original_max_position_embeddings\": 64,"},
     NULL,
     NULL},
    {"stops",
     "models/llama-q8_0",
     to_stops,
     {"\"eos_token_id\": [\n    6,\n    9\n  ]", "\"bos_token_id\": 5", "\"rms_norm_eps\": 1e-06,"},
     NULL,
     NULL},
    {"no_stops",
     "models/llama-q8_0",
     to_no_stops,
     {"\"eos_token_id\": null", "\"bos_token_id\": null", "\"tie_word_embeddings\": true"},
     NULL,
     NULL},
    {"divisors",
     "models/llama3-rope-bf16",
     to_other_divisors,
     {"", "", ""},
     "rope_freqs.weight is not what rope_type llama3 gives",
     NULL},
    {"no_bias",
     "models/qwen2-f16",
     to_no_bias,
     {"", "", ""},
     "config.json of model_type qwen2 cannot express this model (biases of q, k and v)",
     NULL},
    {"out_bias",
     "models/llama-q8_0",
     to_out_bias,
     {"", "", ""},
     "(biases of attention's output)",
     NULL},
    {"mlp_bias", "models/qwen2-f16", to_mlp_bias, {"", "", ""}, "(biases of the MLP)", NULL},
    {"rotation",
     "models/olmo2-bf16",
     to_no_rotation,
     {"", "", ""},
     "(layers without rotation)",
     NULL},
    {"window", "models/gemma-bf16", to_window, {"", "", ""}, "(the window)", NULL},
    {"cap", "models/llama-q8_0", to_cap, {"", "", ""}, "(the cap of scores)", NULL},
    {"scale",
     "models/llama-q8_0",
     to_embedding_scale,
     {"", "", ""},
     "(the scale of embeddings)",
     NULL},
    {"switch",
     "models/phi3-longrope-bf16",
     to_later_switch,
     {"", "", ""},
     "(the rotation of long texts)",
     NULL}};

// config.json says what the file does, by the keys of its family; what it cannot say is refused
// before anything is written.
TEST gguf_configs_are_made(const gguf_made* row) {
    static gguf_log log;
    char name[200];
    char path[512];
    char dir[512];
    bool exists = false;
    qlora_ctx_desc machine;
    qlora_model_desc desc;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    qlora_merge_desc merge;
    qlora__map map;
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    machine.log = gguf_log_add;
    machine.log_user = &log;
    memset(&log, 0, sizeof log);
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    snprintf(name, sizeof name, "gguf/%s.gguf", row->file);
    shared_path(path, sizeof path, name);
    ASSERT_EQ(QLORA_OK, qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        qlora_ctx_destroy(ctx);
        SKIPm("the shared folder was not found");
    }
    gguf_eval_desc(&desc, path);
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_model_open(ctx, &desc, &model));
    memset(&log, 0, sizeof log);
    if (row->change) {
        row->change(model);
    }
    snprintf(dir, sizeof dir, "%s", test_path("made"));
    gguf_folder_drop(dir);
    memset(&merge, 0, sizeof merge);
    merge.dir = dir;
    qlora_result r = qlora_merge_save(model, &merge);
    ASSERT_EQm(qlora_last_error(ctx), row->refusal ? QLORA_ERR_UNSUPPORTED : QLORA_OK, r);
    if (row->refusal) {
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), row->refusal));
        FILE* left = fopen(dir, "rb"); // not even the folder
        ASSERT(left == NULL);
    } else {
        ASSERT_EQ(QLORA_OK, qlora__map_open(&ctx->env, gguf_in_folder(dir, "config.json"), &map));
        ASSERT(map.size < sizeof log.text);
        char* text = (char*)malloc((size_t)map.size + 1);
        memcpy(text, map.data, (size_t)map.size);
        text[map.size] = '\0';
        qlora__map_close(&ctx->env, &map);
        for (int i = 0; i < 3; i++) {
            if (strstr(text, row->has[i]) == NULL) {
                printf("\n%s\n%s\n", row->has[i], text);
            }
            ASSERTm(row->has[i], strstr(text, row->has[i]) != NULL);
        }
        free(text);
    }
    ASSERTm(log.text, strstr(log.text, row->warning ? row->warning : "") != NULL);
    ASSERTm(log.text, row->warning || strstr(log.text, "language part") == NULL);
    gguf_folder_drop(dir);
    ASSERT_EQ(QLORA_OK, qlora_model_close(model));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- tokenizer.json of a folder from a file ----

static void gguf_put_string(gguf_bytes* b, const char* key, const char* text) {
    gguf_put_text(b, key);
    gguf_put_number(b, QLORA__GGUF_STRING, 4);
    gguf_put_text(b, text);
}

static void gguf_put_strings(gguf_bytes* b, const char* key, const char* const* texts, int count) {
    gguf_put_text(b, key);
    gguf_put_number(b, QLORA__GGUF_ARRAY, 4);
    gguf_put_number(b, QLORA__GGUF_STRING, 4);
    gguf_put_number(b, (uint64_t)count, 8);
    for (int i = 0; i < count; i++) {
        gguf_put_text(b, texts[i]);
    }
}

static void gguf_put_words(gguf_bytes* b, const char* key, uint32_t kind, const uint32_t* words,
                           int count) {
    gguf_put_text(b, key);
    gguf_put_number(b, QLORA__GGUF_ARRAY, 4);
    gguf_put_number(b, kind, 4);
    gguf_put_number(b, (uint64_t)count, 8);
    for (int i = 0; i < count; i++) {
        gguf_put_number(b, words[i], 4);
    }
}

#define GGUF_WORDS 9

// Nine tokens, of either kind; what `fault` names is wrong.
static void gguf_vocabulary(gguf_bytes* b, bool pieces, const char* fault) {
    const char* tokens[GGUF_WORDS] = {"<unk>", "<s>", "a", "b", "ab", "abb", "bb", "<user>", ""};
    static const uint32_t types[GGUF_WORDS] = {2, 3, 1, 1, 1, 1, 1, 4, 5};
    const char* merges[] = {"a b", "b b", "ab b"};
    const float numbers[GGUF_WORDS] = {0, 0, -9, -8, -1, -2, -3, 0, 0};
    uint32_t scores[GGUF_WORDS];
    for (int i = 0; i < GGUF_WORDS; i++) {
        scores[i] = qlora__bits(numbers[i]);
    }
    tokens[6] = strcmp(fault, "twice") == 0 ? "ab" : tokens[6];
    tokens[6] = strcmp(fault, "utf8") == 0 ? "\xFF" : tokens[6];
    merges[1] = strcmp(fault, "merge") == 0 ? "b c" : merges[1];
    merges[1] = strcmp(fault, "blank") == 0 ? "bb" : merges[1];
    merges[1] = strcmp(fault, "joined") == 0 ? "b a" : merges[1];
    uint64_t bos = strcmp(fault, "empty") == 0 ? 8 : 1;
    bool prefix = pieces ? strcmp(fault, "bare") != 0 : strcmp(fault, "prefix") == 0;
    gguf_put_head(b, 0, 10);
    gguf_put_string(b, "tokenizer.ggml.model",
                    strcmp(fault, "model") == 0 ? "t5"
                    : pieces                    ? "llama"
                                                : "gpt2");
    gguf_put_string(b, "tokenizer.ggml.pre", strcmp(fault, "pre") == 0 ? "none" : "smollm");
    gguf_put_strings(b, "tokenizer.ggml.tokens", tokens, GGUF_WORDS);
    gguf_put_words(b, "tokenizer.ggml.token_type", QLORA__GGUF_I32, types, GGUF_WORDS);
    gguf_put_words(b, "tokenizer.ggml.scores", QLORA__GGUF_F32, scores, GGUF_WORDS);
    gguf_put_strings(b, "tokenizer.ggml.merges", merges, 3);
    gguf_put_value(b, "tokenizer.ggml.bos_token_id", QLORA__GGUF_U32, bos, 4);
    gguf_put_value(b, "tokenizer.ggml.add_bos_token", QLORA__GGUF_BOOL, 1, 1);
    gguf_put_value(b, "tokenizer.ggml.add_space_prefix", QLORA__GGUF_BOOL, prefix, 1);
    gguf_put_string(b, "general.name", strcmp(fault, "phi3") == 0 ? "My Phi-3" : "My model");
}

typedef struct gguf_vocab_case {
    const char* name;
    bool pieces;
    const char* has[3];  // in tokenizer.json without its blanks and line breaks
    const char* refusal; // NULL: none
} gguf_vocab_case;

static const gguf_vocab_case gguf_vocab_cases[] = {
    {"bytes",
     false,
     {"\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":"
      "{"
      "\"Regex\":\"\\\\p{N}\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"Split\"",
      "\"vocab\":{\"<unk>\":0,\"<s>\":1,\"a\":2,\"b\":3,\"ab\":4,\"abb\":5,\"bb\":6,\"<user>\":7},"
      "\"merges\":[\"ab\",\"bb\",\"abb\"]",
      "\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\","
      "\"type_"
      "id\":0}}]"},
     NULL},
    {"pieces",
     true,
     {"\"normalizers\":[{\"type\":\"Prepend\"", "\"merges\":[\"ab\",\"abb\",\"abb\",\"bb\"]",
      "{\"id\":7,\"content\":\"<user>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
      "\"normalized\":false,\"special\":false}"},
     NULL},
    {"bare",
     true,
     {"\"normalizers\":[{\"type\":\"Replace\"", "{\"type\":\"Fuse\"}]}", "\"unk_token\":\"<unk>\""},
     NULL},
    {"phi3",
     true,
     {"\"content\":\"<user>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":true",
      "\"content\":\"<s>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false", ""},
     NULL},
    {"model", false, {"", "", ""}, "tokenizer.ggml.model \"t5\" is not supported"},
    {"pre", false, {"", "", ""}, "tokenizer.ggml.pre \"none\" is not known"},
    {"twice", false, {"", "", ""}, "the tokens 4 and 6 have the same text"},
    {"utf8", true, {"", "", ""}, "tokenizer.ggml.tokens[6] is not UTF-8"},
    {"merge", false, {"", "", ""}, "tokenizer.ggml.merges[1] must be two tokens"},
    {"blank", false, {"", "", ""}, "tokenizer.ggml.merges[1] must be two tokens"},
    {"joined", false, {"", "", ""}, "tokenizer.ggml.merges[1] must be two tokens"},
    {"empty", false, {"", "", ""}, "the special token 8 has no text"},
    {"prefix", false, {"", "", ""}, "tokenizer.ggml.add_space_prefix is true"}};

// tokenizer.json says what the vocabulary of the file does, or it is refused by name.
TEST gguf_tokenizers_are_made(const gguf_vocab_case* row) {
    static gguf_bytes b;
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora__gguf g;
    qlora__string text;
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    gguf_vocabulary(&b, row->pieces, row->name);
    ASSERT_EQ(QLORA_OK, qlora__gguf_parse(&ctx->env, "f", b.data, b.size, &g));
    qlora__string_begin(&ctx->env, &text);
    qlora_result r = qlora__merge_make_tokens(ctx, &g, &text);
    ASSERT_EQm(qlora_last_error(ctx), row->refusal == NULL, r == QLORA_OK);
    if (row->refusal) {
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), row->refusal));
    } else {
        size_t n = 0;
        for (size_t i = 0; i < text.size; i++) {
            bool blank = text.data[i] == ' ' || text.data[i] == '\n';
            text.data[n] = text.data[i];
            n += blank ? 0 : 1;
        }
        ASSERT(n < text.size);
        text.data[n] = '\0';
        for (int i = 0; i < 3; i++) {
            ASSERTm(text.data, strstr(text.data, row->has[i]) != NULL);
        }
    }
    qlora__string_free(&text);
    qlora__gguf_free(&ctx->env, &g);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// The chat template, and those with a name, are files of their own; a name that no file can have is
// left out.
TEST gguf_chats_are_made(void) {
    static const char* const files[] = {"chat_template.jinja",
                                        "additional_chat_templates/tool_use.jinja"};
    static gguf_bytes b;
    char dir[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora__gguf g;
    qlora__merge merge;
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    gguf_put_head(&b, 0, 4);
    gguf_put_string(&b, "tokenizer.chat_template.tool_use", "tools");
    gguf_put_string(&b, "tokenizer.chat_template", "plain");
    gguf_put_string(&b, "tokenizer.chat_template.../x", "outside");
    gguf_put_string(&b, "tokenizer.chat_templates", "list");
    ASSERT_EQ(QLORA_OK, qlora__gguf_parse(&ctx->env, "f", b.data, b.size, &g));
    snprintf(dir, sizeof dir, "%s", test_path("chats"));
    memset(&merge, 0, sizeof merge);
    merge.ctx = ctx;
    merge.dir = dir;
    ASSERT_EQ(QLORA_OK, qlora__dir_make(&ctx->env, dir));
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora__merge_put_chats(&merge, &g));
    for (int i = 0; i < 2; i++) {
        qlora__map map;
        ASSERT_EQ(QLORA_OK, qlora__map_open(&ctx->env, gguf_in_folder(dir, files[i]), &map));
        ASSERT_EQ(5, (int)map.size);
        ASSERT(memcmp(map.data, i == 0 ? "plain" : "tools", 5) == 0);
        qlora__map_close(&ctx->env, &map);
        remove(gguf_in_folder(dir, files[i]));
    }
    remove(gguf_in_folder(dir, "additional_chat_templates"));
    ASSERT_EQ(0, remove(dir)); // nothing else is in it
    qlora__gguf_free(&ctx->env, &g);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// Everything that opening a model reads.
static qlora_result gguf_open_all(qlora_ctx* ctx, const char* path) {
    qlora_model_desc desc;
    qlora_model* model = NULL;
    memset(&desc, 0, sizeof desc);
    desc.dir = path;
    desc.base = QLORA_BASE_32BIT;
    desc.mode = QLORA_MODE_F32;
    desc.rank = -1;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = 16;
    QLORA__TRY(qlora_model_open(ctx, &desc, &model));
    return qlora_model_close(model);
}

TEST gguf_hostile_files(void) {
    static const char* const tokens[] = {"scores", "tokens-numbers"}; // of the tokenizer only
    char path[512];
    char line[256];
    int refusals = 0;
    int reads = 0;
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    FILE* list = fopen(shared_path(path, sizeof path, "gguf/hostile/list.tsv"), "rb");
    if (!list) {
        SKIPm("the shared folder was not found");
    }
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    while (fgets(line, sizeof line, list)) {
        char file[64];
        char expected[16];
        char name[128];
        if (sscanf(line, "%63s %15s", file, expected) != 2 || !strstr(file, ".gguf")) {
            continue;
        }
        bool text = false;
        for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
            text = text || strncmp(file, tokens[i], strlen(tokens[i])) == 0;
        }
        snprintf(name, sizeof name, "gguf/hostile/%s", file);
        qlora_result r = gguf_open_all(ctx, shared_path(path, sizeof path, name));
        if (getenv("QLORA_TEST_PRINT")) {
            printf("%s\n    %s\n", file, qlora_last_error(ctx));
        }
        ASSERTm(file, strcmp(expected, "read") != 0 || r == QLORA_OK);
        ASSERTm(file, strcmp(expected, "refuse") != 0 || text || r != QLORA_OK);
        ASSERTm(file, r == QLORA_OK || strstr(qlora_last_error(ctx), file) != NULL);
        reads += r == QLORA_OK;
        refusals += r != QLORA_OK;
    }
    fclose(list);
    ASSERT(reads > 5 && refusals > 40);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}
#endif

SUITE(gguf_suite) {
    RUN_TEST(gguf_values_are_read);
    RUN_TEST(gguf_values_of_the_wrong_kind_are_refused);
    RUN_TEST(gguf_tensors_are_read);
    RUN_TEST(gguf_truncated_files_are_refused);
    RUN_TEST(gguf_faults_are_named);
    RUN_TEST(gguf_duplicates_and_nesting_are_refused);
    RUN_TEST(gguf_split_models);
    RUN_TEST(gguf_tensors_without_a_use_are_refused);
    RUN_TEST(gguf_windows_are_those_of_llama_cpp);
    RUN_TESTp(faults_are_survived, "reading split GGUF", do_read_split, NULL);
    RUN_TEST(gguf_blocks_widen_the_same_everywhere);
    RUN_TEST(gguf_blocks_are_packed);
#ifndef _WIN32
    RUN_TEST(gguf_blocks_equal_the_reference);
    RUN_TEST(gguf_models_give_the_golden_logits);
    RUN_TEST(gguf_models_are_merged);
    RUN_TEST(gguf_tokenizers_are_saved);
    RUN_TEST(gguf_models_become_folders);
    for (size_t i = 0; i < sizeof gguf_mades / sizeof gguf_mades[0]; i++) {
        greatest_set_test_suffix(gguf_mades[i].name);
        RUN_TESTp(gguf_configs_are_made, &gguf_mades[i]);
    }
    for (size_t i = 0; i < sizeof gguf_vocab_cases / sizeof gguf_vocab_cases[0]; i++) {
        greatest_set_test_suffix(gguf_vocab_cases[i].name);
        RUN_TESTp(gguf_tokenizers_are_made, &gguf_vocab_cases[i]);
    }
    RUN_TEST(gguf_chats_are_made);
    RUN_TEST(gguf_files_from_folders);
    for (size_t i = 0; i < sizeof gguf_changes / sizeof gguf_changes[0]; i++) {
        greatest_set_test_suffix(gguf_changes[i].name);
        RUN_TESTp(gguf_files_keep_the_config, &gguf_changes[i]);
    }
    RUN_TEST(gguf_hostile_files);
#endif
}
