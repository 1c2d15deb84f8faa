// packed.c - packed PTX: what embed --packed writes becomes the text again, or an error.
#include <stdlib.h>
#include <string.h>

// tests/gates/compile/embed/plain.ptx and a second kernel, which texts for two targets share.
static const char packed_want[] =
    ".version 7.8\n.target sm_90\n.address_size 64\n"
    ".visible .entry qlora_plain(.param .u64 _0)\n{\n.reg .b32 a<100>,c<30>;\n.reg .b64 d<12>;"
    "mov.u32 c29,%tid.x;ld.param.u64 d11,[_0];@%p1 bra $12;bra.uni $12;$12:\n"
    ".local .align 4 .b8 depot[4];\n.pragma \"no//comment\";ret;}\n"
    ".visible .entry qlora_second(){ret;}\n";
static const char packed_own[] =
    "E$!!;H]cv#Xh^EsoK1k'-0}+glP>S3|O9F<Iy*rydvr[d|9Cnx[-[-_-y;{[K+V8G5rfqLy,2=k-Pd-$j.^g`RBmQI"
    "af@EQv|oVD)_8G;LRaqZ|)Z|/6mSA_T`iQ6@nCE@Ozo1|=@.N``qhjfy[+hYkFpgBIwg6fP;}+-zBZ[KC4S,;!JT4x"
    "RFQhK-zPfJcM:+|R<r{DAu:qby753h0.b&yZ#TR!";
static const char packed_shared[] =
    "H!!!R%^Ue##P||A)[B^c/+Vmw,x9s0|-}wOc6Lq-}/mXR{6Fx1cu;+ix]g,[i$";

enum { PACKED_LENGTH = 252, PACKED_CUT = 100 };

typedef struct packed_box {
    qlora_ctx* ctx;
    qlora__gpu gpu;
    int allocations_left; // the next ones fail; below 0 none does
    char own[sizeof packed_own];
    char shared[sizeof packed_shared];
    const char* chunks[8];
    qlora__ptx_text text;
} packed_box;

static void* packed_alloc(size_t bytes, size_t align, void* user) {
    packed_box* box = (packed_box*)user;
    (void)align;
    if (box->allocations_left == 0) {
        return NULL;
    }
    box->allocations_left -= box->allocations_left > 0 ? 1 : 0;
    return malloc(bytes);
}

static void packed_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    (void)user;
    free(pointer);
}

// The text as the table has it.
static void packed_reset(packed_box* box) {
    memcpy(box->own, packed_own, sizeof packed_own);
    memcpy(box->shared, packed_shared, sizeof packed_shared);
    memset(box->chunks, 0, sizeof box->chunks);
    box->chunks[0] = box->own;
    box->chunks[2] = box->shared;
    memset(&box->text, 0, sizeof box->text);
    box->text.module = "plain";
    box->text.target = 75;
    box->text.version = 63;
    box->text.chunks = box->chunks;
    box->text.length = PACKED_LENGTH;
    box->text.hash = 0x5b24013eu;
}

// A context on the CPU that is taken for one of a GPU.
static bool packed_begin(packed_box* box) {
    qlora_ctx_desc desc;
    memset(box, 0, sizeof *box);
    memset(&desc, 0, sizeof desc);
    box->allocations_left = -1;
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.allocator.alloc = packed_alloc;
    desc.allocator.free = packed_free;
    desc.allocator.user = box;
    if (qlora_ctx_create(&desc, &box->ctx) != QLORA_OK) {
        return false;
    }
    strcpy(box->gpu.target, "sm_90");
    box->gpu.target_number = 90;
    box->ctx->gpu = &box->gpu;
    packed_reset(box);
    return true;
}

static qlora_result packed_end(packed_box* box) {
    box->ctx->gpu = NULL;
    return qlora_ctx_destroy(box->ctx);
}

// OK: the text is right. QLORA_ERR_UNSUPPORTED: it is not what it says, or memory is lost.
static qlora_result packed_try(packed_box* box) {
    char* ptx = NULL;
    size_t bytes = 0;
    uint64_t before = box->ctx->env.host_bytes;
    qlora_result r = qlora__ptx_join(box->ctx, &box->text, true, &ptx, &bytes);
    if (r == QLORA_OK) {
        bool same = bytes == sizeof packed_want && memcmp(ptx, packed_want, bytes) == 0;
        qlora__free(box->ctx, ptx, bytes);
        r = same ? QLORA_OK : QLORA_ERR_UNSUPPORTED;
    } else if (r == QLORA_ERR_KERNEL &&
               strstr(box->ctx->env.error, "kernel module plain: its packed PTX for sm_75 is "
                                           "damaged: ") == NULL) {
        r = QLORA_ERR_UNSUPPORTED;
    }
    return box->ctx->env.host_bytes == before ? r : QLORA_ERR_UNSUPPORTED;
}

