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
define COMPILE
@mkdir -p $(@D)
$(CC) -I. -Itests $(CPPFLAGS) $(OWN_CFLAGS) $(CFLAGS) -MMD -MP -MF $@.d
endef
# Fused multiply-add would round the interpreter's results differently from the device's.
FAKE = $(COMPILE) -ffp-contract=off -fPIC -shared -Wl,-soname,$(@F) $(LDFLAGS)
LIBS = $(LDFLAGS) $(OWN_LDLIBS) $(LDLIBS)

TESTS := $(patsubst tests/%.c,$(B)/obj/%.o,$(wildcard tests/test_*.c tests/internal_*.c))
TESTS += $(if $(wildcard qlora.h),$(B)/obj/qlora.o)
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
BENCHES := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/bench*.c))
FUZZERS := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/fuzz_*.c))
KERNELS := $(sort $(wildcard kernels/*.cu))
FAKE_CUDA := $(sort $(filter-out tests/fakecuda/cublas.c,$(wildcard tests/fakecuda/*.c)))
FAKE_CUBLAS := $(wildcard tests/fakecuda/cublas.c)
FAKES := $(if $(FAKE_CUDA),$(addprefix $(B)/,$(addsuffix /libcuda.so.1,fake fake-stub fake-omit))) \
	$(if $(FAKE_CUBLAS),$(addprefix $(B)/,$(addsuffix /libcublas.so.13,fake fake-omit)))

.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all test demo examples ptx ptx-header ptx-report bench check mutants soak install \
	uninstall clean help

all: $(B)/tests $(FAKES) examples ## build the tests and the examples

test: $(B)/tests $(FAKES) ## run the tests: CPU, fake GPU, and the real one where there is one
	@B=$(B) tests/run.sh

demo: $(B)/finetune ## one minute: train a small model made on the spot, show text before and after
	@$(B)/finetune --demo --out $(B)/demo

examples: $(EXAMPLES) ## build every program of examples/

ptx: $(B)/embed ## make kernels_ptx.h anew from kernels/*.cu (needs nvcc)
	@$(MAKE) --no-print-directory ptx-header OUT=kernels_ptx.h \
		TEXTS="$$($(B)/embed --texts $(B)/ptx $(KERNELS) | tr '\n' ' ')"

ptx-header: $(TEXTS)
	$(B)/embed --write $(B)/kernels_ptx.h.new \
		--nvcc "$$($(NVCC) --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')" \
		$(KERNELS) $(sort $(wildcard kernels/*.cuh)) $(TEXTS)
	mv $(B)/kernels_ptx.h.new $(OUT)

ptx-report: $(B)/ptx-tool ## registers, shared memory and spills of every kernel (needs ptxas)
	@B=$(B) PTXAS="$(PTXAS)" tests/ptx_report.sh

bench: $(BENCHES) ## measure the kernels on the GPU at hand
	@for program in $(BENCHES); do $$program || exit 1; done

check: ## every gate: warnings, style, symbols, sanitizers, PTX; names what it has to skip
	@MAKE="$(MAKE)" CLANG="$(CLANG)" NVCC="$(NVCC)" PTXAS="$(PTXAS)" tests/check.sh

mutants: $(B)/tests $(FAKES) ## plant known bugs in the shipped PTX; the tests must find each
	LD_LIBRARY_PATH=$(B)/fake $(B)/tests -v -s mutant

soak: $(B)/tests $(FAKES) $(FUZZERS) ## the long work: fuzzers (FUZZ_SECONDS each), kills, gates
	@for program in $(FUZZERS); do echo "== $$program"; mkdir -p $$program.corpus; \
		$$program -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$$program. $$program.corpus \
		|| exit 1; done
	@for script in $(wildcard tests/soak*.sh) tests/gates.sh; do echo "== $$script"; \
		B=$(B) $$script || exit 1; done

install: ## copy the two headers to DESTDIR, INCLUDEDIR
	$(INSTALL) -d "$(DESTDIR)$(INCLUDEDIR)"
	$(INSTALL) -m 644 qlora.h kernels_ptx.h "$(DESTDIR)$(INCLUDEDIR)"

uninstall: ## remove them again
	rm -f "$(DESTDIR)$(INCLUDEDIR)/qlora.h" "$(DESTDIR)$(INCLUDEDIR)/kernels_ptx.h"

clean: ## remove what was built
	rm -rf $(B)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

# ---- programs: build/NAME can be made by that name ----

$(B)/tests: $(TESTS)
	$(CC) $(OWN_CFLAGS) $(CFLAGS) -o $@ $^ $(LIBS)

$(B)/embed: kernels/embed.c
	$(COMPILE) -o $@ $<

$(B)/ptx-tool: kernels/embed.c kernels_ptx.h
	$(COMPILE) -DEMBED_TABLE='"kernels_ptx.h"' -o $@ $<

$(EXAMPLES): $(B)/%: examples/%.c
	$(COMPILE) -o $@ $< $(LIBS)

$(BENCHES): $(B)/%: tests/%.c $(B)/obj/qlora.o
	$(COMPILE) -o $@ $< $(B)/obj/qlora.o $(LIBS)

$(B)/golden: tests/golden.c
	$(COMPILE) -o $@ $< $(LIBS)

$(B)/soak_kill: tests/soak_kill.c $(B)/obj/qlora.o
	$(COMPILE) -o $@ $< $(B)/obj/qlora.o $(LIBS)

$(B)/adapter_dump: tests/adapter_dump.c
	$(COMPILE) -o $@ $< $(LIBS)

$(FUZZERS): CC := $(CLANG)
$(FUZZERS): $(B)/%: tests/%.c
	$(COMPILE) -O1 -fsanitize=fuzzer,address,undefined -o $@ $< $(LIBS)

# The implementation in a unit of its own, as users are told to have it.
$(B)/obj/qlora.o: Makefile qlora.h
	@mkdir -p $(@D) && printf '#define QLORA_IMPLEMENTATION\n#include "qlora.h"\n' > $(@:.o=.c)
	$(COMPILE) -c -o $@ $(@:.o=.c)

$(B)/obj/%.o: tests/%.c Makefile
	$(COMPILE) -c -o $@ $<

$(B)/fake/libcuda.so.1: $(FAKE_CUDA) Makefile
	$(FAKE) -o $@ $(FAKE_CUDA) -lm -lpthread

$(B)/fake-stub/libcuda.so.1: $(FAKE_CUDA) Makefile
	$(FAKE) -DFAKE_STUB -o $@ $(FAKE_CUDA) -lm -lpthread

# Libraries that lack a symbol, as older ones do.
$(B)/fake-omit/libcuda.so.1: $(FAKE_CUDA) Makefile
	$(FAKE) -DFAKE_OMIT_cuGraphInstantiateWithFlags -DFAKE_OMIT_cuStreamBeginCapture_v2 \
		-o $@ $(FAKE_CUDA) -lm -lpthread

$(B)/fake/libcublas.so.13: $(FAKE_CUBLAS) Makefile
	$(FAKE) -o $@ $(FAKE_CUBLAS) -lm -lpthread

$(B)/fake-omit/libcublas.so.13: $(FAKE_CUBLAS) Makefile
	$(FAKE) -DFAKE_OMIT_cublasGemmStridedBatchedEx -o $@ $(FAKE_CUBLAS) -lm -lpthread

# ---- PTX: build/ptx/MODULE.sm_NN.ptx ----

define PTX_RULE
$(B)/ptx/%.sm_$(1).ptx: kernels/%.cu $(wildcard kernels/*.cuh)
	@mkdir -p $$(@D)
	$$(NVCC) -std=c++14 -arch=compute_$(1) -ptx -o $$@ $$<
endef
$(foreach target,75 80 90a,$(eval $(call PTX_RULE,$(target))))

-include $(wildcard $(B)/*.d $(B)/obj/*.d $(B)/fake*/*.d)
