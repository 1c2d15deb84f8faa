// ptx.c - the interpreter's interface and scheduler: launches, blocks, warps, divergence, barriers.
//
// Build with -O2 -ffp-contract=off. A warp first executes the lanes at the lowest instruction;
// lanes that reach the same instruction continue together. A warp-synchronous instruction holds its
// lanes until its members have arrived; if nothing in the block can make progress, the
// launch traps.
#include "ptx_parse.h"

// ---- Modules ------------------------------------------------------------------------------------

static void kernel_free(ptx_kernel* k) {
    for (u32 i = 0; i < k->code_count; i++) {
        free(k->code[i].list);
    }
    for (u32 i = 0; i < k->table_count; i++) {
        free(k->tables[i].target);
    }
    free(k->tables);
    free(k->code);
    free(k->params);
    free(k->constants);
    free(k->specials);
}

void ptx_free(ptx_module* module) {
    if (module == NULL) {
        return;
    }
    for (u32 i = 0; i < module->kernel_count; i++) {
        kernel_free(&module->kernels[i]);
    }
    free(module->kernels);
    free(module->symbols);
    free(module->data);
    free(module->readonly);
    free(module->pool);
    free(module);
}

ptx_module* ptx_load(const char* text, char* log, size_t log_size) {
    ptx_parser p;
    memset(&p, 0, sizeof p);
    p.module = (ptx_module*)must_alloc(sizeof *p.module);
    p.known = (ptx_known*)must_alloc(PTX_KNOWN * sizeof *p.known);
    p.log = log;
    p.log_size = log_size;
    if (log != NULL && log_size > 0) {
        log[0] = 0;
    }
    const bool ok = read_module(&p, text);
    free(p.tokens);
    free(p.known);
    if (ok) {
        return p.module;
    }
    ptx_free(p.module);
    return NULL;
}

int ptx_version(const ptx_module* module) {
    return module->version;
}

const char* ptx_target(const ptx_module* module) {
    return module->target;
}

size_t ptx_kernel_count(const ptx_module* module) {
    return module->kernel_count;
}

const ptx_kernel* ptx_kernel_at(const ptx_module* module, size_t index) {
    return index < module->kernel_count ? &module->kernels[index] : NULL;
}

const ptx_kernel* ptx_find(const ptx_module* module, const char* name) {
    for (u32 i = 0; i < module->kernel_count; i++) {
        if (same(module->kernels[i].name, name)) {
            return &module->kernels[i];
        }
    }
    return NULL;
}

ptx_kernel_info ptx_describe(const ptx_kernel* kernel) {
    const ptx_kernel_info info = {kernel->name, kernel->param_count, kernel->static_shared,
                                  kernel->max_threads};
    return info;
}

size_t ptx_param_size(const ptx_kernel* kernel, uint32_t index) {
    return index < kernel->param_count ? kernel->params[index].bytes : 0;
}

// ---- Divergence ---------------------------------------------------------------------------------

// Picks the runnable lanes at the lowest instruction. Returns false if every live lane is waiting.
static bool warp_select(ptx_warp* w) {
    const u32 able = w->live & ~w->waiting;
    const u32 runnable = able & ~w->held;
    u32 at[PTX_LANES]; // of the runnable lanes
    u32 lowest = PTX_NONE;
    for (u32 l = 0; l < PTX_LANES; l++) {
        at[l] = w->pc[l] | (lane_on(runnable, l) ? 0 : PTX_NONE);
        lowest = at[l] < lowest ? at[l] : lowest;
    }
    w->group = 0;
    w->stop = PTX_NONE;
    if (runnable == 0) {
        return false;
    }
    u32 here = 0;
    u32 stop = PTX_NONE;
    for (u32 l = 0; l < PTX_LANES; l++) {
        const u32 other = at[l] == lowest ? PTX_NONE : at[l];
        here |= (u32)(w->pc[l] == lowest) << l;
        stop = other < stop ? other : stop;
    }
    w->group = here & able; // lanes held here try again with the newcomers
    w->stop = stop;
    w->held &= ~w->group;
    w->now = lowest;
    return true;
}

