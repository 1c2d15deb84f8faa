#!/usr/bin/env bash
# Uses finetune as a person would: correctly, incorrectly, killed, and on a full disk.
# Needs bash, make and a C compiler; creates its own small model.
# Usage: use_programs.sh [-v] [GROUP...], where a group is one of the functions listed at the end.
# The last line is `N passed, F failed, S skipped`. The status is 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
verbose=
[[ ${1:-} == -v ]] && verbose=-v && shift
root=$PWD
work=$root/$B/test-programs
finetune=${FINETUNE:-$root/$B/finetune}
passed=0
failed=0

note() {
    if [[ $1 == ok ]]; then
        passed=$((passed + 1))
        [[ $verbose == -v ]] && echo "ok    $2"
    else
        failed=$((failed + 1))
        echo "FAIL  $2"
        sed 's/^/      /' "$work/err" "$work/out" | tail -8
    fi
}

check() { # check NAME COMMAND...: the command must succeed
    local name=$1
    shift
    if "$@"; then note ok "$name"; else note bad "$name"; fi
}

run() { # output in $work/out and $work/err, status in $status
    "$@" >"$work/out" 2>"$work/err"
    status=$?
}

# refuses NAME PATTERN ARGUMENT...: expects exit status 1, one matching line on standard error, no
# API names in it, and no folder o.
refuses() {
    local name=$1 pattern=$2
    shift 2
    rm -rf o
    run "$finetune" "$@"
    if [[ $status -eq 1 && $(wc -l <"$work/err") -eq 1 && ! -e o ]] &&
        grep -qE -- "^finetune: .*$pattern" "$work/err" && ! grep -qi qlora_ "$work/err"; then
        note ok "$name"
    else
        note bad "$name (status $status, expected: $pattern)"
    fi
}

works() { # works NAME ARGUMENT...
    local name=$1
    shift
    run "$finetune" "$@"
    [[ $status -eq 0 && ! -s $work/err ]]
    check "$name ($status)" [ $? -eq 0 ]
}

# ---- a small model: random bf16 weights, one token per byte ----

tensor() { # name, shape, number of values
    local end=$((at + $3 * 2))
    header+="${header:+,}\"$1\":{\"dtype\":\"BF16\",\"shape\":[$2],\"data_offsets\":[$at,$end]}"
    at=$end
}

model_make() {
    local header="" at=0 layer p byte i length
    local block="" h=32 m=64 norms_at x=7 pair
    mkdir -p model
    tensor model.embed_tokens.weight 257,$h $((257 * h))
    for layer in 0 1; do
        p=model.layers.$layer
        for i in q k v o; do tensor $p.self_attn.${i}_proj.weight $h,$h $((h * h)); done
        tensor $p.mlp.gate_proj.weight $m,$h $((m * h))
        tensor $p.mlp.up_proj.weight $m,$h $((m * h))
        tensor $p.mlp.down_proj.weight $h,$m $((m * h))
    done
    norms_at=$at
    tensor model.norm.weight $h $h
    for layer in 0 1; do
        tensor model.layers.$layer.input_layernorm.weight $h $h
        tensor model.layers.$layer.post_attention_layernorm.weight $h $h
    done
    # Any low byte; a high byte that gives 0.03 to 0.25 or its negative. Not $RANDOM, which a
    # subshell seeds again: every run must have the same model.
    for ((i = 0; i < 1021; i++)); do
        x=$(((x * 1103515245 + 12345) & 0x7fffffff))
        printf -v pair '\\%03o\\%03o' $((x >> 8 & 255)) $(((x >> 16 & 1) * 128 + 61))
        block+=$pair
    done
    printf "$block" >block
    while [[ $(stat -c %s data.bin 2>/dev/null || echo 0) -lt $at ]]; do cat block >>data.bin; done
    header="{$header}"
    length=${#header}
    {
        for ((i = 0; i < 8; i++)); do printf "\\$(printf %03o $(((length >> (8 * i)) & 255)))"; done
        printf %s "$header"
        head -c $norms_at data.bin
        for ((i = norms_at; i < at; i += 2)); do printf '\200\077'; done # ones
    } >model/model.safetensors
    cat >model/config.json <<END
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
 "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
 "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 128,
 "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
 "tie_word_embeddings": true, "bos_token_id": 256, "eos_token_id": 256, "torch_dtype": "bfloat16"}
END
    local vocab="" other=256
    for ((byte = 0; byte < 256; byte++)); do
        i=$byte
        if ((byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)); then i=$((other++)); fi
        vocab+=$(printf '%s"\\u%04x":%d' "${vocab:+,}" $i $byte)
    done
    cat >model/tokenizer.json <<END
{"model": {"type": "BPE", "merges": [], "vocab": {$vocab}},
 "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": true}],
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
 "decoder": {"type": "ByteLevel"}}
