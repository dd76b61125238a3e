"""Text of tokens, one after the other: streams and whole answers are read by the same code.

A token's text depends on the tokens before it: SentencePiece decoders drop the first blank of a text, and a character
may be several tokens. So an answer is read after the last tokens of its prompt; its text is what it adds to theirs.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

from mmspec.sampling.thoughts import Phase, Place, Thoughts

_CONTEXT = 8  # tokens: a character has at most four
_MOST_HELD = 64  # tokens without a text that is certain, after which it is passed on
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ESCAPED = dict.fromkeys(range(0xDC80, 0xDD00), _UNKNOWN)  # bytes that are no character, of "surrogateescape"
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # by clean_up_tokenization_spaces
_JOINED_BYTES = re.compile(r"ByteLevel|Metaspace|(Replace )?(ByteFallback )?Fuse( Replace)?( Strip)?")
_WHITE = ""  # among what ``StopFilter`` drops

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Bytes by the characters that spell them in vocabularies of byte-level BPE, GPT-2's ``bytes_to_unicode``."""


class Vocabulary:
    """A tokenizer's tokens as bytes. Pieces are read as the tokenizer's decoder reads them: byte-level BPE, or
    SentencePiece with bytes as ``<0xE6>``. Tokens of other tokenizers have the bytes of their text.

    Attributes:
        tokenizer: of transformers.
        special_ids: tokens that are no part of an answer's text.
        joins_bytes: whether a text has the bytes of its tokens, apart from a blank at its beginning.
        errors: how bytes that are no character are decoded, as by the tokenizer's decoder.
        cleans: whether decoding removes blanks before punctuation.
        rewritten: texts that decoding replaces where several tokens spell them.
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
        # transformers does not clean the text of BPE by default.
        by_default = backend is None or type(backend.model).__name__ != "BPE"
        forced = "" if by_default else "_for_bpe_even_though_it_will_corrupt_output"
        self.cleans = bool(getattr(tokenizer, f"clean_up_tokenization_spaces{forced}", False))
        fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
        self.rewritten = [step["pattern"].get("String", "") for step in fused if step["type"] == "Replace"]
        self.rewritten += ["@@ "] if backend is None else []  # of subword-nmt

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, or the part of a character that it is; with the blank before a word."""
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
    """The text that a step of a decoder replaces by a blank, if it does."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return step["pattern"].get("String") if step["type"] == "Replace" and step["content"] == " " else None


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a step of a decoder changes no more than blanks of single tokens and one at the beginning of the text."""
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    return step["type"] != "Replace" or len(_written_as_blank(step) or "") == 1


def _begun(text: str, wholes: Iterable[str]) -> int:
    """Length of the longest end of a text with which one of some other texts begins."""
    lengths = (n for one in wholes for n in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:n]))
    return max(lengths, default=0)


