"""Time to the first token of follow-up questions, with and without a prefix cache: ``mmspec.eval prefix_cache``.

Conversations about held-out scenes: a caption, then questions, each with the whole conversation as its prompt. Two
pipelines over the same weights answer them interleaved, one without cached prefixes. Times are those of a client, from
the request to the first piece of a stream, image preprocessing included; tokens must be equal.
"""

from __future__ import annotations

import statistics
from time import perf_counter as clock
from typing import Any

import click

import mmspec
from mmspec.engine.calibrate import describe
from mmspec.eval.harness.output import Column, benchmark, make_table, wide_console
from mmspec.eval.harness.prompts import Conversation
from mmspec.vision.scenes.conversations import DESCRIBE, describe_prompt
from mmspec.vision.scenes.drawing import picture
from mmspec.vision.scenes.questions import ask
from mmspec.vision.scenes.scene import sample_scene, seeded

_BYTES = 1 << 30
_FIRST_INDEX = 2_200_000  # of the held-out scenes


def draw_conversation(index: int) -> Conversation:
    """A caption, two questions and another caption of a scene."""
    rng = seeded("heldout", index)
    scene = sample_scene(rng)
    questions: list[str] = []
    while len(questions) < 2:
        question = ask(scene, rng)
        if question is not None and question.question not in questions:
            questions.append(question.question)
    return Conversation((rng.choice(DESCRIBE), *questions, describe_prompt(rng)), (picture(scene),))


def timed(pipe: mmspec.Pipeline, request: dict[str, Any], max_new_tokens: int) -> tuple[float, str, list[int], int]:
    """Seconds to the first piece, text, tokens, and the number of cached tokens of the prompt."""
    start, first = clock(), None
    pieces = []
    for piece in pipe.stream(**request, max_new_tokens=max_new_tokens, temperature=0.0):
        first = clock() - start if first is None else first
        pieces.append(piece)
    stats = pieces[-1].stats
    assert stats is not None
    assert first is not None
    tokens = [token for piece in pieces for token in piece.token_ids]
    return first, "".join(piece.text for piece in pieces), tokens, stats.num_cached_tokens


@benchmark
@click.option("--model", default="tiny-llava", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--conversations", "count", type=click.IntRange(1), default=12, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=120, show_default=True)
def main(model: str, dtype: str, count: int, max_new_tokens: int) -> dict[str, Any]:
    """Measure times to first token by turn: a table, then one JSON line."""
    plain = mmspec.load(model, dtype=dtype)
    pipes = {"computed": plain, "cached": mmspec.load(model, dtype=dtype, prefix_cache=_BYTES)}
    rows: dict[int, dict[str, list[Any]]] = {}
    conversations = [draw_conversation(_FIRST_INDEX + number) for number in range(count + 1)]
    for number, conversation in enumerate(conversations):
        answers: list[str] = []
        for turn in range(len(conversation.questions)):
            request = conversation.request(answers)
            results = {name: timed(pipe, request, max_new_tokens) for name, pipe in pipes.items()}
            answers.append(results["computed"][1])
            if number == 0:
                continue  # warm-up
            row = rows.setdefault(turn, {name: [] for name in (*pipes, "tokens", "equal")})
            for name, (seconds, *_) in results.items():
                row[name].append(seconds)
            row["tokens"].append(results["cached"][3])
            row["equal"].append(results["cached"][2] == results["computed"][2])
    first = rows[0]["cached"]
    table = [
        {
            "turn": turn + 1,
            "computed_seconds": statistics.median(row["computed"]),
            "cached_seconds": statistics.median(row["cached"]),
            "over_computed": statistics.median(a / b for a, b in zip(row["cached"], row["computed"], strict=True)),
            "over_first_turn": statistics.median(a / b for a, b in zip(row["cached"], first, strict=True)),
            "cached_tokens": statistics.median(row["tokens"]),
            "equal": sum(row["equal"]),
            "answers": len(row["equal"]),
        }
        for turn, row in rows.items()
    ]
    columns: list[Column] = [
        ("turn", "{turn}"),
        ("first token, computed", lambda row: f"{1e3 * row['computed_seconds']:.1f} ms"),
        ("cached", lambda row: f"{1e3 * row['cached_seconds']:.1f} ms"),
        ("over computed", "{over_computed:.2f}"),
        ("over the first turn", "{over_first_turn:.2f}"),
        ("cached tokens", "{cached_tokens:.0f}"),
        ("equal", "{equal}/{answers}"),
    ]
    wide_console().print(make_table(columns, table, title=f"{count} conversations"))
    return {"model": model, **describe(plain.target), "conversations": count, "turns": table}
