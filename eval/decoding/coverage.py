"""One class of transformers under speculative decoding: the tokens of ``generate``, or why not.

A class is built small with random weights in float32 (``mmspec.eval.decoding.small_configs``) and decodes greedily a
short prompt, a longer one and two rows with padding, with random trees that branch and are partly accepted, and with
drafts looked up in earlier output. Classes with images also decode a prompt with an image, where
``mmspec.eval.decoding.small_media`` can make the inputs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

import mmspec
from mmspec import UserError
from mmspec.drafters.recycle import Recycle
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.decoding.small_configs import WORDS, published_config, random_model, small_config
from mmspec.eval.decoding.small_media import image_inputs

EQUAL, REFUSED, FAULTY, NOT_GENERATED, NOT_BUILT = "equal", "refused", "faulty", "not by generate", "not built"
OUTCOMES = (EQUAL, REFUSED, FAULTY, NOT_GENERATED, NOT_BUILT)
TEXT, VISION, PUBLISHED = "causal language models", "vision-language models", "published configurations"
NEW_TOKENS, NEW_TOKENS_LARGE = 24, 8
_AUTO = {TEXT: AutoModelForCausalLM, VISION: AutoModelForImageTextToText}
_PROMPTS = {"prompt": [12], "long prompt": [40], "batch": [9, 5]}
_IMAGE_PROMPTS = {"image": [9], "batch with images": [9, 6]}
_LARGE = 100_000_000  # parameters
_MOST_WORK = 3 * 10**11  # parameters times tokens of the prompts
_MOST_BYTES = 14 << 30


@dataclass(frozen=True)
class Model:
    """A class to build.

    Attributes:
        kind: ``TEXT``, ``VISION`` or ``PUBLISHED``.
        name: model type, or the published configuration's file.
    """

    kind: str
    name: str

    @property
    def label(self) -> str:
        """Model type, or the published configuration's name."""
        return Path(self.name).stem if self.kind == PUBLISHED else self.name

    def config(self) -> PreTrainedConfig:
        return published_config(Path(self.name)) if self.kind == PUBLISHED else small_config(CONFIG_MAPPING[self.name])

    def build(self) -> PreTrainedModel:
        """A random model.

        Raises:
            ValueError: it would be too large.
        """
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
    """Whether a class is a decoder by default, and not a part of an encoder-decoder."""
    try:
        config = config_class()
    except Exception:  # that the default cannot be built is an outcome
        return True
    encoder = config_class in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
    return not config.is_encoder_decoder and not encoder


@dataclass(frozen=True)
class Outcome:
    """What became of a class.

    Attributes:
        outcome: one of ``OUTCOMES``; the worst of its inputs.
        reason: one line; empty if equal.
        model_class: name, empty if it could not be built.
        inputs: those that ``generate`` decoded and were compared.
        note: which inputs are missing, and why.
    """

    outcome: str
    reason: str = ""
    model_class: str = ""
    inputs: tuple[str, ...] = ()
    note: str = ""

    def row(self, model: Model) -> dict[str, Any]:
        return {"kind": model.kind, "name": model.label, **asdict(self)}


def check(model: Model, progress: Callable[[str], None] = lambda phase: None) -> Outcome:
    """Build a class and compare its tokens.

    Args:
        progress: called with the outcome that a time limit would mean from now on.
    """
    progress(NOT_BUILT)
    try:
        network = model.build()
    except Exception as error:
        return Outcome(NOT_BUILT, _one_line(error))
    name, compared, missing = type(network).__name__, [], []
    worst = Outcome(NOT_GENERATED, model_class=name)
    for label, make in _inputs(network).items():
        progress(NOT_GENERATED)
        try:
            inputs = make()
            if inputs["input_ids"].numel() * network.num_parameters() > _MOST_WORK:
                raise ValueError(f"too slow at these widths: {inputs['input_ids'].numel()} tokens")
            reference = _generate(network, inputs)
        except Exception as error:
            missing.append(f"{label}: {_one_line(error)}")
            continue
        compared.append(label)
        progress(FAULTY)
        outcome, reason = _compared(network, inputs, reference)
        if outcome != EQUAL:
            worst = Outcome(outcome, reason if len(compared) == 1 else f"{label}: {reason}", name)
            break
    else:
        worst = Outcome(EQUAL, model_class=name) if compared else Outcome(NOT_GENERATED, missing[0], name)
    note = "; ".join(missing) if compared else ""
    return Outcome(worst.outcome, worst.reason, name, tuple(compared), note)


def _inputs(network: PreTrainedModel) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Functions that make the inputs, by name."""
    makers: dict[str, Any] = {label: partial(_text_inputs, lengths) for label, lengths in _PROMPTS.items()}
    if type(network.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        makers |= {label: partial(image_inputs, network, lengths) for label, lengths in _IMAGE_PROMPTS.items()}
    return makers


def _text_inputs(lengths: list[int]) -> dict[str, Tensor]:
    generator, longest = torch.Generator().manual_seed(len(lengths)), max(lengths)
    ids = torch.randint(5, WORDS, (len(lengths), longest), generator=generator)
    padding = torch.arange(longest) < longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(padding, 0), "attention_mask": (~padding).long()}


def _options(network: PreTrainedModel) -> dict[str, Any]:
    special = list(range(WORDS, network.config.get_text_config().vocab_size))
    new_tokens = NEW_TOKENS if network.num_parameters() < _LARGE else NEW_TOKENS_LARGE
    return {"max_new_tokens": new_tokens, "do_sample": False, "suppress_tokens": special}


def _generate(network: Any, inputs: dict[str, Any]) -> Tensor:
    """Plain decoding by transformers, (rows, length)."""
    tokens: Tensor = network.generate(**inputs, **_options(network))
    return tokens


def _compared(network: PreTrainedModel, inputs: dict[str, Any], reference: Tensor) -> tuple[str, str]:
    """The outcome for one input, and the reason."""
    start = inputs["input_ids"].shape[1]
    for drafter in (Oracle(reference[:, start:].tolist(), vocab=WORDS), Recycle(top_k=4)):
        try:
            tokens = mmspec.generate(network, drafter=drafter, nodes=8, **inputs, **_options(network))
        except UserError as error:
            return REFUSED, str(error)
        except Exception as error:
            return FAULTY, f"{_one_line(error)} ({_place(error)})"
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


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
