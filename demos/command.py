"""The command ``mmspec demo``."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

import click
from click.core import ParameterSource

from mmspec import plugins
from mmspec.cli.commands import Command
from mmspec.cli.options import (
    API_KEY,
    MODEL_HELP,
    ListenOptions,
    LoadOptions,
    Secret,
    adapt_of,
    adapt_options,
    check_api_key,
    complete,
    derived,
    device_options,
    mmproj_option,
    steps_shown,
)
from mmspec.errors import UserError, missing
from mmspec.serving.settings import is_loopback
from mmspec.workers import on_signals

_log = logging.getLogger("mmspec.demo")
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_NAMES: dict[str, Any] = {"multiple": True, "metavar": "NAME"}
LOGIN = Secret("a login", "--auth", "USER:PASSWORD", "MMSPEC_DEMO_AUTH", "Login for visitors.")


@click.command(cls=Command)
@click.option(
    "--model",
    "models",
    help=f"{MODEL_HELP}; repeatable, the first model is shown first.  [default: ({plugins.DEFAULT_MODEL})]",
    shell_complete=complete("models"),
    **_NAMES,
)
@click.option(
    "--drafter", "drafters", help="Selectable drafter; repeatable.", shell_complete=complete("drafters"), **_NAMES
)
@mmproj_option
@device_options
@derived(LoadOptions, "generation_config")
@derived(ListenOptions, settings={"port": {"default": 7860}})
@LOGIN.declared
@click.option("--api", is_flag=True, help="Also answer OpenAI's API under /v1, with the first model and drafter.")
@API_KEY.declared
@adapt_options
@click.option("--share", is_flag=True, help="Also create a public link through gradio's servers.")
@click.option(
    "--upload-space",
    type=click.IntRange(64),
    default=2048,
    show_default=True,
    metavar="MIB",
    help="Limit on the total size of uploads on disk.",
)
def demo(
    models: Sequence[str],
    drafters: Sequence[str],
    host: str,
    port: int,
    auth: str | None,
    no_auth: bool,
    api: bool,
    api_key: str | None,
    share: bool,
    upload_space: int,
    **options: Any,
) -> None:
    """Serve the web demo: streamed answers, a race against plain decoding, draft trees.

    On a loopback address, such as the default one, visitors can load any hub id or local folder. With another --host or
    with --share, only the models and drafters of --model and --drafter are available (by default the embedded models
    and registered drafters), and --auth (with --api also --api-key) or --no-auth is required.
    """
    public = share or not is_loopback(host)
    LOGIN.check(auth, no_auth, public)
    user, _, password = (auth or "").partition(":")
    if auth and not (user and password):
        raise UserError("--auth must be USER:PASSWORD, neither of them empty")
    if api:
        check_api_key(api_key, no_auth, public)
    elif click.get_current_context().get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
        raise UserError("--api-key goes with --api: got no --api")
    adapt = adapt_of(options)
    if adapt is not None and not api:
        raise UserError("--adapt goes with --api: got no --api")
    with steps_shown():
        _log.info("importing torch, transformers and gradio")
        try:
            import gradio  # noqa: F401
        except ImportError:
            raise missing("the demo", "gradio", "demo") from None
        from mmspec.demos.catalog import Catalog
        from mmspec.demos.models import ModelCache
        from mmspec.demos.server import make_api, run_server

        cache = ModelCache(**options)  # how models are loaded
        # Fail at startup, not at the first request, if a model is missing.
        named = reversed(models or (plugins.default_model(),))
        texts = [name for name in named if not cache.get(name).processor.reads_media]
        catalog = Catalog.of(models, drafters, texts, open=not public)
        _log.info("making the page")
    serving: dict[str, Any] = {"auth": (user, password) if auth else None, "share": share, "upload_space": upload_space}
    if api:
        drafter = drafters[0] if drafters else "auto"
        serving["api"] = make_api(cache, catalog.default, drafter, None if public else host, api_key, adapt)

    def addresses(url: str) -> str:
        return f"{url} and {url.rstrip('/')}/v1" if api else url

    try:
        with _signals_raise(), run_server(cache, catalog, host=host, port=port, opened=True, **serving) as page:
            click.echo(f"mmspec demo: {addresses(str(page.local_url))} (Ctrl-C to stop)")
            if page.share_url:
                click.echo(f"public address: {addresses(str(page.share_url))}")
            Event().wait()
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}") from error


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn termination signals into exceptions, so that cleanup code removes the uploads."""
    # Signals that are ignored already, for example under nohup, stay ignored.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def handle(number: int, _: Any) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt cleanup
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with on_signals(handle, *numbers):
        yield
