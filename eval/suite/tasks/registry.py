"""Tasks by name."""

from __future__ import annotations

from eval.suite.tasks import captions, choices, drawn, open_ended, short_answers, texts, yes_no
from eval.suite.tasks.task import Task
from mmspec.errors import UserError

_MODULES = (drawn, captions, short_answers, choices, yes_no, open_ended, texts)

TASKS: dict[str, Task] = {task.name: task for module in _MODULES for task in module.TASKS}

GROUPS: dict[str, tuple[str, ...]] = {"embedded": tuple(task.name for task in drawn.TASKS)}
"""Names that stand for several tasks; a model that reads text only takes those of them that it can."""


def pick(names: str, visual: bool) -> list[Task]:
    """Tasks and groups, separated by commas.

    Args:
        visual: whether the model sees.

    Raises:
        UserError: an unknown name, none at all, or something to see for a model that does not.
    """
    picked: dict[str, Task] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in GROUPS:
            group = [TASKS[member] for member in GROUPS[name]]
            picked |= {task.name: task for task in group if task.visual == visual}
        elif name in TASKS:
            picked[name] = TASKS[name]
        else:
            raise UserError(f"unknown task: expected some of {', '.join([*GROUPS, *TASKS])}, got {name!r}")
    if not picked:
        raise UserError(f"expected at least one task, received {names!r}")
    if blind := [task.name for task in picked.values() if task.visual and not visual]:
        raise UserError(
            f"{blind[0]} has images or videos: expected a model that sees, received one that reads text only"
        )
    return list(picked.values())
