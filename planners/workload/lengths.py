"""Distributions of lengths in tokens, all reduced to equally likely points so that costs integrate over them."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from planners.sections import Section

POINTS = 2000


@dataclass(frozen=True)
class Lengths:
    """Equally likely lengths in ascending order."""

    points: tuple[float, ...] = field(repr=False)

    @cached_property
    def mean(self) -> float:
        """E[l]."""
        return self.moment(1)

    def moment(self, power: int) -> float:
        """E[l^power]."""
        return sum(p**power for p in self.points) / len(self.points)

    def quantile(self, share: float) -> float:
        """Shortest length that at least `share` of the answers do not exceed."""
        return self.points[min(len(self.points) - 1, max(0, round(share * len(self.points)) - 1))]

    def mean_longest(self, count: int) -> float:
        """E[longest of `count` answers] = Σ pᵢ·((i/N)^count − ((i − 1)/N)^count) over the N points in order."""
        size = len(self.points)
        return sum(p * ((i / size) ** count - ((i - 1) / size) ** count) for i, p in enumerate(self.points, start=1))

    @property
    def longest(self) -> float:
        """The largest length that occurs."""
        return self.points[-1]

    def age_moment(self, power: int) -> float:
        """E[age^power] of an answer met in progress: long ones are met more often (renewal theory)."""
        return self.moment(power + 1) / ((power + 1) * self.mean)

    def residual_quantile(self, share: float) -> float:
        """Tokens left of an answer in progress, not exceeded with probability `share`: P(> x) = ∫ₓ P(l > u)/E[l]."""
        beyond = (1 - share) * self.mean * len(self.points)
        left = 0.0
        for above, (low, high) in enumerate(pairwise(reversed((0.0, *self.points))), start=1):
            piece = above * (low - high)
            if left + piece >= beyond:
                return low - (beyond - left) / above
            left += piece
        return 0.0

    def classes(self, count: int) -> list[tuple[float, float]]:
        """(share of answers, mean length) of `count` classes of equal probability, short to long."""
        size, total = len(self.points), len(self.points)
        bounds = [round(i * size / count) for i in range(count + 1)]
        parts = [self.points[a:b] for a, b in pairwise(bounds) if b > a]
        return [(len(part) / total, sum(part) / len(part)) for part in parts]


def constant(tokens: float) -> Lengths:
    """Every answer has the same length."""
    return Lengths((float(tokens),))


class _Spec(Section):
    model_config = ConfigDict(defer_build=True)


class LogNormal(_Spec):
    """Log-normal by its mean and 99 % quantile before capping, as papers report it."""

    kind: Literal["log-normal"] = "log-normal"
    mean: float = Field(gt=0, description="Mean length in tokens.")
    q99: float = Field(gt=0, description="Length that 99 % of the answers do not exceed, in tokens.")
    cap: int = Field(ge=1, description="Longest length: longer ones are cut off there.")

    @model_validator(mode="after")
    def _shape_exists(self) -> "LogNormal":
        z = NormalDist().inv_cdf(0.99)
        if self.q99 <= self.mean or log(self.q99 / self.mean) > z * z / 2:
            raise ValueError(f"q99 must lie between the mean and {exp(z * z / 2):.1f} times the mean")
        return self

    def lengths(self) -> Lengths:
        """Mid-quantile points. σ solves σ²/2 − z·σ + ln(q99/mean) = 0, μ = ln(mean) − σ²/2."""
        normal = NormalDist()
        z = normal.inv_cdf(0.99)
        sigma = z - sqrt(z * z - 2 * log(self.q99 / self.mean))
        mu = log(self.mean) - sigma * sigma / 2
        quantiles = (exp(mu + sigma * normal.inv_cdf((i + 0.5) / POINTS)) for i in range(POINTS))
        return Lengths(tuple(float(max(1, min(self.cap, round(q)))) for q in quantiles))


class Samples(_Spec):
    """Lengths as they were observed."""

    kind: Literal["samples"] = "samples"
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="Observed lengths in tokens.")

    def lengths(self) -> Lengths:
        """The samples, sorted; many are thinned to equally spaced quantiles."""
        ordered = sorted(map(float, self.tokens))
        if len(ordered) <= POINTS:
            return Lengths(tuple(ordered))
        return Lengths(tuple(ordered[int((i + 0.5) * len(ordered) / POINTS)] for i in range(POINTS)))


class Histogram(_Spec):
    """Counts between edges, as a past run reports them."""

    kind: Literal["histogram"] = "histogram"
    edges: tuple[float, ...] = Field(min_length=2, description="Ascending edges of the bins, in tokens.")
    counts: tuple[float, ...] = Field(description="Answers in each bin.")

    @model_validator(mode="after")
    def _bins_fit(self) -> "Histogram":
        if len(self.counts) != len(self.edges) - 1:
            raise ValueError(f"{len(self.edges)} edges need {len(self.edges) - 1} counts, not {len(self.counts)}")
        if list(self.edges) != sorted(set(self.edges)) or self.edges[0] < 0:
            raise ValueError("edges must ascend from zero or above")
        if min(self.counts) < 0 or sum(self.counts) <= 0:
            raise ValueError("counts must not be negative, and one must be positive")
        return self

    def lengths(self) -> Lengths:
        """Mid-quantile points, uniform inside each bin."""
        cumulative = [0.0, *accumulate(self.counts)]
        points = []
        for i in range(POINTS):
            mass = (i + 0.5) / POINTS * cumulative[-1]
            bin_ = min(bisect_left(cumulative, mass), len(self.counts)) - 1
            within = (mass - cumulative[bin_]) / self.counts[bin_]
            points.append(max(1.0, self.edges[bin_] + within * (self.edges[bin_ + 1] - self.edges[bin_])))
        return Lengths(tuple(points))


LengthSpec = Annotated[LogNormal | Samples | Histogram, Field(discriminator="kind")]
