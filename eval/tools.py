"""Tool calls over HTTP: ``python -m mmspec.eval tools --model FILE.gguf``.

openai-python sends ``mmspec serve`` requests that say which functions to call with which arguments. A request passes if
its answer has these calls, or the expected words if no call is needed, and equals plain decoding's.
"""

from __future__ import annotations

from typing import Any

import click

from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.serving import serving


@benchmark
@click.option("--model", required=True, help="A name that is registered, a folder or a GGUF file.")
@click.option("--drafter", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--tool-parser", default="auto", show_default=True)
@click.option("--least", default=20, show_default=True, help="Exit status 1 if fewer requests pass.")
def main(least: int, drafter: str, **options: Any) -> dict[str, Any]:
    """Send requests for tool calls: a table, then one JSON line."""
    from mmspec.eval.harness.tool_requests import REQUESTS

    drafted, plain = (answers(drafter=one, **options) for one in (drafter, "none"))
    rows = [
        {
            "name": request.name,
            "choice": request.choice,
            "sent": request.sent,
            "outcome": request.outcome(message),
            "equal": comparable(message) == comparable(other),
        }
        for request, message, other in zip(REQUESTS, drafted, plain, strict=True)
    ]
    passed = sum(row["outcome"] == "ok" and row["equal"] for row in rows)
    columns: list[Column] = [(name, f"{{{name}}}") for name in ("name", "choice", "sent", "outcome", "equal")]
    wide_console().print(make_table(columns, rows, title=f"{passed} of {len(rows)} requests"))
    return {**options, "drafter": drafter, "passed": passed, "failed": passed < least, "requests": rows}


def answers(**options: Any) -> list[Any]:
    """The messages that answer the requests, by a server with these options."""
    from openai import OpenAI

    from mmspec.eval.harness.tool_requests import REQUESTS

    with serving(**options) as server, OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        return [request.send(client, model.id) for request in REQUESTS]


def comparable(message: Any) -> Any:
    """An answer's text and calls, without ids."""
    if isinstance(message, str):
        return message
    return message.content, [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
