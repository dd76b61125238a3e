"""Transformers models as targets: support checks, the parts of a model, and the devices that it is on.

Models larger than one device are dispatched to several, layer by layer, or sharded over the ranks of a job.
"""

from __future__ import annotations

import copy
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from mmspec import plugins
from mmspec.cache.tree_cache import cache_argument
from mmspec.errors import UserError, missing, shown
from mmspec.jobs import ranks
from mmspec.ops import builds, cpu_library
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.attention import slot_attention, slot_limit
from mmspec.targets.recognise import CAPTURE
from mmspec.targets.tree_layers import ATTENTION, TreeLayers


def refuse_not_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a weight contains NaN or infinity, which quantised inputs would hide from the logits.

    Checks sums, at memory bandwidth.
    """
    for name, weight in weights:
        dense = weight.is_floating_point() and weight.itemsize > 1 and not weight.is_meta
        if dense and not bool(weight.sum(dtype=torch.float32).isfinite()) and not bool(weight.isfinite().all()):
            raise UserError(f"weights must be finite: {name} contains NaN or infinite numbers in {weight.dtype}")


def without_output_capture(model: PreTrainedModel) -> PreTrainedModel:
    """Copy of the modules, with shared weights, without transformers' output-capturing hooks, which are local functions
    and cannot be pickled. transformers reinstalls them when needed."""
    parts = ((vars(module), module._parameters, module._buffers) for module in model.modules())
    values = [value for part in chain(*parts) for value in part.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    same = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in same.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) == CAPTURE]:
            del hooks[key]
    return same


_WIDEST = 2048  # features; transposed weights that are wider measured slower


def lay_out_for_few_rows(module: nn.Module) -> None:
    """Store the weights of linear layers transposed in memory if this speeds up passes over a few tokens.

    In float32 on a CPU, a pass over 8 to 16 tokens takes two thirds of the time. Values and shapes do not change.
    """
    tied = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) not in tied:
            weight = layer.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and max(weight.shape) <= _WIDEST:
                weight.data = weight.data.t().contiguous().t()


def output_layer(model: PreTrainedModel) -> Any:
    """Output layer of the model or of its inner language model (Nemotron-H-Omni); None without one."""
    inner = model.get_decoder()
    head: Any = model.get_output_embeddings()
    return inner.get_output_embeddings() if head is None and isinstance(inner, PreTrainedModel) else head


def decoder_of(model: PreTrainedModel) -> Any:
    """The model's stack of layers, without the output layer.

    ``get_decoder`` of some classes returns the output layer, or a module that contains it.
    """
    embedding, head, decoder = model.get_input_embeddings(), output_layer(model), model.get_decoder()
    module: Any = decoder if any(part is embedding for part in decoder.modules()) else model
    while any(part is head for part in module.modules()):
        module = next(child for child in module.children() if any(part is embedding for part in child.modules()))
    return module


def towers_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models outside the decoder, such as vision towers."""
    decoder, found, around = decoder_of(model), list[PreTrainedModel](), [*model.children()]
    for part in around:
        if any(one is decoder for one in part.modules()):
            around += [] if part is decoder else part.children()
        elif isinstance(part, PreTrainedModel):
            found.append(part)
    return found


def base_model(model: Any) -> Any:
    """Unwrap a peft wrapper, keeping the adapters in the layers; returns other models unchanged. Raises ``UserError``
    for learned prompts, which only the wrapper's forward adds."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    refuse_learned_prompts(model)
    return model.get_base_model()


def refuse_learned_prompts(model: Any) -> None:
    """Raise for a peft wrapper with learned prompts."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise UserError(f"adapters of peft must be in the model's layers, like LoRA: got learned prompts, {kind}")


_NEVER_EXACT = {
    "idefics": "reads images in every pass",
    "kosmos-2.5": "offsets its positions",
    "xlm": "takes the tokens of its cache again in every pass",
}
"""Model types that pass all other checks, and the reason why their tokens would still differ."""


def cached_layers(config: Any) -> int:
    """Number of KV-cache layers; a layer that runs in several loops per pass (Dory) counts once per loop."""
    again = getattr(config, "n_recurrent_loops", 1) - 1
    layers: int = config.num_hidden_layers
    return layers + again * config.n_recurrent_layers if again else layers


