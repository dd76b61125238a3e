"""``mmspec info`` and ``mmspec clean``."""

from __future__ import annotations

import json
import platform
import shutil
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mmspec import __version__, plugins
from mmspec.cli.commands import Command
from mmspec.cli.options import json_option
from mmspec.errors import UserError, first_line

_PACKAGES = ("torch", "transformers", "av", "decord", "triton", "mamba-ssm", "causal-conv1d")
_SAMPLING = "general.sampling."  # key prefix in GGUF files
_TEMPLATES = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<start_of_turn>": "Gemma",
    "<|channel|>": "Harmony",
    "[INST]": "Mistral",
}
"""Chat template formats by a marker in the template."""
_NOT_SAMPLING = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample")


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--drafters", is_flag=True, help="Show only the available drafters for MODEL, the default first.")
@json_option
def info(model: str | None, drafters: bool, as_json: bool) -> None:
    """Show devices, versions, attention in use, models with their sampling defaults, targets and drafters.

    With MODEL, a registered name, a folder or a GGUF file, show only this model, with its architecture, context,
    vocabulary, weight formats and chat template.
    """
    if drafters and model is None:
        raise UserError("--drafters needs a model: expected mmspec info MODEL --drafters, received none")
    from rich.console import Console
    from rich.table import Table

    from mmspec.progress import show_steps

    with show_steps(Console(stderr=True)):
        facts = {"drafters": drafters_of(model)} if drafters and model else collect(model)
    if as_json:
        click.echo(json.dumps(facts))
        return

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, lines in _sections(facts):
        for number, line in enumerate(lines or ["none"]):
            table.add_row(heading if number == 0 else "", line)
    Console(markup=False, highlight=False).print(table)


def collect(model: str | None = None) -> dict[str, Any]:
    """The output of ``mmspec info`` as JSON values."""
    from mmspec.drafters.registry import drafter_specs
    from mmspec.files import cache_folder, superseded

    models = [entry.name for entry in plugins.registered("models")] if model is None else [model]

    return {
        "mmspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "attention": "torch's, with the tree as a 4D mask (eager where a model has no sdpa)",
        "kernels": _kernels(),
        "models": [_model(name, described=model is not None) for name in models],
        "targets": [{"name": entry.name, "class": entry.value} for entry in plugins.registered("targets")],
        "drafters": [{"name": spec.name, "class": spec.location, "summary": spec.summary} for spec in drafter_specs()],
        "cache": str(cache_folder()),
        "superseded": [{"folder": str(folder), "bytes": size} for folder, size in superseded().items()],
    }


