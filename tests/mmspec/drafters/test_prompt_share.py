"""Which visual tokens and which parts of a long text a draft model gets, against plain loops; drafts after these."""

import math
from collections import Counter

import pytest
import torch

from mmspec import UserError
from mmspec.core.target import Prompt, TargetOutput
from mmspec.drafters import prompt_share
from mmspec.drafters.prompt_share import VisualShare, attended, attention_layers, evenly, prompt_attention, relevant
from mmspec.drafters.small import Small
from mmspec.targets.packing import pack_model
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.draft_checks import check_logits
from tests.mmspec.drafters.test_drafters import assert_equal, target_of
from tests.mmspec.targets.test_packed_forward import GEMMA3, model_of
from tests.targets import prefilled, prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.configs import IMAGE, VIDEO, VISION_CONFIGS
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model

SIZES = {"LONG": 24, "CHUNK": 4, "BEGINNING": 3, "END": 6}
QUERIES = 3


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(prompt_share, name, size)


def kept_by_loop(tokens: list[int], share: float) -> list[int]:
    """Places that are kept of a text, with ``SIZES``."""
    middle = [list(range(at, min(at + 4, len(tokens) - 6))) for at in range(3, len(tokens) - 6, 4)]
    if len(tokens) < 24:
        return list(range(len(tokens)))
    frequencies = Counter(token for chunk in middle for token in {tokens[place] for place in chunk})

    def likeness(chunk: list[int]) -> float:
        common = {tokens[place] for place in chunk} & {*tokens[-6:]}
        return sum(math.log(len(middle) / frequencies[token]) for token in common)

    ranked = sorted(range(len(middle)), key=lambda number: (-round(likeness(middle[number]), 9), number))
    chosen = ranked[: max(1, round(share * len(middle)))]
    return sorted([*range(3), *(place for n in chosen for place in middle[n]), *range(len(tokens) - 6, len(tokens))])


def test_the_chunks_that_the_end_asks_about() -> None:
    """Tokens 5 and 6 of the end are in two chunks; 7 is everywhere, and says nothing."""
    ids = torch.arange(100, 100 + 1600)
    ids[::10] = 7
    ids[64 + 3 * 64 + 9], ids[64 + 17 * 64 + 63] = 5, 6
    ids[-40], ids[-3], ids[-90] = 5, 6, 7
    kept = relevant(ids[None], torch.ones(1, 1600, dtype=torch.bool), 2 / 22)[0].nonzero()[:, 0].tolist()
    assert kept == [*range(64), *range(256, 320), *range(1152, 1216), *range(1472, 1600)]


