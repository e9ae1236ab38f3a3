"""The rights that `txbroker topics plan` names are enough, and each is needed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.kit.doctor import FakeProxies
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.secure.secret_proxy import words_of
from tests.secure.secure_world import USER, AllowedWorld, SecureKafka
from txbroker.cli.doctor.findings import DoctorResult
from txbroker.cli.doctor.report import CHECKS, examine
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.core.records import Message
from txbroker.errors import BadTarget, ConfigurationError, NotPending, TooLarge
from txbroker.kafka.client.acls import AclRole, Right, kafka_acls_command, rights_needed
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import READ_UNCOMMITTED, end_offsets
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.audit_access import AuditAccess
from txbroker.kafka.tools.audit_results import KafkaAuditWriter
from txbroker.kafka.tools.examination import KafkaExamination

SMALL_BYTES = 10_000


@pytest.fixture
async def world(secure_kafka: SecureKafka) -> AsyncIterator[AllowedWorld]:
    """A user without rights, and txbroker's topics."""
    made = AllowedWorld(secure_kafka)
    await made.make_topics()
    yield made
    await made.close()


@pytest.fixture
async def desk() -> AsyncIterator[FakeEndpoint]:
    """Check URLs."""
    async with FakeEndpoint().serve() as serving:
        yield serving


def rights(world: AllowedWorld, role: AclRole, *targets: str) -> list[Right]:
    named = rights_needed(world.settings(), targets)
    return [right for right in named if right.role is role]


async def doctor(world: AllowedWorld) -> DoctorResult:
    """Run the check of rights, as this user."""
    async with KafkaExamination(world.settings()) as kafka:
        subject = Subject(world.login, kafka, FakeProxies())
        report = await examine(subject, [one for one in CHECKS if one.name == "kafka-rights"])
        await subject.close()
    return report.outcomes[0]


async def test_proxy_works_with_exactly_the_listed_rights(
    world: AllowedWorld, desk: FakeEndpoint
) -> None:
    target = await world.create_topic("target")
    allowed = rights(world, AclRole.PROXY, target)
    async with serving(world, desk, allowed, snapshot_records_min=1) as service:
        id = await service.prepare(Message(target, b"", b"committed"))
        assert (await service.commit(id))["state"] == "promoted"
        asked = await service.group({"decision": "commit"})
        checked = await service.prepare(Message(target, b"", b"checked"), group=asked)
        await service.reaches(checked, "promoted")
        unsure = await service.group({"decision": "unknown"}, attempts_max=1, timeout_s=0.1)
        parked = await service.prepare(Message(target, b"", b"parked"), group=unsure)
        await service.reaches(parked, "parked")
        await until(lambda: has_snapshot(world))

        # The next owner takes it from the topics.
        await service.stop()
        other = Service(world, desk, "two", partitions=1, snapshot_records_min=1)
        await other.start()
        try:
            assert (await other.commit(parked))["state"] == "promoted"
        finally:
            await other.stop()
    values = [record.value for record in await world.visible(target)]
    assert values == [b"committed", b"checked", b"parked"]


async def has_snapshot(world: AllowedWorld) -> bool:
    """Return whether a snapshot was written."""
    kept = await world.visible(world.name("checkpoint"))
    return any((record.key or b"").startswith(b"snapshot/") for record in kept)


@asynccontextmanager
async def serving(
    world: AllowedWorld, desk: FakeEndpoint, allowed: Iterable[Right], **settings: Any
) -> AsyncIterator[Service]:
    """Grant rights, and run a proxy of this user until the block is left."""
    await world.allow(allowed)
    await until(lambda: healthy(world))
    service = Service(world, desk, partitions=1, **settings)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def healthy(world: AllowedWorld) -> bool:
    """Return whether the doctor sees all rights."""
    return (await doctor(world)).level == "ok"


async def test_doctor_names_each_missing_right(world: AllowedWorld) -> None:
    allowed = rights(world, AclRole.PROXY)
    await world.allow(allowed)
    await until(lambda: healthy(world))
    for right in allowed:
        for operation in right.operations:
            if right.name == world.name("audit"):
                continue  # a proxy does its work without it
            await world.take(right, operation)

            async def named(right: Right = right, operation: str = operation) -> bool:
                lines = (await doctor(world)).details
                return any(right.name in line and operation in line for line in lines)

            await until(named)
            await world.allow([right])
    await until(lambda: healthy(world))


