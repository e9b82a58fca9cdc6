"""The soak test: disturb publishers, subscribers and the server under load, then account for every message.

Run ``make soak MINUTES=n [ENGINE=mariadb|mysql]``. ``python -m soak --help`` lists all options.
"""
