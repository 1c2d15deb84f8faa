// main.h - what libFuzzer calls, for a program with several targets: build/fuzz_NAME is one of its
// names, and runs the target NAME. Included at the end of library.c and text_library.c. Their list
// FUZZ_TARGETS says of each target whether its inputs are lists of choices (mutate.h).

typedef struct fuzz_target {
    const char* name;
    int (*run)(const uint8_t* data, size_t size);
    bool choices;
} fuzz_target;

#define FUZZ_TARGET(name, choices) {#name, fuzz_##name, choices},
static const fuzz_target fuzz_targets[] = {FUZZ_TARGETS(FUZZ_TARGET)};
static const fuzz_target* fuzz_chosen;

int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t room, unsigned int seed);

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc;
    const char* slash = strrchr((*argv)[0], '/');
    const char* name = slash != NULL ? slash + 1 : (*argv)[0];
    for (size_t i = 0; i < sizeof fuzz_targets / sizeof fuzz_targets[0]; i++) {
        if (strncmp(name, "fuzz_", 5) == 0 && strcmp(name + 5, fuzz_targets[i].name) == 0) {
            fuzz_chosen = &fuzz_targets[i];
            return 0;
        }
    }
    fprintf(stderr, "%s: no target has this name; the program must be called fuzz_NAME\n", name);
    exit(1);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    return fuzz_chosen->run(data, size);
}

// Where inputs are lists of choices, every second one consists of new choices. libFuzzer's own
// changes keep most of them, and try the same few places of the files again and again.
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t room, unsigned int seed) {
    uint64_t state = seed;
    if (!fuzz_chosen->choices || seed % 2 == 0 || room < 32) {
        return LLVMFuzzerMutate(data, size, room);
    }
    for (size_t i = 0; i < 32; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        data[i] = (uint8_t)(state >> 40);
    }
    return 32;
}
