"""Public API: ``Pipeline``, with complete and streamed answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, Unpack, overload
from weakref import WeakKeyDictionary

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from mmspec.adaptation.adaptation import Adaptation
from mmspec.adaptation.options import AdaptOptions
from mmspec.cache.prefix_cache import PrefixCache
from mmspec.core.drafter import Drafter
from mmspec.core.target import HasDefaults, Prompt, Target
from mmspec.drafters.registry import registered_name
from mmspec.engine.distributed import DistributedEngine
from mmspec.engine.engine import MAX_NUM_SEQS, Engine
from mmspec.engine.policy import DraftPolicy
from mmspec.engine.request import GenerateKeywords, Request, parse, shows_keywords
from mmspec.engine.request_state import RequestState, Wakeup
from mmspec.engine.speculation import Speculation
from mmspec.engine.stats import Stats, TreeRecord
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.errors import Attempt, UserError, raising, returning
from mmspec.sampling.defaults import MODELS, Defaults, Source
from mmspec.sampling.grammar import AfterReasoning, Grammars, TriggeredGrammar
from mmspec.sampling.logprobs import TokenLogprob
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.reasoning import ReasoningParser
from mmspec.sampling.sampler import Constraint, Sampler
from mmspec.targets.detokenizer import AnswerReader
from mmspec.targets.packing import weights_kind
from mmspec.targets.processor import Processor, is_token_ids
from mmspec.targets.transformers_target import TransformersTarget, sharded
from mmspec.validation import check

Message = Mapping[str, Any]
PromptInput = str | Sequence[Message] | Sequence[int]
"""Text, chat messages, or token ids."""
_GRAMMARS: WeakKeyDictionary[Processor, dict[tuple[int, ...], Grammars]] = WeakKeyDictionary()
"""Grammar compilers by processor and EOS tokens, cached as llguidance takes seconds to read a large vocabulary."""
if hasattr(os, "register_at_fork"):  # a thread of the parent may have held the locks of compilers
    os.register_at_fork(after_in_child=_GRAMMARS.clear)

_ATTEMPTS = {"raise": raising, "return": returning}


@dataclass(frozen=True)
class Generation:
    """One answer.

    ``token_ids`` are the generated tokens. ``text`` is their text after the prompt, up to a stop string, without the
    blank that some chat templates put before an answer ("ASSISTANT: answer"). With ``trace=True``, ``trees`` are the
    verified trees, one per step. With ``logprobs=K``, ``logprobs`` are the tokens' log probabilities. With
    ``reasoning="auto"`` or a format, ``reasoning`` is the reasoning before the text, and ``num_reasoning_tokens`` its
    number of tokens, markers included.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    trees: list[TreeRecord] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    reasoning: str = ""
    num_reasoning_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last part has ``finish_reason`` and ``stats``. ``trees`` covers the answer so
    far (with ``trace=True``), ``logprobs`` the ``token_ids`` of this part (with ``logprobs=K``). ``seconds`` is the
    engine's time for the answer so far, including waiting and prefill. ``reasoning`` and ``num_reasoning_tokens`` are
    defined as in ``Generation``, for this part."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    trees: list[TreeRecord] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    seconds: float = 0.0
    reasoning: str = ""
    num_reasoning_tokens: int = 0


