"""Drafting kernels in C++: trees of a recurrent cell, and of slots with a Markov head, in one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.ops import cpu_library
from mmspec.ops.cpu_library import Cell, Linear, Markov
from mmspec.ops.threads import kernel_threads


def cell_weights(layers: Sequence[Linear], table: Tensor, norm: Any) -> Cell:
    """The weights of a recurrent cell, for ``draft_cells``; sizes of states and of what ``into`` returns are multiples
    of 16.

    Args:
        layers: ``into``, ``out``, ``guess`` and ``head``, see ``draft_cells``.
        table: (tokens, into.outputs) float32, contiguous: what ``into`` adds for each token, its bias included.
        norm: a ``torch.nn.LayerNorm`` with float32 weights.
    """
    pointers = table.data_ptr(), norm.weight.data_ptr(), norm.bias.data_ptr()
    return Cell(*layers, *pointers, norm.eps)


def markov_weights(out: Linear, table: Tensor, draft_ids: Tensor | None) -> Markov:
    """The weights of a Markov head, for ``draft_slots``.

    Args:
        out: from a token's embedding to the draft vocabulary.
        table: (tokens, out.inputs) float32, contiguous, the embeddings; must outlive the result, as must ``draft_ids``.
        draft_ids: (out.outputs,) int64, the target's tokens; None is the identity.
    """
    return Markov(out, table.data_ptr(), len(table), None if draft_ids is None else draft_ids.data_ptr())


def draft_slots(weights: Markov, logits: Tensor, last: Tensor, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of the most probable paths over slots whose logits the token before corrects.

    Args:
        weights: of ``markov_weights``.
        logits: (batch, slots, draft tokens) float32, of a level of the tree each.
        last: (batch,) int64, the target's tokens before.
        width: nodes extended per level, and children per node.
        nodes: maximum number of nodes besides the root.

    Returns:
        Tokens, parents and log probabilities as in ``TokenTree``, (batch, 1 + nodes or fewer), in descending order.
    """
    batch, slots, vocab = logits.shape
    width = min(width, nodes)
    k = min(width, vocab)
    nodes = 1 + min(nodes, _candidates(k, k, width, slots))
    tree = _tree(batch, nodes)
    logits, last = logits.contiguous(), last.contiguous()
    cpu_library.functions().draft_slots(
        weights, logits.data_ptr(), last.data_ptr(), batch, slots, width, nodes, *_pointers(tree)
    )
    return tree


def draft_cells(
    weights: Cell,
    carried: Tensor,
    first: tuple[Tensor, Tensor],
    last: Tensor,
    draft_ids: Tensor | None,
    width: int,
    levels: int,
    least_gain: float,
    nodes: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """The trees of the most probable paths by a recurrent cell.

    A token's state is ``norm(before + out(silu(table[token] + into(before))))``, ``before`` being the state that it was
    drafted from; its children's logits are ``head(guess(state))``.

    Args:
        weights: of ``cell_weights``.
        carried: (batch, hidden) float32, the states that the first level is drafted from.
        first: the first level, tokens (batch, k) int64, rows of the table, and log probabilities, in descending order.
        last: (batch,) int64, the roots.
        draft_ids: (n,) int64, the target's token of each row of the table; None is the identity.
        width: nodes extended per level, and children per node.
        levels: maximum depth.
        least_gain: of a level, see ``Budget.least_gain``.
        nodes: maximum number of nodes besides the root.

    Returns:
        Tokens, parents and log probabilities as in ``TokenTree``, (batch, 1 + nodes or fewer), in descending order; and
        the number of levels.
    """
    width, levels = min(width, nodes), min(levels, nodes)
    (batch, k), later = first[0].shape, min(width, weights.head.outputs)
    most = 1 + min(nodes, _candidates(k, later, width, levels))
    tree = _tree(batch, most)
    inputs = [x.contiguous() for x in (carried, *first, last)]
    ids = None if draft_ids is None else draft_ids.data_ptr()
    grown: int = cpu_library.functions().draft_cells(
        *(weights, *(x.data_ptr() for x in inputs), ids, batch, k, width, levels, least_gain, most),
        *(*_pointers(tree), kernel_threads()),
    )
    if grown < levels:
        most = 1 + min(nodes, _candidates(k, later, width, grown))
        tree = tree[0][:, :most], tree[1][:, :most], tree[2][:, :most]
    return tree, grown


def _candidates(first: int, children: int, width: int, levels: int) -> int:
    """Candidates of a tree whose first level has ``first`` nodes, and whose levels extend ``width`` nodes each."""
    total = level = first
    for _ in range(levels - 1):
        level = min(width, level) * children
        total += level
    return total


def _tree(batch: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64)
    return tokens, parents, torch.empty(batch, nodes)


def _pointers(tree: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    return [x.data_ptr() for x in tree]
