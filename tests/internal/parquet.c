// parquet.c - gzip, Snappy, Zstandard, Thrift and Parquet, with files made here and, where they are
// present, those in ../shared/parquet. Included by tokens.c.
#include "parquet_write.h"

SUITE_EXTERN(parquet_suite);

#define SHARED_PARQUET "../shared/parquet/"

static qlora__env parquet_env(void) {
    qlora__env env;
    memset(&env, 0, sizeof env);
    env.one_line = true;
    qlora__hooks_default(&env.allocator, &env.files);
    return env;
}

// The bytes of a string of hexadecimal digits.
static size_t hex_bytes(const char* hex, unsigned char* out) {
    size_t count = 0;
    for (; hex[0] != '\0' && hex[1] != '\0'; hex += 2) {
        unsigned value = 0;
        for (int i = 0; i < 2; i++) {
            unsigned digit = (unsigned)(hex[i] <= '9' ? hex[i] - '0' : hex[i] - 'a' + 10);
            value = value * 16 + digit;
        }
        out[count++] = (unsigned char)value;
    }
    return count;
}

// ---- compressed data, made with Python's gzip and zlib, and with zstandard and python-snappy

// What the samples contain.
static size_t compressible_text(char* out, size_t room) {
    size_t used = 0;
    for (int i = 0; i < 40; i++) {
        used += (size_t)snprintf(out + used, room - used, "line %d of a small sample, %d\n", i,
                                 i * i * 7919 % 1000);
    }
    return used;
}

static const char sample_gzip[] =
    "1f8b08000000000002037d933b6ec3400c057b9f620fe04224f7231e4785030458c7067c7f20319654354e3d"
    "20dedbd1d3fcfeb995ad3cbeca515ef763cef23aeecf79bb96ed32df4c88b9f8a24ab48fbea811d5218b56a2"
    "63ab8b36cc1d6dd14e748fd341d02275c74b89c64eb45abc5650946fa90a5d89e735ca328b6831ae1dbd0575"
    "89c69b057d8df425284c7b5ea3b2e6998dd246cbe6ce383782d67a5a53e195e4355a1b1ed98ad6a44573456b"
    "56e3dd8ad62cad295b3bafd19a9fd968ad9ecdd1da9eef36b42669cd786be9dcd05a7e3033761ac58da5e558"
    "ecffa9d9076941d199e4ca6de7e8a03cb4bf1fec179ac7dabdc7040000";
static const char sample_zlib[] =
    "78da7d933b6ec3400c057b9f620fe04224f7231e4785030458c7067c7f20319654354e3d20dedbd1d3fcfeb9"
    "95ad3cbeca515ef763cef23aeecf79bb96ed32df4c88b9f8a24ab48fbea811d5218b56a263ab8b36cc1d6dd1"
    "4e748fd341d02275c74b89c64eb45abc5650946fa90a5d89e735ca328b6831ae1dbd057589c69b057d8df425"
    "284c7b5ea3b2e6998dd246cbe6ce383782d67a5a53e195e4355a1b1ed98ad6a44573456b56e3dd8ad62cad29"
    "5b3bafd19a9fd968ad9ecdd1da9eef36b42669cd786be9dcd05a7e3033761ac58da5e558ecffa9d9076941d1"
    "99e4ca6de7e8a03cb4bf1fec1718de76ba";
static const char sample_zstd[] =
    "28b52ffd64c703250600b2c81615a0a73900667ffe235f552c8912499292fbd6f0d408c3ef17756eb5a66d6b"
    "5d8d78c33a0d4b53d678d3e46179e5bd76388fdbba765ff95ef333846a74ca2f536c66f6f8f0fb864200452a"
    "18c44152228c8310244020851403410a4ea8619cf8fabf0160a3a4700311241c9012e167f501309b04bf74ce"
    "b040a42a77531e301489f22885b632a93b001102abb027274f4b8b931309cef186d80c6b084da2993165e288"
    "090326cebc1c5d8825034dc63ccf05efac7d90d39d903209c2c68e0746152d93cede";
