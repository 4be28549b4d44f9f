// The ranks that each gradient must still be summed over, and which rank counts it in the norm.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/hash.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/mesh.hpp"

namespace crossdock {
namespace {

constexpr const char* kSum = "sum_gradients";
constexpr const char* kNorm = "global_grad_norm";

struct List {
  const char* name;
  std::span<const TensorView> MeshGradients::*tensors;
  MeshAxis summed_over;
  MeshAxis held_by;  // the ranks that hold the same parameters
};

constexpr std::array kLists = {
    List{"experts", &MeshGradients::experts, MeshAxis::kEdp, MeshAxis::kEdp},
    List{"experts_replicated", &MeshGradients::experts_replicated, MeshAxis::kEdp,
         MeshAxis::kEtpEdp},
    List{"dense", &MeshGradients::dense, MeshAxis::kTpCpDp, MeshAxis::kTpCpDp},
    List{"replicated", &MeshGradients::replicated, MeshAxis::kCpDp, MeshAxis::kTpCpDp},
    List{"tensor_parallel", &MeshGradients::tensor_parallel, MeshAxis::kCpDp, MeshAxis::kCpDp},
};

// A summary of one rank's tensors in a list, for the other ranks.
struct Digest {
  int64_t num_tensors = 0;
  int64_t num_elements = 0;
  uint64_t hash = 0;  // of dtypes and shapes

  friend bool operator==(const Digest&, const Digest&) = default;
};
using Digests = std::array<Digest, kLists.size()>;

void check_gradients(const MeshGradients& gradients) {
  std::vector<std::string> names;
  std::vector<ConstTensorView> tensors;
  for (const List& list : kLists) {
    const std::span<const TensorView> own = gradients.*list.tensors;
    for (size_t i = 0; i < own.size(); ++i) {
      names.push_back(concat(list.name, "[", i, "]"));
      tensors.push_back(own[i]);
      CROSSDOCK_CHECK(own[i].given(), names.back(), " must be given, got nothing");
      CROSSDOCK_CHECK(is_summable(own[i].dtype), names.back(),
                      " must be fp64, fp32, bf16 or fp16, got ", name_of(own[i].dtype));
      check_memory(names.back(), own[i]);
    }
  }
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < names.size(); ++i) named.push_back({names[i], tensors[i]});
  check_apart(std::move(named));
}

Digests digests_of(const MeshGradients& gradients) {
  Digests digests;
  for (size_t l = 0; l < kLists.size(); ++l) {
    std::string text;
    for (const TensorView& tensor : gradients.*kLists[l].tensors) {
      ++digests[l].num_tensors;
      digests[l].num_elements += tensor.num_elements();
      text += describe(tensor) + ";";
    }
    digests[l].hash = hash_bytes(text);
  }
  return digests;
}

std::string text_of(const Digest& digest) {
  return concat(digest.num_tensors, digest.num_tensors == 1 ? " tensor with " : " tensors with ",
                digest.num_elements, " elements");
}

// The lists of all ranks, [P]. All ranks see the same lists and find the same error.
class AllDigests {
 public:
  AllDigests(const MeshLayout& layout, const Agreement& agreement)
      : layout_(layout), all_(items_of<Digests>(agreement)) {}

  const Digest& of(int rank, size_t list) const { return all_[static_cast<size_t>(rank)][list]; }

  bool is_empty(size_t list) const {
    return std::all_of(all_.begin(), all_.end(),
                       [&](const Digests& rank) { return rank[list].num_tensors == 0; });
  }

  /// The lowest rank whose list differs from that of the first rank of its group.
  std::optional<Error> mismatch(uint64_t sequence) const {
    for (size_t l = 0; l < kLists.size(); ++l) {
      for (int rank = 0; rank < layout_.num_ranks() && !is_empty(l); ++rank) {
        const int first = layout_.members(kLists[l].summed_over, rank).front();
        if (of(rank, l) == of(first, l)) continue;
        return Error(ErrorCode::kMismatch, describe_mismatch(l, rank, first),
                     {.culprit = rank, .sequence = sequence, .operation = kSum});
      }
    }
    return std::nullopt;
  }

