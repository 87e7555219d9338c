"""A run whose answers nobody can score is told at once: it would generate to its deadline and teach nothing."""

from tasks.exchange.ledger import Progress
from tasks.exchange.ledger.drops import TOO_FEW_SCORED

_STEPS = 3


class Unscored:
    """Counts groups that were dropped because too few of their answers could be scored, with none scored between."""

    def __init__(self, prompts_per_step: int, progress: Progress) -> None:
        """What lies before `progress` counts no more."""
        self.most = _STEPS * prompts_per_step
        """So many in a row, three steps' worth, are not the chance of some questions."""
        self._look(progress)

    def in_a_row(self, progress: Progress) -> int:
        """How many there have been since a group was last scored."""
        if progress.answered != self._answered:
            self._look(progress)
        return progress.dropped.get(TOO_FEW_SCORED, 0) - self._dropped

    def _look(self, progress: Progress) -> None:
        self._answered, self._dropped = progress.answered, progress.dropped.get(TOO_FEW_SCORED, 0)
