"""`txbroker demo`: a small order service on SQLite, killed at the worst moments.

shop.py      the service: copy from here
worker.py    a process that runs the service, one order at a time
stage.py     starts Kafka, proxy and workers, and kills workers
scenes.py    what happens, in which order
life.py      shows every step of every order as it happens
verdict.py   compares the database with Kafka
"""
