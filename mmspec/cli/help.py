"""Help of commands: options in groups, the common ones first, and two examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

Groups = Mapping[str, tuple[str, ...]]
"""Names of parameters by the title of their section, in the order of help; the last section has all others."""

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "caption": (
        'mmspec caption photo.jpg --prompt "What is in the picture?"',
        "mmspec caption photos --out captions.jsonl",
    ),
    "generate": (
        'mmspec generate --model smollm2 --compare "List the planets."',
        "mmspec generate --model smollm2 --temperature 0.7 --seed 1 - < prompt.txt",
    ),
    "serve": (
        "mmspec serve --model smollm2",
        "mmspec serve --model smol-llava --host 0.0.0.0 --api-key KEY",
    ),
    "demo": ("mmspec demo", "mmspec demo --model smollm2 --api --port 8080"),
    "export": (
        "mmspec export --model TARGET --drafter run/drafter --out vllm",
        "mmspec export --model TARGET --drafter run/drafter --out sglang --format eagle",
    ),
    "datastore build": (
        "mmspec datastore build notes.txt --model smollm2 --out store",
        "mmspec datastore build data.jsonl --model smollm2 --out store",
    ),
    "eval": (
        "mmspec eval --model tiny-llava --out results",
        "mmspec eval --list",
    ),
    "tune": (
        "mmspec tune --model smollm2 --prompts prompts.txt",
        "mmspec tune --model smollm2 --prompts prompts.txt --minutes 10 --drafters recycle,ngram",
    ),
    "calibrate": ("mmspec calibrate --model smollm2", "mmspec calibrate --model smollm2 --dtype int8 --refresh"),
    "info": ("mmspec info", "mmspec info smollm2 --drafters"),
    "train make-data": (
        "mmspec train make-data --model smollm2 --self-prompts 2000 --out made",
        "mmspec train make-data --model smol-llava --prompts data.json --images photos --out made",
    ),
    "train recycle": (
        "mmspec train recycle --model smollm2 --recorded made --out run",
        "mmspec train recycle --model smollm2 --prompts data.jsonl --out run",
    ),
}
_TRAINING_EXAMPLES = (
    "mmspec {name} --model smollm2 --text made/data.jsonl --out run --minutes 60",
    "mmspec {name} --model smol-llava --data made/data.jsonl --out run --epochs 2",
)


class Command(click.Command):
    """A command whose help has its options in ``groups``, and ``EXAMPLES`` at the end."""

    groups: ClassVar[Groups] = {
        "Options": (
            *("model", "models", "target", "prompt", "prompts", "drafter", "drafters", "tasks", "methods"),
            *("max_new_tokens", "temperature", "minutes", "host", "port", "api_key", "compare", "refresh"),
            *("out", "resume", "as_json", "listing", "layout"),
        ),
        "Loading": ("device", "dtype", "device_map", "trust_remote_code", "generation_config", "threads"),
        "Images and videos": (
            *("frames", "fps", "video_backend", "images", "max_images", "max_videos"),
            *("max_pixels", "max_video_seconds"),
        ),
        "Sampling": (
            *("stop", "seed", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "min_new_tokens", "ignore_eos", "greedy"),
        ),
        "Structured output": ("json_schema", "regex", "grammar", "grammar_trigger", "grammar_aligned"),
        "Drafting": ("num_draft_tokens", "sizes", "lossy", "adapt", "adapt_folder", "adapt_space"),
        "Access": ("no_auth", "auth", "api", "origins", "allow_urls", "share", "names"),
        "Limits": (
            *("prefix_cache", "upload_space", "max_running", "max_waiting", "max_body", "max_characters"),
            *("max_tokens", "max_model_len", "max_stored", "request_timeout", "shutdown_timeout"),
        ),
        "Several files or machines": ("batch_size", "engine", "workers", "replicas", "replica_gpus"),
        "Other options": (),
    }
    examples: ClassVar[tuple[str, ...]] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        *groups, (last, _) = self.groups.items()
        grouped = {title: [records.pop(name) for name in names if name in records] for title, names in groups}
        for title, rows in {**grouped, last: list(records.values())}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name = ctx.command_path.removeprefix("mmspec ")
        if lines := EXAMPLES.get(name, self.examples):
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"{'':>{formatter.current_indent}}{line.format(name=name)}\n")


class TrainingCommand(Command):
    """A command that trains a drafter."""

    groups: ClassVar[Groups] = {
        "Options": ("target", "out", "text", "data", "minutes", "steps", "epochs"),
        "Data": ("images", "held_out", "recorded", "cache", "text_share"),
        "Schedule": (
            *("batch", "optimiser", "rate", "warmup", "hold", "seed", "precision", "device", "dtype", "threads"),
            *("checkpoint_minutes", "report_minutes"),
        ),
        "Evaluation": ("prompts", "max_new_tokens", "tensorboard"),
        "Trees": ("draft_vocabulary", "top_k", "depth", "total_tokens"),
        "Network and objective": (),
    }
    examples = _TRAINING_EXAMPLES
