"""Django signals of a delivery's life. The sender is always None.

None is sent where nobody listens, and a receiver that raises is logged
(``signal.receiver_failed``) and changes nothing for the delivery.
"""

from __future__ import annotations

from django.dispatch import Signal

delivery_started = Signal()
"""A handler is about to be called with a delivery; of a batch, one for each of its deliveries.

Sent in the handler's thread, outside its transaction, so a slow receiver delays the handler. What the
receiver sets in a context variable the handler sees, and nothing after it does.

Arguments: ``delivery`` (a ``Delivery``).
"""

delivery_handled = Signal()
"""The call of the handler has ended. What it says is not written yet, unless the handler is atomic.

Sent in the handler's thread, in the same context as ``delivery_started``, after its transaction.

Arguments: ``delivery``; ``outcome``, what is going to be written: ``"ack"``, ``"nack"``, ``"snooze"``, ``"reject"``,
or ``"give_back"`` where the delivery comes again without having failed; ``exception``, what the handler raised, or
None; ``seconds``, how long the call took.
"""

delivery_settled = Signal()
"""The end of a delivery has been committed to the database, or was found to have come too late.

Sent in a thread of its own, some milliseconds after the commit, one at a time in order of the commits: a slow
receiver delays other receivers and no message. Where 10,000 wait, and when the process ends before they are sent,
they are dropped (log event ``signal.dropped``). With ``deliver_all`` and ``EAGER`` it is sent in the caller's thread.

Arguments:

- ``delivery``: the object that the handler got.
- ``outcome``: ``"acked"``; ``"failed"``: it comes again after a backoff; ``"snoozed"``: it comes again, as the handler
  asked for; ``"dead_lettered"``: it failed for the last time, or was rejected (then ``delivery.outcome`` is
  ``"reject"``); ``"given_back"``: it comes again, and no attempt is counted; ``"lost"``: it had been handed out again
  or settled, so nothing was written, and the effects of a handler that is not atomic may have happened twice.
- ``error``: the traceback of a failure, or the reason that the handler gave; else empty.
- ``seconds``: how long the handler's call took; of a batch handler, the whole call.
- ``latency``: seconds since the message took its place in the log, by the database's clock.

A message whose holders vanished ``max_attempts`` times becomes a dead letter without another call: it is
``"dead_lettered"`` in 0 seconds. A process that is killed sends nothing of what it held.
"""
