"""Drafter checkpoints: a folder with ``config.json`` and ``model.safetensors``.

``config.json`` contains the drafter's registered name (``mmspec_drafter``), its settings and its target:
``verifier: {name_or_path, architectures, hidden_size, vocab_size}``.

Third-party weight files are read safely: safetensors or pickled (``weights_only``), single or sharded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.drafters.spec import TreeShape
from mmspec.errors import UserError, explained
from mmspec.files import atomic, read_json, write_text
from mmspec.targets.gguf_file import GGUFFile
from mmspec.validation import option, options
from mmspec.validation import read as read_options

S = TypeVar("S")
C = TypeVar("C")
N = TypeVar("N", bound=nn.Module)

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@options
class Verifier:
    """The target that a drafter was trained for: base name of its path, architecture and sizes."""

    name_or_path: str
    architectures: list[str] = option(..., min_length=1)
    hidden_size: int = option(..., ge=1, le=2**20)
    vocab_size: int = option(..., ge=1, le=2**24)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Contents of a folder's ``config.json``; None if they cannot be read."""
    try:
        return read_json(folder / _CONFIG)
    except UserError:
        return None


def drafter_name(folder: Path) -> str | None:
    """Registered name of the drafter in a folder, or None."""
    return (read_config(folder) or {}).get("mmspec_drafter")


def read(folder: Path, kind: type[S]) -> tuple[S, dict[str, Any], dict[str, Tensor]]:
    """Read a drafter checkpoint.

    Returns:
        Settings, target (see ``Verifier``) and tensors.

    Raises:
        UserError: a file is missing or damaged, or a field of ``config.json`` is missing, unknown, of the wrong type or
            out of range. Fields are validated before anything is allocated.
    """
    config, verifier, source = _read_config(folder)
    return read_options(kind, config, source), verifier, _load_tensors(folder)


