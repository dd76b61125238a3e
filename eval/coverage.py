"""Every decoder class of the installed transformers under speculative decoding: ``python -m mmspec.eval coverage``.

The introduction of its page, ``docs/models.md``, describes the comparison. Pixel values are of the class's image
processor; the number of image tokens, if it has any, follows from the model's image features. Each class runs in a
process of its own with a time limit. The log is appended to, so that a stopped sweep resumes.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import click
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_torchvision_available

import mmspec
from mmspec import UserError
from mmspec.checking.oracle import Oracle
from mmspec.cli.options import OUT_FILE
from mmspec.drafters.recycle import Recycle
from mmspec.eval.harness.output import BenchmarkCommand, git_commit, print_result
from mmspec.eval.harness.small_configs import WORDS, published_config, random_model, small_config
from mmspec.files import append_row, read_rows, write_text

_SIDES = (64, 96)  # height and width, unequal so that the position axes of visual tokens differ in length
_ALIKE = {"glm4v_moe": "glm4v", "glm_ocr": "glm4v", "qwen3_vl_moe": "qwen3_vl"}
"""Model types without an image processor of their own, by the type whose processor their checkpoints name."""
ROOT = Path(__file__).resolve().parents[1]
_DOCS = ROOT / "docs" / "models.md"
_RESULT = ROOT / "eval" / "results" / "coverage.json"
_LOG = ROOT / "build" / "coverage.jsonl"
EQUAL, REFUSED, FAULTY, NOT_GENERATED, NOT_BUILT = "equal", "refused", "faulty", "not by generate", "not built"
OUTCOMES = (EQUAL, REFUSED, FAULTY, NOT_GENERATED, NOT_BUILT)
TEXT, VISION, PUBLISHED = "causal language models", "vision-language models", "published configurations"
NEW_TOKENS, NEW_TOKENS_LARGE = 24, 8
_AUTO = {TEXT: AutoModelForCausalLM, VISION: AutoModelForImageTextToText}
_PROMPTS = {"prompt": [12], "long prompt": [40], "batch": [9, 5]}
_IMAGE_PROMPTS = {"image": [9], "batch with images": [9, 6]}
_LARGE = 100_000_000  # parameters
_MOST_WORK = 3 * 10**11  # parameters times prompt tokens
_MOST_BYTES = 14 << 30


@dataclass(frozen=True)
class Model:
    """A class to build: ``kind`` is ``TEXT``, ``VISION`` or ``PUBLISHED``, ``name`` a model type, or the published
    configuration's file."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """Model type, or the published configuration's name."""
        return Path(self.name).stem if self.kind == PUBLISHED else self.name

    def config(self) -> PreTrainedConfig:
        return published_config(Path(self.name)) if self.kind == PUBLISHED else small_config(CONFIG_MAPPING[self.name])

    def build(self) -> PreTrainedModel:
        """A random model. Raises ``ValueError``: it would be too large."""
        config = self.config()
        vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = _AUTO[VISION if self.kind == VISION or (self.kind == PUBLISHED and vision) else TEXT]
        with torch.device("meta"):
            size = 4 * sum(weight.numel() for weight in auto.from_config(config).parameters())
        if size > _MOST_BYTES:
            raise ValueError(f"too large: {size / 2**30:.1f} GiB")
        return random_model(config, auto)


def models(configs: Path | None = None) -> list[Model]:
    """Every decoder-only class of the installed transformers, and the published configurations in a folder."""
    classes = []
    for kind, mapping in ((TEXT, MODEL_FOR_CAUSAL_LM_MAPPING), (VISION, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)):
        types = {config_class.model_type: config_class for config_class in mapping}
        for name, config_class in sorted(types.items()):
            repeated = kind == TEXT and config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            if name in CONFIG_MAPPING and not repeated and _decodes_alone(config_class):
                classes.append(Model(kind, name))
    if configs is not None:
        classes += [Model(PUBLISHED, str(file)) for file in sorted(configs.glob("*.json"))]
    return classes


def _decodes_alone(config_class: type[PreTrainedConfig]) -> bool:
    """Whether a class is a decoder by default, not part of an encoder-decoder."""
    try:
        config = config_class()
    except Exception:  # a default that cannot be built becomes an outcome
        return True
    encoder = config_class in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
    return not config.is_encoder_decoder and not encoder


@dataclass(frozen=True)
class Outcome:
    """The worst of ``OUTCOMES`` over the inputs of a class, with a ``reason`` of one line unless equal.

    ``inputs`` were compared; ``note`` has those that ``generate`` could not decode, with reasons. ``model_class`` is
    empty if the model could not be built.
    """

    outcome: str
    reason: str = ""
    model_class: str = ""
    inputs: tuple[str, ...] = ()
    note: str = ""


def check(model: Model, progress: Callable[[str], None] = lambda phase: None) -> Outcome:
    """Build a class and compare its tokens; ``progress`` gets the outcome of a time limit that is hit from then on."""
    progress(NOT_BUILT)
    try:
        network: Any = model.build()
    except Exception as error:
        return Outcome(NOT_BUILT, _one_line(error))
    name, compared, missing = type(network).__name__, list[str](), list[str]()
    makers: dict[str, Any] = {label: partial(_prompts, lengths) for label, lengths in _PROMPTS.items()}
    if type(network.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        makers |= {label: partial(image_inputs, network, lengths) for label, lengths in _IMAGE_PROMPTS.items()}
    outcome, reason = EQUAL, ""
    for label, make in makers.items():
        progress(NOT_GENERATED)
        try:
            inputs = make()
            if inputs["input_ids"].numel() * network.num_parameters() > _MOST_WORK:
                raise ValueError(f"too slow at these widths: {inputs['input_ids'].numel()} tokens")
            reference = network.generate(**inputs, **_options(network))
        except Exception as error:
            missing.append(f"{label}: {_one_line(error)}")
            continue
        compared.append(label)
        progress(FAULTY)
        outcome, reason = _compared(network, inputs, reference)
        if outcome != EQUAL:
            reason = reason if len(compared) == 1 else f"{label}: {reason}"
            break
    if not compared:
        return Outcome(NOT_GENERATED, missing[0], name)
    return Outcome(outcome, reason, name, tuple(compared), "; ".join(missing))


def _options(network: PreTrainedModel) -> dict[str, Any]:
    special = list(range(WORDS, network.config.get_text_config().vocab_size))
    new_tokens = NEW_TOKENS if network.num_parameters() < _LARGE else NEW_TOKENS_LARGE
    return {"max_new_tokens": new_tokens, "do_sample": False, "suppress_tokens": special}


def _compared(network: PreTrainedModel, inputs: dict[str, Any], reference: Tensor) -> tuple[str, str]:
    """Outcome and reason for one input."""
    start = inputs["input_ids"].shape[1]
    for drafter in (Oracle(reference[:, start:].tolist(), vocab=WORDS), Recycle(top_k=4)):
        try:
            tokens = mmspec.generate(network, drafter=drafter, nodes=8, **inputs, **_options(network))
        except UserError as error:
            return REFUSED, str(error)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return FAULTY, f"{_one_line(error)} ({Path(place.filename).name}:{place.lineno})"
        assert isinstance(tokens, Tensor)
        if not torch.equal(tokens, reference):
            return FAULTY, _difference(network, inputs, tokens, reference)
    return EQUAL, ""


def _difference(network: Any, inputs: dict[str, Any], tokens: Tensor, reference: Tensor) -> str:
    """The first difference, and whether decoding without a cache agrees with either."""
    width, start = min(tokens.shape[1], reference.shape[1]), inputs["input_ids"].shape[1]
    unequal = (tokens[:, :width] != reference[:, :width]).nonzero().tolist()
    row, column = min(unequal, key=lambda index: index[1]) if unequal else (0, width)
    difference = f"other tokens from new token {column - start} on"
    try:
        plain = network.generate(**inputs, **_options(network), use_cache=False)
    except Exception:
        return difference
    same = [name for name, other in (("ours", tokens), ("generate", reference)) if torch.equal(plain, other)]
    return f"{difference} (row {row}); without a cache, generate agrees with {' and '.join(same) or 'neither'}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def image_inputs(network: PreTrainedModel, lengths: list[int]) -> dict[str, Tensor]:
    """A left-padded batch of prompts of ``lengths`` text tokens with one random image each, as inputs of the model.

    Raises:
        Exception: any exception of the class's image processor or vision tower.
        ValueError: the image processor requires a package, or returns unsupported values.
    """
    config = network.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    encode = getattr(network, "get_image_features", None) or getattr(network.base_model, "get_image_features", None)
    pixels = _pixels(config, len(lengths))
    known = signature(network.forward).parameters
    wanted = signature(encode).parameters if encode is not None else {}
    pixels = {name: value for name, value in pixels.items() if name in known or name in wanted}
    if "pixel_values" not in pixels:
        raise ValueError("its image processor makes no pixel values")
    media = [token] if token is not None else []
    if media and encode is not None:
        with torch.no_grad():
            features = encode(**{name: value for name, value in pixels.items() if name in wanted})
        output = getattr(features, "pooler_output", None)
        output = getattr(features, "last_hidden_state", features) if output is None else output
        media *= _rows(output) // len(lengths)
    if (start := getattr(config, "vision_start_token_id", None)) is not None:
        media = [start, *media, config.vision_end_token_id]
    return {**_prompts(lengths, media, token, known), **pixels}


def _prompts(
    lengths: list[int], media: Sequence[int] = (), token: int | None = None, known: Collection[str] = ()
) -> dict[str, Tensor]:
    generator, longest = torch.Generator().manual_seed(0), max(lengths)
    rows, masks = [], []
    for length in lengths:
        words = torch.randint(5, WORDS, (length,), generator=generator).tolist()
        rows.append([0] * (longest - length) + [*words[:2], *media, *words[2:]])
        masks.append([int(place >= longest - length) for place in range(len(rows[-1]))])
    ids = torch.tensor(rows, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(masks, dtype=torch.bool)}
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]
    visual = (ids == token).long() if token is not None else torch.zeros_like(ids)
    return {**inputs, **dict.fromkeys(kinds, visual)}


def _pixels(config: Any, images: int) -> dict[str, Tensor]:
    """Pixel values of random images of one size, from the class's image processor."""
    like = CONFIG_MAPPING[_ALIKE[config.model_type]] if config.model_type in _ALIKE else type(config)
    backends: Any = IMAGE_PROCESSOR_MAPPING[like]
    if "pil" not in backends and not is_torchvision_available():
        raise ValueError("its image processor needs torchvision")
    make = backends.get("pil") or backends["torchvision"]
    default, vision = make(), getattr(config, "vision_config", None)
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    options: dict[str, Any] = {}
    for name in ("size", "crop_size", "max_image_size"):
        if isinstance(side, int) and (size := getattr(default, name, None)):
            options[name] = {axis: side for axis, value in dict(size).items() if value is not None}
    for option, source in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if isinstance(getattr(default, option, None), int) and isinstance(size := getattr(vision, source, None), int):
            options[option] = size
    processor = make(**options)
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (*_SIDES, 3), dtype=np.uint8) for _ in range(images)]
    encoded = processor(images=pictures, return_tensors="pt")
    tensors = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def _rows(features: Any) -> int:
    """Number of visual tokens."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if not isinstance(features, Iterable):
        raise ValueError(f"image features of an unknown kind: {type(features).__name__}")
    return sum(_rows(part) for part in features)


@click.command(cls=BenchmarkCommand)
@click.option("--configs", type=click.Path(path_type=Path, exists=True), help="Folder of published configurations.")
@click.option("--only", help="Model types and files whose names match this regular expression.")
@click.option("--limit", default=120, show_default=True, help="Seconds per class.")
@click.option("--log", type=OUT_FILE, default=_LOG, show_default=True, help="Log of a sweep, resumed if it exists.")
@click.option("--docs", type=OUT_FILE, default=_DOCS, show_default=True, help="Page with the tables.")
@click.option("--out", type=OUT_FILE, default=_RESULT, show_default=True, help="JSON result.")
def main(configs: Path | None, only: str | None, limit: int, log: Path, docs: Path, out: Path) -> None:
    """Print one line per class, then the counts as one JSON line."""
    transformers.logging.set_verbosity_error()
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = {(row["kind"], row["name"]): row for _, row in read_rows(log, cut=True)}
    for model in models(configs):
        key = model.kind, model.label
        if key in rows or (only and not re.search(only, model.label)):
            continue
        start = clock()
        outcome = check_apart(model, limit)
        used = {"seconds": round(clock() - start, 1), "transformers": transformers.__version__}
        rows[key] = {"kind": model.kind, "name": model.label, **asdict(outcome), **used}
        append_row(log, rows[key])
        click.echo(f"{model.label:32} {outcome.outcome:16} {outcome.reason[:200]}")
    about: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__}
    about["torchvision"] = version("torchvision") if is_torchvision_available() else "none"
    about |= {"commit": git_commit(), "dtype": "float32", "new_tokens": NEW_TOKENS}
    result = {"environment": about, "counts": counts(list(rows.values())), "models": list(rows.values())}
    if only is None:
        write_text(docs, page(result))
        print_result(result, out)
    else:
        click.echo(json.dumps(result["counts"]))


def check_apart(model: Model, limit: float) -> Outcome:
    """``check`` in a process of its own, ended after ``limit`` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mmspec.eval.coverage"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(model, sender), daemon=True)
    process.start()
    sender.close()
    phase, end = NOT_BUILT, clock() + limit
    try:
        while receiver.poll(max(0.0, end - clock())):
            message = receiver.recv()
            if isinstance(message, Outcome):
                return message
            phase = message
        return Outcome(phase, f"no answer in {limit:.0f} s")
    except EOFError:
        process.join()
        return Outcome(phase, f"the process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_outcome(model: Model, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    pipe.send(check(model, pipe.send))


def counts(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Number of classes of each kind by outcome."""
    found = Counter((row["kind"], row["outcome"]) for row in rows)
    return {
        kind: {outcome: found[kind, outcome] for outcome in OUTCOMES} for kind in dict.fromkeys(k for k, _ in found)
    }


def page(result: dict[str, Any]) -> str:
    about, rows = result["environment"], result["models"]
    text = [_INTRODUCTION.format(**about)]
    text.append(_table(("", *OUTCOMES), [(kind, *by.values()) for kind, by in result["counts"].items()]))
    for kind in result["counts"]:
        group = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["name"])
        first = "configuration" if kind == PUBLISHED else "model type"
        cells = []
        for row in group:
            used = row["transformers"]
            notes = [row["reason"], row["note"] and f"not compared: {row['note']}"]
            notes.append("" if used == about["transformers"] else f"with transformers {used}")
            cells.append((row["name"], row["model_class"], row["outcome"], "; ".join(filter(None, notes))))
        text += [f"## {kind.capitalize()}\n", _table((first, "class", "outcome", "reason"), cells)]
    return "\n".join(text)


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    escaped = [[re.sub(r"([|<>*_`])", r"\\\1", str(cell)) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


_INTRODUCTION = """# Supported models

Written by `python -m mmspec.eval coverage` with transformers {transformers}, torch {torch} and torchvision
{torchvision} (some image processors need it). Every decoder-only class with a causal language model or
image-text-to-text head is built from its default configuration with sizes cut, and published configurations keep their
widths with layers, experts and vocabulary cut. Weights are random, in {dtype}. Each class decodes greedily {new_tokens}
tokens (8 if it has more than 100 million parameters) after a short prompt, a long one and two prompts with padding;
vision-language models also after prompts with images, where the inputs can be made without a checkpoint's processor.
Trees are random, or drafted from recycled tokens. The tokens are compared with those of transformers' `generate`. Rows
that name another transformers were not measured again.

- **equal**: all tokens are those of `generate`.
- **refused**: an error of one line, before any token.
- **faulty**: other tokens, or a crash. Each is a bug.
- **not by generate**: `generate` itself does not decode the model with these inputs.
- **not built**: transformers cannot build it at this size, or here.

Decoders of encoder-decoder families and classes that are encoders by default (BERT) are left out. Doge is equal up
to its window, 2048 tokens by default. Beyond the window, Doge chooses among equal scores by their order, so longer
prompts are refused.
"""
