#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace train {

struct TextOptions {
  uint64_t seed = 1;
  int64_t num_sequences = 6;  // per step, some of them empty
  int64_t max_length = 20;    // of a sequence, in bytes
  /// Every short_every-th step has a single sequence of 3 bytes, so that most ranks have no tokens
  /// in it; 0: no such steps.
  int64_t short_every = 4;
};

/// The sequences of one step, of different lengths: letters that mostly follow a rule, which a
/// model can learn. Depends on the arguments alone, so that every rank knows the whole batch.
std::vector<std::string> make_sequences(const TextOptions& options, int64_t step);

}  // namespace train
