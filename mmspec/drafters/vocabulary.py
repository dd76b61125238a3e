"""Tokens that two vocabularies share, for a draft model with another tokenizer (arXiv 2502.05202)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from mmspec.errors import UserError
from mmspec.targets.support import from_pretrained


class SharedTokens:
    """Tokens that a target's tokenizer and a draft model's have in common, and translation of the others.

    Tokens are equal if their strings are, apart from the sign of a leading space.

    Args:
        sizes: number of the models' tokens, of the target and of the draft model.

    Attributes:
        target_ids, draft_ids: (shared,) int64, the same tokens in both vocabularies.
    """

    def __init__(self, target: Any, draft: Any, sizes: tuple[int, int]) -> None:
        theirs, ours = target.get_vocab(), draft.get_vocab()
        signs = _space_sign(target), _space_sign(draft)
        pairs = {theirs[name]: ours[one] for one in ours if (name := _renamed(one, *signs)) in theirs}
        pairs = {token: own for token, own in pairs.items() if token < sizes[0] and own < sizes[1]}
        self._target, self._draft = target, draft
        self._pieces: dict[int, list[int]] = {token: [own] for token, own in pairs.items()}
        self.target_ids, self.draft_ids = torch.tensor(list(pairs)).long(), torch.tensor(list(pairs.values())).long()

    def translate(self, tokens: Sequence[int]) -> list[int]:
        """Draft tokens of the target's: a token that is not shared is encoded by its text."""
        for token in tokens:
            if token not in self._pieces:
                text = self._target.decode([token])
                self._pieces[token] = self._draft(text, add_special_tokens=False)["input_ids"]
        return [piece for token in tokens for piece in self._pieces[token]]


def _space_sign(tokenizer: Any) -> str:
    """How tokens that begin with a space begin."""
    ids = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return str(tokenizer.convert_ids_to_tokens(ids)[0])[:1] if ids else ""


def _renamed(token: str, target: str, draft: str) -> str:
    """A draft model's token as the target's tokenizer writes it."""
    return target + token[1:] if target and draft and target != draft and token.startswith(draft) else token


def tokenizer_of(model: Any) -> Any:
    """The tokenizer in a model's folder, or in the cache of the hub; None if there is none."""
    name = "" if model is None else model.config.name_or_path
    if not name:
        return None
    try:
        return from_pretrained(AutoTokenizer, name, local_files_only=True)
    except (OSError, UserError, ValueError):
        return None
