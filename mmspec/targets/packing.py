"""Packing and quantisation of a model's linear layers, and decoder layers with merged operations.

Merged layers are Llama, Qwen3 and Gemma 3 style decoder layers for passes over few tokens on a CPU. QKV is one product,
gate-up another. The residual stream is float32 to avoid conversions. The C++ attention kernels read bfloat16 keys and
values from any cache, transformers' included; other attention is float32. Rotary embedding is one complex product:
query and key rows are reordered so that the two features of a rotated pair are adjacent, which leaves all query-key dot
products unchanged.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from mmspec.cache.tree_cache import TreeCache, cache_in
from mmspec.errors import missing
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, BlockMemory, JoinedLinear
from mmspec.quantisation.experts import pack_experts
from mmspec.quantisation.formats import (
    MXFP4Blocks,
    Q4KBlocks,
    Q5Blocks,
    Q5KBlocks,
    Q6KBlocks,
    StoredEmbedding,
    StoredRows,
    concatenated,
    pack,
    stored_layer,
)
from mmspec.quantisation.linear import GROUP, Bfloat16Linear, HalfLinear, Int4Linear, Int8Linear, PackedLinear
from mmspec.targets.attention import NAME, PASS
from mmspec.targets.checkpoints import bars_on_terminals
from mmspec.targets.recognise import (
    PROJECTIONS,
    epsilon_of,
    gain_of,
    gate_of,
    norms_of,
    reproducible,
    stored_rows,
    weight_of,
)
from mmspec.targets.support import lay_out_for_few_rows

KINDS: dict[str, type[PackedLinear]] = {
    "bfloat16": Bfloat16Linear,
    "float16": HalfLinear,
    "int8": Int8Linear,
    "int4": Int4Linear,
}
QUANTISED = ("int8", "int4")
_AT_ONCE = 32  # layers


def pack_model(model: PreTrainedModel, kind: str) -> None:
    """Pack the linear layers of a model on the CPU, and convert all other weights to bfloat16.

    Decoder layers are packed as ``kind``. Towers and connectors, which no decode step runs, become bfloat16. The output
    layer is not quantised, as rounding it costs more accuracy than rounding all layers before it (SmolLM2 in 4 bits: a
    divergence from float32 of 0.05 against 0.001): with int8 and int4 it is float16. A head tied to the embedding gets
    a packed copy of the weight. Layers with ``stored`` rows use these, whatever ``kind``.

    Args:
        kind: ``"bfloat16"``, ``"int8"`` or ``"int4"``.

    Raises:
        UserError: a file with stored rows was truncated during packing.
    """
    start_packing(model, kind)()


def start_packing(model: PreTrainedModel, kind: str) -> Callable[[], None]:
    """Variant of ``pack_model`` that packs rows stored in a file in a background thread; the result waits for it."""
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    for table in model.modules():
        if isinstance(table, nn.Embedding) and (rows := getattr(table, "stored", None)):
            StoredEmbedding.of(table, rows[0], torch.bfloat16)
    merge_layers(decoder)
    if kind in BLOCKS and cpu_library.available():
        pack_experts(model)
    kinds = {id(layer): kind for layer in decoder.modules()}
    kinds[id(output)] = head_kind(kind)
    found, later = _linears(model, kinds), list[tuple[StoredRows, Tensor]]()
    sizes = chain(*(_sizes(parent.get_submodule(name), kind) for parent, name, kind in found))
    memory, threads = BlockMemory(sizes), cpu.kernel_threads()
    with bars_on_terminals():
        _pack(logging.tqdm(found, desc="Packing weights"), memory, later)
    if isinstance(head := model.get_output_embeddings(), BlockLinear):
        head.takes = torch.float32
    model.bfloat16()

    cpu.trim()
    begun, step = threading.Event(), _AT_ONCE if sys.stderr.isatty() else max(1, len(later))

    def finish() -> None:
        with bars_on_terminals():
            for start in logging.tqdm(range(0, len(later), step), desc="Reading weights"):
                begun.set()
                pack(later[start : start + step], threads)
        begun.set()
        memory.written()

    pool = ThreadPoolExecutor(1)
    result = pool.submit(finish)
    pool.shutdown(wait=False)
    begun.wait()  # the caller may then hold the GIL for long
    return result.result


def head_kind(kind: str) -> str:
    """Packing kind of the output layer in a model packed as ``kind``."""
    return kind if kind not in QUANTISED else "int8" if cpu_library.available() else "float16"


def packed(
    layer: nn.Linear, kind: str, memory: BlockMemory | None = None, later: list[tuple[StoredRows, Tensor]] | None = None
) -> nn.Module:
    """Pack a linear layer as ``kind``, or with its stored rows (see ``stored_layer``). Shapes that torch's kernels do
    not support are packed as bfloat16."""
    if stored := getattr(layer, "stored", None):
        return stored_layer(stored, layer.bias, memory, later)
    if kind in BLOCKS and cpu_library.available():
        made = BLOCKS[kind](layer.weight, layer.bias)
        return made if memory is None else made.moved(memory)
    shape = layer.out_features, layer.in_features
    cls = KINDS[kind] if KINDS[kind].fits(*shape) else Bfloat16Linear
    return cls(layer.weight, layer.bias)


def _sizes(layer: nn.Linear, kind: str) -> Iterator[int]:
    """Block sizes in bytes of a layer for the C++ kernels."""
    if stored := getattr(layer, "stored", None):
        yield from (rows.kind.size_of(rows.features, len(rows.places)) for rows in stored)
    elif kind in BLOCKS and cpu_library.available():
        yield BLOCKS[kind].size_of(layer.in_features, layer.out_features)


def drafter_kind(target: Any, like: Tensor) -> str | None:
    """Packing kind of a drafter's linear layers on the CPU; None if they are not packed.

    The drafter of a quantised target is int8, as it spends most of its time reading weights.

    Args:
        like: tensor with the drafter's dtype and device.
    """
    if like.device.type != "cpu":
        return None
    exact = BLOCKS["bfloat16"], BLOCKS["float32"]
    if any(isinstance(layer, BlockLinear) and type(layer) not in exact for layer in target.model.modules()):
        return "int8"
    return "bfloat16" if like.dtype == torch.bfloat16 and packs_bfloat16() else None


def pack_drafter(network: nn.Module, like: Tensor, kind: str | None) -> None:
    """Move a drafter's network to the device and dtype of ``like``, its weights laid out for products with few rows;
    ``kind`` is the packing kind of ``drafter_kind``."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PackedLinear):
                setattr(parent, name, layer.unpacked())
    network.to(like)
    if kind is None:
        lay_out_for_few_rows(network)
    else:
        _pack(_linears(network, dict.fromkeys(map(id, network.modules()), kind)))