class Detokenizer:
    """Text of tokens as they arrive, at a cost per token that does not depend on their number.

    The texts returned, joined, are what the tokens add to the text of those before them. What a later token may change,
    such as the first bytes of a character, is held back.

    Args:
        context: token ids before; the last ones are read.
        hidden: tokens that leave no text; by default special ones.
        verbatim: keep blanks before punctuation, which some tokenizers remove.
    """

    def __init__(
        self, tokens: Vocabulary, context: Sequence[int] = (), hidden: Set[int] | None = None, verbatim: bool = False
    ) -> None:
        self._vocabulary, self._cleans = tokens, tokens.cleans and not verbatim
        self._hidden = tokens.special_ids if hidden is None else hidden
        self._context = [*islice((token for token in reversed(context) if token not in self._hidden), _CONTEXT)][::-1]
        # What has no certain text yet, how many characters of it were returned, and the text before it.
        self._held, self._shown, self._before = list[int](), 0, ""
        self._characters = codecs.getincrementaldecoder("utf-8")(tokens.errors)
        self._begins, self._joins_bytes = True, tokens.joins_bytes and not self._cleans
        if not self._joins_bytes:
            self._before = self._text(self._context, self._cleans)
            return
        self.append(self._context)
        # Bytes at the context's end are a character of the context, unless a token completes it.
        self._before = self._characters.getstate()[0].decode(errors=tokens.errors).translate(_ESCAPED)

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that further tokens add."""
        read = self._read if self._joins_bytes else self._read_in_context
        return "".join([read(token) for token in token_ids if token not in self._hidden])

    def finish(self) -> str:
        """The text that was held back. Further tokens follow it."""
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
        """The text of held tokens as far as it is certain; they become the context once it is complete."""
        self._held += [] if token is None else [token]
        ids, before = self._context + self._held, self._before
        whole = self._text(ids, self._cleans)
        while not whole.startswith(before):
            before = before[:-1]  # the prompt's end, which the answer completes
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
    """Passes text on up to the first stop string, and nothing that may be the beginning of one.

    Args:
        drops: what is left out at the beginning, one after the other: texts, if they are there, and ``_WHITE`` space.
        trims: leave out white space at the end.

    Attributes:
        stopped, rest: whether there was a stop string, and the text after it.
        length: characters so far, those held back included.
    """

    def __init__(self, stop: Sequence[str], drops: Iterable[str] = (), *, trims: bool = False) -> None:
        self._stop, self._drops, self._trims = stop, list(drops), trims
        self._held, self._sent, self.length = "", 0, 0
        self.rest, self.stopped = "", False

    def feed(self, text: str, *, final: bool = False) -> str:
        """The text to pass on after further text; ``final`` if that is the last."""
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
            end, self.rest, self.stopped = found[0], self._held[found[0] + len(found[1]) :], True
        passed = self._held[:end].rstrip() if self._trims else self._held[:end]
        self._held, self._sent = "" if self.stopped else self._held[len(passed) :], self._sent + len(passed)
        self.length = self._sent + len(self._held)
        return passed


class AnswerReader:
    """Reads an output: its thoughts, and the answer after them, up to a stop string. White space between is left out.

    Args:
        prompt: token ids before the output.
        thoughts: None where the output is an answer from its first token on.
        prefix: text that is left out at the beginning of an answer without thoughts.
        **options: of ``Detokenizer``.

    Attributes:
        answer: of the answer's text.
        num_thoughts: tokens of the thoughts so far, markers included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        stop: Sequence[str],
        thoughts: Thoughts | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self._detokenizer, self._thoughts = Detokenizer(vocabulary, prompt, **options), thoughts
        self._open = ""  # text that may be of thoughts or of the answer
        self._count = self.num_thoughts = 0
        self._place = thoughts.first if thoughts else Place(Phase.PLAIN)
        self.answer = StopFilter(stop, [_WHITE] if thoughts else [prefix] if prefix else [])
        if thoughts is not None:
            marked = self._place.phase is Phase.OPEN and thoughts.start_id is None
            drops = [_WHITE, thoughts.form.start, _WHITE] if marked else [_WHITE]
            self._thought = StopFilter([thoughts.form.end] if thoughts.end_id is None else [], drops, trims=True)

    def append(self, token: int) -> tuple[str, str]:
        """What a token adds to thoughts and answer."""
        text = self._open + self._detokenizer.append([token])
        if self._thoughts is not None and not self._place.answers:
            self._place, self._count = self._thoughts.advance(self._place, token), self._count + 1
            self._open = text if self._place.phase is Phase.OPEN else ""
            if self._place.phase is Phase.OPEN:
                return "", ""
            if self._place.phase is not Phase.PLAIN:
                self.num_thoughts, over = self._count, self._place.answers
                text += self._detokenizer.finish() if over and self._thoughts.end_id is not None else ""
                return self._thought.feed(text, final=over), self.answer.feed(self._thought.rest) if over else ""
        return "", self.answer.feed(text)

    def finish(self) -> tuple[str, str]:
        """What was held back of thoughts and answer, at the end of the output."""
        text = self._open + self._detokenizer.finish()
        if self._place.phase is Phase.THOUGHTS:
            return self._thought.feed(text, final=True), ""
        return "", self.answer.feed(text, final=True)
