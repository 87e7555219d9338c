"""The secret of a stack: made once, and read by its owner alone."""

import os
from pathlib import Path

import pytest

from deployments.local.secret import USER, fingerprint_of, make_secret, read_pair, secret_path
from planners.errors import UserError
from tasks.config.settings import Settings
from tests.support.places import settings_of


def test_a_secret_is_made_once_and_for_its_owner_alone(settings: Settings, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        pair = make_secret(settings)
    finally:
        os.umask(before)
    assert secret_path(settings).stat().st_mode & 0o777 == 0o600
    assert make_secret(settings) == read_pair(settings) == pair
    user, _, secret = pair.partition(":")
    assert user == USER
    assert len(secret) >= 43, "256 bits"
    another = make_secret(settings_of(home=tmp_path / "other", runs=tmp_path, ledger_url=""))
    assert another != pair
    assert fingerprint_of(another) != fingerprint_of(pair)
    assert secret[:4] not in fingerprint_of(pair)


def test_a_new_secret_is_made_where_the_old_one_was_deleted(settings: Settings) -> None:
    before = make_secret(settings)
    secret_path(settings).unlink()
    with pytest.raises(UserError, match=r"is not there: run `hexflow down`, then `hexflow up`"):
        read_pair(settings)
    assert make_secret(settings) != before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_could_read_is_none(settings: Settings, mode: int) -> None:
    make_secret(settings)
    secret_path(settings).chmod(mode)
    for use in (read_pair, make_secret):
        with pytest.raises(UserError, match=r"open to other users.*delete it"):
            use(settings)


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"\xff" * 40])
def test_a_file_without_a_secret_lets_nobody_in(settings: Settings, content: bytes) -> None:
    make_secret(settings)
    secret_path(settings).write_bytes(content)
    with pytest.raises(UserError, match="delete it, and run `hexflow up`"):
        read_pair(settings)
