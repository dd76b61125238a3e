"""Converts parsed requests to jobs, and runs their choices on a pipeline within slots and time limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from time import perf_counter as clock
from typing import Any, TypeVar

from mmspec.drafters.registry import PLAIN
from mmspec.errors import UserError
from mmspec.pipeline import Piece, Pipeline
from mmspec.sampling.grammar import BeyondEndError
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.syntax import CheckedText, GrammarTrial
from mmspec.serving.call_formats import ToolFormat
from mmspec.serving.errors import APIError
from mmspec.serving.formats import ChatFormat, InfillFormat, TextFormat, WireFormat
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.metrics import Metrics
from mmspec.serving.middleware import RequestQueue
from mmspec.serving.responses import ResponsesFormat, ResponsesRequest, StoredResponses, chat_messages
from mmspec.serving.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    InfillRequest,
    TokenizeRequest,
    conversation,
)
from mmspec.serving.settings import Limits
from mmspec.serving.tools import ToolPlan, plan_tools
from mmspec.targets.infill import Infill
from mmspec.workers import Cancellation

Constraint = tuple[str, str]
"""Kind and text of a grammar."""


@dataclass(frozen=True)
class GenerationJob:
    """A generation request in the engine's terms.

    Attributes:
        prompts: texts or chat messages; each gets ``n`` consecutive choices.
        sampling: fields of ``SamplingParams`` of each prompt's first choice, without the grammar; the i-th choice adds
            i to the seed, as in vLLM.
        constraint: the unchecked grammar of the outputs.
        media: images and videos; requires a single prompt.
        keywords: further keywords of ``Pipeline.stream``.
        trigger: text after which the grammar applies; None applies it from the start of the output.
        schemas: JSON schemas of tools and outputs in the grammar, by their names in errors.
    """

    prompts: Sequence[Any]
    sampling: Mapping[str, Any]
    constraint: Constraint | None
    n: int
    media: Sequence[Medium]
    keywords: Mapping[str, Any]
    drafter: str
    trigger: str | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)

    @property
    def drafts(self) -> str:
        """The drafter's name, or ``"none"`` for plain decoding."""
        return PLAIN if self.keywords.get("num_draft_tokens") == 0 else self.drafter

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def grammar(self) -> str:
        """Names of the request fields that define the grammar."""
        if not self.schemas:
            return "response_format"
        return "tools or response_format" if "response_format" in self.schemas else "tools"


