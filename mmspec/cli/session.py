"""Answers a request on the command line: load, stream, statistics. Imports torch, so commands import it lazily."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stderr
from functools import partial
from io import StringIO
from itertools import chain, count, repeat
from typing import Any

import click
import torch
import transformers
from rich.console import Console

from mmspec import plugins
from mmspec.cli.options import GENERATING, LOADING
from mmspec.compare import Comparison, compare
from mmspec.drafters.registry import make_drafter, registered_name
from mmspec.engine.stats import token_origins
from mmspec.engine.threads import fix_threads
from mmspec.errors import UserError
from mmspec.jobs import ranks
from mmspec.loading import load
from mmspec.pipeline import Generation, Piece, Pipeline
from mmspec.progress import show_progress, show_steps
from mmspec.sampling.params import SamplingParams
from mmspec.targets import templates
from mmspec.targets.checkpoints import is_on_hub

_log = logging.getLogger("mmspec.load")
_ROUNDS = 3  # of --compare
SINGLE_THREADED = 20_000_000  # number of parameters below which a single thread is fastest
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def answer(request: dict[str, Any], options: Mapping[str, Any], sample: bool = False) -> None:
    """Answers one request with the options of ``generation_options``. ``sample``: whether the request is an embedded
    sample, for which the model's limits are not shown."""
    keywords = generation_keywords(options)
    notes = Console(stderr=True)
    if options["compare"] and ranks() > 1:
        raise UserError(f"--compare decodes with one rank: got one of {ranks()} ranks of a job")
    plan = "auto" if ranks() > 1 else None
    templates.prepare()
    # Without warm-up, a single request captures only the steps that it needs.
    pipe = open_pipeline(notes, **{name: options[name] for name in LOADING}, tp_plan=plan, warm_up=0)
    if pipe.follow():
        return
    if not sample:
        show_limits(notes, options["model"])
    keywords |= {name: value for name, value in pipe.defaults.served.items() if keywords[name] is None}
    generation = Answer(show=not options["as_json"]).read(notes, pipe.stream(**request, **keywords))
    comparison = None
    if options["compare"]:
        home = plugins.model_path(pipe.name)
        fresh = partial(make_drafter, options["drafter"], home, options["trust_remote_code"])
        done, total = count(1), 2 * (_ROUNDS + 1)
        with show_progress(notes, "comparing with plain decoding") as show:
            show(0, total)
            comparison = compare(
                pipe, fresh, request, keywords, rounds=_ROUNDS, progress=lambda: show(next(done), total)
            )
    drafter = registered_name(pipe.drafter)
    if options["as_json"]:
        content = {name: getattr(generation, name) for name in ("text", "token_ids", "finish_reason")}
        content |= {"model": pipe.name, "drafter": drafter, "stats": generation.stats.to_dict()}
        click.echo(json.dumps(content | ({"compare": comparison.to_dict()} if comparison else {})))
        return
    compared = _comparison_lines(comparison, pipe) if comparison else ()
    show_notes(notes, stats_line(generation, drafter, options["max_model_len"] or pipe.context_limit), *compared)


def show_notes(notes: Console, *lines: str, style: str = "dim") -> None:
    for line in lines:
        notes.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def generation_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``Pipeline.generate`` from the options of ``generation_options``."""
    keywords = {name: options[name] for name in GENERATING} | {"stop": list(options["stop"]) or None}
    SamplingParams(**{name: keywords[name] for name in SamplingParams.__dataclass_fields__})
    keywords |= {"context_limit": options["max_model_len"] or None}
    return keywords | ({} if options.get("chat_template", True) else {"chat_template": False})


def show_limits(notes: Console, model: str) -> None:
    """Print an embedded model's limits before it answers user input."""
    if limits := plugins.limits(model):
        show_notes(notes, f"note: {limits}", style="")


def open_pipeline(
    notes: Console,
    model: str,
    drafter: Any,
    device: str,
    dtype: str,
    trust_remote_code: bool = False,
    threads: int | None = None,
    **options: Any,
) -> Pipeline:
    """Call ``mmspec.load`` with a status line and ``threads`` of torch, hiding messages of other libraries."""
    if threads is not None:
        fix_threads(threads)
    if not os.environ.get("MMSPEC_DEBUG"):
        transformers.logging.set_verbosity_error()
    downloading = is_on_hub(model) and notes.is_terminal  # shows the progress bars of transformers
    if not downloading:
        transformers.logging.disable_progress_bar()
    shown = drafter if isinstance(drafter, str) else registered_name(drafter)
    drafting = f"drafter {shown}, " if shown else ""
    with nullcontext() if downloading else show_steps(notes):
        _log.info("loading %s (%sdevice %s, dtype %s)", model, drafting, device, dtype)
        pipe = load(model, drafter, device, dtype, trust_remote_code=trust_remote_code, **options)
    if threads is None and "OMP_NUM_THREADS" not in os.environ and pipe.model.num_parameters() < SINGLE_THREADED:
        torch.set_num_threads(1)
    return pipe


