from django.db import transaction

from django_mysqlqueue.tasks import JobCancelled, call, enqueue_chain, job
from tests.user_project.shop.models import Mail

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task(queue_name="mail")
def send(text):
    Mail.objects.create(text=text)
    return len(text)


@task
@job(max_attempts=3, backoff={"initial": 3600})
def charge(order, *, currency="eur"):
    if order < 0:
        raise ValueError("no such order")
    transaction.on_commit(lambda: send.enqueue(f"charged {order} {currency}"))
    return f"{order} {currency}"


@task(takes_context=True)
@job(unique="until_started")
def export(context, rows):
    for row in range(rows):
        context.progress(row, rows, f"row {row}")
        if context.cancelled:
            raise JobCancelled
    return context.attempt


@task(takes_context=True)
def total(context):
    return sum(result.return_value for result in context.previous_results())


@task
def count(text):
    return len(text)


def count_all(*texts):
    return enqueue_chain([call(count, text) for text in texts], call(total))
