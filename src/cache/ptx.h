// ---- PTX for a target ---------------------------------------------------------------------------

#ifndef QLORA_NO_CUDA

#ifndef QLORA_KERNELS_HEADER
#define QLORA_KERNELS_HEADER "kernels_ptx.h"
#endif
#include QLORA_KERNELS_HEADER

// Packed texts (embed --packed) have a number of their own: they must not pass for plain ones.
#if QLORA__KERNEL_ABI != 4 && QLORA__KERNEL_ABI != 104
#error                                                                                             \
    "kernels_ptx.h does not match this qlora.h (kernel ABI 4 is needed); use one release for both"
#endif
#define QLORA__PTX_PACKED (QLORA__KERNEL_ABI == 104)

// Returns the module's PTX with the highest target that the device supports. PTX that was excluded
// from the build (chunks is NULL) is returned only if nothing else fits, so that the caller can
// report it.
static const qlora__ptx_text* qlora__ptx_choose(const qlora__gpu* gpu, const char* module) {
    const qlora__ptx_text* best = NULL;
    const qlora__ptx_text* left_out = NULL;
    for (size_t i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        // PTX for a target with a suffix (90a) runs only on exactly that capability.
        bool fits = t->suffix != '\0'
                        ? t->target == gpu->capability && t->target == gpu->target_number
                        : t->target <= gpu->target_number;
        if (strcmp(t->module, module) != 0 || !fits || t->version > gpu->ptx_version) {
            continue;
        }
        if (t->chunks == NULL) {
            left_out = t;
        } else if (best == NULL || t->target > best->target ||
                   (t->target == best->target && t->suffix > best->suffix)) {
            best = t;
        }
    }
    return best != NULL ? best : left_out;
}

// One of the two parts of a packed text.
typedef struct qlora__ptx_part {
    uint8_t* bytes; // compressed
    size_t size;
    uint8_t* data;
    size_t length;
    size_t room; // of data
} qlora__ptx_part;

static void qlora__ptx_part_free(qlora_ctx* ctx, qlora__ptx_part* part) {
    qlora__free(ctx, part->bytes, part->size);
    qlora__free(ctx, part->data, part->room);
}

static qlora_result qlora__ptx_damaged(qlora_ctx* ctx, const qlora__ptx_text* text,
                                       const char* what) {
    return qlora__fail(ctx, QLORA_ERR_KERNEL,
                       "kernel module %s: its packed PTX for sm_%d%.*s is damaged: %s; write the "
                       "header again with embed --packed",
                       text->module, text->target, text->suffix != '\0' ? 1 : 0, &text->suffix,
                       what);
}

// Decompresses a part. The caller frees it, also on failure.
static qlora_result qlora__ptx_part_read(qlora_ctx* ctx, const qlora__ptx_text* text,
                                         const char* const* chunks, qlora__ptx_part* part) {
    size_t size = qlora__unpack_size(chunks);
    if (size > 0) {
        part->bytes = (uint8_t*)qlora__alloc(ctx, size);
        if (part->bytes == NULL) {
            return QLORA_ERR_MEMORY;
        }
        part->size = size;
        if (!qlora__unpack_bytes(chunks, part->bytes, size)) {
            return qlora__ptx_damaged(ctx, text, "a character stands for nothing");
        }
        part->length = qlora__unpack_length(part->bytes, size);
        // Every mark stands for a run, which is not empty.
        if (part->length == 0 || part->length / 2 > text->length) {
            return qlora__ptx_damaged(ctx, text, "the length of a part is wrong");
        }
    }
    part->data = (uint8_t*)qlora__alloc(ctx, part->length + 1);
    if (part->data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    part->room = part->length + 1;
    if (size > 0 && !qlora__unpack_part(part->bytes, size, part->data, part->length)) {
        return qlora__ptx_damaged(ctx, text, "a part cannot be decompressed");
    }
    return QLORA_OK;
}

// Writes text->length bytes, checked against the table.
static qlora_result qlora__ptx_unpack(qlora_ctx* ctx, const qlora__ptx_text* text, char* out) {
    qlora__ptx_part own;
    qlora__ptx_part shared;
    const char* const* chunks = text->chunks;
    memset(&own, 0, sizeof own);
    memset(&shared, 0, sizeof shared);
    qlora_result r = qlora__ptx_part_read(ctx, text, chunks, &own);
    if (r == QLORA_OK) {
        while (*chunks != NULL) {
            chunks++;
        }
        r = qlora__ptx_part_read(ctx, text, chunks + 1, &shared);
    }
    if (r == QLORA_OK &&
        !qlora__unpack_merge(own.data, own.length, shared.data, shared.length, out, text->length)) {
        r = qlora__ptx_damaged(ctx, text, "its parts do not fit together");
    }
    if (r == QLORA_OK && qlora__unpack_hash(out, text->length) != text->hash) {
        r = qlora__ptx_damaged(ctx, text, "its hash is wrong");
    }
    qlora__ptx_part_free(ctx, &own);
    qlora__ptx_part_free(ctx, &shared);
    return r;
}

// Copies a text of n characters with its words in full. Returns the length; with out NULL, it is
// only counted. tools/embed.c says which characters stand for words.
static size_t qlora__ptx_words_copy(const char* text, size_t n, char* out) {
    static const char one[] = "#&'*=^";
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        const char* single = (const char*)memchr(one, text[i], sizeof one - 1);
        size_t place = single != NULL ? (size_t)(single - one) : 0;
        if (single == NULL && (text[i] == '`' || text[i] == '~') && i + 1 < n) {
            place = sizeof one - 1 + (text[i] == '~' ? 94 : 0) + (size_t)(text[i + 1] - '!');
            i++;
        } else if (single == NULL) {
            if (out != NULL) {
                out[length] = text[i];
            }
            length++;
            continue;
        }
        size_t places = sizeof qlora__ptx_words / sizeof *qlora__ptx_words;
        const char* word = place < places ? qlora__ptx_words[place] : "";
        size_t size = strlen(word);
        if (out != NULL) {
            memcpy(out + length, word, size);
        }
        length += size;
    }
    return length;
}

