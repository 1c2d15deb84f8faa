#!/usr/bin/env bash
# Uses generate, merge, plan and tokenize as a person would: correctly and incorrectly.
# Needs bash, make and a C compiler. Some checks also need the model stories260K and its fixture in
# ../shared (or $QLORA_SHARED) and are skipped without them. Usage: tests/gates/use_tools.sh [-v]
# The last line is `N passed, F failed, S skipped`. The status is 1 if anything failed.
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

# refuses PATTERN PROGRAM ARGUMENT...: expects status 1, one matching line on standard error without
# API names, nothing on standard output, and no file or folder named o or o.gguf.
refuses() {
    local pattern=$1 program=$2
    shift 2
    rm -rf o o.gguf
    "$root/$B/$program" "$@" >out 2>err </dev/null
    local status=$?
    [[ $status -eq 1 && $(wc -l <err) -eq 1 && ! -s out && ! -e o && ! -e o.gguf ]] &&
        grep -qE -- "^$program: .*$pattern" err && ! grep -qi qlora_ err
    note $? "$program $* (status $status, expected: $pattern)"
}

# says PATTERN PROGRAM ARGUMENT...: expects status 0 and a matching line on standard output.
says() {
    local pattern=$1 program=$2
    shift 2
    "$root/$B/$program" "$@" >out 2>err </dev/null
    local status=$?
    [[ $status -eq 0 ]] && grep -qE -- "$pattern" out
    note $? "$program $* (status $status, expected: $pattern)"
}

wrong_use() {
    local program
    for program in generate merge plan; do
        says "^usage: $program" $program --help
        refuses "unknown option --frob; see --help" $program --frob
        refuses "needs a value" $program --model
        refuses "unexpected argument 'nothing'" $program nothing
    done
    for program in generate merge plan tokenize; do
        says "^ +--help +show this help" $program --help
        [[ $(awk 'length > 80' out | wc -l) -eq 0 ]]
        note $? "$program --help is at most 80 columns wide"
    done
    refuses "--model DIR is required" generate
    refuses "--prompt TEXT, --prompt-file FILE, --chat or --data FILE is required" generate \
        --model x
    refuses "--prompt and --prompt-file cannot" generate --model x --prompt x --prompt-file x
    refuses "--device and --backend cpu cannot" generate --model x --prompt x --device 0 \
        --backend cpu
    printf 'GGUF0000' >base.gguf
    printf 'GGUF0000' >base
    refuses "--model base: this is a GGUF file; its name must end in .gguf" generate --model base \
        --prompt x
    refuses "--model none.gguf: no such file" plan --model none.gguf
    echo x >plain
    refuses "--model plain: this is a file; give its folder" generate --model plain --prompt x
    refuses "--adapter base.gguf is a GGUF file" merge --model x --adapter base.gguf --out o
    refuses "--adapter base.gguf is a GGUF file" generate --model x --adapter base.gguf --prompt x
    refuses "--system can only be used with --chat" generate --model x --prompt x --system x
    refuses "--model nowhere: config.json not found" generate --model nowhere --prompt x
    refuses "--temperature: 'warm' is not a number$" generate --model x --prompt x \
        --temperature warm
    refuses "--max-tokens: '2.5' is not a whole number$" generate --model x \
        --prompt x --max-tokens 2.5
    refuses "--mode: 'f64' is not one of auto" generate --model x --prompt x --mode f64
    refuses "--model DIR is required" merge --out o
    refuses "--adapter DIR is required" merge --model x --out o
    refuses "either --out DIR .* or --gguf FILE" merge --model x --adapter x
    refuses "cannot be used together" merge --model x --adapter x --out o --gguf o.gguf
    refuses "--model nowhere: config.json not found" merge --model nowhere --adapter nowhere --out o
    echo "not a model" >precious
    refuses "precious: the file exists" merge --model x --adapter x --gguf precious
    [[ $(<precious) == "not a model" ]]
    note $? "merge --gguf leaves another file alone"
    refuses "--dtype: 'f8' is not one of bf16" merge --model x --adapter x --out o --dtype f8
    refuses "--temperature: 101 is out of range; use 0 to 100$" generate --model x --prompt x \
        --temperature 101
    refuses "--memory: '8Q' is not a size such as" plan --memory 8Q
    refuses "--memory: '8GBs' is not a size" plan --memory 8GBs
    refuses "--memory: 1K is out of range; use 1M to 1024T" plan --memory 1K
    refuses "--model nowhere: config.json not found" plan --model nowhere --memory 8G
    refuses "must be given together" plan --shape qwen2.5-0.5b --batch 4 --memory 8G
    refuses "not enough memory: [0-9a-z]" plan --shape llama-3.1-70b --batch 1 --length 512 \
        --memory 8G
}

# Built-in chat formats and templates in tokenize.
formats() {
    local file=$root/tests/golden/text_byte.json
    printf '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", ' >chat.json
    printf '"content": "yo"}]}' >>chat.json
    says "^<.im_start.>user$" tokenize --chat chat.json --template chatml --text
    says "^.INST. hi ./INST. yo</s>" tokenize --chat chat.json --template mistral --eos "</s>" \
        --text
    says "^.[0-9]" tokenize --chat chat.json "$file" --template chatml
    [[ $(sed -n 3p out) == *"0, 1, 1, 1, 0]" ]] # y, o and the end marker, not the line end after it
    note $? "tokenize --template: text, ids and what is trained"
    # a format whose end marker the tokenizer lacks: one entry for each id
    says "^.[0-9]" tokenize --chat chat.json "$file" --template llama3
    [[ $(sed -n 3p out) == *"1, 1]" && $(sed -n 2p out | tr -cd , | wc -c) -eq \
        $(sed -n 3p out | tr -cd , | wc -c) ]]
    note $? "tokenize --template: as many ids as entries of the mask"
    if [[ -d $shared/models/stories260K ]]; then # llama2.c: the end token is id 2, not four letters
        says "^.[0-9]" tokenize --chat chat.json "$shared/models/stories260K" --template alpaca
        [[ $(sed -n 2p out) == *", 2, 410, 13, 13]" &&
            $(sed -n 3p out) == *", 0, 1, 1, 1, 0, 0, 0]" ]]
        note $? "tokenize --template: the end token of a tokenizer.bin"
    fi
    refuses "unknown chat format .foo.;" tokenize --chat chat.json --template foo --text
    refuses "unknown chat format .foo.;" tokenize --chat chat.json "$file" --template foo
    refuses "--chat-template and --template cannot be used together" tokenize --chat chat.json \
        --template chatml --chat-template x --text
    refuses "the options of a chat need --chat FILE" tokenize "$file" --template chatml
    # a template that says nothing about training: its text and ids all the same, and the reason
    printf '%s' "{% for m in messages %}{{ m.content }}{% endfor %}" \
        "{{ 'A:' if add_generation_prompt }}" >odd.jinja
    "$root/$B/tokenize" "$file" --chat chat.json --chat-template odd.jinja >out 2>err
    [[ $? -eq 1 && $(wc -l <out) -eq 2 && $(wc -l <err) -eq 1 ]] &&
        grep -q "what to train is unclear" err
    note $? "tokenize: text and ids without a mask"
    says "^hiyo$" tokenize "$file" --chat chat.json --chat-template odd.jinja --text
}

