#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <span>
#include <stdexcept>

namespace train {
namespace {

// Sets an option from the text that follows it.
using Setter = std::function<void(const std::string&)>;

struct Option {
  std::string name;
  std::string placeholder;  // empty: a flag, without a value
  std::string words;
  Setter set;
};

template <typename Number>
Setter whole_number(Number& value, int64_t least) {
  return [&value, least](const std::string& text) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    constexpr int64_t kLargest = 1'000'000;
    if (error != std::errc() || end != text.data() + text.size() || number < least ||
        number > kLargest) {
      throw std::invalid_argument("must be a whole number from " + std::to_string(least) + " to " +
                                  std::to_string(kLargest) + ", got \"" + text + "\"");
    }
    value = static_cast<Number>(number);
  };
}

Setter number(double& value) {
  return [&value](const std::string& text) {
    char* end = nullptr;
    value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= 0.0 && value <= 1e6)) {
      throw std::invalid_argument("must be a number from 0 to 1e6, got \"" + text + "\"");
    }
  };
}

std::string list_of(std::span<const std::string_view> names, const std::string& separator) {
  std::string list;
  for (const std::string_view name : names)
    list += (list.empty() ? "" : separator) + std::string(name);
  return list;
}

size_t index_of(const std::string& text, std::span<const std::string_view> names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    throw std::invalid_argument("must be one of " + list_of(names, ", ") + "; got \"" + text +
                                "\"");
  }
  return static_cast<size_t>(found - names.begin());
}

// An enum whose values are numbered in the order of their names.
template <typename Enum, size_t N>
Option choice(const std::string& name, Enum& value, const std::array<std::string_view, N>& names,
              const std::string& words) {
  return {name, list_of(names, "|"), words, [&value, &names](const std::string& text) {
            value = static_cast<Enum>(index_of(text, names));
          }};
}

constexpr std::array<std::string_view, 2> kTokensNames = {"sharded", "replicated"};

std::vector<Option> list_options(CommandOptions& options) {
  TrainConfig& training = options.training;
  crossdock::MeshShape& mesh = training.mesh;
  return {
      {"--world", "N", "ranks; default: as few as the mesh needs, or as were started",
       whole_number(mesh.world, 1)},
      {"--tp", "N", "tensor parallel: ranks that share the tokens of a sequence (default 1)",
       whole_number(mesh.tp, 1)},
      {"--cp", "N", "context parallel: the same, cut zigzag (default 1)", whole_number(mesh.cp, 1)},
      {"--ep", "N", "expert parallel: ranks among which the experts are divided (default all)",
       whole_number(mesh.ep, 1)},
      {"--etp", "N", "ranks that share each expert (default 1)", whole_number(mesh.etp, 1)},
      {"--steps", "N", "number of steps (default 20)", whole_number(training.steps, 1)},
      {"--dtype", "fp64|fp32", "of all values (default fp64)",
       [&training](const std::string& text) { training.dtype = crossdock::parse_dtype(text); }},
      {"--strategy", "NAME", "auto, allgather, alltoall, direct or hierarchical (default auto)",
       [&training](const std::string& text) { training.model.strategy = text; }},
      choice("--communicator", options.communicator, kCommunicatorNames,
             "how ranks communicate (default threads)"),
      {"--ranks-per-node", "N", "ranks per simulated node",
       whole_number(options.ranks_per_node, 1)},
      choice("--layout", training.tokens.layout, kLayoutNames,
             "how sequences are arranged in memory (default packed)"),
      {"--align", "N", "pad sequences to a multiple of N (default 1)",
       whole_number(training.tokens.alignment, 1)},
      choice("--tokens", training.tokens.replicated, kTokensNames,
             "whether tp ranks have a shard of the tokens each, or all of them (default sharded)"),
      {"--sequences", "N", "sequences per step (default 6)",
       whole_number(training.text.num_sequences, 1)},
      {"--idle-experts", "N", "the router never chooses the last N of 6 experts (default 0)",
       whole_number(training.model.idle_experts, 0)},
      {"--seed", "N", "of the text (default 1)", whole_number(training.text.seed, 0)},
      {"--learning-rate", "X", "of SGD (default 0.5)", number(training.learning_rate)},
      {"--momentum", "X", "of SGD (default 0)", number(training.momentum)},
      choice("--mistake", training.mistake, kMistakeNames,
             "makes a common mistake on purpose, for --check to find"),
      {"--check", "", "trains on one rank, too, and fails if losses or gradients differ",
       [&options](const std::string&) { options.check = true; }},
      {"--help", "", "prints this text", [&options](const std::string&) { options.help = true; }}};
}

// As few ranks as both grids need, if the ranks are threads and their number was not given.
void fill_in_world(CommandOptions& options) {
  crossdock::MeshShape& mesh = options.training.mesh;
  if (mesh.world > 0 || options.communicator != CommunicatorKind::kThreads) return;
  const auto size = [](int64_t value) { return std::max<int64_t>(1, value); };
  mesh.world = std::lcm(size(mesh.tp) * size(mesh.cp), size(mesh.etp) * size(mesh.ep));
}

void check_together(const CommandOptions& options) {
  const ModelConfig& model = options.training.model;
  if (model.idle_experts > model.E - model.K) {
    throw std::invalid_argument(
        "--idle-experts must be at most " + std::to_string(model.E - model.K) + ", so that " +
        std::to_string(model.K) + " of " + std::to_string(model.E) +
        " experts remain for each token; got " + std::to_string(model.idle_experts));
  }
  const bool is_untold = options.training.mistake == Mistake::kUntoldReplicas ||
                         options.training.mistake == Mistake::kAllowedReplicas;
  if (is_untold && !options.training.tokens.replicated) {
    throw std::invalid_argument("this mistake needs --tokens replicated");
  }
}

}  // namespace

CommandOptions parse_options(const std::vector<std::string>& arguments) {
  CommandOptions options;
  const std::vector<Option> known = list_options(options);
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    const auto option = std::find_if(known.begin(), known.end(),
                                     [&](const Option& o) { return o.name == *argument; });
    if (option == known.end()) {
      throw std::invalid_argument("unknown option " + *argument + "; see --help");
    }
    std::string value;
    if (!option->placeholder.empty()) {
      if (++argument == arguments.end()) {
        throw std::invalid_argument(option->name + " needs a value: " + option->placeholder);
      }
      value = *argument;
    }
    try {
      option->set(value);
    } catch (const std::exception& error) {
      throw std::invalid_argument(option->name + ": " + error.what());
    }
  }
  check_together(options);
  fill_in_world(options);
  return options;
}

std::string help_text() {
  CommandOptions options;
  std::string text = "Trains a small MoE language model on a mesh of ranks.\n\n";
  for (const Option& option : list_options(options)) {
    text += "  " + option.name + " " + option.placeholder + "\n        " + option.words + "\n";
  }
  return text;
}

}  // namespace train
