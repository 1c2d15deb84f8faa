// ptx_forms.h - the table of accepted instruction forms. Any other form is rejected at load.
#ifndef FAKECUDA_PTX_FORMS_H
#define FAKECUDA_PTX_FORMS_H

#include "ptx_text.h"

// The text matched by each element of the form: mod[0] is the opcode, NULL means "absent".
typedef struct ptx_match {
    const char* mod[PTX_MAX_MODIFIERS];
} ptx_match;

typedef bool (*ptx_decode)(ptx_parser* p, const ptx_match* m, ptx_insn* in);

// args has one letter per operand: p predicate, h 16 bits, r 32, l 64, f f32, d f64, i a number
// that is stored in the instruction. The first operand is the result, unless it is n: a 32-bit
// source whose value is not used. If decode is set, it reads the operands instead.
typedef struct ptx_form {
    const char* form;
    const char* args;
    ptx_exec exec;
    ptx_decode decode;
} ptx_form;

static bool word_is_one_of(const char* word, const char* list, size_t length) {
    const size_t n = strlen(word);
    for (size_t i = 0; i + n <= length;) {
        const size_t item = strcspn(list + i, "|?.");
        if (item == n && strncmp(list + i, word, n) == 0) {
            return true;
        }
        i += item + 1;
    }
    return false;
}

// Matches words[0..count) against a form like "add.rn?.ftz?.f32|f64".
static bool form_matches(const char* form, char* const* words, u32 count, ptx_match* match) {
    u32 next = 0;
    memset(match, 0, sizeof *match);
    for (u32 element = 0; *form != 0; element++) {
        const size_t length = strcspn(form, ".");
        const bool optional = form[length - 1] == '?';
        if (next < count && word_is_one_of(words[next], form, length)) {
            match->mod[element] = words[next++];
        } else if (!optional) {
            return false;
        }
        form += length + (form[length] == '.');
    }
    return next == count;
}

static u8 index_of(const char* word, const char* const* list) {
    u8 i = 0;
    while (list[i] != NULL && !same(list[i], word)) {
        i++;
    }
    return i;
}

static ptx_type type_at(const ptx_match* m, u32 element) {
    return m->mod[element] ? type_named(m->mod[element]) : TYPE_NONE;
}

static u8 space_at(const ptx_match* m, u32 element) {
    static const char* const SPACES[] = {"", "global", "shared", "local", "const", "param", NULL};
    if (m->mod[element] == NULL) {
        return SPACE_GENERIC;
    }
    return same(m->mod[element], "shared::cta") ? SPACE_SHARED : index_of(m->mod[element], SPACES);
}

static ptx_type width_type(u32 bytes) {
    return bytes == 8 ? TYPE_B64 : (bytes == 4 ? TYPE_B32 : TYPE_B16);
}

// ---- Data movement ------------------------------------------------------------------------------

// {a, b, ...} or a single operand; returns the number of operands, 0 on error.
static u32 take_vector(ptx_parser* p, ptx_insn* in, u32 first, ptx_type type, bool result,
                       bool wider) {
    const bool braces = accept(p, "{");
    u32 count = 0;
    do {
        if (count == 4 || first + count >= PTX_MAX_ARGS) {
            refuse(p, parser_line(p), "too many elements");
            return 0;
        }
        const bool ok = result ? take_result_arg(p, in, first + count, type, wider)
                               : take_source_arg(p, in, first + count, type, wider);
        if (!ok) {
            return 0;
        }
        count++;
    } while (braces && accept(p, ","));
    return !braces || expect(p, "}") ? count : 0;
}

static u32 count_braced(const ptx_parser* p, u32 at) {
    u32 count = 1;
    for (u32 i = at; i < p->token_count && !same(p->tokens[i].text, "}"); i++) {
        count += same(p->tokens[i].text, ",");
    }
    return count;
}

static bool decode_mov_vector(ptx_parser* p, ptx_insn* in, bool unpack) {
    const u32 bytes = PTX_TYPES[in->type].bytes;
    const u32 count = count_braced(p, p->next + (unpack ? 0 : 2));
    in->vector = (u8)count;
    if (PTX_TYPES[in->type].kind != 'b' || bytes / count < 2 || (count != 2 && count != 4)) {
        return refuse(p, in->line, "mov.%s with %u elements", PTX_TYPES[in->type].name, count);
    }
    const ptx_type part = width_type(bytes / count);
    if (unpack) {
        in->exec = exec_mov_unpack;
        return take_vector(p, in, 0, part, true, false) && expect(p, ",") &&
               take_source_arg(p, in, count, (ptx_type)in->type, false);
    }
    in->exec = exec_mov_pack;
    return take_result_arg(p, in, 0, (ptx_type)in->type, false) && expect(p, ",") &&
           take_vector(p, in, 1, part, false, false);
}

// mov.type
static bool decode_mov(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->type = (u8)type_at(m, 1);
    const bool unpack = same(peek(p), "{");
    const bool pack =
        !unpack && p->next + 2 < p->token_count && same(p->tokens[p->next + 2].text, "{");
    if (unpack || pack) {
        return decode_mov_vector(p, in, unpack);
    }
    if (!take_result_arg(p, in, 0, (ptx_type)in->type, false) || !expect(p, ",")) {
        return false;
    }
    if (is_clock(peek(p))) {
        take(p);
        in->exec = exec_mov_clock;
        return PTX_TYPES[in->type].bytes >= 4 || refuse(p, in->line, "clock in 16 bits");
    }
    const u32 bytes = PTX_TYPES[in->type].bytes;
    in->exec = bytes == 8 ? exec_mov_64 : (bytes == 4 ? exec_mov_32 : exec_mov_16);
    return take_source_arg(p, in, 1, (ptx_type)in->type, false);
}