TEST packed_text_comes_back(void) {
    packed_box box;
    ASSERT(packed_begin(&box));
    ASSERT_EQ_FMT((int)QLORA_OK, (int)packed_try(&box), "%d");
    // In two chunks.
    char first[PACKED_CUT + 1];
    memcpy(first, box.own, PACKED_CUT);
    first[PACKED_CUT] = '\0';
    box.chunks[0] = first;
    box.chunks[1] = box.own + PACKED_CUT;
    box.chunks[2] = NULL;
    box.chunks[3] = box.shared;
    ASSERT_EQ_FMT((int)QLORA_OK, (int)packed_try(&box), "%d");
    ASSERT_EQ(QLORA_OK, packed_end(&box));
    PASS();
}

// Each character replaced by each other one. Only the last ones have bits that nothing needs.
TEST packed_damage_is_an_error(void) {
    packed_box box;
    ASSERT(packed_begin(&box));
    char* parts[2] = {box.own, box.shared};
    int harmless = 0;
    for (int part = 0; part < 2; part++) {
        size_t length = strlen(parts[part]);
        for (size_t at = 0; at < length; at++) {
            char right = parts[part][at];
            for (int value = 0; value < 256; value += test_brief() && value > 0 ? 5 : 1) {
                parts[part][at] = (char)value;
                qlora_result r = packed_try(&box);
                ASSERT(r == QLORA_OK || r == QLORA_ERR_KERNEL);
                harmless += r == QLORA_OK && parts[part][at] != right ? 1 : 0;
                ASSERT(r == QLORA_ERR_KERNEL || parts[part][at] == right || at + 4 >= length);
            }
            parts[part][at] = right;
        }
    }
    ASSERT(harmless < 1000);
    ASSERT_EQ_FMT((int)QLORA_OK, (int)packed_try(&box), "%d");
    ASSERT_EQ(QLORA_OK, packed_end(&box));
    PASS();
}

// A row that does not fit its text, parts that are missing or exchanged, a chunk that is cut.
TEST packed_table_is_checked(void) {
    static const char* const reasons[] = {
        "its parts do not fit together",  "its parts do not fit together",
        "the length of a part is wrong",  "its hash is wrong",
        "its parts do not fit together",  "its parts do not fit together",
        "its parts do not fit together",  "its parts do not fit together",
        "the length of a part is wrong",  "a part cannot be decompressed",
        "a character stands for nothing", "a character stands for nothing"};
    packed_box box;
    ASSERT(packed_begin(&box));
    for (int fault = 0; fault < (int)(sizeof reasons / sizeof reasons[0]); fault++) {
        packed_reset(&box);
        box.text.length += fault == 0 ? 1 : 0;
        box.text.length -= fault == 1 ? 1 : 0;
        box.text.length = fault == 2 ? 0 : box.text.length;
        box.text.hash ^= fault == 3 ? 1 : 0;
        box.chunks[0] = fault == 4 ? box.shared : fault == 5 ? NULL : box.chunks[0];
        box.chunks[2] = fault == 6 ? NULL : fault == 7 ? box.own : box.chunks[2];
        size_t cut = fault == 8 ? 2 : fault == 9 ? 60 : fault == 10 ? 61 : sizeof packed_own - 1;
        box.own[cut] = '\0';
        box.own[0] = fault == 11 ? ' ' : box.own[0];
        ASSERT_EQ_FMT((int)QLORA_ERR_KERNEL, (int)packed_try(&box), "%d");
        ASSERT(strstr(box.ctx->env.error, reasons[fault]) != NULL);
    }
    ASSERT_EQ(QLORA_OK, packed_end(&box));
    PASS();
}

TEST packed_needs_memory(void) {
    packed_box box;
    ASSERT(packed_begin(&box));
    int allocations = 0;
    for (; allocations < 100; allocations++) {
        box.allocations_left = allocations;
        qlora_result r = packed_try(&box);
        box.allocations_left = -1;
        if (r == QLORA_OK) {
            break;
        }
        ASSERT_EQ_FMT((int)QLORA_ERR_MEMORY, (int)r, "%d");
    }
    // the text, the same with its words in full, and the two forms of each part
    ASSERT_EQ_FMT(6, allocations, "%d");
    ASSERT_EQ(QLORA_OK, packed_end(&box));
    PASS();
}

// A length that would take all memory is refused before it is tried.
TEST packed_length_is_bounded(void) {
    packed_box box;
    ASSERT(packed_begin(&box));
    memcpy(box.own, "#~#~", 4); // 26 bits, all set
    box.allocations_left = 2;   // the text and the bytes of a part
    ASSERT_EQ_FMT((int)QLORA_ERR_KERNEL, (int)packed_try(&box), "%d");
    ASSERT(strstr(box.ctx->env.error, "the length of a part is wrong") != NULL);
    box.allocations_left = -1;
    ASSERT_EQ(QLORA_OK, packed_end(&box));
    PASS();
}

SUITE(packed_suite) {
    RUN_TEST(packed_text_comes_back);
    RUN_TEST(packed_damage_is_an_error);
    RUN_TEST(packed_table_is_checked);
    RUN_TEST(packed_needs_memory);
    RUN_TEST(packed_length_is_bounded);
}
