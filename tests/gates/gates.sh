#!/usr/bin/env bash
# gates.sh - every gate of check.sh must be able to fail: injects one defect after another into a
# copy of the repository and expects the gate to report FAIL. Usage: gates.sh [GATE...]; part of
# `make soak`. With GATES_PASS=1, the gates are known to pass without a defect, after `make check`,
# and are not run without one; with GATES_DRY=1, the gates are not run at all, but every defect must
# still find the text that it edits.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
only=" $* "
mkdir -p build/gates
declare -A before # a gate's verdict on the untouched copy
tree=$PWD/build/gates/tree
caught=0
missed=0
left_out=0

# Makes the copy equal to the repository. What was built in it is kept: only files that differ are
# copied, which makes what was built from them out of date.
fresh_copy() {
    local f list=build/gates/files
    mkdir -p "$tree/build"
    git ls-files -co --exclude-standard | while read -r f; do [[ -e $f ]] && echo "$f"; done >$list
    (cd "$tree" && find . -path ./build -prune -o -type f -print | sed 's,^\./,,') |
        grep -vxFf $list | while read -r f; do rm "$tree/$f"; done
    while read -r f; do
        cmp -s "$f" "$tree/$f" && [[ -x $f || ! -x $tree/$f ]] && [[ ! -x $f || -x $tree/$f ]] ||
            { rm -f "$tree/$f" && cp --parents -t "$tree" "$f"; }
    done <$list
    if [[ -d build/ptx && ! -d $tree/build/ptx ]]; then
        cp -r build/ptx "$tree/build/"
    fi
}

# Prints the gate's verdict on the copy: ok, FAIL or skip. The copy is not a git repository, so
# check.sh looks at all files. Of the suites and fuzzers, only those with the defect run; one of the
# fuzzers needs about twenty seconds for one of them.
verdict() {
    (cd "$tree" && GIT_DIR=/nowhere QLORA_SHARED="${QLORA_SHARED:-../../../../shared}" \
        CHECK_SUITES="${2:-harness_suite threads_suite}" \
        CHECK_FUZZERS="tests/fuzz/files.c:10 tests/fuzz/folders.c:90" \
        tests/gates/check.sh "$1" |
        awk '$1 ~ /^(ok|FAIL|skip)$/ && !found { print $1; found = 1 }')
}

# Prints one line that identifies the contents and modes of all files in the copy.
fingerprint() {
    (cd "$tree" && find . -path ./build -prune -o -type f -printf '%m %p\n' -exec cksum {} + |
        sort | cksum)
}

# defect GATE WHAT COMMAND [SUITES]: the command runs in the copy and injects the defect; these
# suites are to find it.
defect() {
    local gate=$1 what=$2 command=$3 suites=${4:-} after whole
    [[ $only == "  " || $only == *" $gate "* ]] || return 0
    fresh_copy
    local with="$gate $suites"
    if [[ -z ${before[$with]:-} ]]; then
        before[$with]=ok
        [[ -n ${GATES_PASS:-}${GATES_DRY:-} ]] || before[$with]=$(verdict "$gate" "$suites")
    fi
    if [[ ${before[$with]} == skip ]]; then
        echo "skipped   $gate: $what (the gate is skipped on this machine)"
        left_out=$((left_out + 1))
        return
    fi
    if [[ ${before[$with]} != ok ]]; then
        echo "MISSED    $gate: fails without the defect"
        missed=$((missed + 1))
        return
    fi
    whole=$(fingerprint)
    (cd "$tree" && eval "$command") || echo "          (the command failed)"
    if [[ $(fingerprint) == "$whole" ]]; then
        echo "MISSED    $gate: $what (the command changed nothing: the text it edits is gone)"
        missed=$((missed + 1))
        return
    fi
    if [[ -n ${GATES_DRY:-} ]]; then
        echo "applies   $gate: $what"
        return
    fi
    after=$(CHECK_FAST=1 verdict "$gate" "$suites")
    if [[ $after == FAIL ]]; then
        echo "caught    $gate: $what"
        caught=$((caught + 1))
    elif [[ $after == skip ]]; then
        echo "skipped   $gate: $what (the gate is skipped on this machine)"
        left_out=$((left_out + 1))
    else
        echo "MISSED    $gate: $what ($after)"
        missed=$((missed + 1))
    fi
}

