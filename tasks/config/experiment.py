"""The experiment: one YAML file, one model, also the form in the Prefect UI.

The defaults are the laptop run, so an empty form trains SmolLM2-135M on one-digit sums.
"""

from typing import Any

from pydantic import Field, model_validator

from planners.sections import Section
from planners.workload.step import Workload
from tasks.config.data import DataSection
from tasks.config.moved import moved_keys
from tasks.config.rewards import RewardSection
from tasks.config.rollout import RolloutSection
from tasks.config.sections import (
    ClusterSection,
    ModelSection,
    PlannerSection,
    PromptSection,
    RunSection,
    StorageSection,
    TrackingSection,
)
from tasks.config.training import OptimizerSection, SamplingSection
from tasks.training.algorithms import Algorithm, DecoupledPpo

_MOST_ANSWERS = 100_000
"""Per step: what the planner's simulator still gets through."""


class Experiment(Section):
    """Everything that decides a run, except the hardware it finds."""

    model: ModelSection = Field(default=ModelSection(), description="Which language model is trained.")
    data: DataSection = Field(default=DataSection(), description="Where questions come from.")
    prompt: PromptSection = Field(default=PromptSection(), description="How a question becomes a prompt.")
    reward: RewardSection = Field(default=RewardSection(), description="How an answer is scored.")
    sampling: SamplingSection = Field(default=SamplingSection(), description="How answers are drawn.")
    algorithm: Algorithm = Field(default=DecoupledPpo(), description="What answers teach: advantages and loss.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="How the weights are updated.")
    workload: Workload = Field(default=Workload(), description="Sizes of a step and the staleness bound.")
    rollout: RolloutSection = Field(default=RolloutSection(), description="How replicas generate and take weights.")
    cluster: ClusterSection = Field(default=ClusterSection(), description="Which devices the run may use.")
    planner: PlannerSection = Field(default=PlannerSection(), description="What the planner may not choose.")
    storage: StorageSection = Field(default=StorageSection(), description="What is kept on shared storage.")
    tracking: TrackingSection = Field(default=TrackingSection(), description="Where the run appears in MLflow.")
    run: RunSection = Field(default=RunSection(), description="Length, seeds and patience of the run.")

    @model_validator(mode="before")
    @classmethod
    def _nothing_of_before(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and (instead := moved_keys(tree)):
            raise ValueError(instead)
        return tree

    @model_validator(mode="after")
    def _sections_agree(self) -> "Experiment":
        if self.workload.group_size < 2:
            raise ValueError(
                "workload.group_size is 1, but advantages are normalised within a group: set it to 2 or more"
            )
        answers = self.workload.prompts_per_step * self.workload.group_size
        if answers > _MOST_ANSWERS:
            raise ValueError(
                f"workload.prompts_per_step × workload.group_size is {answers} answers per step, above "
                f"{_MOST_ANSWERS}: lower either"
            )
        for kind, limit in (("prompt", "max_prompt_tokens"), ("response", "max_new_tokens")):
            spec, most = getattr(self.workload, f"{kind}_lengths"), getattr(self.workload, limit)
            if spec is not None and (longest := spec.lengths().longest) > most:
                raise ValueError(
                    f"workload.{kind}_lengths reaches {longest:.0f} tokens, above workload.{limit} {most}: lower one "
                    "or raise the other"
                )
        lengths = self.workload.max_prompt_tokens + self.workload.max_new_tokens
        if lengths > self.model.max_context:
            raise ValueError(
                f"workload.max_prompt_tokens + workload.max_new_tokens is {lengths}, above model.max_context "
                f"{self.model.max_context}: lower the lengths or raise the context"
            )
        if self.optimizer.minibatches > self.workload.prompts_per_step:
            raise ValueError(
                f"optimizer.minibatches is {self.optimizer.minibatches}, above workload.prompts_per_step "
                f"{self.workload.prompts_per_step}: each minibatch needs at least one group"
            )
        if "{question}" not in self.prompt.template:
            raise ValueError("prompt.template lacks the placeholder {question}")
        if self.data.kind == "jsonl" and not self.data.path:
            raise ValueError("data.kind is jsonl, but data.path is empty: name the file")
        if self.reward.kind == "reasoning_gym" and self.data.kind != "reasoning_gym":
            raise ValueError(
                f"reward.kind reasoning_gym scores its own questions only, but data.kind is {self.data.kind}: "
                "use math_verify or character_share"
            )
        return self
