"""LoRA adapters of peft in a model of transformers: loading, and which of them the next pass uses."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from os import PathLike, fspath, path
from typing import Any

from mmspec.checks import nearest, shown
from mmspec.errors import UserError, explained, missing
from mmspec.files import readable_path
from mmspec.targets.packing import weights_kind
from mmspec.targets.support import output_layer

_NAMES = "mmspec_adapters"  # of a model: those that requests choose; the owner of others chooses himself
_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError)


def add_adapters(model: Any, folders: Mapping[str, str | PathLike[str]]) -> None:
    """Load adapters into a model, which goes on without one.

    Args:
        folders: of ``PeftModel.save_pretrained`` or ``save_adapter``, local or on the hub, by names.

    Raises:
        UserError: peft is not installed, the weights are packed, or an adapter is not one of linear layers within this
            model's decoder.
    """
    if (packed := weights_kind(model)) is not None:
        packed = packed.removesuffix("Blocks").removesuffix("Linear").lower()
        raise UserError(f"adapters need weights that are not packed: expected float32 or float16, got packed {packed}")
    try:
        from peft import PeftConfig, PeftModel
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
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # transformers' own
            _check(about, PeftConfig.from_pretrained(where))
            if wrapper is None:
                wrapper = PeftModel.from_pretrained(model, where, name)
            else:
                wrapper.load_adapter(where, name)
            for layer in (model.get_input_embeddings(), output_layer(model)):
                if hasattr(layer, "base_layer"):  # drafters have copies of them
                    raise UserError(
                        f"{about}: expected changes of the decoder's layers only, got one of {layer._get_name()}"
                    )
    setattr(model, _NAMES, tuple(folders))
    Adapters(model).use(None)


def _check(about: str, config: Any) -> None:
    """Raise for what changes more than the products of linear layers."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise UserError(f"{about}: expected LoRA, got {kind}")
    for name in ("modules_to_save", "trainable_token_indices"):
        if value := getattr(config, name, None):
            raise UserError(f"{about}: expected changes of linear layers only, got {name}={shown(value)}")


class Adapters:
    """The adapters in a model's layers, loaded by ``add_adapters`` or its owner's. Without any, methods do nothing.

    Attributes:
        names: that requests may choose.
        chosen: by the sequences of a target; None without one.
    """

    chosen: str | None = None

    def __init__(self, model: Any) -> None:
        self._layers = [
            module for module in model.modules() if hasattr(module, "active_adapters") and hasattr(module, "lora_A")
        ]
        self.names: tuple[str, ...] = getattr(model, _NAMES, ())

    def check(self, name: str | None) -> None:
        """Raise ``UserError`` if no adapter has this name; None is the model without one."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names) or "none are loaded"
            raise UserError(
                f"unknown adapter: expected one of those loaded ({known}), got {shown(name)}{nearest(name, self.names)}"
            )

    def key(self, name: str | None) -> Hashable:
        """What states of a request with this adapter depend on."""
        if self.names:
            return name
        return next(((tuple(one.active_adapters), one.disable_adapters) for one in self._layers), None)

    def use(self, name: str | None) -> None:
        """Let the model use an adapter, or none."""
        if not self.names:
            return
        for layer in self._layers:
            if layer.disable_adapters != (name is None):
                layer.enable_adapters(name is not None)
            if name is not None and layer.active_adapters != [name]:
                layer.set_adapter(name)
                layer.requires_grad_(False)
