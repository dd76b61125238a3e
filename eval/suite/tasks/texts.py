"""Text tasks: MT-Bench, GSM8K, HumanEval, Spec-Bench, SPEED-Bench."""

from __future__ import annotations

from mmspec.eval.harness.prompts import Conversation
from mmspec.eval.suite.sample import Sample
from mmspec.eval.suite.scoring import last_number
from mmspec.eval.suite.tasks.rows import DatasetRow, HubDataset
from mmspec.eval.suite.tasks.task import EvalTask


def _turns(row: DatasetRow) -> Sample:
    """A conversation from ``turns`` (Spec-Bench, SPEED-Bench, FastChat) or ``prompt`` (MT-Bench on the hub)."""
    turns = row.texts("turns" if row.get("turns") else "prompt")
    return Sample(row.id, Conversation(tuple(turns)), str(row.get("category", "")))


def _gsm8k(row: DatasetRow) -> Sample:
    final = str(row["answer"]).split("####")[-1].strip()
    question = f"{row['question']}\nThink step by step and end with the number that answers the question."
    return Sample(row.id, Conversation((question,)), "math", ((final,),))


def _human_eval(row: DatasetRow) -> Sample:
    question = f"Complete this Python function.\n\n{row['prompt']}"
    return Sample(row.id, Conversation((question,)), "coding")


TASKS = (
    EvalTask(
        "mt-bench",
        "MT-Bench, speed only; turns (list), category",
        False,
        None,
        512,
        _turns,
        HubDataset("HuggingFaceH4/mt_bench_prompts", "train"),
    ),
    EvalTask(
        "gsm8k",
        "GSM8K; question, answer (ends with #### NUMBER)",
        False,
        last_number,
        320,
        _gsm8k,
        HubDataset("openai/gsm8k", "test", "main"),
    ),
    EvalTask(
        "humaneval",
        "HumanEval, speed only (its programs are not run); task_id, prompt",
        False,
        None,
        384,
        _human_eval,
        HubDataset("openai/openai_humaneval", "test"),
    ),
    EvalTask("spec-bench", "Spec-Bench, speed only; question_id, category, turns (list)", False, None, 512, _turns),
    EvalTask("speed-bench", "SPEED-Bench, speed only; question_id, category, turns (list)", False, None, 512, _turns),
)
