"""``mmspec serve``."""

from __future__ import annotations

import logging
import signal
from threading import Event
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import (
    API_KEY,
    JSON_OBJECT,
    LOADING,
    ListenOptions,
    LoadOptions,
    adapt_of,
    adapt_options,
    adapter_option,
    check_api_key,
    derived,
    device_map_option,
    drafters_option,
    mmproj_option,
    model_options,
    reasoning_options,
    steps_shown,
)
from mmspec.errors import UserError
from mmspec.jobs import rank, ranks
from mmspec.sampling.reasoning import AUTO
from mmspec.serving.call_formats import NAMES as PARSERS
from mmspec.serving.settings import (
    Limits,
    ServeOptions,
    ServerSettings,
    drafter_of,
    host_names,
    is_loopback,
    server_url,
)
from mmspec.workers import on_signals

_log = logging.getLogger("mmspec.serve")


@click.command(cls=Command)
@model_options
@mmproj_option
@device_map_option
@derived(LoadOptions, "trust_remote_code", "generation_config", "threads", "kv_cache_dtype")
@drafters_option
@click.option(
    "--speculative-config",
    type=JSON_OBJECT,
    metavar="JSON",
    help='vLLM\'s form of --drafter, such as {"method": "ngram", "num_speculative_tokens": 8}.',
)
@derived(ListenOptions)
@API_KEY.declared
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Web pages that may call the server, such as http://localhost:3000; repeatable.",
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Model name in requests, in place of --model; repeatable, responses have the first name.",
)
@adapter_option
@reasoning_options
@click.option(
    "--tool-call-parser",
    type=click.Choice(PARSERS),
    default=AUTO,
    show_default=True,
    metavar="NAME",
    help=f"Format of the model's tool calls: {', '.join(PARSERS[1:])}; auto: from the chat template.",
)
@adapt_options
@derived(Limits)
@derived(ServeOptions, settings={"prefix_cache": {"metavar": "MIB"}, "prefix_cache_size": {"metavar": "MIB"}})
def serve(
    host: str,
    port: int,
    api_key: str | None,
    no_auth: bool,
    engine: str,
    replicas: int,
    replica_gpus: int,
    **options: Any,
) -> None:
    """Serve a model through OpenAI's, Anthropic's and Ollama's APIs.

    Clients use http://HOST:PORT/v1 as the base URL. On an address that is not a loopback one, --api-key or --no-auth is
    required.
    """
    check_api_key(api_key, no_auth, public=not is_loopback(host))
    if max(replicas, replica_gpus) > 1 and engine != "ray":
        raise UserError(f"--replicas and --replica-gpus go with --engine ray: got --engine {engine}")
    if replica_gpus > 1:
        options["device_map"] = options["device_map"] or "auto"
    adapt = adapt_of(options)
    if adapt is not None and adapt.folder is not None and engine == "ray":
        raise UserError("--adapt-folder is written by one process: expected --engine local, received ray")
    if (speculative := options.pop("speculative_config")) is not None:
        if options["drafter"] != (AUTO,):
            raise UserError("--speculative-config goes in place of --drafter: got both")
        drafter, options["num_draft_tokens"] = drafter_of(speculative)
        options["drafter"] = (drafter,)
    options["drafter"], *others = options["drafter"]
    if others and (adapt is not None or ranks() > 1):
        reason = "--adapt" if adapt is not None else "a model that is sharded over ranks"
        raise UserError(f"{reason} goes with one --drafter: got {1 + len(others)}")
    limits = Limits(**{name: options.pop(name) for name in Limits.__dataclass_fields__})
    loading = {name: options.pop(name) for name in (*LOADING, "prefix_cache_dir")}
    loading |= {name: options.pop(name) << 20 for name in ("prefix_cache", "prefix_cache_size")}
    loading["adapters"] = dict(options.pop("adapters"))
    access = {**options, "api_key": api_key, "hosts": host_names(host)}
    settings = ServerSettings(loading, limits, access, adapt=adapt, others=others)
    if engine == "ray":
        if ranks() > 1:
            raise UserError(f"--engine ray starts its own processes: got one of {ranks()} ranks of a job")
        _on_ray(settings, replicas, replica_gpus, host, port)
    elif rank():  # only rank 0 receives requests
        with steps_shown():
            (pipe,) = settings.pipelines().values()
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)  # all ranks receive the signal; rank 0 notifies the others at its end
        pipe.follow()
    else:
        _here(settings, host, port)


def _here(settings: ServerSettings, host: str, port: int) -> None:
    with steps_shown():
        _log.info("importing torch and transformers")
        from mmspec.serving.server import listen, loading, run

    with listen(host, port) as listening:
        with loading(listening), steps_shown():
            pipes = settings.pipelines()
            pipe = next(iter(pipes.values()))
            pipe.follow()
        drafters, dtype = f"drafter{'s' * (len(pipes) > 1)} {', '.join(pipes)}", settings.loading["dtype"]
        if dtype == "auto":
            own = str(pipe.target.dtype).removeprefix("torch.")
            dtype = vars(pipe.model.generation_config).get("gguf_format", own)
        what = f"model {pipe.name}, {drafters}, {dtype} on {pipe.target.device}"
        _announce(host, listening.getsockname()[1], f"{what}; by default {settings.defaults(pipe)}")
        from mmspec.serving.app import create_app

        run(create_app(pipes, settings.limits, **settings.access), settings.limits, listening, pipe.engine)


def _on_ray(settings: ServerSettings, replicas: int, gpus: int, host: str, port: int) -> None:
    from mmspec.serving.on_ray import deployed
    from mmspec.serving.server import listen

    with listen(host, port) as free:
        port = free.getsockname()[1]
    with steps_shown():
        _log.info("starting %d replicas of %s on Ray", replicas, settings.loading["model"])
    with deployed(settings, replicas, gpus, host, port):
        _announce(host, port, f"model {settings.loading['model']}, {replicas} replicas on Ray")
        ended = Event()
        with on_signals(lambda *_: ended.set(), signal.SIGTERM):
            ended.wait()


def _announce(host: str, port: int, what: str) -> None:
    click.echo(f"mmspec serve: {server_url(host, port)}/v1 ({what}; Ctrl-C to stop)")
