"""Bytes of single tokens, also of those that are parts of a character, which decoding alone cannot spell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Bytes by the characters that spell them in vocabularies of byte-level BPE, GPT-2's ``bytes_to_unicode``."""


class TokenBytes:
    """Bytes of a tokenizer's tokens, a blank at the beginning of a word included.

    The pieces of the vocabulary are read as its decoder reads them: byte-level BPE, or SentencePiece with bytes as
    ``<0xE6>``. Tokens of other tokenizers have the bytes of their text.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        steps = [] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        self._is_byte_level, self._has_bytes = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._blank = next((blank for step in steps if (blank := _written_as_blank(step))), None)

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if self._is_byte_level and all(character in _ALPHABET for character in piece or ""):
            return bytes(_ALPHABET[character] for character in piece or "")
        if self._has_bytes and (byte := _BYTE.fullmatch(piece or "")):
            return bytes([int(byte[1], 16)])
        if self._blank is not None:
            return (piece or "").replace(self._blank, " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in decoder.get("decoders", [decoder]):
        if step["type"] == "Sequence":
            yield from _steps(step)
        else:
            yield step


def _written_as_blank(step: Mapping[str, Any]) -> str | None:
    """The text that a step of a decoder replaces by a blank, if it does."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return step["pattern"].get("String") if step["type"] == "Replace" and step["content"] == " " else None