class ActiveRequest:
    """A request in the engine, with incremental text of its answer.

    Args:
        engine: engine that decodes the request.
        add: queues the request, given ``on_change``.
        reader: converts tokens to text.
    """

    def __init__(self, engine: Engine, add: Callable[..., list[RequestState]], reader: AnswerReader) -> None:
        self._engine, self._add, self._reader = engine, add, reader
        self.started = self.ended = False
        self._pending: list[int] = []  # tokens of the next piece
        self._offsets: list[int] = []  # text offsets of pending tokens
        self._sent = self._num_reasoning_tokens = 0  # tokens and reasoning tokens of earlier pieces

    def start(self, on_change: Callable[[], None]) -> Self:
        """Queue the request; returns ``self``.

        Args:
            on_change: called in another thread after each step in which the request got tokens or ended.
        """
        (self.sequence,) = self._add(on_change=on_change)
        self.started = True
        return self

    @property
    def done(self) -> bool:
        return self.started and self.sequence.done

    def whole(self) -> Generation:
        """The complete answer of an ended sequence. Raises the sequence's error if it failed."""
        one = self.next()
        assert one is not None
        assert one.finish_reason is not None
        record = self.sequence.stats, one.trees, one.logprobs, one.reasoning, one.num_reasoning_tokens
        return Generation(one.text, one.token_ids, one.finish_reason, *record)

    def next(self) -> Piece | None:
        """The tokens since the last call; None while a character is incomplete. Raises a failed sequence's error."""
        sequence, parts = self.sequence, [("", "")]
        # Read before the tokens: another thread may be adding tokens.
        reason: FinishReason | None = (sequence.finish_reason or "length") if sequence.done else None
        self.ended = reason is not None
        if sequence.error is not None:
            raise sequence.error
        for token in sequence.take():
            self._pending.append(token)
            self._offsets.append(self._reader.answer.length)
            parts.append(self._reader.append(token))
        reasoning, text = map("".join, zip(*parts, *([self._reader.finish()] if self.ended else ()), strict=True))
        if not (self.ended or reasoning or text):
            return None
        own = zip(sequence.logprobs[self._sent : self._sent + len(self._pending)], self._offsets, strict=False)
        logprobs = [replace(one, text_offset=offset) for one, offset in own]
        stats, reasoned = sequence.stats if reason else None, self._reader.num_reasoning_tokens
        record = stats, list(sequence.trees or ()), logprobs, sequence.stats.wall_seconds
        piece = Piece(text, self._pending, reason, *record, reasoning, reasoned - self._num_reasoning_tokens)
        self._sent += len(self._pending)
        self._pending, self._offsets, self._num_reasoning_tokens = [], [], reasoned
        return piece

    def cancel(self) -> None:
        """Remove the request from the engine. No effect after its end."""
        self._engine.remove([self.sequence])


