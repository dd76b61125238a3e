"""Decoder passes of a target, with the features that drafters read, and its output layer.

Passes are verify passes, and prefill, whole or in chunks. Runners keep the KV cache of the running sequences, and
run verify passes over it, eager or with static shapes for CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from inspect import signature
from itertools import product
from math import inf
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mmspec.cache.rows import RowTensor, batch_bucket
from mmspec.cache.tree_cache import CACHE_NAMES, TreeCache, cache_argument, cache_in
from mmspec.core.target import Feature, TargetOutput, layer_of
from mmspec.core.tree import TokenTree
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.graphs import Graphed
from mmspec.ops.transfer import on_device
from mmspec.quantisation.blocks import BlockLinear
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.attention import (
    NAME,
    PASS,
    PassAttention,
    TreePass,
    slot_attention,
    slot_limit,
    slot_positions,
    slot_positions_applied,
    tail_mask,
    tree_mask,
)
from mmspec.targets.packing import linear_of
from mmspec.targets.static_forward import FusedDecoder
from mmspec.targets.sublayers import States, SublayerStack
from mmspec.targets.support import (
    cached_layers,
    computing_devices,
    decoder_of,
    input_device,
    is_sharded,
    is_split,
    output_layer,
    refuse_not_finite,
    refuse_unsupported,
    towers_of,
)
from mmspec.targets.tree_layers import tree_layers

_TOLERANCE, _HALF_TOLERANCE = {torch.float32: 1e-3}, 0.1
"""Relative tolerance between a fused pass and the decoder: above rounding errors, below different computations."""

_FAR = 1 << 11  # positions


class Decoder:
    """A model's decoder layers, run with a ``TreeCache``.

    Args:
        model: the model; its code and weights stay unmodified.
        count: run only the first ``count`` layers, then the final norm; None runs all layers.
        prepare: called at the start of each pass.
        kv_cache_dtype: ``"int8"``, or ``"auto"``, the dtype of the passes.

    Attributes:
        config: configuration of the text model, with all layers.
        layers: plug-in for layers other than attention; None for attention-only models.
        takes_positions: whether the model's forward has ``position_ids``.
        has_position_axes: whether visual tokens have several positions each, computed by the model (Qwen-VL).

    Raises:
        UserError: a part of the architecture cannot verify trees exactly, ``count`` is not less than the number of
            layers, or the C++ kernels do not run the attention to keys and values in int8.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        count: int | None = None,
        prepare: Callable[[], None] = lambda: None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._model, self._int8 = model, kv_cache_dtype == "int8"
        self.config = model.config.get_text_config()
        self.layers = tree_layers(model, self.config)
        refuse_unsupported(model, self.config, self.layers)
        if self.layers is not None and (is_sharded(model) or len(computing_devices(model)) > 1):
            raise UserError(f"layers with states are on one device: {type(model).__name__} is split over several")
        self._module = decoder_of(model)
        self.attention = PassAttention(model, self._module, prepare, towers_of(model) if self._is_packed else [])
        if count is not None:
            last = len(self._stack) - 1
            if not 0 < count <= last:
                raise UserError(
                    f"an early exit must be after a layer before the last: expected 1 to {last}, got {count}"
                )
            self._module = self._with_layers(self._stack[:count])
        self._slots = slot_attention(self.config, self._module)
        self._limited = self._slots is not None or slot_limit(self.config) is not None
        self.has_position_axes = hasattr(model.base_model, "get_rope_index")
        self.takes_positions = "position_ids" in signature(self._module.forward).parameters
        self._cache_argument = cache_argument(self._module)
        self._fuses: bool | None = None  # whether the first fused pass matched the decoder's output
        self._embedding: Any = model.get_input_embeddings()
        self._output = output_layer(model)
        self._gathered = input_device(model) if is_split(model) else None  # device for features of all layers
        if self._int8 and (self.static_shapes or self._sublayers is None or not self._sublayers.attends):
            raise UserError(
                "kv_cache_dtype int8 needs packed weights (int8, int4, GGUF, or bfloat16 on a CPU) whose "
                f"attention runs in the C++ kernels: got {type(model).__name__} in {model.dtype} on {model.device}"
            )

    @property
    def static_shapes(self) -> bool:
        """Whether passes on the model's current device use static shapes."""
        kinds = getattr(self.config, "layer_types", None) or ()
        supported = self.attention.name == NAME and "chunked_attention" not in kinds
        supported = supported or (self.layers is not None and not self.layers.attends)
        supported = supported and (self.layers is None or self.layers.static_shapes)
        return supported and not is_split(self._model) and kernels.static_shapes(self._model.device)

    def new_cache(self, reserve: int, static_shapes: bool) -> TreeCache:
        """An empty cache for the model's layers, with ``reserve`` KV slots."""
        return self._cache(reserve, static_shapes, self._centre)

    def _cache(self, reserve: int, static_shapes: bool = False, centre: Tensor | None = None) -> TreeCache:
        if self.layers is not None:
            return self.layers.cache(reserve, static_shapes, centre)
        layers = cached_layers(self.config)
        return TreeCache(layers, reserve=reserve, static_shapes=static_shapes, centre=centre)

    @cached_property
    def _centre(self) -> Tensor | None:
        """``TreeCache.centre``: the mean of the keys of some tokens at positions far apart. Biases of key projections
        (Qwen2.5) are often larger than all else in a key."""
        if not self._int8:
            return None
        count, limit = 64, min(getattr(self.config, "max_position_embeddings", None) or _FAR, _FAR)
        places, cache = torch.arange(count), self._cache(count)
        positions = places * (places + 1) * limit // (count * (count + 1))  # no multiples of one distance
        call = {"input_ids": places[None] % self.config.vocab_size, "position_ids": positions[None]}
        with torch.inference_mode():
            self.prefill_chunk(call, slice(0, count), cache, ())
        keys = [cache.kv.states(layer)[0][0, :, :count] for layer in cache.attending]
        return torch.stack(keys).float().mean(2)

    def mask(
        self, cache: TreeCache, depth: Tensor | None, tail_depth: Tensor | None, reach: Tensor
    ) -> Tensor | dict[str, Tensor | None] | None:
        """``tree_mask`` in the form that the passes' attention implementation requires."""
        if reach.shape[1:] == (1, 1) and not self._limited and not cache.padded:
            return None  # a single node attends to everything
        with self.attention.applied():
            mask = tree_mask(self.config, cache, depth, tail_depth, reach, self._model.dtype)
        if self._slots is None or not isinstance(mask, Tensor):
            return mask
        depth = reach.new_zeros(reach.shape[:2], dtype=torch.long) if depth is None else depth
        mask.slot_positions = slot_positions(cache, depth, tail_depth)  # type: ignore[attr-defined]
        return mask

    def forward(self, inputs: dict[str, Any], cache: TreeCache, names: Sequence[Feature]) -> dict[Feature, Tensor]:
        """Run one decoder pass; returns the named features and ``"last"``."""
        slots, mask = self._slots, inputs.get("attention_mask")
        with self._applied(), nullcontext() if slots is None else slot_positions_applied(slots, mask):
            if (direct := self._direct_states(inputs, cache)) is not None:
                return self._named(direct, names)
            with self._reading(names) as features:
                features["last"] = self._in_dtype(self._run(inputs, cache))
        return features

    def _named(self, computed: States, names: Sequence[Feature]) -> dict[Feature, Tensor]:
        """The named features and ``"last"``."""
        first, outputs, last = computed
        places = {name: sum(layer) for name in names if (layer := layer_of(name)) is not None}
        features = {name: outputs[place - 1] if place else first for name, place in places.items()}
        return {name: self._in_dtype(state) for name, state in {**features, "last": last}.items()}

    def _run(self, inputs: dict[str, Any], cache: TreeCache) -> Tensor:
        return self._module(use_cache=True, **{self._cache_argument: cache}, **inputs)[0]

    def _direct_states(self, inputs: dict[str, Any], cache: TreeCache) -> States | None:
        """States computed without the decoder's forward; None if the forward is needed."""
        if PASS not in inputs:
            others = inputs.keys() - {"input_ids", "inputs_embeds", "position_ids", "attention_mask"}
            usual = all(inputs[name] is cache for name in others)
            return self._sublayers.states(inputs, cache) if usual and self._sublayers is not None else None
        states = None if self._fuses is False else self._fused_states(inputs, cache)
        if states is not None and self._fuses is None:
            # Checked once: some decoders scale their embeddings, or do more after the last layer.
            whole, computed = self._run(inputs, cache).float(), states[2].float()
            tolerance = _TOLERANCE.get(states[2].dtype, _HALF_TOLERANCE)
            self._fuses = bool((computed - whole).norm() <= tolerance * whole.norm())
        return states if self._fuses else None

    @property
    def _is_packed(self) -> bool:
        return any(isinstance(layer, BlockLinear) for layer in self._module.modules())

    @cached_property
    def _sublayers(self) -> SublayerStack | None:
        """The layers for the C++ kernels; None if the kernels do not support them."""
        if not self._is_packed or self._slots is not None or is_split(self._model):
            return None
        try:
            with self._applied():
                return SublayerStack(self._module, () if self.layers is None else self.layers.mixers)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            return None

    def _fused_states(self, inputs: dict[str, Any], cache: TreeCache) -> States | None:
        """States from ``FusedDecoder.states``."""
        fused, usual = self._fused, inputs.keys() == {"input_ids", "position_ids", "attention_mask", PASS}
        if fused is None or not usual or not fused.current:
            return None
        positions = inputs["position_ids"]
        positions = positions.expand(3, -1, -1) if self.has_position_axes else positions
        states, last = fused.states(inputs["input_ids"], positions, inputs["attention_mask"], inputs[PASS], cache)
        return states[0], states[1:], last

    @cached_property
    def _fused(self) -> FusedDecoder | None:
        return None if is_sharded(self._model) else FusedDecoder.of(self._module, self.config)

    def prefill(
        self, call: dict[str, Any], cache: TreeCache, names: Sequence[Feature]
    ) -> tuple[Tensor, dict[str, Any], dict[Feature, Tensor]]:
        """Prefill in one pass of the model; returns last logits, the decoder's inputs and its features."""
        decoder_inputs: dict[str, Any] = {}
        last: dict[Feature, Tensor] = {}

        def record(_: Any, args: Any, inputs: dict[str, Any], out: Any = None) -> None:
            if cache_in(inputs) is cache:
                decoder_inputs.update(inputs) if out is None else last.update(last=self._in_dtype(out[0]))

        with (
            self._applied(),
            self._reading(names) as features,
            self._module.register_forward_pre_hook(record, with_kwargs=True),
            self._module.register_forward_hook(record, with_kwargs=True),
            self._output.register_forward_pre_hook(contiguous_input),
        ):
            out = self._run_model(call, cache)
        return out.logits[:, -1:], decoder_inputs, {**features, **last}

    @property
    def continues(self) -> bool:
        """Whether a prompt can be prefilled in parts."""
        limit = getattr(self.config, "time_step_limit", None) or (0.0, inf)
        # transformers clamps Mamba step sizes in a full prompt pass, tree passes do not.
        return self.layers is None or tuple(limit) == (0.0, inf)

    def chunk_inputs(self, call: dict[str, Any], cache: TreeCache) -> dict[str, Any] | None:
        """The decoder's inputs for a prompt, visual embeddings included; None if they cannot be split into chunks."""
        if not self.continues:
            return None
        decoder_inputs = call
        if set(call) - {"input_ids", "attention_mask", "position_ids"}:

            def stop(_: Any, args: Any, inputs: dict[str, Any]) -> None:
                raise _DecoderReachedError(inputs)

            try:
                with self.attention.applied(), self._module.register_forward_pre_hook(stop, with_kwargs=True):
                    self._run_model(call, cache)
            except _DecoderReachedError as reached:
                decoder_inputs = reached.inputs
        unknown = {name for name, value in decoder_inputs.items() if value is not None} - _SPLIT
        known = decoder_inputs.get("position_ids") is not None or not self.takes_positions
        mask = decoder_inputs.get("attention_mask")
        causal = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)  # Gemma 3's images are not causal
        return decoder_inputs if known and causal and not unknown else None

    def prefill_chunk(
        self, given: dict[str, Any], part: slice, cache: TreeCache, names: Sequence[Feature]
    ) -> dict[Feature, Tensor]:
        """Prefill one chunk of a prompt with the inputs of ``chunk_inputs``, and return its features. Later chunks run
        as chains of accepted nodes. Padding on the left requires ``prompts_natively``."""
        inputs = {name: given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None}
        inputs = {name: value[:, part] for name, value in inputs.items()}
        if self.takes_positions:
            inputs["position_ids"] = given["position_ids"][..., part]
        if (visual := given.get("visual_pos_masks")) is not None:
            first, count = int(visual[:, : part.start].sum()), int(visual[:, part].sum())
            inputs["visual_pos_masks"] = visual[:, part]
            inputs["deepstack_visual_embeds"] = [
                embeds[first : first + count] for embeds in given["deepstack_visual_embeds"]
            ]
        mask, nodes, device = given.get("attention_mask"), part.stop - part.start, input_device(self._model)
        if mask is not None and bool(mask.all()):
            mask = None
        rows = len(next(iter(inputs.values())))
        native = visual is None and self.prompts_natively(cache)
        if native:
            assert self._sublayers is not None
            with self._applied():
                known = None if mask is None else mask[:, : part.stop]
                features = self._named(self._sublayers.prompt(inputs, known, cache), names)
        if part.start == 0:
            features = features if native else self.forward(inputs, cache, names)
            cache.commit_prompt(part.stop, None, rows)
        else:
            depth = torch.arange(nodes, device=device).expand(rows, -1)
            if not native:
                reach = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
                inputs["attention_mask"] = self.mask(cache, depth, None, reach)
                features = self.forward({**inputs, **cache.arguments(reach)}, cache, names)
            cache.commit(depth, [list(range(nodes))] * rows)
        if mask is not None and part.stop == mask.shape[1]:
            cache.commit_prompt(part.stop, mask, rows)  # remove padding
        return features

    def prompts_natively(self, cache: TreeCache) -> bool:
        """Whether prompts run in the C++ kernels of ``SublayerStack``, in which tokens have the bits of decoding."""
        return self._sublayers is not None and self._sublayers.runs(cache)

    def run_layer(self, layer: int, inputs: dict[str, Any], attention: str) -> None:
        """Run one layer on a prompt with a separate cache, for the side effects of its hooks or attention function.

        Args:
            inputs: the decoder's inputs, with the layer's input as ``inputs_embeds``.
            attention: name of an attention implementation of transformers.
        """
        decoder, cache = self._with_layers(nn.ModuleList([self._stack[layer]])), self.new_cache(0, False)
        with self.attention.applied(attention):
            if getattr(self.config, "layer_types", None):  # by place
                decoder.config = copy.copy(decoder.config)
                vars(decoder.config)["layer_types"] = [self.config.layer_types[layer]]
            decoder(use_cache=True, **{self._cache_argument: cache}, **inputs)

    def _run_model(self, call: dict[str, Any], cache: TreeCache) -> Any:
        # Some models can only compute the logits of all positions.
        least = {"logits_to_keep": 1} if "logits_to_keep" in signature(self._model.forward).parameters else {}
        return self._model(**call, use_cache=True, **least, **{cache_argument(self._model): cache})

    @contextmanager
    def _applied(self) -> Iterator[None]:
        """Apply the pass's attention implementation and patched functions."""
        with self.attention.applied(), self.layers.applied() if self.layers is not None else nullcontext():
            yield

    @contextmanager
    def _reading(self, names: Sequence[Feature]) -> Iterator[dict[Feature, Tensor]]:
        """Hook the named layers to record their inputs and outputs during one pass."""
        features: dict[Feature, Tensor] = {}

        def record_input(name: Feature, _: Any, args: Any, inputs: dict[str, Any]) -> None:
            features[name] = self._in_dtype(args[0] if args else inputs["hidden_states"])

        def record_output(name: Feature, _: Any, args: Any, out: Any) -> None:
            features[name] = self._in_dtype(out[0] if isinstance(out, tuple) else out)

        with ExitStack() as hooks:
            for name in names:
                if (place := layer_of(name)) is None:
                    continue
                layer, after = self._stack[place[0]], place[1]
                if after:
                    hooks.enter_context(layer.register_forward_hook(partial(record_output, name)))
                else:
                    hooks.enter_context(layer.register_forward_pre_hook(partial(record_input, name), with_kwargs=True))
            yield features

    def _with_layers(self, layers: nn.ModuleList) -> Any:
        """A shallow copy of the decoder with ``layers`` instead of its layers."""
        decoder = copy.copy(self._module)
        vars(decoder).pop("forward", None)  # an instance forward would run the original decoder
        decoder._modules = {name: layers if part is self._stack else part for name, part in decoder._modules.items()}
        return decoder

    @cached_property
    def _stack(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        stacks = [part for part in self._module.children() if isinstance(part, nn.ModuleList) and len(part) == count]
        if len(stacks) != 1:
            raise UserError(f"single layers need a decoder with one list of {count} layers: got {len(stacks)}")
        if (runs := cached_layers(self.config)) > count:
            raise UserError(f"single layers need a decoder that runs each once: got {runs} runs of {count} layers")
        return stacks[0]

    def _in_dtype(self, hidden: Tensor) -> Tensor:
        """Hidden states in the dtype of the weights, as Mamba-2 returns float32, and on the device of the inputs."""
        return hidden.to(device=self._gathered, dtype=self._embedding.weight.dtype)


_SPLIT = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"}
_SPLIT |= {*CACHE_NAMES, "use_cache", "return_dict", "logits_to_keep"}
"""Decoder inputs that can be split by position or apply to every chunk."""


class _DecoderReachedError(Exception):
    """Raised in a model's forward when it calls the decoder, to capture the decoder's inputs."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


class Head:
    """A model's output layer, with an optional module before it and its logit scaling: logits from hidden states, over
    the whole vocabulary or some tokens.

    Attributes:
        checked: whether the head was compared with the model's logits, by a prefill in one pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layer = output_layer(model)
        config = model.config.get_text_config()
        self._scale = _logit_scaling(config)
        self._size = getattr(config, "unpadded_vocab_size", None)  # the layer's remaining rows are padding
        self._before: Callable[[Tensor], Tensor] = _unchanged
        others = [part for part in model.children() if not isinstance(part, PreTrainedModel)]
        self._candidates: list[Callable[[Tensor], Tensor]] = [_unchanged, *others]
        self._model: Any = model
        self._name = type(model).__name__
        self.checked = False

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._scale(_by_rows(self._layer, self._before(hidden)))
        logits = logits if self._size is None else logits[..., : self._size]
        return logits.to(hidden.device)  # a dispatched model's output layer may be on another device

    def narrow(self, token_ids: Tensor) -> Head:
        """Restrict the head to some tokens, (tokens,) int64, on the layer's device."""
        if is_split(self._model):
            return self._with(self, _unchanged, partial(torch.index_select, dim=-1, index=token_ids))
        # A prefix of the vocabulary needs no copy of the weight.
        first = torch.equal(token_ids, torch.arange(len(token_ids), device=token_ids.device))
        rows = slice(len(token_ids)) if first else token_ids
        layer = self._layer
        if isinstance(layer, PackedLinear):
            return self._with(layer.rows(rows), self._before, self._scale)
        bias = layer.bias.detach()[rows] if getattr(layer, "bias", None) is not None else None
        return self._with(linear_of(layer.weight.detach()[rows], bias), self._before, self._scale)

    def _with(self, layer: Callable[[Tensor], Tensor], before: Any, scale: Any) -> Head:
        head = copy.copy(self)
        head._layer, head._before, head._scale, head._size = layer, before, scale, None
        head._model, head._candidates, head.checked = None, [], True  # a drafter's copy must not hold the model
        return head

    @property
    def linear(self) -> Any:
        """The linear layer if nothing precedes or follows it; else None."""
        return self._layer if self._before is _unchanged and self._scale is _unchanged else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Head:
        return self  # copies of a drafter share weights

    def check(self, hidden: Tensor, logits: Tensor) -> None:
        """At the first call, check that the head reproduces the model's logits; finds the module before the output
        layer (ModernBERT's decoder) and corrects the scaling. Raises ``UserError``: the model transforms its logits in
        an unknown way, or they are NaN."""
        if self.checked:
            return
        # Some vision-language models do not scale logits as their text model does (Cohere).
        for before, scale in product(self._candidates, (self._scale, _unchanged)):
            self._before, self._scale = before, scale
            if self._gives(logits, hidden):
                break
        else:
            if bool(logits.isnan().any()):
                refuse_not_finite(self._model.state_dict().items())
                raise UserError(f"{self._name}: expected logits that are numbers, received NaN")
            raise UserError(
                f"{self._name} transforms its logits after the output layer in an unknown way: expected "
                "head(hidden) to equal the model's logits"
            )
        self.checked = True

    def _gives(self, logits: Tensor, hidden: Tensor) -> bool:
        tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1
        try:
            computed = self(hidden)
        except (RuntimeError, TypeError):  # width mismatch: a projection precedes the output layer
            return False
        fits = computed.shape == logits.shape
        return fits and torch.allclose(computed.float(), logits.float(), atol=tolerance, rtol=tolerance)


def contiguous_input(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of the output layer: makes its input contiguous; see ``_by_rows``."""
    return inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:]


def _by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear layer to (..., features) flattened to a matrix: for a slice of few nodes torch would run a batched
    product and copy the whole weight."""
    y = layer(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


def _logit_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """Scaling of logits after the output layer (Gemma, Cohere, Granite, Falcon-H1, Muse, Inkling)."""
    if cap := getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None):
        return partial(_capped, cap=cap, scale=getattr(config, "output_multiplier", 1.0))
    if scale := getattr(config, "logit_scale", None):
        return partial(torch.mul, other=scale)
    if scale := getattr(config, "logits_scaling", None) or getattr(config, "logits_mup_width_multiplier", None):
        return partial(torch.div, other=scale)
    if scale := getattr(config, "lm_head_multiplier", None):
        return partial(torch.mul, other=scale)
    return _unchanged


def _capped(logits: Tensor, cap: float, scale: float) -> Tensor:
    return torch.tanh(logits * (scale / cap)) * cap if scale != 1.0 else torch.tanh(logits / cap) * cap


def _unchanged(states: Tensor) -> Tensor:
    return states


class VerifyRunner:
    """Verify passes of a decoder, and the KV cache of the running sequences. Pads neither nodes nor rows.
    ``static_shapes``: whether shapes and addresses of tensors are static."""

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
        """Logits and the named features at every node. Graphs are captured per key of the LoRA ``adapter``."""
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
