"""``mmspec demo``."""

from __future__ import annotations

from typing import Any

import click

from mmspec.cli.options import model_options
from mmspec.errors import UserError
from mmspec.extras import missing


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0 takes a free one.")
@click.option(
    "--auth",
    metavar="USER:PASSWORD",
    envvar="MMSPEC_DEMO_AUTH",
    help="Ask visitors for these; better given in MMSPEC_DEMO_AUTH, which other users of this machine cannot see.",
)
@click.option("--share", is_flag=True, help="Open a public address through gradio's servers, too.")
def demo(model: str, device: str, dtype: str, host: str, port: int, auth: str | None, share: bool) -> None:
    """Open the web demo: watch answers appear, and see why they are fast.

    Whoever reaches the page can have any model of the hub or folder of this machine loaded: think before using --host
    or --share without --auth.
    """
    login = _login(auth)
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise missing("the demo", "gradio", "demo") from None
    from demos.models import Models
    from demos.server import serving

    models = Models(device=device, dtype=dtype)
    models.get(model)  # a model that is not there is told now, not to the first visitor
    options: dict[str, Any] = {"server_name": host, "server_port": port, "auth": login, "share": share}
    try:
        with serving(models, page={"model": model}, **options) as page:
            click.echo(f"mmspec demo: {page.local_url} (Ctrl-C ends it)")
            if page.share_url:
                click.echo(f"public address: {page.share_url}")
            page.block_thread()
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}") from error


def _login(auth: str | None) -> tuple[str, str] | None:
    if not auth:
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise UserError("--auth must be USER:PASSWORD, neither of them empty")
    return user, password
