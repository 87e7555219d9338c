"""The experiment: one YAML file, one model, also the form in the Prefect UI.

The form begins as `LAPTOP`, so an empty one trains SmolLM2-135M on one-digit sums.
"""

from typing import Any

from pydantic import Field, model_validator

from planners.sections import Section
from planners.workload.step import Workload
from tasks.config.data import DataSource, Evaluation, HeldOutEvaluation, ReasoningGymSource, SourceEvaluation, repeated
from tasks.config.moved import moved_keys
from tasks.config.rewards import TAKEN_NAMES, ReasoningGymReward, Reward
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
    data: list[DataSource] = Field(
        default=[ReasoningGymSource(parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})],
        min_length=1,
        description="Where questions come from: sources, mixed by weight.",
    )
    prompt: PromptSection = Field(default=PromptSection(), description="How a question becomes a prompt.")
    rewards: list[Reward] = Field(
        default=[ReasoningGymReward()], min_length=1, description="What an answer is worth: rewards, summed by weight."
    )
    sampling: SamplingSection = Field(default=SamplingSection(), description="How answers are drawn.")
    algorithm: Algorithm = Field(default=DecoupledPpo(), description="What answers teach: advantages and loss.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="How the weights are updated.")
    evaluations: list[Evaluation] = Field(
        default=[HeldOutEvaluation()],
        min_length=1,
        description="What the model is judged by before and after; results lead with the first.",
    )
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
        self._check_names()
        self._check_rewards()
        return self

    @property
    def sources(self) -> list[DataSource]:
        """All sources of questions: those trained on, then those of evaluations."""
        return [*self.data, *(e.source for e in self.evaluations if isinstance(e, SourceEvaluation))]

    def _check_names(self) -> None:
        for what, labels in (
            ("sources", [source.label for source in self.sources]),
            ("rewards", [reward.label for reward in self.rewards]),
            ("evaluations", [evaluation.label for evaluation in self.evaluations]),
        ):
            if (twice := repeated(labels)) is not None:
                raise ValueError(f"two {what} are called {twice}: give one another name")
        if taken := [reward.label for reward in self.rewards if reward.label in TAKEN_NAMES]:
            raise ValueError(f"the metric reward/{taken[0]} is another one's: give the reward {taken[0]} another name")

    def _check_rewards(self) -> None:
        """Every source is scored, by rewards that can score it."""
        sources = {source.label: source for source in self.sources}
        for reward in self.rewards:
            for name in reward.sources or []:
                if name not in sources:
                    raise ValueError(
                        f"the reward {reward.label} is for the source {name}, but the sources are {', '.join(sources)}"
                    )
                if not reward.can_score(sources[name].kind):
                    raise ValueError(
                        f"the reward {reward.label} scores questions of reasoning-gym only, but the source {name} is "
                        f"of kind {sources[name].kind}: name other sources or use another reward"
                    )
        for name, source in sources.items():
            if not any(reward.applies(name, source.kind) for reward in self.rewards):
                raise ValueError(
                    f"no reward scores the source {name} of kind {source.kind}; the reward reasoning_gym scores its "
                    "own questions only: add one such as math_verify or character_share"
                )


LAPTOP = Experiment(
    prompt=PromptSection(
        template="<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", prefill="Answer:", stop="<|im_end|>"
    )
)
"""The run of deployments/experiments/laptop.yaml."""
