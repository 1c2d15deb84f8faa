// embed.c - turns the PTX that nvcc generates from kernels/*/*.cu into kernels_ptx.h, and checks
// it.
//
//   embed --targets FILE.cu            print the targets that FILE is compiled for, e.g. "75 80"
//   embed --texts DIR FILE.cu...       print the PTX files in DIR that --write needs for them
//   embed --write OUT.h --nvcc VERSION FILE.cu... FILE.cuh... FILE.sm_NN.ptx...
//   embed --sources HEADER FILE...     check the sources against the hashes in the banner
//   embed --only "WORD..." HEADER OUT.h   HEADER with fewer texts; needs neither nvcc nor kernels/
//   embed --packed HEADER OUT.h        HEADER with compressed texts, a third of its size; the same
//   embed --packed --only "WORD..." HEADER OUT.h
//
// A line "// groups: bf16 nf4" among the first lines of a source says which groups its module
// belongs to; without it, the module belongs to "core". In the header, QLORA_PTX_NO_BF16 leaves out
// every module of the group bf16, and so on; QLORA_PTX_NO_SM80 leaves out the texts for 8.0 and
// newer devices. A word of --only is a group, a module or a target (sm_80): a text is kept when its
// module is named or all of its module's groups are, and its target is, if any target is named.
//
// Compiled with -DEMBED_TABLE='"kernels_ptx.h"' (build/ptx-tool), it also reads the table:
//
//   ptx-tool --check HEADER FILE...    like --sources, and check length, hash and chunks of texts
//   ptx-tool --list                    print the module, target, version and length of every text
//   ptx-tool --emit MODULE sm_NN       print the module as qlora.h passes it to a driver
//
// C99, no dependencies. The output depends only on the inputs: it contains no date, user, host or
// path.

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deflate.h"

// What unpacks texts in qlora.h reads them here, too.
#define QLORA__UNUSED
#include "../src/formats/inflate.h"

#include "../src/cache/unpack.h"

#ifdef EMBED_TABLE
#include EMBED_TABLE
#endif

enum {
    CHUNK_MAX = 4000, // C99 guarantees 4,095 bytes per literal; MSVC counts one more per piece
    COLUMNS = 100,
    TEXT_COLUMNS = 1000, // of a line of PTX in the header: every line costs three characters
    PACKED_COLUMNS = 96, // characters of packed text in a line; even
    JOINED_MAX = 1000,
    GROUPS_MAX = 4,      // of a module
    REGISTER_FILES = 16, // of a kernel
    BASE_TARGET = 75,    // the oldest device; its texts have no macro of their own
    LINES_OF_MARKER = 5,
    FILES_MAX = 512
};

static void die(const char* what, const char* which) {
    fprintf(stderr, "embed: %s%s%s\n", which ? which : "", which ? ": " : "", what);
    exit(1);
}

static void* need_memory(void* p) {
    if (!p) {
        die("out of memory", NULL);
    }
    return p;
}

// Reads a whole file and appends a 0; the caller frees it. CR is rejected, so that a checkout with
// converted line endings gets this error rather than a stale hash.
static char* file_read(const char* path, size_t* size) {
    FILE* file = fopen(path, "rb");
    if (!file) {
        die("cannot open", path);
    }
    size_t room = 1 << 16;
    size_t used = 0;
    char* text = (char*)need_memory(malloc(room + 1));
    for (;;) {
        used += fread(text + used, 1, room - used, file);
        if (used < room) {
            break;
        }
        room *= 2;
        text = (char*)need_memory(realloc(text, room + 1));
    }
    if (ferror(file)) {
        die("cannot read", path);
    }
    fclose(file);
    text[used] = 0;
    if (memchr(text, '\r', used)) {
        die("has CR line endings; the hashes need LF", path);
    }
    *size = used;
    return text;
}

static bool ends_with(const char* s, const char* tail) {
    size_t n = strlen(s);
    size_t m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

static bool starts_with(const char* s, const char* head) {
    return strncmp(s, head, strlen(head)) == 0;
}

static const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// A source as the banner names it: from its folder kernels/ on, so that no folder of a machine is
// in the output.
static const char* source_name(const char* path) {
    const char* name = base_name(path);
    for (const char* p = path; (p = strstr(p, "kernels/")) != NULL; p++) {
        name = p == path || p[-1] == '/' ? p : name;
    }
    return name;
}

// Text that grows.
typedef struct buffer {
    char* data; // a 0 follows
    size_t size;
    size_t room;
} buffer;

static void buffer_add(buffer* b, const char* text, size_t size) {
    if (b->room - b->size <= size) {
        b->room = 2 * (b->room + size) + 4096;
        b->data = (char*)need_memory(realloc(b->data, b->room));
    }
    memcpy(b->data + b->size, text, size);
    b->size += size;
    b->data[b->size] = 0;
}

// Up to 999 characters.
static void buffer_print(buffer* b, const char* format, ...) {
    char line[1000];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof(line)) {
        die("a line is too long", NULL);
    }
    buffer_add(b, line, (size_t)n);
}

static void file_write(const char* path, const buffer* b) {
    FILE* out = fopen(path, "wb");
    if (!out) {
        die("cannot write", path);
    }
    bool bad = fwrite(b->data, 1, b->size, out) != b->size;
    if (fclose(out) != 0 || bad) {
        remove(path); // rather none than half a header
        die("cannot write", path);
    }
}

static bool is_source(const char* path) {
    return ends_with(path, ".cu") || ends_with(path, ".cuh");
}

// ---- SHA-256 (FIPS 180-4) ----

typedef struct sha256_state {
    uint32_t h[8];
    uint32_t k[64];
} sha256_state;

static uint32_t rotate_right(uint32_t x, unsigned n) {
    return (x >> n) | (x << (32 - n));
}

// The first 32 bits of the fractional part of a prime's square or cube root: the standard's
// constants. Found with integers, bit by bit: r^2 <= p * 2^64, r^3 <= p * 2^96.
static uint32_t prime_root_bits(uint32_t prime, int order) {
    uint64_t root = 0; // root * 2^32, at most 2^37
    for (int bit = 36; bit >= 0; bit--) {
        uint64_t r = root | (uint64_t)1 << bit;
        // r = hi * 2^20 + lo: comparing in base 2^20 keeps every product within 64 bits.
        uint64_t digits[8] = {0};
        uint64_t a[2] = {r & 0xfffff, r >> 20};
        uint64_t square[3] = {a[0] * a[0], 2 * a[0] * a[1], a[1] * a[1]};
        for (int i = 0; i < 3; i++) {
            if (order == 2) {
                digits[i] += square[i];
                continue;
            }
            // Carry before multiplying again.
            if (i < 2) {
                square[i + 1] += square[i] >> 20;
                square[i] &= 0xfffff;
            }
            digits[i] += square[i] * a[0];
            digits[i + 1] += square[i] * a[1];
        }
        for (int i = 0; i < 7; i++) {
            digits[i + 1] += digits[i] >> 20;
            digits[i] &= 0xfffff;
        }
        // The limit p * 2^(32 * order) in the same base.
        uint64_t limit[8] = {0};
        int shift = 32 * order;
        limit[shift / 20] = (uint64_t)prime << (shift % 20);
        for (int i = 0; i < 7; i++) {
            limit[i + 1] += limit[i] >> 20;
            limit[i] &= 0xfffff;
        }
        int i = 7;
        while (i > 0 && digits[i] == limit[i]) {
            i--;
        }
        if (digits[i] <= limit[i]) {
            root = r;
        }
    }
    return (uint32_t)root;
}

static void sha256_begin(sha256_state* s) {
    uint32_t prime = 1;
    for (int i = 0; i < 64; i++) {
        bool composite = true;
        while (composite) {
            prime++;
            composite = false;
            for (uint32_t d = 2; d * d <= prime && !composite; d++) {
                composite = prime % d == 0;
            }
        }
        s->k[i] = prime_root_bits(prime, 3);
        if (i < 8) {
            s->h[i] = prime_root_bits(prime, 2);
        }
    }
}

static void sha256_block(sha256_state* s, const unsigned char* p) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) {
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | (uint32_t)p[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t x = w[i - 15];
        uint32_t y = w[i - 2];
        w[i] = w[i - 16] + (rotate_right(x, 7) ^ rotate_right(x, 18) ^ x >> 3) + w[i - 7] +
               (rotate_right(y, 17) ^ rotate_right(y, 19) ^ y >> 10);
    }
    uint32_t v[8];
    memcpy(v, s->h, sizeof(v));
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate_right(v[4], 6) ^ rotate_right(v[4], 11) ^ rotate_right(v[4], 25);
        uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + s->k[i] + w[i];
        uint32_t s0 = rotate_right(v[0], 2) ^ rotate_right(v[0], 13) ^ rotate_right(v[0], 22);
        uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof(v[0]));
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) {
        s->h[i] += v[i];
    }
}

static void sha256_hex(const char* text, size_t size, char hex[65]) {
    sha256_state s;
    sha256_begin(&s);
    const unsigned char* p = (const unsigned char*)text;
    size_t whole = size / 64 * 64;
    for (size_t i = 0; i < whole; i += 64) {
        sha256_block(&s, p + i);
    }
    unsigned char tail[128] = {0};
    size_t rest = size - whole;
    memcpy(tail, p + whole, rest);
    tail[rest] = 0x80;
    size_t end = rest + 9 <= 64 ? 64 : 128;
    uint64_t bits = (uint64_t)size * 8;
    for (size_t i = 0; i < 8; i++) {
        tail[end - 1 - i] = (unsigned char)(bits >> 8 * i);
    }
    for (size_t i = 0; i < end; i += 64) {
        sha256_block(&s, tail + i);
    }
    for (size_t i = 0; i < 8; i++) {
        snprintf(hex + 8 * i, 9, "%08x", (unsigned)s.h[i]);
    }
}

static void file_hash(const char* path, char hex[65]) {
    size_t size;
    char* text = file_read(path, &size);
    sha256_hex(text, size, hex);
    free(text);
}

// ---- which targets a source is compiled for ----

// Finds an "mma" instruction, not the end of "gamma" or "comma".
static bool has_mma(const char* text) {
    for (const char* p = text; (p = strstr(p, "mma")) != NULL; p += 3) {
        const char* before = p > text && p[-1] == 'w' ? p - 1 : p; // wmma
        bool starts = before == text || !(isalnum((unsigned char)before[-1]) || before[-1] == '_');
        if (starts && (p[3] == '.' || p[3] == '_')) {
            return true;
        }
    }
    return false;
}

