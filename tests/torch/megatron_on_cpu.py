"""Lets Megatron's MoE layer run on the CPU, over gloo. Import it before megatron.core."""
import contextlib

import torch


class _Stream:
    """Does nothing: on the CPU everything runs in order."""

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


torch.cuda.current_device = lambda: "cpu"
torch.cuda.Stream = _Stream
_stream = _Stream()
torch.cuda.current_stream = lambda device=None: _stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()

from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402

moe_utils.te_general_gemm = None  # its name does not exist without TransformerEngine


def _to_cpu(tensor, as_numpy=False, record_stream=False):
    """Megatron leaves CPU tensors unchanged; its all-to-all needs numbers."""
    if torch.is_tensor(tensor):
        tensor = tensor.cpu()
        return tensor.numpy() if as_numpy else tensor
    return tensor


token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
