"""Checks of a drafter: the probabilities of its nodes, and that its trees change no token.

References run without a cache: ``plain_pass`` the target, ``whole_pass`` a drafter's network, over a sequence at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from mmspec import SamplingParams, plugins
from mmspec.core.plan import StepPlan
from mmspec.drafters.layer import Rotary, rotary_frequencies, rotary_of
from mmspec.drafters.spec import RotaryShape
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.sampler import Sampler
from tests.decoding import decode
from tests.targets import prompt_of
from tests.tiny import root_path, valid_nodes


class Pass(NamedTuple):
    """Output of a model for one row.

    Attributes:
        embeds: input embeddings, (length, hidden).
        inputs, outputs: of each layer, (length, hidden) each.
        last: normed states after the last layer, (length, hidden).
        positions: (3, length).
    """

    embeds: torch.Tensor
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    last: torch.Tensor
    positions: torch.Tensor


@torch.no_grad()
def plain_pass(model, row, said):
    """Output of the model over a row's prompt and answer."""
    row = dict(row, input_ids=torch.cat([row["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1))
    if "mm_token_type_ids" in row:
        row["mm_token_type_ids"] = F.pad(row["mm_token_type_ids"], (0, len(said)))
    decoder, given, inputs, outputs, last = model.get_decoder(), {}, [], [], []

    def before(module, args, kwargs):
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    def after(module, args, out):
        outputs.append((out[0] if isinstance(out, tuple) else out)[0])

    hooks = [
        decoder.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True),
        decoder.register_forward_hook(lambda module, args, out: last.append(out.last_hidden_state[0])),
    ]
    for layer in decoder.layers:
        hooks += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    model(**row, use_cache=False)
    for hook in hooks:
        hook.remove()
    positions, embeds = given.get("position_ids"), given.get("inputs_embeds")
    if positions is None or positions.ndim < 3:
        positions = torch.arange(row["input_ids"].shape[1]).expand(3, 1, -1)
    if embeds is None:
        embeds = model.get_input_embeddings()(row["input_ids"])
    return Pass(embeds[0], inputs, outputs, last[0], positions[-3:, 0])


def whole_pass(network, x, positions, window=0):
    """Outputs of a network's layers over a sequence, (length, any).

    Args:
        x: their inputs, (length, any).
        positions: (length,), or (3, length) for rotary positions with sections.
        window: entries that one attends to, itself included; 0 is all.
    """
    shape = getattr(network.config, "layer", network.config)
    rotary, axis = Rotary(rotary_frequencies(shape.head_dim, shape.rope_theta)), None
    if isinstance(shape, RotaryShape):
        rotary, axis = rotary_of(shape)
    rotary.reserve(int(positions.max()) + 1, x)
    rotation = rotary(positions[None]) if axis is None else rotary.by_axis(positions[:, None], axis)
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril().triu(1 - window if window else -len(x))

    def attend(q, k, v, layer=0):
        return F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True)

    return network(x[None], rotation, attend)[0]


class Watched(DraftPolicy):
    """Some steps are not drafted at all, others are shallow."""

    def __init__(self, plan, skip):
        super().__init__(plan)
        self.skip, self.step = skip, 0

    def plan(self, rows, remaining):
        self.step += 1
        plan = super().plan(rows, remaining)
        return replace(plan, nodes=0) if self.step in self.skip else plan


class Recorded:
    """Notes the trees that a drafter proposes, and of each row the history and how much of it came before: the next
    draft may be proposed before the tokens of a step are there."""

    def __init__(self, drafter):
        self._rows, self._trees = [], []
        begin, select, propose, observe = drafter.begin, drafter.select, drafter.propose, drafter.observe

        def recorded_begin(prompt, output, history):
            self._rows += [(row, len(row)) for row in history]
            begin(prompt, output, history)

        def recorded_observe(tree, verdict, output):
            accepted = zip(self._rows, verdict.accepted(), strict=True)
            self._rows = [(row, length + count) for (row, length), count in accepted]
            observe(tree, verdict, output)

        def recorded_select(rows):
            self._rows = [self._rows[row] for row in rows]
            select(rows)

        def recorded_propose(token, plan):
            tree = propose(token, plan)
            self._trees.append((tree, self._rows))
            return tree

        drafter.begin, drafter.select, drafter.propose = recorded_begin, recorded_select, recorded_propose
        drafter.observe = recorded_observe

    def take(self):
        """Trees proposed since the last call."""
        trees, self._trees = self._trees, []
        return trees


def check_drafts(model, inputs, drafter, gains, *, nodes=7, depth=4, skip=(), new=12, params=None):
    """Decode; every node of every tree must have been given the probability that ``gains`` finds, and greedy output
    must be that of transformers.

    Args:
        gains: called with the target, a row's number, what it has said and paths of drafted tokens behind that; the
            paths' probabilities.

    Returns:
        How many steps emitted how many tokens.
    """
    target = plugins.target_class(model.config)(model)
    drafter.attach(target)
    policy, recorded = Watched(StepPlan(nodes, depth), skip), Recorded(drafter)
    sampler = Sampler(defaults.processors(params or SamplingParams()), do_sample=params is not None)
    lengths: Counter[int] = Counter()
    stopper, said = Stopper(new, eos_token_ids=[]), []
    for rows in decode(target, drafter, prompt_of(inputs), sampler, stopper, policy):
        for tree, histories in recorded.take():
            for number, (history, length) in enumerate(histories):
                if length > len(history):
                    continue  # the row has ended
                b = next(b for b, row in enumerate(rows) if row.history is history)
                tokens = history[rows[b].prompt_length : length]
                assert int(tree.tokens[number, 0]) == tokens[-1]
                drafted = valid_nodes(tree, number)[1:]
                paths = [[int(tree.tokens[number, i]) for i in root_path(tree, number, node)[1:]] for node in drafted]
                expected = gains(target, b, tokens, paths)
                found = [tree.path_probs[number][node - 1] for node in drafted]
                assert found == pytest.approx(expected, rel=5e-3, abs=1e-6)
        lengths.update(len(row.emitted) for row in rows)
        said = [row.token_ids for row in rows]
    if params is None:
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert said == ids[:, inputs["input_ids"].shape[1] :].tolist()
    return lengths


def check_logits(model, inputs, drafter, logits, **asked):
    """``check_drafts`` by the logits of a draft model.

    Args:
        logits: called with a row's number and tokens after its prompt; (1 + tokens, vocabulary), after the prompt and
            after each of these.
    """

    @torch.no_grad()
    def gain(row, said, path):
        scores = logits(row, said + path[:-1])[len(said) :]
        return float(scores.log_softmax(-1)[range(len(path)), path].sum().exp())

    def gains(target, row, said, paths):
        return [gain(row, said, path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)
