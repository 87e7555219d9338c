"""The summary of a run, from rows by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.config.experiment import Experiment
from tasks.exchange.files import write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.rows import EvaluationRow, Progress, RunRow, SpanRow, StepRow
from tasks.tracking.report import (
    REWARD_MEAN,
    STALENESS_MAX,
    STALENESS_MEAN,
    key_figures,
    plot_curves,
    predicted_times,
    summarise,
    write_report,
)
from tests.support.ledger import begin, join
from tests.support.plan import gpu_plan

RUN = RunRow("laptop-1", "flow-1", "mlflow-1", "completed", 0, 8, 2, 3, 3, 0.0)
PROGRESS = Progress(
    step=3,
    steps=3,
    groups={"consumed": 24},
    dropped={"stale": 1, "error": 2},
    outcomes={"scored": 180, "timeout": 2, "error": 0, "truncated": 10},
    quarantined_prompts=1,
    response_tokens=1200,
    consumed=24,
    max_staleness_seen=2,
    latest_version=(0, 3),
    reward_mean=0.5,
)
STEPS = [
    StepRow(step, end_s, {REWARD_MEAN: step / 4, STALENESS_MEAN: 0.5, STALENESS_MAX: 1.0})
    for step, end_s in ((0, 100.0), (1, 110.0), (2, 130.0))
]
PLAN = gpu_plan("host", "gpu", 2)


def evaluation(purpose: str, greedy: list[float], sampled: list[list[float]]) -> EvaluationRow:
    version = 0 if purpose == "before" else 3
    unscored = {} if purpose == "before" else {"timeout": 2, "error": 1}
    return EvaluationRow(purpose, version, "done", {"greedy": greedy, "sampled": sampled, "unscored": unscored})


EVALUATIONS = {
    "before": evaluation("before", [0.0, 0.0, 1.0], [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
    "after": evaluation("after", [1.0, 1.0, 1.0], [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
}


def spans(role: str, kinds: list[tuple[str, float, float]], slot: int = 0) -> list[SpanRow]:
    return [SpanRow(role, slot, 1, kind, start, end) for kind, start, end in kinds]


def test_summary_by_hand() -> None:
    busy = spans(
        "trainer", [("wait", 0, 20), ("busy", 20, 28), ("publish", 28, 30), ("wait", 30, 35), ("busy", 35, 40)]
    )
    busy += spans("replica", [("wait", 0, 10), ("busy", 10, 32), ("load", 32, 33), ("wait", 33, 37), ("busy", 37, 44)])
    summary = summarise(RUN, PROGRESS, STEPS, busy, EVALUATIONS, PLAN, group_size=8)
    assert summary["run_id"], summary["status"] == ("laptop-1", "completed")
    assert (summary["eval_before"], summary["eval_after"]) == pytest.approx((1 / 6, 5 / 6))
    assert (summary["eval_before_greedy"], summary["eval_after_greedy"]) == pytest.approx((1 / 3, 1.0))
    assert summary["eval_unscored"] == 3
    half = 1.959964 * math.sqrt(1 / 3) / math.sqrt(3)  # differences 1, 0, 1
    assert summary["eval_ci95"] == pytest.approx([2 / 3 - half, 2 / 3 + half])
    assert (summary["trajectories_consumed"], summary["trajectories_dropped"]) == (192, 24)
    assert summary["step_s_measured"] == 15.0
    assert summary["tokens_per_s"] == pytest.approx(400 / 15)
    # Both sides are at work from 20 to 40: the trainer waits 5 of 20 s there, the replica 4 of 20.
    assert (summary["wait_trainer_share"], summary["wait_rollout_share"]) == (5 / 20, 4 / 20)
    # The replica is the slower side with 29 s; both work during 20-30 and 37-40.
    assert summary["overlap_share"] == pytest.approx(13 / 29)
    assert summary["weight_versions"] == 4
    assert (summary["mlflow_run_id"], summary["prefect_flow_run_id"]) == ("mlflow-1", "flow-1")
    json.dumps(summary, allow_nan=False)


def test_measured_times_stand_beside_predicted_ones() -> None:
    """24 groups were finished in 29 s and 11 s of two replicas' time, of which 1 s was a load; a step takes 8."""
    replicas = spans("replica", [("busy", 0, 20), ("load", 19, 20), ("load", 25, 28), ("busy", 30, 39)])
    replicas += spans("replica", [("busy", 5, 16)], slot=1)
    steps = [replace(row, metrics={"train_s": 7.0 + row.step, "publish_s": 2.0}) for row in STEPS]
    summary = summarise(RUN, PROGRESS, steps, replicas, {}, PLAN, group_size=8)
    times = {name: (summary[f"{name}_predicted"], summary[f"{name}_measured"]) for name in predicted_times(PLAN)}
    assert times["train_s"] == pytest.approx((8.0, 8.0))
    assert times["publish_s"] == pytest.approx((1.0, 2.0))
    assert times["load_s"] == pytest.approx((0.5, 2.0))
    assert times["rollout_s"] == pytest.approx((512 / 40, (28 + 11) / 2 / 24 * 8))
    assert times["step_s"] == pytest.approx((512 / 40 + 0.5, 15.0))


def test_a_run_that_never_began_has_a_summary_too() -> None:
    empty = replace(PROGRESS, step=0, dropped={}, response_tokens=0, consumed=0, latest_version=None)
    requested = {"before": EvaluationRow("before", 0, "requested", None)}
    summary = summarise(replace(RUN, state="failed"), empty, [], [], requested, PLAN, group_size=8)
    assert summary["status"] == "failed"
    for name in (
        "eval_before",
        "eval_after",
        "eval_unscored",
        "eval_ci95",
        "step_s_measured",
        "rollout_s_measured",
        "train_s_measured",
        "publish_s_measured",
        "load_s_measured",
        "tokens_per_s",
        "overlap_share",
    ):
        assert summary[name] is None
    assert summary["weight_versions"] == summary["trajectories_dropped"] == 0


def test_a_lost_step_is_not_a_long_step() -> None:
    steps = [StepRow(step, end_s, {}) for step, end_s in ((0, 0.0), (1, 10.0), (5, 500.0), (6, 512.0))]
    assert summarise(RUN, PROGRESS, steps, [], {}, PLAN, group_size=8)["step_s_measured"] == 11.0


def test_the_report_is_written_from_the_ledger(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "laptop-1")
    write_json(directory.experiment, Experiment().model_dump(mode="json"))
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    supervisor = begin(ledger, "laptop-1", (8, 2, 3), flow_run_id="flow-1")
    trainer = join(ledger, "trainer", run_id="laptop-1")
    ledger.record_span(trainer, "busy", "step 0", 1.0)
    ledger.close_run(supervisor, "cancelled")
    summary = write_report(directory, ledger, "laptop-1", PLAN, "it said no")
    assert json.loads(directory.summary.read_text()) == summary
    assert (summary["status"], summary["prefect_flow_run_id"]) == ("cancelled", "flow-1")
    assert key_figures(summary, tmp_path)["not in MLflow"] == "it said no"
    assert "not in MLflow" not in key_figures({**summary, "untracked": None}, tmp_path)
    assert directory.curves.exists()


@pytest.mark.parametrize(("steps", "evaluations"), [(STEPS, EVALUATIONS), ([], {}), ([StepRow(0, 1.0, {})], {})])
def test_curves_are_a_picture(tmp_path: Path, steps: list[StepRow], evaluations: dict[str, EvaluationRow]) -> None:
    plot_curves(tmp_path / "curves.png", steps, evaluations, 2, "laptop-1")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