// The chunks of a plain text, or the one piece of an unpacked text, with their words in full.
static size_t qlora__ptx_chunks_copy(const qlora__ptx_text* text, const char* unpacked, char* out) {
    size_t length = 0;
    if (unpacked != NULL) {
        return qlora__ptx_words_copy(unpacked, text->length, out);
    }
    for (const char* const* chunk = text->chunks; *chunk != NULL; chunk++) {
        length +=
            qlora__ptx_words_copy(*chunk, strlen(*chunk), out != NULL ? out + length : NULL);
    }
    return length;
}

// Joins the chunks of a module's PTX, or unpacks them, after a header that names the target of
// qlora_ctx_target. The caller frees *out, which has *bytes bytes.
static qlora_result qlora__ptx_join(qlora_ctx* ctx, const qlora__ptx_text* text, bool packed,
                                    char** out, size_t* bytes) {
    const qlora__gpu* gpu = ctx->gpu;
    int target_version = text->suffix != '\0' ? 80 : qlora__target_version(gpu->target_number);
    int version = text->version > target_version ? text->version : target_version;
    char header[96];
    int used = snprintf(header, sizeof header, ".version %d.%d\n.target %s%.*s\n.address_size 64\n",
                        version / 10, version % 10, gpu->target, text->suffix != '\0' ? 1 : 0,
                        &text->suffix);
    char* unpacked = packed ? (char*)qlora__alloc(ctx, text->length + 1) : NULL;
    qlora_result r = QLORA_OK;
    if (packed) {
        r = unpacked == NULL ? QLORA_ERR_MEMORY : qlora__ptx_unpack(ctx, text, unpacked);
    }
    char* p = NULL;
    if (r == QLORA_OK) {
        *bytes = (size_t)used + qlora__ptx_chunks_copy(text, unpacked, NULL) + 1;
        p = (char*)qlora__alloc(ctx, *bytes);
        r = p == NULL ? QLORA_ERR_MEMORY : QLORA_OK;
    }
    if (r == QLORA_OK) {
        memcpy(p, header, (size_t)used);
        size_t length = qlora__ptx_chunks_copy(text, unpacked, p + used);
        p[(size_t)used + length] = '\0';
        *out = p;
    }
    qlora__free(ctx, unpacked, text->length + 1);
    return r;
}