# --name=value, the nearest option, sizes, and output that cannot be written, in all programs.
habits() {
    local program size
    refuses "unknown option --modle; did you mean --model\?" generate --modle x
    refuses "unknown option --modle; did you mean --model\?" generate --modle=x
    refuses "unknown option -model; did you mean --model\?" generate -model x
    refuses "unknown option --system-prompt; did you mean --system\?" generate --system-prompt x
    refuses "unknown option --max_tokens; did you mean --max-tokens\?" generate --max_tokens 5
    refuses "unknown option --output; did you mean --out\?" merge --output x
    refuses "unknown option --spceial; did you mean --special\?" tokenize x --spceial
    refuses "unknown option --frobnicate; see --help" tokenize x --frobnicate
    echo '{"messages": [}' >broken.json
    refuses "broken.json:1:15: invalid JSON: expected a value$" tokenize \
        --chat broken.json --template chatml --text
    refuses "unexpected argument 'y'" tokenize x y
    refuses "--special does not take a value" tokenize x --special=1
    refuses "--model nowhere: config.json not found" generate --model=nowhere --prompt=x
    refuses "--model nowhere: config.json not found" merge --model=nowhere --adapter=x --out=o
    refuses "--model nowhere: config.json not found" plan --model=nowhere --memory=8G
    refuses "cannot read nowhere" tokenize "$root/tests/golden/text_byte.json" --json=nowhere
    refuses "--model needs a non-empty value" plan --model=
    for size in 8G 8GiB 8g 8gib 8GIB 8589934592 8589934592B; do
        says "in 8\.00 GiB$" plan --memory $size
    done
    for size in 8GB 8gb 8Gb; do
        says "in 7\.45 GiB$" plan --memory $size
    done
    [[ -w /dev/full ]] || return
    for program in generate merge plan tokenize; do
        for size in --help --version; do
            "$root/$B/$program" $size >/dev/full 2>err
            [[ $? -eq 1 ]] && grep -q "^$program: cannot write to standard output" err
            note $? "$program $size on a full disk"
        done
    done
    "$root/$B/plan" --memory 8G >/dev/full 2>err
    [[ $? -eq 1 ]] && grep -q "^plan: cannot write to standard output" err
    note $? "plan on a full disk"
}

