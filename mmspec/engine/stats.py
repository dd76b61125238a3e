"""Statistics of decode steps, under vLLM's per-request names, step times, and records of trees and log probabilities.

Device times come from CUDA events on CUDA and from the host's clock elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from mmspec.core.target import TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict

Origin = Literal["first", "accepted", "bonus", "plain"]
_COUNTS = ("prompt_tokens", "cached_tokens", "generated_tokens", "spec_steps", "draft_tokens", "accepted_draft_tokens")
_SUMMED = (*(f"num_{name}" for name in _COUNTS), "num_rejected_outputs")


@dataclass
class Stats:
    """Statistics of one sequence. Times are in seconds, shared by the rows of a batch.

    ``draft_seconds`` and ``verify_seconds`` are device times, between events on CUDA. ``commit_seconds`` is the rest of
    the steps' wall-clock time.

    A step is one verify pass after the prefill; the bonus token counts as emitted, not as a draft. As in vLLM,
    ``num_spec_tokens`` is the maximum number of drafts that a step could accept, here the depth of the deepest tree:
    ``1 <= mean_acceptance_length <= num_spec_tokens + 1``.

    ``num_rejected_outputs`` counts earlier outputs that ``grammar_aligned`` rejected. Only ``wall_seconds`` and
    ``time_to_first_token`` include them.

    ``drafter_error`` is the name and error of a drafter that failed; later steps were decoded without it.

    ``lossless`` is False if drafts that the target would not have chosen may have been accepted.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_generated_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_spec_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    wall_seconds: float = 0.0
    time_to_first_token: float = 0.0
    lossless: bool = True
    num_rejected_outputs: int = 0
    drafter_error: str = ""

    def record_step(self, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Record one step of a tree with ``drafted`` draft tokens; ``emitted`` excludes tokens after a stop."""
        self.num_spec_tokens = max(self.num_spec_tokens, depth)
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.num_generated_tokens += emitted
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1
        self.accept_lengths.append(emitted)

    def record_prefill(self, cached: int, emitted: int, seconds: float, waited: float) -> None:
        """Record the prefill and the first token: prompt tokens in the prefix cache, emitted tokens, seconds of the
        prefill, and seconds since the submission."""
        self.num_cached_tokens, self.num_generated_tokens, self.prefill_seconds = cached, emitted, seconds
        self.time_to_first_token = self.wall_seconds = waited

    def record_times(self, draft: float, verify: float, wall: float) -> None:
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.commit_seconds += wall - draft - verify

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus token included."""
        return sum(self.accept_lengths) / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding throughput, without prefill and first token."""
        seconds = self.wall_seconds - self.time_to_first_token
        return sum(self.accept_lengths) / seconds if seconds > 0 else 0.0

    @classmethod
    def combined(cls, parts: Iterable[Stats]) -> Stats:
        """Sum the counts of several sequences. Times are left out, as sequences share them."""
        whole = cls()
        for part in parts:
            for name in _SUMMED:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            whole.num_spec_tokens = max(whole.num_spec_tokens, part.num_spec_tokens)
            counts = zip_longest(whole.acceptance_histogram, part.acceptance_histogram, fillvalue=0)
            whole.acceptance_histogram = [a + b for a, b in counts]
            whole.accept_lengths += part.accept_lengths
            whole.lossless = whole.lossless and part.lossless
            whole.drafter_error = whole.drafter_error or part.drafter_error
        return whole

    def to_dict(self) -> dict[str, float | int | str | list[int]]:
        """All statistics, including derived statistics, as JSON values."""
        derived = ("mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second")
        return {**{name: getattr(self, name) for name in derived}, **vars(self)}


class StepTimer:
    """Named marks of one step, on the device's stream and on the host's clock. The first mark is ``begin``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, tuple[torch.cuda.Event | None, float]] = {}
        self.mark("begin")

    def mark(self, name: str) -> None:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks[name] = event, perf_counter()

    def seconds(self, start: str, end: str) -> float:
        """Seconds of the device between two marks, after the host has synchronised."""
        (begun, before), (ended, after) = self._marks[start], self._marks[end]
        return after - before if begun is None or ended is None else begun.elapsed_time(ended) / 1000.0

    def since(self, name: str) -> float:
        """Seconds of the host since a mark."""
        return perf_counter() - self._marks[name][1]


