#!/usr/bin/env bash
# Part of use_programs.sh: samples of fixed prompts, events for TensorBoard, the page.
# shellcheck disable=SC2154 # the variables belong to use_programs.sh

sample_lines() { grep -c '"samples"' "$1/log.jsonl"; }

times() { grep -ao -- "$2" "$1" | wc -l; } # times FILE TEXT: how often a file has a text

sampling() { # samples of fixed prompts
    local every=(--steps 6 --eval 5 --eval-every 2)
    local some=(--sample-prompt "3 plus 4 is" --sample-prompt 'a "<b>&' --sample-tokens 12)
    rm -rf unsampled sampled again
    works "a run without samples" "${one[@]}" --data sums.jsonl "${every[@]}" --out unsampled
    works "a run with samples" "${one[@]}" --data sums.jsonl "${every[@]}" "${some[@]}" \
        --out sampled
    check "they are in the log, with every evaluation" [ "$(sample_lines sampled)" -eq 4 ]
    check "with both prompts" grep -q \
        '"step":6,"samples":\[{"prompt":"3 plus 4 is","text":.*{"prompt":"a \\"<b>&","text":' \
        sampled/log.jsonl
    check "they are shown at the end" grep -q "^  step 6     | " out
    check "the first ones too" grep -q "^  step 0     | " out
    check "the adapter is the same, bit for bit" \
        cmp unsampled/adapter/adapter_model.safetensors sampled/adapter/adapter_model.safetensors
    check "and the losses" [ "$(losses unsampled)" = "$(losses sampled)" ]
    # Two sessions give what one gives.
    works "the first session" "${one[@]}" --data sums.jsonl --steps 4 --eval 5 --eval-every 2 \
        --schedule constant "${some[@]}" --out again
    works "the second session" "${one[@]}" --data sums.jsonl --steps 6 --eval 5 --eval-every 2 \
        --schedule constant "${some[@]}" --out again
    check "no sample is made twice" [ "$(sample_lines again)" -eq 4 ]
    check "the page has those of both" [ "$(times again/training.html '<th>step ')" -eq 8 ]
    works "without held-out samples" "${one[@]}" --data sums.jsonl --steps 2 --eval 0 \
        "${some[@]}" --out again --resume never
    check "samples are made all the same" [ "$(sample_lines again)" -eq 3 ]
    sample_forms
    sample_faults
}

sample_forms() { # messages, files, temperatures
    local first
    printf '%s\n' '{"prompt": "one\ntwo"}' '' '{"question": "Why", "answer": "secret"}' \
        '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"},'\
' {"role": "assistant", "content": "secret"}]}' >prompts.jsonl
    works "all kinds of prompts" "${one[@]}" --data sums.jsonl --template chatml --steps 1 \
        --eval 0 --sample-message "Hello" --sample-file prompts.jsonl --sample-temperature 0.9 \
        --sample-tokens 9 --out forms --resume never
    check "a message, a text and a conversation" grep -q \
        '{"prompt":"Hello",.*{"prompt":"one\\u000atwo",.*<|im_start|>user\\u000aHi<|im_end|>' \
        forms/log.jsonl
    check "which do not have the answers of the file" [ "$(grep -c secret forms/log.jsonl)" = 0 ]
    check "but the questions" grep -q '<|im_start|>user\\u000aWhy<|im_end|>' forms/log.jsonl
    first=$(grep '"samples"' forms/log.jsonl)
    works "the same again" "${one[@]}" --data sums.jsonl --template chatml --steps 1 --eval 0 \
        --sample-message "Hello" --sample-file prompts.jsonl --sample-temperature 0.9 \
        --sample-tokens 9 --out forms --resume never
    check "the seed decides" [ "$first" = "$(grep '"samples"' forms/log.jsonl)" ]
}

