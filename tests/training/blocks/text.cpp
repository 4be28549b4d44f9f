#include "text.hpp"

#include <random>

namespace train {
namespace {

constexpr uint64_t kLetters = 12;

int64_t draw(std::mt19937_64& generator, int64_t end) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(end));
}

// The rule: the letter after `letter` depends on its position, too.
uint64_t successor(uint64_t letter, int64_t position) {
  return (position % 2 == 0 ? 5 * letter + 3 : 7 * letter + 1) % kLetters;
}

std::string make_sequence(std::mt19937_64& generator, int64_t length) {
  std::string text;
  uint64_t letter = generator() % kLetters;
  for (int64_t position = 0; position < length; ++position) {
    text.push_back(static_cast<char>('a' + letter));
    const bool follows_rule = generator() % 8 != 0;
    letter = follows_rule ? successor(letter, position) : generator() % kLetters;
  }
  return text;
}

}  // namespace

std::vector<std::string> make_sequences(const TextOptions& options, int64_t step) {
  std::mt19937_64 generator(options.seed * 1'000'003 + static_cast<uint64_t>(step));
  const bool is_short = options.short_every > 0 && step % options.short_every == 2;
  if (is_short) return {make_sequence(generator, 3)};
  std::vector<std::string> sequences;
  for (int64_t s = 0; s < options.num_sequences; ++s) {
    const bool is_empty = s > 0 && generator() % 8 == 0;
    const int64_t length = is_empty ? 0 : 2 + draw(generator, options.max_length - 1);
    sequences.push_back(make_sequence(generator, length));
  }
  return sequences;
}

}  // namespace train
