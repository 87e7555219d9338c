"""The mix of sources: exact shares over any start of a run, each source in its own order, one answer for one index."""

import itertools
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tasks.data.mix import Mix, divide

weights = st.lists(st.floats(0.001, 1000) | st.integers(1, 5).map(float), min_size=1, max_size=6)
seeds = st.integers(0, 2**31 - 1)


@given(weights, seeds)
def test_every_source_has_its_share_of_every_run_of_indices(weights: list[float], seed: int) -> None:
    mix, total = Mix(weights, seed), sum(weights)
    counts = [0] * len(weights)
    for index in range(300):
        source, place = mix.place(index)
        assert place == counts[source], "a source's questions come in its own order, none left out or twice"
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (index + 1) * weight / total) <= len(weights)


@given(weights, seeds, st.integers(0, 10**12))
def test_an_index_far_out_is_found_as_if_all_before_it_had_been_walked(
    weights: list[float], seed: int, start: int
) -> None:
    mix = Mix(weights, seed)
    places = [mix.place(index) for index in range(start, start + 60)]
    assert places == [Mix(weights, seed).place(index) for index in range(start, start + 60)]
    for source in range(len(weights)):
        own = [place for at, place in places if at == source]
        assert own == list(range(own[0], own[0] + len(own))) if own else True
        share = Fraction(weights[source]) / sum(map(Fraction, weights))
        assert all(abs(place - share * start) <= len(weights) + 60 for place in own)


def test_a_single_source_has_every_index_as_its_own() -> None:
    assert [Mix([0.3], seed=5).place(index) for index in (0, 1, 17, 10**9)] == [(0, 0), (0, 1), (0, 17), (0, 10**9)]


def test_the_seed_moves_the_mix() -> None:
    orders = {tuple(Mix([1, 1, 1], seed).place(index)[0] for index in range(9)) for seed in range(20)}
    assert len(orders) > 1


@given(st.integers(0, 1000), weights)
def test_a_whole_is_divided_without_rest(count: int, weights: list[float]) -> None:
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    parts = divide(count, shares)
    assert sum(parts) == count
    assert all(abs(part - count * share) < 1 for part, share in zip(parts, shares, strict=True))


def test_shares_are_exact_over_a_million_indices() -> None:
    mix = Mix([0.7, 0.2, 0.1], seed=0)
    first, last = (dict(mix.place(index) for index in range(end - 20, end)) for end in (20, 1_000_000))
    assert {source: place + 1 for source, place in last.items()}.keys() == first.keys() == {0, 1, 2}
    assert all(abs(last[source] - share) <= 3 for source, share in enumerate((700_000, 200_000, 100_000)))
    assert list(itertools.accumulate(divide(10, mix.shares))) == [7, 9, 10]
