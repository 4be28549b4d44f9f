/* The C API, in plain C99: tokens go to their experts and come back, forward and backward.
 *
 *   06_c_api                     four ranks as threads of this process
 *   06_c_api RANK SIZE FOLDER    one of SIZE processes, which exchange their blobs through files.
 *                                06_c_api.sh starts four of them from a shell loop
 *   --device cuda                before these: tensors on GPU 0. Needs a build with CUDA
 */
#define _POSIX_C_SOURCE 200809L

#include <crossdock/crossdock.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "06_memory.h"

enum { E = 8, K = 2, D = 4, T = 3, kRanks = 4, kMaxRanks = 64, kMaxBlobBytes = 4096 };
enum { kSkipped = 77 }; /* exit status without a GPU */

/* Prints the error of a call that failed. */
static int failed(const char* call, crossdock_status status) {
  if (status == CROSSDOCK_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", call, crossdock_status_name(status), crossdock_last_error());
  return 1;
}

/* ---- One rank ---- */

static crossdock_tensor tensor_2d(const Place* place, const void* data, int32_t dtype, int64_t rows,
                                  int64_t columns) {
  crossdock_tensor tensor = crossdock_tensor_2d(data, dtype, rows, columns);
  if (place->is_gpu) tensor.device_kind = CROSSDOCK_CUDA;
  return tensor;
}

/* A rank's values on the host. Small multiples of 1/4, so that all results are exact. */
typedef struct {
  float x[T * D];
  int32_t expert_ids[T * K];
  float weights[T * K];
  float grad_out[T * D];
  float out[T * D];
  float grad_x[T * D];
  float grad_weights[T * K];
} Values;

static void fill(Values* values, int32_t rank) {
  for (int t = 0; t < T; ++t) {
    for (int d = 0; d < D; ++d) {
      values->x[t * D + d] = (float)(100 * rank + 10 * t + d);
      values->grad_out[t * D + d] = 1.0f;
    }
    values->expert_ids[t * K] = (t + rank) % E;
    values->expert_ids[t * K + 1] = (t + rank + 3) % E;
    values->weights[t * K] = 0.25f;
    values->weights[t * K + 1] = 0.5f;
  }
}

static int is_wrong(const Values* values) {
  for (int t = 0; t < T; ++t) {
    float factor = 0.0f; /* of x in out */
    float sum = 0.0f;    /* of the token's values */
    for (int d = 0; d < D; ++d) sum += values->x[t * D + d];
    for (int k = 0; k < K; ++k) {
      const float scale = (float)(values->expert_ids[t * K + k] + 1);
      factor += values->weights[t * K + k] * scale;
      if (values->grad_weights[t * K + k] != scale * sum) return 1;
    }
    for (int d = 0; d < D; ++d) {
      if (values->out[t * D + d] != factor * values->x[t * D + d]) return 1;
      if (values->grad_x[t * D + d] != factor) return 1;
    }
  }
  return 0;
}

/* The same values where the library reads and writes them. */
typedef struct {
  const Place* place;
  crossdock_dispatcher* dispatcher;
  crossdock_plan* plan;
  int64_t first_expert; /* on this rank */
  int64_t R;
  crossdock_tensor expert_ids, weights, x, grad_out; /* in */
  crossdock_tensor out, grad_x, grad_weights;        /* out */
  crossdock_tensor rows, y, grad_rows;               /* [R, D] */
} Step;

/* Expert e multiplies its rows by e + 1; so does its backward with the gradients. Yours would be a
 * kernel in the same stream; this one takes the rows to the host and back. */
static int run_experts(const Step* step, const void* from, void* to) {
  crossdock_plan_info plan = CROSSDOCK_PLAN_INFO_INIT;
  int64_t starts[E];
  int64_t counts[E];
  const size_t num_bytes = (size_t)(step->R * D) * sizeof(float);
  if (failed("plan_describe", crossdock_plan_describe(step->plan, &plan))) return 1;
  const size_t num_experts = (size_t)plan.num_local_experts;
  float* rows = malloc(num_bytes + 1);
  int has_failed = rows == NULL ||
                   copy(step->place, starts, plan.segment_starts, num_experts * 8) ||
                   copy(step->place, counts, plan.segment_counts, num_experts * 8) ||
                   copy(step->place, rows, from, num_bytes);
  for (size_t e = 0; e < num_experts && !has_failed; ++e) {
    for (int64_t i = starts[e] * D; i < (starts[e] + counts[e]) * D; ++i) {
      rows[i] *= (float)(step->first_expert + (int64_t)e + 1);
    }
  }
  has_failed = has_failed || copy(step->place, to, rows, num_bytes);
  free(rows);
  return has_failed;
}

static int forward(const Step* step) {
  crossdock_dispatch_args args = CROSSDOCK_DISPATCH_ARGS_INIT;
  args.x = step->x;
  crossdock_dispatch_result sent = CROSSDOCK_DISPATCH_RESULT_INIT;
  sent.rows.tensor = step->rows; /* given: the library writes there */
  if (failed("dispatch", crossdock_dispatch(step->dispatcher, step->plan, &args, &sent)) ||
      run_experts(step, step->rows.data, step->y.data)) {
    return 1;
  }
  crossdock_output out = {step->out, NULL};
  return failed("combine", crossdock_combine(step->dispatcher, step->plan, &step->y, &out));
}

static int backward(const Step* step) {
  crossdock_combine_backward_args args = CROSSDOCK_COMBINE_BACKWARD_ARGS_INIT;
  args.grad_out = step->grad_out;
  args.y = step->y;
  crossdock_combine_backward_result back = CROSSDOCK_COMBINE_BACKWARD_RESULT_INIT;
  back.grad_weights.tensor = step->grad_weights;
  /* grad_rows is not given: the library provides the memory, and the caller releases it. */
  if (failed("combine_backward",
             crossdock_combine_backward(step->dispatcher, step->plan, &args, &back))) {
    return 1;
  }
  const int has_failed = run_experts(step, back.grad_rows.tensor.data, step->grad_rows.data);
  if (failed("release", crossdock_output_release(&back.grad_rows, step->place->stream)) ||
      has_failed) {
    return 1;
  }
  crossdock_output grad_x = {step->grad_x, NULL};
  return failed("dispatch_backward", crossdock_dispatch_backward(step->dispatcher, step->plan,
                                                                 &step->grad_rows, &grad_x));
}

static int make_plan(Step* step) {
  crossdock_routing routing = CROSSDOCK_ROUTING_INIT;
  routing.expert_ids = step->expert_ids;
  routing.weights = step->weights;
  crossdock_plan_info info = CROSSDOCK_PLAN_INFO_INIT;
  if (failed("plan_create", crossdock_plan_create(step->dispatcher, &routing, &step->plan)) ||
      failed("plan_describe", crossdock_plan_describe(step->plan, &info))) {
    return 1;
  }
  step->R = info.capacity_rows;
  return 0;
}

/* Makes a step of the values: memory is taken from one block. */
static int run_step(Step* step, Values* values) {
  const Place* place = step->place;
  const size_t row_bytes = D * sizeof(float);
  char* block = take(place, sizeof *values);
  Values* there = (Values*)block;
  char* row_block = NULL;
  int has_failed = block == NULL || copy(place, block, values, sizeof *values);
  step->expert_ids = tensor_2d(place, there->expert_ids, CROSSDOCK_I32, T, K);
  step->weights = tensor_2d(place, there->weights, CROSSDOCK_F32, T, K);
  step->x = tensor_2d(place, there->x, CROSSDOCK_F32, T, D);
  step->grad_out = tensor_2d(place, there->grad_out, CROSSDOCK_F32, T, D);
  step->out = tensor_2d(place, there->out, CROSSDOCK_F32, T, D);
  step->grad_x = tensor_2d(place, there->grad_x, CROSSDOCK_F32, T, D);
  step->grad_weights = tensor_2d(place, there->grad_weights, CROSSDOCK_F32, T, K);
  has_failed = has_failed || make_plan(step);
  if (!has_failed) row_block = take(place, 3 * (size_t)step->R * row_bytes);
  has_failed = has_failed || row_block == NULL;
  if (!has_failed) {
    const size_t num_bytes = (size_t)step->R * row_bytes;
    step->rows = tensor_2d(place, row_block, CROSSDOCK_F32, step->R, D);
    step->y = tensor_2d(place, row_block + num_bytes, CROSSDOCK_F32, step->R, D);
    step->grad_rows = tensor_2d(place, row_block + 2 * num_bytes, CROSSDOCK_F32, step->R, D);
    has_failed = forward(step) || backward(step) || copy(place, values, block, sizeof *values) ||
                 is_wrong(values);
  }
  crossdock_plan_destroy(step->plan);
  give_back(place, row_block);
  give_back(place, block);
  return has_failed;
}

/* Everything that a rank does with its group. Returns 0 if all results are right. */
static int run_rank(crossdock_group* group, Place place) {
  crossdock_group_info info = CROSSDOCK_GROUP_INFO_INIT;
  if (failed("group_describe", crossdock_group_describe(group, &info)) || open_stream(&place)) {
    return 1;
  }
  crossdock_dispatch_config config = CROSSDOCK_DISPATCH_CONFIG_INIT;
  config.num_experts = E;
  config.top_k = K;
  config.width = D;
  crossdock_device_options options = CROSSDOCK_DEVICE_OPTIONS_INIT;
  options.stream = place.stream;
  Step step;
  memset(&step, 0, sizeof step);
  step.place = &place;
  step.first_expert =
      info.rank * (E / info.size) + (info.rank < E % info.size ? info.rank : E % info.size);
  Values values;
  memset(&values, 0, sizeof values);
  fill(&values, info.rank);
  const int has_failed =
      failed("dispatcher_create", crossdock_dispatcher_create(group, &config, &step.dispatcher)) ||
      failed("device_options", crossdock_set_device_options(step.dispatcher, &options)) ||
      run_step(&step, &values);
  crossdock_dispatcher_destroy(step.dispatcher);
  close_stream(&place);
  printf("rank %d of %d (%s, %s): %s\n", (int)info.rank, (int)info.size, info.communicator,
         place.is_gpu ? "GPU" : "CPU",
         has_failed ? "something is wrong" : "outputs and gradients are right");
  return has_failed;
}

/* ---- Ranks as threads ---- */

typedef struct {
  crossdock_group* group;
  Place place;
  int has_failed;
} ThreadRank;

static void* run_thread(void* argument) {
  ThreadRank* rank = argument;
  rank->has_failed = run_rank(rank->group, rank->place);
  crossdock_group_leave(rank->group, NULL);
  return NULL;
}

static int run_threads(Place place) {
  crossdock_group* groups[kRanks];
  if (failed("group_from_threads", crossdock_group_from_threads(kRanks, NULL, groups))) return 1;
  pthread_t threads[kRanks];
  ThreadRank ranks[kRanks];
  int is_started[kRanks];
  int has_failed = 0;
  for (int r = 0; r < kRanks; ++r) {
    ranks[r].group = groups[r];
    ranks[r].place = place;
    ranks[r].has_failed = 1;
    is_started[r] = pthread_create(&threads[r], NULL, run_thread, &ranks[r]) == 0;
    if (!is_started[r]) crossdock_group_leave(groups[r], "it has no thread");
  }
  for (int r = 0; r < kRanks; ++r) {
    if (is_started[r]) pthread_join(threads[r], NULL);
    has_failed = has_failed || ranks[r].has_failed;
  }
  for (int r = 0; r < kRanks; ++r) crossdock_group_destroy(groups[r]);
  return has_failed;
}

/* ---- Ranks as processes ---- */

/* Writes this rank's blob to a file; the name appears when the file is complete. */
static int write_blob(const char* folder, int rank, const void* blob, int64_t num_bytes) {
  char part[512];
  char name[512];
  snprintf(part, sizeof part, "%s/part%d", folder, rank);
  snprintf(name, sizeof name, "%s/blob%d", folder, rank);
  FILE* file = fopen(part, "wb");
  if (file == NULL) return 1;
  const size_t written = fwrite(blob, 1, (size_t)num_bytes, file);
  return fclose(file) != 0 || written != (size_t)num_bytes || rename(part, name) != 0;
}

/* Waits for a rank's file, 60 s at most. Returns the size of its blob, 0 if there is none. */
static size_t read_blob(const char* folder, int rank, char* blob) {
  char name[512];
  snprintf(name, sizeof name, "%s/blob%d", folder, rank);
  for (int attempt = 0; attempt < 6000; ++attempt) {
    FILE* file = fopen(name, "rb");
    if (file != NULL) {
      const size_t num_bytes = fread(blob, 1, kMaxBlobBytes, file);
      fclose(file);
      return num_bytes;
    }
    const struct timespec pause = {0, 10000000};
    nanosleep(&pause, NULL);
  }
  fprintf(stderr, "rank %d has not written %s\n", rank, name);
  return 0;
}

static int join(crossdock_bootstrap* bootstrap, int rank, int size, const char* folder,
                crossdock_group** group) {
  const void* own = NULL;
  int64_t own_bytes = 0;
  if (failed("bootstrap_blob", crossdock_bootstrap_blob(bootstrap, &own, &own_bytes)) ||
      write_blob(folder, rank, own, own_bytes)) {
    return 1;
  }
  static char blobs[kMaxRanks * kMaxBlobBytes];
  int64_t offsets[kMaxRanks + 1] = {0};
  for (int r = 0; r < size; ++r) {
    const size_t num_bytes = read_blob(folder, r, blobs + offsets[r]);
    if (num_bytes == 0) return 1;
    offsets[r + 1] = offsets[r] + (int64_t)num_bytes;
  }
  crossdock_join_args args = CROSSDOCK_JOIN_ARGS_INIT;
  args.bytes = blobs;
  args.offsets = offsets;
  args.rank = rank;
  args.size = size;
  return failed("group_join", crossdock_group_join(bootstrap, &args, NULL, group));
}

static int run_process(Place place, int rank, int size, const char* folder) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return 1;
  crossdock_bootstrap* bootstrap = NULL;
  if (failed("bootstrap_open", crossdock_bootstrap_open(NULL, &bootstrap))) return 1;
  crossdock_group* group = NULL;
  int has_failed = join(bootstrap, rank, size, folder, &group);
  crossdock_bootstrap_destroy(bootstrap);
  has_failed = has_failed || run_rank(group, place);
  crossdock_group_destroy(group);
  return has_failed;
}

int main(int argc, char** argv) {
  Place place = {0, NULL};
  if (argc >= 3 && strcmp(argv[1], "--device") == 0) {
    place.is_gpu = strcmp(argv[2], "cuda") == 0;
    argc -= 2;
    argv += 2;
  }
  if (place.is_gpu && !has_gpu()) {
    printf("skipped: no GPU, or this program was compiled without CUDA\n");
    return kSkipped;
  }
  if (argc == 4) return run_process(place, atoi(argv[1]), atoi(argv[2]), argv[3]);
  return run_threads(place);
}
