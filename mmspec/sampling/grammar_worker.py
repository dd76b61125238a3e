"""Handler of ``mmspec.sampling.trial.GrammarTrial``'s worker processes: checks grammars."""

from __future__ import annotations

from mmspec.sampling.syntax import check_grammar


def handle(request: dict[str, str], body: bytes) -> tuple[dict[str, object], tuple[bytes, ...]]:
    """Check a grammar; see ``check_grammar``."""
    check_grammar(request["kind"], body.decode())
    return {}, ()