// Removes lanes from the group, to continue or wait at another instruction.
static void warp_part(ptx_warp* w, u32 lanes, u32 pc) {
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(lanes, l)) {
            w->pc[l] = pc;
        }
    }
    w->group &= ~lanes;
}

static void warp_branch(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (mask == 0) {
        w->now++;
    } else if (mask == w->group) {
        w->now = in->target;
    } else {
        warp_part(w, w->group & ~mask, w->now + 1);
        warp_part(w, mask, in->target);
    }
}

static bool warp_branch_index(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const ptx_table* table = &w->run->kernel->tables[in->target];
    const u32* index = LANES_u32(w, in->arg[0]);
    warp_part(w, w->group & ~mask, w->now + 1);
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        if (index[l] >= table->count) {
            return trap(w, in, PTX_TRAP_OTHER, l, "index %u, the table has %u", index[l],
                        table->count);
        }
        warp_part(w, 1u << l, table->target[index[l]]);
    }
    return true;
}

// Live lanes that the instruction waits for and that have not arrived.
static u32 warp_missing(const ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (in->kind != KIND_MEMBERS) {
        return w->live & ~mask;
    }
    const u32* members = LANES_u32(w, in->arg[in->members]);
    u32 wanted = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        wanted |= lane_on(mask, l) ? members[l] : 0;
    }
    return wanted & w->live & ~mask;
}

static void warp_hold(ptx_warp* w, u32 mask) {
    const u32 now = w->now;
    warp_part(w, w->group & ~mask, now + 1);
    warp_part(w, mask, now);
    w->held |= mask;
}

// Lanes that are held at the instruction that others have come to: they go on together.
static u32 warp_join(ptx_warp* w) {
    u32 here = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        here |= (u32)(lane_on(w->held, l) && w->pc[l] == w->now) << l;
    }
    w->held &= ~here;
    w->group |= here;
    return here;
}

static void warp_exit(ptx_warp* w, u32 mask) {
    w->live &= ~mask;
    w->group &= ~mask;
    w->held = 0; // an exited lane is no longer waited for
    w->now++;
}

// ---- Barriers -----------------------------------------------------------------------------------

static bool warp_arrive(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 first = lane_first(mask);
    const u32 id = LANES_u32(w, in->arg[0])[first];
    const bool counted = in->arg[1] != PTX_NONE;
    const u32 expected = counted ? LANES_u32(w, in->arg[1])[first] : 0;
    if (id >= PTX_BARRIERS || (counted && (expected == 0 || expected % PTX_LANES != 0))) {
        return trap(w, in, PTX_TRAP_OTHER, first, "barrier %u for %u threads", id, expected);
    }
    ptx_barrier* barrier = &w->run->barriers[id];
    if (barrier->arrived > 0 && barrier->expected != expected) {
        return trap(w, in, PTX_TRAP_SYNC, first,
                    "barrier %u is waited for with different thread counts", id);
    }
    barrier->expected = expected;
    if (in->sub >= BARRIER_POPC) {
        barrier->votes += lane_count(pred_get(w, in, 2) & mask);
    }
    barrier->arrived += counted && in->vector ? PTX_LANES : lane_count(mask);
    if (in->sub == BARRIER_ARRIVE) {
        w->now++;
        return true;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            w->barrier[l] = (u8)id;
        }
    }
    w->waiting |= mask;
    warp_part(w, w->group, w->now + 1);
    return true;
}

// A product belongs to the whole warpgroup: when one warp has waited for it, all four have done
// their parts, and one thread may announce that shared memory is no longer read.
static bool warpgroup_join(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 id = PTX_BARRIERS + w->index / 4;
    if (!in->exec(w, in, mask)) {
        return false;
    }
    w->run->barriers[id].expected = 4 * PTX_LANES;
    w->run->barriers[id].arrived += lane_count(mask);
    for (u32 l = 0; l < PTX_LANES; l++) {
        w->barrier[l] = (u8)id;
    }
    w->waiting |= mask;
    warp_part(w, w->group, w->now + 1);
    return true;
}