# Inserts text (with \n) at the top of src/core/base.h.
core() {
    sed -i "1s|^|$1\n\n|" src/core/base.h
}

defect assembled "a stale header" 'core "// x"'
defect assembled "a manual edit" 'echo "// x" >>qlora.h'
defect layers "a call to a later part" \
    'echo "static int qlora__up(qlora_graph* g) { return qlora_graph_replay(g, 0); }" \
    >>src/ops/clip.h'
defect layers "a call to a later part through a prototype" \
    'echo "static int qlora__later(void);
static int qlora__up(void) { return qlora__later(); }" >>src/ops/clip.h
    echo "static int qlora__later(void) { return 1; }" >>src/graph.h'

defect layers "a type of a later part" \
    'echo "static const qlora__layer* qlora__up(void) { return NULL; }" >>src/ops/clip.h'
defect layers "a constant of a later part" \
    'echo "static const int qlora__up = QLORA__STATE_ROWS;" >>src/cpu/rows.h'
defect layers "a name of a later part of qlora_text.h" \
    'echo "static const void* qlora__up(void) { return qlora__text_formats; }" >>src/text/maps.h'

defect abi "a struct that the list lacks" \
    'printf "typedef struct qlora_extra {\n    int a;\n} qlora_extra;\n" >>src/api/context.h'

defect cxx "a cast in a public macro" \
    'sed -i "s/+UINT64_C(1) \* sizeof(type)/+(uint64_t)sizeof(type)/" src/api/abi.h'
defect cxx "a designator that C++ does not have" \
    'sed -i "s/\.rope = {\.theta = 1e4}/.rope.theta = 1e4/" examples/hello.c'
defect cxx "the address of a local variable that is kept" \
    'sed -i "s/QLORA__TRY(qlora__jin_run_into(m, node, &buffer));/m->out = \&buffer;\n    \
    QLORA__TRY(m->hooks->run(m, node->c));/" src/text/template/run.h'

defect text "a byte that is not ASCII" 'printf "// \303\244\n" >>src/graph.h'
defect text "CR line end" 'printf "// x\r\n" >>src/graph.h'
defect text "trailing space" 'printf "// x \n" >>tests/unit/main.c'
defect text "tab" 'printf "//\tx\n" >>tests/unit/main.c'
defect text "101 columns" 'printf "// %098d\n" 0 >>tests/unit/main.c'
defect text "no newline at the end" 'printf "// x" >>tests/unit/main.c'
defect paths "a path of someone's machine" 'echo "see /home/me/notes" >>CONTRIBUTING.md'
defect comments "a heading split from its rule" \
    'sed -i "s|^// ---- chat ---|// ---- chat\n// --------|" programs/generate.c'
defect comments "a line that ends too early" \
    'printf "// where\n// ../shared is present\n" >>src/graph.h'
defect comments "a formula broken after an operator" \
    'printf "// y =\n// a + b\n" >>src/graph.h'
defect comments "a shape broken inside its brackets" \
    'printf "// x [rows,\n// cols]\n" >>src/graph.h'
defect comments "a comment without a space" 'printf "//x\n" >>src/graph.h'
defect mpi "a process that computes a leaf of another one" \
    'sed -i "s,share.end = count \* (rank + 1) / world,& + (rank == 0),;" src/comm/share.h &&
        make headers'
defect scripts "a syntax error" 'echo "if then" >>tests/run.sh'
defect scripts "not executable" 'chmod -x tests/run.sh'
defect libraries "a search that includes the current folder" \
    'sed -i "s/whole ? 0x1100UL : 0x1000UL/whole ? 0x1100UL : 0UL/" src/platform/windows.h'
defect libraries "a function that cannot restrict the search" \
    'sed -i "s/LoadLibraryExA(name, NULL, .*);/LoadLibraryA(name);/" src/platform/windows.h'
defect libraries "entries of PATH that depend on the current folder" \
    'sed -i "s/if (qlora__path_is_whole(at) \&\& /if (/" src/platform/windows.h'
