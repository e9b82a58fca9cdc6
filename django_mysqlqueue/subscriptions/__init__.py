"""What a project subscribes with: ``@subscriber``, the handlers that it declares, and the deliveries that they get."""
