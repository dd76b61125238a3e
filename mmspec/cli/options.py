"""Options shared by commands, with names and defaults of ``mmspec.load`` and ``Pipeline.generate``."""

from __future__ import annotations

import json
import os
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import chain
from math import isfinite
from mimetypes import guess_type
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from mmspec import plugins
from mmspec.adaptation import AdaptOptions
from mmspec.errors import UserError, explained, shown
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.reasoning import AUTO, FORMATS, NAMES
from mmspec.validation import option, options

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def stack(*decorators: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(decorators):
            function = one(function)
        return function

    return decorate


def read_stdin(argument: str, expected: str) -> bytes:
    """Read standard input, for an ``argument`` given as ``-``. Raises ``UserError``: standard input is closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise UserError(f"{argument} is -: expected {expected} on standard input, which is closed")
    return sys.stdin.buffer.read()


def data_uri(file: Path) -> str:
    """A file as a data URI, of the kind that its name states."""
    return f"data:{guess_type(file)[0] or ''};base64,{b64encode(file.read_bytes()).decode()}"


class Output(click.Path):
    """Path of a file or folder to write, checked for writability when options are parsed, before a model is loaded.
    Missing parent folders are allowed: the command creates them."""

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
            with TemporaryDirectory(dir=at):  # root ignores permission bits, but cannot write to /proc
                pass
        except OSError as error:
            self.fail(
                f"expected a {kind} that can be written, received {path} ({error.strerror or error}).", param, ctx
            )
        return path


class TextFile(click.Path):
    """Path of a UTF-8 file whose text becomes the option's value."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        try:
            return path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"expected a file of UTF-8 text, received {path} ({error}).", param, ctx)


OUT_FILE, OUT_FOLDER = Output(folder=False), Output(folder=True)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


class Finite(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


class Listed(click.ParamType):
    """Values separated by commas, without duplicates."""

    name = "list"

    def __init__(self, kind: click.ParamType, make: type = tuple) -> None:
        self.kind, self.make = kind, make

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        return self.make(dict.fromkeys(self.kind.convert(part, param, ctx) for part in parts))


def parsed(expected: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Type of an option that ``parse`` converts; it raises ``ValueError`` for a text that is not ``expected``."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError:
            raise click.BadParameter(f"must be {expected}: got {shown(value)}") from None

    return convert


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises ``ValueError`` for other text."""
    if not isinstance(found := json.loads(text), dict):
        raise ValueError
    return found


JSON_OBJECT = parsed("a JSON object", json_object)


def derived(
    kind: Any, *names: str, prefix: str = "", settings: Mapping[str, Any] | None = None, **changes: Any
) -> Decorator:
    """Options derived from fields of ``mmspec.validation.options``: name, type, range, default and help.

    Args:
        names: field names; by default all fields with a help text.
        settings: click's settings by field, which replace derived settings.
        changes: click's settings of all fields.
    """
    known, own = kind.__pydantic_fields__, settings or {}
    chosen = names or [name for name, one in known.items() if one.description]
    return stack(*(_option(prefix + name, known[name], {**own.get(name, {}), **changes}) for name in chosen))


def _option(name: str, field: FieldInfo, changes: Mapping[str, Any]) -> Decorator:
    extra: Any = field.json_schema_extra or {}
    default, dashed = changes.get("default", field.default_factory or field.default), name.replace("_", "-")
    kind, multiple = _click_type(field.annotation, field.metadata)
    declared = f"--{dashed}/--no-{dashed}" if kind is click.BOOL and default is not False else f"--{dashed}"
    settings: dict[str, Any] = {"is_flag": True} if kind is click.BOOL else {"type": kind, "multiple": multiple}
    if not field.is_required():  # click treats a default of None as a value
        text = "" if "default" in changes else extra.get("default_text")
        is_shown = not (default is None or default is False or default == () or callable(default))
        settings |= {"default": default, "show_default": text or is_shown}
    settings |= {"help": field.description, "required": field.is_required(), **changes}
    return click.option(*(extra.get("names") or [declared]), name, **settings)


def _click_type(kind: Any, metadata: Sequence[Any] = ()) -> tuple[click.ParamType, bool]:
    """click's type for the type of a field, and whether the option is repeatable."""
    while (is_annotated := get_origin(kind) is Annotated) or NoneType in get_args(kind):
        kind, *more = get_args(kind)
        metadata = [*metadata, *more] if is_annotated else metadata
    limits: dict[str, Any] = {
        name: value
        for one in chain.from_iterable(getattr(one, "metadata", [one]) for one in metadata)
        for name in ("ge", "gt", "le", "path_type")
        if (value := getattr(one, name, None)) is not None
    }
    if get_origin(kind) in (list, tuple):
        part, _ = _click_type(get_args(kind)[0])
        has_numbers = isinstance(part, click.types.IntParamType | click.types.FloatParamType)
        return Listed(part, get_origin(kind)) if has_numbers else part, not has_numbers
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind)), False
    if kind is Path:
        paths: dict[Any, click.ParamType] = {"file": FILE, "dir": FOLDER}
        return paths.get(limits.get("path_type"), OUT_FOLDER), False
    least, most = limits.get("gt", limits.get("ge")), limits.get("le")
    if kind is int:
        return click.IntRange(least, most) if limits else click.INT, False
    if kind is float:
        return Finite(least, most, min_open="gt" in limits), False
    return click.BOOL if kind is bool else click.STRING, False


