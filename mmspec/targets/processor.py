"""Processors: encode requests as token ids and decode tokens to text, independently of the target."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from mmspec.core.target import Prompt
from mmspec.errors import UserError, explained
from mmspec.sampling.reasoning import ReasoningParser, reasoning_format
from mmspec.targets.checkpoints import from_pretrained
from mmspec.targets.detokenizer import Detokenizer, Vocabulary
from mmspec.targets.templates import bounded
from mmspec.targets.tree_layers import replaced
from mmspec.validation import check

_MARK = "\ue0a1"  # a private-use character
_RENDERED = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
"""Message fields that templates render in addition to role and content."""

_COMPILER = (chat_template_utils, "_compile_jinja_template")
_MARKER_TOKENS = 32  # maximum tokens of a reasoning marker and the white space after it
_MEDIA_TOKENS = ("image_token", "video_token")  # attributes of transformers' processors


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(token) is int for token in prompt)


def template_variables(plain: Any, given: Any) -> dict[str, Any]:
    """Variables that the chat template of a tokenizer or processor uses; others are dropped, as processors would treat
    them as their own options. Raises ``UserError`` for names that rendering itself uses."""
    own = {"messages", *signature(plain.apply_chat_template).parameters}
    for name in check("chat_template_kwargs", dict, given):
        if name in own:
            raise UserError(f"chat_template_kwargs must not have names that rendering itself uses: got {name}")
    return {name: value for name, value in given.items() if name in str(plain.chat_template)}


def called_arguments(value: Any) -> Any:
    """Arguments of a tool call as a dict; empty for text that is not a JSON object."""
    if not isinstance(value, str):
        return value
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(value)
    return found if isinstance(found, dict) else {}


def _with_objects(value: Any) -> Any:
    """Chat messages with the arguments of tool calls parsed to dicts."""
    if isinstance(value, Mapping):
        return {k: called_arguments(one) if k == "arguments" else _with_objects(one) for k, one in value.items()}
    return [_with_objects(one) for one in value] if isinstance(value, list | tuple) else value


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Variants of chat messages that templates may expect, the most common first.

    Contents are as given, or media-free contents are converted to text: in all messages except the user's, or in all.
    In each case, arguments of tool calls are first dicts, then as given.
    """
    for joined in (lambda role: False, lambda role: role != "user", lambda role: True):
        form = [_of_text(one, refuse=False) if joined(one.get("role")) else one for one in messages]
        yield _with_objects(form)
        yield form