async def test_prepare_refuses_targets_without_rights(
    world: AllowedWorld, desk: FakeEndpoint
) -> None:
    forbidden = await world.create_topic("forbidden")
    small = await world.create_topic("small", max_message_bytes=str(SMALL_BYTES))
    too_large = Message(small, b"", b"x" * 2 * SMALL_BYTES)
    async with serving(world, desk, rights(world, AclRole.PROXY, small)) as service:
        with pytest.raises(BadTarget, match="grant this proxy Describe and Write"):
            await service.send(Message(forbidden, b"", b"x"))
        with pytest.raises(TooLarge):
            await service.send(too_large)

        # Without its settings it is not known before promotion what a topic takes.
        (on_target,) = [
            right for right in rights(world, AclRole.PROXY, small) if right.name == small
        ]
        await world.take(on_target, "DescribeConfigs")

        async def prepared() -> bool:
            try:
                return (await service.send(too_large))[0] == 201
            except TooLarge:
                return False

        await until(prepared)


async def test_revoked_right_refuses_until_granted_again(
    world: AllowedWorld, desk: FakeEndpoint
) -> None:
    target, other = await world.create_topic("target"), await world.create_topic("other")
    allowed = rights(world, AclRole.PROXY, target, other)
    (on_target,) = [right for right in allowed if right.name == target]
    async with serving(world, desk, allowed) as service:
        id = await service.prepare(Message(other, b"k", b"whole"), Message(target, b"k", b"whole"))
        await world.take(on_target, "Write")
        await until(lambda: may_not_write(world, target))
        await service.act(id, "commit")
        cause = (await service.reaches(id, "refused"))["cause"]
        assert (cause["code"], cause["topic"]) == ("not_authorized", target)
        assert "grant it Write" in cause["message"]
        flows = await service.prepare(Message(other, b"k", b"flows"))
        assert (await service.commit(flows))["state"] == "promoted"
        assert await world.visible(target) == []

        await world.allow([on_target])

        async def revived() -> bool:
            # Brokers learn of a right one after another: until then it is refused again. It stays
            # refused until its retry ends, so it may be promoted before this revive.
            if await service.state(id) == "refused":
                with suppress(NotPending):
                    await service.act(id, "revive")
            return await service.state(id) == "promoted"

        await until(revived)
    assert [record.value for record in await world.visible(other)] == [b"flows", b"whole"]
    assert [record.value for record in await world.visible(target)] == [b"whole"]


async def may_not_write(world: AllowedWorld, topic: str) -> bool:
    """Return whether the broker denies this user writes to a topic by now."""
    async with KafkaExamination(world.settings()) as kafka:
        seen = (await kafka.cluster([topic])).topics[topic]
    return seen.rights is not None and "Write" not in seen.rights


async def test_foreign_transactions_do_not_quarantine_target(
    world: AllowedWorld, desk: FakeEndpoint
) -> None:
    target = await world.create_topic("target")
    end = await world.hang(target, 0)
    async with serving(world, desk, rights(world, AclRole.PROXY, target)) as service:
        id = await service.prepare(Message(target, b"", b"ours"))
        await service.act(id, "commit")
        await until(lambda: holds_more(world, target, 1))
        await end()
        await service.reaches(id, "promoted")


async def test_without_read_foreign_transactions_must_end_first(
    world: AllowedWorld, desk: FakeEndpoint
) -> None:
    target = await world.create_topic("target")
    allowed = []
    for right in rights(world, AclRole.PROXY, target):
        left = tuple(one for one in right.operations if one != "Read" or right.name != target)
        allowed.append(structs.replace(right, operations=left))
    end = await world.hang(target, 0)
    async with serving(world, desk, allowed) as service:
        id = await service.prepare(Message(target, b"", b"ours"))
        await service.act(id, "commit")

        async def cause() -> dict[str, Any] | None:
            return (await service.show(id)).get("cause")

        found = await until(cause)
        assert found["code"] == "not_known"
        assert "grant it Read" in found["message"]
        assert not await holds_more(world, target, 1)
        await end()
        await service.reaches(id, "promoted")


async def holds_more(world: AllowedWorld, topic: str, offset: int) -> bool:
    """Return whether a topic has records after an offset, visible or not."""
    client = Client(world.settings())
    try:
        found = await end_offsets(client, [(topic, 0)], READ_UNCOMMITTED, "test")
    finally:
        await client.close()
    return found[topic, 0] > offset


async def test_audit_works_with_its_rights(world: AllowedWorld) -> None:
    target = await world.create_topic("target", cleanup_policy="compact")
    settings = world.settings()
    topics = (settings.half_topic, settings.op_topic, settings.parked_topic, target)
    assert await bounds(settings, topics) == set()
    await world.allow(rights(world, AclRole.AUDIT, target))

    async def denied() -> bool:
        try:
            found = await bounds(settings, topics)
        except ConfigurationError:
            return False
        return found == set(topics)

    await until(denied)
    async with KafkaAuditWriter(settings) as writer:
        await writer.put(settings.audit_topic, "batch", b"{}")


