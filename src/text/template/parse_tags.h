// From tokens to a tree: comparisons, conditions and statements.

// The operator of a comparison at this place, as a node's op; false when there is none.
static bool qlora__jin_comparison(qlora__jin_parser* p, char op[2]) {
    static const char* const operators[] = {"==", "!=", "<", "<=", ">", ">="};
    op[1] = '\0';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(operators); i++) {
        if (qlora__jin_skip_operator(p, operators[i])) {
            op[0] = operators[i][0];
            op[1] = operators[i][1];
            return true;
        }
    }
    op[0] = 'i';
    if (qlora__jin_skip_name(p, "in")) {
        return true;
    }
    op[0] = 'n';
    if (qlora__jin_at_name(p, "not") && qlora__jin_token_is_name(p->token + 1, "in")) {
        p->token += 2;
        return true;
    }
    return false;
}

static qlora_result qlora__jin_parse_compare(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain operands;
    char op[2];
    uint32_t line = p->token->line;
    memset(&operands, 0, sizeof operands);
    QLORA__TRY(qlora__jin_parse_sum(p, out));
    while (qlora__jin_comparison(p, op)) {
        qlora__jin_node* operand = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OPERAND, &operand));
        QLORA__TRY(qlora__jin_parse_sum(p, &operand->a));
        memcpy(operand->op, op, sizeof op);
        QLORA__TRY(qlora__jin_node_done(p, operand));
        qlora__jin_chain_add(&operands, operand);
    }
    if (operands.first == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_COMPARE, line, *out, operands.first, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_not(qlora__jin_parser* p, qlora__jin_node** out) {
    uint32_t line = p->token->line;
    if (!qlora__jin_skip_name(p, "not")) {
        return qlora__jin_parse_compare(p, out);
    }
    qlora__jin_node* inner = NULL;
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(p->negation(p, &inner));
    p->depth--;
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_NOT, line, inner, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_and(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_not(p, out));
    while (qlora__jin_skip_name(p, "and")) {
        qlora__jin_node* right = NULL;
        uint32_t line = p->token->line;
        QLORA__TRY(qlora__jin_parse_not(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_AND, line, *out, right, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_or(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_and(p, out));
    while (qlora__jin_skip_name(p, "or")) {
        qlora__jin_node* right = NULL;
        uint32_t line = p->token->line;
        QLORA__TRY(qlora__jin_parse_and(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_OR, line, *out, right, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_expression(qlora__jin_parser* p, bool conditional,
                                                qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(qlora__jin_parse_or(p, out));
    while (conditional && qlora__jin_skip_name(p, "if")) {
        qlora__jin_node* node = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_COND, &node));
        node->b = *out;
        QLORA__TRY(qlora__jin_parse_or(p, &node->a));
        if (qlora__jin_skip_name(p, "else")) {
            QLORA__TRY(p->expression(p, true, &node->c));
        }
        QLORA__TRY(qlora__jin_node_done(p, node));
        *out = node;
    }
    p->depth--;
    return QLORA_OK;
}

// ---- targets of assignments

static bool qlora__jin_is_literal(const qlora__jin_token* token) {
    static const char* const words[] = {"true", "True", "false", "False", "none", "None"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(words); i++) {
        if (qlora__jin_token_is_name(token, words[i])) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__jin_parse_target_name(qlora__jin_parser* p, bool attribute,
                                                 qlora__jin_node** out) {
    if (p->token->kind != QLORA__JIN_T_NAME || qlora__jin_is_literal(p->token)) {
        return qlora__jin_unexpected(p, "the name of a variable");
    }
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_NAME, out));
    (*out)->name = p->token->text;
    (*out)->size = p->token->size;
    qlora__jin_step(p);
    if (attribute && qlora__jin_skip_operator(p, ".")) {
        const qlora__jin_token* name = p->token;
        QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "the name of an attribute"));
        (*out)->kind = QLORA__JIN_N_NSREF;
        return qlora__jin_string_share(p->m, name->text, name->size, &(*out)->value);
    }
    return QLORA_OK;
}

// a, or a, b, or (a, (b, c)): the ends are "in", "=" or the end of the tag.
static qlora_result qlora__jin_parse_target(qlora__jin_parser* p, bool attribute,
                                            const char* end_name, qlora__jin_node** out) {
    // one open tuple per level
    qlora__jin_chain chains[16];
    size_t level = 0;
    bool tuples[16];
    memset(chains, 0, sizeof chains);
    memset(tuples, 0, sizeof tuples);
    for (;;) {
        qlora__jin_node* node = NULL;
        bool end = p->token->kind == QLORA__JIN_T_BLOCK_END || qlora__jin_at_operator(p, ")") ||
                   (level == 0 && end_name != NULL && qlora__jin_at_name(p, end_name));
        if (!end && qlora__jin_skip_operator(p, "(")) {
            level++;
            if (level == QLORA__TEXT_COUNT(chains)) {
                return qlora__jin_unexpected(p, "a target with fewer parentheses");
            }
            memset(&chains[level], 0, sizeof chains[level]);
            tuples[level] = false;
            continue;
        }
        if (!end) {
            QLORA__TRY(qlora__jin_parse_target_name(p, attribute, &node));
            qlora__jin_chain_add(&chains[level], node);
        }
        while (!qlora__jin_skip_operator(p, ",")) {
            if (chains[level].first == NULL) {
                return qlora__jin_unexpected(p, "the name of a variable");
            }
            node = chains[level].first;
            if (tuples[level]) {
                QLORA__TRY(
                    qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, node->line, node, NULL, &node));
                QLORA__TRY(qlora__jin_node_done(p, node));
            }
            if (level == 0) {
                *out = node;
                return QLORA_OK;
            }
            QLORA__TRY(qlora__jin_need_operator(p, ")"));
            level--;
            qlora__jin_chain_add(&chains[level], node);
        }
        if (chains[level].first == NULL) {
            return qlora__jin_unexpected(p, "the name of a variable");
        }
        tuples[level] = true;
    }
}

// ---- statements

// What follows a tag up to one of the tags in `ends` ("endif else "), which is left as the current
// token.
static qlora_result qlora__jin_parse_body(qlora__jin_parser* p, const char* ends,
                                          qlora__jin_node** out) {
    qlora__jin_skip_operator(p, ":");
    QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_BLOCK_END, "the end of the tag"));
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(p->statements(p, ends, out));
    p->depth--;
    if (p->token->kind == QLORA__JIN_T_END) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "the template ends, but one of these tags is missing: %s",
                               ends);
    }
    return QLORA_OK;
}

