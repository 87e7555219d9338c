"""The experiment: one YAML file, one model, also the form in the Prefect UI.

The defaults are the laptop run, so an empty form trains SmolLM2-135M on one-digit sums.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from planners.errors import UserError
from planners.sections import NAME_PATTERN, Section, parse_section, parse_yaml, read_tree
from planners.workload.step import Workload

_PATHS = ("data.path", "model.source")
_WEEK_S = 604_800
_LARGEST_SEED = 2**31 - 1
"""numpy, and so vLLM, takes less than 2³², to which a replica's slot and attempt are still added."""
_OWNERS = {"task": "reasoning_gym", "parameters": "reasoning_gym", "path": "jsonl"}
"""The kind of data that a key belongs to; others would ignore it."""
_RESERVED_TAGS = ("mlflow.", "hexflow.")
_MOST_ANSWERS = 100_000
"""Per step: what the planner's simulator still gets through."""


class ModelSection(Section):
    """Which language model is trained."""

    source: str = Field(
        default="smollm2-135m-instruct",
        description="`smollm2-135m-instruct` (shipped in a Python package), `tiny-random` (1 M parameters, byte "
        "tokenizer), or a directory in Hugging Face layout with safetensors weights and a tokenizer (in the form, an "
        "absolute path).",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="float32 on CPUs, bfloat16 on GPUs.")
    max_context: int = Field(default=512, ge=16, description="Longest prompt plus answer the engine serves, in tokens.")


