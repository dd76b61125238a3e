"""Caption all images and videos of a folder in batches, resumable, locally or on Ray.

Images and videos are recognised by content. Files and folders whose names start with a dot are skipped; links to
folders are not followed. Batches depend only on the file names, so resumed and distributed runs give the same captions
as an uninterrupted run. Lines are appended to ``OUT.part`` as batches finish; at the end they are sorted by file name
and written to ``OUT``.

A line contains the file's size and modification time and all settings that can change its text, for comparison in a
resumed run; see ``mmspec caption``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.files import append_text, check_settings, read_rows, write_text
from mmspec.jobs import run_jobs

PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}
_MEDIA_KEYS = {"image": "images", "video": "videos"}
# Settings that may differ when a run is resumed, because speculative decoding is lossless.
_NO_EFFECT = ("drafter", "device", "num_draft_tokens")

Line = dict[str, Any]


class Captioner:
    """Captions batches of files with one model; a worker of ``mmspec.jobs.run_jobs``.

    Args:
        settings: ``folder``; ``prompt`` (None: ``PROMPTS``); ``loading``, options of the model; ``video``, options of
            ``load_video``; and ``keywords`` of ``Pipeline.generate``.
    """

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
        """Caption a batch.

        Args:
            job: ``batch``, its index; ``files``, relative to the folder; and ``done``, files with an up-to-date line.
                If none of the other files can be read, the batch is not captioned.

        Returns:
            One line per file, without size, modification time and settings.
        """
        requests: dict[str, list[tuple[str, dict[str, Any]]]] = {"image": [], "video": []}
        lines = []
        for name in job["files"]:
            path = Path(self.settings["folder"]) / name
            try:
                kind, media = self._read(path)
            except UserError as error:
                lines.append({"file": name, "error": str(error).removeprefix(f"{path}: ")})
                continue
            prompt = self.settings["prompt"] or PROMPTS[kind]
            requests[kind].append((name, {"prompt": prompt, _MEDIA_KEYS[kind]: [media]}))
        if not {name for named in requests.values() for name, _ in named} - set(job["done"]):
            return lines
        keywords = dict(self.settings["keywords"])
        if keywords.get("seed") is not None:
            keywords["seed"] += job["batch"]
        for named in requests.values():
            lines += self._generate(named, keywords)
        return lines

    def _generate(self, named: Sequence[tuple[str, dict[str, Any]]], keywords: dict[str, Any]) -> list[Line]:
        """Caption a batch of (file name, request)."""
        requests = [request for _, request in named]
        lines = []
        for (name, request), answer in zip(
            named, self.pipe.generate_batch(requests, on_error="return", **keywords), strict=True
        ):
            if isinstance(answer, UserError):
                lines.append({"file": name, "error": str(answer)})
                continue
            about = {"file": name, "model": self.pipe.name, "prompt": request["prompt"]}
            lines.append(
                about | {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            )
        return lines

    def _read(self, path: Path) -> tuple[str, Any]:
        from mmspec.vision.video import Video

        if os.path.isdir(path):
            kind = "a link to a folder" if os.path.islink(path) else "a folder that cannot be read"
            raise UserError(f"{path}: expected an image or a video, received {kind}")
        media = self.decoder.load(path, **self.settings["video"])
        return "video" if isinstance(media, Video) else "image", media


def caption_folder(
    settings: dict[str, Any],
    out: Path,
    batch_size: int,
    engine: str = "local",
    workers: int = 1,
    on_batch: Callable[[int, int, Sequence[Line]], Any] = lambda done, files, skipped: None,
) -> tuple[int, int]:
    """Caption all files that have no up-to-date line in ``out``.

    Args:
        settings: see ``Captioner``.
        out: JSONL file: one line per file, sorted by file name.
        on_batch: called at the start and after each batch, with the number of files in finished batches, the number of
            all files, and the lines of newly skipped files.

    Returns:
        Number of captions in ``out``, and number of the folder's files that were skipped.

    Raises:
        UserError: the folder has no files, none of them can be captioned, or ``out`` was made with other settings.
    """
    folder = Path(settings["folder"])
    part = out.with_name(out.name + ".part")
    files = _find_files(folder, {out.resolve(), part.resolve()})
    fingerprint = _fingerprint(settings, out, batch_size)
    earlier = {line["file"]: line for path in (out, part) for line in _read_lines(path, fingerprint)}
    done = {name: line for name, line in earlier.items() if _up_to_date(line, files.get(name))}
    jobs = _make_jobs(list(files), done, batch_size)
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


def _make_jobs(names: Sequence[str], done: Mapping[str, Line], batch_size: int) -> list[dict[str, Any]]:
    """The jobs of ``Captioner`` for all batches with a file that is not done."""
    batches = [names[k : k + batch_size] for k in range(0, len(names), batch_size)]
    return [
        {"batch": k, "files": batch, "done": [name for name in batch if name in done]}
        for k, batch in enumerate(batches)
        if any(name not in done for name in batch)
    ]


def _up_to_date(line: Line, file: Line | None) -> bool:
    """Whether a line of an earlier run is still valid: its file is unchanged, or was captioned and then deleted."""
    return "error" not in line if file is None else file.items() <= line.items()


def _find_files(folder: Path, excluded: set[Path]) -> dict[str, Line]:
    """Size and modification time of all files by relative name, without ``excluded`` and hidden files.

    Names that start with a dot are hidden, including folders and their contents. Broken links, links to folders,
    unreadable folders and devices are listed like files, and fail when they are read.

    Raises:
        UserError: there are no files.
    """
    files = {}
    for path in _entries(folder):
        if Path(os.path.realpath(path)) not in excluded:
            files[os.path.relpath(path, folder)] = _status(path)
    if not files:
        raise UserError(f"{folder}: expected images or videos, received a folder without files")
    return {name: files[name] for name in sorted(files)}


def _entries(folder: Path) -> Iterator[str]:
    """Paths of all non-hidden entries except readable folders.

    Raises:
        UserError: ``folder`` cannot be read.
    """
    closed: list[str] = []
    for top, folders, files in os.walk(folder, onerror=lambda error: closed.append(error.filename)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = [name for name in files if not name.startswith(".")]
        yield from (os.path.join(top, name) for name in shown)
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
    """The complete lines of an earlier run; empty if ``path`` does not exist.

    Raises:
        UserError: a line was written with other settings.
    """
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
