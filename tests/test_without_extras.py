"""A checkout on Python's path where neither mmspec nor an optional package is installed.

Run as a program in an environment without these packages, this module prints which features work.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mmspec.errors import EXTRAS, install
from mmspec.plugins import BUILTIN
from tests.process import run as in_new_process

ROOT = Path(__file__).parent.parent
OPTIONAL = {"av", "gradio_client", "jsonschema", "openai", *(name for names in EXTRAS.values() for name in names)}
CLIP = ROOT / "mmspec/vision/embedded/samples/clip.mp4"
TRAINED = sorted(BUILTIN["train"].keys() - {"recycle", "make-data"})
STARTUP = """
import sys
from importlib.metadata import MetadataPathFinder

hidden = {hidden}
sys.modules.update(dict.fromkeys(hidden))
find = MetadataPathFinder.find_distributions


def is_found(distribution):
    return distribution.metadata["Name"].lower().replace("-", "_") not in (*hidden, "mmspec")


MetadataPathFinder.find_distributions = lambda *args, **options: filter(is_found, find(*args, **options))
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of such processes and their children: Python runs a ``sitecustomize.py`` when it starts."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "sitecustomize.py").write_text(STARTUP.format(hidden=sorted(OPTIONAL)))
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def test_what_works_and_what_says_in_one_line_that_it_needs_a_package(
    variables: dict[str, str], tmp_path: Path
) -> None:
    printed = in_new_process("tests.test_without_extras", str(tmp_path), **variables)
    found = json.loads(printed.splitlines()[-1])
    assert found["refusals"] == {
        command: [2, f"error: {purpose} needs the package {package}, which is not installed: run {how}\n"]
        for command, purpose, package, how in (
            *((f"train {name}", "this command", "accelerate", install("train")) for name in TRAINED),
            ("demo", "the demo", "gradio", install("demo")),
            ("serve", "this command", "uvicorn", install("serve")),
            ("generate a --regex b", "structured output", "llguidance", install("structured")),
            (f"caption {CLIP}", f"{CLIP}: reading a video", "av", "pip install av"),
            (f"caption {CLIP} --video-backend decord", f"{CLIP}: reading a video", "av", "pip install av"),
            (f"caption {CLIP.parent} --video-backend decord", "this command", "av", "pip install av"),
            (f"caption {CLIP.parent} --engine ray", "engine ray", "ray", install("ray")),
        )
    }
    assert found["failures"] == []
    image, video = found["captions"]
    assert image != video
    assert [image, video] == captions()


# ---------------------------------------------------------------------- in a process without packages


def say(*args: str) -> tuple[int, str]:
    """Status and standard error of a command."""
    from mmspec.cli import main

    with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()):
        status = main(args)
    return status, told.getvalue()


def refusals(folder: Path) -> dict[str, tuple[int, str]]:
    """What commands say that need a package."""
    (folder / "data.json").write_text("[]")
    out = f" --out {folder / 'out'}"
    more = {f"train {name}": f" --data {folder / 'data.json'}{out}" for name in TRAINED}
    more |= {"demo": "", "serve": " --port 0", "generate a --regex b": ""}
    more |= {f"caption {CLIP}": "", f"caption {CLIP} --video-backend decord": ""}
    more |= {f"caption {CLIP.parent} {option}": out for option in ("--video-backend decord", "--engine ray")}
    return {command: say(*f"{command}{rest}".split()) for command, rest in more.items()}


def failures() -> Iterator[str]:
    """Built-in plug-ins and studies that cannot be imported, and commands without help."""
    from mmspec import plugins

    for group, names in BUILTIN.items():
        yield from _failing(f"{group} {{}}", names, lambda name, group=group: plugins.find(group, name))
    for parent, group in (((), "commands"), (("train",), "train")):
        yield from (f"{name} --help" for name in BUILTIN[group] if say(*parent, name, "--help") != (0, ""))
    studies = [path.stem for path in (ROOT / "eval").glob("*.py") if not path.stem.startswith("_")]
    yield from _failing("eval {}", studies, lambda name: import_module(f"mmspec.eval.{name}").main)


def _failing(label: str, names: Any, use: Callable[[str], Any]) -> Iterator[str]:
    for name in names:
        try:
            use(name)
        except Exception as error:
            yield f"{label.format(name)}: {error!r}"


def captions() -> list[str]:
    """What tiny-llava, with its default drafter, says of an image and a video that are arrays."""
    import mmspec
    from mmspec.eval.harness.prompts import held_out_requests

    requests = held_out_requests("images", 1) + held_out_requests("clips", 1)
    pipe = mmspec.load("tiny-llava", device="cpu", dtype="float32")
    return [answer.text for answer in pipe.generate_batch(requests, max_new_tokens=24)]


if __name__ == "__main__":
    home = Path(sys.argv[1])
    print(json.dumps({"refusals": refusals(home), "failures": [*failures()], "captions": captions()}))