static const char sample_zstd_best[] =
    "28b52ffd0408850500124b1b14a0a90d805967e40c008c13a5c8eeadbe6a383502c0efa79db6be4ab4f1d2ae"
    "b725d6b14425bbcff3778af75d251aefec8ab5bcebae1225d5f1893e3dfab2126dbceab59666f5b744a7deee"
    "d973cc27d1c7235f5d96ce7a5f804c3018ca212cc6308463318221124366400a234ea8110026dfff0db057da"
    "11242059f8f50e10c6413881198818e15857c3111bda378a2f74f303ddd29a146fa90527583b9ab9a30f4b93"
    "69ed1ee849800748152d93cede";
static const char sample_snappy[] =
    "c7096c6c696e652030206f66206120736d616c6c2073616d706c652c20300a051c00314e1c0008393139091e"
    "00324e1e0008363736091e00334e1e0008323731091e00344e1e0008373034091e00354e1e0008393735091e"
    "00364e1e0000380d3b00374e1d0000330d7600384e1d000438310db200394e1e000434330dee003152290104"
    "3930312b522c01043139113e522d010433330d7b0031522e010433310db80031522f010431320df400315230"
    "01003731300031523101043236113e523301043539117c52350104373511ba5236010437350df80032523601"
    "003631360032523601043237113e5236010437390d7c00325236010431350dba00325236010433340df80032"
    "523601003331360032563601153e5236010039157c523601003415ba523601003811f8003352360100313136"
    "003352360100313174003352360131b10033523501003731ef0033563501512d0033523501556b00335a3501"
    "69b90033523401003151e60033523401712300335233010c3739390a";

// Decodes gzip in steps of `step` bytes through a window.
static bool gunzip_in_steps(const unsigned char* in, size_t size, const char* text, size_t length,
                            size_t step, char* said) {
    static qlora__gzip gzip;
    static unsigned char out[1 << 17];
    qlora__env env = parquet_env();
    size_t at = 0;
    bool ended = false;
    qlora_result r = QLORA_OK;
    qlora__gzip_begin(&gzip, in, size);
    while (r == QLORA_OK && !ended) {
        size_t limit = at + step < sizeof out ? at + step : sizeof out;
        r = qlora__gzip_read(&env, &gzip, out, &at, limit, &ended);
        if (r == QLORA_OK && !ended && at < limit) {
            return false; // it must use the room or end
        }
    }
    snprintf(said, 200, "%.199s", r == QLORA_OK ? "" : env.error);
    return r == QLORA_OK && at == length && memcmp(out, text, length) == 0;
}

TEST gzip_decodes(void) {
    char text[4096];
    char twice[8192];
    char said[200];
    unsigned char in[4096];
    size_t length = compressible_text(text, sizeof text);
    size_t size = hex_bytes(sample_gzip, in);
    static const size_t steps[] = {1, 7, 300, 100000};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        ASSERTm(said, gunzip_in_steps(in, size, text, length, steps[i], said));
    }
    // two members, then padding
    memcpy(in + size, in, size);
    memset(in + 2 * size, 0, 20);
    memcpy(twice, text, length);
    memcpy(twice + length, text, length);
    ASSERTm(said, gunzip_in_steps(in, 2 * size + 20, twice, 2 * length, 1000, said));
    // something else after the member
    in[2 * size] = 'x';
    ASSERT_FALSE(gunzip_in_steps(in, 2 * size + 20, twice, 2 * length, 1000, said));
    ASSERT(strstr(said, "no valid header") != NULL);
    size = hex_bytes(sample_zlib, in);
    ASSERTm(said, gunzip_in_steps(in, size, text, length, 100, said));
    in[size - 1] ^= 1;
    ASSERT_FALSE(gunzip_in_steps(in, size, text, length, 100, said));
    ASSERT(strstr(said, "checksum") != NULL);
    PASS();
}

// Every truncation and every damaged byte is noticed.
TEST gzip_damage(void) {
    char text[4096];
    char said[200];
    unsigned char in[4096];
    size_t length = compressible_text(text, sizeof text);
    size_t size = hex_bytes(sample_gzip, in);
    for (size_t i = 0; i < size; i++) {
        ASSERT_FALSE(gunzip_in_steps(in, i, text, length, 100000, said));
        ASSERT(said[0] != '\0');
    }
    for (size_t i = 0; i < size; i++) {
        in[i] ^= 0x55;
        bool header = i >= 4 && i < 10; // time, flags and system are not used
        ASSERT_EQ(header, gunzip_in_steps(in, size, text, length, 100000, said));
        in[i] ^= 0x55;
    }
    in[size - 1] ^= 1;
    ASSERT_FALSE(gunzip_in_steps(in, size, text, length, 100000, said));
    ASSERT(strstr(said, "member 1: its length is wrong") != NULL);
    PASS();
}

