"""Sources of models: a folder or repository in the hub's layout, GGUF files, or a folder completed by packages.

Weights are quantised while they are read: layers keep only quantised rows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, modeling_utils
from transformers.core_model_loading import ConversionOps
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmspec import plugins
from mmspec.errors import UserError, explained, missing
from mmspec.files import cache_folder, fill_folder
from mmspec.ops import cpu, cpu_library
from mmspec.quantisation.experts import WEIGHTS as EXPERTS
from mmspec.quantisation.experts import reproduced_experts, stacks_of
from mmspec.quantisation.formats import StoredRows, quantised_rows
from mmspec.targets import gguf, gguf_file, gguf_models
from mmspec.targets.checkpoints import from_pretrained, read_whole, refuse_other_weights
from mmspec.targets.packing import QUANTISED, head_kind
from mmspec.targets.support import refuse_not_finite
from mmspec.targets.tree_layers import replaced

_LARGE = 1_000_000_000  # parameters; larger models keep the checkpoint's dtype on a CPU, to save memory

Takes = Mapping[str, Callable[[Tensor], list[StoredRows]]]
"""Functions that convert a weight to rows, by the weight's name: of a layer, or of fused experts, in several stacks.
The layer keeps the rows as ``stored`` for ``pack_model`` (experts: by weight); its weight stays on the meta device."""

PARTS = "parts.json"
"""File of an incomplete folder: {"language_model": registered model, "vision_tower": registered tower or missing}."""

WEIGHTS = "model.safetensors"

LABELS = "model.vision_tower.labels"
"""Name of the label tensor: token ids in the incomplete folder, language-model embeddings in the completed model."""

_FORMAT = 3  # of the folder of a completed model


class Source:
    """A folder or repository that transformers can load.

    Attributes:
        folder: path or hub id.
        name: name given by the user, for messages.
        dtype: dtype of ``mmspec.load`` closest to a GGUF file's weights; None for other sources.
    """

    dtype: str | torch.dtype | None = None

    def __init__(self, folder: str, name: str | None = None) -> None:
        self.folder, self.name = folder, name or folder

    def config(self, **options: Any) -> Any:
        """The model's configuration; takes options of ``from_pretrained``."""
        return from_pretrained(AutoConfig, self.folder, **options)

    def processor(self, cls: Any, **options: Any) -> Any:
        """Load the processor as ``cls``, a subclass of ``Processor``."""
        return cls.read(self.folder, **options)

    def model(self, auto_class: Any, config: Any, kind: Any, on_cpu: bool, **options: Any) -> tuple[Any, Any]:
        """Load a model with exactly the weights of its source; returns it with its final dtype.

        For quantisation on a CPU, weights are quantised one by one while being read; ``pack_model`` does the rest.

        Args:
            auto_class: auto class of transformers.
            kind: a dtype of ``mmspec.load``.

        Raises:
            UserError: weights are missing, unexpected or have other shapes; or a file was truncated during loading.
        """
        if _packs(kind, on_cpu) and getattr(config, "quantization_config", None) is None:
            rows = _RowsConfig(partial(_quantised, kind))
            with _unmapped():
                model: Any = read_whole(auto_class, self.folder, config=config, quantization_config=rows, **options)
            if rows.refused:
                raise rows.refused[0]
            refuse_other_weights(model, self.name, (), rows.mismatched, ())
            return model, kind
        model = read_whole(auto_class, self.folder, config=config, **options)
        return model, kind if kind != "auto" or not on_cpu or _is_large(model) else torch.float32


