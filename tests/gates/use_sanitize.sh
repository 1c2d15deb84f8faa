#!/usr/bin/env bash
# Tests tests/sanitize.sh without a GPU: stand-ins for build/tests and compute-sanitizer print what
# the real ones print, and the script must read it right. Usage: tests/gates/use_sanitize.sh [DIR]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
dir=${1:-build/check/sanitize}
rm -rf "$dir/world"
mkdir -p "$dir/world/bin" "$dir/world/build" "$dir/world/tests/golden"
cd "$dir/world" || exit 1
bad=0

fault() {
    echo "$*"
    bad=1
}

# The tests: a suite is named after what happens in it.
cat >build/tests <<'EOF'
#!/usr/bin/env bash
suite=
test=
for ((i = 1; i <= $#; i++)); do
    j=$((i + 1))
    case ${!i} in
    -l) list=1 ;;
    --suites) suite=${!j} ;;
    -t) test=${!j} ;;
    esac
done
all="clean_suite ours_suite cublas_suite mixed_suite strange_suite crash_suite slow_suite"
all="$all nap_a_suite nap_b_suite nap_c_suite failing_suite cpu_suite silent_suite"
all="$all lost_suite nameless_suite"
if [[ -n ${list:-} ]]; then
    for s in ${suite:-$all}; do
        printf '\n* Suite %s:\n  first\n  second\n' "$s"
    done
    exit 0
fi
echo "* Suite $suite:"
case $suite in
crash_suite) kill -SEGV $$ ;;
slow_suite) [[ $test == first ]] || sleep 30 ;;
nap_*) sleep 2 && echo "$suite" >>ended ;;
failing_suite) printf '1 passed, 1 failed, 0 skipped\n'; exit 1 ;;
esac
printf '2 passed, 0 failed, 0 skipped\n'
EOF

# The tool: the formats of compute-sanitizer 2025.
cat >bin/compute-sanitizer <<'EOF'
#!/usr/bin/env bash
tool=
echo "$*" >>calls
while [[ $1 != */tests ]]; do
    [[ $1 != --tool ]] || tool=$2
    shift
done
suite=$5
echo "========= COMPUTE-SANITIZER"
"$@"
status=$?
reports=0

race() { # SEVERITY KERNEL KERNEL
    echo "========= $1: Race reported between Write access at $2+0x2b80"
    echo "=========     and Read access at $3+0x2c10 [508 hazards]"
    echo "========= "
    reports=$((reports + 1))
}

memory() { # WHAT KERNEL
    echo "========= $1 of size 4 bytes"
    echo "=========     at $2+0x160"
    echo "=========     by thread (0,0,0) in block (0,0,0)"
    echo "=========     Access at 0x7f6510c00001 is out of bounds"
    echo "=========     and is 1 bytes after the nearest allocation at 0x7f6510c00000 of size 1"
    echo "=========     Saved host backtrace up to driver entry point at kernel launch time"
    echo "=========         Host Frame: qlora__launch in modules.h:10 [0x1234] in tests"
    echo "========= "
    reports=$((reports + 1))
}

jet=nvjet_tst_128x64_64x6_2x1_v_bz_TNT
cut="void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(T1)"
case $suite:$tool in
ours_suite:racecheck) race Error "qlora_norm_forward_f32(float *, int)" \
    "qlora_norm_forward_f32(float *, int)" ;;
ours_suite:memcheck) memory "Invalid __global__ write" qlora_clip_scale_f32 ;;
ours_suite:initcheck) memory "Uninitialized __global__ memory read" qlora_clip_scale_f32 ;;
cublas_suite:racecheck) race Error $jet $jet; race Warning "$cut" "$cut"; race Error $jet $jet ;;
cublas_suite:memcheck) memory "Invalid __global__ read" $jet ;;
mixed_suite:racecheck) race Error $jet qlora_head_loss_f32 ;;
strange_suite:racecheck) race Error other_kernel other_kernel ;;
nameless_suite:racecheck) echo "========= Error: something new"; reports=1 ;;
lost_suite:racecheck)
    echo "========= Warning: Maximum number of hazards reached. Environment variable" \
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used to increase this count." ;;
lost_suite:memcheck) reports=7 ;;
esac
[[ $status -eq 0 ]] || echo "========= Target application returned an error"
[[ $status -lt 128 ]] || echo "========= Error: process didn't terminate successfully"
if [[ $suite == cpu_suite ]]; then
    echo "========= Target application terminated before first instrumented API call"
