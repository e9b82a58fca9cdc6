"""Names of topics, keys and ids: the one place that encodes and decodes them."""
