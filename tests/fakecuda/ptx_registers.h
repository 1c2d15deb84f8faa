// ptx_registers.h - registers whose values are never needed at the same time share their storage.
//
// PTX names a register for every value, thousands in a kernel. With storage of its own for each, a
// warp's registers fill megabytes, which have to be poisoned for every block and leave the cache
// between two uses. What is found here is true of each thread by itself, so it does not matter how
// the threads of a warp part. A register that some thread may read before it has written it keeps
// the poison.
#ifndef FAKECUDA_PTX_REGISTERS_H
#define FAKECUDA_PTX_REGISTERS_H

#include "ptx_text.h"

typedef struct ptx_range { // a register, and the instructions between which its value is needed
    u32 at;                // offset with storage of its own, then the shared one
    u32 bytes;
    u32 first;
    u32 last;
    u32 next_first; // the next register with the same first instruction
    u32 next_last;
    bool poisoned; // may be read before it is written
} ptx_range;

typedef struct ptx_part { // instructions that are always executed one after the other
    u32 begin;
    u32 end;
    u64* needed;  // registers whose values are needed at its begin; one bit each
    u64* written; // always, before they are read
} ptx_part;

typedef struct ptx_ranges {
    ptx_kernel* kernel;
    u32* number; // 1 + the register at an offset, in words of 4 bytes; 0: not used
    ptx_range* list;
    u32 count;
    ptx_part* parts;
    u32 part_count;
    u32* part_of; // instruction
    u32 words;    // of a set of registers
    u64* bits;    // all sets
    u32* starts;  // instruction: 1 + the first register of a list; 0: none
    u32* ends;
} ptx_ranges;

static bool is_register(u32 at) {
    return at != PTX_NONE && (at & PTX_CONSTANT_BIT) == 0;
}

// The registers of an instruction: visit(r, index of the register, written, data).
typedef void (*ptx_visit)(ptx_ranges* r, u32 index, bool written, void* data);

static void visit_one(ptx_ranges* r, u32 at, bool written, ptx_visit visit, void* data) {
    if (is_register(at)) {
        visit(r, r->number[at / 4] - 1, written, data);
    }
}

// Those that are read first.
static void visit_registers(ptx_ranges* r, const ptx_insn* in, ptx_visit visit, void* data) {
    visit_one(r, in->guard, false, visit, data);
    for (u32 results = 0; results < 2; results++) {
        for (u32 i = 0; i < PTX_MAX_ARGS; i++) {
            if (in->width[i] != 0 && (in->results >> i & 1u) == results) {
                visit_one(r, in->arg[i], results != 0, visit, data);
            }
        }
    }
    for (u32 i = 0; i < in->list_count; i++) {
        visit_one(r, in->list[i], false, visit, data);
    }
}

static void number_register(ptx_ranges* r, u32 at, u32 bytes) {
    if (!is_register(at) || r->number[at / 4] != 0) {
        return;
    }
    r->list = (ptx_range*)grow(r->list, r->count, sizeof *r->list);
    const ptx_range range = {at, bytes, PTX_NONE, 0, 0, 0, false};
    r->list[r->count++] = range;
    r->number[at / 4] = r->count;
}

// The bytes of a predicate and of a register of 32 bits differ although both have a width of 4, so
// they come from what was declared.
static void number_registers(ptx_ranges* r, const ptx_registers* declared, u32 count) {
    const ptx_kernel* k = r->kernel;
    u8* used = (u8*)must_alloc(k->register_bytes / 4 + 1);
    for (u32 i = 0; i < k->code_count; i++) {
        const ptx_insn* in = &k->code[i];
        if (is_register(in->guard)) {
            used[in->guard / 4] = 1;
        }
        for (u32 a = 0; a < PTX_MAX_ARGS; a++) {
            if (in->width[a] != 0 && is_register(in->arg[a])) {
                used[in->arg[a] / 4] = 1;
            }
        }
        for (u32 a = 0; a < in->list_count; a++) {
            if (is_register(in->list[a])) {
                used[in->list[a] / 4] = 1;
            }
        }
    }
    for (u32 i = 0; i < count; i++) {
        const u32 stride = register_stride(declared[i].bytes, declared[i].pred);
        for (u32 n = 0; n < (declared[i].count ? declared[i].count : 1); n++) {
            if (used[(declared[i].at + n * stride) / 4]) {
                number_register(r, declared[i].at + n * stride, stride);
            }
        }
    }
    free(used);
}

// ---- Which values are needed where --------------------------------------------------------------

static bool ends_part(const ptx_insn* in) {
    return in->kind == KIND_BRANCH || in->kind == KIND_BRANCH_INDEX || in->kind == KIND_EXIT;
}

