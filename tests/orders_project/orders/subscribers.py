from datetime import timedelta

from django.core.mail import send_mail

from django_mysqlqueue import publish, subscriber
from orders.models import Order


@subscriber("orders", group="mail")
def confirm(delivery):
    order = Order.objects.get(pk=delivery.payload["order"])
    send_mail("Your order", "Thank you.", None, [order.email])
    order.confirmed = True
    order.save()
    publish("reminders", {"order": order.pk}, delay=timedelta(days=7))


@subscriber("orders", group="warehouse", max_attempts=2)
def pack(delivery):
    order = Order.objects.get(pk=delivery.payload["order"])
    if not order.book:
        raise ValueError(f"order {order.pk} has no book")


@subscriber("reminders", group="mail")
def remind(delivery):
    send_mail("Your order", "Did you like it?", None, [Order.objects.get(pk=delivery.payload["order"]).email])


@subscriber("invoices", group="archive")
def archive(delivery):
    pass
