"""Quantisation while loading: transformers reads a checkpoint tensor by tensor, and layers keep only quantised rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmspec.errors import UserError
from mmspec.ops import cpu
from mmspec.quantisation.formats import StoredRows
from mmspec.targets.tree_layers import replaced

NAME = "mmspec"

Takes = Mapping[str, Callable[[Tensor], StoredRows]]
"""Functions that convert a weight to rows, by the weight's name. The layer keeps the rows as ``stored`` for
``pack_model``; its ``weight`` stays on the meta device."""


@contextmanager
def unmapped() -> Iterator[None]:
    """Make transformers read safetensors files without memory mapping, which keeps them in memory until the end."""
    with replaced({(modeling_utils, "safe_open"): _reading}):
        yield


def _reading(plain: Any) -> Any:
    @wraps(plain, updated=())
    def opened(*args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "backend": "pread"})

    return opened


@register_quantization_config(NAME)
class RowsConfig(QuantizationConfigMixin):
    """For ``from_pretrained(quantization_config=...)``.

    Args:
        takes: given the empty model, returns a ``Takes`` with the weights to quantise.

    Attributes:
        refused: errors of ``takes``, which transformers would wrap.
        mismatched: name, shape and expected shape of weights with a wrong shape, which transformers does not check for
            quantised weights (before 5.24, for all weights).
    """

    def __init__(self, takes: Callable[[PreTrainedModel], Takes]) -> None:
        self.quant_method: Any = NAME
        self.takes = takes
        self.mismatched: set[tuple[str, Any, Any]] = set()
        self.refused: list[UserError] = []


@register_quantizer(NAME)
class _Rows(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._config = cast(RowsConfig, self.quantization_config)
        self._takes: Takes = self._config.takes(model)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._takes

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self._takes, self._config)

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.shape != self._shapes.get(name, parameter.shape):
                self._config.mismatched.add((name, parameter.shape, self._shapes[name]))
        self.remove_quantization_config(model)


class _Take(ConversionOps):
    def __init__(self, takes: Takes, config: RowsConfig) -> None:
        self._takes, self._config = takes, config

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Any = None,
        full_layer_name: str = "",
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        kept = {}
        for name, value in input_dict.items():
            name = full_layer_name if len(input_dict) == 1 else name
            tensor = value[0] if isinstance(value, list) else value
            if name in self._takes:
                layer = model.get_submodule(name.rpartition(".")[0])
                if tensor.shape == layer.weight.shape:
                    try:
                        layer.stored = [self._takes[name](tensor)]
                    except UserError as error:
                        self._config.refused.append(error)
                else:
                    self._config.mismatched.add((name, tensor.shape, layer.weight.shape))
                missing_keys.discard(name)
                cpu.trim()  # otherwise the allocator keeps as much memory again as all rows
            else:
                kept[name] = tensor
        return kept