class Pipeline:
    """A target, its processor, a drafter and the engine that decodes with them.

    Thread-safe: requests of all threads are batched, and no request's tokens depend on another request. Pipelines of
    one target share its engine; requests with different drafters decode one after another.

    Args:
        target: the target model.
        processor: encodes requests and decodes answers; None if prompts and answers are token ids only.
        drafter: the drafter; None for plain decoding.
        name: name that the model was loaded by; by default ``name_or_path`` of its configuration.
        max_num_seqs: maximum number of concurrent requests; further requests wait. Pipelines of one target share the
            largest value.
        prefix_cache: see ``mmspec.load``; for targets that keep states (``KeepsStates``).
        generation_config: see ``mmspec.load``; targets without their own defaults use the library's.
        adapt: see ``mmspec.load``; None does not adapt.
        policy: drafting policy with the learned state of another pipeline; None starts anew.

    Attributes:
        model, hf_processor: the plain transformers objects.
        target, processor, drafter, name, max_num_seqs, generation_config: as above.
        engine: the target's engine.
        defaults: defaults of sampling parameters.
        context_limit: maximum length of prompt plus output; the target's limit unless lowered.
        policy: learned drafting policy of this drafter on this target.
        adaptation: adaptation of the drafter; None if it does not adapt. Copies of the pipeline do not adapt.
    """

    def __init__(
        self,
        target: Target,
        processor: Processor | None = None,
        drafter: Drafter | None = None,
        name: str = "",
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
        prefix_cache: int = 0,
        generation_config: str = MODELS,
        adapt: AdaptOptions | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        # Drafters, evaluation and training of transformers models use attributes outside the ``Target`` protocol.
        self.target: Any = target
        self.processor = Processor() if processor is None else processor
        self.context_limit: int | None = target.context_limit
        model = getattr(target, "model", target)
        self.name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        self.generation_config = check("generation_config", Source, generation_config)
        self.max_num_seqs = check("max_num_seqs", PositiveInt, max_num_seqs)
        check("prefix_cache", NonNegativeInt, prefix_cache)
        self.adaptation = None if adapt is None else Adaptation(drafter, target, adapt)
        self._connect(drafter if self.adaptation is None else self.adaptation.drafter, policy)
        if prefix_cache:
            self.engine.use_prefixes(PrefixCache(prefix_cache))
        if self.adaptation is not None:
            self.engine.idle.add(self.adaptation)

    def __repr__(self) -> str:
        packed = weights_kind(self.model) if isinstance(getattr(self.target, "model", None), nn.Module) else None
        packed = packed and packed.removesuffix("Blocks").removesuffix("Linear").lower()
        shown = {
            "model": self.name,
            "drafter": registered_name(self.drafter),
            "device": str(self.target.device),
            "dtype": packed or str(self.target.dtype).removeprefix("torch."),
        }
        return f"Pipeline({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _connect(self, drafter: Drafter | None, policy: DraftPolicy | None) -> None:
        """Create engine, speculation and defaults for this target."""
        has_defaults = self.generation_config == MODELS and isinstance(self.target, HasDefaults)
        self.defaults: Defaults = self.target.defaults() if has_defaults else Defaults(self.target.eos_token_ids)
        self._speculation = Speculation(self.target, drafter, policy)
        self.engine = (DistributedEngine if sharded(self.target) else Engine).of(self.target, self.max_num_seqs)

    def __getstate__(self) -> dict[str, Any]:
        """For ``pickle`` and ``copy.deepcopy``, without running requests, which may continue."""
        left_out = ("defaults", "engine", "_speculation")
        state = {name: value for name, value in vars(self).items() if name not in left_out} | {"adaptation": None}
        with self.engine.paused():
            drafter = self.drafter and self.drafter.fork(self.target)
            return {**state, "drafter": drafter, "policy": self.policy, "prefixes": self.engine.prefixes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        drafter, policy, prefixes = (state.pop(name) for name in ("drafter", "policy", "prefixes"))
        vars(self).update(state)
        self.target.keep([])
        self._connect(drafter, policy)
        if prefixes is not None:
            self.engine.use_prefixes(prefixes)

    @property
    def model(self) -> Any:
        return self.target.model

    @property
    def drafter(self) -> Drafter | None:
        return self._speculation.drafter

    @property
    def policy(self) -> DraftPolicy:
        return self._speculation.adaptive

    def warm_up(
        self, rows: int | None = None, tokens: int | None = None, num_draft_tokens: Sequence[int | None] = (None,)
    ) -> None:
        """Reserve memory for sequences and capture the CUDA graphs of their decode steps.

        Without warm-up, steps are captured when they first occur. Longer prompts and more sequences remain possible:
        buffers then grow, and steps are captured again. No effect if steps are not captured, as on a CPU. Waits until
        running sequences have ended.

        Args:
            rows: maximum number of concurrent sequences; None is ``max_num_seqs``.
            tokens: tokens per sequence, prompt and answer together, limited to half of the free memory; None is 8192.
            num_draft_tokens: draft sizes, as for ``generate``.
        """
        rows = check("rows", PositiveInt, self.max_num_seqs if rows is None else rows)
        if tokens is not None:
            check("tokens", PositiveInt, tokens)
        self.engine.warm_up(self._speculation, rows, tokens, num_draft_tokens)

    @property
    def hf_processor(self) -> Any:
        return self.processor.plain

    @property
    def io(self) -> Processor:
        """Deprecated name of ``processor``."""
        return self.processor

    def limited(self, context_limit: int) -> Pipeline:
        """A copy of this pipeline with at most this context limit, sharing engine and drafter."""
        if self.context_limit is not None and self.context_limit <= context_limit:
            return self
        limited: Pipeline = object.__new__(type(self))
        vars(limited).update(vars(self), context_limit=check("context_limit", PositiveInt, context_limit))
        return limited

    def encode(self, requests: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Encode requests as one left-padded batch on the target's device; see ``Processor.encode``."""
        return self.processor.encode(requests, **options).to(self.target.device, self.target.dtype)

    def follow(self) -> bool:
        """Answer the requests of rank 0 on all other ranks, until it ends; for a model with ``tp_plan``.

        Every rank calls this once, on the pipeline that rank 0 answers with, before the first request.

        Returns:
            True on ranks other than 0, after rank 0 has ended. False immediately on rank 0, and for models that are not
            sharded.

        Raises:
            RankError: a rank is lost, or its state differs from rank 0's.
        """
        if not isinstance(self.engine, DistributedEngine):
            return False
        return self.engine.follow(self._speculation, lambda request: self._begin(request).sequence)

    def activate(self, request: Request) -> ActiveRequest:
        """Encode a request without starting it.

        Raises:
            UserError: the input cannot be read, or is longer than the context limit.
        """
        request = self.engine.admit(request)
        params, options = self.defaults.complete(request.params), request.options
        rendered = options.chat_template and not is_token_ids(request.content["prompt"])
        prompt = self.encode([request.content], **request.inputs, **({} if rendered else {"chat_template": False}))
        prompt = self._with_adapter(prompt, options.adapter)
        length, limit = prompt.input_ids.shape[1], self.context_limit
        if limit is not None and length >= limit:
            raise UserError(f"the prompt must be shorter than the model's context of {limit} tokens: got {length}")
        parser = self.processor.reasoning_parser(options.reasoning, prompt.input_ids[0])
        constraint = self.grammar(params, parser)
        assert params.max_new_tokens is not None
        eos_token_ids = frozenset(() if params.ignore_eos else self.target.eos_token_ids)
        read = self._answer_reader(params, parser, eos_token_ids, rendered and not request.inputs.get("answer_start"))
        stopper = Stopper(
            params.max_new_tokens,
            context_limit=limit,
            eos_token_ids=eos_token_ids,
            readers=(read, partial(read, hidden=frozenset())) if params.stop_strings else (),
            criteria=options.stopping_criteria,
            device=self.target.device,
            max_time=options.max_time,
        )
        sampler = self.defaults.sampler(params, prompt.input_ids, options.logits_processor, constraint)
        spelling = self.processor.token_bytes if options.trace and self.processor.tokenizer is not None else None
        recording: dict[str, Any] = {"request": request, "token_bytes": spelling}
        add = partial(self.add, prompt, sampler, stopper, options.num_draft_tokens, **recording)
        return ActiveRequest(self.engine, add, read(prompt.input_ids[0].tolist()))

    def _answer_reader(
        self, params: SamplingParams, parser: ReasoningParser | None, eos_token_ids: Set[int], rendered: bool
    ) -> Callable[..., AnswerReader]:
        """Factory of output readers for a prompt; ``rendered``: by the chat template."""
        vocabulary, trigger, hidden = self.processor.vocabulary, params.grammar_trigger, None
        if constrained := params.constraint is not None:
            shown = None if trigger is None else self.processor.special_token(trigger)
            hidden = (vocabulary.special_ids | eos_token_ids) - {shown}  # EOS may be text, except in grammars
        begins = rendered and (not constrained or trigger is not None)
        prefix = self.processor.answer_prefix if begins else ""
        read = partial(AnswerReader, vocabulary, stop=params.stop_strings, parser=parser, prefix=prefix)
        return partial(read, hidden=hidden, verbatim=constrained)

    def add(
        self, prompt: Prompt, sampler: Sampler, stopper: Stopper, num_draft_tokens: int | None = None, **options: Any
    ) -> list[RequestState]:
        """Queue encoded prompts on the engine with this pipeline's drafter; see ``Engine.add``."""
        return self.engine.add(prompt, sampler, stopper, self._speculation, num_draft_tokens, **options)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of LoRA adapters that requests may choose."""
        return self.target.adapters.names if isinstance(self.target, TransformersTarget) else ()

    def _with_adapter(self, prompt: Prompt, name: str | None) -> Prompt:
        if name is None:
            return prompt
        if not isinstance(self.target, TransformersTarget):
            raise UserError(f"adapters need a model of transformers: got {name!r} for {type(self.target).__name__}")
        self.target.adapters.check(name)
        return replace(prompt, adapter=name)

    def _begin(self, request: Request, on_change: Callable[[], None] = lambda: None) -> ActiveRequest:
        return self.activate(request).start(on_change)

    def grammar(self, params: SamplingParams, parser: ReasoningParser | None = None) -> Constraint | None:
        """The grammar that constrains outputs, compiled for the tokenizer; None without one.

        Args:
            parser: parser of the reasoning that precedes the constrained answer.

        Raises:
            UserError: the tokenizer or its vocabulary does not support the grammar.
        """
        if params.constraint is None:
            return None
        known, ends = _GRAMMARS.setdefault(self.processor, {}), tuple(self.target.eos_token_ids)
        if ends not in known:
            known[ends] = Grammars(self.processor.tokenizer, ends)
        grammar: Any = known[ends].compile(*params.constraint)
        if (trigger := params.grammar_trigger) is not None:
            token = self.processor.special_token(trigger)
            grammar = TriggeredGrammar(grammar, trigger, token, known[ends].tokenizer)
        return grammar if parser is None else AfterReasoning(grammar, parser, known[ends].spelt)

    @shows_keywords
    def generate(
        self, prompt: PromptInput, images: Any = None, videos: Any = None, **keywords: Unpack[GenerateKeywords]
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text, chat messages in transformers' or OpenAI's format, or a list of token ids.
            images: paths, bytes, data URIs, PIL images or arrays, in the order of the prompt's placeholders.
            videos: paths, bytes, file objects or ``mmspec.vision.video.Video`` objects.
            **keywords: ``params``, a ``SamplingParams``, or its fields (``max_new_tokens``, ``temperature``, ``stop``,
                ...); fields of ``DecodeOptions`` (``num_draft_tokens``, ``trace``, ``logprobs``, ``reasoning``, ...);
                and options of the processor's ``encode`` (``tools``, ``answer_start``, ``chat_template_kwargs``; of
                videos, ``frames``, ...). All are in ``mmspec.engine.request.GenerateKeywords``.

        Raises:
            UserError: an option out of range, input that cannot be read, or a prompt longer than the context limit.
        """
        return self.generate_batch([{"prompt": prompt, "images": images, "videos": videos}], **keywords)[0]

    @overload
    def generate_batch(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        on_error: Literal["raise"] = "raise",
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Generation]: ...

    @overload
    def generate_batch(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        on_error: Literal["return"],
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Generation | UserError]: ...

    @shows_keywords
    def generate_batch(
        self, requests: Sequence[Mapping[str, Any]], *, on_error: str = "raise", **keywords: Unpack[GenerateKeywords]
    ) -> Sequence[Generation | UserError]:
        """Answer several prompts, ``max_num_seqs`` of them at a time.

        In float32, each answer has the same tokens as alone.

        Args:
            requests: ``{"prompt": ..., "images": ..., "videos": ..., "params": ...}`` each; ``params`` replaces the
                call's parameters.
            on_error: ``"raise"`` raises the first request's ``UserError`` and drops the other answers; ``"return"``
                returns it in place of the answer. Invalid keywords of the call are always raised.
            **keywords: see ``generate``.
        """
        attempt = _ATTEMPTS[check("on_error", Literal["raise", "return"], on_error)]
        return _answer_all(
            self.engine, parse(requests, keywords, self.processor.options, attempt), self.activate, attempt
        )

    @shows_keywords
    def stream(
        self, prompt: PromptInput, images: Any = None, videos: Any = None, **keywords: Unpack[GenerateKeywords]
    ) -> Iterator[Piece]:
        """Answer one prompt piece by piece, as tokens are accepted; see ``generate``.

        The request starts with the first ``next``. Closing or dropping the iterator cancels it.
        """
        (request,) = parse([{"prompt": prompt, "images": images, "videos": videos}], keywords, self.processor.options)
        return _stream_answer(partial(self._begin, request))

    @shows_keywords
    def astream(
        self, prompt: PromptInput, images: Any = None, videos: Any = None, **keywords: Unpack[GenerateKeywords]
    ) -> AsyncIterator[Piece]:
        """``stream`` for asyncio. Cancelling the task or leaving the iteration cancels the request."""
        content = {"prompt": prompt, "images": images, "videos": videos}

        def begin(on_change: Callable[[], None]) -> ActiveRequest:
            (request,) = parse([content], keywords, self.processor.options)
            return self._begin(request, on_change)

        return _astream_answer(begin)


def _answer_all(
    engine: Engine,
    requests: Iterable[Request | UserError],
    activate: Callable[[Request], ActiveRequest],
    attempt: Attempt,
) -> list[Generation | UserError]:
    """Complete answers of several requests, with at most twice ``max_num_seqs`` requests encoded at a time.

    Args:
        requests: requests, or errors, which are returned in their places.
        activate: encodes a request.
        attempt: calls a function and raises or returns its ``UserError`` (``raising``, ``returning``).
    """
    answers: list[ActiveRequest | UserError] = []
    wakeup = Wakeup()

    def known() -> list[ActiveRequest]:
        return [answer for answer in answers if isinstance(answer, ActiveRequest)]

    def ready() -> bool:
        return sum(not answer.done for answer in known()) < 2 * engine.max_num_seqs

    def start() -> None:
        with engine.together():
            for answer in known():
                if not answer.started:
                    answer.start(wakeup)

    def result(answer: ActiveRequest) -> Generation:
        wakeup.wait(lambda: answer.sequence.done)
        return answer.whole()

    try:
        for request in requests:
            if not ready():  # limit the memory for inputs of waiting requests
                start()
                wakeup.wait(ready)
            answers.append(attempt(partial(activate, request)) if isinstance(request, Request) else request)
        start()
        return [attempt(partial(result, entry)) if isinstance(entry, ActiveRequest) else entry for entry in answers]
    finally:
        engine.remove(answer.sequence for answer in known() if answer.started)


def _stream_answer(begin: Callable[[Callable[[], None]], ActiveRequest]) -> Iterator[Piece]:
    """Pieces of an answer, as tokens are accepted. Closing or dropping the iterator cancels the request.

    Args:
        begin: called at the first ``next`` to start the request; takes ``on_change`` for ``ActiveRequest.start``.
    """
    wakeup = Wakeup()
    answer = begin(wakeup)
    try:
        while not answer.ended:
            wakeup.wait(lambda: answer.sequence.has_output)
            if (piece := answer.next()) is not None:
                yield piece
    finally:
        answer.cancel()


async def _astream_answer(begin: Callable[[Callable[[], None]], ActiveRequest]) -> AsyncIterator[Piece]:
    """``_stream_answer`` for asyncio. Cancelling the task or leaving the iteration cancels the request.

    ``begin`` is called in another thread.
    """
    changed, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    starting = asyncio.ensure_future(asyncio.to_thread(begin, wake))
    try:
        answer = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})  # the thread cannot be stopped
        if starting.exception() is None:
            starting.result().cancel()
        raise
    try:
        while not answer.ended:
            await changed.wait()
            changed.clear()
            if (piece := answer.next()) is not None:
                yield piece
    finally:
        answer.cancel()
