// suites.h - every suite, in the order in which they run. X(name) stands for SUITE(name) in a test file.
#define TEST_SUITES(X) X(harness_suite)
