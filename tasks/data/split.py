"""The experiment's questions: which are trained on, and which are kept to judge by.

Invariants: `item` is a function of the data, `run.seed` and the prompt index alone, so that every replica and every
resumed run sees the same questions; and it never returns a question that an evaluation asks, whichever source has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from planners.errors import UserError
from tasks.config.data import DataSource, Evaluation, HeldOutEvaluation, ReasoningGymSource, SourceEvaluation
from tasks.config.experiment import Experiment
from tasks.data.item import Item
from tasks.data.mix import Mix, divide
from tasks.data.sources.base import Source
from tasks.generators import check_task

_SHOWN_GENERATED = 1000
"""Generated questions are alike: so many show whether they fit."""


@dataclass(frozen=True)
class Examination:
    """One evaluation: its name, its questions, all different, and how often each is answered by sampling."""

    name: str
    items: tuple[Item, ...]
    samples: int


class Questions:
    """All questions of an experiment.

    Attributes:
        examinations: one for each of the experiment's evaluations, in their order.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Open every source.

        Raises:
            UserError: the data cannot serve the experiment.
        """
        data, seed = experiment.data, experiment.run.seed
        self._prompts_per_step = experiment.workload.prompts_per_step
        self._mix = Mix([section.weight for section in data], seed)
        sources = [section.open() for section in data]
        kept: set[str] = set()
        self.examinations = tuple(_examine(one, sources, self._mix, kept) for one in experiment.evaluations)
        self._training = [source.training(seed, kept) for source in sources]
        shares = divide(self._prompts_per_step, self._mix.shares)
        for source, training, share in zip(sources, self._training, shares, strict=True):
            if training.epoch is not None and training.epoch < share:
                raise UserError(
                    f"Beside the evaluations' questions there remain {training.epoch} of the source {source.name} to "
                    f"train on, fewer than the {share} that it gives of workload.prompts_per_step "
                    f"{self._prompts_per_step}: add questions, or lower that or the evaluations' size."
                )

    def item(self, prompt_index: int) -> Item:
        """The training question at this index (from 0, endless)."""
        source, place = self._mix.place(prompt_index)
        return self._training[source].draw(place)

    def known(self) -> Iterator[Item]:
        """What can be looked at before a run: all that evaluations ask, whole files, and the start of the generated."""
        for examination in self.examinations:
            yield from examination.items
        for training in self._training:
            for place in range(training.epoch or min(self._prompts_per_step, _SHOWN_GENERATED)):
                yield training.draw(place)


def check_tasks(data: Sequence[DataSource]) -> None:
    """Refuse unknown generators; takes no time.

    Raises:
        UserError: a source's task is no generator of reasoning-gym (the nearest is named).
    """
    for section in data:
        if isinstance(section, ReasoningGymSource):
            check_task(section.task)


def _examine(evaluation: Evaluation, sources: Sequence[Source], mix: Mix, kept: set[str]) -> Examination:
    """The questions of an evaluation, none of which another has; their texts are added to `kept`."""
    items: list[Item] = []
    match evaluation:
        case HeldOutEvaluation():
            for source, size in zip(sources, divide(evaluation.size, mix.shares), strict=True):
                items += _keep(source.held_out(size, evaluation.seed, kept), kept)
        case SourceEvaluation():
            items = _keep(evaluation.source.open().held_out(evaluation.size, evaluation.seed, kept), kept)
        case _:
            assert_never(evaluation)
    return Examination(evaluation.label, tuple(items), evaluation.samples)


def _keep(items: list[Item], kept: set[str]) -> list[Item]:
    kept.update(item.question for item in items)
    return items
