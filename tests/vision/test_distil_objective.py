"""The losses of several self-fed passes against running every chain by itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmspec.transformers_target import TransformersTarget
from tests.drafting import network_for, plain_layer
from tests.tiny import shared_model
from vision.distil.features import Features
from vision.distil.objective import Objective


def random_batch(target, lengths=(11, 9), answers=((3, 9), (2, 8)), seed=0):
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
    return Features(tokens, torch.randn(batch, length, width, generator=g), embeds, visual, answer, keep)


def plain_figures(network, target, batch, passes, draft_ids=None):
    """Per pass, mean losses over entries, each from a chain that is run from the true states on."""
    sums = [[] for _ in range(passes)]
    head = target.head if draft_ids is None else lambda h: target.head(h)[..., draft_ids]
    for row in range(batch.tokens.shape[0]):
        e, h, visual = batch.embeds[row], batch.hidden[row], batch.visual[row]
        said = batch.answer[row].nonzero().flatten().tolist()
        true = [
            e[j + 1] if visual[j + 1] else network.fc(torch.cat([e[j + 1], h[j]]))
            for j in range(batch.tokens.shape[1] - 1)
        ]
        for start in said[:-1]:  # the chain's first entry consumes this token
            inputs = true[:start]
            for number in range(passes):
                consumed = start + number
                if consumed not in said or consumed + 1 not in said:
                    break
                guess = plain_layer(network, torch.stack(inputs))[-1]
                goal, scores = head(h[consumed]).softmax(-1), head(guess).log_softmax(-1)
                sums[number].append((F.smooth_l1_loss(guess, h[consumed]), -(goal * scores).sum()))
                if consumed + 1 < len(e):
                    inputs = [*inputs, network.fc(torch.cat([e[consumed + 1], guess]))]
    means = [tuple(torch.stack(column).mean() for column in zip(*rows, strict=True)) for rows in sums]
    return [(*pair, len(rows) / len(sums[0])) for pair, rows in zip(means, sums, strict=True)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("ids", [None, [2, 5, 7, 30, 44]])
def test_passes_equal_chains(decoupled, ids):
    model = shared_model("llama")
    target = TransformersTarget(model)
    network = network_for(model)
    if decoupled:
        batch = random_batch(target)
    else:
        network = network_for(model, decoupled=False)
        batch = random_batch(target)
        batch.visual = torch.zeros_like(batch.visual)
    draft_ids = None if ids is None else torch.tensor(ids)
    losses = Objective(passes=3, decay=0.5, hidden_weight=0.7, token_weight=0.3, noise=0.0)(
        network, target, batch, draft_ids
    )
    expected = plain_figures(network, target, batch, 3, draft_ids)
    total = 0.0
    for number, (hidden, token, share) in enumerate(expected):
        assert losses.figures[f"hidden_{number + 1}"] == pytest.approx(hidden.item(), rel=1e-4)
        assert losses.figures[f"token_{number + 1}"] == pytest.approx(token.item(), rel=1e-4)
        total = total + share * 0.5**number * (0.7 * hidden + 0.3 * token)
    torch.testing.assert_close(losses.total, total, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad(losses.total, list(network.parameters()))
    theirs = torch.autograd.grad(total, list(network.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-3)


def test_padding_and_short_answers_change_nothing():
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch = random_batch(target, answers=((3, 9), (7, 8)))  # nothing follows the one token of the second answer
    alone = Features(**{name: value[:1] for name, value in vars(batch).items()})
    objective = Objective(passes=3, noise=0.0)
    torch.testing.assert_close(objective(network, target, batch).total, objective(network, target, alone).total)
    batch.hidden[1, 9:], batch.embeds[1, 9:] = 7.0, -7.0
    torch.testing.assert_close(objective(network, target, batch).total, objective(network, target, alone).total)
    batch.answer[:] = False
    assert objective(network, target, batch).total.item() == 0.0


def test_noise_is_the_generators():
    model = shared_model("llama")
    target, network = TransformersTarget(model), network_for(model)
    batch = random_batch(target)
    draws = [
        Objective(noise=0.1)(network, target, batch, None, torch.Generator().manual_seed(seed)).total.item()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
