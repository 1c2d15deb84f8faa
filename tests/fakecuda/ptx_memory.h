// ptx_memory.h - all memory accesses: checked, then carried out lane by lane.
#ifndef FAKECUDA_PTX_MEMORY_H
#define FAKECUDA_PTX_MEMORY_H

#include "ptx_cvt.h"

// ---- Addresses ----------------------------------------------------------------------------------

static const char* space_name(u32 space) {
    static const char* const NAMES[] = {"generic", "global", "shared", "local", "const", "param"};
    return NAMES[space];
}

// The space that contains a generic address; *address becomes an address in that space.
static u32 space_resolve(u32 space, u64* address) {
    if (space != SPACE_GENERIC) {
        return space;
    }
    if (*address - PTX_SHARED_BASE < PTX_WINDOW_BYTES) {
        *address -= PTX_SHARED_BASE;
        return SPACE_SHARED;
    }
    if (*address - PTX_LOCAL_BASE < PTX_WINDOW_BYTES) {
        *address -= PTX_LOCAL_BASE;
        return SPACE_LOCAL;
    }
    return SPACE_GLOBAL;
}

static u8* inside(u8* base, u64 size, u64 address, u32 bytes) {
    return address <= size && bytes <= size - address ? base + address : NULL;
}

static u8* module_data(const ptx_module* module, u64 address, u32 bytes, bool write) {
    const u64 at = address - PTX_MODULE_BASE;
    if (write && at < module->data_bytes && module->readonly[at]) {
        return NULL;
    }
    return inside(module->data, module->data_bytes, at, bytes);
}

// Host address of one lane's bytes, or NULL if they are out of bounds.
static u8* lane_memory(ptx_warp* w, u32 space, u64 address, u32 bytes, bool write, u32 lane) {
    ptx_run* run = w->run;
    const ptx_kernel* kernel = run->kernel;
    u64 at = address;
    switch (space_resolve(space, &at)) {
    case SPACE_SHARED:
        return inside(run->shared, run->shared_bytes, at, bytes);
    case SPACE_LOCAL:
        return inside(w->local + (size_t)lane * kernel->local_bytes, kernel->local_bytes, at,
                      bytes);
    case SPACE_PARAM:
        return write ? NULL : inside(run->params, kernel->param_bytes, at, bytes);
    case SPACE_CONST:
        return write ? NULL : module_data(kernel->module, at, bytes, false);
    default:
        if (at - PTX_MODULE_BASE < PTX_WINDOW_BYTES) {
            return module_data(kernel->module, at, bytes, write);
        }
        return (u8*)run->env->resolve(run->env->user, at, bytes, write);
    }
}

// The addresses of all lanes; inactive lanes repeat that of the first active one.
static void warp_addresses(const ptx_warp* w, const ptx_insn* in, u32 index, s64 offset, u32 mask,
                           u64 address[PTX_LANES]) {
    const u64 add = (u64)offset;
    if (in->width[index] == 8) {
        const u64* from = LANES_u64(w, in->arg[index]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            address[l] = from[l] + add;
        }
    } else {
        const u32* from = LANES_u32(w, in->arg[index]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            address[l] = from[l] + add;
        }
    }
    if (mask != PTX_FULL) {
        const u64 first = address[lane_first(mask)];
        for (u32 l = 0; l < PTX_LANES; l++) {
            address[l] = lane_on(mask, l) ? address[l] : first;
        }
    }
}

static bool trap_access(ptx_warp* w, const ptx_insn* in, u32 space, u64 address, u32 bytes,
                        bool write, u32 lane) {
    if (address % bytes != 0) {
        return trap(w, in, PTX_TRAP_MISALIGNED, lane, "%s %s of %u bytes at 0x%llx is not aligned",
                    space_name(space), write ? "write" : "read", bytes,
                    (unsigned long long)address);
    }
    return trap(w, in, PTX_TRAP_ADDRESS, lane, "%s %s of %u bytes at 0x%llx is out of bounds",
                space_name(space), write ? "write" : "read", bytes, (unsigned long long)address);
}

// Whether all lanes access global memory, each the bytes after those of the lane before.
static bool warp_in_a_row(u32 space, const u64 address[PTX_LANES], u32 bytes, u32 mask) {
    u64 differ = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        differ |= address[l] ^ (address[0] + (u64)l * bytes);
    }
    return differ == 0 && mask == PTX_FULL && space <= SPACE_GLOBAL &&
           address[PTX_LANES - 1] < PTX_PARAM_BASE;
}

