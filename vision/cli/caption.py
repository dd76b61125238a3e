"""The command ``mmspec caption``: describe an image or video, or caption all files of a folder.

Batches depend only on the file names, so resumed and distributed runs give the same captions as an uninterrupted run.
Lines are appended to ``OUT.part`` as batches finish; at the end they are sorted by file name and written to ``OUT``. A
line contains the file's size and modification time and all settings that can change its text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mmspec.cli.commands import Command
from mmspec.cli.options import LOADING, OUT_FILE, Finite, generation_options, read_stdin
from mmspec.errors import UserError
from mmspec.files import alone, append_text, check_settings, read_rows, write_text
from mmspec.jobs import ENGINES, import_ray, run_jobs

EXIT_SKIPPED = 3  # exit status when files of a folder were skipped
PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}
# Settings that may differ when a run is resumed, because speculative decoding is lossless.
_NO_EFFECT = ("drafter", "device", "num_draft_tokens", "threads")

Line = dict[str, Any]


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
    or its line has been deleted. Broken links, links to folders, and folders that cannot be read are treated alike.
    """
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt must not be empty: got --prompt with only white space")
    video: dict[str, Any] = {"frames": frames, "fps": fps, "backend": video_backend}
    piped = file == "-"
    if not piped and os.path.isdir(file):
        if out is None:
            raise UserError(f"{file} is a folder: expected --out FILE for its captions, received none")
        if _caption_folder(file, prompt, video, options, out, batch_size, engine, workers):
            click.get_current_context().exit(EXIT_SKIPPED)
        return
    if out is not None or engine != "local":
        raise UserError(f"--out and --engine require a folder: received {file}")

    from mmspec.vision.decoding import MediaDecoder
    from mmspec.vision.video import Video

    # Decoded before the model loads, so that a broken file fails at once.
    source = read_stdin("FILE", "an image or a video") if piped else file
    media = MediaDecoder().load(source, name="standard input" if piped else file, **video)
    kind = "video" if isinstance(media, Video) else "image"

    from mmspec.cli.session import answer
    from mmspec.vision.embedded import samples

    sample = not piped and Path(file).resolve().parent == samples().resolve()
    answer({"prompt": PROMPTS[kind] if prompt is None else prompt, f"{kind}s": [media]}, options, sample)


def _caption_folder(
    folder: str,
    prompt: str | None,
    video: dict[str, Any],
    options: dict[str, Any],
    out: Path,
    batch_size: int,
    engine: str,
    workers: int,
) -> int:
    """Caption a folder with a progress bar; returns the number of skipped files."""
    from rich.console import Console

    from mmspec.cli.session import generation_keywords, show_limits
    from mmspec.progress import show_progress
    from mmspec.vision.embedded import samples

    if options["compare"] or options["as_json"]:
        raise UserError("--compare and --json require a single file: a folder's captions are JSON lines already")
    if video["backend"] == "decord":
        from mmspec.vision.video_readers import import_decord

        import_decord()  # fails early when decord is missing
    path, keywords = Path(folder).resolve(), generation_keywords(options)
    loading = {name: options[name] for name in LOADING}
    settings = {"folder": str(path), "prompt": prompt, "video": video, "loading": loading, "keywords": keywords}
    if engine == "ray":
        import_ray()  # fails early when ray is missing
    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with alone(out.with_name(f".{out.name}.lock"), out), show_progress(console, "captioning") as show:

        def show_batch(done: int, files: int, skipped: Any) -> None:
            for line in skipped:
                note(f"skipped {line['file']}: {line['error']}")
            show(done, files)

        captions, skipped = caption_folder(settings, out, batch_size, engine, workers, show_batch)
    if path != samples().resolve():
        show_limits(console, options["model"])
    note(f"{captions} captions in {out}, {skipped} files skipped")
    return skipped


