"""Models and drafters in bfloat16 after prompts of more than 256 tokens: it holds no odd position beyond."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec import plugins
from mmspec.checking.oracle import Oracle
from mmspec.core.plan import StepPlan
from mmspec.engine.stopping import Stopper
from mmspec.sampling.sampler import Sampler
from tests.decoding import SteppedEngine
from tests.targets import plain_logits, prompt_of, row_of
from tests.tiny.configs import VISION_CONFIGS
from tests.tiny.models import text_inputs, text_model, vision_inputs, vision_model


def half_model(name: str) -> PreTrainedModel:
    return (vision_model(name) if name in VISION_CONFIGS else text_model(name)).to(torch.bfloat16)


def long_inputs(name: str, tokens: int = 250) -> dict[str, Tensor]:
    """A prompt of 8 tokens, an image where the model takes any, and ``tokens`` more."""
    inputs = vision_inputs(name, seed=2) if name in VISION_CONFIGS else text_inputs(1, 8)
    more = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(3))
    for key, value in (("input_ids", more), ("attention_mask", torch.ones_like(more)), ("mm_token_type_ids", more * 0)):
        if key in inputs:
            inputs[key] = torch.cat([inputs[key], value], dim=1)
    return in_dtype(inputs, torch.bfloat16)


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


@torch.no_grad()
def check_decoding(name: str, new: int = 14) -> None:
    """Decode in bfloat16 with drafts of which many are accepted. The logits that chose each token must be as near those
    of the same weights in float32 as transformers' own pass in bfloat16 is, so that each token is nearly the best."""
    model, inputs = half_model(name), long_inputs(name)
    exact, row = copy.deepcopy(model).float(), row_of(inputs, 0)
    exact_row = in_dtype(row, torch.float32)
    guess = greedy(model, row, new)  # float32 may choose otherwise at a near tie
    engine = SteppedEngine(
        plugins.target_class(model.config)(model), Oracle([guess], vocab=90, spoil=0.0), StepPlan(8, 5)
    )
    (said,) = engine.add(prompt_of(inputs), Sampler(), Stopper(new), logits=True)
    engine.wait(lambda: said.done)
    assert len(said.token_ids) == new
    assert said.stats.num_accepted_draft_tokens > 2
    truth = plain_logits(exact, exact_row, said.token_ids)[:-1]
    theirs = plain_logits(model, row, said.token_ids)[:-1].float() - truth
    ours = torch.stack(said.logits).float()[:new] - truth
    assert ours.square().mean() < 2 * theirs.square().mean()
    assert ours.square().mean() < 0.01 * truth.var()
    chosen = truth.gather(1, torch.tensor(said.token_ids)[:, None])[:, 0]
    assert float((truth.amax(1) - chosen).max()) <= 2 * float(ours.abs().max())


def greedy(model: PreTrainedModel, row: dict[str, Any], new: int) -> list[int]:
    inputs = {"attention_mask": torch.ones_like(row["input_ids"]), **row}
    ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return ids[0, row["input_ids"].shape[1] :].tolist()