def refuse_unsupported(model: PreTrainedModel, config: Any, layers: TreeLayers | None) -> None:
    """Raise if the model cannot verify trees exactly.

    Args:
        layers: the plug-in for layers other than attention; None without one.

    Raises:
        UserError: an encoder-decoder, unsupported layers, or a decoder whose forward takes no positions or no cache.
    """
    name, whole = type(model).__name__, model.config
    reason, recurrent = _NEVER_EXACT.get(whole.model_type), getattr(config, "n_recurrent_layers", 0)
    shared = getattr(config, "recurrent_kv_cache_mode", None) == "last_loop" and config.n_recurrent_loops > 1
    loops = "loops over layers must have"
    for wrong, message in (
        (reason, f"the target must be one that trees can reproduce: {name} {reason}"),
        # transformers' models read named fields of the decoder's output.
        (whole.return_dict is False, f"the target must return fields by name: config.return_dict of {name} is False"),
        (output_layer(model) is None, f"the target must have an output layer: {name} has none"),
        (whole.is_encoder_decoder, f"the target must be a decoder-only model: {name} is an encoder-decoder"),
        (
            shared,
            f"{loops} keys and values of their own: expected recurrent_kv_cache_mode 'per_loop' in {name}, received "
            "'last_loop'",
        ),
        (recurrent < 0, f"{loops} layers: expected at least 0 n_recurrent_layers in {name}, received {recurrent}"),
    ):
        if wrong:
            raise UserError(message)
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - (ATTENTION if layers is None else layers.kinds)):
        supported = ", ".join(plugins.names("layers"))
        raise UserError(
            f"layers must be full or sliding-window attention{supported and f', or {supported}'}: "
            f"{name} has {', '.join(other)} of another kind"
        )
    decoder = decoder_of(model)
    attends = layers is None or layers.attends
    positions = not attends or slot_attention(config, decoder) is not None
    positions = positions or "position_ids" in signature(decoder.forward).parameters
    lacking = [what for what, taken in (("position_ids", positions), ("a cache", cache_argument(decoder))) if not taken]
    if lacking:
        raise UserError(f"forward must take {', '.join(lacking)}: that of {type(decoder).__name__} in {name} does not")


_SWITCHES = {
    "dynamic": "dynamic rotary embeddings",
    "longrope": "longrope rotary embeddings",
    "temperature": "attention temperatures",
    "selection": "attention masks",
}
_BELOW = ("dynamic", "temperature", "selection")
_BY_POSITION = ("dynamic", "longrope")  # others count padding
_MOST_NODES = 512  # maximum nodes of a pass


def refuse_switch(config: Any, lengths: Sequence[int], padded: int, max_new_tokens: Sequence[int]) -> None:
    """Raise if a sequence may cross the length at which its rotary frequencies change.

    A pass has one set of frequencies, but the paths of a tree differ in length. The same holds for other properties of
    attention that change with the length.

    Args:
        lengths: lengths of a batch's prompts, without padding.
        padded: length of the prompts with padding.
        max_new_tokens: maximum new tokens of each prompt.

    Raises:
        UserError: a prompt and its answer are not on one side of that length (longrope) or below it (others), or the
            prompts are on different sides.
    """
    for kind, switch in _rope_switches(config):
        for length, new in zip(lengths, max_new_tokens, strict=True):
            slots = length if kind in _BY_POSITION else padded
            if slots + new > switch and (kind in _BELOW or min(lengths) <= switch):
                raise UserError(
                    f"{_SWITCHES[kind]} change at {switch} tokens: prompt and answer must "
                    f"{'fit below' if kind in _BELOW else 'stay on one side'}, got {min(lengths)} and up to "
                    f"{slots + new - min(lengths)} more"
                )


def rope_side(config: Any, length: int) -> tuple[bool, ...]:
    """For each of these lengths, whether a prompt is longer; must be equal for all sequences of a batch."""
    return tuple(length > switch for _, switch in _rope_switches(config))


_SLOT_BIASES = ("gpt_neo", "inkling_text", "inkling2_text")
"""Model types with biases or windows that depend on distances in slots, padding included."""


def refuse_inner_padding(config: Any, mask: torch.Tensor, max_new_tokens: Sequence[int]) -> None:
    """Raise if inner or right padding lies between tokens whose distance matters to a layer.

    Args:
        mask: (batch, length), padding mask of the prompts.
        max_new_tokens: maximum new tokens of each prompt.

    Raises:
        UserError: transformers' windows, chunks or biases would count the padding.
    """
    limit = 0 if config.model_type in _SLOT_BIASES else slot_limit(config)
    inner = (mask[:, 1:] < mask[:, :-1]).any(1).tolist()
    last = mask.shape[1] + max((new for new, own in zip(max_new_tokens, inner, strict=True) if own), default=0) - 1
    if limit is not None and last > limit and any(inner):  # the last token is never read
        raise UserError(
            "attention_mask must have padding before tokens only where attention compares distances: "
            f"expected at most {limit} slots with padding after tokens, got up to {last}"
        )


