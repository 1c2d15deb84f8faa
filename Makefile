# For GNU make. `make`, `make test` and `make demo` need only a C compiler; `make help` lists all
# targets. CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS, PREFIX and DESTDIR are respected.

ifeq ($(origin CC),default) # `CC ?=` would have no effect: make predefines CC
CC := cc
endif
# Tools that run during the build are compiled for this machine, also when CC is a cross compiler.
HOSTCC ?= $(shell command -v cc >/dev/null 2>&1 && echo cc || echo $(CC))
CLANG ?= clang
NVCC ?= nvcc
PTXAS ?= ptxas
INSTALL ?= install
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
INCLUDEDIR ?= $(PREFIX)/include
LIBDIR ?= $(PREFIX)/lib
FUZZ_SECONDS ?= 600
# The targets count their memory themselves; libFuzzer's look at all of it takes most of the time.
FUZZ_OPTIONS = -timeout=5 -detect_leaks=0 -entropic=0 -len_control=0 -reload=0
PYTHON ?= python3# with torch, transformers and peft, for the comparison in make soak
SEED ?= 1# of that comparison
CASES ?= 200
B ?= build# set it to use a separate folder for another compiler or sanitizer

# In parallel; a -j on the command line wins.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
endif

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-align \
	-Wvla -Wstrict-prototypes -Wmissing-prototypes
OPTIMIZE = -O2
OWN_CFLAGS = -std=c99 $(OPTIMIZE) $(if $(DEV),-g) $(WARNINGS)
OWN_LDLIBS := -lm
ifneq ($(OS),Windows_NT)
OWN_LDLIBS += -lpthread $(if $(filter Linux,$(shell uname -s)),-ldl)
else # what the tests use of POSIX
TEST_INCLUDES := -Itests/windows -include tests/windows/posix.h
TEST_LDLIBS := -Wl,-Bstatic -lpthread
endif
# DEV=1 compiles the parts in src/ directly, so that errors and debuggers show the original file and
# line, and all variables; without it, the assembled headers are compiled, as users do.
INCLUDES := $(if $(DEV),-Isrc) -I. -Itests
define COMPILE
@mkdir -p $(@D)
$(CC) $(INCLUDES) $(CPPFLAGS) $(OWN_CFLAGS) $(CFLAGS) $(TEST_CFLAGS) -MMD -MP -MF $@.d
endef
# With contraction, the interpreter's results would be rounded differently from the device's. It
# runs only where it is built, so it may have all instructions of this processor: a third less time.
FAKE_FLAGS := -ffp-contract=off -fPIC
FAKE_NATIVE := $(shell $(CC) -march=native -E -x c /dev/null >/dev/null 2>&1 && echo -march=native)
FAKE = $(COMPILE) $(FAKE_FLAGS) -shared -Wl,-soname,$(@F) $(LDFLAGS)
LIBS = $(LDFLAGS) $(OWN_LDLIBS) $(LDLIBS)

