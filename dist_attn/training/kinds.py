"""The registry of tasks: the training of each kind of model.

A task is built in, or comes from an installed package: an entry point of the group `dist_attn.tasks`, named after the
kind of model, whose module calls `register_task` when it is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dist_attn.model_config.registry import Build, Registry


@dataclass(frozen=True)
class TaskKind:
    """The training of a kind of model.

    `build` makes the `Task` of a configuration, a share of its batches and a `Progress`. `data` are the kinds of data
    that it reads; labelled_text stands for all kinds that are read as such. `objective` are the options of [objective]
    that have a meaning for it beside dropout. `check` raises ValueError for a configuration that does not fit.
    """

    build: Build
    data: tuple[str, ...]
    objective: tuple[str, ...] = ()
    check: Callable[[Any], None] | None = None


TASKS: Registry[TaskKind] = Registry("dist_attn.tasks", "task")


def register_task(model: str, task: TaskKind) -> None:
    """Make the training of a kind of model known.

    Raises: ConfigError for a kind of model that has a task already.
    """
    TASKS.register([model], task, str(task.build))
