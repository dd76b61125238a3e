"""Texts token by token, for every decoder of the library tokenizers and for tokenizers in Python. The reference decodes
whole sequences, with and without the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer, PreTrainedTokenizerFast

from mmspec import Pipeline
from mmspec.targets.detokenizer import Detokenizer, Vocabulary
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.targets.test_user_text import _sentencepiece
from tests.tiny import Script

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
SPECIAL, TOOL = "<s>", "<tool>"
WORDS = ["a", "b", "▁", "▁▁", "▁a", "ab", "▁ab", "é", UNKNOWN, ".", "▁."]
BYTES = [f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82, 0xFF)]
CLEANED = ["it", "▁it", "▁'", "'", "▁", "s", "▁s", "n", "▁n", "t", "'t", "▁.", "▁n't", "ve", "▁'ve"]
PIECES = ["a", "b", "##a", "##b", "[UNK]", ".", "'", "n't"]


def fast(decoder: Any, pieces: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    names = [SPECIAL, TOOL, *pieces]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[2]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(SPECIAL, lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken(TOOL, special=False, lstrip=True, rstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=SPECIAL, **options)


class InPython(PreTrainedTokenizer):
    """A tokenizer in Python: blanks are stripped, or words have marks of subword-nmt where they go on."""

    def __init__(self, kind: str) -> None:
        self._names = {
            "stripped": ["a", "▁b", "▁", "▁▁", "c"],
            "continued": ["a@@", "b@@", "c", "d"],
        }[kind]
        self._kind = kind
        super().__init__(bos_token=SPECIAL)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._names)} | self.added_tokens_encoder

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def _convert_token_to_id(self, token: str) -> int:
        return self._names.index(token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        if self._kind == "stripped":
            return "".join(tokens).replace("▁", " ").strip()
        return " ".join(tokens).replace("@@ ", "").strip()


def fused(*steps: Any) -> Any:
    return decoders.Sequence([*steps])


_BLANKS = decoders.Replace("▁", " ")
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: fast(decoders.ByteLevel(), [*sorted(pre_tokenizers.ByteLevel.alphabet())[60:], "Ġa", "ĠÃ"]),
    "llama": lambda: fast(
        fused(_BLANKS, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)), [*WORDS, *BYTES]
    ),
    "gguf": lambda: fast(
        fused(decoders.ByteFallback(), decoders.Fuse(), _BLANKS, decoders.Strip(" ", 1, 0)), [*WORDS, *BYTES]
    ),
    "gemma": lambda: fast(fused(_BLANKS, decoders.ByteFallback(), decoders.Fuse()), [*WORDS, *BYTES]),
    **{
        f"metaspace {scheme}": lambda scheme=scheme: fast(decoders.Metaspace(prepend_scheme=scheme), WORDS)
        for scheme in ("first", "always", "never")
    },
    "word pieces": lambda: fast(decoders.WordPiece(cleanup=False), PIECES),
    "cleaned word pieces": lambda: fast(decoders.WordPiece(), PIECES, clean_up_tokenization_spaces=True),
    "cleaned": lambda: fast(decoders.Metaspace(), CLEANED, clean_up_tokenization_spaces=True),
    "suffixes": lambda: fast(decoders.BPEDecoder(), ["a", "b</w>", "c", "ab</w>", "</w>"]),
    "ctc": lambda: fast(decoders.CTC(), ["<pad>", "|", "a", "b", "n't", "."]),
    "fuse": lambda: fast(decoders.Fuse(), WORDS),
    "none": lambda: fast(None, WORDS),
    "strip": lambda: fast(fused(_BLANKS, decoders.Strip(" ", 1, 0), decoders.Fuse()), WORDS),
    "stripped": lambda: fast(fused(_BLANKS, decoders.Fuse(), decoders.Strip(" ", 2, 0)), WORDS),
    "replace": lambda: fast(fused(decoders.Replace(Regex("a+"), "e"), decoders.Replace("b", "cc")), WORDS),
    "replace fused": lambda: fast(fused(decoders.Fuse(), decoders.Replace("ab.", "x")), WORDS),
    "byt5": ByT5Tokenizer,
    **{f"python {kind}": lambda kind=kind: InPython(kind) for kind in ("stripped", "continued")},
}


def characters(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Tokens with U+FFFD in place of each ``<0xE2>`` outside a character: the decoder would replace its neighbours."""
    names, found = tokenizer.convert_ids_to_tokens(list(ids)), []
    unknown = tokenizer.get_vocab().get(UNKNOWN)
    for is_byte, run in groupby(zip(ids, names, strict=True), lambda one: one[1].startswith("<0x")):
        rest = [*run]
        while rest and is_byte:
            content = bytes(int(name[3:5], 16) for _, name in rest)
            wholes = (content[:n].decode(errors="replace") for n in range(1, 5))
            length = next((n for n, one in enumerate(wholes, start=1) if len(one) == 1 and one != UNKNOWN), 0)
            found += [one for one, _ in rest[:length]] or [unknown]
            rest = rest[max(length, 1) :]
        found += [one for one, _ in rest]
    return found