// cvta.to?.space.u64
static bool decode_cvta(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->exec = exec_cvta;
    in->sub = m->mod[1] != NULL;
    in->space = space_at(m, 2);
    return take_result_arg(p, in, 0, TYPE_U64, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_U64, false);
}

// isspacep.space
static bool decode_isspacep(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->exec = exec_isspacep;
    in->space = space_at(m, 1);
    return take_result_arg(p, in, 0, TYPE_PRED, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_U64, false);
}

// cvt.round?.ftz?.relu?.sat?.to.from
static bool decode_cvt(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->type = (u8)type_at(m, 5);
    in->type2 = (u8)type_at(m, 6);
    const ptx_type_info* to = &PTX_TYPES[in->type];
    const ptx_type_info* from = &PTX_TYPES[in->type2];
    const bool rounded = (in->flags & FLAG_ROUNDED) != 0;
    const bool to_integer = (in->flags & FLAG_TO_INTEGER) != 0;
    bool legal = true;
    if (from->kind != 'f') { // integers are rounded only when converted to a float
        legal = rounded == (to->kind == 'f') && !to_integer && in->type != TYPE_BF16;
    } else if (to->kind != 'f') {
        legal = rounded && to_integer && in->type2 != TYPE_BF16;
    } else if (to->bytes < from->bytes) {
        legal = rounded && !to_integer && !(from->bytes == 8 && in->type == TYPE_BF16);
    } else if (to->bytes > from->bytes) {
        legal = !rounded;
    } else {
        legal = in->type == in->type2 && (to_integer || !rounded);
    }
    legal = legal && !((in->flags & FLAG_FTZ) && in->type != TYPE_F32 && in->type2 != TYPE_F32);
    legal = legal && !((in->flags & FLAG_RELU) && !(to->bytes == 2 && in->type2 == TYPE_F32));
    legal = legal && !((in->flags & FLAG_SAT) && in->type == TYPE_BF16);
    if (!legal) {
        return refuse(p, in->line, "no such conversion: %s", in->name);
    }
    in->exec = exec_cvt;
    if (!take_result_arg(p, in, 0, (ptx_type)in->type, true) || !expect(p, ",") ||
        !take_source_arg(p, in, 1, (ptx_type)in->type2, true)) {
        return false;
    }
    const bool exact = in->width[0] == to->bytes && in->width[1] == from->bytes;
    const bool plain = (in->flags & ~(u32)FLAG_ROUNDED) == 0 && in->round == ROUND_NEAREST;
    for (u32 i = 0; exact && plain && i < sizeof PTX_CONVERTS / sizeof PTX_CONVERTS[0]; i++) {
        const ptx_convert_row* row = &PTX_CONVERTS[i];
        if (row->to == in->type && row->from == in->type2 && row->rounded == rounded) {
            in->exec = row->exec;
        }
    }
    return true;
}

// cvt.rn|rz.relu?.pair.f32 d, a, b
static bool decode_cvt_pair(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->type = (u8)type_at(m, 3);
    in->exec = exec_cvt_pair;
    return take_result_arg(p, in, 0, TYPE_B32, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_F32, false) && expect(p, ",") &&
           take_source_arg(p, in, 2, TYPE_F32, false);
}

// cvt.rn.satfinite.e4m3x2.f32 d, a, b
static bool decode_cvt_e4m3(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->exec = exec_cvt_e4m3;
    return take_result_arg(p, in, 0, TYPE_B16, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_F32, false) && expect(p, ",") &&
           take_source_arg(p, in, 2, TYPE_F32, false);
}

// cvt.rna.tf32.f32
static bool decode_cvt_tf32(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->type = TYPE_TF32;
    in->type2 = TYPE_F32;
    in->exec = exec_cvt;
    return take_result_arg(p, in, 0, TYPE_B32, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_F32, false);
}

// ---- Memory -------------------------------------------------------------------------------------

static bool check_vector(ptx_parser* p, const ptx_insn* in, const char* vector, u32 count) {
    const u32 wanted = vector == NULL ? 1 : (u32)(vector[1] - '0');
    if (count != wanted || PTX_TYPES[in->type].bytes * wanted > 16) {
        return refuse(p, in->line, "%s with %u elements", in->name, count);
    }
    return true;
}

// ld.order?.scope?.space?.cache?.hint?.prefetch?.vector?.type
static bool decode_ld(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->space = space_at(m, 3);
    in->type = (u8)type_at(m, 8);
    in->sub = m->mod[1] != NULL && (same(m->mod[1], "acquire") || same(m->mod[1], "relaxed"));
    in->exec = exec_ld;
    if (m->mod[4] != NULL && same(m->mod[4], "nc") && in->space != SPACE_GLOBAL) {
        return refuse(p, in->line, "ld.nc is for global memory");
    }
    in->vector = (u8)take_vector(p, in, 0, (ptx_type)in->type, true, true);
    if (in->vector == 0 || !check_vector(p, in, m->mod[7], in->vector) || !expect(p, ",")) {
        return false;
    }
    const ptx_param* param =
        in->space == SPACE_PARAM ? find_param(p, p->tokens[p->next + 1].text) : NULL;
    if (!take_address(p, in, in->vector, &in->offset)) {
        return false;
    }
    if (param != NULL) {
        const s64 size = (s64)PTX_TYPES[in->type].bytes * in->vector;
        if (in->offset < 0 || in->offset + size > param->bytes) {
            return refuse(p, in->line, "outside parameter '%s'", param->name);
        }
        in->offset += param->at;
        in->exec = exec_ld_param;
    }
    return true;
}