sample_faults() {
    local all=("${one[@]}" --data sums.jsonl --out o)
    refuses "a long sample prompt" \
        "--sample-prompt: the prompt has 200 tokens; --length 128 allows 127" "${all[@]}" \
        --sample-prompt "$(printf 'x%.0s' {1..200})"
    refuses "a prompt that is not UTF-8" "--sample-prompt: the text is not UTF-8 .byte 2 is FF" \
        "${all[@]}" --sample-prompt $'a\xff'
    refuses "a missing file" "--sample-file nowhere: No such file" "${all[@]}" --sample-file nowhere
    printf '{"prompt": "a"}\n{"prompt": 3}\n' >bad.jsonl
    refuses "a prompt that is no text" 'bad.jsonl:2: "prompt" is neither a string nor a list' \
        "${all[@]}" --sample-file bad.jsonl
    echo '{"prompt": "a"} {}' >bad.jsonl
    refuses "two samples in a line" 'bad.jsonl:1:17: .*unexpected text after the value' \
        "${all[@]}" --sample-file bad.jsonl
    echo '{"text": "a"}' >bad.jsonl
    refuses "a sample of another form" 'bad.jsonl:1: .*expected prompt, messages' "${all[@]}" \
        --sample-file bad.jsonl
    for ((i = 0; i < 65; i++)); do echo '{"prompt": "a"}'; done >bad.jsonl
    refuses "too many" "bad.jsonl:65: there are more than 64 prompts" "${all[@]}" \
        --sample-file bad.jsonl
    refuses "tokens out of range" "--sample-tokens: 0 is out of range" "${all[@]}" --sample-tokens 0
}

events() { # --tensorboard
    local file=board/events.out.tfevents.finetune
    local run=("${one[@]}" --data sums.jsonl --eval 5 --eval-every 2 --schedule constant)
    rm -rf board other evented
    works "events" "${run[@]}" --steps 4 --tensorboard board --sample-prompt "a" --out evented
    check "one per step" [ "$(times $file train/loss)" -eq 4 ]
    check "one per evaluation" [ "$(times $file eval/loss)" -eq 3 ]
    check "and samples" [ "$(times $file samples/1)" -eq 3 ]
    check "epochs and memory" [ "$(times $file 'train/epoch\|train/memory_bytes')" -eq 8 ]
    check "the settings, once" [ "$(times $file _hparams_/session_start_info)" -eq 1 ]
    cp $file whole.events
    works "going on" "${run[@]}" --steps 6 --tensorboard board --out evented
    check "has each step once" [ "$(times $file train/loss)" -eq 6 ]
    check "only appends" cmp -n "$(wc -c <whole.events)" whole.events $file
    # What a killed run left: steps that are taken again, and half of a record.
    rm -rf back
    cp -r evented back
    works "two more steps" "${run[@]}" --steps 8 --tensorboard board --out evented
    rm -rf evented
    mv back evented
    head -c 30 whole.events >>$file
    works "these steps again" "${run[@]}" --steps 8 --tensorboard board --out evented
    check "they are there once" [ "$(times $file train/loss)" -eq 8 ]
    check "the version only at the start" [ "$(times $file brain.Event)" -eq 1 ]
    refuses "events of another run" "--tensorboard board has the events of another run" \
        "${run[@]}" --steps 2 --tensorboard board --out o
    check "are not touched" [ "$(times $file train/loss)" -eq 8 ]
    works "unless they are to be replaced" "${run[@]}" --steps 2 --tensorboard board --out evented \
        --resume never
    check "then they are" [ "$(times $file train/loss)" -eq 2 ]
    rm -rf deep
    works "a folder in folders that are missing" "${run[@]}" --steps 2 --tensorboard deep/er/board \
        --out evented --resume never
    check "has the events" [ "$(times deep/er/$file train/loss)" -eq 2 ]
    rm -rf deep
    refuses "a name that is too long" "--tensorboard: cannot create deep/er/xxx" "${run[@]}" \
        --steps 2 --tensorboard "deep/er/$(printf 'x%.0s' {1..300})" --out o
    check "leaves no folders" [ ! -e deep ]
    refuses "a folder that cannot be made" "--tensorboard: cannot create plain/board" \
        "${run[@]}" --steps 2 --tensorboard plain/board --out o
}