elif [[ $suite == silent_suite ]]; then
    exit 1
elif [[ $tool == racecheck ]]; then
    echo "========= RACECHECK SUMMARY: $reports hazards displayed ($reports errors, 0 warnings)"
else
    echo "========= ERROR SUMMARY: $reports errors"
fi
exit $status
EOF
chmod +x build/tests bin/compute-sanitizer
path=$PATH
PATH=$PWD/bin:$PATH
export SANITIZE_NO_PROBE=1

# expect STATUS TEXT OPTIONS: the status, and a line that contains the text (a regular expression).
expect() {
    local status=$1 text=$2 got
    shift 2
    "$root/tests/sanitize.sh" "$@" >out.txt 2>&1
    got=$?
    [[ $got -eq $status ]] || fault "sanitize.sh $*: status $got, not $status: $(cat out.txt)"
    grep -qE -- "$text" out.txt || fault "sanitize.sh $*: no \"$text\" in: $(cat out.txt)"
}

three="--again --tools"
# shellcheck disable=SC2086
{
    expect 0 '^ok +memcheck +clean_suite +2 passed, 0 failed; reports: 0 in our' \
        --again --suites clean_suite
    expect 1 '^FAIL racecheck +ours_suite .* 1 in our kernels' $three racecheck --suites ours_suite
    expect 1 'OURS, 1 reports: qlora_norm_forward_f32$' $three racecheck --suites ours_suite
    expect 1 '^FAIL memcheck +ours_suite .* 1 in our kernels' $three memcheck --suites ours_suite
    expect 1 '^FAIL initcheck +ours_suite .* 1 in our kern' $three initcheck --suites ours_suite
    expect 0 '^ok +racecheck +cublas_suite .* 0 in our kernels, 3 in kernels of NVIDIA' \
        $three racecheck --suites cublas_suite
    expect 0 'NOT OURS, 2 reports: nvjet_tst_128x64' $three racecheck --suites cublas_suite
    expect 0 'NOT OURS, 1 reports: cutlass::device_kernel' $three racecheck --suites cublas_suite
    expect 0 'sanitize: 1 clean, .* 3 reports of racecheck' $three racecheck --suites cublas_suite
    expect 1 '^FAIL memcheck +cublas_suite .* 1 in kernels of NVIDIA' \
        $three memcheck --suites cublas_suite
    expect 1 '^FAIL racecheck +mixed_suite .* 1 in our kernels' \
        $three racecheck --suites mixed_suite
    expect 1 'UNKNOWN, 1 reports: other_kernel' $three racecheck --suites strange_suite
    expect 1 'without a kernel, such as: Error: something new' \
        $three racecheck --suites nameless_suite
    expect 1 '^FAIL racecheck +crash_suite .*ended with status 139' \
        $three racecheck --suites crash_suite
    expect 1 '^FAIL memcheck +failing_suite +1 passed, 1 failed' \
        $three memcheck --suites failing_suite
    expect 0 'cpu_suite .*makes no CUDA calls' $three memcheck,racecheck --suites cpu_suite
    expect 1 'the tool printed no summary' $three memcheck --suites silent_suite
    expect 1 'Maximum number of hazards' $three racecheck --suites lost_suite
    expect 1 'the summary counts 7 reports, 0 were read' $three memcheck --suites lost_suite
    # a suite that takes too long is run test by test, and so the test is found that does
    expect 1 '^FAIL memcheck +slow_suite +2 passed.* took more than 2 s: .*slow_suite.second' \
        $three memcheck --suites slow_suite --each 2
}

