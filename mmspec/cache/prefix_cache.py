"""Prefix cache: states of prompts and answers, for later prompts with a common prefix of tokens and media."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.cache.prefix import LEAST_TOKENS, Prefix, PrefixFiles, common
from mmspec.core.target import Feature, Prompt, State, Stop, Target, TargetOutput, at_text, spaced
from mmspec.core.verify import Verdict


class PrefixCache:
    """LRU cache of prefixes, of at most ``limit`` bytes. Thread-safe. A single prefix above the limit is not cached.

    With ``files``, it is an idle task of its engine: prefixes are written while no sequence runs or waits.

    Attributes:
        cleared: number of calls of ``clear``.
    """

    def __init__(self, limit: int, files: PrefixFiles | None = None) -> None:
        self.limit, self.files = limit, files
        self.nbytes = self.cleared = 0
        self._entries: list[Prefix] = []  # most recently used last
        self._unsaved: list[Prefix] = []  # entries that are not in files
        self._writing: Iterator[None] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefixCache, (self.limit, self.files)  # copies of a pipeline start with an empty cache

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], key: Hashable, features: Sequence[Feature]) -> tuple[Prefix, int] | None:
        """The prefix with the most tokens that a prompt can reuse, and their number. The prefix must have the prompt's
        key and all ``features``."""
        with self._lock:
            best, most = None, 0
            for entry in self._entries:
                fits = entry.key == key and entry.features.keys() >= set(features)
                if fits and (shared := entry.shared(tokens)) > most:
                    best, most = entry, shared
            if best is None:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            return best, most

    def add(self, prefix: Prefix) -> None:
        """Add a prefix and drop the prefixes that it extends, unless its states cannot be cut to those."""
        size = prefix.nbytes
        if size > self.limit:
            return
        with self._lock:
            self._entries = [entry for entry in self._entries if not _replaces(prefix, entry)]
            sizes = [entry.nbytes for entry in self._entries]
            while sum(sizes) + size > self.limit:
                self._entries, sizes = self._entries[1:], sizes[1:]
            self._entries.append(prefix)
            self._unsaved = [entry for entry in (*self._unsaved, prefix) if entry in self._entries and self.files]
            self.nbytes = sum(sizes) + size

    def clear(self) -> None:
        """Drop all prefixes; files that were written stay, for the weights with which they were."""
        with self._lock:
            self._entries, self._unsaved, self._writing, self.nbytes = [], [], None, 0
            self.cleared += 1

    @property
    def pending(self) -> bool:
        return self._writing is not None or bool(self._unsaved)

    def turn(self) -> None:
        """Write a file of the newest prefix that is not in files."""
        with self._lock:
            if self._writing is None and self._unsaved and self.files is not None:
                self._writing = self.files.write(self._unsaved.pop())
            writing = self._writing
        if writing is not None and next(writing, writing) is writing:
            self._writing = None

    def close(self) -> None:
        while self.pending:
            self.turn()


@dataclass
class _Row:
    """Inputs of a running sequence's prompt, and the features of its prompt and of each step."""

    prompt: int
    key: Hashable
    least: int
    embeds: Tensor | None
    positions: Tensor | None
    features: list[dict[Feature, Tensor]]
    length: int  # committed tokens
    stops: dict[int, Stop]
    cached: int = 0  # tokens in the cache


