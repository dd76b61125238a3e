"""Losses of training objectives equal those of plain loops, which run every chain, block or head alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("accelerate")

from mmspec.drafters.checkpoint import load_network
from mmspec.drafters.dflash import DFlash, DFlashNetwork
from mmspec.drafters.eagle3 import Eagle3, Eagle3Network
from mmspec.drafters.medusa import Hydra, Medusa, MedusaNetwork
from mmspec.ssm import training as mamba
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.dflash import DFlashObjective
from mmspec.training.eagle3 import Eagle3Objective
from mmspec.training.kangaroo import KangarooObjective
from mmspec.training.medusa import MedusaObjective
from mmspec.training.objectives import LossInput
from mmspec.training.small import distillation_loss
from mmspec.training.tasks import head_weight, mask_token
from mmspec.vision.training import HiddenStateObjective
from tests import dflash, eagle3, medusa
from tests.drafting import network_for, plain_begin, plain_cell, plain_entries, plain_layer, plain_scores, plain_states
from tests.kangaroo import adapter
from tests.tiny import shared_model
from tests.tiny.models import dflash_network, kangaroo_network, mamba_network, medusa_network
from tests.training import assert_gradients, assert_losses, plain_loss, random_batch

TWO = ([(3, 9)], [(2, 5), (6, 9)])  # answers of two conversations, in one of them two
ALL = slice(None)


@pytest.fixture(scope="module")
def target():
    return TransformersTarget(shared_model("llama"))


def shaken():
    network = copy.deepcopy(shared_model("llama"))
    torch.manual_seed(3)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


def detached(output):
    return replace(output, total=output.total.detach())


# ---------------------------------------------------------------------- EAGLE-3


def eagle3_chains(plain, target, batch, passes, loss):
    """Losses of each depth, over chains that are each run alone from the target's states."""
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
                found[depth].append(plain_loss(loss, goal, logits))
    return found


def eagle3_case(target, config, layout, folder):
    """A head's published tensors, its network and draft vocabulary, and a batch."""
    tensors = eagle3.head_tensors(config, layout)
    shape, ours, draft_ids, _ = Eagle3.convert(config, tensors, "here")
    batch = random_batch(TWO, (11, 11), shape.states)
    batch.tokens[batch.visual] = 100
    batch.embeds[:] = torch.nan  # never read: image positions are placeholder tokens
    return tensors, load_network(Eagle3Network, shape, ours, folder), draft_ids, batch


@pytest.mark.parametrize(
    ("config", "layout", "loss"),
    [
        (eagle3.cut(eagle3.LLAMA3), "A", "kl"),
        (eagle3.cut(eagle3.LLAMA3, fc_norm=True, norm_output=True), "A", "lk"),
        (eagle3.cut(eagle3.GEMMA4, [0, 1], norm_before_fc=True, num_hidden_layers=2), "B", "lk"),
        (eagle3.cut(eagle3.PEAGLE, [0, 1, 2], fc_norm=True, norm_output=True, num_hidden_layers=2), "B", "kl"),
    ],
)
def test_passes_of_eagle3(config, layout, loss, target, tmp_path):
    tensors, network, draft_ids, batch = eagle3_case(target, config, layout, tmp_path)
    tensors = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in tensors.items()}
    output = Eagle3Objective(passes=4, decay=0.5, loss=loss)(network, LossInput(target, batch, draft_ids))
    losses = eagle3_chains(eagle3.PlainHead(config, tensors, target.embed), target, batch, 4, loss)
    total = assert_losses(output, {"token": losses}, partial(pow, 0.5))
    names = ["fc.weight", "norm.weight", "lm_head.weight"]
    at = "midlayer" if layout == "A" else "layers.0"
    theirs = [*names, f"{at}.hidden_norm.weight", f"{at}.self_attn.o_proj.weight", f"{at}.mlp.down_proj.weight"]
    ours = [*names, "layers.0.hidden_norm.weight", "layers.0.out.weight", "layers.0.down.weight"]
    parts = dict(network.named_parameters())
    assert_gradients(output.total, total, [parts[name] for name in ours], [tensors[name] for name in theirs])


