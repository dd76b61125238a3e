"""Extras of the package: which one installs an optional dependency, and the error where it is missing."""

from __future__ import annotations

import re
from importlib.metadata import requires

from mmspec.errors import UserError

_REQUIREMENT = re.compile(r"([\w.-]+).*extra == [\"'](\w+)[\"']")  # 'gradio>=6; extra == "demo"'


def extra_of(module: str) -> str | None:
    """The first extra that installs a module's package; None for modules that no extra installs."""
    package = module.partition(".")[0].replace("_", "-")
    requirements = (_REQUIREMENT.match(line) for line in requires("mmspec") or ())
    return next((match[2] for match in requirements if match and match[1] == package), None)


def install(extra: str) -> str:
    """The command that installs an extra. The package is on no index: it is installed from its source folder."""
    return f"pip install -e '.[{extra}]' in the source folder of mmspec"


def missing(purpose: str, package: str, extra: str) -> UserError:
    """The error where an optional package is not installed.

    Args:
        purpose: what needs the package.
        extra: the extra of mmspec that installs it.
    """
    return UserError(f"{purpose} needs the package {package}, which is not installed: run {install(extra)}")
