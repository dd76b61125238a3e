"""Captions of all images and videos in a folder, batch by batch.

Files are told apart by content. The batches follow from the files' names alone, so that a run which was stopped, or
which several machines share, gives what a single one gives. Lines go to ``OUT.part`` as they come; when all are there,
they are sorted by file and become ``OUT``.

A line holds the file's size and modification time and the settings that can change its text. A file that has changed
is captioned again, a file that has been deleted keeps its line, and other settings are refused. A file that cannot be
captioned has a line with ``error`` in place of the text; it is read again when the file has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.jobs import run_jobs
from mmspec.training.files import check_settings, write_text

PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}
_LOADING = {"image": "images", "video": "videos"}
# Neither changes the tokens: outputs are the target's own, whatever is drafted and wherever it runs.
_FREE = ("drafter", "device", "nodes")

Line = dict[str, Any]


class Captioner:
    """A model that captions files; call it with a job to have it done.

    Args:
        settings: ``folder``, ``prompt`` (None takes the usual ones), ``loading`` (of the model), ``video`` (how videos
            are opened) and ``keywords`` (of ``Pipeline.generate``).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from rich.console import Console

        from mmspec.cli.session import open_pipeline
        from vision.decoding import Decoder
        from vision.targets import VisionTarget

        self.settings = settings
        self.pipe = open_pipeline(Console(quiet=True), **settings["loading"])
        if not isinstance(self.pipe.target, VisionTarget):
            raise UserError(f"{self.pipe.name}: expected a vision-language model, received one that reads text only")
        self.decoder = Decoder()

    def __call__(self, job: dict[str, Any]) -> list[Line]:
        """Caption a batch.

        Args:
            job: ``batch``, its number, ``files``, relative to the folder, and those of them that are ``done``: where
                nothing else can be read, nothing is captioned again.

        Returns:
            One line per file, without its fingerprint.
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
            requests[kind].append((name, {"prompt": prompt, _LOADING[kind]: [media]}))
        if not {name for asked in requests.values() for name, _ in asked} - set(job["done"]):
            return lines
        keywords = dict(self.settings["keywords"])
        if keywords.get("seed") is not None:
            keywords["seed"] += job["batch"]
        for asked in requests.values():
            lines += self._answers(asked, keywords)
        return lines

    def _answers(self, asked: Sequence[tuple[str, dict[str, Any]]], keywords: dict[str, Any]) -> list[Line]:
        """Captions of one batch. Where a file cannot be captioned, such as one too large for the model's context, each
        is asked about alone."""
        try:
            answers = self.pipe.generate_batch([request for _, request in asked], **keywords)
        except ValueError as error:  # a processor's own refusal of a picture is no UserError
            if len(asked) == 1:
                return [{"file": asked[0][0], "error": str(error)}]
            return [line for one in asked for line in self._answers([one], keywords)]
        return [
            {"file": name, "model": self.pipe.name, "prompt": request["prompt"]}
            | {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            for (name, request), answer in zip(asked, answers, strict=True)
        ]

    def _read(self, path: Path) -> tuple[str, Any]:
        from vision.video import Video

        media = self.decoder.load(path, **self.settings["video"])
        return "video" if isinstance(media, Video) else "image", media


def caption_folder(
    settings: dict[str, Any],
    out: Path,
    batch_size: int,
    engine: str = "local",
    workers: int = 1,
    begin: Callable[[int, int], Any] = lambda done, files: None,
    advance: Callable[[int, Sequence[Line]], Any] = lambda files, skipped: None,
) -> tuple[int, int]:
    """Caption what has no caption yet.

    Args:
        settings: see ``Captioner``.
        out: JSONL file: a line per file, in the order of their names.
        batch_size: files at once.
        engine, workers: see ``run_jobs``.
        begin: called once, with the files that are done and all files.
        advance: called after every batch, with how many files it had and the lines of those newly skipped.

    Returns:
        Captions in ``out``, and files of the folder that have an error there instead.

    Raises:
        UserError: an empty folder, nothing in it that can be captioned, or an ``out`` made with other settings.
    """
    folder = Path(settings["folder"])
    part = out.with_name(out.name + ".part")
    files = _files(folder, {out.resolve(), part.resolve()})
    if not files:
        raise UserError(f"{folder}: expected images or videos, there are no files")
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = _fingerprint(settings, out, batch_size)
    found = {line["file"]: line for path in (out, part) for line in _lines(path, kept)}
    done = {name: line for name, line in found.items() if _stands(line, files.get(name))}
    names = list(files)
    batches = [names[k : k + batch_size] for k in range(0, len(names), batch_size)]
    jobs: list[dict[str, Any]] = [
        {"batch": k, "files": batch, "done": [name for name in batch if name in done]}
        for k, batch in enumerate(batches)
        if any(name not in done for name in batch)
    ]
    begin(len(names) - sum(len(job["files"]) for job in jobs), len(names))
    write_text(part, "".join(json.dumps(line) + "\n" for line in done.values()))
    with part.open("a") as file:
        for job, lines in run_jobs(jobs, Captioner, settings, engine, workers):
            new = [line | files[line["file"]] | {"settings": kept} for line in lines if line["file"] not in done]
            done |= {line["file"]: line for line in new}
            file.write("".join(json.dumps(line) + "\n" for line in new))
            file.flush()
            advance(len(job["files"]), [line for line in new if "error" in line])
    failed = [name for name in names if "error" in done[name]]
    if all("error" in line for line in done.values()):
        part.unlink()
        raise UserError(
            f"{folder}: expected at least one image or video, received {len(failed)} other files; the first is "
            f"{failed[0]}: {done[failed[0]]['error']}"
        )
    write_text(part, "".join(json.dumps(done[name]) + "\n" for name in sorted(done)))
    os.replace(part, out)
    return sum("error" not in line for line in done.values()), len(failed)


def _stands(line: Line, file: Line | None) -> bool:
    """Whether an earlier line needs no second try: its file is the same still, or gone after it was captioned."""
    return "error" not in line if file is None else file.items() <= line.items()


def _files(folder: Path, own: set[Path]) -> dict[str, Line]:
    """Size and modification time of all files but hidden and ``own`` ones, by name."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.resolve() not in own and not path.name.startswith("."):
            status = path.stat()
            found[str(path.relative_to(folder))] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {name: found[name] for name in sorted(found)}


def _fingerprint(settings: Mapping[str, Any], out: Path, batch_size: int) -> dict[str, Any]:
    """The settings that can change a caption, as JSON values."""
    given = settings["loading"] | {"prompt": settings["prompt"]} | settings["video"] | settings["keywords"]
    kept = {name: value for name, value in given.items() if name not in _FREE}
    kept["folder"] = os.path.relpath(settings["folder"], out.resolve().parent)
    if kept.get("temperature") and kept.get("seed") is not None:
        kept["batch_size"] = batch_size  # a batch draws from one seed
    return json.loads(json.dumps(kept))


def _lines(path: Path, kept: Mapping[str, Any]) -> list[Line]:
    """The whole lines of an earlier run.

    Raises:
        UserError: they are of another run.
    """
    found = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            break  # the line that a kill cut off
        if not isinstance(line, dict) or "settings" not in line:
            raise UserError(
                f"{path}, line {number}: expected a caption with the settings of its run to go on with, received "
                "none; choose another --out"
            )
        if line["settings"] != kept:
            check_settings(path, line["settings"], kept)
        found.append(line)
    return found
