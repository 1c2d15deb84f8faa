#!/usr/bin/env bash
# Part of use_programs.sh: what the options of finetune mean.
# shellcheck disable=SC2154 # the variables belong to use_programs.sh

one=(--model model --tokens 256 --rank 1 --backend cpu --threads 1)

once() { [[ $(grep -cE -- "$1" out) -eq 1 ]]; } # once PATTERN: one line of the output has it

several() { # --data and --eval-data may be repeated
    head -20 sums.jsonl >first.jsonl
    tail -15 sums.jsonl >second.jsonl
    rm -rf both
    works "two data files" "${one[@]}" --data first.jsonl --data second.jsonl --eval 0 --steps 2 \
        --out both
    check "both are used" grep -q "^data: 35 samples" out
    works "two evaluation files" "${one[@]}" --data sums.jsonl --eval-data first.jsonl \
        --eval-data second.jsonl --steps 2 --out both --resume never
    check "both are evaluated" grep -q "^evaluation data: 35 samples" out
    check "common samples are counted" \
        once "35 of 35 evaluation samples also found in the training data"
    works "the first samples" "${one[@]}" --data first.jsonl --data second.jsonl --eval 0 \
        --max-samples 25 --steps 2 --out both --resume never
    check "as many as asked for" grep -q "^data: 25 samples" out
    { head -3 sums.jsonl; cat long.jsonl; } >some.jsonl
    works "long samples for evaluation" "${one[@]}" --data sums.jsonl --eval-data some.jsonl \
        --steps 1 --out both --resume never
    check "are counted" grep -q "1 too long for --length 128" out
    refuses "only long samples for evaluation" "long.jsonl: the only sample cannot be used" \
        "${one[@]}" --data sums.jsonl --eval-data long.jsonl --steps 1 --out o
    conversations
}

# A template that changes earlier turns gives a sample for each turn. They stay together: what
# counts samples otherwise counts conversations.
conversations() {
    local i talk=(--model model --tokens 256 --rank 1 --backend cpu --threads 1
        --chat-template turns.jinja)
    printf '%s' "{% for m in messages %}[{{ m.role }}]{{ '<think>' if loop.last and m.role == " \
        "'assistant' }}{{ m.content }}<|endoftext|>{% endfor %}" \
        "{{ '[assistant]' if add_generation_prompt }}" >turns.jinja
    for i in {1..8}; do
        printf '{"messages": [{"role": "user", "content": "q%d"}, {"role": "assistant", ' $i
        printf '"content": "a%d"}, {"role": "user", "content": "r"}, {"role": "assistant", ' $i
        printf '"content": "b%d"}]}\n' $i
    done >talks.jsonl
    works "a sample for each turn" "${talk[@]}" --data talks.jsonl:0.5 --eval 2 --max-samples 6 \
        --doctor --samples 0
    check "--max-samples counts conversations" grep -q "^  used  *12$" out
    check "--eval counts conversations" grep -q "^  of these held out  *4$" out
    check "weights count conversations" once "weight 0.5, 2 of 4 records, 100.0% of the records"
    works "whole conversations" "${talk[@]}" --data talks.jsonl --eval 3 --steps 1 --out both \
        --resume never
    check "are trained" once "^data: 10 samples from 5 records"
    check "are held out" once "^held out: 6 samples from 3 records"
    sed 's/"b/"c/' talks.jsonl | head -2 >branches.jsonl
    works "conversations that go on differently" "${talk[@]}" --data talks.jsonl --eval-data \
        branches.jsonl --steps 1 --out both --resume never
    check "their first turns are found" \
        once "2 of 4 evaluation samples also found in the training data"
    check "and what follows them" once "2 of 4 evaluation samples are from conversations that start"
}

modes() { # --mode bf16 on the CPU: another arithmetic, the same run
    rm -rf modes
    works "two steps in bf16 on the CPU" "${one[@]}" --data sums.jsonl --eval 0 --steps 2 \
        --mode bf16 --out modes
    check "the first line says so" grep -qE "^CPU.*, bf16$" <(head -1 out)
    works "two more" "${one[@]}" --data sums.jsonl --eval 0 --steps 4 --out modes
    check "keep the mode" grep -qE "^CPU.*, bf16$" <(head -1 out)
    check "which is noted" grep -qx "mode bf16" modes/settings.txt
    refuses "f32 cannot continue it" "it used --mode bf16, this command has --mode f32" \
        "${one[@]}" --data sums.jsonl --eval 0 --steps 5 --mode f32 --out modes
    works "auto" "${one[@]}" --data sums.jsonl --eval 0 --steps 1 --out modes --resume never
    check "is noted as what it is" grep -qxE "mode (f32|bf16)" modes/settings.txt
}

lengthy() { # --length max, --tile, --offload
    rm -rf lengthy
    works "the longest that fits" --model model --rank 1 --backend cpu --threads 1 --length max \
        --memory 64M --data sums.jsonl --eval 0 --steps 1 --out lengthy
    check "is written down" grep -qE "^length [0-9]+$" lengthy/settings.txt
    works "the longest in micro-batches of 96 tokens" --model model --rank 1 --backend cpu \
        --threads 1 --length max --tokens 96 --data sums.jsonl --eval 0 --steps 1 --out lengthy \
        --resume never
    check "is as long as those" grep -q "^length 96$" lengthy/settings.txt
    works "in tiles" "${one[@]}" --tile 64 --data sums.jsonl --eval 0 --steps 1 --out lengthy \
        --resume never
    refuses "offloading on the CPU" "--offload is on, which needs a GPU" "${one[@]}" --offload on \
        --data sums.jsonl --eval 0 --steps 1 --out o
    refuses "a length that is no number" "--length: 'most' is not a number" "${one[@]}" \
        --length most --data sums.jsonl --out o
}

scaled() { # --rope-scale
    local short=(--model model --rank 1 --backend cpu --threads 1 --eval 0 --data sums.jsonl)
    local limit
    limit=$(sed -n 's/.*"max_position_embeddings": *\([0-9]*\).*/\1/p' model/config.json)
    local wide=$((limit * 4)) run=("${short[@]}" --steps 1 --length $((limit * 4)))
    rm -rf scaled wide
    refuses "more than the model's positions" "limit of $limit tokens; --rope-scale extends it" \
        "${run[@]}" --out o
    refuses "an unknown scaling" "--rope-scale is \"dynamic:4\"; dynamic scaling is not supported" \
        "${run[@]}" --rope-scale dynamic:4 --out o
    refuses "a layout of experts without an adapter" "--expert-layout needs --adapter" \
        "${short[@]}" --steps 1 --expert-layout peft --out o
    refuses "a scaling of the demo" "--rope-scale needs --model" --demo --rope-scale yarn:4
    works "a scaled rotation" "${run[@]}" --rope-scale yarn:4 --out scaled
    check "what others need to use it" grep -q "trained with --rope-scale yarn:4" out
    refuses "resuming with another one" "rope-scale" "${run[@]}" --rope-scale linear:4 \
        --steps 2 --out scaled
    refuses "starting from it without" "was trained with the scaling \"yarn:4\"" --model model \
        --backend cpu --data sums.jsonl --adapter scaled --steps 1 --out o
    run "$root/$B/merge" --model model --adapter scaled --out wide
    check "merging needs it" grep -q 'set --rope-scale to it' err
    run "$root/$B/merge" --model model --adapter scaled --out wide --rope-scale yarn:4 --verify
    check "merging with it, verified" [ $status -eq 0 ]
    run "$root/$B/merge" --model model --adapter scaled --gguf wide.gguf --verify
    check "an adapter is not a merged model" grep -q -- '--verify needs --out' err
    check "the merged config has it" grep -q '"rope_type": "yarn"' wide/config.json
    check "and its positions" grep -q "\"max_position_embeddings\": $wide" wide/config.json
    works "the merged model needs none" --model wide --rank 1 --backend cpu --threads 1 --eval 0 \
        --data sums.jsonl --steps 1 --length "$wide" --out scaled --resume never
    rm -rf wide
}

inputs() { # --data -, --format, names that are not used
    local line='{"text": "one and one is two", "id": 7}'
    rm -rf piped
    printf '%s\n%s\n' "$line" "$line" >asked.data
    "$finetune" "${one[@]}" --data - --eval 0 --steps 1 --out piped <asked.data >out 2>err
    check "standard input" grep -q "^data: 2 samples" out
    check "names that are not used" grep -q "note: standard input: not used: id" out
    works "a form that is given" "${one[@]}" --data asked.data --format jsonl --eval 0 --steps 1 \
        --out piped --resume never
    refuses "an unknown form" "nonsense" "${one[@]}" --data asked.data --format nonsense --out o
    refuses "standard input twice" "can be given only once" "${one[@]}" --data - --eval-data - \
        --out o
    printf '%s\n{"text": 1}\n' "$line" |
        "$finetune" --model model --data - --doctor >out 2>err
    check "bad records in standard input" grep -q "^  standard input:2: " out
}

