"""The figures of a run, under the names that vLLM uses for a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stats:
    """Figures of one sequence. Times are in seconds and shared by the rows of a batch.

    ``draft_seconds`` and ``verify_seconds`` are times of the device: on CUDA, between events. ``commit_seconds`` is the
    rest of the steps' wall-clock time.

    A step is one verify pass of the target after the prefill; the bonus token counts as emitted, not as a draft.
    ``num_spec_tokens`` is the most drafts that any step could have accepted (the depth of the deepest tree), as vLLM
    uses the name: ``1 <= mean_acceptance_length <= num_spec_tokens + 1``.
    """

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

    def record_step(self, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Count one step: drafts in the tree, its depth, drafts on the accepted path, tokens emitted up to a stop."""
        self.num_spec_tokens = max(self.num_spec_tokens, depth)
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.num_generated_tokens += emitted
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1
        self.accept_lengths.append(emitted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify step, the bonus token counted."""
        return sum(self.accept_lengths) / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens of the verify steps over their time, prefill and first token left out."""
        seconds = self.wall_seconds - self.time_to_first_token
        return sum(self.accept_lengths) / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, float | int | list[int]]:
        """All figures, derived ones included, as plain JSON values."""
        derived = ("mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second")
        return {**{name: getattr(self, name) for name in derived}, **vars(self)}
