"""Losses over several passes and slots equal those of running every chain separately."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.features import Features
from mmspec.vision.training.objective import HiddenStateObjective
from tests.drafting import (
    network_for,
    plain_begin,
    plain_cell,
    plain_entries,
    plain_layer,
    plain_scores,
    plain_states,
)
from tests.tiny import shared_model


def random_batch(target, lengths=(11, 9), answers=((3, 9), (2, 8)), seed=0, layers=0):
    g = torch.Generator().manual_seed(seed)
    batch, length, width = len(lengths), max(lengths), target.config.hidden_size
    tokens = torch.randint(3, 90, (batch, length), generator=g)
    embeds = target.embed(tokens).detach().clone()
    visual, answer, keep = torch.zeros(3, batch, length, dtype=torch.bool).unbind(0)
    visual[:, 1:3] = True
    embeds[visual] = torch.randn(int(visual.sum()), width, generator=g)
    for row, (begin, end) in enumerate(answers):
        answer[row, begin:end] = True
        keep[row, : lengths[row]] = True
    hidden = torch.randn(batch, length, width, generator=g)
    read = torch.randn(batch, length, layers * width, generator=g) if layers else None
    return Features(tokens, hidden, embeds, visual, answer, keep, read)


def plain_loss(goal, scores, loss):
    if loss == "kl":
        return -(goal * scores).sum(-1)
    accepted = sum(min(p, q) for p, q in zip(goal, scores.exp(), strict=True))
    share = math.exp(-3 * accepted.item())
    return share * -(goal * scores).sum(-1) + (1 - share) * (1 - accepted)


def plain_coverage(network, goal, scores, guess, carried):
    """Cross-entropy of the predicted with the true probability of the three best drafts together."""
    asked = guess if network.config.slots == 1 else carried
    logit = network.confidence(asked.detach())[0]
    true = goal[scores.topk(3).indices].sum()
    return -(true * F.logsigmoid(logit) + (1 - true) * F.logsigmoid(-logit))


def plain_metrics(network, target, batch, passes, draft_ids=None, offset=0, loss="kl"):
    """By depth, mean losses over chains, each run separately from its true states, and their weights."""
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
                scores = plain_scores(network, head, guess, carried).log_softmax(-1)
                losses = {"token": plain_loss(goal, scores, loss)}
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
    found = []
    for depth, rows in enumerate(filter(None, sums)):
        means = {name: torch.stack([row[name] for row in rows]).mean() for name in rows[0]}
        found.append((means, len(rows) / len(sums[0]) * (slots if depth >= slots else 1)))
    return found


def check(network, target, batch, passes, draft_ids=None, seed=0, loss="kl"):
    """Compares losses and gradients."""
    weights = {"hidden": 0.7, "token": 0.3, "coverage": 1.0}
    objective = HiddenStateObjective(
        passes, decay=0.5, slot_decay=0.9, hidden_weight=0.7, token_weight=0.3, noise=0.0, loss=loss, top_k=3
    )
    losses = objective(network, target, batch, draft_ids, torch.Generator().manual_seed(seed))
    slots = network.config.slots
    offset = int(torch.randint(slots, (), generator=torch.Generator().manual_seed(seed)))
    expected = plain_metrics(network, target, batch, passes, draft_ids, offset, loss)
    total, named = 0.0, {f"right_{depth + 1}" for depth in range(len(expected))}
    for depth, (means, share) in enumerate(expected):
        for name, value in means.items():
            assert losses.metrics[f"{name}_{depth + 1}"] == pytest.approx(value.item(), rel=1e-4)
            named.add(f"{name}_{depth + 1}")
        weight = 0.5 ** (depth // slots) * 0.9 ** (depth % slots)
        total = total + share * weight * sum(weights[name] * value for name, value in means.items())
    assert losses.metrics.keys() == named
    torch.testing.assert_close(losses.total, total, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad(losses.total, list(network.parameters()))
    theirs = torch.autograd.grad(total, list(network.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-3)
    return len(expected)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("ids", [None, [2, 5, 7, 30, 44]])
def test_passes_equal_chains(decoupled, ids):
    model = shared_model("llama")
    target = TransformersTarget(model)
    network = network_for(model, decoupled=decoupled)
    check(network, target, random_batch(target), 3, None if ids is None else torch.tensor(ids))


@pytest.mark.parametrize(("slots", "passes"), [(2, 3), (3, 2), (5, 1), (4, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_slots_equal_chains(slots, passes, seed):
    model = shared_model("llama")
    target = TransformersTarget(model)
    batch = random_batch(target, (13, 12), ((3, 12), (2, 9)))
    depths = check(network_for(model, slots=slots), target, batch, passes, seed=seed)
    assert slots * (passes - 1) < depths <= slots * passes


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("span", [0, 4])
def test_latents_equal_chains(slots, span):
    """Images of unequal numbers of tokens, some too short for latents, one after an answer."""
    model = shared_model("llama")
    target = TransformersTarget(model)
    batch = random_batch(target, (26, 22), ((12, 20), (9, 14)))
    g = torch.Generator().manual_seed(1)
    batch.visual[:] = False
    for row, begin, end in ((0, 1, 6), (0, 7, 9), (0, 21, 25), (1, 2, 9)):
        batch.visual[row, begin:end] = True
        batch.embeds[row, begin:end] = torch.randn(end - begin, 48, generator=g)
    batch.answer[1, 16:21] = True
    check(network_for(model, latents=2, span=span, slots=slots), target, batch, 2)
    check(network_for(model, latents=3, slots=slots, decoupled=False), target, batch, 2, torch.arange(40))


@pytest.mark.parametrize(
    ("slots", "passes", "changes"),
    [
        (1, 3, {"reads": [0, 1]}),
        (3, 2, {"reads": [0, 1], "latents": 1}),
        (3, 1, {"reads": [0, 1], "rank": 4, "head": 7}),
        (1, 3, {"norm_output": True}),
        (3, 2, {"norm_output": True}),
        (1, 2, {"confidence": True}),
        (3, 2, {"confidence": True}),
        (4, 1, {"rank": 3, "head": 7, "confidence": True, "norm_output": True}),
        (3, 2, {"hide_visual": True}),
    ],
)
@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_settings_equal_chains(slots, passes, changes, loss):
    """Layers are read, predictions normed, later slots scored by a low-rank head, coverage predicted, images hidden."""
    model = shared_model("llama")
    target = TransformersTarget(model)
    batch = random_batch(target, (13, 12), ((4, 12), (4, 9)), layers=len(changes.get("reads", ())))
    ids = torch.tensor([2, 5, 7, 30, 44, 60, 61])
    depths = check(network_for(model, slots=slots, **changes), target, batch, passes, ids, loss=loss)
    assert depths > slots * (passes - 1)


def test_glancing_replaces_wrong_predictions_by_true_states():
    """At the start all wrong predictions are replaced, so a second pass equals a first one; at the end none are."""
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch = random_batch(target)

    def run(glancing, progress):
        objective = HiddenStateObjective(passes=2, noise=0.0, glancing=glancing)
        return objective(network, target, batch, None, torch.Generator().manual_seed(0), progress).metrics

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


def test_padding_and_short_answers_change_nothing():
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch = random_batch(target, answers=((3, 9), (7, 8)))  # nothing follows the one token of the second answer
    alone = Features(**{name: None if value is None else value[:1] for name, value in vars(batch).items()})
    objective = HiddenStateObjective(passes=3, noise=0.0)
    torch.testing.assert_close(objective(network, target, batch).total, objective(network, target, alone).total)
    batch.hidden[1, 9:], batch.embeds[1, 9:] = 7.0, -7.0
    torch.testing.assert_close(objective(network, target, batch).total, objective(network, target, alone).total)
    batch.answer[:] = False
    assert objective(network, target, batch).total.item() == 0.0


@pytest.mark.parametrize("size", [0.1, 0.03])
def test_noise_is_uniform_with_its_amplitude(size, monkeypatch):
    """Noise on the first pass's states is within size * 512 / entries, as in the paper's code."""
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch, read = random_batch(target, (65, 65), ((3, 60), (2, 60))), []
    combine = network.combine
    monkeypatch.setattr(network, "combine", lambda e, hidden, v: read.append(hidden) or combine(e, hidden, v))
    HiddenStateObjective(noise=size)(network, target, batch, None, torch.Generator().manual_seed(0))
    noise = read[0] - batch.hidden[:, :-1]
    bound = size * 512 / 64
    assert 0.99 * bound < noise.max() <= bound
    assert -0.99 * bound > noise.min() >= -bound
    assert noise.mean().abs() < 0.03 * bound
    assert noise.std() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_noise_comes_from_the_generator():
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch = random_batch(target)
    draws = [
        HiddenStateObjective(noise=0.1)(network, target, batch, None, torch.Generator().manual_seed(seed)).total.item()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
