#!/usr/bin/env bash
# page.sh - opens training.html and training.svg in a browser and looks at what it makes of them.
# Usage: page.sh BROWSER FOLDER, with build/finetune. Prints one line per fault; the status is 1 if
# there is any. Screenshots to look at are left in FOLDER: BROWSER must be Chromium or Chrome.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
browser=$1
mkdir -p "$2" || exit 1
folder=$(cd "$2" && pwd)
finetune=$PWD/${B:-build}/finetune
bad=0

fault() {
    echo "$*"
    bad=1
}

# browse SCHEME ARGUMENT...: 0 is dark, 1 is light.
browse() {
    local scheme=$1
    shift
    timeout 120 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars \
        --allow-file-access-from-files --user-data-dir="$folder/profile" \
        --blink-settings=preferredColorScheme="$scheme" "$@" 2>"$folder/browser.err"
}

runs_make() {
    local i common=(--backend cpu --threads 1 --steps 12 --eval-every 4 --sample-tokens 12)
    "$finetune" --demo "${common[@]}" --out demo \
        --sample-prompt '</pre><script>document.title = "wrong"</script>&lt;' \
        --sample-prompt "$(printf 'long%.0s' {1..12})" || return 1
    for ((i = 0; i < 60; i++)); do
        echo "{\"prompt\": \"$i is\", \"chosen\": \" $i\", \"rejected\": \" $((i + 1))\"}"
    done >"a name that is long and has <i>odd & strange characters.jsonl"
    "$finetune" --model demo/model --template plain --method dpo "${common[@]}" --eval 10 \
        --length 64 --tokens 512 --out dpo --sample-prompt "1 is" \
        --data "a name that is long and has <i>odd & strange characters.jsonl"
}

# A page with the page in frames of two widths, narrow and wide: a window cannot be narrow enough.
# What a script finds in them is written as lines NAME=VALUE.
frames_make() {
    cat >"$1.frames.html" <<END
<!DOCTYPE html><body style="margin:0"><pre id="found"></pre>
<iframe src="$1/training.html" style="border:0;width:360px;height:2600px"></iframe>
<iframe src="$1/training.html" style="border:0;width:1280px;height:2600px"></iframe>
<script>
onload = () => {
  const found = [];
  const points = (page, kind) => {
    const line = page.querySelector("polyline." + kind);
    return line ? line.points.numberOfItems : 0;
  };
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow, w = frame.clientWidth;
    const inside = (text) => {
      const a = text.getBoundingClientRect(), b = text.ownerSVGElement.getBoundingClientRect();
      return a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 &&
             a.bottom <= b.bottom + 1;
    };
    const texts = [...page.querySelectorAll("svg.curves text")];
    const size = Math.min(...texts.map((t) => t.getBoundingClientRect().height));
    found.push(w + ".scroll=" + page.documentElement.scrollWidth);
    found.push(w + ".cut=" + texts.filter((t) => !inside(t)).map((t) => t.textContent).join(" "));
    found.push(w + ".legible=" + (size >= 9));
    found.push(w + ".background=" + view.getComputedStyle(page.body).backgroundColor);
    found.push(w + ".curve=" + view.getComputedStyle(page.querySelector("polyline.s")).stroke);
    const headings = [...page.querySelectorAll("h2")].map((h) => h.textContent);
    found.push(w + ".loss=" + ["r", "s", "e"].map((kind) => points(page, kind)).join(" "));
    found.push(w + ".panels=" + headings.join(","));
    found.push(w + ".samples=" + page.querySelectorAll("table.sample").length + " " +
               page.querySelectorAll("table.sample tr").length);
    found.push(w + ".prompt=" + page.querySelector("table.sample pre").textContent);
    found.push(w + ".title=" + page.title);
    found.push(w + ".scripts=" + page.querySelectorAll("script, meta[http-equiv=refresh]").length);
    found.push(w + ".named=" + [...page.querySelectorAll("svg.curves")].every(
        (svg) => svg.querySelector("title") && svg.getAttribute("role") === "img"));
  }
  document.getElementById("found").textContent = found.join("\n");
};
</script>
END
}

# expect NAME VALUE: what the script found in the narrow and in the wide frame.
expect() {
    local width value
    for width in 360 1280; do
        value=$(sed -n "s/^\(<.*>\)\{0,1\}$width\.$1=//p" found.html | head -1)
        [[ ${value%%</pre>*} == "$2" ]] ||
            fault "$run, $scheme_name, $width px: $1 is '$value', expected '$2'"
    done
}

look() { # look RUN SCHEME NAME BACKGROUND CURVE
    local run=$1 scheme_name=$3 width scroll steps evals samples panels
    browse "$2" --window-size=1700,2700 --dump-dom "file://$folder/$run.frames.html" >found.html
    if ! grep -q '1280.named=' found.html; then
        fault "$run, $3: the browser found nothing: $(tail -1 browser.err)"
        return
    fi
    for width in 360 1280; do
        scroll=$(sed -n "s/.*$width\.scroll=\([0-9]*\).*/\1/p" found.html)
        [[ ${scroll:-9999} -le $width ]] ||
            fault "$run, $3: $scroll px wide in a window of $width px"
    done
    steps=$(grep -c '"loss"' "$run/log.jsonl")
    evals=$(grep -c '"eval_loss"' "$run/log.jsonl")
    samples=$(grep -c '"samples"' "$run/log.jsonl")
    panels="loss,learning rate,gradient norm,tokens per second,samples,settings,memory plan"
    expect cut ""
    expect legible true
    expect background "$4"
    expect curve "$5"
    expect loss "$steps $steps $evals"
    expect scripts 0
    expect named true
    if [[ $run == demo ]]; then
        expect panels "$panels"
        expect samples "2 $((2 * (samples + 1)))"
        expect prompt '&lt;/pre&gt;&lt;script&gt;document.title = "wrong"&lt;/script&gt;&amp;lt;'
        expect title "100% - finetune --demo"
    else
        expect panels "${panels/loss,/loss,rewards,accuracy,}"
        expect samples "1 $((samples + 1))"
        expect title "100% - model on a name that is long and has &lt;i&gt;odd &amp;..."
    fi
}

# The plot is XML: one wrong character, and a browser shows an error instead.
plot_look() {
    local run=$1 count
    browse 1 --dump-dom "file://$folder/$run/training.svg" >plot.html
    grep -qi 'parsererror' plot.html && fault "$run: training.svg is not well-formed"
    count=$(grep -o '<polyline' plot.html | wc -l)
    [[ $count -eq $2 ]] || fault "$run: training.svg has $count curves, expected $2"
}

cd "$folder" || exit 1
rm -rf demo dpo profile ./*.html ./*.png
runs_make >runs.out 2>&1 || { tail -3 runs.out; exit 1; }
for run in demo dpo; do
    frames_make $run
    look $run 1 light "rgb(255, 255, 255)" "rgb(31, 111, 192)"
    look $run 0 dark "rgb(20, 23, 27)" "rgb(92, 170, 246)"
    browse 0 --window-size=1700,2700 --screenshot="$folder/$run.dark.png" \
        "file://$folder/$run.frames.html" >/dev/null
done
plot_look demo 7
plot_look dpo 13
rm -rf profile
exit $bad
