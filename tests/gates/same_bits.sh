#!/usr/bin/env bash
# Shows that a change of the code changes no bit of what the programs and the library compute.
#
#   tests/gates/same_bits.sh list cpu|fake|gpu|neon >FILE
#   tests/gates/same_bits.sh compare COMMIT [cpu|fake|gpu|neon]
#
# list builds the programs and prints a line for each result, with its name and a SHA-256: adapters,
# checkpoints, losses, texts, merged models, gradients, logits. cpu uses the processor, in every
# tier that it has; fake the fake GPU; gpu a real one; neon a compiler for aarch64 and qemu. Status
# 1 if a result is missing; what the program said about it is printed.
#
# compare does the same with COMMIT, in a clone under build/same-bits, and with the files here, and
# prints the results that differ: < there, > here. Status 1 if any differ, or if a list is
# incomplete. Both lists are made by the script and the models of this checkout, with the programs
# of either side. The list of a commit is kept and used again as long as nothing changes that it was
# made from.
#
# Models: those that tests/golden/same_models.c makes, one of each family. On the CPU also those of
# QLORA_SHARED (../shared), if it exists. SAME_BITS_MODELS=DIR: the folders in DIR instead, each
# with a tokenizer.
#
# What two equal builds may write differently is not hashed:
#   the version         of the files that name it; replaced by the same word
#   README.md           of an adapter: words about the options, and the version
#   training.html, .svg they have speeds and times
#   state.safetensors   without the data of finetune, which has the seconds of training, and without
#                       the checksum
#   log.jsonl           without speeds, times and memory; the losses are there to nine digits
# Paths are the same everywhere, as all programs run in one folder with relative names. Files have
# no dates.
set -uo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
root=${SAME_BITS_ROOT:-$here} # the checkout whose programs run
B=${B:-build}
CC=${CC:-cc}
MAKE=${MAKE:-make}
shared=${QLORA_SHARED:-$here/../shared}
work=$root/$B/same-bits/work
emulator=()

usage() {
    echo "usage: same_bits.sh list cpu|fake|gpu|neon, or compare COMMIT [cpu|fake|gpu|neon]" >&2
    exit 2
}

say() { echo "same_bits: $*" >&2; }

# ---- what differs between the targets -----------------------------------------------------------

target_set() {
    target=$1
    backend=cpu size=small cpu=1
    steps=20 length=64 tokens=96 pair_tokens=128 parallel=$(nproc 2>/dev/null || echo 2)
    case $target in
    cpu) tiers="portable avx2 avx512 avx512_bf16 amx neon neon_bf16" ;;
    fake) # the interpreter is slow: narrow models, less of everything
        backend=cuda size=tiny cpu=
        steps=10 length=40 tokens=40 pair_tokens=64
        export LD_LIBRARY_PATH=$root/$B/fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        ;;
    gpu)
        backend=cuda cpu=
        parallel=$((parallel < 4 ? parallel : 4)) # each process has a context on the GPU
        ;;
    neon)
        local machine=aarch64
        size=tiny steps=4 length=40 tokens=40 tiers="portable neon neon_bf16"
        B=$B/neon CC=$machine-linux-gnu-gcc
        work=$root/$B/same-bits/work
        emulator=("$(command -v qemu-$machine-static || command -v qemu-$machine)" -cpu max
            -L "/usr/$machine-linux-gnu")
        if ! command -v "$CC" >/dev/null || [[ -z ${emulator[0]} ]]; then
            say "$CC or qemu-$machine not found"
            exit 1
        fi
        ;;
    *) usage ;;
    esac
}

# ---- building -----------------------------------------------------------------------------------

# own_program NAME FILE FLAG...: a program of tests/golden, with the header in root.
own_program() {
    local name=$1 file=$2
    shift 2
    $CC -std=c99 -w -I"$root" -o "$root/$B/$name" "$here/tests/golden/$file.c" "$@" \
        -lm -lpthread -ldl
}

build() {
    local more=()
    [[ $target != fake ]] || more=("$B"/fake/lib{cuda.so.1,cublas.so.13,cublasLt.so.13,nccl.so.2})
    [[ $backend != cuda ]] || more+=("$B/outputs")
    $MAKE -s -j2 -C "$root" B="$B" CC="$CC" programs "${more[@]}" >&2 &&
        own_program same_steps same_steps -O1 "$root/$B/obj/qlora.o" || return 1
    [[ $backend != cuda ]] || own_program same_steps_early same_steps -O0 "${early[@]}"
}

