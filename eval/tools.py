"""Tool calls over HTTP: ``python -m mmspec.eval tools --model FILE.gguf``.

openai-python sends ``mmspec serve`` requests that say which functions to call with which arguments. A request passes if
its answer has these calls, or the expected words if no call is needed, and equals plain decoding's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.serving import serving


def _declared(name: str, description: str = "", **fields: Any) -> type[BaseModel]:
    """Create a pydantic model from fields given as types, or types with defaults."""
    pairs: dict[str, Any] = {key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()}
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(name, __doc__=description, __config__=config, **pairs)


_CURRENCY = Literal["EUR", "GBP", "JPY", "USD"]
_PLACE = _declared("place", city=str, room=int)
_ITEM = _declared("item", product=str, quantity=int)
_FUNCTIONS = (
    _declared("get_weather", "Weather forecast.", town=str, unit=Literal["celsius", "fahrenheit"], days=int),
    _declared("convert_currency", "Convert money.", amount=float, source=_CURRENCY, target=_CURRENCY),
    _declared("add_event", "Add to the calendar.", title=str, date=str, attendees=list[str], place=_PLACE),
    _declared("search_files", "Search files for a text.", text=str, folder=str, case_sensitive=bool),
    _declared("place_order", "Order products.", customer=str, items=list[_ITEM], express=bool),  # type: ignore[valid-type]
    _declared("set_volume", "Set the loudspeakers' volume.", percent=int),
    _declared("send_message", "Send a message to people.", recipients=list[str], text=str),
    _declared("get_time", "The time of day."),
    _declared("start_timer", "Start a timer.", minutes=int, label=(str, "")),
    _declared("book_table", "Book a restaurant's table.", restaurant=str, guests=int, outside=(bool, False)),
)
FUNCTIONS = {one.__name__: one for one in _FUNCTIONS}


def _tool(function: type[BaseModel]) -> Any:
    """A function in OpenAI's form: strict, which requires all arguments, if all are required."""
    from openai import pydantic_function_tool

    name, schema = function.__name__, function.model_json_schema()
    if not any("default" in one for one in schema["properties"].values()):
        return pydantic_function_tool(function, name=name)
    return {"type": "function", "function": {"name": name, "description": function.__doc__, "parameters": schema}}


Call = tuple[str, Mapping[str, Any]]  # name of a function and its arguments


@dataclass(frozen=True)
class ToolRequest:
    """A request with its expected calls, or words of an answer without calls (``says``). ``choice`` is ``tool_choice``,
    a function by name; ``sent`` the client's method, of which ``parse`` and ``stream`` require strict tools; ``before``
    an earlier call for the prompt, and its result."""

    name: str
    prompt: str
    calls: Sequence[Call] = ()
    says: str = ""
    choice: str = "auto"
    sent: Literal["create", "parse", "stream"] = "create"
    before: tuple[Call, str] | None = None

    def body(self, model: str) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.prompt}]
        if self.before is not None:
            (name, given), result = self.before
            call = {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "1", "content": result})
        named = {"type": "function", "function": {"name": self.choice}}
        tools = [
            tool for tool in map(_tool, FUNCTIONS.values()) if self.sent == "create" or tool["function"].get("strict")
        ]
        fields = {"tools": tools, "tool_choice": named if self.choice in FUNCTIONS else self.choice}
        return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 256, **fields}

    def send(self, client: Any, model: str) -> Any:
        """Send the request; returns the answer message, or the text of the client's error."""
        from openai import OpenAIError

        chat = client.chat.completions
        try:
            if self.sent == "stream":
                with chat.stream(**self.body(model)) as stream:
                    return stream.get_final_completion().choices[0].message
            return (chat.parse if self.sent == "parse" else chat.create)(**self.body(model)).choices[0].message
        except OpenAIError as error:
            return str(error)

    def outcome(self, message: Any) -> str:
        """``ok``, or the first mistake of an answer."""
        if isinstance(message, str):
            return message
        calls = message.tool_calls or []
        names = [call.function.name for call in calls]
        if names != [name for name, _ in self.calls]:
            said = "" if names else f": {message.content!r}"
            return f"calls {', '.join(names) or 'nothing'}{said}"
        for call, (name, expected) in zip(calls, self.calls, strict=True):
            try:
                found = FUNCTIONS[name].model_validate_json(call.function.arguments)
            except ValidationError as error:
                return f"{name}: {error.errors()[0]['msg']}: {call.function.arguments}"
            parsed = getattr(call.function, "parsed_arguments", None) or found  # ``create`` does not parse them
            if not found == parsed == FUNCTIONS[name](**expected):
                return f"{name}: {call.function.arguments}"
        return "ok" if calls or self.says in (message.content or "") else f"says {message.content!r}"


def _call(function: str, **arguments: Any) -> Call:
    return function, arguments


