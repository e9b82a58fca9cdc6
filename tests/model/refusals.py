"""The rules about messages that the log refuses, because of a trigger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from django_mysqlqueue import operations, publish
from django_mysqlqueue.models import QuarantinedMessage
from tests.support import refusing

if TYPE_CHECKING:
    from tests.model.queue_model import Model


class Refusals(RuleBasedStateMachine):
    """Publishers, and an operator. The model only counts these messages: no group may get one."""

    model: Model

    def begin(self) -> None:
        raise NotImplementedError

    @rule(
        what=st.sampled_from(["publish", "publish", "requeue", "delete"]),
        topic=st.sampled_from(["a", "b"]),
        key=st.sampled_from(["x", "y"]),
        delay=st.sampled_from([0, 0, 5]),
        priority=st.sampled_from([0, 0, 10]),
    )
    def let_the_log_refuse(self, what: str, topic: str, key: str, delay: int, priority: int) -> None:
        """One rule, so that it is not drawn more often than the others."""
        self.begin()
        if what == "publish":
            publish(topic, refusing.PAYLOAD, key=key, delay=delay or None, priority=priority)
            self.model.refused += 1
        elif rows := list(QuarantinedMessage.objects.values_list("pk", flat=True)[:2]):
            if what == "requeue":
                done = operations.requeue_quarantined(rows, actor="operator")
            else:
                done = operations.delete_quarantined(rows, actor="operator")
                self.model.refused -= len(rows)
            assert done.changed == len(rows)