HEADERS := qlora.h qlora_text.h
VERSION := $(shell sed -n 's/^\#define QLORA_VERSION_STRING "\(.*\)"/\1/p' src/api/linkage.h)
LIBRARY := $(B)/obj/qlora.o $(B)/obj/qlora_text.o
TESTS := $(patsubst tests/%.c,$(B)/obj/%.o,$(wildcard tests/unit/*.c) \
	$(addprefix tests/internal/,library.c text_library.c double.c))
PROGRAMS := $(patsubst programs/%.c,$(B)/%,$(wildcard programs/*.c))
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
BENCHES := $(B)/bench
LIBRARY_FUZZERS := $(addprefix $(B)/fuzz_,config folders gguf json safetensors)
TEXT_FUZZERS := $(addprefix $(B)/fuzz_,data files parquet template tokenizer)
FUZZERS := $(LIBRARY_FUZZERS) $(TEXT_FUZZERS)
KERNELS := $(sort $(wildcard kernels/*/*.cu))
KERNEL_PARTS := $(sort $(wildcard kernels/*.cuh kernels/*/*.cuh))
FAKE_PARTS := $(patsubst tests/%.c,$(B)/obj/%.o,\
	$(filter-out %/cublas.c %/cublaslt.c %/nccl.c %/mpi.c %/variant.c %/ptx_test.c,\
	$(wildcard tests/fakecuda/*.c)))
FAKES := $(addprefix $(B)/,$(addsuffix /libcuda.so.1,fake fake-stub fake-omit) \
	$(addsuffix /libcublas.so.13,fake fake-omit) fake/libcublasLt.so.13 \
	fake/libnccl.so.2 fake/libfakempi.so)

.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all test demo programs examples headers static shared where ptx ptx-header ptx-packed \
	ptx-report bench check mutants soak install uninstall clean help FORCE

all: $(B)/tests $(FAKES) programs examples ## build the tests, the programs and the examples

test: $(B)/tests $(FAKES) ## run the tests on the CPU, the fake GPU and, if present, a real GPU
	@B=$(B) tests/run.sh

demo: $(B)/finetune ## train a small generated model (3 to 40 seconds), print text before and after
	@$(B)/finetune --demo --out $(B)/demo

programs: $(PROGRAMS) ## build finetune, generate, merge, plan and tokenize

examples: $(PROGRAMS) $(EXAMPLES) ## build the programs and everything in examples/

headers: $(HEADERS) ## assemble qlora.h and qlora_text.h from src/

static: $(B)/libqlora.a ## build the library as build/libqlora.a

shared: $(B)/libqlora.so ## build the library as build/libqlora.so.VERSION (ELF systems)

where: $(B)/amalgamate ## LINE=n [HEADER=qlora_text.h]: print the part that a line comes from
	@$(B)/amalgamate --where $(LINE) src/$(or $(HEADER),qlora.h)

ptx: $(B)/embed ## regenerate kernels_ptx.h from kernels/*/*.cu (needs nvcc)
	@$(MAKE) --no-print-directory ptx-header OUT=kernels_ptx.h \
		TEXTS="$$($(B)/embed --texts $(B)/ptx $(KERNELS) | tr '\n' ' ')"

ptx-header: $(TEXTS)
	$(B)/embed --write $(B)/kernels_ptx.h.new \
		--nvcc "$$($(NVCC) --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')" \
		$(KERNELS) $(KERNEL_PARTS) $(TEXTS)
	mv $(B)/kernels_ptx.h.new $(OUT)

ptx-packed: $(B)/embed ## [ONLY="WORD..."]: write build/kernels_ptx.h, kernels_ptx.h compressed
	$(B)/embed --packed $(if $(ONLY),--only "$(ONLY)") kernels_ptx.h $(B)/kernels_ptx.h

ptx-report: $(B)/ptx-tool ## print registers, shared memory and spills of every kernel (needs ptxas)
	@B=$(B) PTXAS="$(PTXAS)" tools/ptx_report.sh

bench: $(BENCHES) ## measure the kernels on the available GPU
	@for program in $(BENCHES); do $$program || exit 1; done

check: ## run all gates (warnings, style, layers, sanitizers, PTX, ...); report those skipped
	@MAKE="$(MAKE)" CLANG="$(CLANG)" NVCC="$(NVCC)" PTXAS="$(PTXAS)" tests/gates/check.sh

mutants: $(B)/tests $(FAKES) ## inject known bugs into the shipped PTX; the tests must detect all
	LD_LIBRARY_PATH=$(B)/fake $(B)/tests -v -s mutant

soak: $(B)/tests $(FAKES) $(FUZZERS) $(B)/peft_side ## run long tests: fuzzers, PEFT, kills, gates
	@for program in $(FUZZERS); do echo "== $$program"; mkdir -p $$program.corpus; \
		ASAN_OPTIONS=detect_leaks=0 $$program -max_total_time=$(FUZZ_SECONDS) $(FUZZ_OPTIONS) \
		-artifact_prefix=$$program. $$program.corpus || exit 1; done
	@echo "== tests/peft_diff.py"; B=$(B) $(PYTHON) tests/peft_diff.py --seed $(SEED) --count $(CASES)
	@for script in $(wildcard tests/gates/soak*.sh) tests/gates/gates.sh \
		"tests/gates/check.sh use_clang ptx_assemble"; do echo "== $$script"; B=$(B) \
		PTX_TARGETS="75 80 86 87 89 90 100 103 110 120 121" $$script || exit 1; done

install: programs $(B)/libqlora.a $(B)/qlora.pc ## install headers, programs, library and qlora.pc
	$(INSTALL) -d "$(DESTDIR)$(INCLUDEDIR)" "$(DESTDIR)$(BINDIR)" "$(DESTDIR)$(LIBDIR)/pkgconfig"
	$(INSTALL) -m 644 $(HEADERS) kernels_ptx.h "$(DESTDIR)$(INCLUDEDIR)"
	$(INSTALL) -m 755 $(PROGRAMS) "$(DESTDIR)$(BINDIR)"
	$(INSTALL) -m 644 $(B)/libqlora.a "$(DESTDIR)$(LIBDIR)"
	$(INSTALL) -m 644 $(B)/qlora.pc "$(DESTDIR)$(LIBDIR)/pkgconfig"

uninstall: ## remove what install copied
	rm -f $(addprefix "$(DESTDIR)$(INCLUDEDIR)"/,$(HEADERS) kernels_ptx.h) \
		$(addprefix "$(DESTDIR)$(BINDIR)"/,$(notdir $(PROGRAMS))) \
		"$(DESTDIR)$(LIBDIR)/libqlora.a" "$(DESTDIR)$(LIBDIR)/pkgconfig/qlora.pc"

clean: ## remove the build folder
	rm -rf $(B)

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

# ---- the headers: assembled from src/ and compared by content, not by time stamp ----

$(HEADERS): %.h: $(B)/amalgamate FORCE
	@$(B)/amalgamate src/$@ $@

$(B)/amalgamate: tools/amalgamate.c
	@mkdir -p $(@D)
	$(HOSTCC) $(OWN_CFLAGS) -o $@ $<

# ---- programs: each can be built by name (make build/NAME) ----

$(B)/tests: $(TESTS)
	$(CC) $(OWN_CFLAGS) $(CFLAGS) -o $@ $^ $(LIBS) $(TEST_LDLIBS)

$(B)/embed: tools/embed.c
	$(COMPILE) -o $@ $<

$(B)/ptx-tool: tools/embed.c kernels_ptx.h
	$(COMPILE) -DEMBED_TABLE='"kernels_ptx.h"' -o $@ $<

# Programs and examples include the implementation, so that each compiles with a single command;
# here they are linked with the objects instead.
$(PROGRAMS): $(B)/%: programs/%.c $(LIBRARY)
$(EXAMPLES): $(B)/%: examples/%.c $(LIBRARY)
$(PROGRAMS) $(EXAMPLES):
	$(COMPILE) -DQLORA_IMPLEMENTATION_DONE -DQLORA_TEXT_IMPLEMENTATION_DONE -o $@ $< $(LIBRARY) $(LIBS)

$(B)/bench: tests/bench/bench.c $(LIBRARY)
	$(COMPILE) -o $@ $< $(LIBRARY) $(LIBS)

$(B)/tiles $(B)/step_parts: $(B)/%: tests/bench/%.c | $(HEADERS)
	$(COMPILE) -o $@ $< $(LIBS)

$(B)/soak_kill: tests/gates/soak_kill.c $(B)/obj/qlora.o
	$(COMPILE) -o $@ $< $(B)/obj/qlora.o $(LIBS)

$(B)/golden $(B)/adapter_dump $(B)/outputs $(B)/logprobs $(B)/peft_side $(B)/parquet_rows \
		$(B)/adamw8_side $(B)/dpo_side $(B)/template_side: $(B)/%: tests/golden/%.c | $(HEADERS)
	$(COMPILE) -o $@ $< $(LIBS)

$(B)/ptx_test: tests/fakecuda/ptx_test.c $(B)/obj/fakecuda/ptx.o
	$(COMPILE) $(FAKE_FLAGS) -o $@ $^ -lm

# One program for all targets of a header, which would take most of the time for each of them. It
# runs the target whose name it is called by.
$(LIBRARY_FUZZERS): $(B)/fuzzers
$(TEXT_FUZZERS): $(B)/text_fuzzers
$(FUZZERS):
	ln -sf $(<F) $@

$(B)/fuzzers: tests/fuzz/library.c | $(HEADERS)
$(B)/text_fuzzers: tests/fuzz/text_library.c | $(HEADERS)
$(B)/fuzzers $(B)/text_fuzzers: CC := $(CLANG)
$(B)/fuzzers $(B)/text_fuzzers:
	$(COMPILE) -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -o $@ $< $(LIBS)

# Each implementation has its own translation unit, as the manual recommends.
$(B)/obj/qlora.c: Makefile
	@mkdir -p $(@D) && printf '#define QLORA_IMPLEMENTATION\n#include "qlora.h"\n' > $@

$(B)/obj/qlora_text.c: Makefile
	@mkdir -p $(@D) && printf '#define QLORA_TEXT_IMPLEMENTATION\n#include "qlora_text.h"\n' > $@

$(LIBRARY): $(B)/obj/%.o: $(B)/obj/%.c | $(HEADERS)
	$(COMPILE) -c -o $@ $<

# Suites have to be correct, not fast: only those that compute references are optimised. The library
# does with -O1, which takes half the time of -O2 (programs have that, and the gates run them), and
# without the positions of optimised variables, which take a tenth and change no instruction.
$(TESTS): TEST_CFLAGS = -O0
$(TESTS): INCLUDES += $(TEST_INCLUDES)
$(patsubst %,$(B)/obj/unit/%.o,ops attention gemm linear nf4): TEST_CFLAGS = -O1
# Suites in the same unit have no optimisation, for which checked library functions are not meant.
$(patsubst %,$(B)/obj/internal/%.o,library text_library double): TEST_CFLAGS = \
	-O1 -fno-var-tracking -U_FORTIFY_SOURCE
# Those of which a gate runs nothing.
QUICK =
$(patsubst %,$(B)/obj/internal/%.o,$(QUICK)): TEST_CFLAGS += -O0
$(B)/obj/fakecuda/cuda.o: TEST_CFLAGS = -O1
$(B)/obj/fakecuda/cublas.o: TEST_CFLAGS = $(FAKE_NATIVE)
$(B)/obj/fakecuda/ptx.o: TEST_CFLAGS = -O3 -fno-var-tracking $(FAKE_NATIVE)
# The programs' own code waits for the library's; only tokenize writes every number itself.
$(PROGRAMS): private OPTIMIZE = -O0
$(B)/tokenize: private OPTIMIZE = -O1

$(B)/obj/%.o: tests/%.c Makefile | $(HEADERS)
	$(COMPILE) -c -o $@ $<

# ---- the library as a file of its own ----

$(B)/libqlora.a: $(LIBRARY)
	rm -f $@
	$(AR) rcs $@ $^

# The ABI is not stable before 1.0, so the soname is the full version. Only public names leave it.
$(B)/libqlora.so: $(B)/libqlora.so.$(VERSION)
	ln -sf $(<F) $@

$(B)/libqlora.so.$(VERSION): $(LIBRARY:$(B)/obj/%=$(B)/obj/pic/%) Makefile
	printf '{ global: qlora_*; local: *; };\n' > $(B)/obj/pic/exports
	$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=$(B)/obj/pic/exports $(CFLAGS) -o $@ \
		$(filter %.o,$^) $(LIBS)

$(B)/obj/pic/%.o: $(B)/obj/%.c | $(HEADERS)
	$(COMPILE) -fPIC -c -o $@ $<

# The folders are the caller's, so it is made each time.
$(B)/qlora.pc: qlora.pc.in FORCE
	@mkdir -p $(@D)
	@sed -e 's|@prefix@|$(PREFIX)|' -e 's|@includedir@|$(INCLUDEDIR)|' \
		-e 's|@libdir@|$(LIBDIR)|' -e 's|@version@|$(VERSION)|' -e 's|@libs@|$(OWN_LDLIBS)|' $< > $@

# ---- the fake driver: its parts once, for each variant only variant.c ----

$(FAKE_PARTS) $(addprefix $(B)/obj/fakecuda/,cublas.o cublaslt.o nccl.o mpi.o): $(B)/obj/%.o: \
		tests/%.c Makefile
	$(COMPILE) $(FAKE_FLAGS) -c -o $@ $<

$(B)/fake/libcuda.so.1: tests/fakecuda/variant.c $(FAKE_PARTS) Makefile
	$(FAKE) -o $@ $< $(FAKE_PARTS) -lm -lpthread

$(B)/fake-stub/libcuda.so.1: tests/fakecuda/variant.c $(FAKE_PARTS) Makefile
	$(FAKE) -DFAKE_STUB -o $@ $< $(FAKE_PARTS) -lm -lpthread

# Libraries without some symbols, like older versions.
$(B)/fake-omit/libcuda.so.1: tests/fakecuda/variant.c $(FAKE_PARTS) Makefile
	@mkdir -p $(@D)
	printf '{ local: cuGraphInstantiateWithFlags; cuStreamBeginCapture_v2; };\n' > $@.map
	$(FAKE) -DFAKE_OMIT='"cuGraphInstantiateWithFlags", "cuStreamBeginCapture_v2"' \
		-Wl,--version-script=$@.map -o $@ $< $(FAKE_PARTS) -lm -lpthread

$(B)/fake/libcublas.so.13: $(B)/obj/fakecuda/cublas.o
$(B)/fake/libcublasLt.so.13: $(B)/obj/fakecuda/cublaslt.o
$(B)/fake/libnccl.so.2: $(B)/obj/fakecuda/nccl.o
$(B)/fake/libfakempi.so: $(B)/obj/fakecuda/mpi.o
$(addprefix $(B)/fake/,libcublas.so.13 libcublasLt.so.13 libnccl.so.2 libfakempi.so):
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -shared -Wl,-soname,$(@F) $(LDFLAGS) -o $@ $< -lm -lpthread

$(B)/fake-omit/libcublas.so.13: $(B)/obj/fakecuda/cublas.o
	@mkdir -p $(@D)
	printf '{ local: cublasGemmStridedBatchedEx; };\n' > $@.map
	$(CC) $(CFLAGS) -shared -Wl,-soname,$(@F) -Wl,--version-script=$@.map $(LDFLAGS) -o $@ $< \
		-lm -lpthread

# ---- PTX: build/ptx/MODULE.sm_NN.ptx ----

vpath %.cu $(sort $(dir $(KERNELS)))
define PTX_RULE
$(B)/ptx/%.sm_$(1).ptx: %.cu $(KERNEL_PARTS)
	@mkdir -p $$(@D)
	$$(NVCC) -std=c++14 -arch=compute_$(1) -ptx -o $$@ $$<
endef
$(foreach target,75 80 90 90a,$(eval $(call PTX_RULE,$(target))))

-include $(wildcard $(B)/*.d $(B)/obj/*.d $(B)/obj/*/*.d $(B)/fake*/*.d)