TEST zstd_and_snappy(void) {
    static qlora__zstd zstd;
    static const char* const frames[2] = {sample_zstd, sample_zstd_best};
    char text[4096];
    unsigned char in[4096];
    unsigned char out[4096];
    size_t length = compressible_text(text, sizeof text);
    for (int k = 0; k < 2; k++) {
        size_t size = hex_bytes(frames[k], in);
        size_t refused = 0;
        memset(out, 0, sizeof out);
        ASSERTm(zstd.fault, qlora__zstd_decode(&zstd, in, size, out, length));
        ASSERT_MEM_EQ(text, out, length);
        ASSERT_FALSE(qlora__zstd_decode(&zstd, in, size, out, length - 1));
        ASSERT_FALSE(qlora__zstd_decode(&zstd, in, size, out, length + 1));
        for (size_t i = 0; i < size; i++) {
            ASSERT_FALSE(qlora__zstd_decode(&zstd, in, i, out, length));
        }
        for (size_t i = 6; i < size; i++) { // the text is under the checksum
            in[i] ^= 0x21;
            bool decoded = qlora__zstd_decode(&zstd, in, size, out, length);
            ASSERT(!decoded || memcmp(text, out, length) == 0);
            refused += decoded ? 0 : 1;
            in[i] ^= 0x21;
        }
        ASSERT(refused + 3 > size - 6);
    }
    size_t size = hex_bytes(sample_snappy, in);
    ASSERT(qlora__snappy_decode(in, size, out, length));
    ASSERT_MEM_EQ(text, out, length);
    ASSERT_FALSE(qlora__snappy_decode(in, size, out, length - 1));
    for (size_t i = 0; i < size; i++) {
        ASSERT_FALSE(qlora__snappy_decode(in, i, out, length));
    }
    PASS();
}

// ---- Parquet

// The rows of a file in memory, one per line, or the error.
static const char* rows_of(const void* data, size_t size, char* out, size_t room) {
    qlora__env env = parquet_env();
    qlora__parquet p;
    qlora__string row;
    bool found = true;
    size_t used = 0;
    qlora__string_begin(&env, &row);
    out[0] = '\0';
    qlora_result r = qlora__parquet_open(&env, "x.parquet", data, size, &p);
    bool opened = r == QLORA_OK;
    while (r == QLORA_OK && found) {
        r = qlora__parquet_next(&env, &p, &row, &found);
        if (r == QLORA_OK && found) {
            used += (size_t)snprintf(out + used, room - used, "%.*s\n", (int)row.size, row.data);
        }
    }
    if (r != QLORA_OK) {
        snprintf(out, room, "%s", env.error);
    }
    if (opened) {
        qlora__parquet_close(&env, &p);
    }
    qlora__string_free(&row);
    return env.host_bytes == 0 ? out : "memory was not freed";
}

TEST parquet_made_here(void) {
    static pq_bytes file;
    static const int codecs[] = {0, 1, 2, 6};
    char want[4096];
    char got[4096];
    for (unsigned i = 0; i < 16; i++) {
        unsigned groups = i < 8 ? 1 : 2;
        size_t used = 0;
        for (unsigned k = 0; k < groups * PQ_ROWS; k++) {
            used += (size_t)snprintf(want + used, sizeof want - used, "%s\n", pq_rows[k % PQ_ROWS]);
        }
        pq_make(&file, codecs[i / 2 % 4], i % 2 == 1, groups);
        ASSERT_STR_EQ(want, rows_of(file.data, file.size, got, sizeof got));
    }
    PASS();
}

// The place of a byte string in the file.
static unsigned char* find_bytes(pq_bytes* file, const char* wanted, size_t size) {
    for (size_t i = 0; i + size <= file->size; i++) {
        if (memcmp(file->data + i, wanted, size) == 0) {
            return file->data + i;
        }
    }
    return NULL;
}

