#include "bench/plain_blas.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace crossdock::bench {
namespace {

// Constants of the C interface of BLAS.
constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
constexpr int kTranspose = 112;

void* open_library() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
#endif
  for (const char* name : {"libopenblas.so.0", "libopenblas.so"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<PlainBlas> PlainBlas::load(int num_threads) {
  static void* const kLibrary = open_library();  // never closed, since its threads keep running
  if (kLibrary == nullptr) return nullptr;
  const auto sgemm = reinterpret_cast<Sgemm>(dlsym(kLibrary, "cblas_sgemm"));
  const auto set_threads =
      reinterpret_cast<void (*)(int)>(dlsym(kLibrary, "openblas_set_num_threads"));
  if (sgemm == nullptr || set_threads == nullptr) return nullptr;
  set_threads(num_threads);
  return std::unique_ptr<PlainBlas>(new PlainBlas(sgemm));
}

void PlainBlas::multiply(const PlainProduct& p) const {
  const auto M = static_cast<int>(p.M);
  const auto N = static_cast<int>(p.N);
  const auto K = static_cast<int>(p.K);
  sgemm_(kRowMajor, p.transpose_a ? kTranspose : kNoTranspose,
         p.transpose_b ? kTranspose : kNoTranspose, M, N, K, 1.0f, p.a, p.transpose_a ? M : K, p.b,
         p.transpose_b ? K : N, 0.0f, p.c, N);
}

}  // namespace crossdock::bench
