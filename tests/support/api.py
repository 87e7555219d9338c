"""A Prefect server that says what a test wants, and a ledger's failure."""

import sqlite3
from collections.abc import Callable

from sqlalchemy.exc import OperationalError

from deployments.prefect.api import Json, PrefectApi

FULL = OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))


def a_state(state_type: str) -> Json:
    return {"type": state_type, "name": state_type.capitalize(), "message": "because"}


class FakeApi(PrefectApi):
    """A flow run that goes through `states`, one a look, and stays in the last one."""

    def __init__(self, *states: str | Exception) -> None:
        super().__init__("http://127.0.0.1:1/api")
        self.states = list(states)
        self.proposed: list[str] = []
        self.on_look: Callable[[], None] = lambda: None

    def flow_run(self, flow_run_id: str) -> Json:
        self.on_look()
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return {"state": a_state(state)}

    def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
        self.proposed.append(state_type)
        self.states = ["CANCELLING", "CANCELLED"]