static void find_parts(ptx_ranges* r) {
    const ptx_kernel* k = r->kernel;
    u8* begins = (u8*)must_alloc(k->code_count + 1);
    begins[0] = 1;
    for (u32 i = 0; i < k->code_count; i++) {
        if (k->code[i].kind == KIND_BRANCH) {
            begins[k->code[i].target] = 1;
        }
        begins[i + 1] |= ends_part(&k->code[i]) ? 1 : 0;
    }
    for (u32 i = 0; i < k->table_count; i++) {
        for (u32 n = 0; n < k->tables[i].count; n++) {
            begins[k->tables[i].target[n]] = 1;
        }
    }
    r->part_of = (u32*)must_alloc((k->code_count + 1) * sizeof *r->part_of);
    for (u32 i = 0; i < k->code_count; i++) {
        if (begins[i]) {
            const ptx_part part = {i, i, NULL, NULL};
            r->parts = (ptx_part*)grow(r->parts, r->part_count, sizeof *r->parts);
            r->parts[r->part_count++] = part;
        }
        r->part_of[i] = r->part_count - 1;
        r->parts[r->part_count - 1].end = i + 1;
    }
    free(begins);
    r->words = r->count / 64 + 1;
    r->bits = (u64*)must_alloc((size_t)r->part_count * 2 * r->words * sizeof *r->bits);
    for (u32 i = 0; i < r->part_count; i++) {
        r->parts[i].needed = r->bits + (size_t)2 * i * r->words;
        r->parts[i].written = r->parts[i].needed + r->words;
    }
}

typedef struct ptx_look {
    ptx_part* part;
    bool guarded; // a thread may leave the result as it was
} ptx_look;

static void look_at(ptx_ranges* r, u32 index, bool written, void* data) {
    const ptx_look* look = (const ptx_look*)data;
    const u64 bit = (u64)1 << index % 64;
    (void)r;
    if (!written && (look->part->written[index / 64] & bit) == 0) {
        look->part->needed[index / 64] |= bit;
    } else if (written && !look->guarded) {
        look->part->written[index / 64] |= bit;
    }
}

// Adds what is needed at the begin of the part of an instruction; true if anything is new.
static bool add_needed(ptx_ranges* r, ptx_part* part, u32 instruction) {
    const u64* next = r->parts[r->part_of[instruction]].needed;
    bool changed = false;
    for (u32 i = 0; i < r->words; i++) {
        const u64 more = next[i] & ~part->written[i] & ~part->needed[i];
        part->needed[i] |= more;
        changed = changed || more != 0;
    }
    return changed;
}

// Calls f for the instructions that may follow a part, and returns whether any call was true.
typedef bool (*ptx_follow)(ptx_ranges* r, ptx_part* part, u32 instruction);

static bool follow(ptx_ranges* r, ptx_part* part, ptx_follow f) {
    const ptx_kernel* k = r->kernel;
    const ptx_insn* last = &k->code[part->end - 1];
    bool any = false;
    if (last->kind == KIND_BRANCH) {
        any = f(r, part, last->target) || any;
    } else if (last->kind == KIND_BRANCH_INDEX) {
        for (u32 i = 0; i < k->tables[last->target].count; i++) {
            any = f(r, part, k->tables[last->target].target[i]) || any;
        }
    }
    if ((!ends_part(last) || last->guard != PTX_NONE) && part->end < k->code_count) {
        any = f(r, part, part->end) || any;
    }
    return any;
}

static void find_needed(ptx_ranges* r) {
    for (u32 i = 0; i < r->part_count; i++) {
        for (u32 n = r->parts[i].begin; n < r->parts[i].end; n++) {
            const ptx_insn* in = &r->kernel->code[n];
            ptx_look look = {&r->parts[i], in->guard != PTX_NONE};
            visit_registers(r, in, look_at, &look);
        }
    }
    bool changed = true;
    while (changed) {
        changed = false;
        for (u32 i = r->part_count; i-- > 0;) {
            changed = follow(r, &r->parts[i], add_needed) || changed;
        }
    }
}

// ---- From where to where ------------------------------------------------------------------------

static void range_reach(ptx_range* range, u32 instruction) {
    range->first = instruction < range->first ? instruction : range->first;
    range->last = instruction > range->last ? instruction : range->last;
}

static void reach(ptx_ranges* r, u32 index, bool written, void* data) {
    (void)written;
    range_reach(&r->list[index], *(const u32*)data);
}

static void reach_needed(ptx_ranges* r, const u64* needed, u32 instruction) {
    for (u32 i = 0; i < r->words; i++) {
        for (u64 left = needed[i]; left != 0; left &= left - 1) {
            range_reach(&r->list[64 * i + (u32)__builtin_ctzll(left)], instruction);
        }
    }
}

static bool reach_end(ptx_ranges* r, ptx_part* part, u32 instruction) {
    reach_needed(r, r->parts[r->part_of[instruction]].needed, part->end - 1);
    return false;
}

// A product of a warpgroup reads and writes its registers until it is waited for.
static void reach_all(ptx_ranges* r, u32 index, bool written, void* data) {
    (void)written;
    (void)data;
    r->list[index].first = 0;
    r->list[index].last = r->kernel->code_count - 1;
    r->list[index].poisoned = true;
}

