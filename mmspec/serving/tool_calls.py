"""Tool calls in a streamed output: text in, content and calls out, as deltas of OpenAI's API."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from mmspec.serving.tool_formats import ToolFormat

_HEAD = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_LONGEST_HEAD = 200  # characters; more are no call


@dataclass
class Delta:
    """What a piece of text adds.

    Attributes:
        content: text of the message.
        calls: deltas of calls by index, in OpenAI's form.
    """

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a delta or message: those that there are."""
        content = {"content": self.content} if self.content else {}
        return {**content, "tool_calls": list(self.calls.values())} if self.calls else content


class CallReader:
    """Reads the calls of one output.

    The arguments of a call are passed on as they are written, up to the end of their JSON object: markers inside of its
    strings are text. White space around calls is left out. What begins like a call and is none is content.

    Args:
        begun: whether the marker precedes the output.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, form: ToolFormat, *, begun: bool = False) -> None:
        self._form, self.calls = form, 0
        opening = re.escape(form.opening)
        marker = "" if form.in_call else f"(?:{re.escape(form.marker)})?"
        self._head = re.compile(rf"\s*{marker}\s*(?:{opening})?\s*{_HEAD}")
        self._end = re.compile(rf"\s*\}}\s*{re.escape(form.end.strip())}")
        self._next = re.compile(r"\s*\}\s*,\s*(?=\{)")
        self._rest = ""
        self._step = self._in_head if begun else self._in_text
        self._said = False  # any content: the marker of a format may count at the beginning only
        self._json = _Object()

    def feed(self, text: str, *, final: bool = False) -> Delta:
        """Read more of the output.

        Args:
            final: nothing follows.
        """
        self._rest += text
        delta = Delta()
        while self._step(delta, final):
            pass
        return delta

    def _in_text(self, delta: Delta, final: bool) -> bool:
        rest, marker = self._rest, self._form.marker
        at = rest.find(marker)
        if self._form.in_call and (self._said or at > 0):
            at = -1
        if at >= 0:
            said = rest[:at].rstrip()
            self._say(delta, said)
            self._rest, self._step = rest[len(said) :], self._in_head
            return True
        held = len(rest.rstrip())
        if not self._form.in_call or not self._said:
            held = min([held, *(len(rest) - n for n in range(1, len(marker)) if rest.endswith(marker[:n]))])
            held = len(rest[:held].rstrip())
        if final and not (self.calls and not rest.strip()):
            held = len(rest)
        self._say(delta, rest[:held])
        self._rest = rest[held:]
        return False

    def _in_head(self, delta: Delta, final: bool) -> bool:
        found = self._head.match(self._rest)
        if found is not None:
            prefix, length = ("", self._form.id_length) if self._form.id_length else ("call_", 24)
            call = {"index": self.calls, "id": f"{prefix}{uuid.uuid4().hex[:length]}", "type": "function"}
            delta.calls[self.calls] = {**call, "function": {"name": found[1], "arguments": ""}}
            self._rest, self._step, self._json = self._rest[found.end() :], self._in_arguments, _Object()
            return True
        if final or len(self._rest) > _LONGEST_HEAD:
            self._say(delta, self._rest)
            self._rest, self._step = "", self._in_text
        return False

    def _in_arguments(self, delta: Delta, final: bool) -> bool:
        end = self._json.read(self._rest)
        if end:
            call = delta.calls.setdefault(self.calls, {"index": self.calls, "function": {"arguments": ""}})
            call["function"]["arguments"] += self._rest[:end]
            self._rest = self._rest[end:]
        if self._json.over:
            self.calls, self._step = self.calls + 1, self._in_tail
        elif final:
            self.calls += 1  # cut short
        return self._json.over

    def _in_tail(self, delta: Delta, final: bool) -> bool:
        found = self._next.match(self._rest)
        if found is not None:
            self._step = self._in_head
        elif (found := self._end.match(self._rest)) is not None:
            self._step = self._in_text
        if found is not None:
            self._rest = self._rest[found.end() :]
        return found is not None

    def _say(self, delta: Delta, text: str) -> None:
        delta.content += text
        self._said = self._said or bool(text)


class _Object:
    """Finds the end of a JSON object that arrives in pieces.

    Attributes:
        over: the end was read.
    """

    def __init__(self) -> None:
        self.over = False
        self._depth, self._in_string, self._escaped = 0, False, False

    def read(self, text: str) -> int:
        """Number of characters of a piece that belong to the object."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.over = True
                    return place + 1
        return len(text)
