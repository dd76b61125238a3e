"""Tokenizers of GGUF files, with the splits, flags, defaults and end tokens of llama.cpp (``src/llama-vocab.cpp``).

Three models of ``tokenizer.ggml.model`` are read: BPE of bytes (``gpt2``), BPE of characters (``gemma4``) and
SentencePiece (``llama``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mmspec.errors import nearest, shown
from mmspec.targets.infill import NAMES

_KEY, _BLANK = "tokenizer.ggml.", "\u2581"
_MODELS = ("gpt2", "gemma4", "llama")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens that matter here

_IDS = "bos eos eot eom unknown padding mask prefix suffix middle fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
_READ = {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"}
_READ |= {"add_space_prefix", "suppress_tokens", "eos_token_ids", *(f"{name}_token_id" for name in _IDS.split())}
_IGNORED = {  # keys of tokenizers of encoders, and of Ollama
    *("token_type_count", "seperator_token_id", "cls_token_id", "add_sep_token", "add_cls_token", "add_mask_token"),
    *("remove_extra_whitespaces", "precompiled_charsmap", "normalizer.lowercase", "normalizer.strip_accents"),
    *("add_unknown_token", "add_padding_token"),
}

_SENTENCEPIECE, _FALCON = {"bos": 1, "eos": 2, "unknown": 0}, {"bos": 11, "eos": 11}  # default ids
_NO_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens
_FILL_IN = {"pre": "fim_pre prefix", "suf": "fim_suf suffix", "mid": "fim_mid middle"}  # roles by part of a prompt
_FILL_IN |= {part: f"fim_{part}" for part in ("pad", "rep", "sep")}
_FILL_IN_ENDS = ("pad", "rep", "sep")
_ENDS = (  # texts of tokens that end an answer in every file
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend▁of▁sentence\uff5c> [e~["
)
_NO_ENDS = {  # those that do not if the vocabulary has a token of each list too
    "<|end|>": ("<|return|> <|flush|>", "<|call|> <|calls|>"),
    "</s>": ("<|tool_response>",),
}

# Regular expressions that split a text into words, one after the other, each within the previous words. Where
# llama.cpp only approximates the original tokenizer's expression, the table has llama.cpp's.
_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_START, _SIGNS, _BLANKS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _LINES = r"\p{N}", r"\p{N}{1,3}", r"[^\n]+|\n+"
# Digits in threes from the right, the first with the text before them. The time is linear in texts without digits.
_THREES = r"\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|\P{N}++"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_QWEN2 = rf"{_CONTRACTION}|{_START}\p{{L}}+|{_DIGIT}|{_SIGNS}|{_BLANKS}"
_QWEN35 = rf"{_CONTRACTION}|{_START}[\p{{L}}\p{{M}}]+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_LLAMA3 = rf"{_CONTRACTION}|{_START}\p{{L}}+|{_DIGITS}|{_SIGNS}|{_BLANKS}"
_RUNS = "|".join([rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)])
_JAIS2 = rf"{_CONTRACTION}|{_START}\p{{L}}+|{_DIGITS}|{_SIGNS}|\s*[\r\n]+|{_RUNS}|\s{{1,2}}(?!\S)|\s"
_SIGN_AND_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3 = rf"{_SIGN_AND_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_KANA = r"[一-龥\x{3040}-\x{30FF}]+"
_EAST_ASIAN = r"[[\x{800}-龥\x{AC00}-\x{D7FF}]&&\S]+"
_CASED = (  # of the alphabets in DeepSeek's list
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{AB6F}"
    r"\x{10570}-\x{105BF}\x{10D00}-\x{10DFF}\x{16E40}-\x{16EFF}\x{1D000}-\x{1DFFF}]]"
)
_BLOOM = r" ?[^(\s|.,!?…。、।)\x{FF0C}\x{6D4}\x{60C}]+"


def _by_case(mark: str, contraction: str, digits: str) -> str:
    """Words in which ASCII capitals come before ASCII small letters; ``mark`` is a further class of letters."""
    upper, lower = rf"[[\p{{L}}{mark}]&&[^a-z]]", rf"[[\p{{L}}{mark}]&&[^A-Z]]"
    words = rf"{_START}{upper}*{lower}+{contraction}|{_START}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


def _with_marks(digits: str) -> str:
    """Words of letters and marks."""
    return rf"{_START}[\p{{L}}\p{{M}}]+{_CONTRACTION}?|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
_KIMI = rf"[{_HAN}]+|{_START}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|{_DIGITS}|{_SIGNS}|{_BLANKS}"
_WIDE_SIGNS = r"[…“”—、-\x{303F}\x{FF01}\x{2018}\x{2019}\x{FF1A}\x{FF1B}\x{FF0C}\x{FE30}-\x{FE4F}]+"
_YOUTU = rf"[가-힣ㄱ-ㆎ]+|{_WIDE_SIGNS}|[ㄅ-ㄯ]+|{_KANA}"
_AFMOE = (
    r"[一-\x{9FFF}㐀-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}･-ﾟ\x{2F00}-\x{2FDF}\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
)


class _Kind(NamedTuple):
    """A value of ``tokenizer.ggml.pre``.

    Attributes:
        splits: regular expressions, see above.
        ignores_merges: words in the vocabulary are one token, whatever the merges.
        adds_bos: whether a text begins with the beginning-of-text token, if the file has no flag.
        always_adds_bos: even if the file says otherwise.
        escapes: blanks are written as U+2581 and other characters as they are, not as bytes.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    always_adds_bos: bool = False
    escapes: bool = False


