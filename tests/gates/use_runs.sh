#!/usr/bin/env bash
# Part of use_programs.sh: damaged files, two runs at once, closed terminals, Ctrl-C.
# shellcheck disable=SC2154 # the variables belong to use_programs.sh

soon() { # soon SECONDS COMMAND...: the command must succeed within this time
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [[ $SECONDS -lt $end ]] || return 1
        sleep 0.1
    done
}

gone() { ! kill -0 "$1" 2>/dev/null; }

# A loss that hardly changes must not make the plot's axis endless.
plots() {
    local pid step
    head -1 sums.jsonl >one.jsonl
    rm -rf flat
    "$finetune" --model model --data one.jsonl --tokens 256 --rank 1 --eval 0 --backend cpu \
        --threads 1 --lr 0 --steps 40 --save-every 10 --out flat >out 2>err &
    pid=$!
    check "constant loss: training ends" soon 60 gone $pid
    kill -KILL $pid 2>/dev/null
    wait $pid
    check "constant loss: a plot" grep -q '</svg>' flat/training.svg

    # Losses that differ by rounding only, as the log of an earlier session has them.
    for ((step = 1; step <= 40; step++)); do
        echo "{\"step\":$step,\"loss\":5.500000000000000$((step % 2 * 9)),\"lr\":0}"
    done >flat/log.jsonl
    (ulimit -v "${USE_MEMORY:-4000000}" -t 60 && exec "$finetune" --model model \
        --data one.jsonl --tokens 256 --rank 1 --eval 0 --backend cpu --threads 1 --lr 0 \
        --steps 40 --save-every 10 \
        --out flat >out 2>err) &
    pid=$!
    check "nearly constant loss: training ends" soon 60 gone $pid
    kill -KILL $pid 2>/dev/null
    wait $pid
    check "nearly constant loss: the status ($?)" [ $? -eq 0 ]
    check "the plot is small" [ "$(wc -c <flat/training.svg)" -lt 200000 ]
}

# Whatever a log contains, resuming reads it without harm and keeps the good lines.
logs() {
    local line
    local odd=('{"step":-5,"loss":1}' '{"step":1e300,"loss":1}' '{"step":nan}' '{"step":0.5}'
        '{}' '' '{' '{"step":4,"loss":1' '{"step":99999999999999999999,"loss":2}')
    rm -rf damaged
    works "a run to damage" "${few[@]}" --model model --steps 6 --out damaged
    sed -n 1,3p damaged/log.jsonl >start.jsonl
    for line in "${odd[@]}"; do
        { cat start.jsonl; echo "$line"; sed -n 4,6p damaged/log.jsonl; } >mixed.log
        cp mixed.log damaged/log.jsonl
        works "log with '$line'" "${few[@]}" --model model --steps 6 --out damaged
        check "its good lines are kept" [ "$(losses damaged | wc -l)" -eq 6 ]
    done
    { cat start.jsonl; echo '{"step":1,"loss":3}'; sed -n 4,6p damaged/log.jsonl; } >mixed.log
    cp mixed.log damaged/log.jsonl
    works "log with an earlier step" "${few[@]}" --model model --steps 6 --out damaged
    check "the damage is reported" grep -q "damaged/log.jsonl: 1 damaged line was removed" out
    { head -c 3000 /dev/urandom; echo; echo '{"step":7,"loss":1}'; } >damaged/log.jsonl
    works "log of random bytes" "${few[@]}" --model model --steps 6 --out damaged
}

locks() {
    begin owned
    run "$finetune" "${few[@]}" --model model --steps 5 --out owned
    check "a second run is refused ($status)" [ $status -eq 1 ]
    check "it names the owner" grep -q \
        "owned is in use by process $pid on $(hostname); wait for it, or choose another --out$" err
    run "$finetune" "${few[@]}" --model model --steps 5 --out owned --resume never
    check "also with --resume never" grep -q "in use by process $pid" err
    check "the owner is not disturbed" kill -0 $pid
    finish
    check "the owner saves ($status)" [ $status -eq 130 ]
    check "and removes its lock" [ ! -e owned/.finetune.lock ]

    begin owned
    kill -KILL $pid
    wait $pid 2>/dev/null
    check "a killed run leaves its lock" [ -s owned/.finetune.lock ]
    works "which is taken over" "${few[@]}" --model model --steps 5 --out owned --resume never
    check "and removed" [ ! -e owned/.finetune.lock ]
    echo "4711 another-host" >owned/.finetune.lock
    run "$finetune" "${few[@]}" --model model --steps 5 --out owned
    check "a lock of another host is respected ($status)" \
        grep -q "process 4711 on another-host; wait .* --out; if that process has ended, remove" err
    check "and kept" grep -q "4711 another-host" owned/.finetune.lock
    rm -rf owned
    together owned
}

