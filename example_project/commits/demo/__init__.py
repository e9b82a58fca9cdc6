"""What ``manage.py demo`` is made of; an application of your own needs none of it."""