// The same for one end tag, which is skipped.
static qlora_result qlora__jin_parse_whole(qlora__jin_parser* p, const char* end,
                                           qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_body(p, end, out));
    qlora__jin_step(p);
    return QLORA_OK;
}

// In a loop, its else part included, no target may be named loop.
static qlora_result qlora__jin_parse_stored(qlora__jin_parser* p, bool attribute,
                                            const char* end_name, qlora__jin_node** out) {
    const qlora__jin_token* first = p->token;
    QLORA__TRY(qlora__jin_parse_target(p, attribute, end_name, out));
    bool field = false; // ns.loop and loop.x are something else
    for (const qlora__jin_token* t = first; t != p->token && p->fors > 0; t++) {
        bool dot = t[1].kind == QLORA__JIN_T_OPERATOR && t[1].text[0] == '.';
        if (qlora__jin_token_is_name(t, "loop") && !field && !dot) {
            p->m->line = t->line;
            return qlora__jin_fail(p->m, "\"loop\" cannot be set in a loop");
        }
        field = t->kind == QLORA__JIN_T_OPERATOR && t->text[0] == '.';
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_set(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_ASSIGN, out));
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_parse_stored(p, true, NULL, &(*out)->a));
    if (qlora__jin_skip_operator(p, "=")) {
        return qlora__jin_parse_tuple(p, true, false, NULL, &(*out)->b);
    }
    (*out)->kind = QLORA__JIN_N_ASSIGN_BLOCK;
    QLORA__TRY(qlora__jin_parse_filter(p, false, &(*out)->b));
    return qlora__jin_parse_whole(p, "endset ", &(*out)->c);
}