END
}

data_make() {
    local i
    for ((i = 0; i < 120; i++)); do
        echo "{\"prompt\": \"$i plus $((i % 7)) is\", \"completion\": \" $((i + i % 7))\"}"
    done >sums.jsonl
    sed 's/$/\n/' sums.jsonl | head -8 >short.jsonl
    { head -2 sums.jsonl; echo '{"prompt": "broken", "completion": }'; } >broken.jsonl
    : >empty.jsonl
    echo '{"prompt": "a long one", "completion": "'"$(printf 'x%.0s' {1..300})"'"}' >long.jsonl
    cat short.jsonl long.jsonl >mixed.jsonl
    echo '{"prompt": "", "completion": ""}' >nothing.jsonl
    printf 'not json at all\n' >words.jsonl
    echo 'a file' >plain
}

# ---- wrong use ----

wrong_use() {
    local all=(--model model --data sums.jsonl --out o)
    refuses "no arguments" "--model DIR is required"
    refuses "no data" "--data FILE is required" --model model --out o
    refuses "no out" "--out DIR is required" --model model --data sums.jsonl
    refuses "unknown option" "unknown option --rang; did you mean --rank" "${all[@]}" --rang 8
    refuses "unknown option, nothing near" "unknown option --frobnicate" "${all[@]}" --frobnicate
    refuses "stray argument" "unexpected argument 'word'" "${all[@]}" word
    refuses "no value" "--rank needs a value" "${all[@]}" --rank
    refuses "flag with a value" "--rslora does not take a value" "${all[@]}" --rslora=1
    refuses "not a number" "--lr: 'fast' is not a number" "${all[@]}" --lr fast
    refuses "a number and more" "--rank: '8x' is not a number" "${all[@]}" --rank 8x
    refuses "not whole" "--rank: '1.5' is not a whole number" "${all[@]}" --rank 1.5
    refuses "out of range" "--rank: 0 is out of range; use 1 to 1024" "${all[@]}" --rank 0
    refuses "size out of range" "--memory: 1K is out of range; use 1M to" "${all[@]}" --memory 1K
    refuses "empty value" "--template needs a non-empty value" "${all[@]}" --template ""
    refuses "nan" "--lr: nan is out of range" "${all[@]}" --lr nan
    refuses "unknown choice" "--schedule: 'cos' is not one of cosine" "${all[@]}" --schedule cos
    refuses "unknown target" "--targets: 'z' is not one of q.*; all stands" "${all[@]}" \
        --targets q,z
    refuses "length above tokens" "--length .64. must not exceed --tokens .32." "${all[@]}" \
        --length 64 --tokens 32
    refuses "length above the model" "must not exceed the model's limit of 128" "${all[@]}" \
        --length 4096
    refuses "demo with model" "--demo creates its own" "${all[@]}" --demo
    refuses "unknown template" "chat format.*nonsense" "${all[@]}" --template nonsense
    refuses "missing model" "--model nowhere: config.json not found" --model nowhere \
        --data sums.jsonl --out o
    refuses "a model of the hub" "config.json not found; .* --local-dir b, then --model b$" \
        --model a/b --data sums.jsonl --out o
    refuses "data of the hub" \
        "no such file; .* --repo-type dataset a/b --local-dir b, then --data b/" --model model \
        --data a/b --out o
    refuses "an adapter of the hub" "not found; .* download a/b --local-dir b, then --adapter b$" \
        "${all[@]}" --adapter a/b
    refuses "not an adapter of the hub" "--adapter model/b: adapter_config.json not found$" \
        "${all[@]}" --adapter model/b
    refuses "TRL's name" "unknown option --learning_rate; did you mean --lr.$" "${all[@]}" \
        --learning_rate 1e-4
    refuses "missing data" "nowhere.jsonl" --model model --data nowhere.jsonl --out o
    refuses "missing data without an ending" "--data nowhere: No such file" --model model \
        --data nowhere --out o
    refuses "missing evaluation data" "--eval-data nowhere: No such file" "${all[@]}" \
        --eval-data nowhere
    refuses "empty data" "empty.jsonl" --model model --data empty.jsonl --out o
    refuses "bad JSON names its line" "broken.jsonl:3|broken.jsonl.*line 3" \
        --model model --data broken.jsonl --out o
    refuses "no JSON" "words.jsonl" --model model --data words.jsonl --out o
    refuses "only long samples" "the only sample cannot be used: 1 too long" \
        --model model --data long.jsonl --out o
    refuses "nothing to train" "the only sample cannot be used" --model model --data nothing.jsonl \
        --out o
    refuses "eval takes all" "would hold out all 120 samples" "${all[@]}" --eval 120
    refuses "out below a file" "cannot create the output folder plain/o" \
        --model model --data sums.jsonl --out plain/o
    refuses "out is a file" "plain is not a folder" --model model --data sums.jsonl --out plain
    refuses "adapter missing" "--adapter nowhere: adapter_config.json not found" \
        "${all[@]}" --adapter nowhere
    mkdir -p begun && touch begun/settings.txt
    refuses "adapter of a run that goes on" "the run there has not ended" \
        "${all[@]}" --adapter begun
    refuses "memory too small" "not enough memory: " "${all[@]}" --memory 1M
    vast_model
    refuses "nothing to resume" "no checkpoint found" "${all[@]}" --resume must
    refuses "long prompt" "--prompt has 200 tokens; the limit is 127" "${all[@]}" \
        --prompt "$(printf 'x%.0s' {1..200})"
    mkdir -p bare # without weights: what is said comes before they are read
    cp model/config.json model/tokenizer.json bare
    refuses "long prompt, before loading" "--prompt has 200 tokens; the limit is 127" "${all[@]}" \
        --model bare --prompt "$(printf 'x%.0s' {1..200})"
    refuses "no weights" "model.safetensors" "${all[@]}" --model bare
}

