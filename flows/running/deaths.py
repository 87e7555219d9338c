"""What the deaths of engines cost: nothing for as long as a question may be to blame for them.

An engine that died by itself leaves what it was answering accused in the ledger. Once nobody is accused any more the
verdict is there: a question that went into quarantine for it has paid for all deaths until then, and with nobody found
guilty they are restarts like others. An engine that answers nothing between its deaths cannot blame them on questions
for long.
"""

from tasks.exchange.ledger import Progress
from tasks.exchange.ledger.drops import GUILTY_FROM


class Deaths:
    """The deaths of a run's engines that no verdict has been given on, as the ledger tells of them."""

    def __init__(self, restarts: int, progress: Progress) -> None:
        """`restarts`: the run's budget, by which more deaths may follow each other without an answer between them.

        What lies before `progress` is nobody's any more.
        """
        self._most_unanswered = GUILTY_FROM + restarts
        self._settled = self._last = progress

    def to_pay(self, progress: Progress) -> int:
        """How many deaths turn out to be restarts like others; each is told of once."""
        if progress.answered != self._last.answered:
            self._last = progress
        deaths = progress.engine_deaths - self._settled.engine_deaths
        is_hopeless = progress.engine_deaths - self._last.engine_deaths > self._most_unanswered
        if not deaths or (progress.accused_prompts and not is_hopeless):
            return 0
        is_paid_for = progress.deadly_prompts > self._settled.deadly_prompts and not is_hopeless
        self._settled = progress
        return 0 if is_paid_for else deaths
