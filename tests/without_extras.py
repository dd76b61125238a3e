"""What commands say where no extra is installed, as JSON: ``python -m tests.without_extras FOLDER``."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

OPTIONAL = (
    "accelerate",
    "gradio",
    "datasets",
    "matplotlib",
    "pycocoevalcap",
    "tensorboard",
    "ray",
    "decord",
    "prometheus_client",
    "llguidance",
)
for name in OPTIONAL:
    sys.modules[name] = None  # type: ignore[assignment]
# Processes that decode videos import decord anew.
hidden = TemporaryDirectory()
Path(hidden.name, "decord.py").write_text("raise ModuleNotFoundError('No module named decord', name='decord')")
sys.path.insert(0, hidden.name)

from mmspec.cli import main  # noqa: E402
from mmspec.vision.embedded import samples  # noqa: E402


def say(*args: str) -> tuple[int, str]:
    with redirect_stderr(io.StringIO()) as told:
        status = main(args)
    return status, told.getvalue()


if __name__ == "__main__":
    data, out = Path(sys.argv[1], "data.json"), ["--out", str(Path(sys.argv[1], "out"))]
    data.write_text("[]")
    clip, folder, decord = str(samples() / "clip.mp4"), str(samples()), ("--video-backend", "decord")
    drafters = {
        f"train {name}": say("train", name, "--data", str(data), *out)
        for name in ("msd", "flash", "eagle3", "dflash", "medusa", "kangaroo", "small", "mamba")
    }
    others = {
        "train tiny-llava": say("train", "tiny-llava", *out),
        "train tiny-hybrid": say("train", "tiny-hybrid", *out),
        "demo": say("demo"),
        "serve": say("serve", "--port", "0"),
        "generate --regex": say("generate", "a", "--regex", "b"),
        "caption FILE": say("caption", clip, *decord),
        "caption FOLDER": say("caption", folder, *out, *decord),
        "caption FOLDER --engine ray": say("caption", folder, *out, "--engine", "ray"),
    }
    print(json.dumps(drafters | others))
