"""Generated JSON schemas of the kinds that people write, each with a prompt that asks for an object of it.

The kinds follow the collections of JSONSchemaBench (arXiv 2501.10868): function signatures, configuration files,
records with constraints, definitions that refer to each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_SUBJECTS = (
    "a customer order",
    "a weather report",
    "a used car",
    "a public library",
    "a software bug",
    "a film review",
    "a hotel booking",
    "a mountain hike",
    "a job advertisement",
    "a football match",
    "a recipe for soup",
    "a house plant",
)
_WORDS: dict[str, tuple[str, ...]] = {
    "status": ("open", "closed", "pending"),
    "colour": ("red", "green", "blue", "black", "white"),
    "priority": ("low", "medium", "high", "critical"),
    "size": ("S", "M", "L", "XL"),
    "currency": ("EUR", "USD", "GBP", "JPY"),
    "unit": ("metres", "feet", "kilometres", "miles"),
    "language": ("English", "French", "German", "Spanish"),
    "rating": ("poor", "fair", "good", "excellent"),
}
_TEXTS = ("name", "title", "description", "city", "owner", "summary", "category", "author", "comment")
_WHOLE = ("count", "year", "age", "quantity", "score", "floor", "pages", "seats")
_REAL = ("price", "weight", "latitude", "temperature", "distance", "ratio", "discount")
_FLAGS = ("active", "verified", "available", "in_stock", "archived", "is_public")
_PATTERNS: dict[str, str] = {
    "order_id": "^[A-Z]{3}-[0-9]{4}$",
    "phone": r"^\+[0-9]{1,3} [0-9]{6,10}$",
    "postcode": "^[0-9]{5}$",
    "hex_colour": "^#[0-9a-f]{6}$",
    "version": r"^[0-9]+\.[0-9]+\.[0-9]+$",
    "slug": "^[a-z]+(-[a-z]+){0,3}$",
    "plate": "^[A-Z]{1,3} [A-Z]{1,2} [0-9]{1,4}$",
}
_FORMATS = {
    "date": "date",
    "created_at": "date-time",
    "email": "email",
    "id": "uuid",
    "ip_address": "ipv4",
    "start_time": "time",
}


@dataclass(frozen=True)
class SchemaRequest:
    """A schema and the prompt that asks for it.

    Attributes:
        kind: one of ``KINDS``.
    """

    kind: str
    prompt: str
    schema: Schema


def schema_requests(count: int, seed: int = 0) -> list[SchemaRequest]:
    """``count`` requests with a schema each, cycling through the kinds; no two schemas are equal."""
    kinds = list(KINDS)
    return [_request(kinds[index % len(kinds)], f"{seed}-{index}") for index in range(count)]


def _request(kind: str, seed: str) -> SchemaRequest:
    draw = random.Random(seed)
    schema = KINDS[kind](draw)
    fields = ", ".join(schema.get("properties", {"value": None}))
    subject = draw.choice(_SUBJECTS)
    prompt = f"Write one JSON object that describes {subject}, with these fields: {fields}. Answer with the JSON only."
    return SchemaRequest(kind, prompt, schema)


def _record(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def _text(draw: random.Random) -> tuple[str, Schema]:
    return draw.choice(_TEXTS), {"type": "string", "maxLength": 60}


def _whole(draw: random.Random) -> tuple[str, Schema]:
    low = draw.choice((0, 1, 10, 1900))
    return draw.choice(_WHOLE), {"type": "integer", "minimum": low, "maximum": low + draw.choice((9, 100, 150))}


def _real(draw: random.Random) -> tuple[str, Schema]:
    low = draw.choice((-90, 0, 1))
    name, high = draw.choice(_REAL), low + draw.choice((1, 180, 1000))
    return name, {"type": "number", draw.choice(("minimum", "exclusiveMinimum")): low, "maximum": high}


def _flag(draw: random.Random) -> tuple[str, Schema]:
    return draw.choice(_FLAGS), {"type": "boolean"}


def _enum(draw: random.Random) -> tuple[str, Schema]:
    name = draw.choice(list(_WORDS))
    return name, {"type": "string", "enum": list(_WORDS[name])}


def _pattern(draw: random.Random) -> tuple[str, Schema]:
    name = draw.choice(list(_PATTERNS))
    return name, {"type": "string", "pattern": _PATTERNS[name]}


def _format(draw: random.Random) -> tuple[str, Schema]:
    name = draw.choice(list(_FORMATS))
    return name, {"type": "string", "format": _FORMATS[name]}


_ANY = (_text, _whole, _real, _flag, _enum, _pattern, _format)


def _fields(draw: random.Random, count: int, kinds: Any = _ANY) -> Schema:
    """Properties with different names."""
    properties: Schema = {}
    while len(properties) < count:
        name, schema = draw.choice(kinds)(draw)
        properties.setdefault(name, schema)
    return properties


def _flat(draw: random.Random) -> Schema:
    return _record(_fields(draw, draw.randint(2, 5), (_text, _whole, _flag, _enum)))


def _nested(draw: random.Random) -> Schema:
    inner = _record(_fields(draw, 2))
    middle = _record(_fields(draw, 1) | {"details": inner})
    return _record(_fields(draw, 2) | {draw.choice(("address", "contact", "vendor")): middle})


def _arrays(draw: random.Random) -> Schema:
    items = draw.choice((_text, _whole, _enum))(draw)[1]
    low = draw.randint(1, 2)
    array = {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(1, 3)}
    return _record(_fields(draw, 1) | {draw.choice(("tags", "items", "values")): array})


def _objects_in_arrays(draw: random.Random) -> Schema:
    array = {"type": "array", "items": _record(_fields(draw, 2)), "minItems": 1, "maxItems": 3}
    return _record(_fields(draw, 1) | {"entries": array})


def _enums(draw: random.Random) -> Schema:
    mixed = {"enum": draw.sample(["none", "all", 1, 2.5, True, None], 3)}
    return _record(_fields(draw, 2, (_enum,)) | {"option": mixed, "kind": {"const": "record"}})


def _numbers(draw: random.Random) -> Schema:
    steps = {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": draw.choice((5, 10, 25))}
    return _record(_fields(draw, 3, (_whole, _real)) | {"steps": steps})


def _patterns(draw: random.Random) -> Schema:
    return _record(_fields(draw, draw.randint(2, 3), (_pattern,)))


def _lengths(draw: random.Random) -> Schema:
    low = draw.randint(1, 8)
    code = {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 12)}
    return _record(_fields(draw, 1, (_text,)) | {"code": code})


def _formats(draw: random.Random) -> Schema:
    return _record(_fields(draw, draw.randint(2, 3), (_format,)))


def _any_of(draw: random.Random) -> Schema:
    choices = [
        _record({"type": {"const": name}} | _fields(draw, 1)) for name in draw.sample(["a", "b", "card", "cash"], 2)
    ]
    return _record(_fields(draw, 1) | {"payment": {"anyOf": choices}})


def _optional(draw: random.Random) -> Schema:
    properties = _fields(draw, 5)
    return _record(properties, draw.sample(list(properties), 2))


def _nullable(draw: random.Random) -> Schema:
    properties = _fields(draw, 2)
    name, schema = _whole(draw)
    return _record(properties | {f"maybe_{name}": schema | {"type": ["integer", "null"]}})


def _definitions(draw: random.Random) -> Schema:
    point = _record({"x": {"type": "number"}, "y": {"type": "number"}})
    line = _record({"start": {"$ref": "#/$defs/point"}, "end": {"$ref": "#/$defs/point"}})
    schema = _record(_fields(draw, 1) | {"line": {"$ref": "#/$defs/line"}})
    return schema | {"$defs": {"point": point, "line": line}}


def _recursive(draw: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    node = _record({"label": {"type": "string", "maxLength": 12}, "children": children})
    return _record({"root": {"$ref": "#/$defs/node"}} | _fields(draw, 1)) | {"$defs": {"node": node}}


def _map(draw: random.Random) -> Schema:
    values = draw.choice((_whole, _real, _flag))(draw)[1]
    names = {"patternProperties": {"^[a-z]{1,8}$": values}, "additionalProperties": False}
    counts = {"type": "object", **names, "minProperties": 1, "maxProperties": 3}
    return _record(_fields(draw, 1) | {"counts": counts})


def _function_call(draw: random.Random) -> Schema:
    calls = [
        _record({"name": {"const": f"{verb}_{noun}"}, "arguments": _record(_fields(draw, draw.randint(1, 3)))})
        for verb, noun in zip(draw.sample(["get", "set", "list", "send"], 2), ("report", "user"), strict=True)
    ]
    return _record({"id": {"type": "string", "pattern": "^call_[0-9a-z]{8}$"}, "function": {"anyOf": calls}})


def _tuple(draw: random.Random) -> Schema:
    items = [schema for _, schema in (draw.choice((_whole, _real, _enum))(draw) for _ in range(3))]
    pair = {"type": "array", "prefixItems": items, "items": False, "minItems": 3}
    return _record(_fields(draw, 1) | {"position": pair})


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "flat": _flat,
    "nested": _nested,
    "arrays": _arrays,
    "objects in arrays": _objects_in_arrays,
    "enums": _enums,
    "numbers": _numbers,
    "patterns": _patterns,
    "lengths": _lengths,
    "formats": _formats,
    "anyOf": _any_of,
    "optional": _optional,
    "nullable": _nullable,
    "definitions": _definitions,
    "recursive": _recursive,
    "maps": _map,
    "function calls": _function_call,
    "tuples": _tuple,
}
"""Generators by kind."""
