"""Follows a flow run from the command line: live progress from the ledger, its end from the Prefect server."""

import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from deployments.prefect.api import Json, PrefectApi, Unreachable
from flows.running.context import SUPERVISOR_SILENCE_S
from tasks.exchange.ledger.database import cause_of
from tasks.exchange.ledger.fence import ACTIVE
from tasks.exchange.ledger.rows import ActorRow, Progress, RunRow, SpanRow, StepRow
from tasks.lifecycle.silence import Silence

POLL_S = 1.0
TELL_EVERY_S = 10.0
"""Longest silence in a log while no step is being finished."""
_LONGEST_GAP_S = 10.0
PICKUP_DEADLINE_S = 180.0
CANCEL_DEADLINE_S = 180.0
LOST_AFTER_S = 3 * SUPERVISOR_SILENCE_S
"""Silence after which a run that nobody has closed is given up, while the server is away: a busy disk delays beats."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STEPS_SHOWN = 8
PACE_STEPS = 10
"""Steps over which the time left is estimated: the first ones are slower."""
STEPS_READ = max(STEPS_SHOWN, PACE_STEPS) + 1
"""With the step before the first one shown, at whose end that one began."""


class Books(Protocol):
    """What is read of the ledger, and the one thing that is written."""

    def find_run(self, *, run_id: str | None = None, flow_run_id: str | None = None) -> RunRow | None:
        """The run."""

    def progress(self, run_id: str) -> Progress:
        """How far it is."""

    def steps(self, run_id: str, since: int = 0) -> list[StepRow]:
        """Its finished steps from step `since` on."""

    def actors(self, run_id: str) -> list[ActorRow]:
        """Its actors."""

    def spans(self, run_id: str, since_s: float | None = None) -> list[SpanRow]:
        """Their times that ended after `since_s`."""

    def ask_to_cancel(self, flow_run_id: str) -> bool:
        """Ask for the run's end; False while there is no run yet."""


@dataclass(frozen=True)
class View:
    """One look at the run; `run` is None until the flow has made it.

    `steps` are the last ones, and `spans` the times since the first of these ended; `silent_s` is how long the
    supervisor's beat has stood still before the eyes of who looks.
    """

    flow_state: str
    run: RunRow | None = None
    progress: Progress | None = None
    steps: Sequence[StepRow] = ()
    actors: Sequence[ActorRow] = ()
    spans: Sequence[SpanRow] = ()
    silent_s: float = 0.0


def look(books: Books, flow_run_id: str, flow_state: str, printed_step: int | None) -> View:
    """Read of the run what is shown: the last steps, and those after `printed_step`, the last one seen before."""
    run = books.find_run(flow_run_id=flow_run_id)
    if run is None:
        return View(flow_state)
    run_id = run.run_id
    progress = books.progress(run_id)
    since = progress.step - STEPS_READ
    steps = books.steps(run_id, since if printed_step is None else min(since, printed_step))
    spans = books.spans(run_id, steps[0].end_s) if steps else []
    return View(flow_state, run, progress, steps, books.actors(run_id), spans)


def supervisor_of(view: View) -> ActorRow | None:
    """The run's supervisor if it is at work, as far as is known; None before it joined and once it has left."""
    return next((actor for actor in view.actors if actor.role == "supervisor" and actor.state in ACTIVE), None)


def ending(view: View) -> Json | None:
    """How the run ended, as the last state of a flow run that cannot be asked; None while its supervisor is at work.

    One that was killed, as with the whole stack, has not said that it leaves, but is silent.
    """
    supervisor = supervisor_of(view)
    if view.run is None or (supervisor is not None and view.silent_s < SUPERVISOR_SILENCE_S):
        return None
    if view.run.state != "running":
        message = "The Prefect server does not answer; the ledger has this."
        return {"type": view.run.state.upper(), "name": view.run.state.capitalize(), "message": message}
    if supervisor is None or view.silent_s < LOST_AFTER_S:
        return None
    message = (
        f"The stack seems to have ended: the Prefect server does not answer, and the run has been silent for "
        f"{minutes(view.silent_s)}. `hexflow up` starts it again."
    )
    return {"type": "CRASHED", "name": "Lost", "message": message}


