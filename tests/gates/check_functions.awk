# Prints every function that is too long: more than `soft` lines without a comment that contains
# "long because", or more than `limit` lines in any case. Prints every function with more than
# `most` parameters, except the one named `except`. Also prints every call that a condition hides
# inside QLORA__TRY(condition ? call : QLORA_OK): that is an if.
# Usage: awk -v f=NAME -v soft=60 -v limit=100 -v most=8 -v except= \
#            -f tests/gates/check_functions.awk NAME

# The number of parameters: commas outside of the parameters' own brackets, in the longest list, as
# an attribute may come before the function's.
function parameters(text,    i, c, depth, count, longest) {
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "(" || c == "[") {
            depth++
            count = depth == 1 ? 1 : count
        } else if (c == ")" || c == "]") {
            depth--
            longest = depth == 0 && count > longest ? count : longest
        } else if (c == "," && depth == 1) {
            count++
        }
    }
    return longest
}
/QLORA__TRY\(/ {
    tried = ""
    trying = 1
}
trying {
    tried = tried $0
}
trying && /;[ \t]*(\\|\/\/.*)?$/ {
    if (tried ~ /\? QLORA_OK[ \t]*:/ || tried ~ /\?.*: QLORA_OK\);/) {
        print f ":" NR ": a call that depends on a condition is an if"
        bad = 1
    }
    trying = 0
}
# A signature starts in column 0 and does not end in a semicolon; it may run over several lines.
/^\/\// {
    if (!inside) {
        comment = comment $0
    }
    next
}
!inside && /^[A-Z][A-Z0-9_]*\(.*\)$/ { # a macro that defines a whole function
    start = 0
    next
}
!inside && !start && /^[A-Za-z_].*\(/ {
    start = NR
    name = $0
    why = comment
    signature = ""
}
!inside && start {
    line = $0
    sub(/\/\/.*/, "", line)
    signature = signature line
}
!inside && start && /\{[ \t]*(\/\/.*)?$/ {
    inside = 1
    if (parameters(signature) > most && !(except != "" && index(signature, except "("))) {
        print f ":" start ": " parameters(signature) " parameters: " name
        bad = 1
    }
}
inside && /long because/ {
    why = why $0
}
inside && /^\}/ {
    lines = NR - start + 1
    if (lines > limit || (lines > soft && why !~ /long because/)) {
        print f ":" start ": " lines " lines: " name
        bad = 1
    }
    inside = 0
    start = 0
}
!inside && /;[ \t]*(\/\/.*)?$/ {
    start = 0
}
!inside && /^#/ {
    start = 0
}
{
    comment = inside || start ? comment : ""
    if (inside) {
        comment = ""
    }
}
END {
    exit bad
}
