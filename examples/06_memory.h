#ifndef CROSSDOCK_EXAMPLES_06_MEMORY_H
#define CROSSDOCK_EXAMPLES_06_MEMORY_H

/* Memory for example 06: of the host or, if compiled with EXAMPLE_WITH_CUDA, of GPU 0. Functions
 * that return an int return 0 if they succeed. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef EXAMPLE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

/* Where the tensors of a rank are. */
typedef struct {
  int is_gpu;
  void* stream; /* of this rank, a cudaStream_t */
} Place;

#ifdef EXAMPLE_WITH_CUDA

static int cuda_failed(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return 0;
  fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  return 1;
}

static int has_gpu(void) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

static int open_stream(Place* place) {
  cudaStream_t stream = NULL;
  if (!place->is_gpu) return 0;
  if (cuda_failed("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) return 1;
  place->stream = stream;
  return 0;
}

static void close_stream(const Place* place) {
  if (place->is_gpu) cudaStreamDestroy(place->stream);
}

static int copy(const Place* place, void* to, const void* from, size_t num_bytes) {
  if (num_bytes == 0) return 0;
  if (!place->is_gpu) {
    memcpy(to, from, num_bytes);
    return 0;
  }
  return cuda_failed("copy",
                     cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, place->stream)) ||
         cuda_failed("wait", cudaStreamSynchronize(place->stream));
}

static void* take(const Place* place, size_t num_bytes) {
  void* data = NULL;
  if (!place->is_gpu) return malloc(num_bytes + 1);
  return cuda_failed("cudaMalloc", cudaMalloc(&data, num_bytes + 1)) ? NULL : data;
}

static void give_back(const Place* place, void* data) {
  if (place->is_gpu) {
    cudaFree(data);
  } else {
    free(data);
  }
}

#else /* without CUDA */

static int has_gpu(void) {
  return 0;
}
static int open_stream(Place* place) {
  return place->is_gpu;
}
static void close_stream(const Place* place) {
  (void)place;
}
static int copy(const Place* place, void* to, const void* from, size_t num_bytes) {
  (void)place;
  if (num_bytes > 0) memcpy(to, from, num_bytes);
  return 0;
}
static void* take(const Place* place, size_t num_bytes) {
  (void)place;
  return malloc(num_bytes + 1);
}
static void give_back(const Place* place, void* data) {
  (void)place;
  free(data);
}

#endif

#endif /* CROSSDOCK_EXAMPLES_06_MEMORY_H */
