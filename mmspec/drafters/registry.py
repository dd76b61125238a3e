"""Drafter registry, drafter specifications, and drafters for the arguments of transformers' assisted generation.

    SPEC[@SHAPE]    SPEC is ``none`` or drafters joined by ``+``, which draft one tree together; SHAPE is ``tree`` (the
                    default), ``chain`` or ``chainN`` (one child per node, at most N draft tokens)

A drafter is ``auto`` (the target's default), ``NAME``, ``NAME:ARGUMENT``, or the folder or hub id of a checkpoint. NAME
is the checkpoint of that name in the target's folder, if there is one; ``new:NAME`` ignores it.

Registered names come before paths: ``ngram`` is the drafter, ``./ngram`` a folder. Otherwise, the longest path that
exists is used verbatim, whatever characters it contains (``/m/a+b@chain``).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedModel

from mmspec import plugins
from mmspec.core.drafter import Drafter, as_drafter
from mmspec.drafters import checkpoint
from mmspec.drafters.checkpoint import HEADS
from mmspec.drafters.early_exit import EarlyExit
from mmspec.drafters.gemma4 import MODEL_TYPES, Gemma4
from mmspec.drafters.layouts import LAYOUTS, REFUSED, layout_of, recognise
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.small import Small
from mmspec.drafters.spec import DrafterSpec
from mmspec.drafters.union import Union
from mmspec.errors import UserError, explained, shown
from mmspec.targets.checkpoints import cache_if_offline, is_path
from mmspec.targets.support import base_model

PLAIN, AUTO, DEFAULT = "none", "auto", "recycle+ngram"
LONGEST_CHAIN = 8
"""Maximum draft tokens of ``@chain`` for drafters with their own tree size; other drafters follow the plan."""

_SHAPE = re.compile(r"@(?:tree|(chain)(\d*))$")
_PREFIX = re.compile(r"([^+,@/:=]*[:=])+")  # of an argument: NAME: and, in lists of ``mmspec eval``, LABEL=
_SETTINGS = re.compile(r"@([a-z]+:)?[\d.,]+$")  # of an argument, see ``DrafterSpec.parse_settings``


@dataclass(frozen=True)
class Selection:
    """A parsed specification; see the module.

    Attributes:
        drafters: specifications of single drafters; none for plain decoding.
        chain: draft tokens of a chain, at most; None drafts trees.
    """

    drafters: tuple[str, ...]
    chain: int | None = None

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse a specification. Raises ``UserError``: an unknown shape, no drafter between two ``+``, or plain
        decoding in a union or with chains."""
        is_local = _is_local(split(text, "+")[-1])
        match = None if is_local else _SHAPE.search(text)
        if match is None and not is_local and ":" not in text:  # else it belongs to an argument
            drafters, _, shape = text.rpartition("@")
            if drafters and (os.path.exists(drafters) or not is_path(text)):
                raise UserError(f"a drafter's shape must be tree, chain or chainN: got {shape!r}")
        names = tuple(split(text if match is None else text[: match.start()], "+"))
        chain = None if match is None or not match[1] else int(match[2] or LONGEST_CHAIN)
        if chain == 0:
            raise UserError(f"a chain must have one draft token or more: got {text!r}")
        if names == (PLAIN,):
            if chain is not None:
                raise UserError(f"plain decoding drafts no chains: expected {PLAIN!r} or a drafter, got {text!r}")
            return cls(())
        if {"", PLAIN} & set(names):
            raise UserError(f"names joined by + must each be a drafter's: got {text!r}")
        return cls(names, chain)

    def label(self) -> str:
        """The selection's name for people, such as "FLASH, chain"."""
        named = " + ".join(map(_label, self.drafters)) or "Plain"
        return named if self.chain is None else f"{named}, chain"


def split(text: str, sign: str) -> list[str]:
    """Specifications that a sign (``+`` or ``,``) separates; paths that exist are not divided."""
    pieces, parts = text.split(sign), []
    while pieces:
        joined = (sign.join(pieces[:end]) for end in range(len(pieces), 1, -1))
        parts.append(next(filter(_is_local, joined), pieces[0]))
        pieces = pieces[parts[-1].count(sign) + 1 :]
    return parts


