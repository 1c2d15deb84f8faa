// ---- the share of a process ---------------------------------------------------------------------
//
// Of a step with P leaves, process r of W owns the leaves [r P / W, (r + 1) P / W), which may be
// none, and contributes the largest nodes of the tree that lie within them. All of this is
// arithmetic on P, W and r, so every process knows what every other one sends.

// The most nodes that one process contributes.
#define QLORA__SHARE_NODES (2 * QLORA__TREE_LEVELS)

// The leaves of process `rank`.
static qlora__node qlora__share_of(int64_t count, int32_t world, int32_t rank) {
    qlora__node share;
    // count * world does not overflow: a step has less than 2^48 micro-batches.
    share.begin = count * rank / world;
    share.end = count * (rank + 1) / world;
    return share;
}

static qlora__node qlora__comm_share(const qlora_trainer* t) {
    return qlora__share_of(t->leaves, t->world, t->world > 1 ? t->comm.rank : 0);
}

// The largest nodes of a tree of `count` leaves within a share, from left to right. Returns their
// number.
static int qlora__share_nodes(qlora__node share, int64_t count, qlora__node* out) {
    int n = 0;
    for (int64_t at = share.begin; at < share.end;) {
        int64_t width = 1;
        while (width < count && at % (2 * width) == 0 &&
               qlora__min(at + 2 * width, count) <= share.end) {
            width *= 2;
        }
        out[n].begin = at;
        out[n].end = qlora__min(at + width, count);
        at = out[n++].end;
    }
    return n;
}

// A node that takes part in the sum of a step, and where its values are.
typedef struct qlora__part {
    qlora__node node;
    int32_t rank;
    int32_t own;  // number among the nodes of its process
    char* values; // of a slice
    char* few;
} qlora__part;

// Writes the nodes of all processes, in order, if out is not NULL. Returns their number.
static int64_t qlora__share_parts(int64_t count, int32_t world, qlora__part* out) {
    qlora__node nodes[QLORA__SHARE_NODES];
    int64_t n = 0;
    for (int32_t rank = 0; rank < world; rank++) {
        int own = qlora__share_nodes(qlora__share_of(count, world, rank), count, nodes);
        for (int i = 0; i < own; i++, n++) {
            if (out != NULL) {
                memset(&out[n], 0, sizeof out[n]);
                out[n].node = nodes[i];
                out[n].rank = rank;
                out[n].own = i;
            }
        }
    }
    return n;
}

// The elements of a slice: [begin, begin + count).
typedef struct qlora__stretch {
    int64_t begin;
    int64_t count;
} qlora__stretch;

// Slice number `rank` of a round that starts at element `at` of n, with slices of `length`.
static qlora__stretch qlora__stretch_at(int64_t n, int64_t at, int64_t length, int32_t rank) {
    qlora__stretch slice;
    slice.begin = qlora__min(at + rank * length, n);
    slice.count = qlora__min(length, n - slice.begin);
    return slice;
}
