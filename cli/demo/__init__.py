"""`txbroker demo`: a small order service on SQLite, killed at the worst moments.

shop.py      the service: copy from here
worker.py    a process of the service, one order at a time
stage.py     starts Kafka, proxy and workers, and kills workers
scenes.py    the sequence of events
life.py      prints each step of each order
verdict.py   compares the database with Kafka
"""
