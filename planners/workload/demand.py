"""What one training step asks of the cluster, with lengths as distributions."""

from dataclasses import dataclass
from functools import cached_property

from planners.errors import UserError
from planners.workload.lengths import Lengths, constant
from planners.workload.step import Workload


@dataclass(frozen=True)
class Demand:
    """Sizes of a step (B, G, η as in `Workload`), the lengths, and what the trainer does with them.

    A group is scored `reward_s` seconds after its last answer, `scorers` groups at once (None: as many as there are).
    `longest_tokens` is the longest prompt plus answer that must be served. `concurrency` are the answers of a replica,
    where a person leaves no choice. `reference`: every rank of the trainer also holds the model that the run began
    with, and asks it for the log-probabilities of every answer.
    """

    prompts_per_step: int
    group_size: int
    max_staleness: int
    prompt: Lengths
    response: Lengths
    longest_tokens: int
    minibatches: int = 1
    micro_batch_tokens: int = 16384
    reward_s: float = 0.0
    scorers: int | None = None
    concurrency: int | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise UserError(f"max_staleness is {self.max_staleness}, but staleness cannot be negative: use 0 or more.")
        if self.prompts_per_step < 1 or self.group_size < 1 or self.minibatches < 1:
            raise UserError("prompts_per_step, group_size and minibatches must each be 1 or more.")

    @property
    def answers_per_step(self) -> int:
        """B·G."""
        return self.prompts_per_step * self.group_size

    @cached_property
    def tokens_per_step(self) -> float:
        """W: response tokens of a step; throughput counts these and nothing else."""
        return self.answers_per_step * self.response.mean

    @property
    def scoring_s(self) -> float:
        """What scoring a step's groups takes with all scorers at work; it goes on beside generation and training."""
        return self.prompts_per_step * self.reward_s / self.scorers if self.scorers else 0.0

    @property
    def minibatch_groups(self) -> list[int]:
        """Groups of each minibatch of a step, the larger ones first."""
        return [(self.prompts_per_step + i) // self.minibatches for i in reversed(range(self.minibatches))]

    @cached_property
    def largest_minibatch_tokens(self) -> float:
        """Response tokens that 99 % of the (larger) minibatches do not exceed; answers are independent."""
        answers = self.minibatch_groups[0] * self.group_size
        deviation = max(0.0, self.response.moment(2) - self.response.mean**2) ** 0.5
        likely = answers * self.response.mean + 2.33 * deviation * answers**0.5
        return min(likely, answers * self.response.longest)

    @property
    def gate_answers(self) -> int:
        """Answers that may be in flight at once without starving at the gate: η·B·G, at least one step's."""
        return max(1, self.max_staleness) * self.answers_per_step

    @cached_property
    def context(self) -> float:
        """Mean tokens in the cache of an answer in progress."""
        return self.prompt.mean + self.response.age_moment(1)

    @cached_property
    def context_deviation(self) -> float:
        """Standard deviation of the same."""
        prompt = self.prompt.moment(2) - self.prompt.mean**2
        age = self.response.age_moment(2) - self.response.age_moment(1) ** 2
        return float(max(0.0, prompt + age) ** 0.5)

    @cached_property
    def latency_tokens(self) -> float:
        """Mean length of the longest answer that a step waits for.

        Steps end in order, so one that is late delays those begun meanwhile, η more: half of them, by comparison with
        the simulator, count.
        """
        return self.response.mean_longest(round(self.answers_per_step * (1 + self.max_staleness / 2)))

    @cached_property
    def drain_share(self) -> float:
        """What a batch takes longer than its work at full speed, as a share of the longest answer's time.

        When no answer waits any more, those in progress have still to end: the longest of them takes the residual
        length's high quantile, while their work alone would take its mean. Answers of one length that start
        together also end together.
        """
        if self.response.points[0] == self.response.longest:
            return 0.0
        residual = self.response.residual_quantile(1 - 1 / self.answers_per_step) - self.response.age_moment(1)
        return min(1.0, max(0.0, residual) / self.latency_tokens)


def demand_of(
    workload: Workload,
    minibatches: int = 1,
    answer_tokens: float | None = None,
    *,
    micro_batch_tokens: int = Demand.micro_batch_tokens,
    max_context: int | None = None,
    concurrency: int | None = None,
    reference: bool = False,
) -> Demand:
    """A workload's demand.

    Without a distribution every prompt is as long as it may be, and every answer has `answer_tokens`, or where that is
    not known either `max_new_tokens`.

    Args:
        workload: sizes of a step.
        minibatches: optimiser updates of a step.
        answer_tokens: mean tokens of an answer, as measured.
        micro_batch_tokens: what the trainer packs answers into.
        max_context: longest prompt plus answer that replicas must be able to serve; None: what the workload allows.
        concurrency: answers in flight per replica; None: the planner chooses.
        reference: whether the trainer refers to the model that the run began with.
    """
    prompt, response = workload.prompt_lengths, workload.response_lengths
    return Demand(
        prompts_per_step=workload.prompts_per_step,
        group_size=workload.group_size,
        max_staleness=workload.max_staleness,
        prompt=prompt.lengths() if prompt else constant(workload.max_prompt_tokens),
        response=response.lengths() if response else constant(answer_tokens or workload.max_new_tokens),
        longest_tokens=max_context or workload.max_prompt_tokens + workload.max_new_tokens,
        minibatches=minibatches,
        micro_batch_tokens=micro_batch_tokens,
        reward_s=workload.reward_s,
        scorers=workload.scorers,
        concurrency=concurrency,
        reference=reference,
    )