def _is_local(text: str) -> bool:
    """Whether a specification is or ends with a path that exists; registered names take precedence."""
    if {AUTO, PLAIN, *plugins.names("drafters")}.issuperset(re.split("[+,]", _SHAPE.sub("", text))):
        return False
    argument = _PREFIX.sub("", text, count=1) if _PREFIX.match(text) else ""
    return any(map(os.path.exists, (text, argument, _SETTINGS.sub("", argument))))


def drafter_spec(name: str) -> DrafterSpec:
    """The declaration of a registered drafter. Raises ``UserError``: the name is not registered; the message lists
    registered names."""
    return DrafterSpec.of(name, plugins.find("drafters", name))


def drafter_specs() -> list[DrafterSpec]:
    """All registered drafters: default drafters, then drafters without a checkpoint, then the rest, by name."""
    specs = [DrafterSpec.of(entry.name, entry.load()) for entry in plugins.registered("drafters")]
    return sorted(specs, key=lambda spec: (spec.name not in DEFAULT.split("+"), not spec.alone, spec.name))


def registered_name(drafter: Drafter | None) -> str | None:
    """The registered name of a drafter's class; names of several drafters are joined by +."""
    known = {spec.location: spec.name for spec in drafter_specs()}
    kinds = [type(member) for member in (drafter.members if drafter else ())]
    return "+".join(known.get(f"{kind.__module__}:{kind.__qualname__}", kind.__name__) for kind in kinds) or None


def drafters_for(home: Path) -> list[str]:
    """Specifications of the drafters for the model in a folder or GGUF file, default first: drafters in the folder, in
    the model's checkpoint, and without a checkpoint. If the model is not local, ``auto`` stands for the first."""
    alone = [spec.name for spec in drafter_specs() if spec.alone]
    if not home.exists():
        return [AUTO, *alone]
    homes = plugins.drafter_homes(home)
    folders = [folder for at in homes for folder in (at / "drafter", *sorted(at.glob("drafter-*")))]
    own = [name for name in map(checkpoint.drafter_name, folders) if name]
    inside = [
        spec.name for spec in drafter_specs() if spec.weights == "target" and spec.recognises and spec.recognises(home)
    ]
    first = plugins.default_drafter(home)
    return list(dict.fromkeys([*([] if first == AUTO else [first]), *(own or [DEFAULT]), *inside, *alone]))


def make_drafter(drafter: Any, home: str = "", trust_remote_code: bool = False) -> Drafter | None:
    """A drafter from the ``drafter`` argument of ``mmspec.load``.

    Args:
        drafter: a specification, see the module; a folder; a ``Drafter``; or None.
        trust_remote_code: allow Python code in the folder of a draft model.

    Raises:
        UserError: an unknown name, a damaged checkpoint, or another object.
    """
    if not isinstance(drafter, str | Path):
        return None if drafter is None else as_drafter(drafter)
    is_path_object = isinstance(drafter, Path)
    selection = Selection((os.path.join(os.curdir, drafter),)) if is_path_object else Selection.parse(str(drafter))
    drafters = [_make(part, home, trust_remote_code) for part in selection.drafters]
    if not drafters:
        return None
    joined = drafters[0] if len(drafters) == 1 else Union(drafters)
    if selection.chain is not None:
        joined.draft_chains(selection.chain)
    return joined


def _make(part: str, home: str, trust_remote_code: bool) -> Drafter:
    if part.startswith("new:"):
        part, home = part.removeprefix("new:"), ""
    if home:
        part = _at_home(part, Path(home))
    if part == AUTO:
        default = plugins.default_drafter(Path(home)) if home else AUTO
        drafter = make_drafter(DEFAULT if default == AUTO else default, home, trust_remote_code)
        assert drafter is not None
        return drafter
    is_named = part.partition(":")[0] in plugins.names("drafters")
    if is_named or not (is_path(part) or ("/" in part and ":" not in part)):
        return _by_name(part, home, trust_remote_code)
    folder = _checkpoint_folder(part)
    if name := checkpoint.drafter_name(folder):
        return drafter_spec(name).from_checkpoint(folder)
    if layout := recognise(folder):  # drafters have the names of their layouts
        return drafter_spec("eagle" if layout in REFUSED else layout).from_checkpoint(folder)
    for spec in drafter_specs():
        if spec.recognises is not None and spec.recognises(folder):
            return spec.from_checkpoint(folder)
    adapter = (folder / "adapter_config.json").is_file()
    received = "an adapter of the target, as UNO and LoRA have" if adapter else "none"
    raise UserError(f"{folder}: expected a drafter's config.json with mmspec_drafter, received {received}")


