"""Lossy acceptance of drafts, which no request gets unless it asks for it: outputs may differ from the target's own.

BiLD's rollback policy (Big Little Decoder, arXiv 2302.07863, section 3.3) on trees: the target corrects a drafted token
only if its distance, the target's negative log probability of the token, exceeds a threshold. Where BiLD's small model
hands over by a threshold on its own confidence, the drafters' tree sizes decide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec import ops
from mmspec.core.tree import TokenTree
from mmspec.ops.transfer import on_device


def lossy_choices(tree: TokenTree, scores: Tensor, limit: float) -> Tensor:
    """Returns the token after each node, (batch, nodes) int64: the target's, or a drafted one.

    The most probable child of a node is chosen if its negative log probability is at most the limit; it is the target's
    own token where that is among the children.

    Args:
        tree: the draft, not drawn at random.
        scores: (batch, nodes, vocab), of the target after each node, after all logits processors.
        limit: in nats, above 0.
    """
    choices = ops.greedy(scores).tolist()
    rows = torch.arange(tree.batch, device=scores.device)[:, None]
    own = scores.float().log_softmax(-1)[rows, tree.parents, tree.tokens].tolist()  # of the root: unused
    for row, nodes in enumerate(tree.children):
        for node, children in enumerate(nodes):
            if children:
                token, child = max(children.items(), key=lambda item: own[row][item[1]])
                if own[row][child] >= -limit:
                    choices[row][node] = token
    return on_device(choices, scores.device)
