"""Processes that find no optional package, and of mmspec only a checkout on Python's path.

``python -m tests.without_extras FOLDER``, run with ``variables``, prints what such a process can do, as JSON.
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

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    "accelerate",
    "av",
    "datasets",
    "decord",
    "fastapi",
    "gguf",
    "gradio",
    "gradio_client",
    "jsonschema",
    "llguidance",
    "matplotlib",
    "openai",
    "prometheus_client",
    "pycocoevalcap",
    "pydantic",
    "ray",
    "starlette",
    "tensorboard",
    "uvicorn",
)
TRAINED = ("msd", "flash", "eagle3", "dflash", "medusa", "kangaroo", "small", "mamba")
_STARTUP = """
import sys
from importlib.metadata import MetadataPathFinder

hidden = {hidden}
sys.modules.update(dict.fromkeys(hidden))
find = MetadataPathFinder.find_distributions


def is_found(distribution):
    return distribution.metadata["Name"].lower().replace("-", "_") not in (*hidden, "mmspec")


MetadataPathFinder.find_distributions = lambda *args, **options: filter(is_found, find(*args, **options))
"""


def variables(folder: Path) -> dict[str, str]:
    """Environment variables of such a process and its children.

    Args:
        folder: gets a ``sitecustomize.py``, which Python runs when it starts.
    """
    (folder / "sitecustomize.py").write_text(_STARTUP.format(hidden=OPTIONAL))
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def say(*args: str) -> tuple[int, str]:
    """Status and standard error of a command."""
    from mmspec.cli import main

    with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()):
        status = main(args)
    return status, told.getvalue()


def refusals(folder: Path) -> dict[str, tuple[int, str]]:
    """What commands say that need a package."""
    from mmspec.vision.embedded import samples

    data, out = folder / "data.json", ["--out", str(folder / "out")]
    data.write_text("[]")
    clip, decord = str(samples() / "clip.mp4"), ("--video-backend", "decord")
    drafters = {f"train {name}": say("train", name, "--data", str(data), *out) for name in TRAINED}
    others = {
        "demo": say("demo"),
        "serve": say("serve", "--port", "0"),
        "generate --regex": say("generate", "a", "--regex", "b"),
        "caption FILE": say("caption", clip),
        "caption FILE --video-backend decord": say("caption", clip, *decord),
        "caption FOLDER --video-backend decord": say("caption", str(samples()), *out, *decord),
        "caption FOLDER --engine ray": say("caption", str(samples()), *out, "--engine", "ray"),
    }
    return drafters | others


def failures() -> Iterator[str]:
    """Built-in plug-ins and studies that cannot be imported, and commands without help."""
    from mmspec import plugins
    from mmspec.plugins.builtin import BUILTIN

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

    pipe = mmspec.load("tiny-llava", device="cpu", dtype="float32")
    return [answer.text for answer in pipe.generate_batch(held_out_requests(1, 1), max_new_tokens=24)]


if __name__ == "__main__":
    home = Path(sys.argv[1])
    print(json.dumps({"refusals": refusals(home), "failures": [*failures()], "captions": captions()}))