// Lets a lane continue after its barrier; bar.red stores the outcome in its result.
static void lane_leave(ptx_warp* w, u32 lane, const ptx_barrier* barrier) {
    const ptx_insn* in = &w->run->kernel->code[w->pc[lane] - 1];
    w->waiting &= ~(1u << lane);
    if (in->kind != KIND_BARRIER) {
        return;
    }
    if (in->sub == BARRIER_POPC) {
        LANES_u32(w, in->arg[3])[lane] = barrier->votes;
    } else if (in->sub == BARRIER_AND) {
        pred_put(w, in->arg[3], 1u << lane, barrier->votes == barrier->arrived ? PTX_FULL : 0);
    } else if (in->sub == BARRIER_OR) {
        pred_put(w, in->arg[3], 1u << lane, barrier->votes != 0 ? PTX_FULL : 0);
    }
}

// Opens the barriers that are complete; returns true if there was one.
static bool run_open_barriers(ptx_run* run) {
    u32 live = 0;
    for (u32 i = 0; i < run->warp_count; i++) {
        live += lane_count(run->warps[i].live);
    }
    bool opened = false;
    for (u32 id = 0; id < PTX_BARRIERS + PTX_WARPGROUPS; id++) {
        ptx_barrier* barrier = &run->barriers[id];
        if (barrier->arrived == 0 ||
            barrier->arrived < (barrier->expected ? barrier->expected : live)) {
            continue;
        }
        for (u32 i = 0; i < run->warp_count; i++) {
            ptx_warp* w = &run->warps[i];
            for (u32 l = 0; l < PTX_LANES; l++) {
                if (lane_on(w->waiting, l) && w->barrier[l] == id) {
                    lane_leave(w, l, barrier);
                }
            }
        }
        barrier->arrived = 0;
        barrier->votes = 0;
        opened = true;
    }
    return opened;
}

// ---- Warps --------------------------------------------------------------------------------------

// Handles all instructions that need more than execution and a step to the next one. Returns false
// after a trap.
static bool warp_control(ptx_warp* w, const ptx_insn* in, u32 mask) {
    switch (in->kind) {
    case KIND_BRANCH:
        warp_branch(w, in, mask);
        return true;
    case KIND_BRANCH_INDEX:
        return warp_branch_index(w, in, mask);
    case KIND_EXIT:
        if ((w->early & mask) != 0) {
            return trap(w, in, PTX_TRAP_SYNC, lane_first(w->early & mask),
                        "a thread ends without griddepcontrol.wait");
        }
        warp_exit(w, mask);
        return true;
    default:
        break;
    }
    if (mask == 0) {
        w->now++;
        return true;
    }
    const bool aligned = in->kind != KIND_BARRIER || in->vector;
    mask |= aligned && w->held != 0 ? warp_join(w) : 0;
    if (aligned && warp_missing(w, in, mask) != 0) {
        warp_hold(w, mask);
        return true;
    }
    if (in->kind == KIND_BARRIER) {
        return warp_arrive(w, in, mask);
    }
    if (in->kind == KIND_WARPGROUP) {
        return warpgroup_join(w, in, mask);
    }
    w->now++;
    return in->exec(w, in, mask);
}

// Runs one warp until it cannot continue, or for a number of instructions. Returns false after
// a trap.
static bool warp_run(ptx_warp* w, u64 budget) {
    ptx_run* run = w->run;
    const ptx_insn* code = run->kernel->code;
    u64 steps = 0;
    u64 lanes = 0;
    bool ok = true;
    bool more = warp_select(w);
    w->turn_over = false;
    while (ok && more && steps < budget && !w->turn_over) {
        const ptx_insn* in = &code[w->now];
        u32 mask = w->group;
        if (in->guard != PTX_NONE) {
            mask &= in->negated >> 31 ? ~PRED(w, in->guard) : PRED(w, in->guard);
        }
        steps++;
        lanes += mask == PTX_FULL ? PTX_LANES : lane_count(mask);
        if (in->kind == KIND_PLAIN) {
            ok = mask == 0 || in->exec(w, in, mask);
            w->now++;
        } else {
            ok = warp_control(w, in, mask);
        }
        if (w->now >= w->stop || w->group == 0) {
            warp_part(w, w->group, w->now);
            more = warp_select(w);
        }
    }
    warp_part(w, w->group, w->now);
    run->stats.warp_instructions += steps;
    run->stats.lane_instructions += lanes;
    const u64 limit = run->env->max_steps;
    if (ok && limit != 0 && run->stats.warp_instructions >= limit && w->live != 0) {
        const u32 lane = lane_first(w->live);
        return trap(w, &code[w->pc[lane]], PTX_TRAP_HANG, lane,
                    "still running after %llu instructions", (unsigned long long)limit);
    }
    return ok;
}

