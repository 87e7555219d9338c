"""The result of a run: `summary.json` and the picture of its curves, all of it derived from the ledger.

Busy time is what both sides are judged by: the trainer's spans of training and publishing, the replicas' spans with
answers in flight. Shares of waiting count from the moment both sides have begun to work until either's last busy
moment, so that neither start-up nor the last evaluation looks like waiting.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planners.plan.plan import ClusterPlan
from tasks.config.files import read_resolved_experiment
from tasks.exchange.files import temporary_sibling, write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.rows import EvaluationRow, Progress, RunRow, SpanRow, StepRow
from tasks.tracking.statistics import Interval, intersection, length_s, overlap_share, paired_difference, wait_share

REWARD_MEAN = "reward/mean"
STALENESS_MEAN = "staleness/mean"
STALENESS_MAX = "staleness/max"
"""Metrics of a training step that the curves show; a step without one leaves a gap."""

_BUSY_KINDS = ("busy", "publish")
_BLUE, _ORANGE, _GREY = "#2f6db3", "#d9822b", "#8a8f98"


def write_report(
    directory: RunDirectory, ledger: Ledger, run_id: str, plan: ClusterPlan, untracked: str | None
) -> dict[str, Any]:
    """Write the run's summary and curves; returns the summary. Works on an unfinished run too.

    `untracked` says why the run is not in MLflow; None where it is.
    """
    run = ledger.find_run(run_id=run_id)
    if run is None:
        raise LookupError(f"the ledger knows no run {run_id}")
    steps, evaluations = ledger.steps(run_id), ledger.evaluations(run_id)
    group_size = read_resolved_experiment(directory.experiment).workload.group_size
    summary = summarise(run, ledger.progress(run_id), steps, ledger.spans(run_id), evaluations, plan, group_size)
    summary["quarantined"] = [asdict(prompt) for prompt in ledger.quarantined_prompts(run_id)]
    summary["untracked"] = untracked
    write_json(directory.summary, summary)
    plot_curves(directory.curves, steps, evaluations, run.max_staleness, run_id)
    return summary


def summarise(
    run: RunRow,
    progress: Progress,
    steps: Sequence[StepRow],
    spans: Sequence[SpanRow],
    evaluations: Mapping[str, EvaluationRow],
    plan: ClusterPlan,
    group_size: int,
) -> dict[str, Any]:
    """The figures of a run by name.

    Accuracies are mean rewards over the first evaluation's items: sampled unless named greedy; those of other
    evaluations are in `eval_others`, by name; `eval_ci95` is the 95 % interval
    of after − before, paired by item; `eval_unscored` counts the answers that could not be scored and so count 0.
    `step_s_measured` is the median time from the end of one step to the end of the next, and `tokens_per_s` the
    response tokens of a mean step over that time. Beside each time of a step that the plan predicts stands the measured
    one, see `_measured_times`. What is not known yet is None.
    """
    step_s = _median_step_s(steps)
    tokens_per_step = progress.response_tokens / len(steps) if steps else None
    return {
        "run_id": run.run_id,
        "status": run.state,
        "steps": progress.step,
        **_evaluation_figures(evaluations),
        "trajectories_consumed": progress.consumed * group_size,
        "trajectories_dropped": sum(progress.dropped.values()) * group_size,
        "groups_dropped_by_reason": progress.dropped,
        "answers_by_outcome": progress.outcomes,
        "quarantined_prompts": progress.quarantined_prompts,
        "engine_deaths": progress.engine_deaths,
        "max_staleness_seen": progress.max_staleness_seen,
        "max_staleness_allowed": run.max_staleness,
        **{f"{name}_predicted": value for name, value in predicted_times(plan).items()},
        "step_s_measured": step_s,
        **_measured_times(run, progress, steps, spans),
        "tokens_per_s": tokens_per_step / step_s if tokens_per_step is not None and step_s else None,
        **_side_shares(spans),
        "weight_versions": progress.latest_version[1] + 1 if progress.latest_version else 0,
        "lineage": run.lineage,
        "mlflow_run_id": run.mlflow_run_id,
        "prefect_flow_run_id": run.flow_run_id,
    }


def key_figures(summary: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """The figures of a run that a person reads, by label, and where its files are; what is not known is left out."""
    get = summary.get
    before, after, unscored, interval = (get(f"eval_{key}") for key in ("before", "after", "unscored", "ci95"))
    accuracy = f"{figure(before)} → {figure(after)}" if after is not None else f"{figure(before)} before training"
    if unscored:
        accuracy += f" ({unscored} answers could not be scored and count 0)"
    shown = {
        "held-out accuracy": (before, accuracy),
        "95 % interval of the gain": (interval, f"{interval[0]:+.3f} to {interval[1]:+.3f}" if interval else ""),
        "steps": (get("steps"), figure(get("steps"))),
        "step, predicted / measured": (
            get("step_s_measured"),
            f"{figure(get('step_s_predicted'))} / {figure(get('step_s_measured'))} s",
        ),
        "response tokens/s": (get("tokens_per_s"), figure(get("tokens_per_s"))),
        "staleness seen / allowed": (
            get("steps") or None,
            f"{figure(get('max_staleness_seen'))} / {figure(get('max_staleness_allowed'))}",
        ),
        "trainer waits": (get("wait_trainer_share"), f"{_percent(get('wait_trainer_share'))} of its time"),
        "rollouts wait": (get("wait_rollout_share"), f"{_percent(get('wait_rollout_share'))} of their time"),
        "overlap": (get("overlap_share"), f"{_percent(get('overlap_share'))} of the busier side's work"),
        "prompts skipped": (
            get("quarantined_prompts") or None,
            f"{get('quarantined_prompts')}, for failing or for ending engines: see `quarantined` in summary.json",
        ),
        "not in MLflow": (get("untracked"), get("untracked") or ""),
        "files": (directory, str(directory)),
    }
    return {label: words for label, (known, words) in shown.items() if known is not None}


def figure(value: float | None) -> str:
    """A number as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # never 1.8e+03


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def predicted_times(plan: ClusterPlan) -> dict[str, float]:
    """Seconds of a step and of its parts, as `summary.json` and MLflow name them."""
    return {
        "step_s": plan.step_s,
        "train_s": plan.train_s,
        "rollout_s": plan.rollout_s,
        "publish_s": plan.sync_train_s,
        "load_s": plan.sync_rollout_s,
    }


