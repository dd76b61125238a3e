"""Structured output end to end: every kind of target and drafter says what masked plain decoding says.

The reference (``tests/mmspec/sampling/plain.py``) shares no code with the package.
"""

import itertools
import json
import pickle
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers.generation import logits_process as hf

from mmspec.engine.policy import DraftPolicy

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")


import mmspec
from mmspec import SamplingParams, UserError, plugins
from mmspec.checking.oracle import Oracle
from mmspec.compare import first_difference
from mmspec.drafters.registry import make_drafter
from mmspec.vision.embedded import samples
from tests.mmspec.sampling.plain import allowed_tokens, decode_plainly, llguidance_tokenizer, masking, source
from tests.tiny import byte_model, byte_tokenizer

IMAGE = samples() / "scene.png"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), (the|a) [a-z]{2,6}( and [a-z]{2,6})?\."
LARK = 'start: item ("; " item){1,3}\nitem: NAME "=" NUMBER\nNAME: /[a-c]{1,3}/\nNUMBER: /[0-9]{1,2}/\n'
CONSTRAINTS = {"json_schema": SCHEMA, "regex": PATTERN, "grammar": LARK}
REQUESTS = {
    "tiny-llava": {"prompt": "Describe the image.", "images": [IMAGE]},
    "tiny-hybrid": {"prompt": "Work out: 37 + 48"},
    "bytes": {"prompt": "Say it: "},
}
SAMPLING = {"tiny-llava": True, "tiny-hybrid": False, "bytes": False}
"""Whether a model's references are sampled."""

NEW = 26
SAMPLED = {"temperature": 1.1, "top_p": 0.9, "seed": 5}


@cache
def plain(name):
    """A pipeline that decodes plainly."""
    return mmspec.load(byte_model(), None, processor=byte_tokenizer()) if name == "bytes" else mmspec.load(name, None)


def pipeline(name, drafter):
    made = drafter if not isinstance(drafter, str) else make_drafter(drafter, home(name))
    return mmspec.Pipeline(plain(name).target, plain(name).processor, made)


def home(name):
    return "" if name == "bytes" else plugins.model_path(name)


@cache
def reference(name, kind, sampled=False):
    """New tokens by the reference."""
    return tuple(plainly(name, kind, sampled, []))


def plainly(name, kind, sampled, processors):
    """Plain decoding, masked, then with other processors."""
    pipe = plain(name)
    prompt, ends = pipe.encode([REQUESTS[name]]), pipe.target.eos_token_ids
    if kind:
        form, tokenizer = source(kind, CONSTRAINTS[kind]), pipe.processor.tokenizer
        allowed = lambda said, vocab: allowed_tokens(tokenizer, ends, form, said)  # noqa: E731
        processors = [masking(allowed, prompt.input_ids.shape[1]), *processors]
    if sampled:
        warpers = [hf.TemperatureLogitsWarper(SAMPLED["temperature"]), hf.TopPLogitsWarper(SAMPLED["top_p"])]
        processors = [*processors, *warpers]
    inputs = {"input_ids": prompt.input_ids, **prompt.inputs}
    return decode_plainly(pipe.model, inputs, processors, NEW, SAMPLED["seed"] if sampled else None, ends)


def keywords(kind, sampled=False):
    constraint = {kind: CONSTRAINTS[kind]} if kind else {}
    return {"max_new_tokens": NEW, **constraint, **(SAMPLED if sampled else {})}


def oracle(references, seed=0):
    """Drafts around the references and beyond their ends, with decoys that may be forbidden or the end."""
    beyond = [2, *byte_tokenizer()("}, 1").input_ids]
    return Oracle([[*tokens, *beyond] for tokens in references], vocab=259, seed=seed, spoil=0.3)


@pytest.fixture(params=[False, True], ids=["reached", "every"])
def at_nodes(request):
    """Tokens are chosen at reached nodes, or at every node."""
    if request.param:
        request.getfixturevalue("at_every_node")


@pytest.mark.parametrize(("name", "sampled"), [*SAMPLING.items(), ("bytes", True)])
def test_random_trees_around_the_output(name, sampled, at_nodes):
    """Trees with forbidden branches, rejected branches that the grammar allows, and drafts after the end."""
    accepted = []
    for seed, kind in itertools.product(range(2), CONSTRAINTS):
        expected = reference(name, kind, sampled)
        pipe = pipeline(name, oracle([expected], seed))
        r = pipe.generate(**REQUESTS[name], **keywords(kind, sampled), nodes=12)
        assert tuple(r.token_ids) == expected, kind
        accepted.append(r.stats.mean_acceptance_length)
    assert max(accepted) > 2


