"""Decoding methods of a ``--methods`` option; ``docs/evaluation.md`` lists them.

Options of llama.cpp with commas are in double quotes; by default, a folder is labelled by its last part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from mmspec import plugins
from mmspec.cache.rows import RowTensor
from mmspec.core.drafter import Wrapper
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.registry import drafter_spec, drafters_for, make_drafter
from mmspec.errors import UserError, explained
from mmspec.eval.harness.peers import ENGINES, Peer
from mmspec.eval.harness.timing import Method
from mmspec.ops.transfer import on_device
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


def split_methods(specs: str) -> list[str]:
    """The methods of an option, separated by commas outside of double quotes."""
    return [part.strip() for part in re.findall(r'(?:"[^"]*"|[^,])+', specs) if part.strip()]


def parse_methods(
    specs: str,
    target: TransformersTarget,
    peers: Mapping[str, Callable[[str], Peer]] | None = None,
    model: str | None = None,
) -> list[Method]:
    """The methods of a ``--methods`` option, after the baselines: ``generate``, if it is listed, and ``none``. Raises
    ``UserError``: an unknown method, or a duplicate label. ``model`` is the target's name for ``mmspec.load``."""
    home = plugins.model_path(model) if model else target.model.config.name_or_path or ""
    listed = [
        name for part in split_methods(specs) for name in (auto_methods(Path(home)) if part == "auto" else [part])
    ]
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
    if engine in ENGINES and engine not in peers:
        raise UserError(f"the method {method!r} needs --peer {engine}=COMMAND, its server")
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


class SetAcceptance(Wrapper):
    """A drafter at its cost, whose drafts are replaced: along a path, each is right with a set probability.

    With static shapes, trees keep their number of nodes: a path of as many levels as the drafter drafts comes first,
    all other nodes are wrong children of the root. Otherwise a tree grows by the probabilities of its drafts, so the
    drafter drafts chains, of as many levels as the set rate gains. ``answers`` are plain decoding's new tokens, by
    prompt; of equal prompts with other images, the latest.
    """

    drafter: CapturedDrafter

    def __init__(self, drafter: CapturedDrafter, answers: Mapping[Any, list[int]], rate: float, vocab: int):
        self.drafter, self._answers, self._rate, self._vocab = drafter, answers, rate, vocab
        self._random, self._width = Random(0), 0
        self._at, self._tokens = RowTensor(), RowTensor()  # next place in the answer; (rows, 2, width) answers, drafts

    @property
    def drafts_ahead(self) -> bool:
        return self.drafter.drafts_ahead

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        super().begin(prompt, output, history)
        self._width = max(map(len, self._answers.values()))
        rows = [self._answers[tuple(row[:-1])] for row in history]
        rows = [row + [0] * (self._width - len(row)) for row in rows]
        drafts = [[(x + (self._random.random() >= self._rate)) % self._vocab for x in row] for row in rows]
        self._tokens.append(on_device(list(zip(rows, drafts, strict=True)), prompt.input_ids.device))
        self._at.append(on_device([1] * len(rows), prompt.input_ids.device))

    def select(self, rows: Sequence[int]) -> None:
        for part in (self.drafter, self._tokens, self._at):
            part.select(rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        super().observe(tree, verdict, output)
        self._at.data += verdict.length

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if not self.drafter.static_shapes:
            levels = 1
            while levels < min(plan.depth, plan.nodes) and self._rate**levels > plan.least_gain:
                levels += 1
            plan = replace(plan, chain=True, depth=levels, least_gain=0.0)
        drafted = super().propose(token, plan)
        nodes = drafted.nodes
        depth = min(nodes - 1, self.drafter.limits[0], plan.depth)
        place = torch.arange(nodes, device=token.device).expand(len(token), -1)
        path = place <= depth
        at = (self._at.data[:, None] + (place - 1).where(path, 0)).clamp(0, self._width - 1)
        answers, drafts = (tokens.gather(1, at) for tokens in self._tokens.data.unbind(1))
        tokens = drafts.where(path, (answers + 1 + place - depth) % self._vocab)
        tokens = torch.cat([token[:, None], tokens[:, 1:]], dim=1)
        log_probs = place.clamp(max=depth) * math.log(self._rate) - place.where(~path, 0)
        tree = TokenTree(tokens, (place - 1).where(path, 0), log_probs=log_probs, check=False)
        tree.max_depth, tree.levels = depth, drafted.levels
        return tree


def with_rates(
    methods: Sequence[Method], rates: Sequence[float], answers: Mapping[Any, list[int]], target: TransformersTarget
) -> list[Method]:
    """The methods, with one per rate for each drafter (``NAME at RATE``); ``answers`` as for ``SetAcceptance``, filled
    before they decode. Raises ``UserError``: a drafter has no network, so its drafts have no cost of their own."""
    found = list[Method]()
    for method in methods:
        if (drafter := method.drafter) is None:
            found.append(method)
            continue
        if not isinstance(drafter, CapturedDrafter):
            raise UserError(f"a set acceptance needs drafters with a network, such as mtp: got {method.name!r}")
        for rate in rates:
            rated = SetAcceptance(drafter.fork(target), answers, rate, target.config.vocab_size)
            found.append(replace(method, name=f"{method.name} at {rate:g}", drafter=rated))
    return found