def _linears(module: nn.Module, kinds: Mapping[int, str]) -> list[tuple[Any, str, str]]:
    """Parent, name and packing kind of each linear layer; ``kinds`` is by layer id. The default, also of ``precise``
    layers, is bfloat16."""
    return [
        (parent, name, "bfloat16" if getattr(layer, "precise", False) else kinds.get(id(layer), "bfloat16"))
        for parent in module.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]


def _pack(
    linears: Iterable[tuple[Any, str, str]],
    memory: BlockMemory | None = None,
    later: list[tuple[StoredRows, Tensor]] | None = None,
) -> None:
    """Replace linear layers one by one; see ``stored_layer``."""
    for parent, name, kind in linears:
        setattr(parent, name, packed(parent.get_submodule(name), kind, memory, later))


def packs_bfloat16() -> bool:
    """Whether packed bfloat16 weights are faster: with the C++ kernels, or if the CPU has bfloat16 instructions."""
    if cpu_library.available():
        return True
    has = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in has if check is not None) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def weights_kind(model: nn.Module) -> str | None:
    """Class name of the packed linear layers with the smallest weights; None if no layer is packed."""
    usual = [cls for kind in ("int4", "int8", "bfloat16") for cls in (KINDS[kind], BLOCKS[kind])]
    order = [MXFP4Blocks, Q4KBlocks, *usual[:2], Q5KBlocks, Q5Blocks, Q6KBlocks, *usual[2:]]
    classes = {type(module) for module in model.modules()}
    return next((cls.__name__ for cls in order if cls in classes), None)


