"""The pipe from a child of the supervisor to its parent: the child's end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass, fields
from typing import NamedTuple

VARIABLE = "MYSQLQUEUE_LIFELINE"
"""Tells a child that it is one. It is taken out of the environment at once: a handler's own processes are none."""

ALIVE = b"a"
"""The child's main thread runs."""
PROGRESS = b"p"
"""It runs, and so does the child's poller."""
REPLACE = b"r"
"""The child leaves on purpose and shall be replaced at once."""


class Incarnation(NamedTuple):
    """One run of a child. Both are part of its subscriber's name, so a replacement can derive it."""

    pid: int
    suffix: str


@dataclass(slots=True)
class Lifeline:
    """What a child knows of its supervisor. Signs never block and never fail: ``is_cut`` tells."""

    pipe: int
    parent: int
    number: int
    """1 for the supervisor's first child, and for those that replace it."""
    reload: bool
    suffix: str
    """A random part of the child's name."""
    predecessor: Incarnation | None = None
    """A child that has died in this place: before its own first sign, this one releases the messages that it held."""
    _broken: bool = False

    @classmethod
    def inherited(cls) -> Lifeline | None:
        """This process's lifeline; None where no supervisor started it, and at the second call."""
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return None
        # A supervisor lives on while the package is upgraded: it may say less than this version knows, or more.
        values = {"suffix": secrets.token_hex(4), **json.loads(text)}
        values = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        if values.get("predecessor") is not None:
            values["predecessor"] = Incarnation(*values["predecessor"])
        self = cls(**values)
        # A process that a handler starts must not hold the pipe open.
        os.set_inheritable(self.pipe, False)  # noqa: FBT003
        os.set_blocking(self.pipe, False)
        return self

    def described(self) -> dict[str, str]:
        """The environment variable for the child that is to have it."""
        return {
            VARIABLE: json.dumps(
                {
                    "pipe": self.pipe,
                    "parent": self.parent,
                    "number": self.number,
                    "reload": self.reload,
                    "suffix": self.suffix,
                    "predecessor": self.predecessor,
                }
            )
        }

    def sign(self, *, progress: bool) -> None:
        """Says that the calling thread, which must be the main one, lives."""
        self._write(PROGRESS if progress else ALIVE)

    def ask_replacement(self) -> None:
        self._write(REPLACE)

    def is_cut(self) -> bool:
        """The supervisor is gone, by whatever way."""
        return self._broken or os.getppid() != self.parent

    def _write(self, sign: bytes) -> None:
        # A full pipe belongs to a supervisor that was stopped (Ctrl-Z) hours ago: it will find signs enough.
        with contextlib.suppress(BlockingIOError):
            try:
                os.write(self.pipe, sign)
            except BrokenPipeError:
                self._broken = True
