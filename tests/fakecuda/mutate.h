// mutate.h - injects a bug into a kernel: edits the PTX of a module before it is parsed.
#ifndef FAKE_MUTATE_H
#define FAKE_MUTATE_H

// The environment variable FAKECUDA_MUTATE has four lines: the entry point, which match to edit (1
// is the first, 0 is all), a statement of PTX with * as a wildcard, and its replacement. In the
// last, a star inserts what the corresponding wildcard matched, ~ leaves it out, and ^ inserts what
// the first one matched. Returns the edited text (freed by the caller), or NULL if nothing was
// edited; edits are reported on stderr.
char* mutate_text(const char* ptx);

#endif
