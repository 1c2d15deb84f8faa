// ptx_hopper.h - what compute capability 9.0 adds: mbarriers, tensor copies and warpgroup products.
//
// They are asynchronous, and the device may carry them out at any moment between issue and wait.
// The order of the launch chooses one: FORWARD at once, REVERSE as late as possible, RANDOM in
// between. A kernel that reads too early or overwrites too soon computes garbage in one of them.
#ifndef FAKECUDA_PTX_HOPPER_H
#define FAKECUDA_PTX_HOPPER_H

#include "ptx_warp.h"

static u64 run_random(ptx_run* run) { // splitmix64
    u64 x = run->random += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// Whether an asynchronous operation is carried out now.
static bool run_at_once(ptx_run* run) {
    const ptx_order order = run->env->order;
    return order == PTX_ORDER_FORWARD || (order == PTX_ORDER_RANDOM && run_random(run) % 2 == 0);
}

// ---- proxies ------------------------------------------------------------------------------------

// Tensor copies and products access shared memory through the async proxy. They see what a thread
// wrote by ordinary stores, and the barriers that it initialised, after its fence.proxy.async.

static bool exec_fence_proxy(ptx_warp* w, const ptx_insn* in, u32 mask) {
    (void)in;
    (void)mask;
    for (u32 i = 0; w->run->unfenced != NULL && i <= w->run->shared_bytes / 16; i++) {
        if (w->run->unfenced[i] == w->index + 1) {
            w->run->unfenced[i] = 0;
        }
    }
    return true;
}

// Whether the async proxy may access these bytes of shared memory.
static bool proxy_check(ptx_warp* w, const ptx_insn* in, u64 address, u32 bytes, u32 lane) {
    const u8* unfenced = w->run->unfenced;
    for (u64 i = address / 16; unfenced != NULL && i <= (address + bytes - 1) / 16; i++) {
        if (i <= w->run->shared_bytes / 16 && unfenced[i] != 0) {
            return trap(w, in, PTX_TRAP_SYNC, lane,
                        "no fence.proxy.async since warp %u wrote to shared 0x%llx",
                        unfenced[i] - 1u, (unsigned long long)(i * 16));
        }
    }
    return true;
}

// ---- mbarrier -----------------------------------------------------------------------------------

// The interpreter's own layout of the opaque 64 bits.
typedef struct ptx_mbarrier {
    u32 pending; // arrivals that the current phase still needs
    u32 count;   // arrivals that every phase needs
    u32 phase;   // its parity
    s32 bytes;   // expected and not copied yet
} ptx_mbarrier;

enum { MBARRIER_INIT, MBARRIER_ARRIVE, MBARRIER_EXPECT, MBARRIER_WAIT };

#define MBARRIER_COUNT_MAX 0x3fffu
#define MBARRIER_MARK 5u // three bits that memory without a barrier does not have by chance

static u64 mbarrier_pack(const ptx_mbarrier* b) {
    return (u64)b->pending | (u64)b->count << 14 | (u64)b->phase << 28 | (u64)MBARRIER_MARK << 29 |
           (u64)(u32)b->bytes << 32;
}

// The barrier at a shared address; NULL after a trap.
static u8* mbarrier_find(ptx_warp* w, const ptx_insn* in, u64 address, u32 lane, bool fresh,
                         ptx_mbarrier* b) {
    u8* at = inside(w->run->shared, w->run->shared_bytes, address, 8);
    if (at == NULL || address % 8 != 0) {
        trap_access(w, in, SPACE_SHARED, address, 8, true, lane);
        return NULL;
    }
    u64 raw;
    memcpy(&raw, at, sizeof raw);
    if (!fresh && (raw >> 29 & 7) != MBARRIER_MARK) {
        trap(w, in, PTX_TRAP_SYNC, lane, "the mbarrier at 0x%llx was never initialised",
             (unsigned long long)address);
        return NULL;
    }
    b->pending = (u32)raw & MBARRIER_COUNT_MAX;
    b->count = (u32)(raw >> 14) & MBARRIER_COUNT_MAX;
    b->phase = (u32)(raw >> 28) & 1u;
    b->bytes = (s32)(raw >> 32);
    return at;
}

// Stores a barrier; its phase ends when nothing is missing.
static void mbarrier_store(ptx_run* run, u8* at, ptx_mbarrier* b) {
    if (b->pending == 0 && b->bytes == 0) {
        b->pending = b->count;
        b->phase ^= 1u;
        run->events++;
    }
    const u64 raw = mbarrier_pack(b);
    memcpy(at, &raw, sizeof raw);
}

// mbarrier.init|arrive|arrive.expect_tx: arg 0 the address, arg 1 a count.
static bool exec_mbarrier(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u64 address[PTX_LANES];
    warp_addresses(w, in, 0, in->offset, mask, address);
    for (u32 n = 0; n < PTX_LANES; n++) {
        const u32 l = lane_in_order(w, n);
        ptx_mbarrier b;
        if (!lane_on(mask, l)) {
            continue;
        }
        const u32 count = in->sub != MBARRIER_ARRIVE ? LANES_u32(w, in->arg[1])[l] : 0;
        u8* at = mbarrier_find(w, in, address[l], l, in->sub == MBARRIER_INIT, &b);
        if (at == NULL) {
            return false;
        }
        if (in->sub == MBARRIER_INIT) {
            const ptx_mbarrier first = {count, count, 0, 0};
            if (count == 0 || count > MBARRIER_COUNT_MAX) {
                return trap(w, in, PTX_TRAP_OTHER, l, "a barrier for %u arrivals", count);
            }
            const u64 raw = mbarrier_pack(&first);
            memcpy(at, &raw, sizeof raw);
            if (w->run->unfenced == NULL) {
                w->run->unfenced = (u8*)must(calloc(w->run->shared_bytes / 16 + 1, 1));
            }
            mark_unfenced(w, at, sizeof raw);
            continue;
        }
        if (b.pending == 0) {
            return trap(w, in, PTX_TRAP_SYNC, l, "more arrivals than the barrier's %u", b.count);
        }
        b.bytes += (s32)count;
        b.pending--;
        mbarrier_store(w->run, at, &b);
    }
    return true;
}

// mbarrier.try_wait.parity: arg 0 the result, 1 the address, 2 the parity. If a lane has to wait,
// the warp's turn ends.
static bool exec_mbarrier_wait(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u64 address[PTX_LANES];
    u32 done = 0;
    warp_addresses(w, in, 1, in->offset, mask, address);
    for (u32 l = 0; l < PTX_LANES; l++) {
        ptx_mbarrier b;
        if (!lane_on(mask, l)) {
            continue;
        }
        if (mbarrier_find(w, in, address[l], l, false, &b) == NULL) {
            return false;
        }
        const u32 parity = LANES_u32(w, in->arg[2])[l];
        done |= (u32)(b.phase != (parity & 1u)) << l;
    }
    pred_put(w, in->arg[0], mask, done);
    w->turn_over = done != mask;
    return true;
}

// ---- cp.async.bulk.tensor -----------------------------------------------------------------------

#define PTX_BOX_ROW_BYTES 128 // the widest box that the swizzle allows

// Swaps the 16-byte units of 128 bytes by the row: bits 4 to 6 of an address with bits 7 to 9.
static u64 swizzled(u64 address) {
    return address ^ (address >> 7 & 7u) << 4;
}

// One row of a box: `count` elements of the tensor from `from` on, the others zero. The swizzle
// moves units of 16 bytes.
static bool bulk_row(ptx_run* run, const ptx_bulk* c, u64 to, u64 from, u32 skip, u32 count) {
    const ptx_tensor_map* m = &c->map;
    u8 row[PTX_BOX_ROW_BYTES];
    memset(row, 0, sizeof row);
    if (count > 0) {
        const u8* source =
            (const u8*)run->env->resolve(run->env->user, from, (size_t)count * m->element, false);
        if (source == NULL) {
            return trap_access(&run->warps[c->warp], c->in, SPACE_GLOBAL, from, m->element, false,
                               c->lane);
        }
        memcpy(row + (size_t)skip * m->element, source, (size_t)count * m->element);
        if (run->env->touch) {
            run->env->touch(run->env->user, from, (size_t)count * m->element, false);
        }
    }
    for (u32 i = 0; i < m->box[0] * m->element; i += 16) {
        memcpy(run->shared + swizzled(to + i), row + i, 16);
    }
    return true;
}

// Copies a box into shared memory, with zeros outside the tensor, and completes its bytes.
static bool bulk_complete(ptx_run* run, const ptx_bulk* c) {
    const ptx_tensor_map* m = &c->map;
    ptx_warp* w = &run->warps[c->warp];
    const u64 row_bytes = (u64)m->box[0] * m->element;
    const s64 first = c->at[0] > 0 ? c->at[0] : 0;
    const s64 right = (s64)c->at[0] + m->box[0];
    const s64 end = right < (s64)m->size[0] ? right : (s64)m->size[0];
    for (u32 y = 0; y < m->box[1]; y++) {
        const s64 row = (s64)c->at[1] + y;
        const bool real = row >= 0 && (u64)row < m->size[1] && end > first;
        const u64 from = m->base + (u64)(real ? row : 0) * m->stride + (u64)first * m->element;
        if (!bulk_row(run, c, c->to + y * row_bytes, from, (u32)(first - c->at[0]),
                      real ? (u32)(end - first) : 0)) {
            return false;
        }
    }
    ptx_mbarrier b;
    u8* at = mbarrier_find(w, c->in, c->barrier, c->lane, false, &b);
    if (at == NULL) {
        return false;
    }
    b.bytes -= (s32)(row_bytes * m->box[1]);
    mbarrier_store(run, at, &b);
    run->events++;
    return true;
}

// Completes the copy at an index of the queue.
static bool run_complete_bulk(ptx_run* run, u32 index) {
    const ptx_bulk copy = run->bulks[index];
    run->bulks[index] = run->bulks[--run->bulk_count];
    return bulk_complete(run, &copy);
}

// A turn of the scheduler: some of the copies in flight may arrive, all of them if nothing else
// can happen. Returns false after a trap.
static bool run_bulks(ptx_run* run, bool stuck) {
    while (run->bulk_count > 0 && (stuck || run->env->order == PTX_ORDER_RANDOM)) {
        if (!stuck && run_random(run) % 2 == 0) {
            return true;
        }
        const bool any = run->env->order == PTX_ORDER_RANDOM;
        const u32 index = any ? (u32)(run_random(run) % run->bulk_count) : run->bulk_count - 1;
        if (!run_complete_bulk(run, index)) {
            return false;
        }
        if (stuck && run->env->order == PTX_ORDER_REVERSE) {
            return true; // one at a time
        }
    }
    return true;
}

// The bytes of a tensor map: a parameter of the kernel.
static bool bulk_map(ptx_warp* w, const ptx_insn* in, u64 address, u32 lane, ptx_tensor_map* map) {
    const ptx_run* run = w->run;
    const u8* from = inside(run->params, run->kernel->param_bytes, address - PTX_PARAM_BASE,
                            PTX_TENSOR_MAP_BYTES);
    if (address < PTX_PARAM_BASE || from == NULL || address % 64 != 0) {
        return trap(w, in, PTX_TRAP_ADDRESS, lane, "the tensor map at 0x%llx is not a parameter",
                    (unsigned long long)address);
    }
    memcpy(map, from, sizeof *map);
    if (map->magic != PTX_TENSOR_MAP_MAGIC) {
        return trap(w, in, PTX_TRAP_OTHER, lane, "not a tensor map");
    }
    return true;
}

// arg: shared address, tensor map, x, y, barrier.
static bool exec_bulk(ptx_warp* w, const ptx_insn* in, u32 mask) {
    ptx_run* run = w->run;
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        ptx_bulk c;
        memset(&c, 0, sizeof c);
        c.in = in;
        c.warp = w->index;
        c.lane = l;
        c.to = LANES_u32(w, in->arg[0])[l];
        c.at[0] = LANES_s32(w, in->arg[2])[l];
        c.at[1] = LANES_s32(w, in->arg[3])[l];
        c.barrier = LANES_u32(w, in->arg[4])[l];
        if (!bulk_map(w, in, LANES_u64(w, in->arg[1])[l], l, &c.map)) {
            return false;
        }
        const u64 bytes = (u64)c.map.box[0] * c.map.box[1] * c.map.element;
        u8* place = inside(run->shared, run->shared_bytes, c.to, (u32)bytes);
        if (place == NULL || c.to % 1024 != 0 ||
            c.map.box[0] * c.map.element != 128) { // the pattern repeats every 1,024 bytes
            return trap(w, in, c.to % 1024 != 0 ? PTX_TRAP_MISALIGNED : PTX_TRAP_ADDRESS, l,
                        "%llu bytes at shared 0x%llx", (unsigned long long)bytes,
                        (unsigned long long)c.to);
        }
        if (!proxy_check(w, in, c.to, (u32)bytes, l) || !proxy_check(w, in, c.barrier, 8, l)) {
            return false;
        }
        memset(place, PTX_POISON, (size_t)bytes);
        if (run_at_once(run)) {
            if (!bulk_complete(run, &c)) {
                return false;
            }
            continue;
        }
        if (run->bulk_count == run->bulk_capacity) {
            run->bulk_capacity = run->bulk_capacity ? 2 * run->bulk_capacity : 64;
            run->bulks =
                (ptx_bulk*)must(realloc(run->bulks, run->bulk_capacity * sizeof *run->bulks));
        }
        run->bulks[run->bulk_count++] = c;
    }
    return true;
}

