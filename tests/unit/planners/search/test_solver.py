"""The solver's front door: true bounds, infeasibility told apart from lack of time, and a message without a solver."""

from collections.abc import Callable
from typing import Any

import pulp
import pytest

from planners.errors import UserError
from planners.search import solver
from planners.search.solver import Infeasible, Solution, minimise


def knapsack(items: int) -> Any:
    """A problem whose optimum takes a while to prove: strongly correlated weights and values."""
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    weights = [1000 + (i * 7919) % 997 for i in range(items)]
    x = [program.add_variable(f"x{i}", cat=pulp.LpBinary) for i in range(items)]
    program += -pulp.lpSum((w + 100) * v for w, v in zip(weights, x, strict=True))
    for k in range(5):
        shifted = [weights[(i * (k + 3)) % items] for i in range(items)]
        program += pulp.lpSum(w * v for w, v in zip(shifted, x, strict=True)) <= sum(weights) / 2 - k
    return program


@pytest.mark.parametrize("solve", [solver.with_highs, solver.with_cbc])
def test_both_solvers_find_and_prove(solve: Callable[[Any, float, float], Solution]) -> None:
    program = knapsack(12)
    solution = solve(program, 30, 1e-6)
    assert solution.bound <= solution.objective * (1 - 1e-9) or solution.bound == pytest.approx(solution.objective)
    other = minimise(knapsack(12), 30, 1e-6)
    assert solution.objective == pytest.approx(other.objective)


@pytest.mark.parametrize("solve", [solver.with_highs, solver.with_cbc])
def test_infeasible_is_told_apart(solve: Callable[[Any, float, float], Solution]) -> None:
    program = pulp.LpProblem("none", pulp.LpMinimize)
    x = program.add_variable("x", 0, 1, cat=pulp.LpInteger)
    program += x
    program += x >= 2
    with pytest.raises(Infeasible):
        solve(program, 10, 1e-4)


def test_at_the_limit_the_incumbent_comes_with_its_true_gap() -> None:
    solution = minimise(knapsack(120), 0.5, 1e-9)
    assert solution.bound <= solution.objective
    longer = minimise(knapsack(120), 1, 1e-9)
    assert solution.bound <= longer.objective + 1e-6


def test_no_time_at_all_is_no_proof() -> None:
    with pytest.raises(UserError, match="no proof that none exists"):
        minimise(knapsack(2000), 1e-9)


def test_without_a_solver_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    with pytest.raises(UserError, match="pip install highspy"):
        minimise(knapsack(2))


def test_cbc_stands_in_for_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    assert minimise(knapsack(12), 30, 1e-6).objective < 0
