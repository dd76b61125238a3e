"""Features of conversations on disk, with the call interface of ``Extractor``: a cache, and features recorded during
generation, which save a forward pass of the target in training."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.drafters.checkpoint import verifier_of
from mmspec.errors import UserError, explained
from mmspec.files import atomic, write_text
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training import data
from mmspec.training.data import Conversation
from mmspec.training.features import ConversationFeatures, Extractor, Features, collate

_INDEX = "index.json"
_BY_TOKEN = ("tokens", "hidden", "visual", "answer")


class FeatureCache:
    """Feature cache in a folder: safetensors shards of several conversations each, and ``index.json``.

    Calling the cache with conversations returns their ``Features``. Shards are written atomically; ``fill`` computes
    missing shards. A folder created with more layers also serves extractors of a subset of these layers.

    Args:
        extractor: computes missing features. Its target and settings must match the folder; it may read fewer layers.
        shard: conversations per file. Hidden states and visual features are stored in the target's dtype.

    Raises:
        UserError: the folder holds features of another target, other conversations or other settings.
    """

    def __init__(
        self, folder: Path, extractor: Extractor, conversations: Sequence[Conversation], shard: int = 256
    ) -> None:
        self.folder, self.extractor, self.conversations = folder, copy(extractor), conversations
        self._wanted = extractor.layers
        self.target: TransformersTarget = extractor.target
        self.dtype, self.shard = self.target.dtype, shard
        self._places = {_fingerprint(one): place for place, one in enumerate(conversations)}
        self._open = lru_cache(maxsize=256)(self._opened)
        self._check_index()

    def __len__(self) -> int:
        """Number of shards."""
        return -(-len(self.conversations) // self.shard)

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that have not been written yet."""
        return [number for number in range(len(self)) if not self._path(number).exists()]

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped conversations in the existing shards by reason."""
        total: Counter[str] = Counter()
        for number in sorted(set(range(len(self))) - set(self.missing)):
            total.update(json.loads(self._open(number)[0].metadata()["skipped"]))
        return total

    def fill(
        self, batch: int = 16, rank: int = 0, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compute the missing shards.

        Args:
            rank, processes: compute every ``processes``-th shard, starting at ``rank``.
            progress: called with the number of conversations done and their total, over the shards to compute.
        """
        todo = [number for number in self.missing if number % processes == rank]
        total, done = sum(len(self._members(number)) for number in todo), 0
        for number in todo:
            members = self._members(number)
            before = Counter(self.extractor.skipped)
            rows: list[ConversationFeatures | None] = [None] * len(members)
            order = sorted(range(len(members)), key=lambda index: members[index].size)  # saves padding
            for start in range(0, len(members), batch):
                places = order[start : start + batch]
                for place, row in zip(places, self.extractor.rows([members[p] for p in places]), strict=True):
                    rows[place] = None if row is None else self._packed(row)
                done += len(places)
                if progress:
                    progress(done, total)
            self._write(number, rows, self.extractor.skipped - before)

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        """The features of a batch.

        Raises:
            UserError: a conversation is not in the cache, or a shard is damaged.
        """
        rows = [self._row(conversation) for conversation in conversations]
        return collate([row for row in rows if row is not None], self.target)

    def _members(self, number: int) -> Sequence[Conversation]:
        return self.conversations[number * self.shard : (number + 1) * self.shard]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _packed(self, row: ConversationFeatures) -> ConversationFeatures:
        hidden, shown = (x.to("cpu", self.dtype) for x in (row.hidden, row.shown))
        layers = None if row.layers is None else row.layers.to("cpu", self.dtype)
        tokens = row.tokens.to("cpu", torch.int32)
        return ConversationFeatures(tokens, hidden, shown, row.visual.cpu(), row.answer.cpu(), layers)

    def _write(self, number: int, rows: Sequence[ConversationFeatures | None], skipped: Counter[str]) -> None:
        present = [row for row in rows if row is not None]
        width = self.target.config.hidden_size
        tokens, mask = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.bool)
        hidden, layers = (torch.zeros(0, n * width, dtype=self.dtype) for n in (1, len(self.extractor.layers)))
        # sets dtypes and widths if all rows are empty
        empty = ConversationFeatures(tokens, hidden, hidden, mask, mask, layers)
        names = (*_BY_TOKEN, "shown", *(["layers"] if self.extractor.layers else []))
        tensors = {name: torch.cat([getattr(row, name) for row in [empty, *present]]) for name in names}
        lengths = [(0, 0) if row is None else (len(row.tokens), len(row.shown)) for row in rows]
        columns = zip(("lengths", "shown_lengths"), zip(*lengths, strict=True), strict=True)
        tensors |= {name: torch.tensor(column, dtype=torch.long) for name, column in columns}
        with atomic(self._path(number)) as part:
            save_file(tensors, part, {"skipped": json.dumps(skipped)})

    def _row(self, conversation: Conversation) -> ConversationFeatures | None:
        place = self._places.get(_fingerprint(conversation))
        if place is None:
            raise UserError(f"{self.folder}: expected features of conversation {conversation.id}, found none")
        number, index = divmod(place, self.shard)
        file, ends, shown_ends = self._open(number)
        span, shown = (slice(int(e[index]), int(e[index + 1])) for e in (ends, shown_ends))
        if span.start == span.stop:
            return None
        with explained(f"{self._path(number)}: expected a whole shard of features", SafetensorError):
            part = {name: file.get_slice(name)[span] for name in _BY_TOKEN}
            layers = self._selected(file.get_slice("layers")[span]) if self._wanted else None
            # safetensors cannot slice a tensor of no rows.
            features = file.get_slice("shown")[shown] if shown.start < shown.stop else part["hidden"][:0]
        tokens, hidden, visual, answer = (part[name] for name in _BY_TOKEN)
        return ConversationFeatures(tokens.long(), hidden, features, visual, answer, layers)

    def _selected(self, layers: Tensor) -> Tensor:
        """Select the wanted layers of those on disk: (tokens, n * hidden) in and out."""
        if self._wanted == self.extractor.layers:
            return layers
        columns = [self.extractor.layers.index(layer) for layer in self._wanted]
        return layers.unflatten(1, (len(self.extractor.layers), -1))[:, columns].flatten(1)

    def _opened(self, number: int) -> tuple[Any, Tensor, Tensor]:
        """An open shard and its conversations' offsets into tokens and visual features."""
        with explained(f"{self._path(number)}: expected a whole shard of features", OSError, SafetensorError):
            file = safe_open(self._path(number), "pt", backend="pread")
            ends = [file.get_tensor(name).cumsum(0) for name in ("lengths", "shown_lengths")]
        rows, shown = (torch.nn.functional.pad(end, (1, 0)) for end in ends)
        return file, rows, shown

    def _check_index(self) -> None:
        path, found = self.folder / _INDEX, None
        if path.exists():
            with explained(f"{path}: expected the index of a feature cache", OSError, ValueError, AttributeError):
                found = json.loads(path.read_text())
                stored = found.get("settings", {}).get("layers", [])
            if set(self._wanted) <= set(stored):
                self.extractor.layers = tuple(stored)
        prints = hashlib.sha256("".join(self._places).encode()).hexdigest()
        wanted = {
            "verifier": verifier_of(self.target),
            "conversations": {"number": len(self.conversations), "sha256": prints},
            "settings": {**self.extractor.settings, "dtype": str(self.dtype), "shard": self.shard},
        }
        if found is None:
            write_text(path, json.dumps(wanted, indent=2) + "\n")
            return
        for name in wanted:
            if found.get(name) != wanted[name]:
                raise UserError(
                    f"{self.folder} holds features of another {name}: expected {wanted[name]}, received "
                    f"{found.get(name)}"
                )