# Kernels that pay only in large models, used from the smallest size on, as in tests/internal.
early=(-DQLORA_IMPLEMENTATION -DQLORA__GATED_FROM=1 -DQLORA__SKINNY_FROM=1 -DQLORA__TAILS_FULL=0
    -DQLORA__FP8_GATED_WIDTH=1 -DQLORA__AWAY_OPERATIONS=0 -DQLORA__LAYERS_SPLIT_FROM=1)

# The models, once for both sides of a comparison: they are what goes in, not a result.
models_make() {
    models=$kept/models-$size
    local dir name
    rm -rf "$models" && mkdir -p "$models" &&
        cc -std=c99 -w -I"$here" -o "$here/build/same_models" "$here/tests/golden/same_models.c" \
            -lm -lpthread -ldl &&
        "$here/build/same_models" $size "$models" >/dev/null || return 1
    if [[ $target == cpu ]]; then
        for dir in "$shared"/fixtures/*/model; do
            name=${dir%/model}
            name=$models/golden-${name##*/}
            [[ -e $dir/config.json ]] || continue
            mkdir "$name" && cp "$dir"/*.json "$dir"/*.safetensors "$name" || return 1
        done
    fi
    for dir in "$models"/*; do
        [[ -e $dir/tokenizer.json ]] || tokenizer_write >"$dir/tokenizer.json"
    done
}

# One token per byte, and one more.
tokenizer_write() {
    local vocab="" other=256 byte i
    for ((byte = 0; byte < 256; byte++)); do
        i=$byte
        if ((byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)); then i=$((other++)); fi
        printf -v vocab '%s%s"\\u%04x":%d' "$vocab" "${vocab:+,}" $i $byte
    done
    cat <<END
{"model": {"type": "BPE", "merges": [], "vocab": {$vocab}},
 "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": true}],
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
 "decoder": {"type": "ByteLevel"}}
END
}

data_make() {
    local i a
    mkdir data || return 1
    for ((i = 0; i < 40; i++)); do
        a="\"prompt\": \"$i plus $((i % 7)) is\""
        echo "{$a, \"completion\": \" $((i + i % 7))\"}" >>data/sums.jsonl
        echo "{$a, \"chosen\": \" $((i + i % 7))\", \"rejected\": \" none, $i\"}" >>data/pairs.jsonl
        echo "{$a, \"completion\": \" $((i + i % 3))\", \"label\": $( ((i % 3)) && echo false ||
            echo true)}" >>data/labels.jsonl
        echo "{\"messages\": [{\"role\": \"user\", \"content\": \"say $i\"}," \
            "{\"role\": \"assistant\", \"content\": \"$i!\"}, {\"role\": \"user\", \"content\":" \
            "\"again\"}, {\"role\": \"assistant\", \"content\": \"$i $i\"}]}" >>data/talks.jsonl
    done
    head -1 data/talks.jsonl >data/talk.json
    head -3 data/sums.jsonl >data/prompts.jsonl
    head -7 data/sums.jsonl >data/held.jsonl
    printf '"<one>"\n{"token": "<two>", "init": "plus"}\n' >data/tokens.jsonl
    cat >data/jobs.json <<'END'
[{"name": "first", "data": "data/sums.jsonl", "rank": 3, "seed": 5},
 {"name": "second", "data": "data/held.jsonl", "rank": 6, "lr": 1e-3, "accumulate": 2}]
END
}

# ---- results ------------------------------------------------------------------------------------

measured="tokens_per_s|seconds|memory_bytes|exchange_ms|waited_ms|slowest_rank"

# A checkpoint without the data of finetune, which has the seconds of training, and without the
# checksum.
plain_state() {
    local length header from to
    length=$(od -An -tu8 -N8 "$1")
    header=$(head -c $((8 + length)) "$1" | tail -c +9)
    from=$(sed -E 's/.*"position":[^}]*"data_offsets":\[([0-9]+),([0-9]+).*/\1 \2/' <<<"$header")
    to=${from#* } from=${from% *}
    head -c $((8 + length + from)) "$1" | plain_text
    tail -c +$((8 + length + to + 1)) "$1" | head -c -8
}