class DataSection(Section):
    """Where questions come from."""

    kind: Literal["reasoning_gym", "jsonl", "toy"] = Field(
        default="reasoning_gym",
        description="`reasoning_gym` generates questions; `jsonl` reads {question, answer} lines; `toy` asks for one "
        "character and needs no language.",
    )
    task: str = Field(default="chain_sum", description="reasoning-gym generator (kind `reasoning_gym`).")
    parameters: dict[str, Any] = Field(
        default={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        description="Arguments of the reasoning-gym generator.",
    )
    path: str | None = Field(default=None, description="JSON Lines file (kind `jsonl`); in the form, an absolute path.")
    heldout_size: int = Field(default=100, ge=1, description="Unique questions kept for evaluation, never trained on.")
    heldout_seed: int = Field(
        default=10_000_000, ge=0, le=_LARGEST_SEED, description="Seed of the held-out questions; far from training's."
    )

    @model_validator(mode="after")
    def _no_key_is_ignored(self) -> "DataSection":
        """Compared with the defaults, since the form and a stored experiment hold every key."""
        for key, owner in _OWNERS.items():
            if self.kind != owner and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for kind {owner}, but kind is {self.kind}: leave it out or change the kind")
        return self


class PromptSection(Section):
    """How a question becomes the text the model continues."""

    template: str = Field(
        default="<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        description="Text with the placeholder {question}.",
    )
    prefill: str = Field(default="Answer:", description="Start of the answer, given to the model.")
    stop: str = Field(default="<|im_end|>", description="Token that ends an answer; it is trained on.")


class RewardSection(Section):
    """How an answer is scored, in killable processes."""

    kind: Literal["reasoning_gym", "math_verify", "character_share"] = Field(
        default="reasoning_gym",
        description="`reasoning_gym`: the generator's own scorer; `math_verify`: mathematical equality with the "
        "answer; `character_share`: share of the answer's characters that equal the expected one.",
    )
    timeout_s: float = Field(
        default=5.0, gt=0, le=_WEEK_S, description="Seconds after which scoring one answer is killed."
    )
    processes: int = Field(default=1, ge=1, le=256, description="Scoring processes per rollout replica.")


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


class RolloutSection(Section):
    """How replicas generate and take new weights."""

    on_new_version: Literal["continue", "restart", "drain"] = Field(
        default="continue",
        description="Answers in flight when weights change: `continue` under the new weights with versions kept per "
        "token, `restart` from nothing, or `drain` (finish first, then load).",
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="Answers in flight per replica; empty: as the plan says."
    )
    max_attempts_per_prompt: int = Field(
        default=3,
        ge=1,
        description="Failed attempts of a prompt before it is given up; one lost with a dead replica does not count.",
    )


class ClusterSection(Section):
    """Which devices the run may use."""

    device_types: list[str] | None = Field(
        default=None, min_length=1, description="Device types to use; empty: all that are found."
    )


class PlannerSection(Section):
    """Choices that a person may take away from the planner."""

    train_type: str | None = Field(default=None, description="Device type that trains; empty: the planner chooses.")
    train_devices: int | None = Field(default=None, ge=1, description="Devices that train; empty: planner chooses.")


class StorageSection(Section):
    """What is kept on shared storage."""

    keep_versions: int = Field(default=2, ge=1, description="Newest weight versions kept besides claimed ones.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_steps: int = Field(default=100, ge=1, description="Steps for which consumed trajectories are kept.")


class TrackingSection(Section):
    """Where the run appears in MLflow."""

    experiment: str = Field(default="hexflow", description="MLflow experiment name: one per study.")
    tags: dict[str, str] = Field(default={}, description="Tags of the MLflow run and the Prefect flow run.")

    @field_validator("tags")
    @classmethod
    def _names_are_free(cls, tags: dict[str, str]) -> dict[str, str]:
        for name in tags:
            if name.startswith(_RESERVED_TAGS):
                raise ValueError(f"the tag {name} has a reserved name, {' and '.join(_RESERVED_TAGS)} start those")
        return tags


class RunSection(Section):
    """Length, seeds and patience of the run."""

    name: str = Field(default="laptop", pattern=NAME_PATTERN, description="Start of the run's id.")
    steps: int = Field(default=40, ge=1, le=1_000_000, description="Training steps.")
    seed: int = Field(default=0, ge=0, le=_LARGEST_SEED, description="Seed of data order, sampling and training.")
    checkpoint_every: int = Field(
        default=20, ge=1, description="Steps between checkpoints; the last step always has one."
    )
    evaluation_samples: int = Field(default=2, ge=1, le=1000, description="Sampled answers per held-out question.")
    restarts: int = Field(default=3, ge=0, description="Restarts of dead replicas and trainers allowed in all.")
    heartbeat_deadline_s: float = Field(
        default=60.0,
        ge=5,
        le=_WEEK_S,
        description="Seconds of silence after which an actor is dead; it beats every 2 s.",
    )
    start_deadline_s: float = Field(
        default=600.0, gt=0, le=_WEEK_S, description="Longest start of a replica or trainer, in seconds."
    )
    step_deadline_s: float = Field(
        default=1800.0, gt=0, le=_WEEK_S, description="Longest time without a finished step, in seconds."
    )


class Experiment(Section):
    """Everything that decides a run, except the hardware it finds."""

    model: ModelSection = Field(default=ModelSection(), description="Which language model is trained.")
    data: DataSection = Field(default=DataSection(), description="Where questions come from.")
    prompt: PromptSection = Field(default=PromptSection(), description="How a question becomes a prompt.")
    reward: RewardSection = Field(default=RewardSection(), description="How an answer is scored.")
    algorithm: AlgorithmSection = Field(default=AlgorithmSection(), description="Loss, optimiser and sampling.")
    workload: Workload = Field(default=Workload(), description="Sizes of a step and the staleness bound.")
    rollout: RolloutSection = Field(default=RolloutSection(), description="How replicas generate and take weights.")
    cluster: ClusterSection = Field(default=ClusterSection(), description="Which devices the run may use.")
    planner: PlannerSection = Field(default=PlannerSection(), description="What the planner may not choose.")
    storage: StorageSection = Field(default=StorageSection(), description="What is kept on shared storage.")
    tracking: TrackingSection = Field(default=TrackingSection(), description="Where the run appears in MLflow.")
    run: RunSection = Field(default=RunSection(), description="Length, seeds and patience of the run.")

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
        if self.algorithm.minibatches > self.workload.prompts_per_step:
            raise ValueError(
                f"algorithm.minibatches is {self.algorithm.minibatches}, above workload.prompts_per_step "
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


def load_experiment(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply dotted overrides such as `algorithm.lr=1e-6`.

    Relative paths (`data.path`, a directory in `model.source`) are made absolute, since workers run in other
    directories: those of the file start at the file, those of overrides at the working directory.

    Raises:
        UserError: the file is missing, empty or not YAML, a key is unknown (the nearest is named) or there twice, or a
            value does not fit.
    """
    tree = read_tree(path, "experiment")
    for key in _PATHS:
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict) and name in tree[section]:
            tree[section][name] = _absolute(key, tree[section][name], path.absolute().parent)
    for override in overrides or []:
        _apply_override(tree, override)
    return parse_experiment(tree, str(path))


def read_resolved_experiment(path: Path) -> Experiment:
    """The experiment that was stored with a run.

    Raises:
        UserError: the file is damaged, or of a hexflow that knew other keys or values.
    """
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, the experiment of the run, cannot be read ({error}): start a new run.") from None
    return parse_experiment(tree, str(path))


def parse_experiment(tree: dict[str, Any], origin: str) -> Experiment:
    """Validate a tree of values; `origin` names it in errors.

    Raises:
        UserError: one phrase per fault, with the nearest known key for a misspelt one.
    """
    return parse_section(Experiment, tree, origin)


def _absolute(key: str, value: Any, start: Path) -> Any:
    """The path that a value names, from `start` on; what is none, such as a shipped model's name, stays."""
    if not isinstance(value, str) or not value:
        return value
    path = start / os.path.expanduser(value)
    return str(path.resolve()) if key == "data.path" or path.is_dir() else value


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise UserError(f"The override '{override}' is not of the form section.key=value, as in algorithm.lr=1e-6.")
    node = tree
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise UserError(f"The override '{override}' goes below '{part}', which holds a plain value.")
    try:
        value = parse_yaml(text)
    except ValueError:
        raise UserError(f"The value of the override '{override}' is not valid YAML: quote it.") from None
    node[parts[-1]] = _absolute(key, value, Path.cwd()) if key in _PATHS else value
