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
from types import FunctionType
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

OWN = ("mmspec_tree", "mmspec_queries", "mmspec_shared")
"""Functions that ``mmspec.targets`` and Gemma 4's assistants register when imported."""

THREADS = "AnyIO worker thread"
"""Prefix of thread names that may stay: FastAPI's idle threads end with their event loop."""

PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
PROCESSES += ("mmspec.vision.decoding", "mmspec.sampling.syntax")  # of a server: they end with it, or with this process
"""Parts of the command lines of processes that may stay: those of multiprocessing stay as long as this process."""

# Of mmspec, then of libraries.
ENVIRONMENT = ("PYTEST_CURRENT_TEST", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "TOKENIZERS_PARALLELISM")
ENVIRONMENT += ("HF_HUB_DISABLE_TELEMETRY", "RAY_", "PYTHONBREAKPOINT", "KMP_", "TORCHINDUCTOR_", "PATH")
"""Starts of the names of variables that may change."""


def settings() -> dict[str, Any]:
    """Global settings of the process, by name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    attention, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
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
        "signal handlers": {one.name: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)},
        "environment": {name: one for name, one in os.environ.items() if not name.startswith(ENVIRONMENT)},
        "attention functions": {name: one for name, one in attention.items() if name not in OWN},
        "mask functions": {name: one for name, one in masks.items() if name not in OWN},
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Changed values, a line each; tables are compared by entry."""
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found = {f"{name}: {key}": (old.get(key), new.get(key)) for key in {**old, **new}}
        else:
            found = {f"{name}:": (old, new)}
        yield from (f"{label} was {was!r}, is {now!r}" for label, (was, now) in found.items() if was != now)


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
    """Threads that keep the process alive, without excused threads and idle threads of executors, which end with it."""
    found = set()
    for one in set(threading.enumerate()) - {threading.main_thread()}:
        frame = sys._current_frames().get(one.ident or 0)
        idle = frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (executor.__file__, "_worker")
        if not (one.daemon or one.name.startswith(THREADS) or idle):
            found.add(one)
    return found


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

    parts: dict[int, Any] = {}
    used: set[int] = set()
    for one in _instances(Engine, Speculation):
        if isinstance(one, Speculation):
            parts |= {id(part): part for part in one._parts if isinstance(part, CapturedDrafter)}
            continue
        core, runner = one.core, getattr(one.target, "runner", None)
        ended = not core.queued and all(sequence.done for sequence in core.running)
        if ended and (core.running or core._prefilled):
            yield f"an engine has {len(core.running)} sequences that have ended"
        if core.running:
            used |= {id(part) for part in (one.target, *(core.key.speculation._parts if core.key else ()))}
        elif ended and runner is not None:
            parts[id(one.target)] = one.target
    for part in (part for key, part in parts.items() if key not in used):
        if rows := getattr(part, "runner", part).rows:
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
        running = _still(lambda: processes() - self._processes)
        return left + [f"process {one.pid} runs: {' '.join(one.cmdline())[:200]}" for one in running]


def _still(running: Callable[[], set[Any]]) -> set[Any]:
    if running():
        gc.collect()  # collects unreferenced servers, pools and decoders, which end their threads
    end = time.monotonic() + GRACE
    while (found := running()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