// The rest of a line that starts with the marker, among the first lines of a source.
static bool marker_find(const char* text, const char* marker, char* out, size_t out_size) {
    const char* line = text;
    bool found = false;
    for (int i = 0; i < LINES_OF_MARKER && *line; i++) {
        size_t n = strcspn(line, "\n");
        if (starts_with(line, marker)) {
            size_t skip = strlen(marker) + strspn(line + strlen(marker), " ");
            snprintf(out, out_size, "%.*s", (int)(n - skip), line + skip);
            found = true;
        }
        line += n + (line[n] == '\n');
    }
    return found;
}

// The targets in a line "// targets: 75 80" among the first lines; without one, they follow from
// the instructions used.
static void targets_of(const char* path, char* out, size_t out_size) {
    size_t size;
    char* text = file_read(path, &size);
    if (marker_find(text, "// targets:", out, out_size)) {
        // as it says
    } else if (strstr(text, "cp.async") || has_mma(text)) {
        snprintf(out, out_size, "80");
    } else {
        snprintf(out, out_size, "75 80");
    }
    if (out[0] == 0 || strspn(out, "0123456789af ") != strlen(out)) {
        die("the line '// targets:' must contain targets such as 75 80", path);
    }
    free(text);
}

static void print_texts(const char* folder, const char* path) {
    char targets[64];
    targets_of(path, targets, sizeof(targets));
    const char* name = base_name(path);
    if (!ends_with(name, ".cu")) {
        die("not a .cu file", path);
    }
    size_t stem = strlen(name) - strlen(".cu");
    for (char* t = strtok(targets, " "); t; t = strtok(NULL, " ")) {
        printf("%s/%.*s.sm_%s.ptx\n", folder, (int)stem, name, t);
    }
}

// ---- PTX text ----

typedef struct ptx_text {
    char module[64];
    char groups[GROUPS_MAX][16]; // an empty one ends them
    int target;                  // 80
    char suffix;                 // 'a' of sm_90a, or 0
    int version;                 // 70 is PTX 7.0
    char* text;                  // one instruction per line, without the header lines
    size_t length;
    uint32_t hash;
} ptx_text;

static uint32_t fnv1a(uint32_t hash, const char* text, size_t size) {
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    }
    return hash;
}

#define FNV_START 2166136261u

// "norm.sm_75.ptx" -> norm, 75, 0.
static void name_parse(const char* path, ptx_text* t) {
    const char* name = base_name(path);
    const char* mark = strstr(name, ".sm_");
    char tail[16];
    if (!mark || (size_t)(mark - name) >= sizeof(t->module) ||
        sscanf(mark, ".sm_%d%15s", &t->target, tail) != 2) {
        die("a PTX file is named MODULE.sm_NN.ptx", path);
    }
    memcpy(t->module, name, (size_t)(mark - name));
    t->module[mark - name] = 0;
    t->suffix = tail[0] == '.' ? 0 : tail[0];
    if (strcmp(tail + (t->suffix != 0), ".ptx") != 0) {
        die("a PTX file is named MODULE.sm_NN.ptx", path);
    }
}

// Where a text may differ from that of another target (kernels/early.cuh): an instruction of one,
// an empty comment in the other. Both have a line and a chunk of their own, so that what is between
// them is the same.
static bool is_early(const char* line) {
    return starts_with(line, "griddepcontrol") || starts_with(line, "//\n");
}

// Removes comments, except those that mark such a place; quoted strings are left unchanged.
static void comments_strip(char* text) {
    char* out = text;
    bool quoted = false;
    for (const char* p = text; *p; p++) {
        if (!quoted && p[0] == '/' && p[1] == '/') {
            if (starts_with(p, "// early\n")) {
                *out++ = '/';
                *out++ = '/';
            }
            p += strcspn(p, "\n");
            *out++ = '\n';
            if (!*p) {
                break;
            }
            continue;
        }
        if (!quoted && p[0] == '/' && p[1] == '*') {
            const char* end = strstr(p, "*/");
            if (!end) {
                die("unterminated comment", NULL);
            }
            p = end + 1;
            continue;
        }
        quoted = quoted != (*p == '"');
        *out++ = *p;
    }
    *out = 0;
}

static bool is_header_line(const char* line) {
    return starts_with(line, ".version") || starts_with(line, ".target") ||
           starts_with(line, ".address_size");
}

// Lines for a debugger, and a hint that only newer PTX versions know.
static bool is_debug_line(const char* line) {
    return starts_with(line, ".loc") || starts_with(line, ".file") ||
           starts_with(line, ".pragma \"used_bytes_mask");
}

// Keeps the lines that a driver needs, trimmed, in place.
static void lines_strip(char* text) {
    char* out = text;
    bool in_section = false; // .section .debug_... { ... }
    for (char* line = text; *line;) {
        size_t n = strcspn(line, "\n");
        char* next = line + n + (line[n] == '\n');
        char* begin = line;
        char* end = line + n;
        while (begin < end && isspace((unsigned char)*begin)) {
            begin++;
        }
        while (end > begin && isspace((unsigned char)end[-1])) {
            end--;
        }
        bool was_local = starts_with(begin, ".local"); // not .loc
        in_section = in_section || starts_with(begin, ".section");
        bool drop = begin == end || in_section || is_header_line(begin) ||
                    (is_debug_line(begin) && !was_local);
        if (in_section && memchr(begin, '}', (size_t)(end - begin))) {
            in_section = false;
        }
        if (!drop) {
            memmove(out, begin, (size_t)(end - begin));
            out += end - begin;
            *out++ = '\n';
        }
        line = next;
    }
    *out = 0;
}

// Tabs and runs of spaces are only separators: reduces them to one space, or to none next to
// punctuation.
static void blanks_squeeze(char* text, const char* path) {
    char* out = text;
    bool quoted = false;
    for (const char* p = text; *p; p++) {
        char c = *p == '\t' ? ' ' : *p;
        if ((c < ' ' && c != '\n') || c == 127 || (unsigned char)c > 127) {
            die("contains a byte that is not printable ASCII", path);
        }
        quoted = quoted != (c == '"');
        if (!quoted && strchr(",;[]{}", c) && out > text && out[-1] == ' ') {
            out--;
        }
        if (c != ' ' || quoted || out == text || !strchr(" ,;[]{}", out[-1])) {
            *out++ = c;
        }
    }
    *out = 0;
}

static bool in_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$';
}

// Writes the short form of a name of the compiler's: labels are unique in their kernel without its
// number, parameters without its name. Returns its length; 0 keeps the name.
static size_t name_short(const char* name, size_t length, char out[80]) {
    const char* tail = name + length;
    while (tail > name && isdigit((unsigned char)tail[-1])) {
        tail--;
    }
    size_t digits = (size_t)(name + length - tail);
    const char* before = NULL;
    if (digits > 0 && starts_with(name, "$L__BB") && tail[-1] == '_') {
        before = "$";
    } else if (digits > 0 && starts_with(name, "qlora_") && tail - name > 7 &&
               memcmp(tail - 7, "_param_", 7) == 0) {
        before = "_";
    }
    return before == NULL ? 0 : (size_t)snprintf(out, 80, "%s%.*s", before, (int)digits, tail);
}

// Variables of functions, such as "_ZZ4workE4room", are numbered in their order. Returns the number
// of one.
static int variable_number(buffer* known, const char* name, size_t length) {
    char word[400];
    int number = 0;
    if (length + 3 > sizeof(word)) {
        die("a name is too long", NULL);
    }
    snprintf(word, sizeof(word), " %.*s ", (int)length, name);
    const char* found = known->size > 0 ? strstr(known->data, word) : NULL;
    if (found == NULL) {
        buffer_add(known, word, length + 2);
        found = known->data + known->size - length - 2;
    }
    for (const char* p = known->data; p < found; p++) {
        number += p[0] == ' ' && p[1] == ' ';
    }
    return number;
}

// Replaces the long names that the compiler chose, which are a tenth of its text.
static void names_shorten(char* text) {
    buffer known = {NULL, 0, 0};
    char* out = text;
    bool quoted = false;
    for (const char* p = text; *p;) {
        quoted = quoted != (*p == '"');
        size_t length = 1;
        size_t written = 0;
        char shorter[80];
        if (!quoted && (in_name(*p) || *p == '%')) {
            while (in_name(p[length])) {
                length++;
            }
            written = name_short(p, length, shorter);
            if (starts_with(p, "_Z")) {
                int number = variable_number(&known, p, length);
                written = (size_t)snprintf(shorter, sizeof(shorter), "_V%d", number);
            }
        }
        memmove(out, written > 0 ? shorter : p, written > 0 ? written : length);
        out += written > 0 ? written : length;
        p += length;
    }
    *out = 0;
    free(known.data);
}

// The first letters of names of registers. Those with which PTX's types begin are left out: f32
// would be a register. A second letter is a capital: lg2 would be one, too.
static const char register_letters[] = "acdghijklmnopqrtvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

typedef struct register_rank {
    int uses;
    int number;
} register_rank;

// Registers as the compiler declares them, %r<1300>. Those that occur most get the shortest names.
typedef struct register_file {
    char name[8]; // after the %
    char type[8];
    int count;
    int used;  // how many occur
    int* uses; // by number
    int* rank; // by number: 0 occurs most, and has one of the shortest names
    register_rank* ranks;
    // A letter and a number: ten ranks of each letter, then ninety of each.
    char letters[sizeof(register_letters)];
    int letter_count;
    int pair; // of letters, and a digit: all other ranks
} register_file;

static int by_uses(const void* a, const void* b) {
    const register_rank* x = (const register_rank*)a;
    const register_rank* y = (const register_rank*)b;
    return x->uses != y->uses ? (x->uses < y->uses) - (x->uses > y->uses)
                              : (x->number > y->number) - (x->number < y->number);
}

// Up to 63 characters of the line at p: sscanf reads all of its string first.
static void start_copy(const char* p, char out[64]) {
    size_t n = 0;
    for (; n < 63 && p[n] && p[n] != '\n'; n++) {
        out[n] = p[n];
    }
    out[n] = 0;
}

// Reads ".reg .b32 %r<130>;" at p. Returns its length; 0 if it is no such declaration.
static size_t registers_declared(const char* p, register_file* f) {
    char start[64];
    int length = 0;
    if (!starts_with(p, ".reg")) {
        return 0;
    }
    start_copy(p, start);
    memset(f, 0, sizeof(*f));
    bool ok = sscanf(start, ".reg .%7[a-z0-9] %%%7[a-z]<%d>;%n", f->type, f->name, &f->count,
                     &length) == 3;
    return ok ? (size_t)length : 0;
}

// The file of the register "%r123" at p, its number and length; NULL if it is no register.
static register_file* register_at(const char* p, register_file* files, int count, int* number,
                                  size_t* length) {
    char name[8];
    char start[64];
    int n = 0;
    if (*p != '%') {
        return NULL;
    }
    start_copy(p, start);
    if (sscanf(start, "%%%7[a-z]%d%n", name, number, &n) != 2) {
        return NULL;
    }
    *length = (size_t)n;
    for (int i = 0; i < count; i++) {
        if (strcmp(files[i].name, name) == 0 && *number < files[i].count) {
            return &files[i];
        }
    }
    return NULL;
}

