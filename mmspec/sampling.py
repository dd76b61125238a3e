"""From the target's logits to its choices: the one place where logits processors and sampling parameters act.

Every node of a tree has its own token history (prompt, emitted tokens, the path down to the node), so that repetition
penalties and n-gram bans see at each node exactly what plain decoding would have shown them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec import ops
from mmspec.checks import Checked, Rule, is_text, number, option, optional, whole
from mmspec.errors import UserError
from mmspec.histories import Histories
from mmspec.processors import OnTrees, known, on_trees
from mmspec.tree import TokenTree

# These keep state between calls or pair rows of scores with other rows; neither survives being asked about many nodes
# at once.
_UNSUPPORTED = tuple(
    getattr(hf, name)
    for name in [
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection",
        "AlternatingCodebooksLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    ]
    if hasattr(hf, name)
)

_COLDEST = 1e-4  # logits divided by less may overflow
_BLOCK = 64  # random numbers drawn at a time per row
_STOP = Rule(
    "text or a list of texts, none of them empty",
    lambda stop: stop is None or all(is_text(text) and text for text in ([stop] if isinstance(stop, str) else stop)),
)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How an answer is decoded. Names and meanings are those of transformers' generation config where it has them.

    Attributes:
        temperature: 0 is greedy decoding; above 0, logits are divided by it and sampled.
        top_p: keep the smallest set of tokens whose probability reaches this share, in (0, 1]; 1 keeps all.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one, in [0, 1].
        repetition_penalty: above 1 makes tokens of the prompt and the output less probable; 1 changes nothing.
        max_new_tokens: length of the answer at most, in tokens.
        stop: text or texts that end the answer, which is cut before them.
        seed: of the draws; None takes torch's global generator.

    Raises:
        UserError: a value of another type or out of range.
    """

    temperature: float = option(0.0, number(f"0 or >= {_COLDEST}", lambda t: t == 0 or t >= _COLDEST))
    top_p: float = option(1.0, number("in (0, 1]", lambda p: 0 < p <= 1))
    top_k: int = option(0, whole(0))
    min_p: float = option(0.0, number("in [0, 1]", lambda p: 0 <= p <= 1))
    repetition_penalty: float = option(1.0, number("> 0", lambda penalty: penalty > 0))
    max_new_tokens: int = option(256, whole(1, 1 << 31))
    stop: str | Sequence[str] | None = option(None, _STOP)
    seed: int | None = option(None, optional(whole(-(1 << 63), (1 << 64) - 1)))  # what torch's generators take

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def do_sample(self) -> bool:
        return self.temperature > 0

    def sampler(self, custom: Sequence[hf.LogitsProcessor] = (), device: torch.device | str = "cpu") -> Sampler:
        """What chooses the tokens; ``custom`` as for ``processors``, ``device`` is that of the logits."""
        values = self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty
        return Sampler(
            self.processors(custom),
            do_sample=self.do_sample,
            generator=None if self.seed is None else torch.Generator(device).manual_seed(self.seed),
            key=None if custom else values if self.do_sample else self.repetition_penalty,
        )

    def processors(self, custom: Sequence[hf.LogitsProcessor] = ()) -> LogitsProcessorList:
        """The processors that transformers' ``generate`` would build from the same parameters, in its order: ``custom``
        ones see logits before temperature and filters do."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        chain.extend(custom)
        if not self.do_sample:
            return chain
        if self.temperature != 1.0:
            chain.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chain.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            chain.append(hf.MinPLogitsWarper(self.min_p))
        return chain


class Sampler:
    """How the tokens of one request are chosen: logits processors, then the argmax or a draw.

    Args:
        processors: applied in order to float32 logits, each row with its own history. Those that ``mmspec.processors``
            does not know are called with rows of equal length, for which the host reads the tree: a step then waits for
            the device once more. So it does for transformers' eta and top-h, which check their own probabilities there.
        do_sample: draw from the processed distribution; False takes its argmax.
        generator: the source of randomness, on the device of the logits; None is torch's global one.
        key: samplers of equal keys have equal processors, which then run once for all of their rows; None: no other
            sampler's are equal.

    Raises:
        UserError: a processor that keeps state or depends on the row index cannot be exact on trees.
    """

    def __init__(
        self,
        processors: Sequence[hf.LogitsProcessor] = (),
        *,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        key: Hashable = None,
    ) -> None:
        for processor in processors:
            if isinstance(processor, _UNSUPPORTED):
                raise UserError(
                    f"logits processors must depend on a row's own tokens only: {type(processor).__name__} does not, "
                    "use model.generate for it"
                )
        self.processors = list(processors)
        self.do_sample = do_sample
        self.generator = generator
        self.key = (id(self) if processors and key is None else key, do_sample)


class Sampled:
    """A sequence as far as the choice of its tokens is concerned.

    The n-th new token is drawn with the n-th random number of its sequence, at whichever node of a tree it is decided:
    a path passes one node per depth, so sharing the number among the nodes of a depth biases nothing, and the same seed
    gives the same tokens whatever was drafted. (Drawn trees need further random numbers: there the tokens depend on the
    drafts, too.)

    Args:
        history: its tokens, the prompt's and the emitted ones.
        sampler: how they are chosen.
        index: its row in the request, on which some processors depend.

    Attributes:
        prompt_length: tokens of the history when it began.
        error: what its processors raised.
    """

    def __init__(self, history: list[int], sampler: Sampler, index: int = 0) -> None:
        self.history, self.sampler, self.index = history, sampler, index
        self.prompt_length = len(history)
        self.error: Exception | None = None
        self._uniforms = torch.empty(0)

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """(count,) random numbers of the next tokens."""
        first = len(self.history) - self.prompt_length
        while len(self._uniforms) < first + count:
            block = torch.rand(_BLOCK, generator=self.sampler.generator, device=device)
            self._uniforms = torch.cat([self._uniforms.to(device), block])
        return self._uniforms[first : first + count]


class BatchSampler:
    """Chooses the tokens of a batch of sequences, each as plain decoding of it alone would."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}

    def choose(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        """The target's token after each node.

        Args:
            rows: the sequences, the last token of each history being the root.
            tree: the draft.
            logits: (batch, nodes, vocab), raw logits of the target.

        Returns:
            (batch, nodes) int64. Rows whose processors raised an exception have it as ``error``; their tokens mean
            nothing.
        """
        members: dict[Hashable, list[int]] = {}
        for place, row in enumerate(rows):
            members.setdefault(row.sampler.key, []).append(place)
        self._groups = {
            key: self._groups.get(key) or _Group(rows[places[0]].sampler) for key, places in members.items()
        }
        if len(members) == 1:
            (group,) = self._groups.values()
            return group.choose(rows, tree, logits)
        choices = torch.zeros_like(tree.tokens)
        for key, places in members.items():
            chosen = [rows[place] for place in places]
            choices[places] = self._groups[key].choose(chosen, tree.select(places), logits[places])
        return choices


class _Group:
    """Rows whose logits pass through the same processors."""

    def __init__(self, sampler: Sampler) -> None:
        self._processors, self._do_sample = sampler.processors, sampler.do_sample
        self._histories = Histories()
        self._on_trees: list[OnTrees] = []  # the processors for this vocabulary and device, once they are called
        self._known = all(map(known, self._processors))

    def choose(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        try:
            scores = self._process(rows, tree, logits)
        except Exception as error:
            for row in rows:
                row.error = error
            return torch.zeros_like(tree.tokens)
        if not self._do_sample:
            return scores.max(-1).indices  # what argmax gives, ties included; on a CPU in a third of its time
        if tree.draft_probs is not None:
            # One number decides about each node at its parent, another draws after a node whose children are rejected.
            drawn = [torch.rand(2, tree.nodes, generator=row.sampler.generator, device=scores.device) for row in rows]
            return ops.choose_drawn(tree, scores.softmax(-1), *torch.stack(drawn, dim=1))
        uniforms = torch.stack([row.uniforms(tree.max_depth + 1, scores.device) for row in rows])
        return ops.quantile(scores.softmax(-1), uniforms.gather(1, tree.depth) if tree.nodes > 1 else uniforms)

    def _process(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        if not self._processors:
            return logits.float() if self._do_sample else logits
        if not self._known:
            return self._by_length(rows, tree, logits)
        scores, seen = logits.to(torch.float32, copy=True), self._histories.at([row.history for row in rows], tree)
        self._on_trees = self._on_trees or [on_trees(processor, scores) for processor in self._processors]
        for process in self._on_trees:
            scores = process(seen, scores)
        return scores

    def _by_length(self, rows: Sequence[Sampled], tree: TokenTree, logits: Tensor) -> Tensor:
        scores = logits.to(torch.float32, copy=True)
        for ids, at, node in _histories_by_length([row.history for row in rows], tree):
            group, indices = scores[at, node], [rows[row].index for row in at.tolist()]
            for processor in self._processors:
                group = _for_rows(processor, indices)(ids, group)
            scores[at, node] = group.to(scores.dtype)
        return scores


def _for_rows(processor: hf.LogitsProcessor, rows: list[int]) -> hf.LogitsProcessor:
    """The processor as it must be called when its i-th input belongs to row ``rows[i]`` of the request."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # how much padding each row's repetition penalty must not count
        bound = copy(processor)
        bound.prompt_ignore_length = ignored[rows]  # type: ignore[attr-defined]
        return bound
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda i, ids: allowed(rows[i], ids), num_beams=1)
    return processor


def _histories_by_length(history: list[list[int]], tree: TokenTree) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Full token histories of all valid nodes, grouped so that each group is one rectangular tensor.

    Returns one ``(ids (rows, length), row index (rows,), node index (rows,))`` for each distinct length.
    """
    device = tree.tokens.device
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    valid = tree.valid.tolist() if tree.valid is not None else None
    groups: dict[int, tuple[list[list[int]], list[int], list[int]]] = {}
    for b, prefix in enumerate(history):
        paths: list[list[int]] = []
        for i, token in enumerate(tokens[b]):
            paths.append([*paths[parents[b][i]], token] if i else prefix)
            if valid is None or valid[b][i]:
                ids, rows, nodes = groups.setdefault(len(paths[-1]), ([], [], []))
                ids.append(paths[-1])
                rows.append(b)
                nodes.append(i)
    return [tuple(torch.tensor(part, device=device) for part in group) for group in groups.values()]  # type: ignore[misc]
