#!/usr/bin/env bash
# check.sh - the gates of `make check`. Usage: tests/gates/check.sh [--list | GATE...]
#
# Each gate prints one line: ok, FAIL or skip, its name, its seconds, and why it was skipped. A
# failure prints what the gate found. The status is 1 when a gate failed. gates.sh plants a defect
# for every gate and sees it caught.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

MAKE=${MAKE:-make}
CLANG=${CLANG:-clang}
NVCC=${NVCC:-nvcc}
PTXAS=${PTXAS:-ptxas}
OUT=build/check
mkdir -p $OUT

WARN="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-align -Wvla"
WARN="$WARN -Werror"
WARN_C="$WARN -Wstrict-prototypes -Wmissing-prototypes"
LIBS="-lm -lpthread -ldl"
MACROS="QLORA_STATIC QLORA_DLL QLORA_NO_CUDA QLORA_NO_MODEL QLORA_ASSERT QLORA_KERNELS_HEADER"
MACROS="$MACROS QLORA_DEBUG"
PTX_TARGETS="75 80 86 87 89 90 100 103 110 120 121"
SKIP=77

# ---- what the gates share; each runs in a shell of its own, so `bad` is its own ----

bad=0

fault() {
    echo "$*"
    bad=1
}

# Every line that comes in is a fault.
faults() {
    local prefix=$1 line
    while IFS= read -r line; do
        fault "$prefix$line"
    done
}

# The gate is left out; the reason is its last line.
skip() {
    echo "$*"
    exit $SKIP
}

have() {
    command -v "$1" >/dev/null 2>&1
}

need() {
    local tool
    for tool in "$@"; do
        have "$tool" || skip "$tool not found"
    done
}

need_file() {
    local file
    for file in "$@"; do
        [[ -e $file ]] || skip "there is no $file"
    done
}

compilers() {
    have gcc && echo gcc
    have "$CLANG" && echo "$CLANG"
}

# The first compiler whose programs run with these flags.
compiler_with() {
    local cc
    for cc in $CLANG gcc; do
        if have "$cc" && echo 'int main(void) { return 0; }' >$OUT/probe.c &&
            "$cc" "$@" -o $OUT/probe $OUT/probe.c 2>/dev/null && $OUT/probe 2>/dev/null; then
            echo "$cc"
            return
        fi
    done
}

# Runs the command lines of a file, two at a time; fails when one does.
run_all() {
    [[ -s $1 ]] || { fault "nothing to run"; return; }
    xargs -P 2 -d '\n' -I LINE bash -c 'LINE' <"$1" || bad=1
}

# Text files of the repository, also where there is no git.
files() {
    if have git && git rev-parse --git-dir >/dev/null 2>&1; then
        git ls-files -co --exclude-standard
    else
        find . -type f -not -path './build/*' -not -path './.git/*' | sed 's,^\./,,'
    fi | while read -r f; do [[ -s $f ]] && grep -Iq . "$f" && echo "$f"; done
}

# Recorded data is not ours to wrap.
sources() {
    files | grep -E '(\.(c|cpp|h|cu|cuh|sh|awk|md)|Makefile|\.ci/run|LICENSE)$' |
        grep -v '^tests/golden/'
}

# ---- text ----

gate_text() {
    local f
    while read -r f; do
        faults "$f: not ASCII: " < <(LC_ALL=C grep -n '[^ -~[:cntrl:]]' "$f" | head -3)
        faults "$f: CR: " < <(grep -n $'\r' "$f" | head -3)
        faults "$f: trailing blank: " < <(grep -nE '[ '$'\t'']+$' "$f" | head -3)
        [[ $(tail -c 1 "$f" | wc -l) -eq 1 ]] || fault "$f: no newline at the end"
        if [[ $f != Makefile ]]; then
            faults "$f: tab: " < <(grep -n $'\t' "$f" | head -3)
        fi
        if [[ $f != kernels_ptx.h && $f != *.md ]]; then
            faults "$f: over 100 columns: " < <(LC_ALL=C grep -nE '^.{101,}' "$f" | head -3)
        fi
    done < <(sources)
}

# Nobody's machine stands in the repository.
gate_paths() {
    faults "" < <(files | grep -vE '^tests/gates/(check|gates).sh$' |
        xargs grep -nE '(^|[^A-Za-z0-9_./-])/(work|root|home)/' -- | head -5)
}

