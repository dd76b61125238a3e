"""Runs verify passes over the KV cache of the running sequences, eager or with static shapes for CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.cache.rows import RowTensor, batch_bucket
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.target import Feature, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.ops.graphs import Graphed
from mmspec.ops.transfer import on_device
from mmspec.targets.attention import PASS, TreePass, tail_mask
from mmspec.targets.decoder import Decoder, Head


class VerifyRunner:
    """Verify passes of a decoder, and the KV cache of the running sequences. Pads neither nodes nor rows.

    Attributes:
        static_shapes: whether shapes and addresses of tensors are static.
    """

    static_shapes: ClassVar[bool] = False

    def __init__(self, decoder: Decoder, head: Head) -> None:
        self._decoder, self._head = decoder, head
        self._cache: TreeCache | None = None
        # (rows,) position of the next token, and the last position within the context limit
        self._position, self._last_position = RowTensor(self.static_shapes), RowTensor(self.static_shapes)
        self._tail_depth: Tensor | None = None  # (batch, offset) depths of uncommitted nodes of earlier passes

    @property
    def cache(self) -> TreeCache:
        """KV and recurrent states of the sequences."""
        assert self._cache is not None, "prefill comes first"
        return self._cache

    @property
    def rows(self) -> int:
        """Number of sequences in the cache."""
        return self._cache.rows if self._cache is not None else 0

    @property
    def version(self) -> tuple[Hashable, ...]:
        """Changes when a buffer that captured graphs read has been reallocated."""
        return self.cache.version, self._position.version, self._last_position.version

    def through(self, decoder: Decoder) -> Self:
        """A runner of another decoder that shares this runner's sequences and cache."""
        view = copy.copy(self)
        view._decoder = decoder
        return view

    @property
    def adopts(self) -> bool:
        """Whether ``join`` takes over the cache of a prefill instead of copying its rows."""
        return not self.rows and not self.static_shapes

    def join(self, prompts: TreeCache, reserve: int, position: Tensor, last_position: Tensor) -> None:
        """Add the rows of a prefilled cache.

        Args:
            reserve: KV slots that the longest row may need.
            position, last_position: (rows,) position of the next token, and last position within the context limit.
        """
        if self.adopts:
            self._position, self._last_position, self._cache = RowTensor(), RowTensor(), prompts
        else:
            if self._cache is None:
                self._cache = self._decoder.new_cache(reserve, True)
            self._cache.append(prompts, reserve)
        self._position.append(position)
        self._last_position.append(last_position)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""
        if self._cache is not None:
            self._tail_depth = None
            for part in (self._cache, self._position, self._last_position):
                part.select(rows)

    def forward_tree(self, tree: TokenTree, names: Sequence[Feature], adapter: Hashable) -> TargetOutput:
        """Logits and the named features at every node. Graphs are captured per ``adapter``, the key of the active LoRA
        adapter."""
        states = self.forward_nodes(tree.tokens, None if tree.nodes == 1 else tree.depth, tree.ancestors, names)
        return TargetOutput(self._head(states["last"]), {name: states[name] for name in names})

    def forward_nodes(
        self, tokens: Tensor, depth: Tensor | None, reach: Tensor, names: Sequence[Feature] = ()
    ) -> dict[Feature, Tensor]:
        """The named features of new nodes, and ``"last"``. Nodes attend to the prefix and to uncommitted nodes.

        Args:
            tokens: (batch, nodes) int64.
            depth: (batch, nodes) int64, distance of each node to the end of the prefix; None means 0.
            reach: (batch, nodes, earlier + nodes) bool, the uncommitted nodes that each node attends to.
        """
        inputs = self._inputs(tokens, depth, reach)
        inputs["attention_mask"] = self._decoder.mask(self.cache, depth, self._tail_depth, reach)
        return self._decoder.forward(inputs, self.cache, names)

    def _inputs(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> dict[str, Any]:
        """Inputs of the decoder, without the mask."""
        batch = len(tokens)
        position = self._position.data[:batch, None]
        position = position.expand_as(tokens) if depth is None else position + depth
        # Draft tokens may exceed the context limit, beyond which a model may have no position embedding.
        position = torch.minimum(position, self._last_position.data[:batch, None])
        return {"input_ids": tokens, "position_ids": position, **self.cache.arguments(reach)}

    def keep_nodes(self, depth: Tensor) -> None:
        """Keep the nodes of the last ``forward_nodes`` uncommitted, so that further nodes can attend to them."""
        self._tail_depth = depth if self._tail_depth is None else torch.cat([self._tail_depth, depth], dim=1)
        self.cache.offset = self._tail_depth.shape[1]

    def forget_nodes(self) -> None:
        """Drop all uncommitted nodes."""
        self.cache.offset, self._tail_depth = 0, None

    def commit_nodes(self, path: Tensor, rows: Callable[[], list[list[int]]]) -> None:
        """Commit one path of nodes per row, (batch, depth) padded with -1 and as lists; drop all other nodes.

        With static shapes, the lists are read when a row's length is needed.
        """
        self._tail_depth, paths = None, rows()
        self.cache.commit(path, paths)
        position, accepted = self._position.data, [len(row) for row in paths]
        position += accepted[0] if len(set(accepted)) == 1 else on_device(accepted, position.device)


class StaticRunner(VerifyRunner):
    """Runs passes padded to few static shapes, over buffers with fixed addresses, captured as CUDA graphs."""

    static_shapes = True

    def __init__(self, decoder: Decoder, head: Head) -> None:
        super().__init__(decoder, head)
        self._graphed_pass = Graphed(self._pass)
        self._graphed_commit = Graphed(self.commit_on_device)

    @property
    def captured(self) -> tuple[int, int]:
        """Number of captured CUDA graphs of verify passes and of commits."""
        return self._graphed_pass.captured, self._graphed_commit.captured

    def forward_tree(self, tree: TokenTree, names: Sequence[Feature], adapter: Hashable) -> TargetOutput:
        nodes, batch = tree.nodes, tree.batch
        self.cache.reserve_nodes(node_bucket(nodes))
        settings = {"names": tuple(names), "adapter": adapter}
        logits, *states = self._graphed_pass(*_padded(tree), version=self.version, **settings)
        features = {name: state[:batch, :nodes] for name, state in zip(names, states, strict=True)}
        return TargetOutput(logits[:batch, :nodes], features)

    def _pass(
        self, tokens: Tensor, depth: Tensor, reach: Tensor, names: tuple[Feature, ...], adapter: Hashable
    ) -> tuple[Tensor, ...]:
        """Logits and features of a whole tree; captured."""
        states = self.forward_nodes(tokens, depth, reach, names)
        return self._head(states["last"]), *[states[name] for name in names]

    def forward_nodes(
        self, tokens: Tensor, depth: Tensor | None, reach: Tensor, names: Sequence[Feature] = ()
    ) -> dict[Feature, Tensor]:
        cache, inputs = self.cache, self._inputs(tokens, depth, reach)
        depth = torch.zeros_like(tokens) if depth is None else depth
        cache.reserve_nodes(tokens.shape[1])
        cache.set_write_slots(tokens.shape[1])
        inputs["attention_mask"] = None
        if cache.attending:
            assert cache.bounds is not None
            inputs["attention_mask"] = tail_mask(self._decoder.config, depth, self._tail_depth, reach)
            inputs[PASS] = TreePass(self._decoder.config, cache.bounds.first(len(tokens)), depth)
        return self._decoder.forward(inputs, cache, names)

    def commit_nodes(self, path: Tensor, rows: Callable[[], list[list[int]]]) -> None:
        self._tail_depth, (batch, depth) = None, path.shape
        idle = (0, node_bucket(depth) - depth, 0, batch_bucket(batch) - batch)
        self._graphed_commit(F.pad(path, idle, value=-1) if any(idle) else path, version=self.version)
        self.cache.advance(lambda: [len(row) for row in rows()])

    def commit_on_device(self, path: Tensor) -> tuple[Tensor, ...]:
        """Device part of ``commit_nodes``; captured."""
        self.cache.commit_on_device(path)
        self._position.data[: len(path)] += (path >= 0).sum(1)
        return ()


def new_runner(decoder: Decoder, head: Head) -> VerifyRunner:
    """Create a runner, with static shapes if the device benefits from them and the layers support them."""
    return (StaticRunner if decoder.static_shapes else VerifyRunner)(decoder, head)


def node_bucket(nodes: int) -> int:
    """Padded nodes of a pass or a path with static shapes: a power of two, above 64 a multiple of 64."""
    return 1 << (nodes - 1).bit_length() if nodes <= 64 else -(-nodes // 64) * 64


def _padded(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, depths and ancestors of a tree, padded with nodes and rows that attend only to themselves."""
    width = node_bucket(tree.nodes)
    extra, idle = (0, width - tree.nodes), (0, batch_bucket(tree.batch) - tree.batch)
    if not any(extra + idle):
        return tree.tokens, tree.depth, tree.ancestors
    reach = F.pad(tree.ancestors, extra + extra + idle) | torch.eye(width, dtype=torch.bool, device=tree.tokens.device)
    return F.pad(tree.tokens, extra + idle), F.pad(tree.depth, extra + idle), reach
