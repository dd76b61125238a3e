"""Text of tokens, one token after the other: streams and whole answers are read by the same code.

A token's text depends on the tokens before it: SentencePiece decoders drop the blank at the beginning of a text, a
character may consist of several tokens. So an answer is read after the last tokens of its prompt, and its text is what
it adds to theirs.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mmspec.sampling.thoughts import Phase, Place, Thoughts

_CONTEXT = 8  # tokens: a character has at most four
_MOST_HELD = 64  # tokens without a text that is certain, after which it is passed on
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # by clean_up_tokenization_spaces
_FOR_BPE = "_for_bpe_even_though_it_will_corrupt_output"
_JOINED_BYTES = re.compile(r"ByteLevel|Metaspace|(Replace )?(ByteFallback )?Fuse( Replace)?( Strip)?")
_WHITE = ""  # among what ``StopFilter`` drops

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Bytes by the characters that spell them in vocabularies of byte-level BPE, GPT-2's ``bytes_to_unicode``."""


def _each_unknown(error: UnicodeError) -> tuple[str, int]:
    """Decode each byte that is no part of a character as U+FFFD, as the decoder ``ByteFallback`` does."""
    assert isinstance(error, UnicodeDecodeError)
    return _UNKNOWN * (error.end - error.start), error.end


codecs.register_error("mmspec.each", _each_unknown)


class Vocabulary:
    """Bytes and text of a tokenizer's tokens.

    The pieces of the vocabulary are read as its decoder reads them: byte-level BPE, or SentencePiece with bytes as
    ``<0xE6>``. Tokens of other tokenizers have the bytes of their text.

    Args:
        tokenizer: of transformers.

    Attributes:
        special_ids: tokens that are no part of an answer's text.
        joins_bytes: whether a text has the bytes of its tokens, apart from a blank at its beginning.
        cleans: whether decoding removes blanks before punctuation.
        rewritten: texts that decoding replaces where several tokens spell them.
        errors: how bytes that are no character are decoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
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
        self.errors = "mmspec.each" if self._has_bytes else "replace"
        # transformers does not clean the text of BPE by default.
        by_default = backend is None or type(backend.model).__name__ != "BPE"
        self.cleans = getattr(tokenizer, f"clean_up_tokenization_spaces{'' if by_default else _FOR_BPE}", False)
        fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
        self.rewritten = tuple(step["pattern"].get("String", "") for step in fused if step["type"] == "Replace")
        self.rewritten += ("@@ ",) if backend is None else ()  # of subword-nmt

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, or the part of a character that it is; with the blank before a word."""
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

    def text(self, token_ids: Sequence[int], *, verbatim: bool = False) -> str:
        """Text of tokens at the beginning of a text, special tokens included.

        Args:
            verbatim: keep all blanks before punctuation.
        """
        options = {"clean_up_tokenization_spaces": False} if verbatim else {}
        return str(self._tokenizer.decode(token_ids, **options))


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
        self,
        vocabulary: Vocabulary,
        context: Sequence[int] = (),
        *,
        hidden: Collection[int] | None = None,
        verbatim: bool = False,
    ) -> None:
        self._vocabulary, self._cleans = vocabulary, vocabulary.cleans and not verbatim
        self._hidden = vocabulary.special_ids if hidden is None else hidden
        self._context = [*islice((token for token in reversed(context) if token not in self._hidden), _CONTEXT)][::-1]
        self._characters: codecs.IncrementalDecoder | None = None
        if vocabulary.joins_bytes and not self._cleans:
            self._characters = codecs.getincrementaldecoder("utf-8")(vocabulary.errors)
            self._begins, self._before = True, ""
            for token in self._context:
                self._read(token)
            pending = self._characters.getstate()[0]
            self._before = pending.decode(errors=vocabulary.errors)  # the context's, unless a token completes it
        else:
            # What has no certain text yet, the text before it, and how many characters of it were returned.
            self._held: list[int] = []
            self._before, self._shown = self._text(self._context), 0

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that further tokens add."""
        read = self._read_in_context if self._characters is None else self._read
        return "".join([read(token) for token in token_ids if token not in self._hidden])

    def finish(self) -> str:
        """The text that was held back. Further tokens follow it."""
        if self._characters is None:
            return self._passed_on(final=True)
        return self._own(self._characters.decode(b"", True))

    def _read(self, token: int) -> str:
        assert self._characters is not None
        content = self._vocabulary.token_bytes(token)
        if self._begins and content:
            self._begins = False
            content = self._text([token]).encode() if content.startswith(b" ") else content
        return self._own(self._characters.decode(content))

    def _own(self, text: str) -> str:
        """A text without what is the context's at its beginning."""
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        return text

    def _read_in_context(self, token: int) -> str:
        self._held.append(token)
        return self._passed_on()

    def _passed_on(self, *, final: bool = False) -> str:
        """The text of held tokens as far as it is certain; they become the context once it is complete."""
        whole, before = self._text(self._context + self._held), self._before
        while not whole.startswith(before):
            before = before[:-1]  # the prompt's end, which the answer completes
        text = whole[len(before) :]
        final |= len(self._held) > _MOST_HELD
        uncleaned = self._vocabulary.text(self._context + self._held, verbatim=True) if self._cleans else ""
        rewritten = (*self._vocabulary.rewritten, *(_CLEANED if self._cleans else ()))
        pending = min(len(text) - len(text.rstrip(_UNKNOWN)), 3)
        if _begun(whole, rewritten) or _begun(uncleaned, rewritten):
            pending = len(text)
        certain = text[: len(text) - (0 if final else pending)]
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if final or (text and not pending):
            tail = (self._context + self._held)[-_CONTEXT:]
            if before := self._text(tail):
                self._context, self._before = tail, before
            self._held, self._shown = [], 0
        return new

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.text(token_ids, verbatim=not self._cleans) if token_ids else ""