_ULM = _call("get_weather", town="Ulm", unit="celsius", days=3)
_OSLO = _call("get_weather", town="Oslo", unit="fahrenheit", days=1)
_MONEY = _call("convert_currency", amount=12.5, source="USD", target="EUR")
_BONN = {"city": "Bonn", "room": 12}
_EVENT = _call("add_event", title="Budget", date="2026-03-14", attendees=["Ana", "Ben"], place=_BONN)
_FILES = _call("search_files", text="invoice", folder="/home/ana", case_sensitive=False)
_ITEMS = [{"product": "lamp", "quantity": 2}, {"product": "desk", "quantity": 1}]
_ORDER = _call("place_order", customer="Ana", items=_ITEMS, express=True)
_VOLUME, _TIME, _TEA = _call("set_volume", percent=35), _call("get_time"), _call("start_timer", minutes=4, label="tea")
_MESSAGE = _call("send_message", recipients=["Ana", "Ben"], text='Use "a" and {b}.')
_TIMER, _TABLE = _call("start_timer", minutes=9), _call("book_table", restaurant="Luna", guests=4, outside=True)

_WEATHER = "Get the weather of Ulm in celsius for 3 days."
_WEATHERS = f"{_WEATHER} Also get the weather of Oslo in fahrenheit for 1 day."
_WEATHER_VOLUME = f"{_WEATHER} Also set the volume to 35 percent."
_ORDERS = "Order for the customer Ana, express: 2 of the product lamp and 1 of the product desk."
_EVENTS = "Add the event titled Budget on 2026-03-14 with the attendees Ana and Ben, in the city Bonn, room 12."
_SEND = 'Send a message to Ana and Ben with the text: Use "a" and {b}.'
REQUESTS = (
    ToolRequest("string, enum, integer", _WEATHER, [_ULM]),
    ToolRequest("number, enums", "Convert the amount 12.5 from USD to EUR.", [_MONEY]),
    ToolRequest("list, nested object", _EVENTS, [_EVENT]),
    ToolRequest("boolean", "Search files for the text invoice in /home/ana, not case-sensitive.", [_FILES]),
    ToolRequest("list of objects", _ORDERS, [_ORDER]),
    ToolRequest("quotes and braces", _SEND, [_MESSAGE]),
    ToolRequest("no arguments", "Get the time of day.", [_TIME]),
    ToolRequest("optional, left out", "Start a timer of 9 minutes, without a label.", [_TIMER]),
    ToolRequest("optional, given", "Start a timer of 4 minutes with the label tea.", [_TEA]),
    ToolRequest("optional boolean", "Book a table for 4 guests in the restaurant Luna, outside.", [_TABLE]),
    ToolRequest("two calls", _WEATHERS, [_ULM, _OSLO], choice="required"),
    ToolRequest("two functions", _WEATHER_VOLUME, [_ULM, _VOLUME], choice="required"),
    ToolRequest("stream", _EVENTS, [_EVENT], sent="stream"),
    ToolRequest("stream of two calls", _WEATHER_VOLUME, [_ULM, _VOLUME], choice="required", sent="stream"),
    ToolRequest("parse", _ORDERS, [_ORDER], sent="parse"),
    ToolRequest("required", "Set the volume to 35 percent.", [_VOLUME], choice="required"),
    ToolRequest("required, optional left out", "Start a timer of 9 minutes.", [_TIMER], choice="required"),
    ToolRequest("named", "I pay 12.5 USD. How much is it in EUR?", [_MONEY], choice="convert_currency", sent="parse"),
    ToolRequest("result of a call", "What time is it?", says="16:42", choice="none", before=(_TIME, "16:42")),
    ToolRequest("no tool needed", "What is the capital of France? Answer in one word.", says="Paris"),
)


@benchmark
@click.option("--model", required=True, help="A name that is registered, a folder or a GGUF file.")
@click.option("--drafter", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--tool-call-parser", default="auto", show_default=True)
@click.option("--least", default=20, show_default=True, help="Exit status 1 if fewer requests pass.")
def main(least: int, drafter: str, **options: Any) -> dict[str, Any]:
    """Send requests for tool calls: a table, then one JSON line."""
    drafted, plain = (answers(drafter=one, **options) for one in (drafter, "none"))
    rows = [
        {
            "name": request.name,
            "choice": request.choice,
            "sent": request.sent,
            "outcome": request.outcome(message),
            "equal": comparable(message) == comparable(other),
        }
        for request, message, other in zip(REQUESTS, drafted, plain, strict=True)
    ]
    passed = sum(row["outcome"] == "ok" and row["equal"] for row in rows)
    columns: list[Column] = [(name, f"{{{name}}}") for name in ("name", "choice", "sent", "outcome", "equal")]
    wide_console().print(make_table(columns, rows, title=f"{passed} of {len(rows)} requests"))
    return {**options, "drafter": drafter, "passed": passed, "failed": passed < least, "requests": rows}


def answers(**options: Any) -> list[Any]:
    """The messages that answer the requests, by a server with these options."""
    from openai import OpenAI

    with serving(**options) as server, OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        return [request.send(client, model.id) for request in REQUESTS]


def comparable(message: Any) -> Any:
    """An answer's text and calls, without ids."""
    if isinstance(message, str):
        return message
    return message.content, [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
