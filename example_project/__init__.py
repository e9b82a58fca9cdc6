"""A real application that uses django-mysqlqueue: statistics and review of commits."""
