"""Click groups whose commands are plug-ins, imported only when called."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from typing import Any

import click

from mmspec import plugins
from mmspec.checks import nearest
from mmspec.cli.help import TrainingCommand
from mmspec.cli.options import derived
from mmspec.drafters.spec import DrafterSpec
from mmspec.errors import UserError
from mmspec.extras import missing_import

# Help lines are duplicated here: reading them from the commands would import torch, which takes seconds.
_SECTIONS = {
    "Decode": {
        "caption": "Describe an image, a video, or a folder of them.",
        "generate": "Answer a text prompt.",
    },
    "Serve": {
        "serve": "Serve a model through OpenAI's API.",
        "demo": "Open the web demo.",
    },
    "Train": {
        "train": "Train drafters.",
        "export": "Write a drafter for vLLM or SGLang.",
        "datastore": "Index texts on disk, to draft from.",
    },
    "Evaluate": {
        "eval": "Measure quality, acceptance and speed.",
        "tune": "Find the fastest drafter for your prompts.",
        "calibrate": "Measure the time of verify passes by tree size.",
    },
    "Inspect": {
        "info": "Show devices, versions, models and drafters.",
    },
    "Data": {
        "make-data": "Generate training data for drafters with a model.",
    },
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
    """A group of commands that are plug-ins.

    Args:
        plugin_group: ``"commands"`` or ``"train"``, see ``mmspec.plugins``.
    """

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
            # The reader of the pipe has exited, such as ``| head``; click would report a failure.
            raise click.exceptions.Exit(CLOSED_PIPE) from None
        except ModuleNotFoundError as error:
            raise missing_import(error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        entries = {entry.name: entry for entry in plugins.registered(self.plugin_group)}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS, _DRAFTERS, _OTHERS)}
        for name in self.list_commands(ctx):
            rows[_section(name)].append((name, _HELP.get(name) or _summary(entries[name])))
        for title, listed in rows.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed, col_max=12)


def training_command(name: str, training: Any) -> click.Command:
    """The command of ``mmspec train`` of a drafter, from its ``DrafterTraining``."""

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


def _section(name: str) -> str:
    """The section of help that lists a command."""
    found = next((title for title, section in _SECTIONS.items() if name in section), None)
    return found or (_DRAFTERS if name in plugins.names("drafters") else _OTHERS)


def _summary(entry: EntryPoint) -> str:
    """What a command trains, if it has the name of a drafter; else where it is from."""
    if entry.name in plugins.names("drafters"):
        return f"Drafter {DrafterSpec.of(entry.name, plugins.find('drafters', entry.name)).label} for a model."
    return f"From {entry.module}."
