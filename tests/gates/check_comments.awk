# Finds comments that a formatter has broken:
#   - a heading whose rule (// ---- title --------) is on the next line
#   - a line that ends in a binary operator or inside a [shape]
#   - a short line that breaks off in the middle of a sentence
#   - a continuation without a space after the slashes
# Usage: awk -f tests/gates/check_comments.awk FILE...

function text(line) {
    sub(/^ *\/\/ ?/, "", line)
    return line
}

function indent(line) {
    match(line, /^ */)
    return RLENGTH
}

function report(why) {
    print FILENAME ":" FNR ": " why ": " $0
    bad = 1
}

FNR == 1 {
    before = ""
}

/^ *\/\/[A-Za-z]/ {
    report("no space after //")
}

/^ *\/\// && before != "" && indent(before) == indent($0) {
    old = text(before)
    new = text($0)
    split(new, word, " ")
    prose = old !~ /^ / && new ~ /^[a-z0-9(.\/$]/ && old !~ /clang-format|GENERATED/
    prose = prose && new !~ /^(groups|targets): /
    if (new ~ /^--------/) {
        report("the rule of a heading is on a line of its own")
    } else if (old ~ /[^ ] [=+*\/]$/ || old ~ /\[[^])]*$/) {
        report("the line before ends inside a formula")
    } else if (old != "" && prose && old !~ /[.:;,!?]$/ && length(before) + length(word[1]) < 85) {
        report("the line before ends too early")
    }
}

{
    before = /^ *\/\// ? $0 : ""
}

END {
    exit bad
}