def read_network(
    folder: Path, kind: type[S]
) -> tuple[S, dict[str, Tensor], Tensor | None, dict[str, Any], dict[str, int]]:
    """Read a checkpoint of a trained network.

    Args:
        kind: class of the network's configuration; an optional ``head`` is the number of rows of its output layer.

    Returns:
        Configuration, tensors, draft vocabulary, (n,) int64 (None is the target's full vocabulary), target (see
        ``Verifier``) and tree shape.
    """
    config, verifier, source = _read_config(folder)
    network = read_options(kind, config.pop("network", None), f"{source}: network")
    tree = read_options(TreeShape, config, source)
    tensors, head = _load_tensors(folder), getattr(network, "head", 0)
    draft_ids = take_draft_ids(tensors, verifier["vocab_size"], folder)
    if draft_ids is not None and head not in (0, len(draft_ids)):
        raise UserError(f"{folder}: head must have a row per draft token, {len(draft_ids)}: got {head}")
    return network, tensors, draft_ids, verifier, asdict(tree)


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Settings, target, and the name of the file in error messages."""
    source = str(folder / _CONFIG)
    config = read_json(folder / _CONFIG)
    if "verifier" not in config:
        raise UserError(f"{source}: expected a verifier, received none")
    verifier = asdict(read_options(Verifier, config.pop("verifier"), f"{source}: verifier"))
    config.pop("mmspec_drafter", None)
    return config, verifier, source


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    with explained(f"{folder}: expected a drafter's {_CONFIG} and {_WEIGHTS}", OSError, ValueError, SafetensorError):
        return load_file(folder / _WEIGHTS, backend="pread")


def take_draft_ids(tensors: dict[str, Tensor], vocab: int, folder: Path, name: str = "draft_ids") -> Tensor | None:
    """Pop the draft vocabulary from a checkpoint's tensors; None if it is the full vocabulary. Raises ``UserError``:
    the ids are not distinct tokens of the target."""
    ids = tensors.pop(name, None)
    if ids is not None:
        fit = ids.ndim == 1 and ids.dtype in (torch.int32, torch.int64)
        if not fit or not len(ids) or bool(((ids < 0) | (ids >= vocab)).any()) or len(ids.unique()) < len(ids):
            raise UserError(f"{folder}: {name} must be a 1D integer tensor of distinct tokens below {vocab}")
    return None if ids is None else ids.long()


def load_network(kind: Callable[[C], N], config: C, tensors: Mapping[str, Tensor], folder: Path) -> N:
    """Build a network of class ``kind`` from exactly its tensors, which are assigned, not copied. Raises ``UserError``:
    a tensor is missing, unexpected, of the wrong shape or not floating point."""
    with torch.device("meta"):
        network = kind(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_tensors(tensors, shapes, "a drafter", str(folder))
    network.load_state_dict({name: tensors[name] for name in shapes}, assign=True)
    return network


def load_stored(network: Any, weights: Mapping[str, Any], others: Collection[str], what: str, file: GGUFFile) -> None:
    """Load tensors of a GGUF file; linear layers also have their ``stored`` rows, for ``pack_drafter``.

    Args:
        weights: of ``gguf_models``.
        others: names of the network's tensors that come from elsewhere.

    Raises:
        UserError: see ``check_tensors``.
    """
    tensors = {name: weight[...] for name, weight in weights.items()}
    shapes = {name: tuple(x.shape) for name, x in network.state_dict().items() if name not in others}
    check_tensors(tensors, shapes, what, str(file.path))
    network.load_state_dict(tensors, strict=False, assign=True)
    for name, weight in weights.items():
        layer = network.get_submodule(name.rpartition(".")[0])
        if type(layer) is nn.Linear and (rows := weight.rows()) is not None:
            layer.stored = [rows]  # type: ignore[assignment]


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    where: str,
    optional: Collection[str] = (),
) -> None:
    """Check that there are exactly the tensors of a published layout. Raises ``UserError``: a tensor is missing,
    unknown, or has the wrong shape or dtype: ``d2t`` and ``t2d`` are integer or boolean, all others floating point."""
    harmless = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}  # of old releases of transformers
    missing = sorted(shapes.keys() - tensors.keys() - set(optional))
    unknown = sorted(tensors.keys() - shapes.keys() - harmless)
    if missing or unknown:
        found = [f"{what} {', '.join(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        raise UserError(f"{where}: expected exactly the tensors of {what}, received {'; '.join(found)}")
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor, integers = tensors[name], name in ("d2t", "t2d")
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{where}: {name} must be {shapes[name]} by config.json: got {tuple(tensor.shape)}")
        floating = tensor.is_floating_point() and tensor.element_size() > 1  # float8 is meaningless without its scales
        if floating == integers:
            wanted = "an integer or boolean" if integers else "a floating point"
            raise UserError(f"{where}: {name} must be {wanted} tensor: got {tensor.dtype}")


def write(folder: Path, name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> None:
    """Write a drafter checkpoint; files are written atomically."""
    config = {"mmspec_drafter": name, **settings, "verifier": verifier_of(target)}
    with atomic(folder / _WEIGHTS) as part:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
    write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")


def verifier_of(target: Any) -> dict[str, Any]:
    """The ``verifier`` entry for a target."""
    return {
        "name_or_path": Path(getattr(target.model_config, "name_or_path", "") or "").name,
        "architectures": [target.architecture],
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }


def check_verifier(verifier: Mapping[str, Any], target: Any) -> None:
    """Check that a target matches the known properties of a drafter's target, see ``check_same_target``.

    The target of a published drafter, which has the entry ``model_type``, may have more tokens than the drafter, like
    transformers' LLaVA-1.5 (32064, drafter 32000), but fewer than twice as many, which would be another tokenizer.
    """
    received, kinds = verifier_of(target), dict.fromkeys((target.config.model_type, target.model_config.model_type))
    received |= {"model_type": [*kinds], "name_or_path": received["name_or_path"] or target.architecture}
    check_same_target(verifier, received, more_tokens="model_type" in verifier)


def check_same_target(known: Mapping[str, Any], received: Mapping[str, Any], more_tokens: bool = False) -> None:
    """Check that a target has the known properties of a drafter's target, see ``Verifier``.

    Args:
        more_tokens: accept less than twice as many tokens, too.

    Raises:
        UserError: a size or the type of the model differs, or no class is in both lists of ``architectures``.
    """

    def differs(name: str) -> bool:
        ours, theirs = known.get(name), received.get(name)
        if not ours or not theirs:
            return False
        if name == "architectures":
            return set(ours).isdisjoint(theirs)
        if name == "vocab_size" and more_tokens:
            return not theirs / 2 < ours <= theirs
        return ours not in theirs if isinstance(theirs, list) else ours != theirs

    names = ("architectures", "model_type", "hidden_size", "vocab_size")
    if different := [name for name in names if differs(name)]:
        expected, found = (", ".join(f"{name} {one[name]}" for name in different) for one in (known, received))
        trained, name = known.get("name_or_path") or "another target", received.get("name_or_path")
        found = f"{name} with {found}" if name else found
        raise UserError(f"the drafter was trained for {trained} ({expected}): got {found}")


HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Weight files of published Medusa and Hydra heads; the folder may also contain the target's weights."""


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder, heads first, safetensors preferred; empty if there are none. Raises ``UserError``: the
    index is invalid or lists a file outside its folder."""
    for name in (*HEADS, "model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
    return []


def _shards(index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: expected a weight_map from tensor names to files, received none")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(f"{index}: expected files in the same folder, received {name!r}")
    return [index.parent / name for name in names]


def tensor_names(file: Path) -> list[str]:
    """Tensor names of a file; raises like ``load_weights``."""
    if file.suffix != ".safetensors":
        return list(load_weights(file))
    with _opened(file) as stored:
        return list(stored.keys())


def load_weights(file: Path, shapes_only: Collection[str] = ()) -> dict[str, Tensor]:
    """Load the tensors of a file into memory on the CPU.

    Args:
        shapes_only: names to return as meta tensors, without reading them.

    Raises:
        UserError: the file is damaged or contains anything but named tensors.
    """
    if file.suffix != ".safetensors":
        return _unpickle(file)
    with _opened(file) as stored:
        return {
            name: torch.empty(stored.get_slice(name).get_shape(), dtype=torch.float32, device="meta")
            if name in shapes_only
            else stored.get_tensor(name)
            for name in stored.keys()  # noqa: SIM118, not a mapping
        }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with explained(f"{file}: expected a safetensors file", OSError, SafetensorError):  # noqa: SIM117
        with safe_open(file, "pt", backend="pread") as stored:
            yield stored


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file}: expected tensors and nothing else, received {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected named tensors, received {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{file}: expected named tensors, received {name!r} of type {type(value).__name__}")
    return dict(content)
