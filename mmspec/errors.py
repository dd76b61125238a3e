"""The error for mistakes of the caller, and one-line messages of other errors."""


class UserError(ValueError):
    """A mistake of the caller's, said in one line: the rule, what was expected, what was received.

    The command line prints it as ``error: ...`` and exits with status 2; the Python API lets it propagate.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
