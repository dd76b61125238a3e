"""Captions of all images and videos in a folder, batch by batch.

Files are told apart by content. The batches follow from the files' names alone, so that a run which was stopped, or
which several machines share, gives what a single one gives. Lines go to ``OUT.part`` as they come; when all are there,
they are sorted by file and become ``OUT``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import UserError
from mmspec.jobs import run_jobs
from mmspec.training.records import write

PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}
_LOADING = {"image": "images", "video": "videos"}


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

        self.settings = settings
        self.pipe = open_pipeline(Console(quiet=True), **settings["loading"])
        self.decoder = Decoder()

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """Caption a batch.

        Args:
            job: ``batch``, its number, ``files``, relative to the folder, and those of them that are ``done``: where
                nothing else can be read, nothing is captioned again.

        Returns:
            ``lines``, one per file, and ``skipped``, ``[file, reason]`` each.
        """
        requests: dict[str, list[tuple[str, dict[str, Any]]]] = {"image": [], "video": []}
        skipped = []
        for name in job["files"]:
            try:
                kind, media = self._read(Path(self.settings["folder"]) / name)
            except UserError as error:
                skipped.append([name, str(error)])
                continue
            prompt = self.settings["prompt"] or PROMPTS[kind]
            requests[kind].append((name, {"prompt": prompt, _LOADING[kind]: [media]}))
        if not {name for asked in requests.values() for name, _ in asked} - set(job["done"]):
            return {"lines": [], "skipped": skipped}
        keywords = dict(self.settings["keywords"])
        if keywords.get("seed") is not None:
            keywords["seed"] += job["batch"]
        lines = []
        for asked in requests.values():
            answers = self.pipe.generate_batch([request for _, request in asked], **keywords)
            for (name, request), answer in zip(asked, answers, strict=True):
                told = {"text": answer.text.strip(), "token_ids": answer.token_ids}
                lines.append(
                    {"file": name, "model": self.pipe.name, "prompt": request["prompt"], **told}
                    | {"finish_reason": answer.finish_reason}
                )
        return {"lines": lines, "skipped": skipped}

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
    advance: Callable[[int, Sequence[Sequence[str]]], Any] = lambda files, skipped: None,
) -> tuple[int, int]:
    """Caption what has no caption yet.

    Args:
        settings: see ``Captioner``.
        out: JSONL file: a line per file, in the order of their names.
        batch_size: files at once.
        engine, workers: see ``run_jobs``.
        begin: called once, with the files that are done and all files.
        advance: called after every batch, with how many files it had and what was skipped.

    Returns:
        Captions in ``out``, and files skipped.

    Raises:
        UserError: an empty folder, nothing in it to caption, or an ``out`` of another model or prompt.
    """
    folder = Path(settings["folder"])
    part = out.with_name(out.name + ".part")
    own = {out.resolve(), part.resolve()}
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.resolve() not in own and not path.name.startswith(".")
    )
    if not names:
        raise UserError(f"{folder}: expected images or videos, there are no files")
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {line["file"]: line for path in (out, part) for line in _lines(path, settings)}
    batches = [names[k : k + batch_size] for k in range(0, len(names), batch_size)]
    jobs: list[dict[str, Any]] = [
        {"batch": k, "files": files, "done": [name for name in files if name in done]}
        for k, files in enumerate(batches)
        if any(name not in done for name in files)
    ]
    begin(len(names) - sum(len(job["files"]) for job in jobs), len(names))
    write(part, "".join(json.dumps(line) + "\n" for line in done.values()))
    skipped = 0
    with part.open("a") as file:
        for job, result in run_jobs(jobs, Captioner, settings, engine, workers):
            for line in result["lines"]:
                if line["file"] not in done:
                    done[line["file"]] = line
                    file.write(json.dumps(line) + "\n")
            file.flush()
            skipped += len(result["skipped"])
            advance(len(job["files"]), result["skipped"])
    if not done:
        raise UserError(f"{folder}: expected at least one image or video, received {len(names)} other files")
    write(out, "".join(json.dumps(done[name]) + "\n" for name in sorted(done)))
    part.unlink(missing_ok=True)
    return len(done), skipped


def _lines(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        model, prompts = settings["loading"]["model"], [settings["prompt"]] if settings["prompt"] else PROMPTS.values()
        if not isinstance(line, dict) or line.get("model") != model or line.get("prompt") not in prompts:
            raise UserError(
                f"{path}, line {number}: expected captions by {model} of the same prompt to go on with, received "
                "others; choose another --out"
            )
        found.append(line)
    return found
