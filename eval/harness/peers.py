"""Other engines as baselines: they decode the same GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mmspec import plugins
from mmspec.errors import UserError
from mmspec.targets.gguf import file_in


@dataclass(frozen=True)
class Completion:
    """A greedy answer.

    Attributes:
        tokens: generated token ids, the end-of-sequence token included.
        seconds: decode time after the first token, as the engine measures it.
    """

    tokens: list[int]
    seconds: float

    @property
    def token_seconds(self) -> float:
        """Decode time per token after the first."""
        return self.seconds / (len(self.tokens) - 1)


class Peer(Protocol):
    """An engine with a model."""

    def complete(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool = False) -> Completion:
        """Decode a prompt of token ids."""


def gguf_file(engine: str, model: str) -> str:
    """The GGUF file that a model's name stands for.

    Raises:
        UserError: it is of another format.
    """
    file = file_in(plugins.model_path(model))
    if file is None:
        raise UserError(f"{engine} decodes GGUF files: expected a model of that format, received {model!r}")
    return str(file)
