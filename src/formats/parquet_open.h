// ---- Parquet: opening a file --------------------------------------------------------------------

// ---- the tree of values

typedef enum qlora__parquet_inside {
    QLORA__PARQUET_FIELDS, // fields of a struct
    QLORA__PARQUET_MIDDLE, // the repeated group of a list
    QLORA__PARQUET_ELEMENT // the element inside that group
} qlora__parquet_inside;

// A group whose children are being read.
typedef struct qlora__parquet_frame {
    int64_t left;
    qlora__parquet_inside inside;
    uint32_t definition;
    uint32_t repetition;
    uint32_t depth;
    const qlora__parquet_element* owner;
} qlora__parquet_frame;

typedef struct qlora__parquet_builder {
    qlora__parquet* p;
    const qlora__parquet_element* elements;
    uint32_t count;
    qlora__parquet_frame stack[2 * QLORA__PARQUET_MAX_DEPTH + 4];
    int open;
} qlora__parquet_builder;

static qlora__parquet_node* qlora__parquet_node_add(qlora__parquet* p, qlora__parquet_kind kind,
                                                    const char* name, uint32_t size,
                                                    const qlora__parquet_frame* in) {
    qlora__parquet_node* n = &p->nodes[p->node_count++];
    memset(n, 0, sizeof *n);
    n->kind = kind;
    n->name = name;
    n->name_size = size;
    n->depth = in->depth;
    n->present = in->definition;
    n->filled = in->definition + 1;
    n->repeat = in->repetition + 1;
    n->leaf = p->leaf_count;
    return n;
}

static void qlora__parquet_leaf_add(qlora__parquet* p, const qlora__parquet_element* e,
                                    qlora__parquet_node* n, const qlora__parquet_frame* in) {
    qlora__parquet_leaf* leaf = &p->leaves[p->leaf_count++];
    memset(leaf, 0, sizeof *leaf);
    leaf->node = p->node_count - 1;
    leaf->form = qlora__parquet_form_of(e, &n->why);
    leaf->max_definition = in->definition;
    leaf->max_repetition = in->repetition;
    bool fixed = e->type == QLORA__PARQUET_FIXED;
    if (e->type >= QLORA__PARQUET_TYPE_COUNT || (fixed && e->type_length < 1) ||
        (fixed && e->type_length > 1 << 20)) {
        n->why = "of an unknown type";
        return;
    }
    leaf->type = (qlora__parquet_type)e->type;
    leaf->width = qlora__parquet_width(e->type, e->type_length);
    leaf->bits = e->bits > 0 ? (unsigned)e->bits : 8 * leaf->width;
}

// Whether the repeated group of a list only holds the element, as in new files. In old ones the
// repeated group or value is the element itself; the rules are those of the format's description.
static bool qlora__parquet_is_middle(const qlora__parquet_element* e,
                                     const qlora__parquet_element* list, bool child_repeated) {
    char tuple[300];
    int size = list->name_size < 256 ? (int)list->name_size : 256;
    snprintf(tuple, sizeof tuple, "%.*s_tuple", size, list->name);
    bool named = (e->name_size == 5 && memcmp(e->name, "array", 5) == 0) ||
                 (e->name_size == strlen(tuple) && memcmp(e->name, tuple, e->name_size) == 0);
    return e->type < 0 && e->children == 1 && !named && !child_repeated &&
           !qlora__parquet_is_list(e) && qlora__parquet_why(e) == NULL;
}

