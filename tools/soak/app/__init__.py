"""The application with the handlers of the soak test."""