// st.order?.scope?.space?.cache?.hint?.vector?.type
static bool decode_st(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->space = space_at(m, 3);
    in->type = (u8)type_at(m, 7);
    in->exec = exec_st;
    if (!take_address(p, in, 0, &in->offset) || !expect(p, ",")) {
        return false;
    }
    in->vector = (u8)take_vector(p, in, 1, (ptx_type)in->type, false, true);
    return in->vector != 0 && check_vector(p, in, m->mod[6], in->vector);
}

static const char* const ATOM_NAMES[] = {"add", "min", "max",  "and", "or", "xor",
                                         "inc", "dec", "exch", "cas", NULL};

// atom.order?.scope?.space?.scope?.operation.type, and red without a result
static bool decode_atom(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->space = space_at(m, 3);
    in->sub = index_of(m->mod[5], ATOM_NAMES);
    in->type = (u8)type_at(m, 6);
    in->exec = exec_atom;
    in->arg[0] = PTX_NONE;
    const ptx_type type = (ptx_type)in->type;
    if (same(m->mod[0], "atom") && (!take_result_arg(p, in, 0, type, false) || !expect(p, ","))) {
        return false;
    }
    if (!take_address(p, in, 1, &in->offset) || !expect(p, ",") ||
        !take_source_arg(p, in, 2, type, false)) {
        return false;
    }
    return in->sub != ATOM_CAS || (expect(p, ",") && take_source_arg(p, in, 3, type, false));
}

// cp.async.ca|cg.shared.global.prefetch? [to], [from], bytes {, source size | ignore predicate}
static bool decode_cp_async(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    u32 bytes = 0;
    s64 from_offset = 0;
    in->exec = exec_cp_async;
    if (!take_address(p, in, 0, &in->offset) || !expect(p, ",") ||
        !take_address(p, in, 1, &from_offset) || !expect(p, ",") || !take_u32(p, &bytes)) {
        return false;
    }
    const bool size_ok = bytes == 16 || (same(m->mod[2], "ca") && (bytes == 4 || bytes == 8));
    if (!size_ok || from_offset != (s32)from_offset) {
        return refuse(p, in->line, "%s of %u bytes", in->name, bytes);
    }
    in->vector = (u8)bytes;
    in->target = (u32)(s32)from_offset;
    if (!accept(p, ",")) {
        return true;
    }
    ptx_ref ref;
    const bool negated = same(peek(p), "!");
    if (negated || (find_register(p, peek(p), &ref) && ref.pred)) {
        in->sub = 2;
        return take_pred_arg(p, in, 2);
    }
    in->sub = 1;
    return take_source_arg(p, in, 2, TYPE_U32, false);
}

static bool decode_cp_commit(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)p;
    (void)m;
    in->exec = exec_cp_commit;
    return true;
}

// cp.async.wait_group n, cp.async.wait_all
static bool decode_cp_wait(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->exec = exec_cp_wait;
    in->sub = same(m->mod[2], "wait_all");
    return in->sub || take_integer(p, &in->offset);
}

// ldmatrix.sync.aligned.m8n8.x1|x2|x4.trans?.shared.b16
static bool decode_ldmatrix(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    const u32 wanted = (u32)(m->mod[4][1] - '0');
    in->kind = KIND_WHOLE;
    in->exec = exec_ldmatrix;
    in->space = SPACE_SHARED;
    in->vector = (u8)take_vector(p, in, 0, TYPE_B32, true, false);
    if (in->vector != wanted) {
        return refuse(p, in->line, "%s with %u results", in->name, in->vector);
    }
    return expect(p, ",") && take_address(p, in, in->vector, &in->offset);
}

// ---- Comparisons --------------------------------------------------------------------------------

static bool find_compare(ptx_parser* p, ptx_insn* in, const char* name, ptx_type as) {
    const ptx_type type = as == TYPE_F16 || as == TYPE_BF16 ? TYPE_F32 : as;
    in->type2 = (u8)as;
    for (u32 i = 0; i < sizeof PTX_COMPARES / sizeof PTX_COMPARES[0]; i++) {
        if (PTX_COMPARES[i].type == type && same(PTX_COMPARES[i].name, name)) {
            in->compare = PTX_COMPARES[i].compare;
            return true;
        }
    }
    return refuse(p, in->line, "no such comparison: %s", in->name);
}

static const char* const COMBINE_NAMES[] = {"", "and", "or", "xor", NULL};

static bool take_compared(ptx_parser* p, ptx_insn* in, ptx_type type) {
    if (!expect(p, ",") || !take_source_arg(p, in, 2, type, false) || !expect(p, ",") ||
        !take_source_arg(p, in, 3, type, false)) {
        return false;
    }
    return in->sub == COMBINE_NONE || (expect(p, ",") && take_pred_arg(p, in, 4));
}

