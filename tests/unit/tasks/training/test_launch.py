"""All ranks end together, however one of them ends."""

import sys
from pathlib import Path

import pytest

from tasks.machine.processes import ProcessGroup, end_sessions, group_alive
from tasks.training import launch
from tasks.training.launch import RankFailed, run_ranks


def ranks(script: str, logs: list[Path]) -> None:
    prelude = "import os, sys, time; rank = int(os.environ['RANK']); print(f'pid {os.getpid()}', flush=True); "
    run_ranks([sys.executable, "-c", prelude + script], {"GREETING": "hello"}, logs)


def pid_in(log: Path) -> int:
    return int(log.read_text().split()[1])


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [tmp_path / "logs" / f"rank-{rank}.log" for rank in range(2)]


def test_ranks_can_meet(logs: list[Path]) -> None:
    names = "['GREETING', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']"
    ranks(f"print(*(os.environ[name] for name in {names}))", logs)
    first, second = (log.read_text().split()[2:] for log in logs)
    assert first[:5] == ["hello", "0", "0", "2", "127.0.0.1"]
    assert second[:5] == ["hello", "1", "1", "2", "127.0.0.1"]
    assert first[5] == second[5]


def test_ranks_of_several_machines_count_through_and_meet_where_they_are_told(logs: list[Path]) -> None:
    """As the second of two machines sees it, which has ranks 3 and 4 of 5."""
    names = "['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']"
    script = f"import os; print(*(os.environ[name] for name in {names}))"
    run_ranks([sys.executable, "-c", script], {}, logs, first=3, world_size=5, master="10.0.0.7:29500")
    assert [log.read_text().split() for log in logs] == [
        ["3", "0", "5", "10.0.0.7", "29500"],
        ["4", "1", "5", "10.0.0.7", "29500"],
    ]


def test_a_failing_rank_ends_the_others(logs: list[Path]) -> None:
    script = "time.sleep(0.5); sys.exit('rank 1 is out of luck') if rank == 1 else time.sleep(60)"
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of the trainer ended with status 1.*out of luck"):
        ranks(script, logs)
    assert not any(group_alive(pid_in(log)) for log in logs)


def test_ranks_are_told_to_end_together(logs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[int]] = []

    def end(leaders: list[int]) -> None:
        told.append(leaders)
        end_sessions(leaders)

    monkeypatch.setattr(launch, "end_sessions", end)
    with pytest.raises(RankFailed, match="rank 1 of the trainer ended"):
        ranks("time.sleep(60 * (1 - rank)); sys.exit(rank)", logs)
    assert told == [[pid_in(log) for log in logs]]


def test_a_rank_that_stays_behind_is_ended(logs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAST_RANKS_S", 0.5)
    with pytest.raises(RankFailed, match=r"ranks \[1\] of the trainer were still there"):
        ranks("time.sleep(60 * rank)", logs)
    assert not group_alive(pid_in(logs[1]))


def test_an_interrupted_launch_leaves_no_rank(logs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = iter([KeyboardInterrupt()])

    def poll(rank: ProcessGroup) -> int | None:
        all_run = all(log.exists() and log.read_text() for log in logs)
        if all_run and (interrupt := next(interrupts, None)):
            raise interrupt
        return poll_rank(rank)

    poll_rank = ProcessGroup.poll
    monkeypatch.setattr(ProcessGroup, "poll", poll)
    with pytest.raises(KeyboardInterrupt):
        ranks("time.sleep(60)", logs)
    assert not any(group_alive(pid_in(log)) for log in logs)