together() { # three at once: one trains, two are refused, and its folder is whole
    local first second third ended=0
    "$finetune" "${few[@]}" --model model --steps 60 --out "$1" >out1 2>err1 &
    first=$!
    "$finetune" "${few[@]}" --model model --steps 60 --out "$1" >out2 2>err2 &
    second=$!
    "$finetune" "${few[@]}" --model model --steps 60 --out "$1" >out3 2>err3 &
    third=$!
    wait $first && ended=$((ended + 1))
    wait $second && ended=$((ended + 1))
    wait $third && ended=$((ended + 1))
    cat err1 err2 err3 >err
    check "three at once: one or more end well ($ended)" [ $ended -ge 1 ]
    check "the others name the owner" [ "$(grep -c 'in use by' err)" -eq $((3 - ended)) ]
    check "one log" [ "$(losses "$1" | wc -l)" -eq 60 ]
    check "one checkpoint" grep -q "^step-60$" "$1/checkpoint/latest"
}

closing() {
    local pid line
    if [[ -z $(trap -p HUP) ]]; then # under nohup, it is ignored, and must be
        begin hung
        kill -HUP $pid
        kill -HUP $pid 2>/dev/null
        wait $pid
        status=$?
        check "SIGHUP saves ($status)" [ -s hung/adapter/adapter_model.safetensors ]
        check "SIGHUP: status 130" [ $status -eq 130 ]
    fi

    begin ended
    kill -TERM $pid
    check "SIGTERM ends a run" soon 10 gone $pid
    kill -KILL $pid 2>/dev/null
    wait $pid
    status=$?
    check "SIGTERM saves ($status)" [ -s ended/adapter/adapter_model.safetensors ]
    check "and a checkpoint" [ -s ended/checkpoint/latest ]
    check "SIGTERM: status 130" [ $status -eq 130 ]

    rm -rf piped
    "$finetune" "${few[@]}" --model model --steps 20000 --out piped 2>err | head -8 >out
    status=${PIPESTATUS[0]}
    check "a closed pipe saves ($status)" [ -s piped/adapter/adapter_model.safetensors ]
    check "a closed pipe: status 130" [ "$status" -eq 130 ]
    check "a closed pipe is reported" grep -q "nobody reads the output" err

    rm -rf closed
    "$finetune" "${few[@]}" --model model --steps 9 --out closed >&- 2>err
    check "closed output: status $?" [ $? -eq 0 ]
    check "closed output: the log is clean" [ -z "$(grep -vE '^\{.*\}$' closed/log.jsonl)" ]
    check "closed output: every step" [ "$(losses closed | wc -l)" -eq 9 ]
    rm -rf closed
    "$finetune" "${few[@]}" --model model --steps 9 --out closed <&- >&- 2>&-
    check "no streams at all: the log is clean" [ -z "$(grep -vE '^\{.*\}$' closed/log.jsonl)" ]

    rm -rf piped
    "$finetune" "${few[@]}" --model model --steps 3 --out piped 2>err |
        sed '/^step 3/q' >out # it closes the pipe before the summary
    status=${PIPESTATUS[0]}
    check "a pipe closed after the last step: status 0 ($status)" [ "$status" -eq 0 ]
    "$finetune" "${few[@]}" --model model --steps 3 --out piped >/dev/full 2>err
    check "training to a full disk" [ $? -eq 1 ]
    check "is reported" grep -q "cannot write to standard output: No space left" err
    rm -rf a
    run "$finetune" "${few[@]}" --model model --out a/b/c --resume must
    check "a failed start leaves no folder" [ ! -e a ]
    mkdir a
    run "$finetune" "${few[@]}" --model model --out a/b/c/d --resume must
    check "but what was there" [ "$(find a)" = a ]
    rmdir a

    for line in "--help" "--model model --plan" "--model model --data sums.jsonl --doctor"; do
        # shellcheck disable=SC2086
        timeout 60 "$finetune" $line >/dev/full 2>err
        check "$line to a full disk" [ $? -eq 1 ]
        check "it is reported" grep -q "cannot write to standard output: No space left" err
    done
    line="$finetune ${few[*]} --model model --steps 3 --out closed --resume never"
    if command -v script >/dev/null; then
        TERM=xterm script -qec "$line" /dev/null >out 2>err
        check "escape sequences on a terminal" grep -q $'\033' out
        TERM=dumb script -qec "$line" /dev/null >out 2>err
        check "the output of a dumb terminal" grep -q "^step 3/3" out
        check "has no escape sequences" [ -z "$(grep -l $'\033' out)" ]
    fi
    rm -rf 'a\b'
    works "a backslash in a name" "${few[@]}" --model model --steps 1 --out 'a\b'
    check "makes one folder" [ -d 'a\b' ]
    check "and no other" [ ! -e a ]
}

