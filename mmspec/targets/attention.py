"""Attention of trees in transformers' decoders: masks, the attention implementation, and positions by slot.

Given a mask, transformers repeats keys and values for grouped queries, over the whole prefix and in every layer. On a
CPU, torch's attention supports grouped queries with a mask. With static shapes the prefix needs no mask, and
``mmspec.ops.tree_attention`` is used (a Triton kernel on CUDA).

ALiBi (BLOOM, Falcon, MPT; arXiv 2108.12409, section 3) adds a slope times the key's position to each attention score.
GPT-Neo's layers compute their own causal and window masks. Both use slot indices as positions. During passes, the
modelling file's bias function, or the attention of MPT or GPT-Neo, is replaced by one that reads the positions.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmspec import ops
from mmspec.cache.tree_cache import SlotBounds, TreeCache, cache_in
from mmspec.errors import UserError
from mmspec.ops import cpu, cpu_library
from mmspec.targets.tree_layers import Place, replaced

NAME = "mmspec_tree"
PASS = "tree_pass"
"""Keyword argument of a decoder's forward that passes a ``TreePass`` to every attention layer."""

SLIDING = ("sliding_attention", "hybrid_sliding")
"""Kinds of layers with a sliding window."""


def tree_mask(
    config: Any, cache: TreeCache, depth: Tensor | None, tail_depth: Tensor | None, reach: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None] | None:
    """The ``attention_mask`` of a verify pass.

    Args:
        config: the text configuration, which has the kinds of layers, window and attention implementation.
        cache: cache of the committed prefix.
        depth: (batch, nodes) int64, distance of each new node to the end of the prefix; None means 0.
        tail_depth: (batch, earlier) int64, ``depth`` of uncommitted nodes of earlier passes; None without any.
        reach: (batch, nodes, earlier + nodes) bool, the uncommitted nodes that each new node attends to.
        dtype: dtype of additive masks.

    Returns:
        (batch, 1, nodes, slots): bool, or additive for eager attention, which silently misreads bool masks. A dict if
        there are several kinds of layers. None if a single node attends to everything, or without attention.
    """
    batch, nodes = reach.shape[:2]
    kinds, window = windows(config)
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    limited = window is not None or chunk is not None
    all_allowed = nodes == 1 and tail_depth is None and not cache.padded
    if (all_allowed and not limited) or not cache.attending:
        return None
    prefix = cache.attended[:, None, :].to(reach.device) if cache.padded else reach.new_ones(1, 1, 1)
    full = torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]
    additive = dtype if config._attn_implementation == "eager" else None
    if not limited:
        return _in_form(full, additive)
    if depth is None:
        depth = torch.zeros(batch, nodes, dtype=torch.long, device=reach.device)
    positions = slot_positions(cache, depth, tail_depth)
    query, key = positions[:, None, -nodes:, None], positions[:, None, None]
    # A single node needs its window too: in some models (Moshi, OLMoE) only transformers' cache applies it.
    masks = {"full_attention": None if all_allowed else _in_form(full, additive)}
    if window is not None:
        masks["sliding_attention"] = _in_form(full & (query - key < window), additive)
    if chunk is not None:
        masks["chunked_attention"] = _in_form(full & (query // chunk == key // chunk), additive)
    return _by_kind(masks) if kinds else masks["sliding_attention"]


def tail_mask(
    config: Any, depth: Tensor, tail_depth: Tensor | None, reach: Tensor
) -> Tensor | dict[str, Tensor | None]:
    """The ``attention_mask`` of a verify pass with static shapes: uncommitted nodes only, (batch, 1, nodes, earlier +
    nodes) bool; see ``tree_mask``."""
    full = reach[:, None]
    kinds, window = windows(config)
    if window is None:
        return full
    tail = depth if tail_depth is None else torch.cat([tail_depth, depth], dim=1)
    slid = full & (depth[:, :, None] - tail[:, None, :] < window)[:, None]
    return _by_kind({"full_attention": full, "sliding_attention": slid}) if kinds else slid


def window_of(config: Any, layer: int) -> int | None:
    """Size of a layer's sliding window; None for full attention."""
    kinds, window = windows(config)
    return window if window is None or not kinds or kinds[layer] in SLIDING else None


def slot_limit(config: Any) -> int | None:
    """Maximum slots of a prompt with inner or right padding: in longer prompts, transformers' windows and chunks, which
    count padding, differ from tree masks. None if no layer has windows or chunks."""
    kinds, window = windows(config)
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    return min((size for size in (window, chunk) if size is not None), default=None)


def windows(config: Any) -> tuple[list[str], int | None]:
    """Kinds of a model's layers (empty if the configuration has none) and size of the sliding window."""
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    return kinds, None if kinds and not set(SLIDING) & set(kinds) else window


def _by_kind(masks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Add masks under other names: for layers with both convolution and attention, and for layers without attention."""
    beside = {"hybrid": masks["full_attention"], "hybrid_sliding": masks.get("sliding_attention")}
    return {"linear_attention": None, "conv": None, **beside, **masks}


def slot_positions(cache: TreeCache, depth: Tensor, tail_depth: Tensor | None) -> Tensor:
    """Position of each slot in its sequence, (batch, slots) int64, padding not counted. The nodes are the last slots.
    Arguments as for ``tree_mask``."""
    ends = torch.tensor(cache.lengths, dtype=torch.long, device=depth.device)[:, None]
    tail = depth if tail_depth is None else torch.cat([tail_depth, depth], dim=1)
    slots = torch.arange(cache.length, device=depth.device).expand(depth.shape[0], -1)
    return torch.cat([slots, ends + tail], dim=1)


def _in_form(allowed: Tensor, additive: torch.dtype | None) -> Tensor:
    if additive is None:
        return allowed
    return torch.zeros(allowed.shape, dtype=additive, device=allowed.device).masked_fill(
        ~allowed, torch.finfo(additive).min
    )


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
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    scaled = not any(options.get(name) for name in ("dropout", "softcap")) and options.get("position_bias") is None
    to_all = scaled and not causal and attention_mask is None
    if to_all and (found := _tower_attention(query, key, value, scaling)) is not None:
        return found, None
    masked = query.shape[2] == 1 if attention_mask is None else attention_mask.shape[1] == 1
    grouped = masked and key.shape[1] < query.shape[1] and query.device.type == "cpu"
    if not grouped or not scaled:
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


def _tower_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Attention of every patch of an image to all others, in the C++ kernels: three times as fast as torch's own.
    Arguments and result as in ``tree_attention``; None if the kernels, which take bfloat16, do not support them."""
    (batch, heads, patches, head_dim), half = query.shape, query.dtype == torch.bfloat16
    if not half or query.device.type != "cpu" or head_dim not in cpu.HEAD_DIMS or not cpu_library.available():
        return None
    rows, scale = query.transpose(1, 2).float().contiguous(), head_dim**-0.5 if scale is None else scale
    everything = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool).expand(batch, 1, patches, -1)
    read = cpu.attention(rows, key.contiguous(), value.contiguous(), everything, scale)
    return read.to(query.dtype).view(batch, patches, heads, head_dim)


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
        decoder: the model's layers, see ``decoder_of``.
        prepare: called at the start of each pass.
        towers: models outside the decoder, whose attention is to run in the C++ kernels.

    Attributes:
        name: transformers' name of the implementation.
        lock: while it is held, no target runs passes of this decoder.
    """

    def __init__(self, model: PreTrainedModel, decoder: Any, prepare: Callable[[], None], towers: list[Any]) -> None:
        self._prepare = prepare
        config = model.config.get_text_config()
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
        if self.name == NAME:
            others = (getattr(part, "config", None) for tower in towers for part in tower.modules())
            configs += [copy for copy in others if getattr(copy, "_attn_implementation", None) == "sdpa"]
        # As dicts: setting an attribute of a configuration takes 1 % of a small model's pass.
        self._settings: list[dict[str, Any]] = list({id(copy): vars(copy) for copy in [config, *configs]}.values())
        with _NEW_LOCK:
            self.lock = _LOCKS.setdefault(decoder, threading.RLock())

    @contextmanager
    def applied(self, name: str | None = None) -> Iterator[None]:
        """Apply the implementation, or the implementation ``name``, during one pass. Passes of all targets that share a
        decoder are serialised, as they share its configuration and hooks."""
        with self.lock:
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


_POSITIONS: ContextVar[Tensor | None] = ContextVar("_POSITIONS", default=None)
"""Positions of the slots in this thread's pass, (batch, slots) int64."""


Replacement = Mapping[Place, Callable[[Any], Any]]
"""Function of a modelling file that uses slot indices, and what it is replaced by; see ``replaced``."""


def slot_attention(config: Any, decoder: nn.Module) -> Replacement | None:
    """The function to replace in passes of a decoder; None if its attention does not use slot indices."""
    module = sys.modules[type(decoder).__module__]
    if getattr(config, "alibi", True) is False:  # Falcon may have rotary embeddings instead
        return None
    if hasattr(module, "build_alibi_tensor"):
        return {(module, "build_alibi_tensor"): _biases}
    if hasattr(module, "MptAttention"):
        return {(module.MptAttention, "forward"): _mpt_attention}
    if hasattr(module, "GPTNeoSelfAttention"):
        return {(module.GPTNeoSelfAttention, "_attn"): _gpt_neo_attention}
    return None


@contextmanager
def slot_positions_applied(replacement: Replacement, mask: Tensor | None) -> Iterator[None]:
    """Replace the function during a pass whose mask may have ``slot_positions``, in this thread only."""
    with replaced(replacement):
        token = _POSITIONS.set(getattr(mask, "slot_positions", None))
        try:
            yield
        finally:
            _POSITIONS.reset(token)


@cache
def _biases(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace ``build_alibi_tensor``: (batch * heads, 1, slots)."""

    @wraps(original)
    def biases(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions = _POSITIONS.get()
        if positions is None:
            return original(attention_mask, num_heads, dtype)
        line = attention_mask.new_ones(1, int(positions.max()) + 1, dtype=torch.long)
        by_position = original(line, num_heads, dtype)[:, 0]  # (heads, positions)
        return by_position[:, positions].transpose(0, 1).reshape(-1, 1, positions.shape[1])

    return biases


@cache
def _mpt_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``MptAttention.forward``, which uses equal biases for all rows."""

    @wraps(original)
    def attention(self: Any, hidden_states: Tensor, position_bias: Tensor, **options: Any) -> tuple[Tensor, None]:
        positions = _POSITIONS.get()
        if positions is None:
            return original(self, hidden_states, position_bias, **options)
        states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            states = states.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = states.unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        key, value = cache_in(options).update(key, value, self.layer_idx)
        # Relative to the last position, as in the table: (heads, 1, positions), 0 at its end.
        positions = positions.clamp(max=position_bias.shape[2] - 1)  # no token is emitted after the last position
        bias = position_bias[:, 0, positions - 1 - int(positions.max())].transpose(0, 1).unsqueeze(2)
        bias = bias.to(query.dtype).masked_fill(options["attention_mask"], torch.finfo(query.dtype).min)
        read = nn.functional.scaled_dot_product_attention(query, key, value, bias, scale=self.softmax_scale)
        return self.out_proj(read.transpose(1, 2).flatten(2)), None

    return attention


@cache
def _gpt_neo_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``GPTNeoSelfAttention._attn``, which masks by slot index; the mask of a pass is already causal."""

    @wraps(original)
    def attention(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
        positions = _POSITIONS.get()
        if positions is None or mask is None:
            return original(self, query, key, value, mask)
        scores = query.float() @ key.float().transpose(-1, -2) + mask
        if self.attention_type == "local":
            distance = positions[:, None, -query.shape[2] :, None] - positions[:, None, None]
            scores = scores.masked_fill(distance >= self.config.window_size, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(value.dtype)
        return weights @ value, weights

    return attention