# Samples of a .jsonl file as a table, and mixtures of files.
tables() {
    local same=("${one[@]}" --eval 0 --steps 3 --seed 5)
    rm -rf folder mixed again other
    mkdir -p folder/sub
    head -8 sums.jsonl >folder/b.jsonl
    { echo 'a,q'; sed -n 's/.*"prompt": *"\([^"]*\)".*"completion": *"\([^"]*\)".*/"\2",\1/p' \
        folder/b.jsonl; } >folder/a.CSV
    echo x >folder/README
    check "rows were made" [ "$(wc -l <folder/a.CSV)" -eq 9 ]
    works "a table" "${same[@]}" --data folder/a.CSV --columns prompt=q,completion=a --out mixed
    works "the same as JSON" "${same[@]}" --data folder/b.jsonl --out other
    check "the same adapter" cmp mixed/adapter/adapter_model.safetensors \
        other/adapter/adapter_model.safetensors
    works "a stream" "${same[@]}" --data folder/b.jsonl --stream on --out other --resume never
    check "the same adapter" cmp mixed/adapter/adapter_model.safetensors \
        other/adapter/adapter_model.safetensors
    printf 'prompt,completion\na,b\nc\n' >ragged.csv
    refuses "a ragged row" "ragged.csv:3: the row has 1 field, the header 2" \
        "${same[@]}" --data ragged.csv --out o
    refuses "an unknown name" "columns: \"promt\" is not a name of a record" "${same[@]}" \
        --data folder/a.CSV --columns promt=q --out o
    refuses "an unknown column" "a.CSV: no record has the column \"question\"" "${same[@]}" \
        --data folder/a.CSV --columns prompt=question,completion=a --out o
    works "a column of one file" --model model --data folder/a.CSV --data folder/b.jsonl \
        --columns prompt=q,completion=a --doctor --samples 0 --eval 0
    check "who lacks it" grep -qE \
        '^note: --columns: 1 of 2 files lack "q" and are read without it: folder/b.jsonl$' out
    check "both are read" grep -qE "^  samples +16$" out
    refuses "a column of no file" 'columns: no file has "rules", which is given for "system"' \
        "${same[@]}" --data folder/a.CSV --data folder/b.jsonl \
        --columns prompt=q,completion=a,system=rules --out o
    rm folder/a.CSV
    sed -n 9,12p sums.jsonl >folder/a.json
    works "a folder" --model model --data folder --doctor --samples 0 --eval 0
    check "what is skipped" grep -q "^note: folder: 2 data files; skipped: README, sub$" out
    check "all of it" grep -qE "^  samples +12$" out
    check "in order" grep -q "^  folder/a.json: weight 1, 4 of 4 samples, 33.3% of" out
    refuses "an empty folder" "folder/sub: the folder has no data files" "${same[@]}" \
        --data folder/sub --out o
}

weights() {
    local mix=("${one[@]}" --eval 0 --accumulate 1 --schedule constant --warmup 0 --seed 5
        --data first.jsonl:0.3 --data "a:b.jsonl" --data second.jsonl:1.5)
    rm -rf whole cut
    head -20 sums.jsonl >first.jsonl
    head -4 sums.jsonl >second.jsonl
    sed -n 21,25p sums.jsonl >"a:b.jsonl"
    works "weights" --model model "${mix[@]:6}" --doctor --samples 0
    check "a part" grep -q "^  first.jsonl: weight 0.3, 6 of 20 samples, 35.3% of" out
    check "a name with a colon" grep -q "^  a:b.jsonl: weight 1, 5 of 5 samples, 29.4% of" out
    check "more than once" grep -q "^  second.jsonl: weight 1.5, 6 of 4 samples, 35.3% of" out
    works "weights as JSON" --model model "${mix[@]:6}" --doctor --json
    check "shares" grep -q '"file": "first.jsonl", "weight": 0.3, "samples": 20, "per_epoch": 6' out
    works "in one go" "${mix[@]}" --epochs 4 --out whole
    works "half of it" "${mix[@]}" --epochs 2 --out cut
    works "the rest" "${mix[@]}" --epochs 4 --out cut
    check "went on" grep -q "^resumed after step" out
    check "the same adapter" cmp whole/adapter/adapter_model.safetensors \
        cut/adapter/adapter_model.safetensors
    refuses "a changed weight" "the data has changed since" "${mix[@]}" \
        --data first.jsonl:0.4 --epochs 4 --out cut
    refuses "a weight of zero" "the weight 0 is out of range" "${one[@]}" --data first.jsonl:0 \
        --out o
    refuses "a weight for evaluation" "data for evaluation cannot have a weight" "${one[@]}" \
        --data first.jsonl --eval-data second.jsonl:0.5 --out o
    refuses "a missing file with a weight" "--data nowhere.jsonl: No such file" "${one[@]}" \
        --data nowhere.jsonl:0.5 --out o
}

notes() {
    local i
    rm -rf noted
    works "much that may surprise" "${few[@]}" --model model --out noted --resume never --steps 3 \
        --epochs 2 --warmup 100 --max-norm 0
    check "--steps wins" once "note: --steps 3 overrides --epochs 2"
    check "a long warm-up" once "warm-up of 100 steps is at least as long as"
    check "no clipping" once "--max-norm 0: gradients are not clipped"
    for ((i = 0; i < 300; i++)); do cat sums.jsonl; done | head -400 >many.jsonl
    works "a large fraction" "${one[@]}" --data many.jsonl --eval 0.9 --steps 1 --out noted \
        --resume never
    check "is capped and said so" once "note: --eval 0.9 would be 360 samples; 200 are held"
    check "separate counts" once "^held out: 200 samples, [0-9]* tokens"
    works "doctor and plan" --model model --data sums.jsonl --doctor --plan
    check "the doctor wins" once "note: --plan is ignored beside --doctor"
    works "beta2 0" "${few[@]}" --model model --steps 9 --beta2 0 --lr 1e-2 --out noted \
        --resume never
    cp -r noted/adapter zero
    works "beta2 0.999" "${few[@]}" --model model --steps 9 --beta2 0.999 --lr 1e-2 --out noted \
        --resume never
    check "they differ" [ -z "$(cmp -s zero/adapter_model.safetensors \
        noted/adapter/adapter_model.safetensors && echo same)" ]
    works "the summary" "${few[@]}" --model model --steps 40 --out noted --resume never
    check "compares means" grep -q "^loss .* (means of 4 steps)$" out
    refuses "a device that is missing" "--device 5: " "${few[@]:0:6}" --model model --steps 1 \
        --device 5 --out o
    refuses "a device and the CPU" "--device 5 needs a GPU" "${few[@]}" --model model --steps 1 \
        --device 5 --out o
    refuses "a GGUF adapter" "x.gguf is a GGUF file" "${one[@]:0:4}" --data sums.jsonl --out o \
        --adapter x.gguf
    printf 'GGUF0000' >x.gguf
    cp x.gguf unnamed
    refuses "a GGUF file as data" "--data x.gguf is a GGUF file" "${one[@]}" --data x.gguf --out o
    refuses "with a weight" "--data x.gguf is a GGUF file" "${one[@]}" --data x.gguf:0.5 --out o
    refuses "with a form" "--data x.gguf is a GGUF file" "${one[@]}" --data x.gguf --format jsonl \
        --out o
    refuses "without its ending" "--data unnamed is a GGUF file" "${one[@]}" --data unnamed --out o
    refuses "a GGUF file for evaluation" "--eval-data x.gguf is a GGUF file" "${one[@]}" \
        --data sums.jsonl --eval-data x.gguf --out o
    echo "GGUF is a format for files. This is a text about it." >about.txt
    works "a text about GGUF" "${one[@]}" --data about.txt --eval 0 --steps 1 --out noted \
        --resume never
    refuses "a GGUF model that is missing" "--model none.gguf: no such file" --model none.gguf \
        --data sums.jsonl --out o
    refuses "nearest option" "unknown option --modle; did you mean --model" --modle model
    refuses "too little memory for anything" "not enough memory: .*; it would not fit with" \
        "${few[@]}" --model model --memory 1M --out o
    refuses "a small limit" "the model needs [0-9]+ MiB, but --memory is 5 MiB; it would" \
        "${few[@]}" --model model --memory 5M --out o
    refuses "a module that the model lacks" ": --targets contains qkv" "${few[@]}" --model model \
        --targets qkv --out o
    refuses "too little memory for these tokens" \
        "not enough memory: .*; it would fit with --tokens [0-9]+ --length" \
        --model model --data sums.jsonl --tokens 65536 --memory 60M --backend cpu --threads 1 \
        --out o
    run "$finetune" --model model --plan --length 128 --recompute on --cache off --memory 60M \
        --backend cpu --threads 1 --tokens "$(sed -n 's/.*fit with --tokens \([0-9]*\).*/\1/p' err)"
    check "the advice holds ($status)" [ $status -eq 0 ]
    "$finetune" "${one[@]}" --data sums.jsonl --epochs 1e6 --out noted --resume never \
        >out 2>err &
    pid=$!
    check "counting a million epochs is told" soon 30 grep -q "^counting the steps of" out
    kill -INT $pid
    check "and can be stopped" soon 5 gone $pid
    wait $pid
    check "with status 130" [ $? -eq 130 ]
}

resuming() {
    local common=(--tokens 256 --rank 2 --steps 6 --eval 0 --backend cpu --threads 1)
    local file=$root/../shared/gguf/models/llama-q8_0.gguf
    if [[ -e $file ]]; then
        rm -rf again
        works "a GGUF model" --model "$file" --template plain --data sums.jsonl "${common[@]}" \
            --out again
        cp "$file" copied.gguf
        works "a copy of it" --model copied.gguf --template plain --data sums.jsonl \
            "${common[@]}" --out again
        check "is the same model" grep -q "resumed after step 6 of 6" out
    fi
    resuming_other
    resuming_places
    resuming_files
    rm -rf again elsewhere other
    works "a run" --model model --data sums.jsonl "${common[@]}" --out again
    works "another spelling" --model ./model --data "$PWD/sums.jsonl" "${common[@]}" --out ./again
    check "is the same run" grep -q "resumed after step 6 of 6" out
    cp -r model elsewhere
    works "the same model elsewhere" --model elsewhere --data sums.jsonl "${common[@]}" --out again
    check "is the same run" grep -q "resumed after step 6 of 6" out
    cp -r model other
    printf 'XX' | dd of=other/model.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
    run "$finetune" --model other --data sums.jsonl "${common[@]}" --out again
    check "another model is refused" grep -q -- "--model other has other weights than the run" err
    check "before the data is read" [ "$(grep -c '^data:' out)" -eq 0 ]
    run "$finetune" --model model --data nowhere.jsonl "${common[@]}" --out again --rank 3 \
        --schedule linear --targets q,v --rslora
    check "every difference at once" grep -qF -- "it used --rank 2 --targets all no --rslora \
--schedule cosine, this command has --rank 3 --targets q,v --rslora --schedule linear; use the" err
}

