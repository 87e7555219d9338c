"""What is shown of a URL signs nobody in."""

import pytest

from tasks.config.passwords import without_password


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hush@db:5432/hexflow", "postgresql://…@db:5432/hexflow"),
        ("postgresql://me:hu/s@h@db/hexflow", "postgresql://…@db/hexflow"),
        (
            "postgresql://me@db/hexflow?sslmode=require&password=hush",
            "postgresql://…@db/hexflow?sslmode=require&password=…",
        ),
        (
            "postgresql:///hexflow?host=/run&sslpassword=hush&port=1",
            "postgresql:///hexflow?host=/run&sslpassword=…&port=1",
        ),
        (
            "401 for url 'http://me:hush@host:4200/api/flows?token=hush'; try http://you:hush@other/",
            "401 for url 'http://…@host:4200/api/flows?token=…'; try http://…@other/",
        ),
        ("sqlite:////home/me@work/ledger.db", "sqlite:////home/me@work/ledger.db"),
        ("http://127.0.0.1:4200/api", "http://127.0.0.1:4200/api"),
    ],
)
def test_users_passwords_and_tokens_are_left_out(text: str, shown: str) -> None:
    """Those in parameters as well, those that nobody has quoted, and those in the midst of a library's words."""
    assert without_password(text) == shown
