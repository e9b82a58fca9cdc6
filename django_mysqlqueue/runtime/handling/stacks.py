"""The stacks of this process's threads and tasks as text, which show where a handler hangs."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

DEPTH = 100
"""Maximum number of frames to show of a thread or task, innermost first."""


MOST_TASKS = 50
"""Maximum number of tasks to show."""


def show(tasks: Iterable[asyncio.Task[Any]] = (), *, first: object = None) -> str:
    """Format the stacks of all threads and of some tasks, the innermost call last.

    ``tasks``: tasks of an event loop in another thread, whose own stack shows only the loop. ``first``: the one of them
    that comes first, or the identifier of the thread that does.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda one: (one[0] != first, names.get(one[0], "")))
    blocks = [
        f"Thread {names.get(ident, ident)}:\n{_formatted(traceback.walk_stack(frame))}" for ident, frame in frames
    ]
    ordered = sorted(tasks, key=lambda task: (task is not first, task.get_name()))
    of_tasks = [
        f"Task {task.get_name()}:\n{_formatted(reversed(list(_awaited(task))))}" for task in ordered[:MOST_TASKS]
    ]
    if len(ordered) > MOST_TASKS:
        of_tasks.append(f"{len(ordered) - MOST_TASKS} more tasks.")
    return "\n".join([*of_tasks[:1], *blocks, *of_tasks[1:]] if first in ordered else [*blocks, *of_tasks])


def of_thread(thread: threading.Thread) -> str:
    """Format the stack of a thread, the innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else f"Thread {thread.name}:\n{_formatted(traceback.walk_stack(frame))}"


def _formatted(innermost_first: Iterable[tuple[FrameType, int]]) -> str:
    summary = traceback.StackSummary.extract(iter(innermost_first), limit=DEPTH)
    summary.reverse()
    return "".join(summary.format()).rstrip("\n")


def _awaited(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the coroutines that a task awaits, outermost first.

    ``Task.get_stack`` ends at the task's own coroutine.
    """
    one: Any = task.get_coro()
    # None if it has just ended. Other awaitables (a future, a step of an async generator) do not tell what they await.
    while (frame := getattr(one, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        one = one.cr_await
