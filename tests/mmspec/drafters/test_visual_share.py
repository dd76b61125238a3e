"""Which visual tokens a draft model gets, against plain loops."""

from __future__ import annotations

import pytest
import torch

from mmspec import UserError, plugins
from mmspec.core.target import TargetOutput
from mmspec.drafters.prompt_share import VisualShare, attended, evenly
from tests.targets import prefilled, prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import vision_inputs


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


def test_selection_equals_a_loop():
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
    target = plugins.target_class(model.config)(model)
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
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    for share, top_p, other in ((1.0, 0.4, target), (0.0, 0.4, target), (0.4, 0.4, object()), (0.4, 0.0, target)):
        spaced = VisualShare(share, top_p)
        spaced.attach(other)
        assert spaced.features == ()
    visual = torch.arange(20)[None] > 3
    found = spaced.selected(visual, TargetOutput(torch.empty(0), {}), 0)
    assert torch.equal(found, evenly(visual, torch.tensor([[6]])))
    with pytest.raises(UserError, match=r"^the part of the attention must be from 0 to 1: got 2$"):
        VisualShare(0.4, 2)