links() { # a temporary file never writes through a link
    local name
    rm -rf linked victim
    works "a run" "${few[@]}" --model model --steps 1 --out linked
    echo "precious" >victim
    for name in settings.txt log.jsonl training.svg; do
        ln -sf ../victim linked/$name.new
    done
    works "links in its folder" "${few[@]}" --model model --steps 3 --out linked --resume never
    check "the file they name is kept" [ "$(cat victim)" = precious ]
    ln -sf ../victim linked/.finetune.lock
    run "$finetune" "${few[@]}" --model model --steps 3 --out linked
    check "a lock that is a link is refused ($status)" [ $status -eq 1 ]
    check "and not followed" [ "$(cat victim)" = precious ]
}

starting_over() {
    local kind long=(--model model --steps 12 --save-every 4)
    rm -rf again
    works "a run" "${few[@]}" "${long[@]}" --out again
    works "start over" "${few[@]}" --model model --steps 2 --out again --resume never
    check "old checkpoints are gone" [ ! -e again/checkpoint/step-12 ]
    check "all of them" [ "$(find again/checkpoint -name 'step-*' | wc -l)" -eq 2 ]
    works "the run again" "${few[@]}" "${long[@]}" --out again --resume never
    touch again/checkpoint/step-12/notes
    run "$finetune" "${few[@]}" --model model --steps 2 --out again --resume never
    check "a file of the user's is not removed" grep -q "step-12/notes is not part of" err
    check "nothing was removed" grep -q '^step-12$' again/checkpoint/latest
    rm again/checkpoint/step-12/notes again/checkpoint/latest
    for kind in auto must; do
        run "$finetune" "${few[@]}" "${long[@]}" --out again --resume $kind
        check "no list, --resume $kind" grep -q "contains step-12 but not the file 'latest'" err
    done
    echo step-12 >again/checkpoint/latest
    works "as advised" "${few[@]}" "${long[@]}" --out again
    check "it resumes" grep -q "resumed after step 12 of 12" out
    rm again/checkpoint/latest
    works "or starts over" "${few[@]}" --model model --steps 2 --out again --resume never
    # Killed after the first checkpoint was written and before it was listed.
    find again/checkpoint -name 'step-*' ! -name step-2 -exec rm -r {} +
    rm -r again/adapter again/checkpoint/latest
    run "$finetune" "${few[@]}" --model model --steps 2 --out again
    check "a checkpoint without a list" grep -q "contains step-2 but not the file 'latest'" err
    echo step-2 >again/checkpoint/pending
    works "that was not listed yet" "${few[@]}" --model model --steps 2 --out again
    check "is made again" grep -q '^step-2$' again/checkpoint/latest
}

# refused NAME PATTERN ARGUMENT...: expects a matching error, and the folder kept as it was.
refused() {
    local name=$1 pattern=$2
    shift 2
    rm -rf before
    cp -a kept before
    run "$finetune" "${few[@]}" --model model --steps 2 --out kept "$@"
    check "$name: refused ($status)" grep -qE -- "^finetune: .*$pattern" err
    check "$name: nothing is removed" diff -rq --no-dereference before kept
}

# What a run has saved is removed only if --resume never asks for it.
saved_work() {
    local advice="use --resume never to" mine
    rm -rf kept elsewhere
    works "a run with snapshots" "${few[@]}" --model model --steps 4 --snapshot-every 2 --out kept
    cp -r kept/adapter elsewhere
    rm -r kept/checkpoint
    refused "snapshots" "snapshots of a run, such as step-[24], but no checkpoint; $advice remove"
    mv kept/snapshots snapshots.kept
    refused "an adapter" "contains an adapter but no checkpoint; $advice replace it" --rank 4
    mv snapshots.kept kept/snapshots
    for mine in notes adapter_config.json.mine; do
        touch "kept/snapshots/step-2/$mine"
        refused "$mine in a snapshot" "snapshots/step-2/$mine is not part of" --resume never
        rm "kept/snapshots/step-2/$mine"
    done
    ln -s ../../elsewhere kept/snapshots/step-3
    refused "a link" "snapshots/step-3 is not part of" --resume never
    check "what it leads to is kept" [ -s elsewhere/adapter_model.safetensors ]
    rm kept/snapshots/step-3
    for mine in snapshots checkpoint; do # of another run
        mv kept/snapshots moved
        ln -s ../moved kept/$mine
        refused "a link instead of $mine" "kept/$mine is a link; remove it" --resume never
        check "what $mine leads to is kept" [ -s moved/step-2/adapter_model.safetensors ]
        rm kept/$mine
        mv moved kept/snapshots
    done
    touch kept/adapter/notes
    begin_over kept
    check "starting over removes the adapter" [ ! -e kept/adapter/adapter_config.json ]
    check "and its GGUF file" [ ! -e kept/adapter.gguf ]
    check "and the snapshots" [ -z "$(find kept/snapshots -name 'step-*')" ]
    check "but no other file" [ -e kept/adapter/notes ]
}

