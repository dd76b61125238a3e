"""Grids of cases for kernels, which Triton's interpreter runs on a CPU in a process of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def mend_interpreter() -> None:
    """Scalars bound loops, which int() of an array of one no longer does in numpy; products take bfloat16 for what it
    is, and not for the integers that it is kept in. Nothing, if kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: object, *scope: Any) -> None:  # Triton 3.5 has no scope, which undoes patches after a launch
        patch_tensor(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        floats = (handle.data.astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(floats, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot


def run_grid(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run all checks, name what fails, and end the process."""
    failed = 0
    mend_interpreter()
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # whatever it is, the other cases say more
            failed += 1
            print(f"{name}:\n{type(error).__name__}: {error}\n")
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that operations allocate is NaN, or -7, until it is written."""

    def fill(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: Any, **options: Any) -> Tensor:
            made = allocate(*args, **options)
            return made.fill_(torch.nan if made.is_floating_point() else -7)

        return filled

    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
            patches.enter_context(patch.object(owner, name, fill(getattr(owner, name))))
        yield
