"""Who is silent: only time in which the looker could look counts, by its own clock."""

import time

import pytest

from tasks.lifecycle.silence import Silence


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_silence_lasts_while_the_serial_number_stands_still() -> None:
    clock = Clock()
    silence = Silence(5.0, clock)
    heard = []
    for serial in (1, 1, 1, 2, 2):
        clock.now_s += 4.0
        heard.append(silence.look({"actor": serial})["actor"])
    assert heard == [0.0, 4.0, 8.0, 0.0, 4.0]


def test_a_gap_of_the_looker_makes_nobody_silent() -> None:
    """It was stopped, or the ledger could not be read: a whole deadline begins anew."""
    clock = Clock()
    silence = Silence(5.0, clock)
    silence.look({"actor": 1, "other": 1})
    clock.now_s += 4.0
    assert silence.look({"actor": 1, "other": 1}) == {"actor": 4.0, "other": 4.0}
    clock.now_s += 3600.0
    assert silence.look({"actor": 1, "other": 1}) == {"actor": 0.0, "other": 0.0}
    clock.now_s += 3.0
    assert silence.look({"actor": 1}) == {"actor": 3.0}


def test_a_machine_that_slept_makes_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual monotonic clock stands still meanwhile, so the time before and after would count as one."""
    asked: list[int] = []
    now_s = [100.0]

    def read(clock: int) -> float:
        asked.append(clock)
        return now_s[0]

    monkeypatch.setattr(time, "clock_gettime", read)
    silence = Silence(5.0)
    for seconds, silent_s in ((0.0, 0.0), (4.0, 4.0), (3600.0, 0.0), (4.0, 4.0)):
        now_s[0] += seconds
        assert silence.look({"actor": 1}) == {"actor": silent_s}
    assert set(asked) == {time.CLOCK_BOOTTIME}


def test_who_comes_back_is_heard_anew() -> None:
    clock = Clock()
    silence = Silence(5.0, clock)
    silence.look({"actor": 1})
    clock.now_s += 4.0
    assert silence.look({}) == {}
    clock.now_s += 4.0
    assert silence.look({"actor": 1}) == {"actor": 0.0}