// Finds the declarations of a kernel, and counts how often each register occurs.
static int registers_count(const char* p, const char* end, register_file* files) {
    int count = 0;
    bool quoted = false;
    for (; p < end; p++) {
        int number;
        size_t length;
        quoted = quoted != (*p == '"');
        if (!quoted && registers_declared(p, &files[count]) > 0) {
            size_t n = (size_t)files[count].count + 1;
            files[count].uses = (int*)need_memory(calloc(n, sizeof(int)));
            files[count].rank = (int*)need_memory(calloc(n, sizeof(int)));
            if (++count == REGISTER_FILES) {
                die("contains a kernel with too many declarations of registers", NULL);
            }
        }
        register_file* f = quoted ? NULL : register_at(p, files, count, &number, &length);
        if (f != NULL) {
            f->used += f->uses[number]++ == 0 ? 1 : 0;
        }
    }
    return count;
}

// Orders registers by their uses.
static void registers_rank(register_file* f) {
    size_t n = (size_t)f->count;
    f->ranks = (register_rank*)need_memory(malloc((n + 1) * sizeof(f->ranks[0])));
    for (int i = 0; i < f->count; i++) {
        f->ranks[i].uses = f->uses[i];
        f->ranks[i].number = i;
    }
    qsort(f->ranks, n, sizeof(f->ranks[0]), by_uses);
    for (int i = 0; i < f->count; i++) {
        f->rank[f->ranks[i].number] = i;
    }
}

// Gives each letter to the file whose next ten registers occur most; then pairs to the rest.
static void registers_name(register_file* files, int count) {
    int pair = 0;
    for (const char* letter = register_letters; *letter; letter++) {
        register_file* best = NULL;
        int most = 0;
        for (int i = 0; i < count; i++) {
            int uses = 0;
            for (int j = 10 * files[i].letter_count, n = 0; j < files[i].used && n < 10; j++, n++) {
                uses += files[i].ranks[j].uses;
            }
            best = uses > most ? &files[i] : best;
            most = uses > most ? uses : most;
        }
        if (best != NULL) {
            best->letters[best->letter_count++] = *letter;
        }
    }
    for (int i = 0; i < count; i++) {
        int rest = files[i].used - 100 * files[i].letter_count;
        files[i].pair = pair;
        pair += rest > 0 ? (rest + 9) / 10 : 0;
    }
    if (pair > 26 * (int)strlen(register_letters)) {
        die("contains a kernel with too many registers", NULL);
    }
}

// The name of a rank; its number in the range that has the letters before it.
static int register_write(const register_file* f, int rank, char letters[4]) {
    int n = f->letter_count;
    letters[1] = letters[2] = 0;
    if (rank < 10 * n) {
        letters[0] = f->letters[rank / 10];
        return rank % 10;
    }
    if (rank < 100 * n) {
        letters[0] = f->letters[(rank - 10 * n) / 90];
        return 10 + (rank - 10 * n) % 90;
    }
    int pair = f->pair + (rank - 100 * n) / 10;
    letters[0] = register_letters[pair / 26];
    letters[1] = (char)('A' + pair % 26);
    return (rank - 100 * n) % 10;
}

// ".reg .b32 a<100>,c<30>;": a range ends where the next rank has no number above it.
static void registers_declare(const register_file* f, buffer* out) {
    char letters[4];
    bool first = true;
    for (int i = 0; i < f->letter_count; i++) {
        int low = f->used - 10 * i < 10 ? f->used - 10 * i : 10;
        int high = f->used - 10 * f->letter_count - 90 * i;
        high = high < 0 ? 0 : high < 90 ? high : 90;
        buffer_print(out, "%s%c<%d>", first ? "" : ",", f->letters[i], high > 0 ? 10 + high : low);
        first = false;
    }
    for (int rank = 100 * f->letter_count; rank < f->used; rank += 10) {
        register_write(f, rank, letters);
        buffer_print(out, "%s%s<%d>", first ? "" : ",", letters,
                     f->used - rank < 10 ? f->used - rank : 10);
        first = false;
    }
}

// A kernel, or what is before the first one, with other names for its registers.
static void registers_rename(const char* p, const char* end, buffer* out) {
    register_file files[REGISTER_FILES];
    register_file declared;
    bool quoted = false;
    int count = registers_count(p, end, files);
    for (int i = 0; i < count; i++) {
        registers_rank(&files[i]);
    }
    registers_name(files, count);
    for (int next = 0; p < end;) {
        int number = 0;
        size_t length = 1;
        char letters[4];
        quoted = quoted != (*p == '"');
        size_t declaration = quoted ? 0 : registers_declared(p, &declared);
        register_file* f = quoted ? NULL : register_at(p, files, count, &number, &length);
        if (declaration > 0) {
            f = &files[next++];
            length = declaration + (f->used == 0 && p[declaration] == '\n' ? 1 : 0);
            if (f->used > 0) {
                buffer_print(out, ".reg .%s ", f->type);
                registers_declare(f, out);
                buffer_add(out, ";", 1);
            }
        } else if (f != NULL) {
            number = register_write(f, f->rank[number], letters);
            buffer_print(out, "%s%d", letters, number);
        } else {
            length = 1;
            buffer_add(out, p, 1);
        }
        p += length;
    }
    for (int i = 0; i < count; i++) {
        free(files[i].uses);
        free(files[i].rank);
        free(files[i].ranks);
    }
}

// Names of registers are half of the text: gives them short ones. Returns a new text.
static char* registers_shorten(const char* text) {
    static const char entry[] = ".visible .entry";
    buffer out = {NULL, 0, 0};
    while (*text) {
        const char* end = strstr(text + 1, entry);
        end = end != NULL ? end : text + strlen(text);
        registers_rename(text, end, &out);
        text = end;
    }
    return out.data;
}

// Instructions and labels need no line of their own: joins them to lines of up to JOINED_MAX
// characters.
static void lines_join(char* text) {
    char* out = text;
    size_t length = 0; // of the line so far
    bool alone = is_early(text);
    for (const char* p = text; *p; p++) {
        bool more = isalpha((unsigned char)p[1]) || (p[1] != 0 && strchr("@${}", p[1]) != NULL) ||
                    starts_with(p + 1, ".reg") || starts_with(p + 1, ".param");
        bool apart = alone || is_early(p + 1);
        if (*p == '\n' && p > text && strchr(";:{},(", p[-1]) != NULL && more && !apart &&
            length + strcspn(p + 1, "\n") <= JOINED_MAX) {
            continue;
        }
        alone = *p == '\n' ? is_early(p + 1) : alone;
        length = *p == '\n' ? 0 : length + 1;
        *out++ = *p;
    }
    *out = 0;
}

// The lowest PTX version with which a text assembles for its own target; make check verifies it.
static int version_needed(const ptx_text* t) {
    if (t->target >= 90) {
        return t->suffix ? 80 : 78;
    }
    if (t->target >= 80) {
        return 70;
    }
    return strstr(t->text, "ldmatrix") || has_mma(t->text) ? 65 : 63;
}

// The groups of a module, from its source among the files.
static void groups_load(ptx_text* t, char** files, int count) {
    char name[80];
    char words[128] = "";
    snprintf(name, sizeof(name), "%s.cu", t->module);
    for (int i = 0; i < count; i++) {
        if (strcmp(base_name(files[i]), name) == 0) {
            size_t size;
            char* text = file_read(files[i], &size);
            marker_find(text, "// groups:", words, sizeof(words));
            free(text);
        }
    }
    int used = 0;
    for (char* word = strtok(words, " "); word; word = strtok(NULL, " ")) {
        bool plain = strspn(word, "abcdefghijklmnopqrstuvwxyz0123456789") == strlen(word);
        if (!plain || used == GROUPS_MAX || strlen(word) >= sizeof(t->groups[0])) {
            die("line '// groups:' wants up to four words such as bf16", name);
        }
        strcpy(t->groups[used++], word);
    }
    if (used == 0) {
        strcpy(t->groups[0], "core");
    }
}

// qlora.h cuts the kernels out of a text that a program needs, from one line ".visible .entry" to
// the next: before the first of them there may be variables only, and nothing between them.
static void kernels_check(const char* text, const char* path) {
    static const char entry[] = ".visible .entry qlora_";
    const char* p = strstr(text, entry);
    if (p == NULL || (p > text && p[-1] != '\n')) {
        die("contains no kernel whose name begins with qlora_", path);
    }
    if (memchr(text, '{', (size_t)(p - text)) != NULL || strstr(text, ".func") != NULL) {
        die("contains a function that is no kernel", path);
    }
    while (*p) {
        int depth = 0;
        if (!starts_with(p, entry)) {
            die("contains something between two kernels, or after the last", path);
        }
        do {
            depth += *p == '{' ? 1 : *p == '}' ? -1 : 0;
        } while (*p && (*p++ != '}' || depth > 0));
        if (depth != 0 || *p++ != '\n') {
            die("contains a kernel that does not end with a line", path);
        }
    }
}

// ---- words ----

// What PTX says most often has a character or two instead, which PTX does not use: a text takes two
// thirds of its size in an object. The first words have one of WORDS_ONE. The next places, 94, are
// WORDS_TWO[0] and a character from '!' on, the last 94 the same with WORDS_TWO[1]. The header has
// a table of them, so that they may change. A word begins with a semicolon, never with a line.
#define WORDS_ONE "#&'*=^"
#define WORDS_TWO "`~"

