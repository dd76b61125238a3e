"""CIDEr, for captions with several references."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmspec.eval.suite.sample import Answered
from mmspec.extras import missing


def cider(answered: Sequence[Answered]) -> dict[str, float]:
    """CIDEr, computed by pycocoevalcap.

    Words are lower-case runs of letters and digits, instead of the original's Java tokeniser. Document frequencies come
    from the given references, so a subset of a benchmark scores differently from the whole.

    Raises:
        UserError: pycocoevalcap is not installed.
    """
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise missing("CIDEr", "pycocoevalcap", "eval") from None
    references = {
        k: [_normalise(caption) for caption in sample.references[0]] for k, (sample, _) in enumerate(answered)
    }
    candidates = {k: [_normalise(answers[0])] for k, (_, answers) in enumerate(answered)}
    score, _ = Cider().compute_score(references, candidates)
    return {"CIDEr": float(score)}


def _normalise(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))
