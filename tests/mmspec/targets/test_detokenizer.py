"""Text and tokens: texts token by token, for every decoder of the library tokenizers and for tokenizers in Python; chat
messages and typed special tokens in every kind of template; and the bytes of tokens.

References decode whole sequences, with and without the answer, or encode with tokenizers that do not know the tokens.
"""

import copy
import json
import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer, PreTrainedTokenizerFast

import mmspec
from mmspec import Pipeline, UserError
from mmspec.targets.detokenizer import Detokenizer, Vocabulary
from mmspec.targets.infill import Infill
from mmspec.targets.processor import Processor, UserText, render
from mmspec.targets.transformers_target import TransformersTarget
from tests.model_folders import tokenizer as byte_level
from tests.tiny import Script

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
SPECIAL, TOOL = "<s>", "<tool>"
WORDS = ["a", "b", "▁", "▁▁", "▁a", "ab", "▁ab", "é", UNKNOWN, ".", "▁."]
BYTES = [f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82, 0xFF)]
CLEANED = ["it", "▁it", "▁'", "'", "▁", "s", "▁s", "n", "▁n", "t", "'t", "▁.", "▁n't", "ve", "▁'ve"]
PIECES = ["a", "b", "##a", "##b", "[UNK]", ".", "'", "n't"]
_TURNS = "{% for m in messages %}{{ m['role'] }}</s>GAP{{ m['content'] }}{% endfor %}"
_TEMPLATE = _TURNS + "{% if add_generation_prompt %}assistant</s>{% endif %}"
TEXT = "the naïve 👩‍🚀 日本  a\nb"
_FAMILIES = {
    "qwen": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    "starcoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>"],
    "codellama": ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
}
JOINS_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
)
JOINS_ALL = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
REFUSES = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ raise_exception('roles') }}"


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
        self._names = {"stripped": ["a", "▁b", "▁", "▁▁", "c"], "continued": ["a@@", "b@@", "c", "d"]}[kind]
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
    pipe = pipeline_of(tokenizer)
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


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for i in m['content'] %}{% if i['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ i['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRIMMED = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
_QWEN = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"]
_PLAIN = [
    "Describe the image.",
    " two  blanks ",
    "a\nb\n",
    "<",
    "< /s>",
    "<image",
    "5 < 6 and </b>",
    "émoji 🙂",
    "[INST]",
]


def _sentencepiece(scheme):
    """Llama-2 style: word marks, byte fallback, a leading <s>; special tokens are in the vocabulary."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzDENIST<>/|_[]:.0123456789 \n"]
    vocab = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, "▁a", "th", "the", "▁the"]
    ids = {token: number for number, token in enumerate(dict.fromkeys(vocab))}
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


def pipeline_of(tokenizer):
    """Of a random model of the tokenizer's tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, **sizes)).eval()
    return Pipeline(TransformersTarget(model), Processor(tokenizer), name="m")


def chatml():
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": _QWEN})
    made.chat_template = _CHATML
    return made


def _trimmed(scheme):
    made = _sentencepiece(scheme)
    made.chat_template = _TRIMMED
    return made


_TOKENIZERS = {
    "byte-level": byte_level,
    "first": lambda: _sentencepiece("first"),
    "always": lambda: _sentencepiece("always"),
    "legacy": lambda: _sentencepiece("legacy"),
    "chatml": chatml,
    "trimmed-first": lambda: _trimmed("first"),
    "trimmed-legacy": lambda: _trimmed("legacy"),
}


@pytest.fixture(params=_TOKENIZERS)
def tokenizer(request):
    return _TOKENIZERS[request.param]()


def _ids(tokenizer, prompt):
    return Processor(tokenizer)._token_ids(prompt)


def _rendered(tokenizer, prompt):
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def _specials(tokenizer):
    return [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]


@pytest.mark.parametrize("prompt", _PLAIN)
def test_prompts_without_special_tokens_are_as_ever(tokenizer, prompt):
    bare = not tokenizer.chat_template
    text = prompt if bare else _rendered(tokenizer, prompt)
    expected = tokenizer(text, add_special_tokens=bare)["input_ids"]
    assert _ids(tokenizer, prompt) == expected
    assert UserText(tokenizer).encode(text, bare) == expected  # as would the path that others take


@pytest.mark.parametrize("name", ["byte-level", "first", "always", "legacy"])
def test_without_a_template_as_the_tokenizer_splits_special_tokens(name):
    tokenizer = _TOKENIZERS[name]()
    for special in _specials(tokenizer):
        for prompt in (special, f"a {special} b", f"the{special}the", f" {special} the\n{special}"):
            assert _ids(tokenizer, prompt) == tokenizer(prompt, split_special_tokens=True)["input_ids"]


def test_special_tokens_of_raw_prompts_are_parsed(tokenizer):
    io = Processor(tokenizer)
    for special in _specials(tokenizer):
        if special == getattr(tokenizer, "image_token", None):
            continue
        for prompt in (special, f"a {special} b", f"the{special}the"):
            for parse, expected in ((True, tokenizer(prompt)), (False, tokenizer(prompt, split_special_tokens=True))):
                found = io.encode([{"prompt": prompt}], chat_template=False, parse_special=parse).input_ids[0]
                assert found.tolist() == io.text_ids(prompt, parse_special=parse) == expected["input_ids"]
            asked = [{"role": "user", "content": prompt}]
            assert io.encode([{"prompt": prompt}], parse_special=True).input_ids.tolist() == [_ids(tokenizer, prompt)]
            if tokenizer.chat_template:
                assert _ids(tokenizer, asked).count(tokenizer.convert_tokens_to_ids(special)) == _ids(
                    tokenizer, "a"
                ).count(tokenizer.convert_tokens_to_ids(special))


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_middle_is_filled_in_by_the_tokens_of_a_family(family):
    made = _sentencepiece("first") if family == "codellama" else byte_level()
    made.add_tokens([AddedToken(name, special=False) for name in _FAMILIES[family]])  # Qwen's are not special
    pre, suf, mid, *others = made.convert_tokens_to_ids(_FAMILIES[family])
    bos, infill, name = ([1] if family == "codellama" else []), Infill(Processor(made)), "</s>"

    def plain(text):
        return made(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    core = [pre, *plain(f"a{name}"), suf, *plain(f"{name}b"), mid]
    assert infill.encode(f"a{name}", f"{name}b") == infill.encode(plain(f"a{name}"), f"{name}b") == [*bos, *core]
    started = [pre, *plain("a"), *made(f"c{name}", add_special_tokens=False)["input_ids"], suf, *plain("b"), mid]
    assert infill.encode("a", "b", f"c{name}") == [*bos, *started]
    assert {pre, suf, mid, *others} <= {*infill.ends} <= {pre, suf, mid, *others, *made.all_special_ids}
    before = {
        "qwen": lambda: (
            [others[1], *plain("myproject\n"), others[2], *plain("f\n"), *plain("x"), others[2], *plain("filename\n")]
        ),
        "starcoder": lambda: [others[1], *plain("myproject\n"), *plain("\n\n--- snippet ---\n\n"), *plain("x")],
        "codellama": lambda: [*plain("\n\n--- snippet ---\n\n"), *plain("x")],
    }[family]()
    assert infill.encode(f"a{name}", f"{name}b", files=[("f", "x")]) == [*bos, *before, *core]


def test_ids_of_a_file_come_before_names_and_other_models_have_no_middle():
    made = byte_level()
    with pytest.raises(UserError, match=r"has no token such as <\|fim_middle\|>"):
        Infill(Processor(made))
    made.init_kwargs["fim_token_ids"] = {"pre": 5, "suf": 6, "mid": 7}
    made.add_tokens([AddedToken("<PRE>")])
    assert Infill(Processor(made)).encode([9], "") == [5, 9, 6, 7]


@pytest.mark.parametrize("name", ["chatml", "trimmed-first", "trimmed-legacy"])
def test_in_a_template_as_by_a_tokenizer_of_other_special_tokens(name):
    """A twin whose template writes control tokens that nobody types: the same tokens under other names."""
    tokenizer, twin = _TOKENIZERS[name](), _TOKENIZERS[name]()
    names = {content: f"{{{number}}}" for number, content in enumerate(_specials(tokenizer))}
    parsed = json.loads(twin.backend_tokenizer.to_str())
    real = {}
    for token in parsed["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
        real[token["content"]] = token["id"]
    backend = Tokenizer.from_str(json.dumps(parsed))
    ids = {backend.token_to_id(content): number for content, number in real.items()}
    for special in _specials(tokenizer):
        prompt = f"the {special}the"
        text = _rendered(tokenizer, "QUESTION")
        for content, other in names.items():
            text = text.replace(content, other)
        expected = backend.encode(text.replace("QUESTION", prompt), add_special_tokens=False).ids
        assert _ids(tokenizer, prompt) == [ids.get(i, i) for i in expected]


def test_every_message_and_joined_items():
    tokenizer = chatml()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [
        {"role": "system", "content": "a<|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|> b"}]},
    ]
    ids = _ids(tokenizer, messages)
    assert ids.count(end) == 2
    assert "a<|im_end|><|im_end|>\n" in tokenizer.decode(ids)
    assert "user\n<|im_\nend|> b<|im_end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_names_in_messages_are_text(field):
    tokenizer = chatml()
    tokenizer.chat_template = _CHATML.replace("{{ m['role'] }}", f"{{{{ m['role'] }}}} {{{{ m['{field}'] }}}}")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = _ids(tokenizer, [{"role": "tool", "content": "a", field: "x<|im_end|>"}])
    assert ids.count(end) == 1
    assert "tool x<|im_end|>\na<|im_end|>" in tokenizer.decode(ids)


def test_names_of_a_tools_parameters_are_text():
    made = chatml()
    made.chat_template = "{{ tools | tojson }}" + _CHATML
    tool = {"name": "f", "parameters": {"properties": {"a<|im_end|>": {"enum": ["<|im_end|>"]}}}}
    ids = Processor(made).encode([{"prompt": "a"}], tools=[tool]).input_ids[0].tolist()
    assert ids.count(made.convert_tokens_to_ids("<|im_end|>")) == 1  # of the message


def test_tokenizers_that_make_special_tokens_of_text_are_refused():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]")
    with pytest.raises(UserError, match=r"contains '\[END\]', which this tokenizer cannot encode as text"):
        _ids(tokenizer, "a [END] a")


def test_the_bytes_of_tokens_spell_their_text(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    spelt = [Processor(tokenizer).token_bytes(token) for token in ids]
    assert b"".join(spelt).decode().removeprefix(" ") == TEXT
    assert any(not one.decode(errors="ignore") for one in spelt)  # parts of characters


def test_bytes_are_those_of_llguidance(tokenizer):
    """An independent reference, which reads the vocabulary by itself. Special tokens have the bytes of their names."""
    hf = pytest.importorskip("llguidance.hf")
    reference, io = hf.from_tokenizer(tokenizer), Processor(tokenizer)
    for token in range(len(tokenizer)):
        if token in io.vocabulary.special_ids:
            assert io.token_bytes(token).decode() == tokenizer.convert_ids_to_tokens(token)
            assert tokenizer.decode([token], skip_special_tokens=True) == ""
        elif io.token_bytes(token) != b"\xff":  # 255 marks special tokens there
            assert io.token_bytes(token) == reference.decode_bytes([token]), token


def test_unigram_and_word_pieces_and_ids_beyond_the_vocabulary():
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁Hello", -1.0), ("▁", -2.0)], unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    io = Processor(PreTrainedTokenizerFast(tokenizer_object=unigram))
    assert [io.token_bytes(token) for token in (1, 2, 3)] == [b" Hello", b" ", b""]
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "ab": 1, "##c": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    io = Processor(PreTrainedTokenizerFast(tokenizer_object=pieces))
    assert io.token_bytes(1) == b"ab"


CALLS = "{% for message in messages %}{% for call in message.tool_calls %}{{ call.function.name }}("
END = "){% endfor %}{{ message.content }};{% endfor %}"
OBJECTS = CALLS + "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }},{% endfor %}" + END
EITHER = CALLS + "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}" + END
TEXTS = CALLS + "{{ '<' + call.function.arguments + '>' }}" + END
ARGUMENTS = {  # as sent; in the three templates
    '{"a": 1, "b": "</s>"}': ["a=1,b=</s>,", '{"a": 1, "b": "</s>"}', '<{"a": 1, "b": "</s>"}>'],
    "{}": ["", "{}", "<{}>"],
    "": ["", "{}", "<>"],
    "null": ["", "{}", "<null>"],
    "[1]": ["", "{}", "<[1]>"],
    '{"a": "cut </s>': ["", "{}", '<{"a": "cut </s>>'],
    "[" * 100_000: ["", "{}", f"<{'[' * 100_000}>"],
}


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda text: text[:20])
def test_arguments_are_objects_where_a_template_takes_them_and_otherwise_the_text(arguments):
    plain = copy.deepcopy(byte_level())
    marks = UserText(plain)
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        {"role": "user", "content": "arguments"},
    ]
    for plain.chat_template, expected in zip((OBJECTS, EITHER, TEXTS), ARGUMENTS[arguments], strict=True):
        found = render(plain, marks, messages)
        assert found.replace("\ue0a1", "") == f"f({expected});arguments;"
        assert ("</s>" in found) is False  # typed tokens are marked
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):  # as transformers has it
        messages[0]["tool_calls"][0]["function"]["arguments"] = given
        plain.chat_template = EITHER
        assert render(plain, marks, messages).replace("\ue0a1", "") == plain.apply_chat_template(
            messages, tokenize=False
        )


@pytest.mark.parametrize("parts", [False, True])
def test_contents_are_texts_for_templates_that_join_them(parts):
    pipe = mmspec.load("tiny-llava", drafter=None, device="cpu")
    roles = {"system": "Be brief.", "user": "Hi.", "assistant": "Hello.", "tool": "5"}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in roles.items()
    ]
    for template, expected in (
        (JOINS_ANSWERS, "[Be brief.]Hi.[Hello.][5]"),
        (JOINS_ALL, "[Be brief.][Hi.][Hello.][5]"),
    ):
        pipe.processor.plain.chat_template = template
        ids = pipe.encode([{"prompt": messages}]).input_ids
        assert ids[0].tolist() == pipe.processor.tokenizer(expected)["input_ids"]
    pipe.processor.plain.chat_template = REFUSES
    with pytest.raises(UserError, match="does not accept the messages: roles"):
        pipe.encode([{"prompt": messages}])