static u32 special_value(const ptx_run* run, u32 id, u32 warp, u32 lane) {
    const u32 thread = warp * PTX_LANES + lane;
    const u32 tid[3] = {thread % run->block[0], thread / run->block[0] % run->block[1],
                        thread / run->block[0] / run->block[1]};
    switch (id) {
    case SPECIAL_LANEID:
        return lane;
    case SPECIAL_WARPID:
        return warp;
    case SPECIAL_NWARPID:
        return run->warp_count;
    case SPECIAL_MASK_EQ:
        return 1u << lane;
    case SPECIAL_MASK_LE:
        return PTX_FULL >> (31 - lane);
    case SPECIAL_MASK_LT:
        return (1u << lane) - 1;
    case SPECIAL_MASK_GE:
        return PTX_FULL << lane;
    case SPECIAL_MASK_GT:
        return ~(PTX_FULL >> (31 - lane));
    case SPECIAL_NSMID:
        return 1;
    case SPECIAL_DYNAMIC_SHARED:
        return run->dynamic_shared;
    case SPECIAL_TOTAL_SHARED:
        return run->shared_bytes;
    case SPECIAL_SMID:
    case SPECIAL_GRIDID:
        return 0;
    default:
        break;
    }
    const u32* const groups[4] = {tid, run->block, run->at, run->grid};
    return groups[id / 3][id % 3];
}

// Fills the special registers that depend on the block, or those that do not.
static void warp_specials(ptx_warp* w, bool of_block) {
    const ptx_kernel* k = w->run->kernel;
    for (u32 i = 0; i < k->special_count; i++) {
        const u32 id = k->specials[i].id;
        u32* lanes = LANES_u32(w, k->specials[i].at);
        if ((id >= SPECIAL_CTAID && id < SPECIAL_NCTAID) != of_block) {
            continue;
        }
        for (u32 l = 0; l < PTX_LANES; l++) {
            lanes[l] =
                of_block ? w->run->at[id - SPECIAL_CTAID] : special_value(w->run, id, w->index, l);
        }
    }
}

static void warp_begin(ptx_warp* w) {
    const ptx_run* run = w->run;
    const ptx_kernel* k = run->kernel;
    const u32 threads = run->threads - w->index * PTX_LANES;
    w->live = threads >= PTX_LANES ? PTX_FULL : (1u << threads) - 1;
    w->early = run->env->early ? w->live : 0;
    w->waiting = 0;
    w->held = 0;
    w->group = 0;
    w->now = 0;
    w->copy_count = 0;
    w->fenced = false;
    w->product_group = 0;
    w->product_count = 0;
    memset(w->pc, 0, sizeof w->pc);
    memset(w->copy_group, 0, sizeof w->copy_group);
    memset(w->file, PTX_POISON, k->poison_bytes);
    memset(w->local, PTX_POISON, (size_t)k->local_bytes * PTX_LANES);
    warp_specials(w, true);
}

// Memory of blocks that have ended, for the next ones: most launches are like one before, and an
// allocator that a sanitizer watches is slow with large blocks.
typedef struct spare_memory {
    size_t bytes;
    size_t unused[7]; // what follows is aligned as before
} spare_memory;

#define PTX_SPARES 16
static spare_memory* spares[PTX_SPARES];

static u8* memory_take(size_t bytes) {
    for (u32 i = 0; i < PTX_SPARES; i++) {
        spare_memory* m = __atomic_exchange_n(&spares[i], NULL, __ATOMIC_ACQ_REL);
        if (m != NULL && m->bytes >= bytes) {
            return (u8*)(m + 1);
        }
        free(m); // too small: the one that comes takes its place
    }
    spare_memory* m = (spare_memory*)must(malloc(sizeof *m + bytes));
    m->bytes = bytes;
    return (u8*)(m + 1);
}

