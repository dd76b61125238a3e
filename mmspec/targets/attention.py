"""Tree attention as an attention implementation of transformers.

Given a mask, transformers repeats keys and values for grouped queries, over the whole prefix and in every layer. On a
CPU, torch's attention supports grouped queries with a mask. With static shapes the prefix needs no mask, and
``mmspec.ops.tree_attention`` is used (a Triton kernel on CUDA).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmspec import ops
from mmspec.cache.buffers import SlotBounds
from mmspec.errors import UserError
from mmspec.targets.masks import window_of
from mmspec.targets.support import decoder_of

NAME = "mmspec_tree"
PASS = "tree_pass"
"""Keyword argument of a decoder's forward that passes a ``TreePass`` to every attention layer."""


@dataclass(frozen=True)
class TreePass:
    """A verify pass with static shapes.

    Attributes:
        config: the text configuration, which has the layers' windows.
        bounds: prefix lengths and write position.
        depth: (batch, nodes) int64, distance of each node to the end of its row's prefix.
    """

    config: Any
    bounds: SlotBounds
    depth: Tensor


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function with the signature that transformers calls.

    Args:
        query: (batch, heads, nodes, head_dim).
        key, value: (batch, kv_heads, slots, head_dim), not repeated; in latent attention (MLA), keys are wider.
        attention_mask: (batch, 1, nodes, slots), bool or additive. With static shapes (batch, 1, nodes, tail), bool:
            the uncommitted nodes that each node attends to.
        options: further arguments of the model's layer, and with static shapes a ``TreePass`` named ``PASS``.

    Returns:
        (batch, nodes, heads, head_dim of the values), and None instead of weights.
    """
    tree: TreePass | None = options.pop(PASS, None)
    if tree is not None:
        assert attention_mask is not None
        if other := [name for name in ("position_bias", "s_aux") if options.get(name) is not None]:
            raise UserError(f"attention must be a softmax of scaled scores: {type(module).__name__} has {other[0]}")
        read = ops.tree_attention(
            *(query, key, value, tree.bounds.lengths, attention_mask[:, 0]),
            scale=scaling,
            start=tree.bounds.start,
            depth=tree.depth,
            window=window_of(tree.config, module.layer_idx),  # type: ignore[arg-type]
            softcap=options.get("softcap"),
        )
        return read, None
    masked = query.shape[2] == 1 if attention_mask is None else attention_mask.shape[1] == 1
    grouped = masked and key.shape[1] < query.shape[1] and query.device.type == "cpu"
    if not grouped or any(options.get(name) for name in ("dropout", "softcap")) or "position_bias" in options:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return _grouped_attention(query, key, value, attention_mask, scaling), None


def _grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Grouped-query attention with one matrix product per key head: for a single bfloat16 node on a CPU several times
    as fast as torch's own. Arguments and result as in ``tree_attention``."""
    (batch, heads, nodes, _), kv_heads = query.shape, key.shape[1]
    rows = query.reshape(batch, kv_heads, heads // kv_heads * nodes, -1)
    mask = None if mask is None else _group_mask(mask, heads // kv_heads, query.dtype)
    read = torch.nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scale)
    return read.view(batch, heads, nodes, -1).transpose(1, 2).contiguous()


@lru_cache(maxsize=4)
def _group_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Repeat a mask for the heads of a group, as an additive mask; cached per pass."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.repeat(1, 1, groups, 1)


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def set_attention(network: torch.nn.Module, name: str) -> None:
    """Set the attention implementation of all layers of a network that has no other users."""
    for module in network.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name


class PassAttention:
    """Attention implementation of a target's passes. Between passes the model keeps the user's implementation.

    ``tree_attention`` replaces SDPA, FlashAttention (2D masks only) and flex attention (aborts on dense 4D masks).
    Eager attention is kept. Layers that compute their own masks use SDPA: layers with an indexer (DeepSeek V3.2) mask
    unselected keys only with eager attention or SDPA, and Doge's masks differ by head.

    Args:
        prepare: called at the start of each pass.

    Attributes:
        name: transformers' name of the implementation.
    """

    def __init__(self, model: PreTrainedModel, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._model = model
        config, decoder = model.config.get_text_config(), decoder_of(model)
        usual = config._attn_implementation
        self.name = NAME if usual != "eager" and model._supports_sdpa else "eager"
        if usual in ("sdpa", "eager") and not decoder._can_set_attn_implementation():
            self.name = usual
        elif self.name == NAME and (
            "indexed_attention" in (getattr(config, "layer_types", None) or ()) or config.model_type == "doge"
        ):
            self.name = "sdpa"
        # Layers may have copies of the decoder's configuration.
        candidates = (getattr(module, "config", None) for module in decoder.modules())
        configs = [copy for copy in candidates if getattr(copy, "_attn_implementation", None) == usual]
        # As dicts: setting an attribute of a configuration takes 1 % of a small model's pass.
        self._settings: list[dict[str, Any]] = list({id(copy): vars(copy) for copy in [config, *configs]}.values())
        with _NEW_LOCK:
            self._lock = _LOCKS.setdefault(decoder, threading.RLock())

    def idle(self) -> AbstractContextManager[Any]:
        """Context manager that keeps all targets from running passes of this decoder."""
        return self._lock

    @contextmanager
    def applied(self, name: str | None = None) -> Iterator[None]:
        """Apply the implementation, or the implementation ``name``, during one pass. Passes of all targets that share a
        decoder are serialised, as they share its configuration and hooks."""
        with self._lock:
            usual = [settings[_SETTING] for settings in self._settings]
            self._prepare()
            try:
                for settings in self._settings:
                    settings[_SETTING] = name or self.name
                yield
            finally:
                for settings, before in zip(self._settings, usual, strict=True):
                    settings[_SETTING] = before


_SETTING = "_attn_implementation_internal"  # what ``set_attn_implementation`` writes
_LOCKS: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()  # by decoder
_NEW_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):  # in a forked process, no pass runs
    os.register_at_fork(after_in_child=lambda: [lock._at_fork_reinit() for lock in _LOCKS.values()])  # type: ignore[attr-defined]