# What people bring from elsewhere: names of the hub for --model and the like, and the names that
# other programs have for our options.
other_names() {
    local from="hf download me/model --local-dir model, then" theirs ours program found=
    refuses "config.json not found; .*: $from --model model\$" generate --model me/model --prompt x
    refuses "config.json not found; .*: $from --model model\$" plan --model me/model
    refuses "config.json not found; .*: $from --model model\$" merge --model me/model --adapter x \
        --out o
    refuses "me/model: no such file or folder; .*: $from tokenize model\$" tokenize me/model
    refuses "hf download me/M-GGUF FILE.gguf --local-dir M-GGUF, then --model M-GGUF/FILE.gguf\$" \
        plan --model me/M-GGUF
    refuses "--model ./model: config.json not found\$" plan --model ./model
    refuses "--model a/b/c: config.json not found\$" plan --model a/b/c
    mkdir -p mine/model
    refuses "--model mine/model: config.json not found\$" plan --model mine/model
    while read -r theirs ours; do
        for program in finetune generate merge plan ""; do
            [[ -z $program ]] || "$root/$B/$program" "--${theirs//-/_}" 1 >out 2>err </dev/null
            grep -qE -- "^$program: unknown option --[a-z0-9_]+; .*--$ours([^a-z0-9-]|\$)" err &&
                break
        done
        found="$found${program:+.}"
        [[ -n $program ]]
        note $? "--$theirs is our --$ours"
    done < <(sed -n 's/^    {"\([a-z0-9-]*\)", "\([a-z0-9-]*\)",.*},$/\1 \2/p' \
        "$root/programs/other_names.h")
    [[ ${#found} -gt 150 ]]
    note $? "the names of others"
    for theirs in save_total_limit flash_attention wandb_project tokenizer use_peft hub_model_id; do
        "$root/$B/finetune" "--$theirs" 1 >out 2>err </dev/null
        grep -qE "^finetune: unknown option --$theirs; [a-z]" err
        note $? "--$theirs is answered"
    done
}

# The version of every program is the header's, and --help names the option.
versions() {
    local program version
    version=$(sed -n 's/^#define QLORA_VERSION_STRING "\(.*\)"/\1/p' "$root/qlora.h")
    for program in finetune generate merge plan tokenize; do
        says "^$program \(qlora\.h\) ${version//./\\.}\$" $program --version
        [[ $(wc -l <out) -eq 1 && ! -s err ]]
        note $? "$program --version prints one line, and nothing else"
        says "^  --version +[a-z]" $program --help
    done
}

plans() {
    local hint
    refuses "no smaller setting fits: the frozen weights alone take 3[0-9.]+ GiB$" plan \
        --shape llama-3.1-70b --batch 1 --length 512 --memory 24G
    for hint in "--batch 64 --length 4096 --rank 64" "--batch 1 --length 65536 --memory 7G" \
        "--batch 4 --length 512 --base 32bit --rank 256" \
        "--batch 2 --length 8192 --recompute off"; do
        # shellcheck disable=SC2086 # the words of a command line
        refuses "not enough memory: .*; it would fit with --" plan --memory 12G \
            --shape llama-3.1-8b $hint
        # shellcheck disable=SC2046
        says "total" plan --memory 12G --shape llama-3.1-8b $hint \
            $(sed -n 's/.*it would fit with //p' err)
    done
    says "^qwen2.5-0.5b, rank 16, in 8.00 GiB$" plan --shape QWEN2.5-0.5B --memory 8G
    grep -q "a longer sequence can show a smaller number" out
    note $? "plan explains +"
    for hint in gemma-3-4b phi-4-mini qwen3-4b smollm3-3b ministral-3-8b olmo-3-7b; do
        says "^$hint, rank 16, in 24.00 GiB$" plan --shape $hint --memory 24G
        grep -qE "^  1 +[0-9]+\.[0-9]+" out
        note $? "plan has numbers for $hint"
    done
    refuses "--mode bf16 needs compute capability 8.0 or higher; --capability is 7.5" plan \
        --memory 8G --mode bf16 --capability 7.5
    refuses "--mode fp8 needs compute capability 9.0; --capability is 8.9" plan \
        --memory 8G --mode fp8 --capability 8.9
    refuses "base.gguf: GGUF version 808464432 is not supported" plan --model base.gguf
    says "CPU\)$|[0-9] [GM]iB$" plan # for this machine, whatever it has
    mkdir -p config-only
    cat >config-only/config.json <<END
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
 "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
 "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
 "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": true}
END
    says "^MiB for one micro-batch" plan --model config-only --memory 8G
    refuses "no smaller setting fits: the GPU context alone takes 0.1[0-9] GiB$" plan \
        --model config-only --memory 16M --batch 1 --length 32
    [[ $(grep -c '1024' out) -eq 0 ]]
    note $? "plan shows no length above the model's limit"
    refuses "--length 1024 exceeds the model's limit of 512 tokens" plan --model config-only \
        --memory 8G --batch 1 --length 1024
    says "up to 23051 tokens$" plan --shape llama-3.1-8b --rank 32 --memory 7.5GB \
        --head nf4 --longest
    refuses "--head is nf4, but the head of this model is its embedding .*; use full$" \
        plan --shape qwen2.5-0.5b --memory 8G --head nf4
    refuses "--head nf4 needs --model or --shape$" plan --memory 8G --head nf4
    says "llama-3.1-70b +- +- +- +- +- +-" plan --memory 8G
    says "qwen2.5-0.5b +[0-9]+" plan --memory 8G
    says "^  32 .*-" plan --shape llama-3.1-8b --memory 12G
    says "one sequence can have up to [0-9]{6} tokens$" plan --shape llama-3.1-8b --rank 32 \
        --memory 24GB --longest
    grep -q "MiB of the host, not counted" out && grep -q "131072 positions, already scaled" out
    note $? "plan --longest tells what it takes"
    says "32768 positions; longer sequences need --rope-scale$" plan --shape qwen2.5-0.5b \
        --memory 24GB --longest
    says "each of 2 sequences can have up to 512 tokens$" plan --model config-only --memory 8G \
        --longest --batch 2
    says "each of 2 sequences can have up to 2048 tokens$" plan --model config-only --memory 8G \
        --longest --batch 2 --rope-scale yarn:4
    says "1 x 1024 tokens" plan --model config-only --memory 8G --batch 1 --length 1024 \
        --rope-scale linear:2
    refuses "--rope-scale is \"ntk:4\"; it must be yarn:F or linear:F" plan --model config-only \
        --memory 8G --rope-scale ntk:4
    refuses "already has a scaled rotation .rope_type llama3." plan --shape llama-3.1-8b \
        --memory 24GB --rope-scale yarn:4
    refuses "--rope-scale needs --model or --shape" plan --memory 8G --rope-scale yarn:4
    refuses "--longest needs --model or --shape, and no --length" plan --longest --memory 8G
    says "the input of one layer in 4 is kept, the others are computed again$" plan \
        --shape llama-3.1-8b --rank 32 --memory 24GB --longest --host-budget 16GB
    says "tiles of 512 tokens" plan --shape llama-3.1-8b --memory 24G --batch 1 --length 4096 \
        --tile 512 --offload on
    refuses "--tile is set, .* every layer recomputed, but --recompute is off" plan \
        --shape llama-3.1-8b --memory 24G --batch 1 --length 4096 --tile 512 --recompute off
    says "16-bit weight cache" plan --shape llama-3.1-8b --memory 80G --batch 4 --length 512
    mixture_plans
}

# Shapes with experts, cut shapes, and what is trained of them.
mixture_plans() {
    local size=(--batch 1 --length 64)
    says "^  trained: attention 262144, experts 7340032$" plan --shape olmoe-1b-7b --layers 1 \
        "${size[@]}"
    says "^  trained: attention 163840$" plan --shape granite-3.1-3b-a800m --layers 1 \
        --targets attention "${size[@]}"
    says "^  trained: attention 1376256, MLP 986112, experts 25427968, router 67584$" \
        plan --shape glm-4.5-air --layers 2 --targets attention,gate,up,down,experts,router \
        "${size[@]}"
    says "^  trained: attention 278528, experts 13107200$" plan --shape qwen3-30b-a3b \
        --layers 1 "${size[@]}"
    says "^  trained: experts 6553600$" plan --shape mixtral-8x7b --layers 1 --targets experts \
        "${size[@]}"
    says "^  trained: attention 13631488, MLP 28311552$" plan --shape llama-3.1-8b --memory 24G \
        "${size[@]}"
    refuses "contains experts, which this model does not have" plan --shape llama-3.1-8b \
        --memory 24G --targets experts
    refuses "--targets: 'expert' is not one of q, k" plan --shape olmoe-1b-7b --targets expert
    refuses "--layers is 17; olmoe-1b-7b has 16 layers" plan --shape olmoe-1b-7b --layers 17
    refuses "--targets needs --model or --shape" plan --targets attention
    refuses "--layers needs --shape" plan --model config-only --layers 1
    says "^  olmoe-1b-7b " plan # some settings leave it out of the table, with the reason
}

# A model with its adapter and the two merged must generate the same greedy text.
texts() {
    local model=$shared/models/stories260K fixture=$shared/fixtures/stories260K text
    if [[ ! -d $model || ! -d $fixture ]]; then
        echo "skip  $model or $fixture not found"
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
    says "^wrote merged$" merge --model "$fixture/model" --adapter "$fixture/adapter20" \
        --out merged --base trained --dtype f32
    says "Once" generate --model merged --base 32bit "${greedy[@]}"
    [[ $(cat out) == "$text" ]]
    note $? "the merged model generates the same text"
    refuses "config.json already exists" merge --model "$fixture/model" \
        --adapter "$fixture/adapter20" --out merged
    says "^wrote merged.gguf$" merge --model "$fixture/model" --adapter "$fixture/adapter20" \
        --gguf merged.gguf
    [[ $(head -c 4 merged.gguf) == GGUF ]]
    note $? "the GGUF file starts as one"
    refuses "merged.gguf is an adapter" generate --model merged.gguf --prompt x
    rm -rf whole.gguf small.gguf spoken spoken.gguf
    says "^wrote whole.gguf$" merge --model "$fixture/model" --adapter "$fixture/adapter20" \
        --out whole.gguf --base trained --dtype f32
    grep -q "^note: .*tokenizer.json does not exist: the GGUF file has no tokenizer$" err
    note $? "merge says that its GGUF file has no tokenizer"
    refuses "contains no tokenizer; use that of the original model" generate --model whole.gguf \
        --prompt x
    says "Once" generate --model whole.gguf --base 32bit "${greedy[@]}"
    [[ $(cat out) == "$text" ]]
    note $? "the merged GGUF file generates the same text"
    says "^wrote small.gguf$" merge --model whole.gguf --adapter "$fixture/adapter20" \
        --out small.gguf --dtype q8_0
    refuses "small.gguf already exists" merge --model whole.gguf --adapter "$fixture/adapter20" \
        --out small.gguf
    rm -rf unpacked mute.gguf kept
    says "^wrote unpacked$" merge --model whole.gguf --adapter "$fixture/adapter20" \
        --out unpacked --dtype f32
    grep -q "^note: whole.gguf has no tokenizer: the folder has none$" err
    note $? "merge says that its folder has no tokenizer"
    [[ -e unpacked/config.json && ! -e unpacked/.merge-unfinished ]] &&
        [[ ! -e unpacked/tokenizer.json && ! -e unpacked/tokenizer_config.json ]]
    note $? "merge of a GGUF file into a folder: its files"
    says "Once" generate --model whole.gguf --adapter "$fixture/adapter20" --base 32bit \
        "${greedy[@]}"
    cp out twice
    says "Once" generate --model unpacked --base 32bit "${greedy[@]}"
    cmp -s out twice
    note $? "the folder of a merged GGUF file generates the same text"
    refuses "--dtype q4_0 needs --out FILE.gguf" merge --model "$fixture/model" \
        --adapter "$fixture/adapter20" --out o --dtype q4_0
    says "[GM]iB" plan --model whole.gguf --memory 8G
    says "^MiB for one micro-batch" plan --model "$fixture/model" --memory 8G
    for words in byte spm; do # a folder with a tokenizer: its file gives the same ids
        rm -rf spoken spoken.gguf
        cp -r "${fixture%/*}/qwen2/model" spoken # it has more ids than these tokenizers
        chmod -R u+w spoken
        cp "$root/tests/golden/text_$words.json" spoken/tokenizer.json
        says "^wrote spoken.gguf$" merge --model spoken --adapter "${fixture%/*}/qwen2/adapter20" \
            --out spoken.gguf
        printf 'Once upon a time, 1234 dogs  and\ta cat.\n' >words
        "$root/$B/tokenize" spoken/tokenizer.json <words >ids1 &&
            "$root/$B/tokenize" spoken.gguf <words >ids2 && cmp -s ids1 ids2
        note $? "the tokenizer ($words) in the file gives the same ids"
        rm -rf unpacked
        says "^wrote unpacked$" merge --model spoken.gguf \
            --adapter "${fixture%/*}/qwen2/adapter20" --out unpacked
        printf '<s>It said: <|im_start|> x</s>  \n' >>words
        "$root/$B/tokenize" spoken.gguf <words >ids2 &&
            "$root/$B/tokenize" unpacked/tokenizer.json <words >ids3 && cmp -s ids2 ids3
        note $? "the tokenizer ($words) in the folder of the file gives the same ids"
    done
    LC_ALL=C sed 's/tokenizer.ggml.scores/tokenizer.ggml.scorez/' spoken.gguf >mute.gguf
    refuses "tokenizer.ggml.scores is missing" merge --model mute.gguf \
        --adapter "${fixture%/*}/qwen2/adapter20" --out o
    mkdir kept
    refuses "tokenizer.ggml.scores is missing" merge --model mute.gguf \
        --adapter "${fixture%/*}/qwen2/adapter20" --out kept
    [[ -d kept && -z $(ls -A kept) ]]
    note $? "a refused merge leaves an empty folder as it was"
    rm -rf run missing precious
    mkdir run
    cp -r "$fixture/adapter20" run/adapter
    chmod -R u+w run
    says "^wrote missing/parent/merged$" merge --model "$fixture/model" --adapter run \
        --out missing/parent/merged --base trained --dtype f32
    cmp -s missing/parent/merged/model.safetensors merged/model.safetensors
    note $? "the folder of a run where an adapter is wanted: same weights"
    says "^wrote missing/other/x.gguf$" merge --model "$fixture/model" --adapter run \
        --gguf missing/other/x.gguf
    says "Once" generate --model "$fixture/model" --adapter run "${greedy[@]}"
    [[ $(cat out) == "$text" ]]
    note $? "the folder of a run where an adapter is wanted: same text"
    echo "a file" >precious
    refuses "cannot create precious/o: Not a directory" merge --model "$fixture/model" \
        --adapter "$fixture/adapter20" --out precious/o
    if [[ -w /dev/full ]]; then
        "$root/$B/merge" --model "$fixture/model" --adapter run --gguf full.gguf >/dev/full 2>err
        [[ $? -eq 1 ]] && grep -q "^merge: cannot write to standard output" err
        note $? "merge on a full disk"
    fi
    refuses "--adapter nowhere: adapter_config.json not found" generate --model "$model" \
        --adapter nowhere --prompt x
    "$root/$B/generate" --model "$model" --prompt x --max-tokens 4 --backend cpu --mode bf16 \
        >out 2>err
    note $? "bf16 on the CPU"
    refuses "unknown chat format" generate --model "$model" --chat --template foo
    refuses "--template and --chat-template cannot be used together" generate --model "$model" \
        --chat --template chatml --chat-template x
    printf 'hello\n/clear\nagain\n/exit\nnot read\n' |
        "$root/$B/generate" --model "$model" --chat --max-tokens 8 >out 2>err
    [[ $? -eq 0 && $(wc -l <out) -ge 2 ]]
    note $? "a conversation of two turns"
    if [[ -w /dev/full ]]; then
        "$root/$B/generate" --model "$model" "${greedy[@]}" >/dev/full 2>err
        [[ $? -eq 1 ]] && grep -q "cannot write to standard output" err
        note $? "a full disk"
    fi
}

# Files of the tokenizer are merged as well; leftovers of an interrupted merge are removed, and
# the weights of others are left alone.
merging() {
    local model=$shared/models/stories260K fixture=$shared/fixtures/stories260K text name
    [[ -d $model && -d $fixture ]] || return
    local merge=("$root/$B/merge" --adapter "$fixture/adapter20" --base trained --dtype f32)
    rm -rf whole o
    cp -r "$fixture/model" whole
    chmod -R u+w whole
    cp "$model/tok512.bin" whole/
    mkdir whole/additional_chat_templates whole/notes
    for name in special_tokens_map.json chat_template.jinja spiece.model tekken.json merges.txt \
        additional_chat_templates/rag.jinja; do
        echo "$name" >"whole/$name"
    done
    echo "not copied" >whole/pytorch_model.bin
    says "^wrote o$" merge --model whole --adapter "$fixture/adapter20" --base trained --dtype f32 \
        --out o
    text=$(cd o && find . -type f | sort | tr '\n' ' ')
    [[ $text == "./additional_chat_templates/rag.jinja ./chat_template.jinja ./config.json \
./merges.txt ./model.safetensors ./special_tokens_map.json ./spiece.model ./tekken.json \
./tok512.bin " ]]
    note $? "every file of the tokenizer is copied, and no other weights ($text)"
    says "^Once upon a" generate --model o --prompt "Once upon a" --max-tokens 5

    rm -rf left
    mkdir left
    touch left/.merge-unfinished left/model-00001-of-00007.safetensors \
        left/model-00002-of-00007.safetensors.tmp left/model.safetensors.index.json
    "${merge[@]}" --model whole --out left >out 2>err
    note $? "a merge after an interrupted one"
    text=$(cd left && find . -name '*safetensors*' -o -name '.merge*')
    [[ $text == ./model.safetensors ]]
    note $? "its leftovers are gone ($text)"
    rm -rf left # a merge that is killed while it writes the weights
    { (ulimit -f 64 && exec "${merge[@]}" --model whole --out left) >out 2>err; } 2>/dev/null
    [[ $? -gt 128 && -s left/model.safetensors.tmp && -e left/.merge-unfinished &&
        ! -e left/config.json ]]
    note $? "a merge that is killed leaves no config"
    "${merge[@]}" --model whole --out left >out 2>err && diff -r o left >out
    note $? "run again, it gives what a merge without interruption gives"
    for name in model-00001-of-00002.safetensors consolidated.safetensors pytorch_model.bin; do
        rm -rf left
        mkdir left
        touch "left/$name"
        [[ $name == consolidated* ]] && touch left/.merge-unfinished
        "${merge[@]}" --model whole --out left >out 2>err
        [[ $? -eq 1 && -e left/$name && ! -e left/config.json ]] &&
            grep -q "left: the folder contains $name, which an interrupted merge did not" err
        note $? "the weights of others are left alone: $name"
    done
    # Nothing is written through a link, and no file in the folder is replaced.
    cp whole/tok512.bin kept.bin
    for name in symbolic hard notes; do
        rm -rf left
        mkdir left
        case $name in
        symbolic) ln -s ../whole/tok512.bin left/tok512.bin ;;
        hard) ln whole/tok512.bin left/tok512.bin ;;
        notes) echo mine >left/merges.txt ;;
        esac
        "${merge[@]}" --model whole --out left >out 2>err
        [[ $? -eq 1 ]] && grep -q "left: the folder contains .*; choose an empty or new" err &&
            cmp -s kept.bin whole/tok512.bin && [[ $name != notes || $(<left/merges.txt) == mine ]]
        note $? "a folder with other files is refused: $name"
    done
    rm -rf left
    mkdir left
    touch left/.merge-unfinished
    ln -s ../whole/tok512.bin left/tok512.bin
    ln -s ../whole/additional_chat_templates left/additional_chat_templates
    "${merge[@]}" --model whole --out left >out 2>err && cmp -s kept.bin whole/tok512.bin &&
        cmp -s kept.bin left/tok512.bin && [[ ! -L left/tok512.bin ]] &&
        [[ $(<whole/additional_chat_templates/rag.jinja) == additional_chat_templates/rag.jinja ]]
    note $? "links in the folder of an interrupted merge are replaced, not followed"
    printf 'GGUF0000' >precious.gguf
    refuses "precious.gguf: the file exists; choose another" merge --model whole \
        --adapter "$fixture/adapter20" --gguf precious.gguf
    [[ $(<precious.gguf) == GGUF0000 ]]
    note $? "merge --gguf replaces no GGUF file"
    refuses "--out whole: config.json already exists" merge --model whole \
        --adapter "$fixture/adapter20" --out whole
}

