"""The clients of docs/serving.md, run as they are written there but for the port."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from shutil import which

import pytest

from mmspec.pipeline import Pipeline
from tests.process import ROOT
from tests.testkit.served import SCENE, Served

WRITTEN = "http://127.0.0.1:8000"
CLIENTS = ("curl", "openai", "langchain_openai")


def documented() -> dict[str, list[str]]:
    """The command of each client."""
    section = (ROOT / "docs/serving.md").read_text().split("\n## Clients\n")[1].split("\n## ")[0]
    found = {}
    for language, code in re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL):
        name = "curl" if language == "sh" else re.findall(r"^from (\w+) import", code, re.MULTILINE)[0]
        assert WRITTEN in code
        found[name] = ["sh", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    return found


def answer_of(client: str, url: str) -> str:
    if not (which(client) if client == "curl" else find_spec(client)):
        pytest.skip(f"needs {client}")
    *command, code = documented()[client]
    done = subprocess.run(
        [*command, code.replace(WRITTEN, url)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(client: str, pipe: Pipeline) -> str:
    """A part of the output."""
    if client == "openai":
        return pipe.generate("Describe the image.", images=str(SCENE)).text
    limit = {"max_new_tokens": 40} if client == "curl" else {}
    return pipe.generate("What is in a picture?", **limit).text


def test_all_clients_are_documented() -> None:
    assert set(documented()) == set(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, server: Served, pipe: Pipeline) -> None:
    assert expected(client, pipe) in answer_of(client, server.url)