class TopTwo(hf.LogitsProcessor):
    """A user's own: runs path by path, and sees masked scores."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(scores < scores.topk(2).values[:, -1:], -float("inf"))


OTHERS = {
    "by path": lambda: [TopTwo()],
    "at every node": lambda: [hf.TopKLogitsWarper(2), hf.SuppressTokensLogitsProcessor([5])],
    "penalty": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "reward": lambda: [hf.RepetitionPenaltyLogitsProcessor(0.8)],
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("others", OTHERS)
def test_other_processors_see_masked_scores(others, sampled, at_nodes):
    for kind in ("regex", "json_schema"):
        expected = plainly("bytes", kind, sampled, OTHERS[others]())
        r = pipeline("bytes", oracle([expected])).generate(
            **REQUESTS["bytes"], **keywords(kind, sampled), logits_processor=OTHERS[others](), nodes=12
        )
        assert r.token_ids == expected


def test_white_space_at_the_beginning_belongs_to_the_output():
    pipe = plain("tiny-llava")
    assert pipe.processor.answer_prefix == " "
    r = pipe.generate(**REQUESTS["tiny-llava"], regex="  ?[ab] c")
    assert re.fullmatch("  ?[ab] c", r.text)


def test_forced_tokens_are_drafted_without_a_draft():
    """A drafter that finds nothing: all accepted drafts are forced."""
    pipe = pipeline("bytes", "ngram")
    pattern = "the quick brown fox (jumps over|sleeps under) the lazy dog"
    r = pipe.generate("#", regex=pattern, nodes=12)
    assert re.fullmatch(pattern, r.text)
    assert r.stats.mean_acceptance_length > 4
    free = pipe.generate("#", max_new_tokens=len(r.token_ids), nodes=12)
    assert free.stats.mean_acceptance_length < r.stats.mean_acceptance_length
    assert pipe.generate("#", regex=pattern, nodes=0).stats.num_draft_tokens == 0
    assert plain("bytes").generate("#", regex=pattern).stats.num_draft_tokens == 0


def test_the_margin_of_a_difference_is_of_allowed_tokens():
    pipe, said = plain("bytes"), list(reference("bytes", "regex"))
    prompt = pipe.encode([REQUESTS["bytes"]]).input_ids
    allowed = byte_tokenizer()("yn").input_ids
    with torch.no_grad():
        logits = pipe.model(prompt).logits[0, -1]
    assert int(logits.argmax()) not in allowed
    other = next(token for token in allowed if token != said[0])
    found = first_difference(pipe, REQUESTS["bytes"], keywords("regex"), [other], said)
    assert found.margin == pytest.approx(float(logits[said[0]] - logits[other]), abs=1e-4)


@pytest.mark.parametrize(("name", "drafter"), [("tiny-llava", "msd"), ("tiny-hybrid", "mamba"), ("bytes", "recycle")])
def test_forced_tokens_in_steps_without_a_draft(name, drafter, monkeypatch):
    """The drafter proposes at every third step only, and observes all trees."""
    steps = itertools.count()
    plan = DraftPolicy.plan

    def planned(policy, rows, remaining):
        chosen = plan(policy, rows, remaining)
        return chosen if next(steps) % 3 == 0 else replace(chosen, nodes=0, adaptive=True)

    monkeypatch.setattr(DraftPolicy, "plan", planned)
    pipe = pipeline(name, drafter)
    for kind in CONSTRAINTS:
        r = pipe.generate(**REQUESTS[name], **keywords(kind, SAMPLING[name]), nodes=8)
        assert tuple(r.token_ids) == reference(name, kind, SAMPLING[name])


def test_a_pipeline_is_pickled_after_a_constrained_request():
    pipe = pipeline("bytes", "ngram")
    first = pipe.generate("a", regex="b{3}")
    assert pickle.loads(pickle.dumps(pipe)).generate("a", regex="b{3}").token_ids == first.token_ids
    params = SamplingParams(json_schema=SCHEMA)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(json_schema=json.dumps(SCHEMA)))


@pytest.mark.parametrize(
    ("kind", "text", "longest", "options"),
    [
        ("json_schema", {"enum": ["red"]}, 5, {}),
        ("regex", "[re]ed", 3, {"nodes": 0}),
        ("regex", "[re]ed", 3, SAMPLED),
        ("grammar", 'start: "red" "e"?', 4, {"stopping_criteria": [lambda *_: torch.tensor([False])]}),
    ],
)
def test_min_new_tokens_beyond_the_end(kind, text, longest, options):
    pipe = pipeline("bytes", "recycle+ngram")
    options = {"max_new_tokens": 20, "nodes": 6, kind: text, **options}
    answer = pipe.generate("Say it: ", min_new_tokens=longest, **options)
    assert len(answer.token_ids) == longest + 1  # and the EOS token
    message = f"min_new_tokens must not go beyond the end of {kind}: expected at most {longest} here, got {longest + 1}"
    with pytest.raises(UserError, match=f"^{message}$") as caught:
        pipe.generate("Say it: ", min_new_tokens=longest + 1, **options)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.message("a", "b")) == (message, message.replace("min_new_tokens", "a").replace(kind, "b"))
    open_end = {"json_schema": {"type": "string"}, "regex": "[ab]+", "grammar": "start: /[ab]+/"}[kind]
    assert len(pipe.generate("Say it: ", min_new_tokens=18, **options | {kind: open_end}).token_ids) >= 18


def test_min_new_tokens_count_what_precedes_a_trigger():
    pipe = plain("bytes")
    free = [byte_tokenizer().decode([token]) for token in pipe.generate("Say it: ", max_new_tokens=4).token_ids]
    at = next(place for place, text in enumerate(free) if text.isascii())
    options = {"max_new_tokens": 20, "regex": "abc", "grammar_trigger": free[at]}
    end = at + 4
    assert len(pipe.generate("Say it: ", min_new_tokens=end, **options).token_ids) == end + 1
    with pytest.raises(UserError, match=f"beyond the end of regex: expected at most {end} here, got {end + 1}$"):
        pipe.generate("Say it: ", min_new_tokens=end + 1, **options)


def test_an_aligned_output_that_is_too_short_is_rejected():
    options = {"regex": "a|bc", "temperature": 5.0, "seed": 1, "grammar_aligned": True}
    assert plain("bytes").generate("Say it: ", max_new_tokens=20, min_new_tokens=2, **options).text == "bc"


# ---------------------------------------------------------------------- after a trigger

PICTURE = "What is in a picture?"
LETTERS, DIGITS = r"[ a-z]{0,2}[ o-z]{4,16}\.", r"[0-9]{3,6}"
TRIGGERED = {"temperature": 1.2, "seed": 3}


@cache
def known():
    pipe = plain("tiny-llava")
    return llguidance_tokenizer(pipe.processor.tokenizer, pipe.target.eos_token_ids[0])


def allowed(said, trigger, pattern):
    """What may come after some tokens; None where the output is free."""
    literal = re.sub("^\\\\\\^", "^", re.escape(trigger))
    search = re.compile((trigger[1:-1] if trigger.startswith("/") else literal).encode()).search
    texts = [known().decode_bytes(said[:n]) for n in range(len(said) + 1)]
    begun = next((n for n, text in enumerate(texts) if search(text)), None)
    if begun is None:
        return None
    first = texts[begun][search(texts[begun]).end() :]
    rest, pipe = [*known().tokenize_bytes(first), *said[begun:]], plain("tiny-llava")
    return allowed_tokens(pipe.processor.tokenizer, pipe.target.eos_token_ids, source("regex", pattern), rest)


def after_a_trigger(trigger, pattern, sampled):
    """Plain decoding: the text is looked for in the whole output each time."""
    pipe = plain("tiny-llava")
    ids = pipe.encode([{"prompt": PICTURE}]).input_ids
    chain = [masking(lambda said, vocab: allowed(said, trigger, pattern), ids.shape[1])]
    chain += [hf.TemperatureLogitsWarper(TRIGGERED["temperature"])] if sampled else []
    seed = TRIGGERED["seed"] if sampled else None
    return decode_plainly(pipe.model, {"input_ids": ids}, chain, NEW, seed, pipe.target.eos_token_ids)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["oracle", "flash+ngram"])
def test_grammars_begin_after_their_triggers(drafter, sampled):
    """Triggers of all ends within and between tokens, in one batch; with digits, tokens that go on are free."""
    options = TRIGGERED if sampled else {}
    free = plain("tiny-llava").generate(PICTURE, max_new_tokens=NEW, **options)
    text = plain("tiny-llava").processor.tokenizer.decode(free.token_ids)
    cases = [(text[4 : 7 + end], LETTERS) for end in range(4)] + [(text[3:9], DIGITS), ("^" + text[:5], LETTERS)]
    cases += [("^" + text[1:5], DIGITS), ("never said", DIGITS), (f"/{text[5]}|{text[4:7]}/", LETTERS)]
    cases += [(f"/^.{{2}}(?={text[2:6]})/", text[2:6] + LETTERS), (f"/^.(?={text[2:6]})/", DIGITS)]
    expected = [after_a_trigger(trigger, pattern, sampled) for trigger, pattern in cases]
    assert len(set(map(tuple, expected))) >= 3
    pipe = pipeline("tiny-llava", Oracle(expected, vocab=250, spoil=0.3) if drafter == "oracle" else drafter)
    params = [
        SamplingParams(regex=pattern, grammar_trigger=trigger, max_new_tokens=NEW, **options)
        for trigger, pattern in cases
    ]
    answers = pipe.generate_batch([{"prompt": PICTURE, "params": one} for one in params], nodes=8)
    assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.stats.num_draft_tokens for answer in answers) > 0


def test_a_special_token_is_a_trigger_by_its_id_and_shown():
    pipe = pipeline("tiny-llava", "ngram")
    name, token = pipe.processor.tokenizer.pad_token, pipe.processor.tokenizer.pad_token_id
    options = {"regex": DIGITS, "grammar_trigger": name, "logit_bias": {token: 100}}
    answer = pipe.generate(PICTURE, nodes=4, max_new_tokens=NEW, **options)
    assert answer.token_ids[0] == token
    assert answer.text.startswith(name)
    assert answer.text.removeprefix(name).isdigit()