def reference(tokenizer: Any, context: Sequence[int], ids: Sequence[int], special: bool = False) -> str:
    def decoded(tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if special or token not in tokenizer.all_special_ids]
        return str(tokenizer.decode(characters(tokenizer, shown)))

    before, whole = decoded(context), decoded([*context, *ids])
    same = (n for n in range(len(before), -1, -1) if whole.startswith(before[:n]))
    return whole[next(same) :]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_those_of_whole_sequences(name: str, special: bool) -> None:
    """Of random tokens, invalid UTF-8 included, whatever belongs to the prompt, in any pieces."""
    tokenizer, draw = TOKENIZERS[name](), random.Random(name)
    vocabulary, known = Vocabulary(tokenizer), sorted(tokenizer.get_vocab().values())
    hidden, texts = frozenset() if special else None, set()
    for length in [*range(1, 17)] * (2 if name == "byt5" else 5):  # which is slow
        ids = draw.choices(known, k=length)
        for start in range(length):
            context, answer = ids[:start], ids[start:]
            expected = reference(tokenizer, context, answer, special)
            piecewise, whole = (Detokenizer(vocabulary, context, hidden) for _ in range(2))
            pieces = [piecewise.append([token]) for token in answer]
            assert "".join(pieces) + piecewise.finish() == expected, (context, answer)
            assert whole.append(answer) + whole.finish() == expected
            texts.add(expected)
    assert len(texts) > 100


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_texts_cost_does_not_depend_on_its_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tokens without a text of their own, or with half of a character."""
    tokenizer, longest = TOKENIZERS[name](), 0
    vocabulary, decode = Vocabulary(tokenizer), tokenizer.decode

    def counted(ids: Sequence[int], **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for token in sorted(tokenizer.get_vocab().values())[-20:]:
        reader = Detokenizer(vocabulary, [token] * 500)
        for _ in range(150):
            reader.append([token])
    assert longest < 100


_TURNS = "{% for m in messages %}{{ m['role'] }}</s>GAP{{ m['content'] }}{% endfor %}"
_TEMPLATE = _TURNS + "{% if add_generation_prompt %}assistant</s>{% endif %}"


@pytest.mark.parametrize(
    ("gap", "keywords", "expected"),
    [
        (None, {}, " the a"),
        (None, {"stop": " a"}, " the"),
        (None, {"stop": " the"}, ""),
        (None, {"stop": "Hi the"}, " the a"),  # the answer excludes the prompt's end
        ("", {}, " the a"),
        (" ", {}, "the a"),
        (" ", {"stop": " the"}, "the a"),
        (" ", {"answer_start": " I"}, " the a"),
    ],
)
@pytest.mark.parametrize("decoder", ["llama", "gguf", "metaspace first", "metaspace always", "gemma"])
def test_the_first_words_blank(decoder: str, gap: str | None, keywords: dict[str, Any], expected: str) -> None:
    """It is the answer's, unless the chat template puts it there."""
    tokenizer = _sentencepiece("legacy")
    tokenizer.backend_tokenizer.decoder = TOKENIZERS[decoder]().backend_tokenizer.decoder
    tokenizer.chat_template = None if gap is None else _TEMPLATE.replace("GAP", gap)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, **sizes)).eval()
    pipe = Pipeline(TransformersTarget(model), Processor(tokenizer))
    start = {name: text for name, text in keywords.items() if name == "answer_start"}
    (prompt,) = pipe.encode([{"prompt": "Hi"}], **start).input_ids.tolist()
    said = tokenizer.convert_tokens_to_ids(["▁the", "▁a"])
    keywords = keywords | {"logits_processor": [Script(said, len(prompt))], "max_new_tokens": 9, "logprobs": 0}
    if gap is None and "stop" not in keywords:
        whole = tokenizer.decode([*prompt, *said], skip_special_tokens=True)
        assert tokenizer.decode(prompt, skip_special_tokens=True) + expected == whole
    answer = pipe.generate_batch([{"prompt": "Hi"}] * 2, **keywords)[1]
    assert answer.text == expected
    pieces = list(pipe.stream("Hi", **keywords))
    assert "".join(piece.text for piece in pieces) == expected
    offsets = [one.text_offset for one in answer.logprobs]
    assert [one.text_offset for piece in pieces for one in piece.logprobs] == offsets
    if expected.endswith("the a"):
        assert offsets == [0, len(expected) - 2, len(expected)]