class LazySource(Source):
    """A source whose weights are read lazily, one by one.

    Args:
        state: takes an empty model and returns weights by name: tensors, or lazy weights that are read by
            ``weight[...]`` and may have ``rows`` in a GGUF format.
        language: the language model's file.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        state: Callable[[PreTrainedModel], Mapping[str, Any]],
        language: gguf_file.GGUFFile,
    ) -> None:
        super().__init__(folder, name)
        self._state, self._language, self.dtype = state, language, gguf.dtype_of(language)

    def generation_config(self, config: Any) -> GenerationConfig:
        return GenerationConfig.from_pretrained(self.folder)

    def model(self, auto_class: Any, config: Any, kind: Any, on_cpu: bool, **options: Any) -> tuple[Any, Any]:
        try:
            from accelerate import init_empty_weights
        except ImportError as error:
            raise missing(f"reading {self.name}", "accelerate", "real") from error
        wrong = f"cannot load model {self.name!r}: expected the configuration of a model"
        with explained(wrong, Exception), no_init_weights(), init_empty_weights(include_buffers=False):
            model: Any = auto_class.from_config(config, dtype=config.dtype or torch.float32)
        state, tied = self._state(model), dict(model.all_tied_weights_keys)
        takes: Takes = {}
        dtype = kind if isinstance(kind, torch.dtype) else torch.float32
        if kind == "auto" and _packs(self.dtype, on_cpu):
            kind, takes = self.dtype, _rows(model, state)
        elif kind == "auto" and (_is_large(model) or not on_cpu):
            kind = dtype = self.dtype if isinstance(self.dtype, torch.dtype) else torch.bfloat16
        elif kind == "auto":
            kind = dtype
        elif _packs(kind, on_cpu):
            takes = _quantised(kind, model)
        _fill(model, state, takes, dtype, self.name)
        for name, source in tied.items():
            if source in takes:
                _layer(model, name).stored = [state[source].rows()]
        gguf.scale_frequencies(self._language, model)
        model.generation_config = self.generation_config(config)
        return model, kind


class GGUFSource(LazySource):
    """A GGUF file. Its configuration and tokenizer are cached when the processor is first loaded."""

    def __init__(self, path: Path) -> None:
        file = gguf_file.GGUFFile(path)
        super().__init__(str(gguf.index(file)), str(path), partial(gguf_models.read_weights, file), file)

    def config(self, **options: Any) -> Any:
        return gguf.config(self._language)

    def generation_config(self, config: Any) -> GenerationConfig:
        return gguf.generation_config(self._language, config)

    def processor(self, cls: Any, **options: Any) -> Any:
        return cls(gguf.read_tokenizer(gguf.write_index(self._language)))


class CompletedSource(LazySource):
    """A vision-language model shipped without the weights that installed packages contain.

    The files other than weights, drafters included, are assembled in a folder of the user's cache. Raises
    ``UserError``: a part is not installed, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._incomplete, parts = folder, json.loads((folder / PARTS).read_text())
        name = parts["language_model"]
        file = gguf_file.file_in(plugins.find("models", name)())
        if file is None or not (folder / WEIGHTS).is_file():
            raise UserError(f"cannot complete the model: expected {WEIGHTS} in {folder}, and a GGUF file of {name}")
        self._tower = plugins.find("towers", parts["vision_tower"]) if "vision_tower" in parts else None
        language = gguf_file.GGUFFile(file)
        text = gguf.write_index(language)
        # The key consists of the files' names, sizes and times.
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        identity = hashlib.sha256(f"{_FORMAT} {states} {text}".encode()).hexdigest()[:16]
        index = cache_folder() / "completed" / identity / folder.name
        fill_folder(index, partial(self._write, text))
        super().__init__(str(index), str(folder), self._weights, language)

    def _write(self, text: Path, index: Path) -> None:
        for source in (text, self._incomplete):  # the folder's configuration and chat template take precedence
            shutil.copytree(source, index, ignore=shutil.ignore_patterns(WEIGHTS, PARTS), dirs_exist_ok=True)
        for drafter in self._incomplete.glob(f"*/{WEIGHTS}"):
            shutil.copyfile(drafter, index / drafter.relative_to(self._incomplete))

    def _weights(self, empty: PreTrainedModel) -> dict[str, Any]:
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(gguf.config(self._language))
        language = gguf_models.read_weights(self._language, text)
        weights: dict[str, Any] = {
            f"model.language_model.{name.removeprefix('model.')}": x for name, x in language.items()
        }
        weights |= {f"model.vision_tower.{name}": x for name, x in (self._tower() if self._tower else {}).items()}
        own: dict[str, Tensor] = load_file(self._incomplete / WEIGHTS, backend="pread")
        if LABELS in own:
            own[LABELS] = language["model.embed_tokens.weight"][...][own[LABELS].long()]
        return weights | own


