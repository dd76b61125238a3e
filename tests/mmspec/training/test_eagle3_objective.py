"""Losses of EAGLE-3 over several self-fed steps equal those of running every chain separately."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.eagle3 import Eagle3, Eagle3Network
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.eagle3 import Eagle3Objective
from mmspec.training.features import Features
from tests.eagle3 import GEMMA4, LLAMA3, PEAGLE, PlainHead, cut, head_tensors
from tests.tiny import shared_model


def random_batch(target: TransformersTarget, states: int) -> Features:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 90, (2, 11), generator=g)
    visual, answer, keep = torch.zeros(3, 2, 11, dtype=torch.bool).unbind(0)
    visual[:, 1:3] = True
    tokens[visual] = 100
    for row, spans in enumerate((((3, 9),), ((2, 5), (6, 9)))):
        for begin, end in spans:
            answer[row, begin:end] = True
    keep[:] = True
    hidden, layers = torch.randn(2, 11, 48, generator=g), torch.randn(2, 11, states * 48, generator=g)
    embeds = torch.full((2, 11, 48), torch.nan)  # never read: image positions are placeholder tokens
    return Features(tokens, hidden, embeds, visual, answer, keep, layers)


def plain_losses(plain, target, batch, passes, loss):
    """Losses of each depth, over chains that are each run separately from the target's states."""
    found = [[] for _ in range(passes)]
    for row in range(len(batch.tokens)):
        tokens, said = batch.tokens[row], batch.answer[row].nonzero().flatten().tolist()
        states = list(batch.layers[row].split(48, dim=-1))
        for start in said:  # the chain's first entry consumes this token
            depths = 0
            while depths < passes and start + depths in said and start + depths + 1 in said:
                depths += 1
            if not depths:
                continue
            positions = torch.arange(start).expand(3, -1)
            followed = tokens[start + 1 : start + depths].tolist()
            levels = plain.levels(tokens[1 : start + 1], [s[:start] for s in states], positions, followed)
            for depth, logits in enumerate(levels):
                goal = target.head(batch.hidden[row, start + depth])[plain.ids].softmax(-1)
                kl = -(goal * logits.log_softmax(-1)).sum()
                accepted = sum(min(p, q) for p, q in zip(goal, logits.softmax(-1), strict=True))
                share = math.exp(-3 * accepted.item())
                found[depth].append(kl if loss == "kl" else share * kl + (1 - share) * (1 - accepted))
    return [torch.stack(losses) for losses in found if losses]


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (cut(LLAMA3), "A"),
        (cut(LLAMA3, fc_norm=True, norm_output=True), "A"),
        (cut(GEMMA4, [0, 1], norm_before_fc=True, num_hidden_layers=2), "B"),
        (cut(PEAGLE, [0, 1, 2], fc_norm=True, norm_output=True, num_hidden_layers=2), "B"),
    ],
)
@pytest.mark.parametrize(("passes", "loss"), [(1, "kl"), (4, "kl"), (4, "lk")])
def test_passes_equal_chains(config, layout, passes, loss, tmp_path):
    target = TransformersTarget(shared_model("llama"))
    tensors = {
        name: value.requires_grad_() if value.is_floating_point() else value
        for name, value in head_tensors(config, layout).items()
    }
    shape, ours, draft_ids, _ = Eagle3.convert(
        config, {name: value.detach() for name, value in tensors.items()}, "here"
    )
    network = load_network(Eagle3Network, shape, ours, tmp_path)
    batch = random_batch(target, shape.states)
    output = Eagle3Objective(passes, decay=0.5, loss=loss)(network, target, batch, draft_ids)
    plain = plain_losses(PlainHead(config, tensors, target.embed), target, batch, passes, loss)
    assert len(plain) == passes
    total = sum(0.5**depth * losses.sum() / len(plain[0]) for depth, losses in enumerate(plain))
    torch.testing.assert_close(output.total, total, rtol=1e-4, atol=1e-5)
    for depth, losses in enumerate(plain, start=1):
        assert output.metrics[f"token_{depth}"] == pytest.approx(losses.mean().item(), rel=1e-4)
    names = ["fc.weight", "norm.weight", "lm_head.weight"]
    at = "midlayer" if layout == "A" else "layers.0"
    theirs = [*names, f"{at}.hidden_norm.weight", f"{at}.self_attn.o_proj.weight", f"{at}.mlp.down_proj.weight"]
    parts = dict(network.named_parameters())
    mine = [*names, "layers.0.hidden_norm.weight", "layers.0.out.weight", "layers.0.down.weight"]
    for a, b in zip(
        torch.autograd.grad(output.total, [parts[name] for name in mine]),
        torch.autograd.grad(total, [tensors[name] for name in theirs]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("config", [cut(LLAMA3), cut(PEAGLE, [0, 1, 2])])
def test_chains_that_are_dropped_leave_the_losses_of_the_others(config, tmp_path):
    target, layout = TransformersTarget(shared_model("llama")), "B" if "transformer_layer_config" in config else "A"
    tensors = head_tensors(config, layout)
    shape, ours, draft_ids, _ = Eagle3.convert(config, tensors, "here")
    network, batch = load_network(Eagle3Network, shape, ours, tmp_path), random_batch(target, 3)
    generator = torch.Generator().manual_seed(3)
    output = Eagle3Objective(3, decay=0.5, keep=0.6)(network, target, batch, draft_ids, generator)
    with torch.no_grad():
        plain = plain_losses(PlainHead(config, tensors, target.embed), target, batch, 3, "kl")
    total = plain[0].mean()
    assert output.metrics["token_1"] == pytest.approx(total.item(), rel=1e-4)
    for depth in (2, 3):
        losses, mean = plain[depth - 1].tolist(), output.metrics[f"token_{depth}"]
        subsets = (some for count in range(1, len(losses)) for some in combinations(losses, count))
        kept = next(some for some in subsets if sum(some) / len(some) == pytest.approx(mean, rel=1e-5))
        assert depth == 3 or len(kept) < len(losses)
        total = total + 0.5 ** (depth - 1) * sum(kept) / len(plain[0])
    torch.testing.assert_close(output.total.detach(), total, rtol=1e-4, atol=1e-5)
    none = Eagle3Objective(3, decay=0.5, keep=0.0)(network, target, batch, draft_ids)
    assert float(none.total.detach()) == pytest.approx(plain[0].mean().item(), rel=1e-4)


def test_a_batch_without_answers_has_no_loss(tmp_path):
    target, config = TransformersTarget(shared_model("llama")), cut(LLAMA3)
    shape, ours, draft_ids, _ = Eagle3.convert(config, head_tensors(config), "here")
    batch = random_batch(target, 3)
    batch.answer[:] = False
    assert (
        float(Eagle3Objective()(load_network(Eagle3Network, shape, ours, tmp_path), target, batch, draft_ids).total)
        == 0.0
    )
