"""Several operating system processes on one SQLite ledger, one of them killed with SIGKILL in the middle of it all."""

import multiprocessing
import os
import time
from pathlib import Path

from tasks.exchange.ledger import Actor, ActorRow, Ledger, Process
from tasks.machine.processes import process_key
from tests.support.ledger import ask, assign, begin, join

RUN = "run"
B, STEPS = 30, 2
TO_BE_KILLED = 0


def answer_everything(ledger: Ledger, actor: Actor) -> None:
    while lease := ask(ledger, actor, 0):
        ledger.heartbeat(actor)
        ledger.complete_group(actor, lease.group_id, 0, 0.5, {"scored": 2}, 1)


def replicas(ledger: Ledger) -> list[ActorRow]:
    return [row for row in ledger.actors(RUN) if row.role == "replica"]


def work(url: str, slot: int) -> None:
    ledger = Ledger(url)  # all processes create the file and the tables at once
    while ledger.find_run(run_id=RUN) is None or not any(row.slot == slot for row in replicas(ledger)):
        time.sleep(0.01)
    actor = Actor(RUN, "replica", slot, 1)
    ledger.register(actor, Process(process_key(), os.getpid(), "here"))
    answer_everything(ledger, actor)
    while slot == TO_BE_KILLED:
        ledger.heartbeat(actor)


def test_processes_share_a_ledger_and_survive_a_kill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(url, slot)) for slot in range(2)]
    for worker in workers:
        worker.start()
    ledger = Ledger(url)
    begin(ledger, RUN, (B, STEPS, STEPS))
    for slot in range(2):
        assign(ledger, "replica", slot)
    give_up = time.monotonic() + 60
    while not any(row.state == "scored" for row in ledger.groups(RUN)):
        assert time.monotonic() < give_up, "no process completed a group"
    workers[TO_BE_KILLED].kill()
    workers[TO_BE_KILLED].join()
    successor = join(ledger, "replica", TO_BE_KILLED)
    answer_everything(ledger, successor)
    workers[1].join(60)
    assert [worker.exitcode for worker in workers] == [-9, 0]
    answer_everything(ledger, successor)

    rows = ledger.groups(RUN)
    assert [row.group_id for row in rows] == list(range(1, len(rows) + 1))
    assert sorted(row.prompt_index for row in rows if row.state == "scored") == list(range(B * STEPS))
    assert {row.drop_reason for row in rows if row.state != "scored"} <= {"lease_lost"}
    trainer = join(ledger, "trainer")
    for step in range(STEPS):
        taken = ledger.take_groups(trainer, step)
        assert taken is not None
        assert len(taken) == B
    assert ledger.progress(RUN).consumed == B * STEPS
    ledger.close()
