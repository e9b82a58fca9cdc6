"""A life of the queue in which every function sends its statements."""

from __future__ import annotations

from tests.conftest import empty
from tests.crash.acts import ACTS
from tests.crash.cases import CASES
from tests.support.queue_life import live


def scenario() -> None:
    """A life of the queue, and every case of the crash tests."""
    live()
    for case in CASES.values():
        empty()
        case.operation(case.setup())
    for act in ACTS.values():
        empty()
        act.setup()
        act.run()
