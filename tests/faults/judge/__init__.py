"""An independent judge of txbroker: returns the broken invariants of a run.

Input is the history of the clients, the records of the topics and the rows of the business
database, from memory or from a folder. It shares no code with txbroker, nor with the audit's judge:
an error of one must not hide in the other. It reads no Kafka.
"""

from .folder import Case as Case
from .folder import lines_of as lines_of
from .folder import load as load
from .folder import read_lines as read_lines
from .folder import save as save
from .log import Tx as Tx
from .log import id_time_ms as id_time_ms
from .log import read_log as read_log
from .records import Asked as Asked
from .records import Body as Body
from .records import Call as Call
from .records import End as End
from .records import Header as Header
from .records import History as History
from .records import Note as Note
from .records import Rec as Rec
from .records import Seen as Seen
from .records import Topics as Topics
from .verdict import Judge as Judge
from .verdict import Violation as Violation
