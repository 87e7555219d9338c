"""A supervisor in a process of its own, without Prefect: `python -m tests.support.supervised DIRECTORY FLOW_RUN [RUN]`.

It begins a run for that flow run, or resumes RUN, as the flow `rl` does, and supervises one trainer and one replica
that are sleeping processes. What it does outside the ledger leaves a file in DIRECTORY: `ending` once it ends its
actors, for which it then waits for `go`; `tracked` and `reported`.
"""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from prefect.exceptions import TerminationSignal

from flows import rl
from flows.rl import Work, conduct
from flows.running.context import RunContext, open_run
from flows.running.supervisor import Supervisor
from planners.plan.run import MachineShare
from tasks.config.experiment import Experiment
from tasks.exchange.ledger import Actor, Ledger, Process
from tasks.machine.processes import ProcessGroup, process_key
from tasks.tracking.curves import Curves
from tasks.tracking.tracker import Tracker
from tests.support.plan import gpu_plan, run_plan

GO_DEADLINE_S = 120.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


class SleepingActors:
    """Starts sleepers that register and beat; none of them hears a cancellation."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._ledger = ledger
        self._directory = directory

    def start(self, actor: Actor, share: MachineShare) -> str:
        group = ProcessGroup.start(SLEEPER, {}, self._directory / "sleeper.log")
        self._ledger.register(actor, Process(process_key(group.pid), group.pid, share.machine))
        threading.Thread(target=self._beat, args=(actor,), daemon=True).start()
        return f"{actor.role}-{actor.attempt}"

    def _beat(self, actor: Actor) -> None:
        while True:
            self._ledger.heartbeat(actor)
            time.sleep(0.5)

    def cancel(self, flow_run_id: str) -> None:
        (self._directory / "ending").touch()
        give_up = time.monotonic() + GO_DEADLINE_S
        while not (self._directory / "go").exists() and time.monotonic() < give_up:
            time.sleep(0.05)

    def has_ended(self, flow_run_id: str) -> bool:
        return False


class FileTracker:
    """Leaves a file when MLflow would be told the end."""

    run_id = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def finish(self, status: str, flush_s: float) -> None:
        (self._directory / "tracked").write_text(status)


def main() -> None:
    """Begin a run in the settings' ledger and supervise it to its end, as Prefect's engine would run the flow."""
    directory, flow_run_id = Path(sys.argv[1]), sys.argv[2]
    resume = sys.argv[3] if len(sys.argv) > 3 else None

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    def carry_out(run: RunContext, work: Work) -> None:
        work.tracker, work.plan = cast(Tracker, FileTracker(directory)), gpu_plan("here", "fast", 2)
        work.curves = Curves(work.tracker, run.ledger, run.run_id, 0)
        plan = run_plan(run.machine.name)
        epoch = run.ledger.add_plan_epoch(run.supervisor, plan)
        actors = SleepingActors(run.ledger, directory)
        work.supervisor = Supervisor(run, epoch, plan, actors, lambda progress: None)
        work.supervisor.run()

    def report(*_: object) -> dict[str, Any]:
        (directory / "reported").touch()
        return {}

    for name, stand_in in (("carry_out", carry_out), ("report", report)):
        setattr(rl, name, stand_in)
    signal.signal(signal.SIGTERM, terminate)
    conduct(open_run(Experiment(), resume, flow_run_id), flow_run_id)


if __name__ == "__main__":
    main()