def _fingerprint(conversation: Conversation) -> str:
    content = json.dumps([conversation.messages, conversation.answers], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class Recorder(Drafter):
    """Records the target's last hidden states of whole text sequences; drafts no tokens.

    Attributes:
        finished: hidden states, (length - 1, hidden), of finished sequences by tokens of prompt and answer.
    """

    learns: ClassVar[bool] = False
    features: ClassVar[tuple[Feature, ...]] = ("last",)

    def __init__(self) -> None:
        self.finished: dict[tuple[int, ...], Tensor] = {}
        self._rows: list[tuple[list[int], list[Tensor]]] = []

    @torch.inference_mode()
    def begin(self, prompt: Prompt, output: TargetOutput, history: list[list[int]]) -> None:
        for row, tokens in enumerate(history):
            hidden = output.features["last"][row]
            mask = None if prompt.attention_mask is None else prompt.attention_mask[row].bool()
            self._rows.append((tokens, [hidden.clone() if mask is None else hidden[mask]]))

    def select(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._rows))) - set(rows):
            tokens, hidden = self._rows[row]
            self.finished[tuple(tokens)] = torch.cat(hidden)[: len(tokens) - 1].cpu()
        self._rows = [self._rows[row] for row in rows]

    def propose(self, token: Tensor, plan: StepPlan) -> TokenTree:
        return TokenTree.root(token)

    @torch.inference_mode()
    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for (_, hidden), state in zip(self._rows, output.features["last"][:, :1].clone(), strict=True):
            hidden.append(state)

    def save(self, file: Path, conversations: Sequence[Conversation], pipe: Any) -> None:
        """Write the features of single-turn conversations and forget all finished sequences."""
        tensors = {}
        for one in conversations:
            answer = one.answers[-1]
            assert answer is not None
            prompt = pipe.encode([{"prompt": data.as_text(one.messages[:-1])}]).input_ids[0].tolist()
            hidden = self.finished.get((*prompt, *answer))
            if hidden is not None:  # a one-token answer has no states
                tensors[f"{one.id}/tokens"] = torch.tensor([*prompt, *answer], dtype=torch.int32)
                tensors[f"{one.id}/hidden"] = hidden.clone()
        self.finished.clear()
        with atomic(file) as part:
            save_file(tensors, part)