// Adds the nodes of an element. `at` has the levels of what it is in; a group is opened.
static bool qlora__parquet_value_add(qlora__parquet_builder* b, uint32_t index,
                                     qlora__parquet_frame at, bool named, int64_t repetition) {
    qlora__parquet* p = b->p;
    const qlora__parquet_element* e = &b->elements[index];
    const char* name = named ? e->name : NULL;
    uint32_t size = named ? e->name_size : 0;
    if (at.depth > QLORA__PARQUET_MAX_DEPTH - 2) {
        return false;
    }
    if (repetition == 2) { // repeated without being in a list: a list of its own
        qlora__parquet_node_add(p, QLORA__PARQUET_LIST, name, size, &at);
        at.definition++;
        at.repetition++;
        at.depth++;
        name = NULL;
        size = 0;
    } else if (repetition == 1) {
        at.definition++;
    }
    if (e->type >= 0) {
        qlora__parquet_leaf_add(
            p, e, qlora__parquet_node_add(p, QLORA__PARQUET_LEAF, name, size, &at), &at);
        return true;
    }
    bool list = qlora__parquet_is_list(e);
    bool known =
        list && e->children == 1 && index + 1 < b->count && b->elements[index + 1].repetition == 2;
    qlora__parquet_node* n = qlora__parquet_node_add(
        p, known ? QLORA__PARQUET_LIST : QLORA__PARQUET_STRUCT, name, size, &at);
    n->why = list && !known ? "a LIST of an unknown structure" : qlora__parquet_why(e);
    qlora__parquet_frame* frame = &b->stack[b->open++];
    *frame = at;
    frame->left = e->children;
    frame->inside = known ? QLORA__PARQUET_MIDDLE : QLORA__PARQUET_FIELDS;
    frame->depth = at.depth + 1;
    frame->owner = e;
    return e->children > 0;
}

static bool qlora__parquet_element_add(qlora__parquet_builder* b, uint32_t index) {
    qlora__parquet_frame* top = &b->stack[b->open - 1];
    const qlora__parquet_element* e = &b->elements[index];
    qlora__parquet_frame at = *top;
    top->left--;
    if (at.inside != QLORA__PARQUET_MIDDLE) {
        bool field = at.inside == QLORA__PARQUET_FIELDS;
        return qlora__parquet_value_add(b, index, at, field, e->repetition);
    }
    at.definition++;
    at.repetition++;
    bool repeated = index + 1 < b->count && b->elements[index + 1].repetition == 2;
    if (!qlora__parquet_is_middle(e, at.owner, repeated)) {
        return qlora__parquet_value_add(b, index, at, false, 0);
    }
    qlora__parquet_frame* frame = &b->stack[b->open++];
    *frame = at;
    frame->left = 1;
    frame->inside = QLORA__PARQUET_ELEMENT;
    return true;
}

// Builds the tree of a schema.
static qlora_result qlora__parquet_build(qlora__env* env, qlora__parquet* p,
                                         const qlora__parquet_element* elements, uint32_t count) {
    qlora__parquet_builder b;
    memset(&b, 0, sizeof b);
    b.p = p;
    b.elements = elements;
    b.count = count;
    bool ok = elements[0].type < 0 && elements[0].children > 0;
    ok = ok && qlora__parquet_value_add(&b, 0, b.stack[0], true, 0);
    for (uint32_t i = 1; ok && i < count; i++) {
        while (b.open > 0 && b.stack[b.open - 1].left == 0) {
            b.open--;
        }
        ok = b.open > 0 && qlora__parquet_element_add(&b, i);
    }
    for (int i = 0; ok && i < b.open; i++) {
        ok = b.stack[i].left == 0;
    }
    if (!ok || p->leaf_count == 0 || p->nodes[0].kind != QLORA__PARQUET_STRUCT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the schema is not valid, has no columns, or is deeper than %d "
                               "levels",
                               p->label, QLORA__PARQUET_MAX_DEPTH);
    }
    for (uint32_t i = p->node_count; i-- > 0;) {
        qlora__parquet_node* n = &p->nodes[i];
        n->end = i + 1;
        while (n->end < p->node_count && p->nodes[n->end].depth > n->depth) {
            n->end = p->nodes[n->end].end;
        }
        n->leaf_end = n->end < p->node_count ? p->nodes[n->end].leaf : p->leaf_count;
    }
    return QLORA_OK;
}

// ---- the footer

