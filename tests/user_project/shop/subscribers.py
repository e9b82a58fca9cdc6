import contextlib

from django.db import DatabaseError, IntegrityError, connection, transaction
from django.utils import timezone, translation

from django_mysqlqueue import Backoff, publish, subscriber
from tests.user_project.shop.models import Invoice, Mail


@subscriber("orders", group="billing", atomic=True, max_attempts=3)
def bill(delivery):
    Invoice.objects.create(order=delivery.payload["order"])
    publish("invoices", delivery.payload, key=delivery.key)


@subscriber("orders", group="mail", mode="shared", max_attempts=3, backoff=Backoff(initial=3600))
def confirm(delivery):
    if delivery.payload.get("bounces"):
        raise ValueError("no such address")
    Mail.objects.create(text=f"Thank you for order {delivery.payload['order']}")
    transaction.on_commit(lambda: Mail.objects.create(text="committed"))


@subscriber("invoices", group="archive", batch=True, atomic=True)
def archive(deliveries):
    Mail.objects.create(text=f"archived {sorted(delivery.payload['order'] for delivery in deliveries)}")


@subscriber("reminders", group="mail", max_attempts=3)
async def remind(delivery):
    await Mail.objects.acreate(text=f"reminder {delivery.payload}")


@subscriber("actions", group="actions", max_attempts=4)
def act(delivery):  # noqa: C901  # one thing for each test
    what = delivery.payload
    if what == "late" and delivery.attempt == 1:
        delivery.nack(delay=3600, reason="later")
    elif what == "snooze" and delivery.published_at > timezone.now() - timezone.timedelta(hours=1):
        if not Mail.objects.filter(text="snoozed").exists():
            Mail.objects.create(text="snoozed")
            delivery.snooze(3600)
    elif what == "reject":
        delivery.reject("not for us")
    elif what == "again":
        publish("actions", "again")
    elif what == "duplicate":
        Invoice.objects.create(order=1)
        Invoice.objects.create(order=1)
    elif what == "ack then raise":
        delivery.ack()
        raise ValueError("the raise wins")
    elif what == "ack inside":
        with transaction.atomic():
            Mail.objects.create(text="inside")
            delivery.ack()
    elif what == "publish and look":
        publish("reminders", 1)
        Mail.objects.create(text=f"so far {Mail.objects.filter(text='reminder 1').count()}")
    elif what == "swallow":
        Mail.objects.create(text="kept")
        with contextlib.suppress(DatabaseError):
            Invoice(order=None).save()
    elif what == "catch":
        with contextlib.suppress(IntegrityError):
            Invoice.objects.create(order=1)
        Mail.objects.create(text="went on")
    elif what == "activate":
        translation.activate("de")
    elif what == "isolation":
        assert connection.in_atomic_block


@subscriber("atomic", group="actions", atomic=True, max_attempts=2)
def act_atomic(delivery):
    Mail.objects.create(text=f"atomic {delivery.attempt}")
    if delivery.payload == "raise":
        raise ValueError("rolled back")
    if delivery.payload == "reject":
        delivery.reject("not for us")