# A model of 16 TiB: more than any machine has. It needs no weights, as it is planned before they
# are read. Also sizes and --name=value, which decide what is said.
vast_model() {
    local size big=(--model vast --base 32bit --tokens 256 --backend cpu)
    mkdir -p vast
    cp model/tokenizer.json vast
    sed -e 's/"hidden_size": 32/"hidden_size": 32768/; s/_heads": 2,/_heads": 256,/' \
        -e 's/"intermediate_size": 64/"intermediate_size": 131072/' \
        -e 's/_layers": 2,/_layers": 256,/' model/config.json >vast/config.json
    local fault="not enough memory: the model needs 16[0-9.]+ GiB even with .*, but only"
    refuses "more than the machine has" "$fault [0-9.]+ GiB are available \(base 16[0-9.]+," \
        "${big[@]}" --data sums.jsonl --steps 1 --out o
    refuses "a plan of more" "$fault [0-9.]+ GiB are available \(base 16[0-9.]+," "${big[@]}" --plan
    for size in 8GB 8gb; do
        refuses "--memory=$size" "$fault 7.45 GiB are" "${big[@]}" --plan --memory=$size
    done
    for size in 8G 8gib; do
        refuses "--memory $size" "$fault 8.00 GiB are" "${big[@]}" --plan --memory $size
    done
    [[ -x $root/$B/plan ]] || return
    run "$root/$B/plan" --model vast --base 32bit --batch 1 --length 32
    check "the program plan ($status)" grep -qE "^plan: $fault [0-9.]+ GiB are available" err
    run "$root/$B/plan" --model vast --base 32bit
    check "a table of plans ($status)" grep -qE "^  1 +- +$" out
}