# Options that mean the same resume a run, and those that do not are named.
resuming_other() {
    local same=(--model model --tokens 256 --rank 2 --steps 2 --backend cpu --threads 1) name
    rm -rf again odd
    works "files for evaluation" "${same[@]}" --data sums.jsonl --eval-data short.jsonl --out again
    run "$finetune" "${same[@]}" --data nowhere.jsonl --out again
    check "without them" grep -q "used --eval-data short.jsonl, .* has no --eval-data;" err
    works "held-out samples" "${same[@]}" --data sums.jsonl --out again --resume never \
        --targets q,k,v,o,gate,up,down
    run "$finetune" "${same[@]}" --data nowhere.jsonl --eval-data short.jsonl --out again
    check "with files" grep -q "used no --eval-data, .* has --eval-data short.jsonl;" err
    works "all targets" "${same[@]}" --data sums.jsonl --out again --targets all
    check "are the same" grep -q "resumed after step 2 of 2" out
    run "$finetune" "${same[@]}" --data sums.jsonl --out again --rank 3 --targets q --rslora \
        --alpha 7 --dropout 0.25 --train-norms --lr 0.123456 --schedule linear --warmup 1 \
        --beta2 0.5 --weight-decay 0.125 --max-norm 3 --length 100 --accumulate 9 --seed 77 \
        --truncate --train-prompt --last-turn --max-samples 99 --base 16bit --format text \
        --template "$(printf "x%.0s" {1..99})"
    check "many differences: no part of one" \
        grep -qE -- "--[a-z0-9-]+( [^ ]+)?, and [0-9]+ more differ; use the same" err
    cp model/model.safetensors model/other.safetensors
    works "another file in the model's folder" "${same[@]}" --data sums.jsonl --out again
    rm model/other.safetensors
    rm again/log.jsonl
    works "without its log" "${same[@]}" --data sums.jsonl --out again
    check "no losses are invented" [ -z "$(grep -e '-> 0.0000' out)" ]
    check "nor in the plot" [ -z "$(grep -E 'loss (0.0000|nan)' again/training.svg)" ]
    for name in '=a.jsonl' '"a".jsonl' ' a .jsonl'; do
        cp sums.jsonl "$name"
        works "data in '$name'" "${same[@]}" --data "$name" --out odd --resume never
        works "again" "${same[@]}" --data "$name" --out odd
        check "is resumed" grep -q "resumed after step 2 of 2" out
        works "by its settings" --config odd/settings.txt --out odd --threads 1
    done
    refuses "a line end" "--data: the value contains a line end" "${same[@]}" --data $'a\nb.jsonl' \
        --out o
}

# A run is the same from another folder and with other spellings, however long its paths are.
resuming_places() {
    local run=(--tokens 256 --rank 2 --steps 2 --eval 0 --backend cpu --threads 1) long
    rm -rf again place deep
    works "a run" --model model --data sums.jsonl "${run[@]}" --out again
    works "an absolute model" --model "$PWD/model" --data sums.jsonl "${run[@]}" --out again
    check "is the same run" grep -q "resumed after step 2 of 2" out
    mkdir place
    finetune_at() { (cd "$1" && "$finetune" "${@:2}"); }
    run finetune_at place --model ../model --data ../sums.jsonl "${run[@]}" --out ../again
    check "another working directory ($status)" grep -q "resumed after step 2 of 2" out
    long=deep/$(printf 'x%.0s' {1..120})/$(printf 'y%.0s' {1..120})
    mkdir -p "$long"
    cp -r model "$long/a"
    cp -r model "$long/b"
    printf 'XX' | dd of="$long/b/model.safetensors" bs=1 seek=9000 conv=notrunc 2>/dev/null
    works "a long path" --model "$long/a" --data sums.jsonl "${run[@]}" --out again --resume never
    works "again" --model "$long/a" --data sums.jsonl "${run[@]}" --out again
    check "is the same run" grep -q "resumed after step 2 of 2" out
    run "$finetune" --model "$long/b" --data sums.jsonl "${run[@]}" --out again
    check "one that differs at its end ($status)" grep -q "/b has other weights than the run" err
    rm -rf deep
}

# Files that change the text are compared by what they say.
resuming_files() {
    local run=(--model model --tokens 256 --rank 2 --steps 2 --eval 0 --backend cpu --threads 1)
    local line='{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":'
    rm -rf again place
    mkdir place
    echo "$line \"b\"}]}" >chat.jsonl
    printf '%s' "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}" \
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}" \
        "{% endfor %}" >t.jinja
    printf '<|new|>\n' >names.txt
    local all=("${run[@]}" --data chat.jsonl --out again)
    works "a template and tokens" "${all[@]}" --chat-template t.jinja --add-tokens names.txt
    printed_line "a conversation" 'chat format model, chat_template.jinja of the adapter' Hi
    works "other spellings" "${all[@]}" --chat-template ./t.jinja --add-tokens "$PWD/names.txt"
    check "are the same run" grep -q "resumed after step 2 of 2" out
    cp t.jinja place/u.jinja
    cp names.txt place/other.txt
    works "copies" "${all[@]}" --chat-template place/u.jinja --add-tokens place/other.txt
    check "are the same run" grep -q "resumed after step 2 of 2" out
    sed -i 's/:/;/' place/u.jinja
    run "$finetune" "${all[@]}" --chat-template place/u.jinja --add-tokens names.txt
    check "another template is refused ($status)" grep -q "the data has changed since" err
    echo '<|old|>' >place/other.txt
    run "$finetune" "${all[@]}" --chat-template t.jinja --add-tokens place/other.txt
    check "other tokens are refused ($status)" grep -q "the data has changed since" err
    run "$finetune" "${all[@]}"
    check "neither of them ($status)" grep -q -- "it used --chat-template place/u.jinja \
--add-tokens place/other.txt, this command has no --chat-template no --add-tokens; use the" err
    works "without tokens" "${all[@]}" --chat-template t.jinja --resume never
    run "$finetune" "${all[@]}" --chat-template t.jinja --add-tokens names.txt
    check "with tokens ($status)" grep -q "used no --add-tokens, .* has --add-tokens names.txt;" err
}

rates() { # the steps and learning rates of a log
    sed -n 's/^{"step":\([0-9]*\),.*"lr":\([^,}]*\).*/\1 \2/p' "$1/log.jsonl"
}

extending() {
    local common=(--model model --data sums.jsonl --tokens 256 --rank 2 --eval 0 --backend cpu
        --threads 1 --schedule constant --warmup 0)
    rm -rf longer straight
    works "ten steps" "${common[@]}" --steps 10 --out longer
    works "five more" "${common[@]}" --steps 15 --out longer
    check "it goes on" grep -q "resumed after step 10 of 15" out
    check "and says what changed" grep -q "changed: 15 steps instead of 10" out
    check "the log is whole" [ "$(losses longer | wc -l)" -eq 15 ]
    works "fifteen at once" "${common[@]}" --steps 15 --out straight
    check "constant rate: the same adapter" same_files longer straight
    run "$finetune" "${common[@]}" --steps 12 --out longer
    check "fewer are refused" grep -q -- "it used --steps 15, this command has --steps 12" err
    run "$finetune" "${common[@]}" --steps 20 --lr 1e-3 --out longer
    check "another rate is refused" grep -q -- "--lr 0.0002, .* has --lr 0.001; .*--extend to" err
    works "unless asked for" "${common[@]}" --steps 20 --lr 1e-3 --out longer --extend
    check "it is told" grep -q -- "changed: --lr 0.001 instead of --lr 0.0002" out
    check "and noted" grep -q "^lr 0.001$" longer/settings.txt
    works "from then on it is the run's" "${common[@]}" --steps 20 --lr 1e-3 --out longer
    run "$finetune" "${common[@]}" --steps 20 --lr 1e-3 --rank 3 --out longer --extend
    check "the rank cannot change" grep -q -- "it used --rank 2, this command has --rank 3" err
    works "the run again, by its settings" --config longer/settings.txt --out straight \
        --resume never
    check "its parts: the same adapter" same_files longer straight
    check "the same rates" cmp <(rates longer) <(rates straight)
    check "the same settings" cmp longer/settings.txt straight/settings.txt
    works "at another rate" --config longer/settings.txt --out straight --lr 1e-4 --resume never
    check "the parts make way" grep -q "changed on the way; --lr is used from the first step" out
    check "for one run" [ "$(grep -c '^until' straight/settings.txt)" -eq 0 ]
    cp longer/settings.txt kept.txt
    works "no step is left" "${common[@]}" --steps 20 --lr 5e-3 --out longer --extend
    check "it is told" grep -q "note: no step is left, so the changed options have no effect" out
    check "and not noted" cmp -s kept.txt longer/settings.txt
    rm -rf longer straight
    works "ten steps of a cosine" "${common[@]}" --schedule cosine --steps 10 --out longer
    check "end at zero" awk 'END { exit !($2 < 1e-5) }' <(rates longer)
    works "five more" "${common[@]}" --schedule cosine --steps 15 --out longer
    works "fifteen at once" "${common[@]}" --schedule cosine --steps 15 --out straight
    check "the rates from then on are those of fifteen" \
        cmp <(rates longer | tail -5) <(rates straight | tail -5)
    check "they rise again" awk '{ rate[$1] = $2 } END { exit !(rate[11] > rate[10] + 1e-5) }' \
        <(rates longer)
    rm -rf longer
    works "one epoch" "${common[@]}" --epochs 1 --out longer
    works "two epochs" "${common[@]}" --epochs 2 --out longer
    check "more epochs go on" grep -q "^changed: .* steps instead of" out
}

