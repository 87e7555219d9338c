"""What an actor has in hand: the most patient of its tasks decides how long its count may stand still."""

from tasks.lifecycle.work import Told, Work


def test_beats_tell_the_count_the_patience_and_the_groups() -> None:
    work = Work()
    assert work.told() == Told(0, None, frozenset())
    work.add(3)
    with work.in_hand(300.0, 7), work.in_hand(300.0, 8):
        work.add()
        assert work.told() == Told(4, 300.0, frozenset({7, 8}))
        with work.in_hand(900.0):
            assert work.told() == Told(4, 900.0, frozenset({7, 8}))
        assert work.told() == Told(4, 300.0, frozenset({7, 8}))
    assert work.told() == Told(4, None, frozenset())


def test_what_ends_in_an_error_is_no_longer_in_hand() -> None:
    work = Work()
    try:
        with work.in_hand(300.0, 7):
            raise ValueError
    except ValueError:
        assert work.told() == Told(0, None, frozenset())
