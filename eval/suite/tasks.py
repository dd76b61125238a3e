"""Tasks of ``mmspec eval`` by name, groups of them, and their rows; ``docs/evaluation.md`` describes the local files.

Open-ended benchmarks have official scores from large judge models. Here their score is the overlap with the reference,
which shows whether methods differ, not how good a model is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mmspec.errors import UserError, explained, install
from mmspec.eval.harness.prompts import Questions, held_out
from mmspec.eval.suite import scoring
from mmspec.eval.suite.scoring import Sample, Scorer
from mmspec.files import read_rows

_IDS = ("id", "question_id", "questionId", "task_id", "prompt_id", "image_id", "img_id")
_IMAGES = (".jpg", ".png", ".jpeg", ".webp")
_ENDINGS = ("", *_IMAGES, ".mp4", ".webm", ".mkv", ".avi")


@dataclass(frozen=True)
class DatasetRow:
    """One row of a benchmark's data: its fields, its file and line for messages, its index, and the folder of its media
    files (None if fields contain the media)."""

    values: dict[str, Any]
    where: str
    number: int
    folder: Path | None = None

    def __getitem__(self, field: str) -> Any:
        if field not in self.values:
            raise UserError(f"{self.where}: expected a field {field!r}, received {', '.join(self.values) or 'none'}")
        return self.values[field]

    def get(self, field: str, default: Any = None) -> Any:
        """A field, or ``default`` if it is missing or None."""
        value = self.values.get(field)
        return default if value is None else value

    @property
    def id(self) -> str:
        """``id``, else ``question_id`` or another of ``_IDS``, else the row's index."""
        return str(next((self.values[name] for name in _IDS if self.values.get(name) is not None), self.number))

    def texts(self, field: str) -> list[str]:
        """A field with a text, or a list of texts or of VQAv2's objects with an ``answer`` each."""
        value = self[field]
        values = value if isinstance(value, list | tuple) else [value]
        return [str(one["answer"] if isinstance(one, dict) else one) for one in values]

    def media(self, subfolder: str, *fields: str) -> Iterator[Any]:
        """Images or videos of these fields, as paths (also in ``subfolder``) or in the form of ``datasets``; missing
        fields are skipped."""
        for field in fields:
            value = self.get(field, [])
            for source in value if isinstance(value, list) else [value]:
                if isinstance(source, dict):  # an undecoded image of datasets
                    source = source.get("bytes") or source.get("path")
                yield self._find_file(source, subfolder) if isinstance(source, str) else source

    def _find_file(self, name: str, subfolder: str) -> str:
        if self.folder is None:
            return name
        for base in (self.folder, self.folder / subfolder):
            for ending in _ENDINGS:
                path = base / f"{name}{ending}"
                if path.is_file():
                    return str(path)
        raise UserError(f"{self.where}: expected the file {name} in {self.folder} or its {subfolder}/, there is none")


def local_rows(name: str, data: Path) -> Iterator[DatasetRow]:
    """The rows of a local benchmark. Raises ``UserError``: missing files, or lines that are not JSON objects."""
    single, folder = data / f"{name}.jsonl", data / name
    files = [single] if single.is_file() else sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{name}: expected {single} or .jsonl files in {folder}/, there are none")
    rows = (row for file in files for row in rows_of(file))
    for number, row in enumerate(rows):
        yield replace(row, number=number)


def pages(name: str, data: Path) -> Iterator[DatasetRow]:
    """A row per image in ``DATA/NAME/``; its category is whether a text file of the same name exists."""
    folder = data / name
    images = sorted(path for path in folder.glob("*") if path.suffix.lower() in _IMAGES)
    if not images:
        raise UserError(f"{name}: expected images ({', '.join(_IMAGES)}) in {folder}/, there are none")
    for number, path in enumerate(images):
        category = "with a text" if path.with_suffix(".txt").is_file() else "without a text"
        yield DatasetRow({"id": path.stem, "image": path.name, "category": category}, str(path), number, folder)


def rows_of(file: Path) -> Iterator[DatasetRow]:
    for number, values in read_rows(file):
        yield DatasetRow(values, f"{file}, line {number}", number - 1, file.parent)


