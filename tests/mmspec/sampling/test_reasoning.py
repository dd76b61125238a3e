"""ReasoningParser before an answer, end to end: grammars and stop strings begin after them, at every node of a tree.

The reference looks for the markers in the whole output each time, as text, and decodes plainly.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers.generation import logits_process as hf

pytest.importorskip("llguidance")

from mmspec.checking.oracle import Oracle
from mmspec.sampling.reasoning import FORMATS, NAMES, ReasoningParser, reasoning_format
from mmspec.targets.detokenizer import AnswerReader
from mmspec.targets.transformers_target import TransformersTarget
from tests.mmspec.sampling.plain import allowed_tokens, decode_plainly, masking, source
from tests.thinking import END, MARKERS, PROMPT, ids_of, pipeline, prompt_of, script, target, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

BLANKS, NEW = 8, 60
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
KINDS: dict[str, Any] = {
    "json_schema": SCHEMA,
    "regex": "(yes|no), [a-c]{2,5}",
    "grammar": 'start: "{" /[0-9]{2,3}/ "}"',
}


@cache
def byte_by_symbol() -> dict[str, int]:
    """Bytes of texts by the characters that stand for them in a byte-level vocabulary; others, in no text, lack."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    codes = (code for code in (*range(0x800), *range(0x800, 0x110000, 0x400)) if not 0xD800 <= code < 0xE000)
    texts = ((split(chr(code))[0][0], chr(code).encode()) for code in codes)
    return {symbol: byte for symbols, text in texts for symbol, byte in zip(symbols, text, strict=True)}


@cache
def bytes_of(spelling: str, token: int) -> bytes:
    text: str = tokenizer(spelling).convert_ids_to_tokens(token)
    if token in tokenizer(spelling).added_tokens_decoder:
        return text.encode()
    return bytes(byte_by_symbol().get(symbol, 0xFF) for symbol in text)


def parts(spelling: str, mode: str, said: list[int]) -> tuple[str | None, list[int]]:
    """Reasoning, None without one, and the tokens after it; the text of a special token is a byte of its own."""
    start, end = (one.encode() for one in MARKERS[spelling])
    if mode == "closed":
        return None, said
    reasoning, begun = b"", mode == "begun"
    thought = begun
    for n in range(len(said) + 1):
        text = b"".join(bytes_of(spelling, token) for token in said[:n])
        if not begun and not re.match(rb"\s*" + re.escape(start), text):
            continue
        thought = True
        reasoning = re.sub(rb"<s>|</s>|<pad>|\[THINK\]", b"", text.strip().removeprefix(b"" if begun else start))
        if end in reasoning:
            return reasoning.partition(end)[0].decode(errors="replace").strip(), said[n:]
    return (reasoning.decode(errors="replace").strip(), []) if thought else (None, said)


def in_reasoning(spelling: str, mode: str, said: list[int]) -> bool:
    reasoning, _ = parts(spelling, mode, said)
    text = b"".join(bytes_of(spelling, token) for token in said)
    return reasoning is not None and MARKERS[spelling][1].encode() not in text


def allowed(spelling: str, mode: str, form: str, said: list[int]) -> list[int] | None:
    """Allowed next tokens, for a grammar whose text never starts with white space."""
    start, end = (one.encode() for one in MARKERS[spelling])
    vocab = {token: bytes_of(spelling, token) for token in range(3, len(tokenizer(spelling)))}
    text = b"".join(bytes_of(spelling, token) for token in said)
    if in_reasoning(spelling, mode, said):
        return [END, 0, 1, *(t for t, more in vocab.items() if not re.search(re.escape(end) + rb"\s*\S", text + more))]
    reasoning, rest = parts(spelling, mode, said)
    blank = [bytes_of(spelling, token) for token in rest]
    blanks = next((n for n, one in enumerate(blank) if one.strip()), len(rest)) if mode != "closed" else 0
    found = set(allowed_tokens(tokenizer(spelling), [END], form, rest[blanks:]) or ())
    after = b"".join(blank)
    if reasoning is not None:
        after = text.partition(end)[2]
    for token, more in vocab.items():
        one = after + more
        if mode != "closed" and not one.strip() and len(one) <= BLANKS:
            found.add(token)
        if mode == "open" and reasoning is None and len(one) - len(one.lstrip()) <= BLANKS:
            marker = one.lstrip()
            begins = start.startswith(marker) or marker.startswith(start)
            if marker == start if spelling == "special" else begins:
                found.add(token)
    return sorted(found)


def answered(wanted: str, mode: str = "begun", **options: Any) -> Any:
    """The answer of a model that wants to write a text."""
    script("added", mode, ids_of("added", wanted))
    options = {"chat_template_kwargs": {"mode": mode}, "reasoning": "auto", "max_new_tokens": NEW, **options}
    return pipeline("added").generate(PROMPT, **options)


