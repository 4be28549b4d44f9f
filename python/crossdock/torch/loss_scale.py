"""The factor on the gradients of the routers' losses, for all layers of the process."""
from typing import Callable, Union

_scale: Union[float, Callable[[], float]] = 1.0


def set_loss_scale(scale: Union[float, Callable[[], float]]) -> None:
    """Multiplies the gradients of auxiliary losses and z-losses by the factor that the training loop applies to the main
    loss: 1 / the number of micro-batches, a loss scale, or their product. Default: 1.

    `scale` may be a function, such as `scaler.get_scale` of a GradScaler, which every backward of a layer calls; that one waits
    for a GPU, so it cannot be captured in a CUDA graph: pass its result after every `scaler.update()` instead. The value must
    be the same on every rank. Call it like `MoEAuxLossAutoScaler.set_loss_scale` of Megatron, before backward.
    """
    global _scale
    if not callable(scale):
        scale = float(scale)
    _scale = scale


def loss_scale() -> float:
    """The factor in use now."""
    return float(_scale() if callable(_scale) else _scale)
