"""The application whose handlers the soak runs."""