def with_remedy(state: Json, view: View) -> Json:
    """The end of a flow run, saying what goes on without it where its process was killed and could end nothing."""
    supervisor = supervisor_of(view)
    if state["type"] != "CRASHED" or view.run is None or view.run.state != "running" or supervisor is None:
        return state
    goes_on = "Its actors may go on until `hexflow resume` takes over."
    return {**state, "message": f"{state['message'].rstrip('.')}. {goes_on}"}


def outcome(state: Json, view: View) -> Json | None:
    """How the run ended, None while it goes on: as its flow run did, unless that was cancelled when it was complete.

    Prefect lets no flow run that it was told to cancel end as completed; without its worker it stays Cancelling.
    """
    is_complete = view.run is not None and view.run.state == "completed"
    if is_complete and (state["type"] == "CANCELLED" or (state["type"] == "CANCELLING" and ending(view))):
        return {"type": "COMPLETED", "name": "Completed", "message": "It was complete before it could be cancelled."}
    return state if state["type"] in FINAL else None


def describe_step(view: View, row: StepRow) -> str:
    """One line for a finished step: `step 3/40  reward 0.125  …`."""
    figures = [f"step {row.step + 1}/{view.progress.steps if view.progress else '?'}"]
    figures += [f"{name} {value}" for name, value in step_figures(view, row).items()]
    left_s = time_left_s(view)
    return "  ".join(figures + ([f"left {minutes(left_s)}"] if left_s is not None else []))


def step_figures(view: View, row: StepRow) -> dict[str, str]:
    """The figures of a step that a person follows, by column; those that were not reported are missing."""
    shown = {
        "reward": ("reward/mean", "{:.3f}"),
        "tokens/s": ("throughput/response_tokens_per_s", "{:.1f}"),
        "staleness": ("staleness/max", "{:.0f}"),
        "trainer waits": ("wait/trainer_for_rollouts", "{:.0%}"),
    }
    figures = {
        column: form.format(row.metrics[key])
        for column, (key, form) in shown.items()
        if row.metrics.get(key) is not None
    }
    share = rollout_wait_share(view, row)
    return figures if share is None else {**figures, "rollouts wait": f"{share:.0%}"}


def rollout_wait_share(view: View, row: StepRow) -> float | None:
    """Share of a step's time that the replicas spent waiting, mean over replicas; None for the first step seen."""
    earlier = [step.end_s for step in view.steps if step.end_s < row.end_s]
    replicas = {span.slot for span in view.spans if span.role == "replica"}
    if not earlier or not replicas:
        return None
    start_s = max(earlier)
    waits_s = [
        max(0.0, min(span.end_s, row.end_s) - max(span.start_s, start_s))
        for span in view.spans
        if span.role == "replica" and span.kind == "wait"
    ]
    return sum(waits_s) / (row.end_s - start_s) / len(replicas)


def time_left_s(view: View) -> float | None:
    """Steps left times the median time of the last ones (a resumed run has a gap); None before there are two."""
    if view.progress is None or len(view.steps) < 2:
        return None
    ends_s = [step.end_s for step in view.steps[-PACE_STEPS - 1 :]]
    pace_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends_s))
    return pace_s * (view.progress.steps - view.progress.step)


def minutes(seconds: float) -> str:
    """`42 s`, `3 min 20 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def waiting_for(view: View) -> str:
    """What happens while no step is being finished: the flow's state before the run exists, then its actors."""
    if view.run is None:
        return f"flow run: {view.flow_state.lower()}"
    # Those that have ended were of an attempt before this one, or end because all is done.
    active = [actor for actor in view.actors if actor.role != "supervisor" and actor.state in ACTIVE]
    if not active:
        is_over = view.progress is not None and view.progress.step >= view.progress.steps
        supervisor = supervisor_of(view)
        said = supervisor.message if supervisor else ""
        return f"run {view.run.run_id}: {'reporting' if is_over else said or 'preparing model, profile and plan'}"
    return "; ".join(
        f"{actor.role} {actor.slot} {actor.state}" + (f": {actor.message}" if actor.message else "")
        for actor in sorted(active, key=lambda actor: (actor.role, actor.slot))
    )


def draw(view: View, elapsed_s: float, notice: str) -> RenderableType:
    """The live display: bar, last steps, actors, and a notice such as a cancellation under way."""
    parts: list[RenderableType] = []
    if view.progress and view.steps:
        left_s = time_left_s(view)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {view.progress.step}/{view.progress.steps}", style="bold"),
            ProgressBar(total=view.progress.steps, completed=view.progress.step, width=40),
            f"{minutes(elapsed_s)} gone" + (f", {minutes(left_s)} left" if left_s is not None else ""),
        )
        parts += [head, _step_table(view)]
    parts.append(Text(waiting_for(view) + ("" if view.steps else f" ({minutes(elapsed_s)})"), style="dim"))
    if notice:
        parts.append(Text(notice, style="yellow"))
    return Group(*parts)