#define ASSERT_SAYS(words)                                                                         \
    ASSERTm(got, strstr(rows_of(file.data, file.size, got, sizeof got), words) != NULL)

// What cannot be read is refused by name.
TEST parquet_refused(void) {
    static pq_bytes file;
    static const char* const codecs[] = {"LZO", "BROTLI", "LZ4", "LZ4_RAW", "unknown"};
    static const int numbers[] = {3, 4, 5, 7, 8};
    char got[4096];
    char wanted[80];
    for (int i = 0; i < 5; i++) {
        pq_make(&file, numbers[i], false, 1);
        snprintf(wanted, sizeof wanted, "row group 1, column \"prompt\": the codec %s (number %d)",
                 codecs[i], numbers[i]);
        ASSERT_SAYS(wanted);
    }
    pq_make(&file, 0, false, 1);
    memcpy(file.data + file.size - 4, "PARE", 4);
    ASSERT_SAYS("x.parquet: the file is encrypted");
    memcpy(file.data + file.size - 4, "PAR2", 4);
    ASSERT_SAYS("x.parquet: not a Parquet file");
    // the schema: a DECIMAL, an INT96, a MAP, binary data
    pq_make(&file, 0, false, 1);
    unsigned char* prompt = find_bytes(&file, "\x06prompt\x25", 8) + 8; // its converted type
    *prompt = 2 * 5;
    ASSERT_SAYS("column \"prompt\" is a DECIMAL, which is not supported");
    *prompt = 2 * 9;
    ASSERT_SAYS("column \"prompt\" is a TIMESTAMP");
    *prompt = 2 * 20;
    ASSERT_SAYS("column \"prompt\" is BSON");
    *prompt = 2 * 22;
    ASSERT_SAYS("column \"prompt\" is of an unknown type");
    prompt[-1] = 0x95; // field 13 instead: no annotation
    ASSERT_SAYS("column \"prompt\" is binary data, not a string");
    pq_make(&file, 0, false, 1);
    find_bytes(&file, "\x05score", 6)[-4] = 2 * 3; // the physical type
    ASSERT_SAYS("column \"score\" is an INT96");
    pq_make(&file, 0, false, 1);
    *(find_bytes(&file, "\x08messages\x15\x02\x15", 12) + 12) = 2 * 1;
    ASSERT_SAYS("column \"messages\" is a MAP");
    // integers: -1 in 8 bits without a sign, 64 bits in 32
    pq_make(&file, 0, false, 1);
    unsigned char* old = find_bytes(&file, "\x03old\x25\x1e", 6) + 5;
    *old = 2 * 11;
    ASSERT_SAYS("row 3, column \"old\": 4294967295 does not fit in the 8 bits of its type");
    *old = 2 * 18;
    ASSERT_SAYS("column \"old\" is of an unknown type");
    // the schema and the footer: a column that is required, but has levels
    pq_make(&file, 0, false, 1);
    find_bytes(&file, "\x25\x02\x18\x06prompt", 10)[1] = 0;
    ASSERT_SAYS("column \"prompt\": the footer counts 2 definition levels; its schema has 1");
    // the footer: rows, and a codec that is missing
    pq_make(&file, 0, false, 1);
    find_bytes(&file, "\x16\x06\x19\x1c", 4)[1] = 2 * 4;
    ASSERT_SAYS("x.parquet: the row groups do not have as many rows as the file");
    pq_make(&file, 0, false, 1);
    *(find_bytes(&file, "\x06prompt\x15\0", 9) + 7) = 0x95; // field 12 instead
    ASSERT_SAYS("column \"prompt\": its type, codec, place or size in the footer is missing");
    // a page: a checksum, an encoding
    pq_make(&file, 0, false, 1);
    *(find_bytes(&file, "\x03\0\0\0one", 7) + 4) = 'O';
    ASSERT_SAYS("row group 1, row 1, column \"prompt\": the checksum of a page is wrong");
    PASS();
}

