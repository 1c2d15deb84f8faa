// deflate.h - compresses with deflate (RFC 1951), for embed.c; src/formats/inflate.h reads it.
//
// Slow and thorough: every position gets the nearest match of each length, and each block is the
// cheapest path through them, under the code lengths of the path before. The output depends only on
// the input: all costs are whole bits.

#ifndef DEFLATE_H
#define DEFLATE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFLATE_WINDOW = 32768,
    DEFLATE_SHORTEST = 3,
    DEFLATE_LONGEST = 258,
    DEFLATE_HASHES = 1 << 15,
    DEFLATE_CHAIN = 600,   // earlier places that are tried for a match
    DEFLATE_BLOCK = 16384, // bytes of input in a block
    DEFLATE_PASSES = 4,
    DEFLATE_LITERALS = 286, // literals, the end of a block and lengths
    DEFLATE_DISTANCES = 30,
    DEFLATE_ORDERS = 19, // symbols of the code that code lengths are written in
    DEFLATE_END = 256,
    DEFLATE_UNSEEN = 13 // bits that a symbol is taken to cost which the path before did not use
};

typedef struct deflate_output {
    uint8_t* data;
    size_t size;
    size_t room;
    uint64_t bits; // not yet in data, the first one lowest
    unsigned count;
    bool failed; // out of memory
} deflate_output;

// A literal (distance 0) or a match.
typedef struct deflate_step {
    uint16_t length;
    uint16_t distance;
} deflate_step;

// Matches of growing length and distance for every position: those of i are at first[i].
typedef struct deflate_matches {
    deflate_step* items;
    size_t count;
    size_t room;
    size_t* first;
} deflate_matches;

typedef struct deflate_code {
    uint32_t counts[DEFLATE_LITERALS];
    uint8_t lengths[DEFLATE_LITERALS];
    uint16_t codes[DEFLATE_LITERALS]; // the first bit lowest
} deflate_code;

// ---- bits ----

static void deflate_put(deflate_output* out, uint32_t value, unsigned count) {
    out->bits |= (uint64_t)value << out->count;
    out->count += count;
    for (; out->count >= 8; out->count -= 8, out->bits >>= 8) {
        if (out->size == out->room) {
            size_t room = 2 * out->room + 4096;
            uint8_t* data = (uint8_t*)realloc(out->data, room);
            if (!data) {
                out->failed = true;
                continue;
            }
            out->data = data;
            out->room = room;
        }
        out->data[out->size++] = (uint8_t)(out->bits & 255);
    }
}

// ---- matches ----

static unsigned deflate_hash(const uint8_t* p) {
    return (((unsigned)p[0] << 10) ^ ((unsigned)p[1] << 5) ^ p[2]) & (DEFLATE_HASHES - 1);
}

static bool deflate_match_add(deflate_matches* m, size_t length, size_t distance) {
    if (m->count == m->room) {
        size_t room = 2 * m->room + 65536;
        deflate_step* items = (deflate_step*)realloc(m->items, room * sizeof(items[0]));
        if (!items) {
            return false;
        }
        m->items = items;
        m->room = room;
    }
    m->items[m->count].length = (uint16_t)length;
    m->items[m->count++].distance = (uint16_t)distance;
    return true;
}

// The matches at `at`. before[i]: the place before i with its hash, 0 for none, else place + 1.
static bool deflate_matches_at(deflate_matches* m, const uint8_t* data, size_t size, size_t at,
                               uint32_t place, const uint32_t* before) {
    size_t most = size - at < DEFLATE_LONGEST ? size - at : DEFLATE_LONGEST;
    size_t best = DEFLATE_SHORTEST - 1;
    for (int tries = 0; place > 0 && tries < DEFLATE_CHAIN && best < most; tries++) {
        size_t from = place - 1;
        if (at - from > DEFLATE_WINDOW - 1) { // 32,768 does not fit into a step
            break;
        }
        size_t n = 0;
        if (data[from + best] == data[at + best]) {
            while (n < most && data[from + n] == data[at + n]) {
                n++;
            }
        }
        if (n > best) {
            best = n;
            if (!deflate_match_add(m, n, at - from)) {
                return false;
            }
        }
        place = before[from];
    }
    return true;
}

static bool deflate_matches_find(deflate_matches* m, const uint8_t* data, size_t size) {
    uint32_t* last = (uint32_t*)calloc(DEFLATE_HASHES, sizeof(last[0]));
    uint32_t* before = (uint32_t*)malloc((size + 1) * sizeof(before[0]));
    m->first = (size_t*)malloc((size + 1) * sizeof(m->first[0]));
    bool ok = last && before && m->first;
    for (size_t at = 0; ok && at < size; at++) {
        m->first[at] = m->count;
        if (size - at >= DEFLATE_SHORTEST) {
            unsigned hash = deflate_hash(data + at);
            ok = deflate_matches_at(m, data, size, at, last[hash], before);
            before[at] = last[hash];
            last[hash] = (uint32_t)at + 1;
        }
    }
    if (ok) {
        m->first[size] = m->count;
    }
    free(last);
    free(before);
    return ok;
}

