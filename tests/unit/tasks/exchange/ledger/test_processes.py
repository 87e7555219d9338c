"""Several operating system processes on one SQLite ledger, one of them killed with SIGKILL in the middle of it all."""

import multiprocessing
import os
import time
from pathlib import Path

from tasks.exchange.ledger import Actor, Ledger
from tests.support.ledger import ask

RUN = "run"
B, STEPS = 30, 2
TO_BE_KILLED = 0


def open_ledger(url: str) -> Ledger:
    ledger = Ledger(url)
    ledger.create_run(RUN, prompts_per_step=B, max_staleness=STEPS, steps=STEPS, max_attempts_per_prompt=1)
    return ledger


def answer_everything(ledger: Ledger, actor: Actor) -> None:
    while lease := ask(ledger, actor, 0):
        ledger.heartbeat(actor)
        ledger.complete_group(actor, lease.group_id, 0, 0.5, {"scored": 2}, 1)


def work(url: str, slot: int) -> None:
    ledger = open_ledger(url)  # all processes create the file, the tables and the run at once
    actor = ledger.register(RUN, "replica", slot, os.getpid(), "here")
    answer_everything(ledger, actor)
    while slot == TO_BE_KILLED:
        ledger.heartbeat(actor)


def test_processes_share_a_ledger_and_survive_a_kill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(url, slot)) for slot in range(2)]
    for worker in workers:
        worker.start()
    ledger = open_ledger(url)
    give_up = time.monotonic() + 60
    while not any(row.state == "scored" for row in ledger.groups(RUN)):
        assert time.monotonic() < give_up, "no process completed a group"
    workers[TO_BE_KILLED].kill()
    workers[TO_BE_KILLED].join()
    successor = ledger.register(RUN, "replica", TO_BE_KILLED, os.getpid(), "here")
    answer_everything(ledger, successor)
    workers[1].join(60)
    assert [worker.exitcode for worker in workers] == [-9, 0]
    answer_everything(ledger, successor)

    rows = ledger.groups(RUN)
    assert [row.group_id for row in rows] == list(range(1, len(rows) + 1))
    assert sorted(row.prompt_index for row in rows if row.state == "scored") == list(range(B * STEPS))
    assert {row.drop_reason for row in rows if row.state != "scored"} <= {"lease_lost"}
    trainer = ledger.register(RUN, "trainer", 0, os.getpid(), "here")
    for step in range(STEPS):
        taken = ledger.take_groups(trainer, step)
        assert taken is not None
        assert len(taken) == B
    assert ledger.progress(RUN).consumed == B * STEPS
    ledger.close()
