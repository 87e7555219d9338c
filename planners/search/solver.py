"""The one place where a mixed-integer program meets a solver: HiGHS if it is there, else CBC.

PuLP 3.3 reports a time-limited incumbent as optimal and, with CBC, a missing one as infeasible. Here the incumbent
comes back with the bound that the solver proved, and its absence at the time limit is told apart from infeasibility.
"""

import time
from dataclasses import dataclass
from typing import Any

from planners.errors import UserError


@dataclass(frozen=True)
class Solution:
    """Outcome of a minimisation; the variables hold the incumbent's values."""

    objective: float
    bound: float


class Infeasible(Exception):
    """The program has no solution."""


def minimise(problem: Any, time_limit_s: float = 60.0, gap: float = 1e-4) -> Solution:
    """Solve a PuLP minimisation in place.

    Args:
        problem: the `pulp.LpProblem`.
        time_limit_s: after this the best incumbent is taken.
        gap: relative gap at which to stop.

    Raises:
        Infeasible: proven to have no solution.
        UserError: no solver is installed, or the time limit passed without any solution.
    """
    import pulp

    if pulp.HiGHS(msg=False).available():
        return with_highs(problem, time_limit_s, gap)
    if pulp.PULP_CBC_CMD(msg=False).available():
        return with_cbc(problem, time_limit_s, gap)
    raise UserError("No MILP solver is installed: pip install highspy.")


def with_highs(problem: Any, time_limit_s: float, gap: float) -> Solution:
    """As `minimise`, by HiGHS."""
    import highspy
    import pulp

    class QuietHighs(pulp.HiGHS):
        """`highspy.Highs` prints a banner on construction that no option silences; its base class does not."""

        def createAndConfigureSolver(self, lp: Any) -> None:
            lp.solverModel = highspy._core._Highs()
            lp.solverModel.setOptionValue("output_flag", False)
            lp.solverModel.setOptionValue("threads", 1)
            lp.solverModel.setOptionValue("time_limit", float(time_limit_s))
            lp.solverModel.setOptionValue("mip_rel_gap", gap)

    problem.solve(QuietHighs(msg=False))
    model = problem.solverModel
    if model.getModelStatus() in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        raise Infeasible
    info = model.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise UserError(_no_solution(time_limit_s))
    is_mip = any(variable.cat == pulp.LpInteger for variable in problem.variables())
    objective = float(info.objective_function_value)
    return Solution(objective, float(info.mip_dual_bound) if is_mip else objective)


def with_cbc(problem: Any, time_limit_s: float, gap: float) -> Solution:
    """As `minimise`, by CBC."""
    import pulp

    began = time.monotonic()
    problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=gap))
    in_time = time.monotonic() - began < time_limit_s
    if problem.sol_status == pulp.LpSolutionInfeasible and in_time:
        raise Infeasible
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise UserError(_no_solution(time_limit_s))
    objective = float(pulp.value(problem.objective))
    if in_time:
        return Solution(objective, objective - gap * abs(objective))
    values = {variable.name: variable.varValue for variable in problem.variables()}
    problem.solve(pulp.PULP_CBC_CMD(msg=False, mip=False))
    bound = float(pulp.value(problem.objective))
    for variable in problem.variables():
        variable.varValue = values[variable.name]
    return Solution(objective, bound)


def _no_solution(time_limit_s: float) -> str:
    return f"The solver found no plan within its limit of {time_limit_s:g} s, and no proof that none exists: raise it."
