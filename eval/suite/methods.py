"""Methods as they are named on the command line.

    generate            transformers' own plain decoding
    lookup              transformers' prompt lookup
    assisted:FOLDER     transformers' assisted decoding, by a small model of the same vocabulary
    none                our plain decoding
    SPEC[@SHAPE]        our speculation; SPEC is a drafter as for ``mmspec.load``, or new:NAME for one without the
                        checkpoint that the target's folder holds; SHAPE is ``tree`` (the default: as many nodes per
                        step as pay), a number of nodes, ``chain`` (as long as pays) or ``chainN``

``LABEL=`` may stand before any of them; without, a folder is called by its last part. ``auto`` stands for all that need
nothing but the target's folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from eval.harness.drafters import chain, named_drafters
from eval.harness.timing import Way
from mmspec import checkpoint
from mmspec.drafter import fork
from mmspec.errors import UserError
from mmspec.hub import cache_if_offline
from mmspec.support import from_pretrained
from mmspec.transformers_target import TransformersTarget

BASELINE, PLAIN = "generate", "none"
LONGEST_CHAIN = 8
_LOOKUP = {"prompt_lookup_num_tokens": 10}  # as in transformers' documentation and Spec-Bench's PLD


def automatic(home: Path) -> list[str]:
    """What ``auto`` stands for: the baselines, drafters without weights, and those in the target's folder."""
    folders = [home / "drafter", *sorted(home.glob("drafter-*"))]
    own = [name for name in dict.fromkeys(map(checkpoint.drafter_name, folders)) if name and name != "recycle"]
    drafting = [f"{name}{shape}" for name in ("recycle", *own) for shape in ("", "@chain")]
    return [BASELINE, "lookup", PLAIN, "ngram", *drafting]


def ways_of(specs: str, target: TransformersTarget) -> list[Way]:
    """The methods, both baselines first.

    Raises:
        UserError: an unknown one, or two of the same label.
    """
    home = target.model.config.name_or_path or ""
    parts = [part.strip() for part in specs.split(",") if part.strip()]
    listed = [name for part in parts for name in (automatic(Path(home)) if part == "auto" else [part])]
    ways: dict[str, Way] = {}
    for spec in dict.fromkeys([BASELINE, PLAIN, *listed]):
        way = _way(spec, home, target)
        if way.name in ways:
            raise UserError(f"every method needs a label of its own (LABEL=METHOD): {way.name!r} stands twice")
        ways[way.name] = way
    return list(ways.values())


def _way(spec: str, home: str, target: TransformersTarget) -> Way:
    named = re.fullmatch(r"([^=/]+)=(.+)", spec)
    label, method = named.groups() if named else (re.sub(r"[^:@]*/(?=[^/@])|/(?=@|$)", "", spec), spec)
    if method == BASELINE:
        return Way(label, options={})
    if method == "lookup":
        return Way(label, options=dict(_LOOKUP))
    if method == PLAIN:
        return Way(label)
    if method.startswith("assisted:"):
        return Way(label, options={"assistant_model": _assistant(method.removeprefix("assisted:"), target)})
    drafter_spec, _, shape = method.partition("@")
    (drafter,) = named_drafters(f"drafter={drafter_spec}", home).values()
    drafter.attach(target)  # a drafter of another target is refused before anything is measured
    found = re.fullmatch(r"(tree|chain|)(\d*)", shape)
    if found is None or (found[1] == "tree" and found[2]) or found[2].strip("0") == "" != found[2]:
        raise UserError(f"a method's shape must be tree, chain, chainN or a number of nodes: got {shape!r}")
    nodes = int(found[2]) if found[2] else None
    if found[1] == "chain":
        return Way(label, chain(drafter, nodes or LONGEST_CHAIN, target), nodes)
    return Way(label, fork(drafter, target), nodes)


def _assistant(name: str, target: TransformersTarget) -> object:
    from transformers import AutoModelForCausalLM

    try:
        with cache_if_offline("model", name) as found:
            model = from_pretrained(AutoModelForCausalLM, name, dtype=target.model.dtype, **found)
        return model.to(target.device).eval()
    except UserError:
        raise
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load the assistant {name!r}: {first_line}") from error