static const char* const ptx_words[] = {
    ";add.s32 ", ";mov.f32 ", ";mul.f32 ", ";add.s64 ", ";mov.u32 ", ";mov.b32 ", ";fma.rn.f32 ",
    ";shl.b32 ", ";and.b32 ", ";mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32{",
    ";cvt.rn.bf16x2.f32 ", ";add.f32 ", ";shl.b64 ", ";shr.u32 ", ";ex2.approx.ftz.f32 ",
    ";cvt.s64.s32 ", ";selp.f32 ", ";ld.param.u64 ", ";bra.uni $", ";mul.lo.s64 ", ";setp.ge.s32 ",
    ";shr.s32 ", ";setp.lt.s32 ", ";sub.s32 ", ";sub.f32 ", ";selp.b32 ", ";xor.b32 ", ";max.f32 ",
    ";cvt.u64.u32 ", ";ld.shared.f32 ", ";setp.gt.s32 ", ";cvta.to.global.u64 ", ";or.pred ",
    ";st.shared.b32[", ";mul.rn.f32 ", ";setp.lt.u32 ",
    ";ldmatrix.sync.aligned.m8n8.x4.shared.b16{", ";shfl.sync.bfly.b32 ", ";st.global.u32[",
    ";cp.async.cg.shared.global[", ";ld.param.u32 ", ";or.b32 ", ";ld.global.u16 ", ";neg.f32 ",
    ";or.b64 ", ";st.global.v2.f32[", ";cvt.u32.u64 ", ";st.shared.f32[", ";setp.eq.s32 ",
    ";ld.global.f32 ", ";mul.lo.s32 ", ";ld.shared.u32 ", ";mul.wide.s32 ",
    ";ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16{", ";and.pred ", ";mad.lo.s32 ",
    ";rcp.approx.ftz.f32 ", ";setp.ne.s32 ", ";st.global.f32[", ";setp.ge.s64 ", ";ld.global.u32 ",
    ";mov.u64 ", ";cvt.rn.bf16.f32 ", ";st.global.u16[", ";selp.b64 ", ";prmt.b32 ",
    ";setp.eq.s64 ", ";st.global.v4.u32[", ";mul.wide.u32 ", ";setp.lt.s64 ", ";abs.f32 ",
    ";ld.global.v4.u32{", ";and.b64 ", ";and.b16 ", ";st.shared.u32[", ";min.s32 ", ";shr.u64 ",
    ";shl.b16 ", ";bar.sync ", ";setp.ne.b32 ", ";ld.shared.v4.f32{", ";div.rn.f32 ",
    ";st.shared.v2.f32[", ";setp.ge.f32 ", ";div.s32 ", ";ld.shared.v4.b32{", ";not.pred ",
    ";cvt.f32.f16 ", ";setp.gt.u32 ", ";.reg .b64 ", ";.reg .b32 ", ";cvt.sat.f32.f32 ",
    ";max.s32 ", ";fma.rm.f32 ", ";.reg .f32 ", ";cvt.rn.satfinite.e4m3x2.f32 ", ";cvt.u16.u32 ",
    ";selp.u32 ", ";ld.shared.v4.u32{", ";ld.param.f32 ", ";setp.ne.s64 ", ";sub.s64 ", ";shr.s64 ",
    ";ld.param.v2.u32{", ";mbarrier.init.shared.b64[", ";setp.le.s32 ", ";mov.pred ",
    ";mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32{", ";cvt.u32.u16 ",
    ";wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16{", ";setp.gt.f32 ", ";ld.global.u8 ",
    ";setp.gt.s64 ", ";ld.shared.v2.f32{", ";setp.ge.u32 ", ";or.b16 ", ";ld.u16 ", ";setp.lt.f32 ",
    ";mul.hi.u32 ", ";ld.global.v4.f32{", ";copysign.f32 ", ";mov.u16 ", ";rcp.rn.f32 ",
    ";add.f64 ", ";mov.b64 ", ";.reg .b16 ", ";not.b32 ", ";bar.warp.sync ", ";st.shared.v4.f32[",
    ";ld.shared.f64 ", ";div.u32 ", ";add.rn.f32 ", ";ld.shared.u64 ", ";bfi.b64 ",
    ";st.global.u8[", ";max.u32 ", ";st.shared.v4.u32[", ";ld.global.v2.u32{", ";shfl.sync.up.b32 ",
    ";setp.neu.f32 ", ";mbarrier.try_wait.parity.shared.b64 ", ";ld.global.v2.f32{", ";mov.f64 ",
    ";setp.leu.f32 ", ";ld.global.cg.v4.f32{", ";ld.global.nc.v4.u32{", ";st.global.v2.u32[",
    ";fma.rn.f64 ", ";st.shared.u64[", ";cvta.param.u64 ", ";bfi.b32 ", ";div.approx.f32 ",
    ";cp.async.ca.shared.global[", ";shfl.sync.idx.b32 ", ";st.shared.u16[",
    ";mbarrier.arrive.shared.b64 ", ";cvt.rn.f32.s32 ", ";st.global.v4.f32[", ";cvt.rn.f16.f32 ",
    ";st.shared.f64[", ";setp.eq.b32 ", ";st.global.u64[",
    ";wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16{", ";cp.async.wait_group ",
    ";cvt.f64.f32 ", ";wgmma.wait_group.sync.aligned ", ";ld.global.u64 ", ";setp.eq.s16 ",
    ";st.shared.v4.b32[", ";ld.global.f64 ", ";mul.hi.s32 ", ";ld.shared.v2.u32{", ";selp.u16 ",
    ";ld.v4.u32{", ";mbarrier.arrive.expect_tx.shared.b64 ", ";setp.le.s64 ", ";sqrt.rn.f32 ",
    ";st.volatile.shared.u32[", ";ld.param.s32 ", ";st.shared.v2.u32[", ";ld.global.s32 ",
    ";ld.volatile.shared.u32 ", ";ld.global.cg.f32 ", ";ld.global.nc.f32 ", ";cvt.rn.f32.f64 ",
    ";wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16{", ";ld.relaxed.gpu.global.u64 ",
    ";wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16{"};

enum { WORDS = sizeof(ptx_words) / sizeof(ptx_words[0]), WORDS_SINGLE = 6, WORDS_EACH = 94 };

// The number of a word's place: second characters that a string would have to quote are left out.
static int word_place(int word) {
    int place = WORDS_SINGLE;
    if (word < WORDS_SINGLE) {
        return word;
    }
    for (int left = word - WORDS_SINGLE;; place++) {
        int second = '!' + (place - WORDS_SINGLE) % WORDS_EACH;
        bool quoted = second == '"' || second == '\\' || second == '?';
        if (!quoted && left-- == 0) {
            return place;
        }
    }
}

// The longest word at the start of p; -1 if there is none.
static int word_at(const char* p) {
    size_t longest = 0;
    int found = -1;
    for (int i = 0; *p == ';' && i < WORDS; i++) {
        size_t n = strlen(ptx_words[i]);
        if (n > longest && strncmp(p, ptx_words[i], n) == 0) {
            longest = n;
            found = i;
        }
    }
    return found;
}

// Writes words for what they stand for, in place.
static void words_shorten(char* text, const char* path) {
    char* out = text;
    for (const char* p = text; *p;) {
        int word = word_at(p);
        if (strchr(WORDS_ONE WORDS_TWO, *p)) {
            die("contains a character that stands for a word of PTX", path);
        }
        if (word < 0) {
            *out++ = *p++;
            continue;
        }
        int place = word_place(word);
        p += strlen(ptx_words[word]);
        if (place < WORDS_SINGLE) {
            *out++ = WORDS_ONE[place];
        } else {
            *out++ = WORDS_TWO[(place - WORDS_SINGLE) / WORDS_EACH];
            *out++ = (char)('!' + (place - WORDS_SINGLE) % WORDS_EACH);
        }
    }
    *out = 0;
}

// The table of the header, with an empty place where there is no word.
static void words_write(FILE* out) {
    int last = -1;
    size_t column = TEXT_COLUMNS;
    fprintf(out,
            "// Words of the texts. A text has for them a character of %s, then %c and a\n"
            "// character from '!' on, then %c and a character from '!' on.\n"
            "static const char* const qlora__ptx_words[] QLORA__PTX_UNUSED = {",
            WORDS_ONE, WORDS_TWO[0], WORDS_TWO[1]);
    for (int i = 0; i < WORDS; i++) {
        for (int place = word_place(i); last < place; last++) {
            const char* word = last + 1 == place ? ptx_words[i] : "";
            fputs(column + strlen(word) + 4 > COLUMNS ? "\n    " : " ", out);
            column = (column + strlen(word) + 4 > COLUMNS ? 3 : column) + strlen(word) + 4;
            fprintf(out, "\"%s\",", word);
        }
    }
    fputs("\n};\n\n", out);
}

static void text_load(const char* path, ptx_text* t) {
    name_parse(path, t);
    t->text = file_read(path, &t->length);
    comments_strip(t->text);
    lines_strip(t->text);
    blanks_squeeze(t->text, path);
    names_shorten(t->text);
    char* longer = t->text;
    t->text = registers_shorten(longer);
    free(longer);
    lines_join(t->text);
    kernels_check(t->text, path);
    if (strstr(t->text, "_GLOBAL__N_") || strstr(t->text, "_INTERNAL_")) {
        die("contains a name derived from the path of the source (unnamed namespace)", path);
    }
    t->version = version_needed(t);
    words_shorten(t->text, path);
    t->length = strlen(t->text);
    t->hash = fnv1a(FNV_START, t->text, t->length);
}

// ---- writing kernels_ptx.h ----

static void suffix_text(const ptx_text* t, char out[4]) {
    out[0] = t->suffix;
    out[1] = 0;
}

// A chunk is a run of complete lines of one text. What is identical for two targets is written
// once, so a chunk also ends where a kernel ends and around the lines in which targets differ.
typedef struct ptx_chunk {
    const char* text;
    size_t length;
    int users;  // texts that have it
    int number; // -1 until it is written
} ptx_chunk;

typedef struct chunk_list {
    ptx_chunk* items;
    int count;
    int room;
} chunk_list;

static size_t line_length(const char* line) {
    return strcspn(line, "\n") + 1;
}

static ptx_chunk chunk_cut(const char* text, const char* module) {
    ptx_chunk c = {text, 0, 1, -1};
    while (text[c.length]) {
        const char* line = text + c.length;
        size_t n = line_length(line);
        if (n > CHUNK_MAX) {
            die("contains a line that is longer than a chunk", module);
        }
        if (c.length + n > CHUNK_MAX ||
            (c.length > 0 && (starts_with(line, ".visible .entry") || is_early(line)))) {
            break;
        }
        c.length += n;
        if (is_early(line)) {
            break;
        }
    }
    return c;
}

// The chunk in the list, added when it is not known yet.
static ptx_chunk* chunk_find(chunk_list* list, ptx_chunk c) {
    for (int i = 0; i < list->count; i++) {
        ptx_chunk* old = &list->items[i];
        if (old->length == c.length && memcmp(old->text, c.text, c.length) == 0) {
            return old;
        }
    }
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 256;
        size_t bytes = (size_t)list->room * sizeof(ptx_chunk);
        list->items = (ptx_chunk*)need_memory(realloc(list->items, bytes));
    }
    c.users = 0;
    list->items[list->count] = c;
    return &list->items[list->count++];
}

// The length of the statement at the start of a line, up to its semicolon, the next word or the end
// of the line.
static size_t statement_length(const char* line) {
    size_t word = strchr(WORDS_ONE, *line) ? 1 : strchr(WORDS_TWO, *line) ? 2 : 0;
    size_t n = word + strcspn(line + word, ";\n\"" WORDS_ONE WORDS_TWO);
    if (line[n] != 0 && strchr(WORDS_ONE WORDS_TWO, line[n])) {
        return n;
    }
    return line[n] == ';' && line[n + 1] != '\n' ? n + 1 : line_length(line);
}