// ---- wgmma --------------------------------------------------------------------------------------

// m64nNk16: warp q of the four holds rows 16 q to 16 q + 15 of D, laid out as N / 8 results of an
// m16n8k16. A is in registers, laid out the same way, or in shared memory; B is in shared memory.
enum { WGMMA_TRANS_A = 1, WGMMA_TRANS_B = 2, WGMMA_A_REGISTERS = 4 };

// The shared address of element (line, k) of an operand. A matrix with K in its rows has 8 lines
// per 1,024 bytes and `stride` bytes between groups of 8 lines; a transposed one has 64 lines per
// 128 bytes, `leading` bytes between groups of 64 lines, and `stride` between groups of 8 k.
static u64 wgmma_address(u64 descriptor, bool transposed, u32 line, u32 k) {
    const u64 start = (descriptor & 0x3fff) << 4;
    const u64 leading = (descriptor >> 16 & 0x3fff) << 4;
    const u64 stride = (descriptor >> 32 & 0x3fff) << 4;
    if (transposed) {
        return swizzled(start + line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2);
    }
    return swizzled(start + line / 8 * stride + line % 8 * 128 + k * 2);
}

// Eight elements that share 16 bytes, from (line, k) on: neighbours in k, or lines of a transposed
// operand. They go to every `step`th of value.
static bool wgmma_eight(ptx_warp* w, const ptx_insn* in, u64 descriptor, bool transposed, u32 line,
                        u32 k, u32 step, f32* value) {
    const u64 address = wgmma_address(descriptor, transposed, line, k);
    const u8* at = inside(w->run->shared, w->run->shared_bytes, address, 16);
    if (at == NULL) {
        return trap_access(w, in, SPACE_SHARED, address, 16, false, 0);
    }
    if (w->run->unfenced != NULL && w->run->unfenced[address / 16] != 0) {
        return proxy_check(w, in, address, 2, 0);
    }
    u16 raw[8];
    memcpy(raw, at, sizeof raw);
    for (u32 i = 0; i < 8; i++) {
        value[i * step] =
            in->type2 == TYPE_BF16 ? f32_make((u32)raw[i] << 16) : f16_to_f32(raw[i]);
    }
    return true;
}

