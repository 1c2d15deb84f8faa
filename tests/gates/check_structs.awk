# Prints every struct or union with more than `most` fields. A struct inside of it is one field.
# Usage: awk -v f=NAME -v most=60 -f tests/gates/check_structs.awk NAME

# One struct, from the line that opens it: fields end with semicolons, and commas divide those of
# one declaration, outside of brackets, which are those of parameters and of lengths.
function count(text,    i, c) {
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "{") {
            depth++
        } else if (c == "}") {
            depth--
            if (depth == 0) {
                return
            }
        } else if (c == "(" || c == "[") {
            round++
        } else if (c == ")" || c == "]") {
            round--
        } else if ((c == ";" || c == ",") && depth == 1 && round == 0) {
            fields++
        }
    }
}
{
    line = $0
    sub(/\/\/.*/, "", line)
}
!start && line ~ /^(typedef |static |const )*(struct|union)( [A-Za-z0-9_]+)? \{/ {
    start = NR
    name = $0
    depth = 0
    round = 0
    fields = 0
}
start {
    count(line)
    if (depth == 0) {
        if (fields > most) {
            print f ":" start ": " fields " fields: " name
            bad = 1
        }
        start = 0
    }
}
END {
    exit bad
}