static void memory_give(u8* memory) {
    spare_memory* m = (spare_memory*)(void*)memory - 1;
    for (u32 i = 0; i < PTX_SPARES && m != NULL; i++) {
        m = __atomic_exchange_n(&spares[i], m, __ATOMIC_ACQ_REL);
    }
    free(m);
}

// Registers and local memory of a warp.
static size_t warp_bytes(const ptx_kernel* k) {
    return round_up(k->file_bytes, 64) + round_up(k->local_bytes * PTX_LANES, 64);
}

static void warp_create(ptx_warp* w, ptx_run* run, u32 index) {
    const ptx_kernel* k = run->kernel;
    w->run = run;
    w->index = index;
    w->file = run->shared + run->shared_room + index * warp_bytes(k);
    w->local = w->file + round_up(k->file_bytes, 64);
    for (u32 i = 0; i < k->constant_count; i++) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            lane_put(w, k->constants[i].at, k->constants[i].bytes, l, k->constants[i].value);
        }
    }
    warp_specials(w, false);
}

// ---- Blocks -------------------------------------------------------------------------------------

static void run_order(ptx_run* run, u32* order, u32 count) {
    for (u32 i = 0; i < count; i++) {
        order[i] = run->env->order == PTX_ORDER_REVERSE ? count - 1 - i : i;
    }
    if (run->env->order != PTX_ORDER_RANDOM) {
        return;
    }
    for (u32 i = count; i > 1; i--) {
        const u32 j = (u32)(run_random(run) % i);
        const u32 other = order[i - 1];
        order[i - 1] = order[j];
        order[j] = other;
    }
}

// How long a warp may run before it is the next one's turn.
static u64 run_budget(ptx_run* run) {
    u64 budget = run->env->order == PTX_ORDER_RANDOM ? 1 + run_random(run) % 512 : 100000;
    const u64 limit = run->env->max_steps;
    const u64 left =
        limit > run->stats.warp_instructions ? limit - run->stats.warp_instructions : 1;
    return limit != 0 && left < budget ? left : budget;
}

// Nothing can make progress: reports which lanes wait for what.
static bool trap_deadlock(ptx_run* run) {
    for (u32 i = 0; i < run->warp_count; i++) {
        ptx_warp* w = &run->warps[i];
        if (w->held != 0) {
            const u32 lane = lane_first(w->held);
            const ptx_insn* in = &run->kernel->code[w->pc[lane]];
            u32 here = 0;
            for (u32 l = 0; l < PTX_LANES; l++) {
                here |= (u32)(lane_on(w->held, l) && w->pc[l] == w->pc[lane]) << l;
            }
            return trap(w, in, PTX_TRAP_SYNC, lane,
                        "lanes 0x%08x wait for lanes 0x%08x of their warp", here,
                        warp_missing(w, in, here));
        }
    }
    for (u32 i = 0; i < run->warp_count; i++) {
        ptx_warp* w = &run->warps[i];
        if ((w->live & ~w->waiting) != 0) {
            const u32 lane = lane_first(w->live & ~w->waiting);
            return trap(w, &run->kernel->code[w->pc[lane]], PTX_TRAP_SYNC, lane,
                        "waits for an mbarrier or a block that does not come");
        }
    }
    for (u32 i = 0; i < run->warp_count; i++) {
        ptx_warp* w = &run->warps[i];
        if (w->live != 0) {
            const u32 lane = lane_first(w->live);
            const ptx_insn* in = &run->kernel->code[w->pc[lane] - 1];
            const u32 id = w->barrier[lane];
            return trap(w, in, PTX_TRAP_SYNC, lane, "barrier %u: only %u threads arrive", id,
                        run->barriers[id].arrived);
        }
    }
    return false;
}

// Instructions of a loop that waits for an mbarrier or a word of another block, at most.
#define PTX_SPIN 100