// Whatever is cut or changed gives rows or a message; memory is always freed.
TEST parquet_damage(void) {
    static pq_bytes file;
    static pq_bytes broken;
    static const unsigned char values[] = {0, 1, 0x7F, 0x80, 0xFF};
    char got[4096];
    pq_make(&file, 6, true, 1);
    for (size_t i = 0; i < file.size; i++) {
        const char* said = rows_of(file.data, i, got, sizeof got);
        ASSERTm(said, strncmp(said, "x.parquet: ", 11) == 0);
    }
    for (size_t i = 0; i < file.size; i++) {
        broken = file;
        broken.data[i] = values[i % 5];
        const char* said = rows_of(broken.data, broken.size, got, sizeof got);
        ASSERTm(said, said[0] == '{' || strncmp(said, "x.parquet: ", 11) == 0 || said[0] == '\0');
    }
    PASS();
}

// Files of other programs, row by row: the values of our row and of the line are the same.
static bool same_json(qlora__env* env, const char* a, size_t a_size, const char* b, size_t b_size) {
    qlora__json left;
    qlora__json right;
    memset(&left, 0, sizeof left);
    memset(&right, 0, sizeof right);
    bool same = OK(qlora__text_json(env, "a", a, a_size, &left)) &&
                OK(qlora__text_json(env, "b", b, b_size, &right)) && left.count == right.count;
    for (uint32_t i = 0; same && i < left.count; i++) {
        const qlora__json_token* l = &left.tokens[i];
        const qlora__json_token* r = &right.tokens[i];
        size_t size = l->end - l->begin;
        same = l->kind == r->kind && l->next == r->next;
        if (same && l->kind == QLORA__JSON_STRING) {
            same = size == r->end - r->begin &&
                   memcmp(left.strings + l->begin, right.strings + r->begin, size) == 0;
        } else if (same && l->kind == QLORA__JSON_NUMBER) {
            double x = 0.0;
            double y = 1.0;
            int64_t m = 0;
            int64_t n = 0;
            bool whole = qlora__json_int(&left, i, &m);
            same = whole == qlora__json_int(&right, i, &n) && m == n &&
                   qlora__json_double(&left, i, &x) && qlora__json_double(&right, i, &y) &&
                   memcmp(&x, &y, sizeof x) == 0;
        }
    }
    qlora__json_free(env, &left);
    qlora__json_free(env, &right);
    return same;
}

// Compares NAME.parquet with NAME.jsonl; the message, or NULL.
static const char* compare_shared(const char* name, char* said, size_t room) {
    qlora__env env = parquet_env();
    char path[256];
    qlora__map file;
    qlora__map lines;
    qlora__parquet p;
    qlora__string row;
    bool found = true;
    uint64_t at = 0;
    memset(&lines, 0, sizeof lines);
    memset(&p, 0, sizeof p);
    qlora__string_begin(&env, &row);
    snprintf(path, sizeof path, SHARED_PARQUET "%s.parquet", name);
    qlora_result r = qlora__map_open(&env, path, &file);
    snprintf(path, sizeof path, SHARED_PARQUET "%s.jsonl", name);
    r = r == QLORA_OK ? qlora__map_open(&env, path, &lines) : r;
    r = r == QLORA_OK ? qlora__parquet_open(&env, name, file.data, file.size, &p) : r;
    bool same = true;
    while (r == QLORA_OK && found && same) {
        r = qlora__parquet_next(&env, &p, &row, &found);
        const char* line = at < lines.size ? (const char*)lines.data + at : "";
        const char* end =
            at < lines.size ? (const char*)memchr(line, '\n', (size_t)(lines.size - at)) : NULL;
        if (r != QLORA_OK) {
            break;
        }
        same = found
                   ? end != NULL && same_json(&env, row.data, row.size, line, (size_t)(end - line))
                   : at == lines.size;
        at += end != NULL ? (uint64_t)(end - line) + 1 : 0;
    }
    snprintf(said, room, "%s: %s", name, r != QLORA_OK ? env.error : "a row differs");
    qlora__parquet_close(&env, &p);
    qlora__string_free(&row);
    qlora__map_close(&env, &lines);
    qlora__map_close(&env, &file);
    return r == QLORA_OK && same ? NULL : said;
}