@dataclass(frozen=True)
class TreeRecord:
    """Verified tree of one sequence in one step.

    Attributes:
        tokens, parents: of each node, root first, with parent -1.
        path: nodes of the accepted path, root first. The step emits their tokens without the root's, then the bonus.
        probs: the target's probability of each node's token given its parent, before processors; 1 for the root.
        bonus_prob: the target's probability of the bonus token.
        guesses: the drafter's probability of each node given its parent; None if the drafter has no probabilities.
        texts: each node's text, with leading blanks; a part of a character is U+FFFD. Empty without a tokenizer.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    bonus: int
    probs: list[float]
    bonus_prob: float
    guesses: list[float] | None = None
    texts: list[str] = field(default_factory=list)
    bonus_text: str = ""


def record_tree(
    tree: TokenTree, row: int, verdict: Verdict, output: TargetOutput, token_bytes: Callable[[int], bytes] | None = None
) -> TreeRecord:
    """Record one row of a verified tree; ``output`` is the verify pass's output."""
    path, emitted = verdict.host[row]
    nodes, logits, bonus = tree.drafted[row] + 1, output.logits[row], emitted[-1]  # padding is at the end
    tokens, parents = tree.tokens[row, :nodes], tree.parents[row, :nodes]
    norm = logits.float().logsumexp(-1)
    above = parents[1:]
    probs = (logits[above, tokens[1:]].float() - norm[above]).exp().tolist()
    last = path[-1]
    bonus_prob = float((logits[last, bonus].float() - norm[last]).exp())
    up = parents.tolist()
    along = [1.0, *(tree.path_probs[row][: nodes - 1] if tree.log_probs is not None else ())]
    shown = len(along) == nodes > 1
    guesses = [1.0] + [along[i] / along[up[i]] for i in range(1, nodes)] if shown else None
    ids = tokens.tolist()
    texts = [token_bytes(token).decode(errors="replace") for token in (*ids, bonus)] if token_bytes else [""]
    return TreeRecord(ids, up, path, bonus, [1.0, *probs], bonus_prob, guesses, texts[:-1], texts[-1])


def token_origins(trees: Iterable[TreeRecord]) -> list[tuple[Origin, int]]:
    """Origin and step of an answer's tokens, from all its trees; more than the answer has, if it stopped within a step.

    Origins are "first" (from the prefill, step 0), "accepted" (a draft token), "bonus" (the target's token after them)
    or "plain" (decoded without draft tokens).
    """
    origins: list[tuple[Origin, int]] = [("first", 0)]
    for number, tree in enumerate(trees, start=1):
        origins += [("accepted", number)] * (len(tree.path) - 1)
        origins.append(("bonus" if len(tree.tokens) > 1 else "plain", number))
    return origins


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of one emitted token, before logits processors and sampling parameters, as with vLLM's
    default ``logprobs_mode="raw_logprobs"``.

    Attributes:
        top: the most probable tokens at this position with their log probabilities, best first.
        text_offset: characters of the answer before this token, stop strings included; 0 in the reasoning.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    text_offset: int = 0


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities of emitted tokens.

    Args:
        logits: (tokens, vocab), raw logits at the nodes before the tokens.
        top: number of most probable tokens to list at each position.
    """
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    own = [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
    return [
        TokenLogprob(token, logprob, list(zip(ids[place], values[place], strict=True)))
        for place, (token, logprob) in enumerate(zip(tokens, own, strict=True))
    ]
