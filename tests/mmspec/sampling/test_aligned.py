"""Sampling by rejection under a grammar: outputs follow the model's distribution given the grammar."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

import mmspec
from mmspec import Pipeline, SamplingParams, TokenTree, UserError, plugins
from mmspec.core.tree import build_tree
from mmspec.drafters.registry import make_drafter
from mmspec.sampling import sampler
from mmspec.vision.embedded import samples
from tests.mmspec.engine.test_constrain import ids_of
from tests.mmspec.engine.test_engine import Drawn, Silent
from tests.mmspec.sampling.plain import chi_square
from tests.tiny import byte_model, byte_tokenizer

EOS, VOCAB, PROMPT, TEMPERATURE = 2, 259, "ab: ", 4.0
WORDS = ("ab", "ba", "bbc", "abc", "ccc", "a")
BIASED = {**dict.fromkeys(ids_of("abc"), 20.0), EOS: 18.0}
WHOLE, CUT = 8, 2  # limits of new tokens
IMAGE = samples() / "scene.png"
REQUESTS: dict[str, dict[str, Any]] = {
    "tiny-llava": {"prompt": "Describe the image.", "images": [IMAGE]},
    "tiny-hybrid": {"prompt": "Work out: 37 + 48"},
}


def params(**options: Any) -> SamplingParams:
    defaults = {"regex": "|".join(WORDS), "temperature": TEMPERATURE, "logit_bias": BIASED, "max_new_tokens": WHOLE}
    return SamplingParams(**{**defaults, "grammar_aligned": True, **options})


@cache
def probabilities(said: tuple[int, ...]) -> torch.Tensor:
    """Of the next token, by a forward of the model."""
    with torch.no_grad():
        logits = byte_model()(input_ids=torch.tensor([[*ids_of(PROMPT), *said]])).logits[0, -1].double()
    for token, bias in BIASED.items():
        logits[token] += bias
    return (logits / TEMPERATURE).softmax(-1)


def expected(limit: int, masked: bool = False) -> dict[tuple[int, ...], float]:
    """Probabilities of all outputs within the grammar: given that they are, or with each token masked by itself."""
    outputs = {(*ids_of(word), EOS)[:limit] for word in WORDS}
    found = {}
    for output in sorted(outputs):
        chance = 1.0
        for length, token in enumerate(output):
            probs = probabilities(output[:length])
            allowed = sorted({other[length] for other in outputs if other[:length] == output[:length]})
            chance *= float(probs[token] / (probs[allowed].sum() if masked else 1.0))
        found[output] = chance
    return {output: chance / sum(found.values()) for output, chance in found.items()}


class Branches(Silent):
    """Drafts the words, and wrong words, as one random tree."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)

    def propose(self, token: torch.Tensor, plan: Any) -> TokenTree:
        rows = []
        for _ in token:
            one, other = (torch.randint(6, (2, 3), generator=self._random) + ids_of("a")[0]).tolist()
            rows.append(([*one, *other[1:]], [0, 1, 2, 1, 4]) if one[1] != other[1] else (one, [0, 1, 2]))
        return build_tree(token, rows)


def drawn() -> Drawn:
    g = torch.Generator().manual_seed(9)
    return Drawn((torch.randn(VOCAB, VOCAB, generator=g) + torch.tensor(5.0) * _marked()).softmax(-1), 3)


def _marked() -> torch.Tensor:
    return torch.zeros(VOCAB).index_fill(0, torch.tensor(list(BIASED)), 1.0)


def answers(drafter: Any, total: int, **options: Any) -> list[mmspec.Generation]:
    pipe = mmspec.load(byte_model(), drafter, processor=byte_tokenizer())
    requests = [{"prompt": PROMPT, "params": params(seed=seed, **options)} for seed in range(total)]
    return pipe.generate_batch(requests, nodes=6)


@pytest.mark.long
@pytest.mark.parametrize("limit", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("make", [lambda: None, Branches, drawn], ids=["plain", "tree", "drawn"])
def test_outputs_follow_the_model_given_the_grammar(make: Any, limit: int) -> None:
    total, true = 400, expected(limit)
    found = answers(make(), total, max_new_tokens=limit)
    seen = Counter(tuple(answer.token_ids) for answer in found)
    assert min(true.values()) * total > 5
    statistic, most = chi_square(seen, true, total)
    assert statistic < most
    assert chi_square(seen, expected(limit, masked=True), total)[0] > most
    assert sum(answer.stats.num_rejected_outputs for answer in found) > total / 2


def test_tokens_are_those_of_plain_decoding_with_the_same_seed() -> None:
    plain, fast = answers(None, 40), answers(Branches(), 40)
    assert [one.token_ids for one in fast] == [one.token_ids for one in plain]
    assert [one.stats.num_rejected_outputs for one in fast] == [one.stats.num_rejected_outputs for one in plain]
    assert sum(one.stats.num_accepted_draft_tokens for one in fast) > 4
    assert len({tuple(one.token_ids) for one in plain}) > 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "drafter", "prefix_cache"), [("tiny-llava", "flash", 0), ("tiny-hybrid", "recycle", 1 << 26)]
)
def test_prompts_with_images_and_recurrent_layers_begin_anew(name: str, drafter: str, prefix_cache: int) -> None:
    pattern, given = "[A-Z][a-z]* [a-z ]+", {"temperature": 1.0, "max_new_tokens": 6, "grammar_aligned": True}
    plain = mmspec.load(name, None)
    pipe = Pipeline(
        plain.target, plain.processor, make_drafter(drafter, plugins.model_path(name)), prefix_cache=prefix_cache
    )
    rejected = 0
    for seed in range(6):
        found = [p.generate(**REQUESTS[name], regex=pattern, seed=seed, **given, nodes=6) for p in (plain, pipe)]
        assert found[0].token_ids == found[1].token_ids
        assert re.match("[A-Z][a-z]*( |$)", found[0].text)
        rejected += found[1].stats.num_rejected_outputs
    assert rejected > 0
    plain.engine.use_prefixes(None)