def _by_name(part: str, home: str, trust_remote_code: bool) -> Drafter:
    name, _, argument = part.partition(":")
    spec = drafter_spec(name)
    if spec.weights == "target":
        argument = argument or home
    if argument and spec.weights != "none":
        where, settings = spec.parsed(argument)
        return spec.from_checkpoint(_checkpoint_folder(where), **settings)
    with explained(f"cannot make drafter {part!r}", OSError, ValueError):
        return as_drafter(spec.make(argument, trust_remote_code))


def _label(part: str) -> str:
    """A drafter's name for people."""
    if part == AUTO:
        return "Default drafter"
    known = part in plugins.names("drafters")
    return drafter_spec(part).label if known else Path(part).name or part


def _at_home(drafter: str, home: Path) -> str:
    """The drafter's folder in the target's folder or in a packaged model's folder; the name itself if neither exists.

    ``auto`` prefers the default of a packaged model to any folder.
    """
    if drafter == AUTO and plugins.default_drafter(home) != AUTO:
        return drafter
    for folder in [at / name for at in plugins.drafter_homes(home) for name in ("drafter", f"drafter-{drafter}")]:
        name = checkpoint.drafter_name(folder)
        if name and drafter in (AUTO, name):
            return os.path.join(os.curdir, folder)
    return drafter


def _checkpoint_folder(name: str) -> Path:
    """A local folder, or the local copy of one on the hub."""
    if os.path.exists(name):
        return Path(name)
    if is_path(name) or "/" not in name:
        raise UserError(f"{name}: expected the folder of a drafter checkpoint, there is none")
    known = ", ".join(plugins.names("drafters"))
    message = f"unknown drafter: expected one of {known}, a local folder or a reachable hub id, got {name!r}"
    patterns = ["config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json", *HEADS]
    with explained(message, OSError, ValueError), cache_if_offline("drafter", name) as options:
        return Path(snapshot_download(name, allow_patterns=patterns, **options))


def chosen_drafter(drafter: Any, config: GenerationConfig, assistant: Any, tokenizers: Any, home: str) -> Any:
    """The drafter for a call of ``generate``, from its arguments for assisted generation if it has any.

    Args:
        drafter: ``drafter`` argument of the call; ``"auto"`` if absent.
        assistant: ``assistant_model`` argument of the call.
        tokenizers: ``tokenizer`` and ``assistant_tokenizer`` arguments of the call.

    Raises:
        UserError: no drafter is equivalent, or the call also names a drafter.
    """
    chosen = _assisted(config, assistant, tokenizers, home)
    if chosen is not None and drafter != "auto":
        raise UserError(f"assisted generation chooses the drafter: expected no drafter argument, got {shown(drafter)}")
    return drafter if chosen is None else chosen


def _assisted(config: GenerationConfig, assistant: Any, tokenizers: Any, home: str) -> Drafter | None:
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise UserError("assistant_ensemble_weight changes the output, which drafters do not: expected None")
    if config.assistant_early_exit is not None:
        return EarlyExit(config.assistant_early_exit)
    if config.prompt_lookup_num_tokens is not None:
        return Ngram(config.max_matching_ngram_size) if config.max_matching_ngram_size else Ngram()
    if getattr(config, "use_mtp", None):
        return make_drafter("mtp", home)
    if assistant is None:
        return None
    assistant = base_model(assistant)
    if not isinstance(assistant, PreTrainedModel):
        raise UserError(f"assistant_model must be a model of transformers: got {shown(assistant)}")
    if assistant.config.model_type in MODEL_TYPES:
        return Gemma4(assistant)
    if (layout := layout_of({"architectures": [type(assistant).__name__]}, set())) in LAYOUTS:
        return drafter_spec(str(layout)).load().from_model(assistant)
    return Small(assistant, tokenizers=None if tokenizers[1] is None else tokenizers)