def _measured_times(
    run: RunRow, progress: Progress, steps: Sequence[StepRow], spans: Sequence[SpanRow]
) -> dict[str, float | None]:
    """What the parts of a step took.

    Training, publishing and loading: the median over steps, and over loads of any replica, whose check of the files is
    predicted with the load but takes place beside generation. Generation: the time that the mean replica had answers in
    flight and did not load, for as many groups as a step takes, of all that were finished; where the gate lets through
    fewer answers than were planned for, that is longer than at full speed.
    """
    loads = [s.end_s - s.start_s for s in spans if s.role == "replica" and s.kind == "load"]
    times = {"load_s_measured": median(loads) if loads else None}
    for name in ("train_s", "publish_s"):
        values = [row.metrics[name] for row in steps if name in row.metrics]
        times[f"{name}_measured"] = median(values) if values else None
    slots = {s.slot for s in spans if s.role == "replica" and s.kind == "busy"}
    finished = sum(progress.groups.get(state, 0) for state in ("scored", "consumed"))
    if not slots or not finished:
        return {**times, "rollout_s_measured": None}
    busy_s = 0.0
    for slot in slots:
        own = [s for s in spans if s.slot == slot]
        busy, loading = _intervals(own, "replica", ("busy",)), _intervals(own, "replica", ("load",))
        busy_s += length_s(busy) - length_s(intersection(busy, loading))
    return {**times, "rollout_s_measured": busy_s / len(slots) / finished * run.prompts_per_step}


def _median_step_s(steps: Sequence[StepRow]) -> float | None:
    ends = sorted((row.step, row.end_s) for row in steps)
    times = [end - start for (before, start), (step, end) in pairwise(ends) if step == before + 1]
    return median(times) if times else None


def _evaluation_figures(evaluations: Mapping[str, EvaluationRow]) -> dict[str, Any]:
    sampled, greedy = {}, {}
    for purpose, row in evaluations.items():
        if row.result is not None:
            sampled[purpose] = [fmean(rewards) for rewards in row.result["sampled"]]
            greedy[purpose] = row.result["greedy"]
    figures: dict[str, Any] = {}
    for suffix, items in (("", sampled), ("_greedy", greedy)):
        for purpose in ("before", "after"):
            figures[f"eval_{purpose}{suffix}"] = fmean(items[purpose]) if purpose in items else None
    paired = {"before", "after"} <= sampled.keys() and len(sampled["before"]) > 1
    change = asdict(paired_difference(sampled["before"], sampled["after"])) if paired else None
    figures["eval_change"] = change["mean"] if change else None
    figures["eval_ci95"] = [change["low"], change["high"]] if change else None
    counts = [sum(row.result.get("unscored", {}).values()) for row in evaluations.values() if row.result is not None]
    figures["eval_unscored"] = sum(counts) if counts else None
    figures["eval_items"] = len(sampled["before"]) if "before" in sampled else None
    figures["eval_others"] = _other_evaluations(evaluations)
    return figures


