"""Target interface: prompts, outputs, and the methods that the engine calls.

A target prefills prompts, verifies trees and commits accepted paths. It owns its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict

Feature = int | str
"""Hidden states of a decoder: n is the input of layer n, ``output_of(n)`` its raw output, and ``"last"`` the output of
the final norm.

The output of layer n is the input of layer n + 1, unless the decoder changes it in between, e.g. Qwen3-VL, which adds
visual features (deepstack)."""

_OUTPUT = "output "


def output_of(layer: int) -> Feature:
    """Name of the feature that is the output of a layer."""
    return f"{_OUTPUT}{layer}"


def layer_of(feature: Feature) -> tuple[int, bool] | None:
    """Layer of a feature, and whether the feature is the layer's output; None for ``"last"``."""
    if isinstance(feature, int):
        return feature, False
    return (int(feature.removeprefix(_OUTPUT)), True) if feature.startswith(_OUTPUT) else None


@dataclass
class Prompt:
    """Encoded prompts of a batch.

    Attributes:
        input_ids: (batch, length) int64, left-padded.
        attention_mask: (batch, length), 0 at padding; None without padding.
        inputs: other arguments of the model's forward (``pixel_values``, ``image_sizes``, ...).
        prefill_mask: (batch, length) bool, positions to prefill, without padding, with each row's last; None: all.
        media: original image and video inputs if ``inputs`` contains their encoded form.
        history: (batch, any) int64, tokens before the answer for logits processors if they are not ``input_ids``, which
            are placeholders if ``inputs`` contains ``inputs_embeds``.
        adapter: name of the LoRA adapter to use; None for the base model.
        batch: prompts that this row must be prefilled with, as they share ``inputs``; None if the row has its own.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    prefill_mask: Tensor | None = None
    media: dict[str, Any] = field(default_factory=dict)
    history: Tensor | None = None
    adapter: str | None = None
    batch: Prompt | None = None

    @property
    def is_single(self) -> bool:
        """Whether this is a row of its own without padding, which ``input_ids`` describe together with ``inputs``."""
        alone = len(self.input_ids) == 1 and self.attention_mask is None
        return alone and self.history is None and self.batch is None

    def rows(self) -> list[Prompt]:
        """One prompt per row. Their padding is in their history, as in transformers' ``generate``."""
        if self.is_single:
            return [self]
        history = self.input_ids if self.history is None else self.history
        masks = [None] * len(history) if self.attention_mask is None else self.attention_mask.split(1)
        parts = zip(self.input_ids.split(1), masks, history.split(1), strict=True)
        return [Prompt(ids, mask, history=own, adapter=self.adapter, batch=self) for ids, mask, own in parts]

    def unpadded(self) -> list[list[int]]:
        """Token ids of each row, without padding."""
        rows = (self.input_ids if self.history is None else self.history).tolist()
        if self.attention_mask is None or self.history is not None:
            return rows
        keep = self.attention_mask.tolist()
        return [[t for t, k in zip(row, mask, strict=True) if k] for row, mask in zip(rows, keep, strict=True)]

    def to(self, device: torch.device, dtype: torch.dtype) -> Prompt:
        """The prompt on a device, floating point inputs (pixel values) in a dtype."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        inputs, media = ({name: moved(x) for name, x in values.items()} for values in (self.inputs, self.media))
        ids, mask = moved(self.input_ids), moved(self.attention_mask)
        return replace(self, input_ids=ids, attention_mask=mask, inputs=inputs, media=media)

    @property
    def stack_key(self) -> Hashable:
        """Key of the form of ``inputs``: prompts with equal keys can be stacked; None if it cannot be stacked."""
        forms = []
        for name, value in self.inputs.items():
            if not isinstance(value, Tensor) or not value.ndim:
                return None
            forms.append((name, "token" if value.shape == self.input_ids.shape else value.shape[1:]))
        return None if self.batch else (self.adapter, *sorted(forms))

    @staticmethod
    def stack(prompts: Sequence[Prompt]) -> Prompt:
        """Several prompts as one batch: prompts with the same ``stack_key``, or the rows of a ``batch``.

        Inputs with the shape of ``input_ids`` are padded alike; image and video inputs are concatenated along the first
        axis.
        """
        first = prompts[0]
        if len(prompts) == 1 or first.batch is not None:
            return first.batch or first
        longest = max(prompt.input_ids.shape[1] for prompt in prompts)

        def padded(prompt: Prompt, values: Tensor) -> Tensor:
            return F.pad(values, (longest - prompt.input_ids.shape[1], 0))

        inputs = {}
        for name, example in first.inputs.items():
            values = [prompt.inputs[name] for prompt in prompts]
            if example.shape == first.input_ids.shape:
                values = [padded(prompt, value) for prompt, value in zip(prompts, values, strict=True)]
            inputs[name] = torch.cat(values)
        masks = [
            torch.ones_like(prompt.input_ids) if prompt.attention_mask is None else prompt.attention_mask
            for prompt in prompts
        ]
        mask = torch.cat([padded(prompt, mask) for prompt, mask in zip(prompts, masks, strict=True)])
        ids = torch.cat([padded(prompt, prompt.input_ids) for prompt in prompts])
        return Prompt(ids, None if bool(mask.all()) else mask, inputs, adapter=first.adapter)


@dataclass
class TargetOutput:
    """Output of a verify pass or a prefill.

    Attributes:
        logits: (batch, nodes, vocab), unprocessed; after a prefill, nodes = 1: the last position of the prompt.
        features: (batch, nodes, hidden) each, hidden states for the drafter; after a prefill, at all positions.
        visual: (batch, length) bool, prefill only: positions of image or video features.
        embeds: (batch, length, hidden), prefill only: the input embeddings of the language model.
        positions: (batch, length) or (axes, batch, length) int64, prefill only: the decoder's ``position_ids``; with
            several axes (Qwen-VL), the last three are time, height and width.
        cached_tokens: tokens of the prompt whose states came from the prefix cache.
        prompt: the prompts as one left-padded batch, prefill only.
        stops: after ``KeepsStates.restore``, recurrent states within the prompt, see ``State``.
    """

    logits: Tensor
    features: dict[Feature, Tensor]
    visual: Tensor | None = None
    embeds: Tensor | None = None
    positions: Tensor | None = None
    cached_tokens: int = 0
    prompt: Prompt | None = None
    stops: Mapping[int, Stop] = field(default_factory=dict)


def at_text(positions: Tensor | None, place: int) -> bool:
    """Whether token ``place`` is at a text position, according to ``TargetOutput.positions``. With several axes, time,
    height and width differ at images and videos."""
    if positions is None or positions.ndim == 2:
        return True
    axes = positions[-3:, :, place]
    return bool((axes == axes[0]).all())


BLOCK = 512
"""Recurrent states within a prompt are kept at multiples of this number of tokens."""

_MOST_STOPS, _MOST_BYTES = 16, 1 << 27


@dataclass(frozen=True)
class Stop:
    """Recurrent states and logits after a sequence's first tokens.

    Attributes:
        recurrent: recurrent states, in the target's own form; empty for attention alone.
        logits: (1, 1, vocab), logits after the last token; None if unknown.
    """

    recurrent: tuple[Tensor, ...] = ()
    logits: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.recurrent) + (0 if self.logits is None else self.logits.nbytes)


def spaced(stops: Mapping[int, Stop]) -> dict[int, Stop]:
    """At most 16 of the stops, of at most 128 MiB, at distances that are about equal, and always the last two."""
    size = max((stop.nbytes for stop in stops.values()), default=0)
    kept = dict(sorted(stops.items()))
    while len(kept) > max(2, min(_MOST_STOPS, _MOST_BYTES // max(size, 1))):
        ends = [0, *kept]
        *_, closest = min((after - before, end) for before, end, after in zip(ends, ends[1:-2], ends[2:], strict=False))
        del kept[closest]
    return kept


@dataclass(frozen=True)
class State:
    """A target's states of the tokens of one sequence, apart from its running sequences.

    Attributes:
        cache: keys and values of all tokens, or of more, in the target's own form.
        length: number of tokens.
        nbytes: memory of ``cache``.
        cuts: whether any number of first tokens can be continued; if not, only the numbers in ``stops``.
        stops: by number of tokens.
    """

    cache: Any
    length: int
    nbytes: int
    cuts: bool
    stops: Mapping[int, Stop] = field(default_factory=dict)

    @property
    def logits(self) -> Tensor | None:
        """(1, 1, vocab), logits after the last token; None if unknown."""
        return self.stops[self.length].logits if self.length in self.stops else None

    def first(self, length: int) -> State:
        """States of the first ``length`` tokens."""
        return replace(self, length=length, stops={end: stop for end, stop in self.stops.items() if end <= length})


@runtime_checkable
class KeepsStates(Protocol):
    """Interface of a target whose sequences can be continued by later prompts, as the prefix cache requires."""

    def identity(self) -> str:
        """Hash of the weights, and of all else that the states of a prompt depend on."""

    def snapshot(self, row: int) -> State | None:
        """Copy the states of a running sequence, with one stop; None if no later prompt can continue them."""

    def loaded(self, layout: Any, parts: Sequence[Tensor], recurrent: tuple[Tensor, ...], length: int) -> Any:
        """``State.cache`` from its ``layout`` and ``parts`` (see ``TreeCache``) and the last recurrent states."""

    def restore(
        self, state: State, prompt: Prompt, max_new_tokens: int, reads: Sequence[Feature] = (), chunk: int | None = None
    ) -> Iterator[TargetOutput | None]:
        """``prefill`` of a single prompt after the tokens of ``state``, its first tokens, which may be none. Features
        and embeddings cover the tokens after ``state``."""


@dataclass(frozen=True)
class KeysValues:
    """A layer's keys and values of the committed tokens.

    Attributes:
        keys, values: (batch, kv_heads, slots, head_dim), each row's tokens in its first slots.
        lengths: (batch,) int64, number of tokens of each row.
        version: changes when a tensor read by captured graphs is reallocated.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    version: Hashable

    def to(self, device: torch.device) -> KeysValues:
        """Copy to a device, as layers may be on several devices."""
        return replace(self, keys=self.keys.to(device), values=self.values.to(device), lengths=self.lengths.to(device))


