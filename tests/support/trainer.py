"""A run whose trainer is tested: its directory, its ledger and its plan."""

from planners.plan.run import RunPlan
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.exchange.files import write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tests.support.ledger import begin
from tests.support.plan import run_plan

RUN = "training-test"
PLAN = run_plan(micro_batch_tokens=40)


def make_run(settings: Settings, experiment: Experiment, plan: RunPlan = PLAN) -> tuple[RunDirectory, Ledger]:
    run = RunDirectory(settings.shared.runs / RUN)
    run.create()
    write_json(run.experiment, experiment.model_dump(mode="json"))
    ledger = Ledger(settings.shared.ledger_url)
    sizes = experiment.workload
    supervisor = begin(ledger, RUN, (sizes.prompts_per_step, sizes.max_staleness, experiment.run.steps))
    assert ledger.add_plan_epoch(supervisor, plan) == 0
    return run, ledger