def render(
    plain: Any,
    user_text: UserText,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render chat messages with the chat template of a tokenizer or processor.

    Args:
        user_text: marks special tokens in user text.
        tools: functions that the model may call, as JSON schemas in OpenAI's form.
        variables: further variables of the template, such as ``enable_thinking``.

    Raises:
        UserError: the template rejects the messages, for example a system message (templates may raise anything) or
        takes too much time or memory; or a variable has a name that transformers uses.
    """
    given = {"tools": user_text.marked(tools)} if tools else {}
    if variables:
        given |= template_variables(plain, user_text.marked(variables))
    errors: list[Exception] = []
    for form in map(user_text.mark, _forms(messages)):
        try:
            with replaced({_COMPILER: bounded}):
                return str(plain.apply_chat_template(form, add_generation_prompt=True, tokenize=False, **given))
        except UserError:
            raise
        except Exception as error:
            errors.append(error)
    with explained("the model's chat template does not accept the messages", Exception):
        raise errors[0]


def _of_text(message: Mapping[str, Any], refuse: bool = True) -> Mapping[str, Any]:
    """Join a message's text items into one text, which templates of text models expect as content. A message with
    images or videos raises ``UserError``, or is returned unchanged unless ``refuse``."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if other := [item["type"] for item in content if item["type"] != "text"]:
        if not refuse:
            return message
        raise UserError(f"the model reads text only: got an item of type {other[0]}")
    return {**message, "content": "\n".join(item["text"] for item in content)}


class Processor:
    """Chat template and tokenizer of a text model: encodes requests, decodes answers.

    Args:
        plain: a tokenizer or processor of transformers; None if prompts and answers are token ids only.

    Attributes:
        auto_class: the class of transformers that loads ``plain``.
        options: keywords of ``encode`` besides ``chat_template``, which callers of ``Pipeline.generate`` may give.
        reads_media: whether requests may contain images and videos; requires a method ``place_media`` as in
            ``mmspec.vision.processor.VisionProcessor``.
    """

    auto_class: ClassVar[Any] = AutoTokenizer
    options: ClassVar[Sequence[str]] = ("tools", "answer_start", "chat_template_kwargs", "parse_special")
    reads_media: ClassVar[bool] = False

    def __init__(self, plain: Any = None) -> None:
        self.plain = plain

    @classmethod
    def read(cls, name: str, **options: Any) -> Self:
        """The processor in a local folder or hub repository."""
        return cls(from_pretrained(cls.auto_class, name, **options))

    @property
    def tokenizer(self) -> Any:
        return getattr(self.plain, "tokenizer", self.plain)

    def encode(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_start: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = True,
        **options: Any,
    ) -> Prompt:
        """Encode requests as a left-padded batch, on the CPU.

        Args:
            requests: ``{"prompt": text, chat messages or token ids, "images": ..., "videos": ...}`` each.
            chat_template: render prompts with the chat template if there is one; False uses text prompts as is. Token
                ids are always used as is.
            tools: functions that the model may call, as JSON schemas in OpenAI's form, for the chat template.
            answer_start: text appended to the rendered prompt, which the answer continues; special tokens in it are
                encoded as special tokens.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
            parse_special: with ``chat_template=False``, encode names of special tokens as these tokens (llama.cpp's
                name); False encodes them as text, like those in chat messages.
            **options: media options (none for text models).

        Raises:
            UserError: images or videos for a text model, unknown options, an empty prompt, or an unknown token id.
        """
        if options:
            raise UserError(f"unknown option for a text model: got {', '.join(options)}")
        if any(request.get("images") or request.get("videos") for request in requests):
            raise UserError("the model reads text only: images or videos were given")
        settings = (chat_template, tools, answer_start, chat_template_kwargs, parse_special)
        rows = [self._token_ids(request["prompt"], *settings) for request in requests]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], dtype=torch.long)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], dtype=torch.long)
        return Prompt(ids, None if bool(mask.all()) else mask)

    def media_decoder(self, **limits: Any) -> Any:
        """Return a decoder of untrusted media, a ``mmspec.vision.decoding.MediaDecoder``; None if only text is read."""
        return None

    def decode(self, token_ids: Sequence[int], context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> str:
        """Decode tokens after a context. ``context``: preceding token ids, such as the prompt's. Without a context,
        some tokenizers drop a leading blank."""
        reader = Detokenizer(self.vocabulary, context, None if skip_special_tokens else frozenset())
        return reader.append(token_ids) + reader.finish()

    def has_typed_tokens(self, prompt: Any) -> bool:
        """Whether text or chat messages contain the names of special tokens, which are encoded as text."""
        return self._user_text.mark(prompt) is not prompt

    def _token_ids(
        self,
        prompt: Any,
        chat_template: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_start: str = "",
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = True,
    ) -> list[int]:
        tokenizer = self.tokenizer
        if is_token_ids(prompt):
            self.check_ids(prompt)
            return self._without_media(list(prompt))
        template = getattr(tokenizer, "chat_template", None) if chat_template else None
        if not prompt:
            raise UserError("the prompt must not be empty")
        if not isinstance(prompt, str) and not template:
            why = "the tokenizer has none" if chat_template else "got chat_template=False"
            raise UserError(f"chat messages need a chat template: {why}")
        if (tools or variables) and not template:
            raise UserError(f"{'tools' if tools else 'chat_template_kwargs'} need a chat template: there is none")
        if template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(_of_text, prompt)
            text = render(tokenizer, self._user_text, list(messages), tools, variables) + answer_start
            ids = self._encoded(text, add_special_tokens=False)
        else:
            ids = self._without_media(self.text_ids(prompt, parse_special=parse_special and not chat_template))
        if not ids:
            raise UserError("the prompt must not be empty")
        return ids

    def _without_media(self, ids: list[int]) -> list[int]:
        names = (getattr(self.plain, name, None) for name in _MEDIA_TOKENS)
        media = {self.tokenizer.convert_tokens_to_ids(name) for name in names if name}
        if found := media.intersection(ids):
            raise UserError(f"images and videos need chat messages: got their token {min(found)}")
        return ids

    def adds_special_tokens(self, rendered: str) -> bool:
        """Whether the tokenizer adds special tokens to a prompt that the chat template has rendered."""
        return False

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ``UserError`` if a token id is outside the vocabulary."""
        size = len(self.tokenizer)
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise UserError(f"token ids must be in [0, {size - 1}]: got {wrong[0]}")

    def chat_template_text(self) -> str:
        """The chat template; of several, the template for tool requests, else the default; empty without any."""
        template = getattr(self.plain, "chat_template", None) or ""
        if isinstance(template, Mapping):
            template = template.get("tool_use") or template.get("default", "")
        return str(template)

    def reasoning_parser(self, reasoning: str | None, prompt: torch.Tensor) -> ReasoningParser | None:
        """Reasoning parser of the output after a prompt; None without reasoning.

        Args:
            reasoning: format, see ``reasoning_format``.
            prompt: (length,) int64; a marker at its end shows that reasoning has started or is over.
        """
        form = reasoning_format(reasoning, self.chat_template_text()) if reasoning else None
        if form is None:
            return None
        end = self.decode(prompt[-_MARKER_TOKENS:].tolist(), skip_special_tokens=False).rstrip()
        if end.endswith(form.end):
            return None
        return ReasoningParser(form, end.endswith(form.start), self.token_bytes, self.special_tokens.get)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by name."""
        known = getattr(self.tokenizer, "added_tokens_decoder", {}).items()
        return {token.content: number for number, token in known if token.special}

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token; possibly a part of a character."""
        return self.vocabulary.token_bytes(token)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens as text."""
        return Vocabulary(self.tokenizer)

    def text_ids(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Encode a text, with names of special tokens as plain text unless ``parse_special``."""
        return self._encoded(text if parse_special else self._user_text.mark(text), add_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._user_text.is_marked(text):
            return self._user_text.encode(text, add_special_tokens=add_special_tokens)
        return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    @cached_property
    def _user_text(self) -> UserText:
        return UserText(self.tokenizer, [getattr(self.plain, name, None) for name in _MEDIA_TOKENS])

    @cached_property
    def answer_prefix(self) -> str:
        """Blanks between the chat template's generation prompt and an answer.

        With a template that ends prompts with "ASSISTANT:" and renders earlier answers as "ASSISTANT: answer", the
        model generates the blank. It belongs to the template and must not become a part of the answer's content.
        """
        if not getattr(self.plain, "chat_template", None):
            return ""
        is_tokenizer = self.plain is self.tokenizer  # a processor's template takes lists of items
        question, answer = (
            {"role": role, "content": text if is_tokenizer else [{"type": "text", "text": text}]}
            for role, text in (("user", "question"), ("assistant", "answer"))
        )
        try:
            with replaced({_COMPILER: bounded}):
                prompt = self.plain.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
                whole = self.plain.apply_chat_template([question, answer], tokenize=False)
        except Exception:  # templates are programs and may raise anything
            return ""
        between, separator, _ = whole.removeprefix(prompt).partition("answer")
        return between if separator and whole.startswith(prompt) and between.isspace() else ""


class UserText:
    """Encodes special tokens in user text as plain text.

    In a rendered prompt, a ``</s>`` typed by the user looks like the template's ``</s>``. Typed special tokens are
    therefore marked before rendering, which also hides them from processors that expand image tokens. After rendering,
    the template's special tokens are renamed to secret names, the marks are removed, and a copy of the tokenizer with
    these names encodes the string. Typed tokens are encoded together with the surrounding text, as by
    ``split_special_tokens``. Prompts without typed special tokens are encoded as usual.

    Args:
        media: further strings that the processor expands, such as ``<image>``.
    """

    def __init__(self, tokenizer: Any, media: Iterable[str | None] = ()) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        wanted = {*tokenizer.all_special_tokens, *media}
        # The mark is inserted after the first character.
        self._ids = {t.content: i for i, t in added if (t.special or t.content in wanted) and len(t.content) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._typed = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._renamed: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None

    def __getattr__(self, name: str) -> Any:
        if "tokenizer" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.tokenizer, name)  # processors use this object as their tokenizer

    def mark(self, prompt: Any) -> Any:
        """Mark typed special tokens in a prompt (text or chat messages); returns the same object without any. Raises
        ``UserError`` if the tokenizer cannot encode them as text."""
        text = isinstance(prompt, str)
        marked: Any = self._marked(prompt) if text else [self._marked_message(message) for message in prompt]
        if marked == prompt if text else all(new is old for new, old in zip(marked, prompt, strict=True)):
            return prompt
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError("the prompt contains special tokens, which this tokenizer cannot encode as text")
        return marked

    def is_marked(self, text: str) -> bool:
        """Whether a rendered prompt must be encoded by ``encode``."""
        return _MARK in text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a rendered prompt, with typed special tokens as text. Raises ``UserError`` if the tokenizer encodes
        some plain text as special tokens."""
        backend, names, ids = self._renamed = self._renamed or self._rename()
        text = self._typed.sub(lambda match: names[match[0]], text).replace(_MARK, "")
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        result, control = [], set(self._ids.values())
        for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if added:  # added by the tokenizer, such as a leading <s>, with its real id
                result.append(token)
                continue
            if token not in ids and token in control:
                name = self.tokenizer.convert_ids_to_tokens(token)
                raise UserError(f"the prompt contains {name!r}, which this tokenizer cannot encode as text")
            result.append(ids.get(token, token))
        return result

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: Any = False,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        **_: Any,
    ) -> Any:
        """The tokenizer's ``__call__``, used by processors."""
        rows = [self.encode(row, add_special_tokens) for row in ([text] if isinstance(text, str) else text)]
        return self.tokenizer.pad(
            {"input_ids": rows}, padding=padding, padding_side=padding_side, return_tensors=return_tensors
        )

    def marked(self, value: Any) -> Any:
        """Mark all texts of a JSON value, such as a tool."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        return self._typed.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)

    def _marked_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        rendered = {name: message[name] for name in _RENDERED if message.get(name)}
        if (marked_fields := self.marked(rendered)) != rendered:
            message = {**message, **marked_fields}
        content = message.get("content")
        if isinstance(content, str):
            marked: Any = self._marked(content)
            return message if marked == content else {**message, "content": marked}
        if not isinstance(content, list | tuple):
            return message
        texts = [item.get("text") if isinstance(item, Mapping) else None for item in content]
        strings = [text for text in texts if isinstance(text, str)]
        if not self._typed.search("".join(strings)):
            return message
        end = _MARK if len(strings) > 1 else ""  # joined items may spell a special token
        marked = [
            {**item, "text": self._marked(text) + end} if isinstance(text, str) else item
            for item, text in zip(content, texts, strict=True)
        ]
        return {**message, "content": marked}

    def _rename(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Tokenizer copy with secret names of special tokens, the secret names, and real ids by the copy's ids."""
        secret = secrets.token_hex(8)
        names = {content: f"\ue0a2{secret}-{number}\ue0a3" for number, content in enumerate(self._ids)}
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        real = {}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
            real[token["content"]] = token["id"]
        state["truncation"] = state["padding"] = None
        backend = Tokenizer.from_str(json.dumps(state))
        # The copy renumbers added tokens.
        ids = {backend.token_to_id(content): number for content, number in real.items()}
        return backend, names, {copied: number for copied, number in ids.items() if copied is not None}
