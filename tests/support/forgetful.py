"""A ledger that loses answers, for the property tests."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tasks.exchange.ledger import Ledger
from tests.support.ledger import public_calls, timeless

_CALLS = public_calls()


class ForgetfulLedger(Ledger):
    """At random a call is made again, as after an answer that was lost, and must answer the same."""

    dice = random.Random(0)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return partial(_at_random_twice, value, self.dice) if name in _CALLS else value


def _at_random_twice(call: Callable[..., Any], dice: random.Random, *args: Any, **kwargs: Any) -> Any:
    answer = call(*args, **kwargs)
    if dice.random() < 0.3:
        again = call(*args, **kwargs)
        assert timeless(again) == timeless(answer), f"{call} {args} {kwargs}"
        return again
    return answer
