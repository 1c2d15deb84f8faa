// How a thread computes in floating point: rounding, numbers below the smallest normal one, traps.
// All calls and all threads of the library have the default, so that results do not depend on which
// thread computes what.
#ifdef _WIN32
typedef unsigned int qlora__floating;
#else
typedef fenv_t qlora__floating;
#endif

// Sets the default and keeps what was set before.
static void qlora__floating_default(qlora__floating* before) {
#ifdef _WIN32
    *before = _controlfp(0, 0);
    (void)_controlfp(_RC_NEAR | _DN_SAVE | _MCW_EM, _MCW_RC | _MCW_DN | _MCW_EM);
#else
    (void)fegetenv(before);
    (void)fesetenv(FE_DFL_ENV);
#endif
}

static void qlora__floating_restore(const qlora__floating* before) {
#ifdef _WIN32
    (void)_clearfp(); // a trap that is allowed again must not see what happened before
    (void)_controlfp(*before, _MCW_RC | _MCW_DN | _MCW_EM);
#else
    (void)fesetenv(before);
#endif
}
