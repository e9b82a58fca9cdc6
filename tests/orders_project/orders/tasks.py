from django_mysqlqueue.tasks import JobCancelled

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


def render(order_id, express):
    return f"label {order_id}{', express' if express else ''}"


@task
def print_label(order_id, express):
    return render(order_id, express)


@task(takes_context=True)
def export(context, rows):
    for row in range(rows):
        context.progress(row, rows, f"row {row}")
        if context.cancelled:
            raise JobCancelled
    return f"{rows} rows, attempt {context.attempt}"


@task(takes_context=True)
def total(context):
    return sum(result.return_value for result in context.previous_results())
