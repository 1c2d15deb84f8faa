# GNU make. `make`, `make test` and `make demo` need a C compiler and nothing else; `make help`
# lists the rest. Your CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS, PREFIX, DESTDIR are respected.

ifeq ($(origin CC),default) # `CC ?=` would never apply: make presets CC
CC := cc
endif
CLANG ?= clang
NVCC ?= nvcc
PTXAS ?= ptxas
INSTALL ?= install
PREFIX ?= /usr/local
INCLUDEDIR ?= $(PREFIX)/include
FUZZ_SECONDS ?= 600
B ?= build# another folder for another compiler or sanitizer

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-align \
	-Wvla -Wstrict-prototypes -Wmissing-prototypes
OWN_CFLAGS := -std=c99 -O2 -g $(WARNINGS)
OWN_LDLIBS := -lm
ifneq ($(OS),Windows_NT)
OWN_LDLIBS += -lpthread $(if $(filter Linux,$(shell uname -s)),-ldl)
endif
# DEV=1 compiles the parts in src/ themselves, so that errors and debuggers show the true file and
# line; without it, the assembled headers are compiled, as users do.
INCLUDES := $(if $(DEV),-Isrc) -I. -Itests
define COMPILE
@mkdir -p $(@D)
$(CC) $(INCLUDES) $(CPPFLAGS) $(OWN_CFLAGS) $(CFLAGS) -MMD -MP -MF $@.d
endef
# Fused multiply-add would round the interpreter's results differently from the device's.
FAKE_FLAGS := -ffp-contract=off -fPIC
FAKE = $(COMPILE) $(FAKE_FLAGS) -shared -Wl,-soname,$(@F) $(LDFLAGS)
LIBS = $(LDFLAGS) $(OWN_LDLIBS) $(LDLIBS)