doctors() {
    local i
    {
        head -2 sums.jsonl
        echo '{"prompt": "broken", "completion": }'
        echo '{"prompt": 5, "completion": "x"}'
        sed -n 3p sums.jsonl
        for ((i = 0; i < 25; i++)); do echo "{\"nothing\": $i}"; done
        echo '{"prompt": "a question", "completion": ""}'
    } >ill.jsonl
    run "$finetune" --model model --data ill.jsonl --doctor
    check "bad records: status 1 ($status)" [ $status -eq 1 ]
    check "the total is in the error" grep -q "^finetune: 27 records cannot be read$" err
    check "with their lines" grep -q "^  ill.jsonl:3: invalid JSON" out
    check "each of them" grep -q "^  ill.jsonl:4: .*prompt" out
    check "the first twenty" [ "$(grep -c '^  ill.jsonl:' out)" -eq 20 ]
    check "and a count" grep -q "^  and 7 more$" out
    check "the others are shown" grep -qE "^  samples +4$" out
    check "with their lines" grep -q "^sample 3 (ill.jsonl:5):" out
    check "empty answers" grep -qE "^  empty answers +1   the model learns to say nothing" out
    check "no note about the default format" [ "$(grep -c 'the tokenizer has no token' out)" -eq 0 ]
    echo '{"prompt": "a", "chosen": "b", "rejected": "c"}' >pair.jsonl
    run "$finetune" --model model --data pair.jsonl --doctor
    check "long messages are whole" \
        grep -q "^  pair.jsonl:1: the record is .*, or --method dpo to train on both$" out
    run "$finetune" --model model --data sums.jsonl --doctor --template chatml
    check "a format's missing token" once \
        "note: --template chatml: the tokenizer has no token <.im_end.>; it is written as text"
    run "$finetune" --model model --data ill.jsonl --doctor --json
    check "as JSON" grep -qE '^\{"samples": 4, "bad": 27, .*"line": 3, "error": "invalid JSON' out
    check "one line" [ "$(wc -l <out)" -eq 1 ]
    printf '[\n{"text": "one"},\n{"text": 5},\n {"text":\n "two, [x]"},\n{"txt": "three"}\n]\n' \
        >ill.json
    run "$finetune" --model model --data ill.json --doctor --samples 9
    check "bad records in an array" grep -q "^  ill.json:3: " out
    check "the last one" grep -q "^  ill.json:6: " out
    check "the good ones" grep -qE "^  used +2$" out
    doctor_layouts
    run "$finetune" --model model --data words.jsonl --doctor
    check "nothing but bad records ($status)" [ $status -eq 1 ]
    works "doctor and truncate" --model model --data long.jsonl --doctor --truncate --length 20
    check "what is cut off is not shown" grep -q "more tokens are cut off" out
    check "nor counted" grep -q "^sample 1 (long.jsonl:1): 311 tokens (truncated), 10 trained" out
    check "its end is not trained" grep -qE "^  end not trained +1   the model will not" out
}

# doctor NAME BAD USED PATTERN: --doctor of layout.json or layout.jsonl, as the loader reads it.
doctor() {
    run "$finetune" --model model --data "$1" --doctor --samples 9 "${@:5}"
    check "$1: bad records ($2)" grep -qE "^  bad records +$2( |$)" out
    check "$1: used ($3)" grep -qE "^  used +$3$" out
    check "$1: $4" grep -qE -- "$4" out
}

doctor_layouts() {
    printf '{"text": "one"}\n{"text": 5}\n{"text": "two"}\n' >layout.json
    doctor layout.json 1 2 "^  layout.json:2: "
    printf '[{"text": "one"},\n{"text": 5},\n{"text":\n"two"},{"text": "three"}]\n' >layout.jsonl
    doctor layout.jsonl 1 3 "^sample 3 \(layout.jsonl:4\)"
    printf '{"version": [1, 2],\n"data": [\n{"text": "one"},\n{"text": 5},\n{"text": "two"}]}\n' \
        >layout.json
    doctor layout.json 1 2 "^  layout.json:4: "
    check "lines after a bad record" grep -q "^sample 2 (layout.json:5)" out
    printf '{"text":\n "one"}\n{"text": 5}\n\n{"text": "cut\n{"text":\n "two"}\n' >layout.jsonl
    doctor layout.jsonl 2 2 "^sample 2 \(layout.jsonl:6\)"
    check "a record that is cut" grep -q "^  layout.jsonl:5: " out
    printf '{"text": "a", "prompt": "b", "completion": "c"}\n{"text": "x"}\n' >layout.jsonl
    doctor layout.jsonl 1 1 "^  layout.jsonl:1: .*; use --format to say which"
    printf '{"text": "one"}\n{"text": 5}\n{"text": 6}\n' >noext
    refuses "a name without an ending" "--data noext: the name must end in .jsonl" \
        --model model --data noext --doctor
    check "once" [ "$(wc -l <err)" -eq 1 ]
    refuses "an unknown form" "--format: 'bogus' is not one of jsonl, ndjson, json, txt, " \
        --model model --data noext --format bogus --doctor
    echo '{"input_ids": [1, 2], "labels": [1, 999]}' >labels.jsonl
    refuses "a label out of range" "labels.jsonl:1: label 999 is out of range" --model model \
        --data labels.jsonl --out o
    printf '{"prompt": "%s", "completion": "x"}\n{"text": "y"}\n{"text": ""}\n' \
        "$(printf 'x%.0s' {1..300})" >counts.jsonl
    doctor counts.jsonl 0 1 "^  nothing to train on +0$"
    check "a long one is counted" grep -qE "^  too long for --length +1 " out
    check "plain text is no empty answer" grep -qE "^  empty answers +0$" out
}

configs() {
    cat >run.txt <<'END'
# a comment
model model
--data sums.jsonl
tokens = 256
rank 2
  eval=0
targets q,v
rslora
backend cpu
threads 1
steps 3
prompt "1 plus 1 is"
END
    rm -rf configured
    works "options from a file" --config run.txt --out configured
    check "they count" grep -qE "^step 3/3" out
    check "quotes are removed" grep -q "| 1 plus 1 is" out
    check "they are noted" grep -q "^rslora$" configured/settings.txt
    works "the command line wins" --config run.txt --out configured --steps 4 --data short.jsonl \
        --resume never
    check "also over lists" grep -q "^data: 4 samples" out
    check "also over numbers" grep -qE "^step 4/4" out
    works "a run's own settings" --config configured/settings.txt --out configured
    check "resume it" grep -q "resumed after step 4 of 4" out
    works "epochs win over the file's steps" --config run.txt --out configured --epochs 0.5 \
        --resume never
    check "they do" [ -z "$(grep "^step 3/3" out)" ]
    printf '\357\273\277rank 2\nmodel model\ndata sums.jsonl\nsteps 1\n' >mark.txt
    works "a byte order mark" --config mark.txt --out configured --resume never
    refuses "a missing file" "--config nowhere.txt: No such file" --config nowhere.txt --out o
    printf 'rank 2\nrang 3\n' >bad.txt
    refuses "a wrong line" "bad.txt:2: unknown option --rang; did you mean --rank" \
        --config bad.txt --out o
    printf 'rank two\n' >bad.txt
    refuses "a wrong value" "bad.txt:1: --rank: 'two' is not a number" --config bad.txt --out o
    printf 'model model\nuntil x%0100d\n' 0 >bad.txt
    refuses "a wrong part" "bad.txt: 'until x0{93}' is not the step at which a part of a run" \
        --config bad.txt --out o
}

adapters() {
    local option before
    rm -rf normed more
    head -30 sums.jsonl >held.jsonl
    works "train norms" "${few[@]}" --model model --steps 20 --lr 1e-2 --train-norms --out normed
    works "start from a run with norms" --model model --data sums.jsonl --tokens 256 --eval 0.1 \
        --backend cpu --threads 1 --adapter normed --steps 2 --out more --sample-file short.jsonl \
        --sample-tokens 1
    check "it is told" grep -q "normed/adapter contains trained norms; they are loaded and" out
    check "a GGUF adapter has none" [ ! -e more/adapter.gguf ]
    check "merge has them" grep -q "no adapter.gguf: .* norms; merge the adapter instead (merge" out
    check "a card" grep -q 'model = PeftModel.from_pretrained(base, "THIS FOLDER")' \
        more/adapter/README.md
    check "with the settings" grep -qx "eval 0.1" more/adapter/README.md
    check "but no paths" eval "! grep -qE '^(model|data|adapter|sample-file) [^=]|^base_model' \
        more/adapter/README.md"
    mkdir -p hub/models--ada--sums/snapshots more/adapter
    ln -s ../../../model hub/models--ada--sums/snapshots/1
    echo mine >more/adapter/README.md
    works "a model in the hub's cache" --model hub/models--ada--sums/snapshots/1 --data sums.jsonl \
        --tokens 256 --eval 0.1 --backend cpu --threads 1 --adapter normed --steps 3 --out more
    check "has its name there" grep -q '"ada/sums"' more/adapter/adapter_config.json
    check "a card of others is kept" [ "$(<more/adapter/README.md)" = mine ]
    rm more/adapter/README.md
    works "another name" --model model --data sums.jsonl --tokens 256 --eval 0.1 --backend cpu \
        --threads 1 --adapter normed --steps 4 --out more --base-name eve/other
    check "is in the card" grep -qx "base_model: eve/other" more/adapter/README.md
    works "a name that the hub does not have" --model model --data sums.jsonl --tokens 256 \
        --eval 0.1 --backend cpu --threads 1 --adapter normed --steps 5 --out more \
        --base-name eve/.other
    check "is in the card's text" grep -qF '("eve/.other")' more/adapter/README.md
    check "but not in its head" [ "$(grep -c "^base_model" more/adapter/README.md)" -eq 0 ]
    check "they are kept" grep -q '"model.norm"' more/adapter/adapter_config.json
    works "another format of the base" --model model --data sums.jsonl --adapter normed \
        --eval-only --base 32bit --backend cpu --threads 1
    check "is noted" grep -q "normed/adapter was trained on a base in nf4 and .* in 32bit" out err
    before=$(evaluated normed)
    check "the first loss is that of the run" [ "${before:-none}" = "$(first_eval normed)" ]
    for option in "--rank 1" "--alpha 2" "--targets q" "--rslora"; do
        # shellcheck disable=SC2086
        refuses "$option beside --adapter" "${option%% *} cannot be given with --adapter" \
            --model model --data sums.jsonl --adapter normed --out o $option
    done
    rm -rf snaps
    works "snapshots" "${few[@]}" --model model --steps 7 --snapshot-every 3 --out snaps
    check "are kept" [ "$(cd snaps/snapshots && echo step-*)" = "step-3 step-6" ]
    check "and whole" [ -s snaps/snapshots/step-3/adapter_config.json ]
    works "starting over" "${few[@]}" --model model --steps 2 --out snaps --resume never
    check "removes them" [ -z "$(find snaps -name step-3 -o -name step-6)" ]
}

