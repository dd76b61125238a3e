"""Text alone: MT-Bench, GSM8K, HumanEval, Spec-Bench."""

from __future__ import annotations

from eval.harness.prompts import Conversation
from eval.suite.sample import Sample
from eval.suite.scoring.words import last_number
from eval.suite.tasks.local import Row
from eval.suite.tasks.remote import Hub
from eval.suite.tasks.task import Task


def _turns(row: Row) -> Sample:
    """Spec-Bench's and FastChat's ``turns``, or the ``prompt`` list of MT-Bench on the hub."""
    turns = row.texts("turns" if row.get("turns") else "prompt")
    return Sample(row.id, Conversation(tuple(turns)), str(row.get("category", "")))


def _gsm8k(row: Row) -> Sample:
    final = str(row["answer"]).split("####")[-1].strip()
    question = f"{row['question']}\nThink step by step and end with the number that answers the question."
    return Sample(row.id, Conversation((question,)), "math", ((final,),))


def _human_eval(row: Row) -> Sample:
    question = f"Complete this Python function.\n\n{row['prompt']}"
    return Sample(row.id, Conversation((question,)), "coding")


TASKS = (
    Task(
        "mt-bench",
        "MT-Bench, speed alone; turns (list), category",
        False,
        None,
        512,
        _turns,
        Hub("HuggingFaceH4/mt_bench_prompts", "train"),
    ),
    Task(
        "gsm8k",
        "GSM8K; question, answer (ends with #### NUMBER)",
        False,
        last_number,
        320,
        _gsm8k,
        Hub("openai/gsm8k", "test", "main"),
    ),
    Task(
        "humaneval",
        "HumanEval, speed alone (its programs are not run); task_id, prompt",
        False,
        None,
        384,
        _human_eval,
        Hub("openai/openai_humaneval", "test"),
    ),
    Task("spec-bench", "Spec-Bench, speed alone; question_id, category, turns (list)", False, None, 512, _turns),
)
