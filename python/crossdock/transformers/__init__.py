"""Crossdock in Hugging Face transformers: experts on one rank, and expert parallelism.

    import crossdock.transformers as ct

    ct.register()
    model = AutoModelForCausalLM.from_config(config, experts_implementation="crossdock")
    parallel = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="crossdock")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=parallel)

Importing it changes nothing. See docs/transformers.md.
"""
import warnings
from typing import Any, Optional, Union

import transformers

from crossdock._group import group_config as check_options

from . import dispatchers
from .experts import experts_forward, register_for_fp8

__all__ = ["NAME", "register"]

NAME = "crossdock"


def register(
    *, max_rows: Optional[int] = None, strategy: str = "auto", partial_sums: Union[bool, str] = False, **group_options: Any
) -> None:
    """Registers "crossdock" as `experts_implementation` and `ep_implementation`.

    Options apply to models made afterwards, and must be the same on every rank.

    Args:
        max_rows, strategy, partial_sums: of the dispatchers of expert parallelism; see `crossdock.torch.Dispatcher`.
        group_options: of the groups of ranks, for example `arrival_deadline`; see `crossdock.torch.group`.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        raise ImportError(
            f"transformers {transformers.__version__} has no ExpertsInterface, which crossdock needs; install 5.20 or later"
        ) from None
    check_options(**group_options)
    dispatchers.options = dispatchers.Options(max_rows, strategy, partial_sums, group_options)
    ExpertsInterface.register(NAME, experts_forward)
    register_for_fp8(NAME)
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        warnings.warn(
            f"transformers {transformers.__version__} has no EPImplementationInterface (5.23 has): "
            f'experts_implementation="{NAME}" is registered, ep_implementation="{NAME}" is not',
            stacklevel=2,
        )
        return
    from .expert_parallel import CrossdockEP

    EPImplementationInterface.register(NAME, CrossdockEP)
