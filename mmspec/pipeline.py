"""Public API: ``Pipeline``, with complete and streamed answers."""

from __future__ import annotations

import asyncio
import os
from collections import abc
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, Literal, Unpack, overload
from weakref import WeakKeyDictionary

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from mmspec.adaptation import AdaptOptions
from mmspec.adaptation.adaptation import Adaptation
from mmspec.cache.prefix import PrefixFiles
from mmspec.cache.prefix_cache import PrefixCache
from mmspec.core.drafter import Drafter
from mmspec.core.target import HasDefaults, Prompt, Target
from mmspec.drafters.registry import registered_name
from mmspec.engine.distributed import DistributedEngine
from mmspec.engine.engine import MAX_NUM_SEQS, Engine
from mmspec.engine.policy import DraftPolicy, Speculation
from mmspec.engine.request import GenerateKeywords, Request, parse, shows_keywords
from mmspec.engine.sequence import DecodeRequest, Delta, Sequence, Sink
from mmspec.engine.stats import Stats, TokenLogprob, TreeRecord
from mmspec.engine.stopping import FinishReason, Stopper
from mmspec.engine.warm_up import warm_up
from mmspec.errors import LongPromptError, UserError, raising, returning
from mmspec.sampling.defaults import MODELS, Defaults, Source
from mmspec.sampling.grammar import AfterReasoning, Grammars, TriggeredGrammar
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.reasoning import ReasoningParser
from mmspec.sampling.sampler import Constraint
from mmspec.targets.detokenizer import AnswerReader
from mmspec.targets.packing import weights_kind
from mmspec.targets.processor import Processor, is_token_ids
from mmspec.targets.transformers_target import TransformersTarget, sharded
from mmspec.validation import check

Message = Mapping[str, Any]
PromptInput = str | abc.Sequence[Message] | abc.Sequence[int]
"""Text, chat messages, or token ids."""
_GRAMMARS: WeakKeyDictionary[Processor, dict[tuple[tuple[int, ...], frozenset[int]], Grammars]] = WeakKeyDictionary()
"""Grammar compilers by processor and EOS tokens, cached as llguidance takes seconds to read a large vocabulary."""
if hasattr(os, "register_at_fork"):  # a thread of the parent may have held the locks of compilers
    os.register_at_fork(after_in_child=_GRAMMARS.clear)

