"""A demo for tests: a real server in this process, on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from demos.models import Models
from demos.server import serving


@contextmanager
def demo_server(**options: Any) -> Iterator[str]:
    """Its address, while it listens."""
    with serving(Models(device="cpu"), server_port=0, **options) as page:
        yield page.local_url
