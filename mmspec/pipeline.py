"""The front door: ``load`` a model and a drafter, then generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec import kernels, plugins
from mmspec.budget import AdaptiveBudget, Budget, SteadyBudget
from mmspec.calibrate import cost_table, stored_cost
from mmspec.drafter import Drafter
from mmspec.engine import Row, decode, generator_for
from mmspec.errors import UserError
from mmspec.loading import load_target, make_drafter
from mmspec.sampling import Sampler, SamplingParams
from mmspec.stats import Stats
from mmspec.stopping import FinishReason, Stopper
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Generation:
    """One answer.

    ``token_ids`` are the tokens as generated. ``text`` is what the tokenizer decodes them to, up to a stop string, and
    without the blank that some chat templates put before an answer ("ASSISTANT: answer").
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last one carries ``finish_reason`` and ``stats``."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


def load(
    model: str = "tiny-llava", drafter: Any = "auto", device: str = "auto", dtype: str = "auto", **options: Any
) -> Pipeline:
    """Load a model and a drafter for it.

    Args:
        model: hub id, local folder, or an embedded name (``tiny-llava``).
        drafter: ``"auto"`` (the one in the model's folder, else ``"recycle"``), a registered name (``"ngram"``,
            ``"recycle"``, ``"small:NAME"``, ...), the folder or hub id of a drafter checkpoint, a ``Drafter`` object,
            or None for plain decoding.
        device: ``"auto"`` takes a GPU where there is one; else a torch device name.
        dtype: ``"auto"`` is float32 on a CPU for models below a billion parameters and the checkpoint's own
            otherwise; else ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        **options: passed on to transformers' ``from_pretrained``. Python code that a folder brings along runs only with
            ``trust_remote_code=True``.

    Raises:
        UserError: the model, drafter, device or dtype is unknown or cannot be had.
    """
    folder = str(plugins.find("models", model)() if model in plugins.names("models") else model)
    # First: a misspelt name should not cost the loading of a large model.
    speculator = make_drafter(drafter, folder, options.get("trust_remote_code", False))
    return Pipeline(load_target(folder, device, dtype, **options), speculator, name=model)


