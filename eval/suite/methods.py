"""Decoding methods of a ``--methods`` option.

    generate            transformers' plain decoding
    lookup              transformers' prompt lookup
    assisted:FOLDER     transformers' assisted decoding, with a small model of the same vocabulary
    llama.cpp           llama.cpp's plain decoding of the same GGUF file, greedy, one request at a time
    llama.cpp:TYPE      its speculation: TYPE is a --spec-type of llama-server, and further options after blanks
    none                our plain decoding
    SPEC[@SHAPE]        our speculative decoding; SPEC is a drafter as for ``mmspec.load``, or new:NAME, which ignores
                        the checkpoint in the target's folder; SHAPE is ``tree`` (default, adaptive size), a number of
                        nodes, ``chain`` (adaptive length) or ``chainN``

Any of them may be prefixed by ``LABEL=``; by default, a folder is labelled by its last part. ``auto`` is all methods
that need nothing but the target's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmspec import plugins
from mmspec.core.drafter import fork
from mmspec.drafters import checkpoint
from mmspec.drafters.chain import LONGEST_CHAIN, as_chain
from mmspec.errors import UserError, explained
from mmspec.eval.harness.drafters import parse_drafters
from mmspec.eval.harness.llama_server import LlamaServer
from mmspec.eval.harness.timing import Method
from mmspec.targets.hub import cache_if_offline
from mmspec.targets.support import from_pretrained
from mmspec.targets.transformers_target import TransformersTarget

BASELINE, PLAIN, LLAMA = "generate", "none", "llama.cpp"

_LOOKUP = {"prompt_lookup_num_tokens": 10}  # as in transformers' documentation and Spec-Bench's PLD


def auto_methods(home: Path) -> list[str]:
    """The methods of ``auto``: baselines, drafters without weights, and the drafters in the target's folder."""
    homes = plugins.drafter_homes(home)
    folders = [folder for at in homes for folder in (at / "drafter", *sorted(at.glob("drafter-*")))]
    own = [name for name in dict.fromkeys(map(checkpoint.drafter_name, folders)) if name and name != "recycle"]
    drafters = [f"{name}{shape}" for name in ("recycle", *own) for shape in ("", "@chain")]
    return [BASELINE, "lookup", PLAIN, "ngram", *drafters]


def parse_methods(
    specs: str, target: TransformersTarget, llama: Callable[[str], LlamaServer] | None = None
) -> list[Method]:
    """The methods of a ``--methods`` option, after both baselines.

    Args:
        llama: starts a server with this speculation.

    Raises:
        UserError: an unknown method, or a duplicate label.
    """
    home = target.model.config.name_or_path or ""
    parts = [part.strip() for part in specs.split(",") if part.strip()]
    listed = [name for part in parts for name in (auto_methods(Path(home)) if part == "auto" else [part])]
    methods: dict[str, Method] = {}
    for spec in dict.fromkeys([BASELINE, PLAIN, *listed]):
        method = _parse_method(spec, home, target, llama)
        if method.name in methods:
            raise UserError(f"every method needs its own label (LABEL=METHOD): {method.name!r} is given twice")
        methods[method.name] = method
    return list(methods.values())


def _parse_method(
    spec: str, home: str, target: TransformersTarget, llama: Callable[[str], LlamaServer] | None
) -> Method:
    labelled = re.fullmatch(r"([^=/]+)=(.+)", spec)
    label, method = labelled.groups() if labelled else (re.sub(r"[^:@]*/(?=[^/@])|/(?=@|$)", "", spec), spec)
    if method == BASELINE:
        return Method(label, generate_options={})
    if method == "lookup":
        return Method(label, generate_options=dict(_LOOKUP))
    if method == PLAIN:
        return Method(label)
    if method.startswith("assisted:"):
        assistant = _load_assistant(method.removeprefix("assisted:"), target)
        return Method(label, generate_options={"assistant_model": assistant})
    if method.partition(":")[0] == LLAMA:
        if llama is None:
            raise UserError(f"the method {method!r} needs --llama-server PATH, the server of llama.cpp")
        return Method(label, server=llama(method.partition(":")[2]))
    drafter_spec, _, shape = method.partition("@")
    (drafter,) = parse_drafters(f"drafter={drafter_spec}", home).values()
    drafter.attach(target)  # refuses a drafter of another target before anything is measured
    found = re.fullmatch(r"(tree|chain|)(\d*)", shape)
    if found is None or (found[1] == "tree" and found[2]) or found[2].strip("0") == "" != found[2]:
        raise UserError(f"a method's shape must be tree, chain, chainN or a number of nodes: got {shape!r}")
    nodes = int(found[2]) if found[2] else None
    if found[1] == "chain":
        return Method(label, as_chain(drafter, nodes or LONGEST_CHAIN, target), nodes)
    return Method(label, fork(drafter, target), nodes)


def _load_assistant(name: str, target: TransformersTarget) -> object:
    from transformers import AutoModelForCausalLM

    model = load_pretrained(AutoModelForCausalLM, name, "the assistant", dtype=target.model.dtype)
    return model.to(target.device).eval()


def load_pretrained(auto_class: Any, name: str, what: str, **options: Any) -> Any:
    """Load by a transformers auto class, from the cache if the hub is unreachable.

    Args:
        what: names it in the error message.

    Raises:
        UserError: it cannot be loaded.
    """
    with explained(f"cannot load {what} {name!r}", OSError, ValueError), cache_if_offline("model", name) as found:
        return from_pretrained(auto_class, name, **options, **found)