def find(name: str, mmproj: str | PathLike[str] | None = None) -> Source:
    """The source of a model's name, folder or file.

    Args:
        mmproj: file with the vision tower of a GGUF model; by default, if ``name`` is a folder, the file in it.

    Raises:
        UserError: a folder has several GGUF files, ``mmproj`` is given for a model that is not in GGUF, a package is
            missing, a file cannot be read, or the cache cannot be written.
    """
    path = gguf_file.file_in(name)
    if path is not None and (projector := mmproj or gguf_file.projector_in(name)):
        return cast(Source, plugins.find("sources", "mmproj")(path, projector))
    if path is not None:
        return GGUFSource(path)
    if mmproj is not None:
        raise UserError(f"mmproj goes with the GGUF file of a language model: got the model {name!r}")
    return CompletedSource(Path(name)) if (Path(name) / PARTS).is_file() else Source(name)


def _packs(kind: Any, on_cpu: bool) -> bool:
    return on_cpu and kind in QUANTISED and cpu_library.available()


def _is_large(model: PreTrainedModel) -> bool:
    return model.num_parameters() >= _LARGE


def _layer(model: nn.Module, weight: str) -> Any:
    return model.get_submodule(weight.rpartition(".")[0])


def _quantised(kind: str, model: PreTrainedModel) -> Takes:
    """Quantise rows of the decoder's linear layers and of an untied output layer."""
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    kinds = {id(layer): kind for layer in model.get_decoder().modules()}
    kinds[id(model.get_output_embeddings())] = head_kind(kind)
    linear = {f"{name}.weight": id(layer) for name, layer in model.named_modules() if type(layer) is nn.Linear}
    names = {name: kinds[layer] for name, layer in linear.items() if layer in kinds and name not in tied}
    takes = {name: partial(_quantised_rows, kind, name, None) for name, kind in names.items()}
    packed = {name: module for name, module in _expert_weights(model) if id(module) in kinds}
    return takes | {name: partial(_quantised_rows, kind, name, module) for name, module in packed.items()}


def _expert_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the fused weights of experts that ``pack_model`` packs."""
    packed = {id(module) for _, _, module, _ in reproduced_experts(model)}
    for name, module in model.named_modules():
        if id(module) in packed:
            yield from ((f"{name}.{weight}", module) for weight in EXPERTS)


def _quantised_rows(kind: str, name: str, experts: nn.Module | None, weight: Any) -> list[StoredRows]:
    dense = weight[...]
    refuse_not_finite([(name, dense)])
    parts = [dense] if experts is None else stacks_of(experts, name.rpartition(".")[2], dense)
    return [quantised_rows(part, kind) for part in parts]


def _keep(model: nn.Module, name: str, rows: list[StoredRows]) -> None:
    """Set the ``stored`` rows of a weight."""
    layer, leaf = _layer(model, name), name.rpartition(".")[2]
    layer.stored = rows if leaf == "weight" else {**getattr(layer, "stored", {}), leaf: rows}


def _rows(model: PreTrainedModel, state: Mapping[str, Any]) -> Takes:
    """Take stored rows of linear layers and embeddings whose shapes match. Rows of other values, such as reordered
    columns, are quantised to int8, and layers that the file keeps unquantised, such as gates, are ``precise``:
    little of the file's precision is lost. Other formats are quantised again when the model is packed."""
    layers: dict[str, Any] = {f"{name}.weight": layer for name, layer in model.named_modules()}
    takes: dict[str, Callable[[Any], list[StoredRows]]] = {}
    for name in layers.keys() & state.keys():
        layer, weight = layers[name], state[name]
        rows = getattr(weight, "rows", lambda: None)()
        keeps = type(layer) is nn.Linear or isinstance(layer, nn.Embedding)
        if keeps and rows is not None and (len(rows.places), rows.features) == layer.weight.shape:
            takes[name] = partial(_stored, [rows])
        elif type(layer) is nn.Linear and rows is None and hasattr(weight, "changed"):
            layers[name].precise = not weight.quantised
            if weight.changed:
                takes[name] = partial(_quantised_rows, "int8", name, None)
    for name in state.keys() & dict(_expert_weights(model)).keys():
        stacks = getattr(state[name], "stacks", lambda: None)()
        if stacks is not None and state[name].shape == model.get_parameter(name).shape:
            takes[name] = partial(_stored, stacks)
    return takes