static qlora_result qlora__jin_parse_for(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_FOR, out));
    qlora__jin_step(p);
    p->fors++;
    QLORA__TRY(qlora__jin_parse_stored(p, false, "in", &(*out)->a));
    if (!qlora__jin_skip_name(p, "in")) {
        return qlora__jin_unexpected(p, "in");
    }
    QLORA__TRY(qlora__jin_parse_tuple(p, false, false, "recursive", &(*out)->b));
    if (qlora__jin_skip_name(p, "if")) {
        QLORA__TRY(p->expression(p, true, &(*out)->e));
    }
    if (qlora__jin_at_name(p, "recursive")) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "recursive loops are not supported");
    }
    p->loops++;
    QLORA__TRY(qlora__jin_parse_body(p, "endfor else ", &(*out)->c));
    p->loops--;
    if (qlora__jin_skip_name(p, "else")) {
        QLORA__TRY(qlora__jin_parse_body(p, "endfor ", &(*out)->d));
    }
    p->fors--;
    qlora__jin_step(p);
    return QLORA_OK;
}

// An elif is an if in the else part, without an end of its own. It is linked at the end, so that a
// long chain is not a deep tree.
static qlora_result qlora__jin_parse_if(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_IF, out));
    qlora__jin_node* node = *out;
    qlora__jin_step(p);
    for (;;) {
        QLORA__TRY(qlora__jin_parse_tuple(p, false, false, NULL, &node->a));
        QLORA__TRY(qlora__jin_parse_body(p, "elif else endif ", &node->b));
        QLORA__TRY(qlora__jin_node_done(p, node));
        if (qlora__jin_skip_name(p, "elif")) {
            QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_IF, &node->d));
            node = node->d;
            continue;
        }
        if (qlora__jin_skip_name(p, "else")) {
            return qlora__jin_parse_whole(p, "endif ", &node->c);
        }
        qlora__jin_step(p);
        return QLORA_OK;
    }
}

// (a, b=1): a list of names, each with its default.
static qlora_result qlora__jin_parse_signature(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain names;
    bool defaults = false;
    memset(&names, 0, sizeof names);
    QLORA__TRY(qlora__jin_need_operator(p, "("));
    while (!qlora__jin_at_operator(p, ")")) {
        qlora__jin_node* name = NULL;
        if (names.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_target_name(p, false, &name));
        for (const qlora__jin_node* n = names.first; n != NULL; n = n->next) {
            if (n->size == name->size && memcmp(n->name, name->name, n->size) == 0) {
                p->m->line = name->line;
                return qlora__jin_fail(p->m, "an argument of a macro is named twice");
            }
        }
        if (qlora__jin_skip_operator(p, "=")) {
            QLORA__TRY(p->expression(p, true, &name->a));
            defaults = true;
        } else if (defaults) {
            return qlora__jin_unexpected(p, "a default, as the argument before it has one");
        }
        QLORA__TRY(qlora__jin_node_done(p, name));
        qlora__jin_chain_add(&names, name);
    }
    qlora__jin_step(p);
    *out = names.first;
    return QLORA_OK;
}

// The body of a macro or call block is a function of its own: a break cannot leave it.
static qlora_result qlora__jin_parse_function(qlora__jin_parser* p, const char* end,
                                              qlora__jin_node* node) {
    uint32_t loops = p->loops;
    p->loops = 0;
    QLORA__TRY(qlora__jin_parse_whole(p, end, &node->c));
    p->loops = loops;
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_macro(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_MACRO, out));
    qlora__jin_step(p);
    const qlora__jin_token* name = p->token;
    qlora__jin_node* target = NULL;
    QLORA__TRY(qlora__jin_parse_target_name(p, false, &target));
    (*out)->name = name->text;
    (*out)->size = name->size;
    QLORA__TRY(qlora__jin_parse_signature(p, &(*out)->b));
    return qlora__jin_parse_function(p, "endmacro ", *out);
}

