// mutate.h - plants a bug in a kernel: edits the PTX of a module before it is read.
#ifndef FAKE_MUTATE_H
#define FAKE_MUTATE_H

// FAKECUDA_MUTATE in the environment has four lines: the entry point, which match (1 is the first,
// 0 all), a line of PTX with * for anything, and what to write instead, * for the same things in
// the same order. Returns the edited text (the caller frees it), or NULL when nothing was edited;
// an edit is said on stderr.
char* mutate_text(const char* ptx);

#endif