class StopFilter:
    """Passes text on up to the first stop string, and nothing that may be the beginning of one.

    Args:
        stop: stop strings.
        drops: what is left out at the beginning, one after the other: texts, if they are there, and white space
            (``_WHITE``).
        trims: leave out white space at the end.

    Attributes:
        stopped: whether there was a stop string.
        rest: the text after it.
    """

    def __init__(self, stop: Sequence[str] = (), drops: Iterable[str] = (), *, trims: bool = False) -> None:
        self._stop, self._drops, self._trims = stop, list(drops), trims
        self._held, self._sent = "", 0
        self.rest, self.stopped = "", False

    @property
    def length(self) -> int:
        """Characters so far, without those left out."""
        return 0 if self._drops else self._sent + len(self._held)

    def feed(self, text: str, *, final: bool = False) -> str:
        """The text to pass on.

        Args:
            text: what follows.
            final: nothing follows it.
        """
        if self.stopped:
            return ""
        self._held += text
        while self._drops:
            drop = self._drops[0]
            if drop == _WHITE:
                self._held = self._held.lstrip()
            if not self._held or drop.startswith(self._held):
                return ""
            self._held = self._held.removeprefix(drop)
            del self._drops[0]
        found = min(((at, one) for one in self._stop if (at := self._held.find(one)) >= 0), default=None)
        self.stopped = found is not None
        end = len(self._held) - (0 if final else _begun(self._held, self._stop))
        if found is not None:
            end, self.rest = found[0], self._held[found[0] + len(found[1]) :]
        passed = self._held[:end].rstrip() if self._trims else self._held[:end]
        self._held, self._sent = "" if self.stopped else self._held[len(passed) :], self._sent + len(passed)
        return passed


class AnswerReader:
    """Reads an output: its thoughts, and the answer after them, up to a stop string. White space between is left out.

    Args:
        prompt: token ids before the output.
        stop: stop strings of the answer.
        thoughts: None where the output is an answer from its first token on.
        prefix: text that is left out at the beginning of an answer without thoughts.
        **options: of ``Detokenizer``.

    Attributes:
        num_thoughts: tokens of the thoughts so far, markers included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        thoughts: Thoughts | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self._detokenizer, self._thoughts = Detokenizer(vocabulary, prompt, **options), thoughts
        self._open = ""  # text that may be of thoughts or of the answer
        self._count = self.num_thoughts = 0
        self._place = Place(Phase.PLAIN) if thoughts is None else thoughts.first
        self._answer = StopFilter(stop, [prefix] if thoughts is None and prefix else [_WHITE] if thoughts else [])
        if thoughts is not None:
            is_begun = self._place.phase is Phase.THOUGHTS
            marker = [] if is_begun or thoughts.start_id is not None else [thoughts.form.start, _WHITE]
            ends = [thoughts.form.end] if thoughts.end_id is None else []
            self._thought = StopFilter(ends, [_WHITE, *marker], trims=True)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was read."""
        return self._answer.stopped

    @property
    def length(self) -> int:
        """Characters of the answer so far, those included that are held back."""
        return self._answer.length

    def append(self, token: int) -> tuple[str, str]:
        """What a token adds to thoughts and answer."""
        text = self._detokenizer.append([token])
        if self._thoughts is None or self._place.answers:
            return "", self._answer.feed(text)
        self._place, self._count = self._thoughts.advance(self._place, token), self._count + 1
        self._open += text
        if self._place.phase is Phase.OPEN:
            return "", ""
        text, self._open = self._open, ""
        if self._place.phase is Phase.PLAIN:
            return "", self._answer.feed(text)
        self.num_thoughts, over = self._count, self._place.answers
        if over and self._thoughts.end_id is not None:
            text += self._detokenizer.finish()
        thought = self._thought.feed(text, final=over)
        return thought, self._answer.feed(self._thought.rest) if over else ""

    def finish(self) -> tuple[str, str]:
        """What was held back of thoughts and answer, at the end of the output."""
        text = self._open + self._detokenizer.finish()
        if self._place.phase is Phase.THOUGHTS:
            return self._thought.feed(text, final=True), ""
        return "", self._answer.feed(text, final=True)
