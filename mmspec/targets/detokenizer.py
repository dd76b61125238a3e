"""Incremental detokenization, used for streams and complete answers.

A token's text depends on the tokens before it: SentencePiece decoders drop the first blank of a text, and a character
may be several tokens. An answer is therefore decoded after the last tokens of its prompt, whose text is then removed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

from mmspec.sampling.reasoning import Phase, Place, ReasoningParser

_CONTEXT = 8  # tokens: a character has at most four
_MOST_HELD = 64  # maximum held tokens with uncertain text, after which the text is emitted
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ESCAPED = dict.fromkeys(range(0xDC80, 0xDD00), _UNKNOWN)  # invalid bytes under "surrogateescape"
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # by clean_up_tokenization_spaces
_JOINED_BYTES = re.compile(r"ByteLevel|Metaspace|(Replace )?(ByteFallback )?Fuse( Replace)?( Strip)?")
_WHITE = ""  # stands for white space in ``StopFilter(drops=...)``

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Map from characters to bytes in byte-level BPE vocabularies, the inverse of GPT-2's ``bytes_to_unicode``."""


class Vocabulary:
    """A tokenizer's tokens as bytes. Pieces are decoded as byte-level BPE, or as SentencePiece with bytes as
    ``<0xE6>``. For other tokenizers, a token's bytes are the bytes of its decoded text.

    Attributes:
        tokenizer: tokenizer of transformers.
        special_ids: special tokens, which are not part of an answer's text.
        joins_bytes: whether a text is the concatenation of its tokens' bytes, apart from a leading blank.
        errors: ``errors`` argument for decoding invalid bytes as the tokenizer's decoder does.
        cleans: whether decoding removes blanks before punctuation.
        rewritten: texts that decoding replaces even across tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        steps = [] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))
        kinds = [step["type"] for step in steps]
        self._is_byte_level, self._has_bytes = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._blank = next((blank for step in steps if (blank := _written_as_blank(step))), None)
        self.special_ids = frozenset(number for number, token in self._added.items() if token.special)
        self.special_ids |= set() if backend is not None else set(tokenizer.all_special_ids)
        self.joins_bytes = bool(_JOINED_BYTES.fullmatch(" ".join(kinds))) and all(map(_keeps_bytes, steps))
        self.errors = "surrogateescape" if self._has_bytes else "replace"
        # By default, transformers does not clean text of BPE tokenizers.
        by_default = backend is None or type(backend.model).__name__ != "BPE"
        forced = "" if by_default else "_for_bpe_even_though_it_will_corrupt_output"
        self.cleans = bool(getattr(tokenizer, f"clean_up_tokenization_spaces{forced}", False))
        fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
        self.rewritten = [step["pattern"].get("String", "") for step in fused if step["type"] == "Replace"]
        self.rewritten += ["@@ "] if backend is None else []  # subword-nmt's marker

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, including the blank before a word; possibly a part of a character."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self.tokenizer.convert_ids_to_tokens(token) or ""
        if self._is_byte_level and all(character in _ALPHABET for character in piece):
            return bytes(_ALPHABET[character] for character in piece)
        if self._has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._blank is not None:
            return str(piece.replace(self._blank, " ")).encode()
        return str(self.tokenizer.decode([token])).encode()


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in decoder.get("decoders", [decoder]):
        if step["type"] == "Sequence":
            yield from _steps(step)
        else:
            yield step


def _written_as_blank(step: Mapping[str, Any]) -> str | None:
    """The text that a decoder step replaces by a blank; None for other steps."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return step["pattern"].get("String") if step["type"] == "Replace" and step["content"] == " " else None


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a decoder step changes only blanks of single tokens and the leading blank of the text."""
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    return step["type"] != "Replace" or len(_written_as_blank(step) or "") == 1


def _begun(text: str, wholes: Iterable[str]) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of any of ``wholes``."""
    lengths = (n for one in wholes for n in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:n]))
    return max(lengths, default=0)