static qlora_result qlora__jin_parse_call_block(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CALL_BLOCK, out));
    qlora__jin_step(p);
    if (qlora__jin_at_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_signature(p, &(*out)->b));
    }
    QLORA__TRY(p->expression(p, true, &(*out)->a));
    if ((*out)->a->kind != QLORA__JIN_N_CALL) {
        return qlora__jin_unexpected(p, "a call");
    }
    return qlora__jin_parse_function(p, "endcall ", *out);
}

static qlora_result qlora__jin_parse_generation(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_GENERATION, out));
    qlora__jin_step(p);
    return qlora__jin_parse_function(p, "endgeneration ", *out);
}

static qlora_result qlora__jin_parse_filter_block(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_FILTER_BLOCK, out));
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_parse_filter(p, true, &(*out)->b));
    return qlora__jin_parse_whole(p, "endfilter ", &(*out)->c);
}

static qlora_result qlora__jin_parse_with(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain targets;
    qlora__jin_chain values;
    memset(&targets, 0, sizeof targets);
    memset(&values, 0, sizeof values);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_WITH, out));
    qlora__jin_step(p);
    while (p->token->kind != QLORA__JIN_T_BLOCK_END) {
        qlora__jin_node* item = NULL;
        if (targets.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_target(p, false, NULL, &item));
        qlora__jin_chain_add(&targets, item);
        QLORA__TRY(qlora__jin_need_operator(p, "="));
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&values, item);
    }
    (*out)->a = targets.first;
    (*out)->b = values.first;
    return qlora__jin_parse_whole(p, "endwith ", &(*out)->c);
}

static qlora_result qlora__jin_parse_jump(qlora__jin_parser* p, qlora__jin_node** out) {
    bool leave = qlora__jin_at_name(p, "break");
    if (p->loops == 0) {
        return qlora__jin_unexpected(p, "a loop around break or continue");
    }
    QLORA__TRY(qlora__jin_node_make(p, leave ? QLORA__JIN_N_BREAK : QLORA__JIN_N_CONTINUE, out));
    qlora__jin_step(p);
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_print(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    memset(&items, 0, sizeof items);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OUTPUT, out));
    qlora__jin_step(p);
    while (p->token->kind != QLORA__JIN_T_BLOCK_END) {
        qlora__jin_node* item = NULL;
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&items, item);
    }
    (*out)->a = items.first;
    return QLORA_OK;
}

// Known to jinja2 but without a meaning for a chat template: there is no other template to load.
static qlora_result qlora__jin_parse_other(qlora__jin_parser* p, qlora__jin_node** out) {
    p->m->line = p->token->line;
    (void)out;
    return qlora__jin_fail(p->m, "the tag \"%.*s\" is not supported",
                           (int)(p->token->size < 60 ? p->token->size : 60), p->token->text);
}

typedef struct qlora__jin_tag {
    const char* name;
    qlora__jin_parse_fn parse;
} qlora__jin_tag;

static const qlora__jin_tag qlora__jin_tags[] = {
    {"if", qlora__jin_parse_if},           {"for", qlora__jin_parse_for},
    {"set", qlora__jin_parse_set},         {"macro", qlora__jin_parse_macro},
    {"call", qlora__jin_parse_call_block}, {"filter", qlora__jin_parse_filter_block},
    {"with", qlora__jin_parse_with},       {"generation", qlora__jin_parse_generation},
    {"break", qlora__jin_parse_jump},      {"continue", qlora__jin_parse_jump},
    {"print", qlora__jin_parse_print},     {"block", qlora__jin_parse_other},
    {"include", qlora__jin_parse_other},   {"import", qlora__jin_parse_other},
    {"from", qlora__jin_parse_other},      {"extends", qlora__jin_parse_other},
    {"autoescape", qlora__jin_parse_other}};

