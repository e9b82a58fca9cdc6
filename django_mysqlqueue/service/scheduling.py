"""Moving what waits for its time: for tests."""

from __future__ import annotations

from django_mysqlqueue.models import DeliveryState, OutboxMessage
from django_mysqlqueue.service.sequencing import take_mutex
from django_mysqlqueue.service.transactions import Retry, Session, run

OUTBOX = OutboxMessage._meta.db_table
STATE = DeliveryState._meta.db_table


def advance(using: str, milliseconds: int) -> None:
    """Brings every scheduled message and every backoff so much nearer, as if the time had passed."""

    def move(session: Session) -> None:
        if not take_mutex(session):
            raise Retry  # it is being sequenced
        # 0 stands for "at once", which is before what has come due.
        earlier = f"{session.dialect.greatest}(1, {{column}} - %s)"
        session.execute(
            f"UPDATE {OUTBOX} SET deliver_at = {earlier.format(column='deliver_at')} WHERE deliver_at > 0",
            (milliseconds,),
        )
        session.execute(
            f"UPDATE {STATE} SET invisible_until = {earlier.format(column='invisible_until')} "
            "WHERE invisible_until > 0 AND delivered_by = '' AND acked = %s",
            (milliseconds, False),
        )

    run(using, move)
