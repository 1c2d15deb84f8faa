# Finds words that the headers may use only on one floor, or never: memory, files and the log go
# through hooks, and only src/platform knows the operating system. Comments and strings are ignored.

BEGIN {
    before = "(^|[^A-Za-z0-9_.>])"
    system_words = "malloc|calloc|realloc|free|posix_memalign|fopen|fclose|fread|fwrite|fseek" \
        "|ftell|mmap|munmap|dlopen|dlsym|dlclose|pthread_[a-z_]*|getenv"
    never_words = "printf|vprintf|puts|putchar|exit|_exit|abort|alloca|system|signal|setenv" \
        "|strtok|sprintf|strcpy|strcat|gets|scanf|assert"
}

function report(why) {
    print FILENAME ":" NR ": " section ": " why ": " $0
    bad = 1
}

/^\/\/@@ / {
    section = $2
}

{
    line = $0
    if (block) {
        if (line !~ /\*\//) {
            next
        }
        sub(/.*\*\//, "", line)
        block = 0
    }
    gsub(/\\"/, "", line)
    gsub(/"[^"]*"/, "\"\"", line)
    sub(/\/\/.*/, "", line)
    gsub(/\/\*[^*]*\*\//, "", line)
    if (line ~ /\/\*/) {
        sub(/\/\*.*/, "", line)
        block = 1
    }
}

section == "" || section ~ /^src\/(api\/|qlora(_text)?\.h|text\/(api|manual)\.h)/ {
    next
}

section !~ /^src\/platform\// && line ~ before "(" system_words ")\\(" {
    report("only src/platform may call this")
}

section !~ /^src\/platform\// && line ~ /_WIN32/ {
    report("only src/platform may depend on the system")
}

section !~ /^src\/(platform|core)\// && line ~ before "(fprintf|fputs|stderr)[^A-Za-z0-9_]" {
    report("only the log in src/core may print")
}

line ~ before "(" never_words ")\\(" {
    report("never call this")
}

section != "src/arch.h" && line ~ /QLORA_FAMILY_[A-Z]/ {
    report("only src/arch.h may name a family; its rows say what differs")
}

line ~ /goto / && line !~ /goto fail;/ {
    report("goto is allowed only as goto fail")
}

line ~ /= *\{ *0? *\}/ && line !~ /static const/ {
    report("{0} warns in C++; use memset")
}

END {
    exit bad
}