HEADERS := qlora.h qlora_text.h
LIBRARY := $(B)/obj/qlora.o $(B)/obj/qlora_text.o
TESTS := $(patsubst tests/%.c,$(B)/obj/%.o,$(wildcard tests/unit/*.c) tests/internal/library.c \
	tests/internal/double.c)
PROGRAMS := $(patsubst programs/%.c,$(B)/%,$(wildcard programs/*.c))
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
BENCHES := $(B)/bench
FUZZERS := $(patsubst tests/fuzz/%.c,$(B)/fuzz_%,$(wildcard tests/fuzz/*.c))
KERNELS := $(sort $(wildcard kernels/*.cu))
FAKE_PARTS := $(patsubst tests/%.c,$(B)/obj/%.o,\
	$(filter-out %/cublas.c %/cuda.c %/ptx_test.c,$(wildcard tests/fakecuda/*.c)))
FAKES := $(addprefix $(B)/,$(addsuffix /libcuda.so.1,fake fake-stub fake-omit) \
	$(addsuffix /libcublas.so.13,fake fake-omit))

.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all test demo programs examples headers where ptx ptx-header ptx-report bench check \
	mutants soak install uninstall clean help FORCE

all: $(B)/tests $(FAKES) programs examples ## build the tests, the programs and the examples

test: $(B)/tests $(FAKES) ## run the tests: CPU, fake GPU, and a real GPU if there is one
	@B=$(B) tests/run.sh

demo: $(B)/finetune ## train a small generated model for a minute and print text before and after
	@$(B)/finetune --demo --out $(B)/demo

programs: $(PROGRAMS) ## build finetune, generate, merge, plan and tokenize

examples: $(PROGRAMS) $(EXAMPLES) ## build the programs and everything in examples/

headers: $(HEADERS) ## assemble qlora.h and qlora_text.h from src/

where: $(B)/amalgamate ## LINE=n [HEADER=qlora_text.h]: which part a line comes from
	@$(B)/amalgamate --where $(LINE) src/$(or $(HEADER),qlora.h)

ptx: $(B)/embed ## regenerate kernels_ptx.h from kernels/*.cu (needs nvcc)
	@$(MAKE) --no-print-directory ptx-header OUT=kernels_ptx.h \
		TEXTS="$$($(B)/embed --texts $(B)/ptx $(KERNELS) | tr '\n' ' ')"

ptx-header: $(TEXTS)
	$(B)/embed --write $(B)/kernels_ptx.h.new \
		--nvcc "$$($(NVCC) --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')" \
		$(KERNELS) $(sort $(wildcard kernels/*.cuh)) $(TEXTS)
	mv $(B)/kernels_ptx.h.new $(OUT)

ptx-report: $(B)/ptx-tool ## registers, shared memory and spills of every kernel (needs ptxas)
	@B=$(B) PTXAS="$(PTXAS)" tools/ptx_report.sh

bench: $(BENCHES) ## measure the kernels on the available GPU
	@for program in $(BENCHES); do $$program || exit 1; done

check: ## run every gate (warnings, style, layers, sanitizers, PTX, ...) and name those skipped
	@MAKE="$(MAKE)" CLANG="$(CLANG)" NVCC="$(NVCC)" PTXAS="$(PTXAS)" tests/gates/check.sh

mutants: $(B)/tests $(FAKES) ## inject known bugs into the shipped PTX; the tests must find each
	LD_LIBRARY_PATH=$(B)/fake $(B)/tests -v -s mutant

soak: $(B)/tests $(FAKES) $(FUZZERS) ## the long runs: fuzzers (FUZZ_SECONDS each), kills, gates
	@for program in $(FUZZERS); do echo "== $$program"; mkdir -p $$program.corpus; \
		$$program -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$$program. $$program.corpus \
		|| exit 1; done
	@for script in $(wildcard tests/gates/soak*.sh) tests/gates/gates.sh; do echo "== $$script"; \
		B=$(B) $$script || exit 1; done

install: ## copy the headers to DESTDIR, INCLUDEDIR
	$(INSTALL) -d "$(DESTDIR)$(INCLUDEDIR)"
	$(INSTALL) -m 644 qlora.h qlora_text.h kernels_ptx.h "$(DESTDIR)$(INCLUDEDIR)"

uninstall: ## remove them again
	rm -f $(addprefix "$(DESTDIR)$(INCLUDEDIR)"/,qlora.h qlora_text.h kernels_ptx.h)

clean: ## remove the build folder
	rm -rf $(B)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

# ---- the headers: assembled from src/, judged by content and never by time stamps ----

$(HEADERS): %.h: $(B)/amalgamate FORCE
	@$(B)/amalgamate src/$@ $@

$(B)/amalgamate: tools/amalgamate.c
	$(COMPILE) -o $@ $<

# ---- programs: build/NAME can be made by that name ----

$(B)/tests: $(TESTS)
	$(CC) $(OWN_CFLAGS) $(CFLAGS) -o $@ $^ $(LIBS)

$(B)/embed: tools/embed.c
	$(COMPILE) -o $@ $<

$(B)/ptx-tool: tools/embed.c kernels_ptx.h
	$(COMPILE) -DEMBED_TABLE='"kernels_ptx.h"' -o $@ $<

# Programs and examples contain the implementation, so that one command compiles each of them; here
# the objects are linked instead.
$(PROGRAMS): $(B)/%: programs/%.c $(LIBRARY)
$(EXAMPLES): $(B)/%: examples/%.c $(LIBRARY)
$(PROGRAMS) $(EXAMPLES):
	$(COMPILE) -DQLORA_IMPLEMENTATION_DONE -DQLORA_TEXT_IMPLEMENTATION_DONE -o $@ $< $(LIBRARY) $(LIBS)

$(B)/bench: tests/bench/bench.c $(B)/obj/qlora.o
	$(COMPILE) -o $@ $< $(B)/obj/qlora.o $(LIBS)

$(B)/soak_kill: tests/gates/soak_kill.c $(B)/obj/qlora.o
	$(COMPILE) -o $@ $< $(B)/obj/qlora.o $(LIBS)

$(B)/golden $(B)/adapter_dump $(B)/outputs: $(B)/%: tests/golden/%.c | $(HEADERS)
	$(COMPILE) -o $@ $< $(LIBS)

$(B)/ptx_test: tests/fakecuda/ptx_test.c $(B)/obj/fakecuda/ptx.o
	$(COMPILE) $(FAKE_FLAGS) -o $@ $^ -lm

$(FUZZERS): CC := $(CLANG)
$(FUZZERS): $(B)/fuzz_%: tests/fuzz/%.c | $(HEADERS)
	$(COMPILE) -O1 -fsanitize=fuzzer,address,undefined -o $@ $< $(LIBS)

# Each implementation in a unit of its own, as users are told to have it.
$(B)/obj/qlora.o: Makefile | $(HEADERS)
	@mkdir -p $(@D) && printf '#define QLORA_IMPLEMENTATION\n#include "qlora.h"\n' > $(@:.o=.c)
	$(COMPILE) -c -o $@ $(@:.o=.c)

$(B)/obj/qlora_text.o: Makefile | $(HEADERS)
	@mkdir -p $(@D) && printf '#define QLORA_TEXT_IMPLEMENTATION\n#include "qlora_text.h"\n' \
		> $(@:.o=.c)
	$(COMPILE) -c -o $@ $(@:.o=.c)

$(B)/obj/%.o: tests/%.c Makefile | $(HEADERS)
	$(COMPILE) -c -o $@ $<

# ---- the fake driver: its parts once, cuda.c once per variant ----

$(FAKE_PARTS): $(B)/obj/%.o: tests/%.c Makefile
	$(COMPILE) $(FAKE_FLAGS) -c -o $@ $<

$(B)/fake/libcuda.so.1: tests/fakecuda/cuda.c $(FAKE_PARTS) Makefile
	$(FAKE) -o $@ $< $(FAKE_PARTS) -lm -lpthread

$(B)/fake-stub/libcuda.so.1: tests/fakecuda/cuda.c $(FAKE_PARTS) Makefile
	$(FAKE) -DFAKE_STUB -o $@ $< $(FAKE_PARTS) -lm -lpthread

# Libraries that lack a symbol, as older ones do.
$(B)/fake-omit/libcuda.so.1: tests/fakecuda/cuda.c $(FAKE_PARTS) Makefile
	$(FAKE) -DFAKE_OMIT_cuGraphInstantiateWithFlags -DFAKE_OMIT_cuStreamBeginCapture_v2 \
		-o $@ $< $(FAKE_PARTS) -lm -lpthread

$(B)/fake/libcublas.so.13: tests/fakecuda/cublas.c Makefile
	$(FAKE) -o $@ $< -lm -lpthread

$(B)/fake-omit/libcublas.so.13: tests/fakecuda/cublas.c Makefile
	$(FAKE) -DFAKE_OMIT_cublasGemmStridedBatchedEx -o $@ $< -lm -lpthread

# ---- PTX: build/ptx/MODULE.sm_NN.ptx ----

define PTX_RULE
$(B)/ptx/%.sm_$(1).ptx: kernels/%.cu $(wildcard kernels/*.cuh)
	@mkdir -p $$(@D)
	$$(NVCC) -std=c++14 -arch=compute_$(1) -ptx -o $$@ $$<
endef
$(foreach target,75 80 90a,$(eval $(call PTX_RULE,$(target))))

-include $(wildcard $(B)/*.d $(B)/obj/*.d $(B)/obj/*/*.d $(B)/fake*/*.d)