def drafters_of(model: str) -> list[dict[str, Any]]:
    """Drafters for a model as JSON values: available drafters, the default first, then drafters that need a checkpoint,
    with the training command."""
    from mmspec.drafters.registry import drafter_specs, drafters_for

    specs, ready = {spec.name: spec for spec in drafter_specs()}, drafters_for(Path(plugins.model_path(model)))
    entries: list[dict[str, Any]] = []
    for place, name in enumerate(ready):
        other = (
            f"one tree of {name.replace('+', ' and ')}" if "+" in name else "the drafter in the model's folder, if any"
        )
        summary = specs[name].summary if name in specs else other
        entries.append({"name": name, "default": place == 0, "ready": True, "summary": summary})
    for spec in specs.values():
        if spec.name not in ready:
            train = f"mmspec train {spec.train} --model {model}" if spec.train else None
            entries.append({"name": spec.name, "ready": False, "train": train, "summary": spec.summary})
    return entries


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [
        {"name": "cpu", "kind": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = {"name": f"cuda:{index}", "kind": properties.name, "memory_bytes": properties.total_memory}
        devices.append({**found, "capability": f"{properties.major}.{properties.minor}"})
    return devices


def _kernels() -> dict[str, str]:
    """Kernel implementation by device, with errors of builds in this process, and the CPU implementation of packed
    weights."""
    import torch

    from mmspec.ops import cpu_library, kernels

    packed = "C++" if cpu_library.available() else f"torch ({cpu_library.problem() or 'MMSPEC_KERNELS'})"
    in_use = {device["name"]: kernels.in_use(torch.device(device["name"])) for device in _devices()}
    unbuilt = ", ".join(f"{name} ({reason})" for name, reason in kernels.failed().items())
    if unbuilt:
        in_use |= {device: f"triton; reference for {unbuilt}" for device, name in in_use.items() if name == "triton"}
    return {**in_use, "cpu, packed weights": packed}


def _model(name: str, described: bool) -> dict[str, Any]:
    from mmspec.targets.gguf_file import file_in

    facts: dict[str, Any] = {"name": name}
    try:
        found = plugins.find("models", name) if name in plugins.names("models") else None
        folder = Path(plugins.model_path(name))
        files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
        if not any(file == folder or file.name == "config.json" for file in files) and file_in(folder) is None:
            return {"name": name, "problem": f"expected a model in {folder}, found none"}
        facts |= {"folder": str(folder), "bytes": sum(file.stat().st_size for file in files)}
        facts["default"] = name == plugins.default_model()
        if lacking := [package for package in getattr(found, "packages", ()) if not find_spec(package)]:
            facts["problem"] = f"not ready: run make real, which installs {', '.join(lacking)}"
        facts["generation_config"] = _generation_config(folder)
        facts |= _description(folder) if described else {}
    except Exception as error:  # plug-ins may raise anything; still list the other models
        facts["problem"] = first_line(error)
    return facts


def _description(path: Path) -> dict[str, Any]:
    """Facts from a model's configuration, tokenizer and weights; weight formats are shares of the parameters."""
    from math import prod

    from safetensors import safe_open

    from mmspec.drafters.mtp import has_mtp
    from mmspec.loading import load_config, load_processor
    from mmspec.targets.gguf_file import GGUFFile, file_in
    from mmspec.targets.gguf_models import read_config, set_aside

    config, template = load_config(str(path)), load_processor(str(path)).chat_template_text()
    text, counts, sampling = config.get_text_config(), Counter[str](), {}
    unused, keys = list[str](), dict[str, str]()
    mtp = False
    if (found := file_in(path)) is not None:
        file = GGUFFile(found)
        for tensor in file.tensors.values():
            counts[tensor.format] += prod(tensor.shape)
        named = file.metadata.items()
        sampling = {key.removeprefix(_SAMPLING): value for key, value in named if key.startswith(_SAMPLING)}
        keys, mtp = read_config(file)[1].report(), has_mtp(found)
        unused = [] if mtp else set_aside(file)
    for part in [] if found else path.glob("*.safetensors"):
        with safe_open(part, "pt") as weights:
            for weight in map(weights.get_slice, weights.keys()):
                counts[weight.get_dtype()] += prod(weight.get_shape())
    return {
        "architecture": (config.architectures or [config.model_type])[0],
        "context_length": getattr(text, "max_position_embeddings", None),
        "vocabulary": text.vocab_size,
        "weights": {kind: round(count / counts.total(), 4) for kind, count in counts.most_common()},
        "chat_template": next((kind for mark, kind in _TEMPLATES.items() if mark in template), template and "its own"),
        "sampling": sampling,
        "keys": keys,
        "mtp": mtp,
        "set_aside": unused,
    }


def _generation_config(folder: Path) -> dict[str, Any]:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return {}
    entries = GenerationConfig.from_pretrained(folder).to_diff_dict()
    return {name: value for name, value in entries.items() if value is not None and name not in _NOT_SAMPLING}


def _sections(facts: dict[str, Any]) -> list[tuple[str, list[str]]]:
    def device(d: dict[str, Any]) -> str:
        details = [d["kind"]]
        if "threads" in d:
            details.append(f"threads: {d['threads']}" + (", fewer beside other programs" if d["threads"] > 1 else ""))
        if "memory_bytes" in d:
            details += [f"sm_{d['capability'].replace('.', '')}", f"{d['memory_bytes'] / 2**30:.0f} GiB"]
        return f"{d['name']}: {', '.join(details)}"

    def model(m: dict[str, Any]) -> str:
        if "generation_config" not in m:
            return f"{m['name']}: {m['problem']}"
        defaults = ", ".join(f"{name} {value}" for name, value in m["generation_config"].items())
        size = f"{m['name']}{' (default)' * m['default']}: {m['bytes'] / 1e6:.1f} MB in {m['folder']}"
        notes = [f"defaults of requests: {defaults}"] if defaults else []
        return "; ".join([size, *notes, *([m["problem"]] if "problem" in m else [])])

    def description(m: dict[str, Any]) -> list[str]:
        weights = ", ".join(f"{100 * share:.1f} % {kind}" for kind, share in m["weights"].items())
        sampling = ", ".join(f"{name} {value}" for name, value in m["sampling"].items())
        set_aside = ", ".join(m["set_aside"])
        return [
            f"architecture: {m['architecture']}",
            f"context: {m['context_length'] or 'any number of'} tokens",
            f"vocabulary: {m['vocabulary']} tokens",
            f"weights: {weights or 'in another format than safetensors or GGUF'}",
            f"chat template: {m['chat_template'] or 'none'}",
            *([f"keys: {', '.join(f'{key}: {use}' for key, use in m['keys'].items())}"] if m["keys"] else []),
            *([f"sampling in the file, which is not applied: {sampling}"] if sampling else []),
            *(["drafter: mtp, in the file (--drafter mtp, or recycle+ngram+mtp)"] if m["mtp"] else []),
            *([f"tensors set aside, of blocks after the model's: {set_aside}"] if set_aside else []),
        ]

    def drafter(d: dict[str, Any]) -> str:
        name = f"{d['name']} (default)" if d.get("default") else d["name"]
        return ": ".join(filter(None, (name, d["summary"])))

    def needed(d: dict[str, Any]) -> str:
        return f"{drafter(d)}; {d['train']}" if d["train"] else drafter(d)

    if facts.keys() == {"drafters"}:
        ready = [d for d in facts["drafters"] if d["ready"]]
        return [
            ("at hand", [drafter(d) for d in ready]),
            ("with a checkpoint", [needed(d) for d in facts["drafters"] if d not in ready]),
        ]
    superseded = [f"{one['folder']}: {one['bytes'] / 1e6:,.0f} MB" for one in facts["superseded"]]
    freed = f"{sum(one['bytes'] for one in facts['superseded']) / 1e6:,.0f} MB that earlier versions left in the cache"
    return [
        ("mmspec", [facts["mmspec"]]),
        ("python", [f"{facts['python']} on {facts['platform']}"]),
        ("packages", [f"{name} {found or 'not installed'}" for name, found in facts["packages"].items()]),
        ("devices", [device(d) for d in facts["devices"]]),
        ("attention", [facts["attention"]]),
        ("kernels", [f"{device}: {name}" for device, name in facts["kernels"].items()]),
        ("models", [model(m) for m in facts["models"]]),
        *[("contents", description(m)) for m in facts["models"] if "architecture" in m],
        ("targets", [f"{t['name']}: {t['class']}" for t in facts["targets"]]),
        ("drafters", [drafter(d) for d in facts["drafters"]]),
        ("cache", [facts["cache"]]),
        *([("superseded", [f"mmspec clean removes {freed}", *superseded])] if superseded else []),
    ]


@click.command(cls=Command)
@json_option
def clean(as_json: bool) -> None:
    """Remove unused files of earlier versions from the cache.

    Earlier versions converted GGUF files to folders of several times their size. `mmspec info` lists these folders.
    """
    from mmspec.files import superseded

    found: list[dict[str, Any]] = [{"folder": str(folder), "bytes": size} for folder, size in superseded().items()]
    for one in found:
        shutil.rmtree(one["folder"], ignore_errors=True)
    left = superseded().keys()
    removed = [one for one in found if one["folder"] not in map(str, left)]
    if as_json:
        click.echo(json.dumps({"removed": removed}))
        return
    for one in removed:
        click.echo(f"removed {one['folder']}: {one['bytes'] / 1e6:,.0f} MB")
    click.echo(f"freed {sum(one['bytes'] for one in removed) / 1e6:,.0f} MB")
    for folder in left:
        click.echo(f"could not remove {folder}", err=True)