// ---- prefix codes ----

// The symbol of a length (from 257) or a distance, and its extra bits.
static unsigned deflate_length_symbol(unsigned length, unsigned* extra, uint32_t* value) {
    unsigned n = length - DEFLATE_SHORTEST;
    *extra = 0;
    *value = 0;
    if (length == DEFLATE_LONGEST) {
        return 285;
    }
    if (n < 8) {
        return 257 + n;
    }
    unsigned top = 3; // position of the highest bit
    while (n >> (top + 1)) {
        top++;
    }
    *extra = top - 2;
    *value = n & ((1u << *extra) - 1);
    return 257 + 4 * (top - 1) + (n >> *extra & 3);
}

static unsigned deflate_distance_symbol(unsigned distance, unsigned* extra, uint32_t* value) {
    unsigned n = distance - 1;
    *extra = 0;
    *value = 0;
    if (n < 4) {
        return n;
    }
    unsigned top = 2;
    while (n >> (top + 1)) {
        top++;
    }
    *extra = top - 1;
    *value = n & ((1u << *extra) - 1);
    return 2 * top + (n >> *extra & 1);
}

typedef struct deflate_node {
    uint64_t weight;
    int symbol; // also the order of equal weights
    int parent;
} deflate_node;

static int deflate_by_weight(const void* a, const void* b) {
    const deflate_node* x = (const deflate_node*)a;
    const deflate_node* y = (const deflate_node*)b;
    if (x->weight != y->weight) {
        return x->weight < y->weight ? -1 : 1;
    }
    return x->symbol - y->symbol;
}

// Huffman's code for these weights. Returns the longest length.
static int deflate_tree(const uint32_t* weights, int symbols, uint8_t* lengths) {
    deflate_node nodes[2 * DEFLATE_LITERALS];
    int used = 0;
    memset(lengths, 0, (size_t)symbols);
    for (int i = 0; i < symbols; i++) {
        if (weights[i]) {
            nodes[used].weight = weights[i];
            nodes[used].parent = 0;
            nodes[used++].symbol = i;
        }
    }
    if (used < 2) {
        if (used) {
            lengths[nodes[0].symbol] = 1;
        }
        return used;
    }
    qsort(nodes, (size_t)used, sizeof(nodes[0]), deflate_by_weight);
    int leaf = 0; // two queues: leaves, and inner nodes, which come in order by themselves
    int inner = used;
    for (int next = used; next < 2 * used - 1; next++) {
        nodes[next].weight = 0;
        for (int k = 0; k < 2; k++) {
            bool take = leaf < used && (inner == next || nodes[leaf].weight <= nodes[inner].weight);
            int child = take ? leaf++ : inner++;
            nodes[child].parent = next;
            nodes[next].weight += nodes[child].weight;
        }
    }
    int longest = 0;
    int depth[2 * DEFLATE_LITERALS];
    depth[2 * used - 2] = 0;
    for (int i = 2 * used - 3; i >= 0; i--) {
        depth[i] = depth[nodes[i].parent] + 1;
        if (i < used) {
            lengths[nodes[i].symbol] = (uint8_t)depth[i];
            longest = depth[i] > longest ? depth[i] : longest;
        }
    }
    return longest;
}

// Lengths of at most `limit` bits, and the codes for them. Where a code is too long, the weights
// are made more equal.
static void deflate_code_make(deflate_code* code, int symbols, int limit) {
    uint32_t weights[DEFLATE_LITERALS];
    memcpy(weights, code->counts, (size_t)symbols * sizeof(weights[0]));
    while (deflate_tree(weights, symbols, code->lengths) > limit) {
        for (int i = 0; i < symbols; i++) {
            weights[i] = weights[i] ? weights[i] / 2 + 1 : 0;
        }
    }
    unsigned next = 0;
    for (int n = 1; n < 16; n++) {
        next <<= 1;
        for (int i = 0; i < symbols; i++) {
            if (code->lengths[i] == n) {
                unsigned reversed = 0;
                for (int k = 0; k < n; k++) {
                    reversed |= (next >> k & 1) << (n - 1 - k);
                }
                code->codes[i] = (uint16_t)reversed;
                next++;
            }
        }
    }
}

// ---- blocks ----

typedef struct deflate_block {
    const uint8_t* data;
    size_t begin;
    size_t end;
    deflate_step* steps; // of the cheapest path
    size_t step_count;
    deflate_code literals;
    deflate_code distances;
} deflate_block;