class PrefixReuse:
    """Lookups and insertions of the prefix cache for the running sequences of a target."""

    def __init__(self, target: Target, prefixes: PrefixCache) -> None:
        self.prefixes = prefixes
        self._target: Any = target
        self._rows: list[_Row | None] = []  # None if the row's states are not cached
        self._step: tuple[Verdict, dict[Feature, Tensor]] | None = None  # last commit, until read by the host
        self._known_identity = self._identity()

    def _identity(self) -> tuple[int, str]:
        """Identity of the target, for files, and the number of ``clear`` calls before."""
        return self.prefixes.cleared, "" if self.prefixes.files is None else self._target.identity()

    def prefill(
        self, prompts: Sequence[Prompt], max_new_tokens: Sequence[int], reads: Sequence[Feature], chunk: int | None
    ) -> Iterator[TargetOutput | None]:
        """``Target.prefill``, of a single prompt after its longest cached prefix."""
        prompt = prompts[0]
        if len(prompts) > 1 or not prompt.is_single:
            yield from self._target.prefill(prompts, max_new_tokens, reads, chunk)
            return
        prefix = self._prefix(prompt, reads)
        if prefix is None:
            yield from self._target.restore(State(None, 0, 0, True), prompt, *max_new_tokens, reads, chunk)
            return
        shared, ids = len(prefix.tokens), prompt.input_ids
        positions = continued(prefix.positions, shared, ids.shape[1])
        known = {} if positions is None else {"position_ids": positions}
        rest = Prompt(ids, inputs=known, adapter=prompt.adapter)
        for output in self._target.restore(prefix.state, rest, *max_new_tokens, reads, chunk):
            if output is None:
                yield None
                continue
            more, embeds = output.features, prefix.embeds
            before = {name: prefix.features[name] for name in reads}
            features = {name: torch.cat([x, more[name]], 1) if more else x for name, x in before.items()}
            if embeds is not None:
                embeds = torch.cat([embeds, self._target.embed(ids[:, shared:])], dim=1)
            stops = {**prefix.state.stops, **output.stops}
            yield replace(output, features=features, embeds=embeds, cached_tokens=shared, prompt=prompt, stops=stops)

    def _prefix(self, prompt: Prompt, reads: Sequence[Feature]) -> Prefix | None:
        """The longest cached prefix of a prompt, from memory or files."""
        found = self._find(prompt, reads)
        prefix = None if found is None else found[0].first(found[1])
        shared = 0 if found is None else found[1]
        while (stored := self._find_stored(prompt, reads)) is not None and stored[1] >= shared + LEAST_TOKENS:
            assert self.prefixes.files is not None
            if (read := self.prefixes.files.read(*stored, self._key(prompt), self._target)) is not None:
                prefix = read
                break
        return prefix if prefix is not None and at_text(prefix.positions, -1) else None

    def resumes(self, prompt: Prompt, others: Sequence[Prompt]) -> bool:
        """Whether the cache holds at least half of a prompt's tokens, or will after ``others``."""
        if not prompt.is_single:
            return False
        ids, key = prompt.input_ids[0].tolist(), self._key(prompt)
        shared = [common(ids, other.input_ids[0].tolist()) for other in others if self._key(other) == key]
        shared += [match[1] for match in (self._find(prompt, ()), self._find_stored(prompt, ())) if match]
        return 2 * max(shared, default=0) >= len(ids)

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt], output: TargetOutput) -> None:
        """Record prefilled rows, and cache the states of a prompt that was prefilled alone."""
        self._record()
        first = len(self._rows)
        self._rows += [self._row(row, one, output) if one.is_single else None for row, one in enumerate(prompts)]
        if len(prompts) == 1 and prompts[0].is_single:
            self._add(first, prompts[0].input_ids[0].tolist(), output.logits)

    def _row(self, row: int, prompt: Prompt, output: TargetOutput) -> _Row:
        length, embeds, positions = prompt.input_ids.shape[1], output.embeds, output.positions
        own, last = slice(row, row + 1), slice(-length, None)
        media = [] if output.visual is None else output.visual[row, last].nonzero()[:, 0].tolist()
        return _Row(
            length,
            self._key(prompt),
            media[-1] + 1 if media else 0,
            None if embeds is None else embeds[own, last],
            None if positions is None else positions[..., own, last],
            [{name: states[own, last] for name, states in output.features.items()}],
            length,
            dict(output.stops),
        )

    @torch.inference_mode()
    def commit(self, verdict: Verdict, verified: dict[Feature, Tensor]) -> None:
        """Record the accepted nodes' features among those of the verified tree, (batch, nodes, hidden) each."""
        self._record()
        if any(self._rows):
            nodes = verdict.path.clamp(min=0)
            index = torch.arange(len(nodes), device=nodes.device)[:, None]
            self._step = verdict, {name: states[index, nodes] for name, states in verified.items()}

    def _record(self) -> None:
        """Record the features of the last commit, (batch, depth, hidden) each."""
        if self._step is None:
            return
        (verdict, features), self._step = self._step, None
        for place, (row, (path, _)) in enumerate(zip(self._rows, verdict.host, strict=True)):
            if row is not None and path:
                row.length += len(path)
                row.features.append({name: x[place : place + 1, : len(path)] for name, x in features.items()})

    @torch.inference_mode()
    def retain(self, rows: Sequence[int], histories: Sequence[list[int]]) -> None:
        """Cache the states of finished sequences; ``histories`` are prompt and answer tokens of each."""
        self._record()
        for row, history in zip(rows, histories, strict=True):
            known = self._rows[row]
            if known is not None and known.length > known.prompt:
                self._add(row, history[: known.length])

    def _add(self, row: int, tokens: list[int], logits: Tensor | None = None) -> None:
        known = self._rows[row]
        state: State | None = None if known is None else self._target.snapshot(row)
        if known is None or state is None:
            return
        end = replace(state.stops[state.length], logits=logits)
        known.stops = spaced({**known.stops, state.length: end})
        # After a stop among draft tokens, recurrent states include the tokens after it.
        length = len(tokens) if state.cuts else max((end for end in known.stops if end <= len(tokens)), default=0)
        if length <= known.cached:
            return
        known.cached, tokens, embeds = length, tokens[:length], known.embeds
        parts = known.features
        features = {name: torch.cat([part[name] for part in parts], 1)[:, :length] for name in parts[0]}
        if embeds is not None and length > known.prompt:
            new = torch.tensor([tokens[known.prompt :]], dtype=torch.long, device=embeds.device)
            embeds = torch.cat([embeds, self._target.embed(new)], dim=1)
        state, positions = (
            replace(state, stops=known.stops).first(length),
            continued(known.positions, known.prompt, length),
        )
        self.prefixes.add(Prefix(tokens, known.key, state, features, embeds, positions, known.least))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._record()
        self._rows = [self._rows[row] for row in rows]

    def _find(self, prompt: Prompt, reads: Sequence[Feature]) -> tuple[Prefix, int] | None:
        return self.prefixes.find(prompt.input_ids[0].tolist(), self._key(prompt), reads)

    def _find_stored(self, prompt: Prompt, reads: Sequence[Feature]) -> tuple[list[str], int] | None:
        files = self.prefixes.files
        return None if files is None else files.find(prompt.input_ids[0].tolist(), self._key(prompt), reads)

    def _key(self, prompt: Prompt) -> Hashable:
        if self._known_identity[0] != self.prefixes.cleared:  # the weights may have changed
            self._known_identity = self._identity()
        target = self._target
        return target.batch_key(prompt), media_key(prompt), str(target.device), target.dtype, self._known_identity[1]


def continued(positions: Tensor | None, common: int, length: int) -> Tensor | None:
    """Extend the positions of the first ``common`` tokens to a prompt of ``length`` tokens. The last known token and
    all later tokens are text: all axes advance by one per token."""
    if positions is None:
        return None
    known = positions[..., :common]
    return torch.cat([known, known[..., -1:] + 1 + torch.arange(length - common, device=positions.device)], dim=-1)


def _replaces(new: Prefix, old: Prefix) -> bool:
    extends = new.key == old.key and new.tokens[: len(old.tokens)] == old.tokens
    return (
        extends
        and new.features.keys() >= old.features.keys()
        and (new.state.cuts or len(old.tokens) in new.state.stops)
    )


def media_key(prompt: Prompt) -> str:
    """Content hash of a prompt's inputs other than tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(prompt.inputs.items()):
        if isinstance(value, Tensor) and value.shape == prompt.input_ids.shape:
            continue  # one value per token, implied by the tokens
        digest.update(f"{name} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')};".encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