static bool wgmma_check(ptx_warp* w, const ptx_insn* in, u64 descriptor) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0 || (descriptor >> 3 & 7) != 0) {
        return trap(w, in, PTX_TRAP_OTHER, 0,
                    "matrix descriptor 0x%llx: only the 128-byte swizzle from its first row on is "
                    "supported",
                    (unsigned long long)descriptor);
    }
    return true;
}

static bool wgmma_gather_a(ptx_warp* w, const ptx_product* product, ptx_mma* m) {
    const ptx_insn* in = product->in;
    if (in->sub & WGMMA_A_REGISTERS) {
        f32 element[2][PTX_LANES];
        for (u32 i = 0; i < 4; i++) {
            mma_unpack(LANES_u32(w, in->arg[i]), in->type2, element[0], element[1]);
            for (u32 h = 0; h < 2; h++) {
                mma_place(&m->a[8 * (i % 2)][8 * (i / 2) + h], 16, 2, element[h]);
            }
        }
        return true;
    }
    const u32 first = w->index % 4 * 16;
    const bool transposed = (in->sub & WGMMA_TRANS_A) != 0;
    for (u32 n = 0; n < 32; n++) { // 16 rows or columns in halves
        const u32 i = transposed ? n % 2 * 8 : n / 2;
        const u32 k = transposed ? n / 2 : n % 2 * 8;
        if (!wgmma_eight(w, in, product->a, transposed, first + i, k, transposed ? 16 : 1,
                         &m->a[i][k])) {
            return false;
        }
    }
    return true;
}

