"""For how long a run has stood still: what `run.step_deadline_s` is held against."""

from collections.abc import Callable

from tasks.exchange.ledger import ActorRow, Ledger
from tasks.lifecycle.silence import Silence, steady_s

LOOK_EVERY_S = 1.0
_LONGEST_GAP_S = 10.0


class Stall:
    """How long nothing has moved before the eyes of one who waits for a step, on that one's own clock.

    A step that was finished moves the run. What has a deadline of its own is waited for besides: an actor that starts
    has `run.start_deadline_s`; and while an evaluation is asked for, which keeps a replica from everything else for as
    long as it has questions, every piece of work that a replica counts moves the run. After a gap of the looker's own
    a full deadline begins.
    """

    def __init__(self, ledger: Ledger, run_id: str, clock: Callable[[], float] = steady_s) -> None:
        """`clock` gives seconds that only grow."""
        self._ledger = ledger
        self._run_id = run_id
        self._clock = clock
        self._silence = Silence(_LONGEST_GAP_S, clock)
        self._looked: float | None = None
        self._seen: object = None
        self._moves = 0
        self._still_s = 0.0

    def look(self, step: int = 0) -> float:
        """Seconds for which nothing has moved; to be called again and again, it reads at most every LOOK_EVERY_S.

        Args:
            step: steps that are finished.
        """
        now = self._clock()
        if self._looked is None or now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            rows = [row for row in self._ledger.actors(self._run_id) if row.role != "supervisor"]
            seen = (step, self._work(rows))
            self._moves += seen != self._seen or _somebody_starts(rows)
            self._seen = seen
            self._still_s = self._silence.look({self._run_id: self._moves})[self._run_id]
        return self._still_s

    def _work(self, rows: list[ActorRow]) -> list[tuple[int, int, int]] | None:
        """What the replicas have done while an evaluation is asked for, None while none is."""
        if all(row.state == "done" for row in self._ledger.evaluations(self._run_id).values()):
            return None
        return [(row.slot, row.attempt, row.work) for row in rows if row.role == "replica"]


def _somebody_starts(rows: list[ActorRow]) -> bool:
    """Whether an actor is on its way, or has not been given out yet."""
    roles = {row.role for row in rows}
    return not {"trainer", "replica"} <= roles or any(row.state in ("assigned", "starting") for row in rows)