static qlora_result qlora__parquet_schema(qlora__env* env, qlora__parquet* p, qlora__thrift* t) {
    int type = 0;
    uint64_t count = qlora__thrift_list(t, &type);
    if (p->nodes != NULL || type != QLORA__THRIFT_STRUCT || count == 0 ||
        count > QLORA__PARQUET_MAX_ELEMENTS) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the schema has %llu elements; 1 to %u are allowed", p->label,
                               (unsigned long long)count, QLORA__PARQUET_MAX_ELEMENTS);
    }
    p->node_capacity = 2 * (uint32_t)count;
    p->leaf_capacity = (uint32_t)count;
    size_t bytes = (size_t)count * sizeof(qlora__parquet_element);
    p->nodes = (qlora__parquet_node*)qlora__env_alloc(env, p->node_capacity * sizeof *p->nodes);
    p->leaves = (qlora__parquet_leaf*)qlora__env_alloc(env, p->leaf_capacity * sizeof *p->leaves);
    qlora__parquet_element* elements = (qlora__parquet_element*)qlora__env_alloc(env, bytes);
    qlora_result r = QLORA_ERR_MEMORY;
    if (p->nodes != NULL && p->leaves != NULL && elements != NULL) {
        for (uint64_t i = 0; i < count && !t->bad; i++) {
            qlora__parquet_element_read(t, &elements[i]);
        }
        r = t->bad ? qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the schema is not valid", p->label)
                   : qlora__parquet_build(env, p, elements, (uint32_t)count);
    }
    qlora__env_free(env, elements, bytes);
    return r;
}

static void qlora__parquet_group_read(qlora__thrift* t, qlora__parquet_group* group) {
    qlora__thrift_field field = {0, 0};
    group->columns = NULL;
    group->rows = -1;
    while (qlora__thrift_next(t, &field)) {
        if (field.id == 3 && field.type == QLORA__THRIFT_I64) {
            group->rows = qlora__thrift_int(t);
            continue;
        }
        if (field.id == 1 && field.type == QLORA__THRIFT_LIST) {
            group->columns = t->at;
        }
        qlora__thrift_skip(t, field.type);
    }
    t->bad = t->bad || group->columns == NULL || group->rows < 0;
}

static qlora_result qlora__parquet_groups(qlora__env* env, qlora__parquet* p, qlora__thrift* t) {
    int type = 0;
    uint64_t count = qlora__thrift_list(t, &type);
    if (p->groups != NULL || count > UINT32_MAX || (count > 0 && type != QLORA__THRIFT_STRUCT)) {
        t->bad = true;
        return QLORA_OK;
    }
    p->groups = (qlora__parquet_group*)qlora__env_alloc(env, (size_t)count * sizeof *p->groups);
    if (p->groups == NULL) {
        return QLORA_ERR_MEMORY;
    }
    p->group_count = (uint32_t)count;
    for (uint32_t i = 0; i < p->group_count && !t->bad; i++) {
        qlora__parquet_group_read(t, &p->groups[i]);
    }
    return QLORA_OK;
}

static void qlora__parquet_close(qlora__env* env, qlora__parquet* p) {
    for (uint32_t i = 0; i < p->leaf_count; i++) {
        qlora__parquet_block_free(env, &p->held, &p->leaves[i].dictionary);
        qlora__parquet_block_free(env, &p->held, &p->leaves[i].places);
        qlora__parquet_block_free(env, &p->held, &p->leaves[i].page);
        qlora__parquet_block_free(env, &p->held, &p->leaves[i].previous);
    }
    qlora__env_free(env, p->nodes, p->node_capacity * sizeof *p->nodes);
    qlora__env_free(env, p->leaves, p->leaf_capacity * sizeof *p->leaves);
    qlora__env_free(env, p->groups, p->group_count * sizeof *p->groups);
    qlora__env_free(env, p->zstd, sizeof *p->zstd);
    qlora__env_free(env, p->gzip, sizeof *p->gzip);
    memset(p, 0, sizeof *p);
}