static bool wgmma_multiply(ptx_warp* w, const ptx_product* product) {
    const ptx_insn* in = product->in;
    const bool transposed = (in->sub & WGMMA_TRANS_B) != 0;
    ptx_mma m;
    if (!wgmma_gather_a(w, product, &m)) {
        return false;
    }
    for (u32 j = 0; j < in->list_count / 4; j++) {
        const u32* list = in->list + (size_t)j * 4;
        for (u32 x = 0; x < 16; x++) {
            const u32 n = transposed ? 0 : x / 2;
            const u32 k = transposed ? x : x % 2 * 8;
            if (!wgmma_eight(w, in, product->b, transposed, 8 * j + n, k, transposed ? 1 : 8,
                             &m.b[k][n])) {
                return false;
            }
        }
        memset(m.c, 0, sizeof m.c);
        for (u32 i = 0; i < 4 && product->accumulate; i++) {
            mma_place(&m.c[8 * (i / 2)][i % 2], 8, 2, LANES_f32(w, list[i]));
        }
        mma_multiply(&m, 16);
        for (u32 i = 0; i < 4; i++) {
            mma_pick(&m.c[8 * (i / 2)][i % 2], 8, 2, LANES_f32(w, list[i]));
        }
    }
    w->run->stats.mma++;
    return true;
}