TEST parquet_shared(void) {
    static const char* const names[] = {"alpaca-delta",
                                        "chat-by-duckdb",
                                        "chat-by-polars",
                                        "chat-gzip-v2",
                                        "chat-hard",
                                        "chat-hard-v2",
                                        "chat-none",
                                        "chat-old-list",
                                        "chat-required",
                                        "chat-snappy",
                                        "chat-zstd-pages",
                                        "chat-zstd-v2-delta",
                                        "kto-label",
                                        "kto-label-v2",
                                        "preference",
                                        "preference-text",
                                        "prompt-completion",
                                        "prompt-completion-messages",
                                        "qa-dictionary-fallback",
                                        "scalars",
                                        "scalars-byte-stream-split",
                                        "sharegpt",
                                        "text-all-null-group",
                                        "text-empty",
                                        "text-nulls",
                                        "tokens-delta",
                                        "tokens-delta-v1",
                                        "tokens-dictionary",
                                        "tokens-large-list",
                                        "tools-snappy",
                                        "tools-zstd-v2"};
    char said[1024];
    FILE* file = fopen(SHARED_PARQUET "README.md", "rb");
    if (file == NULL) {
        SKIPm("no " SHARED_PARQUET);
    }
    fclose(file);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char* wrong = compare_shared(names[i], said, sizeof said);
        ASSERTm(wrong, wrong == NULL);
    }
    ASSERT(compare_shared("chat-lz4", said, sizeof said) != NULL);
    ASSERTm(said, strstr(said, "the codec LZ4_RAW (number 7) is not supported") != NULL);
    ASSERT(compare_shared("chat-brotli", said, sizeof said) != NULL);
    ASSERTm(said, strstr(said, "the codec BROTLI (number 4) is not supported") != NULL);
    PASS();
}

// ---- as data files

typedef struct data_rig {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
    qlora_text_data_desc desc;
    char bad[1024]; // what desc.bad was told
} data_rig;

static bool data_bad(void* user, size_t line, const char* what) {
    data_rig* r = (data_rig*)user;
    size_t used = strlen(r->bad);
    (void)what;
    snprintf(r->bad + used, sizeof r->bad - used, "%lu ", (unsigned long)line);
    return true;
}

static bool data_rig_open(data_rig* r) {
    qlora_text_chat_desc chat;
    memset(r, 0, sizeof *r);
    memset(&chat, 0, sizeof chat);
    chat.name = "plain";
    bool ok = OK(qlora_text_create(NULL, &r->text)) &&
              OK(qlora_text_tok_open(r->text, "tests/golden/text_byte.json", &r->tok));
    chat.tok = r->tok;
    ok = ok && OK(qlora_text_chat_open(r->text, &chat, &r->chat));
    r->desc.chat = r->chat;
    r->desc.bad_user = r;
    return ok;
}

static void data_rig_close(data_rig* r) {
    qlora_text_data_close(r->data);
    qlora_text_chat_close(r->chat);
    qlora_text_tok_close(r->tok);
    qlora_text_destroy(r->text);
}

// Loads bytes as a file of this name. The error, or all samples as text, or the names not used.
static const char* data_load(data_rig* r, const char* path, const void* bytes_in, size_t size) {
    static char shown[8192];
    size_t used = 0;
    qlora_text_data_close(r->data);
    r->data = NULL;
    r->bad[0] = 0;
    r->desc.path = path;
    if (!OK(qlora_text_data_load(r->text, &r->desc, bytes_in, size, &r->data))) {
        return qlora_text_last_error(r->text);
    }
    shown[0] = 0;
    for (size_t i = 0; i < qlora_text_data_count(r->data); i++) {
        qlora_text_sample sample;
        qlora_text_bytes text;
        memset(&text, 0, sizeof text);
        memset(&sample, 0, sizeof sample);
        if (OK(qlora_text_sample_read(r->data, i, &sample)) &&
            OK(qlora_text_decode(r->tok, sample.ids, sample.count, 0, &text))) {
            int wrote = snprintf(shown + used, sizeof shown - used, "%lu:%.*s\n",
                                 (unsigned long)sample.line, (int)text.count, text.data);
            used += wrote > 0 && (size_t)wrote < sizeof shown - used ? (size_t)wrote : 0;
        }
        qlora_text_bytes_free(r->text, &text);
    }
    return shown;
}