static qlora_result qlora__parquet_footer(qlora__env* env, qlora__parquet* p) {
    const uint8_t* end = p->file + p->size;
    bool framed = p->size >= 12 && memcmp(p->file, "PAR1", 4) == 0;
    if (p->size >= 12 && memcmp(end - 4, "PARE", 4) == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: the file is encrypted, which is not supported", p->label);
    }
    uint32_t size = framed ? qlora__load32(end - 8) : 0;
    if (!framed || memcmp(end - 4, "PAR1", 4) != 0 || size > p->size - 12) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: not a Parquet file, or it is truncated",
                               p->label);
    }
    qlora__thrift t;
    qlora__thrift_field field = {0, 0};
    t.at = end - 8 - size;
    t.end = end - 8;
    t.bad = false;
    p->footer = p->size - 8 - size;
    int64_t rows = -1;
    while (qlora__thrift_next(&t, &field)) {
        bool list = field.type == QLORA__THRIFT_LIST;
        if (field.id == 2 && list) {
            QLORA__TRY(qlora__parquet_schema(env, p, &t));
        } else if (field.id == 4 && list) {
            QLORA__TRY(qlora__parquet_groups(env, p, &t));
        } else if (field.id == 3 && field.type == QLORA__THRIFT_I64) {
            rows = qlora__thrift_int(&t);
        } else {
            qlora__thrift_skip(&t, field.type);
        }
    }
    if (t.bad || p->nodes == NULL || p->groups == NULL || rows < 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the footer is not valid", p->label);
    }
    for (uint32_t i = 0; i < p->group_count && rows >= 0; i++) {
        rows = p->groups[i].rows <= rows ? rows - p->groups[i].rows : -1;
    }
    return rows == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                       "%s: the row groups do not have as many rows as the file",
                                       p->label);
}

// Opens a file that lies in memory. Every column is read unless the caller sets `skip` of its node,
// which must be a child of node 0.
static qlora_result qlora__parquet_open(qlora__env* env, const char* label, const void* data,
                                        uint64_t size, qlora__parquet* p) {
    memset(p, 0, sizeof *p);
    p->label = label;
    p->file = (const uint8_t*)data;
    p->size = size;
    p->held.limit = QLORA__PARQUET_MAX_HELD;
    p->text_limit = QLORA__PARQUET_MAX_TEXT + QLORA__PARQUET_MAX_GROWTH * size;
    qlora__crc32_begin(&p->crc);
    qlora_result r = qlora__parquet_footer(env, p);
    if (r != QLORA_OK) {
        qlora__parquet_close(env, p);
    }
    return r;
}

// The node of the first column that is read and cannot be, or 0.
static uint32_t qlora__parquet_unreadable(const qlora__parquet* p) {
    for (uint32_t i = 1; i < p->node_count; i++) {
        if (p->nodes[i].skip) {
            i = p->nodes[i].end - 1;
        } else if (p->nodes[i].why != NULL) {
            return i;
        }
    }
    return 0;
}

// ---- the columns of a row group

typedef struct qlora__parquet_chunk {
    int64_t type;
    int64_t codec;
    int64_t values;
    int64_t size;
    int64_t data;       // offset of the first data page
    int64_t dictionary; // and of the dictionary
    uint64_t levels[2]; // repetition and definition levels that it counts; 0: none
    bool elsewhere;     // in another file
    bool encrypted;
} qlora__parquet_chunk;

// How often each level occurs, which tells how many levels the writer's schema had.
static void qlora__parquet_chunk_levels(qlora__thrift* t, qlora__parquet_chunk* c) {
    qlora__thrift_field field = {0, 0};
    while (qlora__thrift_next(t, &field)) {
        if ((field.id == 2 || field.id == 3) && field.type == QLORA__THRIFT_LIST) {
            qlora__thrift list = *t;
            int type = 0;
            c->levels[field.id - 2] = qlora__thrift_list(&list, &type);
        }
        qlora__thrift_skip(t, field.type);
    }
}

static void qlora__parquet_chunk_data(qlora__thrift* t, qlora__parquet_chunk* c) {
    qlora__thrift_field field = {0, 0};
    while (qlora__thrift_next(t, &field)) {
        int64_t* const into[12] = {NULL, &c->type, NULL, NULL,     &c->codec, &c->values,
                                   NULL, &c->size, NULL, &c->data, NULL,      &c->dictionary};
        bool number = field.type == QLORA__THRIFT_I32 || field.type == QLORA__THRIFT_I64;
        if (number && field.id < 12 && into[field.id] != NULL) {
            *into[field.id] = qlora__thrift_int(t);
        } else if (field.id == 16 && field.type == QLORA__THRIFT_STRUCT) {
            qlora__parquet_chunk_levels(t, c);
        } else {
            qlora__thrift_skip(t, field.type);
        }
    }
}

