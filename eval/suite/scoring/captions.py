"""Captions against several references: CIDEr."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.suite.sample import Answered
from mmspec.extras import missing


def cider(answered: Sequence[Answered]) -> dict[str, float]:
    """CIDEr by pycocoevalcap.

    Words are runs of letters and digits in lower case, in place of the Java tokeniser of the original; weights come
    from the references given, so that a part of a benchmark scores otherwise than the whole.

    Raises:
        UserError: pycocoevalcap is not installed.
    """
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise missing("CIDEr", "pycocoevalcap", "eval") from None
    wanted = {k: [_words(one) for one in sample.references[0]] for k, (sample, _) in enumerate(answered)}
    said = {k: [_words(answers[0])] for k, (_, answers) in enumerate(answered)}
    score, _ = Cider().compute_score(wanted, said)
    return {"CIDEr": float(score)}


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))