def plainly(spelling: str, mode: str, kind: str, seed: int | None) -> list[int]:
    prompt, model = prompt_of(spelling, mode), target(spelling).model
    form = source(kind, KINDS[kind])
    chain: list[Any] = [masking(lambda said, _: allowed(spelling, mode, form, said), len(prompt))]
    chain.append(hf.SequenceBiasLogitsProcessor(model.generation_config.sequence_bias))
    return decode_plainly(model, {"input_ids": torch.tensor([prompt])}, chain, NEW, seed, [END])


OUTPUTS = {
    "begun": ["So {1}, no.{end}\n\n{answer}", "{{{end}{answer}", "a < b </th{end} x", "only reasoning"],
    "open": [
        *("{start}\nSo {1}.{end}\n\n{answer}", "\n{start}x{end}{answer}", "{start}never"),
        *("{answer}", "No.", "\n\n{answer}"),
    ],
    "closed": ["{answer}", "{start}x{end}{answer}"],
}
ANSWERS = {"json_schema": json.dumps({"a": "y"}), "regex": "yes, abc", "grammar": "{42}"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", OUTPUTS)
@pytest.mark.parametrize("spelling", MARKERS)
def test_grammars_begin_after_reasoning(spelling: str, mode: str, kind: str) -> None:
    """Whatever is drafted across the markers, and where the model wants to leave the grammar."""
    start, end = MARKERS[spelling]
    tree_sizes = []
    for number, form in enumerate(OUTPUTS[mode]):
        text = form.replace("{start}", start).replace("{end}", end).replace("{answer}", ANSWERS[kind])
        wanted = ids_of(spelling, text)
        script(spelling, mode, wanted)
        for seed in (None, 4):
            expected = plainly(spelling, mode, kind, seed)
            sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
            pipe = pipeline(spelling, Oracle([[*expected, *wanted]], vocab=len(tokenizer(spelling)), seed=number))
            options = {"chat_template_kwargs": {"mode": mode}, "reasoning": "auto", kind: KINDS[kind], **sampling}
            answer = pipe.generate(PROMPT, nodes=12, max_new_tokens=NEW, **options)
            assert answer.token_ids == expected, text
            reasoning, rest = parts(spelling, mode, expected)
            assert answer.reasoning == (reasoning or "")
            assert answer.num_reasoning_tokens == (0 if reasoning is None else len(expected) - len(rest))
            after = tokenizer(spelling).decode([token for token in rest if token != END], skip_special_tokens=True)
            assert answer.text == (after if mode == "closed" else after.lstrip())
            if answer.finish_reason == "stop" and answer.text:
                assert valid(kind, answer.text)
            pieces = list(pipe.stream(PROMPT, nodes=12, max_new_tokens=NEW, **options))
            assert "".join(piece.text for piece in pieces) == answer.text
            assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
            assert sum(piece.num_reasoning_tokens for piece in pieces) == answer.num_reasoning_tokens
            tree_sizes.append(answer.stats.mean_acceptance_length)
    assert max(tree_sizes) > 2


def valid(kind: str, text: str) -> bool:
    if kind == "json_schema":
        return json.loads(text)["a"] in ("x", "y")
    return re.fullmatch(KINDS["regex"] if kind == "regex" else r"\{[0-9]{2,3}\}", text) is not None


@pytest.mark.parametrize(("mode", "blank"), [("begun", "\n\n"), ("open", "")])
@pytest.mark.parametrize("spelling", MARKERS)
def test_texts_of_reasoning_and_answers(spelling: str, mode: str, blank: str) -> None:
    """With parts of markers, and characters of several tokens, in reasoning and answer."""
    start, end = MARKERS[spelling]
    begun = "" if mode == "begun" else f"\n{start}"
    reasoning, answer = f"A < b é {end[:-2]} {start}", f"{{Ulm {end} é STOP"
    ids = ids_of(spelling, f"{begun}\n{reasoning}\n{end}{blank}{answer}")
    processor, prompt = pipeline(spelling).processor, prompt_of(spelling, mode)

    def read(*stop: str) -> tuple[str, str]:
        reader = AnswerReader(
            processor.vocabulary, prompt, stop, processor.reasoning_parser("auto", torch.tensor(prompt))
        )
        reasoning, answers = zip(*map(reader.append, ids), reader.finish(), strict=True)
        assert reader.answer.length == len("".join(answers))
        return "".join(reasoning), "".join(answers)

    hidden = spelling == "special"  # decoding leaves no text of special tokens
    expected = tuple(text if not hidden else text.replace(start, "").replace(end, "") for text in (reasoning, answer))
    expected = expected[0].strip(), expected[1]
    assert read() == expected
    assert read("STOP") == (expected[0], expected[1].removesuffix("STOP"))


def test_what_begins_like_a_marker_is_an_answer_at_the_end() -> None:
    processor = pipeline("text").processor
    reasoning = processor.reasoning_parser("auto", torch.tensor(prompt_of("text", "open")))
    reader = AnswerReader(processor.vocabulary, prompt_of("text", "open"), (), reasoning)
    assert {reader.append(token) for token in ids_of("text", "<thi")} == {("", "")}
    assert reader.finish() == ("", "<thi")
    assert reader.num_reasoning_tokens == 0


def test_outputs_may_be_rejected_after_reasoning() -> None:
    """With rejection in place of masks; the model writes white space before its answer."""
    options = {"reasoning": "qwen3", "temperature": 1.0, "seed": 1, "grammar_aligned": True}
    answer = answered("Hm.</think>\n\nyes, ab", regex=KINDS["regex"], **options)
    assert (answer.reasoning, answer.text) == ("Hm.", "yes, ab")


def test_white_space_of_the_grammar_is_its_own() -> None:
    """Only what precedes it is left out."""
    answer = answered("Hm.</think>\n yes", regex=" (yes|no)")
    assert (answer.text, answer.token_ids[answer.num_reasoning_tokens :]) == ("yes", [*ids_of("added", "\n yes"), END])


def test_an_end_of_sequence_that_is_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersTarget, "eos_token_ids", [END, *ids_of("added", "\n")])
    assert re.fullmatch("yes|no", answered("Hm.</think>\nyes", regex="(yes|no)").text)