_ATTEMPTS = {"raise": raising, "return": returning}


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last part has ``finish_reason`` and ``stats``.

    ``token_ids`` are the generated tokens of this part. ``text`` is their text, up to a stop string, without the blank
    that some chat templates put before an answer ("ASSISTANT: answer"). With ``trace=True``, ``trees`` are the verified
    trees of the answer so far, one per step. With ``logprobs=K``, ``logprobs`` are the tokens' log probabilities.
    ``seconds`` is the engine's time for the answer so far, including waiting and prefill. With ``reasoning="auto"`` or
    a format, ``reasoning`` is the reasoning before the text, and ``num_reasoning_tokens`` its number of tokens, markers
    included. ``num_prompt_tokens`` is the number of prompt tokens, ``stop_string`` what ended the answer. ``parts`` are
    the reasoning and the text that each token adds, and of the last piece also those held back.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    trees: list[TreeRecord] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    stop_string: str | None = None
    parts: list[tuple[str, str]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Generation(Piece):
    """A whole answer, described by the fields of ``Piece``."""

    finish_reason: FinishReason
    stats: Stats


class _PieceReader:
    """Converts the deltas of a sequence to pieces of text, in the client's thread. ``ended``: whether the last piece
    was returned."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader, self.ended = reader, False
        self._token_ids: list[int] = []  # of the next piece
        self._parts: list[tuple[str, str]] = []
        self._logprobs: list[TokenLogprob] = []
        self._trees: list[TreeRecord] = []  # of the answer so far
        self._num_reasoning_tokens = 0  # of earlier pieces

    def next(self, *deltas: Delta) -> Piece | None:
        """The piece of new deltas; None while a character is incomplete. Raises the error of a failed sequence."""
        last = deltas[-1]
        if last.error is not None:
            raise last.error
        for delta in deltas:
            self._trees += delta.trees
            for token, logprob in zip_longest(delta.token_ids, delta.logprobs):
                if logprob is not None:
                    self._logprobs.append(replace(logprob, text_offset=self._reader.answer.length))
                self._parts.append(self._reader.append(token))
            self._token_ids += delta.token_ids
        self.ended = last.finish_reason is not None
        if self.ended:
            self._parts.append(self._reader.finish())
        reasoning, text = map("".join, zip(("", ""), *self._parts, strict=True))
        if not (self.ended or reasoning or text):
            return None
        before, self._num_reasoning_tokens = self._num_reasoning_tokens, self._reader.num_reasoning_tokens
        token_ids, logprobs, self._token_ids, self._logprobs = self._token_ids, self._logprobs, [], []
        tokens, stop = self._num_reasoning_tokens - before, self._reader.answer.stopped or None
        record = list(self._trees), logprobs, reasoning, tokens, last.seconds, last.num_prompt_tokens, stop, self._parts
        self._parts = []
        return Piece(text, token_ids, last.finish_reason, last.stats, *record)


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
        prefix_cache, prefix_cache_dir, prefix_cache_size: see ``mmspec.load``; for targets that keep states
            (``KeepsStates``).
        generation_config: see ``mmspec.load``; targets without their own defaults use the library's.
        adapt: see ``mmspec.load``; None does not adapt.
        policy: drafting policy with the learned state of another pipeline; None starts without history.

    Attributes:
        model, hf_processor: the plain transformers objects.
        target, processor, drafter, name, max_num_seqs, generation_config: as above.
        context_limit: maximum length of prompt plus output; None for no limit.
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
        prefix_cache_dir: str | os.PathLike[str] | None = None,
        prefix_cache_size: int = 2**33,
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
        check("prefix_cache_size", PositiveInt, prefix_cache_size)
        if prefix_cache_dir is not None and not prefix_cache:
            raise UserError("prefix_cache_dir needs prefix_cache, memory for the states, to be > 0: got 0")
        if prefix_cache_dir is not None and sharded(target):  # ranks would find different prefixes
            raise UserError("prefix_cache_dir is read by one process: got a target that is sharded over ranks")
        self.adaptation = None if adapt is None else Adaptation(drafter, target, adapt)
        self._connect(drafter if self.adaptation is None else self.adaptation.drafter, policy)
        if prefix_cache:
            files = None if prefix_cache_dir is None else PrefixFiles(Path(prefix_cache_dir), prefix_cache_size)
            self.engine.use_prefixes(PrefixCache(prefix_cache, files))
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
        self, rows: int | None = None, tokens: int | None = None, num_draft_tokens: abc.Sequence[int | None] = (None,)
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
        warm_up(self.engine, self._speculation, rows, tokens, num_draft_tokens)

    @property
    def hf_processor(self) -> Any:
        return self.processor.plain

    def encode(self, requests: abc.Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
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
        return self.engine.follow(self._speculation, lambda one: self.submit(self._prepared(one)[0], lambda _: None))

    def _prepared(self, request: Request, streams: bool = False) -> tuple[DecodeRequest, AnswerReader]:
        """Encode a request, and return it in the engine's terms with the reader of its output. Raises ``UserError``:
        the input cannot be read, or is longer than the context limit."""
        request = self.engine.admit(request)
        params, options = self.defaults.complete(request.params), request.options
        rendered = options.chat_template and not is_token_ids(request.content["prompt"])
        prompt = self.encode([request.content], **request.inputs, **({} if rendered else {"chat_template": False}))
        if options.adapter is not None:
            if not isinstance(self.target, TransformersTarget):
                kind = type(self.target).__name__
                raise UserError(f"adapters need a model of transformers: got {options.adapter!r} for {kind}")
            self.target.adapters.check(options.adapter)
            prompt = replace(prompt, adapter=options.adapter)
        limits = [limit for limit in (self.context_limit, options.context_limit) if limit is not None]
        length, limit = prompt.input_ids.shape[1], min(limits, default=None)
        if limit is not None and length >= limit:
            raise LongPromptError(
                f"the prompt must be shorter than the model's context of {limit} tokens: got {length}"
            )
        parser = self.processor.reasoning_parser(options.reasoning, prompt.input_ids[0])
        known = self.processor.special_tokens
        text_ids = frozenset(known[name] for name in options.text_tokens if name in known)
        constraint = self.grammar(params, parser, text_ids)
        assert params.max_new_tokens is not None
        stops = frozenset(options.stop_token_ids)
        eos_token_ids = stops.union(() if params.ignore_eos else self.target.eos_token_ids)
        begins = rendered and not request.inputs.get("answer_start")
        if parser is not None and parser.start_id is None:  # its tokens are needed to find the marker
            texts = "".join((parser.form.start, *parser.form.headers))
            text_ids |= {number for name, number in known.items() if name in texts}
        read = self._answer_reader(params, parser, eos_token_ids, stops, begins, text_ids)
        stopper = Stopper(
            params.max_new_tokens,
            context_limit=limit,
            eos_token_ids=eos_token_ids,
            readers=(read, partial(read, hidden=frozenset())) if params.stop_strings else (),
            criteria=options.stopping_criteria,
            device=self.target.device,
            max_time=options.max_time,
        )
        decode = DecodeRequest(
            prompt,
            self.defaults.sampler(params, prompt.input_ids, options.logits_processor, constraint),
            stopper,
            options.num_draft_tokens,
            streams=streams,
            source=request,
            token_bytes=self.processor.token_bytes if options.trace and self.processor.tokenizer is not None else None,
        )
        return decode, read(prompt.input_ids[0].tolist())

    def _answer_reader(
        self,
        params: SamplingParams,
        parser: ReasoningParser | None,
        ends: Set[int],
        stops: Set[int],
        rendered: bool,
        text_ids: Set[int],
    ) -> Callable[..., AnswerReader]:
        """Factory of output readers for a prompt; ``rendered``: by the chat template."""
        vocabulary, trigger = self.processor.vocabulary, params.grammar_trigger
        hidden = vocabulary.special_ids | stops
        if constrained := params.constraint is not None:
            shown = None if trigger is None else self.processor.special_tokens.get(trigger)
            hidden = (vocabulary.special_ids | ends) - {shown}  # EOS may be text, except in grammars
        begins = rendered and (not constrained or trigger is not None)
        prefix = self.processor.answer_prefix if begins else ""
        read = partial(AnswerReader, vocabulary, stop=params.stop_strings, parser=parser, prefix=prefix)
        return partial(read, hidden=hidden - text_ids, verbatim=constrained)

    def submit(self, request: DecodeRequest, sink: Sink) -> Sequence:
        """Queue an encoded request on the engine with this pipeline's drafter; see ``Engine.submit``."""
        return self.engine.submit(request, self._speculation, sink)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of LoRA adapters that requests may choose."""
        return self.target.adapters.names if isinstance(self.target, TransformersTarget) else ()

    def grammar(
        self, params: SamplingParams, parser: ReasoningParser | None = None, text_ids: Set[int] = frozenset()
    ) -> Constraint | None:
        """The grammar that constrains outputs, compiled for the tokenizer; None without one.

        Args:
            parser: parser of the reasoning that precedes the constrained answer.
            text_ids: special tokens that are text in the grammar.

        Raises:
            UserError: the tokenizer or its vocabulary does not support the grammar.
        """
        if params.constraint is None:
            return None
        known, key = _GRAMMARS.setdefault(self.processor, {}), (tuple(self.target.eos_token_ids), frozenset(text_ids))
        if key not in known:
            known[key] = Grammars(self.processor.tokenizer, *key)
        grammar: Any = known[key].compile(*params.constraint)
        if (trigger := params.grammar_trigger) is not None:
            token = self.processor.special_tokens.get(trigger)
            grammar = TriggeredGrammar(grammar, trigger, token, known[key].tokenizer)
        return grammar if parser is None else AfterReasoning(grammar, parser, known[key].spelt)

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
        requests: abc.Sequence[Mapping[str, Any]],
        *,
        on_error: Literal["raise"] = "raise",
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Generation]: ...

    @overload
    def generate_batch(
        self,
        requests: abc.Sequence[Mapping[str, Any]],
        *,
        on_error: Literal["return"],
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Generation | UserError]: ...

    @shows_keywords
    def generate_batch(
        self,
        requests: abc.Sequence[Mapping[str, Any]],
        *,
        on_error: str = "raise",
        **keywords: Unpack[GenerateKeywords],
    ) -> abc.Sequence[Generation | UserError]:
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
        parsed = parse(requests, keywords, self.processor.options, attempt)
        room = Semaphore(2 * self.engine.max_num_seqs)  # limits the memory for inputs of waiting requests
        waiting: list[tuple[DecodeRequest, Sink]] = []
        sequences: list[Sequence] = []

        def encode(request: Request) -> Callable[[], Generation]:
            decode, reader = self._prepared(request)
            answer = Future[Delta]()
            answer.add_done_callback(lambda _: room.release())
            waiting.append((decode, answer.set_result))
            return lambda: _whole(reader, answer.result())

        def start() -> None:
            with self.engine.together():
                for one in waiting:
                    sequences.append(self.submit(*one))
            waiting.clear()

        answers: list[Callable[[], Generation] | UserError] = []
        try:
            for request in parsed:
                if not room.acquire(blocking=False):
                    start()
                    room.acquire()
                answers.append(attempt(partial(encode, request)) if isinstance(request, Request) else request)
                if isinstance(answers[-1], UserError):
                    room.release()
            start()
            return [one if isinstance(one, UserError) else attempt(one) for one in answers]
        finally:
            self.engine.remove(sequences)

    @shows_keywords
    def stream(
        self, prompt: PromptInput, images: Any = None, videos: Any = None, **keywords: Unpack[GenerateKeywords]
    ) -> Iterator[Piece]:
        """Answer one prompt piece by piece, as tokens are accepted; see ``generate``.

        The request starts with the first ``next``. Closing or dropping the iterator cancels it.
        """
        (request,) = parse([{"prompt": prompt, "images": images, "videos": videos}], keywords, self.processor.options)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Piece]:
        new: SimpleQueue[Delta] = SimpleQueue()
        sequence, pieces = self._begin(request, new.put)
        try:
            while not pieces.ended:
                deltas = [new.get()]
                while not new.empty():
                    deltas.append(new.get())
                if (piece := pieces.next(*deltas)) is not None:
                    yield piece
        finally:
            self.engine.remove([sequence])

    def _begin(self, request: Request, sink: Sink) -> tuple[Sequence, _PieceReader]:
        decode, reader = self._prepared(request, streams=True)
        return self.submit(decode, sink), _PieceReader(reader)

    @shows_keywords
    async def astream(
        self, prompt: PromptInput, images: Any = None, videos: Any = None, **keywords: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Piece]:
        """``stream`` for asyncio. Cancelling the task or leaving the iteration cancels the request."""
        content = {"prompt": prompt, "images": images, "videos": videos}
        new, loop = asyncio.Queue[Delta](), asyncio.get_running_loop()

        def sink(delta: Delta) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(new.put_nowait, delta)

        def begin() -> tuple[Sequence, _PieceReader]:
            (request,) = parse([content], keywords, self.processor.options)
            return self._begin(request, sink)

        starting = asyncio.ensure_future(asyncio.to_thread(begin))
        try:
            sequence, pieces = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # the thread cannot be stopped
            if starting.exception() is None:
                self.engine.remove([starting.result()[0]])
            raise
        try:
            while not pieces.ended:
                deltas = [await new.get()]
                while not new.empty():
                    deltas.append(new.get_nowait())
                if (piece := pieces.next(*deltas)) is not None:
                    yield piece
        finally:
            self.engine.remove([sequence])


def _whole(reader: AnswerReader, delta: Delta) -> Generation:
    """The complete answer from its only delta. Raises the error of a failed sequence."""
    piece = _PieceReader(reader).next(delta)
    assert piece is not None
    return Generation(**vars(piece))
