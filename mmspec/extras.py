"""Optional packages: the extra that installs each, and the error where one is missing."""

from __future__ import annotations

from mmspec.errors import UserError

EXTRAS = {
    "cuda": ("causal_conv1d", "mamba_ssm", "torchao"),
    "decord": ("decord",),
    "demo": ("gradio",),
    "eval": ("datasets", "matplotlib", "pycocoevalcap"),
    "peers": ("openvino_genai",),
    "ray": ("ray",),
    "real": ("gguf",),
    "serve": ("fastapi", "httpcore", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "structured": ("llguidance",),
    "train": ("accelerate", "tensorboard"),
}
"""Modules by the extra that installs them. Not read from metadata, which a checkout that is not installed lacks."""


def install(extra: str) -> str:
    """The command that installs an extra. The package is on no index: it is installed from its source folder."""
    return f"pip install -e '.[{extra}]' in the source folder of mmspec"


def missing(purpose: str, package: str, extra: str | None = None) -> UserError:
    """The error where a package is not installed.

    Args:
        purpose: what needs the package.
        extra: the extra of mmspec that installs it; by default that of ``EXTRAS``.
    """
    extra = extra or next((name for name, modules in EXTRAS.items() if package in modules), None)
    command = install(extra) if extra else f"pip install {package}"
    return UserError(f"{purpose} needs the package {package}, which is not installed: run {command}")


def missing_import(error: ModuleNotFoundError) -> UserError:
    """The error of a command that has imported a package which is not installed.

    Raises:
        ModuleNotFoundError: the module is one of mmspec's own.
    """
    package = (error.name or "mmspec").partition(".")[0]
    if package == "mmspec":
        raise error
    return missing("this command", package)
