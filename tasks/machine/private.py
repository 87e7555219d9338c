"""Directories and files that their owner alone can open, whatever the user's umask says."""

import os
import pwd
from pathlib import Path

from planners.errors import UserError

OWN_FILE = 0o600
OWN_DIRECTORY = 0o700
OTHERS = 0o077
"""The bits of a mode that let others in; as an umask, what keeps them out."""


def make_private(directory: Path, variable: str) -> Path:
    """Make a directory that its owner alone may enter, and close one of before to others; returns it.

    Args:
        directory: what is to be there; its parents are made as the umask says.
        variable: the one that names another place, for messages.

    Raises:
        UserError: it is another user's, or its file system keeps no modes.
        OSError: it cannot be made.
    """
    directory.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
    for found in (directory.lstat(), directory.stat()):  # in a place for all, a link may be somebody else's
        if found.st_uid != os.getuid():
            raise UserError(
                f"{directory} belongs to {_user(found.st_uid)}, who could read and take what is in it: name a "
                f"directory of your own in {variable}."
            )
    if directory.stat().st_mode & OTHERS:
        directory.chmod(OWN_DIRECTORY)
    if directory.stat().st_mode & OTHERS:
        raise UserError(
            f"{directory} cannot be closed to other users, since its file system keeps no modes: name a directory on "
            f"another in {variable}."
        )
    return directory


def open_own(path: str, flags: int) -> int:
    """An opener for `open`: a file that it makes is its owner's alone."""
    return os.open(path, flags, OWN_FILE)


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