// As many statements of PTX in a line of the header as fit.
static void chunk_write(FILE* out, const ptx_chunk* c) {
    fprintf(out, "static const char qlora__ptx_%d[]%s =", c->number,
            c->users > 1 ? " QLORA__PTX_UNUSED" : "");
    size_t column = TEXT_COLUMNS;
    for (size_t at = 0; at < c->length;) {
        const char* line = c->text + at;
        size_t n = statement_length(line);
        if (column + n + 4 > TEXT_COLUMNS) {
            fputs(at > 0 ? "\"\n\"" : "\n\"", out);
            column = 0;
        }
        column += n + 1;
        for (size_t i = 0; i < n; i++) {
            if (line[i] == '"' || line[i] == '\\' || line[i] == '?' || line[i] == '\n') {
                fputc('\\', out);
            }
            fputc(line[i] == '\n' ? 'n' : line[i], out);
        }
        at += n;
    }
    fputs("\";\n", out);
}

static void macro_text(const char* group, char out[40]) {
    snprintf(out, 40, "QLORA_PTX_NO_%.20s", group);
    for (char* p = out; *p; p++) {
        *p = (char)toupper((unsigned char)*p);
    }
}

// "// texts SCOPE: GROUPS" opens a block, "// end" closes it: --only reads them.
static void block_write(FILE* out, const ptx_text* t, const char* scope) {
    fprintf(out, "// texts %s %s:", t->module, scope);
    for (int i = 0; i < GROUPS_MAX && t->groups[i][0]; i++) {
        fprintf(out, " %s", t->groups[i]);
    }
    fputs("\n", out);
}

// The chunks that several texts of a module have, before the texts: they stay as long as the module
// does.
static void shared_write(FILE* out, const ptx_text* t, chunk_list* list, int* number) {
    bool any = false;
    for (int i = 0; i < list->count; i++) {
        if (list->items[i].users < 2) {
            continue;
        }
        if (!any) {
            block_write(out, t, "shared");
            for (int g = 0; g < GROUPS_MAX && t->groups[g][0]; g++) {
                char macro[40];
                macro_text(t->groups[g], macro);
                fprintf(out, "%s!defined(%s)", g == 0 ? "#if " : " && ", macro);
            }
            fputs("\n", out);
            any = true;
        }
        list->items[i].number = (*number)++;
        chunk_write(out, &list->items[i]);
    }
    fputs(any ? "#endif\n// end\n\n" : "", out);
}

// One text: its own chunks, their array, and the end of its row in the table; or, when a macro
// leaves it out, a row that names the macro.
static void text_write(FILE* out, const ptx_text* t, chunk_list* list, int* number) {
    char suffix[4];
    char name[96];
    char scope[24];
    char macros[GROUPS_MAX + 1][40];
    int count = 0;
    suffix_text(t, suffix);
    snprintf(name, sizeof(name), "%s_%d%s", t->module, t->target, suffix);
    snprintf(scope, sizeof(scope), "sm_%d%s", t->target, suffix);
    block_write(out, t, scope);
    for (; count < GROUPS_MAX && t->groups[count][0]; count++) {
        macro_text(t->groups[count], macros[count]);
    }
    if (t->target > BASE_TARGET) {
        char target[24];
        snprintf(target, sizeof(target), "sm%d%s", t->target, suffix);
        macro_text(target, macros[count++]);
    }
    for (int i = 0; i < count; i++) {
        fprintf(out, "#%s defined(%s)\n#define QLORA__PTX_%s 0, 0u, 0u, \"%s\"\n",
                i == 0 ? "if" : "elif", macros[i], name, macros[i]);
    }
    fputs("#else\n", out);
    for (size_t at = 0; t->text[at];) {
        ptx_chunk* c = chunk_find(list, chunk_cut(t->text + at, t->module));
        if (c->number < 0) {
            c->number = (*number)++;
            chunk_write(out, c);
        }
        at += c->length;
    }
    fprintf(out, "static const char* const qlora__ptx_%s[] = {\n", name);
    for (size_t at = 0; t->text[at];) {
        const ptx_chunk* c = chunk_find(list, chunk_cut(t->text + at, t->module));
        fprintf(out, "qlora__ptx_%d,\n", c->number);
        at += c->length;
    }
    fprintf(out, "0};\n#define QLORA__PTX_%s qlora__ptx_%s, %luu, 0x%08xu, 0\n", name, name,
            (unsigned long)t->length, (unsigned)t->hash);
    fputs("#endif\n// end\n\n", out);
}

// The texts of one module, the first of `count` in a row.
static int module_write(FILE* out, const ptx_text* texts, int count, int* number) {
    chunk_list list = {NULL, 0, 0};
    int used = 0;
    for (; used < count && strcmp(texts[used].module, texts[0].module) == 0; used++) {
        int before = list.count;
        for (size_t at = 0; texts[used].text[at];) {
            ptx_chunk* c = chunk_find(&list, chunk_cut(texts[used].text + at, texts[0].module));
            bool again = c - list.items >= before; // twice in one text
            c->users += again && c->users > 0 ? 0 : 1;
            at += c->length;
        }
    }
    shared_write(out, &texts[0], &list, number);
    for (int i = 0; i < used; i++) {
        text_write(out, &texts[i], &list, number);
    }
    free(list.items);
    return used;
}

static void banner_write(FILE* out, const char* nvcc, char** files, int count) {
    fputs("// kernels_ptx.h - the GPU kernels of qlora.h as PTX text.\n"
          "//\n"
          "// GENERATED by `make ptx`. Do not edit: change kernels/*/*.cu and run it again.\n"
          "// SPDX-License-Identifier: MIT-0 OR Unlicense\n"
          "//\n"
          "// The lines .version, .target and .address_size are omitted; qlora.h adds them for\n"
          "// the current device. `make check` compares the hashes below with kernels/.\n"
          "//\n",
          out);
    fprintf(out, "// nvcc %s\n", nvcc);
    for (int i = 0; i < count; i++) {
        if (is_source(files[i])) {
            char hex[65];
            file_hash(files[i], hex);
            fprintf(out, "// sha256 %s %s\n", hex, source_name(files[i]));
        }
    }
}

static int by_text(const void* a, const void* b) {
    return strcmp((const char*)a, (const char*)b);
}

static bool in_group(const ptx_text* t, const char* group) {
    for (int i = 0; i < GROUPS_MAX && t->groups[i][0]; i++) {
        if (strcmp(t->groups[i], group) == 0) {
            return true;
        }
    }
    return false;
}

// Macro, bytes and modules of a group.
// The bytes that leaving texts out saves: a chunk that a module has twice is stored once, and stays
// if another text of the module needs it.
static unsigned long saved_bytes(const ptx_text* texts, const bool* left_out, int count) {
    unsigned long bytes = 0;
    for (int first = 0, end = 0; first < count; first = end) {
        chunk_list list = {NULL, 0, 0};
        while (end < count && strcmp(texts[end].module, texts[first].module) == 0) {
            end++;
        }
        for (int i = first; i < end; i++) {
            for (size_t at = 0; texts[i].text[at];) {
                ptx_chunk* c = chunk_find(&list, chunk_cut(texts[i].text + at, texts[i].module));
                c->users += left_out[i] ? 0 : 1;
                at += c->length;
            }
        }
        for (int i = 0; i < list.count; i++) {
            bytes += list.items[i].users == 0 ? (unsigned long)list.items[i].length : 0;
        }
        free(list.items);
    }
    return bytes;
}

static void group_line(FILE* out, const char* group, const ptx_text* texts, int count) {
    char macro[40];
    bool left_out[FILES_MAX];
    for (int i = 0; i < count; i++) {
        left_out[i] = in_group(&texts[i], group);
    }
    unsigned long bytes = saved_bytes(texts, left_out, count);
    macro_text(group, macro);
    fprintf(out, "//   %-21s %7lu bytes:", macro, bytes);
    size_t column = 41;
    for (int i = 0; i < count; i++) {
        if (!in_group(&texts[i], group) ||
            (i > 0 && strcmp(texts[i].module, texts[i - 1].module) == 0)) {
            continue;
        }
        if (column + strlen(texts[i].module) + 1 > COLUMNS) {
            fprintf(out, "\n//   %36s", "");
            column = 41;
        }
        column += strlen(texts[i].module) + 1;
        fprintf(out, " %s", texts[i].module);
    }
    fputs("\n", out);
}

// A line for each target that has a macro.
static void target_lines(FILE* out, const ptx_text* texts, int count) {
    for (int i = 0; i < count; i++) {
        bool first = texts[i].target > BASE_TARGET;
        for (int j = 0; j < i; j++) {
            first =
                first && (texts[j].target != texts[i].target || texts[j].suffix != texts[i].suffix);
        }
        if (first) {
            char macro[40];
            char target[24];
            bool left_out[FILES_MAX];
            snprintf(target, sizeof(target), "sm%d%.1s", texts[i].target, &texts[i].suffix);
            macro_text(target, macro);
            for (int j = 0; j < count; j++) {
                left_out[j] =
                    texts[j].target == texts[i].target && texts[j].suffix == texts[i].suffix;
            }
            unsigned long bytes = saved_bytes(texts, left_out, count);
            fprintf(out, "//   %-21s %7lu bytes: every text for sm_%s\n", macro, bytes, target + 2);
        }
    }
}

// What the macros leave out, as a comment.
static void groups_write(FILE* out, const ptx_text* texts, int count) {
    fputs("//\n"
          "// Each macro, defined before the implementation, leaves out the modules after it; a\n"
          "// call that needs one of them fails and names the macro. `embed --only` writes a\n"
          "// smaller file.\n"
          "//\n",
          out);
    char seen[64][16];
    int groups = 0;
    for (int i = 0; i < count; i++) {
        for (int g = 0; g < GROUPS_MAX && texts[i].groups[g][0]; g++) {
            bool known = false;
            for (int k = 0; k < groups; k++) {
                known = known || strcmp(seen[k], texts[i].groups[g]) == 0;
            }
            if (!known && groups < 64) {
                strcpy(seen[groups++], texts[i].groups[g]);
            }
        }
    }
    qsort(seen, (size_t)groups, sizeof(seen[0]), by_text);
    for (int k = 0; k < groups; k++) {
        group_line(out, seen[k], texts, count);
    }
    target_lines(out, texts, count);
}