class Pipeline:
    """A target and its drafter.

    Attributes:
        model, processor: the plain transformers objects.
        target, drafter: what generation runs on; ``drafter`` may be None.
        name: how the model was asked for.
        budgets: by batch size, what adaptive budgets have learnt of this drafter on this target.
    """

    def __init__(self, target: TransformersTarget, drafter: Drafter | None = None, name: str = "") -> None:
        self.target = target
        self.drafter = drafter
        self.budgets: dict[int, Any] = {}
        self.name = name or getattr(target.model.config, "name_or_path", "") or type(target.model).__name__
        if drafter is not None:
            drafter.attach(target)

    @property
    def model(self) -> Any:
        return self.target.model

    @property
    def processor(self) -> Any:
        return self.target.processor

    def generate(
        self, prompt: str | Sequence[Message], images: Any = None, videos: Any = None, **keywords: Any
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text, or chat messages in transformers' format.
            images: paths, bytes, PIL images or arrays, in the order of their place in the prompt.
            videos: paths (or whatever the target's adapter takes as a video).
            **keywords: ``max_new_tokens`` (256), ``temperature`` (0.0), ``top_p`` (1.0), ``top_k`` (0), ``min_p``
                (0.0), ``repetition_penalty`` (1.0), ``stop`` (strings), ``seed``, ``nodes`` (tree size per step; None
                takes the size that is expected to be fastest), ``logits_processor`` and ``stopping_criteria`` (lists
                as for transformers' ``generate``), ``frames`` (per video).

        Raises:
            UserError: an option out of range, input that cannot be read, or a prompt beyond the context limit.
        """
        return self.generate_batch([{"prompt": prompt, "images": images, "videos": videos}], **keywords)[0]

    def generate_batch(self, requests: Sequence[Mapping[str, Any]], **keywords: Any) -> list[Generation]:
        """Answer several prompts at once, ``{"prompt": ..., "images": ..., "videos": ...}`` each; see ``generate``."""
        if not requests:
            return []
        request = _Request(self, requests, **keywords)
        *_, rows = request.run()
        return [
            Generation(request.text(row.token_ids), row.token_ids, row.finish_reason or "length", row.stats)
            for row in rows
        ]

    def stream(
        self, prompt: str | Sequence[Message], images: Any = None, videos: Any = None, **keywords: Any
    ) -> Iterator[Piece]:
        """Answer one prompt piece by piece, as tokens are accepted; see ``generate``."""
        request = _Request(self, [{"prompt": prompt, "images": images, "videos": videos}], **keywords)
        shown, pending = "", []
        for (row,) in request.run():
            pending += row.emitted
            text = request.text(row.token_ids, final=row.finish_reason is not None)
            if row.finish_reason is not None:
                yield Piece(text[len(shown) :], pending, row.finish_reason, row.stats)
            elif len(text) > len(shown):
                yield Piece(text[len(shown) :], pending)
                shown, pending = text, []


class _Request:
    """One call's options, checked, and its run."""

    def __init__(
        self,
        pipe: Pipeline,
        requests: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        nodes: int | None = None,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        **inputs: Any,
    ) -> None:
        self.target, self.drafter = pipe.target, pipe.drafter
        params = SamplingParams(temperature, top_p, top_k, min_p, repetition_penalty)
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1: got {max_new_tokens}")
        if nodes is not None and nodes < 0:
            raise UserError(f"nodes must be at least 0: got {nodes}")
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        self.prompt: Prompt = self.target.encode(requests, **inputs)
        length, limit = self.prompt.input_ids.shape[1], self.target.context_limit
        if limit is not None and length >= limit:
            raise UserError(f"the prompt must be shorter than the model's context of {limit} tokens: got {length}")
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - length)
        self.sampler = Sampler(
            params.processors(logits_processor),
            do_sample=params.do_sample,
            generator=generator_for(seed, self.prompt.input_ids.device),
        )
        self.stopper = Stopper(
            room,
            eos_token_ids=self.target.eos_token_ids,
            stop=self.stop,
            criteria=stopping_criteria,
            tokenizer=self.target.tokenizer,
        )
        self.budget = budget_for(self.target, self.drafter, nodes, len(requests), pipe.budgets)

    def run(self) -> Iterator[list[Row]]:
        return decode(self.target, self.drafter, self.prompt, self.sampler, self.stopper, self.budget)

    def text(self, token_ids: list[int], *, final: bool = True) -> str:
        """The answer's text; unless ``final``, without an end that later tokens may still change."""
        text = self.target.decode(token_ids)
        cut = min((at for s in self.stop if (at := text.find(s)) >= 0), default=len(text))
        text = text[:cut]
        if final:
            return text
        held = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        text = text[: len(text) - held]
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text


def budget_for(
    target: TransformersTarget,
    drafter: Drafter | None,
    nodes: int | None,
    batch: int,
    learnt: dict[int, Any] | None = None,
) -> Budget:
    """``nodes`` drafted nodes per step, or as many as are measured to pay when it is None.

    Args:
        learnt: adaptive budgets by batch size, to go on with and to add to.
    """
    if target.cost is None:
        target.cost = stored_cost(target)
    if drafter is None:
        return Budget(nodes=0)
    if nodes is not None:
        return Budget(nodes)
    if target.cost is None:
        target.cost = cost_table(target)
    learnt = {} if learnt is None else learnt
    if batch not in learnt:
        steady = kernels.fixed_shapes(target.device)
        learnt[batch] = SteadyBudget(target.cost, batch=batch) if steady else AdaptiveBudget(target.cost, batch=batch)
    return learnt[batch]
