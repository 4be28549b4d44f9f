// The rules that the sizes of a mesh must follow.
#include <algorithm>
#include <optional>

#include "core/check.hpp"
#include "core/sizes.hpp"
#include "crossdock/mesh.hpp"

namespace crossdock {
namespace {

// The largest divisor of `ranks` that is at most `wanted`.
int64_t largest_divisor(int64_t ranks, int64_t wanted) {
  int64_t divisor = std::min(wanted, ranks);
  while (ranks % divisor != 0) --divisor;
  return divisor;
}

void check_not_negative(const char* name, int64_t size) {
  CROSSDOCK_CHECK(size >= 0, name, " must be at least 1, or 0 to be derived, got ", size);
}

// A size of 0 becomes 1.
void set_default(int64_t& size) {
  if (size == 0) size = 1;
}

// The product of the grid whose sizes are given.
int64_t derived_world(const MeshShape& shape) {
  CROSSDOCK_CHECK(shape.dp > 0 || (shape.ep > 0 && shape.edp > 0),
                  "world must be given, or dp, or ep and edp, to tell the number of ranks");
  const bool by_dense = shape.dp > 0;
  const std::optional<int64_t> world =
      by_dense ? product_within(kMaxMeshRanks, {shape.tp, shape.cp, shape.dp, shape.pp})
               : product_within(kMaxMeshRanks, {shape.etp, shape.ep, shape.edp, shape.pp});
  CROSSDOCK_CHECK(world, by_dense ? "tp * cp * dp * pp" : "etp * ep * edp * pp",
                  " must be at most ", kMaxMeshRanks, " ranks");
  return *world;
}

// `stage`: the number of ranks of a pipeline stage.
void resolve_dense(MeshShape& shape, int64_t stage) {
  CROSSDOCK_CHECK(stage % shape.tp == 0 && (stage / shape.tp) % shape.cp == 0, "tp (", shape.tp,
                  ") times cp (", shape.cp, ") must divide the ", stage,
                  " ranks of a pipeline stage; for example, tp ", largest_divisor(stage, shape.tp),
                  " and cp ", largest_divisor(stage / largest_divisor(stage, shape.tp), shape.cp),
                  " would");
  const int64_t dp = stage / shape.tp / shape.cp;
  CROSSDOCK_CHECK(shape.dp == 0 || shape.dp == dp, "tp (", shape.tp, ") times cp (", shape.cp,
                  ") times dp (", shape.dp, ") must be the ", stage,
                  " ranks of a pipeline stage; with this tp and cp, dp is ", dp);
  shape.dp = dp;
}

void resolve_experts(MeshShape& shape, int64_t stage) {
  CROSSDOCK_CHECK(stage % shape.etp == 0, "etp (", shape.etp, ") must divide the ", stage,
                  " ranks of a pipeline stage; the largest etp below that does is ",
                  largest_divisor(stage, shape.etp));
  const std::string etp_times = shape.etp > 1 ? concat("etp (", shape.etp, ") times ") : "";
  const int64_t rest = stage / shape.etp;
  if (shape.ep == 0) {
    const int64_t edp = std::max<int64_t>(1, shape.edp);
    CROSSDOCK_CHECK(rest % edp == 0, etp_times, "edp (", edp, ") must divide the ", stage,
                    " ranks of a pipeline stage; the largest edp below that does is ",
                    largest_divisor(rest, edp));
    shape.ep = rest / edp;
  }
  CROSSDOCK_CHECK(rest % shape.ep == 0, etp_times, "ep (", shape.ep, ") must divide the ", stage,
                  " ranks of a pipeline stage; the largest ep below that does is ",
                  largest_divisor(rest, shape.ep));
  const int64_t edp = rest / shape.ep;
  CROSSDOCK_CHECK(shape.edp == 0 || shape.edp == edp, etp_times, "ep (", shape.ep, ") times edp (",
                  shape.edp, ") must be the ", stage, " ranks of a pipeline stage; with this ",
                  shape.etp > 1 ? "etp and ep" : "ep", ", edp is ", edp);
  shape.edp = edp;
}

}  // namespace

MeshShape resolve_mesh(const MeshShape& given) {
  MeshShape shape = given;
  check_not_negative("world", shape.world);
  check_not_negative("tp", shape.tp);
  check_not_negative("cp", shape.cp);
  check_not_negative("dp", shape.dp);
  check_not_negative("pp", shape.pp);
  check_not_negative("etp", shape.etp);
  check_not_negative("ep", shape.ep);
  check_not_negative("edp", shape.edp);
  set_default(shape.tp);
  set_default(shape.cp);
  set_default(shape.pp);
  set_default(shape.etp);
  if (shape.world == 0) shape.world = derived_world(shape);
  CROSSDOCK_CHECK(shape.world <= kMaxMeshRanks, "world must be at most ", kMaxMeshRanks, ", got ",
                  shape.world);
  CROSSDOCK_CHECK(shape.world % shape.pp == 0, "pp (", shape.pp, ") must divide the ", shape.world,
                  " ranks; the largest pp below that does is ",
                  largest_divisor(shape.world, shape.pp));
  const int64_t stage = shape.world / shape.pp;
  resolve_dense(shape, stage);
  resolve_experts(shape, stage);
  return shape;
}

}  // namespace crossdock
