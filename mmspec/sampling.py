"""From the target's logits to its choices: the one place where logits processors and sampling parameters act.

Every node of a tree has its own token history (prompt, emitted tokens, the path down to the node), so that repetition
penalties and n-gram bans see at each node exactly what plain decoding would have shown them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from mmspec.checks import Checked, Rule, is_text, number, option, optional, whole
from mmspec.errors import UserError
from mmspec.histories import Histories
from mmspec.ops import quantile
from mmspec.processors import OnTrees, known, on_trees
from mmspec.transfer import on_device
from mmspec.tree import TokenTree
from mmspec.verify import Verdict, verify, verify_greedy

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
    """Chooses tokens as plain decoding would.

    The n-th new token of a row is drawn with the n-th random number of that row, at whichever node of a tree it is
    decided: a path passes one node per depth, so sharing the number among the nodes of a depth biases nothing, and the
    same seed gives the same tokens whatever was drafted. (Drawn trees need randomness of their own, and give up the
    latter.)

    Args:
        processors: applied in order to float32 logits, each row with its own history. Those that ``mmspec.processors``
            does not know are shown rows of equal length, for which the host reads the tree: a step then waits for the
            device once more. So it does for transformers' eta and top-h, which check their own probabilities there.
        do_sample: draw from the processed distribution; False takes its argmax.
        generator: the source of randomness, on the device of the logits.

    Raises:
        UserError: a processor that keeps state or depends on the row index cannot be exact on trees.
    """

    def __init__(
        self,
        processors: Sequence[hf.LogitsProcessor] = (),
        *,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
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
        self._uniforms = torch.empty(0)  # (batch, new tokens), drawn in blocks as the rows grow
        self._prompt_lengths: list[int] = []
        self._histories = Histories()
        self._on_trees: list[OnTrees] = []  # the processors for this vocabulary and device, once asked for
        self._known = all(map(known, self.processors))

    def first(self, history: list[list[int]], logits: Tensor) -> Tensor:
        """The token after the prompt. ``history``: token ids per row; ``logits``: (batch, 1, vocab) -> (batch,)."""
        batch = logits.shape[0]
        root_only = TokenTree.root(torch.zeros(batch, dtype=torch.long, device=logits.device))
        self._prompt_lengths, self._histories, self._on_trees = [], Histories(), []
        return self._choose(history, root_only, self._process(history, root_only, logits))[:, 0]

    def verify(self, history: list[list[int]], tree: TokenTree, logits: Tensor) -> Verdict:
        """Judge a tree. ``history``: prompt and emitted tokens of each row, the root being the last; ``logits``:
        (batch, nodes, vocab) raw logits of the target."""
        scores = self._process(history, tree, logits)
        if self.do_sample and tree.draft_probs is not None:
            return verify(tree, scores.softmax(-1), generator=self.generator)
        return verify_greedy(tree, self._choose(history, tree, scores))

    def _choose(self, history: list[list[int]], tree: TokenTree, scores: Tensor) -> Tensor:
        """(batch, nodes) the token after each node."""
        if not self.do_sample:
            return scores.max(-1).indices  # what argmax gives, ties included; on a CPU in a third of its time
        if len(self._prompt_lengths) != len(history):  # new rows
            self._prompt_lengths = [len(row) for row in history]
            self._uniforms = torch.empty(len(history), 0, device=scores.device)
        new = [len(row) - length for row, length in zip(history, self._prompt_lengths, strict=True)]
        while self._uniforms.shape[1] <= max(new) + tree.max_depth:
            block = torch.rand(len(new), _BLOCK, generator=self.generator, device=scores.device)
            self._uniforms = torch.cat([self._uniforms, block], dim=1)
        place = on_device(new, scores.device)[:, None] + (tree.depth if tree.nodes > 1 else 0)
        return quantile(scores.softmax(-1), self._uniforms.gather(1, place))

    def _process(self, history: list[list[int]], tree: TokenTree, logits: Tensor) -> Tensor:
        if not self.processors:
            return logits.float() if self.do_sample else logits
        if not self._known:
            return self._by_length(history, tree, logits)
        scores, seen = logits.to(torch.float32, copy=True), self._histories.at(history, tree)
        self._on_trees = self._on_trees or [on_trees(processor, scores) for processor in self.processors]
        for process in self._on_trees:
            scores = process(seen, scores)
        return scores

    def _by_length(self, history: list[list[int]], tree: TokenTree, logits: Tensor) -> Tensor:
        scores = logits.to(torch.float32, copy=True)
        for ids, row, node in _histories_by_length(history, tree):
            group = scores[row, node]
            for processor in self.processors:
                group = _for_rows(processor, row)(ids, group)
            scores[row, node] = group.to(scores.dtype)
        return scores


def _for_rows(processor: hf.LogitsProcessor, rows: Tensor) -> hf.LogitsProcessor:
    """The processor as it must be called when its i-th input belongs to batch row ``rows[i]``."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # how much padding each row's repetition penalty must not count
        bound = copy(processor)
        bound.prompt_ignore_length = ignored.to(rows.device)[rows]  # type: ignore[attr-defined]
        return bound
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed, index = processor._prefix_allowed_tokens_fn, rows.tolist()
        return hf.PrefixConstrainedLogitsProcessor(lambda i, ids: allowed(index[i], ids), num_beams=1)
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
