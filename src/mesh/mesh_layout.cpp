// Coordinates and members: how the two grids number the ranks.
#include <array>

#include "core/check.hpp"
#include "core/text.hpp"
#include "crossdock/mesh.hpp"

namespace crossdock {
namespace {

constexpr size_t kDims = 4;
using Numbers = std::array<int64_t, kDims>;  // of a grid; the first varies fastest with the rank

struct AxisTraits {
  MeshAxis axis;
  std::string_view name;
  bool is_of_experts;               // the grid: {etp, ep, edp, pp}, else {tp, cp, dp, pp}
  std::array<bool, kDims> differs;  // the coordinates in which members differ
};

constexpr std::array<AxisTraits, kMeshAxes.size()> kTraits = {{
    {MeshAxis::kTp, "tp", false, {true, false, false, false}},
    {MeshAxis::kCp, "cp", false, {false, true, false, false}},
    {MeshAxis::kDp, "dp", false, {false, false, true, false}},
    {MeshAxis::kPp, "pp", false, {false, false, false, true}},
    {MeshAxis::kTpCp, "tp_cp", false, {true, true, false, false}},
    {MeshAxis::kCpDp, "cp_dp", false, {false, true, true, false}},
    {MeshAxis::kTpCpDp, "tp_cp_dp", false, {true, true, true, false}},
    {MeshAxis::kEtp, "etp", true, {true, false, false, false}},
    {MeshAxis::kEp, "ep", true, {false, true, false, false}},
    {MeshAxis::kEdp, "edp", true, {false, false, true, false}},
    {MeshAxis::kEtpEp, "etp_ep", true, {true, true, false, false}},
    {MeshAxis::kEtpEdp, "etp_edp", true, {true, false, true, false}},
}};

constexpr bool are_in_order() {
  for (size_t i = 0; i < kTraits.size(); ++i) {
    if (kTraits[i].axis != kMeshAxes[i] || static_cast<size_t>(kMeshAxes[i]) != i) return false;
  }
  return true;
}
static_assert(are_in_order(), "traits_of finds an axis by its number");

const AxisTraits& traits_of(MeshAxis axis) {
  return kTraits[static_cast<size_t>(axis)];
}

Numbers sizes_of(const MeshShape& shape, bool is_of_experts) {
  return is_of_experts ? Numbers{shape.etp, shape.ep, shape.edp, shape.pp}
                       : Numbers{shape.tp, shape.cp, shape.dp, shape.pp};
}

Numbers place_of(int64_t rank, const Numbers& sizes) {
  Numbers place{};
  for (size_t i = 0; i < kDims; ++i) {
    place[i] = rank % sizes[i];
    rank /= sizes[i];
  }
  return place;
}

// The lowest rank of the group: its coordinates are 0 where members differ.
int64_t lowest_member(int64_t rank, const Numbers& sizes, const AxisTraits& traits) {
  const Numbers place = place_of(rank, sizes);
  int64_t stride = 1;
  for (size_t i = 0; i < kDims; ++i) {
    if (traits.differs[i]) rank -= place[i] * stride;
    stride *= sizes[i];
  }
  return rank;
}

// All members, starting from the lowest. Faster coordinates vary first, so ranks ascend.
std::vector<int> members_from(int64_t lowest, const Numbers& sizes, const AxisTraits& traits) {
  std::vector<int> members = {static_cast<int>(lowest)};
  int64_t stride = 1;
  for (size_t i = 0; i < kDims; ++i) {
    const size_t num_before = members.size();
    for (int64_t k = 1; traits.differs[i] && k < sizes[i]; ++k) {
      for (size_t m = 0; m < num_before; ++m) {
        members.push_back(members[m] + static_cast<int>(k * stride));
      }
    }
    stride *= sizes[i];
  }
  return members;
}

void check_rank(int rank, const MeshShape& shape) {
  CROSSDOCK_CHECK(rank >= 0 && rank < shape.world, "rank must be in [0, ", shape.world, "), got ",
                  rank);
}

}  // namespace

std::string_view name_of(MeshAxis axis) noexcept {
  return traits_of(axis).name;
}

MeshAxis parse_mesh_axis(std::string_view name) {
  return kTraits[index_of_name("a group of a mesh", name, kTraits, &AxisTraits::name)].axis;
}

MeshLayout::MeshLayout(const MeshShape& shape) : shape_(resolve_mesh(shape)) {}

MeshCoordinates MeshLayout::coordinates(int rank) const {
  check_rank(rank, shape_);
  const Numbers dense = place_of(rank, sizes_of(shape_, false));
  const Numbers experts = place_of(rank, sizes_of(shape_, true));
  return {.tp = static_cast<int>(dense[0]),
          .cp = static_cast<int>(dense[1]),
          .dp = static_cast<int>(dense[2]),
          .pp = static_cast<int>(dense[3]),
          .etp = static_cast<int>(experts[0]),
          .ep = static_cast<int>(experts[1]),
          .edp = static_cast<int>(experts[2])};
}

int MeshLayout::group_size(MeshAxis axis) const {
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  int64_t size = 1;
  for (size_t i = 0; i < kDims; ++i) size *= traits.differs[i] ? sizes[i] : 1;
  return static_cast<int>(size);
}

std::vector<int> MeshLayout::members(MeshAxis axis, int rank) const {
  check_rank(rank, shape_);
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  return members_from(lowest_member(rank, sizes, traits), sizes, traits);
}

std::vector<std::vector<int>> MeshLayout::groups(MeshAxis axis) const {
  const AxisTraits& traits = traits_of(axis);
  const Numbers sizes = sizes_of(shape_, traits.is_of_experts);
  std::vector<std::vector<int>> groups;
  for (int64_t rank = 0; rank < shape_.world; ++rank) {
    if (lowest_member(rank, sizes, traits) != rank) continue;
    groups.push_back(members_from(rank, sizes, traits));
  }
  return groups;
}

}  // namespace crossdock
