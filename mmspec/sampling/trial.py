"""Check untrusted grammars in worker processes, with time and memory limits; see ``mmspec.workers``.

This module must not import torch: workers import it, too.
"""

from __future__ import annotations

from mmspec.errors import UserError
from mmspec.sampling.syntax import STACK, CheckedText, check_grammar, check_size
from mmspec.workers import Cancellation, WorkerError, Workers


class GrammarTrial:
    """Pool of worker processes that test whether grammars compile within limits.

    Valid grammars are compiled again in the process that uses them, as compiled grammars cannot be sent between
    processes. Thread-safe. Workers are stopped when the pool is closed or garbage collected.

    Args:
        workers: maximum number of grammars compiled concurrently; further calls block.
        seconds: wall-clock limit per grammar. Not enforced on Windows.
        memory: maximum bytes of data that a worker may allocate. Enforced on Linux only.
    """

    def __init__(self, *, workers: int = 2, seconds: float = 10.0, memory: int = 256 << 20) -> None:
        self.seconds, self.memory = seconds, memory
        self._workers = Workers(__name__, workers=workers, memory=memory + STACK)
        self.close = self._workers.close

    def check(self, kind: str, text: str, *, stop: Cancellation | None = None) -> CheckedText:
        """Check a grammar in a worker.

        Args:
            kind: ``"json_schema"``, ``"regex"`` or ``"grammar"``.
            text: the schema, pattern or grammar.
            stop: stops the check, from another thread.

        Returns:
            The text, marked as checked for ``SamplingParams``.

        Raises:
            UserError: as for ``check_grammar``; or a limit was exceeded, or the check was stopped.
        """
        check_size(kind, text)
        try:
            self._workers.run({"kind": kind}, text.encode(), self.seconds, lambda *_: None, stop)
        except WorkerError as error:
            raise UserError(f"{kind} {self._describe(error)}") from None
        return CheckedText(text)

    def _describe(self, error: WorkerError) -> str:
        if error.cause == "time":
            return f"must compile within {self.seconds:g} s: got one that takes longer"
        if error.cause == "memory" or error.detail == "SIGABRT":  # Rust aborts if an allocation fails
            return f"must compile in {self.memory >> 20} MiB: got one that needs more"
        if error.cause == "stop":
            return "was not checked to the end: stopped"
        return f"must be one that llguidance can compile: got one on which it fails ({error.detail})"


def handle(request: dict[str, str], body: bytes) -> tuple[dict[str, object], tuple[bytes, ...]]:
    """Check a grammar in a worker process; see ``check_grammar``."""
    check_grammar(request["kind"], body.decode())
    return {}, ()