@dataclass
class JobBuilder:
    """Converts requests to jobs.

    Args:
        names: model names that requests may use; responses use the first name. Requests may omit a single name, and
            may name a file without folder and suffix.
        reasoning: format of the model's reasoning; None for models without reasoning.
        drafters: names of selectable drafters, the default first.
        num_draft_tokens: number for requests without one; None chooses adaptively.

    Raises:
        APIError: raised by each method for requests beyond the limits, or for another model.
    """

    pipe: Pipeline
    limits: Limits
    names: Sequence[str]
    tools: ToolFormat
    media: MediaReader
    stored: StoredResponses
    reasoning: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    drafters: Sequence[str] = (PLAIN,)
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        self._known: list[str | None] = [*self.names, *self.pipe.adapters]
        self._expected = " or ".join(map(repr, self._known))
        if len(self._known) == 1:
            path = Path(self.names[0])
            self._known += [None, *((path.name, path.stem) if path.is_file() else ())]

    def check_model(self, name: str | None) -> None:
        """Raise ``APIError`` unless ``name`` is a name of the model or None."""
        if name is not None and name not in self._known:
            message = f"unknown model: expected {self._expected}, got {name[:200]!r}"
            raise APIError(404, message, "model", "model_not_found")

    def _answers(self, name: str | None) -> tuple[str, dict[str, Any]]:
        """Model name in the response, and the keywords of ``Pipeline.stream`` that it implies."""
        if name not in self._known:  # None
            raise APIError(400, f"model is required: expected {self._expected}, got none", "model")
        own = {"context_limit": self.limits.max_model_len or None}
        return (name, own | {"adapter": name}) if name in self.pipe.adapters else (self.names[0], own)

    def chat(
        self, asked: ChatCompletionRequest, form: Callable[..., ChatFormat] = ChatFormat
    ) -> tuple[GenerationJob, WireFormat]:
        job, plan = self._chat(asked, asked.messages)
        return job, form(*self._form(asked, job, [""] * job.n), reader=plan.reader)

    def response(self, asked: ResponsesRequest) -> tuple[GenerationJob, WireFormat]:
        earlier = self.stored.items(asked.previous_response_id)
        job, plan = self._chat(asked, chat_messages([*earlier, *asked.input], asked.instructions))
        about = asked.about(job.sampling)
        store = partial(self.stored.add, asked=[*earlier, *asked.input]) if asked.store else None
        return job, ResponsesFormat(*self._form(asked, job, [""]), reader=plan.reader, about=about, store=store)

    def _chat(
        self, asked: ChatCompletionRequest | ResponsesRequest, messages: Sequence[ChatMessage]
    ) -> tuple[GenerationJob, ToolPlan]:
        self.check_model(asked.model)
        functions = [tool.declaration for tool in asked.tools]
        turns, media = self._conversation(messages, functions)
        sampling, constraint = asked.sampling(self.limits, self.pipe.defaults.served), asked.constraint()
        self.media.check(media)
        schema = None if constraint is None else constraint[1]
        processor = self.pipe.processor
        plan = plan_tools(
            processor, self.tools, functions, asked.tool_choice, several=asked.parallel_tool_calls, schema=schema
        )
        constraint = constraint if plan.grammar is None else ("grammar", plan.grammar)
        variables = effort_variables(asked.reasoning_effort, processor.chat_template_text())
        variables |= asked.chat_template_kwargs
        keywords = {**self._keywords(asked), **plan.keywords, **self._rendering(variables)}
        if self.reasoning and "answer_start" not in keywords:  # a call starts at once there
            keywords["reasoning"] = self.reasoning
        prompts = [plan.messages(turns)]
        common = (prompts, sampling, constraint, asked.n, media, keywords, asked.drafter(self.limits, self.drafters))
        return GenerationJob(*common, plan.trigger, plan.schemas), plan

    def _keywords(self, asked: GenerationRequest) -> dict[str, Any]:
        """Keywords of ``Pipeline.stream`` that do not depend on the prompt."""
        keywords = asked.keywords | self._answers(asked.model)[1]
        if keywords["num_draft_tokens"] is None:
            keywords["num_draft_tokens"] = self.num_draft_tokens
        return keywords

    def _form(self, asked: GenerationRequest, job: GenerationJob, texts: Sequence[str]) -> tuple[Any, ...]:
        """Constructor arguments of a ``WireFormat``."""
        return self._answers(asked.model)[0], self.pipe.processor, asked, texts, job.drafts

    def _rendering(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        variables = {**self.variables, **variables}
        return {"chat_template_kwargs": variables} if variables else {}

    def _conversation(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Medium]]:
        texts = [text for message in messages for text in message.texts]
        self._check_characters([*texts, *map(json.dumps, functions)], "messages")
        return conversation(messages, self.pipe.processor.reads_media)

    def completion(self, asked: CompletionRequest) -> tuple[GenerationJob, WireFormat]:
        self.check_model(asked.model)
        self._check_characters([*asked.prompt, asked.suffix or ""], "prompt")
        if asked.suffix is not None:
            job = self._raw(asked, [self._infill.encode(one, asked.suffix) for one in asked.prompt], self._infill.ends)
        else:
            ids, special = self.pipe.processor.text_ids, (asked.add_special_tokens, asked.parse_special)
            job = self._raw(
                asked, [ids(one, *special) if one and isinstance(one, str) else one for one in asked.prompt]
            )
        if job.choices > self.limits.max_running:
            most = self.limits.max_running
            raise APIError(400, f"a request may have at most {most} choices: got {job.choices}", "prompt")
        before = [self._prompt_text(prompt) if asked.echo else "" for prompt in asked.prompt for _ in range(job.n)]
        return job, TextFormat(*self._form(asked, job, before))

    def infill(self, asked: InfillRequest) -> tuple[GenerationJob, WireFormat]:
        self.check_model(asked.model)
        files, own = [(one.filename, one.text) for one in asked.input_extra], (asked.input_prefix, asked.input_suffix)
        self._check_characters([*own, asked.prompt, *chain(*files)], "input_prefix")
        job = self._raw(asked, [self._infill.encode(*own, asked.prompt, files)], self._infill.ends)
        return job, InfillFormat(*self._form(asked, job, [""]))

    def _raw(self, asked: GenerationRequest, prompts: Sequence[Any], stops: Sequence[int] = ()) -> GenerationJob:
        keywords = self._keywords(asked) | {"chat_template": False, "stop_token_ids": stops}
        sampling = asked.sampling(self.limits, self.pipe.defaults.served)
        drafter = asked.drafter(self.limits, self.drafters)
        return GenerationJob(prompts, sampling, asked.constraint(), asked.n, (), keywords, drafter)

    @cached_property
    def _infill(self) -> Infill:
        return Infill(self.pipe.processor)

    def _prompt_text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        self.pipe.processor.check_ids(prompt)
        return self.pipe.processor.decode(prompt, skip_special_tokens=False)

    def tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        self.check_model(asked.model)
        processor = self.pipe.processor
        if asked.messages is None:
            self._check_characters([asked.prompt or ""], "prompt")
            special = asked.add_special_tokens is not False, asked.parse_special is not False
            tokens = processor.text_ids(asked.prompt or "", *special)
        else:
            functions = [tool.declaration for tool in asked.tools]
            messages, media = self._conversation(asked.messages, functions)
            if media:
                raise APIError(400, f"tokens are those of texts: got {media[0].kind}_url", media[0].param)
            plan = plan_tools(processor, self.tools, functions, "auto")
            keywords = {**plan.keywords, **self._rendering(asked.chat_template_kwargs)}
            tokens = processor.encode([{"prompt": plan.messages(messages)}], **keywords).input_ids[0].tolist()
        names = processor.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        limit = {"max_model_len": self.limits.context_limit(self.pipe.context_limit)}
        return {"count": len(tokens), **limit, "tokens": tokens, "token_strs": names}

    def text(self, asked: DetokenizeRequest) -> dict[str, Any]:
        self.check_model(asked.model)
        self._check_characters([asked.tokens], "tokens")
        return {"prompt": self._prompt_text(asked.tokens)}

    def _check_characters(self, texts: Sequence[Sequence[Any]], param: str) -> None:
        most, found = self.limits.max_characters, sum(map(len, texts))
        if found > most:
            raise APIError(400, f"prompts must have at most {most} characters: got {found}", param)