// setp.compare.combine?.ftz?.type p{|q}, a, b {, c}
static bool decode_setp(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    const ptx_type type = type_at(m, 4);
    in->exec = exec_setp;
    in->sub = m->mod[2] ? index_of(m->mod[2], COMBINE_NAMES) : COMBINE_NONE;
    in->arg[1] = PTX_NONE;
    if (!find_compare(p, in, m->mod[1], type) || !take_result_arg(p, in, 0, TYPE_PRED, false)) {
        return false;
    }
    if (accept(p, "|") && !take_result_arg(p, in, 1, TYPE_PRED, false)) {
        return false;
    }
    if ((in->flags & FLAG_FTZ) && type != TYPE_F32) {
        return refuse(p, in->line, "no such comparison: %s", in->name);
    }
    return take_compared(p, in, type);
}

// set.compare.combine?.ftz?.to.from
static bool decode_set(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    const ptx_type type = type_at(m, 5);
    in->exec = exec_set;
    in->type = (u8)type_at(m, 4);
    in->sub = m->mod[2] ? index_of(m->mod[2], COMBINE_NAMES) : COMBINE_NONE;
    if ((in->flags & FLAG_FTZ) && type != TYPE_F32) {
        return refuse(p, in->line, "no such comparison: %s", in->name);
    }
    return find_compare(p, in, m->mod[1], type) && take_result_arg(p, in, 0, TYPE_B32, false) &&
           take_compared(p, in, type);
}

// testp.what.type
static bool decode_testp(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"finite", "infinite",  "number", "notanumber",
                                        "normal", "subnormal", NULL};
    in->exec = exec_testp;
    in->sub = index_of(m->mod[1], NAMES);
    in->type = (u8)type_at(m, 2);
    return take_result_arg(p, in, 0, TYPE_PRED, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, (ptx_type)in->type, false);
}

// Arithmetic on halves and pairs of halves, with one, two or three operands; the type is last.
static bool decode_half(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"add", "sub", "mul", "fma", "min",
                                        "max", "neg", "abs", NULL};
    in->exec = exec_half;
    in->sub = index_of(m->mod[0], NAMES);
    for (u32 i = 1; i < PTX_MAX_MODIFIERS; i++) {
        in->type = m->mod[i] ? (u8)type_at(m, i) : in->type;
    }
    in->vector = in->sub == HALF_FMA ? 3 : (in->sub >= HALF_NEG ? 1 : 2);
    const ptx_type type = width_type(PTX_TYPES[in->type].bytes);
    if (!take_result_arg(p, in, 0, type, false)) {
        return false;
    }
    for (u32 i = 0; i < in->vector; i++) {
        if (!expect(p, ",") || !take_source_arg(p, in, 1 + i, type, false)) {
            return false;
        }
    }
    return true;
}

// bfi has two values and two positions, lop3 has a table.
static bool exec_bfi_32(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32* d = LANES_u32(w, in->arg[0]);
    const u32* as = LANES_u32(w, in->arg[1]);
    const u32* bs = LANES_u32(w, in->arg[2]);
    const u32* cs = LANES_u32(w, in->arg[3]);
    const u32* es = LANES_u32(w, in->arg[4]);
    EACH_LANE(u32, , field_insert(as[l], bs[l], cs[l], es[l], 32))
    return true;
}

static bool exec_bfi_64(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u64* d = LANES_u64(w, in->arg[0]);
    const u64* as = LANES_u64(w, in->arg[1]);
    const u64* bs = LANES_u64(w, in->arg[2]);
    const u32* cs = LANES_u32(w, in->arg[3]);
    const u32* es = LANES_u32(w, in->arg[4]);
    EACH_LANE(u64, , field_insert(as[l], bs[l], cs[l], es[l], 64))
    return true;
}

// ---- Warp and block -----------------------------------------------------------------------------

// shfl.sync.mode.b32 d{|p}, a, b, c, members
static bool decode_shfl(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"up", "down", "bfly", "idx", NULL};
    in->kind = KIND_MEMBERS;
    in->exec = exec_shfl;
    in->sub = index_of(m->mod[2], NAMES);
    in->members = 5;
    in->arg[1] = PTX_NONE;
    if (!take_result_arg(p, in, 0, TYPE_B32, false)) {
        return false;
    }
    if (accept(p, "|") && !take_result_arg(p, in, 1, TYPE_PRED, false)) {
        return false;
    }
    for (u32 i = 2; i < 6; i++) {
        if (!expect(p, ",") || !take_source_arg(p, in, i, TYPE_B32, false)) {
            return false;
        }
    }
    return true;
}

// vote.sync.mode.pred|b32 d, {!}a, members
static bool decode_vote(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"all", "any", "uni", "ballot", NULL};
    in->kind = KIND_MEMBERS;
    in->exec = exec_vote;
    in->sub = index_of(m->mod[2], NAMES);
    in->members = 2;
    return take_result_arg(p, in, 0, type_at(m, 3), false) && expect(p, ",") &&
           take_pred_arg(p, in, 1) && expect(p, ",") && take_source_arg(p, in, 2, TYPE_B32, false);
}

// match.any|all.sync.type d{|p}, a, members
static bool decode_match(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->kind = KIND_MEMBERS;
    in->exec = exec_match;
    in->sub = same(m->mod[1], "all");
    in->type = (u8)type_at(m, 3);
    in->members = 3;
    in->arg[1] = PTX_NONE;
    if (!take_result_arg(p, in, 0, TYPE_B32, false)) {
        return false;
    }
    if (accept(p, "|") && !take_result_arg(p, in, 1, TYPE_PRED, false)) {
        return false;
    }
    return expect(p, ",") && take_source_arg(p, in, 2, (ptx_type)in->type, false) &&
           expect(p, ",") && take_source_arg(p, in, 3, TYPE_B32, false);
}

