"""What deaths of engines cost: nothing until the verdict, nothing where a question was guilty, else restarts."""

from collections.abc import Iterator

from flows.running.deaths import Deaths
from tasks.exchange.ledger import Progress


def progress(deaths: int = 0, accused: int = 0, deadly: int = 0, answered: int = 0) -> Progress:
    return Progress(
        step=0,
        steps=1,
        groups={"leased": 1, "scored": answered, "consumed": 0, "dropped": 0},
        dropped={},
        outcomes={},
        quarantined_prompts=deadly,
        response_tokens=0,
        consumed=0,
        max_staleness_seen=0,
        latest_version=None,
        reward_mean=None,
        accused_prompts=accused,
        deadly_prompts=deadly,
        engine_deaths=deaths,
    )


def paid(*seen: Progress, restarts: int = 3, start: Progress | None = None) -> list[int]:
    def follow() -> Iterator[int]:
        deaths = Deaths(restarts, start or progress())
        for one in seen:
            yield deaths.to_pay(one)

    return list(follow())


def test_nothing_is_paid_before_the_verdict() -> None:
    assert paid(progress(1, 4), progress(2, 4), progress(2, 1), progress(3, 1)) == [0, 0, 0, 0]


def test_deaths_that_no_question_is_to_blame_for_are_restarts() -> None:
    assert paid(progress(1, 4), progress(2, 4), progress(2, 0, answered=4), progress(2, 0)) == [0, 0, 2, 0]
    assert paid(progress(1, 0), progress(2, 0)) == [1, 1]


def test_a_question_that_is_found_guilty_has_paid_for_all_deaths_until_then() -> None:
    assert paid(progress(3, 2), progress(4, 1, deadly=1), progress(4, 0, deadly=1), progress(5, 0, 1)) == [0, 0, 0, 1]


def test_an_engine_that_answers_nothing_blames_no_questions_for_long() -> None:
    seen = [progress(deaths, 4, deadly=deaths // 4) for deaths in range(1, 9)]
    assert paid(*seen) == [0, 0, 0, 0, 0, 0, 0, 8]
    seen = [progress(deaths, 4, answered=deaths) for deaths in range(1, 9)]
    assert paid(*seen) == [0] * 8


def test_what_was_before_the_supervisor_is_not_its_to_pay() -> None:
    assert paid(progress(5, 2, 1), progress(5, 0, 1), progress(6, 0, 1), start=progress(5, 2, 1)) == [0, 0, 1]