def complete(group: str) -> Callable[..., list[str]]:
    """Shell completion of an option's value from the registered names of a group, see ``mmspec.plugins``."""
    return lambda ctx, param, incomplete: [name for name in plugins.names(group) if name.startswith(incomplete)]


def _only_gguf(_: click.Context, __: click.Parameter, given: Any) -> Any:
    """Refuse a file of another format, before torch is imported."""
    if given is not None and given not in plugins.names("models") and os.path.isfile(given):
        expected = f"cannot load model {str(given)!r}: expected a GGUF file"
        with explained(expected, OSError), open(given, "rb") as file:
            if not b"GGUF".startswith(magic := file.read(4)):
                raise UserError(f"{expected}, found one that begins with {magic!r}")
    return given


def _registered_drafters(_: click.Context, __: click.Parameter, given: Any) -> Any:
    """Refuse an unknown name that is not a folder either, before torch is imported."""
    for text in (given,) if isinstance(given, str) else given:
        name = re.sub(r"@(tree|chain\d*)$", "", text)
        if re.fullmatch(r"[\w-]+", name) and name not in ("auto", "none") and not os.path.exists(text):
            plugins.find_entry("drafters", name)
    return given


def _usable_device(_: click.Context, __: click.Parameter, given: str) -> str:
    """Refuse a GPU with a build of torch that has no CUDA, before torch is imported."""
    if given.startswith("cuda") and version("torch").endswith("+cpu"):
        raise UserError(f"device must be auto or one that torch can use here (cpu): got {given!r}")
    return given


json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object instead.")


@options
class LoadOptions:
    """Options of how a model is loaded and decodes, see ``mmspec.load``."""

    device: str = option("auto", "auto, cpu, cuda:1, ...")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = option(
        "auto",
        "auto, on a CPU: a GGUF file's own precision, float32 for other small models; else the checkpoint's. "
        "int8 and int4 quantise the weights.",
    )
    trust_remote_code: bool = option(False, "Run Python code from model folders.")
    generation_config: Literal["auto", "mmspec"] = option(
        "auto",
        "Sampling options that are left out: auto: as in the model's generation_config.json; mmspec: our defaults.",
    )
    kv_cache_dtype: Literal["auto", "int8"] = option(
        "auto", "Keys and values of packed weights on a CPU; int8: half the memory of auto, bfloat16."
    )
    threads: int | None = option(None, "CPU threads; by default torch's, and fewer while other programs run.", ge=1)
    max_model_len: int = option(
        0, "Tokens of prompt and output together; 0 is the model's limit.", names=("-c", "--max-model-len"), ge=0
    )
    num_draft_tokens: int | None = option(
        None,
        "Draft tokens per step, the size of the trees; by default chosen for speed, from measurements.",
        names=("--num-draft-tokens", "--nodes"),
        ge=0,
        le=512,
    )


device_options = derived(LoadOptions, "device", "dtype", settings={"device": {"callback": _usable_device}})

MODEL_HELP = "Embedded name, local folder, GGUF file or hub id"

model_option = click.option(
    "--model",
    default=plugins.default_model,
    show_default=plugins.DEFAULT_MODEL,
    help=f"{MODEL_HELP}.",
    metavar="NAME",
    shell_complete=complete("models"),
    callback=_only_gguf,
)
model_options = stack(model_option, device_options)

mmproj_option = click.option(
    "--mmproj",
    type=FILE,
    help="Vision tower and projector of a language model in a GGUF file: llama.cpp's mmproj file.",
    callback=_only_gguf,
)

device_map_option = click.option(
    "--device-map",
    type=parsed(
        "auto or a JSON object of modules and devices", lambda text: text if text == "auto" else json_object(text)
    ),
    metavar="JSON",
    help="auto, or a JSON object of modules and devices: dispatch a model that is larger than a device to several, "
    "memory or disk. Under torchrun, the ranks share the weights instead.",
)

_DRAFTER_HELP = (
    f"auto, none for plain decoding, a checkpoint's folder or hub id, or {', '.join(plugins.names('drafters'))}; see "
    "`mmspec info`. Joined by +, drafters draft one tree together; NAME@chain drafts chains."
)

_DRAFTER: dict[str, Any] = {"show_default": True, "metavar": "NAME", "shell_complete": complete("drafters")}
_DRAFTER["callback"] = _registered_drafters

drafter_option = click.option("--drafter", default="auto", help=_DRAFTER_HELP, **_DRAFTER)

