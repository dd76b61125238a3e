"""The parts of a long prompt that a draft model gets if it does not get all (RAPID, arXiv 2502.20330).

The beginning, the end, which contains the question, and between them the chunks that have most in common with the end.
RAPID retrieves chunks by embeddings of another model; here, they are compared by their tokens, of which rare ones count
more. Its other half, a target distribution that the drafter changes, is left out: it is not lossless.
"""

from __future__ import annotations

from collections import Counter
from math import log

import torch
from torch import Tensor

LONG = 1024  # tokens from which on a prompt is shortened
CHUNK = 64
BEGINNING, END = 64, 128  # always kept


def relevant(ids: Tensor, text: Tensor, share: float) -> Tensor:
    """The text tokens to keep.

    Args:
        ids: (batch, length) int64.
        text: (batch, length) bool, tokens to select from: neither padding nor visual ones.
        share: of the chunks between beginning and end; 0 and 1 keep all.

    Returns:
        (batch, length) bool.
    """
    kept = text.clone()
    for row in range(len(ids)) if 0 < share < 1 else ():
        places = text[row].nonzero()[:, 0]
        if len(places) >= LONG:
            kept[row, places] = _selected(ids[row, places].tolist(), share).to(kept.device)
    return kept


def _selected(tokens: list[int], share: float) -> Tensor:
    last = len(tokens) - END
    begins = range(BEGINNING, last, CHUNK)
    chunks = [set(tokens[begin : min(begin + CHUNK, last)]) for begin in begins]
    seen_in, asked = Counter(token for chunk in chunks for token in chunk), set(tokens[last:])
    common = [sum(log(len(chunks) / seen_in[token]) for token in sorted(chunk & asked)) for chunk in chunks]
    best = sorted(range(len(chunks)), key=common.__getitem__, reverse=True)[: max(1, round(share * len(chunks)))]
    kept = torch.zeros(len(tokens), dtype=torch.bool)
    kept[:BEGINNING] = kept[last:] = True
    for number in best:
        kept[begins[number] : min(begins[number] + CHUNK, last)] = True
    return kept