class RecordedFeatures:
    """Features written by ``Recorder``, with the call interface of ``Extractor``.

    Raises:
        UserError: there are no files, or a file is damaged or has another hidden size.
    """

    def __init__(self, folders: Sequence[Path], target: Any) -> None:
        self.target = target
        self._files: dict[str, Any] = {}
        for path in sorted(path for folder in folders for path in folder.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt", backend="pread")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: expected recorded features, received {error}") from error
            names = {key.rpartition("/")[0] for key in list(file.keys())}
            widths = {file.get_slice(f"{name}/hidden").get_shape()[-1] for name in names}
            if wrong := widths - {width := target.config.hidden_size}:
                raise UserError(
                    f"{path}: expected hidden states of size {width}, the model's, received size {min(wrong)}"
                )
            self._files |= dict.fromkeys(names, file)
        if not self._files:
            raise UserError(f"expected features of make-data --record in {', '.join(map(str, folders))}, received none")

    def sequences(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield each conversation's tokens except the last, and hidden states, (length, hidden), in the target's
        dtype."""
        for name in self._files:
            hidden = self._tensor(name, "hidden").to(self.target.device, self.target.dtype)
            yield self._tensor(name, "tokens")[: len(hidden)].tolist(), hidden

    def __contains__(self, conversation: Conversation) -> bool:
        return _name(conversation) in self._files

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        return collate([self._row(conversation) for conversation in conversations], self.target)

    def _tensor(self, name: str, part: str) -> Tensor:
        with explained(f"expected the recorded features of {name} in a whole file", SafetensorError):
            return self._files[name].get_tensor(f"{name}/{part}")

    def _row(self, conversation: Conversation) -> ConversationFeatures:
        name = _name(conversation)
        tokens, hidden = (self._tensor(name, part) for part in ("tokens", "hidden"))
        answer = conversation.answers[-1]
        if answer is None or tokens[-len(answer) :].tolist() != list(answer):
            raise UserError(f"the recorded features of conversation {name} are of another answer")
        mark = torch.arange(len(tokens)) >= len(tokens) - len(answer)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, 1))  # pads the last token, which predicts nothing
        return ConversationFeatures(tokens.long(), hidden, hidden[:0], torch.zeros_like(mark), mark)


def _name(conversation: Conversation) -> str:
    """The conversation's id in its own file."""
    return conversation.id.rpartition("/")[2]