def _stored(rows: list[StoredRows], weight: Any) -> list[StoredRows]:
    return rows


def _fill(model: Any, state: Mapping[str, Any], takes: Takes, dtype: torch.dtype, name: str) -> None:
    """Read a model's weights; layers in ``takes`` keep only rows, and other experts are bfloat16, as after packing."""
    experts = torch.bfloat16 if takes else dtype
    empty = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {}
    for key in state.keys() & empty.keys():
        if key in takes:
            rows = takes[key](state[key])
            found = torch.Size((sum(len(part.places) for part in rows), rows[0].features))
            fused = empty[key].ndim > 2 and found.numel() == empty[key].numel()
            shapes[key] = empty[key].shape if fused else found
            _keep(model, key, rows)
            continue
        value: Tensor = state[key][...]
        shapes[key] = value.shape
        if value.shape == empty[key].shape:
            place, leaf = _layer(model, key), key.rpartition(".")[2]
            value = value.to(experts if value.ndim > 2 else dtype) if value.is_floating_point() else value
            is_buffer = leaf in place._buffers
            setattr(place, leaf, value if is_buffer else nn.Parameter(value, requires_grad=False))
    tied = model.all_tied_weights_keys
    parameters = {key for key, _ in model.named_parameters()} - tied.keys()
    model.tie_weights()
    refuse_other_weights(
        model,
        name,
        missing=parameters - state.keys(),
        mismatched={(key, shape, empty[key].shape) for key, shape in shapes.items() if shape != empty[key].shape},
        unexpected=state.keys() - empty.keys() - tied.keys(),
    )


def _unmapped() -> AbstractContextManager[None]:
    """Make transformers read safetensors files without memory mapping, which keeps them in memory until the end."""

    def reading(plain: Any) -> Any:
        return wraps(plain, updated=())(lambda *args, **options: plain(*args, **{**options, "backend": "pread"}))

    return replaced({(modeling_utils, "safe_open"): reading})


@register_quantization_config("mmspec")
class _RowsConfig(QuantizationConfigMixin):
    """For ``from_pretrained(quantization_config=...)``.

    Args:
        takes: given the empty model, returns a ``Takes`` with the weights to quantise.

    Attributes:
        refused: errors of ``takes``, which transformers would wrap.
        mismatched: name, shape and expected shape of weights with a wrong shape, which transformers does not check for
            quantised weights (before 5.24, for all weights).
    """

    def __init__(self, takes: Callable[[PreTrainedModel], Takes]) -> None:
        self.quant_method: Any = "mmspec"
        self.takes = takes
        self.mismatched: set[tuple[str, Any, Any]] = set()
        self.refused: list[UserError] = []


@register_quantizer("mmspec")
class _Rows(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._config = cast(_RowsConfig, self.quantization_config)
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
    def __init__(self, takes: Takes, config: _RowsConfig) -> None:
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
                expected = model.get_parameter(name).shape
                if tensor.shape == expected:
                    try:
                        _keep(model, name, self._takes[name](tensor))
                    except UserError as error:
                        self._config.refused.append(error)
                else:
                    self._config.mismatched.add((name, tensor.shape, expected))
                missing_keys.discard(name)
                cpu.trim()  # otherwise the allocator keeps as much memory again as all rows
            else:
                kept[name] = tensor
        return kept
