#ifndef CROSSDOCK_C_MESH_H
#define CROSSDOCK_C_MESH_H

/// Meshes: tensor, context, data, pipeline and expert parallelism over one world of ranks. A part
/// of crossdock.h; docs/mesh.md explains the groups.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// The two grids of a mesh, and the groups requested so far.
typedef struct crossdock_mesh crossdock_mesh;

/// Sizes of two grids over the same ranks: tp x cp x dp x pp for dense parts and etp x ep x edp x
/// pp for experts; the first varies fastest with the rank, pp slowest. 0 is derived: tp, cp, pp and
/// etp are then 1, dp and edp the ranks that remain, ep all ranks of a pipeline stage divided by
/// etp and edp, world the size of the group or the product of the grid whose sizes are given.
typedef struct crossdock_mesh_shape {
  size_t struct_size;
  int64_t world;  // number of ranks
  int64_t tp;     // tensor parallel
  int64_t cp;     // context parallel
  int64_t dp;     // data parallel
  int64_t pp;     // pipeline stages
  int64_t etp;    // tensor parallel inside each expert
  int64_t ep;     // expert parallel
  int64_t edp;    // replicas of the experts
} crossdock_mesh_shape;
#define CROSSDOCK_MESH_SHAPE_INIT \
  { .struct_size = sizeof(crossdock_mesh_shape) }

/// With a group, whose ranks form the mesh: collective, and the mesh can make groups. With group =
/// NULL: not collective; the mesh gives coordinates and lists of ranks only, e.g. to make the
/// groups of another library. An impossible mesh is CROSSDOCK_INVALID_ARGUMENT; the error text
/// names the rule and the numbers.
CROSSDOCK_C_API crossdock_status crossdock_mesh_create(crossdock_group* group,
                                                       const crossdock_mesh_shape* shape,
                                                       crossdock_mesh** mesh);
/// Leaves the groups of the mesh, except `group`. Not collective.
CROSSDOCK_C_API void crossdock_mesh_destroy(crossdock_mesh* mesh);

/// The shape with all sizes filled in.
CROSSDOCK_C_API crossdock_status crossdock_mesh_describe(const crossdock_mesh* mesh,
                                                         crossdock_mesh_shape* shape);

/// A rank's place in both grids.
typedef struct crossdock_mesh_coordinates {
  size_t struct_size;
  int32_t tp;
  int32_t cp;
  int32_t dp;
  int32_t pp;
  int32_t etp;
  int32_t ep;
  int32_t edp;
  int32_t padding;  // 0
} crossdock_mesh_coordinates;
#define CROSSDOCK_MESH_COORDINATES_INIT \
  { .struct_size = sizeof(crossdock_mesh_coordinates) }

CROSSDOCK_C_API crossdock_status crossdock_mesh_locate(const crossdock_mesh* mesh, int32_t rank,
                                                       crossdock_mesh_coordinates* coordinates);

enum {  // kinds of groups: ranks that differ in the named coordinates only
  CROSSDOCK_MESH_TP = 0,
  CROSSDOCK_MESH_CP = 1,
  CROSSDOCK_MESH_DP = 2,
  CROSSDOCK_MESH_PP = 3,
  CROSSDOCK_MESH_TP_CP = 4,     // share a batch of sequences
  CROSSDOCK_MESH_CP_DP = 5,     // sum gradients of parameters that are split over tp
  CROSSDOCK_MESH_TP_CP_DP = 6,  // a pipeline stage: sum loads, losses, other gradients
  CROSSDOCK_MESH_ETP = 7,
  CROSSDOCK_MESH_EP = 8,
  CROSSDOCK_MESH_EDP = 9,      // sum gradients of experts
  CROSSDOCK_MESH_ETP_EP = 10,  // exchange rows: the group of a dispatcher or layer
  CROSSDOCK_MESH_ETP_EDP = 11  // hold the same parameters of experts, if not split over etp
};

/// Number of ranks in each group of this kind.
CROSSDOCK_C_API crossdock_status crossdock_mesh_group_size(const crossdock_mesh* mesh, int32_t axis,
                                                           int32_t* size);
/// The ranks of the group of this kind that `rank` belongs to, ascending. The caller provides
/// members [group size].
CROSSDOCK_C_API crossdock_status crossdock_mesh_members(const crossdock_mesh* mesh, int32_t axis,
                                                        int32_t rank, int32_t* members);

/// This rank's group of this kind. The first call for a kind is collective over the whole mesh: all
/// ranks make it, in the same order. The handle belongs to the mesh: crossdock_group_destroy has no
/// effect on it. Kinds with the same members may share a group, so use the groups of a mesh from
/// one thread at a time.
CROSSDOCK_C_API crossdock_status crossdock_mesh_group(crossdock_mesh* mesh, int32_t axis,
                                                      crossdock_group** group);

/// Tensors in host memory. Never changes.
typedef struct crossdock_tensor_list {
  const crossdock_tensor* tensors;  // [num_tensors]; may be NULL if there are none
  int64_t num_tensors;
} crossdock_tensor_list;

/// Gradients of this rank's parameters, by how the mesh holds them.
typedef struct crossdock_mesh_gradients {
  size_t struct_size;
  crossdock_tensor_list experts;             // split over etp and ep; summed over edp
  crossdock_tensor_list experts_replicated;  // of experts, not split over etp, identical on the
                                             // ranks of an etp group; summed over edp
  crossdock_tensor_list dense;               // not split, applied to this rank's tokens only;
                                             // summed over tp, cp and dp
  crossdock_tensor_list replicated;          // not split, identical on the ranks of a tp group;
                                             // summed over cp and dp
  crossdock_tensor_list tensor_parallel;     // split over tp; summed over cp and dp
} crossdock_mesh_gradients;
#define CROSSDOCK_MESH_GRADIENTS_INIT \
  { .struct_size = sizeof(crossdock_mesh_gradients) }

/// Sums each gradient, in place, over the group stated above. Collective over the mesh.
CROSSDOCK_C_API crossdock_status
crossdock_mesh_sum_gradients(crossdock_mesh* mesh, const crossdock_mesh_gradients* gradients);

/// The norm of all gradients of the mesh, each parameter counted once; identical on every rank.
/// Call it after crossdock_mesh_sum_gradients. Collective over the mesh.
CROSSDOCK_C_API crossdock_status crossdock_mesh_grad_norm(crossdock_mesh* mesh,
                                                          const crossdock_mesh_gradients* gradients,
                                                          double* norm);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_MESH_H