plain_text() {
    LC_ALL=C sed -E "s/qlora\.h $version/qlora.h/g; s/\"version\":\"[0-9]+\"/\"version\":\"\"/"
}

# A file without what may differ between equal builds; see above.
plain() {
    case $1 in
    */state.safetensors) plain_state "$1" ;;
    */log.jsonl) LC_ALL=C sed -E "s/,\"($measured)\":[^,}]*//g" "$1" ;;
    *) plain_text <"$1" ;;
    esac
}

# result NAME PATH...: prints the line of a result, from the names and contents of files.
result() {
    local name=$1 file sum
    shift
    for file in "$@"; do
        [[ -e $file ]] || { say "$name: no $file" && return 1; }
    done
    sum=$(find "$@" -type f ! -name README.md | LC_ALL=C sort | while read -r file; do
        echo "$file"
        plain "$file"
    done | sha256sum) || return 1
    echo "$name ${sum%% *}" >&3
}

# tool PROGRAM ARGUMENT...
tool() {
    local program=$1
    shift
    ${emulator[@]+"${emulator[@]}"} "$root/$B/$program" "$@"
}

# train NAME MODEL OPTION...: a run of finetune, whose folder is runs/NAME. Later options replace
# earlier ones, but for those that may be given twice or not with others.
train() {
    local name=$1 model=$2 usual=()
    shift 2
    [[ " $* " == *" --data "* ]] || usual+=(--data data/sums.jsonl)
    [[ " $* " == *" --adapter "* ]] || usual+=(--rank 6 --alpha 9)
    [[ " $* " == *" --mode "* ]] || usual+=(--mode f32)
    tool finetune --model "models/$model" --lr 2e-3 --length $length --tokens $tokens \
        --eval 4 --eval-every 10 --save-every 10 --steps $steps --template plain --threads 2 \
        --backend $backend --out "runs/$name" "${usual[@]}" "$@"
}

# trained NAME: the results of such a run.
trained() {
    local dir=runs/$1
    result "$1/adapter" "$dir/adapter" && result "$1/checkpoint" "$dir/checkpoint" &&
        result "$1/log" "$dir/log.jsonl" || return 1
    [[ ! -e $dir/adapter.gguf ]] || result "$1/adapter.gguf" "$dir/adapter.gguf"
}

run() { # run NAME MODEL OPTION...: both
    train "$@" && trained "$1"
}

# What a GGUF file cannot say.
no_gguf="llama.cpp would compute this model differently|cannot be merged into a GGUF file"
no_gguf+="|has no place in a GGUF file"

# merged NAME RESULT MODEL ADAPTER OPTION...: a folder and a GGUF file. That a model has none is a
# result as well.
merged() {
    local name=$1 model=models/$3 adapter=$4 out=runs/$1-$2
    local line=$1/$2
    shift 4
    tool merge --model "$model" --adapter "$adapter" --out "$out" "$@" &&
        result "$line" "$out" || return 1
    gguf "$line.gguf" "$out.gguf" "$model" "$adapter" "$@"
}

gguf() { # gguf LINE FILE MODEL ADAPTER OPTION...
    local line=$1 out=$2 model=$3 adapter=$4
    shift 4
    if tool merge --model "$model" --adapter "$adapter" --out "$out" "$@" 2>"$out.said"; then
        result "$line" "$out"
    elif grep -qE "$no_gguf" "$out.said"; then
        result "$line" "$out.said"
    else
        cat "$out.said"
        return 1
    fi
}

# texts NAME MODEL OPTION...: a greedy text with log-probabilities, and samples in batches.
texts() {
    local name=$1 model=$2
    local some=(--model "models/$model" --backend "$backend" --threads 2 "${@:3}")
    mkdir -p "runs/$name-texts"
    tool generate "${some[@]}" --prompt "3 plus 4 is" --max-tokens 16 --temperature 0 --ids \
        --logprobs >"runs/$name-texts/greedy" &&
        tool generate "${some[@]}" --data data/prompts.jsonl --template plain --samples 2 \
            --batch 3 --max-tokens 9 --temperature 0.8 --top-k 50 --top-p 0.9 --min-p 0.01 \
            --repetition-penalty 1.1 --seed 3 --out "runs/$name-texts/samples" &&
        result "$name/texts" "runs/$name-texts"
}

