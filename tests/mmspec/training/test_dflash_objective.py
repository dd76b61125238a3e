"""Losses of DFlash at all anchors equal those of running transformers' implementation on every block separately."""

from __future__ import annotations

import math

import pytest
import torch

from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.dflash import DFlash, DFlashNetwork
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.dflash import DFlashObjective
from mmspec.training.features import Features
from tests.dflash import BLOCK, WIDTH, block_states, markov_logits, published, reference, with_heads
from tests.tiny import shared_model


def random_batch():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 90, (2, 13), generator=g)
    visual, answer, keep = torch.zeros(3, 2, 13, dtype=torch.bool).unbind(0)
    visual[:, 1:3] = True  # read as any other position
    for row, spans in enumerate((((3, 11),), ((2, 5), (7, 9), (11, 12)))):
        for begin, end in spans:
            answer[row, begin:end] = True
    keep[0], keep[1, :12] = True, True
    hidden, layers = torch.randn(2, 13, 48, generator=g), torch.randn(2, 13, 2 * 48, generator=g)
    layers[1, 12:] = 9.0  # padding is not read
    return Features(tokens, hidden, torch.full((2, 13, 48), torch.nan), visual, answer, keep, layers)


def plain_losses(plain, target, batch, loss, ids, heads, causal, first):
    """Losses of each slot, of one block after another; ``heads`` are published tensors of DSpark, or none."""
    found = [[] for _ in range(first, BLOCK)]
    for row in range(len(batch.tokens)):
        said = batch.answer[row].nonzero().flatten().tolist()
        for anchor in said:
            states = batch.layers[row, :anchor].split(48, dim=-1)
            last = int(batch.tokens[row, anchor])
            block = block_states(plain, target, states, torch.arange(anchor), last, causal)
            for slot in range(1, len(found) + 1):
                if anchor + slot not in said:
                    break
                goal = target.head(batch.hidden[row, anchor + slot - 1])[ids].softmax(-1)
                state, embed = block[first + slot - 1], None
                logits = target.head(state)[ids]
                if "markov_head.markov_w1.weight" in heads:
                    before = [*[last] * first, *batch.tokens[row, anchor : anchor + slot]]
                    embed = heads["markov_head.markov_w1.weight"][before[-1]]
                    logits = logits + markov_logits(heads, block[: first + slot], before)
                scores = logits.log_softmax(-1)
                kl, accepted = -(goal * scores).sum(), torch.minimum(goal, scores.exp()).sum()
                share = math.exp(-3 * accepted.item())
                total = kl if loss == "kl" else share * kl + (1 - share) * (1 - accepted)
                if loss == "tv":
                    total = 0.1 * kl + 0.9 * (goal - scores.exp()).abs().sum()
                found[slot - 1].append((total, confidence_loss(heads, state, embed, accepted)))
    return [torch.tensor(losses) for losses in found]


def confidence_loss(heads, state, embed, accepted):
    """Cross-entropy of the confidence head with the expected acceptance of a draft; 0 without one."""
    if "confidence_head.proj.weight" not in heads:
        return 0.0
    weight = heads["confidence_head.proj.weight"][0]
    read = state if len(weight) == WIDTH else torch.cat([state, embed])
    sure = (weight @ read + heads["confidence_head.proj.bias"][0]).sigmoid().double()
    return float(-(accepted * sure.log() + (1 - accepted) * (1 - sure).log()))


@pytest.mark.parametrize(
    ("loss", "narrow", "heads", "kind", "causal"),
    [
        ("kl", False, None, "vanilla", False),
        ("lk", True, None, "vanilla", False),
        ("lk", False, None, "vanilla", True),
        ("tv", True, None, "vanilla", True),
        ("tv", False, "markov", "vanilla", False),
        ("kl", False, "state", "gated", False),
        ("kl", False, "none", "rnn", True),
        ("kl", False, "markov", "rnn from masks", False),
    ],
)
def test_blocks_equal_those_run_alone(loss, narrow, heads, kind, causal, tmp_path):
    target, plain, batch = TransformersTarget(shared_model("llama")), reference(), random_batch()
    config, tensors = published(plain, "z-lab")
    if heads is not None:
        named = {"kind": kind.split()[0], "from_anchor": "from" not in kind}
        config, tensors = with_heads(config, tensors, confidence=heads, **named)
    config["dflash_config"]["causal_head"] = causal
    own = {name: tensor for name, tensor in tensors.items() if "_head." in name}
    shape, ours, _, _ = DFlash.convert(config, tensors, "here")
    network = load_network(DFlashNetwork, shape, ours, tmp_path)
    ids = torch.arange(0, 101, 2 if narrow else 1)
    output = DFlashObjective(anchors=99, gamma=2.0, loss=loss)(network, target, batch, ids if narrow else None)
    with torch.no_grad():
        expected = plain_losses(plain, target, batch, loss, ids, own, causal, shape.first)
    total = sum(math.exp(-k / 2.0) * losses.sum() / len(expected[0]) for k, losses in enumerate(expected))
    assert float(output.total.detach()) == pytest.approx(float(total), rel=1e-4)
    assert len(expected) == shape.drafts
    for slot, losses in enumerate(expected, start=1):
        tokens, confidences = losses.mean(0).tolist()
        assert output.metrics[f"token_{slot}"] == pytest.approx(tokens, rel=1e-4)
        assert output.metrics.get(f"confidence_{slot}", 0.0) == pytest.approx(confidences, rel=1e-3)
    gradients = torch.autograd.grad(output.total, list(network.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_of_dspark_in_bfloat16(kind, tmp_path):
    target, batch = TransformersTarget(shared_model("llama")), random_batch()
    shape, ours, _, _ = DFlash.convert(
        *with_heads(*published(reference(), "z-lab"), kind=kind, from_anchor=False), "here"
    )
    network = load_network(DFlashNetwork, shape, ours, tmp_path)
    whole = DFlashObjective(anchors=99)(network, target, batch).total.detach()
    with torch.autocast("cpu", torch.bfloat16):
        half = DFlashObjective(anchors=99)(network, target, batch).total.detach()
    torch.testing.assert_close(half, whole, rtol=0.02, atol=0.0)


def test_anchors_are_drawn_from_the_answers_without_repetition(tmp_path):
    """As many as the losses need, another draw with another seed."""
    target, batch = TransformersTarget(shared_model("llama")), random_batch()
    shape, ours, _, _ = DFlash.convert(*published(reference(), "z-lab"), "here")
    network = load_network(DFlashNetwork, shape, ours, tmp_path)
    totals = [
        float(
            DFlashObjective(anchors)(
                network, target, batch, generator=torch.Generator().manual_seed(seed)
            ).total.detach()
        )
        for anchors, seed in ((1, 0), (1, 0), (1, 5), (99, 0), (99, 5))
    ]
    assert totals[0] == totals[1]
    assert totals[0] != totals[2]
    assert totals[3] == pytest.approx(totals[4], rel=1e-5)


def test_a_batch_without_answers_has_no_loss(tmp_path):
    target, batch = TransformersTarget(shared_model("llama")), random_batch()
    batch.answer[:] = False
    shape, ours, _, _ = DFlash.convert(*published(reference(), "z-lab"), "here")
    assert float(DFlashObjective()(load_network(DFlashNetwork, shape, ours, tmp_path), target, batch).total) == 0
