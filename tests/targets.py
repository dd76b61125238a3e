"""Targets against the plain model: the logits at a tree's node are those after the node's own path."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from mmspec import TokenTree, accept_path, plugins
from mmspec.cache.tree_cache import CACHE_NAMES
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import random_tree, root_path, valid_nodes

CACHE = next(name for name in CACHE_NAMES if name in signature(LlamaModel.forward).parameters)
"""The name of the cache argument in this version of transformers."""


def prompt_of(inputs: dict[str, Tensor]) -> Prompt:
    mask = inputs["attention_mask"]
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    return Prompt(inputs["input_ids"], None if bool(mask.all()) else mask, rest)


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Any]:
    """One row's own inputs, without padding; images and the like are spread evenly over the rows."""
    batch, keep = inputs["input_ids"].shape[0], inputs["attention_mask"][row].bool()
    parts = {name: value.chunk(batch)[row] for name, value in inputs.items() if name != "attention_mask"}
    for name in ("input_ids", "mm_token_type_ids"):
        if name in parts:
            parts[name] = parts[name][:, keep]
    return parts


def plain_logits(model: PreTrainedModel, row: dict[str, Any], continuation: list[int]) -> Tensor:
    """(1 + len(continuation), vocab): after the prompt and after each further token, in one pass without a cache."""
    extended = dict(row)
    extended["input_ids"] = torch.cat([row["input_ids"], torch.tensor([continuation], dtype=torch.long)], dim=1)
    if "mm_token_type_ids" in row:
        extended["mm_token_type_ids"] = torch.nn.functional.pad(row["mm_token_type_ids"], (0, len(continuation)))
    with torch.no_grad():
        logits = model(**extended, use_cache=False).logits[0]
    return logits[row["input_ids"].shape[1] - 1 :]


def assert_trees_equal_paths(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    *,
    nodes: int = 9,
    steps: int = 2,
    seed: int = 0,
    shape: str = "random",
) -> TransformersTarget:
    """Prefill, then trees whose accepted paths differ by row: every logit of every valid node is compared."""
    g = torch.Generator().manual_seed(seed)
    batch = inputs["input_ids"].shape[0]
    target: TransformersTarget = plugins.target_class(model.config)(model)
    rows = [row_of(inputs, b) for b in range(batch)]
    said: list[list[int]] = [[] for _ in range(batch)]
    close = dict(atol=2e-4, rtol=2e-4)

    output = prefilled(target, prompt_of(inputs), 64)
    for b in range(batch):
        torch.testing.assert_close(output.logits[b, 0], plain_logits(model, rows[b], [])[-1], **close)
    for number in range(steps):
        drafted = random_tree(g, batch, 1 if number == 1 else nodes, 90, shape=shape, ragged=shape == "random")
        tree = TokenTree(drafted.tokens + 3, drafted.parents, drafted.valid)
        logits = target.verify(tree).logits
        choices = torch.full_like(tree.tokens, -1)
        for b in range(batch):
            alive = valid_nodes(tree, b)
            for leaf in set(alive) - {int(tree.parents[b, i]) for i in alive}:
                path = root_path(tree, b, leaf)
                tokens = said[b] + [int(tree.tokens[b, i]) for i in path]
                expected = plain_logits(model, rows[b], tokens)[-len(path) :]
                torch.testing.assert_close(logits[b, path], expected, **close)
            kept = root_path(tree, b, alive[int(torch.randint(len(alive), (1,), generator=g))])
            for parent, child in pairwise(kept):
                choices[b, parent] = tree.tokens[b, child]
            said[b] += [int(tree.tokens[b, i]) for i in kept]
        verdict = accept_path(tree, choices)
        target.commit(verdict)
    return target


def prefilled(
    target: Any,
    prompt: Prompt,
    new: int | Sequence[int] = 8,
    reads: Sequence[Feature] = ("last",),
    chunk: int | None = None,
) -> TargetOutput:
    """The output of a prefill, with at most ``new`` new tokens (of each row)."""
    each = [new] * len(prompt.input_ids) if isinstance(new, int) else new
    *_, output = target.prefill([prompt], each, reads, chunk)
    return output
