"""The command ``mmspec caption``: describe an image or video, or caption all files of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import LOADING, OUT_FILE, Finite, generation_options, read_stdin
from mmspec.errors import UserError
from mmspec.files import alone
from mmspec.jobs import ENGINES, import_ray
from mmspec.vision.cli.folder import PROMPTS

EXIT_SKIPPED = 3  # exit status when files of a folder were skipped


@click.command(cls=Command)
@click.argument("file", metavar="FILE|FOLDER")
@click.option("--prompt", help=f"[default: '{PROMPTS['image']}' or '{PROMPTS['video']}']")
@click.option(
    "--frames", type=click.IntRange(1, 512), help="Frames sampled from a video. [default: 8, or according to --fps]"
)
@click.option("--fps", type=Finite(0, min_open=True), help="Frames sampled per second of a video.")
@click.option("--video-backend", type=click.Choice(["pyav", "decord"]), default="pyav", show_default=True)
@click.option("--out", type=OUT_FILE, help="JSONL file for a FOLDER's captions.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Files of a FOLDER per batch.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="Runs a FOLDER.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Ray actors, one model each.")
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
    """Describe FILE, an image or a video, or answer a question about it; - reads it from standard input.

    The answer streams to standard output; one line of statistics follows on standard error. For a FOLDER, every image
    and video is captioned, and one JSON line per file is written to --out. Hidden files and folders, whose names start
    with a dot, are skipped at every depth.

    A FOLDER's run is resumed when the command is repeated with the same settings: new files and changed files (size or
    modification time) are captioned, and the lines of deleted files are kept. A file that cannot be captioned is
    skipped: its line has "error" instead of "text", and the exit status is 3. It is retried after the file has changed
    or its line has been deleted. Broken links, links to folders, and folders that cannot be read are treated the same.
    """
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt must not be empty: got --prompt with only white space")
    video: dict[str, Any] = {"frames": frames, "fps": fps, "backend": video_backend}
    piped = file == "-"
    if not piped and os.path.isdir(file):
        if out is None:
            raise UserError(f"{file} is a folder: expected --out FILE for its captions, received none")
        settings = _folder_settings(file, prompt, video, options)
        if engine == "ray":
            import_ray()  # fails early when ray is missing
        if _caption_folder(settings, out, batch_size, engine, workers):
            click.get_current_context().exit(EXIT_SKIPPED)
        return
    if out is not None or engine != "local":
        raise UserError(f"--out and --engine require a folder: received {file}")

    from mmspec.vision.decoding import MediaDecoder
    from mmspec.vision.video import Video

    # Decoded before the model loads, so that a broken file fails at once.
    source = read_stdin("FILE", "an image or a video") if piped else file
    media = MediaDecoder().load(source, name="standard input" if piped else file, **video)
    kind, key = ("video", "videos") if isinstance(media, Video) else ("image", "images")

    from mmspec.cli.session import answer
    from mmspec.vision.embedded import samples

    sample = not piped and Path(file).resolve().parent == samples().resolve()
    answer({"prompt": PROMPTS[kind] if prompt is None else prompt, key: [media]}, options, sample)


def _folder_settings(folder: str, prompt: str | None, video: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Settings of ``mmspec.vision.cli.folder.Captioner`` from the command line's options."""
    from mmspec.cli.session import generation_keywords

    if options["compare"] or options["as_json"]:
        raise UserError("--compare and --json require a single file: a folder's captions are JSON lines already")
    if video["backend"] == "decord":
        from mmspec.vision.video_decord import import_decord

        import_decord()  # fails early when decord is missing
    keywords = generation_keywords(options)
    return {
        "folder": str(Path(folder).resolve()),
        "prompt": prompt,
        "video": video,
        "loading": {name: options[name] for name in LOADING},
        "keywords": keywords,
    }


def _caption_folder(settings: dict[str, Any], out: Path, batch_size: int, engine: str, workers: int) -> int:
    """Caption a folder with a progress bar; returns the number of skipped files."""
    from rich.console import Console

    from mmspec.cli.session import show_limits
    from mmspec.progress import show_progress
    from mmspec.vision.cli.folder import caption_folder
    from mmspec.vision.embedded import samples

    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if Path(settings["folder"]) != samples().resolve():
        show_limits(console, settings["loading"]["model"])
    with alone(out.with_name(f".{out.name}.lock"), out), show_progress(console, "captioning") as show:

        def show_batch(done: int, files: int, skipped: Any) -> None:
            for line in skipped:
                note(f"skipped {line['file']}: {line['error']}")
            show(done, files)

        captions, skipped = caption_folder(settings, out, batch_size, engine, workers, show_batch)
    note(f"{captions} captions in {out}, {skipped} files skipped")
    return skipped
