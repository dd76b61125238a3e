"""``mmspec serve``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mmspec.cli.options import drafter_option, model_options, trust_option
from mmspec.errors import UserError
from mmspec.serving.addresses import is_loopback
from mmspec.serving.limits import Limits

_DEFAULTS = Limits()


def _limit(name: str, metavar: str, text: str, least: int = 1, most: int | None = None) -> Any:
    """An option with the name and default of a field of ``Limits``."""
    return click.option(
        f"--{name.replace('_', '-')}",
        type=click.IntRange(least, most),
        default=getattr(_DEFAULTS, name),
        show_default=True,
        metavar=metavar,
        help=text,
    )


@click.command()
@model_options
@trust_option
@drafter_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 listens on all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 selects a free port.")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="MMSPEC_API_KEY",
    help="Key that clients must send. Prefer the environment variable MMSPEC_API_KEY, which other local users cannot "
    "see.",
)
@click.option("--no-auth", is_flag=True, help="Allow a public address without a key.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Web pages that may call the server, such as http://localhost:3000; repeatable.",
)
@click.option("--allow-urls", is_flag=True, help="Download images and videos of requests from public addresses.")
@click.option(
    "--prefix-cache",
    type=click.IntRange(0),
    default=512,
    show_default=True,
    metavar="MIB",
    help="Memory for the states of earlier prompts; 0 computes every prompt.",
)
@_limit("max_running", "N", "Choices that decode at the same time.")
@_limit("max_waiting", "N", "Choices that wait for one that has ended; further requests get status 429.", 0)
@_limit("max_body", "MIB", "Size of a request's body and of a downloaded file.")
@_limit("max_characters", "N", "Characters of a request's prompts.")
@_limit("max_tokens", "N", "Generated tokens of a choice, and the default of requests.")
@_limit("max_model_len", "N", "Tokens of prompt and output together; 0 is the model's limit.", 0)
@_limit("max_images", "N", "Images of a request.", 0)
@_limit("max_videos", "N", "Videos of a request.", 0)
@_limit("max_pixels", "N", "Pixels of an image or video frame.")
@_limit("frames", "N", "Frames that are sampled from a video.", 1, 512)
@_limit("max_video_seconds", "N", "Duration of a video.")
def serve(
    model: str,
    drafter: str,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    host: str,
    port: int,
    api_key: str | None,
    no_auth: bool,
    origins: Sequence[str],
    allow_urls: bool,
    prefix_cache: int,
    **limits: int,
) -> None:
    """Serve a model through OpenAI's API.

    Clients use http://HOST:PORT/v1 as the base URL. On an address that is not a loopback one, --api-key or --no-auth is
    required.
    """
    _check_key(api_key, no_auth, host)
    from rich.console import Console

    from mmspec.cli.session import drafter_name, open_pipeline
    from mmspec.drafters.per_sequence import per_sequence
    from mmspec.pipeline import Pipeline
    from mmspec.serving.app import create_app
    from mmspec.serving.server import listen, run
    from mmspec.speculation.calibrate import cost_table

    with listen(host, port) as listening:  # before the model is loaded, which takes longer
        loaded = open_pipeline(Console(stderr=True), model, drafter, device, dtype, trust_remote_code)
        options = {"slots": limits["max_running"], "prefix_cache": prefix_cache << 20}
        pipe = Pipeline(loaded.target, loaded.io, per_sequence(loaded.drafter), loaded.name, **options)
        if pipe.drafter is not None:
            pipe.target.cost = cost_table(pipe.target)
        app = create_app(
            pipe,
            Limits(**limits),
            api_key=api_key,
            hosts={"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None,
            origins=origins,
            allow_urls=allow_urls,
        )
        address = f"[{host.strip('[]')}]" if ":" in host else host
        drafts = drafter_name(loaded.drafter) or "none"
        url = f"http://{address}:{listening.getsockname()[1]}/v1"
        click.echo(f"mmspec serve: {url} (model {pipe.name}, drafter {drafts}; Ctrl-C to stop)")
        run(app, Limits(**limits), listening)


def _check_key(api_key: str | None, no_auth: bool, host: str) -> None:
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise UserError("--api-key (or MMSPEC_API_KEY) must be printable ASCII without blanks, and not empty")
    if api_key and no_auth:
        raise UserError(
            "--api-key and --no-auth (or MMSPEC_API_KEY) exclude each other: expected one of them, got both"
        )
    if not (api_key or no_auth or is_loopback(host)):
        raise UserError("a public address needs a key: expected --api-key KEY, MMSPEC_API_KEY or --no-auth, got none")
