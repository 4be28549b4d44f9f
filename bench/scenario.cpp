#include "bench/scenario.hpp"

#include <algorithm>

#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

std::vector<Scenario> make_scenarios() {
  std::vector<Scenario> list = {
      {.name = "cpu-large",
       .purpose = "plan, dispatch and combine of large rows: memory traffic decides",
       .tokens = 4096,
       .width = 2048,
       .top_k = 8,
       .experts = 64,
       .is_default = true},
      {.name = "anchor-mpi-pack",
       .purpose = "cpu-large by pack, MPI_Alltoallv, regroup: what one writes in an hour",
       .tokens = 4096,
       .width = 2048,
       .top_k = 8,
       .experts = 64,
       .only_strategy = std::string(kAnchorName)},
      {.name = "cpu-medium",
       .purpose = "fewer tokens and routes, a width that is no power of two",
       .tokens = 2048,
       .width = 2880,
       .top_k = 4,
       .experts = 32,
       .is_default = true},
      {.name = "cpu-many-ranks",
       .purpose = "8 ranks, 128 experts",
       .ranks = 8,
       .tokens = 2048,
       .width = 2048,
       .top_k = 8,
       .experts = 128},
      {.name = "cpu-bf16",
       .purpose = "cpu-large in bf16: half the bytes, sums in fp32",
       .tokens = 4096,
       .width = 2048,
       .top_k = 8,
       .experts = 64,
       .dtype = DType::kBF16},
      {.name = "backward",
       .purpose = "cpu-medium with combine_backward and dispatch_backward",
       .tokens = 2048,
       .width = 2880,
       .top_k = 4,
       .experts = 32,
       .backward = true},
      {.name = "decode",
       .purpose = "a few tokens per rank: latency decides",
       .tokens = 16,
       .width = 2048,
       .top_k = 8,
       .experts = 64,
       .is_default = true},
      {.name = "experts-gemm",
       .purpose = "Experts at 256 rows each beside plain BLAS calls on the same products",
       .kind = ScenarioKind::kExperts,
       .ranks = 1,
       .tokens = 2048,
       .width = 2048,
       .top_k = 1,
       .experts = 8,
       .inner = 768,
       .is_default = true},
      {.name = "layer",
       .purpose = "a whole layer, forward and backward, router and experts included",
       .kind = ScenarioKind::kLayer,
       .tokens = 512,
       .width = 1024,
       .top_k = 8,
       .experts = 64,
       .inner = 384,
       .is_default = true},
      {.name = "layer-overlap",
       .purpose = "layer with dispatch in 4 chunks, experts at work meanwhile",
       .kind = ScenarioKind::kLayer,
       .tokens = 512,
       .width = 1024,
       .top_k = 8,
       .experts = 64,
       .inner = 384,
       .overlap_chunks = 4},
  };
  for (const Scenario& s : {Scenario{.name = "h200-deepseek",
                           .purpose = "DeepSeek-V3's layer on 8 ranks",
                           .ranks = 8,
                           .tokens = 4096,
                           .width = 7168,
                           .top_k = 8,
                           .experts = 256},
                            Scenario{.name = "h200-qwen3",
                            .purpose = "Qwen3-30B-A3B's layer on 8 ranks",
                            .ranks = 8,
                            .tokens = 8192,
                            .width = 2048,
                            .top_k = 8,
                            .experts = 128},
                            Scenario{.name = "h200-gptoss",
                            .purpose = "gpt-oss-20b's layer on 4 ranks",
                            .ranks = 4,
                            .tokens = 4096,
                            .width = 2880,
                            .top_k = 4,
                            .experts = 32,
                            .max_sms = 32},
                            Scenario{.name = "h200-decode",
                            .purpose = "128 tokens of DeepSeek-V3's layer on 8 ranks",
                            .ranks = 8,
                            .tokens = 128,
                            .width = 7168,
                            .top_k = 8,
                            .experts = 256}}) {
    list.push_back(s);
    list.back().purpose += ", all on one GPU";
    list.back().kind = ScenarioKind::kCudaMove;
    list.back().dtype = DType::kBF16;
    list.back().backward = true;
  }
  const Scenario narrow{.tokens = 16384, .width = 256, .top_k = 8, .experts = 64};
  for (const int64_t T : {4096, 16384, 65536}) {
    Scenario s = narrow;
    s.name = "scale-t" + std::to_string(T);
    s.purpose = "narrow rows: cost over the number of tokens";
    s.tokens = T;
    list.push_back(s);
  }
  for (const int P : {1, 2, 8, 16}) {
    Scenario s = narrow;
    s.name = "scale-p" + std::to_string(P);
    s.purpose = "narrow rows: cost over the number of ranks, 65536 tokens in all";
    s.ranks = P;
    s.tokens = 65536 / P;
    list.push_back(s);
  }
  for (const int64_t E : {16, 256, 1024}) {
    Scenario s = narrow;
    s.name = "scale-e" + std::to_string(E);
    s.purpose = "narrow rows: cost over the number of experts";
    s.experts = E;
    list.push_back(s);
  }
  return list;
}

bool fits(std::string_view pattern, std::string_view name) {
  if (pattern.ends_with('*')) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return pattern == name;
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> kAll = make_scenarios();
  return kAll;
}

std::vector<Scenario> find_scenarios(const std::vector<std::string>& names) {
  const std::vector<Scenario>& all = scenarios();
  for (const std::string& name : names) {
    if (std::ranges::any_of(all, [&](const Scenario& s) { return fits(name, s.name); })) continue;
    std::vector<std::string> known(all.size());
    std::ranges::transform(all, known.begin(), &Scenario::name);
    throw_unknown_name("scenario", name, known);
  }
  std::vector<Scenario> found;
  for (const Scenario& s : all) {
    const bool is_named =
        std::ranges::any_of(names, [&](const std::string& name) { return fits(name, s.name); });
    if (names.empty() ? s.is_default : is_named) found.push_back(s);
  }
  return found;
}

void throw_unknown_name(std::string_view what, std::string_view name,
                        const std::vector<std::string>& known) {
  std::string message(what);
  message.append(" must be one of ");
  for (size_t i = 0; i < known.size(); ++i) message.append(i == 0 ? "" : ", ").append(known[i]);
  message.append("; got \"").append(name).append("\"");
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace crossdock::bench
