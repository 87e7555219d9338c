"""URLs as they may be shown and kept. Needs the standard library only: the doctor shows them before the set-up."""

import re

_USER = re.compile(r"(?<=://)(?!/)[^\s\"']*@")
"""To the last @ of a word: a password may hold an @ or a slash that nobody has quoted."""
_PARAMETER = re.compile(r"([?&][^=&\s]*(?:password|secret|token)[^=&\s]*=)[^&\s\"']*", re.IGNORECASE)


def without_password(text: str) -> str:
    """A URL, or a text with URLs in it such as an error of a library's, without their users, passwords and tokens."""
    return _PARAMETER.sub(r"\1…", _USER.sub("…@", text))