_TABLE = {
    "default": _Kind((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _Kind((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": _Kind((_LLAMA3,)),
    "glm4 glm5": _Kind((_LLAMA3,), True),
    "minicpm5": _Kind((_DIGITS, _LLAMA3.replace(_DIGITS, r"\p{N}+")), True),
    "jais-2": _Kind((_JAIS2,)),
    "deepseek-llm": _Kind(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}、。]+",
            r"\s+\z",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": _Kind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _Kind((_DIGITS, _KANA, _DEEPSEEK3)),
    "spark2_5": _Kind((_DIGITS, _KANA, rf"{_SIGN_AND_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", _DIGIT)),
    "youtu": _Kind((_YOUTU, _with_marks(_DIGIT)), True),
    "falcon": _Kind((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _Kind((_DIGIT, _GPT2)),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 jina-v1-en "
    "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling": _Kind((_GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _Kind((_QWEN2,)),
    "qwen35": _Kind((_QWEN35,)),
    "poro-chat bloom gpt3-finnish": _Kind((_BLOOM,)),
    "viking": _Kind((_BLOOM, _DIGIT)),
    "tekken": _Kind((_by_case("", "", _DIGIT),), True, True),
    "chameleon": _Kind(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _Kind((_by_case("", f"{_CONTRACTION}?", _DIGITS),)),
    "granite-embed-multi-97m": _Kind((_by_case(r"\p{M}", f"{_CONTRACTION}?", _DIGITS),), True),
    "tiny_aya cohere2moe": _Kind((_THREES, _with_marks(_DIGITS))),
    "kimi-k2": _Kind((_KIMI,)),
    "superbpe": _Kind((r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")),
    "bailingmoe bailingmoe2 llada-moe": _Kind((_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "seed-coder": _Kind((_QWEN2.replace(_SIGNS, r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "ufakzeka": _Kind((_QWEN2.removeprefix(f"{_CONTRACTION}|"),)),
    "afmoe": _Kind((_THREES, _AFMOE, _DEEPSEEK3)),
    "laguna": _Kind((_LINES, _QWEN2)),
    "exaone-moe": _Kind((rf"{_EXAONE_MOE}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "gemma4 granite-embed-multi-311m": _Kind((_LINES,), always_adds_bos=True, escapes=True),
    "sarvam-moe": _Kind((_LINES,), escapes=True),
}
KINDS = {name: kind for names, kind in _TABLE.items() for name in names.split()}
"""Values of ``tokenizer.ggml.pre`` of decoders; ``whitespace`` and ``mmbert`` belong to encoders."""


class Vocabulary:
    """Tokens of a file, with types and roles by keys, texts and llama.cpp's defaults.

    Args:
        metadata: the file's values by key.

    Attributes:
        entries: values by key, without ``tokenizer.ggml.``.
        texts, types: text and type of each token.
        ids: tokens by text.
        fill_in: tokens for filling in the middle by part of a prompt, see ``mmspec.targets.infill``.
        ends: tokens that end an answer: of text, turn and message, then others by text.

    Raises:
        ValueError: an unknown key or model, a missing or short list, or a token that occurs twice.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.entries = {key.removeprefix(_KEY): value for key, value in metadata.items() if key.startswith(_KEY)}
        if unknown := sorted(self.entries.keys() - _READ - _IGNORED):
            raise ValueError(f"expected known keys of tokenizers, got {_KEY}{unknown[0]}")
        model = self.entries.get("model")
        if model not in _MODELS:
            raise ValueError(f"expected {_KEY}model to be {' or '.join(_MODELS)}, got {shown(model)}")
        self.is_sentencepiece = model == "llama"
        self.texts = [text or f"[EMPTY_{number}]" for number, text in enumerate(self.listed("tokens"))]
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for number, text in enumerate(self.texts) if self.ids[text] != number)
            raise ValueError(f"expected each token once in {_KEY}tokens, got {shown(twice)} twice")
        self.types = self.listed("token_type", len(self.texts), _NORMAL)
        self.fill_in: dict[str, int] = {}
        self.ends = self._ends()

    def listed(self, key: str, count: int = 0, default: Any = None) -> list[Any]:
        """A list of at least ``count`` values, which are the default without the key."""
        values = self.entries.get(key, None if default is None else [default] * count)
        if not isinstance(values, list) or len(values) < count:
            found = f"{len(values)} values" if isinstance(values, list) else shown(values)
            raise ValueError(f"expected a list {_KEY}{key} of at least {count} values, got {found}")
        return [*values]

    def token(self, role: str) -> int | None:
        """The token of a role, such as ``eos``; None without one."""
        number = self.entries.get(f"{role}_token_id", -1)
        if not 0 <= number < len(self.texts):
            number = (_SENTENCEPIECE if self.is_sentencepiece else _FALCON).get(role, -1)
            if not self.is_sentencepiece and self.types[number : number + 1] != [_CONTROL]:
                return None
        return number if 0 <= number < len(self.texts) else None

    def text(self, role: str) -> str | None:
        """The text of a role's token; None without one."""
        number = self.token(role)
        return None if number is None else self.texts[number]

    def _ends(self) -> list[int]:
        found = [self.token("eos"), *self.entries.get("eos_token_ids", ()), self.token("eot"), self.token("eom")]
        for part, roles in _FILL_IN.items():
            number = next((token for role in roles.split() if (token := self.token(role)) is not None), None)
            if number is None and (known := [self.ids[text] for text in NAMES[part].split() if text in self.ids]):
                number = known[0]
                self.types[number] = _CONTROL
            if number is not None:
                self.fill_in[part] = number
        found += [self.fill_in.get(part) for part in _FILL_IN_ENDS]
        for number in sorted(self.ids[text] for text in _ENDS.split() if text in self.ids):
            self.types[number] = _CONTROL
            found.append(number)
        for text, lists in _NO_ENDS.items():
            if text in self.ids and all(any(other in self.ids for other in one.split()) for one in lists):
                found = [number for number in found if number != self.ids[text]]
                self.types[self.ids[text]] = _CONTROL if text == "<|end|>" else _NORMAL
        return [number for number in dict.fromkeys(found) if number is not None and 0 <= number < len(self.texts)]


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a file, and options of its ``PreTrainedTokenizerFast``. Raises ``ValueError``: as for
    ``Vocabulary``; also an unknown value of ``tokenizer.ggml.pre``."""
    vocabulary = Vocabulary(metadata)
    made, adds_bos = (_sentencepiece if vocabulary.is_sentencepiece else _bpe)(vocabulary)
    name = str(metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    added = [
        AddedToken(text, special=kind != _USER_DEFINED, normalized=False, rstrip=strips and text not in _NO_STRIP)
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    made.add_tokens(added)
    names = {token.content for token in added}
    options: dict[str, Any] = {f"{role}_token": vocabulary.text(role) for role in ("bos", "eos")}
    for option, role in (("unk", "unknown"), ("pad", "padding"), ("mask", "mask")):
        text = vocabulary.text(role)
        options[f"{option}_token"] = text if text in names else None  # a word must not become a special token
    options["add_bos_token"] = adds_bos and options["bos_token"] is not None
    options["add_eos_token"] = bool(vocabulary.entries.get("add_eos_token", False)) and options["eos_token"] is not None
    options["clean_up_tokenization_spaces"] = False
    options["fim_token_ids"] = vocabulary.fill_in
    options["chat_template"] = metadata.get("tokenizer.chat_template")
    return made, options


def _bpe(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """A BPE tokenizer, and whether it adds the beginning-of-text token."""
    entries = vocabulary.entries
    name = "gemma4" if entries["model"] == "gemma4" else entries.get("pre") or "default"
    if name not in KINDS:
        raise ValueError(f"expected a known {_KEY}pre, got {shown(name)}{nearest(str(name), KINDS)}")
    kind = KINDS[name]
    merges = vocabulary.listed("merges", default=False if name == "kimi-k2" else None)
    parts = ((merge[:1], merge[1:].partition(" ")) for merge in merges)
    pairs = dict.fromkeys((first + left, right) for first, (left, _, right) in parts)
    model = BPE(vocabulary.ids, [*pairs], ignore_merges=kind.ignores_merges, byte_fallback=kind.escapes)
    made = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in kind.splits]
    if kind.escapes:
        made.normalizer, made.decoder = normalizers.Replace(" ", _BLANK), _escaped_decoder()
    else:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return made, kind.always_adds_bos or bool(entries.get("add_bos_token", kind.adds_bos))


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """A SentencePiece tokenizer, and whether it adds the beginning-of-text token.

    Pairs are merged by the score of the token that they become. Other special tokens than bytes have been matched
    before and are not pairs, which would let a text spell a control token.
    """
    ids, scores = vocabulary.ids, vocabulary.listed("scores", len(vocabulary.texts), 0.0)
    merged = {
        text
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=False)
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    best_first = sorted(merged, key=lambda text: (-scores[ids[text]], ids[text]))
    cuts = ((text[:cut], text[cut:]) for text in best_first for cut in range(1, len(text)))
    pairs = [(left, right) for left, right in cuts if left in merged and right in merged]
    made = Tokenizer(BPE(ids, pairs, unk_token=vocabulary.text("unknown"), byte_fallback=True))
    prefixes = bool(vocabulary.entries.get("add_space_prefix", True))
    escape = normalizers.Replace(" ", _BLANK)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), escape]) if prefixes else escape
    made.decoder = _escaped_decoder(*[decoders.Strip(" ", 1, 0)] * prefixes)
    return made, bool(vocabulary.entries.get("add_bos_token", True))


def _escaped_decoder(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *more])
