"""Drafting of MSD and FLASH entry by entry, with random networks that run over whole sequences."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mmspec.vision.drafters.msd import MSDConfig
from tests.draft_checks import check_drafts, plain_pass, whole_pass
from tests.targets import prompt_of, row_of
from tests.tiny.models import msd_network


def network_for(model, seed=0, **changes):
    """Without norm and biases, whatever the model."""
    return msd_network(model, seed, **{"input_norm": False, "qkv_bias": False, **changes})


def plain_layer(network, x, positions=None):
    """The network's guesses for one sequence of inputs, (length, hidden); positions are 0, 1, ... by default."""
    return _outputs(network, x, positions)[:, : network.config.hidden_size]


def _outputs(network, x, positions=None):
    return whole_pass(network, x, torch.arange(len(x)) if positions is None else torch.tensor(positions))


def plain_begin(network, inputs, positions=None):
    """The guess after a sequence of inputs, and the state of the first slot, (hidden,) each."""
    return network.begin(_outputs(network, inputs, positions)[-1])


def plain_cell(network, embed, carried):
    """The guess behind a token, and what is carried on, from what was carried to it."""
    carried = network.cell(embed, carried)
    return None if network.config.rank else network.guess(carried), carried


def plain_scores(network, head, state, carried):
    """Draft-vocabulary logits of a predicted state; of a carried state where the cell has an output layer."""
    return network.cell.scores(carried) if state is None else head(state)


def plain_states(network, hidden):
    """What entries take, (length, hidden), of the target's states, see ``states_of``."""
    return network.states(torch.cat([hidden[-1], *(hidden[layer] for layer in network.config.reads)], dim=-1))


def plain_entries(network, hidden, embeds, visual):
    """The layer's inputs for a sequence of entries, (length, hidden) each, and their positions."""
    c, inputs, positions = network.config, [], []
    fuse = lambda j, e: network.fc(torch.cat([e, hidden[j]]))  # noqa: E731
    if not isinstance(c, MSDConfig):
        visual = [False] * len(embeds)
    j = 0
    while j < len(embeds):
        end = j
        while end < len(embeds) and visual[end]:
            end += 1
        if end == j:
            inputs.append(fuse(j, embeds[j]))
            positions.append(j)
            j += 1
            continue
        if c.hide_visual:
            j = end
            continue
        pieces = math.ceil((end - j) / c.span) if c.span else 1
        cuts = [j + (end - j) * piece // pieces for piece in range(pieces + 1)]
        for begin, stop in pairwise(cuts):
            count = stop - begin
            spots = list(range(begin, stop))
            read, told = embeds[begin:stop], hidden[begin:stop]
            if c.latents and count > c.latents:
                spots = [begin + math.floor((place + 0.5) * count / c.latents) for place in range(c.latents)]
                weights = plain_weights(network, told)
                read, told = weights @ read, weights @ told
            apart = network.visual_fc if c.visual_states else network.fc
            plain = c.decoupled and not c.visual_states
            both = [torch.cat([e, h]) for e, h in zip(read, told, strict=True)]
            inputs += list(read) if plain else [apart(pair) for pair in both]
            positions += spots
        j = end
    return torch.stack(inputs), positions


def plain_weights(network, hidden):
    """What each latent takes of an image's entries, (latents, entries), from the target's states there."""
    width = hidden.shape[1]
    keys = hidden / (hidden.pow(2).mean(-1, keepdim=True) + torch.finfo(hidden.dtype).eps).sqrt()
    return torch.stack([(query @ keys.T / math.sqrt(width)).softmax(-1) for query in network.latents.queries])


def states_of(model, row, said, read=lambda states: states[-1]):
    """Hidden states and input embeddings of a row's prompt and answer; ``read`` combines the inputs of all
    layers and the last states, (layers + 1, length, hidden)."""
    seen = plain_pass(model, row, said)
    with torch.no_grad():
        return read(torch.stack([*seen.inputs, seen.last])), seen.embeds


@torch.no_grad()
def plain_gain(drafter, target, hidden, embeds, visual, path):
    """Path probability of drafted tokens, by running the network over the whole sequence whenever it is asked."""
    network = drafter.network
    inputs, positions = plain_entries(network, hidden[:-1], embeds[1:], visual[1:])
    (state, carried), block, gain = plain_begin(network, inputs, positions), [], 1.0
    ids = list(range(len(target.head(hidden[0])))) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    for token in path:
        log_probs = plain_scores(network, lambda state: target.head(state)[ids], state, carried).log_softmax(-1)
        if network.config.confidence:
            covered = network.confidence(state if network.config.slots == 1 else carried).sigmoid()
            best = log_probs.topk(min(drafter.top_k, len(ids))).values
            log_probs = log_probs - best.logsumexp(-1) + covered.log()
        gain *= float(log_probs[ids.index(token)].exp())
        embed = target.embed(torch.tensor(token))
        block.append(None if state is None else network.fc(torch.cat([embed, state])))
        if len(block) < network.config.slots:
            state, carried = plain_cell(network, embed, carried)
            continue
        inputs = torch.cat([inputs, torch.stack(block)])
        positions = [*positions, *range(positions[-1] + 1, positions[-1] + 1 + len(block))]
        (state, carried), block = plain_begin(network, inputs, positions), []
    return gain


def check(model, inputs, drafter, **asked):
    """Decode; every tree's every node must have the probability of the plain loop, and every output token be right."""

    def gains(target, b, said, paths):
        hidden, embeds = states_of(model, row_of(inputs, b), said, lambda states: plain_states(drafter.network, states))
        visual = torch.zeros(len(embeds), dtype=torch.bool)
        marks = target.visual(prompt_of({**inputs, "input_ids": row_of(inputs, b)["input_ids"]}))
        if marks is not None:
            visual[: marks.shape[1]] = marks[0]
        return [plain_gain(drafter, target, hidden, embeds, visual, path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)
