"""The one error that a person is meant to read."""


class UserError(Exception):
    """Bad input or a bad environment: the message says what is wrong, where, and the remedy.

    The command line prints it without a traceback and exits with status 2; a flow fails with it as its message.
    """