# ---- looking first ----

looking() {
    works "help" --help
    check "help names every option" [ "$(grep -c '^  --' out)" -ge 40 ]
    check "help is at most 80 columns wide" [ "$(awk 'length > 80' out | wc -l)" -eq 0 ]
    check "help shows the defaults" grep -qE "^  --rank N +LoRA rank \(default 16\)" out
    rm -rf o
    rm -rf written
    works "--name=value" --model=model --data=sums.jsonl --tokens=256 --rank=1 --eval=0 \
        --backend=cpu --threads=1 --steps=3 --memory=8gb --out=written
    check "has its meaning" grep -qE "^step 3/3" out
    check "also in the settings" grep -qx "rank 1" written/settings.txt
    works "plan" --model model --plan
    check "plan shows a total" grep -q "total.*MiB" out
    check "no data, no time" [ "$(grep -c '^time: ' out)" -eq 0 ]
    works "plan with data" --model model --data sums.jsonl --plan --backend cpu --steps 7
    check "plan tells the time" \
        grep -qE "^time: about [0-9hms]+ on this CPU for 7 steps, without evaluation$" out
    works "doctor" --model model --data mixed.jsonl --doctor
    check "doctor marks what is trained" grep -qE "^  TRAINED > +0<\|endoftext\|>" out
    check "doctor counts the long one" grep -qE "too long for --length +1 " out
    check "doctor tells the time" grep -qE "^time: about [0-9hms]+ on this CPU for [0-9]+ step" out
    check "nothing was created" [ ! -e o ]
}

# ---- training, stopping, resuming ----

same_files() {
    cmp -s "$1/adapter/adapter_model.safetensors" "$2/adapter/adapter_model.safetensors"
}

losses() { # the steps and losses of a log, without the times
    sed -n 's/^{"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1/log.jsonl"
}

wait_for_steps() { # folder, steps, process
    while kill -0 "$3" 2>/dev/null && [[ $(losses "$1" 2>/dev/null | wc -l) -lt $2 ]]; do
        sleep 0.02
    done
}

line_of() { # the number of the first matching line of the output
    grep -nE "$1" out | head -1 | cut -d: -f1
}

# stop_midway SIGNAL DIR STEPS ARGUMENT...: trains into DIR and sends the signal after STEPS of 60
# steps; the status is in $status. On a busy machine, training may finish before the signal arrives;
# it is then tried again.
stop_midway() {
    local signal=$1 dir=$2 steps=$3 pid try
    shift 3
    for try in 1 2 3 4 5 6 7 8; do
        rm -rf "$dir"
        "$finetune" "$@" --out "$dir" >/dev/null 2>&1 &
        pid=$!
        wait_for_steps "$dir" "$steps" $pid
        kill "-$signal" $pid 2>/dev/null
        wait $pid 2>/dev/null
        status=$?
        [[ $(losses "$dir" | wc -l) -lt 60 ]] && return
        [[ $verbose == -v ]] && echo "      (attempt $try was over before the signal)"
    done
}

