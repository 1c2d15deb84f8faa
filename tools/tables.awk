# tables.awk - fills in the tables of a Markdown file that are made from other files; tables.sh
# runs it:
#
#     awk -f tools/tables.awk docs/speed.csv src/arch.h docs/speed.md
#
# In the last file, the lines from `<!-- table: NAME -->` to `<!-- end -->` are replaced. NAME is a
# section of the CSV file, whose values contain no commas, or `families`, `wrappers` or `refused`:
# rows of src/arch.h.

function thousands(text,    head) {
    if (text !~ /^[0-9][0-9][0-9][0-9]+$/) {
        return text
    }
    head = substr(text, 1, length(text) - 3)
    return thousands(head) "," substr(text, length(text) - 2)
}

function figure_rows(name,    i, f, commands, command) {
    for (i = 1; i <= figures; i++) {
        split(figure[i], f, ",")
        commands = commands || (f[1] == name && f[4] != "")
    }
    print "| shape | what |" (commands ? " command |" : "") \
        " figure | on | commit | date | repeats |"
    print "| --- | --- |" (commands ? " --- |" : "") " --- | --- | --- | --- | --- |"
    for (i = 1; i <= figures; i++) {
        split(figure[i], f, ",")
        if (f[1] == name) {
            gsub(/;/, ",", f[3])
            command = !commands ? "" : f[4] == "" ? " |" : " `" f[4] "` |"
            print "| " f[2] " | " f[3] " |" command " " thousands(f[5]) \
                (f[6] == "%" || f[6] == "" ? "" : " ") f[6] \
                " | " f[7] " | " f[8] " | " f[9] " | " f[10] " |"
            rows++
        }
    }
}

function quoted(text) {
    return match(text, /"[^"]*"/) ? substr(text, RSTART + 1, RLENGTH - 2) : ""
}

function fill(name,    i, f) {
    rows = 0
    if (name == "families") {
        print "| `model_type` | `architectures` | in GGUF files |"
        print "| --- | --- | --- |"
    } else if (name == "wrappers") {
        print "| `model_type` | `architectures` | text part |"
        print "| --- | --- | --- |"
    } else if (name == "refused") {
        print "| reason | `model_type` |"
        print "| --- | --- |"
    } else {
        figure_rows(name)
    }
    for (i = 1; i <= listed[name]; i++) {
        print list[name, i]
        rows++
    }
    if (rows == 0) {
        print "tables.awk: nothing is known about the table " name >"/dev/stderr"
        bad = 1
    }
}

FILENAME ~ /\.csv$/ {
    if (FNR > 1 && $0 != "") {
        figure[++figures] = $0
    }
    next
}

# A row begins {QLORA_FAMILY_X, "type", "Class", "gguf", and a wrapper {"type", "Class", {"text",
FILENAME ~ /arch\.h$/ {
    if (/^ *\{QLORA_FAMILY_[A-Z0-9_]*, "/) {
        split($0, f, ",")
        list["families", ++listed["families"]] = "| `" quoted(f[2]) "` | `" quoted(f[3]) "` | `" \
            quoted(f[4]) "` |"
    }
    if (/^static const qlora__wrapper /) {
        wrappers = 1
    } else if (wrappers && match($0, /^ *\{"/)) {
        split($0, f, ",")
        list["wrappers", ++listed["wrappers"]] = "| `" quoted(f[1]) "` | `" quoted(f[2]) "` | `" \
            quoted(f[3]) "`" (quoted(f[4]) != "" ? " or `" quoted(f[4]) "`" : "") " |"
        wrappers = !/;$/
    }
    if (/qlora__refused_archs\[\] = \{/) {
        refused = 1
    } else if (refused && /"/) {
        if (match($0, /\{"[^"]*"/)) {
            reason = substr($0, RSTART + 2, RLENGTH - 3)
            types = ""
            $0 = substr($0, RSTART + RLENGTH)
        }
        types = types quoted($0)
        if (/\}/) {
            sub(/^ */, "", types)
            sub(/ *$/, "", types)
            gsub(/ +/, "`, `", types)
            list["refused", ++listed["refused"]] = "| " reason " | `" types "` |"
        }
        refused = !/\}\};$/
    }
    next
}

/^<!-- table: / {
    print
    fill($3)
    inside = 1
    next
}

/^<!-- end -->/ {
    inside = 0
}

!inside

END {
    exit bad || inside
}
