"""What all API calls of one proxy share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import structs

from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import Settings
from txbroker.contract.service import History, ListRequest, SearchRequest, Service
from txbroker.principals import Directory, Principal
from txbroker.proxy.admission import Admission, Budgets
from txbroker.proxy.http.guards import ReloadedFile
from txbroker.proxy.observe.metrics import Metrics


@dataclass
class ApiContext:
    """What all API calls of one proxy share.

    Attributes:
        checks: calls check URLs.
        principals: returns the current principals.
        limits: shared by all contexts of a proxy, as are the fields below but `admission`.
        registering: groups being registered, once per call.
        files: credential files, reloaded when they change.
        url: this proxy's own URL; with port 0 set once it listens.
    """

    service: Service
    groups: Groups
    sessions: SessionRegistry
    settings: Settings
    metrics: Metrics
    checks: HttpChecks
    principals: Callable[[], Directory]
    limits: Budgets = field(init=False)
    admission: Admission = field(init=False)
    registering: list[str] = field(init=False, default_factory=list)
    files: list[ReloadedFile[Any]] = field(init=False, default_factory=list)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.limits = Budgets(self.settings)
        self.url = self.settings.advertise_url
        self.serve(self.service)

    def serve(self, service: Service) -> None:
        """Let this service answer the calls."""
        self.service = service
        self.admission = Admission(service, self.settings, self.metrics)

    def unusable_files(self) -> dict[str, bool]:
        """Map each setting of a credential file to whether the file's current content fails."""
        unusable: dict[str, bool] = {}
        for file in self.files:
            unusable[file.name] = unusable.get(file.name, False) or file.unusable
        return unusable


def seen_by(history: History, principal: Principal) -> History:
    """Return a history without the events and actions of other groups than the principal's."""
    if principal.groups.everything:
        return history
    groups = principal.groups
    return structs.replace(
        history,
        events=tuple(e for e in history.events if not e.group or e.group in groups),
        actions=tuple(action for action in history.actions if action.group in groups),
    )


Scoped = TypeVar("Scoped", ListRequest, SearchRequest)


def within_groups(request: Scoped, principal: Principal) -> Scoped:
    """Return a request of a list or a search restricted to the principal's groups."""
    if principal.groups.everything:
        return request
    return structs.replace(
        request, groups_allowed=principal.groups.allow, groups_denied=principal.groups.deny
    )
