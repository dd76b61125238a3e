"""Threads, processes, replaced functions, global settings and engine rows that the tests of a module leave behind."""

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
"""Folders of this tree's code; an environment (``.venv``) may be in the same folder."""

GRACE = 60.0
"""Seconds for threads and processes that are ending, on a machine with much to do."""

PATCHED = ("transformers", "torch.nn", "gguf")
"""Packages whose functions are replaced during passes, conversions and training."""

REPLACED = "transformers.generation.utils.GenerationMixin._extract_generation_mode_kwargs"
"""The function that stays replaced: ``mmspec.hook`` does so when imported."""

THREADS = "AnyIO worker thread"
"""Prefix of thread names that may stay: FastAPI's idle threads end with their event loop."""

PROCESSES = {
    "multiprocessing.resource_tracker": "one per process, for its whole life",
    "mmspec.vision.decoding": "of a server's decoder: they end with it, or with this process",
    "mmspec.sampling.syntax": "of a server's trial of grammars: likewise",
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
    """Registered functions, except functions registered at import by ``mmspec.targets`` and Gemma-4's assistants."""
    return {
        name: one
        for name, one in interface._global_mapping.items()
        if name not in ("mmspec_tree", "mmspec_queries", "mmspec_shared")
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Changed values, a line each; tables are compared by entry."""
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            yield from (f"{name}: {key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed)
        elif old != new:
            yield f"{name}: was {old!r}, is {new!r}"


def replaced_functions() -> Iterator[str]:
    """Functions of this tree in the modules of ``PATCHED`` and their classes, but ``REPLACED``."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(PATCHED):
            continue
        for name, value in list(vars(module).items()):
            owned = isinstance(value, type) and value.__module__ == module_name
            members = [(f"{name}.{part}", one) for part, one in list(vars(value).items())] if owned else [(name, value)]
            for path, one in members:
                if _ours(one) and f"{module_name}.{path}" != REPLACED:
                    yield f"{module_name}.{path} is a function of this tree"


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
        and not one.name.startswith(THREADS)
        and not _idle(frames.get(one.ident or 0))
    }


def _idle(frame: FrameType | None) -> bool:
    """Whether a thread waits for the next task of its executor, with which it ends."""
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (executor.__file__, "_worker")


def processes() -> set[psutil.Process]:
    """Child processes, recursively, without zombies and processes in ``PROCESSES``."""
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
    from mmspec.engine.policy import Speculation
    from mmspec.targets.transformers_target import TransformersTarget

    found = _instances(Engine, Speculation)
    engines = [one for one in found if issubclass(type(one), Engine)]
    speculations = [one for one in found if issubclass(type(one), Speculation)]
    idle = [one for one in engines if not one.core.queued and all(sequence.done for sequence in one.core.running)]
    for engine in idle:
        if engine.core.running or engine.core._prefilled:
            yield f"an engine has {len(engine.core.running)} sequences that have ended"
    used: set[int] = set()
    for engine in engines:
        if engine.core.running:
            used |= {
                id(part) for part in (engine.target, *(engine.core.key.speculation._parts if engine.core.key else ()))
            }
    parts = [*(one.target for one in idle), *(part for one in speculations for part in one._parts)]
    for part in {id(part): part for part in parts if id(part) not in used}.values():
        rows = part.runner.rows if isinstance(part, TransformersTarget) else getattr(part, "rows", 0)
        if isinstance(part, TransformersTarget | CapturedDrafter) and rows:
            yield f"{type(part).__name__} has {rows} rows after all requests have ended"


def _instances(*kinds: type) -> list[Any]:
    """Instances refer to their class, or one derived from it, which is found faster than all objects."""
    derived = list(kinds)
    for kind in derived:
        derived += kind.__subclasses__()
    return [one for one in gc.get_referrers(*derived) if type(one) in derived]


class Leftovers:
    """Compares the process with its state at construction."""

    def __init__(self) -> None:
        self._settings, self._threads, self._processes = settings(), threads(), processes()

    def found(self) -> list[str]:
        """Leftovers, a line each; waits for threads and processes that are ending."""
        left = [*differences(self._settings, settings()), *replaced_functions(), *held_rows()]
        left += [f"the thread {one.name} runs" for one in _still(lambda: threads() - self._threads)]
        for one in _still(lambda: processes() - self._processes):
            left.append(f"process {one.pid} runs: {' '.join(one.cmdline())[:200]}")
        return left


def _still(running: Callable[[], set[Any]]) -> set[Any]:
    if running():
        gc.collect()  # collects unreferenced servers, pools and decoders, which end their threads
    end = time.monotonic() + GRACE
    while (found := running()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
