"""What the flow `evaluate` refuses, in the words that a person reads."""

from typing import cast

import pytest
from prefect import State

from flows.evaluate import evaluate, newest_weights
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tests.support.ledger import RUN


def test_a_run_that_is_not_there_ends_the_flow_with_a_sentence(settings: Settings) -> None:
    """Before anything starts, and without a traceback."""
    ended = cast(State[None], evaluate.fn(run="none-1"))
    assert ended.is_failed()
    assert ended.message == f"There is no run none-1 in {settings.shared.runs}: `hexflow runs` lists them."


def test_a_run_without_weights_is_told(settings: Settings, ledger: Ledger, trainer: Actor) -> None:
    """Version 0 is recorded, but its files are gone."""
    with pytest.raises(UserError, match=f"Run {RUN} has no weights to evaluate"):
        newest_weights(ledger, RUN)
    assert not RunDirectory(settings.shared.runs / RUN).weights.exists()
