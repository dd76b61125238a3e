"""Decoder-only models of transformers as targets; their code and weights stay unmodified."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mmspec.cache.rows import RowTensor, batch_bucket, pad_rows
from mmspec.cache.tree_cache import TreeCache
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.graphs import Graphed
from mmspec.ops.transfer import on_device
from mmspec.quantisation.linear import PackedLinear
from mmspec.speculation.budget import CostTable
from mmspec.speculation.tree import TokenTree
from mmspec.speculation.verify import Verdict
from mmspec.targets import attention
from mmspec.targets.layers import tree_layers
from mmspec.targets.masks import tail_mask, tree_mask
from mmspec.targets.processor import Processor
from mmspec.targets.support import (
    cache_argument,
    decoder_of,
    logit_scaling,
    refuse_rope_switch,
    refuse_unsupported,
    rope_side,
    unscaled,
)
from mmspec.targets.target import Feature, Prompt, Step


class TransformersTarget:
    """A decoder-only model of transformers as a target.

    A tree is verified with a 4D attention mask over (prefix, tree), ``position_ids = prefix + depth`` and a
    ``TreeCache``. Sliding windows are part of the mask. Layers other than attention need a plug-in
    (``mmspec/targets/layers.py``).

    Args:
        model: any causal language model; subclasses take multimodal ones.

    Attributes:
        auto_class: the class of transformers that loads these models.
        processor_class: the ``Processor`` of these models.
        attention: attention implementation of the passes.
        layers: plug-in for layers other than attention; None for a model without any.
        cost: measured verify times; if known, trees are padded to the width with the fastest pass.

    Raises:
        UserError: a part of the architecture cannot verify trees exactly.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    processor_class: ClassVar[type[Processor]] = Processor

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.layers = tree_layers(model, self.config)
        refuse_unsupported(model, self.config, self.layers)
        self.attention = attention.PassAttention(model)
        self.decoder = decoder_of(model)
        self._cache_argument = cache_argument(self.decoder)
        self._embedding: Any = model.get_input_embeddings()
        self._output: Any = model.get_output_embeddings()
        self._scale_logits = logit_scaling(self.config)
        self.cost: CostTable | None = None
        self._head_checked = False
        self.features: Sequence[Feature] = ("last",)
        self._cache: TreeCache | None = None
        # (rows,) position of the next token, and the last position within the context limit
        self._position, self._last_position = RowTensor(), RowTensor()
        self._tail_depth: Tensor | None = None  # (batch, offset) depths of uncommitted nodes of earlier passes
        self._check = Graphed(self._pass)
        self._keep = Graphed(self.absorb)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "layers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.layers = tree_layers(self.model, self.config)

    @classmethod
    def supports(cls, config: Any) -> bool:
        """Whether models of this configuration are loaded as this class."""
        own_code = getattr(config, "auto_map", None) or {}  # of the folder; run only with trust_remote_code
        return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code

    def fork(self) -> TransformersTarget:
        """The same weights and measured cost, without sequences."""
        fork = type(self)(self.model)
        fork.cost = self.cost
        return fork

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer, according to the generation config."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    @property
    def context_limit(self) -> int | None:
        """Most tokens of prompt and output; None if the config has no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def cache(self) -> TreeCache:
        """KV and recurrent states of the sequences."""
        assert self._cache is not None, "prefill comes first"
        return self._cache

    @property
    def rows(self) -> int:
        """Number of sequences in the cache."""
        return self._cache.rows if self._cache is not None else 0

    def prefill(self, prompt: Prompt, room: int | Sequence[int]) -> Step:
        *_, step = self.prefill_chunks(prompt, room, None)
        assert step is not None
        return step

    @torch.inference_mode()
    def prefill_chunks(self, prompt: Prompt, room: int | Sequence[int], chunk: int | None) -> Iterator[Step | None]:
        ids, mask = prompt.input_ids, prompt.attention_mask
        batch, length = ids.shape
        longest = room if isinstance(room, int) else max(room)
        shortest = length if mask is None else int(mask.sum(1).min())
        refuse_rope_switch(self.config, shortest, length - shortest + longest)
        reserve = length + min(longest, 4096) + 64
        # Rows that are copied to another cache need no slots for the answer.
        cache = self._new_cache(length + 1 if self.in_place or self.rows else reserve, False)
        positions = prompt.inputs.get("position_ids")
        if positions is None:
            positions = self._prompt_positions(ids, mask)
        call = {**prompt.inputs, "input_ids": ids, "attention_mask": mask, "position_ids": positions}
        given = self._decoder_inputs(call, cache) if chunk is not None and batch == 1 and length > chunk else None
        if chunk is None or given is None:
            logits, given, features = self._whole_prompt(call, cache)
            cache.commit_prompt(length, mask, batch)
        else:
            passes: list[dict[Feature, Tensor]] = []
            for start in range(0, length, chunk):
                if start:
                    yield None
                passes.append(self._prompt_part(given, slice(start, min(start + chunk, length)), cache))
            features = {name: torch.cat([one[name] for one in passes], dim=1) for name in passes[0]}
            logits = self.head(features["last"][:, -1:])
        # A decoder without attention has no position_ids.
        position = self._next_position(prompt, given.get("position_ids") if cache.attending else positions)
        last = (position + on_device(room, ids.device) - 1).clamp(min=(self.context_limit or 0) - 1)
        self._check_head(features["last"][:, -1:], logits)
        self._join(cache, reserve)
        self._position.append(position)
        self._last_position.append(last)
        kept = {name: features[name] for name in self.features}
        yield Step(logits, kept, self._visual(prompt), given.get("inputs_embeds"))

    def kind(self, prompt: Prompt) -> Hashable:
        return rope_side(self.config, prompt.input_ids.shape[1])

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        if self._cache is not None:
            self._tail_depth = None
            for part in (self._cache, self._position, self._last_position):
                part.select(rows)

    @torch.inference_mode()
    def forward_tree(self, tree: TokenTree) -> Step:
        nodes, batch = tree.nodes, tree.batch
        width = nodes if self.cost is None else self.cost.width(nodes, batch)
        names = list(self.features)
        if self.cache.in_place:
            width, rows = node_bucket(width), batch_bucket(batch)
            self.cache.reserve_nodes(width)
            logits, *read = self._check(*_padded(tree, width, rows), version=(*self.version, *names))
            features = {name: one[:batch, :nodes] for name, one in zip(names, read, strict=True)}
            return Step(logits[:batch, :nodes], features)
        if width == nodes:
            found = self._forward_nodes(tree.tokens, None if nodes == 1 else tree.depth, tree.ancestors)
        else:
            found = self._forward_nodes(*_padded(tree, width, batch))
            found = {name: one[:, :nodes] for name, one in found.items()}
        return Step(self.head(found["last"]), {name: found[name] for name in names})

    def _pass(self, tokens: Tensor, depth: Tensor, reach: Tensor) -> tuple[Tensor, ...]:
        """Logits and features of a whole tree; captured as a CUDA graph."""
        found = self._forward_nodes(tokens, depth, reach)
        return self.head(found["last"]), *[found[name] for name in self.features]

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        rows = [path for path, _ in verdict.host]
        self.commit_nodes(verdict.path, rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self._scale_logits(_by_rows(self._output, hidden))

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        layer = self._output
        ids = token_ids.to(self.device)
        # The first tokens of the vocabulary need no copy of their rows.
        first = torch.equal(ids, torch.arange(len(ids), device=ids.device))
        rows = slice(len(ids)) if first else ids
        if isinstance(layer, PackedLinear):
            return _NarrowHead(layer.rows(rows), self._scale_logits)
        weight = layer.weight.detach()[rows]
        bias = layer.bias.detach()[rows] if getattr(layer, "bias", None) is not None else None
        return _NarrowHead(partial(F.linear, weight=weight, bias=bias), self._scale_logits)

    def forward_nodes(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> Tensor:
        """Last hidden states of new nodes, which attend to the prefix and to uncommitted nodes.

        Args:
            tokens: (batch, nodes) int64.
            depth: (batch, nodes) int64, distance of each node to the end of the prefix; None means 0.
            reach: (batch, nodes, earlier + nodes) bool, the uncommitted nodes that each node attends to.
        """
        return self._forward_nodes(tokens, depth, reach)["last"]

    def _forward_nodes(self, tokens: Tensor, depth: Tensor | None, reach: Tensor) -> dict[Feature, Tensor]:
        cache, batch = self.cache, len(tokens)
        position = self._position.data[:batch, None]
        position = position.expand_as(tokens) if depth is None else position + depth
        # Draft tokens may exceed the context limit, where a model may have no position embedding.
        position = torch.minimum(position, self._last_position.data[:batch, None])
        inputs = {"input_ids": tokens, "position_ids": position, **cache.arguments(reach)}
        if not cache.in_place:
            inputs["attention_mask"] = self._mask(cache, depth, self._tail_depth, reach)
            return self._decoded(inputs, cache)
        depth = torch.zeros_like(tokens) if depth is None else depth
        cache.reserve_nodes(tokens.shape[1])
        cache.set_write_slots(tokens.shape[1])
        inputs["attention_mask"] = None
        if cache.attending:
            assert cache.bounds is not None
            inputs["attention_mask"] = tail_mask(self.config, depth, self._tail_depth, reach)
            inputs[attention.PASS] = attention.TreePass(self.config, cache.bounds.first(batch), depth)
        return self._decoded(inputs, cache)

    def _mask(
        self, cache: TreeCache, depth: Tensor | None, tail_depth: Tensor | None, reach: Tensor
    ) -> Tensor | dict[str, Tensor | None] | None:
        """``tree_mask`` in the form of the attention implementation of the passes."""
        with self.attention.applied():
            return tree_mask(self.config, cache, depth, tail_depth, reach, self.model.dtype)

    def _decoded(self, inputs: dict[str, Any], cache: TreeCache) -> dict[Feature, Tensor]:
        """Features of one pass of the decoder, including ``"last"``."""
        layers = self.layers.applied() if self.layers is not None else nullcontext()
        with self.attention.applied(), layers, self._reading() as features:
            out = self.decoder(use_cache=True, **{self._cache_argument: cache}, **inputs)
        features["last"] = self._in_dtype(out[0])
        return features

    @contextmanager
    def _reading(self) -> Iterator[dict[Feature, Tensor]]:
        """Records the inputs of the layers in ``self.features`` during one pass."""
        features: dict[Feature, Tensor] = {}

        def record(layer: int, _: Any, args: Any, inputs: dict[str, Any]) -> None:
            features[layer] = self._in_dtype(args[0] if args else inputs["hidden_states"])

        with ExitStack() as hooks:
            for layer in self.features:
                if isinstance(layer, int):
                    part = self._decoder_layers[layer]
                    hooks.enter_context(part.register_forward_pre_hook(partial(record, layer), with_kwargs=True))
            yield features

    @cached_property
    def _decoder_layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        stacks = [part for part in self.decoder.children() if isinstance(part, nn.ModuleList) and len(part) == count]
        if len(stacks) != 1:
            raise UserError(f"features of layers need a decoder with one list of {count} layers: got {len(stacks)}")
        return stacks[0]

    def _whole_prompt(
        self, call: dict[str, Any], cache: TreeCache
    ) -> tuple[Tensor, dict[str, Any], dict[Feature, Tensor]]:
        """Prefill in one pass of the model: last logits, the decoder's inputs, its features."""
        given: dict[str, Any] = {}
        last: dict[Feature, Tensor] = {}

        def record(_: Any, args: Any, inputs: dict[str, Any], out: Any = None) -> None:
            if inputs.get(self._cache_argument) is cache:
                given.update(inputs) if out is None else last.update(last=self._in_dtype(out[0]))

        with (
            self.attention.applied(),
            self._reading() as features,
            self.decoder.register_forward_pre_hook(record, with_kwargs=True),
            self.decoder.register_forward_hook(record, with_kwargs=True),
            self._output.register_forward_pre_hook(_contiguous_input),
        ):
            out = self.model(**call, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        return out.logits[:, -1:], given, {**features, **last}

    def _decoder_inputs(self, call: dict[str, Any], cache: TreeCache) -> dict[str, Any] | None:
        """The decoder's inputs for a prompt, visual embeddings included; None if they cannot be split into chunks."""
        limit = getattr(self.config, "time_step_limit", None) or (0.0, inf)
        if self.layers is not None and tuple(limit) != (0.0, inf):
            return None  # transformers clamps the step sizes of a prompt in one pass; tree passes do not
        given = call
        if set(call) - {"input_ids", "attention_mask", "position_ids"}:

            def stop(_: Any, args: Any, inputs: dict[str, Any]) -> None:
                raise _DecoderReachedError(inputs)

            try:
                with self.attention.applied(), self.decoder.register_forward_pre_hook(stop, with_kwargs=True):
                    self.model(**call, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
            except _DecoderReachedError as reached:
                given = reached.inputs
        unknown = {name for name, value in given.items() if value is not None} - _SPLIT
        known = given.get("position_ids") is not None or not cache.attending
        return None if unknown or not known else given

    def _prompt_part(self, given: dict[str, Any], part: slice, cache: TreeCache) -> dict[Feature, Tensor]:
        """Prefill a chunk of a prompt, after the first as a chain of nodes that are all accepted; its features."""
        inputs = {name: given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None}
        inputs = {name: value[:, part] for name, value in inputs.items()}
        if cache.attending:
            inputs["position_ids"] = given["position_ids"][..., part]
        if (visual := given.get("visual_pos_masks")) is not None:
            first, count = int(visual[:, : part.start].sum()), int(visual[:, part].sum())
            inputs["visual_pos_masks"] = visual[:, part]
            inputs["deepstack_visual_embeds"] = [
                embeds[first : first + count] for embeds in given["deepstack_visual_embeds"]
            ]
        if part.start == 0:
            features = self._decoded(inputs, cache)
            cache.commit_prompt(part.stop, None, 1)
            return features
        nodes = part.stop - part.start
        reach = torch.ones(1, nodes, nodes, dtype=torch.bool, device=self.device).tril()
        depth = torch.arange(nodes, device=self.device)[None]
        inputs["attention_mask"] = self._mask(cache, depth, None, reach)
        features = self._decoded({**inputs, **cache.arguments(reach)}, cache)
        cache.commit(depth, [list(range(nodes))])
        return features

    def _join(self, prompts: TreeCache, reserve: int) -> None:
        """Add the rows of a prefilled cache, with at most ``reserve`` slots."""
        if self._cache is None or self._cache.in_place != self.in_place or not (self.in_place or self.rows):
            self._position, self._last_position = RowTensor(self.in_place), RowTensor(self.in_place)
            self._cache = self._new_cache(reserve, True) if self.in_place else prompts
        if self._cache is not prompts:
            self._cache.append(prompts, reserve)

    def keep_nodes(self, depth: Tensor) -> None:
        """Keep the nodes of the last ``forward_nodes`` uncommitted, so that further nodes can attend to them."""
        assert self._cache is not None
        self._tail_depth = depth if self._tail_depth is None else torch.cat([self._tail_depth, depth], dim=1)
        self._cache.offset = self._tail_depth.shape[1]

    def forget_nodes(self) -> None:
        """Drop all uncommitted nodes."""
        self.cache.offset, self._tail_depth = 0, None

    def commit_nodes(self, path: Tensor, rows: list[list[int]]) -> None:
        """Commit one path of nodes per row, (batch, depth) padded with -1 and as lists; drop all other nodes."""
        self._tail_depth = None
        grown = [len(row) for row in rows]
        if self.cache.in_place:
            self._keep(pad_rows(path, batch_bucket(len(path)), -1), version=self.version)
            self.cache.advance(grown)
            return
        self.cache.commit(path, rows)
        position = self._position.data
        position += grown[0] if len(set(grown)) == 1 else on_device(grown, position.device)

    def absorb(self, path: Tensor) -> tuple[Tensor, ...]:
        """Device part of ``commit_nodes`` for static shapes; captured as a CUDA graph."""
        self.cache.commit_on_device(path)
        self._position.data[: len(path)] += (path >= 0).sum(1)
        return ()

    @property
    def version(self) -> tuple[Hashable, ...]:
        """Changes when a buffer that captured graphs read has been reallocated."""
        return self.cache.version, self._position.version, self._last_position.version

    @property
    def in_place(self) -> bool:
        """Whether passes have static shapes."""
        kinds = getattr(self.config, "layer_types", None) or ()
        supported = self.attention.name == attention.NAME and "chunked_attention" not in kinds
        supported = supported or (self.layers is not None and not self.layers.attends)
        return supported and kernels.fixed_shapes(self.device)

    def _new_cache(self, reserve: int, in_place: bool) -> TreeCache:
        if self.layers is not None:
            return self.layers.cache(reserve, in_place)
        return TreeCache(self.config.num_hidden_layers, reserve=reserve, in_place=in_place)

    def _in_dtype(self, hidden: Tensor) -> Tensor:
        """Last hidden states in the dtype of the weights: Mamba-2 returns float32."""
        return hidden.to(self._embedding.weight.dtype)

    def _prompt_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """``position_ids`` of the prompt, (batch, length); None if the model must compute them."""
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def _next_position(self, prompt: Prompt, positions: Tensor | None) -> Tensor:
        """(batch,) position of the first new token, from the decoder's ``position_ids`` of the prompt."""
        if positions is None:
            raise UserError(f"the decoder must be given position_ids: that of {type(self.model).__name__} is not")
        if positions.ndim == 3:
            # Qwen-VL: an image is followed by its largest coordinate + 1; a fourth axis, in front, counts tokens.
            return positions[-3:].amax((0, 2)) + 1
        return positions[:, -1].expand(prompt.input_ids.shape[0]) + 1

    def _visual(self, prompt: Prompt) -> Tensor | None:
        return None

    def _check_head(self, hidden: Tensor, logits: Tensor) -> None:
        """Checks once that the head, as applied to trees, returns the model's own logits."""
        if self._head_checked:
            return
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        fits = self._output.weight.shape[-1] == hidden.shape[-1]  # other widths: a projection before the output layer
        # Some vision-language models do not scale logits as their text model does (Cohere).
        for scale in (self._scale_logits, unscaled) if fits else ():
            self._scale_logits = scale
            if torch.allclose(self.head(hidden).float(), logits.float(), atol=tolerance, rtol=tolerance):
                break
        else:
            raise UserError(
                f"{type(self.model).__name__} transforms its logits after the output layer in an unknown way: expected "
                "head(hidden) to equal the model's logits"
            )
        self._head_checked = True


class _NarrowHead:
    """An output layer restricted to some tokens."""

    def __init__(self, layer: Callable[[Tensor], Tensor], scale: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._scale = layer, scale

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scale(_by_rows(self._layer, hidden))

    def __deepcopy__(self, memo: dict[int, Any]) -> _NarrowHead:
        return self  # copies of a drafter share weights


_SPLIT = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"}
_SPLIT |= {"past_key_values", "cache_params", "use_cache", "return_dict"}
"""Inputs of a decoder that can be split into chunks of positions, or apply to every chunk."""


class _DecoderReachedError(Exception):
    """Ends a model's forward when it calls the decoder."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


def node_bucket(nodes: int) -> int:
    """Padded number of nodes of a pass with static shapes: a power of two, above 64 a multiple of 64."""
    return 1 << (nodes - 1).bit_length() if nodes <= 64 else -(-nodes // 64) * 64


def _contiguous_input(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of the output layer: makes its input contiguous; see ``_by_rows``."""
    return inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]


def _by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear layer to (..., features) as one matrix: for a slice of few nodes torch would run a batched product
    and copy the whole weight."""
    y = layer(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


def _padded(tree: TokenTree, width: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, depths and ancestors of a tree, with padding nodes and rows that attend to themselves only."""
    extra, idle = (0, width - tree.nodes), (0, rows - tree.batch)
    if not any(extra + idle):
        return tree.tokens, tree.depth, tree.ancestors
    reach = F.pad(tree.ancestors, extra + extra + idle) | torch.eye(width, dtype=torch.bool, device=tree.tokens.device)
    return F.pad(tree.tokens, extra + idle), F.pad(tree.depth, extra + idle), reach
