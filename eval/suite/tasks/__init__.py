"""What ``mmspec eval`` asks: tasks by name, and groups of them.

A benchmark's own data is read from ``--data FOLDER`` (layout: ``local.py``) or, where the network
allows, through ``datasets``. The ``scenes-...`` tasks and ``texts`` are drawn by the package and need neither.

A new task is a ``Task`` in one of this folder's modules, named in ``_MODULES``.
"""

from eval.suite.tasks.registry import GROUPS, TASKS, pick
from eval.suite.tasks.task import Task

__all__ = ["GROUPS", "TASKS", "Task", "pick"]
