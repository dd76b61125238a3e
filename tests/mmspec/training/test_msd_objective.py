"""Losses of MSD and FLASH over several passes and slots equal those of running every chain separately."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("accelerate")

from mmspec.targets.transformers_target import TransformersTarget
from mmspec.vision.training import HiddenStateObjective
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
from tests.training import assert_gradients, assert_losses, plain_loss, random_batch

WEIGHTS = {"hidden": 0.7, "token": 0.3}
IDS = torch.tensor([2, 5, 7, 30, 44, 60, 61])


@pytest.fixture(scope="module")
def target():
    return TransformersTarget(shared_model("llama"))


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


def check(network, target, batch, passes, draft_ids=None, seed=0, loss="kl"):
    """Compares losses and gradients; returns the number of depths."""
    objective = HiddenStateObjective(
        passes, decay=0.5, slot_decay=0.9, hidden_weight=0.7, token_weight=0.3, noise=0.0, loss=loss, top_k=3
    )
    output = objective(network, target, batch, draft_ids, torch.Generator().manual_seed(seed))
    slots = network.config.slots
    offset = int(torch.randint(slots, (), generator=torch.Generator().manual_seed(seed)))
    found = plain_chains(network, target, batch, passes, draft_ids, offset, loss)
    found = {name: [rows for rows in depths if rows] for name, depths in found.items()}

    def decay(depth):
        """A later pass continues one chain in ``slots``."""
        return 0.5 ** (depth // slots) * 0.9 ** (depth % slots) * (slots if depth >= slots else 1)

    total = assert_losses(output, found, decay, WEIGHTS)
    assert_gradients(output.total, total, list(network.parameters()))
    return len(found["token"])


@pytest.mark.parametrize(("decoupled", "ids"), [(True, None), (False, IDS)])
def test_passes_equal_chains(decoupled, ids, target):
    batch = dense(([(3, 9), (10, 11)], [(2, 8)]), (11, 9))
    check(network_for(target.model, decoupled=decoupled), target, batch, 3, ids)


@pytest.mark.parametrize(("slots", "passes", "seed"), [(2, 3, 0), (3, 2, 1), (5, 1, 0), (4, 2, 1)])
def test_slots_equal_chains(slots, passes, seed, target):
    batch = dense(([(3, 12)], [(2, 9)]), (13, 12))
    depths = check(network_for(target.model, slots=slots), target, batch, passes, seed=seed)
    assert slots * (passes - 1) < depths <= slots * passes


@pytest.mark.parametrize(("slots", "changes"), [(1, {"span": 4}), (2, {}), (2, {"decoupled": False, "latents": 3})])
def test_latents_equal_chains(slots, changes, target):
    """Images of unequal numbers of tokens, some too short for latents, one after an answer."""
    batch = dense(([(12, 20)], [(9, 14), (16, 21)]), (26, 22))
    batch.visual[:] = False
    for row, begin, end in ((0, 1, 6), (0, 7, 9), (0, 21, 25), (1, 2, 9)):
        batch.visual[row, begin:end] = True
    network = network_for(target.model, slots=slots, **{"latents": 2, **changes})
    check(network, target, batch, 2, IDS if changes else None)


@pytest.mark.parametrize(
    ("slots", "passes", "loss", "changes"),
    [
        (1, 3, "kl", {"reads": [0, 1]}),
        (3, 2, "lk", {"reads": [0, 1], "latents": 1}),
        (3, 1, "kl", {"reads": [0, 1], "rank": 4, "head": 7}),
        (1, 3, "lk", {"norm_output": True}),
        (1, 2, "kl", {"confidence": True}),
        (3, 2, "lk", {"confidence": True}),
        (4, 1, "lk", {"rank": 3, "head": 7, "confidence": True, "norm_output": True}),
        (3, 2, "kl", {"hide_visual": True, "norm_output": True}),
    ],
)
def test_settings_equal_chains(slots, passes, loss, changes, target):
    """Layers are read, predictions normed, later slots scored by a low-rank head, coverage predicted, images hidden."""
    batch = dense(([(4, 12)], [(4, 9)]), (13, 12), len(changes.get("reads", ())))
    network = network_for(target.model, slots=slots, **changes)
    assert check(network, target, batch, passes, IDS, loss=loss) > slots * (passes - 1)


def test_glancing_replaces_wrong_predictions_by_true_states(target):
    """At the start all wrong predictions are replaced, so a second pass equals a first one; at the end none are."""
    network, batch = network_for(target.model), dense(([(3, 9)], [(2, 8)]), (11, 9))

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


def test_noise_is_uniform_with_its_amplitude_and_comes_from_the_generator(target, monkeypatch):
    """Noise on the first pass's states is within size * 512 / entries, as in the paper's code."""
    network, batch, read = network_for(target.model), dense(([(3, 60)], [(2, 60)]), (65, 65)), []
    combine = network.combine
    monkeypatch.setattr(network, "combine", lambda e, hidden, v: read.append(hidden) or combine(e, hidden, v))
    for size, seed in ((0.1, 0), (0.1, 0), (0.1, 1), (0.03, 0)):
        HiddenStateObjective(noise=size)(network, target, batch, None, torch.Generator().manual_seed(seed))
    first, same, other, small = (states - batch.hidden[:, :-1] for states in read[:: HiddenStateObjective().passes])
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    for size, noise in ((0.1, first), (0.03, small)):
        bound = size * 512 / 64
        assert 0.99 * bound < noise.max() <= bound
        assert -0.99 * bound > noise.min() >= -bound
        assert noise.mean().abs() < 0.03 * bound
        assert noise.std() == pytest.approx(bound / 3**0.5, rel=0.03)
