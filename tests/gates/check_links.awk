# Links in Markdown files: the file that a link names must exist, and its heading if it has one.
# Usage: awk -f check_links.awk FILE..., all Markdown files that are linked with a heading included.

function folder_of(path) {
    return path ~ /\// ? substr(path, 1, match(path, /[^\/]*$/) - 1) : ""
}

# Resolves the ".." in a path.
function plain(path) {
    while (sub(/[^\/.]+\/\.\.\//, "", path)) {
    }
    return path
}

# The anchor of a heading, as GitHub makes it.
function anchor(text) {
    gsub(/`/, "", text)
    text = tolower(text)
    gsub(/[^a-z0-9 _-]/, "", text)
    gsub(/ /, "-", text)
    return text
}

FNR == 1 {
    code = 0
}

/^ *```/ {
    code = !code
}

code {
    next
}

/^#+ / {
    text = $0
    sub(/^#+ /, "", text)
    headings[FILENAME "#" anchor(text)] = 1
}

{
    text = $0
    gsub(/`[^`]*`/, "", text)
    while (match(text, /\]\([^)]*\)/)) {
        link[++links] = substr(text, RSTART + 2, RLENGTH - 3)
        from[links] = FILENAME
        at[links] = FNR
        text = substr(text, RSTART + RLENGTH)
    }
}

END {
    for (i = 1; i <= links; i++) {
        if (link[i] ~ /^[a-z]+:/) {
            continue
        }
        n = index(link[i], "#")
        path = n > 0 ? substr(link[i], 1, n - 1) : link[i]
        path = path == "" ? from[i] : plain(folder_of(from[i]) path)
        if (system("test -e '" path "'") != 0) {
            print from[i] ":" at[i] ": the link " link[i] " leads nowhere: no " path
            bad = 1
        } else if (n > 0 && !((path substr(link[i], n)) in headings)) {
            print from[i] ":" at[i] ": the link " link[i] " leads nowhere: no such heading"
            bad = 1
        }
    }
    exit bad
}
