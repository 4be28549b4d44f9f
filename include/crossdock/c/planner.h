#ifndef CROSSDOCK_C_PLANNER_H
#define CROSSDOCK_C_PLANNER_H

/// The planner: traffic, memory and time of a job before it starts. A part of crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// The plan for one job.
typedef struct crossdock_job_plan crossdock_job_plan;

typedef struct crossdock_job {
  size_t struct_size;

  // The layer.
  const char* model;    // sizes of a published model, e.g. "deepseek-v3"; NULL: those below. A size
                        // that is set below overrides the model's
  int64_t width;        // D
  int64_t inner;        // F, for the size of the experts' weights; 0: not computed
  int64_t num_experts;  // E
  int64_t top_k;        // K

  // Tokens per rank: `tokens`, or sequence * micro_batch divided among tp * cp ranks.
  int64_t tokens;
  int64_t sequence;
  int64_t micro_batch;  // 0: 1

  // The mesh; 0: 1, except ep.
  int64_t nodes;
  int64_t ranks_per_node;
  int64_t tp;
  int64_t cp;
  int64_t pp;
  int64_t ep;  // 0: all ranks of a pipeline stage

  // The exchange of rows.
  int64_t alignment;       // 0: 1
  double capacity_factor;  // 0: no capacity
  double zipf;             // experts are drawn with weights (e + 1)^-zipf; 0: uniformly
  const char* fabric;      // "h100-nvlink-400g" (NULL), "h200-nvlink-400g", "gb200", ...
  int32_t dtype;           // of the tokens; 0: bf16
  int32_t partial_sums;    // CROSSDOCK_PARTIAL_SUMS_NONE, ...
} crossdock_job;
#define CROSSDOCK_JOB_INIT \
  { .struct_size = sizeof(crossdock_job) }

/// Plans a job. Not collective, and needs no group. An impossible job is CROSSDOCK_INVALID_ARGUMENT
/// or CROSSDOCK_CAPACITY; the error text names the limit, the value and the largest legal value.
CROSSDOCK_C_API crossdock_status crossdock_job_plan_create(const crossdock_job* job,
                                                           crossdock_job_plan** plan);
CROSSDOCK_C_API void crossdock_job_plan_destroy(crossdock_job_plan* plan);

/// Strings are valid as long as the plan.
typedef struct crossdock_job_summary {
  size_t struct_size;
  const char* strategy;         // the chosen strategy
  const char* reason;           // why it was chosen
  int64_t num_strategies;       // for crossdock_job_plan_strategy
  int64_t tokens;               // T of every rank
  int64_t num_ranks;            // total
  int64_t group_ranks;          // ranks that exchange rows
  int64_t group_nodes;          // nodes of these ranks
  int64_t capacity_rows;        // limit per source rank and expert; 0: no capacity
  int64_t expert_weight_bytes;  // of the rank with the most, one layer
  double ranks_per_token;       // distinct ranks that a token is routed to, mean
  double nodes_per_token;       // distinct nodes
  double rows_per_rank;         // R, mean
  double most_rows;             // R of the rank that expects the most
  double dropped_share;         // share of routes that capacity drops
} crossdock_job_summary;
#define CROSSDOCK_JOB_SUMMARY_INIT \
  { .struct_size = sizeof(crossdock_job_summary) }

CROSSDOCK_C_API crossdock_status crossdock_job_plan_describe(const crossdock_job_plan* plan,
                                                             crossdock_job_summary* summary);

/// Cost of one dispatch or combine, per rank. Never changes.
typedef struct crossdock_operation_cost {
  double bytes_within_node;    // sent, mean
  double bytes_between_nodes;  // sent, mean
  double lower_bound_s;        // links and memory at full rate, concurrently
  double serial_s;             // links first, then memory, as the strategies do
} crossdock_operation_cost;

typedef struct crossdock_strategy_cost {
  size_t struct_size;
  const char* name;  // valid as long as the plan
  crossdock_operation_cost dispatch;
  crossdock_operation_cost combine;  // in the configured mode
  double expected_bytes;             // memory of the rank that expects the most rows, one step
  double worst_bytes;                // if all routes that can go to one rank go there
  double step_lower_bound_s;         // forward and backward
  double step_serial_s;
} crossdock_strategy_cost;
#define CROSSDOCK_STRATEGY_COST_INIT \
  { .struct_size = sizeof(crossdock_strategy_cost) }

/// Strategies are sorted by name; `index` is in [0, num_strategies).
CROSSDOCK_C_API crossdock_status crossdock_job_plan_strategy(const crossdock_job_plan* plan,
                                                             int64_t index,
                                                             crossdock_strategy_cost* cost);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_PLANNER_H