# A chat keeps its cache: what it says is what each turn says on its own, and only what is new is
# computed. What a template drops from earlier turns (here, all of them) is computed again. In f32:
# bf16, which auto may be, rounds prompts and single tokens differently.
turns() { # turns MODEL
    local talk=("$root/$B/generate" --model "$1" --chat --temperature 0 --max-tokens 8 --stats) kept
    talk+=(--mode f32)
    printf 'hello\nand then\n/clear\nhello\n' | "${talk[@]}" >out 2>err
    kept=$(sed -n 's/.*prompt: [0-9]* tokens (\([0-9]*\) in the cache).*/\1/p' err | tr '\n' ' ')
    [[ $(sed -n 1p out) == "$(sed -n 3p out)" && $kept =~ ^1[0-9][0-9]\ 9[0-9]\ $ ]]
    note $? "a chat keeps its cache ($kept)"
    printf '%s' "{{ bos_token }}Q: {{ messages[-1].content }} A:" >last.jinja
    printf 'hello\nand then\n' | "${talk[@]}" --chat-template last.jinja >out 2>err
    grep -qE " \([1-9] in the cache\)" err && sed -n 2p out >second &&
        "${talk[@]}" --chat-template last.jinja --prompt "and then" 2>err | cmp -s - second
    note $? "a template that drops earlier turns: the same answer as without them"
}

