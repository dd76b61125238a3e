"""Options shared by commands, with names and defaults of ``mmspec.load`` and ``Pipeline.generate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from mmspec import plugins

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A finite number in a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number is not None and not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def stack(*options: Decorator) -> Decorator:
    """Several options as one decorator, in their order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Output(click.Path):
    """Path of a file or folder to write, checked for writability when options are parsed, before a model is loaded.

    Missing parent folders are allowed: the command creates them.
    """

    def __init__(self, folder: bool) -> None:
        super().__init__(file_okay=not folder, dir_okay=folder, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        kind = "file" if self.file_okay else "folder"
        at = path if self.dir_okay else path.parent
        try:
            if path.exists() and not (path.is_dir() if self.dir_okay else path.is_file()):
                raise OSError(f"it is not a {kind}")
            while not at.exists():
                at = at.parent
            with TemporaryDirectory(dir=at):  # permission bits do not suffice: a superuser passes them on /proc
                pass
        except OSError as error:
            self.fail(
                f"expected a {kind} that can be written, received {path} ({error.strerror or error}).", param, ctx
            )
        return path


class TextFile(click.Path):
    """Path of a UTF-8 file, whose text is the option's value."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        try:
            return path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"expected a file of UTF-8 text, received {path} ({error}).", param, ctx)


OUT_FILE, OUT_FOLDER = Output(folder=False), Output(folder=True)

json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object instead.")

device_options = stack(
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ..."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
        default="auto",
        show_default=True,
        help="auto, on a CPU: a GGUF file's own precision, float32 for other small models; else the checkpoint's. "
        "int8 and int4 quantise the weights.",
    ),
)

model_options = stack(
    click.option(
        "--model",
        default="tiny-llava",
        show_default=True,
        help="Embedded name, local folder, GGUF file or hub id.",
        metavar="NAME",
    ),
    device_options,
)

trust_option = click.option("--trust-remote-code", is_flag=True, help="Run Python code from model folders.")

_DRAFTER_HELP = (
    f"auto, none for plain decoding, a checkpoint's folder or hub id, or {', '.join(plugins.names('drafters'))}; see "
    "`mmspec info`. Joined by +, drafters draft one tree together; NAME@chain drafts chains."
)

drafter_option = click.option("--drafter", default="auto", show_default=True, metavar="NAME", help=_DRAFTER_HELP)

generation_config_option = click.option(
    "--generation-config",
    type=click.Choice(["auto", "mmspec"]),
    default="auto",
    show_default=True,
    help="Sampling options that are left out: auto: as in the model's generation_config.json; mmspec: our defaults.",
)

generation_options = stack(
    model_options,
    trust_option,
    drafter_option,
    generation_config_option,
    click.option("--max-new-tokens", type=click.IntRange(1, 2**31), help="[the model's, or 256]"),
    click.option("--temperature", type=Number(0), help="0 is greedy. [the model's, or 0]"),
    click.option("--top-p", type=Number(0, 1, min_open=True), help="[the model's, or 1]"),
    click.option("--top-k", type=click.IntRange(0, 2**31), help="0 keeps all tokens. [the model's, or 0]"),
    click.option("--min-p", type=Number(0, 1), help="[the model's, or 0]"),
    click.option("--repetition-penalty", type=Number(0, min_open=True), help="[the model's, or 1]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
    click.option("--json-schema", type=TextFile(), metavar="FILE", help="Answer in JSON that satisfies this schema."),
    click.option("--regex", metavar="PATTERN", help="Answer with a match of this regular expression."),
    click.option("--grammar", type=TextFile(), metavar="FILE", help="Answer according to this Lark grammar."),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of sampling."),
    click.option(
        "--nodes",
        type=click.IntRange(0, 512),
        help="Draft tree nodes per step; by default chosen for speed, from measurements.",
    ),
    click.option("--compare", is_flag=True, help="Compare speed and tokens with plain decoding."),
    json_option,
)

LOADING = ("model", "drafter", "device", "dtype", "trust_remote_code", "generation_config")
GENERATING = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "json_schema",
    "regex",
    "grammar",
    "seed",
    "nodes",
)