# Several at a time, and test by test: three naps of two seconds take less than their sum.
began=$SECONDS
expect 0 '^ok +memcheck +nap_c_suite +4 passed' --again --apart --jobs 6 --tools memcheck \
    --suites nap_a_suite,nap_b_suite,nap_c_suite
[[ $((SECONDS - began)) -lt 10 ]] || fault "six jobs took $((SECONDS - began)) s"
[[ $(wc -l <ended) -eq 6 ]] || fault "not every test ran once: $(cat ended)"
rm ended

# Slices: the limit ends the first one, and the next ones go on until every suite has run once.
naps="--tools memcheck --suites nap_a_suite,nap_b_suite,nap_c_suite --limit 5"
# shellcheck disable=SC2086
expect 3 '^left memcheck +nap_c_suite' --again $naps
for ((i = 0; i < 6; i++)); do
    # shellcheck disable=SC2086
    "$root/tests/sanitize.sh" $naps >out.txt 2>&1
    status=$?
    [[ $status -eq 3 ]] || break
done
[[ $status -eq 0 && $(grep -c '^ok' out.txt) -eq 3 ]] ||
    fault "the slices do not add up: status $status: $(cat out.txt)"
[[ $(sort ended | uniq -c | awk '$1 != 1' | wc -l) -eq 0 && $(wc -l <ended) -eq 3 ]] ||
    fault "not every suite ran once: $(cat ended)"
expect 1 'starting from the beginning' --again --tools memcheck --suites ours_suite
expect 1 '^FAIL memcheck +ours_suite' --tools memcheck --suites ours_suite # remembered
echo "# new" >>build/tests
expect 0 'starting from the beginning' --tools memcheck --suites clean_suite # after a new build

# Kernels that use no shared memory in any of their texts are left out.
rm calls
cat >kernels_ptx.h <<'EOF'
".visible .entry qlora_with(.param .u64 _0\n)\n{\n"
"ld.shared.f32 f0,[r0];\n}\n"
".visible .entry qlora_without(.param .u64 _0\n)\n{\n"
"ld.global.f32 f0,[r0];\n}\n"
".visible .entry qlora_twice(.param .u64 _0\n)\n{\n}\n"
".visible .entry qlora_twice(.param .u64 _0\n)\n{\n"
"cp.async.bulk.shared::cluster.global [r0],[r1],16;\n}\n"
EOF
expect 0 'racecheck left out qlora_twice' --again --tools racecheck --suites clean_suite \
    --shared --without qlora_twice
grep -q -- '--kernel-name-exclude kne=qlora_without --kernel-name-exclude kne=qlora_twice' calls ||
    fault "--without: $(cat calls)"
expect 2 'kernels_ptx.h has no qlora_none' --without qlora_none --suites clean_suite
rm calls
expect 0 'sanitize: 3 clean' --again --shared --suites clean_suite
[[ $(grep -o 'kne=[^ ]*' calls | tr '\n' ' ') == "kne=qlora_decode_layers kne=qlora_without " ]] ||
    fault "--shared: $(cat calls)"
[[ $(grep -c kernel-name calls) -eq 1 && $(wc -l <calls) -eq 3 ]] ||
    fault "--shared is for racecheck: $(cat calls)"
rm kernels_ptx.h
expect 2 'kernels_ptx.h has no kernels' --shared --suites clean_suite

expect 2 'build/tests has no nothing_suite' --suites nothing_suite
expect 2 'leakcheck is not memcheck' --tools leakcheck
expect 2 'whole numbers of seconds' --limit soon
expect 2 'unknown option --what' --what
expect 2 'jobs is a number from 1' --jobs many
rm -r tests/golden
expect 2 'tests/golden not found: run this in the root' --suites clean_suite
mkdir tests/golden
mv build/tests build/others
expect 2 'build/tests not found: run this in the root' --suites clean_suite
mv build/others build/tests
rm bin/compute-sanitizer
PATH=$path
command -v compute-sanitizer >/dev/null ||
    expect 2 'compute-sanitizer not found' --suites clean_suite
exit $bad
