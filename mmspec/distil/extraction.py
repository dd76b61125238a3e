"""A target run over conversations: the hidden states and embeddings that its drafters learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.distil.data import Conversation
from mmspec.distil.sequences import Encoded, Encoder
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget

_KINDS = "mm_token_type_ids"


@dataclass
class Features:
    """A batch of conversations as a target sees them, padded on the right. Ordinary tensors without gradients.

    Attributes:
        tokens: (batch, length) int64, 0 at padding.
        hidden: (batch, length, hidden), the target's last hidden states after its final norm, 0 at padding.
        embeds: (batch, length, hidden), its input embeddings; visual features at visual positions.
        visual: (batch, length) bool, positions that carry image or video features.
        answer: (batch, length) bool, tokens that the target says: what a drafter must guess.
        keep: (batch, length) bool, False at padding.
    """

    tokens: Tensor
    hidden: Tensor
    embeds: Tensor
    visual: Tensor
    answer: Tensor
    keep: Tensor


@dataclass
class Row:
    """One conversation of a batch, without padding.

    Attributes:
        tokens, visual, answer: (length,) as in `Features`.
        hidden: (length, hidden).
        shown: (visual positions, hidden), the visual features.
    """

    tokens: Tensor
    hidden: Tensor
    shown: Tensor
    visual: Tensor
    answer: Tensor


class Extractor:
    """Runs a target over conversations. Calling it with some gives their `Features`.

    A conversation that has no place within `max_length` gets no row; a batch of none but such is one row of padding.

    Args:
        target: the model that answers.
        max_length, frames, fps, video_backend: as for `Encoder`.
    """

    def __init__(self, target: TransformersTarget, max_length: int | None = None, **video: Any) -> None:
        self.target = target
        self.encoder = Encoder(target, max_length, **video)

    @property
    def skipped(self) -> Counter[str]:
        """How many conversations got no row, by reason."""
        return self.encoder.skipped

    @property
    def settings(self) -> dict[str, Any]:
        """What features depend on beside target and conversation, as JSON values."""
        return self.encoder.settings

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        """Features of a batch; see the class."""
        return collate([row for row in self.rows(conversations) if row is not None], self.target)

    def rows(self, conversations: Sequence[Conversation]) -> list[Row | None]:
        """The row of each conversation; None where it has none."""
        encoded = [self.encoder(conversation) for conversation in conversations]
        usable = [one for one in encoded if one is not None]
        alike = [usable] if _stackable(usable) else [[one] for one in usable]
        rows = iter([row for group in alike if group for row in self._run(group)])
        return [None if one is None else next(rows) for one in encoded]

    def _run(self, batch: Sequence[Encoded]) -> list[Row]:
        device = self.target.model.device
        longest = max(len(one.tokens) for one in batch)
        pads = [longest - len(one.tokens) for one in batch]
        ids = torch.stack([torch.nn.functional.pad(one.tokens, (p, 0)) for one, p in zip(batch, pads, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        inputs = _joined(batch)
        if any(_KINDS in one.inputs for one in batch):
            inputs[_KINDS] = self._kinds(ids).to(device)
        prompt = Prompt(ids.to(device), mask.to(device) if any(pads) else None, inputs)
        self.target.features = ("last",)
        self.target.select([])
        step = self.target.prefill(prompt, room=1)
        self.target.select([])
        rows = []
        for index, (one, pad) in enumerate(zip(batch, pads, strict=True)):
            visual = one.visual.to(device)
            # Cloned outside of inference mode, these are tensors that autograd takes.
            hidden = step.features["last"][index, pad:].clone()
            shown = hidden[:0] if step.embeds is None else step.embeds[index, pad:][visual].clone()
            rows.append(Row(one.tokens.to(device), hidden, shown, visual, (one.turn >= 0).to(device)))
        return rows

    def _kinds(self, ids: Tensor) -> Tensor:
        """As processors mark them: 0 for text, 1 for images, 2 for videos."""
        config = self.target.model.config
        kinds = torch.zeros_like(ids)
        for kind, name in enumerate(("image_token_id", "video_token_id"), start=1):
            kinds[ids == getattr(config, name, -1)] = kind
        return kinds


def extract(
    target: TransformersTarget, conversations: Sequence[Conversation], max_length: int | None = None, **video: Any
) -> Features:
    """Features of one batch of conversations; see `Extractor`, which serves many."""
    return Extractor(target, max_length, **video)(conversations)


def collate(rows: Sequence[Row], target: TransformersTarget) -> Features:
    """Rows as a batch; no rows as one of padding."""
    device, dtype = target.model.device, target.model.dtype
    if not rows:
        empty = torch.zeros(2, target.config.hidden_size, device=device, dtype=dtype)
        marks = torch.zeros(2, dtype=torch.bool, device=device)
        rows = [Row(marks.long(), empty, empty[:0], marks, marks)]
        lengths = torch.zeros(1, dtype=torch.long)
    else:
        lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens, visual, answer, hidden = (
        pad_sequence([getattr(row, name).to(device) for row in rows], batch_first=True)
        for name in ("tokens", "visual", "answer", "hidden")
    )
    with torch.no_grad():
        # A placeholder's own embedding stands nowhere, and may lie outside of the table.
        embeds = target.embed(tokens.masked_fill(visual, 0)).clone()
    embeds[visual] = torch.cat([row.shown for row in rows]).to(device, embeds.dtype)
    keep = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
    return Features(tokens, hidden.to(dtype), embeds, visual, answer, keep)


def _stackable(batch: Sequence[Encoded]) -> bool:
    """Whether the pixel inputs of a batch can be joined: videos of unequal numbers of frames cannot."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for one in batch:
        for name, value in _pixels(one).items():
            # The tiles of an image, whose number differs, are padded.
            shape = value.shape[2:] if name == "pixel_values" and value.ndim == 5 else value.shape[1:]
            shapes.setdefault(name, set()).add(tuple(shape))
    return all(len(found) == 1 for found in shapes.values())


def _pixels(one: Encoded) -> dict[str, Tensor]:
    return {name: value for name, value in one.inputs.items() if name != _KINDS}


def _joined(batch: Sequence[Encoded]) -> dict[str, Any]:
    """The pixel inputs of all rows."""
    parts: dict[str, list[Tensor]] = {}
    for one in batch:
        for name, value in _pixels(one).items():
            parts.setdefault(name, []).append(value)
    inputs: dict[str, Any] = {}
    for name, values in parts.items():
        if name == "pixel_values" and values[0].ndim == 5:
            most = max(value.shape[1] for value in values)
            values = [torch.nn.functional.pad(value, (0, 0) * 3 + (0, most - value.shape[1])) for value in values]
        inputs[name] = torch.cat(values)
    return inputs
