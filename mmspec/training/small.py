"""``mmspec train small``: loss and setup of a draft model (FastDraft, arXiv 2411.11055).

FastDraft trains on raw text first, then on answers of the target. Here, the draft model can instead be initialised from
the target's weights, and learns the target's full distributions over answers.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from mmspec.core.target import Target
from mmspec.drafters.hidden_state import plain_embedding
from mmspec.drafters.small import Small
from mmspec.errors import UserError, explained
from mmspec.files import settle, temporary
from mmspec.pipeline import Pipeline
from mmspec.targets.decoder import Head
from mmspec.training.objectives import LossInput, LossOutput, TokenLoss, next_token_loss
from mmspec.training.options import NextTokenLoss, RunOptions
from mmspec.training.tasks import DrafterTraining, TrainingTask, decoder_weights, head_weight
from mmspec.validation import option, options

_HEAD_DIM = 64


@options(kw_only=True)
class SmallOptions(NextTokenLoss, RunOptions):
    """Options of ``mmspec train small``."""

    layers: int = option(4, "Decoder layers of the draft model.", ge=1, le=256)
    hidden: int | None = option(
        None,
        "Hidden size; if it equals the target's, embeddings start as the target's.",
        default_text="the target's",
        ge=2,
        le=2**16,
    )
    from_target: bool = option(False, "Initialise from the target's first layers, embeddings and output layer.")


class DraftModel(Small):
    """A draft model in training, saved as a transformers checkpoint with the target's tokenizer."""

    tree_size = 16

    def __init__(self, tokenizer: Any, model: Any, draft_ids: None) -> None:
        super().__init__(model)
        self._tokenizer = tokenizer

    def save(self, folder: Path, target: Target) -> None:
        """Write weights in bfloat16, configuration and tokenizer; each file is replaced atomically."""
        small: Any = copy.deepcopy(self.model)
        small.to(torch.bfloat16)
        tokens = {name: getattr(self.model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        small.generation_config = GenerationConfig(**tokens, max_new_tokens=256, do_sample=False)
        with temporary(folder) as part:
            part.mkdir()
            small.save_pretrained(part)
            self._tokenizer.save_pretrained(part)
            settle(part)
            folder.mkdir(exist_ok=True)
            for path in sorted(part.iterdir()):
                os.replace(path, folder / path.name)


def distillation_loss(kind: TokenLoss, network: Any, given: LossInput) -> LossOutput:
    """Loss of a language model against the target's next-token distributions, without images and videos, like
    ``Small``; deterministic."""

    def states() -> Tensor:
        batch = given.batch
        read = (batch.keep & ~batch.visual).long()
        options = {"attention_mask": read, "position_ids": (read.cumsum(1) - 1).clamp(min=0), "use_cache": False}
        return network.get_decoder()(batch.tokens * read, **options).last_hidden_state

    return next_token_loss(kind, given, states, Head(network))


def setup(options: SmallOptions, pipe: Pipeline, draft_ids: None) -> TrainingTask:
    with torch.no_grad():
        model = (_first_layers if options.from_target else _new_model)(pipe, options.layers, options.hidden)
    network = model.to(pipe.target.device, torch.float32)
    drafter = partial(DraftModel, pipe.processor.tokenizer)
    return TrainingTask(network, partial(distillation_loss, options.loss), drafter)


def _new_model(pipe: Pipeline, layers: int, hidden: int | None) -> Any:
    """A Llama with random layers, and with the target's embedding and output layer if it has the target's width."""
    target, theirs = pipe.target, pipe.target.config
    width = hidden or theirs.hidden_size
    special: Any = {f"{name}_token_id": getattr(theirs, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // _HEAD_DIM),
        head_dim=_HEAD_DIM,
        max_position_embeddings=pipe.context_limit or 4096,
        tie_word_embeddings=width != theirs.hidden_size or target.model_config.tie_word_embeddings,
        **special,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if width == theirs.hidden_size:
        tokens = torch.arange(theirs.vocab_size, device=target.device)
        model.get_input_embeddings().weight.copy_(plain_embedding(target, tokens))
        # Last: if both are tied, scaled embeddings (Gemma) would make the logits too large.
        model.get_output_embeddings().weight.copy_(head_weight(target, None)[: theirs.vocab_size])
    return model


def _first_layers(pipe: Pipeline, layers: int, hidden: int | None) -> Any:
    """The target's first layers, embedding, last norm and output layer. Raises ``UserError``: the target has another
    width, fewer layers, or a text part without its own class in transformers."""
    target, shape = pipe.target, pipe.target.config.to_dict()
    known = {"hidden": target.config.hidden_size, "layers": target.config.num_hidden_layers}
    if hidden not in (None, known["hidden"]) or layers > known["layers"]:
        received = {"hidden": hidden or known["hidden"], "layers": layers}
        raise UserError(f"--from-target takes the target's width and at most its layers, {known}: received {received}")
    tied = target.model_config.tie_word_embeddings  # unreliable in sub-configurations
    shape |= {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    if shape.get("layer_types"):
        shape["layer_types"] = shape["layer_types"][:layers]
    with explained("--from-target needs a text model of transformers", AttributeError, RuntimeError, ValueError):
        model = AutoModelForCausalLM.from_config(type(target.config).from_dict(shape), dtype=torch.float32)
        model.get_decoder().load_state_dict(decoder_weights(target, range(layers)))
        if not tied:
            model.get_output_embeddings().weight.copy_(head_weight(target, None))
    return model


TRAINING = DrafterTraining(
    SmallOptions,
    setup,
    """Train a small language model of the target's vocabulary, which drafts as small:OUT/drafter (FastDraft).

    The result is a transformers checkpoint. Images and videos are left out.""",
)