begin_over() { # starts over in a folder, killed before it saves anything
    "$finetune" "${few[@]}" --model model --steps 1000000 --out "$1" --resume never >out 2>err &
    pid=$!
    soon 30 grep -q "^ready" out
    kill -KILL $pid
    wait $pid 2>/dev/null
}

# Ctrl-C is answered within a step and within an evaluation.
interrupts() {
    local i last slow=(--model model --tokens 128 --rank 1 --backend cpu --threads 1 --length 64)
    rm -rf slow whole
    local steps=(--data much.jsonl --eval 0 --steps 3 --accumulate 800)
    for ((i = 0; i < 3000; i++)); do
        echo '{"text": "'"$i$i$i$i$i$i$i$i"' and more of it"}'
    done >much.jsonl
    "$finetune" "${slow[@]}" "${steps[@]}" --out slow >out 2>err &
    pid=$!
    soon 60 grep -q "^ready" out
    soon 60 grep -q '"step":1,' slow/log.jsonl
    sleep 0.3
    kill -INT $pid
    check "Ctrl-C within a step is answered" soon 4 gone $pid
    wait $pid
    check "Ctrl-C within a step: 130" [ $? -eq 130 ]
    check "it is acknowledged" \
        grep -q "stopping after this micro-batch; press Ctrl-C again to quit at once" err
    last=$(sed -n 's/.*"step":\([0-9]*\),.*/\1/p' slow/log.jsonl | tail -n 1)
    check "the last whole step is saved" grep -q "^step-$last$" slow/checkpoint/latest
    check "and it is not the end" [ "$last" -lt 3 ]
    works "it resumes" "${slow[@]}" "${steps[@]}" --out slow
    works "without interruption" "${slow[@]}" "${steps[@]}" --out whole
    cp out whole.out
    check "the same adapter" same_files slow whole

    rm -rf slow
    "$finetune" "${slow[@]}" --data sums.jsonl --steps 1000000000 --eval 0 --out slow >out 2>err &
    pid=$!
    check "a run of days says so" soon 60 grep -qE "^note: the 1000000000 steps .* days on this" out
    check "and what would shorten it" \
        soon 9 grep -qE "^ +shorter: .*--steps [0-9]+ \(about (9|10)m" out
    check "and short runs do not" [ "$(grep -c ' days on this CPU' whole.out)" -eq 0 ]
    kill -INT $pid
    wait $pid

    rm -rf slow
    "$finetune" "${slow[@]}" --data sums.jsonl --eval-data much.jsonl --steps 3 --out slow \
        >out 2>err &
    pid=$!
    soon 60 grep -q "^ready" out
    sleep 0.3
    kill -INT $pid
    check "Ctrl-C within an evaluation is answered" soon 4 gone $pid
    wait $pid
    check "before the first step: nothing to save" grep -q "there is nothing to save" out
    check "and no folder" [ ! -e slow ]

    # The attention of a single long text takes twenty seconds.
    echo '{"text": "'"$(seq -s ' ' 1000 5000)"'"}' >book.jsonl
    QLORA_CPU_TIER=portable "$finetune" --model model --tokens 24000 --length 24000 --rank 1 \
        --rope-scale linear:256 --backend cpu --threads 1 --eval-data book.jsonl --eval-only \
        >out 2>err &
    pid=$!
    soon 60 grep -q "^evaluation data" out
    sleep 1
    kill -INT $pid
    check "Ctrl-C within a micro-batch of an evaluation is answered" soon 4 gone $pid
    wait $pid
    check "and there is no result" [ "$(grep -c "^loss" out)" -eq 0 ]

    # The fake GPU takes minutes for this step, which must not be waited for.
    [[ -e $root/$B/fake/libcuda.so.1 ]] || return
    LD_LIBRARY_PATH=$root/$B/fake "$finetune" --model model --tokens 128 --length 64 --rank 1 \
        --backend cuda --data much.jsonl --eval 0 --steps 1 --accumulate 400 --out slow \
        >out 2>err &
    pid=$!
    soon 120 grep -q "^ready" out
    sleep 2
    kill -INT $pid
    check "Ctrl-C within a step of a GPU is answered" soon 4 gone $pid
    wait $pid
    check "Ctrl-C within a step of a GPU: 130" [ $? -eq 130 ]
    check "there is nothing to save" grep -q "there is nothing to save" out
}