static void block_begin(ptx_run* run) {
    memset(run->barriers, 0, sizeof run->barriers);
    memset(run->shared, PTX_POISON, run->shared_bytes);
    if (run->unfenced != NULL) {
        memset(run->unfenced, 0, run->shared_bytes / 16 + 1);
    }
    for (u32 i = 0; i < run->warp_count; i++) {
        warp_begin(&run->warps[i]);
    }
    run->bulk_count = 0;
}

typedef enum block_state { BLOCK_DONE, BLOCK_TRAPPED, BLOCK_WAITS } block_state;

// Runs a block until it ends or cannot continue by itself; *moved if it did anything.
static block_state block_turn(ptx_run* run, u32* order, bool* moved) {
    u32 idle_rounds = 0;
    for (;;) {
        bool live = false;
        bool ran = false;
        const u64 events = run->events;
        run_order(run, order, run->warp_count);
        for (u32 i = 0; i < run->warp_count; i++) {
            ptx_warp* w = &run->warps[order[i]];
            if ((w->live & ~w->waiting & ~w->held) != 0) {
                const u64 before = run->stats.warp_instructions;
                if (!warp_run(w, run_budget(run))) {
                    return BLOCK_TRAPPED;
                }
                const u64 steps = run->stats.warp_instructions - before;
                ran = ran || !w->turn_over || steps > PTX_SPIN;
            }
            live = live || w->live != 0;
        }
        if (!live) {
            return BLOCK_DONE;
        }
        const bool idle = !run_open_barriers(run) && !ran && run->events == events;
        if (!run_bulks(run, idle)) {
            return BLOCK_TRAPPED;
        }
        *moved = *moved || !idle;
        // A waiting warp needs one round to leave the wait and another to enter the next one.
        idle_rounds = idle && run->events == events ? idle_rounds + 1 : 0;
        if (idle_rounds > 2) {
            return BLOCK_WAITS;
        }
    }
}

static bool run_block(ptx_run* run, u32* order) {
    bool moved = false;
    block_begin(run);
    const block_state state = block_turn(run, order, &moved);
    return state == BLOCK_WAITS ? trap_deadlock(run) : state == BLOCK_DONE;
}

// ---- Launch -------------------------------------------------------------------------------------

static ptx_result launch_refused(char* trap_text, size_t trap_size, const char* name,
                                 const char* why) {
    if (trap_text != NULL && trap_size > 0) {
        snprintf(trap_text, trap_size, "%s: %s", name, why);
    }
    return PTX_TRAP_OTHER;
}

static void run_place(ptx_run* run, u32 block) {
    run->at[0] = block % run->grid[0];
    run->at[1] = block / run->grid[0] % run->grid[1];
    run->at[2] = block / run->grid[0] / run->grid[1];
}

static void run_blocks(ptx_run* run) {
    const u64 count = (u64)run->grid[0] * run->grid[1] * run->grid[2];
    u32* warp_order = (u32*)must_alloc(run->warp_count * sizeof *warp_order);
    u32* block_order = (u32*)must_alloc((size_t)count * sizeof *block_order);
    run_order(run, block_order, (u32)count);
    for (u64 i = 0; i < count; i++) {
        run_place(run, block_order[i]);
        if (!run_block(run, warp_order)) {
            break;
        }
    }
    free(block_order);
    free(warp_order);
}

// What belongs to a block.
static void run_create(ptx_run* run) {
    run->shared_room = round_up(run->shared_bytes, 64);
    run->shared = memory_take(run->shared_room + run->warp_count * warp_bytes(run->kernel));
    run->warps = (ptx_warp*)must_alloc(run->warp_count * sizeof *run->warps);
    for (u32 i = 0; i < run->warp_count; i++) {
        warp_create(&run->warps[i], run, i);
    }
}

static void run_destroy(ptx_run* run) {
    for (u32 i = 0; i < run->warp_count; i++) {
        free(run->warps[i].copies);
        free(run->warps[i].products);
    }
    free(run->warps);
    free(run->bulks);
    free(run->unfenced);
    memory_give(run->shared);
}