defect libraries "relative paths on Windows" \
    'sed -i "s/if (!whole \&\& strpbrk(name/if (false \&\& strpbrk(name/" src/platform/windows.h'
defect libraries "relative paths on POSIX" \
    'sed -i "s/if (name\[0\] != .\/. \&\& strchr(name, .\/.) != NULL)/if (!name)/" \
        src/platform/posix.h'
defect libraries "another place that opens libraries" \
    'echo "static void* own(void) { return dlopen(\"./x.so\", 2); }" >>programs/tokenize.c'
defect sanitize "kernels of ours that count as the library's" \
    'sed -i "s/return \"ours\"/return \"library\"/" tests/sanitize.awk'
defect sanitize "a crash that is not seen" \
    'sed -i "s/echo \"crash .status\"/true/" tests/sanitize.sh'
defect sanitize "a time-out that is not seen" \
    'sed -i "s/|| echo \"timeout .seconds\"/|| true/" tests/sanitize.sh'
defect sanitize "reports of cuBLAS that are hidden" \
    'sed -i "s/^    reports\[owner\]++/    if (owner != \"library\") reports[owner]++/" \
        tests/sanitize.awk'
defect contents "a floor that CONTENTS lacks" \
    'mkdir src/extra && echo "// x" >src/extra/x.h && echo "#include \"extra/x.h\"" >>src/qlora.h'
defect contents "a different order" \
    'sed -i "/^ *ops  /{h;d};/^ *graph  /{G}" src/api/manual.h'
defect functions "61 lines without a reason" '{ echo "static int f(void) {"
    yes "    a();" | head -59; echo "}"; } >>tools/embed.c'
defect functions "101 lines with a reason" '{ echo "// long because"; echo "static int f(int a,"
    echo "    int b) {"; yes "    a();" | head -98; echo "}"; } >>src/graph.h'
defect functions "9 parameters" '{ echo "static void qlora__f(int a, int b, int c, int d, int e,"
    echo "    int f, int g, void (*h)(int, int), int i[2]) {"; echo "}"; } >>src/graph.h'
defect functions "61 fields" '{ echo "typedef struct qlora__f {"
    yes "    int a[2], (*b)(int, int);" | head -30; echo "    int c;"
    echo "} qlora__f;"; } >>src/graph.h'
defect functions "a condition inside QLORA__TRY" \
    'core "#define QLORA__T(x) QLORA__TRY(x > 0 ? qlora__u(x) : QLORA_OK);"'
defect words "malloc outside platform" 'core "static void* qlora__m(void) { return malloc(1); }"'
defect words "printf" 'core "static void qlora__p(void) { printf(\"x\"); }"'
defect words "fopen outside platform" \
    'core "static void* qlora__m(void) { return fopen(\"x\", \"r\"); }"'
defect words "_WIN32 outside platform" 'core "#ifdef _WIN32\n#endif"'
defect words "a family outside arch.h" 'core "#define QLORA__F QLORA_FAMILY_LLAMA"'
defect words "a goto" 'core "static void qlora__g(void) { goto out; out:; }"'
defect words "{0}" 'core "static void qlora__z(void) { int a[2] = {0}; (void)a; }"'
defect words "a method by name, not by its row" \
    'sed -i "s/if (t->method->report != NULL)/if (t->desc.method != QLORA_METHOD_SFT)/" \
        src/train/checkpoint.h'
defect words "a method by name in finetune" \
    'sed -i "s/if (method->preferences)/if (a->o.method.kind != QLORA_METHOD_SFT)/" \
        programs/finetune/reports/log.h'
defect words "a kind of mixer by name, not by its row" \
    'sed -i "s/QLORA__TRY(kind->mix(/QLORA__TRY(qlora__softmax_mix(/" src/model/forward.h'
defect words "a kind of MLP by name" \
    'sed -i "s/qlora__ffn_plan_of(layer)->joins/layer->layout->ffn == QLORA__FFN_GATED/" \
        src/model/stacks.h'
defect words "an activation by name" \
    'sed -i "s/qlora__ffn_of(layer)->step(m, layer)/qlora__relu2_forward(m->ctx, x, y)/" \
        src/model/step.h'