def test_rows_beside_others() -> None:
    """Masked, free and rejected rows of a batch do not affect each other."""
    pipe = mmspec.load(byte_model(), Branches(), processor=byte_tokenizer())
    kinds = [params(seed=3), params(seed=3, grammar_aligned=False), params(seed=3, regex=None), params(seed=4)]
    alone = [pipe.generate(PROMPT, params=one, nodes=6).token_ids for one in kinds]
    together = pipe.generate_batch([{"prompt": PROMPT, "params": one} for one in kinds], nodes=6)
    assert [one.token_ids for one in together] == alone
    free = params(seed=3, regex=None, grammar_aligned=False)
    assert pipe.generate(PROMPT, params=free, nodes=6).token_ids == alone[2]  # no grammar, no effect


def test_streams_send_what_is_accepted_only() -> None:
    pipe = mmspec.load(byte_model(), Branches(), processor=byte_tokenizer())
    for seed in range(8):
        whole = pipe.generate(PROMPT, params=params(seed=seed), nodes=6, logprobs=1, trace=True)
        (piece,) = pipe.stream(PROMPT, params=params(seed=seed), nodes=6, logprobs=1)
        assert (piece.token_ids, piece.text, piece.finish_reason) == (whole.token_ids, whole.text, "stop")
        assert [one.token_id for one in piece.logprobs] == whole.token_ids
        assert len(whole.trees) == whole.stats.num_spec_steps == len(whole.stats.accept_lengths)
        assert whole.stats.num_generated_tokens == len(whole.token_ids)


def test_stop_strings_end_an_output_before_it_can_be_rejected() -> None:
    pipe = mmspec.load(byte_model(), Branches(), processor=byte_tokenizer())
    found = [pipe.generate(PROMPT, params=params(seed=seed, stop="b"), nodes=6) for seed in range(30)]
    assert {one.text for one in found} >= {"a", ""}
    assert all(one.finish_reason == "stop" for one in found)


def test_stop_strings_do_not_begin_in_a_rejected_output() -> None:
    found = answers(Branches(), 60, stop="bc")
    assert sum(one.stats.num_rejected_outputs for one in found) > 30
    assert {one.text for one in found} >= {"ccc", "ab", "b"}
    assert all(one.token_ids[-1:] == [EOS] or (*one.token_ids,) == ids_of(f"{one.text}bc") for one in found)


def test_what_follows_a_trigger_is_aligned() -> None:
    pipe = mmspec.load(byte_model(), None, processor=byte_tokenizer())
    biased, texts = {**BIASED, ids_of("#")[0]: 20.0, EOS: -100.0}, []
    for seed in range(12):
        one = params(seed=seed, regex="[ab]+", grammar_trigger="#", logit_bias=biased, max_new_tokens=4)
        texts.append(pipe.generate(PROMPT, params=one).text)
    assert all(re.fullmatch("[^#]*(#[ab]*)?", text, re.DOTALL) for text in texts)
    assert 0 < sum("#" in text[:3] for text in texts) < len(texts)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = mmspec.load(byte_model(), None, processor=byte_tokenizer())
    never = {ids_of(letter)[0]: -100.0 for letter in "abc"}
    with pytest.raises(UserError, match="no output that logits processors and sampling parameters leave satisfies"):
        pipe.generate(PROMPT, params=params(top_k=2, logit_bias=never))
    monkeypatch.setattr(sampler, "_MOST_REJECTED", 2)
    reject, accepted = sampler.Alignment.reject, []
    monkeypatch.setattr(sampler.Alignment, "reject", lambda self: accepted.append(reject(self)))
    with pytest.raises(UserError, match="must satisfy the grammar with grammar_aligned: 2 did not, and of others"):
        pipe.generate(PROMPT, params=params(seed=0, logit_bias=None))
    assert len(accepted) == 1  # the second raised
