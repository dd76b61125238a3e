"""The network of MSD and FLASH by hand, with random weights, and drafting as plain loops say it."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mmspec.vision.drafters.msd import MSDConfig
from tests.draft_checks import check_drafts
from tests.targets import prompt_of, row_of
from tests.tiny.models import msd_network


def network_for(model, seed=0, **changes):
    """Without norm and biases, whatever the model."""
    return msd_network(model, seed, **{"input_norm": False, "qkv_bias": False, **changes})


def plain_layer(network, x, positions=None):
    """The network's guesses for one sequence of inputs, (length, hidden); positions are 0, 1, ... by default."""
    return plain_output(network, x, positions)[0]


def plain_output(network, x, positions=None):
    """Guesses, and what the layer's MLP adds to, (length, hidden) each, head by head."""
    c, state = network.config, dict(network.named_parameters())
    norm = lambda y, w: plain_norm(y, w, c.norm_eps)  # noqa: E731
    at = torch.arange(len(x)) if positions is None else torch.tensor(positions)
    y = norm(x, state["input_norm.weight"]) if c.input_norm else x
    qkv = y @ state["qkv.weight"].T + state.get("qkv.bias", 0.0)
    parts = qkv.split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in parts)

    def turn(z):
        half = c.head_dim // 2
        spin = at[:, None] * c.rope_theta ** (-torch.arange(half) / half)
        turned = torch.complex(z[..., :half], z[..., half:]) * torch.polar(torch.ones_like(spin), spin)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    q, k = turn(q), turn(k)
    heads = []
    for head in range(c.heads):
        own = head * c.kv_heads // c.heads
        scores = q[:, head] @ k[:, own].T / math.sqrt(c.head_dim)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, own])
    x = x + torch.cat(heads, dim=-1) @ state["out.weight"].T
    gate, up = (norm(x, state["post_norm.weight"]) @ state["gate_up.weight"].T).split(c.mlp, dim=-1)
    return x + (gate * gate.sigmoid() * up) @ state["down.weight"].T, x


def plain_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_begin(network, inputs, positions=None):
    """The guess behind a sequence of inputs, and what the first slot carries, (hidden,) each."""
    raw, middle = (part[-1] for part in plain_output(network, inputs, positions))
    guess = plain_guess(network, raw)
    if network.config.slots == 1:
        return guess, None
    w = dict(network.cell.named_parameters())
    return guess, plain_centred(network, w["first.weight"] @ torch.cat([raw, middle]) + w["first.bias"])


def plain_cell(network, embed, carried):
    """The guess behind a token, and what is carried on, from what was carried to it."""
    w = dict(network.cell.named_parameters())
    read = w["into.weight"] @ torch.cat([embed, carried]) + w["into.bias"]
    carried = plain_centred(network, carried + w["out.weight"] @ (read * read.sigmoid()))
    if network.config.rank:
        return None, carried
    return plain_guess(network, w["guess.weight"] @ carried + w["guess.bias"]), carried


def plain_guess(network, raw):
    """A predicted state, normed if the network norms them."""
    return plain_norm(raw, network.norm.weight, network.config.norm_eps) if network.config.norm_output else raw


def plain_scores(network, head, state, carried):
    """Draft-vocabulary logits of a predicted state; of a carried state where the cell has an output layer."""
    if state is not None:
        return head(state)
    w = dict(network.cell.named_parameters())
    return w["head.weight"] @ (w["narrow.weight"] @ carried) + w["head.bias"]


def plain_states(network, hidden):
    """What entries take, (length, hidden), of the target's states, see ``states_of``."""
    last, w, eps = hidden[-1], dict(network.named_parameters()), network.config.norm_eps
    found = [plain_norm(hidden[n], w[f"read_norms.{i}.weight"], eps) for i, n in enumerate(network.config.reads)]
    return last + torch.cat(found, dim=-1) @ w["read.weight"].T if found else last


def plain_centred(network, x):
    w = network.cell.norm
    return (x - x.mean()) / (x.var(unbiased=False) + network.config.norm_eps).sqrt() * w.weight + w.bias


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
    """Hidden states and input embeddings of a row's prompt and what was said, by the plain model without a cache;
    ``read`` combines those before the first and after each layer, (layers + 1, length, hidden)."""
    extended = dict(row)
    extended["input_ids"] = torch.cat([row["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
    if "mm_token_type_ids" in row:
        extended["mm_token_type_ids"] = torch.nn.functional.pad(row["mm_token_type_ids"], (0, len(said)))
    seen = {}
    handle = model.get_decoder().register_forward_pre_hook(lambda _, a, kw: seen.update(kw), with_kwargs=True)
    with torch.no_grad():
        states = model(**extended, use_cache=False, output_hidden_states=True).hidden_states
        hidden = read(torch.stack([state[0] for state in states]))
    handle.remove()
    embeds = seen.get("inputs_embeds")
    return hidden, model.get_input_embeddings()(extended["input_ids"])[0] if embeds is None else embeds[0]


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
            w = dict(network.confidence.named_parameters())
            asked = state if network.config.slots == 1 else carried
            covered = (w["weight"] @ asked + w["bias"]).sigmoid()
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
    rows = [row_of(inputs, b) for b in range(inputs["input_ids"].shape[0])]

    def gains(target, b, said, paths):
        hidden, embeds = states_of(model, rows[b], said, lambda states: plain_states(drafter.network, states))
        visual = torch.zeros(len(embeds), dtype=torch.bool)
        marks = target.visual(prompt_of({**inputs, "input_ids": rows[b]["input_ids"]}))
        if marks is not None:
            visual[: marks.shape[1]] = marks[0]
        return [plain_gain(drafter, target, hidden, embeds, visual, path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)