def _step_table(view: View) -> Table:
    shown = view.steps[-STEPS_SHOWN:]
    rows = [step_figures(view, row) for row in shown]
    columns = list(dict.fromkeys(column for figures in rows for column in figures))
    table = Table("step", *columns, box=None, header_style="dim")
    for row, figures in zip(shown, rows, strict=True):
        table.add_row(str(row.step + 1), *(figures.get(column, "") for column in columns))
    return table


class Follower:
    """Shows one flow run until it ends; Ctrl-C or SIGTERM cancels it, a second one leaves it to end by itself."""

    def __init__(
        self,
        api: PrefectApi,
        books: Books,
        flow_run_id: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is what the silence of a supervisor is measured by."""
        self._api = api
        self._books = books
        self._flow_run_id = flow_run_id
        self._console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._started = self._answered = time.monotonic()
        self._state: Json = {"type": "SCHEDULED", "name": "Scheduled", "message": ""}
        self._view = View(self._state["name"])
        self._silence = Silence(_LONGEST_GAP_S, clock)
        self._printed_step: int | None = None
        self._has_stepped = False
        self._printed_line = ""
        self._doing_since = self._told = time.monotonic()
        self._attempts: dict[tuple[str, int], int] = {}
        self._notice = ""
        self._picked_up = False
        self._is_told = self._is_asked = False

    def follow(self) -> Json:
        """Show the run until it ends; returns the flow run's last state (`type`, `name`, `message`).

        A run that no worker picks up is cancelled, and comes back as CRASHED.
        """
        with self._live or nullcontext():
            try:
                with sigterm_as_ctrl_c():
                    return self._watch(None)
            except KeyboardInterrupt:
                return self._cancel()

    def cancel(self) -> Json:
        """Cancel the run, whoever started it, and show it until it ends, as `follow`."""
        with self._live or nullcontext():
            return self._cancel()

    def _cancel(self) -> Json:
        try:
            with sigterm_as_ctrl_c():
                self._announce("Cancelling, which takes up to 3 minutes. Ctrl-C again leaves it to end by itself.")
                return self._watch(time.monotonic() + CANCEL_DEADLINE_S)
        except KeyboardInterrupt:
            again = f", `hexflow cancel {self._view.run.run_id}` asks again" if self._view.run else ""
            return {**self._state, "message": f"It is left to end by itself: `hexflow status` shows it{again}."}

    def _watch(self, deadline: float | None) -> Json:
        """Until the flow run ends; with a deadline it is being cancelled."""
        while True:
            if deadline is not None and not self._is_asked:
                self._is_asked = self._ask_ledger_to_cancel()
            answered = self._ask_prefect(is_cancelling=deadline is not None)
            self._answered = time.monotonic() if answered else self._answered
            view = self._look()
            self._show(view)
            ended = outcome(self._state, view) or (None if answered else ending(view))
            if ended is not None:
                return with_remedy(ended, view) if answered else ended
            if not answered and view.run is None and time.monotonic() - self._answered > PICKUP_DEADLINE_S:
                message = f"The Prefect server has not answered for {PICKUP_DEADLINE_S:.0f} s: `hexflow up` starts it."
                return {"type": "CRASHED", "name": "Lost", "message": message}
            if deadline is not None and time.monotonic() > deadline:
                message = f"It was not cancelled within {CANCEL_DEADLINE_S:.0f} s: `hexflow down` ends everything."
                return {**self._state, "type": "CRASHED", "message": message}
            self._picked_up = self._picked_up or self._state["type"] not in ("SCHEDULED", "PENDING")
            if not self._picked_up and time.monotonic() - self._started > PICKUP_DEADLINE_S:
                return self._give_up()
            time.sleep(POLL_S)

    def _ask_ledger_to_cancel(self) -> bool:
        """Whether it took the request; where it does not, as on a full disk, what Prefect is told must do."""
        try:
            return self._books.ask_to_cancel(self._flow_run_id)
        except SQLAlchemyError as error:
            self._announce(f"The ledger did not take the cancellation, which is left to Prefect: {cause_of(error)}.")
            return False

    def _look(self) -> View:
        """The run as the ledger has it now; while that cannot be read, as it was seen last."""
        try:
            view = look(self._books, self._flow_run_id, self._state["name"], self._printed_step)
            supervisor = supervisor_of(view)
            silent_s = self._silence.look({row.attempt: row.serial for row in (supervisor,) if row})
            self._view = replace(view, silent_s=max(silent_s.values(), default=0.0))
        except SQLAlchemyError as error:
            self._announce(f"The ledger cannot be read: {cause_of(error)}.")
        return self._view

    def _ask_prefect(self, is_cancelling: bool) -> bool:
        """Whether the server answered; one that is away does not stop the run, nor the one who watches it."""
        try:
            if is_cancelling and not self._is_told:
                self._api.set_state(self._flow_run_id, "CANCELLING", "Cancelled from the command line.")
                self._is_told = True
            self._state = self._api.flow_run(self._flow_run_id)["state"]
        except Unreachable as error:
            self._announce(str(error))
            return False
        return True

    def _give_up(self) -> Json:
        self._api.set_state(self._flow_run_id, "CANCELLED", "No worker picked it up.", force=True)
        message = (
            f"No worker picked the run up within {PICKUP_DEADLINE_S:.0f} s: see `hexflow status`, and "
            "worker-control.log among the stack's logs."
        )
        return {"type": "CRASHED", "name": "Crashed", "message": message}

    def _announce(self, notice: str) -> None:
        if notice != self._notice and self._live is None:
            self._console.print(notice, soft_wrap=True, markup=False)
        self._notice = notice

    def _tell_restarts(self, view: View) -> None:
        """A line for each actor whose attempt has risen; those of a supervisor before this one are no longer active."""
        for actor in view.actors:
            if actor.role == "supervisor" or actor.state not in ACTIVE:
                continue
            if actor.attempt > self._attempts.setdefault((actor.role, actor.slot), actor.attempt):
                line = f"{actor.role} {actor.slot} died; started again (attempt {actor.attempt})"
                self._console.print(line, soft_wrap=True, markup=False)
                self._attempts[actor.role, actor.slot] = actor.attempt

    def _show(self, view: View) -> None:
        self._tell_restarts(view)
        if self._live is not None:
            self._live.update(draw(view, time.monotonic() - self._started, self._notice))
            return
        # A log wants one line per event, not a picture.
        if view.run is not None and self._printed_step is None:
            self._printed_step = view.steps[-1].step if view.steps else -1  # a resumed run's earlier steps are no news
        new = [row for row in view.steps if self._printed_step is not None and row.step > self._printed_step]
        for row in new:
            self._print(describe_step(view, row))
            self._printed_step = row.step
        self._has_stepped = self._has_stepped or bool(new)
        if not new and (not self._has_stepped or view.progress is None or view.progress.step >= view.progress.steps):
            self._print(waiting_for(view))
            self._print_again()

    def _print(self, line: str) -> None:
        if line != self._printed_line:
            self._printed_line = line
            self._doing_since = self._told = time.monotonic()
            self._console.print(line, soft_wrap=True, markup=False)

    def _print_again(self) -> None:
        """What was printed last, with its time so far, once that is TELL_EVERY_S ago."""
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            line = f"{self._printed_line}, {minutes(now - self._doing_since)} so far"
            self._console.print(line, soft_wrap=True, markup=False)


class _Keeper:
    """A handler of signals that keeps them for later."""

    def __init__(self) -> None:
        self.has_some = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_some = True

    def give(self) -> bool:
        """Whether there was one; it is kept no longer."""
        had, self.has_some = self.has_some, False
        return had


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM for `sigterm_as_ctrl_c`, so that none comes between a run's start and its being followed.

    Taken at once it would end the command, and leave alone the run that the server has begun meanwhile.
    """
    with _handled_by(_Keeper()):
        yield


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A command that is told to end cancels its run, too: left alone, that would go on and hold the devices.

    Raises:
        KeyboardInterrupt: one of the two has come, or was kept.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kept = signal.getsignal(signal.SIGTERM)
    with _handled_by(interrupt):
        if isinstance(kept, _Keeper) and kept.give():
            raise KeyboardInterrupt
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to `handler`; what was ignored before, as Ctrl-C in the background of a shell, stays so."""
    heard = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, handler)) for number in heard]
    try:
        yield
    finally:
        for number, former in before:
            signal.signal(number, former)