# library NAME MODEL SETTING...: what same_steps.c computes.
library() {
    local name=$1 model=$2 kind=cpu program=${program:-same_steps}
    local out=runs/$name
    [[ $backend == cpu ]] || kind=cuda
    shift 2
    mkdir -p "$out" && tool "$program" "models/$model" "$out" 4 $kind "$@" &&
        result "$name/evaluation" "$out/evaluation" "$out/logits" &&
        result "$name/steps" "$out/steps" "$out/checkpoint" && result "$name/texts" "$out/texts" ||
        return 1
    [[ ! -e $out/gradients ]] || result "$name/gradients" "$out/gradients"
}

# ---- cases --------------------------------------------------------------------------------------

family() { # everything that a family can do differently
    local name=$1
    run "$name" "$name" && texts "$name" "$name" --adapter "runs/$name/adapter" --mode f32 &&
        merged "$name" merged "$name" "runs/$name/adapter" &&
        library "$name-parts" "$name" parts dropout && bits16 "$name"
}

bits16() {
    local name=$1
    [[ $target != neon ]] || return 0 # the tiers have it
    train "$name-bf16" "$name" --mode bf16 --steps 6 --train-norms --eval 0 &&
        result "$name-bf16/adapter" "runs/$name-bf16/adapter"
}

tier() { # tier NAME TIER MODEL
    export QLORA_CPU_TIER=$2
    local name=$1 model=$3
    if [[ $model == llama-wide ]]; then
        library "$name" "$model" parts && library "$name-bf16" "$model" parts bf16
        return
    fi
    run "$name" "$model" --sample-prompt "3 plus" --sample-tokens 6 &&
        run "$name-bf16" "$model" --mode bf16 --base 16bit && texts "$name" "$model" \
        --mode bf16 && library "$name-calls" "$model" graph
}

early() { # the same with the thresholds of the kernels lowered
    program=same_steps_early library "$@"
}

capability() { # capability NAME CC: the kernels of another device
    export FAKECUDA_CC=$2 QLORA_GPU_TARGET=sm_$2
    run "$1" llama && kernels "$1" || return 1
    [[ $2 == 75 ]] || run "$1-bf16" qwen3 --mode bf16
}

# Two processes. The fake NCCL has the path of a temporary folder in an id of 128 bytes, too few for
# that of a clone.
ranks() {
    local status
    export CUDA_VISIBLE_DEVICES=0
    TMPDIR=$(mktemp -d) || return 1
    export TMPDIR
    run "$@" --ranks 2 --accumulate 4 --rank-limit 120
    status=$?
    rm -rf "$TMPDIR"
    return $status
}

kernels() { # every kernel alone; the status is that of a table of figures which must be complete
    mkdir "runs/$1-kernels"
    tool outputs --write "runs/$1-kernels/outputs"
    [[ -s runs/$1-kernels/outputs ]] && result "$1/kernels" "runs/$1-kernels"
}

resumed() { # the second half of a run, in another process
    train "$1" llama --save-every 5 --dropout 0.1 --snapshot-every 7 \
        --keep-best &&
        rm -r "runs/$1/checkpoint/step-$steps" "runs/$1/adapter" &&
        train "$1" llama --save-every 5 --dropout 0.1 --snapshot-every 7 \
            --keep-best && trained "$1" &&
        result "$1/others" "runs/$1/best" "runs/$1/snapshots"
}

jobs_case() { # several adapters at once
    tool finetune --model models/llama --jobs data/jobs.json --length $length --tokens $tokens \
        --eval 2 --steps $steps --template plain --threads 2 --backend $backend --out "runs/$1" \
        "${@:2}" &&
        trained "$1/first" && trained "$1/second"
}

again() { # from an adapter that was trained before, and evaluated
    train "$1-before" qwen3 --steps 4 --eval 0 --rslora --targets q,v,down &&
        run "$1" qwen3 --adapter "runs/$1-before/adapter" --lr 1e-3 &&
        tool finetune --model models/qwen3 --adapter "runs/$1/adapter" --data data/held.jsonl \
            --template plain --eval-only --json --threads 2 --backend $backend \
            >"runs/$1/evaluated.json" && result "$1/evaluated" "runs/$1/evaluated.json"
}

