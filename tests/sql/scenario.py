"""A life of the queue in which every function sends its statements."""

from __future__ import annotations

from tests.conftest import empty
from tests.crash.acts import ACTS
from tests.crash.cases import CASES
from tests.support.queue_life import live
from tests.support.roles import as_role


def scenario() -> None:
    """A life of the queue, every case of the crash tests, and what operators do in them."""
    live()
    for case in CASES.values():
        empty()
        world = case.setup()
        with as_role(case.role):
            case.operation(world)
    for act in ACTS.values():
        empty()
        act.setup()
        with as_role("operator" if act.audited else "subscriber"):
            act.run()