static void head_write(FILE* out) {
    fputs("\n#ifndef QLORA__KERNELS_PTX_H\n"
          "#define QLORA__KERNELS_PTX_H\n"
          "\n"
          "#include <stddef.h>\n"
          "#include <stdint.h>\n"
          "\n"
          "#define QLORA__KERNEL_ABI 4\n"
          "\n"
          "#if defined(__GNUC__) || defined(__clang__)\n"
          "#define QLORA__PTX_UNUSED __attribute__((unused))\n"
          "#else\n"
          "#define QLORA__PTX_UNUSED\n"
          "#endif\n"
          "\n"
          "// clang-format off\n"
          "typedef struct qlora__ptx_text {\n"
          "    const char* module;\n"
          "    int target;                // compute capability it is written for: 75, 80, 90\n"
          "    char suffix;               // 'a' when it runs on that target only, else 0\n"
          "    int version;               // lowest PTX version it assembles with: 63 is 6.3\n"
          "    const char* const* chunks; // ends with NULL; itself NULL when left out\n"
          "    size_t length;             // of all chunks together\n"
          "    uint32_t hash;             // FNV-1a\n"
          "    const char* left_out;      // by which macro or command; NULL when it is here\n"
          "} qlora__ptx_text;\n\n",
          out);
    words_write(out);
}

static void table_write(FILE* out, const ptx_text* texts, int count) {
    fputs("static const qlora__ptx_text qlora__ptx_texts[] QLORA__PTX_UNUSED = {\n", out);
    for (int i = 0; i < count; i++) {
        const ptx_text* t = &texts[i];
        char suffix[4];
        suffix_text(t, suffix);
        fprintf(out, "    {\"%s\", %d, ", t->module, t->target);
        fprintf(out, t->suffix ? "'%c', " : "0, ", t->suffix);
        fprintf(out, "%d, QLORA__PTX_%s_%d%s},\n", t->version, t->module, t->target, suffix);
    }
    fprintf(out, "};\n// clang-format on\n\n#define QLORA__PTX_TEXT_COUNT %d\n\n#endif\n", count);
}

static int by_name(const void* a, const void* b) {
    return strcmp(base_name(*(char* const*)a), base_name(*(char* const*)b));
}

static int command_write(const char* path, const char* nvcc, char** files, int count) {
    static ptx_text texts[FILES_MAX];
    int used = 0;
    qsort(files, (size_t)count, sizeof(files[0]), by_name);
    for (int i = 0; i < count; i++) {
        if (ends_with(files[i], ".ptx")) {
            if (used == FILES_MAX) {
                die("too many files", NULL);
            }
            text_load(files[i], &texts[used]);
            groups_load(&texts[used++], files, count);
        } else if (!is_source(files[i])) {
            die("neither .cu, .cuh nor .ptx", files[i]);
        }
    }
    if (used == 0) {
        die("no PTX files given", NULL);
    }
    FILE* out = fopen(path, "wb");
    if (!out) {
        die("cannot write", path);
    }
    banner_write(out, nvcc, files, count);
    groups_write(out, texts, used);
    head_write(out);
    int number = 0;
    for (int i = 0; i < used;) {
        i += module_write(out, texts + i, used - i, &number);
    }
    table_write(out, texts, used);
    bool bad = ferror(out) != 0;
    if (fclose(out) != 0 || bad) {
        die("cannot write", path);
    }
    return 0;
}

// ---- a smaller kernels_ptx.h ----

// Words are separated by commas or blanks.
static bool word_in(const char* words, const char* word, size_t length) {
    for (const char* p = words; *p;) {
        size_t n = strcspn(p, ", ");
        if (n == length && strncmp(p, word, n) == 0) {
            return true;
        }
        p += n + (p[n] != 0);
    }
    return false;
}

// line: "MODULE SCOPE: GROUP..." of a block, SCOPE being sm_NN or "shared".
static bool block_kept(const char* line, const char* words) {
    size_t module = strcspn(line, " ");
    const char* scope = line + module + 1;
    size_t scope_length = strcspn(scope, ":");
    bool targets = starts_with(words, "sm_") || strstr(words, " sm_") || strstr(words, ",sm_");
    if (targets && starts_with(scope, "sm_") && !word_in(words, scope, scope_length)) {
        return false;
    }
    if (word_in(words, line, module)) {
        return true;
    }
    const char* end = line + strcspn(line, "\n");
    for (const char* p = scope + scope_length + 2; p < end;) {
        size_t n = strcspn(p, " \n");
        if (!word_in(words, p, n)) {
            return false;
        }
        p += n + 1;
    }
    return true;
}

// Every word is a module, a group or a target of the header.
static void words_check(const char* text, const char* words) {
    for (const char* p = words; *p;) {
        size_t n = strcspn(p, ", ");
        bool known = n == 0;
        for (const char* b = text; !known && (b = strstr(b, "\n// texts ")) != NULL; b++) {
            const char* line = b + strlen("\n// texts ");
            size_t end = strcspn(line, "\n");
            for (size_t at = 0; at < end && !known;) {
                size_t m = strcspn(line + at, " :\n");
                known = m == n && strncmp(line + at, p, n) == 0 && strncmp(p, "shared", n) != 0;
                known = known || (at == 0 && m == n && strncmp(line, p, n) == 0);
                at += m + 1;
            }
        }
        if (!known) {
            char word[64];
            snprintf(word, sizeof(word), "%.*s", (int)n, p);
            die("no module, group or target of this header has that name", word);
        }
        p += n + (p[n] != 0);
    }
}

// The header without the texts that no word names.
static void header_only(const char* words, const char* text, buffer* out) {
    if (strlen(words) > 200 || strpbrk(words, "\"\\\n?") || strspn(words, ", ") == strlen(words)) {
        die("--only wants up to 200 characters of names", NULL);
    }
    words_check(text, words);
    bool drop = false;
    for (const char* line = text; *line; line += line_length(line)) {
        size_t n = line_length(line);
        if (starts_with(line, "// texts ")) {
            const char* module = line + strlen("// texts ");
            drop = !block_kept(module, words);
            size_t name = strcspn(module, " ");
            const char* scope = module + name + 1;
            if (drop && starts_with(scope, "sm_")) {
                buffer_print(out, "#define QLORA__PTX_%.*s_%.*s 0, 0u, 0u, \"embed --only %s\"\n",
                             (int)name, module, (int)strcspn(scope, ":") - 3, scope + 3, words);
            }
        }
        if (!drop) {
            buffer_add(out, line, n);
        }
        if (line == text) {
            buffer_print(out, "// Made smaller by: embed --only \"%s\"\n", words);
        }
        drop = drop && !starts_with(line, "// end");
    }
}

// ---- a packed kernels_ptx.h ----
//
// src/cache/unpack.h has the format. Texts that share chunks share a part, so that the texts of a
// module for several targets cost little more than one of them.

// A block of the header, and what becomes of it.
typedef struct pack_block {
    const char* begin; // "// texts MODULE SCOPE: GROUP..."
    const char* body;  // after "#else" or, of a shared one, after "#if"
    const char* end;   // after "// end"
    char module[64];
    bool shared;
    char name[96]; // of a text: MODULE_NN
    int* numbers;  // of its chunks
    int count;
    buffer text; // what it consists of
    buffer own;  // the part, and then the characters that it becomes
    size_t length;
    uint32_t hash;
} pack_block;

typedef struct pack_header {
    const char* path;
    buffer* chunks; // by number
    int chunk_count;
    pack_block* blocks;
    int block_count;
    int numbers; // of chunks in the output
} pack_header;

// The line after the one at `line`.
static const char* line_next(const char* line) {
    size_t n = strcspn(line, "\n");
    return line + n + (line[n] == '\n');
}

// The number in a chunk's name "qlora__ptx_12" at p; -1 if it is none.
static int chunk_number(const char* p) {
    int number = -1;
    int length = 0;
    char start[64];
    start_copy(p, start);
    bool ok = sscanf(start, "qlora__ptx_%d%n", &number, &length) == 1 && length > 0;
    return ok && number >= 0 && !in_name(start[length]) ? number : -1;
}

// Reads the literals of a chunk, from the line after its name. Returns the line after them.
static const char* literals_read(const char* line, buffer* out) {
    for (; *line == '"'; line = line_next(line)) {
        const char* p = line + 1;
        for (; *p && *p != '"' && *p != '\n'; p++) {
            char c = *p;
            if (c == '\\') {
                c = *++p == 'n' ? '\n' : *p;
            }
            if (!*p) {
                break;
            }
            buffer_add(out, &c, 1);
        }
    }
    return line;
}

static void chunks_read(pack_header* h, const char* text) {
    static const char start[] = "static const char qlora__ptx_";
    for (const char* line = text; *line; line = line_next(line)) {
        int number = starts_with(line, start) ? chunk_number(strchr(line, 'q')) : -1;
        if (number < 0) {
            continue;
        }
        if (number >= h->chunk_count) {
            size_t count = (size_t)number + 1;
            size_t old = (size_t)h->chunk_count;
            h->chunks = (buffer*)need_memory(realloc(h->chunks, count * sizeof(buffer)));
            memset(h->chunks + old, 0, (count - old) * sizeof(buffer));
            h->chunk_count = number + 1;
        }
        if (h->chunks[number].size > 0) {
            die("two chunks have the same number", h->path);
        }
        literals_read(line_next(line), &h->chunks[number]);
    }
}

// The names of the chunks of a text, up to "0};". Returns the line after them.
static const char* numbers_read(const pack_header* h, const char* line, pack_block* b) {
    for (; starts_with(line, "qlora__ptx_"); line = line_next(line)) {
        int number = chunk_number(line);
        if (number < 0 || number >= h->chunk_count || h->chunks[number].size == 0) {
            die("names a chunk that does not exist", b->module);
        }
        size_t bytes = ((size_t)b->count + 1) * sizeof(b->numbers[0]);
        b->numbers = (int*)need_memory(realloc(b->numbers, bytes));
        b->numbers[b->count++] = number;
        buffer_add(&b->text, h->chunks[number].data, h->chunks[number].size);
    }
    return line_next(line);
}

// Reads the block that begins at a line.
static void block_read(const pack_header* h, const char* line, pack_block* b) {
    unsigned long length = 0;
    unsigned hash = 0;
    char row[256] = "";
    char scope[24];
    memset(b, 0, sizeof(*b));
    b->begin = line;
    snprintf(row, sizeof(row), "%.*s", (int)strcspn(line, "\n"), line);
    if (sscanf(row, "// texts %63s %23[a-z0-9_]:", b->module, scope) != 2) {
        die("contains a line '// texts' without module and target", h->path);
    }
    b->shared = strcmp(scope, "shared") == 0;
    const char* open = b->shared ? "#if" : "#else";
    while (*line && !starts_with(line, "// end")) {
        bool names = starts_with(line, "static const char* const qlora__ptx_");
        b->body = !b->body && starts_with(line, open) ? line_next(line) : b->body;
        line = line_next(line);
        if (names) {
            line = numbers_read(h, line, b);
            snprintf(row, sizeof(row), "%.*s", (int)strcspn(line, "\n"), line);
        }
    }
    b->end = line_next(line);
    if (!b->body || !*line ||
        (!b->shared && sscanf(row, "#define QLORA__PTX_%95s qlora__ptx_%*s %luu, 0x%xu, 0", b->name,
                              &length, &hash) != 3)) {
        die("its block is not as make ptx writes it", b->module);
    }
    b->length = length;
    b->hash = hash;
    if (!b->shared &&
        (b->text.size != length || fnv1a(FNV_START, b->text.data, b->text.size) != hash)) {
        die("its text has been edited: length or hash is wrong", b->name);
    }
}

