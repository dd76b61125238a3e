"""Fields of options: errors of one line with rule, expected and received value. Exceptions as errors of the user."""

from math import inf, nan
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock

import numpy as np
import pytest
from pydantic import FilePath, NonNegativeInt

from mmspec import UserError, workers
from mmspec.errors import explained, first_line, nearest, shown
from mmspec.validation import Many, Text, check, inherited, option, options, part, read, with_fields_of


@options
class Sample:
    count: int = option(3, "Number.", ge=1, le=8)
    rate: float | None = option(None, "Speed.", gt=0, default_text="the usual one", names=("--speed",))
    kind: Literal["a", "b"] = "a"
    name: Text = "x"
    files: Many[FilePath] = ()
    ids: list[int] = option(list, "Ids.", min_length=1, max_length=2)
    on: bool = option(False, "Whether.")

    def __post_init__(self) -> None:
        if self.count == 8 and self.on:
            raise UserError("count 8 does not go with on")
        if self.count == 7 and self.on:
            raise ValueError("odd")


@options(kw_only=True)
class Needed:
    size: int
    sample: str = ""


def assert_refused(message: str, call: Any, *values: Any, **named: Any) -> None:
    with pytest.raises(UserError) as caught:
        call(*values, **named)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count must be >= 1: got 0"),
        ({"count": 9}, "count must be <= 8: got 9"),
        ({"count": True}, "count must be a whole number: got True"),
        ({"count": "5"}, "count must be a whole number: got '5'"),
        ({"count": 2.0}, "count must be a whole number: got 2.0"),
        ({"count": object()}, "count must be a whole number: got object"),
        ({"rate": 0}, "rate must be > 0: got 0"),
        ({"rate": nan}, "rate must be a finite number: got nan"),
        ({"rate": inf}, "rate must be a finite number: got inf"),
        ({"rate": True}, "rate must be a number: got True"),
        ({"kind": "c"}, "kind must be 'a' or 'b': got 'c'"),
        ({"name": 5}, "name must be text that UTF-8 can encode: got 5"),
        ({"name": "\ud800"}, r"name must be text that UTF-8 can encode: got '\ud800'"),
        ({"files": [Path("/nowhere")]}, "files[0] must be an existing file: got '/nowhere'"),
        ({"files": 5}, "files must be a list: got 5"),
        ({"ids": []}, "ids must be a list of at least 1: got 0"),
        ({"ids": [1, 2, 3]}, "ids must be a list of at most 2: got 3"),
        ({"ids": [1, "a"]}, "ids[1] must be a whole number: got 'a'"),
        ({"on": 1}, "on must be true or false: got 1"),
        ({"nmae": "a"}, "unknown field of Sample: got nmae; did you mean name?"),
        ({"zzz": "a"}, "unknown field of Sample: got zzz"),
        ({"count": 8, "on": True}, "count 8 does not go with on"),
        ({"count": 7, "on": True}, "Sample: odd"),
    ],
)
def test_invalid_fields(given: dict[str, Any], message: str) -> None:
    assert_refused(message, Sample, **given)


def test_positional_arguments_have_names_in_errors() -> None:
    assert_refused("rate must be > 0: got -1", Sample, 1, -1)
    assert_refused("Sample: Unexpected positional argument", Sample, 1, 1.0, "a", "x", (), [1], True, 5)


