# prose.awk - measures the prose of Markdown files: words, sentences, their lengths, and figures.
#
#     awk -f tools/prose.awk README.md docs/*.md               a table, one line per file
#     awk -v words=40 -v figures=8 -f tools/prose.awk ...      and fails for longer sentences, and
#                                                              for paragraphs with more figures
#
# Only running text counts: no code blocks, tables, headings or images. A span of code is a word,
# and so is the text of a link. A figure is a number, with its unit or alone, outside of code.

function file_end(    n, i, count, p90) {
    paragraph_end()
    if (file == "") {
        return
    }
    for (n = 0; n <= longest; n++) {
        count += lengths[n]
        if (p90 == "" && sentences > 0 && count >= 0.9 * sentences) {
            p90 = n
        }
    }
    printf "%6d %9d %5.1f %4d %8d %8d  %s\n", total, sentences,
        (sentences > 0 ? total / sentences : 0), p90, longest, numbers, file
    for (i in lengths) {
        delete lengths[i]
    }
    total = sentences = longest = numbers = 0
}

function sentence_end(n, from) {
    if (n == 0) {
        return
    }
    total += n
    sentences++
    lengths[n]++
    longest = n > longest ? n : longest
    if (words > 0 && n > words) {
        print file ":" line ": a sentence of " n " words (at most " words "): " from " ..."
        bad = 1
    }
}

function paragraph_end(    text, parts, n, i, count, from, seen) {
    text = paragraph
    paragraph = ""
    if (text == "") {
        return
    }
    gsub(/!\[[^\]]*\]\([^)]*\)/, "", text)
    while (match(text, /\]\([^)]*\)/)) {
        text = substr(text, 1, RSTART - 1) substr(text, RSTART + RLENGTH)
    }
    gsub(/`[^`]*`/, "CODE", text)
    gsub(/[*_]/, "", text)
    gsub(/[[\]]/, "", text)
    n = split(text, parts, /[ \t\n]+/)
    for (i = 1; i <= n; i++) {
        if (parts[i] == "") {
            continue
        }
        if (parts[i] ~ /[A-Za-z0-9]/) {
            count++
            from = count == 1 ? parts[i] : count < 7 ? from " " parts[i] : from
        }
        if (parts[i] ~ /^[("]*[-+]?[0-9][0-9,.]*(x|%|s|ms|GiB|MiB|GB|MB|KB|e-[0-9]+)?[,.;:)"]*$/) {
            seen++
        }
        # A sentence ends with a stop before a capital, a number or the end.
        if (parts[i] ~ /[.!?][")]*$/ && parts[i] !~ /^(e\.g\.|i\.e\.|vs\.)$/ &&
            (i == n || parts[i + 1] == "" || parts[i + 1] ~ /^[("]*[A-Z0-9]/)) {
            sentence_end(count, from)
            count = 0
        }
    }
    sentence_end(count, from)
    numbers += seen
    if (figures > 0 && seen > figures) {
        print file ":" line ": a paragraph with " seen " figures (at most " figures \
            "); use a table: " substr(text, 1, 40) " ..."
        bad = 1
    }
}

FNR == 1 {
    file_end()
    file = FILENAME
    code = 0
    if (!titled) {
        print " words sentences  mean  p90  longest  figures  file"
        titled = 1
    }
}

/^ *```/ {
    paragraph_end()
    code = !code
    next
}

# Tables, headings, rules, comments, and blocks of code that are indented after a blank line.
code || /^ *\|/ || /^#/ || /^ *<!--/ || (/^    / && blank && !list) {
    paragraph_end()
    next
}

/^[ \t]*$/ {
    paragraph_end()
    blank = 1
    next
}

{
    if (/^ *([-*]|[0-9]+\.) /) {
        paragraph_end()
        list = 1
        sub(/^ *([-*]|[0-9]+\.) /, "")
    } else if (!/^ /) {
        list = blank ? 0 : list
    }
    if (paragraph == "") {
        line = FNR
    }
    blank = 0
    paragraph = paragraph " " $0
}

END {
    file_end()
    exit bad
}
