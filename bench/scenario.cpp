#include "bench/scenario.hpp"

#include <algorithm>
#include <deque>
#include <utility>

#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

struct Size {
  int ranks;        // P
  int64_t tokens;   // T, per rank
  int64_t width;    // D
  int64_t top_k;    // K
  int64_t experts;  // E
};

constexpr Size kLarge{4, 4096, 2048, 8, 64};
constexpr Size kMedium{4, 2048, 2880, 4, 32};
constexpr Size kNarrow{4, 16384, 256, 8, 64};
constexpr Size kDeepSeek{8, 4096, 7168, 8, 256};

class ScenarioList {
 public:
  /// Returns the new scenario, so that the caller can set the rest.
  Scenario& add(std::string name, std::string purpose, const Size& size) {
    return list_.emplace_back(Scenario{.name = std::move(name),
                                       .purpose = std::move(purpose),
                                       .ranks = size.ranks,
                                       .tokens = size.tokens,
                                       .width = size.width,
                                       .top_k = size.top_k,
                                       .experts = size.experts});
  }
  std::vector<Scenario> take() { return {list_.begin(), list_.end()}; }

 private:
  std::deque<Scenario> list_;  // a deque, because its elements never move
};

void add_moves(ScenarioList& list) {
  list.add("cpu-large", "large rows, limited by memory traffic", kLarge).is_default = true;
  list.add("anchor-mpi-pack", "cpu-large without this library: pack, MPI_Alltoallv, regroup",
           kLarge)
      .only_strategy = kAnchorName;
  list.add("cpu-medium", "fewer tokens and routes, width not a power of two", kMedium).is_default =
      true;
  list.add("cpu-many-ranks", "8 ranks, 128 experts", {8, 2048, 2048, 8, 128});
  list.add("cpu-bf16", "cpu-large in bf16: half the bytes, sums in fp32", kLarge).dtype =
      DType::kBF16;
  list.add("backward", "cpu-medium with combine_backward and dispatch_backward", kMedium).backward =
      true;
  list.add("decode", "a few tokens per rank, limited by latency", {4, 16, 2048, 8, 64}).is_default =
      true;
}

void add_experts_and_layers(ScenarioList& list) {
  Scenario& experts =
      list.add("experts-gemm", "experts with 256 rows each, compared with plain BLAS calls",
               {1, 2048, 2048, 1, 8});
  experts.kind = ScenarioKind::kExperts;
  experts.inner = 768;
  experts.is_default = true;
  const Size small{4, 512, 1024, 8, 64};
  Scenario& layer = list.add("layer", "a whole layer, forward and backward", small);
  layer.is_default = true;
  Scenario& overlap =
      list.add("layer-overlap", "layer with dispatch in 4 chunks, overlapped with experts", small);
  overlap.overlap_chunks = 4;
  for (Scenario* each : {&layer, &overlap}) {
    each->kind = ScenarioKind::kLayer;
    each->inner = 384;
  }
}

void add_agree(ScenarioList& list) {
  Scenario& agree = list.add("agree", "Group::agree with an empty body, which begins every call",
                             {8, 0, 0, 0, 0});
  agree.kind = ScenarioKind::kAgree;
}

void add_gpu_moves(ScenarioList& list) {
  const auto add = [&](const char* name, const std::string& layer, const Size& size) -> Scenario& {
    Scenario& s = list.add(name, layer + ", all on one GPU", size);
    s.kind = ScenarioKind::kCudaMove;
    s.dtype = DType::kBF16;
    s.backward = true;
    return s;
  };
  add("h200-deepseek", "DeepSeek-V3's layer on 8 ranks", kDeepSeek);
  add("h200-qwen3", "Qwen3-30B-A3B's layer on 8 ranks", {8, 8192, 2048, 8, 128});
  add("h200-gptoss", "gpt-oss-20b's layer on 4 ranks", {4, 4096, 2880, 4, 32}).max_sms = 32;
  add("h200-decode", "128 tokens of DeepSeek-V3's layer on 8 ranks", {8, 128, 7168, 8, 256});
}

