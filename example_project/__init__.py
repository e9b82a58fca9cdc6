"""An example application that uses django-mysqlqueue: statistics and reviews of commits."""
