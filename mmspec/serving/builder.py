"""Jobs of parsed requests, within the server's limits, and the formats of their responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.pipeline import Pipeline
from mmspec.serving.errors import APIError
from mmspec.serving.formats import ChatFormat, Format, TextFormat
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.responses import ResponsesFormat, ResponsesRequest, StoredResponses
from mmspec.serving.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    Tool,
    conversation,
)
from mmspec.serving.tools import ToolPlan, ToolPlanner

Constraint = tuple[str, str]
"""Kind and text of a grammar."""


@dataclass(frozen=True)
class GenerationJob:
    """What a request asks for.

    Attributes:
        prompts: texts, or chat messages; each is answered ``n`` times, its choices one after the other.
        sampling: fields of ``SamplingParams``, without the grammar's, of the first choice of each prompt; the
            seed of the i-th is larger by i, as in vLLM.
        constraint: the grammar of the outputs, which has not been checked yet.
        media: images and videos, of a request with one prompt.
        keywords: further keywords of ``Pipeline.stream``.
        trigger: the text after which the grammar begins; None for the beginning of the output.
        schemas: the schemas of tools and outputs that the grammar was made of, by what errors call them.
    """

    prompts: Sequence[Any]
    sampling: Mapping[str, Any]
    constraint: Constraint | None
    n: int
    media: Sequence[Medium]
    keywords: Mapping[str, Any]
    trigger: str | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def grammar(self) -> str:
        """The fields of the request that the grammar was made of."""
        if not self.schemas:
            return "response_format"
        return "tools or response_format" if "response_format" in self.schemas else "tools"


class JobBuilder:
    """Makes jobs of requests.

    Args:
        names: what requests may call the model; responses use the first one.
        stored: responses that later requests continue.

    Raises:
        APIError: of each method, for requests beyond the limits, or for another model.
    """

    def __init__(
        self,
        pipe: Pipeline,
        limits: Limits,
        names: Sequence[str],
        tools: ToolPlanner,
        media: MediaReader,
        stored: StoredResponses,
    ) -> None:
        self._pipe, self._limits, self._names, self._tools, self._media = pipe, limits, names, tools, media
        self._stored = stored

    def check_model(self, name: str | None) -> None:
        """Raise ``APIError`` if the model has another name; None is right."""
        if name is not None and name not in self._names:
            expected = " or ".join(map(repr, self._names))
            message = f"unknown model: expected {expected}, got {name[:200]!r}"
            raise APIError(404, message, "model", "model_not_found")

    def chat(self, asked: ChatRequest) -> tuple[GenerationJob, Format]:
        """The job of a chat request, and the format of its response."""
        job, plan = self._chat(asked, asked)
        return job, ChatFormat(self._names[0], self._pipe.io, asked, [""] * job.n, reader=plan.reader)

    def response(self, asked: ResponsesRequest) -> tuple[GenerationJob, Format]:
        """The job of a request of a response, as a chat request, and the format of its response."""
        earlier = self._stored.items(asked.previous_response_id)
        chat = asked.as_chat(earlier)
        job, plan = self._chat(chat, asked)
        common = (self._names[0], self._pipe.io, chat, [""])
        form = ResponsesFormat(*common, reader=plan.reader, about=asked.about(job.sampling))
        if asked.store:
            form.on_end = lambda response: self._stored.add(response, [*earlier, *asked.input])
        return job, form

    def _chat(self, asked: ChatRequest, original: GenerationRequest) -> tuple[GenerationJob, ToolPlan]:
        """The job of a chat request, with the parameters of the original request, whose fields errors name."""
        self.check_model(asked.model)
        messages, media = self._conversation(asked.messages, asked.tools)
        sampling, constraint = original.sampling(self._limits, self._pipe.defaults.served), asked.constraint()
        self._media.check(media)
        schema = None if constraint is None else constraint[1]
        plan = self._tools.plan(asked.tools, asked.tool_choice, several=asked.parallel_tool_calls, schema=schema)
        constraint = constraint if plan.grammar is None else ("grammar", plan.grammar)
        keywords = {**asked.keywords, **plan.keywords}
        prompts = [plan.messages(messages)]
        return GenerationJob(prompts, sampling, constraint, asked.n, media, keywords, plan.trigger, plan.schemas), plan

    def _conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[Medium]]:
        texts = [text for message in messages for text in message.texts]
        self._check_characters([*texts, *(tool.model_dump_json() for tool in tools)], "messages")
        return conversation(messages, self._pipe.io.reads_media)

    def completion(self, asked: CompletionRequest) -> tuple[GenerationJob, Format]:
        """The job of a request of completions, and the format of its response."""
        self.check_model(asked.model)
        self._check_characters(asked.prompt, "prompt")
        keywords = asked.keywords | {"chat_template": False}
        sampling = asked.sampling(self._limits, self._pipe.defaults.served)
        job = GenerationJob(asked.prompt, sampling, asked.constraint(), asked.n, (), keywords)
        if job.choices > self._limits.max_running:
            most = self._limits.max_running
            raise APIError(400, f"a request may have at most {most} choices: got {job.choices}", "prompt")
        before = [self._prompt_text(prompt) if asked.echo else "" for prompt in job.prompts for _ in range(job.n)]
        return job, TextFormat(self._names[0], self._pipe.io, asked, before)

    def _prompt_text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        self._pipe.io.check_ids(prompt)
        return str(self._pipe.io.tokenizer.decode(prompt))

    def tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The response to ``POST /tokenize``."""
        self.check_model(asked.model)
        io = self._pipe.io
        if asked.messages is None:
            self._check_characters([asked.prompt or ""], "prompt")
            tokens = io.text_ids(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
        else:
            messages, media = self._conversation(asked.messages, asked.tools)
            if media:
                raise APIError(400, f"tokens are those of texts: got {media[0].kind}_url", media[0].param)
            plan = self._tools.plan(asked.tools, "auto")
            tokens = io.encode([{"prompt": plan.messages(messages)}], **plan.keywords).input_ids[0].tolist()
        names = io.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        limit = {"max_model_len": self._pipe.context_limit}
        return {"count": len(tokens), **limit, "tokens": tokens, "token_strs": names}

    def text(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The response to ``POST /detokenize``."""
        self.check_model(asked.model)
        self._check_characters([asked.tokens], "tokens")
        return {"prompt": self._prompt_text(asked.tokens)}

    def _check_characters(self, texts: Sequence[Sequence[Any]], param: str) -> None:
        most, found = self._limits.max_characters, sum(map(len, texts))
        if found > most:
            raise APIError(400, f"prompts must have at most {most} characters: got {found}", param)
