"""Loads models, targets and processors by name."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from os import PathLike, fspath
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import NonNegativeInt
from safetensors import SafetensorError
from transformers import PreTrainedModel

from mmspec import plugins
from mmspec.adaptation import AdaptOptions
from mmspec.drafters.registry import make_drafter
from mmspec.engine.engine import MAX_NUM_SEQS
from mmspec.engine.threads import release_threads
from mmspec.errors import SlowWarning, UserError, explained, nearest, shown
from mmspec.ops import cpu, cpu_library
from mmspec.pipeline import Pipeline
from mmspec.sampling.defaults import MODELS, Source
from mmspec.targets import sources
from mmspec.targets.checkpoints import bars_on_terminals, cache_if_offline, is_on_hub
from mmspec.targets.lora import add_adapters
from mmspec.targets.packing import QUANTISED, pack_model, packs_bfloat16, quantise_on_cuda, start_packing
from mmspec.targets.processor import Processor
from mmspec.targets.support import base_model, is_split, lay_out_for_few_rows, refuse_not_finite, split_options
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.validation import check

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def load(
    model: Any = None,
    drafter: Any = "auto",
    device: str = "auto",
    dtype: Any = "auto",
    processor: Any = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    prefix_cache: int = 0,
    generation_config: str = MODELS,
    kv_cache_dtype: str = "auto",
    adapt: Any = False,
    device_map: Any = None,
    tp_plan: Any = None,
    warm_up: int = 1,
    mmproj: str | PathLike[str] | None = None,
    adapters: Mapping[str, str | PathLike[str]] | None = None,
    **options: Any,
) -> Pipeline:
    """Load a model and a drafter for it.

    Args:
        model: hub id, local folder, GGUF file, an embedded name (``tiny-llava``), the name of a model in a package
            (``smollm2``), or a transformers model or its peft wrapper, which keeps its device and dtype. None is the
            default of all commands: ``smol-llava`` if its packages are installed, else ``tiny-llava``.
        drafter: ``"auto"`` (the drafter in the model's folder, else ``"recycle+ngram"``), a registered name
            (``"ngram"``, ``"recycle"``, ``"small:MODEL"``, ...), the folder or hub id of a drafter checkpoint, a
            ``Drafter`` object, or None for plain decoding.
        device: a torch device name; ``"auto"`` uses a GPU if available.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype; ``"int8"`` and ``"int4"`` quantise
            the weights of the decoder's linear layers, with everything else in bfloat16. ``"auto"`` on a CPU is the
            precision of a GGUF file (int4 or int8, if the C++ kernels run: see ``mmspec info``), and float32 for other
            models below a billion parameters; otherwise it is the checkpoint's dtype.
        processor: tokenizer, processor or ``Processor`` of a model given as an object.
        max_num_seqs: maximum number of concurrent requests; each needs memory for its KV cache.
        prefix_cache: memory in bytes for states of prompts, so that a prompt with a cached prefix, such as the next
            turn of a conversation, computes only its new tokens. 0 disables.
        generation_config: source of unset sampling parameters. ``"auto"`` is the model's generation config, whose other
            entries (``suppress_tokens``, ``no_repeat_ngram_size``, ...) are also applied, so that tokens equal
            ``model.generate``'s; ``"mmspec"`` uses the defaults of ``SamplingParams``.
        kv_cache_dtype: ``"int8"`` stores keys and values of packed weights on a CPU in 8 bits, half the memory of
            ``"auto"``, bfloat16. Logits differ slightly; drafted answers still equal plain ones.
        adapt: let drafters learn from answers while the engine is idle, which does not change answers. True keeps the
            learned state in memory, a folder also stores it there, and an ``AdaptOptions`` limits its size.
        device_map: ``"auto"``, or a dict of modules and devices: accelerate dispatches the layers of a model that is
            larger than one device to several devices, or to memory and disk, from which every pass reads them.
        tp_plan: ``"auto"``, or a dict of modules and styles: under ``torchrun``, weights are sharded over the ranks
            (tensor parallelism of transformers); see ``Pipeline.follow``.
        warm_up: on CUDA, number of sequences to reserve memory and capture decode steps for, see ``Pipeline.warm_up``;
            steps of more sequences are captured when they first occur. 0 captures all steps when they occur.
        mmproj: llama.cpp's file with vision tower and projector for a language model in a GGUF file; found
            automatically in a folder with both files.
        adapters: folders or hub ids of LoRA adapters (peft) by name; a request selects one with ``adapter=``.
        **options: options of transformers' ``from_pretrained``. Python code in a folder runs only with
            ``trust_remote_code=True``.

    Raises:
        UserError: the model, drafter, device or dtype is unknown or not available; the model's generation config
            requests something that speculative decoding does not support, such as beam search; or none of the drafters
            can adapt.
    """
    check("generation_config", Source, generation_config)
    check("warm_up", NonNegativeInt, warm_up)
    check("kv_cache_dtype", Literal["auto", "int8"], kv_cache_dtype)
    settings: dict[str, Any] = {"max_num_seqs": max_num_seqs, "prefix_cache": prefix_cache}
    settings |= {"generation_config": generation_config, "adapt": AdaptOptions.of(adapt)}
    known = {*signature(load).parameters, "trust_remote_code"} - {"options"}
    model = base_model(model)
    if isinstance(model, PreTrainedModel):
        if processor is None:
            raise UserError(f"a model object needs processor=, its tokenizer or processor: got {type(model).__name__}")
        placement = {"device": device, "dtype": dtype, "device_map": device_map, "tp_plan": tp_plan, "mmproj": mmproj}
        placement |= {"adapters": adapters or None, **options}
        for name in options:
            if hint := nearest(name, known):
                raise UserError(f"unknown option of mmspec.load: got {name}{hint}")
        if fixed := [f"{name}={shown(value)}" for name, value in placement.items() if value not in ("auto", None)]:
            raise UserError(f"a model object stays on its device and in its dtype: got {', '.join(fixed)}")
        adapter = plugins.target_class(model.config)
        target, name = adapter(model, kv_cache_dtype=kv_cache_dtype), ""
        speculator = make_drafter(drafter, model.config.name_or_path or "")
        processor = processor if isinstance(processor, Processor) else adapter.processor_class(processor)
    else:
        model = plugins.default_model() if model is None else model
        if not isinstance(model, str | PathLike):
            raise UserError(f"model must be a name, a folder or a model of transformers: got {shown(model)}")
        if processor is not None:
            raise UserError(f"processor= goes with a model object: got the model {shown(model)}, which brings its own")
        name = model if isinstance(model, str) else os.path.join(os.curdir, fspath(model))  # not a registered name
        folder = plugins.model_path(name)
        if is_on_hub(folder):  # report a missing target before a missing drafter
            with _located(folder) as (source, hub_options):
                source.config(**(options | hub_options))
        # Drafter first, to report a misspelt name before loading a large model.
        speculator = make_drafter(drafter, folder, options.get("trust_remote_code", False))
        try:
            target, processor = _load_target(
                folder, device, dtype, device_map, tp_plan, mmproj, adapters, kv_cache_dtype, options
            )
        except TypeError as error:  # transformers rejects an option while it builds the model
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if match is None or match[1] not in options:
                raise
            hint = nearest(match[1], [*known, *signature(PreTrainedModel.from_pretrained).parameters])
            raise UserError(f"unknown option of mmspec.load: got {match[1]}{hint}") from error
    pipeline = Pipeline(target, processor, speculator, name, **settings)
    if warm_up:
        pipeline.warm_up(warm_up)
    release_threads()  # requests may come from other threads
    return pipeline


def _load_target(
    name: str,
    device: str,
    dtype: Any,
    device_map: Any,
    tp_plan: Any,
    mmproj: str | PathLike[str] | None,
    adapters: Mapping[str, str | PathLike[str]] | None,
    kv_cache_dtype: str,
    options: dict[str, Any],
) -> tuple[TransformersTarget, Processor]:
    """Load a transformers model as a target, and its processor; arguments and errors as for ``load``."""
    where = pick_device(device)
    if "torch_dtype" in options:
        raise UserError(f"torch_dtype is called dtype here: got torch_dtype={shown(options['torch_dtype'])}")
    kind = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if kind not in ("auto", *QUANTISED, *_DTYPES.values()):
        raise UserError(f"dtype must be auto, {', '.join((*_DTYPES, *QUANTISED))}: got {dtype!r}")
    if placing := split_options(device_map, tp_plan, device):
        if kind in QUANTISED or os.path.isfile(name):
            raise UserError(
                "packed weights (int8, int4, GGUF files) stay on one device: expected a model in float32, bfloat16 or "
                f"float16 with device_map or tp_plan, got {shown(name if os.path.isfile(name) else dtype)}"
            )
        placing["dtype"] = kind
    on_cpu = where.type == "cpu"
    with _located(name, mmproj) as (source, hub_options):
        options = options | hub_options
        config = source.config(**options)
        adapter = plugins.target_class(config)
        if on_cpu and (kind in QUANTISED or source.dtype in QUANTISED) and (why := cpu_library.problem()):
            warnings.warn(f"quantised weights decode several times slower here: {why}", SlowWarning, stacklevel=2)
        with bars_on_terminals():
            model, kind = source.model(adapter.auto_class, config, kind, on_cpu, **options, **placing)
            packs = on_cpu and kind in QUANTISED
            if packs:
                refuse_not_finite(model.named_parameters())
            finish = start_packing(model, kind) if packs else None
            processor = source.processor(adapter.processor_class, **options)
            if finish is not None:
                finish()
            elif not is_split(model):
                model = _prepared(model, kind, where)
    if adapters:
        add_adapters(model, adapters)
    cpu.trim()
    return adapter(model.eval(), kv_cache_dtype=kv_cache_dtype), processor


def load_config(name: str) -> Any:
    """Load the configuration of a model by its name for ``load``, without weights. Raises ``UserError``: the model does
    not exist."""
    with _located(plugins.model_path(name)) as (source, hub_options):
        return source.config(**hub_options)


def load_processor(name: str) -> Processor:
    """Load the processor of a model, without weights; arguments and errors as for ``load_config``."""
    with _located(plugins.model_path(name)) as (source, hub_options):
        config = source.config(**hub_options)
        return source.processor(plugins.target_class(config).processor_class, **hub_options)


@contextmanager
def _located(name: str, mmproj: Any = None) -> Iterator[tuple[sources.Source, dict[str, Any]]]:
    """Source of a model, and options of transformers; loading errors in the block are raised as ``UserError``."""
    kind = "GGUF file" if os.path.isfile(name) else "folder" if os.path.exists(name) else "folder or hub id"
    with (
        explained(f"cannot load model {name!r}: expected the {kind} of a supported model", *_LOADING_ERRORS),
        cache_if_offline("model", name) as hub_options,
    ):
        yield sources.find(name, mmproj), hub_options


def _prepared(model: Any, kind: Any, device: torch.device) -> Any:
    """Move an unpacked model to a dtype and device, with weights laid out for products with few rows."""
    model = model.to(device=device)
    model = model if kind in ("auto", *QUANTISED) else model.to(dtype=kind)
    refuse_not_finite(model.named_parameters())
    if kind in QUANTISED:
        quantise_on_cuda(model, kind)
    elif device.type == "cpu" and model.dtype == torch.bfloat16 and packs_bfloat16():
        pack_model(model, "bfloat16")
    else:
        lay_out_for_few_rows(model)
    return model


def pick_device(device: str) -> torch.device:
    """Resolve ``"auto"`` or a torch device name. Raises ``UserError``: the device is not available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.zeros(1, dtype=torch.bool, device=picked).item()  # fails on the meta device, whose tensors have no data
    except (RuntimeError, AssertionError, TypeError) as error:
        usable, kind = ["cpu"], torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        usable += [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())] if kind else []
        raise UserError(
            f"device must be auto or one that torch can use here ({', '.join(usable)}): got {device!r}"
        ) from error
    return picked
