// What the experts' tiles, activation and threads leave of a BLAS library's plain speed: the same
// products once through Experts, once as plain sgemm calls with as many threads, in turn, in one
// run. Prints a table, and as the last line "ratio <library time / our time>" over all.
//
//   expert_products [experts=8] [rows=256] [width=2048] [inner=768]

#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/crossdock.hpp"

namespace {

using crossdock::Experts;

constexpr int kRepeats = 9;

struct Sizes {
  int64_t E, R, D, F;  // R rows for each expert
};

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<float> values(int64_t count) {
  std::vector<float> result(static_cast<size_t>(count));
  uint32_t state = 12345;
  for (float& value : result) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(state >> 8) * 0x1p-24F - 0.5F;
  }
  return result;
}

struct Problem {
  explicit Problem(const Sizes& size_in)
      : size(size_in),
        x(values(size.E * size.R * size.D)),
        w1(values(size.E * 2 * size.F * size.D)),
        w2(values(size.E * size.D * size.F)),
        g(values(size.E * size.R * size.D)),
        y(x.size()),
        h(static_cast<size_t>(size.E * size.R * 2 * size.F)),
        grad_w1(w1.size()),
        grad_w2(w2.size()) {
    for (int64_t e = 0; e <= size.E; ++e) starts.push_back(e * size.R);
    counts.assign(static_cast<size_t>(size.E), size.R);
  }

  crossdock::Segments segments() const { return {starts.data(), counts.data(), size.E, {}}; }
  crossdock::ExpertWeights weights() const {
    return {
        {w1.data(), {size.E, 2 * size.F, size.D}}, {w2.data(), {size.E, size.D, size.F}}, {}, {}};
  }

  Sizes size;
  std::vector<float> x, w1, w2, g, y, h, grad_w1, grad_w2;
  std::vector<int64_t> starts, counts;
};

// C [M, N] = A B for all experts; A is [M, K] or, transposed, [K, M]; B likewise.
void multiply_all(Problem& p, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::array<int64_t, 3> mnk,
                  std::array<float*, 3> abc) {
  const auto [M, N, K] = mnk;
  for (int64_t e = 0; e < p.size.E; ++e) {
    cblas_sgemm(
        CblasRowMajor, ta, tb, static_cast<int>(M), static_cast<int>(N), static_cast<int>(K), 1.0F,
        abc[0] + e * M * K, static_cast<int>(ta == CblasTrans ? M : K), abc[1] + e * N * K,
        static_cast<int>(tb == CblasTrans ? K : N), 0.0F, abc[2] + e * M * N, static_cast<int>(N));
  }
}

struct Step {
  const char* name;
  std::function<void()> ours;
  std::function<void()> library;
};

std::vector<Step> make_steps(Problem& p, const Experts& experts, crossdock::ExpertsSaved& saved) {
  const int64_t E = p.size.E;
  const int64_t R = p.size.R;
  const int64_t D = p.size.D;
  const int64_t F = p.size.F;
  const crossdock::Shape rows{E * R, D};
  const int64_t hidden = 2 * F;
  return {{"forward",
           [&, rows] {
             saved = experts.forward({.weights = p.weights(),
                                      .rows = {p.x.data(), rows},
                                      .segments = p.segments(),
                                      .row_weights = {},
                                      .y = {p.y.data(), rows}});
           },
           [&, R, D, F, hidden] {
             multiply_all(p, CblasNoTrans, CblasTrans, {R, hidden, D},
                          {p.x.data(), p.w1.data(), p.h.data()});
             multiply_all(p, CblasNoTrans, CblasTrans, {R, D, F},
                          {p.h.data(), p.w2.data(), p.y.data()});
           }},
          {"dX",
           [&, rows] {
             experts.backward_dx({.weights = p.weights(),
                                  .rows = {p.x.data(), rows},
                                  .segments = p.segments(),
                                  .row_weights = {},
                                  .grad_y = {p.g.data(), rows},
                                  .saved = &saved,
                                  .grad_rows = {p.y.data(), rows},
                                  .grad_row_weights = {}});
           },
           [&, R, D, F, hidden] {
             multiply_all(p, CblasNoTrans, CblasNoTrans, {R, F, D},
                          {p.g.data(), p.w2.data(), p.h.data()});
             multiply_all(p, CblasNoTrans, CblasNoTrans, {R, D, hidden},
                          {p.h.data(), p.w1.data(), p.y.data()});
           }},
          {"dW",
           [&, rows, E, D, F, hidden] {
             experts.backward_dw(
                 {.rows = {p.x.data(), rows},
                  .segments = p.segments(),
                  .row_weights = {},
                  .grad_y = {p.g.data(), rows},
                  .saved = &saved,
                  .grads = {
                      {p.grad_w1.data(), {E, hidden, D}}, {p.grad_w2.data(), {E, D, F}}, {}, {}}});
           },
           [&, R, D, F, hidden] {
             multiply_all(p, CblasTrans, CblasNoTrans, {hidden, D, R},
                          {p.h.data(), p.x.data(), p.grad_w1.data()});
             multiply_all(p, CblasTrans, CblasNoTrans, {D, F, R},
                          {p.g.data(), p.h.data(), p.grad_w2.data()});
           }}};
}

