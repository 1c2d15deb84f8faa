# GNU make. `make`, `make test` and `make demo` need a C compiler and nothing else; `make help` lists
# the rest. Your CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS, PREFIX, DESTDIR are respected.

ifeq ($(origin CC),default) # `CC ?=` would never apply: make presets CC
CC := cc
endif
NVCC ?= nvcc
PTXAS ?= ptxas
CLANG ?= clang
PREFIX ?= /usr/local
INCLUDEDIR ?= $(PREFIX)/include
INSTALL ?= install
FUZZ_SECONDS ?= 60

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-align \
	-Wvla -Wstrict-prototypes -Wmissing-prototypes
OWN_CFLAGS := -std=c99 -O2 -g $(WARNINGS)
OWN_CPPFLAGS := -I. -Itests
OWN_LDLIBS := -lm
ifneq ($(OS),Windows_NT)
OWN_LDLIBS += -lpthread
ifeq ($(shell uname -s),Linux)
OWN_LDLIBS += -ldl
endif
endif
COMPILE = $(CC) $(OWN_CPPFLAGS) $(CPPFLAGS) $(OWN_CFLAGS) $(CFLAGS)
LINK = $(CC) $(OWN_CFLAGS) $(CFLAGS) $(LDFLAGS)
# Fused multiply-add would round the interpreter's results differently from the device's.
FAKE = $(COMPILE) -ffp-contract=off -fPIC -shared