# --ids and --logprobs: the texts of the lines are the text.
token_lines() { # token_lines MODEL
    local run=("$root/$B/generate" --model "$1" --prompt "Once upon a" --temperature 0
        --max-tokens 12)
    "${run[@]}" --no-echo >plain 2>err
    "${run[@]}" --ids >out 2>err
    sed -n 's/^{"id": [0-9]*, "text": "\(.*\)"}$/\1/p' out | tr -d '\n' >texts
    printf '\n' >>texts
    cmp -s plain texts && [[ $(wc -l <out) -eq 12 ]]
    note $? "--ids"
    "${run[@]}" --logprobs >full 2>err
    grep -cE '^\{"id": [0-9]+, "text": ".*", "logprob": -[0-9]+\.[0-9]{6}\}$' full | grep -qx 12 &&
        sed 's/, "logprob": [-0-9.]*//' full | cmp -s - out
    note $? "--logprobs"
}

# --samples: the answers to a prompt follow each other, differ, and do not depend on how many of
# them share the prompt. They are those of a prompt that stands in the file several times.
samples() { # samples MODEL
    local run=("$root/$B/generate" --model "$1" --temperature 1 --max-tokens 12 --seed 3)
    printf '{"prompt": "%s"}\n' "Once upon" "The dog" >prompts.jsonl
    printf '{"prompt": "%s"}\n' "Once upon" "Once upon" "Once upon" >repeated.jsonl
    rm -f each.jsonl many.jsonl repeated.out
    "${run[@]}" --data prompts.jsonl --samples 3 --out each.jsonl --batch 1 2>err &&
        "${run[@]}" --data prompts.jsonl --samples 3 --out many.jsonl --batch 4 2>err &&
        cmp -s each.jsonl many.jsonl &&
        [[ $(grep -o '"line":[12],"sample":[012]' many.jsonl | tr -dc '0-9\n' | paste -sd' ' -) == \
            "10 11 12 20 21 22" ]] &&
        [[ $(sed 's/.*"text"//' many.jsonl | sort -u | wc -l) -eq 6 ]]
    note $? "--samples: every prompt has its answers, the same in any batch"
    "${run[@]}" --data repeated.jsonl --out repeated.out 2>err &&
        cmp -s <(head -n 3 many.jsonl | sed 's/.*"text"//') <(sed 's/.*"text"//' repeated.out)
    note $? "--samples: as if the prompt stood there several times"
    refuses "--samples: 0 is out of range" generate "${run[@]:1}" --data prompts.jsonl \
        --samples 0 --out x
    refuses "has something else in line 1" generate "${run[@]:1}" --data prompts.jsonl \
        --samples 2 --out many.jsonl
    refuses "all answers to a prompt would be the same" generate --model "$1" --temperature 0 \
        --data prompts.jsonl --samples 2 --out x
}