# Both in f32: with --mode auto, a run may compute in bf16 where an evaluation alone does not.
evaluated() { # the held-out loss of a run's adapter on all the data that `first_eval` used
    "$finetune" --model model --adapter "$1" --data held.jsonl --tokens 256 --backend cpu \
        --mode f32 --threads 1 --eval-only --json 2>err |
        sed 's/.*"loss": \([0-9.]*\),.*/\1/' | cut -c1-8
}

first_eval() { # the loss before the first step
    rm -rf first
    "$finetune" --model model --adapter "$1" --data sums.jsonl --eval-data held.jsonl \
        --mode f32 --tokens 256 --backend cpu --threads 1 --steps 1 --out first >/dev/null 2>&1
    sed -n 's/^{"step":0,"eval_loss":\([0-9.]*\),.*/\1/p' first/log.jsonl | cut -c1-8
}

evaluations() {
    head -30 sums.jsonl >held.jsonl
    rm -rf learnt
    works "a run to evaluate" "${few[@]}" --model model --steps 60 --lr 1e-2 --out learnt
    works "the model itself" --model model --data held.jsonl --tokens 256 --eval-only
    check "prints a loss" grep -qE "^loss [0-9.]+, perplexity [0-9.]+ over 30 samples" out
    sed 's/^loss \([0-9.]*\).*/\1/;t;d' out >untrained
    works "the adapter" --model model --adapter learnt --data held.jsonl --tokens 256 --eval-only
    sed 's/^loss \([0-9.]*\).*/\1/;t;d' out >trained
    check "has learnt" awk 'NR == 1 { a = $1 } NR == 2 { exit !($1 < a) }' untrained trained
    works "as JSON" --model model --adapter learnt --eval-data held.jsonl --eval-only --json
    check "one line" grep -qE '^\{"loss": [0-9.]+, .*"samples": 30,' out
    check "nothing is created" [ ! -e o ]
    refuses "JSON of nothing" "--json needs" --model model --data sums.jsonl --json --out o
}

best() { # --keep-best, --patience, --csv
    rm -rf best repeated
    works "the best adapter" "${one[@]}" --data sums.jsonl --eval 5 --steps 6 --eval-every 1 \
        --keep-best --csv --snapshot-every 4 --sample-prompt $'a\nb ' --sample-tokens 3 \
        --base-name org/name --out best
    check "is kept" [ -s best/best/adapter_model.safetensors ]
    check "and named" grep -q "best/best .* the adapter of step" out
    check "the log as a table" [ "$(head -1 best/log.csv)" = \
        "step,loss,grad_norm,lr,tokens_per_s,epoch,memory_bytes,eval_loss" ]
    check "has a line per entry" \
        [ "$(wc -l <best/log.csv)" -eq $(($(grep -vc samples best/log.jsonl) + 1)) ]
    works "by its settings" --config best/settings.txt --out repeated --threads 1 --resume never
    check "every file is there" cmp <(cd best && find . | sort) <(cd repeated && find . | sort)
    check "the same settings" cmp best/settings.txt repeated/settings.txt
    check "the same samples" cmp <(grep samples best/log.jsonl) <(grep samples repeated/log.jsonl)
    check "the same best adapter" cmp best/best/adapter_model.safetensors \
        repeated/best/adapter_model.safetensors
    works "a rate that makes it worse" "${one[@]}" --data sums.jsonl --eval 5 --steps 40 \
        --eval-every 1 --patience 2 --lr 9 --schedule constant --out best --resume never
    check "stops early" grep -q "stopped early: the held-out loss has not fallen for 2" out
    check "after few steps" [ "$(grep -c eval_loss best/log.jsonl)" -lt 30 ]
    works "two steps" "${one[@]}" --data sums.jsonl --eval 5 --steps 2 --eval-every 1 --out best \
        --resume never
    rm -rf best/best
    works "--keep-best later" "${one[@]}" --data sums.jsonl --eval 5 --steps 2 --eval-every 1 \
        --keep-best --out best
    check "names no folder that is not there" \
        eval "! grep -q 'best/best ' out || [ -s best/best/adapter_model.safetensors ]"
    local worse=("${one[@]}" --data sums.jsonl --eval 5 --eval-every 1)
    works "a run that gets worse" "${worse[@]}" --steps 6 --out best --resume never
    sed -i '/"step":2,"eval_loss"/s/"eval_loss":[0-9.]*/"eval_loss":0.5/' best/log.jsonl
    works "--keep-best after the best" "${worse[@]}" --steps 9 --keep-best --patience 3 --out best
    check "says what is not kept" grep -q "held-out loss so far, 0.5000, was that of step 2" out
    check "and what is" grep -qE "best/best .* the adapter of step [6-9], .* since --keep-best" out
    check "it is there" grep -qE "^step [6-9]$" best/best/best.txt
    check "--patience counts from there" grep -q "counts the evaluations after step 6" out
    check "so steps are taken" [ "$(losses best | wc -l)" -eq 9 ]
    refuses "nothing is held out" "--keep-best needs held-out samples" "${one[@]}" \
        --data sums.jsonl --eval 0 --keep-best --out o
}

lone_texts() { # texts and pairs that do not fit into a step, or are alone in it
    local i
    head -3 judged.jsonl >three.jsonl
    works "three texts of kto" "${one[@]}" --data three.jsonl --method kto --eval 0 \
        --tokens 16 --length 16 --accumulate 2 --epochs 1 --out kto --resume never
    check "are one step" [ "$(grep -c '"loss"' kto/log.jsonl)" -eq 1 ]
    head -1 judged.jsonl >single.jsonl
    refuses "one text of kto" "kto needs at least 2" "${one[@]}" --data single.jsonl --method kto \
        --eval 0 --out o
    works "pairs that do not fit" "${one[@]}" --data pairs.jsonl --method dpo --eval 0 \
        --tokens 28 --length 17 --steps 1 --out dpo --resume never
    check "say so" grep -q " too long for --tokens 28, which must hold both texts: skipped" out
    local question='{"role": "user", "content": "' answer='"}, {"role": "assistant", "content": "'
    for i in 1 2; do
        echo "{\"chosen\": [${question}1${answer}a\"}], \"rejected\": [$question$i${answer}b\"}]}"
    done >talks.jsonl
    works "two conversations" "${one[@]}" --data talks.jsonl --method dpo --eval 0 --steps 1 \
        --template chatml --out dpo --resume never
    check "that differ early" grep -q " 1 whose texts differ before the answers" out
    works "pairs and the doctor" --model model --data pairs.jsonl --method dpo --doctor --json
    check "are counted as one" grep -q '^{"samples": 10,' out
}

