# A part uses only what parts before it define: finds names of ours that a part uses and only later
# ones define. Arguments: the parts of a header in the order of its frame. A function is defined
# where its body is, since its declaration may be anywhere; parts that only declare use nothing.
# Names that a macro puts together are not seen, nor are fields and locals.

# Removes comments, strings and characters from `line`, which may begin within a comment.
function code_of(line,    out, at) {
    out = ""
    while (line != "") {
        if (comment) {
            at = index(line, "*/")
            if (at == 0) {
                return out
            }
            comment = 0
            line = substr(line, at + 2)
        } else if (match(line, /"([^"\\]|\\.)*"|'([^'\\]|\\.)+'|\/\/|\/\*/)) {
            out = out substr(line, 1, RSTART - 1)
            at = substr(line, RSTART, 2)
            if (at == "//") {
                return out
            }
            comment = at == "/*"
            out = out (comment ? " " : "0")
            line = substr(line, RSTART + RLENGTH)
        } else {
            return out line
        }
    }
    return out
}

function defines(name) {
    if (name != "" && !(name in first)) {
        first[name] = part
    }
}

FNR == 1 {
    part++
    file[part] = FILENAME
    comment = depth = type_depth = list_depth = 0
    head = ""
    declares = FILENAME ~ /(^|\/)(api\/[a-z_]*|text\/api[a-z_]*|manual)\.h$/
}

{
    text = code_of($0)
    # uses; a pointer to a struct needs no definition
    rest = text
    gsub(/(struct|union)[ \t]+[A-Za-z0-9_]+[ \t]*[*;]/, "", rest)
    while (!declares && match(rest, /(qlora|QLORA|text|jin)_[A-Za-z0-9_]+/)) {
        name = substr(rest, RSTART, RLENGTH)
        before = RSTART > 1 ? substr(rest, RSTART - 1, 1) : ""
        if (before !~ /[A-Za-z0-9_.>#]/ && !((part, name) in line_of)) {
            line_of[part, name] = FNR
            used[++count] = part SUBSEP name
        }
        rest = substr(rest, RSTART + RLENGTH)
    }
    # definitions
    if (text ~ /^[ \t]*#/) {
        if (match(text, /^[ \t]*#[ \t]*define[ \t]+[A-Za-z0-9_]+/)) {
            name = substr(text, RSTART, RLENGTH)
            sub(/.*[ \t]/, "", name)
            defines(name)
        }
        continued = text ~ /\\$/
        next
    }
    if (continued) {
        continued = text ~ /\\$/
        next
    }
    at_start = depth
    opened = gsub(/[{]/, "{", text)
    closed = gsub(/[}]/, "}", text)
    if (at_start == 0) {
        head = head " " text
    }
    if (in_enum && match(text, /^[ \t]*QLORA_[A-Z0-9_]+|^[ \t]*[A-Z][A-Z0-9_]+/)) {
        name = substr(text, RSTART, RLENGTH)
        gsub(/[ \t]/, "", name)
        defines(name)
    }
    depth += opened - closed
    if (at_start == 0 && depth > 0) { # the head of a body or of a type
        in_enum = head ~ /^[ \t]*(typedef[ \t]+)?enum/
        in_type = head ~ /^[ \t]*(typedef[ \t]+)?(struct|enum|union)/
        if (in_type && head !~ /[=(]/) {
            if (match(head, /(struct|enum|union)[ \t]+[A-Za-z0-9_]+/)) {
                name = substr(head, RSTART, RLENGTH)
                sub(/.*[ \t]/, "", name)
                defines(name)
            }
        } else {
            define_head(head)
        }
        head = ""
    } else if (at_start > 0 && depth == 0) {
        if (in_type && match(text, /[}][ \t]*[A-Za-z0-9_]+/)) {
            name = substr(text, RSTART, RLENGTH)
            sub(/[}][ \t]*/, "", name)
            defines(name)
        }
        in_enum = in_type = 0
        head = ""
    } else if (depth == 0 && text ~ /[;}][ \t]*$/) {
        if (opened > 0 || head ~ /=/) {
            if (head ~ /^[ \t]*(typedef[ \t]+)?enum/) {
                define_list(head)
            }
            define_head(head)
        } else if (head ~ /^[ \t]*typedef/) {
            define_typedef(head)
        }
        head = ""
    }
}

# A function with a body, or a table with values: the last name of ours before `(`, `[` or `=`.
function define_head(head,    name) {
    sub(/[=].*/, "", head)
    if (match(head, /[A-Za-z_][A-Za-z0-9_]*[ \t]*[(]/) && head !~ /^[ \t]*static[^(]*[(][*]/) {
        while (match(head, /__attribute__[ \t]*[(][(][^)]*[)]*[)][)]|QLORA__[A-Z]+[(][^)]*[)]/)) {
            head = substr(head, 1, RSTART - 1) substr(head, RSTART + RLENGTH)
        }
        match(head, /[A-Za-z_][A-Za-z0-9_]*[ \t]*[(]/)
        name = substr(head, RSTART, RLENGTH)
        gsub(/[ \t(]/, "", name)
    } else {
        sub(/\[.*/, "", head)
        gsub(/[ \t]+$/, "", head)
        name = head
        sub(/.*[ \t*]/, "", name)
    }
    defines(name)
}

function define_typedef(head,    name) {
    if (match(head, /[(][*][ \t]*[A-Za-z0-9_]+/)) {
        name = substr(head, RSTART + 2, RLENGTH - 2)
    } else {
        sub(/(\[[^]]*\])?[ \t]*;.*/, "", head)
        name = head
        sub(/.*[ \t*]/, "", name)
    }
    defines(name)
}

# An enum in one line.
function define_list(head,    items, n, i) {
    sub(/^[^{]*[{]/, "", head)
    sub(/[}].*/, "", head)
    n = split(head, items, ",")
    for (i = 1; i <= n; i++) {
        sub(/=.*/, "", items[i])
        gsub(/[ \t]/, "", items[i])
        defines(items[i])
    }
}

END {
    for (i = 1; i <= count; i++) {
        split(used[i], u, SUBSEP)
        if (u[2] in first && first[u[2]] > u[1] + 0) {
            print file[u[1]] ":" line_of[u[1], u[2]] ": uses " u[2] " of the later " \
                file[first[u[2]]]
            bad = 1
        }
    }
    n = 0
    for (name in first) {
        n++
    }
    if (n < 1000) {
        print "too few names found: " n
        bad = 1
    }
    exit bad
}
