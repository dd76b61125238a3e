"""Loading of targets, processors and drafters by name."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from mmspec import plugins
from mmspec.checks import nearest, shown
from mmspec.core.drafter import Drafter
from mmspec.drafters import checkpoint
from mmspec.drafters.union import Union
from mmspec.errors import SlowWarning, UserError, explained
from mmspec.ops import cpu
from mmspec.targets import completed, gguf
from mmspec.targets.hub import cache_if_offline, is_path
from mmspec.targets.packing import QUANTISED, pack_model, packs_bfloat16, quantise_on_cuda
from mmspec.targets.processor import Processor
from mmspec.targets.support import from_pretrained, lay_out_for_few_rows, read_whole
from mmspec.targets.transformers_target import TransformersTarget

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, SafetensorError)
_LARGE = 1_000_000_000  # parameters; larger models keep the checkpoint's dtype on a CPU, to save memory


def load_target(
    name: str, device: str = "auto", dtype: Any = "auto", **options: Any
) -> tuple[TransformersTarget, Processor]:
    """Load a model of transformers as a target, and its processor.

    Args:
        name: local folder, GGUF file or hub id.
        device, dtype: as for ``mmspec.load``.
        **options: of ``from_pretrained`` (``revision``, ``trust_remote_code``, ...). Python code in a folder runs only
            with ``trust_remote_code=True``.

    Raises:
        UserError: there is no such model, no adapter for its architecture, or no such device or dtype.
    """
    where = pick_device(device)
    if "torch_dtype" in options:
        raise UserError(f"torch_dtype is called dtype here: got torch_dtype={shown(options['torch_dtype'])}")
    kind = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if kind not in ("auto", *QUANTISED, *_DTYPES.values()):
        raise UserError(f"dtype must be auto, {', '.join((*_DTYPES, *QUANTISED))}: got {dtype!r}")
    with _located(name) as found:
        options |= found
        name = completed.resolved(gguf.resolved(name))
        config = from_pretrained(AutoConfig, name, **options)
        adapter = plugins.target_class(config)
        model: Any = read_whole(adapter.auto_class, name, config=config, **options)
        processor = adapter.processor_class.read(name, **options)
    if where.type == "cpu" and (kind in QUANTISED or gguf.stored_form(name) is not None) and (why := cpu.problem()):
        warnings.warn(f"quantised weights decode several times slower here: {why}", SlowWarning, stacklevel=2)
    if kind == "auto" and where.type == "cpu":
        kind = _cpu_dtype(name, model)
    return adapter(_prepared(model.eval(), kind, where)), processor


def load_config(name: str) -> Any:
    """Configuration of a model of transformers, without its weights.

    Args:
        name: as for ``mmspec.load``.

    Raises:
        UserError: there is no such model.
    """
    folder = plugins.model_path(name)
    with _located(folder) as found:
        return from_pretrained(AutoConfig, completed.resolved(gguf.resolved(folder)), **found)


@contextmanager
def _located(name: str) -> Iterator[dict[str, Any]]:
    """Options that locate a model, while it is read; errors are those of the user."""
    expected = (
        f"an embedded model ({', '.join(plugins.names('models')) or 'none'}), a local folder or a reachable hub id"
    )
    if not name or (not os.path.exists(name) and is_path(name)):
        raise UserError(f"cannot load model {name!r}: expected {expected}, there is no such folder")
    if os.path.exists(name):
        expected = "the GGUF file of a supported model" if os.path.isfile(name) else "the folder of a supported model"
    with (
        explained(f"cannot load model {name!r}: expected {expected}", *_LOADING_ERRORS),
        cache_if_offline("model", name) as found,
    ):
        yield found


@contextmanager
def known_options(function: str, options: Collection[str], known: Iterable[str]) -> Iterator[None]:
    """Raise a ``UserError`` where transformers refuses one of the options, which it does as the model is built.

    Args:
        function: for the message.
        options: names that were passed on to transformers.
        known: names of further options that ``function`` takes.
    """
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in options:
            raise
        hint = nearest(found[1], [*known, *signature(PreTrainedModel.from_pretrained).parameters])
        raise UserError(f"unknown option of {function}: got {found[1]}{hint}") from error


def _cpu_dtype(folder: str, model: Any) -> Any:
    """That of a GGUF file's own weights, where the kernels decode it exactly; else float32 for all but large models."""
    if cpu.available() and (form := gguf.stored_form(folder)) is not None:
        return form
    return torch.float32 if model.num_parameters() < _LARGE else "auto"


def _prepared(model: Any, kind: Any, device: torch.device) -> Any:
    """A model in the dtype ``kind`` on a device, its weights laid out for products with few rows."""
    on_cpu = device.type == "cpu"
    model = model.to(device=device)
    if kind in QUANTISED:
        (pack_model if on_cpu else quantise_on_cuda)(model, kind)
        return model
    model = model if kind == "auto" else model.to(dtype=kind)
    if on_cpu and model.dtype == torch.bfloat16 and packs_bfloat16():
        pack_model(model, "bfloat16")
    else:
        lay_out_for_few_rows(model)
    return model