// redux.sync.operation.type d, a, members
static bool decode_redux(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->kind = KIND_MEMBERS;
    in->exec = exec_redux;
    in->sub = index_of(m->mod[2], ATOM_NAMES);
    in->type = (u8)type_at(m, 3);
    in->members = 2;
    return take_result_arg(p, in, 0, TYPE_B32, false) && expect(p, ",") &&
           take_source_arg(p, in, 1, TYPE_B32, false) && expect(p, ",") &&
           take_source_arg(p, in, 2, TYPE_B32, false);
}

// bar.warp.sync members
static bool decode_syncwarp(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->kind = KIND_MEMBERS;
    in->exec = exec_syncwarp;
    in->members = 0;
    return take_source_arg(p, in, 0, TYPE_B32, false);
}

enum { BARRIER_SYNC, BARRIER_ARRIVE, BARRIER_POPC, BARRIER_AND, BARRIER_OR };

// bar.cta?.sync|arrive a{, b}; barrier.cta?.sync|arrive.aligned? a{, b}. bar is always aligned: the
// warp arrives as a whole. in->vector is 1 for aligned. arg: barrier, count or PTX_NONE.
static bool decode_barrier(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->kind = KIND_BARRIER;
    in->exec = exec_nothing;
    in->sub = same(m->mod[2], "arrive") ? BARRIER_ARRIVE : BARRIER_SYNC;
    in->vector = same(m->mod[0], "bar") || m->mod[3] != NULL;
    in->arg[1] = PTX_NONE;
    if (!take_source_arg(p, in, 0, TYPE_B32, false)) {
        return false;
    }
    if (accept(p, ",")) {
        return take_source_arg(p, in, 1, TYPE_B32, false);
    }
    return in->sub == BARRIER_SYNC || refuse(p, in->line, "%s without a thread count", in->name);
}

// bar.cta?.red.popc|and|or.type d, a{, b}, {!}c. arg: barrier, count or PTX_NONE, c, d.
static bool decode_barrier_red(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"popc", "and", "or", NULL};
    in->kind = KIND_BARRIER;
    in->exec = exec_nothing;
    in->sub = (u8)(BARRIER_POPC + index_of(m->mod[3], NAMES));
    in->vector = 1;
    in->arg[1] = PTX_NONE;
    if (!take_result_arg(p, in, 3, type_at(m, 4), false) || !expect(p, ",") ||
        !take_source_arg(p, in, 0, TYPE_B32, false) || !expect(p, ",")) {
        return false;
    }
    ptx_ref ref;
    const bool pred = same(peek(p), "!") || (find_register(p, peek(p), &ref) && ref.pred);
    if (!pred && (!take_source_arg(p, in, 1, TYPE_B32, false) || !expect(p, ","))) {
        return false;
    }
    return take_pred_arg(p, in, 2);
}

// mma.sync.aligned.shape.row.col.d.a.b.c
static bool decode_mma(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    in->kind = KIND_WHOLE;
    in->exec = exec_mma;
    in->vector = (u8)strtoul(m->mod[3] + strlen("m16n8k"), NULL, 10);
    in->type = (u8)type_at(m, 6);
    in->type2 = (u8)type_at(m, 7);
    if (!same(m->mod[7], m->mod[8]) || !same(m->mod[6], m->mod[9])) {
        return refuse(p, in->line, "mixed types: %s", in->name);
    }
    const ptx_type wide = in->type == TYPE_F32 ? TYPE_F32 : TYPE_B32;
    const u32 c_count = in->type == TYPE_F32 ? 4 : 2;
    const u32 a_count = in->vector / (in->type2 == TYPE_TF32 ? 2u : 4u);
    const u32 count[4] = {c_count, a_count, a_count / 2, c_count};
    u32 at = 0;
    for (u32 i = 0; i < 4; i++) {
        const ptx_type type = i == 0 || i == 3 ? wide : TYPE_B32;
        if ((i > 0 && !expect(p, ",")) || take_vector(p, in, at, type, i == 0, false) != count[i]) {
            return refuse(p, in->line, "%s: operand %u has %u registers", in->name, i, count[i]);
        }
        at += count[i];
    }
    return true;
}

// ---- Compute capability 9.0 ---------------------------------------------------------------------

// mbarrier.init|arrive.expect_tx?.shared.b64 {_,} [address] {, count}
static bool decode_mbarrier(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    const bool init = same(m->mod[1], "init");
    in->sub = init ? MBARRIER_INIT : m->mod[2] != NULL ? MBARRIER_EXPECT : MBARRIER_ARRIVE;
    in->exec = exec_mbarrier;
    if (!init && (!expect(p, "_") || !expect(p, ","))) {
        return false;
    }
    return take_address(p, in, 0, &in->offset) &&
           (in->sub == MBARRIER_ARRIVE ||
            (expect(p, ",") && take_source_arg(p, in, 1, TYPE_U32, false)));
}

// mbarrier.try_wait.parity.shared.b64 p, [address], parity
static bool decode_mbarrier_wait(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->exec = exec_mbarrier_wait;
    return take_result_arg(p, in, 0, TYPE_PRED, false) && expect(p, ",") &&
           take_address(p, in, 1, &in->offset) && expect(p, ",") &&
           take_source_arg(p, in, 2, TYPE_U32, false);
}

