"""Load test of the demo: latency of concurrent visitors, memory over many requests. ``python -m demos.load``"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter as clock
from typing import Any

import click
import psutil
from gradio_client import Client, handle_file

from vision.embedded import samples

_PICTURE = str(samples() / "scene.png")


@contextmanager
def demo_process() -> Iterator[tuple[str, psutil.Process]]:
    """Start a demo; yields its address and process."""
    command = [sys.executable, "-c", "from mmspec.cli import main; main(['demo', '--port', '0'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http" not in line:
                raise click.ClickException(f"expected the demo's address, received {line!r}")
            yield line.split()[2], psutil.Process(process.pid)
        finally:
            process.terminate()


def _timed_caption(client: Client) -> tuple[dict[str, Any], float]:
    start = clock()
    answer = client.predict(handle_file(_PICTURE), api_name="/caption_image")
    return answer, clock() - start


@click.command()
@click.option("--users", default=5, show_default=True, help="Concurrent visitors.")
@click.option("--requests", default=100, show_default=True, help="Sequential requests.")
def load_test(users: int, requests: int) -> None:
    """Measure the latency of concurrent visitors, then the server's memory over many requests."""
    with demo_process() as (address, process):
        clients = [Client(address, verbose=False) for _ in range(users)]
        _timed_caption(clients[0])  # warm-up
        single = statistics.median(_timed_caption(clients[0])[1] for _ in range(3))
        start = clock()
        with ThreadPoolExecutor(users) as pool:
            answers = list(pool.map(_timed_caption, clients))
        total = clock() - start
        texts = {answer["text"] for answer, _ in answers}
        if len(texts) != 1:
            raise click.ClickException(f"expected equal answers for all visitors, received {texts}")
        latencies = sorted(seconds for _, seconds in answers)
        click.echo(
            f"one visitor: {single:.2f} s; {users} concurrent: {', '.join(f'{latency:.2f}' for latency in latencies)} s"
        )
        memory = {0: process.memory_info().rss / 2**20}
        for number in range(1, requests + 1):
            _timed_caption(clients[number % users])
            if number % max(requests // 5, 1) == 0:
                memory[number] = process.memory_info().rss / 2**20
                click.echo(f"after {number} requests: {memory[number]:.0f} MiB")
        click.echo(json.dumps({"single": single, "concurrent": latencies, "total": total, "rss_mib": memory}))


if __name__ == "__main__":
    load_test()