defect words "a sentence that nobody can follow" \
    '{ echo; yes and so on | head -14 | tr "\n" " "; echo; } >>docs/questions.md'
defect words "a paragraph of figures" \
    'printf "\nIt took 1 s, 2 s, 3 s, 4 s, 5 s, 6 s, 7 s, 8 s and 9 s.\n" >>docs/speed.md'
defect embed "a different hash" 'sed -i "s/prime, 3)/prime, 2)/" tools/embed.c'
defect embed "comments are kept" 'sed -i "s/^    comments_strip(t->text);//" tools/embed.c'
defect embed "the wrong version for a target" \
    'sed -i "s/{\"121\", 88}/{\"121\", 87}/" tools/embed.c'
defect embed "a kernel that two targets share is lost with one" \
    'sed -i "s/list->items\[i\].users < 2/list->items[i].users < 9/" tools/embed.c'
defect embed "wrong codes in a packed text" \
    'sed -i "s/return 257 + 4 \* (top - 1)/return 257 + 4 * top/" tools/deflate.h'
defect embed "a text that was edited is not named" \
    'sed -i "s/fnv1a(FNV_START, b->text.data, b->text.size) != hash/false/" tools/embed.c'
defect embed "packed texts of a module share nothing" \
    'sed -i "s/int used = shared ? anchors_find/int used = !shared ? anchors_find/" tools/embed.c'
defect embed "damage to packed texts is not seen" \
    'sed -i "s/return bad + 1;/return bad;/" tools/embed.c'
defect groups "packed texts are taken for plain ones" \
    'sed -i "s/(QLORA__KERNEL_ABI == 104)/(QLORA__KERNEL_ABI == 204)/" src/cache/ptx.h'
defect groups "a packed header lists the bytes of a plain one" \
    'sed -i "s/^        macro_line(h, line, out);/buffer_add(out, line, line_length(line));/" \
        tools/embed.c'
defect groups "a macro that leaves nothing out" \
    'sed -i "s/defined(QLORA_PTX_NO_HEAD64)/defined(NEVER)/" kernels_ptx.h'
defect groups "a module in the wrong group" \
    'sed -i "s/^\(.. texts attn64 .*\) head64/\1 head128/" kernels_ptx.h'
defect groups "an error that does not name the macro" \
    'sed -i "s/text->left_out);/\"a macro\");/" src/cache/modules.h'
defect groups "another path in silence" \
    'sed -i "s/{QLORA_BF16, 64, \([89]0\),/{QLORA_BF16, 63, \1,/" src/ops/attention.h'
defect groups "--only keeps everything" \
    'sed -i "s/drop = !block_kept(module, words);/drop = false;/" tools/embed.c'
defect shared "another soname" \
    'sed -i "s/-soname,\$(@F) -Wl,--version/-soname,x -Wl,--version/" Makefile'
defect shared "everything is exported" '
    sed -i "s/ local: \*;//; s/global: qlora_/global: /" Makefile
    core "int other_name(void);\nint other_name(void) { return 1; }"'
defect shared "a function that is not exported" \
    'sed -i "s/global: qlora_\*/global: qlora_c*/" Makefile'
defect interpreter "an instruction that computes something else" \
    'sed -i "s/fmaf(a, b, c))/fmaf(a, b, -c))/" tests/fakecuda/ptx_alu.h'
defect install "uninstall forgets a file" \
    'sed -i "s,^.*pkgconfig/qlora.pc\"\$,,; s,^\(.*notdir.*\) .*,\1," Makefile'
defect install "qlora.pc with the wrong folder" 'sed -i "s,-I..includedir.,-I/nowhere," qlora.pc.in'
defect packaging "a target without its folder" \
    'sed -i "s/BUILD_INTERFACE:/BUILD_LOCAL:/" CMakeLists.txt'
defect packaging "an option that packs nothing" \
    'sed -i "/QLORA_KERNELS_HEADER=/d" CMakeLists.txt'
