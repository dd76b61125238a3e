"""The front door: ``load`` a model and a drafter, then generate."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from transformers import PreTrainedModel

from mmspec import kernels, plugins
from mmspec.budget import AdaptiveBudget, Budget, SteadyBudget
from mmspec.calibrate import cost_table, stored_cost
from mmspec.checks import shown
from mmspec.drafter import Drafter
from mmspec.engine import Row, decode, generator_for
from mmspec.errors import UserError
from mmspec.loading import load_target, make_drafter
from mmspec.request import Call, parse
from mmspec.sampling import Sampler
from mmspec.stats import Stats
from mmspec.stopping import FinishReason, Stopper
from mmspec.target import Prompt
from mmspec.transformers_target import TransformersTarget
from mmspec.turns import Turn

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
    model: Any = "tiny-llava",
    drafter: Any = "auto",
    device: str = "auto",
    dtype: Any = "auto",
    processor: Any = None,
    **options: Any,
) -> Pipeline:
    """Load a model and a drafter for it.

    Args:
        model: hub id, local folder, an embedded name (``tiny-llava``), or a model of transformers, which is left as it
            is: on its device, in its dtype.
        drafter: ``"auto"`` (the one in the model's folder, else ``"recycle"``), a registered name (``"ngram"``,
            ``"recycle"``, ``"small:NAME"``, ...), the folder or hub id of a drafter checkpoint, a ``Drafter`` object,
            or None for plain decoding.
        device: ``"auto"`` takes a GPU where there is one; else a torch device name.
        dtype: ``"auto"`` is float32 on a CPU for models below a billion parameters and the checkpoint's own
            otherwise; else ``"float32"``, ``"bfloat16"`` or ``"float16"``, or the torch dtype.
        processor: the tokenizer or processor of a model that is given as an object.
        **options: passed on to transformers' ``from_pretrained``. Python code that a folder brings along runs only with
            ``trust_remote_code=True``.

    Raises:
        UserError: the model, drafter, device or dtype is unknown or cannot be had.
    """
    if isinstance(model, PreTrainedModel):
        if processor is None:
            raise UserError(f"a model object needs processor=, its tokenizer or processor: got {type(model).__name__}")
        asked = {"device": device, "dtype": dtype, **options}
        if given := [f"{name}={shown(value)}" for name, value in asked.items() if value != "auto"]:
            raise UserError(f"a model object stays on its device and in its dtype: got {', '.join(given)}")
        home = model.config.name_or_path or ""
        return Pipeline(plugins.target_class(model.config)(model, processor), make_drafter(drafter, home))
    if not isinstance(model, str | PathLike):
        raise UserError(f"model must be a name, a folder or a model of transformers: got {shown(model)}")
    if processor is not None:
        raise UserError(f"processor= goes with a model object: got the model {shown(model)}, which brings its own")
    model = fspath(model)
    folder = str(plugins.find("models", model)() if model in plugins.names("models") else model)
    # First: a misspelt name should not cost the loading of a large model.
    speculator = make_drafter(drafter, folder, options.get("trust_remote_code", False))
    return Pipeline(load_target(folder, device, dtype, **options), speculator, name=model)


class Pipeline:
    """A target and its drafter.

    It serves one request at a time: threads wait for each other, and a request made before a stream of the same thread
    is finished is refused. So it is with pipelines that share a target or a drafter.

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
            with Turn(drafter):
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
            **keywords: the fields of ``SamplingParams`` (``max_new_tokens``, ``temperature``, ``stop``, ``seed``, ...),
                ``nodes`` (tree size per step; None takes the size that is expected to be fastest),
                ``logits_processor`` and ``stopping_criteria`` (lists as for transformers' ``generate``), ``frames``
                (per video).

        Raises:
            UserError: an option out of range, input that cannot be read, a prompt beyond the context limit, or a stream
                of this thread that is not finished.
        """
        return self.generate_batch([{"prompt": prompt, "images": images, "videos": videos}], **keywords)[0]

    def generate_batch(self, requests: Sequence[Mapping[str, Any]], **keywords: Any) -> list[Generation]:
        """Answer several prompts at once, ``{"prompt": ..., "images": ..., "videos": ...}`` each; see ``generate``.

        In float32, each row's tokens are those of its answer alone.
        """
        call = parse(requests, keywords)
        if not requests:
            return []
        request = _Request(self, call)
        *_, rows = request.steps()
        return [
            Generation(request.text(row.token_ids), row.token_ids, row.finish_reason or "length", row.stats)
            for row in rows
        ]

    def stream(
        self, prompt: str | Sequence[Message], images: Any = None, videos: Any = None, **keywords: Any
    ) -> Iterator[Piece]:
        """Answer one prompt piece by piece, as tokens are accepted; see ``generate``.

        The request begins when the first piece is asked for, and ends with the last one, or when the iterator is closed
        or dropped.
        """
        request = _Request(self, parse([{"prompt": prompt, "images": images, "videos": videos}], keywords))
        shown, pending = "", []
        with closing(request.steps()) as steps:
            for (row,) in steps:
                pending += row.emitted
                text = request.text(row.token_ids, final=row.finish_reason is not None)
                if row.finish_reason is not None:
                    last = Piece(text[len(shown) :], pending, row.finish_reason, row.stats)
                elif len(text) > len(shown):
                    yield Piece(text[len(shown) :], pending)
                    shown, pending = text, []
        yield last

    def steps(
        self, prompt: Prompt, sampler: Sampler, stopper: Stopper, nodes: int | None = None
    ) -> Generator[list[Row], None, None]:
        """Decode as ``mmspec.engine.decode`` does. Target and drafter belong to this request from the first step until
        the generator ends, is closed or is dropped.

        Raises:
            UserError: another request has them and may never end; see ``Turn``.
        """
        with Turn(self.target, self.drafter) as turn:
            if self.drafter is not None:
                self.drafter.attach(self.target)  # another pipeline may have attached it to its own target
            budget = budget_for(self.target, self.drafter, nodes, len(prompt.input_ids), self.budgets)
            for rows in decode(self.target, self.drafter, prompt, sampler, stopper, budget):
                with turn.paused():
                    yield rows


class _Request:
    """A call that was checked, with what its decoding needs."""

    def __init__(self, pipe: Pipeline, call: Call) -> None:
        self.pipe, self.target = pipe, pipe.target
        params, extras = call.params, call.extras
        self.stop, self.nodes = params.stop_strings, extras.nodes
        with self.target.attention.applied():  # targets of one model share its tokenizer as well
            self.prompt: Prompt = self.target.encode(call.requests, **call.inputs)
        length, limit = self.prompt.input_ids.shape[1], self.target.context_limit
        if limit is not None and length >= limit:
            raise UserError(f"the prompt must be shorter than the model's context of {limit} tokens: got {length}")
        self.sampler = Sampler(
            params.processors(extras.logits_processor),
            do_sample=params.do_sample,
            generator=generator_for(params.seed, self.prompt.input_ids.device),
        )
        self.stopper = Stopper(
            params.max_new_tokens,
            context_limit=limit,
            eos_token_ids=self.target.eos_token_ids,
            stop=self.stop,
            criteria=extras.stopping_criteria,
            tokenizer=self.target.tokenizer,
        )

    def steps(self) -> Generator[list[Row], None, None]:
        return self.pipe.steps(self.prompt, self.sampler, self.stopper, self.nodes)

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