def test_a_trigger_counts_after_reasoning() -> None:
    options, wanted = {"regex": "[ 0-9]{3}", "grammar_trigger": "CALL"}, "CALL no.</think>\nNo CALL 7a"
    answer = answered(wanted, **options)
    assert answer.reasoning == "CALL no."
    assert re.fullmatch("No CALL 7[ 0-9]", answer.text)
    assert re.fullmatch("CALL[ 0-9]{3}", answered(wanted, **options, reasoning=None).text)
    at_start = {**options, "grammar_trigger": "^CALL"}  # of the answer, white space aside
    assert re.fullmatch("CALL 7[ 0-9]", answered("CALL no.</think>\n\nCALL 7a", **at_start).text)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}{{ '<think>\n' if think }}", "think"),
        ("{{ '[THINK]' + m.reasoning + '[/THINK]' }}", "mistral"),
        ("{{ m.content.split('</think>')[-1] }}", "think"),
        ("{{ '<seed:think>' }}", "seed_oss"),
        ("{{ m.content }}<|end|>", None),
        ("", None),
    ],
)
def test_formats_of_templates(template: str, name: str | None) -> None:
    found = reasoning_format("auto", template)
    assert (found and found.name) == name
    assert reasoning_format("deepseek_r1", template) is reasoning_format("think", template) is FORMATS[0]
    assert reasoning_format("none", template) is reasoning_format(None, template) is None
    assert len(set(NAMES)) == len(NAMES)


ASIDE = b"<|start|>assistant<|channel|>fin"
FINAL = b"<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "special", "opens", "answers", "gaps"),
    [
        ("think", False, [b"", b" " * 8 + b"<th", b"<think>A"], [b" " * 9, b" " * 9 + b"<th", b"A"], [b"", b"\n" * 8]),
        ("mistral", True, [b"\n"], [b"[TH", b"[THINK]"], [b" "]),
        ("openai_gptoss", True, [b"\n", ASIDE, FINAL], [b"<|channel|>an", FINAL + b"A"], [ASIDE, FINAL + b"\n"]),
    ],
)
def test_texts_before_and_after_reasoning(
    name: str, special: bool, opens: list[bytes], answers: list[bytes], gaps: list[bytes]
) -> None:
    form = reasoning_format(name, "")
    assert form is not None
    parser = ReasoningParser(
        form, False, lambda _: b"", {form.start: 7, form.end: 8}.get if special else lambda _: None
    )
    assert list(map(parser.opens, (*opens, *answers))) == [True] * len(opens) + [False] * len(answers)
    assert list(map(parser.is_gap, (*gaps, b" " * 9, FINAL + b"A", b"A"))) == [True] * len(gaps) + [False] * 3


def test_masks_of_one_grammar_are_not_those_of_another() -> None:
    """Two grammars on one model: the cached masks of markers must not contain tokens of another grammar."""
    assert answered("{42}", "open", grammar=KINDS["grammar"]).text == "{42}"
    assert re.fullmatch("yes|no", answered("{42}", "open", regex="yes|no", max_new_tokens=256).text)


@pytest.mark.parametrize("answer", ["Ulm.", "\n\nUlm."])
def test_a_stop_string_at_the_beginning_of_an_answer_without_reasoning(answer: str) -> None:
    found = answered(f"{answer} It is there.", "open", stop="Ulm")
    assert (found.text, found.finish_reason) == ("", "stop")
    assert found.token_ids == ids_of("added", answer.removesuffix("."))
