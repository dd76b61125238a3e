"""Commands of ``mmspec``: help with option groups and examples, and command groups with lazily imported plug-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import click

from mmspec import plugins
from mmspec.errors import UserError, missing_import, nearest

Groups = Mapping[str, tuple[str, ...]]
"""Parameter names by section title, in the order of help; the last section has all other parameters."""

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "caption": (
        'mmspec caption photo.jpg --prompt "What is in the picture?"',
        "mmspec caption photos --out captions.jsonl",
    ),
    "generate": (
        'mmspec generate --model smollm2 --compare "List the planets."',
        "mmspec generate --model smollm2 --temperature 0.7 --seed 1 - < prompt.txt",
    ),
    "chat": ("mmspec chat FILE.gguf", 'mmspec chat smol-llava --system "Answer in one sentence."'),
    "serve": ("mmspec serve --model smollm2", "mmspec serve --model smol-llava --host 0.0.0.0 --api-key KEY"),
    "demo": ("mmspec demo", "mmspec demo --model smollm2 --api --port 8080"),
    "export": (
        "mmspec export --model TARGET --drafter run/drafter --out vllm",
        "mmspec export --model TARGET --drafter run/drafter --out sglang --format eagle",
    ),
    "datastore build": (
        "mmspec datastore build notes.txt --model smollm2 --out store",
        "mmspec datastore build data.jsonl --model smollm2 --out store",
    ),
    "eval": ("mmspec eval --model tiny-llava --out results", "mmspec eval --list"),
    "tune": (
        "mmspec tune --model smollm2 --prompts prompts.txt",
        "mmspec tune --model smollm2 --prompts prompts.txt --minutes 10 --drafters recycle,ngram",
    ),
    "check": ("mmspec check smollm2", "mmspec check --url http://127.0.0.1:8000 --against http://127.0.0.1:8001"),
    "info": ("mmspec info", "mmspec info smollm2 --drafters"),
    "clean": ("mmspec clean", "mmspec clean --json"),
    "train make-data": (
        "mmspec train make-data --model smollm2 --self-prompts 2000 --out made",
        "mmspec train make-data --model smol-llava --prompts data.json --images photos --out made",
    ),
    "train recycle": (
        "mmspec train recycle --model smollm2 --recorded made --out run",
        "mmspec train recycle --model smollm2 --prompts data.jsonl --out run",
    ),
}


class Command(click.Command):
    """A command whose help shows options in ``groups``, and ``EXAMPLES`` at the end."""

    groups: ClassVar[Groups] = {
        "Options": (
            *("model", "models", "target", "prompt", "prompts", "drafter", "drafters", "tasks", "methods"),
            *("max_new_tokens", "temperature", "minutes", "host", "port", "api_key", "compare", "refresh"),
            *("url", "against", "only", "out", "resume", "as_json", "listing", "layout", "system"),
        ),
        "Loading": (
            *("mmproj", "device", "dtype", "kv_cache_dtype", "device_map", "trust_remote_code", "generation_config"),
            "threads",
        ),
        "Images and videos": (
            *("frames", "fps", "video_backend", "images", "max_images", "max_videos"),
            *("max_pixels", "max_video_seconds"),
        ),
        "Sampling": (
            *("stop", "seed", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "min_new_tokens", "ignore_eos", "greedy"),
        ),
        "Structured output": ("json_schema", "regex", "grammar", "grammar_trigger", "grammar_aligned"),
        "Drafting": ("num_draft_tokens", "show_drafts", "sizes", "lossy", "adapt", "adapt_folder", "adapt_space"),
        "Access": ("no_auth", "auth", "api", "origins", "allow_urls", "share", "names"),
        "Limits": (
            *("prefix_cache", "prefix_cache_dir", "prefix_cache_size"),
            *("upload_space", "max_running", "max_waiting", "max_body", "max_characters"),
            *("max_tokens", "max_model_len", "max_stored", "request_timeout", "shutdown_timeout"),
        ),
        "Several files or machines": ("batch_size", "engine", "workers", "replicas", "replica_gpus"),
        "Other options": (),
    }
    examples: ClassVar[tuple[str, ...]] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        *groups, (last, _) = self.groups.items()
        grouped = {title: [records.pop(name) for name in names if name in records] for title, names in groups}
        for title, rows in {**grouped, last: list(records.values())}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name = ctx.command_path.removeprefix("mmspec ")
        if lines := EXAMPLES.get(name, self.examples):
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"{'':>{formatter.current_indent}}{line.format(name=name)}\n")


class TrainingCommand(Command):
    groups: ClassVar[Groups] = {
        "Options": ("target", "out", "text", "data", "minutes", "steps", "epochs"),
        "Data": ("images", "held_out", "recorded", "cache", "text_share"),
        "Schedule": (
            *("batch", "optimiser", "rate", "warmup", "hold", "seed", "precision", "device", "dtype", "threads"),
            *("checkpoint_minutes", "report_minutes"),
        ),
        "Evaluation": ("prompts", "max_new_tokens", "tensorboard"),
        "Trees": ("draft_vocabulary", "top_k", "depth", "total_tokens"),
        "Network and objective": (),
    }
    examples = (
        "mmspec {name} --model smollm2 --text made/data.jsonl --out run --minutes 60",
        "mmspec {name} --model smol-llava --data made/data.jsonl --out run --epochs 2",
    )


# Help lines are duplicated here: reading them from the commands would import torch, which takes seconds.
_SECTIONS = {
    "Decode": {
        "chat": "Talk with a model on a terminal.",
        "caption": "Describe an image, a video, or a folder of them.",
        "generate": "Answer a text prompt.",
    },
    "Serve": {"serve": "Serve a model through OpenAI's, Anthropic's and Ollama's APIs.", "demo": "Open the web demo."},
    "Train": {
        "train": "Train drafters.",
        "export": "Write a drafter for other engines.",
        "datastore": "Index texts on disk, to draft from.",
    },
    "Evaluate": {
        "check": "Check that drafts change no answer of your model, or of a server.",
        "eval": "Measure quality, acceptance and speed.",
        "tune": "Find the fastest drafter for your prompts.",
    },
    "Inspect": {
        "info": "Show devices, versions, models and drafters.",
        "clean": "Remove from the cache what earlier versions left.",
    },
    "Data": {"make-data": "Generate training data for drafters with a model."},
}
_HELP = {name: text for section in _SECTIONS.values() for name, text in section.items()}
_RUNS = """Run the same command again to resume an interrupted run. The drafter is written to OUT/drafter, metrics to
OUT/log.jsonl and OUT/curve.svg. On several devices: `accelerate launch -m mmspec train {name} OPTIONS`."""
_DRAFTERS, _OTHERS = "Drafters", "Other commands"

CLOSED_PIPE = 128 + 13  # exit status that shells report after SIGPIPE


def _debug(ctx: click.Context, parameter: click.Parameter, on: bool) -> None:
    if on:
        os.environ["MMSPEC_DEBUG"] = "1"


debug_option = click.Option(
    ["--debug"], is_flag=True, expose_value=False, help="Show tracebacks and warnings.", callback=_debug
)


class Commands(click.Group):
    """A group of commands that are plug-ins of the group ``"commands"`` or ``"train"``, see ``mmspec.plugins``."""

    def __init__(self, plugin_group: str, **settings: Any) -> None:
        super().__init__(invoke_without_command=True, callback=click.pass_context(_help_if_alone), **settings)
        self.plugin_group = plugin_group
        self.params.append(debug_option)

    def list_commands(self, ctx: click.Context) -> list[str]:
        order = list(_HELP)
        return sorted(plugins.names(self.plugin_group), key=lambda n: (order.index(n) if n in _HELP else len(order), n))

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        known = self.list_commands(ctx)
        if name not in known:
            expected = ", ".join(known) or "(none registered)"
            raise UserError(f"unknown command: expected one of {expected}, got {name!r}{nearest(name, known)}")
        found = plugins.find(self.plugin_group, name)
        command: click.Command = found if isinstance(found, click.Command) else training_command(name, found)
        if debug_option not in command.params:
            command.params.append(debug_option)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The pipe's reader, such as ``| head``, has exited; click would report a failure.
            raise click.exceptions.Exit(CLOSED_PIPE) from None
        except ModuleNotFoundError as error:
            raise missing_import(error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        entries = {entry.name: entry for entry in plugins.registered(self.plugin_group)}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS, _DRAFTERS, _OTHERS)}
        for name in self.list_commands(ctx):
            section = next((title for title, section in _SECTIONS.items() if name in section), None)
            section = section or (_DRAFTERS if name in plugins.names("drafters") else _OTHERS)
            rows[section].append((name, _HELP.get(name) or _summary(entries[name])))
        for title, listed in rows.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed, col_max=12)


def training_command(name: str, training: Any) -> click.Command:
    """Build a drafter's ``mmspec train`` command from its ``DrafterTraining``."""
    from mmspec.cli.options import derived  # imports pydantic, which takes 0.1 s

    def train(**options: Any) -> None:
        from mmspec.training.run import train_drafter

        train_drafter(training.options(**options), training.setup)

    text = f"{training.text}\n\n{_RUNS.format(name=name)}"
    return click.command(name, cls=TrainingCommand, help=text)(derived(training.options)(train))


class ModuleCommand(click.Command):
    """A command of ``python -m MODULE``, which reports a ``UserError`` in one line and exits with status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise click.UsageError(str(error)) from error


def _help_if_alone(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _summary(entry: EntryPoint) -> str:
    """Help line of a plug-in command: the drafter that it trains, or the package that provides it."""
    if entry.name in plugins.names("drafters"):
        from mmspec.drafters.spec import DrafterSpec  # imports pydantic

        return f"Drafter {DrafterSpec.of(entry.name, plugins.find('drafters', entry.name)).label} for a model."
    return f"From {entry.module}."


train = Commands("train", name="train", help="Train a drafter, or generate its training data.")
