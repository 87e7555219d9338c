"""The ledger's runs, their supervisors, plan epochs and machines."""

from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from planners.errors import UserError
from planners.plan.run import RunPlan
from tasks.exchange.ledger.actors import add_actor, end_slots
from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import ACTIVE, require_supervisor, run_of
from tasks.exchange.ledger.rows import Actor, MachineRow, PlanEpochRow, Process, RunRow, columns_of
from tasks.exchange.ledger.schema import actors, is_newest, machines, plan_epochs, runs

END_STATES = ("completed", "failed", "cancelled")


class Runs(Database):
    """What the run is, what should become of it, and what was planned for it."""

    def begin_run(
        self,
        run_id: str,
        process: Process,
        *,
        prompts_per_step: int,
        max_staleness: int,
        steps: int,
        max_attempts_per_prompt: int,
        flow_run_id: str | None = None,
    ) -> Actor:
        """Begin a run in lineage 0, supervised by `process`. Asking again for the same process gives the same answer.

        Returns:
            The run's supervisor.

        Raises:
            UserError: a run of this id exists.
        """
        sizes = {
            "prompts_per_step": prompts_per_step,
            "max_staleness": max_staleness,
            "steps": steps,
            "max_attempts_per_prompt": max_attempts_per_prompt,
        }
        supervisor = Actor(run_id, "supervisor", 0, 1)
        with self.write(run_id) as connection:
            if connection.scalar(select(runs.c.run_id).where(runs.c.run_id == run_id)) is None:
                values = {"run_id": run_id, "flow_run_id": flow_run_id, "state": "running", "lineage": 0, **sizes}
                connection.execute(insert(runs).values(**values, created_s=now_s()))
                _supervise(connection, supervisor, process)
            elif (newest := _newest_supervisor(connection, run_id)).process_key != process.key:
                raise UserError(f"The run {run_id} exists already, supervised by attempt {newest.attempt}: resume it.")
        return supervisor

    def take_over(
        self, run_id: str, process: Process, flow_run_id: str | None, seen: tuple[int, int] | None = None
    ) -> Actor:
        """Supervise an unfinished run, under another Prefect flow run or a retry of its own; one transaction.

        The former supervisor and all its actors are fenced, what they held is given out again, and the run is running.
        A retry is the newer word: what was asked of the former supervisor is not asked of this one. Asking again for
        the same process gives the same answer.

        Args:
            run_id: the run.
            process: who takes over.
            flow_run_id: its Prefect flow run.
            seen: (attempt, serial) of a supervisor at work that was found silent. A retry asks for none: Prefect starts
                a flow run again when its process is gone.

        Returns:
            The run's supervisor.

        Raises:
            UserError: the run is unknown, complete, or being worked on.
        """
        with self.write(run_id) as connection:
            run = run_of(connection, run_id)
            former = _newest_supervisor(connection, run_id)
            is_retry = run.flow_run_id == flow_run_id
            is_active = former.state in ACTIVE
            if is_active and is_retry and former.process_key == process.key:
                return Actor(run_id, "supervisor", 0, former.attempt)
            if run.state == "completed":
                raise UserError(f"Run {run_id} is complete: there is nothing to resume. Start a new run instead.")
            if is_active and not is_retry and (former.attempt, former.serial) != seen:
                raise UserError(f"Run {run_id} is being worked on: `hexflow cancel {run_id}` ends that first.")
            end_slots(connection, run_id)
            values = {"state": "running", "flow_run_id": flow_run_id}
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(**values))
            supervisor = Actor(run_id, "supervisor", 0, former.attempt + 1)
            _supervise(connection, supervisor, process)
        return supervisor

    def find_run(self, *, run_id: str | None = None, flow_run_id: str | None = None) -> RunRow | None:
        """The run with this id or of this Prefect flow run, or None. Exactly one of the two is to be given."""
        if (run_id is None) == (flow_run_id is None):
            raise ValueError("a run is found by run_id or by flow_run_id")
        wanted = runs.c.run_id == run_id if run_id is not None else runs.c.flow_run_id == flow_run_id
        with self.read() as connection:
            row = connection.execute(select(*columns_of(RunRow, runs)).where(wanted)).one_or_none()
        return RunRow(*row) if row else None

    def list_runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        with self.read() as connection:
            rows = connection.execute(select(*columns_of(RunRow, runs)).order_by(runs.c.created_s, runs.c.run_id))
            return [RunRow(*row) for row in rows]

    def close_run(self, supervisor: Actor, state: str) -> str:
        """Say that the run is completed, failed or cancelled: its actors leave, and none joins. The first word counts.

        Returns:
            The state that stands.

        Raises:
            Fenced: this supervisor is no longer current.
        """
        with self.write(supervisor.run_id) as connection:
            require_supervisor(connection, supervisor)
            if run_of(connection, supervisor.run_id).state == "running":
                _close(connection, supervisor.run_id, state)
                waiting = (actors.c.run_id == supervisor.run_id, is_newest, actors.c.state == "assigned")
                connection.execute(update(actors).where(*waiting).values(state="fenced"))
            return run_of(connection, supervisor.run_id).state

    def settle_run(self, supervisor: Actor, seen_serial: int, state: str) -> bool:
        """Close a run whose supervisor is gone without a word, and fence all its actors; safe to repeat.

        Args:
            supervisor: whose process is gone.
            seen_serial: serial number of its beat when it was read, before its process was looked for.
            state: what the run becomes.

        Returns:
            False where there is nothing to settle: the run has ended otherwise, another supervisor has taken it over,
            be it of the same flow run, or this one has beaten since.
        """
        run_id = supervisor.run_id
        with self.write(run_id) as connection:
            newest = _newest_supervisor(connection, run_id)
            is_meant = (newest.attempt, newest.serial) == (supervisor.attempt, seen_serial)
            if not is_meant or run_of(connection, run_id).state not in ("running", state):
                return False
            _close(connection, run_id, state)
            end_slots(connection, run_id)
        return True

    def ask_to_cancel(self, flow_run_id: str) -> bool:
        """Ask for the end of the run that this Prefect flow run works on; repeatable.

        It is asked of the supervisor at work: one that comes late does not reach the run under another flow run that
        has resumed it, or under a retry.

        Returns:
            False while the flow run has no run yet: ask again.
        """
        of_flow_run = select(runs.c.run_id).where(runs.c.flow_run_id == flow_run_id)
        with self.read() as connection:
            run_id = connection.scalar(of_flow_run)
        if run_id is None:
            return False
        with self.write(run_id) as connection:
            if connection.scalar(of_flow_run) != run_id:
                return False  # resumed under another one meanwhile
            this = (actors.c.run_id == run_id, actors.c.role == "supervisor", is_newest, actors.c.state.in_(ACTIVE))
            connection.execute(update(actors).where(*this).values(wanted="leave"))
        return True

    def set_mlflow_run(self, supervisor: Actor, mlflow_run_id: str) -> None:
        """Name the MLflow run that tracks this run.

        Raises:
            Fenced: this supervisor is no longer current.
        """
        with self.write(supervisor.run_id) as connection:
            require_supervisor(connection, supervisor)
            this = runs.c.run_id == supervisor.run_id
            connection.execute(update(runs).where(this).values(mlflow_run_id=mlflow_run_id))

    def mlflow_run(self, run_id: str) -> str | None:
        """The MLflow run that tracks this run; None while there is none."""
        with self.read() as connection:
            return run_of(connection, run_id).mlflow_run_id

    def add_plan_epoch(self, supervisor: Actor, plan: RunPlan) -> int:
        """Put a plan in force and return its epoch (0-based); the plan that is in force already keeps its epoch.

        Raises:
            Fenced: this supervisor is no longer current.
        """
        plan_json, run_id = plan.model_dump_json(), supervisor.run_id
        with self.write(run_id) as connection:
            require_supervisor(connection, supervisor)
            newest = connection.execute(
                select(plan_epochs.c.epoch, plan_epochs.c.plan_json)
                .where(plan_epochs.c.run_id == run_id)
                .order_by(plan_epochs.c.epoch.desc())
                .limit(1)
            ).one_or_none()
            if newest is not None and newest.plan_json == plan_json:
                return int(newest.epoch)
            epoch = 0 if newest is None else int(newest.epoch) + 1
            values = {"run_id": run_id, "epoch": epoch, "plan_json": plan_json}
            connection.execute(insert(plan_epochs).values(**values, created_s=now_s()))
        return epoch

    def plan(self, run_id: str, epoch: int) -> RunPlan:
        """What the run starts under a plan epoch.

        Raises:
            UserError: the run has no such epoch.
        """
        wanted = (plan_epochs.c.run_id == run_id, plan_epochs.c.epoch == epoch)
        with self.read() as connection:
            text = connection.scalar(select(plan_epochs.c.plan_json).where(*wanted))
        if text is None:
            raise UserError(f"Run {run_id} has no plan epoch {epoch}: `hexflow resume {run_id}` makes a plan anew.")
        return RunPlan.model_validate_json(text)

    def plan_epochs(self, run_id: str) -> list[PlanEpochRow]:
        """The run's plans, oldest first; the last is in force."""
        query = select(*columns_of(PlanEpochRow, plan_epochs)).where(plan_epochs.c.run_id == run_id)
        with self.read() as connection:
            return [PlanEpochRow(*row) for row in connection.execute(query.order_by(plan_epochs.c.epoch))]

    def announce_machine(self, name: str, description_json: str) -> None:
        """Say that a machine is there now and what it has."""
        values = {"description_json": description_json, "seen_s": now_s()}
        with self.write("machines") as connection:
            known = connection.scalar(select(func.count()).select_from(machines).where(machines.c.name == name))
            statement = update(machines).where(machines.c.name == name) if known else insert(machines)
            connection.execute(statement.values(**values) if known else statement.values(name=name, **values))

    def machines(self) -> list[MachineRow]:
        """All machines that ever announced themselves, by name."""
        query = select(machines.c.name, machines.c.description_json, (now_s() - machines.c.seen_s).label("silent_s"))
        with self.read() as connection:
            return [MachineRow(*row) for row in connection.execute(query.order_by(machines.c.name))]


def _close(connection: Connection, run_id: str, state: str) -> None:
    if state not in END_STATES:
        raise ValueError(f"a run ends as {', '.join(END_STATES)}, not {state}")
    connection.execute(update(runs).where(runs.c.run_id == run_id).values(state=state))


def _supervise(connection: Connection, supervisor: Actor, process: Process) -> None:
    values = {"state": "starting", "process_key": process.key, "pid": process.pid, "machine": process.machine}
    add_actor(connection, supervisor, serial=1, **values)


def _newest_supervisor(connection: Connection, run_id: str) -> Row[Any]:
    return connection.execute(
        select(actors)
        .where(actors.c.run_id == run_id, actors.c.role == "supervisor")
        .order_by(actors.c.attempt.desc())
        .limit(1)
    ).one()
