"""LoRA adapters of peft in a transformers model: loading, and selection per pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Mapping
from os import PathLike, fspath, path
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from mmspec.errors import UserError, explained, missing, nearest, shown
from mmspec.files import read_json, readable_path
from mmspec.targets.packing import weights_kind
from mmspec.targets.support import output_layer

_NAMES = "mmspec_adapters"  # model attribute: adapters that requests may choose; users switch other adapters themselves
_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError, UnpicklingError, EOFError)
_FIELDS = ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"]
_FIELDS += ["target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"]
"""Fields of an adapter's configuration that are passed to peft; all others must have their defaults."""

_UNUSED = ["peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"]
_UNUSED += ["inference_mode", "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"]
"""Fields without effect on a trained adapter."""

_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")  # keep the model's own weights unchanged


def add_adapters(model: Any, folders: Mapping[str, str | PathLike[str]]) -> None:
    """Load adapters into a model, none of them active. The model's own weights do not change.

    Args:
        folders: by adapter name, folders of ``PeftModel.save_pretrained`` or ``save_adapter``, local or on the hub.

    Raises:
        UserError: peft is not installed, the weights are packed, an adapter changes more than linear layers and experts
            of this model's decoder, or the tensors in its file do not match these layers.
    """
    if (packed := weights_kind(model)) is not None:
        packed = packed.removesuffix("Blocks").removesuffix("Linear").lower()
        raise UserError(f"adapters need weights that are not packed: expected float32 or float16, got packed {packed}")
    try:
        from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
        from peft.tuners.lora import LoraLayer, ParamWrapper
    except ModuleNotFoundError as error:
        raise missing("adapters=", "peft") from error
    wrapper = None
    for name, folder in folders.items():
        where = fspath(folder)
        where = readable_path(where if path.exists(where) else path.expanduser(where))
        about = f"cannot load adapter {name!r} from {where!r}"
        if not isinstance(name, str) or not name or "." in name:
            raise UserError(f"the name of an adapter must be text without a dot: got {shown(name)}")
        with explained(about, *_ERRORS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors that are refused below
            fields = read_json(Path(cached_file(where, "adapter_config.json") or where))
            _check(about, fields, LoraConfig().to_dict())
            tensors = load_peft_weights(where, "cpu")
            _refuse(about, "tensors of LoRA alone, got", [key for key in tensors if ".lora_" not in key])
            # Without peft's initialisation, which may change the model's weights.
            config = LoraConfig(init_lora_weights=False, **{key: fields[key] for key in _FIELDS if key in fields})
            if wrapper is None:
                wrapper = PeftModel.from_pretrained(model, where, name, config=config, ignore_mismatched_sizes=True)
            else:
                wrapper.add_adapter(name, config)
            found: Any = set_peft_model_state_dict(wrapper, tensors, name, ignore_mismatched_sizes=True)
            _refuse(about, "tensors of this model's layers, got", found.unexpected_keys)
            own = re.compile(rf"(\.lora_\w+)\.{re.escape(name)}(?=\.|$)")
            absent = [own.sub(r"\1", key) for key in found.missing_keys if own.search(key)]
            _refuse(about, "all tensors, in the sizes of their layers, missing", absent)
            copied = model.get_input_embeddings(), output_layer(model)  # drafters copy these weights
            layers = [(place, layer) for place, layer in model.named_modules() if isinstance(layer, LoraLayer)]
            linear = [place for place, layer in layers if isinstance(layer.get_base_layer(), nn.Linear | Conv1D)]
            experts = [place for place, layer in layers if isinstance(layer, ParamWrapper)]
            other = [place for place, layer in layers if place not in (*linear, *experts) or layer in copied]
            _refuse(about, "changes of the decoder's linear layers and experts only, got those of", other)
    setattr(model, _NAMES, tuple(folders))
    Adapters(model).use(None)


def _check(about: str, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for an adapter that changes, or may change, more than linear layers."""
    if (kind := fields.get("peft_type")) != "LORA":
        raise UserError(f"{about}: expected LoRA, got {kind}")
    known = [*_FIELDS, *_UNUSED, *(["init_lora_weights"] if fields.get("init_lora_weights", True) in _INITS else [])]
    other = {key: value for key, value in fields.items() if key not in known and value and value != defaults.get(key)}
    given = [f"{key}={shown(value)}" for key, value in other.items()]
    _refuse(about, "LoRA of layers, which leaves the model's own weights unchanged, got", given)


def _refuse(about: str, expected: str, names: Iterable[str]) -> None:
    """Raise ``UserError`` unless ``names`` is empty."""
    if names := sorted(names):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"{about}: expected {expected} {', '.join(names[:3])}{more}")


class Adapters:
    """Adapters in a model's layers, loaded by ``add_adapters`` or by the user. Methods do nothing without adapters.

    Attributes:
        names: adapters that requests may choose.
        chosen: adapter of the target's current and next sequences; None without one.
    """

    chosen: str | None = None

    def __init__(self, model: Any) -> None:
        self.names: tuple[str, ...] = getattr(model, _NAMES, ())
        self._model, self._owner = model, object()
        self._layers: list[Any] = []
        self._find()
        if not self._layers:
            self._version = ""  # the same in all processes

    def _find(self) -> None:
        """Find the LoRA layers again if the user has wrapped or unwrapped the model: peft replaces ``peft_config``."""
        owner = vars(self._model).get("peft_config")
        if owner is not self._owner:
            layers = (layer for layer in self._model.modules() if hasattr(layer, "active_adapters"))
            self._layers = [layer for layer in layers if hasattr(layer, "lora_A")]
            self._owner, self._version = owner, uuid4().hex

    def check(self, name: str | None) -> None:
        """Raise ``UserError`` for an unknown adapter; None, for no adapter, is valid."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names) or "none are loaded"
            raise UserError(
                f"unknown adapter: expected one of those loaded ({known}), got {shown(name)}{nearest(name, self.names)}"
            )

    def key(self, name: str | None) -> Hashable:
        """Key of the adapter weights that a request's KV states depend on."""
        if self.names:
            return name
        self._find()
        states = ((*one.active_adapters, one.disable_adapters, *one.merged_adapters) for one in self._layers)
        return self._version, next(states, None)

    def use(self, name: str | None) -> None:
        """Activate an adapter in the model's layers, which other targets of the model share; None deactivates all."""
        if not self.names:
            return
        for layer in self._layers:
            if layer.disable_adapters != (name is None):
                layer.enable_adapters(name is not None)
            if name is not None and layer.active_adapters != [name]:
                layer.set_adapter(name)
                layer.requires_grad_(False)
