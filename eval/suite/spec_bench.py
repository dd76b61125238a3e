"""Answer files in Spec-Bench's format, for its ``evaluation/speed.py`` and ``equal.py`` (arXiv 2401.07851).

One file per method, temperature and batch size, one line per conversation. Tokens are counted as generated; the time of
a batch is divided evenly among its rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mmspec.files import write_text


def answer_file_name(about: dict[str, Any], method: str, temperature: float, batch: int) -> str:
    """The file name in Spec-Bench's scheme: model, method, dtype, temperature."""
    model = Path(about["model"]).name
    words = f"{model}-{method}-{about['dtype']}-temp-{temperature}" + (f"-batch-{batch}" if batch > 1 else "")
    return re.sub(r"[^\w.@+-]+", "_", words) + ".jsonl"


def answer_lines(record: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """One method's answers to a batch of conversations, a JSON object per conversation."""
    model_id = f"{Path(record['about']['model']).name}-{method}"
    lines = []
    for row, (sample, category) in enumerate(zip(record["ids"], record["categories"], strict=True)):
        choice: dict[str, Any] = {"index": 0, "turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": []}
        accepted: list[int] = []
        for turn in record["turns"]:
            if row not in turn["rows"]:
                continue
            result, index = turn["methods"][method], turn["rows"].index(row)
            tokens = len(result["answers"][index])
            # The prefill gives the first token; without statistics, assume one pass for each further token.
            steps = result["stats"][index]["accept_lengths"] if result["stats"] else [1] * (tokens - 1)
            choice["turns"].append(result["texts"][index])
            choice["decoding_steps"].append(len(steps))
            choice["new_tokens"].append(tokens)
            choice["wall_time"].append(median(seconds["total"] for seconds in result["seconds"]) / len(turn["rows"]))
            accepted += steps
        choice["accept_lengths"] = accepted
        question_id = int(sample) if sample.isdecimal() else sample
        head = {"question_id": question_id, "category": category or record["task"], "model_id": model_id}
        lines.append({**head, "choices": [choice], "tstamp": record["tstamp"]})
    return lines


def write_answers(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write all answer files of a run; returns their paths."""
    files: dict[str, list[str]] = {}
    for record in records:
        for method in record["turns"][0]["methods"]:
            name = answer_file_name(record["about"], method, record["temperature"], record["batch"])
            files.setdefault(name, []).extend(json.dumps(line) for line in answer_lines(record, method))
    for name, lines in files.items():
        write_text(folder / name, "".join(f"{line}\n" for line in lines))
    return [folder / name for name in files]
