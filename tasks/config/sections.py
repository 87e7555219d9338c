"""What decides a run besides its data, its rewards and its training: one section each of the experiment."""

import re

from pydantic import Field, field_validator

from planners.sections import NAME_PATTERN, Section
from planners.workload.model import Dtype
from tasks.config.paths import DirectoryOrName

LONGEST_S = 604_800
"""A week."""
LARGEST_SEED = 2**31 - 1
"""numpy, and so vLLM, takes less than 2³², to which a replica's slot and attempt are still added."""
_RESERVED_TAGS = ("mlflow.", "hexflow.")
_TAG_NAME = r"\w[\w.\- :]{0,249}"


class ModelSection(Section):
    """Which language model is trained."""

    source: DirectoryOrName = Field(
        default="smollm2-135m-instruct",
        description="`smollm2-135m-instruct` (shipped in a Python package), `tiny-random` (1 M parameters, byte "
        "tokenizer), or a directory in Hugging Face layout with safetensors weights and a tokenizer (in the form, an "
        "absolute path).",
    )
    dtype: Dtype = Field(default="float32", description="float32 on CPUs, bfloat16 on GPUs.")
    max_context: int = Field(default=512, ge=16, description="Longest prompt plus answer the engine serves, in tokens.")


class PromptSection(Section):
    """How a question becomes the text the model continues."""

    template: str | None = Field(
        default=None,
        description="Text with the placeholder {question}; empty: the chat template of the model's tokenizer, with the "
        "question as the user's turn.",
    )
    prefill: str = Field(default="", description="Start of the answer, given to the model.")
    stop: str | None = Field(
        default=None, description="Token that ends an answer, which is trained on; empty: the tokenizer's own."
    )

    @field_validator("template")
    @classmethod
    def _has_a_place_for_the_question(cls, template: str | None) -> str | None:
        if template is not None and "{question}" not in template:
            raise ValueError("it lacks the placeholder {question}")
        return template


class ClusterSection(Section):
    """Which devices the run may use."""

    device_types: list[str] | None = Field(
        default=None, min_length=1, description="Device types to use; empty: all that are found."
    )


class PlannerSection(Section):
    """Choices that a person may take away from the planner: wishes, each optional."""

    train_type: str | None = Field(default=None, description="Device type that trains; empty: the planner chooses.")
    train_devices: int | None = Field(default=None, ge=1, description="Devices that train; empty: planner chooses.")
    zero_stage: int | None = Field(
        default=None, ge=0, le=3, description="DeepSpeed ZeRO stage, 0 to 3; empty: the fastest that fits."
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Largest packed micro-batch in tokens (a single answer above it goes alone); empty: 1,024 on "
        "cores, on GPUs up to 16,384, as many as memory allows.",
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="Answers in flight per replica; empty: the planner chooses."
    )


class StorageSection(Section):
    """What is kept on shared storage."""

    keep_versions: int = Field(default=2, ge=1, description="Newest weight versions kept besides claimed ones.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_steps: int = Field(default=100, ge=1, description="Steps for which consumed trajectories are kept.")


class TrackingSection(Section):
    """Where the run appears in MLflow."""

    experiment: str = Field(
        default="hexflow", min_length=1, max_length=500, description="MLflow experiment name: one per study."
    )
    tags: dict[str, str] = Field(default={}, description="Tags of the MLflow run and the Prefect flow run.")

    @field_validator("tags")
    @classmethod
    def _names_are_free(cls, tags: dict[str, str]) -> dict[str, str]:
        for name in tags:
            if name.startswith(_RESERVED_TAGS):
                raise ValueError(f"the tag {name} has a reserved name, {' and '.join(_RESERVED_TAGS)} start those")
            if not re.fullmatch(_TAG_NAME, name):
                raise ValueError(f"MLflow takes no tag {name!r}: a name is up to 250 letters, digits, blanks and _.-:")
        return tags


class RunSection(Section):
    """Length, seeds and patience of the run."""

    name: str = Field(default="laptop", pattern=NAME_PATTERN, description="Start of the run's id.")
    steps: int = Field(default=40, ge=1, le=1_000_000, description="Training steps.")
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="Seed of data order, sampling and training.")
    checkpoint_every: int = Field(
        default=20, ge=1, description="Steps between checkpoints; the last step always has one."
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Restarts of dead replicas and trainers allowed in all; who cannot start the first time gets none.",
    )
    heartbeat_deadline_s: float = Field(
        default=60.0,
        ge=5,
        le=LONGEST_S,
        description="Seconds of silence after which an actor is dead; it beats every 2 s.",
    )
    work_deadline_s: float = Field(
        default=300.0,
        gt=0,
        le=LONGEST_S,
        description="Seconds for which an actor with work in hand may beat and not get on (no token, scored answer or "
        "micro-batch) until it is replaced; scoring adds its time limits. Loading a version may take 900 s more, "
        "publishing and checkpoints half of step_deadline_s. Starting and waiting for others do not count.",
    )
    start_deadline_s: float = Field(
        default=600.0, gt=0, le=LONGEST_S, description="Longest start of a replica or trainer, in seconds."
    )
    step_deadline_s: float = Field(
        default=1800.0,
        gt=0,
        le=LONGEST_S,
        description="Longest time without a finished step, in seconds; in an evaluation, without an answer.",
    )