# --data: answers in the order of the prompts, the same in any batch and after an interruption, and
# those of single prompts.
batches() { # batches MODEL
    local run=("$root/$B/generate" --model "$1" --data prompts.jsonl --temperature 0
        --max-tokens 12) word text
    for word in "Once upon" "The dog" "A cat was" "One day" "He"; do
        printf '{"prompt": "%s"}\n\n' "$word"
    done >prompts.jsonl
    rm -f one.jsonl many.jsonl
    "${run[@]}" --out one.jsonl --batch 1 2>err && "${run[@]}" --out many.jsonl --batch 4 2>err &&
        cmp -s one.jsonl many.jsonl && [[ $(wc -l <many.jsonl) -eq 5 ]]
    note $? "--data: the answers do not depend on the batch"
    text=$("$root/$B/generate" --model "$1" --prompt "A cat was" --no-echo --temperature 0 \
        --max-tokens 12 2>err)
    grep -qF "\"line\":5,\"prompt_tokens\":" many.jsonl && [[ $text == *[a-z]* ]] &&
        sed -n 3p many.jsonl | grep -qF "\"text\":\"$text\"}"
    note $? "--data: an answer is that of the single prompt"
    head -c $(($(head -n 3 one.jsonl | wc -c) - 7)) one.jsonl >part.jsonl
    "${run[@]}" --out part.jsonl --batch 2 2>err && cmp -s one.jsonl part.jsonl
    note $? "--data: goes on after two answers and a part"
    head -n 4 one.jsonl >part.jsonl
    "${run[@]}" --out part.jsonl --batch 3 --verbose 2>err && cmp -s one.jsonl part.jsonl &&
        grep -q "up to 3 texts at the same time" err
    note $? "--data: with as many texts at the same time as if it had not been interrupted"
    rm -f few.jsonl
    "${run[@]}" --out few.jsonl --batch 4 --positions 40 2>err && cmp -s one.jsonl few.jsonl
    note $? "--data: texts wait for --positions"
    refuses "--positions 3 is too small: .* can have [0-9]+ tokens" generate "${run[@]:1}" --out x \
        --positions 3 --max-tokens 40
    refuses "--data nobody/prompts: no such file; .* --repo-type dataset nobody/prompts" generate \
        --model "$1" --data nobody/prompts --out x
    refuses "--positions can only be used with --data" generate --model "$1" --prompt x \
        --positions 64
    rm -rf deep
    printf '{"mine": 1}' >mine.json
    "${run[@]}" --out deep/er/x.jsonl 2>err && cmp -s one.jsonl deep/er/x.jsonl
    note $? "--data: folders above --out are created"
    refuses "--out mine.json/x: Not a directory" generate "${run[@]:1}" --out mine.json/x
    "${run[@]}" --out part.jsonl 2>err && grep -q "nothing to do: 5 answers in --out already" err
    note $? "--data: nothing is left"
    refuses "has something else in line 1" generate "${run[@]:1}" --out part.jsonl --stop x
    refuses "has something else in line 1" generate "${run[@]:1}" --out mine.json
    [[ $(cat mine.json) == '{"mine": 1}' ]]
    note $? "--data: a file of somebody else is not touched"
    refuses "is not a file" generate "${run[@]:1}" --out .
    refuses "--data needs --out" generate "${run[@]:1}"
    refuses "--data and --prompt cannot be used together" generate "${run[@]:1}" --prompt x --out x
    refuses "--batch can only be used with --data" generate --model "$1" --prompt x --batch 2
    refuses "--samples can only be used with --data" generate --model "$1" --prompt x --samples 2
    samples "$1"
    echo '{"prompt": 3}' >prompts.jsonl
    refuses 'prompts.jsonl:1: "prompt" is neither a string nor a list' generate "${run[@]:1}" \
        --out x
    echo '[1]' >prompts.jsonl
    refuses 'prompts.jsonl:1: a record must be an object' generate "${run[@]:1}" --out x
    echo '{"id": 1, "text": "x"}' >prompts.jsonl
    refuses 'expected prompt, messages, .* found id, text' generate "${run[@]:1}" --out x
    echo '{"prompt": "\ud800\udc00 is one character"}' >prompts.jsonl # the first beyond 16 bits
    rm -f first.jsonl
    "${run[@]}" --out first.jsonl 2>err
    note $? "--data: a pair of escapes is a character"
    printf '{"prompt": "\xff"}\n' >prompts.jsonl
    refuses 'prompts.jsonl:1:13: invalid JSON: invalid UTF-8' generate "${run[@]:1}" --out x
    echo '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}' >prompts.jsonl
    refuses 'content part of the type "image"; only' generate "${run[@]:1}" --out x \
        --template chatml
    echo '{"prompt": "x"' >prompts.jsonl
    refuses "prompts.jsonl:1:.* expected ',' or '}'" generate "${run[@]:1}" --out x
    echo '{"id": [1, {"prompt": "no"}], "prompt": "He", "n": -1.5e3, "messages": null}' \
        >prompts.jsonl
    rm -f field.jsonl
    "${run[@]}" --out field.jsonl 2>err &&
        [[ $(cut -d, -f5- field.jsonl) == "$(tail -n 1 one.jsonl | cut -d, -f5-)" ]]
    note $? "--data: other fields are left alone"
    : >prompts.jsonl
    refuses 'the file contains no records' generate "${run[@]:1}" --out x
    references "$1"
}

