"""The ledger's runs, plan epochs and machines."""

from sqlalchemy import delete, func, insert, select, update

from planners.errors import UserError
from planners.plan.run import RunPlan
from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import run_of
from tasks.exchange.ledger.rows import MachineRow, PlanEpochRow, RunRow, columns_of
from tasks.exchange.ledger.schema import cancellations, machines, plan_epochs, runs

RUN_STATES = ("running", "completed", "failed", "cancelled")


class Runs(Database):
    """What the run is and what was planned for it."""

    def create_run(
        self,
        run_id: str,
        prompts_per_step: int,
        max_staleness: int,
        steps: int,
        max_attempts_per_prompt: int,
        flow_run_id: str | None = None,
    ) -> None:
        """Begin a run in lineage 0, or find it begun already.

        Raises:
            UserError: a run of this id exists with other sizes.
        """
        sizes = {
            "prompts_per_step": prompts_per_step,
            "max_staleness": max_staleness,
            "steps": steps,
            "max_attempts_per_prompt": max_attempts_per_prompt,
        }
        with self.write(run_id) as connection:
            existing = connection.execute(select(runs).where(runs.c.run_id == run_id)).one_or_none()
            if existing is None:
                values = {"run_id": run_id, "flow_run_id": flow_run_id, "state": "running", "lineage": 0, **sizes}
                connection.execute(insert(runs).values(**values, created_s=now_s()))
                return
        for name, value in sizes.items():
            recorded = existing._mapping[name]
            if recorded != value:
                raise UserError(
                    f"The run {run_id} was begun with {name} {recorded}, not {value}: keep it, or begin another run."
                )

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

    def set_run_state(self, run_id: str, state: str) -> None:
        """Say that the run is running, completed, failed or cancelled. Prompts are leased only while it is running."""
        if state not in RUN_STATES:
            raise ValueError(f"a run is {', '.join(RUN_STATES)}, not {state}")
        with self.write(run_id) as connection:
            run_of(connection, run_id)
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(state=state))

    def reopen_run(self, run_id: str, flow_run_id: str | None) -> None:
        """Say that an unfinished run is running again, under another Prefect flow run or a retry of its own.

        A retry is the newer word: what was asked of its flow run before is forgotten. What was asked of another flow
        run holds, since that may have been told to end before it came here.
        """
        with self.write(run_id) as connection:
            if run_of(connection, run_id).flow_run_id == flow_run_id:
                connection.execute(delete(cancellations).where(cancellations.c.flow_run_id == flow_run_id))
            values = {"state": "running", "flow_run_id": flow_run_id}
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(**values))

    def ask_to_cancel(self, flow_run_id: str) -> None:
        """Ask for the end of the run that this Prefect flow run works on; repeatable.

        The request is the flow run's own: it may come before the run is there, and one that comes late does not reach
        the run under another flow run that has resumed it.
        """
        asked = cancellations.c.flow_run_id == flow_run_id
        with self.write(flow_run_id) as connection:
            if connection.scalar(select(cancellations.c.flow_run_id).where(asked)) is None:
                connection.execute(insert(cancellations).values(flow_run_id=flow_run_id, asked_s=now_s()))

    def is_to_cancel(self, flow_run_id: str) -> bool:
        """Whether this Prefect flow run was asked to end its run."""
        asked = cancellations.c.flow_run_id == flow_run_id
        with self.read() as connection:
            return connection.scalar(select(cancellations.c.flow_run_id).where(asked)) is not None

    def set_mlflow_run(self, run_id: str, mlflow_run_id: str) -> None:
        """Name the MLflow run that tracks this run."""
        with self.write(run_id) as connection:
            run_of(connection, run_id)
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(mlflow_run_id=mlflow_run_id))

    def mlflow_run(self, run_id: str) -> str | None:
        """The MLflow run that tracks this run; None while there is none."""
        with self.read() as connection:
            return run_of(connection, run_id).mlflow_run_id

    def add_plan_epoch(self, run_id: str, plan: RunPlan) -> int:
        """Put a plan in force and return its epoch (0-based); the plan that is in force already keeps its epoch."""
        plan_json = plan.model_dump_json()
        with self.write(run_id) as connection:
            run_of(connection, run_id)
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
