"""What the tests of a module leave behind: threads, processes, replaced functions, global settings, rows of engines."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executor
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("demos", "eval", "mmspec", "ssm", "tests", "vision"))
"""Folders of this tree's code; an environment (``.venv``) may lie beside them."""

GRACE = 60.0
"""Seconds for threads and processes that are ending, on a machine with much to do."""

PATCHED = ("transformers", "torch.nn", "gguf")
"""Packages whose functions are replaced during passes, conversions and training."""

REPLACED = {
    "transformers.generation.utils.GenerationMixin._extract_generation_mode_kwargs": "of mmspec.hook, when imported",
}
"""Functions that stay replaced."""

THREADS = {
    "AnyIO worker thread": "of FastAPI: idle ones end with their event loop",
}
"""Threads that may stay, by the start of their names. Idle workers of executors may, too."""

PROCESSES = {
    "multiprocessing.resource_tracker": "one per process, for its whole life",
    "mmspec.vision.decoding": "of a server's decoder: they end with it, or with this process",
    "mmspec.sampling.trial": "of a server's trial of grammars: likewise",
    "multiprocessing.forkserver": "of multiprocessing, for the whole life of the process that uses it",
}
"""Processes that may stay, by a part of their command lines."""

ENVIRONMENT = {
    "PYTEST_CURRENT_TEST": "of pytest",
    "TRANSFORMERS_VERBOSITY": "of mmspec.cli, for the whole process",
    "HF_HUB_VERBOSITY": "of mmspec.cli",
    "HF_HUB_DISABLE_TELEMETRY": "of gradio",
    "TOKENIZERS_PARALLELISM": "of mmspec.cli",
    "RAY_": "of ray, when it starts",
    "PYTHONBREAKPOINT": "of ray",
    "KMP_": "of OpenMP, when torch is loaded",
    "TORCHINDUCTOR_": "of torch, when its compiler is imported",
    "PATH": "of decord, when it is imported",
}
"""Variables that may change, by the start of their names."""


def settings() -> dict[str, Any]:
    """Global settings of the process, by name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    signals = (signal.SIGINT, signal.SIGTERM)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(tuple(ENVIRONMENT))}
    return {
        "stack size of threads": threading.stack_size(),
        "recursion limit": sys.getrecursionlimit(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads of torch": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "working directory": os.getcwd(),
        "signal handlers": {one.name: signal.getsignal(one) for one in signals},
        "environment": variables,
        "attention functions": _registered(AttentionInterface),
        "mask functions": _registered(AttentionMaskInterface),
    }


def _registered(interface: Any) -> dict[str, Any]:
    """Without those of ``mmspec.targets`` and Gemma-4's assistants, which register them when imported."""
    return {
        name: one
        for name, one in interface._global_mapping.items()
        if name not in ("mmspec_tree", "mmspec_queries", "mmspec_shared")
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What has changed, a line each; of tables, their entries."""
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            yield from (f"{name}: {key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed)
        elif old != new:
            yield f"{name}: was {old!r}, is {new!r}"


def replaced_functions() -> Iterator[str]:
    """Functions of this tree in the modules and classes of ``PATCHED``, but those of ``REPLACED``."""
    return (f"{name} is a function of this tree" for name in _replaced() if name not in REPLACED)


def _replaced() -> Iterator[str]:
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(PATCHED):
            continue
        for name, value in list(vars(module).items()):
            if _ours(value):
                yield f"{module_name}.{name}"
            elif isinstance(value, type) and value.__module__ == module_name:
                for attribute, own in list(vars(value).items()):
                    if _ours(own):
                        yield f"{module_name}.{name}.{attribute}"


def _ours(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(PACKAGES)


def threads() -> set[threading.Thread]:
    """Those that keep the process alive, without those that are excused."""
    frames = sys._current_frames()
    return {
        one
        for one in threading.enumerate()
        if not one.daemon
        and one is not threading.main_thread()
        and not one.name.startswith(tuple(THREADS))
        and not _idle(frames.get(one.ident or 0))
    }


def _idle(frame: FrameType | None) -> bool:
    """Whether a thread waits for the next task of its executor, with which it ends."""
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (executor.__file__, "_worker")


def processes() -> set[psutil.Process]:
    """Children and theirs, without zombies and those that are excused."""
    found = set()
    for one in psutil.Process().children(recursive=True):
        try:
            line = " ".join(one.cmdline())
            if one.status() != psutil.STATUS_ZOMBIE and not any(part in line for part in PROCESSES):
                found.add(one)
        except psutil.Error:  # it has ended
            continue
    return found


def held_rows() -> Iterator[str]:
    """Rows in targets and drafters of engines whose requests have all ended."""
    if "mmspec.engine.engine" not in sys.modules:
        return
    from mmspec.drafters.captured import CapturedDrafter
    from mmspec.engine.engine import Engine
    from mmspec.engine.speculation import Speculation
    from mmspec.targets.transformers_target import TransformersTarget

    engines = [one for one in gc.get_objects() if issubclass(type(one), Engine)]
    parts: dict[int, Any] = {}
    for engine in engines:
        if any(not sequence.done for sequence in engine.core.running) or engine.core.queued:
            continue
        if engine.core.running or engine.core._prefilled:
            yield f"an engine has {len(engine.core.running)} sequences that have ended"
        parts[id(engine.target)] = engine.target
    for speculation in [one for one in gc.get_objects() if issubclass(type(one), Speculation)]:
        parts |= {id(part): part for part in speculation._parts}
    for engine in engines:
        for part in [engine.target, *(engine.core.key.speculation._parts if engine.core.key else ())]:
            if engine.core.running:
                parts.pop(id(part), None)
    for part in parts.values():
        rows = part.runner.rows if isinstance(part, TransformersTarget) else getattr(part, "rows", 0)
        if isinstance(part, TransformersTarget | CapturedDrafter) and rows:
            yield f"{type(part).__name__} has {rows} rows after all requests have ended"


class Leftovers:
    """Compares the process with what it was when this was made."""

    def __init__(self) -> None:
        self._settings, self._threads, self._processes = settings(), threads(), processes()

    def found(self) -> list[str]:
        """What is left, a line each; waits for what is ending."""
        left = [*differences(self._settings, settings()), *replaced_functions(), *held_rows()]
        left += [f"the thread {one.name} runs" for one in _still(lambda: threads() - self._threads)]
        for one in _still(lambda: processes() - self._processes):
            left.append(f"process {one.pid} runs: {' '.join(one.cmdline())[:200]}")
        return left


def _still(running: Callable[[], set[Any]]) -> set[Any]:
    if running():
        gc.collect()  # servers, pools and decoders that nobody refers to end what they have started
    end = time.monotonic() + GRACE
    while (found := running()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