def quantise_on_cuda(model: PreTrainedModel, kind: str) -> None:
    """Quantise a decoder's linear layers in place with torchao (weight-only; activations stay bfloat16).

    Raises:
        UserError: torchao is not installed.
    """
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise missing(f"dtype {kind} on {model.device.type}", "torchao", "cuda") from error
    output = model.get_output_embeddings()
    quantize_(
        model.bfloat16().get_decoder(),
        Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(group_size=GROUP),
        filter_fn=lambda layer, _: isinstance(layer, nn.Linear) and layer is not output,
    )


_NORMS = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
_MAX_ROWS = 1024  # maximum tokens of a pass computed in one call, which keeps every layer's output


class MergedLayer(nn.Module):
    """A pre-norm decoder layer: attention with rotary positions, then a gated MLP.

    Optional norms: query and key heads (Qwen3), outputs of attention and MLP (Gemma 3).

    Args:
        layer: a supported transformers layer; its projections are removed.
        last: whether this is the decoder's last layer, whose output is bfloat16 for the final norm and the head.
    """

    place: int
    stack: Stack | None

    def __init__(self, layer: Any, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.place, self.stack = 0, None
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.head_dim = attention.config, attention.head_dim
        self.self_attn, self.act_fn = attention, mlp.act_fn
        query, key, value = (getattr(attention, name) for name in PROJECTIONS)
        self.heads, self.kv_heads = (part.out_features // self.head_dim for part in (query, key))
        self.qkv = merged([paired(query, self.head_dim), paired(key, self.head_dim), value])
        self.gate_up = merged([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.norms = nn.ModuleDict({name: norm_of(norm) for name, norm in norms_of(layer).items()})
        if hasattr(attention, "q_norm"):
            self.norms["head"] = head_norm(attention, self.heads, self.kv_heads, self.head_dim)
        for name in (*PROJECTIONS, "o_proj"):
            delattr(attention, name)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        rotation, cache = rotation_of(*position_embeddings), cache_in(kwargs) if cache is None else cache
        if self.stack is not None and self.attends_by_kernel(kwargs):
            output = self.stack.output(self.place, hidden_states, rotation, attention_mask, cache)
            if output is not None:
                return output
        x = hidden_states.float()
        qkv = self._qkv(x, rotation)
        query, key, value = qkv.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.native is not None and self.attends_by_kernel(kwargs):
            key, value = key.bfloat16(), value.bfloat16()
        if cache is not None:
            key, value = cache.update(key, value, self.self_attn.layer_idx)
        read = self._attend(query, key, value, attention_mask, kwargs)
        return self.rounded(self._outputs(read.flatten(2), x))

    def separate(self) -> dict[str, Tensor]:
        """Unmerged weights under their names in Llama, Qwen2 and Qwen3 layers; other weights are omitted."""
        found: dict[str, Any] = {
            **{f"self_attn.{name}": weight for name, weight in self.self_attn.named_parameters()},  # head norms
            **{f"{theirs}.weight": self.norms[ours].weight for ours, theirs in _NORMS.items()},
        }
        sizes = [self.head_dim * count for count in (self.heads, self.kv_heads, self.kv_heads)]
        for kind in ("weight", "bias"):
            for name, layer in {"self_attn.o_proj": self.out, "mlp.down_proj": self.down}.items():
                found[f"{name}.{kind}"] = getattr(layer, kind)
            if (joined := getattr(self.qkv, kind)) is not None:
                *pairs, value = joined.split(sizes)
                halves = (x.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for x in pairs)
                names = (f"self_attn.{name}.{kind}" for name in PROJECTIONS)
                found |= zip(names, (*halves, value), strict=True)
            if (joined := getattr(self.gate_up, kind)) is not None:
                found[f"mlp.gate_proj.{kind}"], found[f"mlp.up_proj.{kind}"] = joined.chunk(2)
        return {name: weight for name, weight in found.items() if weight is not None}

    def rounded(self, x: Tensor) -> Tensor:
        """Cast an output to the dtype that the next layer, norm or head expects."""
        return x.bfloat16() if self.last and isinstance(self.down, PackedLinear) else x

    def _qkv(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rotated queries and keys, and values: (batch, tokens, heads + 2 * kv_heads, head_dim)."""
        if self.native is not None:
            rotation = rotation.expand(len(x), -1, -1, -1).contiguous()
            return cpu.attention_inputs(self.native, x.contiguous(), rotation)
        qkv = self.qkv(self.norms["attention"](x)).unflatten(-1, (-1, self.head_dim))
        turned = self.heads + self.kv_heads
        pairs = torch.view_as_complex(self._normed("head", qkv[..., :turned, :]).unflatten(-1, (-1, 2)))
        return torch.cat([torch.view_as_real(pairs * rotation).flatten(-2), qkv[..., turned:, :]], dim=-2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attention output, (batch, tokens, heads, head_dim), by transformers' implementation or the kernel."""
        scaling = self.self_attn.scaling
        usual = key.dtype == value.dtype == torch.bfloat16 and key.stride() == value.stride() and key.stride(3) == 1
        if self.native is not None and usual and self.attends_by_kernel(options):
            allowed = None if mask is None else allowed_slots(mask, len(query))
            return cpu.attention(query.transpose(1, 2), key, value, allowed, scaling)
        # The default is the eager attention of the layer's modelling file.
        eager = getattr(sys.modules[type(self.self_attn).__module__], "eager_attention_forward", None)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)  # type: ignore[arg-type]
        key, value = key.to(query.dtype), value.to(query.dtype)
        return attend(self.self_attn, query, key, value, mask, dropout=0.0, scaling=scaling, **options)[0]

    def attends_by_kernel(self, options: dict[str, Any]) -> bool:
        """Whether the C++ kernel applies: attention is SDPA or tree attention, without static shapes."""
        return self.config._attn_implementation in (NAME, "sdpa") and PASS not in options

    def _outputs(self, read: Tensor, x: Tensor) -> Tensor:
        """The layer's output, from the attention output and the layer's input."""
        if self.native is not None:
            return cpu.layer_outputs(self.native, read.contiguous(), x.contiguous())
        x = x + self._normed("attention_after", self.out(read))
        after = self.norms["mlp"](x)
        # In the dtype of the next product, the only consumer.
        gate, up = self.gate_up(after.bfloat16() if isinstance(self.gate_up, PackedLinear) else after).chunk(2, dim=-1)
        return x + self._normed("mlp_after", self.down(self.act_fn(gate) * up))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return self.norms[name](x) if name in self.norms else x

    @cached_property
    def native(self) -> Any:
        """Weights for the functions of ``mmspec.ops.cpu``; None if they do not support the layer."""
        linears: list[Any] = [self.qkv, self.out, self.gate_up, self.down]
        whole = all(layer.in_features % GROUP == 0 for layer in linears) and self.head_dim in cpu.HEAD_DIMS
        blocks = all(isinstance(layer, BlockLinear | JoinedLinear) for layer in linears)
        gate = gate_of(self.act_fn)
        if not whole or not blocks or gate is None:
            return None
        parts: Any = self.norms
        norms = {name: (norm.weight, norm.epsilon.item()) for name, norm in parts.items()}
        native = [layer.native for layer in linears]
        return cpu.layer_weights(native, norms, self.heads, self.kv_heads, self.head_dim, gelu=gate == "gelu")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "native"}


@lru_cache(maxsize=4)
def allowed_slots(mask: Tensor, batch: int) -> Tensor:
    """Convert a mask to (batch, 1, nodes, slots) bool with contiguous slots; cached per pass."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    return (allowed if allowed.stride(-1) == 1 else allowed.contiguous()).expand(batch, 1, -1, -1)


@lru_cache(maxsize=4)
def rotation_of(cos: Tensor, sin: Tensor) -> Tensor:
    """Complex rotations, (batch, tokens, 1, head_dim / 2), of (batch, tokens, head_dim) each; cached per pass."""
    half = cos.shape[-1] // 2
    return torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, :, None]


class Stack:
    """A decoder's layers, computed in one native call except in large passes.

    In a pass of the decoder, the first layer's forward computes the outputs of all layers. Each later layer returns its
    precomputed output if its input is the previous layer's output, so hooks on layers see the usual inputs and outputs.
    """

    def __init__(self, layers: list[MergedLayer]) -> None:
        self._layers = layers
        self._outputs: list[Tensor] = []
        self._rotations = torch.empty(0, dtype=torch.float32)  # (positions, 1, head_dim / 2) complex64
        for place, layer in enumerate(layers):
            layer.place, layer.stack = place, self

    def states(
        self, decoder: Any, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> list[Tensor] | None:
        """Inputs of all layers and the last layer's output, without the decoder's forward.

        Args:
            decoder: a decoder with these layers that passes its embeddings unchanged to the first layer.
            tokens: (batch, nodes) int64.
            positions: (batch, nodes) int64.
            mask: (batch, 1, nodes, slots) bool or additive; None for single nodes that attend to all slots.

        Returns:
            (batch, nodes, hidden) each; None if the decoder's forward is needed.
        """
        hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)
        usual = positions.ndim == 2 and (isinstance(mask, Tensor) or (mask is None and tokens.shape[1] == 1))
        changing = any(kind in getattr(decoder.rotary_emb, "rope_type", "dynamic") for kind in ("dynamic", "longrope"))
        if hooks or changing or not usual or not self._layers[0].attends_by_kernel({}) or self._weights is None:
            return None
        x, highest = decoder.embed_tokens(tokens), int(positions.max())
        if highest >= len(self._rotations):
            known = torch.arange(2 * (highest + 1), device=x.device)[None]
            self._rotations = rotation_of(*decoder.rotary_emb(x, position_ids=known))[0]
        outputs = self._computed(x, self._rotations[positions], mask, cache)
        return None if outputs is None else [x, *outputs]

    def output(self, place: int, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor | None:
        """A layer's precomputed output; None if the layer must compute it."""
        if place == 0:
            self._outputs = self._computed(x, rotation.expand(len(x), -1, -1, -1), mask, cache) or []
        elif not self._outputs or x is not self._outputs[place - 1]:
            return None
        return self._outputs[place] if self._outputs else None

    def _computed(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> list[Tensor] | None:
        first = self._layers[0]
        stored = isinstance(cache, TreeCache) and not cache.static_shapes and len(cache.attending) >= len(self._layers)
        small = x.shape[0] * x.shape[1] <= _MAX_ROWS
        if not (small and stored) or self._weights is None:
            return None
        like = x.new_empty(first.kv_heads, 0, first.head_dim, dtype=torch.bfloat16)
        start = cache.get_seq_length()
        storage = cache.kv.shared(cache.attending, *x.shape[:2], like, start)
        allowed, scaling = None if mask is None else allowed_slots(mask, len(x)), first.self_attn.scaling
        inputs = x.float().contiguous(), rotation.contiguous(), allowed, scaling
        *inner, last = cpu.decode(self._weights, *inputs, storage, start, centre=cache.kv.centre)
        return [*inner, self._layers[-1].rounded(last)]

    @property
    def attends(self) -> bool:
        """Whether the layers' attention runs in the kernels."""
        return self._weights is not None

    @cached_property
    def _weights(self) -> Any:
        """The layers' weights for ``cpu.decode``; None if it does not support all of them with one mask."""
        native = [layer.native for layer in self._layers]
        kinds = getattr(self._layers[0].config, "layer_types", None) or []
        return None if None in native or len(set(kinds)) > 1 else cpu.decoder_weights(native)

    def __getstate__(self) -> dict[str, Any]:
        return {"_layers": self._layers, "_outputs": [], "_rotations": self._rotations}


def first_layers(layers: nn.ModuleList, count: int) -> nn.ModuleList:
    """The first layers of a decoder. Merged layers are copied, with shared weights, into a separate ``Stack``."""
    first: list[Any] = list(layers[:count])
    if all(isinstance(layer, MergedLayer) for layer in first):
        first = [copy.copy(layer) for layer in first]
        first[-1].last = True
        Stack(first)
    return nn.ModuleList(first)


def merge_layers(decoder: nn.Module) -> None:
    """Replace a decoder's layers by ``MergedLayer`` if that reproduces their outputs."""
    if reproducible(decoder, lambda layer, x, rotation: MergedLayer(layer)(x, position_embeddings=rotation)):
        layers: Any = decoder.layers
        for index in range(len(layers)):
            layers[index] = MergedLayer(layers[index], last=index == len(layers) - 1)
        Stack([layer for layer in layers if isinstance(layer, MergedLayer)])


class Float32Norm(nn.Module):
    """RMSNorm in float32, in few operations.

    Args:
        gain: (..., features) float32.
        epsilon: added to the mean square.
    """

    weight: Tensor
    epsilon: Tensor

    def __init__(self, gain: Tensor, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("weight", gain, persistent=False)
        self.register_buffer("epsilon", torch.tensor([epsilon], dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_() * self.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self  # keep float32 when the model is cast


def norm_of(norm: Any) -> Float32Norm:
    """Convert a transformers RMSNorm."""
    return Float32Norm(gain_of(norm), epsilon_of(norm))


def head_norm(attention: Any, heads: int, kv_heads: int, head_dim: int) -> Float32Norm:
    """Merge the norms of query and key heads, in ``pair_order``: gains (heads + kv_heads, head_dim)."""
    order = pair_order(head_dim)
    parts = [(attention.q_norm, heads), (attention.k_norm, kv_heads)]
    gains = [norm_of(norm).weight[order].expand(count, -1) for norm, count in parts]
    return Float32Norm(torch.cat(gains), epsilon_of(attention.q_norm))


def pair_order(head_dim: int) -> Tensor:
    """Permutation of a head's features that makes each rotated pair, j and j + head_dim / 2, adjacent."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def paired(layer: nn.Linear, head_dim: int) -> nn.Linear:
    """The layer with the features of each head in ``pair_order``."""
    order = (torch.arange(0, layer.out_features, head_dim)[:, None] + pair_order(head_dim)).flatten()
    bias = None if layer.bias is None else layer.bias.detach()[order]
    return linear_of(layer.weight.detach()[order], bias, [rows.ordered(order) for rows in stored_rows(layer)])


def merged(parts: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    stored = [stored_rows(part) for part in parts]
    kept = all(stored)
    weight = torch.cat([part.weight.detach() if kept else weight_of(part) for part in parts])
    bias = None
    if given := [part.bias.detach() for part in parts if part.bias is not None]:
        biases = [part.bias for part in parts]
        zeros = [given[0].new_zeros(part.out_features) for part in parts]
        bias = torch.cat([zero if own is None else own.detach() for own, zero in zip(biases, zeros, strict=True)])
    return linear_of(weight, bias, concatenated(chain(*stored)) if kept else [])


def linear_of(weight: Tensor, bias: Tensor | None, stored: Sequence[StoredRows] = ()) -> nn.Linear:
    """A linear layer of a weight, (outputs, features), a bias, (outputs,), and stored rows."""
    layer: Any = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.stored = list(stored)
    return layer
