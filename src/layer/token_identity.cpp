#include "layer/token_identity.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/refusal.hpp"
#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "router/backend.hpp"
#include "router/choice.hpp"

namespace crossdock {
namespace {

constexpr int64_t kSampledTokens = 16;
constexpr int64_t kSampledBytes = 512;  // of each
constexpr int64_t kFewestCompared = 8;  // fewer tokens may be equal by chance

bool is_used(const LocalTokens& tokens, int64_t t) {
  return !tokens.mask.given() || !pointer<bool>(tokens.mask)[t];
}

int64_t count_used(const LocalTokens& tokens) {
  const int64_t T = tokens.x.num_rows();
  if (!tokens.mask.given()) return T;
  return std::count(pointer<bool>(tokens.mask), pointer<bool>(tokens.mask) + T, false);
}

// A few of `count` used tokens, spread evenly from the first to the last.
std::vector<int64_t> choose_tokens(const LocalTokens& tokens, int64_t count) {
  std::vector<int64_t> numbers;  // among the used tokens, ascending
  const int64_t num_chosen = std::min(count, kSampledTokens);
  for (int64_t i = 0; i < num_chosen; ++i) {
    numbers.push_back(num_chosen == 1 ? 0 : i * (count - 1) / (num_chosen - 1));
  }
  if (!tokens.mask.given()) return numbers;
  std::vector<int64_t> chosen;
  int64_t number = 0;
  for (int64_t t = 0; chosen.size() < numbers.size(); ++t) {
    if (is_used(tokens, t) && number++ == numbers[chosen.size()]) chosen.push_back(t);
  }
  return chosen;
}

uint64_t hash_bytes(uint64_t hash, const std::byte* bytes, int64_t num_bytes) {
  constexpr int64_t kWord = sizeof(uint64_t);
  for (int64_t i = 0; i < num_bytes; i += kWord) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, static_cast<size_t>(std::min(kWord, num_bytes - i)));
    hash = router::mix(hash ^ word);
  }
  return hash;
}

// Number and place of the tokens, as the start of a hash.
uint64_t hash_of_sizes(const LocalTokens& tokens, int64_t count) {
  return router::mix(static_cast<uint64_t>(count) ^
                     router::mix(static_cast<uint64_t>(tokens.first)));
}

// The first two ranks with equal nonzero values.
std::optional<std::pair<size_t, size_t>> find_equal(std::span<const uint64_t> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return values[a] != values[b] ? values[a] < values[b] : a < b;
  });
  std::optional<std::pair<size_t, size_t>> first;
  for (size_t i = 1; i < order.size(); ++i) {
    const std::pair<size_t, size_t> pair{order[i - 1], order[i]};
    if (values[pair.first] == 0 || values[pair.first] != values[pair.second]) continue;
    if (!first || pair < *first) first = pair;
  }
  return first;
}

}  // namespace

uint64_t sample_tokens(const LocalTokens& tokens) {
  const int64_t count = count_used(tokens);
  if (count == 0) return 0;
  const int64_t row_bytes = tokens.x.row_bytes();
  uint64_t hash = hash_of_sizes(tokens, count);
  for (const int64_t t : choose_tokens(tokens, count)) {
    hash = hash_bytes(hash, pointer<std::byte>(tokens.x) + t * row_bytes,
                      std::min(row_bytes, kSampledBytes));
  }
  return std::max<uint64_t>(hash, 1);
}

uint64_t sample_to_compare(const LocalTokens& tokens) {
  return count_used(tokens) < kFewestCompared ? 0 : sample_tokens(tokens);
}

uint64_t hash_tokens(const LocalTokens& tokens) {
  const int64_t count = count_used(tokens);
  if (count == 0) return 0;
  const int64_t row_bytes = tokens.x.row_bytes();
  uint64_t hash = hash_of_sizes(tokens, count);
  for (int64_t t = 0; t < tokens.x.num_rows(); ++t) {
    if (!is_used(tokens, t)) continue;
    hash = hash_bytes(hash, pointer<std::byte>(tokens.x) + t * row_bytes, row_bytes);
  }
  return std::max<uint64_t>(hash, 1);
}

void refuse_equal_tokens(Group& group, std::span<const uint64_t> samples,
                         const LocalTokens& tokens) {
  if (!find_equal(samples)) return;
  uint64_t own = 0;
  const std::optional<Error> refusal = refusal_of([&] {
    if (samples[static_cast<size_t>(group.rank())] != 0) own = hash_tokens(tokens);
  });
  const Agreement agreement = group.agree(
      {.operation = "compare_tokens", .body = body_of(own), .refusal = as_refusal(refusal)});
  const auto equal = find_equal(items_of<uint64_t>(agreement));
  CROSSDOCK_CHECK(!equal, "tokens must be different on every rank, but those of ranks ",
                  equal->first, " and ", equal->second,
                  " are bit-identical and would count twice in the gradients; set "
                  "replicated_over to the group that they are replicated over, or "
                  "allow_equal_tokens if they are meant to be tokens of their own");
}

namespace {

std::vector<std::byte> read(const ConstTensorView& tensor, Stream stream) {
  std::vector<std::byte> bytes(tensor.given() ? static_cast<size_t>(tensor.num_bytes()) : 0);
  if (!bytes.empty()) router::read_device(tensor, bytes, stream);
  return bytes;
}

}  // namespace

HostTokens::HostTokens(const LocalTokens& on_gpu, Stream stream)
    : x_(read(on_gpu.x, stream)), mask_(read(on_gpu.mask, stream)), tokens_(on_gpu) {
  tokens_.x = {x_.data(), on_gpu.x.dtype, on_gpu.x.shape};
  if (on_gpu.mask.given()) tokens_.mask = {mask_.data(), on_gpu.mask.dtype, on_gpu.mask.shape};
}

}  // namespace crossdock
