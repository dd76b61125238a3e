"""``mmspec info``."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from mmspec import __version__, plugins
from mmspec.cli.options import json_option

_PACKAGES = ("torch", "transformers", "av", "decord", "triton", "mamba-ssm", "causal-conv1d")
_NOT_SAMPLING = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample")


@click.command()
@click.argument("model", required=False)
@json_option
def info(model: str | None, as_json: bool) -> None:
    """Show devices, versions, attention in use, models with their sampling defaults, targets and drafters.

    MODEL, a registered name or a folder, shows that model alone instead of all registered ones.
    """
    facts = collect(model)
    if as_json:
        click.echo(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, lines in _sections(facts):
        for number, line in enumerate(lines or ["none"]):
            table.add_row(heading if number == 0 else "", line)
    Console(markup=False, highlight=False).print(table)


def collect(model: str | None = None) -> dict[str, Any]:
    """Returns what ``mmspec info`` shows, as JSON values."""
    from mmspec.drafters.registry import drafter_specs
    from mmspec.files import cache_folder

    models = [entry.name for entry in plugins.registered("models")] if model is None else [model]

    return {
        "mmspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "attention": "torch's, with the tree as a 4D mask (eager where a model has no sdpa)",
        "kernels": _kernels(),
        "models": [_model(name) for name in models],
        "targets": [{"name": entry.name, "class": entry.value} for entry in plugins.registered("targets")],
        "drafters": [{"name": spec.name, "class": spec.location, "summary": spec.summary} for spec in drafter_specs()],
        "calibrations": str(cache_folder()),
    }


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
        devices.append(
            {
                "name": f"cuda:{index}",
                "kind": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _kernels() -> dict[str, str]:
    """Kernel implementation in use, by device, and that of packed weights on the CPU."""
    import torch

    from mmspec.ops import cpu_library, kernels

    packed = "C++" if cpu_library.available() else f"torch ({cpu_library.problem() or 'MMSPEC_KERNELS'})"
    in_use = {device["name"]: kernels.in_use(torch.device(device["name"])) for device in _devices()}
    return {**in_use, "cpu, packed weights": packed}


def _model(name: str) -> dict[str, Any]:
    try:
        folder = Path(plugins.model_path(name))
        if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
            return {"name": name, "problem": f"expected a model in {folder}, found none"}
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        defaults = _generation_config(folder)
    except Exception as error:  # a plug-in may raise anything; others should still be listed
        return {"name": name, "problem": f"{type(error).__name__}: {error}"}
    return {"name": name, "folder": str(folder), "bytes": size, "generation_config": defaults}


def _generation_config(folder: Path) -> dict[str, Any]:
    """Entries of a model's ``generation_config.json`` that requests follow unless they set their own."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return {}
    entries = GenerationConfig.from_pretrained(folder).to_diff_dict()
    return {name: value for name, value in entries.items() if value is not None and name not in _NOT_SAMPLING}


def _sections(facts: dict[str, Any]) -> list[tuple[str, list[str]]]:
    def device(d: dict[str, Any]) -> str:
        details = [d["kind"]]
        if "threads" in d:
            details.append(f"threads: {d['threads']}")
        if "memory_bytes" in d:
            details += [f"sm_{d['capability'].replace('.', '')}", f"{d['memory_bytes'] / 2**30:.0f} GiB"]
        return f"{d['name']}: {', '.join(details)}"

    def model(m: dict[str, Any]) -> str:
        if "problem" in m:
            return f"{m['name']}: {m['problem']}"
        defaults = ", ".join(f"{name} {value}" for name, value in m["generation_config"].items())
        size = f"{m['name']}: {m['bytes'] / 1e6:.1f} MB in {m['folder']}"
        return f"{size}; defaults of requests: {defaults}" if defaults else size

    return [
        ("mmspec", [facts["mmspec"]]),
        ("python", [f"{facts['python']} on {facts['platform']}"]),
        ("packages", [f"{name} {found or 'not installed'}" for name, found in facts["packages"].items()]),
        ("devices", [device(d) for d in facts["devices"]]),
        ("attention", [facts["attention"]]),
        ("kernels", [f"{device}: {name}" for device, name in facts["kernels"].items()]),
        ("models", [model(m) for m in facts["models"]]),
        ("targets", [f"{t['name']}: {t['class']}" for t in facts["targets"]]),
        ("drafters", [f"{d['name']}: {d['summary']}" for d in facts["drafters"]]),
        ("calibrations", [facts["calibrations"]]),
    ]