HEADERS := $(wildcard qlora.h kernels_ptx.h)
TEST_SOURCES := $(wildcard tests/test_*.c tests/internal_*.c)
TEST_OBJECTS := $(TEST_SOURCES:tests/%.c=build/obj/%.o) $(if $(wildcard qlora.h),build/obj/qlora.o)
EXAMPLES := $(patsubst examples/%.c,build/%,$(wildcard examples/*.c))
BENCHES := $(patsubst tests/%.c,build/%,$(wildcard tests/bench*.c))
FUZZERS := $(patsubst tests/%.c,build/%,$(wildcard tests/fuzz_*.c))
KERNELS := $(sort $(wildcard kernels/*.cu))
KERNEL_SOURCES := $(KERNELS) $(sort $(wildcard kernels/*.cuh))
FAKE_CUDA := $(sort $(filter-out tests/fakecuda/cublas%.c tests/fakecuda/main%.c, \
	$(wildcard tests/fakecuda/*.c)))
FAKE_CUBLAS := $(wildcard tests/fakecuda/cublas.c)
FAKES := $(if $(FAKE_CUDA),build/fake/libcuda.so.1) $(if $(FAKE_CUBLAS),build/fake/libcublas.so.13)

.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all test demo examples ptx ptx-texts ptx-report bench check mutants soak install uninstall \
	clean help

all: build/tests examples ## build the tests and the examples

test: build/tests $(FAKES) ## run the tests: CPU, fake GPU, and the real one where there is one
	@tests/run.sh

demo: examples ## build and run the first examples
	@found=0; for program in build/01_* build/02_* build/03_*; do \
		if test -f $$program -a -x $$program; then found=1; echo "== $$program"; $$program || exit 1; fi; \
	done; test $$found = 1 || echo "no examples yet"

examples: $(EXAMPLES) ## build every program of examples/

ptx: build/embed ## make kernels_ptx.h anew from kernels/*.cu (needs nvcc)
	@$(MAKE) --no-print-directory ptx-texts \
		PTX_TEXTS="$$(build/embed --texts $(KERNELS) | tr '\n' ' ')"

ptx-texts: $(PTX_TEXTS)
	build/embed --write build/kernels_ptx.h.new \
		--nvcc "$$($(NVCC) --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')" \
		$(KERNEL_SOURCES) $(PTX_TEXTS)
	mv build/kernels_ptx.h.new kernels_ptx.h

ptx-report: build/ptx-tool ## registers, shared memory and spills of every kernel (needs ptxas)
	@PTXAS="$(PTXAS)" tests/check.sh ptx-report

bench: $(BENCHES) ## measure the kernels on the GPU at hand
	@for program in $(BENCHES); do $$program || exit 1; done

check: ## every gate: warnings, style, symbols, sanitizers, PTX; names what it has to skip
	@CC="$(CC)" NVCC="$(NVCC)" PTXAS="$(PTXAS)" CLANG="$(CLANG)" MAKE="$(MAKE)" tests/check.sh

mutants: build/tests $(FAKES) ## plant known bugs in the shipped PTX; the tests must find each
	LD_LIBRARY_PATH=build/fake build/tests -v -s mutant

soak: build/tests $(FAKES) $(FUZZERS) ## the long work: fuzzers (FUZZ_SECONDS each) and kill tests
	@for program in $(FUZZERS); do echo "== $$program"; mkdir -p $$program.corpus; \
		$$program -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$$program. $$program.corpus \
		|| exit 1; done
	@if test -x tests/soak.sh; then tests/soak.sh; fi

install: ## copy the two headers to $(DESTDIR)$(INCLUDEDIR)
	$(INSTALL) -d $(DESTDIR)$(INCLUDEDIR)
	$(INSTALL) -m 644 qlora.h kernels_ptx.h $(DESTDIR)$(INCLUDEDIR)

uninstall: ## remove them again
	rm -f $(DESTDIR)$(INCLUDEDIR)/qlora.h $(DESTDIR)$(INCLUDEDIR)/kernels_ptx.h

clean: ## remove build/
	rm -rf build

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

# ---- programs: build/NAME can be made by that name ----

build/tests: $(TEST_OBJECTS)
	$(LINK) -o $@ $(TEST_OBJECTS) $(OWN_LDLIBS) $(LDLIBS)

build/embed: kernels/embed.c
	@mkdir -p $(@D)
	$(COMPILE) -o $@ $<

build/ptx-tool: kernels/embed.c kernels_ptx.h
	@mkdir -p $(@D)
	$(COMPILE) -DEMBED_TABLE='"kernels_ptx.h"' -o $@ $<

$(EXAMPLES): build/%: examples/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(COMPILE) -o $@ $< $(LDFLAGS) $(OWN_LDLIBS) $(LDLIBS)

$(BENCHES): build/%: tests/%.c build/obj/qlora.o $(HEADERS)
	@mkdir -p $(@D)
	$(COMPILE) -o $@ $< build/obj/qlora.o $(LDFLAGS) $(OWN_LDLIBS) $(LDLIBS)

$(FUZZERS): build/%: tests/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CLANG) $(OWN_CPPFLAGS) -std=c99 -O1 -g -fsanitize=fuzzer,address,undefined -o $@ $< $(OWN_LDLIBS)

# The implementation in a unit of its own, as users are told to have it.
build/obj/qlora.o: $(HEADERS) Makefile
	@mkdir -p $(@D)
	printf '#define QLORA_IMPLEMENTATION\n#include "qlora.h"\n' > build/obj/qlora.c
	$(COMPILE) -c -o $@ build/obj/qlora.c

build/obj/%.o: tests/%.c $(HEADERS) $(wildcard tests/*.h tests/fakecuda/*.h) Makefile
	@mkdir -p $(@D)
	$(COMPILE) -c -o $@ $<

build/fake/libcuda.so.1: $(FAKE_CUDA) $(wildcard tests/fakecuda/*.h) Makefile
	@mkdir -p $(@D)
	$(FAKE) -Wl,-soname,libcuda.so.1 -o $@ $(FAKE_CUDA) -lm -lpthread

build/fake/libcublas.so.13: $(FAKE_CUBLAS) $(wildcard tests/fakecuda/*.h) Makefile
	@mkdir -p $(@D)
	$(FAKE) -Wl,-soname,libcublas.so.13 -o $@ $(FAKE_CUBLAS) -lm -lpthread

# ---- PTX: build/ptx/MODULE.sm_NN.ptx ----

define PTX_RULE
build/ptx/%.sm_$(1).ptx: kernels/%.cu $(wildcard kernels/*.cuh)
	@mkdir -p $$(@D)
	$$(NVCC) -std=c++14 -arch=compute_$(1) -ptx -o $$@ $$<
endef
$(foreach target,75 80 90a,$(eval $(call PTX_RULE,$(target))))