TEST gzip_data(void) {
    data_rig r;
    char text[4096];
    char plain[8192];
    unsigned char in[4096];
    ASSERT(data_rig_open(&r));
    size_t length = compressible_text(text, sizeof text);
    size_t size = hex_bytes(sample_gzip, in);
    snprintf(plain, sizeof plain, "%s", data_load(&r, "x.txt", text, length));
    ASSERT(strncmp(plain, "1:<s>line 0", 11) == 0);
    ASSERT_STR_EQ(plain, data_load(&r, "x.txt.gz", in, size));
    ASSERT_STR_EQ(plain, data_load(&r, "x.TXT.GZ", in, size));
    const char* said = data_load(&r, "x.txt.gz", in, size - 1);
    ASSERTm(said, strstr(said, ": x.txt.gz: damaged gzip data: member 1: it is trunc") != NULL);
    in[size - 5] ^= 1;
    r.desc.bad = data_bad; // is not asked: it is not one record that is wrong
    said = data_load(&r, "x.txt.gz", in, size);
    ASSERTm(said, strstr(said, "member 1: its checksum is wrong") != NULL);
    said = data_load(&r, "x.gz", in, size);
    ASSERTm(said, strstr(said, "x.gz: unknown data format") != NULL);
    said = data_load(&r, "x.parquet.gz", in, size);
    ASSERTm(said, strstr(said, "Parquet inside gzip is not supported") != NULL);
    ASSERT(qlora_text_data_known("a/b.Json.Gz"));
    ASSERT(qlora_text_data_known("b.PARQUET"));
    ASSERT_FALSE(qlora_text_data_known("b.gz"));
    data_rig_close(&r);
    PASS();
}

TEST parquet_data(void) {
    static pq_bytes file;
    data_rig r;
    qlora_text_data_info info;
    ASSERT(data_rig_open(&r));
    pq_make(&file, 6, true, 2);
    const char* said = data_load(&r, "x.parquet", file.data, file.size);
    ASSERTm(said, strstr(said, ": x.parquet:2: unrecognised record") != NULL);
    ASSERTm(said, strstr(said, "prompt (null), messages (null), score") != NULL);
    r.desc.bad = data_bad;
    ASSERT_STR_EQ("1:<s>alpha\nalphabet</s>\n4:<s>alpha\nalphabet</s>\n",
                  data_load(&r, "x.parquet", file.data, file.size));
    ASSERT_STR_EQ("2 3 5 6 ", r.bad);
    ASSERT(OK(qlora_text_data_query(r.data, &info)));
    ASSERT_STR_EQ("prompt, score, ids, old, flag, tags", info.ignored);
    r.desc.format = "text";
    r.desc.columns = "text=prompt";
    ASSERT_STR_EQ("1:<s>one</s>\n3:<s>\"\t</s>\n4:<s>one</s>\n6:<s>\"\t</s>\n",
                  data_load(&r, "x.parquet", file.data, file.size));
    // a column that cannot be read, or holds a NaN, is an error only if it is used
    r.desc.format = NULL;
    r.desc.columns = NULL;
    pq_scores[0] = (double)NAN;
    pq_make(&file, 0, false, 1);
    pq_scores[0] = 0.5;
    ASSERT_STR_EQ("1:<s>alpha\nalphabet</s>\n", data_load(&r, "x.parquet", file.data, file.size));
    pq_make(&file, 0, false, 1);
    find_bytes(&file, "\x05score", 6)[-4] = 2 * 3; // an INT96
    ASSERT_STR_EQ("1:<s>alpha\nalphabet</s>\n", data_load(&r, "x.parquet", file.data, file.size));
    r.desc.columns = "text=score";
    said = data_load(&r, "x.parquet", file.data, file.size);
    ASSERTm(said, strstr(said, "column \"score\" is an INT96, which is not supp") != NULL);
    data_rig_close(&r);
    PASS();
}

SUITE(parquet_suite) {
    RUN_TEST(gzip_decodes);
    RUN_TEST(gzip_damage);
    RUN_TEST(zstd_and_snappy);
    RUN_TEST(parquet_made_here);
    RUN_TEST(parquet_refused);
    RUN_TEST(parquet_damage);
    RUN_TEST(parquet_shared);
    RUN_TEST(gzip_data);
    RUN_TEST(parquet_data);
}