class Captioner:
    """Captions batches of files with one model; a worker of ``mmspec.jobs.run_jobs``. ``settings``: ``folder``;
    ``prompt`` (None: ``PROMPTS``); ``loading``, options of the model; ``video``, options of ``load_video``; and
    ``keywords`` of ``Pipeline.generate``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from rich.console import Console

        from mmspec.cli.session import open_pipeline
        from mmspec.vision.decoding import MediaDecoder

        self.settings = settings
        self.pipe = open_pipeline(Console(quiet=True), **settings["loading"])
        if not self.pipe.processor.reads_media:
            raise UserError(f"{self.pipe.name}: expected a vision-language model, received one that reads text only")
        self.decoder = MediaDecoder()

    def __call__(self, job: dict[str, Any]) -> list[Line]:
        """Caption a job's batch: its index, ``files`` relative to the folder, and ``done`` files, which have an
        up-to-date line. If no other file can be read, the batch is not captioned. Returns a line per file, without
        size, modification time and settings."""
        requests: dict[str, dict[str, dict[str, Any]]] = {"image": {}, "video": {}}  # by file name
        lines = []
        for name in job["files"]:
            try:
                kind, media = self._read(Path(self.settings["folder"], name))
            except UserError as error:
                lines.append({"file": name, "error": str(error)})
                continue
            requests[kind][name] = {"prompt": self.settings["prompt"] or PROMPTS[kind], f"{kind}s": [media]}
        if {*requests["image"], *requests["video"]} <= set(job["done"]):
            return lines
        keywords = dict(self.settings["keywords"])
        if keywords.get("seed") is not None:
            keywords["seed"] += job["batch"]
        for named in requests.values():
            answers = self.pipe.generate_batch(list(named.values()), on_error="return", **keywords)
            for (name, request), answer in zip(named.items(), answers, strict=True):
                line: Line = {"file": name, "error": str(answer)}
                if not isinstance(answer, UserError):
                    line = {"file": name, "model": self.pipe.name, "prompt": request["prompt"]}
                    line |= {field: getattr(answer, field) for field in ("text", "token_ids", "finish_reason")}
                lines.append(line)
        return lines

    def _read(self, path: Path) -> tuple[str, Any]:
        """Kind and content of a file. Raises ``UserError`` with a message without the file's name."""
        from mmspec.vision.video import Video

        if os.path.isdir(path):
            kind = "a link to a folder" if os.path.islink(path) else "a folder that cannot be read"
            raise UserError(f"expected an image or a video, received {kind}")
        try:
            media = self.decoder.load(path, **self.settings["video"])
        except UserError as error:
            raise UserError(str(error).removeprefix(f"{path}: ")) from None
        return "video" if isinstance(media, Video) else "image", media


def caption_folder(
    settings: dict[str, Any],
    out: Path,
    batch_size: int,
    engine: str = "local",
    workers: int = 1,
    on_batch: Callable[[int, int, Sequence[Line]], Any] = lambda done, files, skipped: None,
) -> tuple[int, int]:
    """Caption all files that have no up-to-date line in ``out``; returns the number of captions in ``out``, and of the
    folder's files that were skipped.

    Args:
        settings: see ``Captioner``.
        on_batch: called at the start and after each batch, with the number of files in finished batches, the number of
            all files, and the lines of newly skipped files.

    Raises:
        UserError: the folder has no files, none of them can be captioned, or ``out`` was made with other settings.
    """
    folder = Path(settings["folder"])
    part = out.with_name(out.name + ".part")
    files = _find_files(folder, {out.resolve(), part.resolve()})
    fingerprint = _fingerprint(settings, out, batch_size)
    earlier = {line["file"]: line for path in (out, part) for line in _read_lines(path, fingerprint)}
    # A line is still valid if its file is unchanged, or was captioned and then deleted.
    done = {
        name: line
        for name, line in earlier.items()
        if (files[name].items() <= line.items() if name in files else "error" not in line)
    }
    names = list(files)
    batches = [names[k : k + batch_size] for k in range(0, len(names), batch_size)]
    jobs: list[dict[str, Any]] = [
        {"batch": k, "files": batch, "done": [name for name in batch if name in done]}
        for k, batch in enumerate(batches)
        if not done.keys() >= set(batch)
    ]
    finished = len(files) - sum(len(job["files"]) for job in jobs)
    on_batch(finished, len(files), [])
    write_text(part, "".join(json.dumps(line) + "\n" for line in done.values()))
    for job, lines in run_jobs(jobs, Captioner, settings, engine, workers):
        new = [line | files[line["file"]] | {"settings": fingerprint} for line in lines if line["file"] not in done]
        done |= {line["file"]: line for line in new}
        append_text(part, "".join(json.dumps(line) + "\n" for line in new))
        finished += len(job["files"])
        on_batch(finished, len(files), [line for line in new if "error" in line])
    failed = [done[name] for name in files if "error" in done[name]]
    if all("error" in line for line in done.values()):
        part.unlink()
        first = f"{failed[0]['file']}: {failed[0]['error']}"
        raise UserError(
            f"{folder}: expected at least one image or video, received {len(failed)} other files; the first is {first}"
        )
    write_text(out, "".join(json.dumps(done[name]) + "\n" for name in sorted(done)))
    part.unlink()
    return sum("error" not in line for line in done.values()), len(failed)


