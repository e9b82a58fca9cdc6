"""An ASGI application with a subscriber beside its server."""

from django.core.asgi import get_asgi_application

from django_mysqlqueue.contrib.asgi import with_subscriber

application = with_subscriber(get_asgi_application(), "--processes=1", "--group=plain")
