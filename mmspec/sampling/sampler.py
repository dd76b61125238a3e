"""Sampling of a request and of its sequences: logits processors, random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.sampling.aligned import Alignment
from mmspec.sampling.grammar import Grammar
from mmspec.sampling.matcher import Matcher
from mmspec.sampling.processors import TreeProcessor, Warper, copy_for_row, tree_form
from mmspec.sampling.trigger import TriggeredGrammar

# Processors that combine rows of scores, call the model, or use encoder inputs.
_UNSUPPORTED = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.ClassifierFreeGuidanceLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
    hf.WhisperNoSpeechDetection,
    hf.DiaClassifierFreeGuidanceLogitsProcessor,
    hf.DiaEOSChannelFilterLogitsProcessor,
    hf.DiaEOSDelayPatternLogitsProcessor,
)

Processor = hf.LogitsProcessor | TreeProcessor
Constraint = Grammar | TriggeredGrammar

_BLOCK = 64  # random numbers per row and draw


class Sampler:
    """Sampler of one request: logits processors, then argmax or sampling.

    Args:
        processors: applied in order to float32 logits, each row with its own history. Processors that are neither
            transformers' own nor tree processors run path by path (with a warning): one call and host sync per emitted
            token instead of one call for all nodes, up to an end of sequence. They may be stateful; each sequence has
            its own copies. transformers' eta and top-h sync with the host, too.
        copies: False if there is one sequence, which uses the processors themselves: they keep what they record.
        do_sample: sample from the processed distribution; False takes its argmax.
        generator: random generator; None is torch's global one.
        key: samplers with equal keys have equal processors and are batched; None disables this.
        constraint: masks the raw logits, before all processors.
        lossy: negative log probability up to which drafts are accepted, see ``SamplingParams``; 0 is lossless.
        aligned: the constraint rejects outputs instead, see ``mmspec.sampling.aligned``.
        least: number of new tokens that the processors require before an EOS token: it is an error if the constraint
            allows only that earlier.

    Attributes:
        forms: tree implementation of each processor (see ``tree_form``).
        by_path: whether any processor runs path by path, or outputs are rejected; all processors then do.
        warpers: the last of ``forms`` that ignore the history.
        before_warpers: the other ones.

    Raises:
        UserError: a processor depends on more than a row's own tokens, ``lossy`` does not go with sampling, or
            ``aligned`` with greedy decoding.
    """

    def __init__(
        self,
        processors: Sequence[Processor] = (),
        *,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        key: Hashable = None,
        constraint: Constraint | None = None,
        lossy: float = 0.0,
        aligned: bool = False,
        copies: bool = True,
        least: int = 0,
    ) -> None:
        if lossy and do_sample:
            raise UserError(f"lossy goes with greedy decoding, temperature 0: got lossy {lossy:g} and sampling")
        if aligned and not do_sample:
            raise UserError("grammar_aligned goes with sampling, a temperature above 0: got greedy decoding")
        self.lossy, self.aligned, self.copies, self.least = lossy, aligned, copies, least
        self.processors = list(processors)
        self.constraint = constraint
        self.forms = [tree_form(processor) for processor in processors]
        self.by_path = aligned or None in self.forms
        self.warpers: list[Warper] = []
        for form in reversed(self.forms):
            if aligned or not isinstance(form, Warper):  # weights come after all processors
                break
            self.warpers.insert(0, form)
        self.before_warpers = self.forms[: len(self.forms) - len(self.warpers)]
        for processor, form in zip(self.processors, self.forms, strict=True):
            if form is None and isinstance(processor, _UNSUPPORTED):
                raise UserError(
                    f"logits processors must depend on a row's own tokens only: {type(processor).__name__} does not, "
                    "use model.generate for it"
                )
            if form is None:
                _warn_once(f"{type(processor).__module__}.{type(processor).__qualname__}")
        self.do_sample = do_sample
        self.generator = generator
        self.key = (object() if processors and key is None else key, do_sample, lossy, aligned)

    def generators(self, rows: int) -> list[torch.Generator | None]:
        """One generator per row, so that the order of rows does not affect their tokens."""
        if not self.do_sample or (rows == 1 and self.generator is not None):
            return [self.generator] * rows
        device = torch.device("cpu") if self.generator is None else self.generator.device
        seeds = torch.randint(1 << 62, (rows,), generator=self.generator, device=device).tolist()
        return [torch.Generator().manual_seed(seed) for seed in seeds]


@cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"{name} runs path by path, which is slow, in a copy per sequence (the only one of generate: itself): make it "
        "a mmspec.TreeProcessor, or register a function that returns one as an entry point of mmspec.processors",
        stacklevel=3,
    )


class Sampled:
    """Sampling state of one sequence.

    The n-th new token uses the n-th random number of its sequence at every node of that depth. A path has one node per
    depth, so this adds no bias, and a seed gives the same tokens whatever was drafted. Drawn trees need further random
    numbers, so their tokens also depend on the drafts.

    Args:
        history: prompt and emitted tokens.
        index: row in the request, which some processors use.
        generator: random generator of the sequence; None uses the sampler's.

    Attributes:
        constraint: state of the sampler's grammar, if it has one.
        alignment: what was rejected; None if the grammar rejects no outputs.
        failures: exceptions of processors by node of the last tree; only those on the accepted path take effect.
        error: exception that ended the sequence.
    """

    def __init__(
        self, history: list[int], sampler: Sampler, index: int = 0, generator: torch.Generator | None = None
    ) -> None:
        self.history, self.sampler, self.index = history, sampler, index
        self.generator = generator or sampler.generator
        self.prompt_length = len(history)
        self.alignment = Alignment() if sampler.aligned else None
        self.failures: dict[int, Exception] = {}
        self.error: Exception | None = None
        self._uniforms, self._used = torch.empty(0), 0  # used by rejected outputs
        self._begin()

    def _begin(self) -> None:
        constraint = self.sampler.constraint
        least = 0 if self.sampler.aligned else self.sampler.least  # other outputs may be longer
        self.constraint = None if constraint is None else Matcher(constraint, self.history, least)
        self._own: dict[int, Any] = {}  # by processor index: state of this sequence

    def restart(self) -> None:
        """Begin a rejected output anew, with the random numbers that follow those it has used."""
        self._used += len(self.history) - self.prompt_length + 1
        self.history = self.history[: self.prompt_length]
        self._begin()

    def ends(self, token: int, length: int) -> bool:
        """Whether the output ends with a token at this length, so that no processor is to be called after it."""
        return False

    def drawn(self, count: int, device: torch.device) -> Tensor:
        """(count,) random numbers, generated on the host: a seed gives the same numbers on every device."""
        where = torch.device("cpu") if self.generator is None else self.generator.device
        numbers = torch.rand(count, generator=self.generator, device=where)
        return numbers if where == device else on_device(numbers.cpu(), device)

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """(count,) random numbers for the next tokens."""
        first = self._used + len(self.history) - self.prompt_length
        while len(self._uniforms) < first + count:
            block = self.drawn(_BLOCK, device)
            self._uniforms = torch.cat([self._uniforms, block]) if len(self._uniforms) else block
        return self._uniforms[first : first + count]

    def own(self, place: int) -> Any:
        """The sequence's ``Matcher`` or copy of processor ``place``."""
        if place not in self._own:
            processor, form = self.sampler.processors[place], self.sampler.forms[place]
            if isinstance(form, TreeProcessor):
                self._own[place] = Matcher(form, self.history[: self.prompt_length])
            else:
                self._own[place] = copy_for_row(processor, self.index) if self.sampler.copies else processor
        return self._own[place]
