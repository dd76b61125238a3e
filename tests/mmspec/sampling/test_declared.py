"""Sampling parameters are declared once: names, limits and errors of Python, command line and server are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import click
import pytest

pytest.importorskip("fastapi")

from mmspec import SamplingParams, UserError
from mmspec.cli import main
from mmspec.cli.generate import generate
from mmspec.sampling.syntax import KINDS
from mmspec.serving.errors import APIError
from mmspec.serving.limits import Limits
from mmspec.serving.schemas import ChatCompletionRequest, CompletionRequest, parse
from tests.mmspec.sampling.test_params import CHANGES

NAMES = [one.name for one in fields(SamplingParams)]
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.5, "hot"],
    "top_p": [-0.1, 1.5, "most"],
    "top_k": [-2, "few"],
    "min_p": [-0.5, 1.5, "least"],
    "repetition_penalty": [0.0, -1.0, "strong"],
    "max_new_tokens": [0, 2**31 + 1, "all"],
    "min_new_tokens": [-1, 2**31 + 1, "all"],
    "presence_penalty": [-2.1, 2.1, "strong"],
    "frequency_penalty": [-2.1, 2.1, "strong"],
    "logit_bias": ["5", "5=1,6", "5=a"],
    "seed": [2**64, -(2**63) - 1, "lucky"],
}
FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of requests by parameters, where the names differ."""

CASES = [(name, value) for name, values in WRONG.items() for value in values]


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


@pytest.mark.parametrize(("name", "value"), CASES)
def test_errors_are_the_same_everywhere(name: str, value: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as api:
        SamplingParams(**{name: value})
    rule = str(api.value).removeprefix(name)
    assert rule.startswith(" must be ")
    option = f"--{name.replace('_', '-')}"
    assert main(["generate", "A", f"{option}={value}"]) == 2
    assert capfd.readouterr().err == f"error: Invalid value for '{option}':{rule}\n"
    field = FIELDS.get(name, name)
    with pytest.raises(APIError) as http:
        asked(**{field: value})
    assert (http.value.message, http.value.param) == (f"{field}{rule}", field)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"])
def test_help_shows_range_and_default(name: str) -> None:
    (option,) = (one for one in generate.params if one.name == name and isinstance(one, click.Option))
    rule, metadata = SamplingParams.rule(name), SamplingParams.__dataclass_fields__[name].metadata
    assert option.help is not None
    assert option.help.endswith(f"[default: the model's, or {metadata['library']:g}; {rule.limits}]")


def test_options_need_no_torch() -> None:
    code = "import sys, mmspec.cli.generate; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