// Whether accesses to global memory are in order with the kernel before.
static bool warp_watch(ptx_warp* w, const ptx_insn* in, u32 space, const u64 address[PTX_LANES],
                       u32 bytes, bool write, u32 mask) {
    const ptx_env* env = w->run->env;
    if (!write && w->early == 0) {
        return true; // all have waited for the kernel before
    }
    const bool alike = w->early == 0 || w->early == PTX_FULL;
    const bool row = alike && warp_in_a_row(space, address, bytes, mask);
    bytes *= row ? PTX_LANES : 1;
    for (u32 l = 0; l < (row ? 1 : PTX_LANES) && space <= SPACE_GLOBAL; l++) {
        u64 at = address[l];
        if (!lane_on(mask, l) || space_resolve(space, &at) != SPACE_GLOBAL ||
            at - PTX_MODULE_BASE < PTX_WINDOW_BYTES) {
            continue;
        }
        const bool waited = !lane_on(w->early, l);
        const bool raced =
            env->watch != NULL && !env->watch(env->user, at, bytes, write, waited);
        if (raced || (write && !waited)) {
            return trap(w, in, PTX_TRAP_SYNC, l,
                        write ? "global memory is written before griddepcontrol.wait"
                              : "what an earlier kernel writes is read before griddepcontrol.wait");
        }
    }
    return true;
}

// Reports what the lanes access in global memory.
static void warp_touch(const ptx_warp* w, u32 space, const u64 address[PTX_LANES], u32 bytes,
                       bool write, u32 mask) {
    const ptx_env* env = w->run->env;
    for (u32 l = 0; l < PTX_LANES && space <= SPACE_GLOBAL; l++) {
        u64 at = address[l];
        if (lane_on(mask, l) && space_resolve(space, &at) == SPACE_GLOBAL &&
            at - PTX_MODULE_BASE >= PTX_WINDOW_BYTES) {
            env->touch(env->user, at, bytes, write);
        }
    }
}

// Finds and checks the bytes of every lane. One look-up is enough for the whole warp if all its
// lanes access one allocation or shared memory, which is nearly always the case.
static bool warp_memory(ptx_warp* w, const ptx_insn* in, u32 space, const u64 address[PTX_LANES],
                        u32 bytes, bool write, u32 mask, u8* at[PTX_LANES]) {
    if ((w->run->env->early || w->run->env->watch) &&
        !warp_watch(w, in, space, address, bytes, write, mask)) {
        return false;
    }
    if (w->run->env->touch) {
        warp_touch(w, space, address, bytes, write, mask);
    }
    u64 low = address[0];
    u64 high = address[0];
    u64 bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        low = address[l] < low ? address[l] : low;
        high = address[l] > high ? address[l] : high;
        bits |= address[l];
    }
    u8* base = NULL;
    if ((bits & (bytes - 1)) == 0) {
        const u64 above = space == SPACE_SHARED ? 0 : PTX_SHARED_BASE;
        if (space == SPACE_SHARED || (space == SPACE_GENERIC && low >= above)) {
            const bool within = inside(w->run->shared, w->run->shared_bytes, high - above, bytes);
            base = within ? w->run->shared + (low - above) : NULL;
        } else if (space <= SPACE_GLOBAL && high < PTX_MODULE_BASE) {
            const ptx_env* env = w->run->env;
            base = (u8*)env->resolve(env->user, low, (size_t)(high - low) + bytes, write);
        } else if (space == SPACE_PARAM && !write) {
            const bool within = inside(w->run->params, w->run->kernel->param_bytes, high, bytes);
            base = within ? w->run->params + low : NULL;
        }
    }
    if (base != NULL) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            at[l] = base + (address[l] - low);
        }
        return true;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        const bool aligned = (address[l] & (bytes - 1)) == 0; // a power of two
        at[l] = aligned ? lane_memory(w, space, address[l], bytes, write, l) : NULL;
        if (at[l] == NULL) {
            return trap_access(w, in, space, address[l], bytes, write, l);
        }
    }
    for (u32 l = 0; l < PTX_LANES; l++) { // inactive lanes point to a harmless place
        at[l] = lane_on(mask, l) ? at[l] : at[lane_first(mask)];
    }
    return true;
}

// When several lanes write to one place, the winner is undefined, so it depends on the order here.
static u32 lane_in_order(const ptx_warp* w, u32 i) {
    return w->run->env->order == PTX_ORDER_REVERSE ? PTX_LANES - 1 - i : i;
}

