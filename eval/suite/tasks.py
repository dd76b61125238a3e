"""Tasks of ``mmspec eval`` by name, and groups of them.

The embedded suite is held-out scenes, clips and texts of the kinds that the embedded models were trained on. Edits of
code are for larger models; ``code-edits-tuning`` is to choose settings on. The others are published benchmarks of
images and videos (captions, short answers, choices, yes or no, open-ended) and of texts, read from ``--data FOLDER`` or
from the hub through ``datasets`` (``mmspec.eval.suite.data``). Open-ended benchmarks have official scores from
large judge models. Here their score is the overlap with the reference, which shows whether methods differ, not how good
a model is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from mmspec.errors import UserError
from mmspec.eval.harness.prompts import Questions, held_out
from mmspec.eval.suite import scoring
from mmspec.eval.suite.data import DatasetRow, EvalTask, HubDataset, Sample, Scorer, lmms_lab, pages, single_turn

# Prompts are taken from LLaVA-1.5 (arXiv 2310.03744, 3.2) and lmms-eval.
_CAPTION = "Provide a one-sentence caption for the provided image."
_SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
_TRANSCRIBE = "Transcribe all text of this page, in reading order."
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_LETTER = "\nAnswer with the option's letter from the given choices directly."


def _caption_task(name: str, description: str, field: str, hub: HubDataset) -> EvalTask:
    def read(row: DatasetRow) -> Sample:
        return single_turn(row, _CAPTION, row.texts(field))

    return EvalTask(name, f"{description}; image, {field} (list of captions)", True, scoring.cider, 64, read, hub)


def _references(row: DatasetRow, field: str) -> list[str]:
    """Accepted answers: texts, or VQAv2's objects with an ``answer`` each."""
    value = row[field]
    if isinstance(value, list):
        return [str(entry["answer"] if isinstance(entry, dict) else entry) for entry in value]
    return [str(value)]


def _answer_task(
    name: str,
    description: str,
    score: Scorer,
    hub: HubDataset,
    field: str = "answer",
    category: str = "",
    *,
    fields: str = "",
    instruction: str = _SHORT_ANSWER,
    max_new_tokens: int = 32,
) -> EvalTask:
    """A task with one question per row; ``fields`` describes the fields of a row."""

    def read(row: DatasetRow) -> Sample:
        question = str(row["question"]) + instruction
        return single_turn(row, question, _references(row, field), str(row.get(category, "")))

    fields = fields or f"image, question, {field}"
    return EvalTask(name, f"{description}; {fields}", True, score, max_new_tokens, read, hub)


def _free_task(
    name: str, description: str, hub: HubDataset, field: str, category: str, max_new_tokens: int
) -> EvalTask:
    """A task with open-ended answers."""
    options = {"fields": f"image, question, {field}, {category}", "instruction": "", "max_new_tokens": max_new_tokens}
    return _answer_task(name, description, scoring.rouge_l, hub, field, category, **options)  # type: ignore[arg-type]


def _video_sample(row: DatasetRow) -> Sample:
    question = str(row["question"]).strip().capitalize().rstrip("?") + "?" + _SHORT_ANSWER
    clip = row.videos("video") or row.videos("video_name")
    references = (tuple(_references(row, "answer")),)
    return Sample(row.id, Questions((question,), videos=clip), str(row.get("type", "")), references)


def _video_task(name: str, description: str) -> EvalTask:
    # The hub's rows only name the videos, which must be downloaded elsewhere.
    fields = f"{description}; video_name, question, answer"
    return EvalTask(name, fields, True, scoring.contained, 32, _video_sample)


def _list_options(options: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + k)}. {option}" for k, option in enumerate(options))


def _letter(answer: object) -> str:
    """The letter of an option, given by index or letter."""
    return chr(ord("A") + int(answer)) if str(answer).isdecimal() else str(answer)  # type: ignore[call-overload]


def _ai2d(row: DatasetRow) -> Sample:
    options = row.texts("options")
    question = f"{row['question']}\n{_list_options(options)}{_LETTER}"
    return single_turn(row, question, [_letter(row["answer"])], metadata=options)


def _scienceqa(row: DatasetRow) -> Sample:
    options = row.texts("choices")
    context = f"Context: {row['hint']}\n" if row.get("hint") else ""
    question = f"{context}{row['question']}\n{_list_options(options)}{_LETTER}"
    return single_turn(row, question, [_letter(row["answer"])], str(row.get("subject", "")), metadata=options)


