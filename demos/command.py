"""``mmspec demo``."""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

import click

from mmspec.cli.options import device_options
from mmspec.errors import UserError
from mmspec.extras import missing

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help=(
        "Embedded name, local folder or hub id; the first answers by default. May be repeated. [default: tiny-llava]"
    ),
)
@click.option("--drafter", "drafters", multiple=True, metavar="NAME", help="What visitors may choose. May be repeated.")
@device_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0 takes a free one.")
@click.option(
    "--auth",
    metavar="USER:PASSWORD",
    envvar="MMSPEC_DEMO_AUTH",
    help="Ask visitors for these; better given in MMSPEC_DEMO_AUTH, which other users of this machine cannot see.",
)
@click.option("--no-auth", is_flag=True, help="Let everybody in who reaches a public address.")
@click.option("--share", is_flag=True, help="Open a public address through gradio's servers, too.")
@click.option(
    "--upload-space",
    type=click.IntRange(64),
    default=2048,
    show_default=True,
    metavar="MIB",
    help="What visitors' uploads may take on disk together.",
)
def demo(
    models: Sequence[str],
    drafters: Sequence[str],
    device: str,
    dtype: str,
    host: str,
    port: int,
    auth: str | None,
    no_auth: bool,
    share: bool,
    upload_space: int,
) -> None:
    """Open the web demo: watch answers appear, and see why they are fast.

    Who reaches the page at a loopback address, such as the default one, can have any model of the hub or folder of this
    machine loaded. At another --host, or with --share, there are the --model and --drafter given here alone (the
    embedded models and registered drafters if none are), and --auth or --no-auth is required.
    """
    public = share or not _is_loopback(host)
    login = _login(auth, no_auth, public)
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise missing("the demo", "gradio", "demo") from None
    from demos.models import Models
    from demos.offer import offer
    from demos.server import serving

    offered = offer(models, drafters, open=not public)
    loaded = Models(device=device, dtype=dtype)
    for name in reversed(models or (offered.default,)):
        loaded.get(name)  # a missing model is an error now, not for the first visitor
    options: dict[str, Any] = {"server_name": host, "server_port": port, "auth": login, "share": share}
    try:
        with _unwound_by_signals(), serving(loaded, offered, upload_space=upload_space, **options) as page:
            click.echo(f"mmspec demo: {page.local_url} (Ctrl-C ends it)")
            if page.share_url:
                click.echo(f"public address: {page.share_url}")
            Event().wait()
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may come to mean any address
        return False


def _login(auth: str | None, no_auth: bool, public: bool) -> tuple[str, str] | None:
    if auth and no_auth:
        raise UserError("--auth and --no-auth (or MMSPEC_DEMO_AUTH) exclude each other: expected one of them, got both")
    if not auth:
        if public and not no_auth:
            raise UserError(
                "a public address needs a login: expected --auth USER:PASSWORD, MMSPEC_DEMO_AUTH or --no-auth, got none"
            )
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise UserError("--auth must be USER:PASSWORD, neither of them empty")
    return user, password


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Signals that end the process run its clean-up first, which removes visitors' uploads."""

    def end(number: int, _: Any) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # a second one would cut the clean-up short
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = {one: signal.getsignal(one) for one in _SIGNALS}
    before = {one: handler for one, handler in handlers.items() if handler != signal.SIG_IGN}  # as nohup sets it
    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