@dataclass(frozen=True)
class HubDataset:
    """A benchmark's dataset on the hub, as for ``datasets.load_dataset``; for ``images`` in another table: its config,
    and the field with the image's ``id``."""

    path: str
    split: str
    config: str | None = None
    images: tuple[str, str] | None = None


def lmms_lab(name: str, *options: Any) -> HubDataset:
    """A dataset of lmms-lab, the organisation used by lmms-eval 0.7.3; options as for ``HubDataset``."""
    return HubDataset(f"lmms-lab-encoder/{name}", *options)


def hub_rows(name: str, hub: HubDataset, limit: int | None) -> Iterator[DatasetRow]:
    """The rows of a benchmark, read lazily."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: expected --data FOLDER with local files, or the package datasets and a network, received neither "
            f"({install('eval')})"
        ) from None
    # Network, server and dataset problems raise many kinds of errors.
    with explained(f"{name}: expected to read {hub.path} through datasets, or --data FOLDER", Exception):
        # Streaming avoids downloading a whole benchmark to read a part.
        for number, values in enumerate(_load_table(datasets, hub, hub.config, streaming=limit is not None)):
            if hub.images is not None and number == 0:
                image_table = _load_table(datasets, hub, hub.images[0])
                image_index = {row["id"]: index for index, row in enumerate(image_table.select_columns("id"))}
            if hub.images is not None:
                values = {**values, "image": image_table[image_index[values[hub.images[1]]]]["image"]}
            yield DatasetRow(dict(values), f"{hub.path}, row {number}", number)


def _load_table(datasets: Any, hub: HubDataset, config: str | None, streaming: bool = False) -> Any:
    """A table with undecoded images, since all samples of a task are in memory at once."""
    table = datasets.load_dataset(hub.path, config, split=hub.split, streaming=streaming)
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    return table


def sample_of(
    row: DatasetRow,
    turns: str | Sequence[str],
    references: Sequence[str] = (),
    category: Any = "",
    metadata: Any = None,
) -> Sample:
    """A sample with one question or several, about the row's images or video where it has any; references are of the
    only question."""
    images = row.media("images", "image", *(f"image_{k}" for k in range(1, 8)))
    videos = row.media("videos", "video" if row.get("video") else "video_name")
    questions = Questions((turns,) if isinstance(turns, str) else tuple(turns), tuple(images), tuple(videos))
    return Sample(row.id, questions, str(category), (tuple(references),) if references else (), metadata)


@dataclass(frozen=True)
class EvalTask:
    """A benchmark, ``visual`` if it has images or videos. Without a scorer, only speed and equality are measured.

    Its samples are in the package (``rows``), or in rows that ``read`` converts: of the hub, unless None, or of a
    folder of data, which ``local`` reads.
    """

    name: str
    description: str
    visual: bool
    score: Scorer | None
    max_new_tokens: int
    read: Callable[[DatasetRow], Sample] | None = None
    hub: HubDataset | None = None
    rows: Callable[[], Iterator[Sample]] | None = None
    local: Callable[[str, Path], Iterator[DatasetRow]] = local_rows

    def samples(self, data: Path | None, limit: int | None) -> list[Sample]:
        """The samples, or the first ``limit``, from a folder of local benchmark files or through ``datasets``."""
        if self.rows is not None:
            return list(islice(self.rows(), limit))
        assert self.read is not None
        if data is not None:
            rows = self.local(self.name, data)
        elif self.hub is not None:
            rows = hub_rows(self.name, self.hub, limit)
        else:
            files = f"{self.name}.jsonl or {self.name}/"
            raise UserError(f"{self.name} is read from local files only: expected --data FOLDER with {files}")
        read = [self.read(row) for row in islice(rows, limit)]
        if not read:
            raise UserError(f"{self.name}: expected at least one sample, received none")
        if len({sample.id for sample in read}) < len(read):
            read = [replace(sample, id=f"{number}:{sample.id}") for number, sample in enumerate(read)]
        return read


# Prompts are taken from LLaVA-1.5 (arXiv 2310.03744, 3.2) and lmms-eval.
_CAPTION = "Provide a one-sentence caption for the provided image."
_SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
_TRANSCRIBE = "Transcribe all text of this page, in reading order."
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_LETTER = "\nAnswer with the option's letter from the given choices directly."


def _caption_task(name: str, description: str, field: str, hub: HubDataset) -> EvalTask:
    def read(row: DatasetRow) -> Sample:
        return sample_of(row, _CAPTION, row.texts(field))

    return EvalTask(name, f"{description}; image, {field} (list of captions)", True, scoring.cider, 64, read, hub)


def _answer_task(
    name: str,
    description: str,
    score: Scorer,
    hub: HubDataset,
    field: str = "answer",
    category: str = "",
    instruction: str = _SHORT_ANSWER,
    max_new_tokens: int = 32,
) -> EvalTask:
    def read(row: DatasetRow) -> Sample:
        return sample_of(row, f"{row['question']}{instruction}", row.texts(field), row.get(category, ""))

    fields = ", ".join(filter(None, ("image, question", field, category)))
    return EvalTask(name, f"{description}; {fields}", True, score, max_new_tokens, read, hub)


def _video(row: DatasetRow) -> Sample:
    question = str(row["question"]).strip().capitalize().rstrip("?")
    return sample_of(row, f"{question}?{_SHORT_ANSWER}", row.texts("answer"), row.get("type", ""))


def _with_options(question: str, options: Sequence[str]) -> str:
    listed = "".join(f"\n{chr(ord('A') + k)}. {option}" for k, option in enumerate(options))
    return f"{question}{listed}{_LETTER}"


def _choice(row: DatasetRow, field: str) -> Sample:
    """The answer is the index of an option, or its letter."""
    context, answer = f"Context: {row['hint']}\n" if row.get("hint") else "", str(row["answer"])
    question, options = f"{context}{row['question']}", row.texts(field)
    letter = chr(ord("A") + int(answer)) if answer.isdecimal() else answer
    return sample_of(row, _with_options(question, options), [letter], row.get("subject", ""), options)


def _mmmu(row: DatasetRow) -> Sample:
    given = row.get("options", []), row["answer"]
    parsed = [ast.literal_eval(one) if isinstance(one, str) and one.startswith("[") else one for one in given]
    options, answers = (one if isinstance(one, list) else [one] for one in parsed)
    question = str(row["question"])
    question = _with_options(question, options) if options else f"{question}\nAnswer with a word, a phrase or a number."
    return sample_of(row, question, list(map(str, answers)), row.get("subfield", ""), options)


def _mme(row: DatasetRow) -> Sample:
    # MME asks two questions per image, and also scores both together.
    question = str(row["question"]).replace(" Please answer yes or no.", "") + _SHORT_ANSWER
    return sample_of(row, question, row.texts("answer"), row.get("category", ""), metadata=row.id)


def _video_detail(row: DatasetRow) -> Sample:
    return sample_of(row, str(row.get("question", "Describe the video in detail.")), row.texts("answer"))


def _benchmark(row: DatasetRow) -> Sample:
    """Its six tasks are ``topic``; ``category`` divides them further."""
    turns, image = row.texts("turns"), row["image"]
    if image is None:
        raise UserError(f"{row.where}: expected an image, received none")
    return sample_of(row, turns, category=row["topic"])


def _turns(row: DatasetRow) -> Sample:
    """A conversation from ``turns`` (Spec-Bench, SPEED-Bench, FastChat) or ``prompt`` (MT-Bench on the hub)."""
    turns = row.texts("turns" if row.get("turns") else "prompt")
    if turns[0].startswith(_PLACEHOLDER):
        raise UserError(f"{row.where}: expected texts from SPEED-Bench's prepare_data.py, received its placeholder")
    return sample_of(row, turns, category=row.get("category", ""))


def _page(row: DatasetRow) -> Sample:
    return sample_of(row, _TRANSCRIBE, category=row["category"])


def _gsm8k(row: DatasetRow) -> Sample:
    final = str(row["answer"]).split("####")[-1].strip()
    question = f"{row['question']}\nThink step by step and end with the number that answers the question."
    return sample_of(row, question, [final], "math")


def _human_eval(row: DatasetRow) -> Sample:
    return sample_of(row, f"Complete this Python function.\n\n{row['prompt']}", category="coding")


def _held_out(name: str, description: str, score: Scorer, max_new_tokens: int = 160, visual: bool = True) -> EvalTask:
    """A task whose rows are in ``eval/heldout``, see ``mmspec.eval.harness.prompts``."""

    def rows() -> Iterator[Sample]:
        for row, conversation in held_out(name):
            references = tuple(map(tuple, row.get("references", ())))
            yield Sample(row["id"], conversation, row["category"], references, row.get("parts", row.get("options")))

    return EvalTask(name, description, visual, score, max_new_tokens, rows=rows)


_GQA = lmms_lab("GQA", "testdev", "testdev_balanced_instructions", ("testdev_balanced_images", "imageId"))
_SCIENCEQA = "ScienceQA; image (or none), question, choices, answer (index), hint"
_SCIENCEQA_HUB = lmms_lab("ScienceQA", "test", "ScienceQA-IMG")
_AI2D = "AI2D; image, question, options, answer (index)"
_MMMU = "MMMU; image_1 .. image_7, question, options, answer (letter or text)"
_MMSPEC = "The MMSpec benchmark (arXiv 2603.14989), unrelated to this package; id, image, turns, category, topic"
_MME = "MME; image, question, answer (yes or no), category"
_LLAVA = lmms_lab("llava-bench-in-the-wild", "train")
_VIDEO = "video_name, question, answer"
_TURNS = "question_id, category, turns (list)"
_GSM8K = "GSM8K; question, answer (ends with #### NUMBER)"
_DOCUMENTS = "your own pages, DATA/documents/PAGE.png, PAGE.jpg, ...; a PAGE.txt beside them is another program's OCR"
_HUMAN_EVAL = "HumanEval, speed only (its programs are not run); task_id, prompt"
_MT_BENCH_HUB = HubDataset("HuggingFaceH4/mt_bench_prompts", "train")
_BENCHMARKS = (
    _caption_task("coco", "COCO captions 2017", "answer", lmms_lab("COCO-Caption2017", "val")),
    _caption_task("flickr30k", "Flickr30k captions", "caption", lmms_lab("flickr30k", "test")),
    _caption_task("nocaps", "NoCaps", "annotations_captions", lmms_lab("NoCaps", "validation")),
    _answer_task("vqav2", "VQAv2", scoring.vqa_accuracy, lmms_lab("VQAv2", "validation"), "answers", "question_type"),
    _answer_task("gqa", "GQA, test-dev balanced", scoring.exact, _GQA),
    _answer_task("textvqa", "TextVQA", scoring.vqa_accuracy, lmms_lab("textvqa", "validation"), "answers"),
    _answer_task("vizwiz", "VizWiz-VQA", scoring.vqa_accuracy, lmms_lab("VizWiz-VQA", "val"), "answers", "category"),
    _answer_task("chartqa", "ChartQA", scoring.relaxed, lmms_lab("ChartQA", "test"), "answer", "type"),
    _answer_task("docvqa", "DocVQA", scoring.anls, lmms_lab("DocVQA", "validation", "DocVQA"), "answers"),
    # The hub's rows only name the videos, which must be downloaded elsewhere.
    EvalTask("activitynet-qa", f"ActivityNet-QA; {_VIDEO}", True, scoring.contained, 32, _video),
    EvalTask("msvd-qa", f"MSVD-QA; {_VIDEO}", True, scoring.contained, 32, _video),
    EvalTask(
        "ai2d", _AI2D, True, scoring.choice_accuracy, 16, partial(_choice, field="options"), lmms_lab("ai2d", "test")
    ),
    EvalTask(
        "scienceqa", _SCIENCEQA, True, scoring.choice_accuracy, 16, partial(_choice, field="choices"), _SCIENCEQA_HUB
    ),
    EvalTask("mmmu", _MMMU, True, scoring.choice_accuracy, 32, _mmmu, lmms_lab("MMMU", "validation")),
    _answer_task("pope", "POPE", scoring.pope, lmms_lab("POPE", "test"), category="category", max_new_tokens=16),
    EvalTask("mme", _MME, True, scoring.mme, 16, _mme, lmms_lab("MME", "test")),
    _answer_task("mm-vet", "MM-Vet", scoring.rouge_l, lmms_lab("MMVet", "test"), "answer", "capability", "", 256),
    _answer_task("llava-bench", "LLaVA-Bench in the wild", scoring.rouge_l, _LLAVA, "gpt_answer", "category", "", 512),
    EvalTask("video-detail", f"VideoDetailCaption; {_VIDEO}", True, scoring.rouge_l, 512, _video_detail),
    EvalTask("mmspec-benchmark", _MMSPEC, True, None, 512, _benchmark),
    EvalTask("mt-bench", "MT-Bench, speed only; turns (list), category", False, None, 512, _turns, _MT_BENCH_HUB),
    EvalTask("gsm8k", _GSM8K, False, scoring.last_number, 320, _gsm8k, HubDataset("openai/gsm8k", "test", "main")),
    EvalTask("humaneval", _HUMAN_EVAL, False, None, 384, _human_eval, HubDataset("openai/openai_humaneval", "test")),
    EvalTask("documents", _DOCUMENTS, True, None, 1024, _page, local=pages),
    EvalTask("spec-bench", f"Spec-Bench, speed only; {_TURNS}", False, None, 512, _turns),
    EvalTask("speed-bench", f"SPEED-Bench, speed only; {_TURNS}", False, None, 512, _turns),
)


_EMBEDDED = (
    _held_out("scenes-captions", "drawn: captions of one image", scoring.mentioned),
    _held_out("scenes-questions", "drawn: questions about an image", scoring.contained, 64),
    _held_out("scenes-reading", "drawn: words and numbers on a sign", scoring.contained, 64),
    _held_out("scenes-counting", "drawn: counting questions", scoring.contained, 64),
    _held_out("scenes-charts", "drawn: bar charts, unknown to the embedded models", scoring.choice_accuracy, 64),
    _held_out("scenes-turns", "drawn: a caption, then two questions", scoring.contained),
    _held_out("scenes-images", "drawn: two or three images at once", scoring.mentioned),
    _held_out("scenes-video", "drawn: captions of clips", scoring.mentioned),
    _held_out("texts", "generated: sums, word problems, stories, programs", scoring.mentioned, 256, visual=False),
)

_EDITS = (
    _held_out("code-edits", "functions to edit: rename, types, docstring, fix, ...", scoring.edited, 512, False),
    _held_out("code-edits-tuning", "other edits of the same kinds, to tune on", scoring.edited, 512, False),
)

TASKS: dict[str, EvalTask] = {task.name: task for task in (*_EMBEDDED, *_EDITS, *_BENCHMARKS)}

GROUPS: dict[str, tuple[str, ...]] = {"embedded": tuple(task.name for task in _EMBEDDED)}
"""Groups of tasks by name; a text model gets the text tasks of a group, a vision-language model the visual tasks."""


def select_tasks(names: str, visual: bool) -> list[EvalTask]:
    """Tasks of a ``--tasks`` option, names and groups separated by commas, for a model that is ``visual`` or not."""
    selected: dict[str, EvalTask] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in GROUPS:
            group = [TASKS[member] for member in GROUPS[name]]
            selected |= {task.name: task for task in group if task.visual == visual}
        elif name in TASKS:
            selected[name] = TASKS[name]
        else:
            raise UserError(f"unknown task: expected some of {', '.join([*GROUPS, *TASKS])}, got {name!r}")
    if not selected:
        raise UserError(f"expected at least one task, received {names!r}")
    if visual_tasks := [task.name for task in selected.values() if task.visual and not visual]:
        raise UserError(
            f"{visual_tasks[0]} has images or videos: expected a vision-language model, received a text model"
        )
    return list(selected.values())
