"""The experiment's algorithm: loss, optimiser and the sampling it relies on."""

from typing import Literal

from pydantic import Field

from planners.sections import Section


class AlgorithmSection(Section):
    """Decoupled PPO with group-normalised advantages, and the sampling it relies on."""

    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of rollouts.")
    lr: float = Field(default=5e-6, gt=0, description="AdamW learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Decay after warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW decay of the gradient's running mean: β₁.")
    adam_beta2: float = Field(
        default=0.99, ge=0, lt=1, description="AdamW decay of the squared gradient's running mean: β₂."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW decoupled weight decay; 0 is none.")
    clip: float = Field(default=0.2, gt=0, description="PPO clip range ε.")
    behaviour_weight_cap: float = Field(
        default=2.0, gt=0, description="Cap of π_prox/π_behave, the correction for stale tokens."
    )
    gradient_clip: float = Field(default=1.0, gt=0, description="Largest global gradient norm.")
    minibatches: int = Field(
        default=1,
        ge=1,
        description="Optimiser updates per training step, at most workload.prompts_per_step; it need not divide them.",
    )
    tokens_per_micro_batch: int = Field(
        default=1024, ge=1, description="Largest packed micro-batch in tokens (a single answer above it goes alone)."
    )
    zero_stage: int = Field(default=0, ge=0, le=3, description="DeepSpeed ZeRO stage, 0 to 3.")
    permute_advantages: bool = Field(
        default=False, description="Control experiment: shuffle advantages within each group, with a random sign."
    )
