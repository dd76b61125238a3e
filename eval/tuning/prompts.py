"""Prompts of a user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.errors import UserError, explained
from mmspec.eval.suite.tasks.rows import rows_of


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Requests of a file: a text file has a prompt per line; a ``.jsonl`` file an object per line, with ``prompt`` (or
    ``turns``, of which the first is taken), and ``images`` and ``videos``, files beside it, if any.

    Raises:
        UserError: an unreadable file or row, or none at all.
    """
    if path.suffix == ".jsonl":
        requests = [_request(row) for row in rows_of(path)]
    else:
        with explained(f"{path}: expected a text file in UTF-8", OSError, UnicodeDecodeError):
            lines = path.read_text("utf-8-sig").splitlines()
        requests = [{"prompt": line} for line in lines if line.strip()]
    if not requests:
        raise UserError(f"{path}: expected at least one prompt, received none")
    return requests


def _request(row: Any) -> dict[str, Any]:
    texts = row.texts("turns" if "turns" in row.values else "prompt")
    return {"prompt": texts[0], "images": list(row.images("images")), "videos": list(row.videos("videos"))}
