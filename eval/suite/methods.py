"""Decoding methods of a ``--methods`` option; ``docs/evaluation.md`` lists them.

Options of llama.cpp with commas are in double quotes; by default, a folder is labelled by its last part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM

from mmspec import plugins
from mmspec.drafters.registry import drafter_spec, drafters_for, make_drafter
from mmspec.errors import UserError, explained
from mmspec.eval.harness.peers import LLAMA, Peer
from mmspec.eval.harness.timing import Method
from mmspec.targets.checkpoints import cache_if_offline, from_pretrained
from mmspec.targets.transformers_target import TransformersTarget

BASELINE, PLAIN = "generate", "none"

_GENERATE: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "lookup": {"prompt_lookup_num_tokens": 10},  # as in transformers' documentation and Spec-Bench's PLD
    "generate:mtp": {"use_mtp": True},
}


def auto_methods(home: Path) -> list[str]:
    """The methods of ``auto``: baselines, drafters without weights, and the drafters in the target's folder."""
    drafters = [name for name in drafters_for(home) if "+" not in name]
    chains = [f"{name}@chain" for name in drafters if drafter_spec(name).chains]
    return [BASELINE, "lookup", PLAIN, *drafters, *chains]


def parse_methods(
    specs: str,
    target: TransformersTarget,
    peers: Mapping[str, Callable[[str], Peer]] | None = None,
    model: str | None = None,
) -> list[Method]:
    """The methods of a ``--methods`` option, after the baselines: ``generate``, if it is listed, and ``none``. Raises
    ``UserError``: an unknown method, or a duplicate label. ``model`` is the target's name for ``mmspec.load``."""
    home = plugins.model_path(model) if model else target.model.config.name_or_path or ""
    parts = [part.strip() for part in re.findall(r'(?:"[^"]*"|[^,])+', specs) if part.strip()]
    listed = [name for part in parts for name in (auto_methods(Path(home)) if part == "auto" else [part])]
    methods: dict[str, Method] = {}
    for spec in dict.fromkeys([*([BASELINE] if BASELINE in listed else []), PLAIN, *listed]):
        method = _parse_method(spec, home, target, peers or {})
        if method.name in methods:
            raise UserError(f"every method needs its own label (LABEL=METHOD): {method.name!r} is given twice")
        methods[method.name] = method
    return list(methods.values())


def _parse_method(
    spec: str, home: str, target: TransformersTarget, peers: Mapping[str, Callable[[str], Peer]]
) -> Method:
    labelled = re.fullmatch(r"((?:(?! --)[^=/])+)=(.+)", spec)
    label, method = labelled.groups() if labelled else (re.sub(r"[^:@]*/(?=[^/@])|/(?=@|$)", "", spec), spec)
    if method == PLAIN:
        return Method(label)
    if method in _GENERATE:
        return Method(label, generate_options=_GENERATE[method].copy())
    if assisted := re.fullmatch(r"assisted:(.*)", method):
        return Method(label, generate_options={"assistant_model": _load_assistant(assisted[1], target)})
    if dflash := re.fullmatch(r"generate:dflash:(.+)", method):
        assistant = _load_assistant(dflash[1], target, AutoModel)
        return Method(label, generate_options={"assistant_model": assistant, "speculation_type": "dflash"})
    if method.startswith(f"{BASELINE}:"):
        raise UserError(f"{BASELINE} speculates as {BASELINE}:mtp or {BASELINE}:dflash:FOLDER: got {method!r}")
    engine, _, speculation = method.partition(":")
    if engine == LLAMA and engine not in peers:
        raise UserError(f"the method {method!r} needs --llama-server PATH, the server of llama.cpp")
    if engine in peers:
        return Method(label, peer=peers[engine](speculation))
    lossy = re.fullmatch(r"(.+)~(\d+(?:\.\d+)?)", method)
    selected, nodes = parse_shape(lossy[1] if lossy else method)
    drafter = make_drafter(selected, home)
    if drafter is None:
        raise UserError(f"plain decoding drafts no nodes: expected {PLAIN!r} or a drafter, got {method!r}")
    drafter.attach(target)  # rejects a drafter for another target before measuring
    return Method(label, drafter, nodes, lossy=float(lossy[2]) if lossy else 0.0)


def parse_shape(method: str) -> tuple[str, int | None]:
    """A drafter's specification and the draft tokens per step of ``SPEC@N`` or ``SPEC@chainN``; None is adaptive."""
    if match := re.fullmatch(r"(.+)@(\d+)", method):
        if not int(match[2]):
            raise UserError(f"a method's shape must be tree, chain, chainN or a number above 0: got {method!r}")
        return match[1], int(match[2])
    sized = re.fullmatch(r".+@chain(\d+)", method)
    return method, int(sized[1]) if sized else None


def _load_assistant(name: str, target: TransformersTarget, auto: Any = AutoModelForCausalLM) -> object:
    with (
        explained(f"cannot load assistant {name!r}", OSError, ValueError),
        cache_if_offline("assistant", name) as hub_options,
    ):
        model = from_pretrained(auto, name, dtype=target.model.dtype, **hub_options)
    return model.to(target.device).eval()
