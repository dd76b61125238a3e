"""Sampler of a request, and sampling state of its sequences: logits processors and random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from mmspec.errors import UserError
from mmspec.ops.transfer import on_device
from mmspec.sampling.grammar import AfterReasoning, BeyondEndError, Grammar, TriggeredGrammar
from mmspec.sampling.processors import TreeProcessor, Warper, copy_for_row, tree_form

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

LogitsProcessor = hf.LogitsProcessor | TreeProcessor
Constraint = Grammar | TriggeredGrammar | AfterReasoning

_BLOCK = 64  # random numbers per row and draw
_MOST_REJECTED = 1000  # maximum rejected outputs per sequence


class Sampler:
    """Samples tokens of one request: logits processors, then argmax or sampling.

    Args:
        processors: applied in order to float32 logits, each row with its own history. Custom processors (neither
            transformers' nor tree processors) run path by path, with a warning: one call and host sync per emitted
            token instead of one call for all nodes, up to EOS. They may be stateful; each sequence has its own copies.
            transformers' eta and top-h processors also sync with the host.
        copies: False uses the processors themselves, which keep their records; requires a single sequence.
        do_sample: sample from the processed distribution; False takes its argmax.
        generator: random generator; None uses torch's global generator.
        key: samplers with equal keys have equal processors and are batched; None disables batching.
        constraint: masks the raw logits, before all processors.
        lossy: negative log probability up to which drafts are accepted, see ``SamplingParams``; 0 is lossless.
        aligned: the constraint rejects outputs instead of masking, see ``Alignment``.
        least: new tokens that the processors require before EOS; a constraint that allows only EOS earlier is an error.

    Attributes:
        forms: tree implementation of each processor (see ``tree_form``).
        by_path: whether all processors run path by path, because any of them does or outputs are rejected.
        warpers: trailing ``forms`` that ignore the history.
        before_warpers: all ``forms`` before the warpers.

    Raises:
        UserError: a processor depends on more than a row's own tokens; ``lossy`` with sampling, or ``aligned`` without.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor] = (),
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


class Matcher:
    """Runs a tree processor on one sequence and its drafted trees.

    Args:
        processor: tree processor, shared with other sequences.
        prompt: prompt tokens of the sequence.
        least: minimum number of new tokens; a grammar that ends earlier is an error.
    """

    def __init__(self, processor: Any, prompt: Sequence[int], least: int = 0) -> None:
        self._processor = processor
        self._name = type(processor).__name__
        self._state = processor.start(list(prompt))
        self._first, self._least = len(prompt), least
        self._length = len(prompt)  # tokens in the state, without drafts
        self._drafts: list[int] = []  # draft tokens in the state, after ``_length`` tokens
        self._before: list[tuple[Any, ...]] = []  # per draft: (previous state,), or () if changed in place
        self._to_undo = 0  # in-place tokens still to be undone
        self._masks: dict[int, Tensor] = {}  # by node of the last tree
        self._children: list[dict[int, int]] = []

    def walk(
        self, history: Sequence[int], children: list[dict[int, int]], vocab: int
    ) -> tuple[dict[int, Tensor], dict[int, Exception]]:
        """Masks of allowed tokens by node, and exceptions by failed node.

        Subtrees of forbidden and failed nodes are skipped.

        Args:
            history: all tokens of the sequence, up to the root.
            children: ``{token: node}`` by node.

        Raises:
            Exception: the processor failed on tokens emitted since the last walk.
        """
        self._follow(history)
        masks: dict[int, Tensor] = {}
        failures: dict[int, Exception] = {}
        waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while waiting:
            node, path = waiting.pop()
            try:
                self._go(path)
                masks[node] = self._mask(vocab)
            except Exception as error:
                failures[node] = error
                continue
            for token, child in reversed(children[node].items()):
                if _allows(masks[node], token):
                    waiting.append((child, (*path, token)))
                else:
                    failures[child] = self._forbidden(token)
        self._go(())
        self._settle()
        self._masks, self._children = masks, children
        return masks, failures

    def at(self, history: Sequence[int], path: Sequence[int]) -> Any:
        """State after the drafts ``path`` that follow ``history``; valid until the next call."""
        self._follow(history)
        self._go(path)
        self._settle()
        return self._state

    def allowed(self, history: Sequence[int], path: Sequence[int], vocab: int) -> Tensor:
        """(vocab,) bool on the CPU, allowed tokens after the drafts ``path`` that follow ``history``."""
        self.at(history, path)
        return self._mask(vocab)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits processor interface of plain decoding: ``input_ids`` (1, length) int64, ``scores`` (1, vocab)."""
        masks, failures = self.walk(input_ids[0].tolist(), [{}], scores.shape[-1])
        if failures:
            raise failures[0]
        return scores.masked_fill(~on_device(masks[0], scores.device), -torch.inf)

    def _follow(self, history: Sequence[int]) -> None:
        """Advance the state by the tokens emitted since the last call."""
        if len(history) == self._length:
            return
        node: int | None = 0
        for token in history[self._length :]:
            if node in self._masks:
                if not _allows(self._masks[node], token):
                    raise self._forbidden(token)
                node = self._children[node].get(token)
        self._go(history[self._length :])
        self._drafts, self._before, self._length = [], [], len(history)
        self._masks, self._children = {}, []

    def _go(self, path: Sequence[int]) -> None:
        """Move the state to other drafts: undo back to the common prefix, then advance."""
        common = 0
        for drafted, token in zip(self._drafts, path, strict=False):
            if drafted != token:
                break
            common += 1
        while len(self._drafts) > common:
            self._back()
        for token in path[common:]:
            self._advance(token)

    def _advance(self, token: int) -> None:
        self._settle()
        after = self._processor.advance(self._state, token)
        self._drafts.append(token)
        self._before.append(() if after is None else (self._state,))
        if after is not None:
            self._state = after

    def _back(self) -> None:
        """Undo the last draft: restore the previous state, or defer an in-place undo until the state is used."""
        self._drafts.pop()
        if before := self._before.pop():
            self._state, self._to_undo = before[0], 0
        else:
            self._to_undo += 1

    def _settle(self) -> None:
        if self._to_undo:
            self._processor.undo(self._state, self._to_undo)
            self._to_undo = 0

    def _mask(self, vocab: int) -> Tensor:
        self._settle()
        allowed = self._processor.mask(self._state)
        if allowed is None:
            return torch.ones(vocab, dtype=torch.bool)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.ndim != 1 or len(allowed) > vocab:
            shape = f"{allowed.dtype} {tuple(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
            raise UserError(f"{self._name}.mask must return a bool tensor of at most ({vocab},): got {shape}")
        if not allowed.any():
            raise UserError(f"{self._name}.mask must allow at least one token: got none")
        new = self._length + len(self._drafts) - self._first
        if new < self._least and self._processor.only_ends(allowed):
            raise BeyondEndError(self._processor.kind, new, self._least)
        mask = torch.zeros(vocab, dtype=torch.bool)  # copied, as a processor may reuse its tensor
        mask[: len(allowed)] = allowed
        return mask

    def _forbidden(self, token: int) -> UserError:
        return UserError(f"{self._name} forbids token {token}, the only one allowed by other logits processors")


def _allows(mask: Tensor, token: int) -> bool:
    return token < len(mask) and bool(mask[token])


class RejectedError(Exception):
    """The sampled token is forbidden by the grammar: the output must be restarted."""


@dataclass(slots=True)
class _Beginning:
    """Trie node of an output prefix.

    Attributes:
        prob: probability of the prefix's last token.
        weight: w(x), see ``Alignment``.
        rest: total probability of allowed tokens not in ``children``; None before the first draw.
        children: longer prefixes by sampled, allowed token.
    """

    prob: float = 1.0
    weight: float = 1.0
    rest: float | None = None
    children: dict[int, _Beginning] = field(default_factory=dict)


class Alignment:
    """Grammar-aligned decoding (arXiv 2405.21047) of one sequence: samples the model's distribution given the grammar.

    Grammar masks distort this distribution, as they renormalise each token separately: they ignore how probably a
    prefix can be completed within the grammar. Here, tokens are drawn without masks, and an output is rejected at its
    first forbidden token and restarted (adaptive rejection sampling; accepted outputs are exact). Rejected
    continuations are excluded from later attempts: each prefix x of a rejected output has a weight, the probability
    that its continuation is not known to violate the grammar,

        w(x) = sum over tokens t of p(t | x) w(x t),    w = 0 after a forbidden token, w = 1 for unexplored prefixes,

    and later outputs draw t with probability proportional to p(t | x) w(x t).
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._path = [_Beginning()]  # prefixes of the current output, by length

    def weighted(self, length: int, scores: Tensor, allowed: Tensor) -> Tensor:
        """Reweight the scores for the next draw; pass the sampled token to ``take``.

        Args:
            length: number of output tokens so far.
            scores: (1, vocab) float32, after all processors.
            allowed: (vocab,) bool, the grammar's mask.
        """
        del self._path[length + 1 :]
        here, weights = self._path[length], on_device(allowed, scores.device).double()
        self._probs = scores[0].double().softmax(-1) * weights
        self._allowed = allowed
        if here.rest is None:
            return scores
        for token, below in here.children.items():
            weights[token] = below.weight
        return scores + weights.log().to(scores.dtype)

    def take(self, token: int) -> bool:
        """Append a sampled token; returns whether the grammar allows it."""
        here, probs, allowed = self._path[-1], self._probs, bool(self._allowed[token])
        if allowed:
            self._path.append(here.children.setdefault(token, _Beginning()))
            self._path[-1].prob = float(probs[token])
        probs[list(here.children)] = 0.0
        here.rest = float(probs.sum())  # summed without cancellation: exactly 0 after all tokens were drawn
        return allowed

    def reject(self) -> None:
        """Update the weights along the rejected output, from its last token to its first. Raises ``UserError``: no
        output is left, or too many were rejected."""
        self.rejected += 1
        for here in reversed(self._path):
            assert here.rest is not None
            here.weight = here.rest + sum(below.prob * below.weight for below in here.children.values())
        if not self._path[0].weight:
            raise UserError("no output that logits processors and sampling parameters leave satisfies the grammar")
        if self.rejected >= _MOST_REJECTED:
            raise UserError(
                "an output of the model must satisfy the grammar with grammar_aligned: "
                f"{_MOST_REJECTED} did not, and of others the probability is at most {self._path[0].weight:.1g}"
            )


class SamplingState:
    """Sampling state of one sequence.

    The n-th new token uses the n-th random number of its sequence at every node of that depth. A path has one node per
    depth, so this adds no bias, and a seed gives the same tokens for all drafts. Sampled trees need further random
    numbers, so that their tokens also depend on the drafts.

    Args:
        history: prompt and emitted tokens.
        index: row in the request, which some processors use.
        generator: random generator of the sequence; None uses the sampler's.

    Attributes:
        constraint: state of the sampler's grammar; None without a grammar.
        alignment: rejected outputs; None without ``grammar_aligned``.
    """

    def __init__(
        self, history: list[int], sampler: Sampler, index: int = 0, generator: torch.Generator | None = None
    ) -> None:
        self.history, self.sampler, self.index = history, sampler, index
        self.generator = generator or sampler.generator
        self.prompt_length = len(history)
        self.alignment = Alignment() if sampler.aligned else None
        self._uniforms, self._used = torch.empty(0, dtype=torch.float32), 0  # used also by rejected outputs
        self._begin()

    def _begin(self) -> None:
        constraint = self.sampler.constraint
        least = 0 if self.sampler.aligned else self.sampler.least  # with alignment, a longer output may follow
        self.constraint = None if constraint is None else Matcher(constraint, self.history, least)
        self._own: dict[int, Any] = {}  # by processor index: state of this sequence

    def restart(self) -> None:
        """Restart a rejected output with fresh random numbers."""
        self._used += len(self.history) - self.prompt_length + 1
        self.history = self.history[: self.prompt_length]
        self._begin()

    def ends(self, token: int, length: int) -> bool:
        """Whether the output ends with this token at this length, so that no processor is called after it."""
        return False

    def drawn(self, count: int, device: torch.device) -> Tensor:
        """(count,) random numbers, generated on the host so that a seed gives equal numbers on every device."""
        where = torch.device("cpu") if self.generator is None else self.generator.device
        numbers = torch.rand(count, dtype=torch.float32, generator=self.generator, device=where)
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