formats() { # formats NAME MODEL: the adapter of another case in every format
    local name=$1 model=$2 adapter=runs/$1-adapter kind
    train "$name-adapter" "$model" --steps 6 --eval 0 || return 1
    for kind in f16 f32; do
        merged "$name" $kind "$model" "$adapter" --dtype $kind || return 1
    done
    for kind in q8_0 q4_0; do
        gguf "$name/$kind" "runs/$name-$kind.gguf" "models/$model" "$adapter" --dtype $kind ||
            return 1
    done
    merged "$name" trained "$model" "$adapter" --base trained &&
        tool merge --model "models/$model" --adapter "$adapter" --base fp8 \
            --out "runs/$name-fp8" && result "$name/fp8" "runs/$name-fp8" &&
        tool merge --model "models/$model" --adapter "$adapter" --shard 1M \
            --out "runs/$name-shards" && result "$name/shards" "runs/$name-shards" &&
        cp "runs/$name-q8_0.gguf" "models/$name-q8_0.gguf" &&
        run "$name-from-gguf" "$name-q8_0.gguf" --base-name x/y &&
        texts "$name-from-gguf" "$name-q8_0.gguf"
}

trained_merged() { # a run whose merged model has more than projections
    run "$@" && merged "$1" merged "$2" "runs/$1/adapter" --base trained &&
        texts "$1" "$2" --adapter "runs/$1/adapter"
}

tokens() { # no arithmetic: ids, templates
    local file
    mkdir "runs/$1"
    tool tokenize models/llama <data/talks.jsonl >"runs/$1/ids" || return 1
    for file in "$shared"/templates/*.jinja; do
        [[ -e $file ]] || continue
        cp "$file" template.jinja
        tool tokenize models/llama --chat data/talk.json --text --chat-template template.jinja \
            --generation-prompt --now 2026-01-02T03:04:05 >"runs/$1/${file##*/}" 2>&1
    done
    result "$1" "runs/$1"
}

# ---- the list -----------------------------------------------------------------------------------

names=()
commands=()

add() { # add FUNCTION NAME ARGUMENT...: a case, whose files are runs/NAME*
    local command
    printf -v command '%q ' "$@"
    names+=("$2")
    commands+=("$command")
}

# A checkout from before a family has nothing to compare with.
add_families() {
    local dir type
    for dir in models/*/; do
        dir=${dir%/}
        type=$(sed -n 's/.*"model_type": *"\([a-z0-9_]*\)".*/\1/p' "$dir/config.json" | head -1)
        if grep -q "\"$type\"" "$root/src/arch.h"; then
            add family "${dir#models/}"
        else
            say "${dir#models/} left out: $root has no family $type"
        fi
    done
}

# What finetune can be told that changes how or what it computes.
add_options() {
    add run base16 llama --base 16bit
    add run base32 llama --base 32bit
    add run base-fp8 qwen3 --base fp8 --train-norms
    add run fp8-folder llama-fp8 --sample-prompt "3 plus" --sample-tokens 6
    add run bf16-base16 qwen3 --mode bf16 --base 16bit
    add run bf16-base-fp8 llama --mode bf16 --base fp8
    add run head-nf4 llama --head nf4
    add run recompute llama --recompute on --dropout 0.1
    add run tile qwen3 --tile 32 --dropout 0.1
    add run cache llama --cache on
    add run no-cache llama --cache off --recompute off
    add run bf16-tile gemma2 --mode bf16 --tile 32
    add run keep llama --keep-quantised --quantised-dir "runs"
    add trained_merged dora llama --dora
    add run dora-bf16 qwen3 --dora --mode bf16
    add run rslora llama --rslora --rank 9 --targets q,v,o
    add trained_merged norms gemma2 --train-norms
    add run norms-qwen3 qwen3 --train-norms --train-prompt
    add trained_merged embed llama --save-modules embed
    add run head llama --save-modules head
    add trained_merged both llama --save-modules both
    add trained_merged tied llama-tied --save-modules embed
    add run rows llama --train-tokens 49,50,51,60
    add run rows-tied llama-tied --train-tokens 49,50,51,60
    add run new-tokens llama-tied --add-tokens data/tokens.jsonl
    add run adamw8 llama --optimizer adamw8bit --weight-decay 0.1
    add run loraplus llama --loraplus-ratio 8 --lr-factors q=0.5,norms=0.25 --train-norms
    add run neftune llama --neftune 5
    add run linear llama --schedule linear --warmup 3 --beta2 0.95 --max-norm 0.5
    add run constant llama --schedule constant --max-norm 0 --accumulate 1
    add run accumulate llama --accumulate 5 --seed 9
    add run one-thread llama --threads 1
    add run talks llama --data data/talks.jsonl --last-turn --truncate
    add run weighted llama --data data/held.jsonl:0.5 --stream on --eval-data data/held.jsonl
    add run yarn llama --rope-scale yarn:2 --length 300 --tokens 300
    add run linear-scale qwen3 --rope-scale linear:2
    add resumed resumed
    add again again
    add jobs_case jobs --mode f32
    add jobs_case jobs-bf16 --mode bf16
}