static void deflate_count(deflate_block* b) {
    unsigned extra;
    uint32_t value;
    memset(b->literals.counts, 0, sizeof(b->literals.counts));
    memset(b->distances.counts, 0, sizeof(b->distances.counts));
    size_t at = b->begin;
    for (size_t i = 0; i < b->step_count; i++) {
        const deflate_step* s = &b->steps[i];
        if (s->distance) {
            b->literals.counts[deflate_length_symbol(s->length, &extra, &value)]++;
            b->distances.counts[deflate_distance_symbol(s->distance, &extra, &value)]++;
        } else {
            b->literals.counts[b->data[at]]++;
        }
        at += s->length;
    }
    b->literals.counts[DEFLATE_END] = 1;
}

// What each length and distance costs under the current codes; before the first pass, a guess.
typedef struct deflate_costs {
    uint32_t literal[256];
    uint32_t length[DEFLATE_LONGEST + 1];
    uint32_t distance[DEFLATE_DISTANCES]; // by symbol, with its extra bits
} deflate_costs;

static void deflate_costs_set(deflate_costs* c, const deflate_block* b, bool guess) {
    unsigned extra;
    uint32_t value;
    for (unsigned i = 0; i < 256; i++) {
        unsigned n = b->literals.lengths[i];
        c->literal[i] = guess ? 7 : n ? n : DEFLATE_UNSEEN;
    }
    for (unsigned i = DEFLATE_SHORTEST; i <= DEFLATE_LONGEST; i++) {
        unsigned n = b->literals.lengths[deflate_length_symbol(i, &extra, &value)];
        c->length[i] = (guess ? 6 : n ? n : DEFLATE_UNSEEN) + extra;
    }
    for (unsigned i = 0; i < DEFLATE_DISTANCES; i++) {
        unsigned n = b->distances.lengths[i];
        c->distance[i] = (guess ? 5 : n ? n : DEFLATE_UNSEEN) + (i < 4 ? 0 : i / 2 - 1);
    }
}

// Finds the cheapest path through a block. cost and from have a place for each byte and the end.
static void deflate_path(deflate_block* b, const deflate_matches* m, const deflate_costs* c,
                         uint32_t* cost, deflate_step* from) {
    unsigned extra;
    uint32_t value;
    size_t size = b->end - b->begin;
    memset(cost, 255, (size + 1) * sizeof(cost[0]));
    cost[0] = 0;
    for (size_t i = 0; i < size; i++) {
        uint32_t literal = cost[i] + c->literal[b->data[b->begin + i]];
        if (literal < cost[i + 1]) {
            cost[i + 1] = literal;
            from[i + 1].length = 1;
            from[i + 1].distance = 0;
        }
        size_t length = DEFLATE_SHORTEST;
        for (size_t k = m->first[b->begin + i]; k < m->first[b->begin + i + 1]; k++) {
            const deflate_step* s = &m->items[k];
            uint32_t far_off =
                cost[i] + c->distance[deflate_distance_symbol(s->distance, &extra, &value)];
            for (; length <= s->length && length <= size - i; length++) {
                if (far_off + c->length[length] < cost[i + length]) {
                    cost[i + length] = far_off + c->length[length];
                    from[i + length].length = (uint16_t)length;
                    from[i + length].distance = s->distance;
                }
            }
        }
    }
    b->step_count = 0;
    for (size_t i = size; i > 0; i -= from[i].length) {
        b->steps[b->step_count++] = from[i];
    }
    for (size_t i = 0; i < b->step_count / 2; i++) {
        deflate_step other = b->steps[i];
        b->steps[i] = b->steps[b->step_count - 1 - i];
        b->steps[b->step_count - 1 - i] = other;
    }
}

// The lengths of both codes, repeats as symbols 16 to 18. Returns how many symbols there are.
static int deflate_lengths(const uint8_t* lengths, int count, uint8_t* symbols, uint8_t* extra) {
    int used = 0;
    for (int i = 0; i < count;) {
        int n = 1;
        while (i + n < count && lengths[i + n] == lengths[i]) {
            n++;
        }
        if (lengths[i] == 0 && n >= 3) {
            n = n < 138 ? n : 138;
            symbols[used] = n < 11 ? 17 : 18;
            extra[used++] = (uint8_t)(n < 11 ? n - 3 : n - 11);
        } else if (i > 0 && lengths[i] == lengths[i - 1] && n >= 3) {
            n = n < 6 ? n : 6;
            symbols[used] = 16;
            extra[used++] = (uint8_t)(n - 3);
        } else {
            n = 1;
            symbols[used] = lengths[i];
            extra[used++] = 0;
        }
        i += n;
    }
    return used;
}