def pick_device(device: str) -> torch.device:
    """``"auto"`` or a torch device name that exists here.

    Raises:
        UserError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.zeros(1, device=picked).item()  # fails on the meta device, whose tensors have no data
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device must be auto or one that torch can use here: got {device!r}") from error
    return picked


def make_drafter(drafter: Any, home: str = "", trust_remote_code: bool = False) -> Drafter | None:
    """A drafter from the ``drafter`` argument of ``mmspec.load``.

    Args:
        drafter: names joined by + draft one tree together.
        home: the target's folder or name. ``"auto"`` loads the checkpoint in its ``drafter`` folder; a registered name
            loads that one if it has this name, else the one in ``drafter-NAME``, else a drafter without a checkpoint
            or, if it is ``in_target``, with the target's own.
        trust_remote_code: allow Python code in the folder of a draft model.

    Raises:
        UserError: an unknown name, a damaged checkpoint, or an object without a drafter's methods.
    """
    if drafter is None or drafter == "none":
        return None
    if drafter == "auto" and home:
        drafter = plugins.default_drafter(Path(home))
    if isinstance(drafter, str) and "+" in drafter and not os.path.exists(drafter):
        names = drafter.split("+")
        if {"", "none"} & set(names):
            raise UserError(f"names joined by + must each be a drafter's: got {drafter!r}")
        joined = [make_drafter(name, home, trust_remote_code) for name in names]
        return Union([member for member in joined if member is not None])
    if isinstance(drafter, str | Path):
        drafter = _at_home(str(drafter), Path(home)) if home else drafter
        folder = Path("recycle" if drafter == "auto" else drafter)
        if "/" in str(drafter) and ":" not in str(drafter):
            folder = _checkpoint_folder(str(drafter))
        if name := checkpoint.drafter_name(folder):
            cls = plugins.find("drafters", name)
            if not hasattr(cls, "from_checkpoint"):
                raise UserError(f"{folder}: mmspec_drafter must name a drafter with a checkpoint: got {name!r}")
            return cls.from_checkpoint(folder)
        if folder.is_dir():
            for known in plugins.names("drafters"):
                cls = plugins.find("drafters", known)
                if hasattr(cls, "recognises") and cls.recognises(folder):
                    return cls.from_checkpoint(folder)
            raise UserError(f"{folder}: expected a drafter's config.json with mmspec_drafter, received none")
        return _registered_drafter(str(folder), home, trust_remote_code)
    if all(hasattr(drafter, method) for method in ("attach", "begin", "propose", "observe")):
        return drafter
    raise UserError(f"drafter must be a name, a folder, a Drafter or None: got {type(drafter).__name__}")


def _at_home(drafter: str, home: Path) -> str:
    """The drafter's folder in the target's folder, or in that of a packaged model; the name itself if there is none."""
    for folder in [at / name for at in plugins.drafter_homes(home) for name in ("drafter", f"drafter-{drafter}")]:
        name = checkpoint.drafter_name(folder)
        if name and drafter in ("auto", name):
            return str(folder)
    return drafter


def _checkpoint_folder(name: str) -> Path:
    """A local folder, or the local copy of one on the hub."""
    if os.path.exists(name):
        return Path(name)
    if is_path(name) or "/" not in name:
        raise UserError(f"{name}: expected the folder of a drafter checkpoint, there is none")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """The local copy of a drafter checkpoint on the hub."""
    known = ", ".join(plugins.names("drafters"))
    message = f"unknown drafter: expected one of {known}, a local folder or a reachable hub id, got {name!r}"
    patterns = ["config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json"]
    with explained(message, OSError, ValueError), cache_if_offline("drafter", name) as found:
        return Path(snapshot_download(name, allow_patterns=patterns, **found))


def _registered_drafter(drafter: str, home: str, trust_remote_code: bool) -> Drafter:
    name, _, argument = drafter.partition(":")
    cls = plugins.find("drafters", name)
    if getattr(cls, "in_target", False):
        argument = argument or home
    if argument and hasattr(cls, "from_checkpoint"):
        where, settings = cls.parse_argument(argument) if hasattr(cls, "parse_argument") else (argument, {})
        return cls.from_checkpoint(_checkpoint_folder(where), **settings)
    trust = (
        {"trust_remote_code": True} if trust_remote_code and "trust_remote_code" in signature(cls).parameters else {}
    )
    try:
        with explained(f"cannot make drafter {drafter!r}", OSError, ValueError):
            return cls(argument, **trust) if argument else cls()
    except TypeError as error:
        if not argument:
            raise UserError(f"{name} needs a checkpoint: expected {name}:FOLDER, or the folder itself") from error
        raise UserError(f"drafter {name!r} does not take the argument {argument!r}") from error
