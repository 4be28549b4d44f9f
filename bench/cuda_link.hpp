#pragma once

namespace crossdock::bench {

/// The rate at which each of the first `num_gpus` GPUs sends to the others while receiving from
/// them, in GB/s: the median of several rounds in which every GPU copies to every other. 0 for one
/// GPU. Leaves peer access enabled.
double measure_link_rate(int num_gpus);

}  // namespace crossdock::bench