// ---- ld, st -------------------------------------------------------------------------------------

static u64 memory_get(const u8* at, ptx_type type) {
    u64 raw = 0;
    switch (PTX_TYPES[type].bytes) {
    case 1:
        raw = *at;
        break;
    case 2: {
        u16 value;
        memcpy(&value, at, sizeof value);
        raw = value;
        break;
    }
    case 4: {
        u32 value;
        memcpy(&value, at, sizeof value);
        raw = value;
        break;
    }
    default:
        memcpy(&raw, at, sizeof raw);
        break;
    }
    return PTX_TYPES[type].kind == 's' ? sign_extend(raw, PTX_TYPES[type].bytes) : raw;
}

static void memory_put(u8* at, u32 bytes, u64 raw) {
    const u8 value8 = (u8)raw;
    const u16 value16 = (u16)raw;
    const u32 value32 = (u32)raw;
    switch (bytes) {
    case 1:
        *at = value8;
        break;
    case 2:
        memcpy(at, &value16, sizeof value16);
        break;
    case 4:
        memcpy(at, &value32, sizeof value32);
        break;
    default:
        memcpy(at, &raw, sizeof raw);
        break;
    }
}

// One element for every lane, with a register as wide as the element.
#define DEFINE_TRANSFER(type)                                                                      \
    static void load_##type(ptx_warp* w, u32 to, u32 mask, u8* const at[PTX_LANES], u32 skip) {    \
        type* d = LANES_##type(w, to);                                                             \
        if (mask == PTX_FULL) {                                                                    \
            for (u32 l = 0; l < PTX_LANES; l++) {                                                  \
                memcpy(&d[l], at[l] + skip, sizeof d[l]);                                          \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        for (u32 l = 0; l < PTX_LANES; l++) {                                                      \
            type value;                                                                            \
            memcpy(&value, at[l] + skip, sizeof value);                                            \
            d[l] = lane_on(mask, l) ? value : d[l];                                                \
        }                                                                                          \
    }                                                                                              \
    static void store_##type(ptx_warp* w, u32 from, u32 mask, u8* const at[PTX_LANES], u32 skip) { \
        const type* d = LANES_##type(w, from);                                                     \
        for (u32 n = 0; n < PTX_LANES; n++) {                                                      \
            const u32 l = lane_in_order(w, n);                                                     \
            if (lane_on(mask, l)) {                                                                \
                memcpy(at[l] + skip, &d[l], sizeof d[l]);                                          \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_TRANSFER(u16)
DEFINE_TRANSFER(u32)
DEFINE_TRANSFER(u64)

static bool exec_ld(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 size = PTX_TYPES[in->type].bytes;
    const u32 source = in->vector;
    u64 address[PTX_LANES];
    u8* at[PTX_LANES];
    warp_addresses(w, in, source, in->offset, mask, address);
    if (!warp_memory(w, in, in->space, address, size * in->vector, false, mask, at)) {
        return false;
    }
    for (u32 i = 0; i < in->vector; i++) {
        const u32 to = in->arg[i];
        if (to == PTX_NONE) {
            continue;
        }
        if (size != in->width[i]) {
            for (u32 l = 0; l < PTX_LANES; l++) {
                if (lane_on(mask, l)) {
                    const u64 value = memory_get(at[l] + i * size, (ptx_type)in->type);
                    lane_put(w, to, in->width[i], l, value);
                }
            }
        } else if (size == 4) {
            load_u32(w, to, mask, at, i * size);
        } else if (size == 2) {
            load_u16(w, to, mask, at, i * size);
        } else {
            load_u64(w, to, mask, at, i * size);
        }
    }
    w->turn_over = w->turn_over || (in->sub != 0 && w->run->env->together);
    return true;
}

// ld.param at a fixed offset: the same value for every lane.
static bool exec_ld_param(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 size = PTX_TYPES[in->type].bytes;
    for (u32 i = 0; i < in->vector; i++) {
        const u64 value = memory_get(w->run->params + in->offset + i * size, (ptx_type)in->type);
        if (in->width[i] == 8) {
            u64* d = LANES_u64(w, in->arg[i]);
            EACH_LANE(u64, , value)
        } else if (in->width[i] == 4) {
            u32* d = LANES_u32(w, in->arg[i]);
            EACH_LANE(u32, , value)
        } else {
            u16* d = LANES_u16(w, in->arg[i]);
            EACH_LANE(u16, , value)
        }
    }
    return true;
}

// Records a write to shared memory that tensor copies and products do not see before a fence.
static void mark_unfenced(ptx_warp* w, const u8* at, u32 bytes) {
    ptx_run* run = w->run;
    if (run->unfenced != NULL && at >= run->shared && at < run->shared + run->shared_bytes) {
        const size_t first = (size_t)(at - run->shared);
        memset(run->unfenced + first / 16, (int)(w->index + 1),
               (first + bytes - 1) / 16 - first / 16 + 1);
    }
}

static bool exec_st(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 size = PTX_TYPES[in->type].bytes;
    u64 address[PTX_LANES];
    u8* at[PTX_LANES];
    warp_addresses(w, in, 0, in->offset, mask, address);
    if (!warp_memory(w, in, in->space, address, size * in->vector, true, mask, at)) {
        return false;
    }
    for (u32 l = 0; w->run->unfenced != NULL && l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            mark_unfenced(w, at[l], size * in->vector);
        }
    }
    for (u32 i = 0; i < in->vector; i++) {
        const u32 from = in->arg[1 + i];
        if (size != in->width[1 + i]) {
            for (u32 n = 0; n < PTX_LANES; n++) {
                const u32 l = lane_in_order(w, n);
                if (lane_on(mask, l)) {
                    memory_put(at[l] + i * size, size, lane_get(w, from, in->width[1 + i], l));
                }
            }
        } else if (size == 4) {
            store_u32(w, from, mask, at, i * size);
        } else if (size == 2) {
            store_u16(w, from, mask, at, i * size);
        } else {
            store_u64(w, from, mask, at, i * size);
        }
    }
    return true;
}

// ---- atom, red ----------------------------------------------------------------------------------

enum {
    ATOM_ADD,
    ATOM_MIN,
    ATOM_MAX,
    ATOM_AND,
    ATOM_OR,
    ATOM_XOR,
    ATOM_INC,
    ATOM_DEC,
    ATOM_EXCH,
    ATOM_CAS
};

static bool atom_less(ptx_type type, u64 a, u64 b) {
    if (PTX_TYPES[type].kind == 's') {
        return (s64)extend(a, type) < (s64)extend(b, type);
    }
    return a < b;
}

static u64 atom_apply(u32 operation, ptx_type type, u64 old, u64 b, u64 c) {
    switch (operation) {
    case ATOM_ADD:
        if (type == TYPE_F32) {
            return f32_bits(f32_nan(f32_make((u32)old) + f32_make((u32)b)));
        }
        return type == TYPE_F64 ? f64_bits(f64_nan(f64_make(old) + f64_make(b))) : old + b;
    case ATOM_MIN:
        return atom_less(type, b, old) ? b : old;
    case ATOM_MAX:
        return atom_less(type, old, b) ? b : old;
    case ATOM_AND:
        return old & b;
    case ATOM_OR:
        return old | b;
    case ATOM_XOR:
        return old ^ b;
    case ATOM_INC:
        return old >= b ? 0 : old + 1;
    case ATOM_DEC:
        return old == 0 || old > b ? b : old - 1;
    case ATOM_EXCH:
        return b;
    default:
        return old == b ? c : old;
    }
}

// arg[0] result or PTX_NONE, arg[1] address, arg[2] and arg[3] operands.
static bool exec_atom(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const ptx_type type = (ptx_type)in->type;
    const u32 size = PTX_TYPES[type].bytes;
    u64 address[PTX_LANES];
    u8* at[PTX_LANES];
    warp_addresses(w, in, 1, in->offset, mask, address);
    if (!warp_memory(w, in, in->space, address, size, true, mask, at)) {
        return false;
    }
    for (u32 n = 0; n < PTX_LANES; n++) {
        const u32 l = lane_in_order(w, n);
        if (!lane_on(mask, l)) {
            continue;
        }
        const u64 old = zero_extend(memory_get(at[l], type), size);
        const u64 b = lane_get(w, in->arg[2], size, l);
        const u64 c = in->sub == ATOM_CAS ? lane_get(w, in->arg[3], size, l) : 0;
        memory_put(at[l], size, atom_apply(in->sub, type, old, b, c));
        if (in->arg[0] != PTX_NONE) {
            lane_put(w, in->arg[0], size, l, old);
        }
    }
    return true;
}

// ---- cp.async -----------------------------------------------------------------------------------

// The copy is only queued here and its destination poisoned: it is carried out when the thread
// waits for it, the latest moment the device may choose, and until then no thread can see the data.
static bool exec_cp_async(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 bytes = in->vector;
    u64 to[PTX_LANES];
    u64 from[PTX_LANES];
    u8* at[PTX_LANES];
    warp_addresses(w, in, 0, in->offset, mask, to);
    warp_addresses(w, in, 1, (s32)in->target, mask, from);
    if (!warp_memory(w, in, SPACE_SHARED, to, bytes, true, mask, at)) {
        return false;
    }
    if ((w->run->env->early || w->run->env->watch) && in->sub == 0 &&
        !warp_watch(w, in, SPACE_GLOBAL, from, bytes, false, mask)) {
        return false;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        u32 size = bytes;
        if (in->sub == 1) { // number of bytes to read; the rest become zero
            size = LANES_u32(w, in->arg[2])[l];
        } else if (in->sub == 2) { // whether to ignore the source
            size = lane_on(pred_get(w, in, 2), l) ? 0 : bytes;
        }
        if (size > bytes) {
            return trap(w, in, PTX_TRAP_OTHER, l, "source size %u is above %u", size, bytes);
        }
        const bool aligned = from[l] % bytes == 0;
        const u8* source =
            aligned && size ? lane_memory(w, SPACE_GLOBAL, from[l], size, false, l) : NULL;
        if (size > 0 && source == NULL) {
            return trap_access(w, in, SPACE_GLOBAL, from[l], aligned ? size : bytes, false, l);
        }
        if (w->copy_count == w->copy_capacity) {
            w->copy_capacity = w->copy_capacity ? 2 * w->copy_capacity : 256;
            w->copies = (ptx_copy*)must(realloc(w->copies, w->copy_capacity * sizeof *w->copies));
        }
        const ptx_copy copy = {l, w->copy_group[l], (u32)to[l], bytes, size, source};
        w->copies[w->copy_count++] = copy;
        memset(at[l], PTX_POISON, bytes);
    }
    return true;
}

static bool exec_cp_commit(ptx_warp* w, const ptx_insn* in, u32 mask) {
    (void)in;
    for (u32 l = 0; l < PTX_LANES; l++) {
        w->copy_group[l] += mask >> l & 1u;
    }
    return true;
}

// Leaves at most in->offset of the newest groups in flight; with in->sub, also completes
// uncommitted copies.
static bool exec_cp_wait(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32 kept = 0;
    for (u32 i = 0; i < w->copy_count; i++) {
        const ptx_copy copy = w->copies[i];
        const bool due = in->sub || copy.group + in->offset < w->copy_group[copy.lane];
        if (!due || !lane_on(mask, copy.lane)) {
            w->copies[kept++] = copy;
            continue;
        }
        u8* to = w->run->shared + copy.to;
        memset(to, 0, copy.bytes);
        if (copy.source_bytes > 0) {
            memcpy(to, copy.from, copy.source_bytes);
        }
    }
    w->copy_count = kept;
    return true;
}

// ---- ldmatrix -----------------------------------------------------------------------------------

// Matrix m: lane 8 m + r provides the address of row r, 16 bytes; lane l gets elements 2 (l % 4),
// +1 of row l / 4, or of column l / 4 with .trans.
static bool exec_ldmatrix(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (mask != PTX_FULL) {
        return trap(w, in, PTX_TRAP_SYNC, lane_first(mask), "needs all 32 lanes, has 0x%08x", mask);
    }
    u64 address[PTX_LANES];
    u16 element[4][8][8];
    warp_addresses(w, in, in->vector, in->offset, mask, address);
    for (u32 l = 0; l < 8u * in->vector; l++) {
        const u8* row =
            address[l] % 16 == 0 ? lane_memory(w, in->space, address[l], 16, false, l) : NULL;
        u64 at = address[l];
        if (row == NULL || space_resolve(in->space, &at) != SPACE_SHARED) {
            return trap_access(w, in, in->space, address[l], 16, false, l);
        }
        memcpy(element[l / 8][l % 8], row, 16);
    }
    for (u32 m = 0; m < in->vector; m++) {
        u32* d = LANES_u32(w, in->arg[m]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            const u32 i = l / 4;
            const u32 j = l % 4 * 2;
            const u32 low = in->flags & FLAG_TRANS ? element[m][j][i] : element[m][i][j];
            const u32 high = in->flags & FLAG_TRANS ? element[m][j + 1][i] : element[m][i][j + 1];
            d[l] = high << 16 | low;
        }
    }
    return true;
}

#endif