defect packaging "no dependency on threads" 'sed -i "/find_dependency(Threads)/d" CMakeLists.txt'
defect packaging "programs for everybody" \
    'sed -i "s/^set(top_level OFF)/set(top_level ON)/" CMakeLists.txt'
defect ptx_fresh "a source changed" 'echo "// x" >>kernels/common.cuh'
defect ptx_fresh "a new source" 'echo "// x" >kernels/layer/zzz.cu'
defect ptx_fresh "manually edited PTX" 'sed -i "0,/:ret;}/s/:ret;}/:exit;}/" kernels_ptx.h'
defect ptx_same "manually edited PTX" 'sed -i "0,/:ret;}/s/:ret;}/:exit;}/" kernels_ptx.h'
defect ptx_assemble "an instruction that does not exist" \
    'sed -i "0,/:ret;}/s/:ret;}/:rat;}/" kernels_ptx.h'
defect ptx_assemble "an instruction of a newer PTX version" \
    'sed -i "0,/:ret;}/s/:ret;}/:griddepcontrol.wait;ret;}/" kernels_ptx.h'
defect ptx_assemble "a name without our prefix" \
    'sed -i "s/\.entry qlora_/.entry other_/" kernels_ptx.h'
defect link "no guard around the implementation" \
    'sed -i "s/.*define QLORA_IMPLEMENTATION_DONE.*//" src/qlora.h'
defect link "no extern C" 'sed -i "s/^extern \"C\" {/namespace qlora {/" src/qlora.h'
defect link "no advice about system headers" \
    'sed -i "/#error/,+1s/or use -D_POSIX_C_SOURCE=200809L/sorry/" src/platform/*.h'
defect link "a variable called I" 'core "static int qlora__i(int I) { return I; }"'
defect link "no word about C89" 'sed -i "s/needs C99/is modern/" src/api/manual.h'
defect symbols "a private function that is not static" 'core "int qlora__loose(void) { return 1; }"'
defect symbols "a writable static" '
    core "static int qlora__n; int qlora_x(void);\nint qlora_x(void) { return qlora__n++; }"'
defect symbols "declared, not defined" \
    'sed -i "s/^QLORA_API int qlora_version(void);/&\nQLORA_API int qlora_no(void);/" src/api/*.h'
defect symbols "calls abort" 'core "void qlora_a(void);\nvoid qlora_a(void) { abort(); }"'
defect words "malloc in qlora_text.h" \
    'echo "static void* qlora__text_m(void) { return malloc(1); }" >>src/text/maps.h'
defect contents "a room of qlora_text.h that CONTENTS lacks" \
    'echo "// x" >src/text/x.h && echo "#include \"text/x.h\"" >>src/qlora_text.h'
defect text_header "exported without the prefix" \
    'echo "int qlora_loose(void); int qlora_loose(void) { return 1; }" >>src/text/maps.h'
defect text_header "a writable static" \
    'echo "static int qlora__text_n; int qlora_text_x(void);
int qlora_text_x(void) { return qlora__text_n++; }" >>src/text/maps.h'
defect text_header "declared, not defined" \
    'echo "QLORA_API int qlora_text_no(void);" >>src/text/api.h'
defect text_header "not C++: no cast" \
    'echo "int* qlora_text_c(void* p); int* qlora_text_c(void* p) { return p; }" >>src/text/maps.h'
defect text_header "a shared part without its guard" \
    'sed -i "s/^#ifndef QLORA__PART_JSON_READ/#ifndef QLORA__PART_NO/" src/formats/json_read.h'
defect text_header "a shared function that is not static" \
    'sed -i "s/^static QLORA__UNUSED void qlora__sort(/void qlora__sort(/" src/core/tools.h'
defect text_header "no comparison of versions" \
    'sed -i "s/different versions/one version/" src/api/linkage.h'
defect text_header "no guard around the implementation" \
    'sed -i "s/.*define QLORA_TEXT_IMPLEMENTATION_DONE.*//" src/qlora_text.h'
defect text_header "Parquet that is not left out" \
    'sed -i "s/QLORA_TEXT_NO_PARQUET/NEVER/" src/qlora_text.h'
defect text_header "an error that does not name the macro" \
    'sed -i "s/QLORA_TEXT_NO_GGUF\"/a macro\"/" src/text/no_gguf.h'