add_methods() {
    local dpo=(--method dpo --data data/pairs.jsonl --tokens "$pair_tokens")
    local kto=(--method kto --data data/labels.jsonl --tokens "$pair_tokens" --accumulate 4)
    local method
    add run dpo llama "${dpo[@]}"
    add run dpo-more qwen3 "${dpo[@]}" --beta 0.3 --label-smoothing 0.1 --sft-alpha 0.5 \
        --reference beside
    add run dpo-bf16 llama "${dpo[@]}" --mode bf16 --dora
    add run kto llama "${kto[@]}"
    add run kto-more gemma2 "${kto[@]}" --reference beside --desirable-weight 1.3 \
        --undesirable-weight 0.8
    add run kto-bf16 llama "${kto[@]}" --mode bf16
    for method in $(tool finetune --help | grep -m1 -oE -- "--method [a-z0-9|]+" | tr "|" " "); do
        [[ $method == --method || $method == sft || "${commands[*]}" == *"--method $method "* ]] ||
            { say "no case has --method $method" && return 1; }
    done
}

add_library() {
    local way
    for way in graph eager micro slices parts; do
        add library "way-$way" llama $way
        add library "way-$way-bf16" qwen3 $way bf16 dropout
    done
    add library chunks llama parts chunks again
    add library clip-layers gemma2 parts clip-layers
    add library single-quant llama parts single-quant
    add library one-thread-parts llama parts one-thread
}

add_merges() {
    add formats formats-llama llama
    add formats formats-phi3 phi3
    [[ $target != cpu ]] || add formats formats-gemma2 gemma2
}

add_tiers() {
    local tier model
    for tier in $tiers; do
        if QLORA_CPU_TIER=$tier tool finetune --model models/llama --plan --backend cpu \
            >plan 2>&1; then
            for model in llama gemma2 qwen3 llama-wide; do
                [[ ! -d models/$model ]] || add tier "tier-$tier-$model" "$tier" $model
            done
        elif ! grep -q "QLORA_CPU_TIER" plan; then
            cat plan >&2
            return 1
        fi
    done
}

add_gpu() {
    add run tf32 llama --mode tf32
    add library tf32 llama parts tf32
    add library tf32-all llama parts tf32-all
    add library no-cublas llama parts no-cublas
    add library no-cublas-bf16 qwen3 parts no-cublas bf16
    add run offload llama --offload on
    add run offload-bf16 qwen3 --offload on --mode bf16 --tile 32
    add early early-bf16 llama parts rank-8 bf16
    add early early-again llama parts rank-8 bf16 again
    add early early-gelu gemma2 graph rank-8 bf16
    add early early-dropout gemma2 parts rank-8 bf16 dropout
    add early early-base-fp8 qwen3 parts rank-8 bf16 base-fp8
    add early early-f32 llama parts rank-8
    # Only compute capability 9.0 has it; if one side of a comparison refuses it, its lines are
    # missing, which is a difference.
    if tool finetune --model models/llama --mode fp8 --plan --backend cuda >plan 2>&1; then
        add run fp8 llama --mode fp8
        add run fp8-base qwen3 --mode fp8 --base fp8
        add early early-fp8 llama parts rank-8 fp8
        add early early-fp8-base qwen3 parts rank-8 fp8 base-fp8
    fi
    if [[ $target == fake ]]; then
        add ranks ranks llama
        add capability sm-89 89
        add capability sm-100 100
    fi
    add capability sm-75 75
    add capability sm-80 80
    add kernels kernels
}

