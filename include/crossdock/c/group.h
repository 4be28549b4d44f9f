#ifndef CROSSDOCK_C_GROUP_H
#define CROSSDOCK_C_GROUP_H

/// Groups: the P ranks that exchange rows. A part of crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// One rank's view of a group.
typedef struct crossdock_group crossdock_group;

/// A wait for other ranks that takes long. Valid until the callback returns.
typedef struct crossdock_wait_notice {
  size_t struct_size;
  int32_t rank;            // the rank that waits
  int32_t size;            // P
  const int32_t* awaited;  // [num_awaited] the ranks it waits for, ascending
  int32_t num_awaited;     // 0: not known
  int32_t padding;         // 0
  uint64_t sequence;       // number of the collective in its group; 0 in set-up
  const char* operation;   // "dispatch", ...; "set-up" while a group is made
  double waited_s;
  double left_s;     // until the wait fails, unless there is progress
  const char* text;  // the above in words, one line
} crossdock_wait_notice;

typedef struct crossdock_group_config {
  size_t struct_size;
  double arrival_deadline_s;   // for a peer to arrive; 0: CROSSDOCK_ARRIVAL_DEADLINE, else 600
  double progress_deadline_s;  // without progress; 0: CROSSDOCK_PROGRESS_DEADLINE, else 30
  double setup_deadline_s;     // MPI: to make the group; 0: as arrival_deadline_s
  int64_t recorded_events;     // recent events to keep; 0: 256, -1: none
  int64_t staging_bytes;       // limit on rows in transit between nodes; 0: 64 MiB. Identical on
                               // every rank
  const char* report_file;     // receives the recent events of a failure; NULL: CROSSDOCK_REPORT
  int32_t num_threads;         // threads that move and sum rows; 0: this rank's share of the cores
  int32_t ranks_per_node;      // threads and MPI, for tests: ranks per simulated node; 0: detected
  /// (optional) Called once by a thread that has waited for other ranks for notice_after_s without
  /// progress, for example to print the text: the library itself prints nothing. Must not use the
  /// group.
  void (*on_wait)(void* context, const crossdock_wait_notice* notice);
  void* on_wait_context;        // argument of `on_wait`; must outlive the group, its subgroups and
                                // the objects made with them
  double notice_after_s;        // in a call; 0: 10
  double setup_notice_after_s;  // MPI: while the group is made; 0: 3
  /// (optional) Called with a line for each choice: what was chosen, and why. `level`: 1: choices
  /// that all ranks share, on rank 0 only; 2: choices of each rank. Must not use the group.
  void (*on_log)(void* context, int32_t level, const char* line);
  void* on_log_context;  // argument of `on_log`; must live as long as on_wait_context
  int32_t log_level;     // the highest level; 0: 1
  int32_t log_padding;   // 0
} crossdock_group_config;
#define CROSSDOCK_GROUP_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_group_config) }

/// `size` ranks that are threads of this process, for tests: groups[r] is rank r's, to be used by
/// one thread. The caller provides groups [size]. `config` may be NULL in all functions of this
/// header.
CROSSDOCK_C_API crossdock_status crossdock_group_from_threads(int32_t size,
                                                              const crossdock_group_config* config,
                                                              crossdock_group** groups);

/// A group over a duplicate of an MPI_Comm. `mpi_comm` points to the caller's MPI_Comm:
/// crossdock_group_from_mpi(&comm, ...). NULL: MPI_COMM_WORLD, and MPI is initialised if necessary.
/// Collective over its processes. CROSSDOCK_UNSUPPORTED without MPI.
CROSSDOCK_C_API crossdock_status crossdock_group_from_mpi(const void* mpi_comm,
                                                          const crossdock_group_config* config,
                                                          crossdock_group** group);

// ---- Processes started by any launcher ----
//
// Each process opens a bootstrap and gets a blob of bytes. The processes exchange their blobs by
// any means (an all-gather of another library, files), then all of them join.

/// A listening process that has not joined yet.
typedef struct crossdock_bootstrap crossdock_bootstrap;