pages() {
    local pid row refresh='http-equiv="refresh"'
    rm -rf paged
    cp sums.jsonl 'odd <i>&name.jsonl'
    "$finetune" "${one[@]}" --data 'odd <i>&name.jsonl' --steps 100000 --eval 5 --eval-every 1 \
        --sample-prompt '</pre><script>' --save-every 5 --out paged >out 2>err &
    pid=$!
    check "a page while the run goes on" soon 60 grep -qs "$refresh" paged/training.html
    kill -INT $pid
    wait $pid
    status=$?
    check "the run was stopped ($status)" [ $status -eq 130 ]
    check "it says so" grep -q 'id="state">Stopped; the same command resumes it: step ' \
        paged/training.html
    check "it does not refresh any more" eval "! grep -q '$refresh' paged/training.html"
    check "the title is escaped" grep -q \
        '<title>.* - model on odd &lt;i&gt;&amp;name.jsonl</title>' paged/training.html
    check "the title of the plot too" grep -q \
        '<title id="title">model on odd &lt;i&gt;&amp;name.jsonl: step ' paged/training.svg
    check "samples are escaped" grep -q '&lt;/pre&gt;&lt;script&gt;' paged/training.html
    check "there is no script" eval "! grep -q '<script' paged/training.html"
    check "nothing comes from elsewhere" eval \
        "! grep -E '(src|href)=|url\(|@import|https?://' paged/training.html"
    check "the settings are there" grep -q '<th>rank</th><td>' paged/training.html
    check "and the plan" grep -q 'id="plan">.*' paged/training.html
    check "the backend, in words of the options" grep -qE \
        '>CPU, [^<]* .requested by --backend.[^<]*<' paged/training.html
    works "a short run" "${one[@]}" --data sums.jsonl --steps 3 --eval 0 --out paged --resume never
    check "is finished" grep -q 'id="state">Finished: step 3 of 3, epoch 0.' paged/training.html
    check "with the loss that the end of the output has" grep -qF \
        ", loss $(sed -n 's/^loss .* -> \([0-9.]*\).*/\1/p' out)" \
        <(grep 'id="state"' paged/training.html)
    check "values on hover" grep -q '<title>step 3, training [0-9.]*, smoothed ' paged/training.html
    check "the axes have names" [ "$(grep -c '>step</text>' paged/training.html)" -eq \
        "$(grep -c 'svg class="curves"' paged/training.html)" ]
    for row in 'alpha</th><td>2<' 'warmup</th><td>1 step' 'targets</th><td>all' \
        'trained parameters</th><td>[0-9]*, [0-9.]*%' 'version</th><td>qlora.h [0-9]' \
        'tokens of the data</th><td>1946 in 120 samples, 496 of them trained (25.5%)' \
        'machine</th><td>CPU, 1 thread, [a-z]' 'arithmetic</th><td>[bf]'; do
        check "a row ($row)" grep -q "<th>$row" paged/training.html
    done
    check "planned and resident memory" grep -qE \
        '^memory: [0-9.]+ [MG]iB as planned; the process has [0-9.]+ [MG]iB, with' out
    check "also on the page" grep -q '>memory: [0-9.]* [MG]iB as planned; the process' \
        paged/training.html
    # A page that cannot be written is reported, and the training goes on.
    rm -f paged/training.html
    mkdir paged/training.html
    run "$finetune" "${one[@]}" --data sums.jsonl --steps 5 --eval 0 --out paged --resume never
    check "no page: status 1 ($status)" [ $status -eq 1 ]
    check "no page: reported" grep -q "^finetune: cannot write paged/training.html: " err
    check "no page: trained" grep -q "^step-5$" paged/checkpoint/latest
    rmdir paged/training.html
}

helps() { # every description is set off from its option
    local row glued
    for row in finetune:37 generate:31 merge:31 plan:31 tokenize:17; do
        glued=$("$root/$B/${row%:*}" --help | awk -v n="${row#*:}" \
            'substr($0, 1, 4) == "  --" && NF > 2 && $2 !~ /:$/ && substr($0, n, 1) != " "')
        check "${row%:*} --help ($glued)" [ -z "$glued" ]
        glued=$("$root/$B/${row%:*}" --help | grep -E ' [;,.]( |$)| $|.{81}')
        check "${row%:*} --help: no stray marks or spaces, no long lines ($glued)" [ -z "$glued" ]
        glued=$("$root/$B/${row%:*}" --help | sed '/^Chat formats/,$d' |
            grep -oE '^  --[a-z0-9-]+' | sort | uniq -d)
        check "${row%:*} --help: every option once ($glued)" [ -z "$glued" ]
    done
    for row in finetune generate; do
        glued=$("$root/$B/$row" --help | sed '/^[A-Z][a-z]* and /,$d' | grep -cE '^  --[a-z]')
        check "$row --help: begins with twelve ($glued)" [ "$glued" -eq 12 ]
        glued=$("$root/$B/$row" --help | sed '/^Chat formats/,$d' | grep -cE '^  --[a-z]')
        check "$row --help: and has all of them ($glued)" [ "$glued" -eq \
            "$(sed -n '/^static const option option_table/,/^};/p' \
            "$root/programs/$row"{.c,/options/table.h} 2>/dev/null |
            grep -E '^    .".*OPT_' | grep -vc OPT_HEADING)" ]
    done
}