// All blocks of a cooperative launch, in turn; each runs until it has to wait.
static void run_together(ptx_run* run) {
    const u32 count = run->grid[0] * run->grid[1] * run->grid[2];
    ptx_run* blocks = (ptx_run*)must_alloc(count * sizeof *blocks);
    bool* done = (bool*)must_alloc(count * sizeof *done);
    u32* warp_order = (u32*)must_alloc(run->warp_count * sizeof *warp_order);
    u32* order = (u32*)must_alloc(count * sizeof *order);
    for (u32 i = 0; i < count; i++) {
        blocks[i] = *run;
        blocks[i].random += i;
        run_place(&blocks[i], i);
        run_create(&blocks[i]);
        block_begin(&blocks[i]);
    }
    u32 left = count;
    u32 idle_rounds = 0;
    while (left > 0 && run->result == PTX_OK) {
        bool moved = false;
        u32 waiting = 0;
        run_order(run, order, count);
        for (u32 i = 0; i < count && run->result == PTX_OK; i++) {
            ptx_run* block = &blocks[order[i]];
            if (done[order[i]]) {
                continue;
            }
            const block_state state = block_turn(block, warp_order, &moved);
            done[order[i]] = state == BLOCK_DONE;
            left -= state == BLOCK_DONE ? 1 : 0;
            waiting = order[i];
            run->result = block->result;
        }
        // A warp's turn is over at every load of what it waits for, and there may be many.
        idle_rounds = moved || left == 0 ? 0 : idle_rounds + 1;
        if (idle_rounds > 16 && run->result == PTX_OK) {
            trap_deadlock(&blocks[waiting]);
            run->result = blocks[waiting].result;
        }
    }
    for (u32 i = 0; i < count; i++) {
        run->stats.warp_instructions += blocks[i].stats.warp_instructions;
        run->stats.lane_instructions += blocks[i].stats.lane_instructions;
        run->stats.mma += blocks[i].stats.mma;
        run_destroy(&blocks[i]);
    }
    free(blocks);
    free(done);
    free(warp_order);
    free(order);
}

ptx_result ptx_launch(const ptx_kernel* kernel, const ptx_env* env, const uint32_t grid[3],
                      const uint32_t block[3], uint32_t dynamic_shared, void* const* args,
                      ptx_stats* stats, char* trap_text, size_t trap_size) {
    const u64 threads = (u64)block[0] * block[1] * block[2];
    const u64 blocks = (u64)grid[0] * grid[1] * grid[2];
    if (trap_text != NULL && trap_size > 0) {
        trap_text[0] = 0;
    }
    if (threads == 0 || threads > 1024 || (kernel->max_threads && threads > kernel->max_threads)) {
        return launch_refused(trap_text, trap_size, kernel->name, "invalid block size");
    }
    if (blocks == 0 || blocks > 0x7fffffffu || dynamic_shared > 0x1000000u) {
        return launch_refused(trap_text, trap_size, kernel->name,
                              "invalid grid or shared memory size");
    }
    ptx_run run;
    memset(&run, 0, sizeof run);
    run.kernel = kernel;
    run.env = env;
    memcpy(run.grid, grid, sizeof run.grid);
    memcpy(run.block, block, sizeof run.block);
    run.dynamic_shared = dynamic_shared;
    run.threads = (u32)threads;
    run.warp_count = round_up((u32)threads, PTX_LANES) / PTX_LANES;
    run.random = env->seed;
    run.trap = trap_text;
    run.trap_size = trap_size;
    run.shared_bytes = kernel->static_shared;
    if (dynamic_shared > 0) {
        run.shared_bytes = round_up(kernel->static_shared, kernel->dynamic_align) + dynamic_shared;
    }
    run.params = (u8*)must_alloc(kernel->param_bytes);
    for (u32 i = 0; i < kernel->param_count; i++) {
        memcpy(run.params + kernel->params[i].at, args[i], kernel->params[i].bytes);
    }
    if (env->together) {
        run_together(&run);
    } else {
        run_create(&run);
        run_blocks(&run);
        run_destroy(&run);
    }
    free(run.params);
    if (stats != NULL) {
        *stats = run.stats;
    }
    return run.result;
}