// Old versions take a new processor for an older one; give the library its best kernels.
void choose_best_blas_kernels(char** argv) {
  const std::string_view core = openblas_get_corename();
  const bool is_old = core == "Haswell" || core == "Prescott" || core == "Zen";
  if (!is_old || !__builtin_cpu_supports("avx512f")) return;
  if (setenv("OPENBLAS_CORETYPE", "SkylakeX", 0) == 0) execv("/proc/self/exe", argv);
}

}  // namespace

int main(int argc, char** argv) {
  choose_best_blas_kernels(argv);
  const auto argument = [&](int i, int64_t otherwise) {
    return argc > i ? std::strtoll(argv[i], nullptr, 10) : otherwise;
  };
  Problem problem({argument(1, 8), argument(2, 256), argument(3, 2048), argument(4, 768)});
  const auto [E, R, D, F] = problem.size;
  const auto pool = crossdock::ThreadPool::process_wide();
  openblas_set_num_threads(pool->num_threads());
  std::printf("E %ld, %ld rows each, D %ld, F %ld; %d threads; library OpenBLAS %s\n", E, R, D, F,
              pool->num_threads(), openblas_get_corename());
  const Experts experts({.num_local_experts = E, .width = D, .inner = F}, pool);
  crossdock::ExpertsSaved saved;
  const std::vector<Step> steps = make_steps(problem, experts, saved);
  std::vector<std::vector<double>> ours(steps.size());
  std::vector<std::vector<double>> library(steps.size());
  for (int repeat = -1; repeat < kRepeats; ++repeat) {  // the first is a warm-up
    for (size_t i = 0; i < steps.size(); ++i) {
      const double a = seconds(steps[i].ours);
      const double b = seconds(steps[i].library);
      if (repeat < 0) continue;
      ours[i].push_back(a);
      library[i].push_back(b);
    }
  }
  const double flops = 6.0 * static_cast<double>(E * R * D * F);
  double total_ours = 0.0;
  double total_library = 0.0;
  std::printf("%-8s %12s %12s %12s %12s %8s\n", "step", "ours ms", "GFLOP/s", "library ms",
              "GFLOP/s", "ratio");
  for (size_t i = 0; i < steps.size(); ++i) {
    std::sort(ours[i].begin(), ours[i].end());
    std::sort(library[i].begin(), library[i].end());
    const double a = ours[i][kRepeats / 2];
    const double b = library[i][kRepeats / 2];
    total_ours += a;
    total_library += b;
    std::printf("%-8s %12.2f %12.1f %12.2f %12.1f %8.2f\n", steps[i].name, a * 1e3, flops / a / 1e9,
                b * 1e3, flops / b / 1e9, b / a);
  }
  std::printf("ratio %.2f\n", total_library / total_ours);
  return 0;
}
