// A kernel with a stack, for the test of tools/check_spills.py.

__global__ void spilling_kernel(int* values, int count) {
  int kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = values[i];
  for (int i = 0; i < count; ++i) values[i] = kept[(i * values[i]) & 63];  // not known in advance
}
