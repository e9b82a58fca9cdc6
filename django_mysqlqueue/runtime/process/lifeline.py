"""The pipe from a child process to the supervisor: the child's end."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, fields
from typing import NamedTuple

VARIABLE = "MYSQLQUEUE_LIFELINE"
"""The environment variable that tells a process that it is a child of a supervisor.

It is removed from the environment at once, because processes that a handler starts are not children of the supervisor.
"""

ALIVE = b"a"
"""The child's main thread runs."""
PROGRESS = b"p"
"""The child's main thread and its poller run."""
REPLACE = b"r"
"""The child exits on purpose, and the supervisor shall replace it at once."""


class Incarnation(NamedTuple):
    """One run of a child. Both fields are part of its subscriber's name, so that a replacement can derive the name."""

    pid: int
    suffix: str


@dataclass(slots=True)
class Lifeline:
    """What a child knows about its supervisor.

    Signals to the supervisor never block and never raise; ``is_cut`` tells whether the supervisor is gone.
    """

    pipe: int
    parent: int
    number: int
    """The child's number, from 1. A replacement has the number of the child that it replaces."""
    reload: bool
    suffix: str
    """A random part of the child's name."""
    predecessor: Incarnation | None = None
    """The child that died and that this one replaces. This one releases its messages before sending a signal."""
    died: str = ""
    """How the predecessor died: its exit status or signal."""
    memory: int | None = None
    """File descriptor of the memory for what the child has not started (``Unstarted``)."""
    left: int | None = None
    """File descriptor of the memory of the predecessor."""
    _broken: bool = False

    @classmethod
    def inherited(cls) -> Lifeline | None:
        """Return this process's lifeline, or None if no supervisor started the process, and from the second call on."""
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return None
        # A supervisor survives an upgrade of the package: it may pass fewer fields than this version has, or more.
        given = json.loads(text)
        values = {one.name: given[one.name] for one in fields(cls) if one.name in given}
        if values.get("predecessor") is not None:
            values["predecessor"] = Incarnation(*values["predecessor"])
        self = cls(**values)
        # Processes that a handler starts must not keep the pipe open.
        for descriptor in (self.pipe, self.memory, self.left):
            if descriptor is not None:
                os.set_inheritable(descriptor, False)  # noqa: FBT003
        os.set_blocking(self.pipe, False)
        return self

    def described(self) -> dict[str, str]:
        """Return the environment variable to set for the child."""
        return {
            VARIABLE: json.dumps(
                {
                    "pipe": self.pipe,
                    "parent": self.parent,
                    "number": self.number,
                    "reload": self.reload,
                    "suffix": self.suffix,
                    "predecessor": self.predecessor,
                    "died": self.died,
                    "memory": self.memory,
                    "left": self.left,
                }
            )
        }

    def sign(self, *, progress: bool) -> None:
        """Signal that the calling thread, which must be the main thread, runs."""
        self._write(PROGRESS if progress else ALIVE)

    def ask_replacement(self) -> None:
        """Ask the supervisor to replace this child at once when it ends."""
        self._write(REPLACE)

    def is_cut(self) -> bool:
        """Return whether the supervisor is gone."""
        return self._broken or os.getppid() != self.parent

    def _write(self, sign: bytes) -> None:
        # The pipe is full if the supervisor was stopped (Ctrl-Z) hours ago: it will find enough signals in it.
        with contextlib.suppress(BlockingIOError):
            try:
                os.write(self.pipe, sign)
            except BrokenPipeError:
                self._broken = True
