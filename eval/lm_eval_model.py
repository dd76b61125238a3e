"""lm-evaluation-harness with mmspec as a model: ``python -m mmspec.eval lm_eval_model run --model mmspec ...``.

For harness releases up to 0.4.13, which do not load models from entry points; arguments as for ``lm-eval``.
"""

from __future__ import annotations

import sys

import click

from mmspec.cli.commands import ModuleCommand
from mmspec.errors import UserError


@click.command(cls=ModuleCommand, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness with the model ``mmspec``."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model
    except ImportError:
        raise UserError("this command needs the package lm_eval: expected `pip install 'lm_eval[hf]'`") from None
    from mmspec.eval.adapters.lm_eval_model import MmspecLM

    register_model("mmspec")(MmspecLM)
    sys.argv[1:] = arguments
    cli_evaluate()