def effort_variables(effort: str | None, template: str) -> dict[str, Any]:
    """Chat template variables for ``reasoning_effort``, restricted to variables that the template reads."""
    if effort == "none" and re.search(r"\benable_thinking\b", template):
        return {"enable_thinking": False}
    reads = effort is not None and re.search(r"\breasoning_effort\b", template)
    return {"reasoning_effort": effort} if reads else {}


_WORKERS = 2
_KEPT = 64  # results, of at most 128 KiB each


class GrammarChecker:
    """Checks the grammars of untrusted requests, each once. Used from one event loop only."""

    def __init__(self) -> None:
        self._trial = GrammarTrial(workers=_WORKERS)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._checks: dict[Constraint, _Check] = {}  # least recently used first

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    async def check(self, constraint: Constraint) -> CheckedText:
        """Check a grammar. When no request waits for the result, terminates the worker and waits for its exit. Raises
        ``UserError``: see ``GrammarTrial.check``."""
        if (check := self._checks.pop(constraint, None)) is None:
            stop = Cancellation()
            check = _Check(self._threads.submit(self._trial.check, *constraint, stop=stop), stop)
        self._checks[constraint] = check
        if len(self._checks) > _KEPT:
            del self._checks[next(iter(self._checks))]
        check.waiting += 1
        done = asyncio.wrap_future(check.future)
        try:
            return await asyncio.shield(done)
        except UserError as error:
            raise UserError(str(error)) from None  # a kept exception would collect the tracebacks of requests
        except asyncio.CancelledError:
            if check.waiting == 1:
                self._checks.pop(constraint, None)  # a later request starts a new check
                check.stop()
                check.future.cancel()
                await asyncio.wait({done})
            raise
        except Exception:
            self._checks.pop(constraint, None)
            raise
        finally:
            check.waiting -= 1


@dataclass
class _Check:
    """A running or finished grammar check, and the number of requests that wait for its result."""

    future: Future[CheckedText]
    stop: Cancellation
    waiting: int = 0


Pieces = AsyncIterator[tuple[int, Piece]]
"""Pieces of a request's choices as they arrive, each with the number of its choice."""


