"""Special tokens in user text, encoded as the characters that they consist of.

In the string that a chat template renders, a typed ``</s>`` looks like the template's own. So typed ones are marked
before rendering, which also hides them from processors that expand image tokens. Then the template's own get secret
names, the marks are removed, and a copy of the tokenizer whose special tokens have these names encodes the string.
Typed tokens are encoded together with the text around them, as by ``split_special_tokens``. Prompts without typed
special tokens are encoded as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from mmspec.errors import UserError

_MARK = "\ue0a1"  # a private-use character
_RENDERED = ("tool_calls", "tool_call_id", "name")  # what templates write of a message beside its role and content


class UserText:
    """Marks and encodes prompts for one tokenizer.

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
        if "tokenizer" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.tokenizer, name)  # a processor takes this object for its tokenizer

    def mark(self, prompt: Any) -> Any:
        """A prompt, text or chat messages, with typed special tokens marked; the same object if there are none.

        Raises:
            UserError: the tokenizer cannot encode them as text.
        """
        if isinstance(prompt, str):
            marked: Any = self._marked(prompt)
            changed = marked != prompt
        else:
            marked = [self._marked_message(message) for message in prompt]
            changed = any(new is not old for new, old in zip(marked, prompt, strict=True))
        if not changed:
            return prompt
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError("the prompt contains special tokens, which this tokenizer cannot encode as text")
        return marked

    def is_marked(self, text: str) -> bool:
        """Whether a rendered prompt must be encoded by ``encode``."""
        return _MARK in text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a rendered prompt, typed special tokens as text.

        Raises:
            UserError: the tokenizer makes special tokens of plain text.
        """
        backend, names, ids = self._renamed = self._renamed or self._rename()
        text = self._typed.sub(lambda match: names[match[0]], text).replace(_MARK, "")
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        result, control = [], set(self._ids.values())
        for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if added:  # by the tokenizer itself, such as a first <s>; its id is the real one
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
        """The tokenizer's call, for processors."""
        rows = [self.encode(row, add_special_tokens) for row in ([text] if isinstance(text, str) else text)]
        return self.tokenizer.pad(
            {"input_ids": rows}, padding=padding, padding_side=padding_side, return_tensors=return_tensors
        )

    def marked(self, value: Any) -> Any:
        """A JSON value, such as a tool, whose texts are marked."""
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
        end = _MARK if len(strings) > 1 else ""  # items that a template joins may spell a special token together
        marked = [
            {**item, "text": self._marked(text) + end} if isinstance(text, str) else item
            for item, text in zip(content, texts, strict=True)
        ]
        return {**message, "content": marked}

    def _rename(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer with secret names of special tokens, these names, and real ids by the copy's ids."""
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