drafters_option = click.option(
    "--drafter",
    multiple=True,
    default=["auto"],
    help=f"{_DRAFTER_HELP} Repeatable: requests may name one, the first is the default.",
    **_DRAFTER,
)


def _adapter(text: str) -> tuple[str, ...]:
    name, _, folder = text.partition("=")
    if not (name and folder):
        raise ValueError
    return name, folder


adapter_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=parsed("NAME=FOLDER", _adapter),
    metavar="NAME=FOLDER",
    help="A LoRA adapter of peft; repeatable.",
)

adapt_options = stack(
    click.option("--adapt", is_flag=True, help="Let drafters learn from all requests while none is running."),
    derived(AdaptOptions, prefix="adapt_"),
)


def adapt_of(given: dict[str, Any]) -> AdaptOptions | None:
    """Pop the values of ``adapt_options``; None without ``--adapt`` and ``--adapt-folder``."""
    on, folder, space = (given.pop(name) for name in ("adapt", "adapt_folder", "adapt_space"))
    return AdaptOptions(folder, space) if on or folder is not None else None


def _biases(text: str) -> dict[str, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {token.strip(): float(bias) for token, _, bias in pairs}


SAMPLING = tuple(one.name for one in fields(SamplingParams))

reasoning_options = stack(
    click.option(
        "--reasoning-parser",
        type=click.Choice(NAMES),
        default=AUTO,
        show_default=True,
        metavar="NAME",
        help=f"Format of the model's reasoning: {', '.join(one.name for one in FORMATS)}, a name of vLLM's, or none; "
        "auto: from the chat template.",
    ),
    click.option(
        "--chat-template-kwargs",
        type=JSON_OBJECT,
        default="{}",
        metavar="JSON",
        help='Variables of the chat template, as {"enable_thinking": false}.',
    ),
)

answer_options = stack(
    model_options,
    mmproj_option,
    device_map_option,
    drafter_option,
    derived(
        LoadOptions,
        *("trust_remote_code", "generation_config", "kv_cache_dtype", "threads", "max_model_len", "num_draft_tokens"),
    ),
    derived(
        SamplingParams,
        *SAMPLING,
        settings={
            "stop": {"multiple": True},
            "seed": {"type": int},
            "json_schema": {"type": TextFile()},
            "regex": {"metavar": "PATTERN"},
            "grammar": {"type": TextFile()},
            "logit_bias": {
                "type": parsed("token ids with biases, as 42=-100,7=1.5", _biases),
                "metavar": "ID=BIAS,...",
            },
        },
    ),
)

generation_options = stack(
    answer_options,
    click.option("--compare", is_flag=True, help="Compare speed and tokens with plain decoding."),
    json_option,
)

LOADING = (
    *("model", "mmproj", "drafter", "device", "dtype", "kv_cache_dtype"),
    *("trust_remote_code", "generation_config", "device_map", "threads"),
)
GENERATING = (*SAMPLING, "num_draft_tokens")


@options
class ListenOptions:
    """Options of servers."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all.")
    port: int = option(8000, "0 selects a free port.", ge=0, le=65535)
    no_auth: bool = option(False, "Allow a public address without a key or login.")


def steps_shown() -> AbstractContextManager[None]:
    """Show the steps of the start on standard error, see ``mmspec.progress.show_steps``."""
    from rich.console import Console

    from mmspec.progress import show_steps

    return show_steps(Console(stderr=True))


@dataclass(frozen=True)
class Secret:
    """A key or login that clients need. ``name``: name with article, for messages."""

    name: str
    option: str
    form: str
    variable: str
    text: str

    @property
    def declared(self) -> Decorator:
        text = f"{self.text} Prefer the environment variable {self.variable}, which other local users cannot see."

        def not_empty(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
            if given == "" or (given is None and os.environ.get(self.variable) == ""):  # click ignores empty variables
                raise UserError(f"{self.option} (or {self.variable}) must not be empty: expected {self.form}")
            return given

        return click.option(self.option, metavar=self.form, envvar=self.variable, help=text, callback=not_empty)

    def check(self, given: str | None, no_auth: bool, public: bool) -> None:
        """Check that a public address has either the secret or ``--no-auth``."""
        if given and no_auth:
            raise UserError(
                f"{self.option} and --no-auth (or {self.variable}) exclude each other: expected one of them, got both"
            )
        if public and not (given or no_auth):
            expected = f"{self.option} {self.form}, {self.variable} or --no-auth"
            raise UserError(f"a public address needs {self.name}: expected {expected}, got none")


API_KEY = Secret("a key", "--api-key", "KEY", "MMSPEC_API_KEY", "Key that clients of the API must send.")


def check_api_key(key: str | None, no_auth: bool, public: bool) -> None:
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError("--api-key (or MMSPEC_API_KEY) must be printable ASCII without blanks")
    API_KEY.check(key, no_auth, public)