// Carries out the products of all groups but the newest `kept`, in their order.
static bool wgmma_finish(ptx_warp* w, u32 kept, bool also_open) {
    u32 done = 0;
    while (done < w->product_count &&
           (also_open || w->products[done].group + kept < w->product_group)) {
        if (!wgmma_multiply(w, &w->products[done])) {
            return false;
        }
        done++;
    }
    w->product_count -= done;
    memmove(w->products, w->products + done, w->product_count * sizeof *w->products);
    return true;
}

// arg: A (four registers, or its descriptor in 0), B in 4, the predicate scale-d in 5; list: D.
static bool exec_wgmma(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (mask != PTX_FULL) {
        return trap(w, in, PTX_TRAP_SYNC, lane_first(mask), "needs all 32 lanes, has 0x%08x", mask);
    }
    if (!w->fenced) {
        return trap(w, in, PTX_TRAP_SYNC, 0, "no wgmma.fence since the last wgmma.wait_group");
    }
    ptx_product product;
    memset(&product, 0, sizeof product);
    product.in = in;
    product.group = w->product_group;
    product.a = in->sub & WGMMA_A_REGISTERS ? 0 : LANES_u64(w, in->arg[0])[0];
    product.b = LANES_u64(w, in->arg[4])[0];
    product.accumulate = lane_on(pred_get(w, in, 5), 0);
    if ((!(in->sub & WGMMA_A_REGISTERS) && !wgmma_check(w, in, product.a)) ||
        !wgmma_check(w, in, product.b)) {
        return false;
    }
    if (w->product_count == w->product_capacity) {
        w->product_capacity = w->product_capacity ? 2 * w->product_capacity : 32;
        w->products =
            (ptx_product*)must(realloc(w->products, w->product_capacity * sizeof *w->products));
    }
    w->products[w->product_count++] = product;
    return !run_at_once(w->run) || wgmma_finish(w, 0, true);
}

enum { WGMMA_FENCE, WGMMA_COMMIT, WGMMA_WAIT };

static bool exec_wgmma_sync(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (mask != PTX_FULL) {
        return trap(w, in, PTX_TRAP_SYNC, lane_first(mask), "needs all 32 lanes, has 0x%08x", mask);
    }
    if (in->sub == WGMMA_FENCE) {
        w->fenced = true;
    } else if (in->sub == WGMMA_COMMIT) {
        w->product_group++;
    } else {
        w->fenced = false;
        return wgmma_finish(w, (u32)in->offset, false);
    }
    return true;
}

#endif
