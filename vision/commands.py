"""``mmspec caption FILE`` and ``mmspec caption FOLDER --out captions.jsonl``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mmspec.cli.options import LOADING, OUT_FILE, Number, generation_options
from mmspec.errors import UserError
from mmspec.jobs import ENGINES
from vision.folder import PROMPTS

SKIPPED = 3  # exit status where some files of a folder were skipped


@click.command()
@click.argument("file", metavar="FILE|FOLDER")
@click.option("--prompt", help=f"By default '{PROMPTS['image']}' or '{PROMPTS['video']}'")
@click.option(
    "--frames", type=click.IntRange(1, 512), help="Frames taken from a video; by default 8, or what --fps gives."
)
@click.option("--fps", type=Number(0, min_open=True), help="Frames taken per second of a video.")
@click.option("--video-backend", type=click.Choice(["pyav", "decord"]), default="pyav", show_default=True)
@click.option("--out", type=OUT_FILE, help="JSONL file for the captions of a FOLDER.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Files of a FOLDER at once.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="For a FOLDER.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model-holding actors on Ray.")
@generation_options
def caption(
    file: str,
    prompt: str | None,
    frames: int | None,
    fps: float | None,
    video_backend: str,
    out: Path | None,
    batch_size: int,
    engine: str,
    workers: int,
    **options: Any,
) -> None:
    """Describe FILE, an image or a video, or answer a question about it.

    The answer streams to standard output, one line of figures follows on standard error. Of a FOLDER, every image and
    video is described, and --out gets a line of JSON for each.

    Called again with the same settings, a FOLDER's run goes on: files that are new or have changed (size or
    modification time) are captioned, lines of deleted files stay. A file that cannot be captioned is skipped; its line
    has "error" in place of "text", and the exit status is 3. It is tried again when it has changed or its line has been
    deleted.
    """
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt must not be empty: got --prompt with nothing but blanks")
    video: dict[str, Any] = {"frames": frames, "fps": fps, "backend": video_backend}
    if os.path.isdir(file):
        if out is None:
            raise UserError(f"{file} is a folder: expected --out FILE for its captions, received none")
        _caption_all(file, prompt, video, out, batch_size, engine, workers, options)
        return
    if out is not None or engine != "local":
        raise UserError(f"--out and --engine are for folders: {file} is not one")

    from vision.decoding import Decoder
    from vision.video import Video

    # Read before the model loads: a broken file should not cost the minutes that a large model takes.
    media = Decoder().load(file, **video)
    kind, key = ("video", "videos") if isinstance(media, Video) else ("image", "images")

    from mmspec.cli.session import answer
    from vision.embedded import samples

    sample = Path(file).resolve().parent == samples().resolve()
    answer({"prompt": PROMPTS[kind] if prompt is None else prompt, key: [media]}, options, sample)


def _caption_all(
    folder: str,
    prompt: str | None,
    video: dict[str, Any],
    out: Path,
    batch_size: int,
    engine: str,
    workers: int,
    options: dict[str, Any],
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from mmspec.cli.session import generation_keywords, show_limits
    from vision.embedded import samples
    from vision.folder import caption_folder
    from vision.video_decord import import_decord

    if options["compare"] or options["as_json"]:
        raise UserError("--compare and --json are for one file: a folder's captions are JSON lines already")
    if video["backend"] == "decord":
        import_decord()  # where it is missing, no video could be read
    keywords = generation_keywords(options)
    settings = {
        "folder": str(Path(folder).resolve()),
        "prompt": prompt,
        "video": video,
        "loading": {name: options[name] for name in LOADING},
        "keywords": keywords | {"stop": list(keywords["stop"])},
    }
    notes = Console(stderr=True)
    if Path(folder).resolve() != samples().resolve():
        show_limits(notes, options["model"])
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        bar = progress.add_task("captioning")

        def advance(files: int, skipped: Any) -> None:
            for line in skipped:
                notes.print(f"skipped {line['file']}: {line['error']}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar, files)

        captions, skipped = caption_folder(
            settings,
            out,
            batch_size,
            engine,
            workers,
            lambda done, files: progress.update(bar, total=files, completed=done),
            advance,
        )
    notes.print(f"{captions} captions in {out}, {skipped} files skipped", markup=False, highlight=False, soft_wrap=True)
    if skipped:
        click.get_current_context().exit(SKIPPED)
