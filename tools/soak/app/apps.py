"""Install the traps in every process of the soak test."""

from django.apps import AppConfig


class SoakConfig(AppConfig):
    name = "soak.app"
    label = "soak"

    def ready(self) -> None:
        from soak.app import traps  # needs the models

        traps.watch_statements()