defect text_header "data that is not left out" \
    'sed -i "s/QLORA_TEXT_NO_DATA/NEVER/" src/qlora_text.h'
defect text_header "more left out than the macro says" \
    'sed -i "s/^.include .text.pattern.api.h./#ifndef QLORA_TEXT_NO_TEMPLATES\n&\n#endif/" \
        src/qlora_text.h'
defect left_out "training that is not left out" \
    'sed -i "s/QLORA_NO_TRAIN/NEVER/" src/qlora.h'
defect left_out "code of GGUF files that something still calls" \
    'sed -i "s/QLORA__GGUF ?/true ?/" src/formats/gguf_config.h'
defect left_out "an error that does not name the macro" \
    'sed -i "s/left out by QLORA_NO_GENERATE/left out/" src/model/plan.h'
defect left_out "more left out than the macro says" \
    'sed -i "s/^.include .adapter.save.h./#ifndef QLORA_NO_MERGE\n&\n#endif/" src/qlora.h'
defect left_out "a kernel that evaluating needs, left out with those of training" \
    'sed -i "s/^#elif defined(QLORA_PTX_NO_HEAD32)/& || defined(QLORA_PTX_NO_TRAIN)/" kernels_ptx.h'
defect macros "a macro without our prefix" 'core "#define MIN(a, b) ((a) < (b) ? (a) : (b))"'
defect macros "a helper macro that stays defined" \
    'sed -i "s/^#define QLORA_VERSION_STRING.*/&\n#define QLORA_X_A 1/" src/api/linkage.h'
defect recursion "a function that calls itself" \
    'core "int qlora_r(int n);\nint qlora_r(int n) { return n ? qlora_r(n - 1) : 0; }"'
defect recursion "two functions that call each other" '
    core "static int qlora__s(int n) { return n ? qlora_r(n - 1) : 0; }"
    core "int qlora_r(int n);"
    echo "int qlora_r(int n) { return qlora__s(n); }" >>tests/gates/compile/two_b.c'
defect warnings "an unused function" 'core "static int qlora__u(void) { return 1; }"'
defect warnings "not C++: no cast" \
    'core "int* qlora_c(void* p);\nint* qlora_c(void* p) { return p; }"'
defect warnings "only with QLORA_NO_CUDA" \
    'core "#ifdef QLORA_NO_CUDA\nstatic int qlora__u(void) { return 1; }\n#endif"'
defect warnings "only with QLORA_DEBUG" \
    'core "#ifdef QLORA_DEBUG\nstatic int qlora__u(void) { return 1; }\n#endif"'
defect warnings "a loss of sign" \
    'core "unsigned qlora_c(int a);\nunsigned qlora_c(int a) { return a; }"'
defect warnings "only with optimisation" \
    'core "int qlora_c(int n);\nint qlora_c(int n) { int v; if (n > 3) { v = n; } return v; }"'
defect warnings "only with -O3, in a program" \
    'sed -i "s/: %.500s/: %s/" programs/finetune/run/state.h'
defect contract "a wrong value" 'sed -i "s/^\(#define QLORA__CUBLAS_OP_T\) 1/\1 2/" src/driver/*.h'
defect contract "a wrong symbol" 'sed -i "s/\"cuMemAlloc_v2\"/\"cuMemAlloc\"/" src/driver/*.h'
defect contract "a wrong parameter" \
    'sed -i "s/\(\"cuMemFree_v2\"\), (qlora__CUdeviceptr)/\1, (int)/" src/driver/*.h'
defect programs "a warning in a test" \
    'echo "static int unused(void) { return 1; }" >>tests/unit/harness.c'
defect programs "a benchmark that forgets what is trained" \
    'sed -i "/desc.targets = (uint32_t)o->targets;/d" tests/bench/bench_step.h'
defect examples "an example that fails" 'sed -i "s/? 0 : 1;/? 1 : 0;/" examples/*.c'
defect examples "a wrong compile command" 'sed -i "s,^// *cc ,// cc -DX=( ," examples/hello.c'
defect use "a message that lost its meaning" \
    'sed -i "s/resumed after step/continued at step/" programs/finetune/run/start.h'
