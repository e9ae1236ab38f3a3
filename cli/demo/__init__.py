"""`txbroker demo`: a small order service on SQLite, killed at the worst moments. `txbroker demo
consume`: a consumer and a message that always fails.

shop.py      the service: copy from here
worker.py    a process of the service, one order at a time
stage.py     starts Kafka, proxy and workers, kills workers, and prints each step of each order
command.py   the sequence of events, and the comparison of the database with Kafka
consume.py   the demo of consumers
"""
