// tests_from_here.h - included between an implementation and the suites that follow it in the same
// translation unit: they have to be correct, not fast. The implementation keeps the flags of the
// command line.
#if defined(__clang__)
#pragma clang optimize off
#elif defined(__GNUC__)
#pragma GCC optimize("O0")
#endif
