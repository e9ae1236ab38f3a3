"""The rules of transactional messages: records and the time in, decisions out.

Nothing here does I/O. Modules of this package import neither asyncio nor Kafka, neither clock,
random, logging nor os (a test asserts it), so that every rule can be tested, replayed and
simulated alone.
"""
