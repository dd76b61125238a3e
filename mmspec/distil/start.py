"""What hidden-state drafters start from: weights of the target's head or of another drafter, and a mask token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.core.target import Target
from mmspec.drafters.dflash.drafter import plain_embedding
from mmspec.drafters.hidden_state.drafter import HiddenStateDrafter
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.quantisation.linear import PackedLinear
from mmspec.targets.decoder_layer import MergedLayer


@torch.no_grad()
def head_weight(target: Target, draft_ids: Tensor | None) -> Tensor:
    """Weight of the target's output layer for a draft vocabulary, (draft tokens, hidden) float32."""
    head = target.head if draft_ids is None else target.narrow_head(draft_ids)
    width = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
    unit = torch.eye(width, device=target.device, dtype=target.dtype)
    return (head(unit) - head(torch.zeros_like(unit[:1]))).t().float()


def decoder_weights(target: Any, layers: Sequence[int]) -> dict[str, Tensor]:
    """Weights of a target's decoder under their published names, with these of its layers only, numbered from 0."""
    decoder = target.model.get_decoder()
    found: dict[str, Tensor] = {}

    def add(prefix: str, module: nn.Module) -> None:
        for name, part in module.named_modules(prefix=prefix):
            plain = part.unpacked() if isinstance(part, PackedLinear) else part
            found.update({f"{name}.{key}": weight for key, weight in plain.named_parameters(recurse=False)})

    for name, module in decoder.named_children():
        if name != "layers":
            add(name, module)
    for number, place in enumerate(layers if hasattr(decoder, "layers") else ()):
        layer = decoder.layers[place]
        if isinstance(layer, MergedLayer):
            found |= {f"layers.{number}.{name}": weight for name, weight in layer.separate().items()}
        else:
            add(f"layers.{number}", layer)
    return found


def output_rows(target: Target) -> int:
    """Tokens that the target's output layer has."""
    return target.head(target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).shape[-1]


def mask_token(pipe: Pipeline) -> int:
    """A token for masks: one that answers do not contain, if the tokenizer has it, else the last that ends no answer.

    Its embedding is not zero, which attention could not turn.
    """
    tokenizer, vocab = pipe.io.tokenizer, pipe.target.config.vocab_size
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk"))
    for token in [*(token for token in named if token is not None and token < vocab), *reversed(range(vocab))]:
        embedding = plain_embedding(pipe.target, torch.tensor([token], device=pipe.target.device))
        if token not in pipe.target.eos_token_ids and bool(embedding.any()):
            return int(token)
    raise UserError("expected a target with a token for masks, received one whose embeddings are all zero")


def load_shared_weights(start: HiddenStateDrafter, network: nn.Module, folder: Path | None) -> None:
    """Loads the weights of another drafter that the network has too; all others keep their random initialisation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shared = {name: tensor for name, tensor in start.network.state_dict().items() if name in wanted}
    for name, tensor in shared.items():
        if tuple(tensor.shape) != wanted[name]:
            raise UserError(f"{folder}: expected {name} {wanted[name]} to start from, received {tuple(tensor.shape)}")
    network.load_state_dict(shared, strict=False)
