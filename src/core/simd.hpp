#pragma once

/// Marks a function that is compiled once per instruction set; the best one the CPU has is chosen
/// when the program is loaded. The bits must not depend on the choice: write std::fma where it is
/// meant, and let nothing depend on the width of a vector. Sanitizers cannot be combined with the
/// load-time choice, and other compilers or CPUs take the plain function.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__CUDACC__)
#define CROSSDOCK_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CROSSDOCK_SIMD
#endif

/// For the body of such a function when it is a template: becomes part of each version.
#define CROSSDOCK_INLINE inline __attribute__((always_inline))