# --data with answers: they are references, which the model does not see. A prompt that is too long
# has a line that says so, and costs the others nothing.
references() { # references MODEL
    local run=("$root/$B/generate" --model "$1" --temperature 0 --template chatml) all i
    printf '{"question": "%s", "answer": "%s"}\n' Lily "one 1, two 22" Tom "33" >asked.jsonl
    printf '{"messages": [{"role": "user", "content": "Lily"}%s]}\n' "" \
        ', {"role": "assistant", "content": "The dog ran."}' >>asked.jsonl
    printf '{"prompt": "%s", "completion": "no"}\n' "$(printf 'x y %.0s' {1..400})" >>asked.jsonl
    for i in 1 2; do printf '{"prompt": "%s", "completion": ""}\n' "Once upon" >>asked.jsonl; done
    rm -f two.jsonl short.jsonl
    "${run[@]}" --data asked.jsonl --out two.jsonl --batch 3 --max-tokens 20 --stop "," >out 2>err
    note $? "--data: the records of finetune"
    [[ $(grep -o '"prompt_tokens":[0-9]*' two.jsonl | sed -n '1p;3p;4p' | sort -u | wc -l) -eq 1 ]]
    note $? "--data: the model does not see the answer"
    sed -n 1p two.jsonl | grep -qF ',"reference":"one 1, two 22"}' &&
        sed -n 4p two.jsonl | grep -qF ',"reference":"The dog ran."}' &&
        ! sed -n 3p two.jsonl | grep -q reference
    note $? "--data: it is in the output"
    sed -n 5p two.jsonl | grep -qE '"error":"the prompt has 12[0-9]* tokens; the .* limit is 512' &&
        grep -qE "^\[6 answers, 1 prompt too long, " err && grep -qE "^\[[1-6] of 7, .* left" err
    note $? "--data: a prompt that is too long, and progress without a terminal"
    all=$(sed -n 's/^{"id":"\([0-9a-f]*\)",.*/\1/p' two.jsonl | sort -u | wc -l)
    [[ $all -eq 7 && $(<out) == "exact match: 0 of 5 (0.0%)" ]]
    note $? "--data: exact matches"
    rm -f less.jsonl
    "${run[@]}" --data asked.jsonl --out less.jsonl --batch 3 --max-tokens 8 --positions 32 >out \
        2>err && grep -qE '"error":"--positions 32 is too small: the prompt and its answer can' \
        less.jsonl && grep -qE "^\[[1-5] answers, [2-6] prompts too long, " err
    note $? "--data: a prompt that is too long for --positions"
    cp less.jsonl more.jsonl
    rm -f all.jsonl
    "${run[@]}" --data asked.jsonl --out more.jsonl --batch 3 --max-tokens 8 >out 2>err &&
        "${run[@]}" --data asked.jsonl --out all.jsonl --batch 3 --max-tokens 8 >out 2>err &&
        cmp -s more.jsonl all.jsonl && ! cmp -s less.jsonl all.jsonl
    note $? "--data: with more of them, it is answered"
    "${run[@]}" --data asked.jsonl --out more.jsonl --batch 3 --max-tokens 8 --positions 32 \
        >out 2>err && cmp -s more.jsonl all.jsonl
    note $? "--data: and stays so"
    { sed -n 6p two.jsonl; sed -n 2p two.jsonl; sed -n 4p two.jsonl | head -c 20; } >short.jsonl
    "${run[@]}" --data asked.jsonl --out short.jsonl --batch 3 --max-tokens 20 --stop "," >out \
        2>err && cmp -s two.jsonl short.jsonl
    note $? "--data: goes on after any answers, in the order of the prompts"
    sed -i 's/"text":"[^"]*"/"text":"a 7, then 22."/; 2s/"a 7[^"]*"/" 33 "/' two.jsonl
    "${run[@]}" --data asked.jsonl --out two.jsonl --max-tokens 20 --stop "," --score '(\d+)\W*$' \
        >out 2>err
    [[ $(<out) == "exact match: 1 of 5 (20.0%)"$'\n'"score: 2 of 5 (40.0%)" ]]
    note $? "--score"
    # the second answer has less room, so it ends first; the order cannot be made afterwards
    printf '{"prompt": "%s"}\n' "Once upon" "$(printf 'x y %.0s' {1..168})" >asked.jsonl
    rm -rf ended.jsonl*
    mkdir -p ended.jsonl.new/full
    "${run[@]}" --data asked.jsonl --out ended.jsonl --max-tokens 12 >out 2>err &&
        [[ $(grep -o '"line":[0-9]*' ended.jsonl | tr -dc 0-9) == 21 ]] &&
        grep -q "has all answers, but not in the order of the prompts: " err
    note $? "--data: an answer is written when it ends"
    rm -r ended.jsonl.new
    "${run[@]}" --data asked.jsonl --out ended.jsonl --max-tokens 12 >out 2>err &&
        [[ $(grep -o '"line":[0-9]*' ended.jsonl | tr -dc 0-9) == 12 ]]
    note $? "--data: the order is made up for"
    printf 'ask,reply\nLily,yes\n' >asked.csv
    rm -f csv.jsonl day.jsonl
    "${run[@]}" --data asked.csv --columns question=ask,answer=reply --out csv.jsonl \
        --max-tokens 4 >out 2>err &&
        cmp -s <(grep -o '"prompt_tokens":[0-9]*' csv.jsonl) \
            <(sed -n 1p two.jsonl | grep -o '"prompt_tokens":[0-9]*')
    note $? "--columns"
    "${run[@]}" --data - --format csv --columns question=ask,answer=reply --out csv.jsonl \
        --max-tokens 4 <asked.csv >out 2>err && grep -q "nothing to do: 1 answer in" err
    note $? "--data -"
    echo '{{ messages[0].content if strftime_now("%Y") == "2024" else raise_exception("today") }}' \
        >day.jinja
    "${run[@]:0:5}" --data asked.csv --columns question=ask,answer=reply --chat-template day.jinja \
        --out day.jsonl --max-tokens 1 >out 2>err
    note $? "--data: a template has the day of the training, so that tomorrow goes on"
    refuses "--score: the regular expression .* has, at byte 0, .*not supported" generate \
        "${run[@]:1}" --data asked.csv --out x --score '*'
    refuses "asked.csv: no record has the column \"nope\", which --columns" generate \
        "${run[@]:1}" --data asked.csv --columns question=nope --out x
    echo '{"question": "x"}' >asked.jsonl
    refuses "--score needs answers to compare with" generate "${run[@]:1}" --data asked.jsonl \
        --out x --score x
    refuses "--score can only be used with --data" generate --model "$1" --prompt x --score x
    echo '{"prompt": "x"}' >asked.jsonl
    refuses "asked.jsonl:1: --system cannot be used with a \"prompt\" that .*; use --chat, or" \
        generate "${run[@]:1}" --data asked.jsonl --out x --system x
    printf '{"prompt": "%s"}\n' "$(printf 'x y %.0s' {1..400})" >asked.jsonl
    refuses "asked.jsonl:1: the prompt has 12[0-9]* tokens; the model's limit is 512" generate \
        "${run[@]:1}" --data asked.jsonl --out x
}