static qlora_result qlora__jin_parse_tag(qlora__jin_parser* p, qlora__jin_node** out) {
    if (p->token->kind != QLORA__JIN_T_NAME) {
        return qlora__jin_unexpected(p, "the name of a tag");
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_tags); i++) {
        if (qlora__jin_at_name(p, qlora__jin_tags[i].name)) {
            QLORA__TRY(qlora__jin_tags[i].parse(p, out));
            return qlora__jin_node_done(p, *out);
        }
    }
    p->m->line = p->token->line;
    return qlora__jin_fail(p->m, "unknown tag \"%.*s\"",
                           (int)(p->token->size < 60 ? p->token->size : 60), p->token->text);
}

// Whether the current token is one of the names in "endif else ".
static bool qlora__jin_at_end(const qlora__jin_parser* p, const char* ends) {
    while (ends != NULL && *ends != '\0') {
        size_t size = strcspn(ends, " ");
        if (p->token->kind == QLORA__JIN_T_NAME && p->token->size == size &&
            memcmp(p->token->text, ends, size) == 0) {
            return true;
        }
        ends += size + 1;
    }
    return false;
}

static qlora_result qlora__jin_parse_data(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
    QLORA__TRY(qlora__jin_string_share(p->m, p->token->text, p->token->size, &(*out)->value));
    qlora__jin_step(p);
    return QLORA_OK;
}

// Text and expressions in a row are one output statement.
static qlora_result qlora__jin_parse_output(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    memset(&items, 0, sizeof items);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OUTPUT, out));
    for (;;) {
        qlora__jin_node* item = NULL;
        if (p->token->kind == QLORA__JIN_T_DATA) {
            QLORA__TRY(qlora__jin_parse_data(p, &item));
        } else if (p->token->kind == QLORA__JIN_T_VARIABLE) {
            qlora__jin_step(p);
            QLORA__TRY(qlora__jin_parse_tuple(p, true, false, NULL, &item));
            QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_VARIABLE_END, "}}"));
        } else {
            break;
        }
        qlora__jin_chain_add(&items, item);
    }
    (*out)->a = items.first;
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_statements(qlora__jin_parser* p, const char* ends,
                                                qlora__jin_node** out) {
    qlora__jin_chain body;
    memset(&body, 0, sizeof body);
    while (p->token->kind != QLORA__JIN_T_END) {
        qlora__jin_node* node = NULL;
        if (p->token->kind == QLORA__JIN_T_BLOCK) {
            qlora__jin_step(p);
            if (qlora__jin_at_end(p, ends)) {
                break;
            }
            QLORA__TRY(qlora__jin_parse_tag(p, &node));
            QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_BLOCK_END, "the end of the tag"));
        } else {
            QLORA__TRY(qlora__jin_parse_output(p, &node));
        }
        qlora__jin_chain_add(&body, node);
    }
    *out = body.first;
    return QLORA_OK;
}

// The root is a node with the template in c.
static qlora_result qlora__jin_parse(qlora__jin_machine* m, const char* source, size_t size,
                                     qlora__jin_node** out) {
    qlora__jin_lexer lexer;
    qlora__jin_parser parser;
    memset(&parser, 0, sizeof parser);
    QLORA__TRY(qlora__jin_lex(&lexer, m, source, size));
    parser.m = m;
    parser.token = lexer.tokens;
    parser.expression = qlora__jin_parse_expression;
    parser.unary = qlora__jin_parse_unary;
    parser.negation = qlora__jin_parse_not;
    parser.statements = qlora__jin_parse_statements;
    QLORA__TRY(qlora__jin_node_make(&parser, QLORA__JIN_N_BLOCK, out));
    return qlora__jin_parse_statements(&parser, NULL, &(*out)->c);
}