training() {
    local common=(--model model --data sums.jsonl --tokens 256 --rank 4 --dropout 0.1 --seed 3)
    common+=(--steps 60 --save-every 7 --lr 3e-3 --backend cpu --threads 1)
    rm -rf whole killed stopped
    works "train" "${common[@]}" --out whole
    cp out whole.txt
    check "what computes" grep -qE \
        "^CPU, 1 thread, [a-z0-9_]+ .requested by --backend., b?f(32|16)$" whole.txt
    check "the page says it" grep -q "CPU, 1 thread, .*requested by --backend" whole/training.html
    printed_line "texts" '^0 plus 0 is '
    check "the loss falls" awk 'NR == 1 { a = $2 } { b = $2 } END { exit !(b < 0.8 * a) }' \
        <(losses whole)
    check "one log line per step" [ "$(losses whole | wc -l)" -eq 60 ]
    check "a plot" grep -q '</svg>' whole/training.svg
    check "an adapter" [ -s whole/adapter/adapter_config.json ]
    check "no temporary files" [ -z "$(find whole -name '*.new' -o -name '*.tmp')" ]

    stop_midway KILL killed 9 "${common[@]}"
    check "killed in the middle" [ "$(losses killed | wc -l)" -lt 60 ]
    works "resume after kill -9" "${common[@]}" --out killed --resume must
    check "it did resume" grep -q "resumed after step" out
    check "killed and resumed: same adapter" same_files whole killed
    check "killed and resumed: same losses" diff <(losses whole) <(losses killed)

    stop_midway INT stopped 4 "${common[@]}"
    check "Ctrl-C gives 130" [ $status -eq 130 ]
    check "Ctrl-C saves" [ -s stopped/adapter/adapter_model.safetensors ]
    works "resume after Ctrl-C" "${common[@]}" --out stopped
    check "stopped and resumed: same adapter" same_files whole stopped
    works "once more: nothing to do" "${common[@]}" --out stopped
    check "still the same adapter" same_files whole stopped
    check "and the same summary" grep -qF "$(sed -n 's/^\(loss .* -> .*\)/\1/p' whole.txt)" out
    run "$finetune" "${common[@]}" --out stopped --rank 8
    check "different options are named" grep -q -- "it used --rank 4, this command has --rank 8" err
    run "$finetune" "${common[@]}" --out stopped --schedule linear
    check "choices are named" grep -q -- "used --schedule cosine, .* has --schedule linear;" err
    run "$finetune" "${common[@]}" --out stopped --targets q,up
    check "targets are named" grep -q -- "--targets all, .* has --targets q,up;" err
    run "$finetune" "${common[@]}" --out stopped --rslora
    check "flags are named" grep -q -- "used no --rslora, this command has --rslora;" err
    sed 's/plus/and/' sums.jsonl >other.jsonl
    cp sums.jsonl kept && cp other.jsonl sums.jsonl
    run "$finetune" "${common[@]}" --out stopped
    check "changed data is rejected" grep -q "the data has changed since stopped" err
    cp kept sums.jsonl
}

long_samples() {
    local common=(--model model --data mixed.jsonl --tokens 256 --rank 2 --steps 2 --eval 0)
    common+=(--resume never)
    works "train with a long sample in the data" "${common[@]}" --out long
    check "it is reported before step 1" [ "$(line_of '1 too long')" -lt "$(line_of '^step 1/')" ]
    check "and skipped" grep -q "skipped; use --truncate" out
    works "truncate" "${common[@]}" --out long --truncate
    check "is also reported" grep -q "1 too long .*: truncated$" out
}

# ---- the user's files are never lost ----

few=(--data sums.jsonl --tokens 256 --rank 1 --eval 0 --backend cpu --threads 1)

# keeps NAME PATTERN ARGUMENT...: expects one matching line on standard error, and the folder theirs
# unchanged.
keeps() {
    local name=$1 pattern=$2
    shift 2
    rm -rf before
    cp -a theirs before
    run "$finetune" "${few[@]}" --steps 2 "$@"
    [[ $status -eq 1 && $(wc -l <err) -eq 1 ]] && grep -qE -- "^finetune: .*$pattern" err
    check "$name: rejected (status $status, expected: $pattern)" [ $? -eq 0 ]
    check "$name: nothing changed" diff -r --no-dereference before theirs
    rm -rf theirs
    cp -a before theirs
}