// With the sizes of cpu-large and h200-deepseek where the user gives none.
void add_custom(ScenarioList& list) {
  list.add("custom", "your own sizes (--tokens, --width, ...)", kLarge);
  Scenario& on_gpu = list.add("custom-cuda", "the same, all on one GPU", kDeepSeek);
  on_gpu.kind = ScenarioKind::kCudaMove;
  on_gpu.dtype = DType::kBF16;
  on_gpu.backward = true;
}

void add_gpu_layers(ScenarioList& list) {
  struct Model {
    std::string name;
    std::string words;
    Size layer;
    int64_t inner;
    int64_t product_experts;  // those of one rank of several
  };
  const auto add = [&](const std::string& name, const std::string& purpose, ScenarioKind kind,
                       const Model& model) -> Scenario& {
    Scenario& s = list.add(name, purpose, model.layer);
    s.kind = kind;
    s.dtype = DType::kBF16;
    s.inner = model.inner;
    return s;
  };
  const std::vector<Model> models = {
      {"deepseek", "DeepSeek-V3's", {1, 4096, 7168, 8, 32}, 2048, 32},
      {"qwen3", "Qwen3-30B-A3B's", {1, 8192, 2048, 8, 128}, 768, 16},
      {"gptoss", "gpt-oss-20b's", {1, 4096, 2880, 4, 32}, 2880, 8}};
  for (const Model& model : models) {
    add("layer-" + model.name, model.words + " layer on one GPU, forward and backward",
        ScenarioKind::kCudaLayer, model);
  }
  for (const Model& model : models) {
    add("layer-overlap-" + model.name,
        "the same with the dispatch in chunks beside the experts, on a share of the SMs",
        ScenarioKind::kCudaOverlap, model)
        .overlap_chunks = 4;
  }
  for (Model model : models) {
    model.layer.experts = model.product_experts;
    add("grouped-" + model.name, "products of " + model.words + " experts on a GPU",
        ScenarioKind::kCudaProducts, model);
    add("grouped-" + model.name + "-skewed", "the same, with uneven loads and two empty experts",
        ScenarioKind::kCudaProducts, model)
        .skewed = true;
  }
}

void add_quantise(ScenarioList& list) {
  const auto add = [&](const char* name, const std::string& bytes, int64_t T, int64_t D) {
    Scenario& s =
        list.add(name, "rows to fp8 and back on a GPU, " + bytes + " in bf16", {1, T, D, 1, 1});
    s.kind = ScenarioKind::kCudaQuantise;
    s.dtype = DType::kBF16;
  };
  add("quantise-8mb", "8 MB", 560, 7168);
  add("quantise-64mb", "64 MB", 4480, 7168);
  add("quantise-512mb", "512 MB", 35840, 7168);
  add("quantise-2gb", "2 GB", 143360, 7168);
  add("quantise-ragged", "512 MB of rows with a short last group,", 89600, 2880);
}

void add_scales(ScenarioList& list) {
  for (const int64_t T : {4096, 16384, 65536}) {
    Size size = kNarrow;
    size.tokens = T;
    list.add("scale-t" + std::to_string(T), "narrow rows, number of tokens varies", size);
  }
  for (const int P : {1, 2, 8, 16}) {
    Size size = kNarrow;
    size.ranks = P;
    size.tokens = 65536 / P;
    list.add("scale-p" + std::to_string(P),
             "narrow rows, number of ranks varies, 65536 tokens in total", size);
  }
  for (const int64_t E : {16, 256, 1024}) {
    Size size = kNarrow;
    size.experts = E;
    list.add("scale-e" + std::to_string(E), "narrow rows, number of experts varies", size);
  }
}

std::vector<Scenario> make_scenarios() {
  ScenarioList list;
  add_moves(list);
  add_experts_and_layers(list);
  add_agree(list);
  add_gpu_moves(list);
  add_gpu_layers(list);
  add_quantise(list);
  add_scales(list);
  add_custom(list);
  return list.take();
}

bool matches(std::string_view pattern, std::string_view name) {
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
    if (std::ranges::any_of(all, [&](const Scenario& s) { return matches(name, s.name); }))
      continue;
    std::vector<std::string> known(all.size());
    std::ranges::transform(all, known.begin(), &Scenario::name);
    throw_unknown_name("scenario", name, known);
  }
  std::vector<Scenario> found;
  for (const Scenario& s : all) {
    const bool is_named =
        std::ranges::any_of(names, [&](const std::string& name) { return matches(name, s.name); });
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