def _mmmu(row: DatasetRow) -> Sample:
    options = row.get("options", [])
    options = list(ast.literal_eval(options)) if isinstance(options, str) else list(options)
    prompt = f"{_list_options(options)}{_LETTER}" if options else "Answer with a word, a phrase or a number."
    question = f"{row['question']}\n{prompt}"
    images = row.images(*(f"image_{k}" for k in range(1, 8)))
    answers = ast.literal_eval(row["answer"]) if str(row["answer"]).startswith("[") else row["answer"]
    references = tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),)
    return Sample(row.id, Questions((question,), images), str(row.get("subfield", "")), (references,), options)


def _mme(row: DatasetRow) -> Sample:
    # MME asks two questions per image, and also scores both together.
    question = str(row["question"]).replace(" Please answer yes or no.", "") + _SHORT_ANSWER
    return single_turn(row, question, [str(row["answer"])], str(row.get("category", "")), metadata=row.id)


def _video_detail(row: DatasetRow) -> Sample:
    question = str(row.get("question", "Describe the video in detail."))
    clip = row.videos("video") or row.videos("video_name")
    return Sample(row.id, Questions((question,), videos=clip), "", ((str(row["answer"]),),))


def _benchmark(row: DatasetRow) -> Sample:
    """Its six tasks are ``topic``; ``category`` divides them further."""
    turns, image = tuple(row.texts("turns")), row["image"]
    if image is None:
        raise UserError(f"{row.where}: expected an image, received none")
    return Sample(row.id, Questions(turns, row.images("image")), str(row["topic"]))


def _turns(row: DatasetRow) -> Sample:
    """A conversation from ``turns`` (Spec-Bench, SPEED-Bench, FastChat) or ``prompt`` (MT-Bench on the hub)."""
    turns = row.texts("turns" if row.get("turns") else "prompt")
    if turns[0].startswith(_PLACEHOLDER):
        raise UserError(f"{row.where}: expected texts from SPEED-Bench's prepare_data.py, received its placeholder")
    return Sample(row.id, Questions(tuple(turns)), str(row.get("category", "")))


def _page(row: DatasetRow) -> Sample:
    return single_turn(row, _TRANSCRIBE, (), str(row["category"]))


def _gsm8k(row: DatasetRow) -> Sample:
    final = str(row["answer"]).split("####")[-1].strip()
    question = f"{row['question']}\nThink step by step and end with the number that answers the question."
    return Sample(row.id, Questions((question,)), "math", ((final,),))


def _human_eval(row: DatasetRow) -> Sample:
    question = f"Complete this Python function.\n\n{row['prompt']}"
    return Sample(row.id, Questions((question,)), "coding")


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
_YES_NO = "image, question, answer (yes or no), category"
_MMSPEC = "The MMSpec benchmark (arXiv 2603.14989), unrelated to this package; id, image, turns, category, topic"
_LLAVA_BENCH_HUB = lmms_lab("llava-bench-in-the-wild", "train")
_VIDEO_DETAIL = "VideoDetailCaption; video_name, question, answer"
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
    _video_task("activitynet-qa", "ActivityNet-QA"),
    _video_task("msvd-qa", "MSVD-QA"),
    EvalTask("ai2d", _AI2D, True, scoring.choice_accuracy, 16, _ai2d, lmms_lab("ai2d", "test")),
    EvalTask("scienceqa", _SCIENCEQA, True, scoring.choice_accuracy, 16, _scienceqa, _SCIENCEQA_HUB),
    EvalTask("mmmu", _MMMU, True, scoring.choice_accuracy, 32, _mmmu, lmms_lab("MMMU", "validation")),
    _answer_task(
        "pope", "POPE", scoring.pope, lmms_lab("POPE", "test"), "answer", "category", fields=_YES_NO, max_new_tokens=16
    ),
    EvalTask("mme", f"MME; {_YES_NO}", True, scoring.mme, 16, _mme, lmms_lab("MME", "test")),
    _free_task("mm-vet", "MM-Vet", lmms_lab("MMVet", "test"), "answer", "capability", 256),
    _free_task("llava-bench", "LLaVA-Bench (in the wild)", _LLAVA_BENCH_HUB, "gpt_answer", "category", 512),
    EvalTask("video-detail", _VIDEO_DETAIL, True, scoring.rouge_l, 512, _video_detail),
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
    """The tasks of a ``--tasks`` option: names and groups, separated by commas.

    Args:
        visual: whether the model takes images.

    Raises:
        UserError: an unknown name, none at all, or a visual task for a text model.
    """
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
