"""Drafters that learn from verified tokens while the engine is idle (online speculative decoding, arXiv 2310.07177)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.validation import option, options


@options
class AdaptOptions:
    """Options of adaptation. ``space``: size limit of the folder, in MiB."""

    folder: Path | None = option(None, "Load and save what drafters learn in this folder; implies --adapt.")
    space: int = option(256, "Limit on the size of --adapt-folder, in MiB.", ge=1)

    @staticmethod
    def of(value: Any) -> AdaptOptions | None:
        """Options from the ``adapt`` argument of ``mmspec.load``: False, True, a folder, or the options themselves."""
        if isinstance(value, AdaptOptions):
            return value
        if isinstance(value, bool):
            return AdaptOptions() if value else None
        if isinstance(value, str | PathLike):
            return AdaptOptions(Path(value))
        raise UserError(f"adapt must be True, False, a folder or AdaptOptions: got {type(value).__name__}")
