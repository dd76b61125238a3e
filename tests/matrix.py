"""The matrix of decoding: target x drafter x sampling x schedule x mode.

The answer to a request depends on the target and its sampling parameters alone. Every cell of the matrix is therefore
compared with tokens that are computed once per target and request: by transformers' own ``generate`` if greedy, else by
plain decoding of the request alone.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch

from mmspec import SamplingParams, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.drafters.captured import CapturedDrafter
from mmspec.drafters.registry import DEFAULT
from mmspec.engine.policy import AdaptivePolicy, DraftPolicy
from mmspec.engine.sequence import Sequence
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling import defaults
from tests.decoding import SteppedEngine
from tests.device import Replayed, as_launches, on_a_gpu, record_captures, waiting
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import HYBRID_CONFIGS, TEXT_CONFIGS, VISION_CONFIGS
from tests.tiny.drafters import drafter_class, tiny_drafter, tiny_drafters
from tests.tiny.models import generate, text_inputs, vision_inputs

MAIN = ("llama", "llava", "bamba")
"""A dense, a vision-language and a hybrid target, on which every drafter runs."""

DRAFTERS = ("plain", *tiny_drafters(), DEFAULT)
TARGETS = {
    **dict.fromkeys(MAIN, DRAFTERS),
    **{name: ("recycle",) for name in (*TEXT_CONFIGS, *HYBRID_CONFIGS, *VISION_CONFIGS) if name not in MAIN},
    "mistral-window": ("plain", "recycle", "small"),
    "mamba2": ("plain", "recycle"),
    "llava_bamba": ("recycle", "msd"),
    "qwen3_vl": ("plain", "recycle", "msd", "eagle3"),
    "qwen3_5": ("recycle", "mtp"),
}
"""Drafters of each target; one stands for all where the drafter's part does not depend on the target's."""

VARYING = ("doge", "gemma2", "gpt_neo", "inkling_text", "inkling2_text")
"""Targets whose shapes vary on every device."""

STATIC = [
    (name, drafter)
    for name, drafters in TARGETS.items()
    if name not in VARYING
    for drafter in drafters
    if "+" not in drafter
]
"""Pairs of target and drafter that wait for the device once per step."""

SAMPLING = {
    "greedy": [SamplingParams()],
    "sampled": [SamplingParams(temperature=1.1, top_k=30, repetition_penalty=1.2, seed=5)],
    "mixed": [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0.8, top_p=0.9, seed=6),
        SamplingParams(),
    ],
}
SCHEDULES = {"alone": (3, 4, 5), "batch": (3, 4, 5), "limit": (5,), "joining": (0, 1, 3, 4)}
"""Schedules and the numbers of their requests: one after another; three at once, twice, then one of them
without drafts; one whose drafts could pass the context limit; random joining, leaving and cancelling."""

MODES = ("varying", "static", "captured")
"""Shapes as on a CPU; as on CUDA, with one host sync per step; and steps that are captured, recorded and replayed."""

GPU_MODES = ("triton", "reference")
"""On a GPU, captured, with Triton's kernels and with torch's operations."""


@dataclass(frozen=True)
class Cell:
    target: str
    drafter: str
    sampling: str
    schedule: str
    mode: str

    def __str__(self) -> str:
        return "-".join(astuple(self))


def cells(modes: Iterable[str]) -> list[Cell]:
    return [
        Cell(target, drafter, sampling, schedule, mode)
        for target, drafters in TARGETS.items()
        for drafter in drafters
        for sampling in SAMPLING
        for schedule in SCHEDULES
        for mode in modes
    ]


def covering(whole: Collection[Cell], *fields: tuple[str, ...]) -> list[Cell]:
    """Cells that contain each combination of values of these fields which is in the matrix, those with most new ones
    first."""
    order = sorted(whole, key=lambda cell: zlib.crc32(str(cell).encode()))
    values = {cell: {(names, *(getattr(cell, name) for name in names)) for names in fields} for cell in order}
    seen: set[Any] = set()
    chosen = []
    for least in range(len(fields), 0, -1):
        for cell in order:
            if len(values[cell] - seen) >= least:
                chosen.append(cell)
                seen |= values[cell]
    return sorted(chosen, key=str)


PLANS = StepPlan(7, 4), StepPlan(3, 2), StepPlan(3, 3, chain=True)
FIELDS = ("target", "drafter", "sampling", "schedule", "mode")
PAIRS = [("target", "drafter"), ("drafter", "mode"), *combinations(FIELDS[2:], 2)]
ALL = [*combinations(FIELDS, 2), FIELDS[1:4], ("drafter", "schedule", "mode"), ("sampling", "schedule", "mode")]


def parameters() -> list[Any]:
    """The cells to run, by name: every drafter on its targets and in every mode, every schedule with every sampling.

    The long tests also contain all other pairs, and triples without targets."""
    matrix = cells(MODES)
    default = covering(matrix, *PAIRS)
    longer = set(covering(matrix, *ALL)) - set(default)
    found = [pytest.param(cell, id=str(cell)) for cell in default]
    found += [pytest.param(cell, id=str(cell), marks=pytest.mark.long) for cell in sorted(longer, key=str)]
    gpu = covering([cell for cell in cells(GPU_MODES) if cell.schedule != "limit"], *PAIRS)
    return [*found, *(pytest.param(cell, id=str(cell), marks=pytest.mark.gpu) for cell in gpu)]


# ---------------------------------------------------------------------- requests


class Asked(NamedTuple):
    """A request, and the new tokens that answer it."""

    prompt: Prompt
    params: SamplingParams
    stopper: Stopper
    tokens: list[int]

    def add(self, engine: Any, **options: Any) -> Sequence:
        """Pass it to an engine of steps."""
        device = engine.target.device
        prompt = Prompt(
            self.prompt.input_ids.to(device), self.prompt.attention_mask, on_a_gpu(self.prompt.inputs, device)
        )
        return engine.add(prompt, defaults.sampler(self.params), self.stopper, **options)[0]


def inputs_of(target: str, number: int, batch: int = 1) -> dict[str, Any]:
    """Prompts of several lengths, with one or two images where the target reads images."""
    if target in VISION_CONFIGS:
        return vision_inputs(target, batch, images=1 + number % 2, seed=number)
    return text_inputs(batch, length=1 + 5 * number, seed=number)


def new_target(name: str, device: str = "cpu") -> Any:
    model = shared_model(name)
    if device != "cpu":
        model = copy.deepcopy(model).to(device)
    return plugins.target_class(model.config)(model)


@cache
def asked(target: str, sampling: str, number: int) -> Asked:
    """Request ``number``, which ends at a limit or at token 3."""
    inputs, kinds = inputs_of(target, number), SAMPLING[sampling]
    prompt, params, stopper = prompt_of(inputs), kinds[number % len(kinds)], Stopper(3 * number + 6, eos_token_ids=[3])
    if params == SamplingParams():
        ids = prompt.input_ids
        options = {"max_new_tokens": stopper.max_new_tokens, "do_sample": False, "eos_token_id": 3, "pad_token_id": 0}
        with torch.no_grad():
            tokens = generate(shared_model(target), 1, **inputs, **options)[0, ids.shape[1] :].tolist()
    else:
        engine = SteppedEngine(new_target(target), None, StepPlan(0))
        (row,) = engine.add(prompt, defaults.sampler(params), stopper)
        engine.wait(lambda: row.done)
        tokens = row.token_ids
    return Asked(prompt, params, stopper, tokens)


# ---------------------------------------------------------------------- running a cell


class Some(DraftPolicy):
    """Some steps are not drafted, others draft chains."""

    asked = 0

    def plan(self, rows: int, remaining: int) -> StepPlan:
        self.asked += 1
        plan = replace(super().plan(rows, remaining), chain=self.asked % 3 == 2)
        return plan if self.asked % 5 else replace(plan, nodes=0)


def check(cell: Cell, patch: pytest.MonkeyPatch) -> None:
    """Decode as the cell says, and compare with the references.

    Raises:
        AssertionError: other tokens, or steps that wait for the device or are not captured where they should be.
    """
    rng = random.Random(str(cell))
    requests = [asked(cell.target, cell.sampling, number) for number in SCHEDULES[cell.schedule]]
    if cell.schedule != "limit":  # one request: some models say one token over and over, which would hide mistakes
        assert len({token for one in requests for token in one.tokens}) > 2
    enter(cell.mode, patch)
    if cell.schedule == "limit":
        ((prompt, _, stopper, _),) = requests
        config = shared_model(cell.target).config.get_text_config()
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        if hasattr(config, name):
            patch.setattr(config, name, prompt.input_ids.shape[1] + stopper.max_new_tokens)
    target = new_target(cell.target, "cuda" if cell.mode in GPU_MODES else "cpu")
    drafter = drafter_of(cell.drafter, target.model, cell.mode)
    policy = _policy(cell, rng)
    engine = SteppedEngine(target, drafter, policy, max_num_seqs=4, chunk=8)
    if drafter is not None:
        drafter.attach(target)
    run = {"batch": _batch, "joining": _joining}.get(cell.schedule, _alone)
    run(engine, _steps(engine, _waits_once(cell)), requests, rng)
    engine.remove([])
    assert target.runner.rows == 0
    if cell.mode != "varying":
        assert target.runner.static_shapes == (cell.target not in VARYING)
    if cell.target in VARYING:
        return
    if cell.mode == "captured" and cell.schedule != "limit":
        assert Replayed.replays > 0
    if cell.mode in ("captured", *GPU_MODES) and cell.schedule in ("alone", "batch"):
        assert all(target.runner.captured)
        if drafts_are_captured(cell.drafter):
            part = drafter._on_device if cell.drafter == "recycle" else drafter
            assert part._grow.captured
            assert part._update.captured or cell.drafter == "early-exit"  # whose states are the target's


def enter(mode: str, patch: pytest.MonkeyPatch) -> None:
    """Let steps run in a mode from now on."""
    if mode in GPU_MODES:
        patch.setenv("MMSPEC_KERNELS", mode)
    elif mode == "captured":
        record_captures(patch)
    else:
        patch.setattr(kernels, "static_shapes", lambda device: mode == "static")
        as_launches(patch)


def drafter_of(kind: str, model: Any, mode: str = "varying") -> Any:
    """A drafter of its own weights; where shapes are static, with a draft vocabulary if it may have one."""
    changes = {"layers": 2, "norm_output": True} if kind == "eagle3" else {}
    return copy.deepcopy(tiny_drafter(kind, model, None if mode == "varying" else 40, **changes))


def drafts_are_captured(kind: str) -> bool:
    return kind == "recycle" or (kind not in ("plain", DEFAULT) and issubclass(drafter_class(kind), CapturedDrafter))


def _policy(cell: Cell, rng: random.Random) -> DraftPolicy:
    static = cell.mode != "varying"
    if cell.drafter == "plain":
        return DraftPolicy(StepPlan(0), static)
    some = Some(StepPlan(12, 4), static)
    if cell.schedule != "joining":
        return some
    return rng.choice([DraftPolicy(StepPlan(3), static), some, AdaptivePolicy(static, PLANS if static else None)])


def _waits_once(cell: Cell) -> bool:
    """Not where rows are gathered by their parameters, or trees are merged on the host."""
    return cell.mode == "static" and cell.sampling != "mixed" and "+" not in cell.drafter


def _steps(engine: Any, waits: bool) -> Iterator[None]:
    """Steps of an engine. Where ``waits`` are counted, a step of the same rows as before waits for the device once."""
    decoding: list[Any] = []
    left = 6 if waits else 0
    while True:
        before = list(engine.core.running)
        counted = left and decoding == before != [] and not engine.core.queued
        with waiting() if counted else nullcontext({}) as counts:
            engine._has_work()
            engine._turn()
        if counted and before == engine.core.running and engine.target.runner.static_shapes:
            assert counts == {"tolist": 1}
            left -= 1
        decoding = before
        assert len(engine.core.running) == engine.target.runner.rows <= 4
        yield


def _finish(steps: Iterator[None], rows: list[tuple[Sequence, Asked]]) -> None:
    while not all(row.done for row, _ in rows):
        next(steps)
    for row, request in rows:
        assert row.error is None
        assert row.stats.drafter_error == ""
        assert row.token_ids == request.tokens


def _alone(engine: Any, steps: Iterator[None], requests: list[Asked], rng: random.Random) -> None:
    for request in requests:
        _finish(steps, [(request.add(engine), request)])


def _batch(engine: Any, steps: Iterator[None], requests: list[Asked], rng: random.Random) -> None:
    for plain in (None, 1):
        rows = [
            (request.add(engine, nodes=0 if number == plain else None), request)
            for number, request in enumerate(requests)
        ]
        _finish(steps, rows)


def _joining(engine: Any, steps: Iterator[None], requests: list[Asked], rng: random.Random) -> None:
    running = [(request.add(engine), request) for request in requests[:2]]
    for _ in range(35):
        event = rng.random()
        if event < 0.3:
            request = rng.choice(requests)
            running.append((request.add(engine, nodes=rng.choice((None, None, 0))), request))
        elif event < 0.37 and running:
            row, request = running.pop(rng.randrange(len(running)))
            engine.remove([row])
            assert row.token_ids == request.tokens[: len(row.token_ids)]
        elif engine.core.has_work:
            next(steps)
    _finish(steps, running)