@pytest.mark.parametrize("config", [eagle3.cut(eagle3.LLAMA3), eagle3.cut(eagle3.PEAGLE, [0, 1, 2])])
def test_chains_that_are_dropped_leave_the_losses_of_the_others(config, target, tmp_path):
    layout = "B" if "transformer_layer_config" in config else "A"
    tensors, network, draft_ids, batch = eagle3_case(target, config, layout, tmp_path)
    generator = torch.Generator().manual_seed(3)
    output = Eagle3Objective(passes=3, decay=0.5, keep=0.6)(network, LossInput(target, batch, draft_ids, generator))
    with torch.no_grad():
        plain = eagle3_chains(eagle3.PlainHead(config, tensors, target.embed), target, batch, 3, "kl")
    kept = [plain[0]]
    for depth in (2, 3):
        losses, mean = plain[depth - 1], output.metrics[f"token_{depth}"]
        subsets = (some for count in range(1, len(losses)) for some in combinations(losses, count))
        kept.append(next(some for some in subsets if float(sum(some)) / len(some) == pytest.approx(mean, rel=1e-5)))
    assert len(kept[1]) < len(plain[1])
    assert_losses(detached(output), {"token": kept}, partial(pow, 0.5))
    none = Eagle3Objective(passes=3, decay=0.5, keep=0.0)(network, LossInput(target, batch, draft_ids))
    assert_losses(detached(none), {"token": plain[:1]}, partial(pow, 0.5))


# ---------------------------------------------------------------------- DFlash


KINDS = ("full_attention", "sliding_attention")


def dflash_blocks(plain, target, batch, loss, ids, heads, causal, first):
    """Losses of each slot, of one block after another; ``heads`` are published tensors of DSpark, or none."""
    drafts = dflash.BLOCK - first
    found = {name: [[] for _ in range(drafts)] for name in ("token", "confidence", "base")}
    for row in range(len(batch.tokens)):
        said = batch.answer[row].nonzero().flatten().tolist()
        for anchor in said:
            states = batch.layers[row, :anchor].split(48, dim=-1)
            last = int(batch.tokens[row, anchor])
            block = dflash.block_states(plain, target, states, torch.arange(anchor), last, KINDS if causal else ())
            for slot in range(1, drafts + 1):
                if anchor + slot not in said:
                    break
                goal = target.head(batch.hidden[row, anchor + slot - 1])[ids].softmax(-1)
                read = block[first + slot - 1]
                logits = target.head(read)[ids]
                if "refiner_head.mix_l" in heads:
                    found["base"][slot - 1].append(plain_loss(loss, goal, logits))
                    before = batch.tokens[row, anchor - first : anchor + slot]
                    logits = logits + dflash.refined_logits(heads, block[: first + slot], before, block.mean(0))
                if "markov_head.markov_w1.weight" in heads:
                    before = [*[last] * first, *batch.tokens[row, anchor : anchor + slot]]
                    logits = logits + dflash.markov_logits(heads, block[: first + slot], before)
                    read = torch.cat([read, heads["markov_head.markov_w1.weight"][before[-1]]])
                found["token"][slot - 1].append(plain_loss(loss, goal, logits))
                if "confidence_head.proj.weight" in heads:  # cross-entropy with the expected acceptance
                    weight = heads["confidence_head.proj.weight"][0]
                    sure = weight @ read[: len(weight)] + heads["confidence_head.proj.bias"][0]
                    accepted = torch.minimum(goal, logits.softmax(-1)).sum()
                    found["confidence"][slot - 1].append(F.binary_cross_entropy_with_logits(sure, accepted))
    return {name: losses for name, losses in found.items() if losses[0]}


def dflash_case(folder, causal=False, **heads):
    """Published tensors, their network, and a batch of which one conversation ends with an answer of one token."""
    config, tensors = dflash.published(dflash.reference(), "z-lab")
    if heads:
        config, tensors = dflash.with_heads(config, tensors, **heads)
    config["dflash_config"]["causal_head"] = causal
    shape, ours, _, _ = DFlash.convert(config, tensors, "here")
    batch = random_batch(([(3, 11)], [(2, 5), (7, 9), (11, 12)]), (13, 12), layers=2)
    batch.layers = batch.layers.nan_to_num(9.0)  # attention's mask does not hide NaN
    batch.embeds[:] = torch.nan
    return tensors, load_network(DFlashNetwork, shape, ours, folder), batch


