// upcycle.c - makes a mixture of experts of a model with Llama's block, for tests/gates/
// soak_upcycle.sh: every expert is a copy of the MLP, and the router has small random weights.
//
//   upcycle FROM.safetensors TO.safetensors LAYERS EXPERTS
//
// The names are Mixtral's. Since the weights of a token's experts add up to 1, the mixture computes
// what the model does, whatever the router chooses.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct file {
    char* header; // JSON, with a NUL
    char* data;
} file;

static bool file_read(const char* path, file* out) {
    unsigned char length[8];
    FILE* f = fopen(path, "rb");
    long size = f != NULL && fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    long header = 0;
    memset(out, 0, sizeof *out);
    bool ok = size > 8 && fseek(f, 0, SEEK_SET) == 0 && fread(length, 1, 8, f) == 8;
    for (int i = 0; ok && i < 3; i++) {
        header |= (long)length[i] << (8 * i);
    }
    ok = ok && header < size - 8;
    if (ok) {
        out->header = (char*)calloc((size_t)header + 1, 1);
        out->data = (char*)malloc((size_t)(size - 8 - header));
        ok = out->header != NULL && out->data != NULL &&
             fread(out->header, 1, (size_t)header, f) == (size_t)header &&
             fread(out->data, 1, (size_t)(size - 8 - header), f) == (size_t)(size - 8 - header);
    }
    if (f != NULL) {
        fclose(f);
    }
    return ok;
}

typedef struct tensor {
    const char* data;
    long bytes;
    long rows;
    long cols; // 0 = a vector
} tensor;

// A tensor in f32.
static bool tensor_find(const file* f, const char* name, tensor* out) {
    char quoted[128];
    char dtype[8];
    long begin = 0;
    long end = 0;
    snprintf(quoted, sizeof quoted, "\"%s\":", name);
    const char* row = strstr(f->header, quoted);
    const char* shape = row != NULL ? strstr(row, "\"shape\":") : NULL;
    const char* at = row != NULL ? strstr(row, "\"data_offsets\":") : NULL;
    memset(out, 0, sizeof *out);
    if (shape == NULL || at == NULL ||
        sscanf(row + strlen(quoted), "{\"dtype\":\"%7[A-Z0-9]\"", dtype) != 1 ||
        strcmp(dtype, "F32") != 0 || sscanf(shape + 8, "[%ld,%ld", &out->rows, &out->cols) < 1 ||
        sscanf(at + 15, "[%ld,%ld]", &begin, &end) != 2) {
        fprintf(stderr, "upcycle: %s is missing, or not in f32\n", name);
        return false;
    }
    out->data = f->data + begin;
    out->bytes = end - begin;
    return true;
}

typedef struct writer {
    FILE* header;
    FILE* data;
    long bytes;
    bool failed;
} writer;

static void write_tensor(writer* w, const char* name, const tensor* t) {
    char shape[48];
    snprintf(shape, sizeof shape, t->cols > 0 ? "%ld,%ld" : "%ld", t->rows, t->cols);
    w->failed = fprintf(w->header, "%c\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],"
                        "\"data_offsets\":[%ld,%ld]}", w->bytes == 0 ? '{' : ',', name, shape,
                        w->bytes, w->bytes + t->bytes) < 0 ||
                fwrite(t->data, 1, (size_t)t->bytes, w->data) != (size_t)t->bytes || w->failed;
    w->bytes += t->bytes;
}

static void copy(writer* w, const file* from, const char* prefix, const char* old,
                 const char* name) {
    char path[128];
    tensor t;
    snprintf(path, sizeof path, "%s%s", prefix, old);
    w->failed = !tensor_find(from, path, &t) || w->failed;
    if (!w->failed) {
        snprintf(path, sizeof path, "%s%s", prefix, name);
        write_tensor(w, path, &t);
    }
}

// The router: numbers from -1/16 to 1/16, times 1 / 8.
static void write_router(writer* w, const char* prefix, long experts, long hidden, uint32_t* seed) {
    char path[128];
    tensor t = {NULL, experts * hidden * 4, experts, hidden};
    float* values = (float*)malloc((size_t)t.bytes);
    w->failed = values == NULL || w->failed;
    for (long i = 0; i < experts * hidden && !w->failed; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        values[i] = ((float)(*seed >> 22) - 511.5f) / 65536.0f;
    }
    t.data = (const char*)values;
    snprintf(path, sizeof path, "%sblock_sparse_moe.gate.weight", prefix);
    if (!w->failed) {
        write_tensor(w, path, &t);
    }
    free(values);
}

static void write_layer(writer* w, const file* from, long layer, long experts, uint32_t* seed) {
    static const char* const same[] = {
        "input_layernorm.weight",  "post_attention_layernorm.weight", "self_attn.q_proj.weight",
        "self_attn.k_proj.weight", "self_attn.v_proj.weight",         "self_attn.o_proj.weight"};
    static const char* const mlp[][2] = {
        {"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}};
    char prefix[64];
    tensor norm;
    snprintf(prefix, sizeof prefix, "model.layers.%ld.", layer);
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        copy(w, from, prefix, same[i], same[i]);
    }
    for (long e = 0; e < experts; e++) {
        for (int i = 0; i < 3; i++) {
            char old[64];
            char name[64];
            snprintf(old, sizeof old, "mlp.%s.weight", mlp[i][0]);
            snprintf(name, sizeof name, "block_sparse_moe.experts.%ld.%s.weight", e, mlp[i][1]);
            copy(w, from, prefix, old, name);
        }
    }
    if (tensor_find(from, "model.norm.weight", &norm)) {
        write_router(w, prefix, experts, norm.rows, seed);
    }
}

static bool append(FILE* from, FILE* to) {
    rewind(from);
    for (int c = fgetc(from); c != EOF; c = fgetc(from)) {
        if (fputc(c, to) == EOF) {
            return false;
        }
    }
    return ferror(from) == 0;
}

static bool write_file(writer* w, const char* path) {
    unsigned char length[8];
    fputc('}', w->header);
    while (ftell(w->header) % 8 != 0) {
        fputc(' ', w->header);
    }
    uint64_t size = (uint64_t)ftell(w->header);
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)(size >> (8 * i));
    }
    FILE* f = fopen(path, "wb");
    bool ok = f != NULL && fwrite(length, 1, 8, f) == 8 && append(w->header, f) &&
              append(w->data, f);
    return f != NULL && fclose(f) == 0 && ok;
}

int main(int argc, char** argv) {
    file from;
    writer w = {tmpfile(), tmpfile(), 0, false};
    uint32_t seed = 7;
    if (argc != 5 || w.header == NULL || w.data == NULL || !file_read(argv[1], &from)) {
        fprintf(stderr, "usage: upcycle FROM.safetensors TO.safetensors LAYERS EXPERTS\n");
        return 1;
    }
    copy(&w, &from, "model.", "embed_tokens.weight", "embed_tokens.weight");
    copy(&w, &from, "model.", "norm.weight", "norm.weight");
    for (long l = 0; l < atol(argv[3]) && !w.failed; l++) {
        write_layer(&w, &from, l, atol(argv[4]), &seed);
    }
    if (w.failed || !write_file(&w, argv[2])) {
        fprintf(stderr, "upcycle: %s cannot be made\n", argv[2]);
        return 1;
    }
    free(from.header);
    free(from.data);
    fclose(w.header);
    fclose(w.data);
    return 0;
}