others_files() {
    local kind
    rm -rf theirs
    mkdir -p theirs/empty theirs/notes theirs/settings
    cp -r model theirs/model
    cp sums.jsonl theirs/
    ln -s sums.jsonl theirs/to-file
    ln -s nowhere theirs/dangling
    ln -s empty theirs/to-empty
    echo "my picture" >theirs/notes/training.svg
    echo "my figures" >theirs/notes/log.jsonl
    echo "colour blue" >theirs/settings/settings.txt
    keeps "out is the data" "sums.jsonl is not a folder" --model model --data theirs/sums.jsonl \
        --out theirs/sums.jsonl
    keeps "out is a link to a file" "to-file is not a folder" --model model --out theirs/to-file
    keeps "out is a dangling link" "dangling is not a folder" --model model --out theirs/dangling
    keeps "failed start in an empty folder" "no checkpoint found" --model model --out theirs/empty \
        --resume must
    keeps "failed start through a link" "no checkpoint found" --model model --out theirs/to-empty \
        --resume must
    keeps "another folder" "contains 'log.jsonl' but no finetune run" --model model \
        --out theirs/notes
    for kind in auto never must; do
        keeps "other settings, --resume $kind" "contains 'settings.txt' but no finetune run" \
            --model model --out theirs/settings --resume $kind
    done
    keeps "the model's folder" "contains 'config.json' but no finetune run" \
        --model theirs/model --out theirs/model
    finetune_in() { (cd "$1" && "$finetune" "${@:2}"); }
    rm -rf before
    cp -a theirs before
    run finetune_in theirs/notes "${few[@]}" --steps 2 --model ../model --data ../sums.jsonl --out .
    check "the current folder ($status)" grep -q -- "--out \.: .* 'log.jsonl' but no" err
    check "the current folder: nothing changed" diff -r --no-dereference before theirs
}

own_folders() {
    rm -rf theirs
    mkdir -p theirs/empty
    ln -s empty theirs/to-empty
    works "an empty folder through a link" "${few[@]}" --steps 2 --model model --out theirs/to-empty
    works "once more" "${few[@]}" --steps 2 --model model --out theirs/empty --resume must
    rm theirs/empty/settings.txt
    works "without its settings" "${few[@]}" --steps 2 --model model --out theirs/empty
    check "they are written again" grep -q "^rank 1$" theirs/empty/settings.txt
    rm theirs/empty/settings.txt
    run "$finetune" "${few[@]}" --steps 2 --model model --out theirs/empty --resume never
    check "starting over is rejected" grep -q "but no finetune run" err
    rm -rf theirs broken
    mkdir theirs
    works "a run" "${few[@]}" --steps 2 --model model --out theirs/run
    cp -r model broken
    truncate -s -2000 broken/model.safetensors
    keeps "failed start, --resume never" "model.safetensors: .*truncated" --model broken \
        --out theirs/run --resume never
    works "start over" "${few[@]}" --steps 3 --model model --out theirs/run --resume never
}

# begin DIR ARGUMENT...: starts a long training in the background and returns after a few steps; its
# process id is in $pid.
begin() {
    rm -rf "$1"
    "$finetune" "${few[@]}" --model model --steps 1000000 --out "$@" >"$work/out" 2>"$work/err" &
    pid=$!
    wait_for_steps "$1" 3 $pid
}

finish() { # Ctrl-C
    kill -INT $pid
    wait $pid
    status=$?
}

# On a terminal, the end of a run waits until its results can be saved.
waiting() {
    local line pid
    command -v script >/dev/null || return
    rm -rf fails && mkdir fails
    line="$finetune ${few[*]} --model model --steps 3 --out fails"
    works "a start" "${few[@]}" --model model --steps 2 --out fails
    rm -rf fails/adapter && touch fails/adapter
    TERM=xterm script -qec "$line" /dev/null >out 2>err &
    pid=$!
    check "it waits" soon 20 grep -q "make room for about 1 MiB in fails" out
    rm fails/adapter
    wait $pid
    status=$?
    check "status 0 ($status)" [ $status -eq 0 ]
    check "and then saves" [ -s fails/adapter/adapter_model.safetensors ]
    check "and says so" grep -q "^saved" out
}

budgets() { # on the CPU, a step in slices needs no more than the plan has
    local most
    rm -rf within
    works "a budget of 40 MiB" --model model --data sums.jsonl --backend cpu --threads 1 \
        --tokens 256 --eval 0 --steps 2 --rank 2 --memory 40M --out within
    most=$(sed -n 's/.*"memory_bytes":\([0-9]*\).*/\1/p' within/log.jsonl | sort -n | tail -1)
    check "is kept ($most bytes)" [ "${most:-99999999}" -le 41943040 ]
}

