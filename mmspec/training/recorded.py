"""Features that are recorded while a target generates its answers: training then needs no pass of it over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.core.budget import Budget
from mmspec.core.drafter import Drafter
from mmspec.core.target import Feature, Prompt, TargetOutput
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict
from mmspec.errors import UserError, explained
from mmspec.files import atomic
from mmspec.training import data
from mmspec.training.data import Conversation
from mmspec.training.features import ConversationFeatures, Features, collate


class Recorder(Drafter):
    """A drafter that drafts nothing and keeps the target's last hidden states of whole sequences of text.

    Attributes:
        finished: hidden states, (length - 1, hidden), of sequences that have ended, by their tokens, prompt included.
            The last token was never fed.
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

    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        return TokenTree.root(token)

    @torch.inference_mode()
    def observe(self, tree: TokenTree, verdict: Verdict, output: TargetOutput) -> None:
        for (_, hidden), state in zip(self._rows, output.features["last"][:, :1].clone(), strict=True):
            hidden.append(state)

    def save(self, file: Path, conversations: Sequence[Conversation], pipe: Any) -> None:
        """Write the features of conversations of one question and answer; forgets all sequences that have ended."""
        tensors = {}
        for one in conversations:
            answer = one.answers[-1]
            assert answer is not None
            prompt = pipe.encode([{"prompt": data.as_text(one.messages[:-1])}]).input_ids[0].tolist()
            hidden = self.finished.get((*prompt, *answer))
            if hidden is not None:  # an answer of one token has none
                tensors[f"{one.id}/tokens"] = torch.tensor([*prompt, *answer], dtype=torch.int32)
                tensors[f"{one.id}/hidden"] = hidden.clone()
        self.finished.clear()
        with atomic(file) as part:
            save_file(tensors, part)


class RecordedFeatures:
    """The features in folders that ``Recorder`` wrote, with the call interface of ``Extractor``.

    Args:
        folders: of files, as ``make-data --record`` writes them.
        target: that generated the conversations.

    Raises:
        UserError: a file is damaged or of a model with another hidden size; there is none.
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
        """Yield the tokens of each conversation but the last, and the hidden states at them, (length, hidden),
        in the target's dtype."""
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
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, 1))  # of the last token, which predicts nothing
        return ConversationFeatures(tokens.long(), hidden, hidden[:0], torch.zeros_like(mark), mark)


def _name(conversation: Conversation) -> str:
    """Its id in its own file."""
    return conversation.id.rpartition("/")[2]