cases() {
    if [[ $target == neon ]]; then
        add_tiers
        return
    fi
    [[ -n $cpu ]] || add_gpu
    add_options
    add_methods || return 1
    add_library
    add_merges
    add_families
    [[ -z $cpu ]] || add_tiers
    add tokens tokens
}

one() { # one NUMBER: runs a case
    local name=${names[$1]}
    if ! eval "${commands[$1]}" 3>"lines/$1" >"said/$1" 2>&1 </dev/null; then
        say "$name failed"
        tail -4 "said/$1" | sed 's/^/    /' >&2
        echo "$name" >>failed
    fi
}

list() {
    local i running=0
    build || return 1
    models=${SAME_BITS_MODELS:-}
    [[ -n $models ]] || models_make || return 1
    models=$(cd "$models" && pwd) || return 1
    version=$(sed -n 's/^#define QLORA_VERSION_STRING "\(.*\)"/\1/p' "$root/src/api/linkage.h")
    rm -rf "$work" && mkdir -p "$work"/{runs,lines,said,models} && cd "$work" || return 1
    ln -s "$models"/* models/ && data_make && cases || return 1
    for i in "${!names[@]}"; do
        if ((running == parallel)); then
            wait -n
            running=$((running - 1))
        fi
        one "$i" &
        running=$((running + 1))
    done
    wait
    for i in "${!names[@]}"; do
        cat "lines/$i"
    done
    [[ ! -e failed ]]
}

# ---- comparing ----------------------------------------------------------------------------------

# A checkout of a commit, whose programs stay built.
clone_make() { # clone_make COMMIT
    clone=$kept/${1:0:12}
    [[ ! -d $clone ]] || return 0
    rm -rf "$clone.new"
    git clone -q --shared --no-checkout "$here" "$clone.new" &&
        git -C "$clone.new" checkout -q --detach "$1" && mv "$clone.new" "$clone"
}

# All that a kept list of a commit depends on.
key() {
    {
        $CC --version
        grep -m1 flags /proc/cpuinfo
        cat "$0" "$here/tests/golden/same_steps.c" "$models"/*/*
        [[ $target != cpu ]] || cat "$shared"/templates/*.jinja 2>/dev/null
        [[ $target != gpu ]] || nvidia-smi -L
    } | sha256sum | cut -c1-12
}

compare() {
    local commit there
    commit=$(git -C "$here" rev-parse -q --verify "$1^{commit}") || {
        say "there is no commit $1"
        return 1
    }
    models=${SAME_BITS_MODELS:-}
    [[ -n $models ]] || models_make || return 1
    export SAME_BITS_MODELS=$models
    mkdir -p "$kept" && clone_make "$commit" || return 1
    there=$clone/$target.$(key)
    if [[ ! -e $there ]]; then
        SAME_BITS_ROOT=$clone B=$plain_b CC=$plain_cc "$0" list "$target" >"$there.new" || {
            say "the list of $1 is incomplete"
            return 1
        }
        mv "$there.new" "$there"
    fi
    B=$plain_b CC=$plain_cc "$0" list "$target" >"$kept/$target.here" || {
        say "the list of this checkout is incomplete"
        return 1
    }
    lists_compare "$there" "$kept/$target.here"
}

# Prints the lines that differ; a list without lines would be the same as any other without them.
lists_compare() {
    local all
    all=$(wc -l <"$2")
    if [[ ! -s $1 || ! -s $2 ]]; then
        say "a list is empty"
        return 1
    fi
    if ! diff "$1" "$2" >"$kept/differences"; then
        grep '^[<>]' "$kept/differences"
        say "$(grep '^[<>]' "$kept/differences" | cut -d' ' -f2 | sort -u | wc -l) of $all differ"
        return 1
    fi
    echo "same_bits: $all results, all the same"
}

kept=$here/build/same-bits
plain_b=$B plain_cc=$CC
case ${1:-} in
list)
    [[ $# -eq 2 ]] || usage
    target_set "$2"
    list
    ;;
compare)
    [[ $# -eq 2 || $# -eq 3 ]] || usage
    target_set "${3:-cpu}"
    compare "$2"
    ;;
*) usage ;;
esac
