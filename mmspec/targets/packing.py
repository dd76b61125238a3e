"""Packing and quantisation of a model's linear layers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from mmspec.errors import missing
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.blocks import BLOCKS, BlockLinear, BlockMemory
from mmspec.quantisation.experts import pack_experts
from mmspec.quantisation.formats import (
    MXFP4Blocks,
    Q4KBlocks,
    Q5Blocks,
    Q5KBlocks,
    Q6KBlocks,
    StoredEmbedding,
    StoredRows,
    pack,
    stored_layer,
)
from mmspec.quantisation.linear import GROUP, Bfloat16Linear, HalfLinear, Int4Linear, Int8Linear, PackedLinear
from mmspec.targets.checkpoints import bars_on_terminals
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
    if kind in BLOCKS and cpu_library.available():
        pack_experts(model)
    kinds = {id(layer): kind for layer in decoder.modules()}
    kinds[id(output)] = head_kind(kind)
    found, later = _linears(model, kinds), list[tuple[StoredRows, Tensor]]()
    sizes = (_size(parent.get_submodule(name), kind) for parent, name, kind in found)
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
        return stored_layer(stored[0], layer.bias, memory, later)
    if kind in BLOCKS and cpu_library.available():
        made = BLOCKS[kind](layer.weight, layer.bias)
        return made if memory is None else made.moved(memory)
    shape = layer.out_features, layer.in_features
    cls = KINDS[kind] if KINDS[kind].fits(*shape) else Bfloat16Linear
    return cls(layer.weight, layer.bias)


def _size(layer: nn.Linear, kind: str) -> int:
    """Block size in bytes of a layer for the C++ kernels; 0 without them."""
    if stored := getattr(layer, "stored", None):
        return int(stored[0].kind.size_of(layer.in_features, layer.out_features))
    blocks = kind in BLOCKS and cpu_library.available()
    return BLOCKS[kind].size_of(layer.in_features, layer.out_features) if blocks else 0


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
    """Parent, name and packing kind of linear layers, from ``kinds`` by layer id; ``precise`` layers: bfloat16."""
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
    """Quantise a decoder's linear layers in place with torchao (weight-only; activations stay bfloat16). Raises
    ``UserError``: torchao is not installed."""
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


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of a weight, (outputs, features), and a bias, (outputs,)."""
    layer: Any = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
