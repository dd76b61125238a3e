"""Is speculative output the target's own? Thousands of comparisons, token by token.

    python -m eval.losslessness [--cases N] [--json]

Every supported architecture, tiny and randomly initialised, in float32: batches of one and three rows, several prompts,
images and lengths, logits processors, and drafters whose trees are accepted in part. Random weights are a hard test:
the answers hold no pattern that could hide a wrong position, mask or history.

Greedy answers are compared with those of transformers' ``generate``. Sampled ones are compared with our own plain
decoding by the same seed: what is drafted must not change a single token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mmspec
from eval.decoding.oracle import Oracle
from eval.decoding.tiny_models import (
    HYBRID_CONFIGS,
    TEXT_CONFIGS,
    VISION_CONFIGS,
    VOCAB,
    mamba_network,
    msd_network,
    text_inputs,
    text_model,
    vision_inputs,
    vision_model,
)
from mmspec.drafter import Drafter
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.ops import quantile
from ssm.drafters.mamba import Mamba
from vision.drafters.msd import MSD, Eagle, Flash

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition-penalty": {"repetition_penalty": 1.4},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "min-new-tokens": {"min_new_tokens": 12, "suppress_tokens": [5, 6, 7]},
    "sampled": {"do_sample": True},
    "sampled-filtered": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4},
}
DRAFTERS = ("oracle", "ngram", "recycle", "small")
DRAFTERS_WITH_WEIGHTS = ("msd", "eagle", "flash", "mamba")
"""Of their own, here random ones; for the vision models, and two text models, of which one has Mamba-2 layers."""
MODELS = (*TEXT_CONFIGS, *HYBRID_CONFIGS, *VISION_CONFIGS)


@dataclass(frozen=True)
class Case:
    """One comparison: which model reads what, how tokens are chosen, who drafts."""

    model: str
    batch: int
    images: int
    length: int
    seed: int
    setting: str
    drafter: str
    eager: bool = False


@dataclass(frozen=True)
class Difference:
    """Where two outputs part, and how near a tie plain decoding was there: the lead of the best raw logit over the
    second, or where tokens are drawn, how far the draw was, in probability, from another token's share."""

    case: Case
    row: int
    position: int
    margin: float


def cases(count: int | None = None) -> list[Case]:
    """All cases, or ``count`` of them drawn from all models alike; sorted so that models are built once each."""
    every = []
    for name in MODELS:
        prompts = [(1, 8, 0), (2, 8, 1), (0, 8, 2)] if name in VISION_CONFIGS else [(0, 1, 0), (0, 9, 1), (0, 23, 2)]
        drafters = DRAFTERS + (DRAFTERS_WITH_WEIGHTS if name in (*VISION_CONFIGS, "llama", "bamba") else ())
        grid = itertools.product((1, 3), prompts, SETTINGS, drafters)
        for batch, (images, length, seed), setting, drafter in grid:
            rows_fit = batch == 1 or length > batch  # each further row is padded by one more token
            if rows_fit:
                every.append(Case(name, batch, images, length, seed, setting, drafter, eager=seed == 1))
    if count is not None and count < len(every):
        order = {name: place for place, name in enumerate(MODELS)}
        drawn: dict[str, list[Case]] = {name: [] for name in order}
        for case in random.Random(0).sample(every, len(every)):
            drawn[case.model].append(case)
        in_turn = [case for turn in itertools.zip_longest(*drawn.values()) for case in turn if case is not None]
        every = sorted(in_turn[:count], key=lambda case: order[case.model])
    return every


def inputs_of(case: Case) -> dict[str, Tensor]:
    if case.model in VISION_CONFIGS:
        return vision_inputs(case.model, case.batch, case.images, case.seed)
    return text_inputs(case.batch, case.length, case.seed)


def build(name: str) -> Any:
    return vision_model(name) if name in VISION_CONFIGS else text_model(name)


def compare(
    model: Any, case: Case, new_tokens: int, reference: Tensor | None = None
) -> tuple[Tensor, Difference | None]:
    """Decode a case both ways.

    Args:
        model: the case's model.
        new_tokens: length of the answers.
        reference: what plain decoding gave for this case, if it is known.

    Returns:
        The output of plain decoding (batch, length), and the first difference or None.
    """
    inputs: dict[str, Any] = inputs_of(case)
    options = {"do_sample": False, **SETTINGS[case.setting], "max_new_tokens": new_tokens}

    def ours(drafter: Drafter | None) -> Tensor:
        torch.manual_seed(case.seed)
        tokens = mmspec.generate(model, drafter=drafter, nodes=12, **inputs, **options)
        assert isinstance(tokens, Tensor)
        return tokens

    with torch.no_grad():
        if reference is None:
            reference = ours(None) if options["do_sample"] else model.generate(**inputs, **options)
        drafter = _drafter(model, case, reference[:, inputs["input_ids"].shape[1] :].tolist())
        return reference, _first_difference(model, case, inputs, reference, ours(drafter))