defect use "a version of its own" \
    'sed -i "s/(qlora.h) \" QLORA_VERSION_STRING/(qlora.h) 0.0.9\"/" programs/tool.h'
for gate in use_gcc use_clang; do
    defect $gate "an overflow in a program" \
        'sed -i "s/^int main(int argc, char.. argv) {/&\n volatile int n = 2147483647;\n n++;/" \
            programs/tokenize.c'
done
defect page "a text that makes the page wide" \
    'sed -i "s/white-space: pre-wrap; overflow-wrap: anywhere/white-space: pre/" \
        programs/finetune/reports/page.h'
defect page "markup that is not escaped" \
    'sed -i "s/\"&lt;\"/\"<\"/" programs/finetune/reports/curves.h'
defect page "no dark colours" \
    'sed -i "s/prefers-color-scheme: dark/prefers-color-scheme: none/" programs/finetune/*/*.h'
defect readme "a program that does not compile" \
    'sed -i "s/#include \"qlora.h\"/#include \"qlola.h\"/" README.md'
defect readme "a program of another page that fails" \
    'sed -i "s/== QLORA_OK ? 0 : 1;/== QLORA_OK ? 1 : 0;/" docs/embed.md'
defect readme "a link that leads nowhere" \
    'sed -i "s/(finetune.md#the-model)/(finetune.md#a-model)/" docs/questions.md'
defect readme "an option that a program does not have" \
    'sed -i "s/--keep-quantised/--keep-quantized/" docs/finetune.md'
defect readme "a function that does not exist" \
    'sed -i "s/qlora_train_poll/qlora_train_pole/" docs/embed.md'
defect readme "a figure that is not that of the table" \
    'sed -i "s/,17640,/,17641,/" docs/speed.csv'
defect readme "a family that no page names" \
    'sed -i "s/\"seed_oss\", \"SeedOssFor/\"seed_os\", \"SeedOssFor/" src/arch.h'
defect msvc "a GNU extension" \
    'core "int qlora_p(int a);\nint qlora_p(int a) { return ({ int b = a; b; }); }"'
defect msvc "a POSIX call outside its branch" \
    'core "long qlora_p(void);\nlong qlora_p(void) { return sysconf(1); }"'
defect mingw "a POSIX call outside its branch" '
    core "long qlora_p(void);\nlong qlora_p(void) { return sysconf(_SC_PAGESIZE); }"'
defect wine "arguments in the code page" \
    'sed -i "/utf8_arguments(&argc, &argv);/d" programs/finetune.c'
defect wine "folders that are not removed" \
    'sed -i "s/(qlora__os_is_folder(wide) ? _wrmdir/(false ? _wrmdir/" src/platform/windows.h'
defect golden "a rotation in the wrong direction on the CPU" \
    'sed -i "s/sine, (QLORA__REAL)job->sign/sine, -(QLORA__REAL)job->sign/" src/ops/rope.h'
defect golden "weights of experts that are not renormalised" \
    'sed -i "s/return rule->renormalise || rule->score/return rule->score/" src/ops/experts.h'
defect golden "a correction of the choice of experts in their weights" \
    'sed -i "s/? qlora__route_sigmoid(at)/& + (rule->correction ? *rule->correction : 0)/" \
        src/ops/experts.h'
defect golden "groups of experts that are ignored" \
    'sed -i "s/if (finite \&\& rule->groups > 1)/if (finite \&\& rule->groups > 99)/" \
        src/ops/experts.h'
defect golden "B of an expert in one block" \
    'sed -i "s,i % rank . t->experts + e;,e * rank + i % rank;," src/model/parameters.h'
defect golden "experts that are off by one" \
    'sed -i "s/&experts->linears\[2 . e\]/\&experts->linears[2 * (e > 0 ? e - 1 : e)]/" \
        src/model/ffns/experts.h'
defect golden "a shared expert without its gate" \
    'sed -i "s/out\[r\] = (QLORA__REAL)qlora__route_sigmoid(z);/out[r] = (QLORA__REAL)(z < 1e9);/" \
        src/model/ffns/experts.h'