# Limits of the model, stop texts, prompts from files, one answer, Ctrl-C.
generation() {
    local model=$shared/models/stories260K
    local greedy=(--model "$model" --prompt "Once upon a" --temperature 0) text status pid
    [[ -d $model ]] || return
    says "^Once upon a time" generate "${greedy[@]}" --max-tokens 2000
    grep -q "stopped at the model's limit of 512 tokens" err
    note $? "a text ends at max_position_embeddings"
    refuses "the prompt has [0-9]+ tokens; the model's limit is 512" generate --model "$model" \
        --prompt "$(printf 'x y %.0s' {1..400})"
    refuses "--context 4096 exceeds the model's limit of 512" generate --model "$model" --chat \
        --context 4096
    refuses "the prompt has [0-9]+ tokens; --context is 16" generate --model "$model" --chat \
        --context 16 --prompt "a message that does not fit"
    refuses "--context can only be used with --chat" generate "${greedy[@]}" --context 64
    for text in "--context 64|into --context 64; shorten it or raise" \
        "|into the model's limit of 512 tokens; shorten it$"; do
        # shellcheck disable=SC2086 # the words of a command line
        printf 'x y %.0s' {1..400} |
            "$root/$B/generate" --model "$model" --chat ${text%|*} >out 2>err
        [[ $? -eq 1 ]] && grep -qE -- "${text#*|}" err
        note $? "a long message in a script: $text"
    done
    says "." generate "${greedy[@]}" --max-tokens 1 --stats
    grep -qE "^\[prompt: 4 tokens, [0-9.]+ s, [0-9.]+ tokens/s; new: 1 token, [0-9.]+ s, " err
    note $? "--stats: one token is not 1 tokens, and not a token of the prompt"
    says "^Once upon a time, there was a little $" generate "${greedy[@]}" --stop girl --stop zzz
    says "^Once upon a time, there was a little girl named Lily\.$" generate "${greedy[@]}" \
        --stop " She" --stop " Shf"
    says "^Once upon a time, there was a little girl nam" generate "${greedy[@]}" --max-tokens 12 \
        --stop "named Lilz"
    printf 'Once upon a' >prompt.txt
    says "^Once upon a time" generate --model "$model" --prompt-file prompt.txt --temperature 0 \
        --max-tokens 20
    text=$(cat out)
    says "Once" generate "${greedy[@]}" --max-tokens 20
    [[ $(cat out) == "$text" ]]
    note $? "a prompt from a file: same text"
    refuses "--prompt-file nowhere: No such file" generate --model "$model" --prompt-file nowhere
    says "." generate --model "$model" --chat --prompt hello --temperature 0 --max-tokens 8
    text=$(cat out)
    [[ ! -s err ]]
    note $? "one answer, and nothing else"
    printf 'hello\n' | "$root/$B/generate" --model "$model" --chat --temperature 0 --max-tokens 8 \
        >out 2>err
    [[ $(cat out) == "$text" ]]
    note $? "one answer: the same as in a conversation"
    turns "$model"
    token_lines "$model"
    batches "$model"
    says "." generate "${greedy[@]}" --min-p 1 --temperature 5 --max-tokens 30
    text=$(cat out)
    says "." generate "${greedy[@]}" --max-tokens 30
    [[ $(cat out) == "$text" ]]
    note $? "--min-p 1 is greedy"
    says "." generate "${greedy[@]}" --top-p 0 --temperature 5 --max-tokens 30
    [[ $(cat out) == "$text" ]]
    note $? "--top-p 0 is greedy"
    says "." generate "${greedy[@]}" --repetition-penalty 1.8 --max-tokens 30
    [[ $(cat out) != "$text" ]]
    note $? "--repetition-penalty changes the text"
    refuses "GPU|CUDA|cuda" generate --model "$model" --prompt x --device 5
    "$root/$B/generate" "${greedy[@]}" --max-tokens 500 --base 32bit --threads 1 >out 2>err &
    pid=$!
    while kill -0 $pid 2>/dev/null && [[ $(stat -c %s out) -lt 40 ]]; do sleep 0.01; done
    kill -INT $pid 2>/dev/null
    wait $pid
    status=$?
    [[ $status -eq 130 && $(wc -l <out) -ge 1 ]]
    note $? "Ctrl-C: status 130 ($status)"
}

# Tokens without a name, and a tokenizer of another model.
vocabularies() {
    local model=$shared/models/stories260K
    [[ -d $model ]] || return
    refuses "belongs to another model: the prompt has token [0-9]+; the vocabulary has 512" \
        generate --model "$model" --tokenizer big.json --prompt "$(printf '\xff')"
    says "^Once" generate --model "$model" --tokenizer big.json --prompt "Once" --max-tokens 3
    [[ $(cat err) == "[the tokenizer has 656 tokens, the model's vocabulary only 512]" ]]
    note $? "a tokenizer with more tokens is reported, once"
    cp "$model/config.json" "$model/model.safetensors" small/
    says "^Once" generate --model small --prompt "Once" --max-tokens 200 --temperature 3 --top-p 1
    grep -q "vocabulary has 512 tokens, the tokenizer 257; .* U.FFFD" err
    note $? "a tokenizer with fewer tokens is reported"
    grep -q $'\xEF\xBF\xBD' out
    note $? "tokens without a name are printed as U+FFFD"
}

# byte_tokenizer FIRST: one token per byte, with ids from FIRST on. The id of an added token is the
# number of the others.
byte_tokenizer() {
    local vocab="" other=256 byte i
    for ((byte = 0; byte < 256; byte++)); do
        i=$byte
        if ((byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)); then i=$((other++)); fi
        vocab+=$(printf '%s"\\u%04x":%d' "${vocab:+,}" $i $((byte + $1)))
    done
    echo "{\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {$vocab}},
 \"added_tokens\": [{\"id\": 256, \"content\": \"<|endoftext|>\", \"special\": true}],
 \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false},
 \"decoder\": {\"type\": \"ByteLevel\"}}"
}

rm -rf "$work"
mkdir -p "$work"
[[ -n ${NO_BUILD:-} ]] || ${MAKE:-make} -s B="$B" "$B/finetune" "$B/generate" "$B/merge" "$B/plan" \
    "$B/tokenize" || exit 1
shared=$(cd "$shared" 2>/dev/null && pwd || echo "$shared")
cd "$work" || exit 1
: >out
: >err
wrong_use
habits
other_names
formats
versions
plans
texts
merging
generation
mkdir small
byte_tokenizer 0 >small/tokenizer.json
byte_tokenizer 400 >big.json
vocabularies
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 && $passed -gt 0 ]]
