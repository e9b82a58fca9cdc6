"""Django signals about deliveries. The sender is always None.

Nothing is sent if there are no receivers. If a receiver raises an exception, it is logged (``signal_receiver.failed``)
and does not affect the delivery.
"""

from __future__ import annotations

from django.dispatch import Signal

__all__ = ["delivery_handled", "delivery_settled", "delivery_started"]

delivery_started = Signal()
"""Sent before a handler is called; for a batch, once for each of its deliveries.

It is sent in the handler's thread (for an async handler, in a thread for synchronous code), outside its transaction,
so a slow receiver delays the handler. Context variables that a receiver sets are visible to the handler, and are
reset after the call.

Args:
    delivery: the ``Delivery`` that the handler gets.
    task: the dotted path of the task, if the delivery is of a job; otherwise empty.
    job_id: the id of that job; otherwise empty.
"""

delivery_handled = Signal()
"""Sent when the call of the handler has ended; for a batch, once for each of its deliveries.

The outcome is not in the database yet, unless the handler is atomic. The signal is sent in the handler's thread, in
the same context as ``delivery_started``, after the handler's transaction.

Args:
    delivery: the ``Delivery`` that the handler got.
    task: the dotted path of the task, if the delivery is of a job; otherwise empty.
    job_id: the id of that job; otherwise empty.
    outcome: the outcome that will be written, as in ``delivery_settled``; the delivery may still turn out to be
        ``"lost"``.
    exception: the exception that the handler raised, or that an ``on_commit`` hook of an atomic handler raised (with
        the outcome ``"acked"``), or None.
    seconds: how long the call took; for a batch handler, the whole call.
"""

delivery_settled = Signal()
"""Sent when the outcome of a delivery has been committed, or when it came too late to be stored.

It is sent in a thread of its own, a few milliseconds after the commit, one at a time, in the order of the commits. A
slow receiver delays other receivers, but no message. If 10,000 signals wait to be sent, further ones are dropped, as
are those that were not sent before the process ended (log event ``signal.dropped``). With ``deliver_all`` and
``EAGER`` it is sent in the caller's thread.

Args:
    delivery: the ``Delivery`` that the handler got.
    task: the dotted path of the task, if the delivery is of a job; otherwise empty.
    job_id: the id of that job; otherwise empty.
    outcome: one of

        - ``"acked"``;
        - ``"failed"``: the message will be redelivered after a backoff;
        - ``"snoozed"``: the message will be redelivered after the delay that the handler asked for;
        - ``"dead_lettered"``: the message failed for the last time, or was rejected (after ``reject()``,
          ``delivery.outcome`` is ``"dead_lettered"`` too);
        - ``"released"``: the message will be redelivered, and no attempt is counted;
        - ``"lost"``: the delivery was revoked, claimed again by another subscriber, or already settled, so nothing was
          written. The effects of a handler that is not atomic may happen twice.
    error: the traceback of a failure, or the reason that the handler gave; otherwise empty.
    seconds: how long the handler's call took; for a batch handler, the whole call.
    latency: seconds since the message entered the log, by the database's clock.

If a process is lost during the last attempt at a suspected poison message, the message is dead-lettered without another
call: the outcome is ``"dead_lettered"``, with 0 seconds. The same holds for a message that has expired, if the handler
has ``on_expiry="dead_letter"``; otherwise no signal is sent for it. The first loss of a message is not counted. A
process that is killed sends nothing for the deliveries that it held; one that exits while handlers run sends nothing
for those.
"""
