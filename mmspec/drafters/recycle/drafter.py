"""Token Recycling drafter (arXiv 2408.08696): a table of the target's top candidates per context.

Every verify pass ranks successors at every node, accepted or not. The table keeps the most probable ones, and trees are
grown from it. Two differences from the paper, each with higher acceptance: contexts of two tokens take precedence over
single tokens, and an entry is a running average of the target's probabilities instead of the latest ranking, which
calibrates it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import ops
from mmspec.checks import FLAG, Checked, option, required, whole
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters import checkpoint
from mmspec.drafters.lookup import Children, LookUpDrafter
from mmspec.drafters.recycle.device import NEWEST, UNLIKELY, Recycled
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device

Context = tuple[int, int]  # the last two tokens; -1 first for single-token contexts
Ranking = dict[int, float]  # successor -> probability

_ANY = -1
_ENTRIES = 200_000  # maximum table size; the oldest entries are evicted first


@dataclass(frozen=True)
class _Settings(Checked):
    """Contents of ``config.json``."""

    top_k: int = required(whole(1, 64))
    pairs: bool = option(True, FLAG)


class Recycle(LookUpDrafter):
    """Token Recycling drafter.

    The table persists between requests until ``reset``; ``learned`` counts the steps that it has learned from. With
    static shapes it is on the device (``mmspec.drafters.recycle.device``).

    Args:
        top_k: successors per context.
        pairs: also keep contexts of two tokens; False is the paper's single-token table.
        width: maximum children per node; 1 drafts chains, None trees of any width.

    Raises:
        UserError: ``top_k`` is not an integer from 1 to 64.
    """

    def __init__(self, top_k: int = 8, pairs: bool = True, width: int | None = None) -> None:
        _Settings(top_k, pairs)
        super().__init__()  # rows are the token before the root, and the root
        self.top_k, self.pairs, self.width = top_k, pairs, width
        self._table: dict[Context, Ranking] = {}
        self._vocab: int | None = None
        self._verifier: Mapping[str, Any] | None = None
        self._drafted = False  # in this step
        self._recycled: Recycled | None = None  # device table, with static shapes
        self.learned = 0  # steps

    def __deepcopy__(self, memo: dict[int, Any]) -> Recycle:
        # Rankings are replaced, never changed: copies share them, and a server copies the table for each request.
        memo[id(self._table)] = dict(self._table)
        copied = copy.copy(self)
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Recycle:
        """Load a table written by ``save``.

        Raises:
            UserError: the folder does not contain a valid table.
        """
        settings, verifier, tensors = checkpoint.read(folder, _Settings)
        _check(tensors, settings.top_k, verifier["vocab_size"], folder)
        drafter = cls(settings.top_k, settings.pairs)
        drafter._verifier, drafter._vocab = verifier, verifier["vocab_size"]
        rows = zip(*(tensors[name].tolist() for name in ("contexts", "tokens", "probs")), strict=True)
        for (before, last), tokens, probs in rows:
            drafter._table[before, last] = {t: p for t, p in zip(tokens, probs, strict=True) if p > 0.0}
        return drafter

    def restore(self, folder: Path) -> None:
        """Replace the table by one that ``save`` wrote; shape of trees and settings stay.

        Raises:
            UserError: see ``from_checkpoint``.
        """
        saved = Recycle.from_checkpoint(folder)
        self._table, self._recycled = saved._table, None
        self._vocab, self._verifier = saved._vocab, saved._verifier

    def save(self, folder: Path, target: Any, smallest: float = 0.01) -> None:
        """Write the table as a drafter checkpoint.

        Args:
            target: the target that the table was learned from.
            smallest: minimum probability of a saved successor.
        """
        kept = {
            context: sorted(((p, t) for t, p in ranking.items() if p >= smallest), reverse=True)[: self.top_k]
            for context, ranking in dict(self._rankings()).items()  # another thread may be learning
        }
        dtype = torch.uint16 if (self._vocab or 0) <= 1 << 16 else torch.int32
        tokens = torch.zeros(len(kept), self.top_k, dtype=dtype)
        probs = torch.zeros(len(kept), self.top_k, dtype=torch.float16)
        for row, ranking in enumerate(kept.values()):
            for place, (p, t) in enumerate(ranking):
                tokens[row, place], probs[row, place] = t, p
        contexts = torch.tensor(list(kept), dtype=torch.int32).view(-1, 2)
        tensors = {"contexts": contexts, "tokens": tokens, "probs": probs}
        checkpoint.write(folder, "recycle", {"top_k": self.top_k, "pairs": self.pairs}, tensors, target)

    @property
    def entries(self) -> int:
        """Number of contexts in the table."""
        return len(self._rankings())

    def attach(self, target: Target) -> None:
        if target is self._target:
            return
        if self._verifier is not None:
            checkpoint.check_verifier(self._verifier, target)
        self._target = target
        self.select([])

    def reset(self) -> None:
        """Clear the table."""
        self._table = {}
        if self._recycled is not None:
            self._recycled.forget()

    def _rankings(self) -> dict[Context, Ranking]:
        return self._table if self._recycled is None else dict(self._recycled.entries())

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        ends: list[Context] = [([_ANY, *row][-2], row[-1]) for row in prompt.input_ids.tolist()]
        if (recycled := self._placed(output.logits)) is not None:
            first = on_device([row[-1] for row in history], recycled.device)
            recycled.begin(on_device(ends, recycled.device), output, first)
            return
        self.rows += [(end[1], row[-1]) for end, row in zip(ends, history, strict=True)]
        self._learn(ends, output.logits.flatten(0, 1))

    @torch.inference_mode()
    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> list[Recycled]:
        recycled = self._placed(output.logits)
        if recycled is None:
            return []
        recycled.join(len(history), True)
        recycled.last.append(torch.zeros(len(history), 2, dtype=torch.long, device=recycled.device))
        return [recycled]

    def _placed(self, logits: Tensor) -> Recycled | None:
        """The table of a target with these logits, on their device; None where it is the host's."""
        if self._vocab != logits.shape[-1]:  # the vocabulary has changed
            self._table, self._recycled, self.rows = {}, None, []
            self._vocab = logits.shape[-1]
        static_shapes = kernels.static_shapes(logits.device)
        if self._recycled is not None and (not static_shapes or self._recycled.device != logits.device):
            self._table, self._recycled = self._rankings(), None
        if static_shapes and self._recycled is None:
            self._recycled = Recycled(self, self._vocab, logits.device)
            self._recycled.fill(self._table)
        return self._recycled

    def select(self, rows: Sequence[int]) -> None:
        if self._recycled is not None:
            self._recycled.select(rows)
        else:
            super().select(rows)

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        if self._recycled is not None:
            return self._recycled.propose(token, budget)
        self._drafted = True
        return super().propose(token, budget)

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return () if self._recycled is not None else super().continuations(row, path)  # its table is on the device

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Context, Children]:
        before, last = (*self.rows[row], *path)[-2:]
        return (before, last), self._successors

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self.learned += 1
        if self._recycled is not None:
            self._recycled.observe(tree, verdict, output)
            return
        contexts: list[Context] = [
            (row[parent] if parent >= 0 else before, token)
            for (before, _), row, above in zip(self.rows, tree.tokens.tolist(), tree.parents.tolist(), strict=True)
            for token, parent in zip(row, above, strict=True)
        ]
        self.rows = [(*last, *tokens)[-2:] for last, (_, tokens) in zip(self.rows, verdict.host, strict=True)]
        drafted, self._drafted = self._drafted, False
        # While drafting does not pay, only new tokens are worth the time.
        if drafted or tree.nodes > 1 or any((_ANY, last) not in self._table for _, last in contexts):
            self._learn(contexts, output.logits.flatten(0, 1))

    @torch.inference_mode()
    def fit(self, texts: Iterable[tuple[Sequence[int], Tensor]], contexts: int | None = None) -> None:
        """Replace the table by the target's mean probabilities in texts.

        Args:
            texts: tokens, and the target's logits after each of them, (length, vocab).
            contexts: number of contexts to keep, those that occur most often; None keeps all.
        """
        keys, ranked, probs = [], [], []
        for tokens, logits in texts:
            self._vocab = logits.shape[-1]
            best, log_probs = ops.top_log_probs(logits, self.top_k)
            last = torch.tensor(tokens)
            pairs = (last[:-1] + 1) * self._vocab + last[1:]  # below the vocabulary's size: a context of one token
            places = torch.cat([torch.arange(len(tokens)), torch.arange(1, len(tokens))][: 1 + self.pairs])
            keys.append(torch.cat([last, pairs][: 1 + self.pairs]))
            ranked.append(best.cpu()[places])
            probs.append(log_probs.exp().cpu()[places])
        self._table, self._recycled = {}, None
        if not keys:
            return
        assert self._vocab is not None
        distinct, place, count = torch.cat(keys).unique(return_inverse=True, return_counts=True)
        rank = torch.empty_like(count)
        rank[count.argsort(descending=True, stable=True)] = torch.arange(len(count))
        successor, entry = (place[:, None] * self._vocab + torch.cat(ranked)).unique(return_inverse=True)
        total = torch.zeros(len(successor)).index_add_(0, entry.flatten(), torch.cat(probs).flatten())
        of = successor // self._vocab
        mean = total / count[of]
        kept = (mean >= UNLIKELY) & (rank[of] < (len(count) if contexts is None else contexts))
        likeliest = mean[kept].argsort(descending=True)
        names = torch.stack([distinct // self._vocab - 1, distinct % self._vocab], dim=-1)[of[kept]][likeliest]
        columns = names, (successor % self._vocab)[kept][likeliest], mean[kept][likeliest]
        for (before, after), token, p in zip(*(column.tolist() for column in columns), strict=True):
            ranking = self._table.setdefault((before, after), {})
            if len(ranking) < self.top_k:
                ranking[token] = p

    def _successors(self, context: Context) -> list[tuple[int, float, Context]]:
        last = context[1]
        ranking = self._table.get(context) or self._table.get((_ANY, last), {})
        return [(token, p, (last, token)) for token, p in ranking.items()]

    def _learn(self, contexts: list[Context], logits: Tensor) -> None:
        """Update the contexts' entries with the rankings of ``logits``, (contexts, vocab)."""
        ranked, log_probs = ops.top_log_probs(logits, self.top_k)
        probs = log_probs.exp()
        for context, tokens, chances in zip(contexts, ranked.tolist(), probs.tolist(), strict=True):
            latest = [(token, p) for token, p in zip(tokens, chances, strict=True) if p >= UNLIKELY]
            self._average((_ANY, context[1]), latest)
            if self.pairs:
                self._average(context, latest)
        while len(self._table) > _ENTRIES:
            del self._table[next(iter(self._table))]

    def _average(self, context: Context, latest: list[tuple[int, float]]) -> None:
        known = self._table.get(context)
        if known is None:
            self._table[context] = dict(latest)
            return
        ranking = {token: p * (1.0 - NEWEST) for token, p in known.items()}
        for token, p in latest:
            ranking[token] = ranking.get(token, 0.0) + NEWEST * p
        if len(ranking) > 2 * self.top_k:
            for token in sorted(ranking, key=ranking.__getitem__)[: -self.top_k]:
                del ranking[token]
        self._table[context] = ranking


def _check(tensors: Mapping[str, Tensor], top_k: int, vocab: int, folder: Path) -> None:
    """Validate the tensors of a saved table."""
    rows = len(tensors["contexts"]) if "contexts" in tensors and tensors["contexts"].ndim else 0
    expected = {"contexts": (rows, 2), "tokens": (rows, top_k), "probs": (rows, top_k)}
    if (received := {name: tuple(tensor.shape) for name, tensor in tensors.items()}) != expected:
        raise UserError(f"{folder}: expected the tensors {expected}, received {received}")
    contexts, tokens, probs = (tensors[name] for name in expected)
    if [tensor.is_floating_point() for tensor in (contexts, tokens, probs)] != [False, False, True]:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (contexts, tokens, probs))
        raise UserError(f"{folder}: contexts and tokens must be integers, probs floating point: got {dtypes}")
    if not rows:
        return
    tokens = tokens.long()  # of uint16, torch finds no minimum
    lowest, highest = min(int(contexts[:, 1].min()), int(tokens.min())), max(int(contexts.max()), int(tokens.max()))
    if lowest < 0 or highest >= vocab or int(contexts.min()) < _ANY:
        raise UserError(f"{folder}: contexts and tokens must be tokens below {vocab}: got {lowest} to {highest}")
    if not bool(((probs >= 0) & (probs <= 1)).all()):
        raise UserError(f"{folder}: probs must be in [0, 1]")
