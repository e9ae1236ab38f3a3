"""Results of audits are metrics of every proxy, on a real Kafka and in memory."""

from __future__ import annotations

from tests.kit.service import Service
from tests.kit.until import until
from txbroker.contract.audit import AuditNews, encode_news


async def test_proxy_shows_newest_audit_despite_broken_record(
    service: Service,
) -> None:
    assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 0
    for value in (b"\xff", _news(1000, lost=0, late=3)):
        await service.world.write_audit("batch", value)
    await until(lambda: _shows(service, "late", 3))
    await service.world.write_audit("batch", _news(2000, lost=2, late=0))
    await until(lambda: _shows(service, "lost", 2))
    assert await service.metric("audit_drift", kind="late") == 0
    assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 2
    await service.world.write_audit("batch", None)
    await until(lambda: _shows(service, "lost", 0))


async def _shows(service: Service, kind: str, number: int) -> bool:
    return await service.metric("audit_drift", kind=kind) == number


def _news(ended_ms: int, **drift: int) -> bytes:
    return encode_news(
        AuditNews(
            run="r",
            mode="full",
            started_ms=0,
            ended_ms=ended_ms,
            transactions=5,
            states={},
            drift=drift,
        )
    )