typedef struct crossdock_bootstrap_config {
  size_t struct_size;
  const char* address;      // numeric, to listen on; NULL: CROSSDOCK_SOCKETS_ADDRESS, else the
                            // interface in use
  double setup_deadline_s;  // to join; 0: CROSSDOCK_ARRIVAL_DEADLINE, else 600
  /// (optional) Called at least every 100 ms by a thread that waits for other ranks of the group,
  /// for example to check for signals (Ctrl-C). A nonzero result ends the wait with
  /// CROSSDOCK_COMMUNICATION, on the other ranks too. Must not use the group.
  int32_t (*interrupt)(void* context);
  void* interrupt_context;  // argument of `interrupt`; must outlive the group, its subgroups and
                            // the objects made with them
  int32_t ranks_per_node;   // for tests: ranks per simulated node; 0: detected
  int32_t padding;          // 0
  /// (optional) As in crossdock_group_config, while a group or a subgroup is made.
  void (*on_wait)(void* context, const crossdock_wait_notice* notice);
  void* on_wait_context;  // argument of `on_wait`; must live as long as interrupt_context
  double notice_after_s;  // 0: 3
} crossdock_bootstrap_config;
#define CROSSDOCK_BOOTSTRAP_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_bootstrap_config) }

/// `config` may be NULL.
CROSSDOCK_C_API crossdock_status crossdock_bootstrap_open(const crossdock_bootstrap_config* config,
                                                          crossdock_bootstrap** bootstrap);
/// The bytes for the other processes. Valid as long as the bootstrap. They contain a secret: send
/// them to the members of the group only.
CROSSDOCK_C_API crossdock_status crossdock_bootstrap_blob(const crossdock_bootstrap* bootstrap,
                                                          const void** blob, int64_t* num_bytes);
CROSSDOCK_C_API void crossdock_bootstrap_destroy(crossdock_bootstrap* bootstrap);

/// The blobs of all ranks. Rank r's blob is bytes [offsets[r], offsets[r + 1]) of `bytes`.
typedef struct crossdock_join_args {
  size_t struct_size;
  const void* bytes;
  const int64_t* offsets;  // [size + 1]
  int32_t rank;            // of this process; its blob must be that of `bootstrap`
  int32_t size;            // P
} crossdock_join_args;
#define CROSSDOCK_JOIN_ARGS_INIT \
  { .struct_size = sizeof(crossdock_join_args) }

/// Connects the ranks, with a deadline. Collective. A bootstrap can join once; destroy it
/// afterwards.
CROSSDOCK_C_API crossdock_status crossdock_group_join(crossdock_bootstrap* bootstrap,
                                                      const crossdock_join_args* args,
                                                      const crossdock_group_config* config,
                                                      crossdock_group** group);

/// The same without blobs: the processes meet at MASTER_ADDR and MASTER_PORT, with RANK and
/// WORLD_SIZE (torchrun) or Slurm's variables. Collective. `bootstrap` may be NULL.
CROSSDOCK_C_API crossdock_status
crossdock_group_from_environment(const crossdock_bootstrap_config* bootstrap,
                                 const crossdock_group_config* config, crossdock_group** group);

// ---- Your own communicator ----

/// The call that an exchange belongs to, and how long it may take. Deadlines are best effort: an
/// exchange that ignores them can hang.
typedef struct crossdock_wait {
  const char* operation;  // "plan", "dispatch", ...
  uint64_t sequence;      // number of the collective in its group
  double arrival_s;       // time for a peer to arrive
  double progress_s;      // time without progress once data moves
} crossdock_wait;

/// A communicator made of callbacks. They return CROSSDOCK_OK, or CROSSDOCK_PEER_FAILED,
/// CROSSDOCK_TIMEOUT or CROSSDOCK_COMMUNICATION to fail the call on this rank and poison the group.
/// A callback may say why with crossdock_set_callback_error. Callbacks run on the thread that uses
/// the group; they must not use the group or throw. The memory they are given is theirs until they
/// return. The struct is copied; `context` must live until `destroy` is called.
typedef struct crossdock_communicator {
  size_t struct_size;
  void* context;                // first argument of every callback
  int32_t rank;                 // of this process
  int32_t size;                 // P
  const int32_t* node_of_rank;  // [P] ranks with equal numbers are processes on one machine that
                                // can open each other's memory; NULL: one rank per node

  /// Sends all of `send` to every rank. Bytes [recv_offsets[r], recv_offsets[r + 1]) of recv come
  /// from rank r. recv_offsets has P + 1 entries, identical on every rank. Collective, like
  /// all_to_all_v.
  crossdock_status (*all_gather_v)(void* context, const void* send, int64_t send_bytes, void* recv,
                                   const int64_t* recv_offsets, const crossdock_wait* wait);
  /// Sends bytes [send_offsets[r], send_offsets[r + 1]) of send to rank r and receives bytes
  /// [recv_offsets[r], recv_offsets[r + 1]) of recv from it.
  crossdock_status (*all_to_all_v)(void* context, const void* send, const int64_t* send_offsets,
                                   void* recv, const int64_t* recv_offsets,
                                   const crossdock_wait* wait);

  /// (optional) Fills in a communicator of `members` [num_members], ascending ranks including this
  /// one. Called by the members only, also after a failure. If the struct cannot be used, its
  /// `destroy` is called.
  crossdock_status (*subgroup)(void* context, const int32_t* members, int32_t num_members,
                               struct crossdock_communicator* communicator);
  /// (optional) Tells the peers that this rank has failed, so that their waits end. Must not wait.
  void (*abort)(void* context, const char* reason);
  /// (optional) Tells the peers that this rank makes no further calls. Must not wait.
  void (*leave)(void* context, const char* reason);
  /// (optional) Called when the group no longer needs `context`.
  void (*destroy)(void* context);
} crossdock_communicator;
#define CROSSDOCK_COMMUNICATOR_INIT \
  { .struct_size = sizeof(crossdock_communicator) }

