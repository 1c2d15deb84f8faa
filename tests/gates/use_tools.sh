#!/usr/bin/env bash
# generate, merge and plan as a user meets them: right use, wrong use, what they leave behind.
# Needs bash, make and a C compiler, and the model stories260K and its fixture in ../shared (or
# $QLORA_SHARED); skips what needs them otherwise. Usage: tests/gates/use_tools.sh [-v]
# The last line is `N passed, F failed, S skipped`, alone. The status is 1 when something failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
verbose=${1:-}
root=$PWD
work=$root/$B/test-tools
shared=${QLORA_SHARED:-$root/../shared}
passed=0
failed=0
skipped=0

note() { # note STATUS NAME
    if [[ $1 -eq 0 ]]; then
        passed=$((passed + 1))
        [[ $verbose == -v ]] && echo "ok    $2"
    else
        failed=$((failed + 1))
        echo "FAIL  $2"
        tail -n 8 "$work/err" "$work/out" | sed 's/^/      /'
    fi
}

# refuses PATTERN PROGRAM ARGUMENT...: status 1, one line that matches on standard error, nothing on
# standard output, no file or folder named o or o.gguf.
refuses() {
    local pattern=$1 program=$2
    shift 2
    rm -rf o o.gguf
    "$root/$B/$program" "$@" >out 2>err </dev/null
    local status=$?
    [[ $status -eq 1 && $(wc -l <err) -eq 1 && ! -s out && ! -e o && ! -e o.gguf ]] &&
        grep -qE -- "^$program: .*$pattern" err
    note $? "$program $* (status $status, wanted: $pattern)"
}

# says PATTERN PROGRAM ARGUMENT...: status 0, and a line of standard output matches.
says() {
    local pattern=$1 program=$2
    shift 2
    "$root/$B/$program" "$@" >out 2>err </dev/null
    local status=$?
    [[ $status -eq 0 ]] && grep -qE -- "$pattern" out
    note $? "$program $* (status $status, wanted: $pattern)"
}

wrong_use() {
    local program
    for program in generate merge plan; do
        says "^usage: $program" $program --help
        refuses "--frob is no option" $program --frob
        refuses "needs a value" $program --model
        refuses "nothing is no option" $program nothing
    done
    refuses "--model DIR is missing" generate
    refuses "--prompt TEXT, or --chat" generate --model x
    refuses "--prompt TEXT, or --chat" generate --model x --prompt x --chat
    refuses "cannot read nowhere: no such file" generate --model nowhere --prompt x
    refuses "a number from 0 to 100" generate --model x --prompt x --temperature warm
    refuses "a number from 1 to" generate --model x --prompt x --max-tokens 2.5
    refuses "none of auto" generate --model x --prompt x --mode f64
    refuses "--model DIR is missing" merge --out o
    refuses "--adapter DIR is missing" merge --model x --out o
    refuses "--out DIR .* or --gguf" merge --model x --adapter x
    refuses "--out DIR .* or --gguf" merge --model x --adapter x --out o --gguf o.gguf
    refuses "nowhere/config.json" merge --model nowhere --adapter nowhere --out o
    echo "not a model" >precious
    refuses "precious is there already" merge --model x --adapter x --gguf precious
    [[ $(<precious) == "not a model" ]]
    note $? "merge --gguf leaves another file alone"
    refuses "none of bf16" merge --model x --adapter x --out o --dtype f8
    refuses "a number from" plan --memory 8Q
    refuses "nowhere/config.json" plan --model nowhere --memory 8G
    refuses "go together" plan --shape qwen2.5-0.5b --batch 4 --memory 8G
    refuses "would fit" plan --shape llama-3.1-70b --batch 1 --length 512 --memory 8G
}

plans() {
    says "llama-3.1-70b +- +- +- +- +- +-" plan --memory 8G
    says "qwen2.5-0.5b +[0-9]+" plan --memory 8G
    says "^  32 .*-" plan --shape llama-3.1-8b --memory 12G
    says "16-bit weight cache" plan --shape llama-3.1-8b --memory 80G --batch 4 --length 512
}

# The greedy text of a model and its adapter, and of the two merged, must be the same.
texts() {
    local model=$shared/models/stories260K fixture=$shared/fixtures/stories260K text
    if [[ ! -d $model || ! -d $fixture ]]; then
        echo "skip  $model or $fixture is not there"
        skipped=$((skipped + 1))
        return
    fi
    local greedy=(--tokenizer "$model" --prompt "Once upon a" --temperature 0 --max-tokens 40)
    says "^Once upon a time" generate --model "$model" "${greedy[@]}"
    says "^ time" generate --model "$model" "${greedy[@]}" --no-echo
    says "." generate --model "$model" --prompt "" --seed 3 --max-tokens 10
    says "Once" generate --model "$fixture/model" --adapter "$fixture/adapter20" "${greedy[@]}"
    text=$(cat out)
    rm -rf merged merged.gguf
    says "merged is ready" merge --model "$fixture/model" --adapter "$fixture/adapter20" \
        --out merged --base trained --dtype f32
    says "Once" generate --model merged --base 32bit "${greedy[@]}"
    [[ $(cat out) == "$text" ]]
    note $? "the merged model says the same"
    refuses "config.json is there already" merge --model "$fixture/model" \
        --adapter "$fixture/adapter20" --out merged
    says "merged.gguf is ready" merge --model "$fixture/model" --adapter "$fixture/adapter20" \
        --gguf merged.gguf
    [[ $(head -c 4 merged.gguf) == GGUF ]]
    note $? "the GGUF file begins as one"
    refuses "cannot make the folder" merge --model "$fixture/model" \
        --adapter "$fixture/adapter20" --out missing/o
    refuses "cannot read nowhere/adapter_config.json" generate --model "$model" --adapter nowhere \
        --prompt x
    refuses "unknown chat format" generate --model "$model" --chat --template foo
    printf 'hello\n/clear\nagain\n/exit\nnot read\n' |
        "$root/$B/generate" --model "$model" --chat --max-tokens 8 >out 2>err
    [[ $? -eq 0 && $(wc -l <out) -ge 2 ]]
    note $? "a conversation of two turns"
    if [[ -w /dev/full ]]; then
        "$root/$B/generate" --model "$model" "${greedy[@]}" >/dev/full 2>err
        [[ $? -eq 1 ]] && grep -q "could not be written" err
        note $? "a full disk"
    fi
}

rm -rf "$work"
mkdir -p "$work"
[[ -n ${NO_BUILD:-} ]] || ${MAKE:-make} -s B="$B" "$B/generate" "$B/merge" "$B/plan" || exit 1
shared=$(cd "$shared" 2>/dev/null && pwd || echo "$shared")
cd "$work" || exit 1
: >out
: >err
wrong_use
plans
texts
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 && $passed -gt 0 ]]
