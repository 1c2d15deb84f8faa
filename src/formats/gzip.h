// ---- CRC-32 of gzip and of Parquet's pages ------------------------------------------------------

typedef struct qlora__crc32 {
    uint32_t table[4][256];
} qlora__crc32;

static void qlora__crc32_begin(qlora__crc32* c) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int k = 0; k < 8; k++) {
            value = value >> 1 ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
        }
        c->table[0][i] = value;
    }
    for (uint32_t i = 0; i < 3 * 256; i++) {
        uint32_t before = c->table[i / 256][i % 256];
        c->table[i / 256 + 1][i % 256] = before >> 8 ^ c->table[0][before & 255];
    }
}

// Continues a checksum, which starts at 0.
static uint32_t qlora__crc32_add(const qlora__crc32* c, uint32_t crc, const uint8_t* p,
                                 size_t size) {
    crc = ~crc;
    for (; size >= 4; size -= 4, p += 4) {
        crc ^= qlora__load32(p);
        crc = c->table[3][crc & 255] ^ c->table[2][crc >> 8 & 255] ^ c->table[1][crc >> 16 & 255] ^
              c->table[0][crc >> 24];
    }
    for (; size > 0; size--, p++) {
        crc = crc >> 8 ^ c->table[0][(crc ^ *p) & 255];
    }
    return ~crc;
}

// ---- gzip and zlib: deflate with a header and a checksum ----------------------------------------

// A gzip file in memory: one member or several, each with its CRC-32 and its length.
typedef struct qlora__gzip {
    qlora__inflate inflate;
    qlora__crc32 crc;
    uint32_t sum;    // of the current member
    uint64_t member; // number of the current member, from 1
    bool inside;     // a member has begun
    bool zlib;       // a zlib stream: Adler-32, one member
    const uint8_t* data;
    const uint8_t* at; // after the previous member
    const uint8_t* end;
} qlora__gzip;

static void qlora__gzip_begin(qlora__gzip* g, const uint8_t* data, size_t size) {
    qlora__crc32_begin(&g->crc);
    g->sum = 0;
    g->member = 0;
    g->inside = false;
    g->zlib = false;
    g->data = data;
    g->at = data;
    g->end = data + size;
}

// Skips a text that a zero ends; NULL if there is no zero.
static const uint8_t* qlora__gzip_text(const uint8_t* at, const uint8_t* end) {
    const uint8_t* zero = (const uint8_t*)memchr(at, 0, (size_t)(end - at));
    return zero != NULL ? zero + 1 : NULL;
}

// The first byte after a gzip header; NULL: it is not one, or not complete.
static const uint8_t* qlora__gzip_header(const qlora__gzip* g) {
    const uint8_t* at = g->at;
    if (g->end - at < 18 || at[0] != 0x1F || at[1] != 0x8B || at[2] != 8 || (at[3] & 0xE0) != 0) {
        return NULL;
    }
    unsigned flags = at[3];
    at += 10;
    if ((flags & 4) != 0) {
        size_t extra = (size_t)at[0] + 256u * at[1];
        if (extra + 2 > (size_t)(g->end - at)) {
            return NULL;
        }
        at += extra + 2;
    }
    if ((flags & 8) != 0) {
        at = qlora__gzip_text(at, g->end);
    }
    if (at != NULL && (flags & 16) != 0) {
        at = qlora__gzip_text(at, g->end);
    }
    if (at != NULL && (flags & 2) != 0) {
        uint32_t sum = qlora__crc32_add(&g->crc, 0, g->at, (size_t)(at - g->at));
        bool same = g->end - at >= 2 && (sum & 0xFFFF) == (uint32_t)at[0] + 256u * at[1];
        at = same ? at + 2 : NULL;
    }
    return at;
}

// Begins the next member, or finds the end. Zeros may follow the last member, as padding.
static qlora_result qlora__gzip_member(qlora__env* env, qlora__gzip* g, bool* ended) {
    const uint8_t* rest = g->at;
    while (g->member > 0 && rest < g->end && *rest == 0) {
        rest++;
    }
    *ended = g->member > 0 && rest == g->end;
    if (*ended) {
        return QLORA_OK;
    }
    const uint8_t* begin = qlora__gzip_header(g);
    // zlib, if the first two bytes say so and no dictionary is wanted
    bool zlib = g->member == 0 && g->end - g->at >= 6 && (g->at[0] & 15) == 8 &&
                (g->at[0] * 256 + g->at[1]) % 31 == 0 && (g->at[1] & 32) == 0;
    if (begin == NULL && zlib) {
        begin = g->at + 2;
        g->zlib = true;
    }
    if (begin == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "damaged gzip data: no valid header at byte %llu",
                               (unsigned long long)(g->at - g->data));
    }
    qlora__inflate_begin(&g->inflate, begin, (size_t)(g->end - begin));
    g->sum = g->zlib ? 1 : 0;
    g->member++;
    g->inside = true;
    return QLORA_OK;
}

static uint32_t qlora__adler32_add(uint32_t sum, const uint8_t* p, size_t size) {
    uint32_t low = sum & 0xFFFF;
    uint32_t high = sum >> 16;
    while (size > 0) {
        size_t part = size < 5000 ? size : 5000; // no overflow of 32 bits before the remainder
        for (size_t i = 0; i < part; i++) {
            low += p[i];
            high += low;
        }
        low %= 65521;
        high %= 65521;
        p += part;
        size -= part;
    }
    return high << 16 | low;
}

// The end of a member: its checksum and its length.
static qlora_result qlora__gzip_trailer(qlora__env* env, qlora__gzip* g) {
    const uint8_t* at = g->inflate.at;
    size_t size = g->zlib ? 4 : 8;
    const char* wrong = NULL;
    if ((size_t)(g->end - at) < size) {
        wrong = "it is truncated";
    } else if (g->zlib) {
        uint32_t sum = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        wrong = sum != g->sum ? "its checksum is wrong" : NULL;
    } else if (qlora__load32(at) != g->sum) {
        wrong = "its checksum is wrong";
    } else if (qlora__load32(at + 4) != (uint32_t)g->inflate.total) {
        wrong = "its length is wrong";
    }
    if (wrong != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "damaged gzip data: member %llu: %s",
                               (unsigned long long)g->member, wrong);
    }
    g->at = at + size;
    g->inside = false;
    return QLORA_OK;
}

// Continues to write at out[*at], as qlora__inflate_run. *ended: everything has been written and
// all checksums were right.
static qlora_result qlora__gzip_read(qlora__env* env, qlora__gzip* g, uint8_t* out, size_t* at,
                                     size_t capacity, bool* ended) {
    *ended = false;
    for (;;) {
        if (!g->inside) {
            QLORA__TRY(qlora__gzip_member(env, g, ended));
            if (*ended) {
                return QLORA_OK;
            }
        }
        size_t begin = *at;
        if (!qlora__inflate_run(&g->inflate, out, at, capacity)) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT, "damaged or truncated gzip data: member %llu, byte %llu",
                (unsigned long long)g->member, (unsigned long long)(g->inflate.at - g->data));
        }
        g->sum = g->zlib ? qlora__adler32_add(g->sum, out + begin, *at - begin)
                         : qlora__crc32_add(&g->crc, g->sum, out + begin, *at - begin);
        if (g->inflate.mode != QLORA__INFLATE_DONE) {
            return QLORA_OK; // the room is used up
        }
        QLORA__TRY(qlora__gzip_trailer(env, g));
    }
}
