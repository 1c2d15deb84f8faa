// ---- slots --------------------------------------------------------------------------------------
//
// What a part of a layer keeps for the backward pass: tensors of qlora__kept. Each kind of part has
// a list of them (mixers/plans.h, ffns/plans.h); what lays out memory loops over the lists.

// Which rows a slot has, when a layer that is short of memory has it, and where it may go.
typedef enum qlora__kept_use {
    QLORA__KEPT_MIXED, // all: what mixing leaves; the first that recomputed layers keep; the host
    QLORA__KEPT_IN,    // all: what mixing reads; the next that they keep; the host with MIXED
    QLORA__KEPT_TILE   // of a tile: what comes after mixing; always computed again
} qlora__kept_use;

typedef struct qlora__kept_slot {
    qlora__kept_use use;
    size_t place; // of its tensor in qlora__kept
    qlora_dtype dtype;
    int64_t rows;
    int64_t cols;
} qlora__kept_slot;

#define QLORA__KEPT_SLOTS 16 // of all kinds, at most

typedef struct qlora__kept_slots {
    int count;
    qlora__kept_slot all[QLORA__KEPT_SLOTS];
} qlora__kept_slots;

// Adds a slot, or makes one in the same place larger: layers that take turns with memory need the
// most that any of them does.
static void qlora__kept_add(qlora__kept_slots* slots, const qlora__kept_slot* slot) {
    int i = 0;
    while (i < slots->count && slots->all[i].place != slot->place) {
        i++;
    }
    QLORA_ASSERT(i < QLORA__KEPT_SLOTS);
    if (i == slots->count) {
        slots->all[slots->count++] = *slot;
        return;
    }
    slots->all[i].rows = qlora__max(slots->all[i].rows, slot->rows);
    slots->all[i].cols = qlora__max(slots->all[i].cols, slot->cols);
}

// The tensor of a slot.
static qlora_tensor* qlora__kept_at(const qlora__kept_slot* slot, qlora__kept* kept) {
    return (qlora_tensor*)(void*)((char*)kept + slot->place);
}

// Lays out the slots with one use.
static void qlora__layout_slots(qlora__arena* arena, const qlora__kept_slots* slots,
                                qlora__kept_use use, qlora__kept* kept) {
    for (int i = 0; i < slots->count; i++) {
        const qlora__kept_slot* s = &slots->all[i];
        if (s->use == use) {
            qlora__arena_tensor(arena, s->dtype, s->rows, s->cols, qlora__kept_at(s, kept));
        }
    }
}

// Uses those of another layer.
static void qlora__borrow_slots(const qlora__kept_slots* slots, qlora__kept_use use,
                                qlora__kept* from, qlora__kept* to) {
    for (int i = 0; i < slots->count; i++) {
        if (slots->all[i].use == use) {
            *qlora__kept_at(&slots->all[i], to) = *qlora__kept_at(&slots->all[i], from);
        }
    }
}
