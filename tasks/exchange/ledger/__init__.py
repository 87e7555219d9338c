"""The ledger: every fact that two processes of a run share, and the only place where it is kept.

Invariants, each kept by the transaction that could break it and by the keys in `schema`:

- a group is consumed at most once in the surviving lineage, and never more than η steps after its version;
- an attempt that is no longer current writes nothing;
- what a dead actor held is given out again, and without failures nothing is dropped;
- counts are derived from the open groups and from the totals that stand with the last step that consumed, so a resume
  takes them back; only drops, which nothing takes back, are counted beside their rows;
- what is over and done is not read again: no call of a step, lease, beat or page costs more the longer a run gets;
- every transition may be repeated, and is where its answer was lost: the second time changes nothing and answers the
  same.
"""

from tasks.exchange.ledger.actors import Actors
from tasks.exchange.ledger.groups import Groups
from tasks.exchange.ledger.reports import Reports
from tasks.exchange.ledger.rows import (
    Actor,
    ActorRow,
    Beat,
    Evaluation,
    EvaluationRow,
    Fenced,
    GroupRow,
    Lease,
    MachineRow,
    PlanEpochRow,
    Process,
    Progress,
    RunRow,
    SpanRow,
    StepRow,
)
from tasks.exchange.ledger.runs import Runs
from tasks.exchange.ledger.versions import Weights

__all__ = [
    "Actor",
    "ActorRow",
    "Beat",
    "Evaluation",
    "EvaluationRow",
    "Fenced",
    "GroupRow",
    "Lease",
    "Ledger",
    "MachineRow",
    "PlanEpochRow",
    "Process",
    "Progress",
    "RunRow",
    "SpanRow",
    "StepRow",
]


class Ledger(Runs, Actors, Weights, Groups, Reports):
    """The ledger at one URL; see `Database` for opening it and the parts for what it records."""