def _other_evaluations(evaluations: Mapping[str, EvaluationRow]) -> dict[str, dict[str, float]]:
    """Sampled accuracy before and after on all evaluations but the first, by their names."""
    figures: dict[str, dict[str, float]] = {}
    for purpose, row in evaluations.items():
        for name, result in (row.result or {}).get("others", {}).items():
            figures.setdefault(name, {})[purpose] = sampled_accuracy(result)
    return figures


def sampled_accuracy(result: Mapping[str, Any]) -> float:
    """Mean reward of an evaluation's sampled answers: each item counts once, whatever its number of answers."""
    return fmean(fmean(rewards) for rewards in result["sampled"])


def _side_shares(spans: Sequence[SpanRow]) -> dict[str, float | None]:
    busy = {role: _intervals(spans, role, _BUSY_KINDS) for role in ("trainer", "replica")}
    if not all(busy.values()):
        return {"wait_trainer_share": None, "wait_rollout_share": None, "overlap_share": None}
    window = (
        max(min(start for start, _ in side) for side in busy.values()),
        min(max(end for _, end in side) for side in busy.values()),
    )
    return {
        "wait_trainer_share": side_wait_share(spans, "trainer", window),
        "wait_rollout_share": side_wait_share(spans, "replica", window),
        "overlap_share": overlap_share(busy["trainer"], busy["replica"]),
    }


def side_wait_share(spans: Sequence[SpanRow], role: str, window: Interval = (-math.inf, math.inf)) -> float:
    """Share of the time that the actors of a role were there, within the window, that they spent waiting."""
    slots = sorted({span.slot for span in spans if span.role == role})
    by_slot = [[span for span in spans if span.slot == slot] for slot in slots]
    waits = [intersection(_intervals(own, role, ("wait",)), [window]) for own in by_slot]
    presence = [intersection(_intervals(own, role, None), [window]) for own in by_slot]
    return wait_share(waits, presence)


def _intervals(spans: Sequence[SpanRow], role: str, kinds: Sequence[str] | None) -> list[Interval]:
    return [(s.start_s, s.end_s) for s in spans if s.role == role and (kinds is None or s.kind in kinds)]


def plot_curves(
    path: Path,
    steps: Sequence[StepRow],
    evaluations: Mapping[str, EvaluationRow],
    max_staleness: int,
    title: str,
) -> None:
    """Draw reward and staleness over training steps, with the held-out evaluations, into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    _draw_reward(above, steps, evaluations)
    _draw_staleness(below, steps, max_staleness)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    temporary = temporary_sibling(path)
    figure.savefig(temporary, format="png")
    temporary.rename(path)


def _draw_reward(axes: Any, steps: Sequence[StepRow], evaluations: Mapping[str, EvaluationRow]) -> None:
    numbers, rewards = _series(steps, REWARD_MEAN)
    axes.plot(numbers, rewards, color=_BLUE, alpha=0.35, linewidth=1, marker=".", markersize=4, label="training step")
    axes.plot(numbers, _smooth(rewards), color=_BLUE, linewidth=2.2, label="mean of the last 5 steps")
    results = [(row.version, row.result) for row in evaluations.values() if row.result is not None]
    versions = [version for version, _ in results]
    sampled = [sampled_accuracy(result) for _, result in results]
    greedy = [fmean(result["greedy"]) for _, result in results]
    marks = {"color": _ORANGE, "markeredgecolor": "white", "linestyle": "none", "clip_on": False, "zorder": 4}
    axes.plot(versions, sampled, marker="o", markersize=10, label="held out, sampled", **marks)
    axes.plot(versions, greedy, marker="D", markersize=8, label="held out, greedy", **marks)
    axes.set_ylabel("mean reward")
    axes.set_ylim(bottom=min(0.0, *rewards) if rewards else 0.0)
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def _draw_staleness(axes: Any, steps: Sequence[StepRow], max_staleness: int) -> None:
    numbers, largest = _series(steps, STALENESS_MAX)
    axes.bar(numbers, largest, width=0.8, color=_GREY, alpha=0.35, label="largest")
    numbers, means = _series(steps, STALENESS_MEAN)
    axes.plot(numbers, means, color=_BLUE, linewidth=1.6, label="mean")
    axes.axhline(max_staleness, color=_ORANGE, linestyle="--", linewidth=1.4, label=f"bound ({max_staleness})")
    axes.set_ylim(0, max_staleness + 1)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("staleness\n(versions)")
    axes.set_xlabel("training step")
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)


def _series(steps: Sequence[StepRow], name: str) -> tuple[list[int], list[float]]:
    points = sorted((row.step, row.metrics[name]) for row in steps if name in row.metrics)
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of up to five values that end at each one."""
    return [fmean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]