def stats_line(generation: Generation, drafter: str | None, context_limit: int | None) -> str:
    """Statistics of an answer in one line; ``context_limit`` is the maximum length of prompt and answer."""
    stats, reason = generation.stats, str(generation.finish_reason)
    if reason == "length":
        is_full = stats.num_prompt_tokens + stats.num_generated_tokens == context_limit
        reason = f"length, the model's context of {context_limit}" if is_full else "length, --max-new-tokens raises it"
    drafting = "none"
    if drafter:
        idle = stats.num_spec_steps > 0 and stats.num_draft_tokens == 0
        drafting = drafter + (" (nothing drafted)" if idle else "") + ("" if stats.lossless else ", lossy")
    speed = f"{stats.tokens_per_second:.1f} tokens/s" if stats.num_spec_steps else "no decoding step to time"
    return " | ".join(
        (
            f"{stats.num_generated_tokens} tokens ({reason})",
            speed,
            f"mean acceptance length {stats.mean_acceptance_length:.2f}",
            f"{stats.num_spec_steps} steps",
            f"drafter {drafting}",
            *([f"drafting stopped ({stats.drafter_error})"] if stats.drafter_error else []),
            f"prompt of {stats.num_prompt_tokens} tokens, {stats.num_cached_tokens} cached",
            f"first token after {stats.time_to_first_token:.3f} s",
        )
    )


class Answer:
    """An answer that is being read; after an error, the part before it.

    Args:
        show: print its text to standard output as it arrives. Its reasoning is dim, or on standard error if standard
            output is not a terminal.
        drafts: underline accepted draft tokens; of a request with ``trace=True``.
    """

    def __init__(self, show: bool = True, drafts: bool = False) -> None:
        self.text = self.reasoning = ""
        self.token_ids: list[int] = []
        self._show, self._drafts, self._on_terminal = show, drafts, sys.stdout.isatty()

    def read(self, notes: Console, pieces: Iterator[Piece]) -> Generation:
        """Read a stream to its end, with a status line before its first piece; warnings are printed at the end."""
        warnings = StringIO()
        try:
            with show_steps(notes):
                _log.info("reading the prompt")
                first = next(pieces)
            with redirect_stderr(warnings) if self._show else nullcontext():
                for piece in chain([first], pieces):
                    self._add(piece)
        finally:
            pieces.close()  # type: ignore[attr-defined]
            if self._show and self.token_ids and not self.text.endswith("\n"):
                click.echo()
            click.echo(warnings.getvalue(), nl=False, err=True)
        assert piece.finish_reason is not None
        assert piece.stats is not None
        return Generation(self.text, self.token_ids, piece.finish_reason, piece.stats)

    def _add(self, piece: Piece) -> None:
        origins = token_origins(piece.trees)[len(self.token_ids) :] if self._drafts else []
        for (reasoning, text), (origin, _) in zip(piece.parts, chain(origins, repeat(("plain", 0))), strict=False):
            drafted = {"underline": True} if origin == "accepted" else {}
            self._print(reasoning, err=not self._on_terminal, dim=True, **drafted)
            if text and self.reasoning and not self.text:
                self._print("\n\n", err=not self._on_terminal)
            self._print(text, **drafted)
            self.reasoning, self.text = self.reasoning + reasoning, self.text + text
        self.token_ids += piece.token_ids

    def _print(self, text: str, err: bool = False, **style: bool) -> None:
        # Escape sequences in an answer must not control the terminal.
        text = text.translate(_CONTROLS) if self._on_terminal else text
        if self._show and text:
            click.echo(click.style(text, **style) if style else text, nl=False, err=err)


def _comparison_lines(comparison: Comparison, pipe: Pipeline) -> Iterator[str]:
    fast, slow, ratio = comparison.speculative, comparison.plain, comparison.decode_ratio
    if ratio is None:
        yield "decoding: nothing to compare in an answer of one token"
    else:
        speeds = f"{fast.tokens_per_second:.1f} against {slow.tokens_per_second:.1f} tokens/s"
        yield f"decoding: {ratio:.2f}x plain decoding ({speeds})"
    times = f"{fast.seconds:.3f} against {slow.seconds:.3f} s"
    yield (
        f"end to end: {comparison.end_to_end_ratio:.2f}x ({times}); medians of {comparison.rounds} interleaved rounds, "
        "after a warm-up, each with a new drafter"
    )
    if comparison.equal is None:
        yield "tokens: sampled; equal in distribution (with --seed, token by token)"
    elif comparison.equal:
        yield "tokens: equal"
    else:
        found = comparison.difference
        assert found is not None
        texts = [
            repr(pipe.processor.token_bytes(token).decode(errors="replace")) if token is not None else "the end"
            for token in (found.speculative, found.plain)
        ]
        where = f"differ first at position {found.position}: {texts[0]} against {texts[1]}"
        margin = "" if found.margin is None else f", logit margin {found.margin:.3g}"
        yield f"tokens: {where}{margin} ({str(pipe.model.dtype).removeprefix('torch.')})"
