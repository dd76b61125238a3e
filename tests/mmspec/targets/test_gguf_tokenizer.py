"""Tokenizers of GGUF files: expected tokens and end tokens are llama.cpp's for the same vocabularies (``llama-tokenize
--ids``, build 11434)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

import mmspec
from mmspec.targets import gguf
from mmspec.targets.gguf_tokenizer import KINDS, Vocabulary, build
from tests.model_folders import save_gguf

pytest.importorskip("gguf", reason="the package gguf is not installed")

BYTES = list(bytes_to_unicode().values())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPLIT = "It'S aB1234  #x--\n\n e\u0301日本/\n ok"
"""Contraction in capitals, case, digits, blanks, sign before a word, line breaks, mark, Han and a trailing slash."""


def bpe(
    pre: str | None = "gpt-2", merges: list[str] | None = None, special: dict[str, int] | None = None, **entries: Any
) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: bytes, merged tokens, then special tokens with their types."""
    merges, special = merges or ["t h"], {"<|endoftext|>": CONTROL, "<s>": CONTROL, **(special or {})}
    known = [*BYTES, *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    made = {"model": "gpt2", "tokens": [*known, *special], "merges": merges, **({"pre": pre} if pre else {})}
    made |= {"token_type": [*[NORMAL] * len(known), *special.values()]}
    ends = {"eos_token_id": len(known), "bos_token_id": len(known) + 1}
    return named({**made, **ends, **entries})


def every_merge(text: str) -> list[str]:
    """Merges which make one token of any word of a text, so that tokens are words."""
    spelled = "".join(bytes_to_unicode()[byte] for byte in text.encode())
    words = [spelled[i:j] for i in range(len(spelled)) for j in range(i + 2, len(spelled) + 1)]
    return [f"{word[:cut]} {word[cut:]}" for word in sorted(set(words), key=len) for cut in range(1, len(word))]


def pieces(*normal: str, special: dict[str, int] | None = None, **entries: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary, the best pieces first."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **(special or {})}
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    types = [*special.values(), *[BYTE] * 256, *[NORMAL] * len(normal)]
    scores = [*[0.0] * (len(tokens) - len(normal)), *(-float(rank) for rank in range(len(normal)))]
    return named({"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, **entries})


def named(entries: dict[str, Any]) -> dict[str, Any]:
    name = entries.pop("name", "stand-in")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return {"general.architecture": "llama", "general.name": name, **metadata}


def gemma(**entries: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of characters with bytes."""
    special = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL}
    known = ["▁", *"abc", "ab", "▁ab", "▁▁", "\n", "\n\n"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    types = [*special.values(), *[BYTE] * 256, *[NORMAL] * len(known)]
    roles = {"bos_token_id": 2, "eos_token_id": 1}
    merges = ["a b", "▁ ab", "▁ ▁", "\n \n"]
    return named({"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, **roles, **entries})


def tokenizer_of(metadata: dict[str, Any], folder: Path) -> Any:
    gguf.save_tokenizer(*build(metadata), folder)
    return gguf.read_tokenizer(folder)


WORDS = {  # of SPLIT, between bars
    "default": "It|'|S| aB|123|4|  |#|x|--|\n\n| e|\u0301|日本|/|\n| ok",
    "llama-bpe": "It|'S| aB|123|4| | #|x|--\n\n| e|\u0301日本|/\n| ok",
    "qwen2": "It|'S| aB|1|2|3|4| | #|x|--\n\n| e|\u0301日本|/\n| ok",
    "qwen35": "It|'S| aB|1|2|3|4| | #|x|--\n\n| e\u0301日本|/\n| ok",
    "deepseek-llm": "It|'|S| aB|1234| | #|x|--|\n|\n| e|\u0301|日本|/|\n| ok",
    "deepseek-coder": "It|'|S| aB|1|2|3|4| | #|x|--|\n|\n| e|\u0301|日本|/|\n| ok",
    "deepseek-v3": "It|'S| aB|123|4| | #|x|--\n\n| e\u0301|日本|/\n| ok",
    "spark2_5": "It|'S| aB|1|2|3|4| | #|x|--|\n|\n| e\u0301|日本|/|\n| ok",
    "youtu": "It'S| aB|1|2|3|4| | #|x|--\n\n| e\u0301|日本|/\n| ok",
    "falcon": "It|'|S| aB|123|4|  |#|x|--|\n\n| e|\u0301|日本|/|\n| ok",
    "starcoder": "It|'|S| aB|1|2|3|4| | #|x|--|\n\n| e|\u0301|日本|/|\n| ok",
    "gpt-2": "It|'|S| aB|1234| | #|x|--|\n\n| e|\u0301|日本|/|\n| ok",
    "bloom": "It'S| aB1234| | #x--|\n\n| e\u0301日本/|\n| ok",
    "viking": "It'S| aB|1|2|3|4| | #x--|\n\n| e\u0301日本/|\n| ok",
    "tekken": "It|'S| a|B|1|2|3|4| | #|x|--\n\n| e|\u0301日本|/\n| ok",
    "chameleon": "It|'|S| aB|1|2|3|4|  |#|x|-|-|\n|\n| e|\u0301|日本|/|\n| ok",
    "gpt-4o": "It'S| a|B|123|4| | #|x|--\n\n| e|\u0301日本|/\n| ok",
    "granite-embed-multi-97m": "It'S| a|B|123|4| | #|x|--\n\n| e\u0301日本|/\n| ok",
    "tiny_aya": "It'S| aB|1|234| | #|x|--\n\n| e\u0301日本|/\n| ok",
    "kimi-k2": "It'S| aB|123|4| | #|x|--\n\n| e|\u0301|日本|/\n| ok",
    "superbpe": "It'S aB|1|234|  #x--\n\n e\u0301日本/\n ok",
    "bailingmoe": "It|'S| aB|1|2|3|4| | #|x|--\n\n| e|\u0301日本|/\n| ok",
    "seed-coder": "It|'S| aB|1|2|3|4| | #|x|--|\n\n| e|\u0301日本|/|\n| ok",
    "afmoe": "It|'S| aB|1|234| | #|x|--\n\n| e\u0301|日本|/\n| ok",
    "laguna": "It|'S| aB|1|2|3|4| | #|x|--|\n\n| e|\u0301日本|/|\n| ok",
    "exaone-moe": "It|'S| aB|1|2|3|4| | #|x|--\n|\n| e\u0301日本|/\n| ok",
}

HI = ("▁hi", "hi", "▁", "h", "i")
SPEECH = {"<|user|>": CONTROL, "<think>": USER_DEFINED}
PHI = {**SPEECH, "<|endoftext|>": CONTROL}
CASES: dict[
    str, tuple[dict[str, Any], str, list[str]]
] = {  # vocabulary, text, and its tokens with those added to a text
    "words in the vocabulary need no merges": (bpe("llama3", special={"ab": NORMAL}), "ab", ["<s>", "ab"]),
    "words of other kinds do": (bpe("dbrx", special={"ab": NORMAL}), "ab", ["a", "b"]),
    "merges in order": (bpe(merges=["b c", "a b"]), "abc", ["a", "bc"]),
    "the first of equal merges": (bpe(merges=["a b", "b c", "a b"]), "abc", ["ab", "c"]),
    "no pre": (bpe(None, every_merge("x12345")), "x12345", ["x", "123", "45"]),
    "tekken begins texts": (bpe("tekken"), "a", ["<s>", "a"]),
    "llama-bpe begins texts": (bpe("llama-bpe"), "a", ["<s>", "a"]),
    "unless the file says no": (bpe("llama-bpe", add_bos_token=False), "a", ["a"]),
    "qwen2 does not": (bpe("qwen2"), "a", ["a"]),
    "unless the file says so": (
        bpe("qwen2", add_bos_token=True, add_eos_token=True),
        "a",
        ["<s>", "a", "<|endoftext|>"],
    ),
    "chameleon begins texts": (bpe("chameleon"), "a", ["<s>", "a"]),
    "special tokens": (bpe(special=SPEECH), "<|user|>a <think>", ["<|user|>", "a", "\u0120", "<think>"]),
    "types by text": (bpe(special={"<|im_end|>": NORMAL}), "a<|im_end|>", ["a", "<|im_end|>"]),
    "bytes outside of the vocabulary": (
        bpe(merges=["a a"], tokens=["a", "aa", "<s>"], token_type=[1, 1, 3], eos_token_id=2, bos_token_id=2),
        "ab",
        ["a"],
    ),
    "SentencePiece": (pieces(*HI), "hi", ["<s>", "▁hi"]),
    "a blank before each part": (
        pieces(*HI, special=SPEECH),
        "hi<|user|>hi<think> hi",
        ["<s>", "▁hi", "<|user|>", "▁hi", "<think>", "▁", "▁hi"],
    ),
    "no blank": (pieces(*HI, add_space_prefix=False), "hi hi", ["<s>", "hi", "▁hi"]),
    "extra blanks stay": (pieces(*HI, remove_extra_whitespaces=True), "hi   hi", ["<s>", "▁hi", "▁", "▁", "▁hi"]),
    "no beginning": (pieces(*HI, add_bos_token=False), "hi", ["▁hi"]),
    "an end": (pieces(*HI, add_eos_token=True), "hi", ["<s>", "▁hi", "</s>"]),
    "bytes": (pieces(*HI), "h€\n", ["<s>", "▁", "h", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]),
    "the best piece first": (pieces("bc", "ab", "a", "b", "c", "▁"), "abc", ["<s>", "▁", "a", "bc"]),
    "unused pieces": (
        pieces("ab", "a", "b", "▁", token_type=[2, 3, 3, *[6] * 256, 5, 1, 1, 1]),
        "ab",
        ["<s>", "▁", "ab"],
    ),
    "blanks of user-defined tokens": (pieces(*HI, special={"  ": USER_DEFINED}), "hi  hi", ["<s>", "▁hi", "  ", "▁hi"]),
    "longest special token": (
        pieces(*HI, special={"\n": USER_DEFINED, "\n\n": USER_DEFINED}),
        "\n\n\n",
        ["<s>", "\n\n", "\n"],
    ),
    "Phi-3 strips": (
        pieces(*HI, special=PHI, name="a Phi-3 mini"),
        "<|user|>\n hi<s> hi</s> \n<think> h<|endoftext|> \n",
        ["<s>", "<|user|>", "▁hi", "<s>", "▁", "▁hi", "</s>", "<think>", "▁", "h", "<|endoftext|>", "▁", "▁", "<0x0A>"],
    ),
    "others do not": (pieces(*HI, special=SPEECH), "<|user|>\n hi", ["<s>", "<|user|>", "▁", "<0x0A>", "▁hi"]),
    "gemma4": (gemma(), "ab a\n\n\nc  é", ["<bos>", "ab", "▁", "a", "\n\n", "\n", "c", "▁▁", "<0xC3>", "<0xA9>"]),
    "gemma4 always begins texts": (gemma(add_bos_token=False), "\n\n", ["<bos>", "\n\n"]),
    "escaped BPE": (gemma(model="gpt2", pre="sarvam-moe"), "ab\n\n", ["ab", "\n\n"]),
}


TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "[EOT]", "<turn|>", "[e~[")
END = 257  # of ``bpe``
ENDS = {  # vocabulary, and tokens that end an answer
    "by keys": (bpe(special={"<y>": CONTROL, "<z>": CONTROL}, eot_token_id=260, eom_token_id=259), [END, 260, 259]),
    "by text": (bpe(special=dict.fromkeys(TURNS, CONTROL)), [END, *range(259, 259 + len(TURNS))]),
    "of any type": (bpe(special={"<|im_end|>": USER_DEFINED}), [END, 259]),
    "after a middle": (
        bpe(special={"<|fim_pad|>": 4, "<|fim_middle|>": 4, "<|repo_name|>": 4, "<|file_sep|>": 4}),
        [END, 259, 261, 262],
    ),
    "after a middle by key": (bpe(special={"<x>": 4, "<|fim_pad|>": 4}, fim_pad_token_id=259), [END, 259]),
    "messages of gpt-oss": (bpe(special={"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}), [END, 260, 261]),
    "messages of Solar": (bpe(special={"<|end|>": 3, "<|flush|>": 3, "<|calls|>": 3}), [END, 260, 261]),
    "</s> of Gemma 4": (bpe(special={"</s>": 3, "<|tool_response>": 3}), [END, 260]),
    "by default": (pieces(*HI), [2]),
    # llama.cpp adds 11, the comma of most vocabularies.
    "outside of the vocabulary": (bpe(eos_token_id=9999, eot_token_id=258), [258, END]),
}

BAD = {  # vocabulary, and the message
    "key": (bpe(odd_flag=1), r"expected known keys of tokenizers, got tokenizer\.ggml\.odd_flag$"),
    "model": (bpe(model="bert"), r"expected tokenizer\.ggml\.model to be gpt2 or gemma4 or llama, got 'bert'$"),
    "unigrams": (bpe(model="t5"), "got 't5'$"),
    "pre": (bpe("qwen3"), r"expected a known tokenizer\.ggml\.pre, got 'qwen3'; did you mean qwen35\?$"),
    "encoder": (bpe("mmbert"), r"tokenizer\.ggml\.pre, got 'mmbert'"),
    "no merges": (
        named({"model": "gpt2", "tokens": BYTES}),
        r"expected a list tokenizer\.ggml\.merges of .*, got None$",
    ),
    "no tokens": (named({"model": "llama"}), r"expected a list tokenizer\.ggml\.tokens of .*, got None$"),
    "few types": (bpe(token_type=[1, 1]), r"tokenizer\.ggml\.token_type of at least 259 values, got 2 values$"),
    "few scores": (pieces(*HI, scores=[1.0]), r"tokenizer\.ggml\.scores of at least 264 values, got 1 values$"),
    "twice": (bpe(tokens=["a", "b", "a"]), r"expected each token once in tokenizer\.ggml\.tokens, got 'a' twice$"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_words_are_those_of_the_kind(kind: str) -> None:
    made, _ = build(bpe(kind, every_merge(SPLIT)))
    words = "|".join(made.decode([token]) for token in made.encode(SPLIT).ids)
    assert words.replace("\ufffd", "") == WORDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_loses_text(kind: str) -> None:
    made, _ = build(gemma(model="gpt2", pre=kind) if KINDS[kind].escapes else bpe(kind, every_merge("a 12")))
    text = f"{SPLIT} a 12 ab  \t\r\n\u3000x'll 1234567 IMGIMGABZ 中\uff0c\U0001f999"
    assert made.decode(made.encode(text).ids) == text


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_texts(case: str, tmp_path: Path) -> None:
    metadata, text, expected = CASES[case]
    tokenizer = tokenizer_of(metadata, tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == expected


@pytest.mark.parametrize("case", ENDS)
def test_tokens_that_end_an_answer(case: str) -> None:
    metadata, expected = ENDS[case]
    assert Vocabulary(metadata).ends == expected


@pytest.mark.parametrize("case", BAD)
def test_other_vocabularies_are_refused_by_name(case: str) -> None:
    metadata, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        build(metadata)


def test_files_of_other_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    for entry, message in {"odd_flag": "expected known keys", "pre": "expected a known tokenizer"}.items():
        path = save_gguf(tmp_path / f"{entry}.gguf", entries={f"tokenizer.ggml.{entry}": "x"})
        with pytest.raises(mmspec.UserError, match=rf"^cannot load model '.*{entry}\.gguf': {message}"):
            mmspec.load(path, dtype="float32")


def test_suppressed_tokens_are_not_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    first = mmspec.load(save_gguf(tmp_path / "a.gguf"), dtype="float32", drafter=None)
    found = first.generate([5, 6], max_new_tokens=1, ignore_eos=True).token_ids
    path = save_gguf(tmp_path / "b.gguf", entries={"tokenizer.ggml.suppress_tokens": [*found, 9999]})
    later = mmspec.load(path, dtype="float32", drafter=None)
    assert later.target.model.generation_config.suppress_tokens == found
    assert later.generate([5, 6], max_new_tokens=1, ignore_eos=True).token_ids != found


def test_texts_cannot_spell_control_tokens(tmp_path: Path) -> None:
    """Not even where merges would lead to them."""
    tokenizer = tokenizer_of(pieces("</", "s>", "<", "/", "s", ">", "▁"), tmp_path)
    text = mmspec.targets.processor.Processor(tokenizer).text_ids("</s>")
    assert tokenizer.convert_ids_to_tokens(text) == ["<s>", "▁", "</", "s>"]


def test_words_do_not_become_special_tokens(tmp_path: Path) -> None:
    """A padding token that is a word, as in files whose tokenizer has none."""
    tokenizer = tokenizer_of(bpe(padding_token_id=BYTES.index("!")), tmp_path)
    assert tokenizer.pad_token is None
    assert tokenizer.decode(tokenizer("a!")["input_ids"], skip_special_tokens=True) == "a!"


def test_texts_without_the_prefix_keep_their_first_blank(tmp_path: Path) -> None:
    for prefix in (True, False):
        tokenizer = tokenizer_of(pieces(*HI, add_space_prefix=prefix), tmp_path)
        for text in ("hi", " hi", "  hi \n", "h€"):
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