def _drafter(model: Any, case: Case, references: list[list[int]]) -> Drafter:
    if case.drafter == "oracle":
        return Oracle(references, vocab=90, seed=case.seed)
    if case.drafter == "msd":
        return MSD(msd_network(model), top_k=4, depth=4, total_tokens=12)
    if case.drafter == "eagle":
        return Eagle(msd_network(model), top_k=4, depth=4, total_tokens=12)
    if case.drafter == "flash":
        return Flash(msd_network(model, latents=3, span=16, slots=3), top_k=4, depth=5, total_tokens=12)
    if case.drafter == "mamba":
        return Mamba(mamba_network(), top_k=4, depth=4, total_tokens=12)
    if case.drafter == "small":
        return Small(text_model("llama"), top_k=3)
    return Ngram() if case.drafter == "ngram" else Recycle(top_k=4)


def _first_difference(
    model: Any, case: Case, inputs: dict[str, Tensor], reference: Tensor, ours: Tensor
) -> Difference | None:
    if torch.equal(reference, ours):
        return None
    width = min(reference.shape[1], ours.shape[1])
    places = (reference[:, :width] != ours[:, :width]).nonzero().tolist()
    row, place = min(places, key=lambda found: found[1]) if places else (0, width)
    position = place - inputs["input_ids"].shape[1]
    drawn = SETTINGS[case.setting].get("do_sample", False)
    near = nearest_border(model, case, position) if drawn else logit_margin(model, inputs, reference[:, :place])
    return Difference(case, row, position, near[row])


def nearest_border(model: Any, case: Case, position: int) -> list[float]:
    """How far the draw of each row's new token at ``position`` is from the nearest border between two tokens."""
    distances: list[list[float]] = []

    def noted(probs: Tensor, uniform: Tensor) -> Tensor:
        borders = probs.double().cumsum(-1)
        apart = (borders / borders[..., -1:] - uniform.double()[..., None]).abs()
        distances.append(apart.amin(-1)[:, 0].tolist())
        return quantile(probs, uniform)

    with mock.patch("mmspec.sampling.quantile", noted):
        torch.manual_seed(case.seed)
        options: dict[str, Any] = {**SETTINGS[case.setting], **inputs_of(case)}
        mmspec.generate(model, drafter=None, max_new_tokens=position + 1, **options)
    return distances[position]


def logit_margin(model: Any, inputs: dict[str, Tensor], ids: Tensor) -> list[float]:
    """The lead of the best raw logit over the second in each row, after ``ids`` (batch, length): prompt and answer."""
    extra = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, extra), value=1)
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in rest:
        rest["mm_token_type_ids"] = torch.nn.functional.pad(rest["mm_token_type_ids"], (0, extra))
    options = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(input_ids=ids, attention_mask=mask, **rest, **options)
    best = out.logits[0].float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def run(selected: list[Case], new_tokens: int = 24) -> Iterator[tuple[Case, Difference | None]]:
    """Compare all cases, one after the other, building each model and each reference once."""
    for name, group in itertools.groupby(selected, key=lambda case: case.model):
        model = build(name)
        usual = model.config._attn_implementation
        references: dict[tuple[Any, ...], Tensor] = {}
        for case in group:
            model.set_attn_implementation("eager" if case.eager else usual)
            key = (case.batch, case.images, case.length, case.seed, case.setting)
            references[key], difference = compare(model, case, new_tokens, references.get(key))
            yield case, difference


def main() -> None:
    """Print one line per model and every unequal case; end with one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m eval.losslessness", description=__doc__)
    parser.add_argument("--cases", type=int, help="compare this many cases instead of all")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens per answer (24)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    arguments = parser.parse_args()

    began = clock()
    results = []
    for name, group in itertools.groupby(run(cases(arguments.cases), arguments.new_tokens), key=lambda r: r[0].model):
        done = list(group)
        results += done
        if not arguments.json:
            equal = sum(difference is None for _, difference in done)
            print(f"{name:20} {equal:4} of {len(done):4} equal", flush=True)
    different = [difference for _, difference in results if difference is not None]
    if not arguments.json:
        for d in different:
            print(f"unequal: {d.case}, row {d.row}, new token {d.position}, margin {d.margin:.2e}")
    figures = {
        "cases": len(results),
        "equal": len(results) - len(different),
        "unequal": [{**vars(d.case), "row": d.row, "position": d.position, "margin": d.margin} for d in different],
        "dtype": "float32",
        "new_tokens": arguments.new_tokens,
        "vocab": VOCAB,
        "seconds": round(clock() - began, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