defect asan "a tie between experts that goes to the higher number" \
    'sed -i "s/values\[e\] > values\[best\])) {/values[e] >= values[best])) {/" src/ops/experts.h' \
    experts_suite
defect fuzz "a parser that crashes" \
    'sed -i "s/^static int fuzz_.*{/&\n    __builtin_trap();/" tests/fuzz/*.c'
defect fuzz "a checksum that is not compared" \
    'sed -i "s/qlora__hash_end(&hash) != qlora__load_u64(t->data)/false/" src/formats/safetensors.h'
defect fuzz "a turn of weight 0 that is trained" \
    'sed -i "s/masked = .masked || number == 0.0;/masked = *masked;/" src/text/data/messages.h'
defect fuzz "an added token with the id of the next one" \
    'sed -i "s/added->id = (int32_t)use;/added->id = (int32_t)use + (number == 5 ? 1 : 0);/" \
        src/text/tokens/load.h'
for gate in x86_64 aarch64 musl wine tsan; do
    defect $gate "a failing test" \
        'sed -i "s/ASSERT_NEQ(test_random/ASSERT_EQ(test_random/" tests/unit/harness.c'
done
# What only another processor, C library, number of threads or a sanitizer shows.
defect aarch64 "a wrong lane in the NEON products" \
    'sed -i "s/QLORA__ROW(1, a0, 1);/QLORA__ROW(1, a0, 0);/" src/cpu/neon.h' tiers_suite
defect aarch64 "swapped operands of the BF16 products" \
    'sed -i "s/: \"w\"(a), \"w\"(b))/: \"w\"(b), \"w\"(a))/" src/cpu/neon_bf16.h' bf16_suite
defect aarch64 "a wrong half of f16 weights in NEON" \
    'sed -i "s/vld1_u16((p) + 4)/vld1_u16((p) + 3)/" src/cpu/stream_neon.h' stream_suite
defect x86_64 "a wrong sum in the AVX2 products" \
    'sed -i "s/c11 = _mm256_fmadd_ps(x, b1, c11);/c11 = _mm256_fmadd_ps(x, b2, c11);/" \
        src/cpu/avx2.h' tiers_suite
defect musl "a char that must be signed" \
    'sed -i "s/uint32_t size = p\[0\] < 0x80 ?/uint32_t size = (text[0] | 0) >= 0 ?/" \
        src/core/env.h' formats_suite
defect musl "a stack that only large threads have" \
    'sed -i "s/^static void qlora__pool_thread(void. user) {/&\n    volatile char big[400000];\n\
    big[0] = big[399999] = 0;/" src/core/threads.h' threads_suite
defect musl "a header that only glibc has" \
    'sed -i "s/^#include <errno.h>/#include <gnu\/libc-version.h>\n&/" src/platform/base.h'
defect tsan "a range that is taken without the lock" \
    'sed -i "/pool->next = end;/d; s/^        if (pool->slot_fn != NULL) {/pool->next = end;\n&/" \
        src/core/threads.h' threads_suite
defect tsan "a word that is read without a fence" \
    'sed -i "s/return __atomic_load_n(word, __ATOMIC_ACQUIRE);/return *word;/" \
        src/core/threads.h' threads_suite
defect asan "a load that needs alignment" \
    'sed -i "/^static uint64_t qlora__load_u64/,/^}/s/value = value << 8 . p\[i\];/\
value = *(const uint64_t*)p;/" src/formats/safetensors.h' \
    formats_suite
defect tsan "contexts that share a counter" \
    'sed -i "/qlora__trainer_enter(.*\"qlora_train_step\")/s/^/static volatile int n;\nn++;\n/" \
        src/train/*.h'
defect asan "a read past the end" \
    'sed -i "s/(a, b, 2, 0.0999)/(a, b, 3, 0.0999)/" tests/unit/harness.c'
defect asan "an overflow" '
    sed -i "s/^SUITE(harness_suite) {/&\n    volatile int big = 2147483647;\n    big++;/" \
        tests/unit/harness.c'

echo "gates: $caught caught, $missed missed, $left_out skipped"
[[ $missed -eq 0 ]]