static void blocks_read(pack_header* h, const char* text) {
    for (const char* line = text; *line; line = line_next(line)) {
        if (starts_with(line, "// texts ")) {
            size_t bytes = ((size_t)h->block_count + 1) * sizeof(h->blocks[0]);
            h->blocks = (pack_block*)need_memory(realloc(h->blocks, bytes));
            block_read(h, line, &h->blocks[h->block_count++]);
        }
    }
    if (h->block_count == 0) {
        die("contains no texts", h->path);
    }
}

// How often a text has a chunk.
static int chunk_uses(const pack_block* b, int number) {
    int uses = 0;
    for (int i = 0; i < b->count; i++) {
        uses += b->numbers[i] == number;
    }
    return uses;
}

// The chunks that each of the texts has once and in the same order, the anchors, become the runs of
// the shared part. Sets begins[i] where a run begins at anchor i: in some text, something else is
// before it. Returns how many anchors there are; 0 if their order differs.
static int anchors_find(const pack_block* texts, int count, int* anchors, bool* begins) {
    int used = 0;
    for (int i = 0; i < texts[0].count; i++) {
        bool all = true;
        for (int t = 0; t < count; t++) {
            all = all && chunk_uses(&texts[t], texts[0].numbers[i]) == 1;
        }
        if (all) {
            begins[used] = used == 0;
            anchors[used++] = texts[0].numbers[i];
        }
    }
    for (int t = 0; t < count; t++) {
        int next = 0;
        bool apart = false;
        for (int i = 0; i < texts[t].count; i++) {
            if (next < used && texts[t].numbers[i] == anchors[next]) {
                begins[next] = begins[next] || apart;
                apart = false;
                next++;
            } else {
                apart = true;
            }
        }
        if (next < used) {
            return 0;
        }
    }
    return used;
}

// Divides the texts of a module, which stand in a row, into their own parts and the shared one.
static void parts_make(const pack_header* h, pack_block* texts, int count, buffer* shared) {
    static const char mark = QLORA__UNPACK_MARK;
    size_t most = (size_t)texts[0].count + 1;
    int* anchors = (int*)need_memory(malloc(most * sizeof(anchors[0])));
    bool* begins = (bool*)need_memory(malloc(most * sizeof(begins[0])));
    int used = shared ? anchors_find(texts, count, anchors, begins) : 0;
    for (int i = 0; i < used; i++) {
        if (begins[i] && i > 0) {
            buffer_add(shared, &mark, 1);
        }
        buffer_add(shared, h->chunks[anchors[i]].data, h->chunks[anchors[i]].size);
    }
    for (int t = 0; t < count; t++) {
        int next = 0;
        for (int i = 0; i < texts[t].count; i++) {
            const buffer* chunk = &h->chunks[texts[t].numbers[i]];
            bool anchor = next < used && texts[t].numbers[i] == anchors[next];
            if (!anchor) {
                buffer_add(&texts[t].own, chunk->data, chunk->size);
            } else if (begins[next++]) {
                buffer_add(&texts[t].own, &mark, 1);
            }
        }
    }
    free(anchors);
    free(begins);
}

// Adds two characters for 13 bits.
static void pair_add(buffer* out, uint32_t value) {
    char digits[96];
    int used = 0;
    for (char c = '!'; c <= '~'; c++) {
        if (qlora__unpack_digit(c) < 91) {
            digits[used++] = c;
        }
    }
    char pair[2] = {digits[value % 91], digits[value / 91]};
    buffer_add(out, pair, 2);
}

// Replaces a part by the characters that stand for it.
static void part_pack(buffer* part) {
    uint8_t* packed = NULL;
    size_t size = 0;
    if (!deflate((const uint8_t*)part->data, part->size, &packed, &size)) {
        die("out of memory", NULL);
    }
    uint32_t bits = 0;
    unsigned count = 0;
    size_t length = part->size;
    part->size = 0;
    for (size_t i = 0; i < size + 4; i++) {
        bits |= (i < 4 ? (uint32_t)(length >> 8 * i & 255) : packed[i - 4]) << count;
        count += 8;
        if (count >= 13) {
            pair_add(part, bits & 8191);
            bits >>= 13;
            count -= 13;
        }
    }
    if (count > 0) {
        pair_add(part, bits);
    }
    free(packed);
}

