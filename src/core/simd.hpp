#pragma once

/// Marks a function that is compiled once per instruction set; the best one for the CPU is chosen
/// when the program is loaded. The bits must not depend on the choice: write std::fma explicitly,
/// and let nothing depend on the vector width. With sanitizers, which do not support this, and with
/// other compilers or CPUs, the function is compiled once.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__CUDACC__)
#define CROSSDOCK_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CROSSDOCK_SIMD
#endif

/// For templates called by such a function: they are inlined into each version.
#define CROSSDOCK_INLINE inline __attribute__((always_inline))