class Detokenizer:
    """Incremental detokenizer with constant cost per token.

    The returned texts, joined, are the text that the tokens add to their context. Text that a later token may change,
    such as the first bytes of a character, is held back.

    Args:
        context: preceding token ids, of which only the last are read.
        hidden: tokens without text; by default special tokens.
        verbatim: keep blanks before punctuation, which some tokenizers remove.
    """

    def __init__(
        self, tokens: Vocabulary, context: Sequence[int] = (), hidden: Set[int] | None = None, verbatim: bool = False
    ) -> None:
        self._vocabulary, self._cleans = tokens, tokens.cleans and not verbatim
        self._hidden = tokens.special_ids if hidden is None else hidden
        self._context = [*islice((token for token in reversed(context) if token not in self._hidden), _CONTEXT)][::-1]
        # Tokens with uncertain text, the number of their characters already returned, and the context's text.
        self._held, self._shown, self._before = list[int](), 0, ""
        self._characters = codecs.getincrementaldecoder("utf-8")(tokens.errors)
        self._begins, self._joins_bytes = True, tokens.joins_bytes and not self._cleans
        if not self._joins_bytes:
            self._before = self._text(self._context, self._cleans)
            return
        self.append(self._context)
        # An incomplete character at the context's end belongs to the context, unless a token completes it.
        self._before = self._characters.getstate()[0].decode(errors=tokens.errors).translate(_ESCAPED)

    def append(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return their text so far."""
        read = self._read if self._joins_bytes else self._read_in_context
        return "".join([read(token) for token in token_ids if token not in self._hidden])

    def finish(self) -> str:
        """Return the text held back; further tokens may follow."""
        return self._read(None) if self._joins_bytes else self._read_in_context(None)

    def _read(self, token: int | None) -> str:
        content = b"" if token is None else self._vocabulary.token_bytes(token)
        if self._begins and content and token is not None:
            self._begins = False
            content = self._text([token], False).encode() if content.startswith(b" ") else content
        text = self._characters.decode(content, token is None).translate(_ESCAPED)
        if text:
            text, self._before = text.removeprefix(self._before), ""
        return text

    def _read_in_context(self, token: int | None) -> str:
        """Return the certain text of held tokens; complete tokens become the context."""
        self._held += [] if token is None else [token]
        ids, before = self._context + self._held, self._before
        whole = self._text(ids, self._cleans)
        while not whole.startswith(before):
            before = before[:-1]  # an incomplete character that the answer completes
        text = whole[len(before) :]
        rewritten = [*self._vocabulary.rewritten, *(_CLEANED if self._cleans else ())]
        pending = min(len(text) - len(text.rstrip(_UNKNOWN)), 3)
        if _begun(whole, rewritten) or (self._cleans and _begun(self._text(ids, False), rewritten)):
            pending = len(text)
        if token is None or len(self._held) > _MOST_HELD:
            pending = 0
        certain = text[: len(text) - pending]
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if not pending and (text or len(self._held) > _MOST_HELD):
            if before := self._text(ids[-_CONTEXT:], self._cleans):
                self._context, self._before = ids[-_CONTEXT:], before
            self._held, self._shown = [], 0
        return new

    def _text(self, token_ids: Sequence[int], cleans: bool) -> str:
        options = {} if cleans else {"clean_up_tokenization_spaces": False}
        return str(self._vocabulary.tokenizer.decode(token_ids, **options)) if token_ids else ""


class StopFilter:
    """Emits text up to the first stop string, and holds back text that may be the start of a stop string.

    Args:
        drops: leading texts to remove in this order if present; ``_WHITE`` removes white space.
        trims: remove trailing white space.

    Attributes:
        stopped, rest: the stop string that was found, or "", and the text after it.
        length: characters so far, including held characters.
    """

    def __init__(self, stop: Sequence[str], drops: Iterable[str] = (), *, trims: bool = False) -> None:
        self._stop, self._drops, self._trims = stop, list(drops), trims
        self._held, self._sent, self.length = "", 0, 0
        self.rest, self.stopped = "", ""

    def feed(self, text: str, *, final: bool = False) -> str:
        """Add text and return the text to emit; ``final`` releases held text."""
        self._held += "" if self.stopped else text
        while self._drops:
            drop = self._drops[0]
            self._held = self._held if drop else self._held.lstrip()
            if drop.startswith(self._held):
                return ""
            self._held = self._held.removeprefix(self._drops.pop(0))
        found = min(((at, one) for one in self._stop if (at := self._held.find(one)) >= 0), default=None)
        end = len(self._held) - (0 if final else _begun(self._held, self._stop))
        if found is not None:
            end, self.rest, self.stopped = found[0], self._held[found[0] + len(found[1]) :], found[1]
        passed = self._held[:end].rstrip() if self._trims else self._held[:end]
        self._held, self._sent = "" if self.stopped else self._held[len(passed) :], self._sent + len(passed)
        self.length = self._sent + len(self._held)
        return passed


class AnswerReader:
    """Splits an output into reasoning and answer, up to a stop string. White space between the two is removed.

    Args:
        prompt: token ids before the output.
        parser: reasoning parser; None if the output is an answer without reasoning.
        prefix: text to remove at the start of an answer without reasoning.
        **options: of ``Detokenizer``.

    Attributes:
        num_reasoning_tokens: number of reasoning tokens so far, markers included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        stop: Sequence[str],
        parser: ReasoningParser | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self._detokenizer, self._parser = Detokenizer(vocabulary, prompt, **options), parser
        self._open = ""  # text that may belong to the reasoning or to the answer
        self._count = self.num_reasoning_tokens = 0
        self._place = parser.first if parser else Place(Phase.PLAIN)
        self.answer = StopFilter(stop, [_WHITE, *parser.form.headers] if parser else [prefix] if prefix else [])
        if parser is not None:
            marked = self._place.phase is Phase.OPEN and parser.start_id is None
            drops = [_WHITE, parser.form.start, _WHITE] if marked else [_WHITE]
            self._reasoning = StopFilter([parser.form.end] if parser.end_id is None else [], drops, trims=True)

    def append(self, token: int) -> tuple[str, str]:
        """Append a token; returns new text of the reasoning and of the answer."""
        text = self._open + self._detokenizer.append([token])
        if self._parser is not None and not self._place.answers:
            self._place, self._count = self._parser.advance(self._place, token), self._count + 1
            self._open = text if self._place.phase is Phase.OPEN else ""
            if self._place.phase is Phase.OPEN:
                return "", ""
            if self._place.phase is not Phase.PLAIN:
                self.num_reasoning_tokens, over = self._count, self._place.answers
                text += self._detokenizer.finish() if over and self._parser.end_id is not None else ""
                return self._reasoning.feed(text, final=over), self.answer.feed(self._reasoning.rest) if over else ""
        return "", self.answer.feed(text)

    def finish(self) -> tuple[str, str]:
        """Return held text of the reasoning and of the answer at the end of the output."""
        text = self._open + self._detokenizer.finish()
        if self._place.phase is Phase.REASONING:
            return self._reasoning.feed(text, final=True), ""
        return "", self.answer.feed(text, final=True)
