"""Tasks of ``mmspec eval`` by name, and groups of them.

A benchmark's data is read from ``--data FOLDER`` (layout: ``rows.py``) or from the hub through ``datasets``. The
``scenes-...`` tasks and ``texts`` are in the package and need neither.

A new task is an ``EvalTask`` in one of this folder's modules, listed in ``_MODULES`` if the module is new.
"""

from __future__ import annotations

from mmspec.errors import UserError
from mmspec.eval.suite.tasks import benchmarks, embedded
from mmspec.eval.suite.tasks.task import EvalTask

_MODULES = (embedded, benchmarks)

TASKS: dict[str, EvalTask] = {task.name: task for module in _MODULES for task in module.TASKS}

GROUPS: dict[str, tuple[str, ...]] = {"embedded": tuple(task.name for task in embedded.TASKS)}
"""Groups of tasks by name; a text model gets the text tasks of a group, a vision-language model the visual ones."""


def select_tasks(names: str, visual: bool) -> list[EvalTask]:
    """The tasks of a ``--tasks`` option: names and groups, separated by commas.

    Args:
        visual: whether the model takes images.

    Raises:
        UserError: an unknown name, none at all, or a visual task for a text model.
    """
    selected: dict[str, EvalTask] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in GROUPS:
            group = [TASKS[member] for member in GROUPS[name]]
            selected |= {task.name: task for task in group if task.visual == visual}
        elif name in TASKS:
            selected[name] = TASKS[name]
        else:
            raise UserError(f"unknown task: expected some of {', '.join([*GROUPS, *TASKS])}, got {name!r}")
    if not selected:
        raise UserError(f"expected at least one task, received {names!r}")
    if visual_tasks := [task.name for task in selected.values() if task.visual and not visual]:
        raise UserError(
            f"{visual_tasks[0]} has images or videos: expected a vision-language model, received a text model"
        )
    return list(selected.values())
