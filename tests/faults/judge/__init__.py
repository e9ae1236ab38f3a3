"""An independent judge of txbroker: from what clients did, what the topics hold and what the
business database holds, it says which invariants are broken.

It shares no code with txbroker, and reads no Kafka: what it judges lies in memory, or in a folder.
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