 private:
  std::string describe_mismatch(size_t list, int rank, int first) const {
    const Digest& own = of(rank, list);
    const Digest& other = of(first, list);
    const bool same_sizes =
        own.num_tensors == other.num_tensors && own.num_elements == other.num_elements;
    return concat("rank ", rank, " has ", text_of(own), " in the list ", kLists[list].name,
                  " where rank ", first, " of its ", name_of(kLists[list].summed_over),
                  " group has ", same_sizes ? "other dtypes or shapes" : text_of(other),
                  "; the ranks of a group must have the same gradients, in the same order");
  }

  const MeshLayout& layout_;
  std::vector<Digests> all_;
};

// Runs the work after the mesh has agreed. Peers in any group may be waiting for this rank.
template <typename Body>
void run_agreed_on(Mesh& mesh, const Body& body) {
  try {
    body();
  } catch (...) {
    mesh.fail(current_error());
    throw;
  }
}

// Errors of the group are reported to the whole mesh, so they name the rank in the mesh.
void sum_list(Mesh& mesh, MeshAxis axis, std::span<const TensorView> tensors) {
  Group& group = mesh.group(axis);
  try {
    group.all_reduce(tensors);
  } catch (const Error& error) {
    ErrorContext context = error.context();
    if (context.culprit >= 0) {
      const std::vector<int> members = mesh.layout().members(axis, mesh.world().rank());
      context.culprit = members[static_cast<size_t>(context.culprit)];
    }
    throw Error(error.code(),
                concat(error.what(), " (in the ", name_of(axis), " group of rank ",
                       mesh.world().rank(), " of the mesh)"),
                context);
  }
}

double square(double value) {
  return value * value;
}
template <typename T>
double square(T value) {
  return square(static_cast<double>(to_float(value)));
}

// Summed in blocks, so the error does not grow with the number of elements.
template <typename T>
double sum_of_squares(std::span<const T> values) {
  constexpr size_t kBlock = 1024;
  double sum = 0;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    double block = 0;
    const size_t end = std::min(begin + kBlock, values.size());
    for (size_t i = begin; i < end; ++i) block += square(values[i]);
    sum += block;
  }
  return sum;
}

double sum_of_squares(const ConstTensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kF64:
      return sum_of_squares(tensor.as<double>());
    case DType::kF32:
      return sum_of_squares(tensor.as<float>());
    case DType::kBF16:
      return sum_of_squares(tensor.as<BF16>());
    default:
      return sum_of_squares(tensor.as<F16>());
  }
}

// Sum of squares of the gradients for which this rank is the lowest that holds them.
double counted_squares(Mesh& mesh, const MeshGradients& gradients) {
  const int rank = mesh.world().rank();
  double sum = 0;
  for (const List& list : kLists) {
    if (mesh.layout().members(list.held_by, rank).front() != rank) continue;
    for (const TensorView& tensor : gradients.*list.tensors) sum += sum_of_squares(tensor);
  }
  return sum;
}

}  // namespace

void sum_gradients(Mesh& mesh, const MeshGradients& gradients) {
  Digests own;
  const std::optional<Error> refusal = refusal_of([&] {
    check_gradients(gradients);
    own = digests_of(gradients);
  });
  const Agreement agreement =
      mesh.world().agree({.operation = kSum, .body = body_of(own), .refusal = as_refusal(refusal)});
  std::optional<AllDigests> all;
  std::optional<Error> mismatch;
  run_agreed_on(mesh, [&] {
    all.emplace(mesh.layout(), agreement);
    mismatch = all->mismatch(agreement.sequence);
  });
  if (mismatch) throw *mismatch;
  run_agreed_on(mesh, [&] {
    for (size_t l = 0; l < kLists.size(); ++l) {
      if (all->is_empty(l)) continue;  // on every rank
      sum_list(mesh, kLists[l].summed_over, gradients.*kLists[l].tensors);
    }
  });
}

double global_grad_norm(Mesh& mesh, const MeshGradients& gradients) {
  double own = 0;
  const std::optional<Error> refusal = refusal_of([&] {
    check_gradients(gradients);
    own = counted_squares(mesh, gradients);
  });
  const Agreement agreement = mesh.world().agree(
      {.operation = kNorm, .body = body_of(own), .refusal = as_refusal(refusal)});
  double sum = 0;
  for (int rank = 0; rank < mesh.world().size(); ++rank) sum += item_of<double>(agreement, rank);
  return std::sqrt(sum);
}

}  // namespace crossdock