# Results of jobs that cannot be saved: every message says something.
jobs_waiting() {
    local line pid
    rm -rf fails
    echo '[{"name": "a", "rank": 1}, {"name": "b", "rank": 2}]' >two.json
    works "two jobs" "${few[@]}" --model model --jobs two.json --steps 2 --out fails
    rm -rf fails/a/adapter && touch fails/a/adapter
    run "$finetune" "${few[@]}" --model model --jobs two.json --steps 3 --out fails
    check "jobs, saving fails: status 1 ($status)" [ $status -eq 1 ]
    check "what is elsewhere is named" \
        grep -q "^finetune: a: the results could not be saved to fails/a; they are in " err
    check "no message is empty" eval "! grep -qE '^finetune: ([a-z]: )?$' err"
    check "the other job is saved" grep -q "^b: 3 steps, .*saved to fails/b" out
    command -v script >/dev/null || return
    line="$finetune ${few[*]} --model model --jobs two.json --steps 4 --out fails"
    TERM=xterm script -qec "$line" /dev/null >out 2>err &
    pid=$!
    check "on a terminal, a job waits" soon 20 grep -q "^a: .*make room .* in fails/a" out
    rm fails/a/adapter
    wait $pid
    status=$?
    check "jobs, room was made: status 0 ($status)" [ $status -eq 0 ]
    check "and then it saves" [ -s fails/a/adapter/adapter_model.safetensors ]
}

saving_fails() {
    local kept
    rm -rf rescued
    begin fails --rescue rescued/deep
    touch fails/checkpoint fails/adapter
    finish
    check "Ctrl-C, saving fails: status 1 ($status)" [ $status -eq 1 ]
    check "the checkpoint error is reported" grep -q "^finetune: saving a checkpoint: " err
    check "the adapter error is reported" grep -q "^finetune: saving the adapter: " err
    check "the checkpoint comes first" [ "$(sed -n 's/^finetune: saving \([a-z ]*\):.*/\1/p' err |
        head -1)" = "a checkpoint" ]
    check "the other adapter is saved" [ -s fails/adapter.gguf ]
    check "and the plot" [ -s fails/training.svg ]
    kept=$(find rescued/deep -mindepth 1 -maxdepth 1)
    check "all of it is elsewhere" grep -q "saved to fails; they are in $kept: copy them" err
    check "the adapter too" [ -s "$kept/adapter/adapter_model.safetensors" ]
    check "with the whole log" cmp -s fails/log.jsonl "$kept/log.jsonl"
    works "it goes on from there" "${few[@]}" --model model --out "$kept" --resume must \
        --steps $(($(losses "$kept" | tail -1 | cut -d' ' -f1) + 1)) --extend
    waiting
    jobs_waiting
    begin fails --rescue plain/deep
    touch fails/checkpoint fails/adapter
    rm -f fails/adapter.gguf && mkdir fails/adapter.gguf
    finish
    check "nowhere else either" grep -q "saved to fails, nor to plain/deep; --rescue DIR" err

    begin fails
    until rm -rf fails/training.svg && mkdir fails/training.svg 2>/dev/null; do :; done
    finish
    check "Ctrl-C, the plot fails: status 1 ($status)" [ $status -eq 1 ]
    check "the plot error is reported" grep -q "^finetune: cannot write fails/training.svg" err
    check "the checkpoint exists" [ -s fails/checkpoint/latest ]
    check "the adapter exists" [ -s fails/adapter/adapter_model.safetensors ]

    run "$finetune" "${few[@]}" --model model --steps 9 --out fails --resume never
    check "no plot: training continues" grep -q "^step-9$" fails/checkpoint/latest
    check "no plot: one line, status 1 ($status)" [ "$status $(wc -l <err)" = "1 1" ]
    check "no plot: the log is complete" [ "$(losses fails | wc -l)" -eq 9 ]
    check "no plot: an adapter" [ -s fails/adapter.gguf ]

    rm -rf rescued
    begin fails --rescue rescued/deep
    mkdir -p fails/adapter/tokenizer.json # an adapter without its chat format would be another one
    finish
    check "no tokenizer: status 1 ($status)" [ $status -eq 1 ]
    check "no tokenizer: reported" grep -q "^finetune: saving the adapter: its tokenizer: " err
    check "no tokenizer: no adapter" [ ! -e fails/adapter/adapter_config.json ]

    rm -rf fails
    (ulimit -f 64 && "$finetune" "${few[@]}" --model model --steps 600 --out fails) >out 2>err
    check "log full: status 1" [ $? -eq 1 ]
    check "log full: one line per file" [ "$(wc -l <err)" -eq "$(sort -u err | wc -l)" ]
    check "log full: reported" grep -q "^finetune: cannot write fails/log.jsonl" err
    check "log full: training continues" grep -q "^step-600$" fails/checkpoint/latest
    check "log full: an adapter" [ -s fails/adapter.gguf ]
    check "log full: complete lines" [ -z "$(grep -vE '^\{.*\}$' fails/log.jsonl)" ]
}