// Unpacks chunks into a new text. NULL if they are damaged.
static char* text_unpack(const char* const* chunks, size_t length, uint32_t hash) {
    uint8_t* data[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    bool ok = true;
    for (int i = 0; i < 2 && ok; i++) {
        size_t size = qlora__unpack_size(chunks);
        uint8_t* bytes = (uint8_t*)need_memory(malloc(size + 1));
        ok = qlora__unpack_bytes(chunks, bytes, size);
        sizes[i] = qlora__unpack_length(bytes, size);
        ok = ok && sizes[i] / 2 <= length && (sizes[i] > 0 || size == 0);
        data[i] = (uint8_t*)need_memory(malloc(ok ? sizes[i] + 1 : 1));
        ok = ok && (size == 0 || qlora__unpack_part(bytes, size, data[i], sizes[i]));
        free(bytes);
        while (*chunks) {
            chunks++;
        }
        chunks++;
    }
    char* text = (char*)need_memory(malloc(length + 1));
    ok = ok && qlora__unpack_merge(data[0], sizes[0], data[1], sizes[1], text, length);
    ok = ok && qlora__unpack_hash(text, length) == hash;
    text[length] = 0;
    free(data[0]);
    free(data[1]);
    if (!ok) {
        free(text);
        return NULL;
    }
    return text;
}

// The characters as chunks, and the first and last number of them.
static void packed_chunks(pack_header* h, const buffer* part, const char* unused, buffer* out,
                          int numbers[2]) {
    numbers[0] = h->numbers;
    for (size_t at = 0; at < part->size; h->numbers++) {
        size_t end = part->size - at < CHUNK_MAX ? part->size : at + CHUNK_MAX;
        buffer_print(out, "static const char qlora__ptx_%d[]%s =\n", h->numbers, unused);
        while (at < end) {
            size_t n = end - at < PACKED_COLUMNS ? end - at : PACKED_COLUMNS;
            buffer_print(out, "\"%.*s\"%s\n", (int)n, part->data + at, at + n < end ? "" : ";");
            at += n;
        }
    }
    numbers[1] = h->numbers;
}

static void names_write(const int numbers[2], buffer* out) {
    for (int i = numbers[0]; i < numbers[1]; i++) {
        buffer_print(out, "qlora__ptx_%d,\n", i);
    }
}

// The texts of a module, from the first of its blocks on; `out` has a buffer for each block.
// Returns how many blocks it has.
static int module_pack(pack_header* h, pack_block* first, int most, buffer* out) {
    int count = 1;
    while (count < most && strcmp(first[count].module, first[0].module) == 0) {
        count++;
    }
    int begin = first[0].shared ? 1 : 0;
    int shared_numbers[2] = {0, 0};
    buffer* shared = begin == 1 && count > 2 ? &first[0].own : NULL;
    if (count > begin) {
        parts_make(h, first + begin, count - begin, shared);
    }
    if (shared && shared->size > 0) {
        part_pack(shared);
        buffer_add(out, first[0].begin, (size_t)(first[0].body - first[0].begin));
        packed_chunks(h, shared, " QLORA__PTX_UNUSED", out, shared_numbers);
        buffer_print(out, "#endif\n// end\n");
    }
    for (int i = begin; i < count; i++) {
        pack_block* b = &first[i];
        int numbers[2];
        part_pack(&b->own);
        const char* chunks[4] = {b->own.data, NULL, shared && shared->size ? shared->data : NULL,
                                 NULL};
        char* again = text_unpack(chunks, b->length, b->hash);
        if (!again || memcmp(again, b->text.data, b->length) != 0) {
            die("does not become itself again", b->name);
        }
        free(again);
        buffer_add(&out[i], b->begin, (size_t)(b->body - b->begin));
        packed_chunks(h, &b->own, "", &out[i], numbers);
        buffer_print(&out[i], "static const char* const qlora__ptx_%s[] = {\n", b->name);
        names_write(numbers, &out[i]);
        buffer_print(&out[i], "0,\n");
        names_write(shared_numbers, &out[i]);
        buffer_print(&out[i],
                     "0};\n#define QLORA__PTX_%s qlora__ptx_%s, %luu, 0x%08xu, 0\n#endif\n// end\n",
                     b->name, b->name, (unsigned long)b->length, (unsigned)b->hash);
    }
    return count;
}

// A line "//   QLORA_PTX_NO_BF16  123 bytes: attn128 ..." with the bytes of the packed texts.
static void macro_line(const pack_header* h, const char* line, buffer* out) {
    char macro[48];
    unsigned long bytes = 0;
    const char* name = strchr(line, 'Q');
    const char* rest = strstr(line, " bytes:");
    snprintf(macro, sizeof(macro), "(%.*s)", (int)strcspn(name, " \n"), name);
    for (int i = 0; i < h->block_count; i++) {
        const pack_block* b = &h->blocks[i];
        const char* found = strstr(b->begin, macro);
        bytes += found && found < b->body ? (unsigned long)b->own.size : 0;
    }
    if (!rest || rest > line + line_length(line)) {
        die("contains a macro without its bytes", h->path);
    }
    macro[strlen(macro) - 1] = 0;
    buffer_print(out, "//   %-21s %7lu", macro + 1, bytes);
    buffer_add(out, rest, (size_t)(line + line_length(line) - rest));
}

// Everything that is not a block.
static void other_line(const pack_header* h, const char* text, const char* line, buffer* out) {
    if (starts_with(line, "//   QLORA_PTX_NO_")) {
        macro_line(h, line, out);
    } else if (starts_with(line, "#define QLORA__KERNEL_ABI ")) {
        buffer_print(out, "#define QLORA__KERNEL_ABI 104 // 4, packed\n");
    } else if (starts_with(line, "    const char* const* chunks;")) {
        buffer_print(out, "    const char* const* chunks; // its own, NULL, its module's, NULL; "
                          "itself NULL when left out\n");
    } else if (starts_with(line, "    size_t length; ")) {
        buffer_print(out, "    size_t length;             // of the unpacked text\n");
    } else {
        buffer_add(out, line, line_length(line));
    }
    if (line == text) {
        buffer_print(out, "// Packed by: embed --packed. qlora.h unpacks a module's text when it "
                          "loads it.\n");
    }
}

// The header with packed texts.
static void header_packed(const char* path, const char* text, buffer* out) {
    pack_header h;
    memset(&h, 0, sizeof(h));
    h.path = path;
    if (strstr(text, "\n#define QLORA__KERNEL_ABI 104")) {
        die("is already packed", path);
    }
    if (!strstr(text, "\n#define QLORA__KERNEL_ABI 4\n")) {
        die("is not a kernels_ptx.h of this version", path);
    }
    chunks_read(&h, text);
    blocks_read(&h, text);
    size_t count = (size_t)h.block_count;
    buffer* packed = (buffer*)need_memory(calloc(count, sizeof(buffer)));
    for (int i = 0; i < h.block_count;) {
        i += module_pack(&h, &h.blocks[i], h.block_count - i, &packed[i]);
    }
    int next = 0;
    for (const char* line = text; *line;) {
        if (next < h.block_count && line == h.blocks[next].begin) {
            const buffer* b = &packed[next];
            line = h.blocks[next++].end;
            if (b->size > 0) {
                buffer_add(out, b->data, b->size);
            } else if (*line == '\n') {
                line++; // and the blank line after a block that is gone
            }
            continue;
        }
        other_line(&h, text, line, out);
        line = line_next(line);
    }
    for (int i = 0; i < h.block_count; i++) {
        free(h.blocks[i].numbers);
        free(h.blocks[i].text.data);
        free(h.blocks[i].own.data);
        free(packed[i].data);
    }
    for (int i = 0; i < h.chunk_count; i++) {
        free(h.chunks[i].data);
    }
    free(h.chunks);
    free(h.blocks);
    free(packed);
}

// embed [--packed] [--only "WORD..."] HEADER OUT.h
static int command_smaller(char** arguments, int count) {
    const char* words = NULL;
    bool packed = false;
    int at = 0;
    for (; at < count && starts_with(arguments[at], "--"); at++) {
        if (strcmp(arguments[at], "--packed") == 0) {
            packed = true;
        } else if (strcmp(arguments[at], "--only") == 0 && at + 1 < count) {
            words = arguments[++at];
        } else {
            die("unknown option", arguments[at]);
        }
    }
    if (count - at != 2) {
        die("--packed and --only want a header and the file to write", NULL);
    }
    size_t size;
    char* text = file_read(arguments[at], &size);
    buffer out = {text, size, size + 1};
    if (words) {
        memset(&out, 0, sizeof(out));
        header_only(words, text, &out);
        free(text);
        text = out.data;
    }
    if (packed) {
        memset(&out, 0, sizeof(out));
        header_packed(arguments[at], text, &out);
        free(text);
    }
    file_write(arguments[at + 1], &out);
    free(out.data);
    return 0;
}

// ---- checking it ----

// Every given file must be in the banner with its hash, and every file in the banner must be given.
static int command_sources(const char* header, char** files, int count) {
    size_t size;
    char* text = file_read(header, &size);
    int bad = 0;
    int seen = 0;
    for (int i = 0; i < count; i++) {
        if (!is_source(files[i])) {
            continue;
        }
        char hex[65];
        char want[256];
        const char* name = source_name(files[i]);
        file_hash(files[i], hex);
        snprintf(want, sizeof(want), "\n// sha256 %s %s\n", hex, name);
        seen++;
        if (!strstr(text, want)) {
            printf("%s is out of date: %s has changed (run make ptx)\n", header, name);
            bad++;
        }
    }
    int listed = 0;
    for (const char* p = text; (p = strstr(p, "\n// sha256 ")) != NULL; p++) {
        listed++;
    }
    if (listed != seen || seen == 0) {
        printf("%s lists %d sources but kernels/ has %d (run make ptx)\n", header, listed, seen);
        bad++;
    }
    free(text);
    return bad != 0;
}

#ifdef EMBED_TABLE

#if QLORA__KERNEL_ABI == 104
#define TABLE_PACKED true
#else
#define TABLE_PACKED false
#endif

// The chunks of a text, joined or unpacked. NULL if they are damaged; the caller frees it.
static char* text_join(const qlora__ptx_text* t) {
    if (TABLE_PACKED) {
        return text_unpack(t->chunks, t->length, t->hash);
    }
    buffer b = {NULL, 0, 0};
    for (const char* const* chunk = t->chunks; *chunk; chunk++) {
        buffer_add(&b, *chunk, strlen(*chunk));
    }
    return b.data;
}

static int check_text(const qlora__ptx_text* t) {
    if (!t->chunks) {
        return 0; // left out
    }
    int bad = 0;
    const char* const* chunk = t->chunks;
    for (int part = 0; part < (TABLE_PACKED ? 2 : 1); part++) {
        for (; *chunk; chunk++) {
            size_t n = strlen(*chunk);
            if (n > CHUNK_MAX) {
                printf("%s sm_%d: chunk of %lu bytes is too long\n", t->module, t->target,
                       (unsigned long)n);
                bad++;
            }
        }
        chunk++;
    }
    char* text = text_join(t);
    if (!text) {
        printf("%s sm_%d: the packed text is damaged\n", t->module, t->target);
        return bad + 1;
    }
    size_t length = strlen(text);
    uint32_t hash = fnv1a(FNV_START, text, length);
    if (length != t->length || hash != t->hash) {
        printf("%s sm_%d: edited: %lu bytes, hash %08x; expected %lu bytes, hash %08x\n", t->module,
               t->target, (unsigned long)length, (unsigned)hash, (unsigned long)t->length,
               (unsigned)t->hash);
        bad++;
    }
    free(text);
    return bad;
}

static int command_check(const char* header, char** files, int count) {
    int bad = command_sources(header, files, count);
    for (int i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        bad += check_text(&qlora__ptx_texts[i]);
    }
    return bad != 0;
}

static int command_list(void) {
    for (int i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        char suffix[2] = {t->suffix, 0};
        if (!t->chunks) {
            continue; // left out
        }
        printf("%s sm_%d%s %d.%d %lu\n", t->module, t->target, suffix, t->version / 10,
               t->version % 10, (unsigned long)t->length);
    }
    return 0;
}

// The first PTX version that supports each target.
static const struct {
    const char* name;
    int version;
} target_versions[] = {{"75", 63},  {"80", 70},  {"86", 71},  {"87", 74},  {"88", 90},
                       {"89", 78},  {"90", 78},  {"90a", 80}, {"100", 86}, {"103", 88},
                       {"110", 90}, {"120", 87}, {"121", 88}};

// Prints the newest text that the target can run; texts with a suffix run only on their own target.
static int command_emit(const char* module, const char* target) {
    const char* name = starts_with(target, "sm_") ? target + 3 : target;
    char* end;
    long number = strtol(name, &end, 10);
    int version = 0;
    for (size_t i = 0; i < sizeof(target_versions) / sizeof(target_versions[0]); i++) {
        if (strcmp(target_versions[i].name, name) == 0) {
            version = target_versions[i].version;
        }
    }
    if (version == 0) {
        die("unknown target", target);
    }
    const qlora__ptx_text* best = NULL;
    for (int i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        bool fits = t->suffix ? t->target == number && t->suffix == *end : t->target <= number;
        if (strcmp(t->module, module) == 0 && fits && t->chunks) {
            if (!best || t->target > best->target || (t->target == best->target && t->suffix)) {
                best = t;
            }
        }
    }
    if (!best) {
        fprintf(stderr, "embed: no PTX of %s for %s\n", module, target);
        return 2;
    }
    char* text = text_join(best);
    if (!text) {
        die("the packed text is damaged", module);
    }
    version = best->version > version ? best->version : version;
    printf(".version %d.%d\n.target sm_%s\n.address_size 64\n", version / 10, version % 10, name);
    for (const char* p = text; *p; p++) {
        const char* one = strchr(WORDS_ONE, *p);
        const char* two = strchr(WORDS_TWO, *p);
        if (one) {
            fputs(qlora__ptx_words[one - WORDS_ONE], stdout);
        } else if (two) {
            p++;
            fputs(qlora__ptx_words[WORDS_SINGLE + (two - WORDS_TWO) * WORDS_EACH + *p - '!'],
                  stdout);
        } else {
            putchar(*p);
        }
    }
    free(text);
    return 0;
}

#endif

static const char usage_text[] =
    "usage: embed --targets FILE.cu            print the targets of FILE, e.g. \"75 80\"\n"
    "       embed --texts DIR FILE.cu...       print the PTX files in DIR that --write needs\n"
    "       embed --write OUT.h --nvcc VERSION FILE.cu... FILE.cuh... FILE.sm_NN.ptx...\n"
    "       embed --sources HEADER FILE...     check the sources against the hashes in HEADER\n"
    "       embed --only \"WORD...\" HEADER OUT.h\n"
    "                                          write HEADER with fewer texts; a word is a group\n"
    "                                          (bf16), a module or a target (sm_80)\n"
    "       embed --packed [--only \"WORD...\"] HEADER OUT.h\n"
    "                                          write HEADER with compressed texts\n"
#ifdef EMBED_TABLE
    "       ptx-tool --check HEADER FILE...    like --sources, and check the texts\n"
    "       ptx-tool --list                    print module, target, version, length of each text\n"
    "       ptx-tool --emit MODULE sm_NN       print a module as a driver gets it\n"
#endif
    ;

int main(int argc, char** argv) {
    const char* command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "--targets") == 0 && argc == 3) {
        char targets[64];
        targets_of(argv[2], targets, sizeof(targets));
        puts(targets);
        return 0;
    }
    if (strcmp(command, "--texts") == 0 && argc > 3) {
        for (int i = 3; i < argc; i++) {
            print_texts(argv[2], argv[i]);
        }
        return 0;
    }
    if (strcmp(command, "--write") == 0 && argc > 5 && strcmp(argv[3], "--nvcc") == 0) {
        return command_write(argv[2], argv[4], argv + 5, argc - 5);
    }
    if (strcmp(command, "--only") == 0 || strcmp(command, "--packed") == 0) {
        return command_smaller(argv + 1, argc - 1);
    }
    if (strcmp(command, "--sources") == 0 && argc > 3) {
        return command_sources(argv[2], argv + 3, argc - 3);
    }
#ifdef EMBED_TABLE
    if (strcmp(command, "--check") == 0 && argc > 3) {
        return command_check(argv[2], argv + 3, argc - 3);
    }
    if (strcmp(command, "--list") == 0) {
        return command_list();
    }
    if (strcmp(command, "--emit") == 0 && argc == 4) {
        return command_emit(argv[2], argv[3]);
    }
#endif
    bool asked = strcmp(command, "--help") == 0;
    fputs(usage_text, asked ? stdout : stderr);
    return asked ? 0 : 2;
}