@runtime_checkable
class SharesKeysValues(Protocol):
    """Interface of a target whose keys and values drafters may read between passes."""

    def keys_values(self, layer: int, rows: int) -> KeysValues:
        """A layer's keys and values for the first ``rows`` rows."""


@runtime_checkable
class HasDefaults(Protocol):
    """Interface of a target whose model has its own sampling defaults."""

    def defaults(self) -> Any:
        """The model's sampling defaults, a ``mmspec.sampling.defaults.Defaults``."""


class Target(Protocol):
    """Interface of a target: weights, forward passes, and caches with one row per sequence.

    Rows are the decoding sequences, in the order of joining. ``TransformersTarget`` implements it for transformers
    models; any other class with these members works in a ``Pipeline`` too. The ``Processor`` handles text and media.
    """

    @property
    def device(self) -> torch.device:
        """Device of the target's tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating point type of a prompt's inputs."""

    @property
    def context_limit(self) -> int | None:
        """Maximum number of prompt and output tokens; None for no limit."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""

    def fork(self) -> Target:
        """A target with the same weights and without sequences."""

    def batch_key(self, prompt: Prompt) -> Hashable:
        """Key of a prompt: only prompts with equal keys may decode in one batch."""

    def prefill(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: Sequence[int],
        reads: Sequence[Feature] = (),
        chunk: int | None = None,
    ) -> Iterator[TargetOutput | None]:
        """Compute and cache prompts, which become the last rows.

        Args:
            prompts: prompts that ``Prompt.stack`` can stack.
            max_new_tokens: limit of each row.
            reads: hidden states that the output must contain.
            chunk: maximum tokens per pass, if the model allows several passes; None prefills in one pass.

        Yields:
            None after each pass except the last, then the output. The rows join with the last pass, not before.
        """

    def verify(self, tree: TokenTree, reads: Sequence[Feature] = ()) -> TargetOutput:
        """Verify pass: logits, and the hidden states ``reads``, at every node. The cache keeps its lengths."""

    def commit(self, verdict: Verdict) -> None:
        """Add the accepted path of the last tree to the cache."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, (...) int64 -> (..., hidden)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states, (..., hidden) -> (..., vocab)."""

    def narrow_head(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """The head restricted to some tokens, (n,) int64: a function (..., hidden) -> (..., n)."""