# ---- a full disk: no file may grow beyond a few blocks ----

full_disk() {
    local limit found
    for limit in 1 3 8 24; do
        rm -rf full rescue
        [[ $limit -ne 3 ]] || mkdir rescue
        (
            ulimit -f $limit
            "$finetune" --model model --data sums.jsonl --tokens 256 --steps 400 --rank 4 \
                --out full --eval 0 --save-every 20 --snapshot-every 200 --rescue rescue/deep
        ) >"$work/out" 2>"$work/err"
        status=$?
        check "files of $limit KiB: status 1" [ $status -eq 1 ]
        check "files of $limit KiB: a message" \
            grep -qiE "^finetune: .*(file too large|cannot write)" err
        check "files of $limit KiB: no empty snapshots" \
            [ -z "$(find full/snapshots -empty 2>/dev/null)" ]
        check "files of $limit KiB: what is elsewhere is named" \
            grep -qE "saved to full(, nor to rescue/deep;|; what .* saved is in rescue/deep/)" err
        found=$(find rescue -mindepth 1 -empty 2>/dev/null)
        check "files of $limit KiB: no empty folders ($found)" [ -z "$found" ]
        if grep -q "nor to rescue/deep;" err; then # a folder that was there is not removed
            check "files of $limit KiB: none for nothing" \
                [ "$(ls -d rescue 2>/dev/null)" = "$([[ $limit -ne 3 ]] || echo rescue)" ]
        fi
        found=$(find full rescue -name '*.new' -o -name '*.tmp' 2>/dev/null)
        check "files of $limit KiB: no partial files ($found)" [ -z "$found" ]
        if [[ -s full/log.jsonl ]]; then
            found=$(grep -vE '^\{.*\}$' full/log.jsonl)
            check "files of $limit KiB: complete log lines" [ -z "$found" ]
        fi
    done
}

# shellcheck source=tests/gates/use_runs.sh
. tests/gates/use_runs.sh
# shellcheck source=tests/gates/use_options.sh
. tests/gates/use_options.sh
# shellcheck source=tests/gates/use_page.sh
. tests/gates/use_page.sh
# shellcheck source=tests/gates/use_ranks.sh
. tests/gates/use_ranks.sh
rm -rf "$work"
mkdir -p "$work/tmp"
export TMPDIR=$work/tmp # for what cannot be saved
[[ -n ${NO_BUILD:-} ]] || ${MAKE:-make} -s B="$B" "$B/finetune" || exit 1
cd "$work" || exit 1
: >out
: >err
model_make
data_make
groups="wrong_use looking training long_samples others_files own_folders saving_fails full_disk"
groups="$groups budgets plots logs locks closing links starting_over saved_work interrupts"
groups="$groups several modes lengthy scaled inputs tables weights notes resuming extending doctors"
groups="$groups configs adding kept_formats adapters jobs"
groups="$groups evaluations"
groups="$groups best preferences balance demos sampling events pages helps ranks"
[[ $# -gt 0 ]] && groups=$*
for group in $groups; do
    $group
done
echo "$passed passed, $failed failed, 0 skipped"
[[ $failed -eq 0 && $passed -gt 0 ]]
