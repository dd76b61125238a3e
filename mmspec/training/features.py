"""Feature extraction: runs a target over conversations and returns the hidden states that its drafters train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.target import Feature, Prompt
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training.data import Conversation
from mmspec.training.sequences import EncodedConversation, Encoder

_TOKEN_TYPES = "mm_token_type_ids"


@dataclass
class Features:
    """A target's features of a batch of conversations, padded on the right. Not inference tensors; without gradients.

    Attributes:
        tokens: (batch, length) int64, 0 at padding.
        hidden: (batch, length, hidden), last hidden states after the final norm, 0 at padding.
        embeds: (batch, length, hidden), input embeddings; visual features at visual positions.
        layers: (batch, length, n * hidden), the states of further layers that the extractor reads, concatenated, 0 at
            padding; None if it reads none.
        visual: (batch, length) bool, positions of image and video features.
        answer: (batch, length) bool, tokens that the target generates, which a drafter learns to predict.
        keep: (batch, length) bool, False at padding.
    """

    tokens: Tensor
    hidden: Tensor
    embeds: Tensor
    visual: Tensor
    answer: Tensor
    keep: Tensor
    layers: Tensor | None = None


@dataclass
class ConversationFeatures:
    """Features of one conversation, without padding.

    Attributes:
        tokens, visual, answer: (length,) as in ``Features``.
        hidden: (length, hidden).
        shown: (visual positions, hidden), the visual features.
        layers: (length, n * hidden), or None.
    """

    tokens: Tensor
    hidden: Tensor
    shown: Tensor
    visual: Tensor
    answer: Tensor
    layers: Tensor | None = None


class Extractor:
    """Runs a target over conversations; calling it returns their ``Features``.

    A conversation whose first question exceeds ``max_length`` is skipped. A batch of skipped ones is a row of padding.

    Args:
        max_length: as for ``Encoder``.
        layers: further hidden states to read.
    """

    def __init__(self, pipe: Pipeline, max_length: int | None = None, layers: Sequence[Feature] = ()) -> None:
        self.target: TransformersTarget = pipe.target
        self.layers = tuple(layers)
        self.encoder = Encoder(pipe, max_length)

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped conversations by reason."""
        return self.encoder.skipped

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the features depend on besides target and conversation, as JSON values."""
        return self.encoder.settings | ({"layers": list(self.layers)} if self.layers else {})

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        return collate([row for row in self.rows(conversations) if row is not None], self.target)

    def rows(self, conversations: Sequence[Conversation]) -> list[ConversationFeatures | None]:
        """The features of each conversation; None for skipped ones."""
        encoded = [self.encoder(conversation) for conversation in conversations]
        usable = [one for one in encoded if one is not None]
        batches = [usable] if _stackable(usable) else [[one] for one in usable]
        rows = iter([row for batch in batches if batch for row in self._run(batch)])
        return [None if one is None else next(rows) for one in encoded]

    def _run(self, batch: Sequence[EncodedConversation]) -> list[ConversationFeatures]:
        device = self.target.device
        longest = max(len(one.tokens) for one in batch)
        pads = [longest - len(one.tokens) for one in batch]
        ids = torch.stack([torch.nn.functional.pad(one.tokens, (p, 0)) for one, p in zip(batch, pads, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        inputs = _concatenated(batch)
        if any(_TOKEN_TYPES in one.inputs for one in batch):
            inputs[_TOKEN_TYPES] = self._token_types(ids).to(device)
        prompt = Prompt(ids.to(device), mask.to(device) if any(pads) else None, inputs)
        self.target.features = ("last", *self.layers)
        self.target.select([])
        output = self.target.prefill(prompt, max_new_tokens=1)
        self.target.select([])
        rows = []
        for index, (one, pad) in enumerate(zip(batch, pads, strict=True)):
            visual = one.visual.to(device)
            # Clones made outside of inference mode can be used in autograd.
            hidden = output.features["last"][index, pad:].clone()
            shown = hidden[:0] if output.embeds is None else output.embeds[index, pad:][visual].clone()
            read = [output.features[name][index, pad:] for name in self.layers]
            layers = torch.cat(read, dim=-1).clone() if read else None
            answer = (one.turn >= 0).to(device)
            rows.append(ConversationFeatures(one.tokens.to(device), hidden, shown, visual, answer, layers))
        return rows

    def _token_types(self, ids: Tensor) -> Tensor:
        """Token type ids as processors return them: 0 for text, 1 for images, 2 for videos."""
        config = self.target.model.config
        types = torch.zeros_like(ids)
        for kind, name in enumerate(("image_token_id", "video_token_id"), start=1):
            types[ids == getattr(config, name, -1)] = kind
        return types


def collate(rows: Sequence[ConversationFeatures], target: TransformersTarget) -> Features:
    """Pads conversations into a batch; no conversations become one row of padding."""
    device, dtype = target.device, target.model.dtype
    if not rows:
        empty = torch.zeros(2, target.config.hidden_size, device=device, dtype=dtype)
        marks = torch.zeros(2, dtype=torch.bool, device=device)
        rows = [ConversationFeatures(marks.long(), empty, empty[:0], marks, marks)]
        lengths = torch.zeros(1, dtype=torch.long)
    else:
        lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens, visual, answer, hidden = (
        pad_sequence([getattr(row, name).to(device) for row in rows], batch_first=True)
        for name in ("tokens", "visual", "answer", "hidden")
    )
    with torch.no_grad():
        # The embedding of a placeholder token is overwritten, and its id may lie outside of the table.
        embeds = target.embed(tokens.masked_fill(visual, 0)).clone()
    embeds[visual] = torch.cat([row.shown for row in rows]).to(device, embeds.dtype)
    keep = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
    found = [row.layers.to(device, dtype) for row in rows if row.layers is not None]
    layers = pad_sequence(found, batch_first=True) if found else None
    return Features(tokens, hidden.to(dtype), embeds, visual, answer, keep, layers)


def _stackable(batch: Sequence[EncodedConversation]) -> bool:
    """Whether the pixel inputs of a batch can be concatenated: videos of unequal numbers of frames cannot."""
    # Images with fewer tiles than others are padded.
    return all(len({value.shape[1 + _tiled(name, value) :] for value in found}) == 1 for name, found in _pixels(batch))


def _pixels(batch: Sequence[EncodedConversation]) -> Iterator[tuple[str, list[Tensor]]]:
    """Pixel inputs of the conversations that have some, by name."""
    for name in dict.fromkeys(name for one in batch for name in one.inputs if name != _TOKEN_TYPES):
        yield name, [one.inputs[name] for one in batch if name in one.inputs]


def _tiled(name: str, value: Tensor) -> bool:
    return name == "pixel_values" and value.ndim == 5


def _concatenated(batch: Sequence[EncodedConversation]) -> dict[str, Any]:
    """Concatenated pixel inputs of a batch."""
    inputs: dict[str, Any] = {}
    for name, values in _pixels(batch):
        if _tiled(name, values[0]):
            most = max(value.shape[1] for value in values)
            values = [torch.nn.functional.pad(value, (0, 0) * 3 + (0, most - value.shape[1])) for value in values]
        inputs[name] = torch.cat(values)
    return inputs
