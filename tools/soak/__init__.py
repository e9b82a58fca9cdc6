"""The soak: publishers and subscribers under load while processes and the server die, and proof that nothing was lost.

``make soak MINUTES=n [ENGINE=mariadb|mysql]``; ``python -m soak --help`` has the rest.
"""