@pytest.mark.parametrize(
    ("loss", "heads", "causal"),
    [
        ("kl", {}, False),
        ("lk", {}, True),
        ("tv", {"kind": "vanilla", "confidence": "markov"}, False),
        ("kl", {"kind": "gated", "confidence": "state"}, False),
        ("kl", {"kind": "rnn", "confidence": "none"}, True),
        ("kl", {"kind": "rnn", "confidence": "markov", "from_anchor": False}, False),
        ("tv", {"kind": "xpress", "confidence": "none", "from_anchor": False}, False),
        ("kl", {"kind": "xpress", "confidence": "none"}, True),
    ],
)
def test_blocks_of_dflash(loss, heads, causal, target, tmp_path):
    tensors, network, batch = dflash_case(tmp_path, causal, **({"from_anchor": True} | heads if heads else {}))
    narrow = torch.arange(0, 101, 2) if loss == "lk" else None
    output = DFlashObjective(anchors=99, gamma=2.0, loss=loss)(network, LossInput(target, batch, narrow))
    own = {name: tensor for name, tensor in tensors.items() if "_head." in name}
    with torch.no_grad():
        ids, first = ALL if narrow is None else narrow, network.config.first
        found = dflash_blocks(dflash.reference(), target, batch, loss, ids, own, causal, first)
    assert len(found["token"]) == network.config.drafts
    assert_losses(detached(output), found, lambda slot: math.exp(-slot / 2.0), {"base": 0.6})
    gradients = torch.autograd.grad(output.total, list(network.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_of_dspark_in_bfloat16(kind, target, tmp_path):
    _, network, batch = dflash_case(tmp_path, kind=kind, from_anchor=False)
    whole = DFlashObjective(anchors=99)(network, LossInput(target, batch)).total.detach()
    with torch.autocast("cpu", torch.bfloat16):
        half = DFlashObjective(anchors=99)(network, LossInput(target, batch)).total.detach()
    torch.testing.assert_close(half, whole, rtol=0.02, atol=0.0)


def test_anchors_are_drawn_from_the_answers_without_repetition(target, tmp_path):
    _, network, batch = dflash_case(tmp_path)

    def drawn(anchors, seed):
        generator = torch.Generator().manual_seed(seed)
        return float(
            DFlashObjective(anchors=anchors)(network, LossInput(target, batch, generator=generator)).total.detach()
        )

    assert drawn(1, 0) == drawn(1, 0) != drawn(1, 5)
    assert drawn(99, 0) == pytest.approx(drawn(99, 5), rel=1e-5)


# ---------------------------------------------------------------------- Medusa and Hydra


@torch.no_grad()
def medusa_heads(layout, tensors, target, batch, loss, ids):
    """Losses of each head, at one token after another."""
    found = [[] for _ in range(medusa.HEADS)]
    for row, states in enumerate(batch.hidden):
        said = batch.answer[row].nonzero().flatten().tolist()
        if layout == "hydra-prefix":
            states = medusa.prefix()(inputs_embeds=states[None]).last_hidden_state[0]
        for root in said:
            for head in range(medusa.HEADS):
                if root + head + 1 not in said:
                    break
                embeds = batch.embeds[row, root : root + head + 1]
                scores = medusa.logits(layout, tensors, head, states[root - 1], embeds, target.head)
                goal = target.head(batch.hidden[row, root + head])[ids].softmax(-1)
                found[head].append(plain_loss(loss, goal, scores))
    return found


@pytest.mark.parametrize(
    ("layout", "loss"),
    [("medusa", "kl"), ("tgi", "lk"), ("vllm-narrow", "kl"), ("hydra", "lk"), ("hydra-prefix", "kl")],
)
def test_heads_of_medusa_and_hydra(layout, loss, target, tmp_path):
    config, tensors = medusa.published(layout)
    batch = random_batch(TWO, (11, 11))
    shape, ours, ids, _ = (Hydra if layout.startswith("hydra") else Medusa).convert(config, tensors, str(tmp_path))
    network = load_network(MedusaNetwork, shape, ours, tmp_path)
    if layout == "hydra-prefix":
        network.take_shape(taken := Hydra.shape_of(medusa_network(target.model, prefix=True)))
        assert network.config.layer == network.layers[0].shape == taken
    assert layout != "vllm-narrow" or torch.equal(ids, medusa.MAP)
    output = MedusaObjective(decay=0.7, loss=loss)(network, LossInput(target, batch, ids))
    expected = medusa_heads(layout, tensors, target, batch, loss, ALL if ids is None else ids)
    assert_losses(detached(output), {"token": expected}, partial(pow, 0.7))
    gradients = torch.autograd.grad(output.total, list(network.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    "changes", [{"head": 101}, {"grounded": True, "layers": 2}, {"grounded": True, "prefix": True}]
)
def test_heads_start_as_the_targets_output_layer(changes, target):
    network = medusa_network(target.model, **changes)
    network.start(head_weight(target, None))
    state, rotation = torch.randn(1, 5, 48), (torch.ones(5, 1, 1), torch.zeros(5, 1, 1))
    assert torch.equal(network(state, rotation, lambda q, k, v: q), state)
    for head, chain in enumerate(network.heads):
        read = torch.cat([state, torch.randn(1, 5, 48 * (head + 1))], dim=-1) if network.config.grounded else state
        torch.testing.assert_close(network.scores(head, [chain(read)], target.head), target.head(state))


# ---------------------------------------------------------------------- MSD and FLASH


WEIGHTS = {"hidden": 0.7, "token": 0.3}
IDS = torch.tensor([2, 5, 7, 30, 44, 60, 61])


def dense(answers, lengths, layers=0):
    """A batch whose padding is finite: attention's mask does not hide NaN."""
    batch = random_batch(answers, lengths, layers)
    parts = {name: getattr(batch, name) for name in ("hidden", "embeds", "layers")}
    return replace(batch, **{name: None if x is None else x.nan_to_num(9.0) for name, x in parts.items()})


def plain_coverage(network, goal, scores, guess, carried):
    """Cross-entropy of the predicted with the true probability of the three best drafts together."""
    asked = guess if network.config.slots == 1 else carried
    logit = network.confidence(asked.detach())[0]
    true = goal[scores.topk(3).indices].sum()
    return -(true * F.logsigmoid(logit) + (1 - true) * F.logsigmoid(-logit))


def plain_chains(network, target, batch, passes, draft_ids, offset, loss):
    """Losses by name and depth, over chains that are each run alone from their true states."""
    slots = network.config.slots
    sums = [[] for _ in range(passes * slots)]
    head = target.head if draft_ids is None else lambda h: target.head(h)[..., draft_ids]
    for row in range(batch.tokens.shape[0]):
        e, h, visual = batch.embeds[row], batch.hidden[row], batch.visual[row]
        said = batch.answer[row].nonzero().flatten().tolist()
        read = () if batch.layers is None else batch.layers[row].split(h.shape[1], dim=-1)
        taken = plain_states(network, torch.stack([*read, h]))
        true, at = plain_entries(network, taken[:-1], e[1:], visual[1:])
        starts = [start for start in said[:-1] if start + 1 in said]
        for number, start in enumerate(starts):  # the chain's first entry consumes this token
            inputs, positions = true[: at.index(start - 1) + 1], at[: at.index(start - 1) + 1]
            (guess, carried), block = plain_begin(network, inputs, positions), []
            for depth in range(passes * slots):
                consumed = start + depth
                followed = depth < slots or number % slots == offset
                if consumed not in said or consumed + 1 not in said or not followed:
                    break
                goal = head(h[consumed]).softmax(-1)
                scores = plain_scores(network, head, guess, carried)
                losses = {"token": plain_loss(loss, goal, scores)}
                if guess is not None:
                    losses["hidden"] = F.smooth_l1_loss(guess, h[consumed])
                if network.config.confidence:
                    losses["coverage"] = plain_coverage(network, goal, scores, guess, carried)
                sums[depth].append(losses)
                if consumed + 1 == len(e) or depth + 1 == passes * slots:
                    break
                block.append(None if guess is None else network.fc(torch.cat([e[consumed + 1], guess])))
                if len(block) < slots:
                    guess, carried = plain_cell(network, e[consumed + 1], carried)
                    continue
                inputs = torch.cat([inputs, torch.stack(block)])
                positions = [*positions, *range(positions[-1] + 1, positions[-1] + 1 + slots)]
                (guess, carried), block = plain_begin(network, inputs, positions), []
    return {name: [[row[name] for row in rows if name in row] for rows in sums if rows] for name in sums[0][0]}


def check_chains(network, target, batch, passes, draft_ids=None, seed=0, loss="kl"):
    objective = HiddenStateObjective(
        passes=passes, decay=0.5, slot_decay=0.9, hidden_weight=0.7, token_weight=0.3, noise=0.0, loss=loss, top_k=3
    )
    output = objective(network, LossInput(target, batch, draft_ids, torch.Generator().manual_seed(seed)))
    slots = network.config.slots
    offset = int(torch.randint(slots, (), generator=torch.Generator().manual_seed(seed)))
    found = plain_chains(network, target, batch, passes, draft_ids, offset, loss)
    found = {name: [rows for rows in depths if rows] for name, depths in found.items()}

    def decay(depth):
        return 0.5 ** (depth // slots) * 0.9 ** (depth % slots) * (slots if depth >= slots else 1)

    total = assert_losses(output, found, decay, WEIGHTS)
    assert_gradients(output.total, total, list(network.parameters()))
    return len(found["token"])


@pytest.mark.parametrize(
    ("slots", "passes", "loss", "ids", "changes"),
    [
        (1, 3, "kl", None, {}),
        (1, 3, "kl", IDS, {"decoupled": False}),
        (2, 3, "kl", None, {}),
        (3, 2, "kl", None, {}),
        (5, 1, "kl", None, {}),
        (4, 2, "kl", None, {}),
        (1, 3, "kl", IDS, {"reads": [0, 1]}),
        (3, 2, "lk", IDS, {"reads": [0, 1], "latents": 1}),
        (3, 1, "kl", IDS, {"reads": [0, 1], "rank": 4, "head": 7}),
        (1, 3, "lk", IDS, {"norm_output": True}),
        (1, 2, "kl", IDS, {"confidence": True}),
        (3, 2, "lk", IDS, {"confidence": True}),
        (4, 1, "lk", IDS, {"rank": 3, "head": 7, "confidence": True, "norm_output": True}),
        (3, 2, "kl", IDS, {"hide_visual": True, "norm_output": True}),
    ],
)
def test_passes_equal_chains(slots, passes, loss, ids, changes, target):
    """Layers are read, predictions normed, later slots scored by a low-rank head, coverage predicted, images hidden."""
    first = 4 if "hide_visual" in changes else 2  # the image is the second and third token
    batch = dense(([(4, 12)], [(first, 9), (10, 11)]), (13, 12), len(changes.get("reads", ())))
    network = network_for(target.model, slots=slots, **changes)
    depths = check_chains(network, target, batch, passes, ids, seed=slots % 2, loss=loss)
    assert slots * (passes - 1) < depths <= slots * passes


@pytest.mark.parametrize(("slots", "changes"), [(1, {"span": 4}), (2, {}), (2, {"decoupled": False, "latents": 3})])
def test_latents_equal_chains(slots, changes, target):
    """Images of unequal numbers of tokens, some too short for latents, one after an answer."""
    batch = dense(([(12, 20)], [(9, 14), (16, 21)]), (26, 22))
    batch.visual[:] = False
    for row, begin, end in ((0, 1, 6), (0, 7, 9), (0, 21, 25), (1, 2, 9)):
        batch.visual[row, begin:end] = True
    network = network_for(target.model, slots=slots, **{"latents": 2, **changes})
    check_chains(network, target, batch, 2, IDS if changes else None)


def test_noise_is_uniform_and_less_in_longer_sequences(target):
    network, batch = network_for(target.model), dense(([(3, 9)], [(2, 8)]), (11, 9))
    objective, losses = HiddenStateObjective(passes=1, noise=0.01), []
    output = objective(network, LossInput(target, batch, None, torch.Generator().manual_seed(0)))
    drawn = torch.rand(batch.hidden[:, :-1].shape, generator=torch.Generator().manual_seed(0))
    noisy = batch.hidden[:, :-1] + 0.01 * 512 / 10 * (2 * drawn - 1)
    for row, said in enumerate(batch.answer):
        inputs, _ = plain_entries(network, noisy[row], batch.embeds[row, 1:], batch.visual[row, 1:])
        guesses = plain_layer(network, inputs)
        there = [j for j in range(len(said) - 2) if said[j + 1 : j + 3].all()]
        losses += [F.smooth_l1_loss(guesses[j], batch.hidden[row, j + 1]) for j in there]
    assert output.metrics["hidden_1"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_glancing_replaces_wrong_predictions_by_true_states(target):
    """At the start all wrong predictions are replaced, so a second pass equals a first one; at the end none are."""
    network, batch = network_for(target.model), dense(([(3, 9)], [(2, 8)]), (11, 9))

    def run(glancing, progress):
        objective = HiddenStateObjective(passes=2, noise=0.0, glancing=glancing)
        return objective(network, LossInput(target, batch, None, torch.Generator().manual_seed(0), progress)).metrics

    assert run(0.0, 0.0) == run(1.0, 1.0)
    shown = run(1.0, 0.0)
    assert shown["right_1"] == 0.0  # no guess of this network is right
    losses = []
    for row, said in enumerate(batch.answer):
        inputs, _ = plain_entries(network, batch.hidden[row, :-1], batch.embeds[row, 1:], batch.visual[row, 1:])
        guesses = plain_layer(network, inputs)
        there = [j for j in range(1, len(said) - 2) if said[j : j + 3].all()]
        losses += [F.smooth_l1_loss(guesses[j], batch.hidden[row, j + 1]) for j in there]
    assert shown["hidden_2"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    half = [run(0.5, 0.0)["hidden_2"], run(1.0, 0.5)["hidden_2"]]
    assert half[0] == half[1] != shown["hidden_2"]


def test_noise_is_uniform_with_its_amplitude_and_comes_from_the_generator(target, monkeypatch):
    """Noise on the first pass's states is within size * 512 / entries, as in the paper's code."""
    network, batch, read = network_for(target.model), dense(([(3, 60)], [(2, 60)]), (65, 65)), []
    combine = network.combine
    monkeypatch.setattr(network, "combine", lambda e, hidden, v: read.append(hidden) or combine(e, hidden, v))
    for size, seed in ((0.1, 0), (0.1, 0), (0.1, 1), (0.03, 0)):
        HiddenStateObjective(noise=size)(network, LossInput(target, batch, None, torch.Generator().manual_seed(seed)))
    first, same, other, small = (states - batch.hidden[:, :-1] for states in read[:: HiddenStateObjective().passes])
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    for size, noise in ((0.1, first), (0.03, small)):
        bound = size * 512 / 64
        assert 0.99 * bound < noise.max() <= bound
        assert -0.99 * bound > noise.min() >= -bound
        assert noise.mean().abs() < 0.03 * bound
        assert noise.std() == pytest.approx(bound / 3**0.5, rel=0.03)


# ---------------------------------------------------------------------- next tokens: Kangaroo, small models, Mamba


def kangaroo_logits(target, network, batch, row, at):
    """Of transformers' layer with the network's weights, over the states of the exit layer."""
    ours = network.state_dict()
    tensors = dict(zip("qkv", ours["layers.0.qkv.weight"].split([48, 24, 24]), strict=True))
    tensors["o"] = ours["layers.0.out.weight"]
    tensors = {f"layers.0.self_attn.{part}_proj.weight": tensor for part, tensor in tensors.items()}
    norms = {"layers.0.input_layernorm.weight": ours["layers.0.input_norm.weight"], "norm.weight": ours["norm.weight"]}
    read = batch.layers[row : row + 1, : at + 1]
    return target.head(adapter(tensors | norms)(inputs_embeds=read, use_cache=False).last_hidden_state[0, -1])


def small_logits(target, network, batch, row, at):
    read = batch.tokens[row, : at + 1][~batch.visual[row, : at + 1]]
    return network(input_ids=read[None]).logits[0, -1]


def mamba_logits(target, network, batch, row, at):
    hidden = network(batch.tokens[row : row + 1, : at + 1])[0][0, -1]
    return network.embed.weight @ hidden


NEXT = {
    "kangaroo": (lambda loss: KangarooObjective(loss), kangaroo_network, kangaroo_logits),
    "small": (lambda loss: partial(distillation_loss, loss), lambda model: shaken(), small_logits),
    "mamba": (lambda loss: partial(mamba.distillation_loss, loss), lambda model: mamba_network(), mamba_logits),
}


@pytest.mark.parametrize(
    ("kind", "loss", "ids"),
    [
        ("kangaroo", "kl", None),
        ("kangaroo", "lk", torch.arange(0, 101, 3)),
        ("small", "kl", None),
        ("small", "lk", None),
        ("mamba", "kl", None),
        ("mamba", "tv", torch.tensor([3, 7, 50, 51, 99])),
    ],
)
def test_next_tokens(kind, loss, ids, target):
    """Padding is NaN, and rows have answers of several tokens, of one, and of several spans."""
    make, network_of, logits_of = NEXT[kind]
    network = network_of(target.model)
    batch = random_batch(([(3, 6), (8, 9)], [(4, 5)], [(3, 5), (7, 12)]), (9, 5, 12), layers=1)
    if kind == "kangaroo":
        batch.layers = batch.layers.nan_to_num(9.0)  # the layers' attention does not know of padding
    if kind == "small":
        batch.tokens[batch.visual] = 5000  # images are left out
    places = [(0, 3), (0, 4), (2, 3), *((2, at) for at in (7, 8, 9, 10))]
    chosen, losses, right = ALL if ids is None else ids, [], 0
    for row, at in places:
        logits = logits_of(target, network, batch, row, at)[chosen]
        goal = target.head(batch.hidden[row, at])[chosen].softmax(-1).detach()
        losses.append(plain_loss(loss, goal, logits))
        right += int(logits.argmax() == goal.argmax())
    output = make(loss)(network, LossInput(target, batch, ids))
    total = assert_losses(output, {"token": [losses]}, lambda depth: 1.0)
    assert output.metrics["right_1"] == pytest.approx(right / len(places))
    if kind == "kangaroo":  # the loop's weights are copies
        assert all(bool(each.any()) for each in torch.autograd.grad(output.total, list(network.parameters())))
    else:
        assert_gradients(output.total, total, list(network.parameters()))


SILENT = {
    "eagle3": (Eagle3Objective(), lambda model: Eagle3Network(Eagle3.convert(*eagle3_head(), "here")[0])),
    "dflash": (DFlashObjective(), dflash_network),
    "medusa": (MedusaObjective(), medusa_network),
    **{kind: (make("kl"), network_of) for kind, (make, network_of, _) in NEXT.items()},
    "msd": (HiddenStateObjective(), network_for),
}


def eagle3_head():
    config = eagle3.cut(eagle3.LLAMA3)
    return config, eagle3.head_tensors(config)


@pytest.mark.parametrize("kind", SILENT)
def test_a_batch_without_answers_has_no_loss(kind, target):
    objective, network_of = SILENT[kind]
    network, batch = network_of(target.model), random_batch(([(2, 3)], []), (4, 4), layers=3)
    output = objective(network, LossInput(target, batch))
    assert float(output.total.detach()) == 0.0
    assert not any(output.metrics.values())


@pytest.mark.parametrize(
    ("named", "expected"), [((7, 3, 1), 7), ((None, 3, 1), 3), ((101, 3, 1), 3), ((101, 200, None), 100)]
)
def test_a_mask_token_is_one_that_the_embedding_has(named, expected):
    """A tokenizer's own first; tokens beyond the vocabulary are left out."""
    target = TransformersTarget(shared_model("llama"))
    tokenizer = SimpleNamespace(**dict(zip(("mask_token_id", "pad_token_id", "unk_token_id"), named, strict=True)))
    pipe: Any = SimpleNamespace(target=target, processor=SimpleNamespace(tokenizer=tokenizer))
    assert mask_token(pipe) == expected
