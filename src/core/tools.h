#ifndef QLORA__PART_TOOLS
#define QLORA__PART_TOOLS

// ---- sorting ------------------------------------------------------------------------------------

// Heap sort of an index array: no recursion, no quadratic worst case, and the same order on every
// platform as long as `less` is a strict total order.
typedef bool (*qlora__less_fn)(const void* user, uint32_t a, uint32_t b);

static QLORA__UNUSED void qlora__sort_sift(uint32_t* index, size_t root, size_t count,
                                           qlora__less_fn less, const void* user) {
    for (;;) {
        size_t child = 2 * root + 1;
        if (child >= count) {
            return;
        }
        if (child + 1 < count && less(user, index[child], index[child + 1])) {
            child++;
        }
        if (!less(user, index[root], index[child])) {
            return;
        }
        uint32_t swap = index[root];
        index[root] = index[child];
        index[child] = swap;
        root = child;
    }
}

static QLORA__UNUSED void qlora__sort(uint32_t* index, size_t count, qlora__less_fn less,
                                      const void* user) {
    for (size_t i = count / 2; i > 0; i--) {
        qlora__sort_sift(index, i - 1, count, less, user);
    }
    for (size_t i = count; i > 1; i--) {
        uint32_t swap = index[0];
        index[0] = index[i - 1];
        index[i - 1] = swap;
        qlora__sort_sift(index, 0, i - 1, less, user);
    }
}

// ---- checksums ----------------------------------------------------------------------------------

// 64-bit checksum of a byte stream, eight bytes at a time; the result does not depend on how the
// stream is split into pieces. Each step is a bijection of the state for a given word and of the
// word for a given state, so damage inside one aligned word is always detected, and other damage
// with probability 1 - 2^-64. It gives no protection against deliberate changes.
typedef struct qlora__hash {
    uint64_t state;
    uint64_t bytes;
    uint64_t word; // bytes that do not fill a word yet, little-endian
} qlora__hash;

static QLORA__UNUSED void qlora__hash_begin(qlora__hash* h) {
    h->state = 0x9E3779B97F4A7C15u;
    h->bytes = 0;
    h->word = 0;
}

static QLORA__UNUSED uint64_t qlora__hash_mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0xD6E8FEB86659FD93u;
    return state ^ (state >> 32);
}

static QLORA__UNUSED void qlora__hash_add(qlora__hash* h, const void* data, size_t size) {
    const uint8_t* p = (const uint8_t*)data;
    while (size > 0) {
        unsigned filled = (unsigned)(h->bytes & 7);
        if (filled == 0 && size >= 8) {
            uint64_t word = 0;
            for (unsigned i = 0; i < 8; i++) {
                word |= (uint64_t)p[i] << (8 * i);
            }
            h->state = qlora__hash_mix(h->state, word);
            h->bytes += 8;
            p += 8;
            size -= 8;
            continue;
        }
        h->word |= (uint64_t)p[0] << (8 * filled);
        h->bytes++;
        p++;
        size--;
        if (filled == 7) {
            h->state = qlora__hash_mix(h->state, h->word);
            h->word = 0;
        }
    }
}

static QLORA__UNUSED uint64_t qlora__hash_end(const qlora__hash* h) {
    return qlora__hash_mix(qlora__hash_mix(h->state, h->word), h->bytes);
}

// FNV-1a, for short keys.
static QLORA__UNUSED uint64_t qlora__fnv(const void* data, size_t bytes, uint64_t seed) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t h = seed ^ 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++) {
        h = (h ^ p[i]) * 0x100000001b3ull;
    }
    return h;
}

#endif // QLORA__PART_TOOLS
