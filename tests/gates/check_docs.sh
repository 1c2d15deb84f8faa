#!/usr/bin/env bash
# check_docs.sh - what the documents name must exist: links, files, options of programs, functions,
# macros, targets of make, and figures. Usage: tests/gates/check_docs.sh; part of the gate `readme`,
# which also compiles and runs the programs in them. One line per finding; the status is 1 then.
# The changelog and docs/history.md name what existed at the time, so only their links are checked.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
bad=0
pages=()
for page in ./*.md docs/*.md tests/README.md; do
    [[ $page == docs/history.md || $page == ./CHANGELOG.md ]] || pages+=("${page#./}")
done

fault() {
    echo "$*"
    bad=1
}

# Prints the sources of a program.
sources_of() {
    case $1 in
    bench) ls tests/bench/*.[ch] ;;
    golden) ls tests/golden/golden*.[ch] ;;
    embed) ls tools/embed.c ;;
    tests) ls tests/unit/main.c ;;
    *) find programs/"$1".c programs/"$1" programs/*.h -type f 2>/dev/null ;;
    esac
    return 0
}

# Options: "NAME OPTION PAGE:LINE" of every `build/NAME --option` until the end of the line or span
# of code.
options_of() {
    awk '{
        text = $0
        while (match(text, /build\/[a-z_]+ [^`#|]*/)) {
            n = split(substr(text, RSTART + 6, RLENGTH - 6), word, /[ =]+/)
            for (i = 1; i <= n; i++) {
                name = i == 1 ? word[1] : word[i] ~ /^build\/[a-z_]+$/ ? substr(word[i], 7) : name
                if (word[i] ~ /^--[a-z]/) print name, word[i], FILENAME ":" FNR
            }
            text = substr(text, RSTART + RLENGTH)
        }
    }' "$@" | sort -u -k 1,2
}

awk -f tests/gates/check_links.awk ./*.md docs/*.md tests/README.md || bad=1
tools/tables.sh --check || bad=1

# Options of a program, and options that are named alone.
while read -r name option at; do
    sources_of "$name" | xargs grep -qE "\"(--)?${option#--}\"" -- ||
        fault "$at: $name has no option $option"
done < <(options_of "${pages[@]}")
all=$(cat Makefile tools/* tests/*.sh tests/*.py tests/gates/*.sh tests/bench/* tests/unit/main.c \
    tests/golden/*.[ch] programs/*.[ch] programs/*/*.h programs/*/*/*.h)
while read -r option; do
    [[ $option == --rope-scaling ]] && continue # of llama.cpp
    [[ $all == *"\"${option#--}\""* || $all == *"\"$option"* || $all == *"$option)"* ||
        $all == *" $option "* ]] || fault "no program has the option $option: $(
        grep -nFe "$option" "${pages[@]}" | head -1 | cut -c 1-80)"
done < <(grep -hoE '`--[a-z][a-z0-9-]+' "${pages[@]}" | tr -d '`' | sort -u)

# Functions, macros and environment variables.
known=$(cat qlora.h qlora_text.h tests/unit/main.c tests/*.sh CMakeLists.txt \
    <(sed '/^static/d; /^"/d' kernels_ptx.h) kernels/*/*.cu* |
    grep -oE '(QLORA|qlora)_[A-Za-z0-9_]+' | sort -u)
names=$(comm -23 <(grep -hoE '\b(QLORA|qlora)_[A-Za-z0-9_]+' "${pages[@]}" | sed 's/_$//' |
    sort -u) <(sort -u <<<"$known") | grep -vE '^qlora_(NAME|noun|_noun)' |
    while read -r name; do
        grep -qE "^$name" <<<"$known" || grep -nF "$name" "${pages[@]}" | head -1 |
            sed "s/^\([^:]*:[0-9]*\):.*/\1: nothing is called $name/"
    done)
[[ -z $names ]] || fault "$names"

# Files, and targets of make.
while read -r name; do
    [[ $name =~ NAME|X\. || -e $name || $name == *_ ]] || fault "no such file: $name: $(
        grep -nF "$name" "${pages[@]}" | head -1 | cut -c 1-80)"
done < <(grep -hoE '`(src|tests|programs|kernels|tools|docs|examples)/[A-Za-z0-9_./-]+' \
    "${pages[@]}" | tr -d '`' | sort -u)
while read -r name; do
    grep -qE "^$name:|[$][(]B[)]/${name#build/}( |:|\$)" Makefile || fault "no target: make $name"
done < <(grep -hoE '(`|^)make [a-z][a-z_/-]*' "${pages[@]}" | awk '{ print $2 }' | sort -u)

# The README fits a page, and the figures in its table are rows of docs/speed.csv.
awk 'END { exit NR > 140 }' README.md || fault "README.md has more than 140 lines"
awk 'length > 110 { print FILENAME ":" FNR ": over 110 columns"; bad = 1 } END { exit bad }' \
    README.md || bad=1
awk -F '[|,] *' 'FILENAME ~ /csv$/ { split($0, f, ","); have[f[2] " " f[5]] = 1; next }
    /^\| [A-Z].*[0-9]B/ {
        shape = tolower($2)
        sub(/ *$/, "", shape)
        text = $0
        while (match(text, /[0-9]+,[0-9][0-9][0-9]/)) {
            figure = substr(text, RSTART, RLENGTH)
            text = substr(text, RSTART + RLENGTH)
            sub(/,/, "", figure)
            if (!((shape " " figure) in have)) {
                print FILENAME ":" FNR ": docs/speed.csv has no row " shape " " figure
                bad = 1
            }
            seen++
        }
    }
    END { exit bad || !seen }' docs/speed.csv README.md || fault "README.md: its table of figures"

# Every family of src/arch.h has a row that says how it is tested.
while read -r name; do
    awk -F '|' -v name="$name" '$3 ~ "`" name "`" && NF == 5 && $4 !~ /`[A-Za-z]*For/ { found = 1 }
        END { exit !found }' docs/models.md || fault "docs/models.md: no row for \`$name\`"
done < <(sed -nE 's/^ *\{QLORA_FAMILY_[A-Z0-9_]+, "([a-z0-9_]+)".*/\1/p' src/arch.h)
exit $bad