static void find_ranges(ptx_ranges* r) {
    for (u32 i = 0; i < r->part_count; i++) {
        ptx_part* part = &r->parts[i];
        reach_needed(r, part->needed, part->begin);
        follow(r, part, reach_end);
        for (u32 n = part->begin; n < part->end; n++) {
            const ptx_insn* in = &r->kernel->code[n];
            visit_registers(r, in, in->list_count != 0 ? reach_all : reach, &n);
        }
    }
    for (u32 i = 0; i < r->count; i++) {
        ptx_range* range = &r->list[i];
        range->poisoned = range->poisoned || (r->parts[0].needed[i / 64] >> i % 64 & 1u) != 0;
    }
}

// ---- Storage ------------------------------------------------------------------------------------

#define PTX_SIZES 4 // of registers: predicates, and 16, 32 and 64 bits for each lane

typedef struct ptx_storage {
    u32* free[PTX_SIZES];
    u32 free_count[PTX_SIZES];
    u32 bytes;
} ptx_storage;

static u32 size_of(u32 bytes) {
    return bytes == 4 ? 0 : bytes == 64 ? 1 : bytes == 128 ? 2 : 3;
}

static void storage_give(ptx_storage* s, u32 size, u32 at) {
    s->free[size] = (u32*)grow(s->free[size], s->free_count[size], sizeof *s->free[size]);
    s->free[size][s->free_count[size]++] = at;
}

// Predicates share 64 bytes, so that all other registers are aligned.
static u32 storage_take(ptx_storage* s, u32 bytes) {
    const u32 size = size_of(bytes);
    if (s->free_count[size] == 0) {
        const u32 chunk = bytes < 64 ? 64 : bytes;
        for (u32 at = chunk; at >= bytes; at -= bytes) {
            storage_give(s, size, s->bytes + at - bytes);
        }
        s->bytes += chunk;
    }
    return s->free[size][--s->free_count[size]];
}

// Those with poison are first, and nothing else has their storage before them.
static void place_ranges(ptx_ranges* r, ptx_storage* s) {
    ptx_kernel* k = r->kernel;
    for (u32 i = 0; i < r->count; i++) {
        if (r->list[i].poisoned) {
            r->list[i].at = storage_take(s, r->list[i].bytes);
        }
    }
    k->poison_bytes = s->bytes;
    for (u32 n = 0; n < k->code_count; n++) {
        for (u32 i = r->starts[n]; i != 0; i = r->list[i - 1].next_first) {
            if (!r->list[i - 1].poisoned) {
                r->list[i - 1].at = storage_take(s, r->list[i - 1].bytes);
            }
        }
        for (u32 i = r->ends[n]; i != 0; i = r->list[i - 1].next_last) {
            storage_give(s, size_of(r->list[i - 1].bytes), r->list[i - 1].at);
        }
    }
    k->register_bytes = s->bytes;
}

static u32 placed(const ptx_ranges* r, u32 at) {
    return is_register(at) ? r->list[r->number[at / 4] - 1].at : at;
}

static void rename_registers(ptx_ranges* r) {
    for (u32 n = 0; n < r->kernel->code_count; n++) {
        ptx_insn* in = &r->kernel->code[n];
        in->guard = placed(r, in->guard);
        for (u32 i = 0; i < PTX_MAX_ARGS; i++) {
            in->arg[i] = in->width[i] != 0 ? placed(r, in->arg[i]) : in->arg[i];
        }
        for (u32 i = 0; i < in->list_count; i++) {
            in->list[i] = placed(r, in->list[i]);
        }
    }
}

static void sort_ranges(ptx_ranges* r) {
    const u32 count = r->kernel->code_count;
    r->starts = (u32*)must_alloc(count * sizeof *r->starts);
    r->ends = (u32*)must_alloc(count * sizeof *r->ends);
    for (u32 i = r->count; i-- > 0;) {
        ptx_range* range = &r->list[i];
        range->next_first = r->starts[range->first];
        range->next_last = r->ends[range->last];
        r->starts[range->first] = i + 1;
        r->ends[range->last] = i + 1;
    }
}

// Places the registers of a kernel whose labels are settled.
static void share_registers(ptx_kernel* k, const ptx_registers* declared, u32 count) {
    ptx_ranges r;
    ptx_storage storage;
    memset(&r, 0, sizeof r);
    memset(&storage, 0, sizeof storage);
    r.kernel = k;
    r.number = (u32*)must_alloc((k->register_bytes / 4 + 1) * sizeof *r.number);
    number_registers(&r, declared, count);
    find_parts(&r);
    find_needed(&r);
    find_ranges(&r);
    sort_ranges(&r);
    place_ranges(&r, &storage);
    rename_registers(&r);
    for (u32 i = 0; i < PTX_SIZES; i++) {
        free(storage.free[i]);
    }
    free(r.number);
    free(r.list);
    free(r.parts);
    free(r.part_of);
    free(r.bits);
    free(r.starts);
    free(r.ends);
}

#endif
