"""The curves of a whole run, on its own MLflow run: what people compare experiments by.

Each attempt of an actor tracks its parts in a run of its own. These are the few that speak for all of them, by training
step, taken from the ledger by whoever supervises the run.
"""

from statistics import fmean

from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.rows import EvaluationRow, Progress
from tasks.tracking.report import REWARD_MEAN, STALENESS_MAX, STALENESS_MEAN, sampled_accuracy, side_wait_share
from tasks.tracking.tracker import Tracker

STEP_CURVES = (
    REWARD_MEAN,
    STALENESS_MEAN,
    STALENESS_MAX,
    "response/tokens_mean",
    "throughput/response_tokens_per_s",
    "wait/trainer_for_rollouts",
    "step_s",
)
"""Metrics of a training step that stand on the run itself as well as on its trainer's attempt."""


class Curves:
    """Tracks a run step by step: `follow` is called again and again, and reads only what is new."""

    def __init__(self, tracker: Tracker, ledger: Ledger, run_id: str, first_step: int) -> None:
        """`first_step` is the step the run begins at here: before it, a former supervisor has tracked the run."""
        self._tracker = tracker
        self._ledger = ledger
        self._run_id = run_id
        self._next_step = first_step
        last = ledger.steps(run_id, since=first_step - 1)
        self._heard_until_s = last[-1].end_s if last else None
        self._evaluated: set[str] = set()

    def follow(self, progress: Progress) -> None:
        """Track the steps since the last call; a step that is trained anew after a resume is tracked anew."""
        if progress.step <= self._next_step:
            self._next_step = progress.step
            return
        for row in self._ledger.steps(self._run_id, since=self._next_step):
            self._tracker.log({name: row.metrics[name] for name in STEP_CURVES if name in row.metrics}, row.step)
        self._next_step = progress.step
        skipped = {"quarantined_prompts": progress.quarantined_prompts, "engine_deaths": progress.engine_deaths}
        self._tracker.log({f"rollout/{name}": float(count) for name, count in skipped.items()}, progress.step - 1)
        self._track_waits(progress.step - 1)
        self.track_evaluations()

    def track_evaluations(self) -> None:
        """Track the evaluations that are over and not tracked yet, at the version they examined."""
        for purpose, row in self._ledger.evaluations(self._run_id).items():
            if row.result is not None and purpose not in self._evaluated:
                self._evaluated.add(purpose)
                self._tracker.log(_accuracies(row), row.version)

    def _track_waits(self, step: int) -> None:
        """Share of their time that the replicas waited, over what they have told since the last step."""
        spans = [s for s in self._ledger.spans(self._run_id, self._heard_until_s) if s.role == "replica"]
        if spans:
            self._heard_until_s = max(span.end_s for span in spans)
            self._tracker.log({"wait/rollouts_for_trainer": side_wait_share(spans, "replica")}, step)


def _accuracies(row: EvaluationRow) -> dict[str, float]:
    """Mean rewards of an evaluation that is over, as MLflow shows them: first in the order of names."""
    assert row.result is not None
    figures = {"eval/held_out": sampled_accuracy(row.result), "eval/held_out_greedy": fmean(row.result["greedy"])}
    for name, result in row.result.get("others", {}).items():
        figures[f"eval/others/{name}"] = sampled_accuracy(result)
    return figures