# The committed headers are what their parts give; an edit of one is refused, with its part named.
gate_assembled() {
    local h d=$OUT/assembled
    rm -rf $d
    mkdir -p $d
    $MAKE -s build/amalgamate || return 1
    for h in qlora.h qlora_text.h; do
        build/amalgamate --check src/$h $h || bad=1
    done
    [[ $bad -eq 0 ]] || return 1
    cp -r src qlora.h $d/
    sed -i 's/^    return y;$/    return -y;/' $d/qlora.h
    sed -i '0,/^#define QLORA_VERSION_MINOR/s/^#define QLORA_VERSION_MINOR/& 7 \/\//' $d/qlora.h
    (cd $d && ../../amalgamate src/qlora.h qlora.h) >$d/log 2>&1 && fault "an edit is overwritten"
    grep -q '^  src/api/linkage.h:' $d/log ||
        fault "the part of an edit is not named: $(cat $d/log)"
    cmp -s qlora.h $d/qlora.h && fault "the edit was not planted, or is lost"
    # Every line of the header has the same text as the line that --where names.
    local line at
    for line in 7 200 1500 9000 15000; do
        at=$(build/amalgamate --where $line src/qlora.h) || bad=1
        [[ $(sed -n "${line}p" qlora.h) == "$(sed -n "${at##*:}p" "${at%:*}")" ]] ||
            fault "line $line is not $at"
    done
}

# The first words of the lines of CONTENTS.
contents_of() {
    awk '/^ *CONTENTS/ { on = 1; next }
        on && /^ *[a-z_\/]+  +[^ ]/ { print $1; seen = 1; next }
        on && seen && /^ *$/ { exit }' "$1"
}

# CONTENTS and the banners of a header: the same floors in the same order.
gate_contents() {
    need_file qlora.h
    contents_of qlora.h >$OUT/contents
    sed -n 's,^//@@ src/,,p' qlora.h | grep -v '^qlora\.h$' | sed 's,/.*,,; s,\.h$,,' |
        uniq >$OUT/floors
    [[ -s $OUT/floors ]] || fault "no banners"
    diff $OUT/contents $OUT/floors || fault "CONTENTS (<) and floors (>) differ"
    # qlora_text.h: its own rooms one by one, of the shared floors only the name.
    contents_of qlora_text.h >$OUT/contents
    sed -n 's,^//@@ src/,,p' qlora_text.h | grep -vE '^(qlora_text|text/manual)\.h$' |
        sed 's,\.h$,,; /^text/!s,/.*,,' | uniq >$OUT/floors
    [[ -s $OUT/floors ]] || fault "qlora_text.h: no banners"
    diff $OUT/contents $OUT/floors || fault "qlora_text.h: CONTENTS (<) and parts (>) differ"
}

# A part uses only parts before it: the frame is compiled with the parts after each one left out,
# and whatever is then used but not defined lies above. A static prototype would only hide that.
gate_layers() {
    need gcc
    local frame macro d=$OUT/layers n k
    rm -rf $d
    mkdir -p $d
    for frame in qlora qlora_text; do
        macro=QLORA_IMPLEMENTATION
        [[ $frame == qlora ]] || macro=QLORA_TEXT_IMPLEMENTATION
        n=$(grep -c '^#include "' src/$frame.h)
        for ((k = 1; k <= n; k++)); do
            awk -v k=$k '/^#include "/ && ++seen > k { next } { print }' src/$frame.h \
                >$d/$frame.$k.h
            echo "gcc -std=c99 -I. -Isrc -DQLORA_STATIC -D$macro -x c -fsyntax-only -Wall" \
                "-Wno-unused-function -Wno-unused-const-variable -Wno-unused-variable" \
                "-D_POSIX_C_SOURCE=200809L -Werror $d/$frame.$k.h"
        done
    done >$d/commands
    xargs -P 2 -d '\n' -I LINE bash -c 'LINE' <$d/commands >$d/log 2>&1 || bad=1
    grep -hoE '[a-z/_0-9]+\.h:[0-9]+:.*(never defined|undeclared|implicit).*' $d/log |
        sort -u | head -20
    faults "a prototype that hides a call upwards: " < <(awk '
        FNR == 1 { text = "" } /^static [^=]*\(/ { text = $0; at = FNR }
        text != "" && FNR > at { text = text $0 }
        text ~ /\{/ { text = "" }
        text ~ /;/ { if (text ~ /\) *;/) print FILENAME ":" at ": " text; text = "" }' \
        src/*.h src/*/*.h | grep -v __attribute__)
}

# Library: 60 lines, to 100 with a reason. A kernel, whose parts share registers: to 200 with a
# reason. A test, often a table: 100, more with a reason.
gate_functions() {
    local f soft limit
    while read -r f; do
        soft=60
        limit=100
        [[ $f == kernels/*.cu* ]] && limit=200
        [[ $f == tests/* ]] && soft=100 limit=1000
        awk -v f="$f" -v soft=$soft -v limit=$limit -f tests/gates/check_functions.awk "$f" || bad=1
    done < <(sources | grep -E '\.(c|cpp|h|cu|cuh)$' | grep -vE '^(kernels_ptx|qlora.*)\.h$')
}

gate_words() {
    need_file qlora.h
    awk -f tests/gates/check_words.awk qlora.h || bad=1
    awk -f tests/gates/check_words.awk qlora_text.h || bad=1
}

gate_scripts() {
    local f
    for f in tests/*.sh tests/*/*.sh tools/*.sh .ci/run; do
        [[ -e $f ]] || continue
        bash -n "$f" || bad=1
        [[ -x $f ]] || fault "$f is not executable"
        if have shellcheck; then
            shellcheck -S warning "$f" || bad=1
        fi
    done
}

# ---- compiling ----

macro_flag() {
    case $1 in
    QLORA_ASSERT) echo '-DQLORA_ASSERT(x)=((void)(x))' ;;
    QLORA_KERNELS_HEADER) echo '-DQLORA_KERNELS_HEADER="tests/gates/compile/other_kernels.h"' ;;
    *) echo "-D$1" ;;
    esac
}

# The command lines of one compiler and language: one run at -O2, then every macro with the second
# command, which may be a quicker one.
warning_lines() {
    local run="$2" macro all=""
    echo "$1 -O2 tests/gates/compile/config.c"
    echo "$run tests/gates/compile/declarations.c"
    echo "$run tests/gates/compile/after_declarations.c"
    echo "$run -DNDEBUG -DQLORA_NO_CUDA -DQLORA_NO_MODEL tests/gates/compile/config.c"
    for macro in $MACROS; do
        all="$all '$(macro_flag "$macro")'"
        echo "$run '$(macro_flag "$macro")' tests/gates/compile/config.c"
        # Declarations alone with QLORA_STATIC would be functions that nobody defines.
        [[ $macro == QLORA_STATIC ]] ||
            echo "$run '$(macro_flag "$macro")' tests/gates/compile/declarations.c"
    done
    echo "$run $all tests/gates/compile/config.c"
}

gate_warnings() {
    need_file qlora.h
    local cc c cxx
    [[ -n $(compilers) ]] || skip "neither gcc nor $CLANG found"
    for cc in $(compilers); do
        c="$cc -I. -std=c99 $WARN_C -o /dev/null -c"
        cxx="$cc -I. -x c++ -std=c++11 $WARN -o /dev/null -c"
        # gcc finds functions that nobody calls only when it compiles; once in C is enough.
        if [[ $cc == gcc ]]; then
            warning_lines "$c" "$c"
        else
            warning_lines "$c" "${c% -c} -fsyntax-only"
        fi
        warning_lines "$cxx" "${cxx% -c} -fsyntax-only"
        # Flags that users bring.
        echo "$c -O2 -ffast-math -funsigned-char tests/gates/compile/config.c"
        echo "$c -std=c11 -fsigned-char -fsyntax-only tests/gates/compile/config.c"
        echo "$cxx -std=c++17 -fno-exceptions -fno-rtti -fsyntax-only tests/gates/compile/config.c"
    done >$OUT/warnings.commands
    run_all $OUT/warnings.commands
}

gate_link() {
    need_file qlora.h
    need gcc
    local d=$OUT/link t=tests/gates/compile a b ld=gcc
    rm -rf $d
    mkdir -p $d
    gcc -I. -std=c99 -O1 -c -o $d/b_c.o $t/two_b.c || bad=1
    gcc -I. -std=c99 -c -o $d/a_c.o $t/two_a.c || bad=1
    if have g++; then
        ld=g++
        g++ -I. -x c++ -std=c++11 -O1 -c -o $d/b_cxx.o $t/two_b.c || bad=1
        g++ -I. -x c++ -std=c++11 -c -o $d/a_cxx.o $t/two_a.c || bad=1
    fi
    for a in $d/a_*.o; do
        for b in $d/b_*.o; do
            # shellcheck disable=SC2086
            { $ld -o $d/two "$a" "$b" $LIBS && $d/two >/dev/null; } ||
                fault "$a and $b do not link and run"
        done
    done
    # shellcheck disable=SC2086
    { gcc -I. -std=c99 -o $d/static $t/static_a.c $t/static_b.c $LIBS && $d/static; } ||
        fault "two private copies do not live in one program"
    # shellcheck disable=SC2086
    { gcc -I. -std=c99 -o $d/after $t/after_declarations.c $LIBS && $d/after; } ||
        fault "declarations first, then the implementation: fails"
    # shellcheck disable=SC2086
    if gcc -o $d/none $d/a_c.o $LIBS 2>/dev/null; then
        fault "a program links without the implementation"
    fi
    # A system header first: it works, or our own words say what to do; and that helps.
    if ! gcc -I. -std=c99 -c -o /dev/null $t/late.c 2>$d/late.log; then
        grep -q '#error.*_POSIX_C_SOURCE=200809L' $d/late.log ||
            fault "a system header first: no helpful #error: $(head -3 $d/late.log)"
    fi
    gcc -I. -std=c99 -D_POSIX_C_SOURCE=200809L -c -o /dev/null $t/late.c ||
        fault "a system header first, with -D_POSIX_C_SOURCE=200809L: fails"
}

# symbols_of PREFIX CONFIG.c DECLARATIONS.c MACRO...: what the object of the implementation exports,
# calls and keeps, under each macro. The last one is the default, DEFAULT.
symbols_of() {
    local prefix=$1 config=tests/gates/compile/$2 declarations=tests/gates/compile/$3 name
    local never="exit|_exit|abort|printf|puts|putchar|vprintf|__assert_fail|getenv"
    shift 3
    for name in "$@"; do
        gcc -I. -std=c99 -O1 "-D$name" -c -o $OUT/symbols.o "$config" || { bad=1; return; }
        nm -g --defined-only $OUT/symbols.o | awk '{ print $NF }' | sort -u >$OUT/defined
        faults "$name: exported, but not public: " < <(grep -vE "^${prefix}[a-z0-9]" $OUT/defined)
        if [[ $name == QLORA_STATIC ]]; then
            faults "$name: exported: " <$OUT/defined
        fi
        faults "$name: writable: " < <(objdump -t $OUT/symbols.o |
            grep -E ' O (\.(data|bss|tdata|tbss)|\*COM\*)' | grep -v '\.data\.rel\.ro')
        faults "$name: calls " < <(nm -u $OUT/symbols.o | awk '{ print $NF }' | grep -xE "($never)")
    done
    # Every declared function exists. The object of the last round is the default one.
    gcc -I. -E -P "$declarations" | tr '\n' ' ' | tr ';' '\n' | grep 'extern' |
        grep -oE 'qlora_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >$OUT/declared
    [[ -s $OUT/declared ]] || fault "no declarations found"
    faults "declared, not defined: " < <(comm -23 $OUT/declared $OUT/defined)
    faults "defined, not declared: " < <(comm -13 $OUT/declared $OUT/defined)
}

gate_symbols() {
    need_file qlora.h
    need gcc nm objdump
    symbols_of qlora_ config.c declarations.c QLORA_STATIC QLORA_NO_CUDA QLORA_DEBUG QLORA_DLL \
        DEFAULT
}

# qlora_text.h: alone, beside qlora.h in both orders, in two units, in both languages.
gate_text_header() {
    need_file qlora.h qlora_text.h
    need gcc nm objdump
    local d=$OUT/text_header t=tests/gates/compile cc c cxx first macro
    rm -rf $d
    mkdir -p $d
    for cc in $(compilers); do
        c="$cc -I. -std=c99 $WARN_C"
        cxx="$cc -I. -x c++ -std=c++11 $WARN"
        echo "$c -O2 -c -o /dev/null $t/text_config.c"
        echo "$c -fsyntax-only $t/text_declarations.c"
        echo "$cxx -fsyntax-only $t/text_config.c"
        echo "$cxx -fsyntax-only $t/text_declarations.c"
        for macro in QLORA_STATIC QLORA_DLL QLORA_NO_MODEL QLORA_NO_CUDA; do
            echo "$c -D$macro -fsyntax-only $t/text_config.c"
        done
        echo "$c -DQLORA_STATIC -fsyntax-only $t/text_both.c"
        echo "$c -DQLORA_NO_MODEL -fsyntax-only $t/text_both.c"
        echo "$c -DQLORA_NO_MODEL -DTEXT_FIRST -fsyntax-only $t/text_both.c"
        echo "$c -DQLORA_NO_CUDA -DTEXT_FIRST -fsyntax-only $t/text_both.c"
        echo "$cxx -fsyntax-only $t/text_both.c"
        echo "$cxx -DTEXT_FIRST -fsyntax-only $t/text_both.c"
    done >$d/commands
    run_all $d/commands
    # One unit, each order; then two units. Alone it links with the C library only.
    gcc -I. -std=c99 -o $d/alone $t/text_alone.c && $d/alone tests/golden/text_spm.json ||
        fault "qlora_text.h alone does not link and run"
    for first in QLORA_FIRST TEXT_FIRST; do
        # shellcheck disable=SC2086
        { gcc -I. -std=c99 -D$first -o $d/both $t/text_both.c $LIBS && $d/both; } ||
            fault "both headers in one unit, $first: do not link and run"
    done
    gcc -I. -std=c99 -c -o $d/a.o $t/text_two_a.c || bad=1
    gcc -I. -std=c99 -c -o $d/b.o $t/text_two_b.c || bad=1
    gcc -I. -std=c99 -DQLORA_NO_MODEL -c -o $d/c.o $t/two_b.c || bad=1
    # shellcheck disable=SC2086
    { gcc -o $d/two $d/a.o $d/b.o $d/c.o $LIBS && $d/two >/dev/null; } ||
        fault "two units do not link and run"
    # Headers of different versions.
    mkdir -p $d/other
    cp qlora.h kernels_ptx.h $d/other/
    sed 's/\(QLORA_VERSION_PATCH\) 0$/\1 1/; s/\(QLORA_VERSION_PATCH\) != 0/\1 != 1/' qlora_text.h \
        >$d/other/qlora_text.h
    if gcc -I$d/other -std=c99 -fsyntax-only $t/text_both.c 2>$d/version.log; then
        fault "headers of different versions compile together"
    fi
    grep -q '#error.*different versions' $d/version.log ||
        fault "headers of different versions: no helpful #error: $(head -3 $d/version.log)"
    symbols_of qlora_text_ text_config.c text_declarations.c QLORA_STATIC QLORA_DLL DEFAULT
}

# Macros that qlora.h and kernels_ptx.h leave behind, by the line markers of the preprocessor.
macros_left() {
    gcc -I. -std=c99 -E -dD "$1" | awk '
        /^# [0-9]+ "/ { ours = ($3 ~ /(qlora|kernels_ptx)\.h"/) }
        /^#define / { name = $2; sub(/\(.*/, "", name); if (ours) left[name] = 1 }
        /^#undef / { delete left[$2] }
        END { for (name in left) print name }' | sort
}

gate_macros() {
    need_file qlora.h
    need gcc
    local ok='^(QLORA|_POSIX_C_SOURCE$|_DARWIN_C_SOURCE$|_FILE_OFFSET_BITS$)'
    faults "left behind: " < <(macros_left tests/gates/compile/config.c | grep -vE "$ok")
    faults "left behind by the declarations: " < <(macros_left tests/gates/compile/declarations.c |
        grep -E '^(QLORA__|QLORA_X_)|^[^Q]')
    faults "private name among the declarations: " < <(
        gcc -I. -E -P tests/gates/compile/declarations.c |
        grep -oE '\bqlora__[a-z_]+' | sort -u)
}

# No function calls itself, directly or by way of others (calls through pointers are not seen).
gate_recursion() {
    need_file qlora.h
    need gcc tsort
    rm -f $OUT/calls*
    gcc -I. -std=c99 -O0 -fcallgraph-info -c -o $OUT/calls.o tests/gates/compile/config.c \
        2>/dev/null || skip "this gcc has no -fcallgraph-info"
    sed -n 's/^edge: { sourcename: "\([^"]*\)" targetname: "\([^"]*\)".*/\1 \2/p' $OUT/calls*.ci |
        sed 's,[^ ]*:,,g' | grep -v '__indirect_call' | sort -u >$OUT/calls
    [[ -s $OUT/calls ]] || fault "no call graph"
    faults "calls itself: " < <(awk '$1 == $2 { print $1 }' $OUT/calls)
    faults "" < <(tsort $OUT/calls 2>&1 >/dev/null | head -20)
}

# Everything else that is compiled, with both compilers and -Werror.
gate_programs() {
    local cc b
    for cc in $(compilers); do
        b=build/check-$(basename "$cc")
        $MAKE -s -j2 all "$b/embed" "B=$b" CC="$cc" CFLAGS=-Werror || bad=1
        [[ ! -e kernels_ptx.h ]] || $MAKE -s "$b/ptx-tool" "B=$b" CC="$cc" CFLAGS=-Werror || bad=1
    done
}

# Examples: short, with a compile command on top that works, and they run on both backends.
gate_examples() {
    local f name
    $MAKE -s -j2 all || return 1
    for f in examples/*.c; do
        name=$(basename "$f" .c)
        [[ $(wc -l <"$f") -le 120 ]] || fault "$f is longer than 120 lines"
        head -12 "$f" | sed -n 's,^//[ $]*\(cc .*\),\1,p' | head -1 |
            sed "s, -o [^ ]*, -o $OUT/$name,; s,^cc ,cc -Werror ," >"$OUT/$name.command"
        grep -q "$name" "$OUT/$name.command" || fault "$f: no compile command on top"
        bash "$OUT/$name.command" || fault "$f: the compile command on top fails"
        grep -q '^// check: needs ' "$f" && continue
        build/"$name" >"$OUT/$name.out" 2>&1 || fault "$name fails: $(tail -5 "$OUT/$name.out")"
        if [[ -e build/fake/libcuda.so.1 ]]; then
            LD_LIBRARY_PATH=build/fake build/"$name" >"$OUT/$name.out" 2>&1 ||
                fault "$name fails on the fake GPU: $(tail -5 "$OUT/$name.out")"
        fi
    done
}

# The programs as a user meets them.
gate_use() {
    local script out
    $MAKE -s -j2 examples || return 1
    for script in tests/gates/use_programs.sh tests/gates/use_tools.sh; do
        out=$OUT/$(basename "$script" .sh).out
        "$script" >"$out" 2>&1 || fault "$script: $(grep -A8 '^FAIL' "$out"; tail -1 "$out")"
    done
}

# C blocks of README.md whose first line names a file (`// hello.c`) are written out; then every
# line of its sh blocks that starts with `cc ` is run beside them, and the program that it makes.
gate_readme() {
    need_file README.md qlora.h kernels_ptx.h
    local d=$OUT/readme line out
    rm -rf $d
    mkdir -p $d
    ln -s "$PWD/qlora.h" "$PWD/kernels_ptx.h" "$PWD/qlora_text.h" $d/
    awk -v d=$d '/^```c$/ { on = 1; first = 1; next } /^```/ { on = 0; file = "" }
        on && first && match($0, /[A-Za-z0-9_]+\.c/) { file = d "/" substr($0, RSTART, RLENGTH) }
        on { first = 0; if (file != "") print > file }' README.md
    awk '/^```(sh|bash|console)$/ { on = 1; next } /^```/ { on = 0 }
        on && sub(/^(\$ )?cc /, "cc ")' README.md >$d/commands
    [[ -s $d/commands ]] || fault "README.md shows no compile command"
    while read -r line; do
        out=$(sed -n 's/.* -o \([^ ]*\).*/\1/p' <<<"$line")
        (cd $d && bash -c "${line%%&&*}") || { fault "fails: $line"; continue; }
        (cd $d && "./${out:-a.out}" >/dev/null 2>&1) || fault "does not run: ${out:-a.out}"
    done <$d/commands
    while read -r line; do
        grep -qE "^$line:" Makefile || fault "README.md: no such target: make $line"
    done < <(grep -oE '`make [a-z-]+' README.md | awk '{ print $2 }' | sort -u)
}

# ---- kernels ----

gate_ptx_fresh() {
    need_file kernels_ptx.h
    $MAKE -s build/ptx-tool || return 1
    build/ptx-tool --check kernels_ptx.h kernels/* || bad=1
}

gate_ptx_same() {
    need_file kernels_ptx.h
    need "$NVCC"
    local mine theirs
    mine=$($NVCC --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')
    theirs=$(sed -n 's,^// nvcc ,,p' kernels_ptx.h)
    [[ $mine == "$theirs" ]] || skip "kernels_ptx.h is of nvcc $theirs, here is $mine"
    $MAKE -s build/embed || return 1
    $MAKE -s -j2 ptx-header OUT=$OUT/kernels_ptx.h \
        TEXTS="$(build/embed --texts build/ptx kernels/*.cu | tr '\n' ' ')" || return 1
    cmp kernels_ptx.h $OUT/kernels_ptx.h || bad=1
}

# What qlora.h would hand to a driver, for every target, through the assembler.
gate_ptx_assemble() {
    need_file kernels_ptx.h
    need "$PTXAS"
    local module target text known d=$OUT/ptx
    rm -rf $d
    mkdir -p $d
    $MAKE -s build/ptx-tool || return 1
    known=$($PTXAS --help | tr -c 'a-z0-9_' '\n' | grep '^sm_' | sort -u)
    {
        for module in $(build/ptx-tool --list | awk '{ print $1 }' | sort -u); do
            for target in $PTX_TARGETS; do
                echo "$module $target"
            done
        done
        # A text for one target only, such as sm_90a.
        build/ptx-tool --list | sed -n 's/^\([^ ]*\) sm_\([0-9]*a\) .*/\1 \2/p'
    } >$d/wanted
    while read -r module target; do
        text=$d/$module.$target
        if ! grep -qx "sm_$target" <<<"$known"; then
            echo "(this ptxas does not know sm_$target)" >&2
        elif build/ptx-tool --emit "$module" "sm_$target" >"$text.ptx" 2>/dev/null; then
            echo "$PTXAS -arch=sm_$target -o $text.cubin $text.ptx"
        elif [[ $target != 75 ]]; then
            echo "echo no text of $module for sm_$target; false"
        fi
    done <$d/wanted >$d/commands
    run_all $d/commands
    faults "not our name: " < <(grep -hoE '\.visible \.entry [A-Za-z0-9_$]+' $d/*.ptx |
        awk '$3 !~ /^qlora_/ { print $3 }' | sort -u)
}

# The embedder itself: what it keeps of a text, its hashes, its refusals.
gate_embed() {
    local d=$OUT/embed t=tests/gates/compile/embed n
    rm -rf $d
    mkdir -p $d
    $MAKE -s build/embed || return 1
    printf '// targets: 80\n' >$d/marked.cu
    printf 'comma gamma\n' >$d/plain.cu
    printf 'asm("mma.sync.aligned");\n' >$d/tensor.cu
    printf 'cp.async\n' >$d/copy.cu
    for n in "marked 80" "plain 75 80" "tensor 80" "copy 80"; do
        [[ "${n%% *} $(build/embed --targets "$d/${n%% *}.cu")" == "$n" ]] ||
            fault "wrong targets: $n"
    done
    cp $t/plain.ptx $d/plain.sm_75.ptx
    sed 's/$/ /; s/%tid.x/%ntid.x/' $t/plain.ptx >$d/plain.sm_80.ptx
    for n in 1 2; do
        build/embed --write $d/$n.h --nvcc 1.2 $d/plain.cu $d/plain.sm_80.ptx $d/plain.sm_75.ptx ||
            return 1
    done
    cmp $d/1.h $d/2.h || fault "two runs differ"
    gcc -std=c99 $WARN_C -DEMBED_TABLE="\"$PWD/$d/1.h\"" -o $d/tool tools/embed.c || return 1
    $d/tool --check $d/1.h $d/plain.cu || fault "its own output does not pass"
    $d/tool --emit plain sm_75 | diff $t/plain.sm_75.expected - || fault "wrong text for sm_75"
    $d/tool --emit plain sm_86 | grep -q '%ntid.x' || fault "sm_86 does not get the text of sm_80"
    [[ $($d/tool --emit plain sm_121 | head -2 | xargs) == ".version 8.8 .target sm_121" ]] ||
        fault "wrong head for sm_121"
    if have sha256sum; then
        for n in 0 1 55 56 63 64 65 119 120 1000; do
            head -c $n tools/embed.c >$d/n.cuh
            build/embed --write $d/n.h --nvcc 1 $d/n.cuh $d/plain.sm_75.ptx
            grep -q "sha256 $(sha256sum <$d/n.cuh | cut -c 1-64) " $d/n.h ||
                fault "wrong sha256 of $n bytes"
        done
    fi
    printf 'x' >>$d/plain.cu
    build/embed --sources $d/1.h $d/plain.cu >/dev/null && fault "a stale source passes"
    printf '.visible .entry q() { \303\244 }\n' >$d/bad.sm_80.ptx
    build/embed --write $d/x.h --nvcc 1 $d/plain.cu $d/bad.sm_80.ptx 2>/dev/null &&
        fault "a text that is not ASCII passes"
    return 0
}

# Our declarations of the driver and of cuBLAS against NVIDIA's own headers and libraries.
gate_contract() {
    need_file qlora.h
    need g++
    grep -q 'QLORA__CUDA_SYMBOLS(X)' qlora.h || skip "qlora.h has no table of CUDA symbols"
    local root=${CUDA_HOME:-} stub
    if [[ -z $root ]] && have "$NVCC"; then
        root=$(dirname "$(dirname "$(command -v "$NVCC")")")
    fi
    [[ -e $root/include/cuda.h ]] || skip "no cuda.h (CUDA_HOME says where)"
    [[ -e $root/include/cublas_v2.h ]] || skip "no cublas_v2.h"
    sed -n 's/^#define QLORA__\(CU[A-Z]*_[A-Z0-9_]*\) [-(0-9].*/VALUE(\1)/p' qlora.h >$OUT/values.h
    # shellcheck disable=SC2086
    g++ -std=c++11 -I. -isystem "$root/include" -Wall -Wextra -Werror \
        -DCONTRACT_VALUES="\"$PWD/$OUT/values.h\"" -o $OUT/contract \
        tests/gates/contract_cuda.cpp $LIBS || return 1
    stub=$(find -L "$root" -name libcuda.so -path '*stubs*' 2>/dev/null | head -1)
    LD_LIBRARY_PATH="$root/lib64" $OUT/contract ${stub:+"$stub"} || bad=1
}

# ---- running ----

# The tests with a sanitizer in them; the fake GPU is built without, it checks its memory itself.
sanitized() {
    local name=$1 flags=$2 cc
    shift 2
    need_file qlora.h
    # shellcheck disable=SC2086
    cc=$(compiler_with $flags)
    [[ -n $cc ]] || skip "no compiler with $flags"
    $MAKE -s -j2 all || return 1
    $MAKE -s -j2 "build/$name/tests" "B=build/$name" CC="$cc" \
        CFLAGS="-O1 -fno-omit-frame-pointer $flags" || return 1
    LD_LIBRARY_PATH=build/fake timeout 900 "build/$name/tests" "$@" >"$OUT/$name.out" 2>&1 && return
    grep -E -A12 'ERROR|runtime error|WARNING|^FAIL' "$OUT/$name.out" | head -30
    fault "$(tail -3 "$OUT/$name.out")"
}

# Without the mutants: they judge the tests, and a test that fails leaks.
gate_asan() {
    sanitized asan "-fsanitize=address,undefined -fno-sanitize-recover=all" -x mutant_is_caught
}

gate_tsan() {
    sanitized tsan "-fsanitize=thread" --backend cpu
}

# Fixture folders of transformers, PEFT and bitsandbytes: on the CPU, and one on the fake GPU with
# the kernels of an old and of a new device. The small one is in the repository, others beside it.
gate_golden() {
    need_file tests/golden/golden.c qlora.h
    local dirs=()
    while read -r d; do dirs+=("$(dirname "$d")"); done < <(ls -d tests/golden/*/golden.json \
        ../shared/fixtures/*/golden.json 2>/dev/null)
    [[ ${#dirs[@]} -gt 0 ]] || skip "no fixture folders"
    $MAKE -s build/golden build/fake/libcuda.so.1 build/fake/libcublas.so.13 || return 1
    build/golden --known "${dirs[@]}" >$OUT/golden.out 2>&1 ||
        fault "$(grep -E 'FAILED|error' $OUT/golden.out)"
    local cc
    for cc in 75 90; do
        FAKECUDA_CC=$cc LD_LIBRARY_PATH=build/fake build/golden --backend cuda --mode f32 \
            "${dirs[0]}" >$OUT/golden.$cc 2>&1 || fault "sm_$cc: $(tail -5 $OUT/golden.$cc)"
    done
}

# Each fuzzer for a moment: it builds, runs, and finds nothing at once. `make soak` is the real run.
gate_fuzz() {
    local f name
    ls tests/fuzz/*.c >/dev/null 2>&1 || skip "no fuzz targets"
    [[ $(compiler_with -fsanitize=address) == "$CLANG" ]] || skip "no clang with libFuzzer"
    for f in tests/fuzz/*.c; do
        name=fuzz_$(basename "$f" .c)
        $MAKE -s "build/$name" || { bad=1; continue; }
        mkdir -p "build/$name.corpus"
        "build/$name" -max_total_time=5 -artifact_prefix="build/$name." "build/$name.corpus" \
            >"$OUT/$name.out" 2>&1 || fault "$name: $(tail -20 "$OUT/$name.out")"
    done
}

# Another processor: compiled, and run under qemu where it is found.
cross() {
    local machine=$1 b=build/check-$1 cc=$1-linux-gnu-gcc qemu
    need_file qlora.h
    [[ $(uname -m) != "$machine" ]] || skip "that is this machine"
    need "$cc"
    $MAKE -s -j2 all "B=$b" CC="$cc" CFLAGS=-Werror || return 1
    qemu=$(command -v "qemu-$machine-static" || command -v "qemu-$machine") ||
        skip "compiles; qemu-$machine not found, so it was not run"
    # Thousands of whole passes for one statistic: minutes here, and no different on this machine.
    timeout 900 "$qemu" -L "/usr/$machine-linux-gnu" -E "LD_LIBRARY_PATH=$b/fake" "$b/tests" \
        --backend cpu -x sampling_follows >"$OUT/$machine.out" 2>&1 ||
        fault "$(tail -20 "$OUT/$machine.out")"
}

gate_x86_64() {
    cross x86_64
}

gate_aarch64() {
    cross aarch64
}

gate_mingw() {
    need_file qlora.h
    local cc=x86_64-w64-mingw32-gcc
    need $cc
    $cc -I. -std=c99 $WARN_C -O1 -c -o $OUT/win_b.o tests/gates/compile/two_b.c || bad=1
    $cc -I. -std=c99 $WARN_C -DQLORA_DLL -c -o /dev/null tests/gates/compile/two_b.c || bad=1
    $cc -I. -x c++ -std=c++11 $WARN -c -o /dev/null tests/gates/compile/two_b.c || bad=1
    $cc -I. -std=c99 $WARN_C -fsyntax-only tests/gates/compile/text_both.c || bad=1
    $cc -I. -std=c99 $WARN_C -DTEXT_FIRST -fsyntax-only tests/gates/compile/text_both.c || bad=1
    $cc -I. -std=c99 $WARN_C -DQLORA_DLL -fsyntax-only tests/gates/compile/text_config.c || bad=1
    $cc -I. -std=c99 -o $OUT/win.exe tests/gates/compile/two_a.c $OUT/win_b.o || bad=1
    if have wine; then
        wine $OUT/win.exe >/dev/null 2>&1 || fault "win.exe fails under wine"
    fi
}

# clang in its MSVC mode, with headers of our own: the branch for Windows, and nothing that only GNU
# knows. Functions without a caller are marked by an attribute that this mode does not have.
gate_msvc() {
    need_file qlora.h
    need "$CLANG"
    local flags="--target=x86_64-pc-windows-msvc -fms-compatibility -ffreestanding -nostdlibinc"
    flags="$flags -isystem tests/gates/compile/msvc -I. -fsyntax-only $WARN -Wgnu"
    flags="$flags -Wlanguage-extension-token -Wno-unused-function"
    local f
    for f in config declarations text_config text_declarations text_both; do
        echo "$CLANG -std=c99 $flags tests/gates/compile/$f.c"
        echo "$CLANG -x c++ -std=c++11 $flags tests/gates/compile/$f.c"
        echo "$CLANG -std=c99 $flags -DQLORA_DLL tests/gates/compile/$f.c"
        echo "$CLANG -std=c99 $flags -DQLORA_NO_CUDA tests/gates/compile/$f.c"
    done >$OUT/msvc.commands
    run_all $OUT/msvc.commands
}

# ---- the list, quick ones first ----

GATES="assembled text paths scripts contents layers functions words embed ptx_fresh link"
GATES="$GATES symbols text_header macros recursion warnings ptx_assemble ptx_same contract"
GATES="$GATES programs examples use readme msvc mingw"
GATES="$GATES x86_64 aarch64 fuzz golden tsan asan"

if [[ ${1:-} == --list ]]; then
    tr ' ' '\n' <<<"$GATES"
    exit 0
fi

read -ra chosen <<<"${*:-$GATES}"
failed=0
skipped=0
start=$SECONDS
for gate in "${chosen[@]}"; do
    # The first gate judges what is committed; the others judge what the parts give.
    [[ $gate == assembled ]] || $MAKE -s headers || exit 1
    began=$SECONDS
    (
        "gate_$gate" || bad=1
        exit $bad
    ) >"$OUT/$gate.log" 2>&1
    status=$?
    took=$((SECONDS - began))
    if [[ $status -eq 0 ]]; then
        printf 'ok    %-13s %4d s\n' "$gate" $took
    elif [[ $status -eq $SKIP ]]; then
        printf 'skip  %-13s %4d s  %s\n' "$gate" $took "$(tail -n 1 "$OUT/$gate.log")"
        skipped=$((skipped + 1))
    else
        printf 'FAIL  %-13s %4d s\n' "$gate" $took
        tail -40 "$OUT/$gate.log" | sed 's/^/      /'
        failed=$((failed + 1))
    fi
done
passed=$((${#chosen[@]} - failed - skipped))
echo "check: $passed gates passed, $failed failed, $skipped skipped, $((SECONDS - start)) s"
[[ $failed -eq 0 ]]