def _find_files(folder: Path, excluded: set[Path]) -> dict[str, Line]:
    """Size and modification time of all files by relative name, without ``excluded`` and hidden files. Broken links,
    links to folders, unreadable folders and devices are listed like files, and fail when they are read. Raises
    ``UserError``: the folder has no files."""
    paths = [path for path in _entries(folder) if Path(os.path.realpath(path)) not in excluded]
    if not paths:
        raise UserError(f"{folder}: expected images or videos, received a folder without files")
    return dict(sorted((os.path.relpath(path, folder), _status(path)) for path in paths))


def _entries(folder: Path) -> Iterator[str]:
    """Paths of all non-hidden entries except readable folders. Raises ``UserError``: ``folder`` cannot be read."""
    closed: list[str] = []
    for top, folders, files in os.walk(folder, onerror=lambda error: closed.append(error.filename)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(top, name) for name in files if not name.startswith("."))
        yield from (path for name in folders if os.path.islink(path := os.path.join(top, name)))
    if str(folder) in closed:
        raise UserError(f"{folder}: expected a folder of images or videos, received one that cannot be read")
    yield from closed


def _status(path: str) -> Line:
    """Size and modification time of a file or broken link; 0 if they cannot be read."""
    for status_of in (os.stat, os.lstat):
        with suppress(OSError):
            status = status_of(path)
            return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {"size": 0, "mtime_ns": 0}


def _fingerprint(settings: Mapping[str, Any], out: Path, batch_size: int) -> dict[str, Any]:
    """All settings that can change a caption, as JSON values."""
    options = settings["loading"] | {"prompt": settings["prompt"]} | settings["video"] | settings["keywords"]
    kept = {name: value for name, value in options.items() if name not in _NO_EFFECT}
    kept["folder"] = os.path.relpath(settings["folder"], out.resolve().parent)
    if kept.get("temperature") != 0 and kept.get("seed") is not None:
        kept["batch_size"] = batch_size  # the rows of a batch share a random generator
    return json.loads(json.dumps(kept))


def _read_lines(path: Path, fingerprint: Mapping[str, Any]) -> list[Line]:
    """The complete lines of an earlier run; empty if ``path`` does not exist. Raises ``UserError``: a line was written
    with other settings."""
    lines = []
    for number, line in read_rows(path, cut=True):
        if not (isinstance(line.get("settings"), dict) and isinstance(line.get("file"), str)):
            raise UserError(
                f"{path}, line {number}: expected a caption with the settings of its run, received another; "
                "choose another --out"
            )
        if line["settings"] != fingerprint:
            check_settings(path, line["settings"], fingerprint)
        lines.append(line)
    return lines
