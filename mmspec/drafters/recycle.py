"""Token Recycling drafter (arXiv 2408.08696): a table of the target's top candidates per context.

Every verify pass ranks successors at every node, accepted or not. The table stores the most probable successors, and
trees are grown from it. Two differences from the paper raise acceptance: two-token contexts take precedence over single
tokens, and an entry is a calibrated running average of the target's probabilities instead of the latest ranking.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from mmspec import ops
from mmspec.cache.rows import RowTensor
from mmspec.core.plan import Exploration, StepPlan
from mmspec.core.target import Prompt, Target, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters import checkpoint
from mmspec.drafters.captured import CapturedDrafter, RowState
from mmspec.drafters.growth import Children, LookUpDrafter, grow_tree
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.ops.transfer import on_device
from mmspec.validation import option, options

Context = tuple[int, int]  # the last two tokens; -1 first for single-token contexts
Ranking = dict[int, float]  # successor -> probability

_ANY = -1
_ENTRIES = 200_000  # maximum table size; the oldest entries are evicted first
EMA_WEIGHT = 0.3  # weight of the latest ranking in the running average
UNLIKELY = 0.005  # minimum probability of a stored successor
_SLOTS = 1 << 17  # hash slots of two-token contexts
_DEPTH, _NODES = 6, 512  # maximum tree size; twice the depth did not raise acceptance
_HASH = -7046029254386353131  # Fibonacci hashing: 2**64 / golden ratio


@options
class Settings:
    """Settings of the drafter, stored in ``config.json``."""

    top_k: int = option(..., ge=1, le=64)
    pairs: bool = True


class Rankings:
    """Table of successors and their probabilities per context, in descending order.

    Args:
        slots: number of contexts; one extra slot is a write sink.

    Attributes:
        key: (slots + 1,) int64, context of each slot; -1 if empty.
        tokens, probs: (slots + 1, width), padded with 0.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.key = torch.full((slots + 1,), -1, device=device)
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.long, device=device)
        self.probs = torch.zeros(slots + 1, width, dtype=torch.float32, device=device)

    def look_up(self, slot: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities, (..., width) each, of contexts, (...); unknown contexts have probabilities 0."""
        return self.tokens[slot], self.probs[slot].where((self.key[slot] == key)[..., None], 0.0)

    def average(self, slot: Tensor, key: Tensor, counts: Tensor, tokens: Tensor, probs: Tensor, newest: float) -> None:
        """Update running averages with new rankings of weight ``newest``. ``slot, key, counts``: (contexts,);
        ``counts`` bool, False for idle rows."""
        later = ((slot[:, None] == slot) & counts).triu(1).any(1)
        slot = slot.where(counts & ~later, len(self.key) - 1)
        known = (self.key[slot] == key)[:, None]
        held, share = self.tokens[slot], self.probs[slot].where(known, 0.0) * (1.0 - newest)
        probs = torch.where(known, newest * probs, probs)
        both = (tokens[:, :, None] == held[:, None]) & (share > 0.0)[:, None]  # (contexts, k, width)
        share = share + (both * probs[:, :, None]).sum(1)
        best, at = torch.cat([share, probs.where(~both.any(2), 0.0)], dim=1).topk(share.shape[1], dim=1)
        self.key[slot] = key
        self.tokens[slot] = torch.cat([held, tokens], dim=1).gather(1, at)
        self.probs[slot] = best


class DeviceTable(CapturedDrafter):
    """Table on the device: updates and drafting with static shapes and without host syncs.

    Differences from the host table: two-token contexts are hashed into a fixed number of slots, where new contexts
    overwrite old contexts; and if a context occurs several times in a step, only its last node counts.

    Attributes:
        width: maximum children per node; None keeps all.
        last: (rows, 2) int64, the token before the root, and the root.
    """

    def __init__(self, settings: Settings, vocab: int, device: torch.device, width: int | None) -> None:
        self._top_k, self._has_pairs, self._vocab, self.width = settings.top_k, settings.pairs, vocab, width
        self._any = Rankings(vocab, 2 * settings.top_k, device)
        self._pairs = Rankings(_SLOTS if settings.pairs else 0, 2 * settings.top_k, device)
        super().__init__()

    def reset(self, static_shapes: bool = False) -> None:
        super().reset(static_shapes)
        self.last = RowTensor(static_shapes)

    @property
    def device(self) -> torch.device:
        return self._any.key.device

    @property
    def parts(self) -> tuple[RowState, ...]:
        return (self.last,)

    @property
    def limits(self) -> tuple[int, int]:
        return _DEPTH, _NODES

    def forget(self) -> None:
        self._any.key.fill_(-1)
        self._pairs.key.fill_(-1)

    @torch.inference_mode()
    def begin(self, ends: Tensor, output: TargetOutput, first: Tensor) -> None:  # type: ignore[override]
        """Append rows for new sequences.

        Args:
            ends: (new rows, 2) int64, the last two tokens of each prompt.
            first: (new rows,) int64, the first emitted tokens.
        """
        self.join(len(ends), True)
        ends = ends.clamp(0, self._vocab - 1)  # -1 before a one-token prompt, and out-of-vocabulary tokens
        self.last.append(torch.stack([ends[:, 1], first], dim=1))
        ranked = ops.top_log_probs(output.logits[:, 0], self._top_k)
        self._learn(ends[:, 0], ends[:, 1], torch.ones_like(first, dtype=torch.bool), *ranked)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        steps, self._pending = self._pending, []
        self._update_all(steps)  # removed rows still update the table
        super().select(rows)

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        """Queue the rankings at every node, and the accepted tokens."""
        ranked = ops.top_log_probs(output.logits, self._top_k)
        self.queue((tree.tokens, tree.parents, *ranked, verdict.tokens), verdict)

    def update(  # type: ignore[override]
        self, tokens: Tensor, parents: Tensor, ranked: Tensor, log_probs: Tensor, emitted: Tensor, length: Tensor
    ) -> None:
        """Update the table with the rankings, (batch, nodes, k), at a tree's nodes, (batch, nodes), and advance
        ``last`` by ``emitted``, (batch, depth)."""
        last = self.last.data[: len(tokens)]
        before = torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0)), last[:, :1])
        counts = (length > 0)[:, None].expand_as(tokens)
        self._learn(*(x.flatten(0, 1) for x in (before, tokens, counts, ranked, log_probs)))
        both = torch.cat([last, emitted], dim=1)
        self.last.write(both.gather(1, length[:, None] + torch.arange(2, device=length.device)))

    def grow(self, token: Tensor, plan: StepPlan) -> TokenTree:
        above = self.last.data[: len(token), :1]

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal above
            before, above = above.gather(1, origin), beam
            return self._children(before, beam)

        return grow_tree(token, None, extend, plan, self._top_k)

    def _children(self, before: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Successors of contexts, (...), and their log probabilities, (..., width) each."""
        tokens, probs = self._any.look_up(token, token)
        if self._has_pairs:
            key = self._pair(before, token)
            exactly, chances = self._pairs.look_up(self._slot(key), key)
            known = (chances[..., :1] > 0.0).expand_as(chances)
            tokens, probs = torch.where(known, exactly, tokens), torch.where(known, chances, probs)
        most = self.width or probs.shape[-1]
        return tokens[..., :most], probs[..., :most].log()

    def _learn(self, before: Tensor, token: Tensor, counts: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Update the table with rankings, (contexts, k), of contexts, (contexts,)."""
        probs = log_probs.exp()
        probs = probs.where(probs >= UNLIKELY, 0.0)
        ranking = counts, tokens, probs, EMA_WEIGHT
        self._any.average(token, token, *ranking)
        if self._has_pairs:
            key = self._pair(before, token)
            self._pairs.average(self._slot(key), key, *ranking)

    def _pair(self, before: Tensor, token: Tensor) -> Tensor:
        return before * self._vocab + token

    def _slot(self, key: Tensor) -> Tensor:
        return ((key * _HASH) >> 40) & (len(self._pairs.key) - 2)

    def fill(self, table: Mapping[Context, Ranking]) -> None:
        """Copy the host table; of colliding contexts, the last wins."""
        for pairs, kept in ((False, self._any), (True, self._pairs)):
            chosen = {context: ranking for context, ranking in table.items() if (context[0] >= 0) == pairs}
            if not chosen or (pairs and not self._has_pairs):
                continue
            best = [sorted(ranking.items(), key=lambda item: -item[1]) for ranking in chosen.values()]
            width = kept.tokens.shape[1]
            rows = [row[:width] + [(0, 0.0)] * (width - len(row)) for row in best]
            before, token = torch.tensor([*chosen], dtype=torch.long).unbind(1)
            key = self._pair(before, token) if pairs else token
            slot = self._slot(key) if pairs else key
            place = {int(at): number for number, at in enumerate(slot)}  # last context per slot
            order = torch.tensor([*place.values()], dtype=torch.long)
            where = kept.key.new_tensor([*place])
            kept.key[where] = key[order].to(where.device)
            kept.tokens[where] = kept.tokens.new_tensor([[t for t, _ in row] for row in rows])[order]
            kept.probs[where] = kept.probs.new_tensor([[p for _, p in row] for row in rows])[order]

    def entries(self) -> Iterator[tuple[Context, Ranking]]:
        """Iterate over the table in the host table's format."""
        for pairs, kept in ((False, self._any), (True, self._pairs)):
            key, tokens, probs = (x[:-1] for x in (kept.key, kept.tokens, kept.probs))
            at = (key >= 0).nonzero()[:, 0]
            for number, row, chances in zip(key[at].tolist(), tokens[at].tolist(), probs[at].tolist(), strict=True):
                context = divmod(number, self._vocab) if pairs else (-1, number)
                yield context, {token: p for token, p in zip(row, chances, strict=True) if p > 0.0}


class Recycle(LookUpDrafter):
    """Token Recycling drafter.

    The table persists between requests until ``reset``; ``learned`` counts the steps learned from. With static shapes,
    the table is on the device, see ``DeviceTable``.

    Args:
        top_k: successors per context.
        pairs: also keep contexts of two tokens; False is the paper's single-token table.
        width: maximum children per node; 1 drafts chains, None trees of any width.

    Raises:
        UserError: ``top_k`` is not an integer from 1 to 64.
    """

    def __init__(self, top_k: int = 8, pairs: bool = True, width: int | None = None) -> None:
        self._settings = Settings(top_k, pairs)
        super().__init__()  # a row is the token before the root, and the root
        self.top_k, self.pairs, self.width = top_k, pairs, width
        self._table: dict[Context, Ranking] = {}
        self._vocab: int | None = None
        self._verifier: Mapping[str, Any] | None = None
        self._drafted = False  # in this step
        self._observed, self._spare = 0.0, Exploration()  # time of the last step, and for learning in plain steps
        self._on_device: DeviceTable | None = None  # device table, with static shapes
        self.learned = 0  # steps

    def __deepcopy__(self, memo: dict[int, Any]) -> Recycle:
        # Rankings are immutable, so copies can share them; a server copies the table for each request.
        memo[id(self._table)] = dict(self._table)
        copied = copy.copy(self)
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Recycle:
        """Load a table written by ``save``. Raises ``UserError``: the folder does not contain a valid table."""
        settings, verifier, tensors = checkpoint.read(folder, Settings)
        _check(tensors, settings.top_k, verifier["vocab_size"], folder)
        drafter = cls(settings.top_k, settings.pairs)
        drafter._verifier, drafter._vocab = verifier, verifier["vocab_size"]
        rows = zip(*(tensors[name].tolist() for name in ("contexts", "tokens", "probs")), strict=True)
        for (before, last), tokens, probs in rows:
            drafter._table[before, last] = {t: p for t, p in zip(tokens, probs, strict=True) if p > 0.0}
        return drafter

    def restore(self, folder: Path) -> None:
        """Replace the table by a saved table; tree shape and settings stay."""
        saved = Recycle.from_checkpoint(folder)
        self._table, self._on_device = saved._table, None
        self._vocab, self._verifier = saved._vocab, saved._verifier

    def save(self, folder: Path, target: Any, smallest: float = 0.01) -> None:
        """Write the table as a drafter checkpoint. ``smallest``: minimum probability of a saved successor."""
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
        self._table = {}
        if self._on_device is not None:
            self._on_device.forget()

    def _rankings(self) -> dict[Context, Ranking]:
        return self._table if self._on_device is None else dict(self._on_device.entries())

    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        ends: list[Context] = [([_ANY, *row][-2], row[-1]) for row in prompt.input_ids.tolist()]
        if (table := self._placed(output.logits)) is not None:
            first = on_device([row[-1] for row in history], table.device)
            table.begin(on_device(ends, table.device), output, first)
            return
        self.rows += [(end[1], row[-1]) for end, row in zip(ends, history, strict=True)]
        self._learn(ends, output.logits.flatten(0, 1))

    @torch.inference_mode()
    def begin_idle(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> list[DeviceTable]:
        table = self._placed(output.logits)
        if table is None:
            return []
        table.join(len(history), True)
        table.last.append(torch.zeros(len(history), 2, dtype=torch.long, device=table.device))
        return [table]

    def _placed(self, logits: Tensor) -> DeviceTable | None:
        """The device table for a target with these logits; None if the host table is in use."""
        if self._vocab != logits.shape[-1]:  # the vocabulary has changed
            self._table, self._on_device, self.rows = {}, None, []
            self._vocab = logits.shape[-1]
        static_shapes = kernels.static_shapes(logits.device)
        if self._on_device is not None and (not static_shapes or self._on_device.device != logits.device):
            self._table, self._on_device = self._rankings(), None
        if static_shapes and self._on_device is None:
            self._on_device = DeviceTable(self._settings, self._vocab, logits.device, self.width)
            self._on_device.fill(self._table)
        return self._on_device

    def draft_chains(self, length: int) -> None:
        super().draft_chains(length)
        if self._on_device is not None:
            self._on_device.width = self.width

    def select(self, rows: Sequence[int]) -> None:
        if self._on_device is not None:
            self._on_device.select(rows)
        else:
            super().select(rows)

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        if self._on_device is not None:
            return self._on_device.propose(token, plan)
        return super().propose(token, plan)

    @property
    def on_host(self) -> bool:
        return self._on_device is None

    def continuations(self, row: int, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        return super().continuations(row, path) if self.on_host else ()

    def start(self, row: int, path: Sequence[int] = ()) -> tuple[Context, Children]:
        self._drafted = True
        before, last = (*self.rows[row], *path)[-2:]
        return (before, last), self._successors

    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        self.learned += 1
        if self._on_device is not None:
            self._on_device.observe(tree, verdict, output)
            return
        contexts: list[Context] = [
            (row[parent] if parent >= 0 else before, token)
            for (before, _), row, above in zip(self.rows, tree.tokens.tolist(), tree.parents.tolist(), strict=True)
            for token, parent in zip(row, above, strict=True)
        ]
        self.rows = [(*last, *tokens)[-2:] for last, (_, tokens) in zip(self.rows, verdict.host, strict=True)]
        drafted, self._drafted = self._drafted or tree.nodes > 1, False
        start = clock()
        step, self._observed = start - self._observed, start
        # While drafting is paused, only learn from new tokens, in a small share of the time.
        if drafted or (self._spare.allowed and any((_ANY, last) not in self._table for _, last in contexts)):
            self._learn(contexts, output.logits.flatten(0, 1))
        if not drafted:
            self._spare.elapse(1.0, (clock() - start) / max(step, 1e-9))

    @torch.inference_mode()
    def fit(self, texts: Iterable[tuple[Sequence[int], Tensor]], contexts: int | None = None) -> None:
        """Replace the table by the target's mean probabilities in texts. ``contexts``: number of contexts to keep,
        those that occur most often; None keeps all."""
        keys, ranked, probs = [], [], []
        for tokens, logits in texts:
            self._vocab = logits.shape[-1]
            best, log_probs = ops.top_log_probs(logits, self.top_k)
            last = torch.tensor(tokens, dtype=torch.long)
            pairs = (last[:-1] + 1) * self._vocab + last[1:]  # values below the vocabulary size are one-token contexts
            places = torch.cat([torch.arange(len(tokens)), torch.arange(1, len(tokens))][: 1 + self.pairs])
            keys.append(torch.cat([last, pairs][: 1 + self.pairs]))
            ranked.append(best.cpu()[places])
            probs.append(log_probs.exp().cpu()[places])
        self._table, self._on_device = {}, None
        if not keys:
            return
        assert self._vocab is not None
        distinct, place, count = torch.cat(keys).unique(return_inverse=True, return_counts=True)
        rank = torch.empty_like(count)
        rank[count.argsort(descending=True, stable=True)] = torch.arange(len(count))
        successor, entry = (place[:, None] * self._vocab + torch.cat(ranked)).unique(return_inverse=True)
        every = torch.cat(probs).flatten()
        total = every.new_zeros(len(successor)).index_add_(0, entry.flatten(), every)
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
        for context, tokens, logs in zip(contexts, ranked.tolist(), log_probs.tolist(), strict=True):
            latest = [(token, p) for token, log in zip(tokens, logs, strict=True) if (p := exp(log)) >= UNLIKELY]
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
        ranking = {token: p * (1.0 - EMA_WEIGHT) for token, p in known.items()}
        for token, p in latest:
            ranking[token] = ranking.get(token, 0.0) + EMA_WEIGHT * p
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
    tokens = tokens.long()  # torch has no minimum for uint16
    lowest, highest = min(int(contexts[:, 1].min()), int(tokens.min())), max(int(contexts.max()), int(tokens.max()))
    if lowest < 0 or highest >= vocab or int(contexts.min()) < _ANY:
        raise UserError(f"{folder}: contexts and tokens must be tokens below {vocab}: got {lowest} to {highest}")
    if not bool(((probs >= 0) & (probs <= 1)).all()):
        raise UserError(f"{folder}: probs must be in [0, 1]")


SPEC = DrafterSpec(
    "recycle",
    "Recycle",
    "looks up likely successors of the last tokens in a table of the target's predictions (arXiv 2408.08696)",
    Recycle,
    weights="optional",
    train="recycle",
)