def test_values_are_converted(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    made = Sample(np.int64(2), np.float32(0.5), files=[file])  # type: ignore[arg-type]
    assert (made.count, made.rate, made.files) == (2, 0.5, (file,))
    assert [type(value) for value in (made.count, made.rate, made.files)] == [int, float, tuple]
    assert (Sample().ids, Sample(rate=1).rate) == ([], 1.0)
    assert part(made, ("count", "kind", "other")) == {"count": 2, "kind": "a"}
    assert part(Sample(), ("rate", "on")) == {"on": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "f: size is required"),
        ({"size": None}, "f: size must be a whole number: got None"),
        ({"size": 1, "smaple": ""}, "f: unknown field of Needed: got smaple; did you mean sample?"),
        ([1], "f must be an object: got [1]"),
    ],
)
def test_objects_of_files(values: Any, message: str) -> None:
    assert_refused(message, read, Needed, values, "f")
    assert read(Needed, {"size": 1}, "f") == Needed(size=1)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (NonNegativeInt | None, -1, "x must be >= 0: got -1"),
        (Literal["a"], "b", "x must be 'a': got 'b'"),
        (list[int], [1, None], "x[1] must be a whole number: got None"),
        (dict, 5, "x must be an object: got 5"),
    ],
)
def test_single_values(kind: Any, value: Any, message: str) -> None:
    assert_refused(message, check, "x", kind, value)
    assert check("x", NonNegativeInt | None, np.int32(4)) == 4
    assert check("x", NonNegativeInt | None, None) is None


def test_fields_of_other_classes() -> None:
    @options(kw_only=True)
    @with_fields_of(Sample)
    class Derived:
        count: int = inherited(Sample, "count", "Other help.", default=5)
        speed: float | None = inherited(Sample, "rate", gt=2)

    known = Derived.__pydantic_fields__  # type: ignore[attr-defined]
    helps = {name: (one.description, one.json_schema_extra["default_text"]) for name, one in known.items()}
    assert helps == {
        "count": ("Other help.", ""),
        "speed": ("Speed.", "the usual one"),
        "rate": ("Speed.", "the usual one"),
        "ids": ("Ids.", ""),
        "on": ("Whether.", "off"),
    }
    assert known["rate"].json_schema_extra["names"] == ("--speed",)
    made: Any = Derived()
    assert (made.count, made.rate, made.ids, made.on) == (5, None, None, None)
    for given in ({"count": 9}, {"rate": 0.0}, {"ids": []}, {"speed": 2.0}):
        with pytest.raises(UserError, match=f"^{next(iter(given))} must be "):
            Derived(**given)


def test_shown() -> None:
    assert shown("x" * 1000) == "str " + repr("x" * 1000)[:80] + "..."
    assert shown([{"url": "data:image/png;base64,QUJD"}]) == "[{'url': 'data:image/png;base64,...'}]"
    assert (shown(len), shown(None)) == ("builtin_function_or_method", "None")
    nested: list[Any] = []
    nested.append([nested])
    assert shown(nested) == "[[[...]]]"


def test_first_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a" * 900)) == "a" * 400 + " ..."
    assert first_line(ValueError("a" * 400)) == "a" * 400
    assert nearest("presence_penalty", ["repetition_penalty"]) == ""


def test_replies_of_a_worker_about_exceptions() -> None:
    memory = {"cause": "memory", "error": ""}
    for error, context, reply in (
        (UserError("no"), KeyError("a"), {"error": "no"}),
        (UserError("no"), MemoryError(), memory),
        (MemoryError("no"), None, memory),
        (ValueError("no"), MemoryError(), {"cause": "exception", "error": "ValueError: no"}),
    ):
        error.__context__ = context
        assert workers._handle(MagicMock(side_effect=error), None, b"") == (reply, ())


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_that_failed_is_stopped_and_forgotten(idle: bool) -> None:
    pool, worker = workers.Workers("none", workers=1, memory=1), MagicMock(idle=idle)
    worker.process.poll.return_value = None
    pool._workers.add(worker)
    pool._release(worker)
    assert (pool._idle, pool._workers) == (([worker], {worker}) if idle else ([], set()))
    assert worker.stop.called == (not idle)


def test_named_exceptions_become_one_line() -> None:
    with pytest.raises(UserError, match=r"^cannot read x: no$") as raised, explained("cannot read x", OSError):
        raise OSError("no\nfile")
    assert isinstance(raised.value.__cause__, OSError)
    for error in (UserError("said"), KeyError("other")):  # others pass
        with pytest.raises(type(error)) as passed, explained("cannot read x", OSError, ValueError):
            raise error
        assert passed.value is error
