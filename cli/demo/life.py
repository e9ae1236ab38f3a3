"""Prints the steps of every order as they happen."""

from datetime import datetime

from rich.console import Console
from rich.text import Text

from txbroker.contract.service import TransactionView

_STYLES = {
    "prepared": "cyan",
    "check": "yellow",
    "commit": "green",
    "promoted": "bold green",
    "rollback": "magenta",
    "killed": "bold red",
    "database": "blue",
}
_WHO_WIDTH, _EVENT_WIDTH = 7, 9


class Timeline:
    """Prints each step of each transaction once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._orders: dict[str, str] = {}
        self._shown: dict[str, set[tuple[int, str, str]]] = {}

    @property
    def ids(self) -> list[str]:
        """The transactions so far."""
        return list(self._orders)

    def title(self, text: str) -> None:
        """Begin a scene."""
        self._console.print()
        self._console.print(Text(text, "bold"))

    def begin(self, id: str, order: str) -> None:
        """Register an order's transaction."""
        self._orders[id] = order
        self._shown[id] = set()

    def show(self, who: str, event: str, text: str, at: datetime | None = None) -> None:
        """Print one step."""
        moment = at or datetime.now()
        line = Text()
        line.append(f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}  ", "dim")
        line.append(f"{who:<{_WHO_WIDTH}} ", "bold")
        line.append(f"{event:<{_EVENT_WIDTH}} ", _STYLES.get(event, ""))
        line.append(text)
        self._console.print(line, soft_wrap=True)

    def follow(self, view: TransactionView) -> None:
        """Print the new events of a transaction."""
        shown = self._shown[view.id]
        in_flight = {check.at_ms for check in view.checks if not check.outcome}
        for event in view.timeline:
            is_check = event.event == "check"
            if is_check and event.at_ms in in_flight and view.decision is None:
                continue  # printed together with its answer
            step = (event.at_ms, event.event, "" if is_check else event.text)
            if step not in shown:
                shown.add(step)
                at = datetime.fromtimestamp(event.at_ms / 1000)
                self.show(self._orders[view.id], event.event, event.text, at)
