"""`txbroker demo`: a small order service on SQLite, killed at the worst moments.

shop.py          the service: copy from here
worker.py        a process of the service, one order at a time
stage.py         starts Kafka, proxy and workers, kills workers, and prints each step of each order
command.py       the sequence of events, and the comparison of the database with Kafka
comparison.py    orders against messages
consume.py       the demo of consumers; stock.py is a process of exactly_once.py
outbox.py        the demo of relays; outbox_shop.py and outbox_relay.py are its processes
"""
