"""The experiment's sampling and optimiser; its algorithm is one of `tasks.training.algorithms`."""

from typing import Literal

from pydantic import Field

from planners.sections import Section


class SamplingSection(Section):
    """How answers are drawn: from the whole vocabulary, without top-k, top-p or penalties."""

    temperature: float = Field(
        default=1.0,
        ge=0.01,  # vLLM takes a lower one for this, so that its log-probabilities are not those of the trainer
        description="Sampling temperature of rollouts.",
    )


class OptimizerSection(Section):
    """AdamW, and the updates of a step."""

    lr: float = Field(default=5e-6, gt=0, description="AdamW learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay of the learning rate after warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW decay of the gradient's running mean: β₁.")
    beta2: float = Field(
        default=0.99, ge=0, lt=1, description="AdamW decay of the squared gradient's running mean: β₂."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW decoupled weight decay; 0 is none.")
    gradient_clip: float = Field(default=1.0, gt=0, description="Largest global gradient norm.")
    minibatches: int = Field(
        default=1,
        ge=1,
        description="Optimiser updates per training step, at most workload.prompts_per_step; it need not divide them.",
    )
