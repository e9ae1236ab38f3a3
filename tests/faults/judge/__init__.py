"""An independent judge of txbroker: returns the broken invariants of a run.

Input is the history of the clients, the records of the topics and the rows of the business
database, from memory or from a folder. It shares no code with txbroker, nor with the audit's judge:
an error of one must not hide in the other. It reads no Kafka.
"""

from .folder import Case, load, save
from .history import Asked, Body, Call, History, Note
from .log import Tx, id_time_ms, read_log
from .records import End, Header, Rec, Seen, Topics
from .verdict import Judge, Violation

__all__ = [
    "Asked",
    "Body",
    "Call",
    "Case",
    "End",
    "Header",
    "History",
    "Judge",
    "Note",
    "Rec",
    "Seen",
    "Topics",
    "Tx",
    "Violation",
    "id_time_ms",
    "load",
    "read_log",
    "save",
]
