# sanitize.awk - reads the output of one compute-sanitizer run for sanitize.sh. Prints lines of a
# word and a value: how many reports name kernels of ours, of NVIDIA's libraries, others, or none;
# what the tool's own summary counts; what it says of itself; and every kernel with its reports.
#
# A report is a line that starts with "=========" and one blank, with the indented lines after it.
# What is not known to be something else is a report, so that an unknown message is never lost.

# The name of a kernel in "at NAME(arguments)+0x160 in FILE:LINE" or "at 0x160 in NAME"; else "".
function kernel_of(line, name) {
    if (line !~ /(^|[ \t])at .*(\+0x[0-9a-f]+|0x[0-9a-f]+ in [^ ])/) {
        return ""
    }
    name = line
    if (name ~ /\+0x[0-9a-f]+/) {
        sub(/^.*[ \t]at /, "", name)
        sub(/\+0x[0-9a-f]+.*/, "", name)
    } else {
        sub(/^.*[ \t]at 0x[0-9a-f]+ in /, "", name)
    }
    sub(/^(static )?void /, "", name)
    sub(/[(<].*/, "", name)
    sub(/[ \t]+$/, "", name)
    return name ~ /^[A-Za-z_][A-Za-z_0-9:]*$/ ? name : ""
}

# qlora_NAME is ours; the others are the names of cuBLAS's and NCCL's kernels.
function owner_of(name) {
    if (name ~ /^qlora_/) {
        return "ours"
    }
    if (name ~ /^(nvjet_|cutlass|cublas|ncclDevKernel|ncclKernel|gemv|gemm|dot_kernel)/ ||
        name ~ /^(splitK|volta_|turing_|ampere_|sm[0-9]+_xmma_)/) {
        return "library"
    }
    return "other"
}

# Counts the report that has ended. One that names kernels of several owners is not the library's.
function report_end(name, owner) {
    if (!open) {
        return
    }
    owner = "none"
    for (name in names) {
        owner = owner == "none" || owner == owner_of(name) ? owner_of(name) : "ours"
    }
    reports[owner]++
    for (name in names) {
        kernels[name]++
        owners[name] = owner_of(name)
    }
    if (owner == "none") {
        print "unnamed " title
    }
    open = 0
    split("", names)
}

function kernel_note(line, name) {
    name = kernel_of(line)
    if (name != "") {
        names[name] = 1
    }
}

!/^=========/ { next }
/^=========[ \t]*$/ { report_end(); next }
/^========= (COMPUTE-SANITIZER|LEAK SUMMARY|Target application returned an error)/ ||
    /^========= Error: process didn't terminate successfully/ {
    report_end()
    next
}
/^========= (Error: )?Target application terminated before first instrumented API call/ {
    report_end()
    print "unused 1"
    next
}
/^========= (ERROR|RACECHECK) SUMMARY: / {
    report_end()
    summaries++
    counted += $4
    next
}
# Messages after which reports are missing, or the tool has failed.
/^========= .*(Maximum number of hazards|[Pp]rint limit|Internal [Ss]anitizer|Internal Error)/ ||
    /^========= (Error: )?(No attachable|Unable to|Could not|Failed to)/ {
    report_end()
    print "lost " substr($0, 11)
    next
}
/^=========  / {
    if (open && $0 !~ /Host Frame:/) {
        pairs += /^=========[ \t]+and / ? 1 : 0
        kernel_note($0)
    }
    next
}
{
    report_end()
    open = 1
    title = substr($0, 11)
    kernel_note($0)
}

END {
    report_end()
    total = reports["ours"] + reports["library"] + reports["other"] + reports["none"]
    print "ours " reports["ours"] + 0
    print "library " reports["library"] + 0
    print "other " reports["other"] + 0
    print "none " reports["none"] + 0
    for (name in kernels) {
        print "kernel " owners[name] " " kernels[name] " " name
    }
    if (summaries > 0 && counted != total && counted != pairs) {
        print "lost the summary counts " counted " reports, " total " were read"
    }
    print "summaries " summaries + 0
}