heads() { # --head nf4, on the model with a head of its own, which is in a second file
    local size=$((257 * 32 * 2)) length names
    local header="{\"lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":[257,32],"
    header+="\"data_offsets\":[0,$size]}}"
    length=$(printf %03o ${#header})
    rm -rf untied
    cp -r model untied
    mv untied/model.safetensors untied/a.safetensors
    {
        printf '%b' "\\0$length\\0\\0\\0\\0\\0\\0\\0$header"
        head -c $size data.bin
    } >untied/b.safetensors
    names=$(head -c 3000 untied/a.safetensors | grep -ao '"model[a-z0-9_.]*"' |
        sed 's/$/: "a.safetensors", /' | tr -d '\n')
    echo "{\"weight_map\": {$names\"lm_head.weight\": \"b.safetensors\"}}" \
        >untied/model.safetensors.index.json
    works "a 4-bit head" "${one[@]}" --model untied --data sums.jsonl --head nf4 --steps 2 \
        --out kto --resume never
    refuses "another head" "it used --head nf4" "${one[@]}" --model untied --data sums.jsonl \
        --steps 2 --out kto
    refuses "a trained 4-bit head" "--head is nf4, but the head of this model is trained; use" \
        "${one[@]}" --model untied --data sums.jsonl --head nf4 --save-modules head --out o
    refuses "a tied 4-bit head" "--head is nf4, but the head of this model is its embedding" \
        "${one[@]}" --data sums.jsonl --head nf4 --out o
}

# --router-aux-loss, on the model with three experts, in a second file, in place of each MLP.
balance() {
    local header="" at=0 layer e i p names length
    local steps=(--data sums.jsonl --eval 2 --accumulate 2 --schedule constant --warmup 0)
    for layer in 0 1; do
        p=model.layers.$layer.block_sparse_moe
        tensor $p.gate.weight 3,32 96
        for e in 0 1 2; do
            for i in 1 3; do tensor $p.experts.$e.w$i.weight 16,32 512; done
            tensor $p.experts.$e.w2.weight 32,16 512
        done
    done
    header="{$header}"
    length=${#header}
    rm -rf mixture balanced
    cp -r model mixture
    mv mixture/model.safetensors mixture/a.safetensors
    {
        for ((i = 0; i < 8; i++)); do printf "\\$(printf %03o $(((length >> (8 * i)) & 255)))"; done
        printf %s "$header"
        head -c $at data.bin
    } >mixture/b.safetensors
    names=$(head -c 3000 mixture/a.safetensors | grep -ao '"model[a-z0-9_.]*"' | grep -v mlp |
        sed 's/$/: "a.safetensors", /' | tr -d '\n')
    names+=$(grep -o '"model[a-z0-9_.]*"' <<<"$header" | sed 's/$/: "b.safetensors", /' |
        tr -d '\n')
    echo "{\"weight_map\": {${names%, }}}" >mixture/model.safetensors.index.json
    sed 's/LlamaForCausalLM/MixtralForCausalLM/; s/"llama"/"mixtral"/; s/"num_hidden/"num_local_ex'\
'perts": 3, "num_experts_per_tok": 2, &/; s/"intermediate_size": 64/"intermediate_size": 16/' \
        model/config.json >mixture/config.json
    works "experts" "${one[@]}" --model mixture "${steps[@]}" --steps 2 --csv --out balanced
    check "have a load" grep -qE '"load_least":[01]\..*"load_most":1\..*"load_entropy":[01]' \
        balanced/log.jsonl
    check "and no load-balancing loss" [ "$(grep -c aux_loss balanced/log.jsonl)" -eq 0 ]
    check "in the table as well" [ "$(head -1 balanced/log.csv)" = \
        "step,loss,grad_norm,lr,tokens_per_s,epoch,memory_bytes,eval_loss,load_least,load_most,$(
            )load_entropy" ]
    check "on the page" grep -q "load of experts" balanced/training.html
    works "the load-balancing loss" "${one[@]}" --model mixture "${steps[@]}" --steps 4 \
        --router-aux-loss 0.1 --out balanced --resume never
    check "is logged" grep -qE '"router_aux_loss":[12]\.' balanced/log.jsonl
    cp balanced/adapter/adapter_model.safetensors whole.safetensors
    works "in two parts" "${one[@]}" --model mixture "${steps[@]}" --steps 2 \
        --router-aux-loss 0.1 --out balanced --resume never
    works "resumed" "${one[@]}" --model mixture "${steps[@]}" --steps 4 --router-aux-loss 0.1 \
        --out balanced
    check "is the same as in one" cmp -s whole.safetensors \
        balanced/adapter/adapter_model.safetensors
    refuses "another coefficient" "it used --router-aux-loss 0.1" "${one[@]}" --model mixture \
        "${steps[@]}" --steps 4 --router-aux-loss 0.2 --out balanced
    refuses "a loss without experts" "--router-aux-loss is 0.1, but the model has no experts" \
        "${one[@]}" --data sums.jsonl --router-aux-loss 0.1 --out o
    sed -i 's/"vocab_size"/"output_router_logits": true, &/' mixture/config.json
    refuses "a config that asks for it" "give its router_aux_loss_coef with --router-aux-loss" \
        "${one[@]}" --model mixture "${steps[@]}" --steps 1 --out o
    works "the answer none" "${one[@]}" --model mixture "${steps[@]}" --steps 1 \
        --router-aux-loss -1 --out balanced --resume never
}

preferences() { # --method dpo and kto
    local i
    for i in 1 2 3 4 5 6 7 8 9 10; do
        echo "{\"prompt\": \"$i and 1\", \"chosen\": \" is more\", \"rejected\": \" no\"}"
    done >pairs.jsonl
    sed 's/"chosen.*"rejected": " no"/"completion": " no", "label": false/' pairs.jsonl \
        >judged.jsonl
    sed 's/"chosen.*"rejected": " no"/"completion": " is more", "label": true/' pairs.jsonl \
        >>judged.jsonl
    local steps=(--eval 2 --accumulate 1 --lr 1e-2 --schedule constant --warmup 0)
    rm -rf dpo kto
    works "dpo" "${one[@]}" "${steps[@]}" --data pairs.jsonl --method dpo --steps 4 --out dpo
    check "pairs are counted" grep -q "^data: 8 pairs" out
    check "the first loss is log 2" grep -q '"step":1,"loss":0.69314' dpo/log.jsonl
    check "rewards are logged" grep -q '"rewards_chosen":.*"margins":.*"accuracy":' dpo/log.jsonl
    check "and learned" grep -q '"step":4,"eval_loss":.*"eval_accuracy":1}' dpo/log.jsonl
    check "references are kept" [ -s dpo/references.bin ]
    works "kto" "${one[@]}" "${steps[@]}" --data judged.jsonl --method kto --steps 4 --out kto
    check "kl is logged" grep -q '"kl":' kto/log.jsonl
    cp kto/adapter/adapter_model.safetensors whole.safetensors
    works "kto in two parts" "${one[@]}" "${steps[@]}" --data judged.jsonl --method kto --steps 2 \
        --out kto --resume never
    works "resumed" "${one[@]}" "${steps[@]}" --data judged.jsonl --method kto --steps 4 --out kto
    check "is the same" cmp -s whole.safetensors kto/adapter/adapter_model.safetensors
    works "references in the step" "${one[@]}" "${steps[@]}" --data judged.jsonl --method kto \
        --steps 4 --out kto --resume never --reference beside
    check "give the same" cmp -s whole.safetensors kto/adapter/adapter_model.safetensors
    works "dora and rows" "${one[@]}" "${steps[@]}" --data sums.jsonl --dora --train-tokens 5,7 \
        --steps 2 --out kto --resume never
    check "no adapter for llama.cpp" [ ! -e kto/adapter.gguf ]
    check "and why" grep -q "a GGUF adapter cannot contain the magnitudes of DoRA" out
    check "the config of PEFT" grep -q '"use_dora": true' kto/adapter/adapter_config.json
    works "a trained embedding" "${one[@]}" "${steps[@]}" --data sums.jsonl --save-modules embed \
        --loraplus-ratio 4 --steps 2 --out kto --resume never
    check "is saved" grep -q '"embed_tokens"' kto/adapter/adapter_config.json
    local lean=(--data sums.jsonl --optimizer adamw8bit --neftune 5 --out kto)
    works "8-bit moments and noise" "${one[@]}" "${steps[@]}" "${lean[@]}" --steps 4 --resume never
    cp kto/adapter/adapter_model.safetensors whole.safetensors
    works "in two parts" "${one[@]}" "${steps[@]}" "${lean[@]}" --steps 2 --resume never
    works "resumed with both" "${one[@]}" "${steps[@]}" "${lean[@]}" --steps 4
    check "is the same as in one" cmp -s whole.safetensors kto/adapter/adapter_model.safetensors
    refuses "other moments" "it used --optimizer adamw8bit" "${one[@]}" "${steps[@]}" \
        --data sums.jsonl --neftune 5 --out kto --steps 4
    heads
    refuses "rows that are no ids" "is not a list" "${one[@]}" --data sums.jsonl \
        --train-tokens 5,x --out o
    works "kto once more" "${one[@]}" "${steps[@]}" --data judged.jsonl --method kto --steps 4 \
        --out kto --resume never
    refuses "another beta" "it used --beta 0.1, this command has --beta 0.2" "${one[@]}" \
        "${steps[@]}" --data judged.jsonl --method kto --steps 4 --out kto --beta 0.2
    refuses "pairs for kto" "is not a judged answer" "${one[@]}" --data pairs.jsonl --method kto \
        --out o
    refuses "an option of another method" "--sft-alpha cannot be used with --method kto" \
        "${one[@]}" --data judged.jsonl --method kto --sft-alpha 1 --out o
    lone_texts
    refuses "beta without preferences" "--beta cannot be used with --method sft" "${one[@]}" \
        --data sums.jsonl --beta 1 --out o
}

# The line that a run ended with: it must work, in the current folder, with what $3 sends to it, and
# its output must match $2. Goes back to $work.
printed_line() {
    local line
    line=$(sed -n 's/^Try it:  //p' "$work/out")
    if [[ -x ${finetune%/*}/generate ]]; then
        echo "${3:-}" | bash -c "$line --max-tokens 9 --temperature 0" >"$work/out" 2>"$work/err"
        check "the printed line: $1 ($? $line)" grep -qaE "$2" "$work/out" "$work/err"
    fi
    cd "$work" || exit 1
}

demos() {
    local small=(--demo --backend cpu --threads 1 --save-every 1)
    rm -rf demo
    "$finetune" "${small[@]}" --out demo >out 2>err &
    pid=$!
    wait_for_steps demo 3 $pid
    kill -INT $pid
    wait $pid
    check "an interrupted demo saves" grep -q "run the same command to resume" out
    works "run again" "${small[@]}" --steps 12 --out demo --resume never
    check "it starts over" grep -qE "^step 12/12" out
    check "what is held out is not trained" [ -z "$(grep "also found" out)" ]
    refuses "a demo that is all held out" "--eval 300 leaves no sentence" "${small[@]}" --out o \
        --eval 300
    works "a complete demo" "${small[@]}" --steps 12 --out demo
    check "starts over" grep -qE "^step 1/12" out
    rm -rf demo
    "$finetune" "${small[@]}" --steps 40 --out demo >out 2>err &
    pid=$!
    wait_for_steps demo 3 $pid
    kill -INT $pid
    wait $pid
    works "an interrupted demo" "${small[@]}" --steps 40 --out demo
    check "is resumed" grep -q "resumed after step .* of 40" out
    check "the model is kept" [ -s demo/model/model.safetensors ]
    check "and the command printed" grep -q "generate --model demo/model --adapter demo/adapter" out
    printed_line "a complete demo" '^3 and 4 is.'
    rm -rf clone # as after a clone: only finetune is built, and make builds what the line needs
    mkdir -p clone/build clone/programs
    ln -s "$finetune" clone/build/finetune
    : >clone/programs/generate.c
    printf 'build/generate:\n\tln -s %s/generate $@\n' "${finetune%/*}" >clone/Makefile
    (cd clone && build/finetune "${small[@]}" --steps 1 --out "my demo's") >out 2>err
    check "the line builds generate" grep -q "^Try it:  make build/generate && build/generate" out
    cd clone && printed_line "a demo in a clone" '^3 and 4 is.'
    run "${MAKE:-make}" -C "$root" -n B=build build/generate # not the B of this script
    check "make has a rule for it ($status)" [ $status -eq 0 ]
    rm -rf apart
    mkdir apart
    ln -s "$finetune" apart/finetune
    apart/finetune --demo --steps 1 --save-every 1 --out apart/demo >out 2>err
    check "what computes" grep -qE \
        "^(CPU, [0-9]+ threads?, [a-z0-9_]+ .no NVIDIA driver.|GPU: .+), b?f(32|16)$" <(head -1 out)
    check "it may be missing" grep -q "^Try it, once generate is built:  apart/generate --m" out
    rm -rf theirs
    mkdir -p theirs/model
    echo '{}' >theirs/model/config.json
    run "$finetune" "${small[@]}" --steps 2 --out theirs
    check "another model is not overwritten" grep -q "model/config.json is not the demo's" err
    check "it is still there" [ "$(cat theirs/model/config.json)" = "{}" ]
    check "and nothing else" [ "$(find theirs -type f | wc -l)" -eq 1 ]
}

adding() { # --add-tokens
    local all=("${one[@]}" --data sums.jsonl --eval 0 --schedule constant --warmup 0)
    local tool=$root/$B
    printf '<|user|>\nab\r\n\nc\n' >new.txt
    echo '{"token": "ab", "special": true, "init": "3 plus"}' >new.jsonl
    rm -rf added again joined unlike
    works "new tokens" "${all[@]}" --add-tokens new.txt --steps 4 --out added
    check "tokens that exist are named" grep -q "^tokens: 2 added; the tokenizer already has c$" out
    check "PEFT's command has their number" grep -q "resize_token_embeddings(259)" out
    check "the tokenizer is saved" \
        grep -q '"id":258,"content":"ab".*"special":false' added/adapter/tokenizer.json
    works "two steps" "${all[@]}" --add-tokens new.txt --steps 2 --out again
    works "and two more" "${all[@]}" --add-tokens new.txt --steps 4 --out again
    check "give the same bits" \
        cmp added/adapter/adapter_model.safetensors again/adapter/adapter_model.safetensors
    echo "<|other|>" >>new.txt
    run "$finetune" "${all[@]}" --add-tokens new.txt --steps 6 --out again
    check "more tokens are refused" grep -q "was saved with vocab = 259" err
    printf '<|user|>\ncd\n' >new.txt
    run "$finetune" "${all[@]}" --add-tokens new.txt --steps 6 --out again
    check "and so are others" grep -q "data" err
    works "a list that is started anew" "${all[@]}" --add-tokens new.jsonl --steps 2 --out again \
        --resume never
    works "an adapter with new tokens" --model model --tokens 256 --backend cpu --threads 1 \
        --data sums.jsonl --eval 0 --adapter added --steps 1 --out again --resume never
    check "passes its tokenizer on" cmp added/adapter/tokenizer.json again/adapter/tokenizer.json
    local best=("${one[@]}" --data sums.jsonl --eval 5 --eval-every 1 --keep-best --steps 2)
    works "the best with new tokens" "${best[@]}" --add-tokens new.jsonl --out again --resume never
    check "has their tokenizer" [ -s again/best/tokenizer.json ]
    works "the best without them" "${best[@]}" --out again --resume never
    check "has the model's" cmp -s model/tokenizer.json again/best/tokenizer.json
    works "no best" "${all[@]}" --steps 2 --out again --resume never
    check "leaves none" [ ! -e again/best ]
    if [[ -x $tool/generate && -x $tool/merge ]]; then
        run "$tool/generate" --model model --adapter added --prompt "<|user|>ab" --max-tokens 3
        check "generate knows them ($status)" [ $status -eq 0 ]
        run "$tool/merge" --model model --adapter added --out joined
        check "merge ($status)" [ $status -eq 0 ]
        check "has the new size" grep -q '"vocab_size": 259' joined/config.json
        check "and the new tokenizer" cmp added/adapter/tokenizer.json joined/tokenizer.json
        cp added/adapter/tokenizer.json again/adapter
        run "$tool/merge" --model model --adapter again --out unlike
        check "the tokenizer of another adapter" grep -q "has a token with id 258, but" err
        run "$tool/merge" --model model --adapter added --out joined.gguf
        check "GGUF is refused" grep -q "cannot be merged into a GGUF file" err
    fi
    add_faults "${all[@]}" --out o
}

kept_formats() { # the chat format of training stays with the adapter
    local all=(--model model --data talk.jsonl --backend cpu --threads 1 --tokens 256)
    local tool=$root/$B name before
    rm -rf kept kept2 kept3 kept3.gguf other
    echo '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yo"}]}' \
        >talk.jsonl
    printf '%s' '{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}' \
        '{% if add_generation_prompt %}[assistant]{% endif %}' >t.jinja
    works "a template" "${all[@]}" --chat-template t.jinja --eval 0 --steps 1 --out kept
    check "is kept" cmp -s t.jinja kept/adapter/chat_template.jinja
    works "evaluated with it" "${all[@]}" --chat-template t.jinja --adapter kept --eval-only --json
    before=$(<out)
    works "evaluated" "${all[@]}" --adapter kept --eval-only --json
    check "the template is the adapter's" [ "$(<out)" = "$before" ]
    works "another one" "${all[@]}" --adapter kept --template chatml --eval 0 --steps 1 --out other
    check "is told" grep -q "^note: --template chatml is used; kept/adapter was trained with" out
    check "and kept" grep -q '<|im_start|>' other/adapter/chat_template.jinja
    works "trained further" "${all[@]}" --adapter kept --eval 0 --steps 1 --out kept2
    check "with the same" cmp -s t.jinja kept2/adapter/chat_template.jinja
    works "without a conversation" --model model --data sums.jsonl --backend cpu --threads 1 \
        --tokens 256 --eval 0 --steps 1 --out other --resume never
    check "no format is claimed" [ -s other/adapter/tokenizer.json -a \
        ! -e other/adapter/chat_template.jinja ]
    [[ -x $tool/generate && -x $tool/merge && -x $tool/tokenize ]] || return
    name=(generate --model model --adapter kept --chat --prompt hi --max-tokens 1 --stats)
    run "$tool/${name[0]}" "${name[@]:1}"
    check "generate --chat uses it ($status)" grep -q "^.prompt: 20 tokens" err
    run "$tool/${name[0]}" "${name[@]:1}" --template plain
    check "or says so" grep -q "^.--template plain is used; kept/adapter has another chat" err
    cp -r model base
    printf '{"chat_template": "base", "eos_token": "<|endoftext|>"}' >base/tokenizer_config.json
    echo base >base/chat_template.jinja
    for name in kept3 kept3.gguf; do
        run "$tool/merge" --model base --adapter kept --out $name
        check "merge into $name ($status)" [ $status -eq 0 ]
        run "$tool/tokenize" $name --chat talk.jsonl
        check "keeps it" grep -qF '"[user]hi<|endoftext|>[assistant]yo<|endoftext|>"' out
    done
    check "in every file" [ -z "$(grep -l base kept3/*.jinja kept3/tokenizer_config.json)" ]
    works "a base in a GGUF file" --model kept3.gguf "${all[@]:2}" --template zephyr --eval 0 \
        --steps 1 --out other --resume never
    check "keeps its tokenizer" [ -s other/adapter/tokenizer_config.json ]
    "$tool/tokenize" kept3.gguf --special <talk.jsonl >whole.ids 2>err
    run "$tool/tokenize" other/adapter --special <talk.jsonl
    check "whose tokens are the same" cmp -s out whole.ids
    rm kept3/config.json # no longer a model
    run "$tool/merge" --model kept3.gguf --adapter other --out kept3/merged.gguf
    run "$tool/tokenize" kept3/merged.gguf --chat talk.jsonl
    check "but the template, also merged ($status)" grep -qF '"<|user|>\u000ahi' out
    begins_with_bos
    rm -rf base
    printf '%s' '{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!' \
        '{% endfor %}' >t.jinja
    works "answers without an end" "${all[@]}" --chat-template t.jinja --eval-only
    check "are told" grep -q "^  1 whose answers have no end marker: the model will not learn" out
    works "and counted" "${all[@]}" --chat-template t.jinja --doctor
    check "as they are" grep -qE "^ *end not trained +1 " out
}

begins_with_bos() { # a text with a BOS of its own has the ids that training gives it
    local post='{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>"}},
        {"Sequence": {"id": "A"}}], "special_tokens": {"<|endoftext|>": {"ids": [256]}}}' text
    sed "s/^{\"model\"/{\"post_processor\": ${post//$'\n'/}, \"model\"/" model/tokenizer.json \
        >base/tokenizer.json
    for text in "hi" "<|endoftext|>hi"; do
        run "$root/$B/generate" --model base --prompt "$text" --max-tokens 1 --stats
        check "$text: BOS once" grep -q "^.prompt: 3 tokens" err
    done
    check "and told" grep -q "^.the prompt begins with <|endoftext|>; as in training" err
    echo '{"prompt": "<|endoftext|>hi"}' >bos.jsonl
    rm -f bos.out
    run "$root/$B/generate" --model base --data bos.jsonl --max-tokens 1 --out bos.out
    check "in a file: BOS once" grep -q '"prompt_tokens":3,' bos.out
    check "and told as well" grep -q "^.a prompt begins with <|endoftext|>; as in training" err
}

add_faults() {
    refuses "tokens beside an adapter" "--add-tokens cannot be given with --adapter" \
        --model model --data sums.jsonl --out o --adapter added --add-tokens new.txt
    refuses "a missing list" "--add-tokens nowhere: No such file" "$@" --add-tokens nowhere
    refuses "an empty list" "empty.jsonl: the file has no tokens" "$@" --add-tokens empty.jsonl
    echo '{"token": "x", "lstrip": true}' >bad.jsonl
    refuses "unknown names" 'bad.jsonl:1: the names are "token", "special" and "init"' "$@" \
        --add-tokens bad.jsonl
    echo '{"token": ""}' >bad.jsonl
    refuses "an empty token" "bad.jsonl:1: the token is empty" "$@" --add-tokens bad.jsonl
    echo '{"token": "x", "special": 1}' >bad.jsonl
    refuses "no flag" "bad.jsonl:1: true or false was expected" "$@" --add-tokens bad.jsonl
    printf '"x"\n"x"\n' >bad.jsonl
    refuses "a token twice" 'new token 1 is "x", as token 0 is' "$@" --add-tokens bad.jsonl
    echo '{"prompt": "a", "chosen": "b", "rejected": "c"}' >pairs.jsonl
    refuses "preferences" "the head is trained, which DPO and KTO do not support" "${one[@]}" \
        --data pairs.jsonl --eval 0 --steps 1 --out o --add-tokens new.jsonl --method dpo
    refuses "factors of other modules" "--lr-factors: 'x=2' is not a list" "$@" --lr-factors x=2
}

jobs() { # --jobs: every job has the folder that it would have alone
    local job=("${one[@]}" --eval 0)
    local common=(--model model --backend cpu --threads 1 --eval 0)
    rm -rf jobs alone cut
    cat >jobs.json <<'END'
[{"name": "first", "data": "sums.jsonl", "rank": 1, "tokens": 256, "steps": 9, "lr": 0.001},
 {"name": "second", "data": ["sums.jsonl"], "rank": 3, "alpha": 5, "tokens": 128, "steps": 40,
  "seed": 9, "schedule": "constant", "csv": true}]
END
    works "two jobs" "${common[@]}" --jobs jobs.json --out jobs
    check "lines name the job" grep -qE "^second: step 40/40" out
    works "the first alone" "${job[@]}" --data sums.jsonl --steps 9 --lr 0.001 --out alone/first
    works "the second alone" "${common[@]}" --data sums.jsonl --rank 3 --alpha 5 --tokens 128 \
        --steps 40 --seed 9 --schedule constant --csv --out alone/second
    for i in first second; do
        check "the same adapter: $i" cmp -s jobs/$i/adapter/adapter_model.safetensors \
            alone/$i/adapter/adapter_model.safetensors
        check "the same settings: $i" cmp -s jobs/$i/settings.txt alone/$i/settings.txt
    done
    check "the options of a job" [ -s jobs/second/log.csv ]
    check "are not those of another" [ ! -e jobs/first/log.csv ]
    "$finetune" "${common[@]}" --jobs jobs.json --out cut >out 2>err &
    pid=$!
    wait_for_steps cut/second 3 $pid
    kill -INT $pid
    wait $pid
    works "interrupted jobs" "${common[@]}" --jobs jobs.json --out cut
    check "are resumed" grep -q "^second: resumed after step .* of 40" out
    for i in first second; do
        check "with the same bits: $i" cmp -s jobs/$i/adapter/adapter_model.safetensors \
            cut/$i/adapter/adapter_model.safetensors
    done
    works "the plan of jobs" "${common[@]}" --jobs jobs.json --plan --out o
    check "makes no folder" [ ! -e o ]
    refuses "no jobs" "there is no such file|No such file" "${common[@]}" --jobs nowhere --out o
    refuses "dropout" "--dropout cannot be used with --jobs" "${common[@]}" --jobs jobs.json \
        --dropout 0.1 --out o
    local i=0 text
    while IFS='|' read -r text words; do
        echo "$text" >wrong.json
        refuses "jobs: $words" "--jobs wrong.json.*$words" "${common[@]}" --jobs wrong.json --out o
        i=$((i + 1))
    done <<'END'
[]|the list is empty
{}|an array was expected
[1]|an object was expected
[{"data": "sums.jsonl"}]|name is missing
[{"name": "../a", "data": "sums.jsonl"}]|cannot name a folder
[{"name": "a", "model": "x"}]|is the same for all jobs
[{"name": "a", "ranks": 2}]|is the same for all jobs
[{"name": "a", "lrr": 1}]|did you mean lr\?
[{"name": "a", "lr": "fast"}]|is not a number
[{"name": "a", "lr": [1, 2]}]|one value was expected
[{"name": "a", "csv": 1}]|true or false was expected
[{"name": "a", "lr": true}]|a number or a string was expected
[{"name": "a"}]|data FILE is required
[{"name": "a\u0000b", "data": "sums.jsonl"}]|name: a zero byte cannot be in a value
[{"name": "a", "data": "sums.jsonl"}, {"name": "a"}]|is given twice
[{"name": "a", "data": "sums.jsonl"}, {"name": "A"}]|differ only in case
[{"name": "a.", "data": "sums.jsonl"}]|cannot name a folder
[{"name": [], "data": "sums.jsonl"}]|name: a string was expected
[{"name": "a", "data": "sums.jsonl", "lr": []}]|lr: one value was expected
[{"name": "a", "lrr": []}]|did you mean lr
[{"name": "a", "data": []}]|data FILE is required
[{"name": "a", "lr": 1, "data": "sums.jsonl", "lr": 2}]|lr is given twice
[{"name": "a", "data": "sums.jsonl", "name": "b"}]|name is given twice
[{"name": "a", "data": "sums.jsonl", "data": []}]|data is given twice
[{"name": "a", "data": "-"}, {"name": "b", "data": "-"}]|jobs a and b both read standard input
[{"name": "a", "data": "sums.jsonl"}] 1|goes on after the list
END
    check "all of them were tried" [ $i -eq 26 ]
    echo '[{"name": "a", "data": "sums.jsonl"}, {"name": "b", "data": "nowhere.jsonl"}]' >wrong.json
    refuses "data of one job that is missing" "job b: .*nowhere.jsonl" "${common[@]}" \
        --jobs wrong.json --out o
    job_estimates
    job_ends
    job_rotations
}

job_estimates() { # how long all of them take, before the first step
    local common=(--model model --data sums.jsonl --backend cpu --threads 1 --tokens 256)
    rm -rf days
    echo '[{"name": "a", "rank": 1}, {"name": "b", "rank": 3}]' >days.json
    "$finetune" "${common[@]}" --jobs days.json --eval 0 --steps 1000000000 --out days >out \
        2>err &
    pid=$!
    check "jobs of days say so" soon 60 \
        grep -qE "^note: the 1000000000 steps of 2 jobs .* days on this CPU; Ctrl-C" out
    kill -INT $pid
    wait $pid
    works "short jobs" "${common[@]}" --jobs days.json --eval 5 --steps 2 --out days/short
    check "do not" eval "! grep -q 'on this CPU$' out"
    check "the end says what memory they took" grep -q "^memory: .* as planned" out
}

job_ends() { # what a job does not share with the others: its end, its samples
    local common=(--model model --data sums.jsonl --backend cpu --threads 1 --tokens 256)
    rm -rf ends
    cat >ends.json <<'END'
[{"name": "sound", "rank": 1, "lr": 0.001, "eval": 0, "sample-prompt": []},
 {"name": "wild", "rank": 1, "alpha": 1000000, "lr": 10, "weight-decay": 10, "max-norm": 0,
  "schedule": "constant", "warmup": 0}]
END
    run "$finetune" "${common[@]}" --jobs ends.json --steps 60 --eval 5 --eval-every 5 \
        --sample-prompt "1 plus" --sample-tokens 4 --out ends
    check "a job that diverges is a fault ($status)" [ $status -eq 1 ]
    check "and is named" grep -q "^finetune: wild: step .*: ten consecutive non-finite" err
    check "it ends" grep -qE "^wild: stopped after step [0-9]+ of 60 and saved to ends/wild" out
    check "the other goes on" \
        grep -qE "^sound: 60 steps, epoch [0-9.]+, .* tokens; saved to ends/sound" out
    check "with no result that it lacks" eval "! grep -qi '^sound: .*nan' out"
    check "and without samples" eval "! grep -q '\"sample' ends/sound/log.jsonl"
    check "which the other has" grep -q '"sample' ends/wild/log.jsonl
    echo '[{"name": "a", "lr": 9, "schedule": "constant"}]' >ends.json
    works "a job with patience" "${common[@]}" --jobs ends.json --steps 40 --eval 5 \
        --eval-every 1 --patience 2 --out ends/early
    check "says that it stopped early" grep -q "^a: stopped early: the held-out loss has not" out
    echo '[{"name": "a"}]' >ends.json
    "$finetune" "${common[@]}" --jobs ends.json --eval 0 --steps 40 --accumulate 200 \
        --out ends/stopped >out 2>err &
    pid=$!
    wait_for_steps ends/stopped/a 1 $pid
    kill -INT $pid
    wait $pid
    check "Ctrl-C says when a job ends" grep -q "stopping after this step" err
}

job_rotations() { # one set of rotary factors for short texts and one for long ones
    rm -rf rotated
    mkdir rotated
    cp model/tokenizer* rotated
    cat >rotated/config.json <<'END'
{"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 16, "vocab_size": 257,
 "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
 "num_hidden_layers": 1, "max_position_embeddings": 256, "original_max_position_embeddings": 64,
 "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu",
 "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4]}}
END
    echo '[{"name": "a", "length": 64}, {"name": "b", "length": 128}]' >ok.json
    works "short and long texts with longrope" --model rotated --data sums.jsonl --eval 0 \
        --steps 1 --backend cpu --jobs ok.json --plan --out o
}
