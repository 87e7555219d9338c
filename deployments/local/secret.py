"""The secret of a stack: one file in its home that its owner alone can read, made at the first `hexflow up`.

All parts of the stack sign in with it at its own servers, as the user `hexflow`; who can read the file is the owner. It
travels in files and environments, never in a URL, an argument or a log. Needs the standard library only.
"""

import hashlib
import os
import secrets
from pathlib import Path

from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic
from tasks.machine.private import OTHERS, OWN_FILE

USER = "hexflow"
"""The name that goes with the secret where one is asked for."""
_BYTES = 32


def secret_path(settings: Settings) -> Path:
    """The file."""
    return settings.local.home / "secret"


def make_secret(settings: Settings) -> str:
    """The secret as of `read_pair`, made now if there is none; the caller holds the stack's lock."""
    if not secret_path(settings).exists():
        write_atomic(secret_path(settings), f"{secrets.token_urlsafe(_BYTES)}\n".encode(), OWN_FILE)
    return read_pair(settings)


def fingerprint_of(pair: str) -> str:
    """Tells one secret from another, and nothing of it."""
    return hashlib.sha256(pair.encode()).hexdigest()[:12]


def read_pair(settings: Settings) -> str:
    """`user:secret`, as HTTP's Basic scheme wants it.

    Raises:
        UserError: there is none, or others could have read it.
    """
    path, anew = secret_path(settings), "Run `hexflow down`, delete it, and run `hexflow up`, which makes a new one."
    try:
        with path.open() as file:
            facts, secret = os.fstat(file.fileno()), file.read().strip()
    except FileNotFoundError:
        raise UserError(
            f"{path}, the stack's secret, is not there: run `hexflow down`, then `hexflow up`, which makes one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}, the stack's secret, cannot be read ({error}). {anew}") from None
    if facts.st_uid != os.getuid() or facts.st_mode & OTHERS:
        raise UserError(f"{path}, the stack's secret, is open to other users, who may know it by now. {anew}")
    if len(secret) < _BYTES:  # an empty one would let in whoever gives none
        raise UserError(f"{path} holds no secret. {anew}")
    return f"{USER}:{secret}"