@pytest.mark.usefixtures("small_sizes")
def test_selected_text_equals_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    shortened = 0
    for case in range(40):
        length, share = 20 + case, [0.1, 0.25, 0.5, 0.9][case % 4]
        ids = torch.randint(3, [12, 40, 400][case % 3], (3, length), generator=g)
        text = torch.rand(3, length, generator=g) < [0.6, 1.0][case % 2]
        found = relevant(ids, text, share)
        for row in range(3):
            places = text[row].nonzero()[:, 0]
            expected = places[kept_by_loop(ids[row, places].tolist(), share)].tolist()
            assert found[row].nonzero()[:, 0].tolist() == expected
            shortened += len(expected) < len(places)
        assert torch.equal(relevant(ids, text, 1.0), text)
        assert torch.equal(relevant(ids, text, 0.0), text)  # images alone are left out
    assert shortened > 40


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_drafts_follow_what_is_kept(share: float) -> None:
    batch = 3
    model, small, inputs = shared_model("llama"), text_model("llama"), text_inputs(batch, 40)
    with torch.no_grad():
        small.lm_head.weight += 0.3 * torch.randn(
            small.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    rows = [row_of(inputs, number)["input_ids"][0].tolist() for number in range(batch)]
    kept = [[row[place] for place in kept_by_loop(row, share)] if share < 1 else row for row in rows]
    assert share == 1 or all(len(short) < len(row) - 9 for short, row in zip(kept, rows, strict=True))

    def logits(row: int, tokens: list[int]) -> torch.Tensor:
        return small(input_ids=torch.tensor([kept[row] + tokens])).logits[0, len(kept[row]) - 1 :]

    check_logits(model, inputs, Small(small, 3, share=share), logits, nodes=7, depth=3, skip=(2,), new=8)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_text_around_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, value in {"LONG": 6, "CHUNK": 2, "BEGINNING": 1, "END": 2}.items():
        monkeypatch.setattr(prompt_share, size, value)
    model, inputs = shared_model(name), vision_inputs(name, 2)
    drafter, prompts = Small(vision_model(name, seed=1), share=0.3), []
    begin = drafter._begin_with_media

    def noted(prompt, *others):
        prefill = drafter.lm.prefill
        monkeypatch.setattr(
            drafter.lm, "prefill", lambda given, *options: prompts.extend(given) or prefill(given, *options)
        )
        begin(prompt, *others)

    drafter._begin_with_media = noted
    assert_equal(model, drafter, inputs, num_draft_tokens=6)
    (prompt,) = prompts
    text = (prompt.attention_mask == 1) & (prompt.input_ids != IMAGE) & (prompt.input_ids != VIDEO)
    assert torch.equal(prompt.prefill_mask & text, relevant(prompt.input_ids, text, 0.3))
    assert int((prompt.prefill_mask & text).sum()) < int(text.sum())
    assert not prompt.prefill_mask[prompt.attention_mask == 0].any()


def selected_by_loop(visual: list[int], weights: list[float], kept: int) -> set[int]:
    """Places of ``visual``: the heaviest until they have 0.4 of the weight, then evenly spaced ones of the others."""
    top: list[int] = []
    for place in sorted(visual, key=lambda place: -weights[place]):
        if len(top) == kept or sum(weights[at] for at in top) >= 0.4 * sum(weights[at] for at in visual):
            break
        top.append(place)
    others, more = [place for place in visual if place not in top], kept - len(top)
    spaced = {others[at] for at in range(len(others)) if (at + 1) * more // len(others) > at * more // len(others)}
    assert len(spaced) == more
    return spaced | {*top}


def test_selected_visual_tokens_equal_a_loop():
    g = torch.Generator().manual_seed(0)
    for case in range(40):
        length, share = 30, [0.1, 0.25, 0.5, 0.9][case % 4]
        visual = torch.rand(3, length, generator=g) < [0.2, 0.5, 1.0][case % 3]
        visual[:, 0] = True
        weights = torch.rand(3, length, generator=g) ** [1, 8][case % 2]
        weights[2] = 0  # nothing is known of a row's attention
        kept = (visual.sum(1, keepdim=True) * share).round().long().clamp(min=1)
        found = attended(visual, weights, kept, 0.4)
        for row in range(3):
            places = visual[row].nonzero()[:, 0].tolist()
            expected = selected_by_loop(places, weights[row].tolist(), int(kept[row]))
            assert set(found[row].nonzero()[:, 0].tolist()) == expected
        assert torch.equal(found[2], evenly(visual, kept)[2])


def test_a_row_does_not_depend_on_the_others():
    model, inputs = shared_model("qwen2_vl"), vision_inputs("qwen2_vl", 3)
    target = target_of(model)
    share = VisualShare(0.4)
    share.attach(target)
    reads = share.features
    first = 0
    together = prefilled(target, prompt_of(inputs), reads=reads)
    found = share.selected(together.visual, together, first)
    for row in range(3):
        first += [3, 1, 1][row]
        alone = {**row_of(inputs, row)}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        output = prefilled(target, prompt_of(alone), reads=reads)
        length = alone["input_ids"].shape[1]
        chosen = share.selected(output.visual, output, first)
        assert torch.equal(chosen[0], found[row, -length:])
        assert int(chosen.sum()) == round(0.4 * int(output.visual.sum()))
        assert not torch.equal(chosen, evenly(output.visual, chosen.sum(1, keepdim=True)))


def test_other_targets_and_shares_need_no_attention():
    target = target_of("llava")
    for share, top_p, other in ((1.0, 0.4, target), (0.0, 0.4, target), (0.4, 0.4, object()), (0.4, 0.0, target)):
        spaced = VisualShare(share, top_p)
        spaced.attach(other)
        assert spaced.features == ()
    visual = torch.arange(20)[None] > 3
    found = spaced.selected(visual, TargetOutput(torch.empty(0), {}), 0)
    assert torch.equal(found, evenly(visual, torch.tensor([[6]])))
    with pytest.raises(UserError, match=r"^the part of the attention must be from 0 to 1: got 2$"):
        VisualShare(0.4, 2)


def model_and_inputs(name):
    if name not in VISION_CONFIGS:
        return text_model(name), text_inputs(2, 9)
    return vision_model(name), vision_inputs(name, 1 if name == "llava_onevision" else 2)


@torch.no_grad()
def eager_weights(model, inputs):
    """(batch, queries, length) of each layer of attention, the mean over heads."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(usual)
    return [weights.mean(1)[:, -QUERIES:] for weights in found if weights is not None]


@pytest.mark.parametrize(
    "name", ["llava", "llava_bamba", "llava_onevision", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma2"]
)
def test_weights_are_those_of_eager_attention(name):
    """With padding, images, several position axes, other layers in between, and limited scores."""
    model, inputs = model_and_inputs(name)
    expected = eager_weights(model, inputs)
    target, prompt = target_of(model), prompt_of(inputs)
    layers = attention_layers(target.config)
    batch = len(prompt.input_ids)
    prefilled(target, Prompt(torch.tensor([[7, 8, 9]])), 8)  # a row before them, of another length
    output = prefilled(target, prompt, reads=layers)
    if name == "gemma2":
        assert layers == [1]  # layer 0 has a window
        expected = expected[1:]
    for layer, weights in zip(layers, expected, strict=True):
        found = prompt_attention(target, layer, output, 1, QUERIES)
        assert found.shape == (batch, QUERIES, prompt.input_ids.shape[1])
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-4)
    again = prefilled(target, prompt, 8)  # the attention implementation is restored
    assert torch.equal(again.logits, output.logits)


def test_a_prompt_in_chunks():
    model, inputs = shared_model("qwen2_vl"), vision_inputs("qwen2_vl", 1)
    target = target_of(model)
    whole = prefilled(target, prompt_of(inputs), reads=(1,))
    output = prefilled(target, prompt_of(inputs), 8, (1,), 5)
    expected = prompt_attention(target, 1, whole, 0, QUERIES)
    torch.testing.assert_close(prompt_attention(target, 1, output, 1, QUERIES), expected, atol=1e-5, rtol=1e-4)


@needs_kernels
def test_packed_forward():
    """Whose queries and keys have their features in another order, and keys are bfloat16."""
    model, ids = model_of(GEMMA3), torch.arange(5, 25)[None]
    expected = eager_weights(model, {"input_ids": ids})[1]
    pack_model(model, "bfloat16")
    target = TransformersTarget(model)
    assert attention_layers(target.config) == [1]
    output = prefilled(target, Prompt(ids), reads=(1,))
    found = prompt_attention(target, 1, output, 0, QUERIES)
    torch.testing.assert_close(found, expected, atol=0.04, rtol=0.05)
    assert torch.allclose(found.sum(-1), torch.ones(1, QUERIES))


def test_layers_that_are_not_read():
    assert attention_layers(text_model("mistral-window").config) == []
    model = text_model("doge")  # its layers have masks of their own
    target = TransformersTarget(model)
    assert (
        prompt_attention(target, 1, prefilled(target, Prompt(torch.tensor([[5, 6, 7, 8]])), reads=(1,)), 0, 2) is None
    )
