"""Sampling parameters are declared once: Python, command line and server share names, limits and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("fastapi")

from mmspec import SamplingParams, UserError
from mmspec.cli import main
from mmspec.cli.generate import generate
from mmspec.sampling.params import LIBRARY
from mmspec.sampling.syntax import KINDS
from mmspec.serving.errors import APIError
from mmspec.serving.schemas import ChatCompletionRequest, CompletionRequest, parse
from mmspec.serving.settings import Limits
from tests.mmspec.sampling.test_params import CHANGES

NAMES = [one.name for one in fields(SamplingParams)]
WRONG: dict[str, list[tuple[Any, str]]] = {
    "temperature": [(-0.5, "be >= 0"), ("hot", "be a number"), (float("inf"), "be a finite number")],
    "top_p": [(-0.1, "be >= 0"), (1.5, "be <= 1"), ("most", "be a number")],
    "top_k": [(-2, "be >= 0"), ("few", "be a whole number")],
    "min_p": [(-0.5, "be >= 0"), (1.5, "be <= 1")],
    "repetition_penalty": [(0.0, "be > 0"), ("strong", "be a number")],
    "max_new_tokens": [(0, "be >= 1"), (2**31 + 1, f"be <= {2**31}")],
    "min_new_tokens": [(-1, "be >= 0"), (2**31 + 1, f"be <= {2**31}")],
    "presence_penalty": [(-2.1, "be >= -2"), (2.1, "be <= 2")],
    "frequency_penalty": [(-2.1, "be >= -2"), (2.1, "be <= 2")],
    "logit_bias": [
        ("5", "be token ids"),
        ("5=1,6", "be token ids"),
        ("5=a", "be token ids"),
        ("5=101", "be token ids"),
    ],
    "seed": [(2**64, f"be <= {2**64 - 1}"), (-(2**63) - 1, f"be >= {-(2**63)}"), ("lucky", "be a whole number")],
    "lossy": [(-0.1, "be >= 0"), (float("nan"), "be a finite number")],
    "ignore_eos": [("x", "be true or false")],
    "grammar_aligned": [("x", "be true or false")],
    "stop": [(["a", 5], "be text or a list of texts"), ({"a": 1}, "be text or a list of texts"), (5, "be text or")],
    "regex": [("", "be text that is not empty"), (5, "be text that is not empty")],
    "grammar": [("\ud800", "be text that is not empty")],
    "grammar_trigger": [("", "be text that is not empty, or /PATTERN/ of Python's re")],
    "json_schema": [("[", "be a JSON schema"), ([], "be a JSON schema"), (3, "be a JSON schema")],
}
RIGHT: dict[str, list[Any]] = {
    "temperature": [0, 1e9, np.float32(0.5)],
    "top_p": [0, 1],
    "top_k": [0, np.int32(5)],
    "min_p": [0, 1],
    "repetition_penalty": [1e-6],
    "max_new_tokens": [1, 2**31, np.int64(5)],
    "min_new_tokens": [0, 2**31],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [2**64 - 1, -(2**63)],
    "lossy": [0],
}
FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of requests by parameters, where the names differ."""

CASES = [(name, value, rule) for name, values in WRONG.items() for value, rule in values]


def asked(**given: Any) -> ChatCompletionRequest:
    request = {"model": "m", "messages": [{"role": "user", "content": "a"}], **given}
    return parse(ChatCompletionRequest, json.dumps(request).encode())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_an_option_and_a_field_of_requests(name: str) -> None:
    assert name in {parameter.name for parameter in generate.params}
    if name not in (*KINDS, "grammar_trigger"):
        value, field = CHANGES[name], FIELDS.get(name, name)
        given = json.loads(json.dumps(value))  # JSON's keys are texts
        assert asked(**{field: given}).sampling(Limits(), {})[name] == getattr(SamplingParams(**{name: value}), name)
        assert field in CompletionRequest.model_fields


@pytest.mark.parametrize(("name", "value", "rule"), CASES)
def test_invalid_values(name: str, value: Any, rule: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as api:
        SamplingParams(**{name: value})
    assert str(api.value).startswith(f"{name} must {rule}")
    assert "\n" not in str(api.value)
    if name in ("stop", *KINDS, "grammar_trigger", "ignore_eos", "grammar_aligned"):
        return
    option = f"--{name.replace('_', '-')}"
    assert main(["generate", "A", f"{option}={value}"]) == 2
    error = capfd.readouterr().err
    assert error.startswith((f"error: Invalid value for '{option}': ", f"error: {name} must {rule}"))
    assert error.count("\n") == 1
    if value == value and value != float("inf"):  # JSON's numbers are finite
        field = FIELDS.get(name, name)
        with pytest.raises(APIError) as http:
            asked(**{field: value})
        assert (http.value.message, http.value.param) == (str(api.value).replace(name, field), field)


def test_values_at_their_limits() -> None:
    for name, values in RIGHT.items():
        for value in values:
            found = getattr(SamplingParams(**{name: value}), name)
            assert found == value
            assert type(found) in (int, float)
        assert getattr(SamplingParams(**{name: None}) if name in LIBRARY else SamplingParams(), name) in (None, 0)
    assert SamplingParams(temperature=0.00009).temperature == 0
    assert SamplingParams(temperature=0.0001).temperature == 0.0001
    assert SamplingParams(stop=["a", ""]) == SamplingParams(stop=("a",))
    assert (SamplingParams(stop="").stop, SamplingParams(stop="a").stop) == ((), "a")


def test_help_shows_range_and_default() -> None:
    text = " ".join(CliRunner().invoke(generate, ["--help"]).output.split())
    for part in ("[default: (the model's, or 1); 0<=x<=1]", "[default: 0.0; -2<=x<=2]", "(the model's, or 256)"):
        assert part in text


def test_options_need_no_torch() -> None:
    code = "import sys, mmspec.cli.generate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