// cp.async.bulk.tensor.2d... [to], [map, {x, y}], [barrier]
static bool decode_bulk(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    s64 offset[2] = {0, 0};
    in->exec = exec_bulk;
    return take_address(p, in, 0, &offset[0]) && expect(p, ",") && expect(p, "[") &&
           take_source_arg(p, in, 1, TYPE_U64, false) && expect(p, ",") && expect(p, "{") &&
           take_source_arg(p, in, 2, TYPE_S32, false) && expect(p, ",") &&
           take_source_arg(p, in, 3, TYPE_S32, false) && expect(p, "}") && expect(p, "]") &&
           expect(p, ",") && take_address(p, in, 4, &offset[1]) &&
           ((offset[0] == 0 && offset[1] == 0) ||
            refuse(p, in->line, "%s with an offset", in->name));
}

// The results of a wgmma: {%f1, %f2, ...}
static bool take_list(ptx_parser* p, ptx_insn* in, u32 count) {
    in->list = (u32*)must_alloc(count * sizeof *in->list);
    in->list_count = count;
    ptx_insn one;
    memset(&one, 0, sizeof one);
    for (u32 i = 0; i < count; i++) {
        if (!expect(p, i == 0 ? "{" : ",") || !take_result_arg(p, &one, 0, TYPE_F32, false)) {
            return false;
        }
        in->list[i] = one.arg[0];
    }
    return expect(p, "}");
}

static bool take_flag(ptx_parser* p, bool must_be_set, bool* flag) {
    s64 value = 0;
    if (!expect(p, ",") || !take_integer(p, &value)) {
        return false;
    }
    if (value != 1 && (value != 0 || must_be_set)) {
        return refuse(p, parser_line(p), "wgmma with %lld", (long long)value);
    }
    *flag = value == 1;
    return true;
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.type.type {d...}, a, b, p, 1, 1 {, trans-a}, trans-b
static bool decode_wgmma(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    const u32 columns = (u32)strtoul(m->mod[4] + strlen("m64n"), NULL, 10);
    bool flag = false;
    in->kind = KIND_WHOLE;
    in->exec = exec_wgmma;
    in->type2 = (u8)type_at(m, 6);
    if (!same(m->mod[6], m->mod[7]) || columns % 8 != 0 || columns == 0 || columns > 256) {
        return refuse(p, in->line, "%s", in->name);
    }
    if (!take_list(p, in, columns / 2) || !expect(p, ",")) {
        return false;
    }
    if (same(peek(p), "{")) {
        in->sub = WGMMA_A_REGISTERS;
        if (take_vector(p, in, 0, TYPE_B32, false, false) != 4) {
            return refuse(p, in->line, "%s: A has four registers", in->name);
        }
    } else if (!take_source_arg(p, in, 0, TYPE_B64, false)) {
        return false;
    }
    if (!expect(p, ",") || !take_source_arg(p, in, 4, TYPE_B64, false) || !expect(p, ",") ||
        !take_pred_arg(p, in, 5) || !take_flag(p, true, &flag) || !take_flag(p, true, &flag)) {
        return false;
    }
    if (!(in->sub & WGMMA_A_REGISTERS)) {
        if (!take_flag(p, false, &flag)) {
            return false;
        }
        in->sub |= flag ? WGMMA_TRANS_A : 0;
    }
    if (!take_flag(p, false, &flag)) {
        return false;
    }
    in->sub |= flag ? WGMMA_TRANS_B : 0;
    return true;
}

// wgmma.fence, wgmma.commit_group, wgmma.wait_group n
static bool decode_wgmma_sync(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    static const char* const NAMES[] = {"fence", "commit_group", "wait_group", NULL};
    in->exec = exec_wgmma_sync;
    in->sub = index_of(m->mod[1], NAMES);
    in->kind = in->sub == WGMMA_WAIT ? KIND_WARPGROUP : KIND_WHOLE;
    return in->sub != WGMMA_WAIT || take_integer(p, &in->offset);
}

// setmaxnreg.inc|dec.sync.aligned.u32 n: the interpreter has registers enough.
static bool decode_setmaxnreg(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    s64 count = 0;
    (void)m;
    in->kind = KIND_WHOLE;
    in->exec = exec_nothing;
    return take_integer(p, &count) && ((count >= 24 && count <= 256 && count % 8 == 0) ||
                                       refuse(p, in->line, "%lld registers", (long long)count));
}

// ---- Control ------------------------------------------------------------------------------------

static u32 label_named(ptx_parser* p, const char* name) {
    for (u32 i = 0; i < p->label_count; i++) {
        if (same(p->labels[i].name, name)) {
            return i;
        }
    }
    p->labels = (ptx_label*)grow(p->labels, p->label_count, sizeof *p->labels);
    const ptx_label label = {name, PTX_NONE, parser_line(p)};
    p->labels[p->label_count] = label;
    return p->label_count++;
}

static bool decode_bra(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->kind = KIND_BRANCH;
    in->target = label_named(p, take(p));
    return true;
}

// brx.idx index, table
static bool decode_brx(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->kind = KIND_BRANCH_INDEX;
    if (!take_source_arg(p, in, 0, TYPE_U32, false) || !expect(p, ",")) {
        return false;
    }
    in->target = label_named(p, take(p));
    return true;
}

static bool decode_exit(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)p;
    (void)m;
    in->kind = KIND_EXIT;
    return true;
}