def _rope_switches(config: Any) -> Iterator[tuple[str, int]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [part for part in parameters.values() if isinstance(part, dict)] or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue  # Mamba-2 has neither rotary embeddings nor max_position_embeddings
        switch = config.max_position_embeddings
        if kind == "longrope":
            name = "original_max_position_embeddings"
            switch = rope.get(name) or getattr(config, name, switch)
        yield kind, switch
    # Llama 4 and Inkling number the nodes of a pass regardless of depth.
    if getattr(config, "attn_temperature_tuning", None):
        yield "temperature", config.floor_scale - _MOST_NODES
    elif config.model_type == "inkling_text" and config.log_scaling_n_floor is not None:
        yield "temperature", config.log_scaling_n_floor - _MOST_NODES
    elif config.model_type == "doge":
        # Beyond this length, each layer selects the highest scores of a path; ties depend on slot order.
        yield "selection", config.keep_window_size


_OFFLOADED = ("cpu", "disk")


def split_options(device_map: Any, tp_plan: Any, device: str) -> dict[str, Any]:
    """Options of ``from_pretrained`` that split a model; empty for a model on one device.

    Args:
        device_map, tp_plan, device: as for ``mmspec.load``.

    Raises:
        UserError: both are given, or one of them with a device; accelerate is not installed for ``device_map``; or
            ``tp_plan`` is given outside a job of several ranks.
    """
    if device_map is None and tp_plan is None:
        return {}
    if device_map is not None and tp_plan is not None:
        raise UserError("a model is either dispatched or sharded: got device_map and tp_plan")
    name = "device_map" if tp_plan is None else "tp_plan"
    if device != "auto":
        raise UserError(f"{name} places the model: expected device 'auto' with it, got {shown(device)}")
    given, entries = (device_map, "devices") if tp_plan is None else (tp_plan, "styles")
    if given != "auto" and not isinstance(given, dict):
        raise UserError(f'{name} must be "auto" or a dict of modules and {entries}: got {shown(given)}')
    if tp_plan is None:
        if find_spec("accelerate") is None:
            raise missing("device_map", "accelerate", "real")
        return {"device_map": device_map}
    if not distributed.is_initialized() and ranks() < 2:
        raise UserError("tp_plan shards a model over the ranks of a job: expected one of torchrun, got 1 rank")
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan)}


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether the weights are sharded over ranks (tensor parallelism)."""
    return (model._tp_size or 1) > 1


def is_split(model: PreTrainedModel) -> bool:
    """Whether the model is dispatched by accelerate, or sharded: its weights are not all on its device."""
    return is_sharded(model) or _hook(model) is not None


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that a model takes its inputs on and returns its logits on."""
    hook = _hook(model)
    if hook is None or hook.execution_device is None:
        return model.device
    place = hook.execution_device
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def computing_devices(model: PreTrainedModel) -> set[str]:
    """The devices that the layers of a model run on."""
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if _hook(model) is None:
        return {str(model.device)}
    main = str(input_device(model))
    return {main if str(place) in _OFFLOADED else str(place) for place in places.values()}


def fingerprint(model: PreTrainedModel) -> str:
    """Hash of all that a model's states depend on: weights with adapters, configuration, device, kernels and versions.
    Raises ``UserError``: weights are neither in memory nor in a GGUF file."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    kernels = builds.identity(builds.SOURCE, [cpu_library.build(), os.environ.get("MMSPEC_KERNELS", "auto")])
    about = [torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), device, kernels]
    digest = hashlib.blake2b(" ".join([*about, model.config.to_json_string(use_diff=False)]).encode(), digest_size=16)
    for name, module in model.named_modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if isinstance(module, PackedLinear) and "_blocks" not in module._buffers:
            tensors += module._parts()
        stored = vars(module).get("stored")
        for tensor in tensors if stored is None else [stored.data()]:
            if tensor is not None and tensor.is_meta:
                raise UserError(f"prefix_cache_dir needs weights in memory: {name} is read from a disk in each pass")
            if tensor is not None:
                order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # as in memory
                data = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
                check = zlib.crc32(data.cpu().numpy())
                digest.update(f"{name} {tensor.dtype} {[*tensor.shape]} {order} {check}".encode())
    return digest.hexdigest()


def _hook(model: PreTrainedModel) -> Any:
    """accelerate's hook that moves a dispatched model's inputs; None for a model on one device."""
    return getattr(model, "_hf_hook", None)