async def bounds(settings: KafkaSettings, topics: tuple[str, ...]) -> set[str]:
    """Ask where topics end; return those that are there."""
    async with AuditAccess(settings) as access:
        found = await access.bounds(topics)
        there = {topic for topic, each in found.items() if not each.unread}
        assert topics[-1] not in there or found[topics[-1]].compacted
        return there


async def test_apply_works_with_its_rights(secure_kafka: SecureKafka) -> None:
    world = AllowedWorld(secure_kafka)
    try:
        await world.allow(rights(world, AclRole.APPLY))

        async def applied() -> bool:
            door = world.closed_door()
            try:
                await door.apply(await door.plan())
                return (await door.plan()).empty
            except ConfigurationError:
                return False

        await until(applied)
    finally:
        await world.close()


def test_kafka_acls_commands_grant_the_rights() -> None:
    needed = rights_needed(KafkaSettings(bootstrap_servers=("b:1",), instance_id=""), ["a", "b.*"])
    lines = [kafka_acls_command(right, "User:CN=it's me", "b:1") for right in needed]
    start = "kafka-acls.sh --bootstrap-server b:1 --add --allow-principal 'User:CN=it'\"'\"'s me'"
    assert all(line.startswith(start) for line in lines)
    on_target = f"{start} --operation Read --operation Write --operation DescribeConfigs"
    assert f"{on_target} --topic a" in lines
    assert f"{on_target} --topic b. --resource-pattern-type prefixed" in lines
    assert f"{start} --operation Read --group txbroker" in lines
    assert len(set(lines)) == len(lines)


# --- the plan of topics and rights ---------------------------------------------------------------

NOWHERE = ("--kafka", "127.0.0.1:9")
LOGIN = ("--kafka-security-protocol", "SASL_PLAINTEXT", "--kafka-sasl-username", "shop")


@pytest.fixture
def password(tmp_path: Path) -> tuple[str, str]:
    """The option that names the password's file."""
    file = tmp_path / "password"
    file.write_text("secret")
    return ("--kafka-sasl-password-file", str(file))


def test_plan_names_topics_and_rights(
    secure_kafka: SecureKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [*words_of(secure_kafka.options("SCRAM-SHA-512")), "--topic-prefix", "planned"]
    assert run(cli, ["topics", "plan", *where, "--target", "orders", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    created = [row for row in rows if row["action"] == "create"]
    allowed = [row for row in rows if row["action"] == "allow"]
    assert [*created, *allowed] == rows
    assert len(created) == 7
    assert {row["principal"] for row in allowed} == {f"User:{USER}"}
    assert {row["for"] for row in allowed} == {"proxy", "apply", "doctor", "audit"}
    half = {"for": "proxy", "resource": "topic", "name": "planned.half", "pattern": "literal"}
    (found,) = [row for row in allowed if half.items() <= row.items()]
    assert found["operations"] == ["Read", "Write", "DescribeConfigs"]

    assert run(cli, ["topics", "plan", *where, "--no-acls", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == created


def test_plan_table_shows_topics_and_rights(
    secure_kafka: SecureKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [*words_of(secure_kafka.options("MUTUAL")), "--topic-prefix", "tabled"]
    assert run(cli, ["topics", "plan", *where, "--role", "proxy"]) == 0
    out, err = capsys.readouterr()
    topics, rights = out.split("\n\n")
    assert topics.splitlines()[0].split() == ["ACTION", "TOPIC", "WHAT"]
    assert rights.splitlines()[0].split() == ["FOR", "ON", "NAME", "ALLOW", "TO"]
    assert "proxy  transactional-id  tabled.half-*" in rights
    assert "name them by --target" in err
    assert "name the Kafka principal of this login by --principal" in err


def test_commands_need_no_kafka(
    password: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*NOWHERE, *LOGIN, *password, "--role", "audit", "--acl-commands")
    assert run(cli, ["topics", "plan", *options, "--target", "pay.*"]) == 0
    out, err = capsys.readouterr()
    first, *commands = out.splitlines()
    assert first == "# audit"
    start = "kafka-acls.sh --bootstrap-server 127.0.0.1:9 --add --allow-principal User:shop "
    assert all(line.startswith(start) for line in commands)
    assert commands[3].endswith("--topic pay. --resource-pattern-type prefixed")
    assert err == ""


def test_creating_targets_needs_create(
    password: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*NOWHERE, *LOGIN, *password, "--role", "proxy", "--acl-commands", "--target", "new")
    wanted = "--operation Create --topic new"
    assert run(cli, ["topics", "plan", *options]) == 0
    assert wanted not in capsys.readouterr().out
    assert run(cli, ["topics", "plan", *options, "--create-target-topics"]) == 0
    assert wanted in capsys.readouterr().out