static bool decode_nothing(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)p;
    (void)m;
    in->exec = exec_nothing;
    return true;
}

static bool exec_grid_wait(ptx_warp* w, const ptx_insn* in, u32 mask) {
    (void)in;
    w->early &= ~mask;
    return true;
}

// prefetch.space?.level [a]: the address is not accessed.
static bool decode_prefetch(ptx_parser* p, const ptx_match* m, ptx_insn* in) {
    (void)m;
    in->exec = exec_nothing;
    return take_address(p, in, 0, &in->offset);
}

// ---- The table ----------------------------------------------------------------------------------

#define LETTER_u16 "h"
#define LETTER_s16 "h"
#define LETTER_u32 "r"
#define LETTER_s32 "r"
#define LETTER_f32 "f"
#define LETTER_u64 "l"
#define LETTER_s64 "l"
#define LETTER_f64 "d"

#define ROW_UNARY(name, form, td, ta, e) {form, LETTER_##td LETTER_##ta, exec_##name, NULL},
#define ROW_BINARY(name, form, td, ta, tb, e)                                                      \
    {form, LETTER_##td LETTER_##ta LETTER_##tb, exec_##name, NULL},
#define ROW_TERNARY(name, form, td, ta, tb, tc, e)                                                 \
    {form, LETTER_##td LETTER_##ta LETTER_##tb LETTER_##tc, exec_##name, NULL},
#define ROW_F32_UNARY(name, form, form2, e)                                                        \
    {form, "ff", exec_##name, NULL}, {form2, "ff", exec_##name##_2, NULL},
#define ROW_F32_BINARY(name, form, form2, e)                                                       \
    {form, "fff", exec_##name, NULL}, {form2, "fff", exec_##name##_2, NULL},
#define ROW_F32_TERNARY(name, form, form2, e)                                                      \
    {form, "ffff", exec_##name, NULL}, {form2, "ffff", exec_##name##_2, NULL},
#define ROW_PREDICATE(name, form, args, e) {form, args, exec_##name, NULL},
#define ROW_SELECT(name, form, type, args) {form, args, exec_##name, NULL},

#define COMPARE_NAMES "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"
#define COMPARE_TYPES "b16|u16|s16|f16|bf16|b32|u32|s32|f32|b64|u64|s64|f64"
#define CVT_ROUND "rn|rz|rm|rp|rni|rzi|rmi|rpi?"
#define CVT_TYPES "u8|s8|u16|s16|u32|s32|u64|s64|f16|f32|f64|bf16"
#define SCOPE "cta|gpu|sys?"
#define HINT "L1::no_allocate|L1::evict_first|L1::evict_last|L1::evict_normal|L1::evict_unchanged?"
#define PREFETCH "L2::64B|L2::128B|L2::256B?"
#define MEMORY_TYPES "b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64"
#define WGMMA_SHAPES                                                                               \
    "m64n8k16|m64n16k16|m64n32k16|m64n48k16|m64n64k16|m64n80k16|m64n96k16|"                        \
    "m64n128k16|m64n192k16|m64n256k16"
#define ATOM "atom.relaxed|acquire|release|acq_rel?." SCOPE ".global|shared|shared::cta?." SCOPE "."
#define RED "red.relaxed|release?." SCOPE ".global|shared|shared::cta?." SCOPE "."

static const ptx_form PTX_FORMS[] = {
    // clang-format off
    UNARY_OPS(ROW_UNARY)
    BINARY_OPS(ROW_BINARY)
    TERNARY_OPS(ROW_TERNARY)
    F32_UNARY_OPS(ROW_F32_UNARY)
    F32_BINARY_OPS(ROW_F32_BINARY)
    F32_TERNARY_OPS(ROW_F32_TERNARY)
    PREDICATE_OPS(ROW_PREDICATE)
    SELECT_OPS(ROW_SELECT)
    // clang-format on
    {"bfi.b32", "rrrrr", exec_bfi_32, NULL},
    {"bfi.b64", "lllrr", exec_bfi_64, NULL},
    {"lop3.b32", "rrrri", exec_lop3, NULL},
    {"activemask.b32", "r", exec_activemask, NULL},
    {"mov.b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64", NULL, NULL, decode_mov},
    {"cvta.to?.global|shared|local|const|param.u64", NULL, NULL, decode_cvta},
    {"isspacep.global|shared|local", NULL, NULL, decode_isspacep},
    {"cvt.rn|rz.relu?.f16x2|bf16x2.f32", NULL, NULL, decode_cvt_pair},
    {"cvt.rna.tf32.f32", NULL, NULL, decode_cvt_tf32},
    {"cvt.rn.satfinite.e4m3x2.f32", NULL, NULL, decode_cvt_e4m3},
    {"cvt." CVT_ROUND ".ftz?.relu?.sat?." CVT_TYPES "." CVT_TYPES, NULL, NULL, decode_cvt},
    {"setp." COMPARE_NAMES ".and|or|xor?.ftz?." COMPARE_TYPES, NULL, NULL, decode_setp},
    {"set." COMPARE_NAMES ".and|or|xor?.ftz?.u32|s32|f32." COMPARE_TYPES, NULL, NULL, decode_set},
    {"testp.finite|infinite|number|notanumber|normal|subnormal.f32|f64", NULL, NULL, decode_testp},
    {"add|sub|mul.rn?.sat?.f16|f16x2", NULL, NULL, decode_half},
    {"add|sub|mul.rn?.bf16|bf16x2", NULL, NULL, decode_half},
    {"fma.rn.sat?.f16|f16x2", NULL, NULL, decode_half},
    {"fma.rn.relu?.f16|f16x2|bf16|bf16x2", NULL, NULL, decode_half},
    {"min|max.f16|f16x2|bf16|bf16x2", NULL, NULL, decode_half},
    {"neg|abs.f16|f16x2|bf16|bf16x2", NULL, NULL, decode_half},
    {"ld.weak|volatile|relaxed|acquire?." SCOPE ".global|shared|shared::cta|local|const|param?."
     "ca|cg|cs|lu|cv|nc?." HINT "." PREFETCH ".v2|v4?." MEMORY_TYPES,
     NULL, NULL, decode_ld},
    {"st.weak|volatile|relaxed|release?." SCOPE
     ".global|shared|shared::cta|local?.wb|cg|cs|wt?." HINT ".v2|v4?." MEMORY_TYPES,
     NULL, NULL, decode_st},
    {ATOM "add.u32|s32|u64|f32|f64", NULL, NULL, decode_atom},
    {ATOM "min|max.u32|s32|u64|s64", NULL, NULL, decode_atom},
    {ATOM "and|or|xor.b32|b64", NULL, NULL, decode_atom},
    {ATOM "inc|dec.u32", NULL, NULL, decode_atom},
    {ATOM "exch.b32|b64", NULL, NULL, decode_atom},
    {ATOM "cas.b16|b32|b64", NULL, NULL, decode_atom},
    {RED "add.u32|s32|u64|f32|f64", NULL, NULL, decode_atom},
    {RED "min|max.u32|s32|u64|s64", NULL, NULL, decode_atom},
    {RED "and|or|xor.b32|b64", NULL, NULL, decode_atom},
    {RED "inc|dec.u32", NULL, NULL, decode_atom},
    {"cp.async.ca|cg.shared|shared::cta.global." PREFETCH, NULL, NULL, decode_cp_async},
    {"cp.async.commit_group", NULL, NULL, decode_cp_commit},
    {"cp.async.wait_group|wait_all", NULL, NULL, decode_cp_wait},
    {"ldmatrix.sync.aligned.m8n8.x1|x2|x4.trans?.shared|shared::cta.b16", NULL, NULL,
     decode_ldmatrix},
    {"mma.sync.aligned.m16n8k8|m16n8k16.row.col.f32|f16.f16.f16.f32|f16", NULL, NULL, decode_mma},
    {"mma.sync.aligned.m16n8k8|m16n8k16.row.col.f32.bf16.bf16.f32", NULL, NULL, decode_mma},
    {"mma.sync.aligned.m16n8k4|m16n8k8.row.col.f32.tf32.tf32.f32", NULL, NULL, decode_mma},
    {"mbarrier.init|arrive.expect_tx?.shared|shared::cta.b64", NULL, NULL, decode_mbarrier},
    {"mbarrier.try_wait.parity.shared|shared::cta.b64", NULL, NULL, decode_mbarrier_wait},
    {"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes", NULL, NULL,
     decode_bulk},
    {"wgmma.mma_async.sync.aligned." WGMMA_SHAPES ".f32.bf16|f16.bf16|f16", NULL, NULL,
     decode_wgmma},
    {"wgmma.fence|commit_group|wait_group.sync.aligned", NULL, NULL, decode_wgmma_sync},
    {"setmaxnreg.inc|dec.sync.aligned.u32", NULL, NULL, decode_setmaxnreg},
    {"fence.proxy.async.shared::cta|global?", NULL, exec_fence_proxy, NULL},
    {"shfl.sync.up|down|bfly|idx.b32", NULL, NULL, decode_shfl},
    {"vote.sync.all|any|uni.pred", NULL, NULL, decode_vote},
    {"vote.sync.ballot.b32", NULL, NULL, decode_vote},
    {"match.any|all.sync.b32|b64", NULL, NULL, decode_match},
    {"redux.sync.add|min|max.u32|s32", NULL, NULL, decode_redux},
    {"redux.sync.and|or|xor.b32", NULL, NULL, decode_redux},
    {"bar.warp.sync", NULL, NULL, decode_syncwarp},
    {"bar.cta?.sync|arrive", NULL, NULL, decode_barrier},
    {"bar.cta?.red.popc.u32", NULL, NULL, decode_barrier_red},
    {"bar.cta?.red.and|or.pred", NULL, NULL, decode_barrier_red},
    {"barrier.cta?.sync|arrive.aligned?", NULL, NULL, decode_barrier},
    {"membar.cta|gl|sys", NULL, NULL, decode_nothing},
    {"fence.sc|acq_rel?.cta|gpu|sys", NULL, NULL, decode_nothing},
    {"prefetch.global|local?.L1|L2", NULL, NULL, decode_prefetch},
    {"prefetchu.L1", NULL, NULL, decode_prefetch},
    {"griddepcontrol.wait", NULL, exec_grid_wait, NULL},
    {"griddepcontrol.launch_dependents", NULL, exec_nothing, NULL},
    {"nanosleep.u32", "n", exec_nothing, NULL},
    {"bra.uni?", NULL, NULL, decode_bra},
    {"brx.idx.uni?", NULL, NULL, decode_brx},
    {"ret.uni?", NULL, NULL, decode_exit},
    {"exit", NULL, NULL, decode_exit},
    {"trap", NULL, exec_trap, NULL},
};

#endif
