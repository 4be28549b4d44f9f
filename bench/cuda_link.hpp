#pragma once

namespace crossdock::bench {

/// What each of the first `num_gpus` GPUs sends to the others, and receives from them at the same
/// time, in GB/s: the median of several rounds in which every GPU copies to every other. 0 for one
/// GPU. Leaves peer access on.
double measure_link_rate(int num_gpus);

}  // namespace crossdock::bench