/// Not collective. If it fails, `destroy` is not called: the caller still owns the context.
CROSSDOCK_C_API crossdock_status
crossdock_group_from_callbacks(const crossdock_communicator* communicator,
                               const crossdock_group_config* config, crossdock_group** group);
/// For callbacks that fail: sets the reason, which becomes part of the error text. Copied.
CROSSDOCK_C_API void crossdock_set_callback_error(const char* reason);

/// For languages whose runtime ends before the process does: ends all calls before the runtime is
/// gone. Waits with an interrupt end as if it had returned nonzero, and callbacks are not called
/// any more. Other threads that make a call from now on stay in it until the process exits. Waits
/// at most this long for running calls to end. Returns 1 if none is running any more, so that
/// groups may be destroyed.
CROSSDOCK_C_API int32_t crossdock_end_calls(double seconds);

// ---- Using a group ----

typedef struct crossdock_group_info {
  size_t struct_size;
  int32_t rank;
  int32_t size;              // P
  int32_t num_nodes;         // machines, as far as the communicator knows
  int32_t node;              // of this rank
  int32_t is_poisoned;       // 1: every further call fails; see crossdock_group_subgroup
  int32_t padding;           // 0
  int64_t pool_bytes;        // memory held for results and staging
  int64_t window_bytes;      // memory held that the other ranks on the node can reach
  const char* communicator;  // "threads", "mpi", ...; valid as long as the group
  const char* note;          // how the ranks are connected, for logs: one line, or ""; valid as
                             // long as the group
} crossdock_group_info;
#define CROSSDOCK_GROUP_INFO_INIT \
  { .struct_size = sizeof(crossdock_group_info) }

CROSSDOCK_C_API crossdock_status crossdock_group_describe(const crossdock_group* group,
                                                          crossdock_group_info* info);
/// Returns the failure that poisoned the group, if any.
CROSSDOCK_C_API crossdock_status crossdock_group_check(const crossdock_group* group);
/// A group of `members` [num_members], ascending ranks of `group` including this one. Called by the
/// members only; also works on a poisoned group, so that the survivors of a failure can continue.
CROSSDOCK_C_API crossdock_status crossdock_group_subgroup(crossdock_group* group,
                                                          const int32_t* members,
                                                          int32_t num_members,
                                                          crossdock_group** subgroup);
/// Sums `tensors` [num_tensors] over the ranks, in place: afterwards every rank has the sums. In
/// host memory, fp64, fp32, bf16, fp16 or int64; number, dtypes and shapes must be identical on
/// every rank. Elements are added in rank order; for fp32, bf16 and fp16 tensors in fp32, rounded
/// once at the end. The bits are identical on every rank and for every communicator. Collective.
CROSSDOCK_C_API crossdock_status crossdock_group_all_reduce(crossdock_group* group,
                                                            const crossdock_tensor* tensors,
                                                            int64_t num_tensors);
/// Sums `input`, which has the same shape on every rank, and gives each rank its part of the sum.
/// The parts are contiguous and in rank order. Their sizes are those of the ranks' `out`, which may
/// differ or be 0; together they must cover the input. Otherwise as crossdock_group_all_reduce.
/// Collective.
CROSSDOCK_C_API crossdock_status crossdock_group_reduce_scatter(crossdock_group* group,
                                                                const crossdock_tensor* input,
                                                                const crossdock_tensor* out);

/// Tells the peers that this rank makes no further calls, so that none of them waits for it. The
/// reason becomes part of their errors; it may be NULL.
CROSSDOCK_C_API void crossdock_group_leave(crossdock_group* group, const char* reason);
/// Leaves the group, like crossdock_group_leave. Its memory is freed once everything that was made
/// with it is destroyed. Not collective.
CROSSDOCK_C_API void crossdock_group_destroy(crossdock_group* group);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_GROUP_H
