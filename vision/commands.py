"""``mmspec caption FILE``."""

from __future__ import annotations

from typing import Any

import click

from mmspec.cli.options import Number, generation_options

PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}


@click.command()
@click.argument("file")
@click.option("--prompt", help=f"By default '{PROMPTS['image']}' or '{PROMPTS['video']}'")
@click.option(
    "--frames", type=click.IntRange(1, 512), help="Frames taken from a video; by default 8, or what --fps gives."
)
@click.option("--fps", type=Number(0, min_open=True), help="Frames taken per second of a video.")
@click.option("--video-backend", type=click.Choice(["pyav", "decord"]), default="pyav", show_default=True)
@generation_options
def caption(
    file: str, prompt: str | None, frames: int | None, fps: float | None, video_backend: str, **options: Any
) -> None:
    """Describe FILE, an image or a video, or answer a question about it.

    The answer streams to standard output, one line of figures follows on standard error.
    """
    from vision.images import load_image
    from vision.video import kind_of, load_video

    kind = kind_of(file)
    # Read before the model loads: a broken file should not cost the minutes that a large model takes.
    if kind == "image":
        media: dict[str, Any] = {"images": [load_image(file)]}
    else:
        media = {"videos": [load_video(file, frames=frames, fps=fps, backend=video_backend)]}  # type: ignore[arg-type]

    from mmspec.cli.session import answer

    answer({"prompt": PROMPTS[kind] if prompt is None else prompt, **media}, options)
