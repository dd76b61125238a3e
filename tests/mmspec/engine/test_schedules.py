"""Random schedules of joining, leaving and cancelling: every sequence's tokens are those that it has alone."""

import random
import zlib
from functools import cache

import pytest
import torch

from mmspec import SamplingParams, plugins
from mmspec.core.budget import Budget, CostTable
from mmspec.engine.budget import AdaptiveBudget
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from tests.decoding import SteppedEngine
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import CONVOLUTION_CONFIGS, MIXER_CONFIGS, VISION_CONFIGS
from tests.tiny.drafters import tiny_drafter, tiny_drafters
from tests.tiny.models import text_inputs, vision_inputs

pytestmark = pytest.mark.long

SLOTS, CHUNK, REQUESTS = 4, 8, 10

CASES = [
    *[(name, kind) for name in ("llama", "llava", "bamba") for kind in ("plain", *tiny_drafters(), "recycle+ngram")],
    *[("mistral-window", name) for name in ("plain", "recycle", "small")],
    *[("mamba2", name) for name in ("plain", "recycle")],
    *[(name, "recycle") for name in ("qwen3_5_text", "olmo_hybrid", "kimi_linear", "falcon_mamba", "jamba", "zamba")],
    *[(name, "recycle") for name in (*CONVOLUTION_CONFIGS, *MIXER_CONFIGS) if name != "lfm2_moe"],
    *[("qwen3_vl", name) for name in ("plain", "recycle", "msd", "eagle3")],
    ("qwen3_5", "mtp"),
]
EACH = 100 // len(CASES) + 1  # schedules of each case
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.2, top_k=12, seed=6),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=7),
]


@cache
def requests(name):
    """Prompt, sampling parameters, limit and the tokens of each request alone, decoded plainly by a fresh engine."""
    model, found = shared_model(name), []
    for number in range(REQUESTS):
        if name in VISION_CONFIGS:
            inputs = vision_inputs(name, images=1 + number % 2, seed=number)
        else:
            inputs = text_inputs(length=1 + 5 * number, seed=number)
        prompt, params = prompt_of(inputs), PARAMS[number % len(PARAMS)]
        engine = SteppedEngine(plugins.target_class(model.config)(model), None, lambda batch, nodes: Budget(0))
        (row,) = engine.add(prompt, defaults.sampler(params), stopper := Stopper(2 + 2 * number, eos_token_ids=[3]))
        engine.wait(lambda row=row: row.done)
        found.append((prompt, params, stopper, row.token_ids))
    return found


def test_alone_is_what_generate_generates():
    for name in ("llama", "bamba"):
        model, (prompt, _, stopper, said) = shared_model(name), requests(name)[5]
        ids = prompt.input_ids
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=stopper.max_new_tokens,
            eos_token_id=3,
            pad_token_id=0,
        )
        assert said == expected[0, ids.shape[1] :].tolist()


def budget_of(rng):
    adaptive = AdaptiveBudget(CostTable((1, 64), (1e-3, 2e-3)), nodes=12)
    return rng.choice([Budget(0), Budget(3), Budget(12, 4), adaptive])


@pytest.mark.long
@pytest.mark.parametrize(("name", "drafter"), CASES)
def test_a_schedule(name, drafter):
    check(name, drafter, range(1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), CASES)
def test_schedules(name, drafter):
    check(name, drafter, range(1, EACH))


def check(name, drafter, seeds):
    model, known = shared_model(name), requests(name)
    target = plugins.target_class(model.config)(model)
    used = tiny_drafter(drafter, model, depth=3, total_tokens=9)
    if used is not None:
        used.attach(target)
    for seed in seeds:
        rng = random.Random(zlib.crc32(f"{name} {drafter} {seed}".encode()))
        budget = budget_of(rng)
        engine = SteppedEngine(
            target, used, lambda batch, nodes, budget=budget: budget, max_num_seqs=SLOTS, chunk=CHUNK
        )
        running, ended = [], 0
        for _ in range(60):
            event = rng.random()
            if event < 0.35:
                prompt, params, stopper, said = rng.choice(known)
                (row,) = engine.add(prompt, defaults.sampler(params), stopper)
                running.append((row, said))
            elif event < 0.42 and running:
                row, said = running.pop(rng.randrange(len(running)))
                engine.remove([row])
                assert row.token_ids == said[: len(row.token_ids)]
            else:
                engine.core.step()
            assert len(engine.core.running) <= SLOTS
            assert target.runner.rows == len(engine.core.running)
        while not all(row.done for row, _ in running):
            engine.core.step()
        for row, said in running:
            assert row.error is None
            assert row.token_ids == said
            ended += 1
        engine.remove([])
        assert target.runner.rows == 0
        assert ended > 2
