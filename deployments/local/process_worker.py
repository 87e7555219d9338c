"""Prefect's process worker, narrowed: it runs the flows that set-up deployed, in the environment that it has itself.

It asks nobody to keep the server's job templates closed: what they or a deployment would change is refused here.
"""

from typing import TYPE_CHECKING, Any, Self

from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments.prefect.setup import entrypoints
from planners.errors import UserError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse


class OwnJob(ProcessJobConfiguration):
    """A job in whose command, directory and environment nobody but its worker has a say."""

    @classmethod
    async def from_template_and_values(
        cls, base_job_template: dict[str, Any], values: dict[str, Any], client: "PrefectClient | None" = None
    ) -> Self:
        """The same for all: neither the pool's template nor the variables of a deployment or a flow run are read."""
        return cls()


class OwnFlowsWorker(ProcessWorker):
    """A worker that refuses what is no flow of hexflow's; the flow run is then crashed, and no process was started."""

    job_configuration = OwnJob

    @classmethod
    def __dispatch_key__(cls) -> str:
        return "hexflow"  # not in place of Prefect's own of the same type

    async def run(
        self, flow_run: "FlowRun", configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Run it in a process of its own.

        Raises:
            UserError: see `own_entrypoint`.
        """
        deployment = await self.client.read_deployment(flow_run.deployment_id) if flow_run.deployment_id else None
        # What the process loads is what was looked at, and no pull step comes before it.
        configuration.env["PREFECT__FLOW_ENTRYPOINT"] = own_entrypoint(flow_run, deployment)
        return await super().run(flow_run, configuration, task_status)


def own_entrypoint(flow_run: "FlowRun", deployment: "DeploymentResponse | None") -> str:
    """The entrypoint of a flow run's deployment, `module.function`.

    Raises:
        UserError: it is not one of prefect.yaml, or more was asked for than to run it.
    """
    if deployment is None:
        raise UserError("It belongs to no deployment: start one of hexflow's.")
    if deployment.entrypoint is None or deployment.entrypoint not in entrypoints():
        raise UserError(
            f"The entrypoint of deployment {deployment.name} is {deployment.entrypoint}, which is no flow of "
            "hexflow's: start one of its deployments, which `hexflow up` makes."
        )
    if deployment.pull_steps:
        raise UserError(
            f"Deployment {deployment.name} has pull steps, and hexflow's flows have none: start one that `hexflow up` "
            "has made."
        )
    if variables := {**(deployment.job_variables or {}), **(flow_run.job_variables or {})}:
        raise UserError(
            f"It has job variables ({', '.join(sorted(variables))}), and a process of hexflow takes none: start it "
            "without them."
        )
    return deployment.entrypoint
