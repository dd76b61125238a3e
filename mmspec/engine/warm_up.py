"""Warm-up of captured decode steps.

A capture in a decode step delays all of its sequences, and a buffer that grows drops the graphs that read it. Buffers
are therefore reserved, and CUDA graphs captured, before the first request.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence

import torch

from mmspec.cache.rows import batch_bucket
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, Target
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import AHEAD, CapturedDrafter
from mmspec.engine.engine import Engine
from mmspec.engine.policy import STEADY_PLANS, Speculation
from mmspec.errors import UserError
from mmspec.ops import graphs
from mmspec.targets.decoder import node_bucket
from mmspec.targets.transformers_target import RESERVED_NODES, TransformersTarget, sharded

_PROMPT = 128  # prompt tokens per row during capture
_TREE_NODES = 64  # nodes of the largest trees
_TOKENS = 8192  # maximum tokens reserved per row
_LEAST_TOKENS = 2048  # minimum per row; if they do not fit, fewer rows are reserved
_SHARE = 0.5  # share of free device memory for the target's KV cache
_MOST_NODES = 512  # maximum nodes of all rows in a step captured here; larger steps are captured when they occur
_log = logging.getLogger("mmspec.warm_up")


def warm_up(
    engine: Engine, speculation: Speculation, rows: int, tokens: int | None, sizes: Sequence[int | None] = (None,)
) -> None:
    """After all sequences have ended, reserve buffers and capture decode steps; see ``Pipeline.warm_up``."""
    target, drafter = engine.target, speculation.drafter
    if not isinstance(target, TransformersTarget) or sharded(target):
        return
    if not (target.decoder.static_shapes and graphs.captures(target.device)):
        return
    plans = [StepPlan(size) for size in sizes if size] if drafter is not None else []
    if drafter is not None and None in sizes:
        plans.extend(STEADY_PLANS)
    plans.sort(key=lambda plan: (plan.nodes, plan.chain, plan.depth), reverse=True)
    with engine.drained():
        speculation.acquire()
        try:
            reserve_and_capture(target, drafter, rows, tokens, plans)
        except (UserError, torch.OutOfMemoryError) as error:  # requests then capture their steps
            warnings.warn(f"CUDA graphs could not be captured beforehand: {error}", RuntimeWarning, stacklevel=2)
        finally:
            speculation.release()


def reserve_and_capture(
    target: TransformersTarget, drafter: Drafter | None, rows: int, tokens: int | None, plans: Sequence[StepPlan]
) -> None:
    """Reserve buffers and capture steps, largest first, so that smaller steps share their memory.

    Steps run on idle rows and accept no tokens, so that no state changes.

    Args:
        target: has no sequences.
        drafter: attached to the target, without sequences.
        rows: maximum number of concurrent sequences.
        tokens: maximum tokens per row, prompt and answer together; reduced to fit a share of the free memory.
        plans: plans of the drafts, largest first.
    """
    reads = tuple(drafter.features) if drafter else ()
    try:
        rows, tokens = _reservation(target, rows, tokens)
        _log.info("capturing decode steps of up to %d sequences of %d tokens", rows, tokens)
        prompt = placeholder(rows, _PROMPT, target)
        *_, output = target.prefill([prompt], [1] * rows, reads)
        assert output is not None
        target.runner.cache.reserve_nodes(tokens + RESERVED_NODES - target.runner.cache.length)
        histories = [[*row, 0] for row in prompt.input_ids.tolist()]
        parts = [] if drafter is None else drafter.begin_idle(prompt, output, histories)
        parts = [part for part in parts if part.static_shapes]
        for part in parts:
            part.reserve(tokens + AHEAD)
        while rows:
            _capture(target, parts, rows, plans, reads)
            rows = batch_bucket(rows) // 2
            target.keep(range(rows))
            for part in parts:
                part.select(range(rows))
    finally:
        target.keep([])
        if drafter is not None:
            drafter.select([])


def placeholder(rows: int, tokens: int, target: Target) -> Prompt:
    """Prompts of up to ``tokens`` tokens, which leave room for the largest trees.

    Their own history keeps them out of the prefix cache.
    """
    limit = target.context_limit or tokens + _TREE_NODES
    length = max(1, min(tokens, limit - _TREE_NODES))
    ids = torch.zeros(rows, length, dtype=torch.long, device=target.device)
    return Prompt(ids, history=ids)


def _reservation(target: TransformersTarget, rows: int, tokens: int | None) -> tuple[int, int]:
    """Number of rows and of tokens per row to reserve."""
    limit = tokens or _TOKENS
    limit = min(limit, target.context_limit or limit)
    list(target.prefill([placeholder(1, _PROMPT, target)], [1]))
    token_bytes, kv = _token_bytes(target.runner.cache), target.runner.cache.kv
    target.keep([])
    if not token_bytes:
        return rows, limit
    fitting = max(kv.rows * kv.capacity, int(_SHARE * _free_bytes(target.device) / token_bytes))
    while rows > 1 and fitting // batch_bucket(rows) < min(limit, _LEAST_TOKENS):
        rows = batch_bucket(rows) // 2
    return rows, min(limit, fitting // batch_bucket(rows))


def _token_bytes(cache: TreeCache) -> int:
    """KV-cache bytes per token."""
    size = sum(tensor.nbytes for tensor in cache.kv.tensors)
    return size // (cache.kv.rows * cache.kv.capacity) if size else 0


def _free_bytes(device: torch.device) -> int:
    """Free memory of a device, unused memory of torch's caching allocator included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _capture(
    target: TransformersTarget,
    parts: Sequence[CapturedDrafter],
    rows: int,
    plans: Sequence[StepPlan],
    reads: Sequence[Feature],
) -> None:
    """Capture the steps of target and drafters at their current number of rows."""
    token = torch.zeros(rows, dtype=torch.long, device=target.device)
    plans = [plan for plan in plans if batch_bucket(rows) * plan.nodes < _MOST_NODES]
    nodes = max((plan.nodes for plan in plans), default=0)
    depth = max((plan.depth for plan in plans), default=0)
    target.verify(_chain(rows, 1 + nodes, target.device), reads)  # the first pass allocates buffers of recurrent layers
    for width in _buckets(1 + nodes):
        for _ in range(2):
            target.verify(_chain(rows, width, target.device), reads)
    for width in _buckets(1 + min(nodes, depth)):
        for _ in range(2):
            target.commit(_nothing(_chain(rows, width, target.device)))
    for part in parts if plans else ():
        # The first draft, and drafts after a step of each size, also without drafts.
        part.propose(token, plans[0])  # allocates buffers, as the target's first pass does
        trees = {0: TokenTree.root(token)}  # by depth, which an update's shape depends on
        for plan in plans:
            for _ in range(2):
                tree = part.propose(token, plan)
            trees.setdefault(tree.max_depth, tree.select(list(range(rows))))  # a copy
        for tree in trees.values():
            output, verdict = target.verify(tree, reads), _nothing(tree)
            for number, plan in enumerate(plans):
                for _ in range(2):
                    for _ in range(1 if number else 2):  # capture also an update without a draft
                        part.observe(tree, verdict, output)
                    part.propose(token, plan)


def _buckets(nodes: int) -> Iterator[int]:
    """Padded sizes of up to ``nodes`` nodes, largest first."""
    size = node_bucket(nodes)
    while size > 1:
        yield size
        size = node_bucket(size - (64 if size > 64 else size // 2))
    yield 1


def _chain(rows: int, nodes: int, device: torch.device) -> TokenTree:
    parents = torch.arange(-1, nodes - 1, device=device).expand(rows, -1)
    tree = TokenTree(torch.zeros_like(parents), parents, check=False)
    tree.max_depth = nodes - 1
    return tree


def _nothing(tree: TokenTree) -> Verdict:
    """A verdict that accepts no tokens, for idle rows."""
    width = 1 + tree.max_depth
    packed = torch.zeros(tree.batch, 2 + 2 * width, dtype=torch.long, device=tree.tokens.device)
    packed[:, 2 : 2 + width] = -1
    return Verdict(packed)
