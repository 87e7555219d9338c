"""All ranks end together, however one of them ends."""

import socket
import sys
from pathlib import Path

import pytest

from planners.errors import UserError
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


def test_ranks_of_one_machine_meet_in_a_directory_that_no_other_user_may_enter(logs: list[Path]) -> None:
    """And talk over loopback: nobody else on the network can take part."""
    names = "['GREETING', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME']"
    script = (
        "place = pathlib.Path(os.environ['HEXFLOW_MEETING'].removeprefix('file://')); "
        f"print(*(os.environ[name] for name in {names}), oct(place.parent.stat().st_mode)[-3:], place)"
    )
    ranks("import pathlib; " + script, logs)
    first, second = (log.read_text().split()[2:] for log in logs)
    assert first[:7] == ["hello", "0", "0", "2", "lo", "lo", "700"]
    assert second[:7] == ["hello", "1", "1", "2", "lo", "lo", "700"]
    assert first[7] == second[7]
    assert not Path(first[7]).parent.exists(), "it is gone with the ranks"


SEEN = (
    "import os; print(*(os.environ.get(n) for n in ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'HEXFLOW_MEETING']), sep=';')"
)


def test_ranks_of_several_machines_count_through_and_meet_where_they_are_told(logs: list[Path]) -> None:
    """As the second of two machines sees it, which has ranks 3 and 4 of 5."""
    run_ranks([sys.executable, "-c", SEEN], {}, logs, first=3, world_size=5, master="127.0.0.7:29500")
    assert [log.read_text().strip().split(";") for log in logs] == [
        ["3", "0", "5", "tcp://127.0.0.7:29500"],
        ["4", "1", "5", "tcp://127.0.0.7:29500"],
    ]


def test_the_first_of_several_machines_listens_on_the_named_address_before_any_rank_is_started(
    logs: list[Path],
) -> None:
    """Rank 0 alone is given the socket; whoever has the port already is told before anything runs."""
    script = (
        "import os, socket; fd = os.environ.get('HEXFLOW_MEETING_SOCKET'); "
        "print(socket.socket(fileno=int(fd)).getsockname() if fd else None)"
    )
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot meet at 127\.0\.0\.2:{port} \(Address already in use\)"):
            run_ranks([sys.executable, "-c", script], {}, logs, world_size=3, master=f"127.0.0.2:{port}")
        assert not any(log.exists() for log in logs)
        run_ranks([sys.executable, "-c", script], {}, logs, world_size=3, master=f"127.0.0.3:{port}")
    assert [log.read_text().strip() for log in logs] == [f"('127.0.0.3', {port})", "None"]


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