// The row of a kernel in the registry; -1 if there is none.
static int qlora__kernel_row_find(const char* name) {
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        if (strcmp(qlora__kernel_rows[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

// Finds the next kernel of a module's PTX, at the start of a line; NULL if there is none.
static char* qlora__ptx_next(char* ptx) {
    char* line = strstr(ptx, "\n.visible .entry qlora_");
    return line != NULL ? line + 1 : NULL;
}

// Removes the kernels from a module's PTX that are not in take[], which has an element for every
// row of the registry. The text has no function but kernels, and after the first of them nothing
// else: tools/embed.c refuses others. Returns how many remain.
static uint32_t qlora__ptx_cut(char* ptx, const bool* take) {
    char* from = qlora__ptx_next(ptx);
    char* to = from;
    uint32_t count = 0;
    while (from != NULL) {
        char* next = qlora__ptx_next(from);
        size_t length = next != NULL ? (size_t)(next - from) : strlen(from);
        char name[96] = "";
        const char* start = strchr(from, '_') + 1; // after "qlora_"
        size_t n = strcspn(start, "(");
        memcpy(name, start, n < sizeof name ? n : 0);
        int row = qlora__kernel_row_find(name);
        if (row >= 0 && take[row]) {
            memmove(to, from, length);
            to += length;
            count++;
        }
        from = next;
    }
    if (to != NULL) {
        *to = '\0';
    }
    return count;
}

// Finds a directive at the start of a line, outside comments; NULL if there is none.
static const char* qlora__ptx_directive(const char* text, const char* directive) {
    size_t length = strlen(directive);
    const char* p = text;
    bool line_start = true;
    while (*p != '\0') {
        if (p[0] == '/' && p[1] == '/') {
            p += strcspn(p, "\n");
        } else if (p[0] == '/' && p[1] == '*') {
            const char* end = strstr(p + 2, "*/");
            p = end != NULL ? end + 2 : p + strlen(p);
        } else if (line_start && strncmp(p, directive, length) == 0 &&
                   (p[length] == ' ' || p[length] == '\t')) {
            return p;
        } else {
            line_start = *p == '\n' || ((*p == ' ' || *p == '\t' || *p == '\r') && line_start);
            p++;
        }
    }
    return NULL;
}

// Copies the word after a directive: "sm_90a" from ".target sm_90a, texmode_independent".
static void qlora__ptx_word(const char* directive, char* out, size_t size) {
    const char* p = directive + strcspn(directive, " \t");
    p += strspn(p, " \t");
    size_t n = strcspn(p, " \t\r\n,/");
    n = n < size - 1 ? n : size - 1;
    memcpy(out, p, n);
    out[n] = '\0';
}

// PTX of the caller must name the target that qlora_ctx_target returns, or that target with the
// suffix a or f.
static qlora_result qlora__ptx_check_target(qlora_ctx* ctx, const char* ptx) {
    const char* directive = qlora__ptx_directive(ptx, ".target");
    if (directive == NULL) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX has no .target line; this device needs %s (see "
                           "qlora_ctx_target and qlora_ptx_emit)",
                           ctx->gpu->target);
    }
    char word[32];
    qlora__ptx_word(directive, word, sizeof word);
    size_t n = strlen(ctx->gpu->target);
    bool same = strncmp(word, ctx->gpu->target, n) == 0 &&
                (word[n] == '\0' || ((word[n] == 'a' || word[n] == 'f') && word[n + 1] == '\0'));
    if (!same) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX is for %s, but this device needs %s (qlora_ctx_target); "
                           "rewrite it with qlora_ptx_emit",
                           word, ctx->gpu->target);
    }
    return QLORA_OK;
}

// Returns 78 for a .version line with "7.8", and 0 if the line has no version.
static int qlora__ptx_version(const char* directive) {
    char word[16];
    qlora__ptx_word(directive, word, sizeof word);
    if (word[0] < '0' || word[0] > '9' || word[1] != '.' || word[2] < '0' || word[2] > '9') {
        return 0;
    }
    return (word[0] - '0') * 10 + (word[2] - '0');
}

static qlora_result qlora__ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                    size_t* needed) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (ptx == NULL || needed == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", ptx == NULL ? "ptx" : "needed");
    }
    const char* version_line = qlora__ptx_directive(ptx, ".version");
    const char* target_line = qlora__ptx_directive(ptx, ".target");
    int version = version_line != NULL ? qlora__ptx_version(version_line) : 0;
    if (version == 0) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, "the PTX has no valid .version line");
    }
    if (target_line == NULL || target_line < version_line) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX has no .target line after its .version line");
    }
    char word[32];
    qlora__ptx_word(target_line, word, sizeof word);
    int number = strncmp(word, "sm_", 3) == 0 ? atoi(word + 3) : 0;
    if (number == 0) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, ".target is '%s'; expected sm_ and a number",
                           word);
    }
    char last = word[strlen(word) - 1];
    if (last == 'a' || last == 'f' || number > ctx->gpu->target_number) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, "PTX for %s cannot be rewritten for %s: %s", word,
                           ctx->gpu->target,
                           number > ctx->gpu->target_number
                               ? "its target is newer"
                               : "a target with a suffix has no later equivalent");
    }
    int least = qlora__target_version(ctx->gpu->target_number);
    version = version > least ? version : least;
    if (version > ctx->gpu->ptx_version) {
        return qlora__fail(
            ctx, QLORA_ERR_TARGET, "the text needs PTX %d.%d; this driver accepts at most %d.%d",
            version / 10, version % 10, ctx->gpu->ptx_version / 10, ctx->gpu->ptx_version % 10);
    }
    const char* after_version = version_line + strcspn(version_line, "\n");
    const char* after_target = target_line + strcspn(target_line, "\n");
    int n =
        snprintf(buffer, buffer != NULL ? size : 0, "%.*s.version %d.%d%.*s.target %s%s",
                 (int)(version_line - ptx), ptx, version / 10, version % 10,
                 (int)(target_line - after_version), after_version, ctx->gpu->target, after_target);
    *needed = (size_t)n + 1;
    if (buffer != NULL && size < *needed) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "size is %llu; the text needs %llu bytes",
                           (unsigned long long)size, (unsigned long long)*needed);
    }
    return QLORA_OK;
}

#endif // QLORA_NO_CUDA
