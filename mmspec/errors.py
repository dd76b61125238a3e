"""The one exception that means: the user asked for something that cannot be done as asked."""


class UserError(ValueError):
    """A mistake of the caller's, said in one line: the rule, what was expected, what was received.

    The command line prints it as ``error: ...`` and exits with status 2; the Python API lets it propagate.
    """