static void qlora__parquet_chunk_read(qlora__thrift* t, qlora__parquet_chunk* c) {
    qlora__thrift_field field = {0, 0};
    memset(c, 0, sizeof *c);
    c->type = -1; // as all others that must be there
    c->codec = -1;
    c->values = -1;
    c->size = -1;
    c->data = -1;
    while (qlora__thrift_next(t, &field)) {
        c->elsewhere = c->elsewhere || field.id == 1;
        c->encrypted = c->encrypted || field.id == 8 || field.id == 9;
        if (field.id == 3 && field.type == QLORA__THRIFT_STRUCT) {
            qlora__parquet_chunk_data(t, c);
        } else {
            qlora__thrift_skip(t, field.type);
        }
    }
}

// Points a column at its pages in a row group.
static qlora_result qlora__parquet_chunk_open(qlora__env* env, const qlora__parquet* p,
                                              qlora__parquet_leaf* leaf,
                                              const qlora__parquet_chunk* c) {
    bool known = c->codec >= 0 && c->codec < QLORA__PARQUET_CODEC_COUNT;
    if (c->encrypted || c->elsewhere) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "it is %s, which is not supported",
                               c->encrypted ? "encrypted" : "in another file");
    }
    if (c->codec != -1 && (!known || qlora__parquet_codecs[c->codec].growth == 0)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the codec %s (number %lld) is not supported; UNCOMPRESSED, SNAPPY, "
                               "GZIP and ZSTD are",
                               known ? qlora__parquet_codecs[c->codec].name : "unknown",
                               (long long)c->codec);
    }
    bool first = c->dictionary > 0 && c->dictionary < c->data;
    int64_t begin = first ? c->dictionary : c->data;
    if (c->values == 0) {
        begin = 4; // no pages: the offset may be anything
    }
    if (!known || c->type != (int64_t)leaf->type || c->values < 0 || c->data < 0 || begin < 4 ||
        c->size < 0 || (uint64_t)begin > p->footer ||
        (uint64_t)c->size > p->footer - (uint64_t)begin) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "its type, codec, place or size in the footer is missing or not "
                               "valid");
    }
    const uint32_t most[2] = {leaf->max_repetition, leaf->max_definition};
    for (int i = 0; i < 2; i++) {
        if (c->levels[i] > 0 && c->levels[i] != (uint64_t)most[i] + 1) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "the footer counts %llu %s levels; its schema has %u",
                                   (unsigned long long)c->levels[i],
                                   i == 0 ? "repetition" : "definition", most[i] + 1);
        }
    }
    leaf->at = p->file + begin;
    leaf->end = leaf->at + c->size;
    leaf->codec = c->codec;
    leaf->left = c->values;
    leaf->entries = 0;
    leaf->has_dictionary = false;
    leaf->word_count = 0;
    leaf->ready = false;
    leaf->ended = false;
    return QLORA_OK;
}

// Opens the row group p->group.
static qlora_result qlora__parquet_group_open(qlora__env* env, qlora__parquet* p) {
    const qlora__parquet_group* group = &p->groups[p->group - 1];
    qlora__thrift t;
    int type = 0;
    t.at = group->columns;
    t.end = p->file + p->size - 8;
    t.bad = false;
    uint64_t count = qlora__thrift_list(&t, &type);
    if (count != p->leaf_count || type != QLORA__THRIFT_STRUCT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: row group %u has %llu columns; the schema has %u", p->label,
                               p->group, (unsigned long long)count, p->leaf_count);
    }
    p->rows_left = group->rows;
    for (uint32_t field = 1; field < p->node_count; field = p->nodes[field].end) {
        for (uint32_t i = p->nodes[field].leaf; i < p->nodes[field].leaf_end; i++) {
            qlora__parquet_chunk chunk;
            qlora__parquet_chunk_read(&t, &chunk);
            if (t.bad) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the footer is not valid",
                                       p->label);
            }
            if (p->nodes[field].skip) {
                continue;
            }
            qlora_result r = qlora__parquet_chunk_open(env, p, &p->leaves[i], &chunk);
            if (r != QLORA_OK) {
                return qlora__parquet_at(env, p, &p->leaves[i], r);
            }
        }
    }
    return QLORA_OK;
}