@dataclass
class RequestRunner:
    """Runs requests: a choice holds a slot from grammar check and media decoding to its last token.

    Args:
        pipes: pipelines by drafter; ``max_num_seqs`` of each must be at least the number of slots.
        seconds: time limit of a request; 0 sets no limit.
    """

    pipes: Mapping[str, Pipeline]
    media: MediaReader
    grammars: GrammarChecker
    slots: RequestQueue
    metrics: Metrics
    seconds: float = 0

    def close(self) -> None:
        self.media.close()
        self.grammars.close()

    @asynccontextmanager
    async def start(self, job: GenerationJob) -> AsyncIterator[Pieces]:
        """Wait for slots and start a request. Leaving the block cancels unfinished choices and frees their slots.

        Choices do not wait for the consumer of their pieces, so a slow client occupies no slot.

        Raises:
            APIError: the queue is full, an image or video cannot be read, or the request timed out.
            UserError: the grammar is invalid or exceeds a limit. The iterator of pieces raises the pipeline's errors
                and, on timeout, ``APIError``.
        """
        arrived, deadline = clock(), Deadline(self.seconds)
        await deadline.wait(self.slots.acquire(job.choices))
        try:
            params, media = await deadline.wait(self._prepared(job))
        except BaseException:
            self.slots.release(job.choices)
            raise
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks = []

        async def iterate() -> Pieces:
            choices = job.choices
            while choices:
                index, piece = await deadline.wait(pieces.get())
                if isinstance(piece, Exception):
                    raise piece
                choices -= piece.finish_reason is not None
                yield index, piece

        for index in range(job.choices):
            task = asyncio.create_task(self._choice(job, index, params, media, pieces, arrived))
            task.add_done_callback(lambda _: self.slots.release())  # also if the task is cancelled before it starts
            tasks.append(task)
        try:
            yield iterate()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def count(self, job: GenerationJob) -> int:
        """Number of tokens of a job's prompt, images and videos included. Raises as ``start``."""
        _, media = await self._prepared(job)
        pipe = self.pipes[job.drafter]
        options = {name: value for name, value in job.keywords.items() if name in pipe.processor.options}
        (prompt,) = job.prompts
        encoded = await asyncio.to_thread(pipe.processor.encode, [{"prompt": prompt, **media}], **options)
        return int(encoded.input_ids.shape[1])

    async def _prepared(self, job: GenerationJob) -> tuple[SamplingParams, Mapping[str, Any]]:
        """Check the grammar and decode the media: sampling parameters of the first choice, and media."""
        grammar: dict[str, Any] = {}
        if job.constraint is not None:
            if job.sampling.get("ignore_eos"):
                raise APIError(400, f"ignore_eos does not go with {job.grammar}, which ends the output", "ignore_eos")
            try:
                checked = await self.grammars.check(job.constraint)
            except UserError as error:
                raise await self._located(error, job.schemas) from None
            grammar = {job.constraint[0]: checked, "grammar_trigger": job.trigger}
        return SamplingParams(**job.sampling, **grammar), await self.media.read(job.media)

    async def _located(self, error: UserError, schemas: Mapping[str, str]) -> Exception:
        """The error of a grammar; names the invalid schema if the grammar has several."""
        for name, schema in schemas.items():
            try:
                await self.grammars.check(("json_schema", schema))
            except UserError as own:
                return APIError(400, f"{name}: {own}", name if name == "response_format" else "tools")
        return APIError(400, f"tools: {error}", "tools") if schemas else error

    async def _choice(
        self,
        job: GenerationJob,
        index: int,
        params: SamplingParams,
        media: Mapping[str, Any],
        pieces: asyncio.Queue[tuple[int, Piece | Exception]],
        arrived: float,
    ) -> None:
        prompt, number = divmod(index, job.n)
        seconds, before = self.metrics.first_token, arrived
        try:
            if params.seed is not None and number:
                params = replace(params, seed=(params.seed + number) % (1 << 64))
            stream = self.pipes[job.drafter].astream(job.prompts[prompt], **media, params=params, **job.keywords)
            async with aclosing(stream):
                async for piece in stream:
                    seconds.observe((now := clock()) - before)
                    seconds, before = self.metrics.next_tokens, now
                    if piece.stats is not None:
                        self.metrics.ended(piece.stats, str(piece.finish_reason), job.drafts)
                    pieces.put_nowait((index, piece))
        except BeyondEndError as error:
            pieces.put_nowait((index, APIError(400, error.message("min_tokens", job.grammar), "min_tokens")))
        except Exception as error:
            pieces.put_nowait((index, error))


T = TypeVar("T")


class Deadline:
    """Deadline of a request, in seconds from now; 0 sets no limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds if seconds else None

    async def wait(self, work: Awaitable[T]) -> T:
        """Await ``work``, and cancel it at the deadline. Raises ``APIError``: status 504, the deadline has passed.
        Clients should not retry automatically."""
        try:
            async with asyncio.timeout_at(self._end) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
        message = f"a request must end within {self._seconds:g} s (--request-timeout): this one had not"
        raise APIError(504, message, code="timeout", headers={"x-should-retry": "false"})
