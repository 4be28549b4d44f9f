"""Tiny models with the mixture-of-experts layers of well-known ones."""
import dataclasses
from typing import Optional

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Letters: D width, E experts, K routes per token, F inner width of an expert."""

    width: int = 32
    layers: int = 2
    heads: int = 4  # of queries
    key_heads: int = 2  # of keys and values
    head_width: int = 8
    rotary_base: float = 10000.0
    attention_bias: bool = False
    normalise_heads: bool = False  # RMS norm of every head's queries and keys

    experts: int = 8
    top_k: int = 2
    inner: int = 48
    activation: str = "swiglu"  # or "clamped_swiglu"
    expert_bias_terms: bool = False  # biases inside the experts
    shared_inner: int = 0  # inner width of the shared expert; 0: none

    score: str = "softmax"  # over all experts; "softmax_of_chosen"; "sigmoid"
    router_bias: bool = False  # of the logits
    normalise_weights: bool = True
    weight_scale: float = 1.0
    groups: int = 1  # of experts, of which the best top_groups are kept
    top_groups: int = 1
    bias_rate: float = 0.0  # of the bias for selection, which balances the load without a loss
    balance_loss: float = 0.01
    z_loss: float = 0.001
    idle_expert: Optional[int] = None  # never chosen: for tests

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})")
        if self.experts % self.groups:
            raise ValueError(f"experts ({self.experts}) must be a multiple of groups ({self.groups})")
        if self.top_groups * (self.experts // self.groups) < self.top_k:
            raise ValueError(f"{self.top_groups} groups have fewer experts than top_k ({self.top_k})")


PRESETS = {
    "qwen3": ModelConfig(normalise_heads=True),
    "mixtral": ModelConfig(experts=4, inner=64, score="softmax_of_chosen", z_loss=0.0),
    "deepseek-v3": ModelConfig(
        experts=16, top_k=4, inner=24, shared_inner=24, score="sigmoid", groups=4, top_groups=2, weight_scale=2.5,
        bias_rate=0.001, balance_loss=0.001, z_loss=0.0,
    ),
    "gpt-oss": ModelConfig(
        attention_bias=True, activation="clamped_swiglu", expert_bias_terms=True, score="softmax_of_chosen",
        router_bias=True, z_loss=0.0,
    ),
}
