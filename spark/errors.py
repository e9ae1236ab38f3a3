"""What keeps an audit from being made."""

from txbroker.errors import TxbrokerError


class AuditError(TxbrokerError):
    """The audit cannot be made."""
