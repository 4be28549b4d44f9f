#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Maximum number of ranks in a mesh.
inline constexpr int64_t kMaxMeshRanks = 65536;

/// The sizes of two grids over the same ranks: tp x cp x dp x pp for attention and other dense
/// parts, etp x ep x edp x pp for experts. In both, the first size varies fastest with the rank,
/// and pp, which the grids share, varies slowest. A size of 0 is derived (see resolve_mesh).
struct MeshShape {
  int64_t world = 0;  // number of ranks
  int64_t tp = 0;     // tensor parallel
  int64_t cp = 0;     // context parallel
  int64_t dp = 0;     // data parallel
  int64_t pp = 0;     // pipeline stages
  int64_t etp = 0;    // tensor parallel inside each expert
  int64_t ep = 0;     // expert parallel
  int64_t edp = 0;    // replicas of the experts

  friend bool operator==(const MeshShape&, const MeshShape&) = default;
};

/// The shape with all sizes filled in. tp, cp, pp and etp default to 1; dp and edp to the ranks
/// that remain; ep to all ranks of a pipeline stage divided by etp and, if given, edp; world to the
/// product of the grid whose sizes are given. Throws Error(kInvalidArgument), naming the rule and
/// the numbers, unless tp * cp * dp * pp = etp * ep * edp * pp = world.
[[nodiscard]] CROSSDOCK_API MeshShape resolve_mesh(const MeshShape& shape);

/// A rank's place in both grids.
struct MeshCoordinates {
  int tp = 0;
  int cp = 0;
  int dp = 0;
  int pp = 0;
  int etp = 0;
  int ep = 0;
  int edp = 0;

  friend bool operator==(const MeshCoordinates&, const MeshCoordinates&) = default;
};

/// A kind of group: ranks that differ in the named coordinates only. Only the coordinates of one
/// grid are compared: kTp to kTpCpDp belong to the dense grid, the others to the expert grid.
enum class MeshAxis : uint8_t {
  kTp,
  kCp,
  kDp,
  kPp,
  kTpCp,    // the ranks that share a batch of sequences
  kCpDp,    // sums gradients of parameters that are split over tp
  kTpCpDp,  // a pipeline stage: sums loads, losses and gradients of parameters that are not split
  kEtp,
  kEp,
  kEdp,    // sums gradients of experts
  kEtpEp,  // exchanges rows: the group of a dispatcher or layer
  kEtpEdp  // holds the same parameters of experts, if they are not split over etp
};

inline constexpr std::array kMeshAxes = {MeshAxis::kTp,     MeshAxis::kCp,    MeshAxis::kDp,
                                         MeshAxis::kPp,     MeshAxis::kTpCp,  MeshAxis::kCpDp,
                                         MeshAxis::kTpCpDp, MeshAxis::kEtp,   MeshAxis::kEp,
                                         MeshAxis::kEdp,    MeshAxis::kEtpEp, MeshAxis::kEtpEdp};

/// "tp", "tp_cp_dp", "etp_ep", ...
CROSSDOCK_API std::string_view name_of(MeshAxis axis) noexcept;

/// The inverse of name_of. Throws Error(kInvalidArgument), listing the valid names.
CROSSDOCK_API MeshAxis parse_mesh_axis(std::string_view name);

/// The coordinates and groups of all ranks of a mesh, as numbers, e.g. to make the groups of
/// another library. Immutable, cheap to copy, usable by any number of threads.
class CROSSDOCK_API MeshLayout {
 public:
  /// Throws as resolve_mesh.
  explicit MeshLayout(const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }  // with all sizes filled in
  int num_ranks() const { return static_cast<int>(shape_.world); }

  /// Throws Error(kInvalidArgument) for a rank that is not in the mesh.
  [[nodiscard]] MeshCoordinates coordinates(int rank) const;

  /// Number of ranks in each group of this kind.
  [[nodiscard]] int group_size(MeshAxis axis) const;
  /// The ranks of the group of this kind that `rank` belongs to, ascending. Throws as coordinates.
  [[nodiscard]] std::vector<int> members(MeshAxis axis, int rank) const;
  /// All groups of this kind, in the order of their lowest ranks. Every rank is in one of them.
  [[nodiscard]] std::vector<std::vector<int>> groups(MeshAxis axis) const;

 private:
  MeshShape shape_;
};

/// A mesh over the ranks of a group, seen from one of them: gives the groups of its axes.
///
/// Groups with the same members may be the same object, including `world` itself: use the groups of
/// a mesh from one thread at a time. `world` must outlive the mesh.
class CROSSDOCK_API Mesh {
 public:
  /// `shape.world` may be 0; otherwise it must be the size of the group. Collective: if the shape
  /// is invalid or differs between ranks, every rank throws the same error.
  Mesh(Group& world, const MeshShape& shape);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const MeshLayout& layout() const;
  const MeshShape& shape() const;
  const MeshCoordinates& coordinates() const;  // of this rank
  Group& world();

  /// This rank's group of this kind, with the options of `world`. Made by the first call for this
  /// kind, which is collective over `world`: all ranks of all pipeline stages make it, in the same
  /// order. Later calls are local. The reference is valid as long as the mesh.
  Group& group(MeshAxis axis);
  /// Makes several groups at once, in this order.
  void make_groups(std::span<const MeshAxis> axes);

  /// Poisons `world` and all groups made so far, so that no peer waits for this rank (see
  /// Group::fail).
  void fail(const Error& cause) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Gradients of this rank's parameters, by how the mesh holds them. In host memory, fp64, fp32,
/// bf16 or fp16. The ranks of a group that sums a list must have matching lists: the same number of
/// tensors, with the same dtypes and shapes. Lists may differ between groups, and so between
/// pipeline stages.
struct MeshGradients {
  /// Split over etp and ep: W1, b1 and W2 of this rank's experts. Summed over edp.
  std::span<const TensorView> experts{};
  /// Parameters of experts that are not split over etp, with identical gradients on the ranks of an
  /// etp group: b2. Summed over edp. With etp = 1 they may also be in `experts`.
  std::span<const TensorView> experts_replicated{};
  /// Not split, and applied to this rank's tokens only: the gate, shared experts and, with sequence
  /// shards, norms. Summed over tp, cp and dp.
  std::span<const TensorView> dense{};
  /// Not split, with identical gradients on the ranks of a tp group: dense parts that all of them
  /// applied to the same tokens. Summed over cp and dp.
  std::span<const TensorView> replicated{};
  /// Split over tp: attention, dense MLPs, embeddings. Summed over cp and dp.
  std::span<const TensorView> tensor_parallel{};
};

/// Sums each gradient, in place, over the group stated in MeshGradients. Collective over the mesh.
/// If a tensor is refused on one rank, or lists differ within a group, every rank of the mesh
/// throws the same error before anything is summed. The order of each sum is that of
/// Group::all_reduce.
CROSSDOCK_API void sum_gradients(Mesh& mesh, const MeshGradients& gradients);

/// The Euclidean norm of the gradients of all parameters of the mesh, each counted once, however
/// many ranks hold it. Call it after sum_gradients. Squares are summed in fp64; the result is
/// identical on every rank. A parameter that several pipeline stages hold (tied embeddings) must be
/// in the lists of only one of them. Collective over the mesh; throws like sum_gradients.
[[nodiscard]] CROSSDOCK_API double global_grad_norm(Mesh& mesh, const MeshGradients& gradients);

}  // namespace crossdock
