from django.db import transaction

from django_mysqlqueue import publish
from orders.models import Order
from orders.tasks import print_label


def place_order(book, email):
    with transaction.atomic():
        order = Order.objects.create(book=book, email=email)
        publish("orders", {"order": order.pk}, key=email)
    return order


def ship(order_id, express=False):
    print_label.enqueue(order_id, express=express)
