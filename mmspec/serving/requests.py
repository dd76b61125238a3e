"""What parsed requests ask for: checked against the server's limits, as work of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.pipeline import Pipeline
from mmspec.serving.catalog import Catalog
from mmspec.serving.errors import APIError
from mmspec.serving.formats import ChatFormat, Format, TextFormat
from mmspec.serving.limits import Limits
from mmspec.serving.media import MediaReader, Medium
from mmspec.serving.messages import ChatMessage, conversation
from mmspec.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from mmspec.serving.response_format import ResponseFormat
from mmspec.serving.response_request import ResponsesRequest
from mmspec.serving.runner import Work
from mmspec.serving.stored import StoredResponses
from mmspec.serving.tool_use import Tool, ToolUse, Use


class Requests:
    """Makes work of requests.

    Args:
        stored: responses that later requests continue.

    Raises:
        APIError: of each method, for requests beyond the limits, or for another model.
    """

    def __init__(
        self,
        pipe: Pipeline,
        limits: Limits,
        catalog: Catalog,
        tools: ToolUse,
        media: MediaReader,
        stored: StoredResponses,
    ) -> None:
        self._pipe, self._limits, self._catalog, self._tools, self._media = pipe, limits, catalog, tools, media
        self._stored = stored

    def chat(self, asked: ChatRequest) -> tuple[Work, Format]:
        """What a chat request asks for, and how it is answered."""
        work, use = self._chat(asked, asked)
        return work, ChatFormat(self._catalog.name, self._pipe.io, asked, [""] * work.n, reader=use.reader)

    def response(self, asked: ResponsesRequest) -> tuple[Work, Format]:
        """What a request of a response asks for, as a chat request, and how it is answered."""
        earlier = self._stored.items(asked.previous_response_id)
        chat = asked.as_chat(earlier)
        work, use = self._chat(chat, asked)
        common = (self._catalog.name, self._pipe.io, chat, [""])
        form = ResponseFormat(*common, reader=use.reader, about=asked.about(work.params))
        if asked.store:
            form.on_end = lambda response: self._stored.add(response, [*earlier, *asked.input])
        return work, form

    def _chat(self, asked: ChatRequest, original: GenerationRequest) -> tuple[Work, Use]:
        """Work of a chat request, whose parameters are those of the original one: so are the names in errors."""
        self._catalog.check(asked.model)
        messages, media = self._conversation(asked.messages, asked.tools)
        params, constraint = original.params(self._limits, self._pipe.defaults.served), asked.constraint()
        self._media.check(media)
        schema = None if constraint is None else constraint[1]
        use = self._tools.of(asked.tools, asked.tool_choice, several=asked.parallel_tool_calls, schema=schema)
        constraint = constraint if use.grammar is None else ("grammar", use.grammar)
        keywords = {**asked.keywords, **use.keywords}
        prompts = [use.messages(messages)]
        return Work(prompts, params, constraint, asked.n, media, keywords, use.trigger, use.schemas), use

    def _conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[Medium]]:
        texts = [text for message in messages for text in message.texts]
        self._check_characters([*texts, *(tool.model_dump_json() for tool in tools)], "messages")
        return conversation(messages, self._pipe.io.reads_media)

    def completion(self, asked: CompletionRequest) -> tuple[Work, Format]:
        """What a request of completions asks for, and how it is answered."""
        self._catalog.check(asked.model)
        self._check_characters(asked.prompt, "prompt")
        keywords = asked.keywords | {"chat_template": False}
        params = asked.params(self._limits, self._pipe.defaults.served)
        work = Work(asked.prompt, params, asked.constraint(), asked.n, (), keywords)
        if work.choices > self._limits.max_running:
            most = self._limits.max_running
            raise APIError(400, f"a request may have at most {most} choices: got {work.choices}", "prompt")
        before = [self._prompt_text(prompt) if asked.echo else "" for prompt in work.prompts for _ in range(work.n)]
        return work, TextFormat(self._catalog.name, self._pipe.io, asked, before)

    def _prompt_text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        self._pipe.io.check_ids(prompt)
        return str(self._pipe.io.tokenizer.decode(prompt))

    def tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The response to ``POST /tokenize``."""
        self._catalog.check(asked.model)
        io = self._pipe.io
        if asked.messages is None:
            self._check_characters([asked.prompt or ""], "prompt")
            tokens = io.text_ids(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
        else:
            messages, media = self._conversation(asked.messages, asked.tools)
            if media:
                raise APIError(400, f"tokens are those of texts: got {media[0].kind}_url", media[0].param)
            use = self._tools.of(asked.tools, "auto")
            tokens = io.encode([{"prompt": use.messages(messages)}], **use.keywords).input_ids[0].tolist()
        names = io.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        limit = {"max_model_len": self._pipe.context_limit}
        return {"count": len(tokens), **limit, "tokens": tokens, "token_strs": names}

    def text(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The response to ``POST /detokenize``."""
        self._catalog.check(asked.model)
        self._check_characters([asked.tokens], "tokens")
        return {"prompt": self._prompt_text(asked.tokens)}

    def _check_characters(self, texts: Sequence[Sequence[Any]], param: str) -> None:
        most, found = self._limits.max_characters, sum(map(len, texts))
        if found > most:
            raise APIError(400, f"prompts must have at most {most} characters: got {found}", param)