static void deflate_header(deflate_output* out, const deflate_block* b, bool last) {
    static const uint8_t order[DEFLATE_ORDERS] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                                  11, 4,  12, 3, 13, 2, 14, 1, 15};
    static const uint8_t extra_bits[3] = {2, 3, 7};
    uint8_t lengths[DEFLATE_LITERALS + DEFLATE_DISTANCES];
    uint8_t symbols[DEFLATE_LITERALS + DEFLATE_DISTANCES];
    uint8_t extra[DEFLATE_LITERALS + DEFLATE_DISTANCES];
    int literals = DEFLATE_LITERALS;
    int distances = DEFLATE_DISTANCES;
    while (literals > 257 && !b->literals.lengths[literals - 1]) {
        literals--;
    }
    while (distances > 1 && !b->distances.lengths[distances - 1]) {
        distances--;
    }
    memcpy(lengths, b->literals.lengths, (size_t)literals);
    memcpy(lengths + literals, b->distances.lengths, (size_t)distances);
    int used = deflate_lengths(lengths, literals + distances, symbols, extra);
    deflate_code code;
    memset(&code, 0, sizeof(code));
    for (int i = 0; i < used; i++) {
        code.counts[symbols[i]]++;
    }
    deflate_code_make(&code, DEFLATE_ORDERS, 7);
    int orders = DEFLATE_ORDERS;
    while (orders > 4 && !code.lengths[order[orders - 1]]) {
        orders--;
    }
    deflate_put(out, (last ? 1u : 0u) | 2u << 1, 3); // a block with codes of its own
    deflate_put(out, (uint32_t)literals - 257, 5);
    deflate_put(out, (uint32_t)distances - 1, 5);
    deflate_put(out, (uint32_t)orders - 4, 4);
    for (int i = 0; i < orders; i++) {
        deflate_put(out, code.lengths[order[i]], 3);
    }
    for (int i = 0; i < used; i++) {
        deflate_put(out, code.codes[symbols[i]], code.lengths[symbols[i]]);
        if (symbols[i] >= 16) {
            deflate_put(out, extra[i], extra_bits[symbols[i] - 16]);
        }
    }
}

static void deflate_write(deflate_output* out, const deflate_block* b, bool last) {
    unsigned extra;
    uint32_t value;
    size_t at = b->begin;
    deflate_header(out, b, last);
    for (size_t i = 0; i < b->step_count; i++) {
        const deflate_step* s = &b->steps[i];
        unsigned symbol = b->data[at];
        if (s->distance) {
            symbol = deflate_length_symbol(s->length, &extra, &value);
        }
        deflate_put(out, b->literals.codes[symbol], b->literals.lengths[symbol]);
        if (s->distance) {
            deflate_put(out, value, extra);
            symbol = deflate_distance_symbol(s->distance, &extra, &value);
            deflate_put(out, b->distances.codes[symbol], b->distances.lengths[symbol]);
            deflate_put(out, value, extra);
        }
        at += s->length;
    }
    deflate_put(out, b->literals.codes[DEFLATE_END], b->literals.lengths[DEFLATE_END]);
}

// Compresses data, which is not empty. The caller frees *out; false if out of memory.
static bool deflate(const uint8_t* data, size_t size, uint8_t** out, size_t* out_size) {
    deflate_output output;
    deflate_matches m;
    deflate_block b;
    deflate_costs costs;
    uint32_t* cost = (uint32_t*)malloc((DEFLATE_BLOCK + 1) * sizeof(cost[0]));
    deflate_step* from = (deflate_step*)malloc((DEFLATE_BLOCK + 1) * sizeof(from[0]));
    memset(&output, 0, sizeof(output));
    memset(&m, 0, sizeof(m));
    memset(&b, 0, sizeof(b));
    b.data = data;
    b.steps = (deflate_step*)malloc((DEFLATE_BLOCK + 1) * sizeof(b.steps[0]));
    bool ok = cost && from && b.steps && deflate_matches_find(&m, data, size);
    while (ok && b.end < size) {
        b.begin = b.end;
        b.end = size - b.begin < DEFLATE_BLOCK ? size : b.begin + DEFLATE_BLOCK;
        for (int pass = 0; pass < DEFLATE_PASSES; pass++) {
            deflate_costs_set(&costs, &b, b.begin == 0 && pass == 0);
            deflate_path(&b, &m, &costs, cost, from);
            deflate_count(&b);
            deflate_code_make(&b.literals, DEFLATE_LITERALS, 15);
            deflate_code_make(&b.distances, DEFLATE_DISTANCES, 15);
        }
        deflate_write(&output, &b, b.end == size);
    }
    deflate_put(&output, 0, 7); // the rest of the last byte
    free(cost);
    free(from);
    free(b.steps);
    free(m.items);
    free(m.first);
    if (!ok || output.failed) {
        free(output.data);
        return false;
    }
    *out = output.data;
    *out_size = output.size;
    return true;
}

#endif
