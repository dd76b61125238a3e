"""Triton's interpreter, mended where it does not do what compiled kernels do."""

from __future__ import annotations

import os
from typing import Any


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
