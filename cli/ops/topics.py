"""`txbroker topics`: plan and create txbroker's own topics."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import confirm, env_option, require_terminal, yes_option
from txbroker.cli.output import Row, TableColumn, object_output_option, show_data, show_rows
from txbroker.cli.setting_options import TOPIC_SETTINGS, setting_options, settings_from
from txbroker.config.settings import Settings
from txbroker.consumer.settings import GROUP_NAME, group_topics
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.client.acls import (
    UNKNOWN_PRINCIPAL,
    AclRole,
    Right,
    consumer_rights,
    kafka_acls_command,
    rights_needed,
)
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.door import KafkaDoor
from txbroker.kafka.door.topics import Plan, plan_for

T = TypeVar("T")

COLUMNS = (
    TableColumn("ACTION"),
    TableColumn("TOPIC", keep=True),
    TableColumn("WHAT", text=True),
    TableColumn("SETTINGS", wide=True),
)
ACL_COLUMNS = (
    TableColumn("FOR"),
    TableColumn("ON", lambda row: row["resource"], rank=1),
    TableColumn("NAME", lambda row: row["name"] + "*" * (row["pattern"] == "prefixed"), keep=True),
    TableColumn("ALLOW", lambda row: ", ".join(row["operations"]), rank=1),
    TableColumn("TO", lambda row: row["principal"]),
    TableColumn("WHY", wide=True, text=True),
)


consumer_option = env_option(
    "--consumer",
    "Instead of txbroker's topics those of this group of consumers. Repeatable.",
    param="consumers",
    multiple=True,
    metavar="GROUP",
)


@click.group("topics", cls=SuggestingGroup)
def command() -> None:
    """Plan and create txbroker's own topics."""


@command.command("plan")
@setting_options((*TOPIC_SETTINGS, "create_target_topics"))
@env_option(
    "--target",
    "A target topic, for the rights on it; `orders.*` for a prefix. Repeatable.",
    param="targets",
    multiple=True,
    metavar="TOPIC",
)
@consumer_option
@env_option(
    "--consumer-topic",
    "A topic that the consumers read, for the rights on it; `orders.*` for a prefix. Repeatable.",
    param="consumer_topics",
    multiple=True,
    metavar="TOPIC",
)
@env_option(
    "--consumer-output",
    "A topic that the consumers write to (`InKafka`), for the rights on it; `prices.*` for a "
    "prefix. Repeatable.",
    param="consumer_outputs",
    multiple=True,
    metavar="TOPIC",
)
@env_option(
    "--principal",
    "The Kafka principal that gets the rights.",
    shown="the user who logs in by password",
    metavar="User:NAME",
)
@env_option(
    "--role",
    "Show the rights of this role only. Repeatable.",
    param="roles",
    shown="all",
    multiple=True,
    type=click.Choice([role.value for role in AclRole]),
)
@click.option("--acl-commands", is_flag=True, help="Show only the Kafka commands that grant them.")
@env_option(
    "--acls/--no-acls",
    "Show the necessary rights, too.",
    shown="where kafka_security_protocol is not PLAINTEXT",
    default=None,
)
@object_output_option
def plan_command(
    config: Path | None,
    output: str,
    acls: bool | None,
    acl_commands: bool,
    roles: tuple[str, ...],
    principal: str | None,
    targets: tuple[str, ...],
    consumers: tuple[str, ...],
    consumer_topics: tuple[str, ...],
    consumer_outputs: tuple[str, ...],
    **options: Any,
) -> None:
    """Show the changes that `apply` would make, and the necessary rights; change nothing.

    A Kafka with ACLs has to grant these rights first. --acl-commands works without a connection.
    """
    settings = settings_from(config, options)
    if AclRole.CONSUMER in roles and not consumers:
        raise click.UsageError("--role consumer: name the group by --consumer")
    for option, given in (
        ("--consumer-topic", consumer_topics),
        ("--consumer-output", consumer_outputs),
    ):
        if given and not consumers:
            raise click.UsageError(f"{option} is for consumers: name their group by --consumer")
    if consumers:
        rights = _rights_of(settings, roles, consumers, consumer_topics, consumer_outputs)
    else:
        rights = _rights(settings, roles, targets)
    grantee = principal or _principal(settings)
    if acl_commands:
        click.echo("\n".join(_commands(rights, grantee, settings)))
    else:
        shown = settings.kafka_security_protocol != "PLAINTEXT" if acls is None else acls
        allowed = [_acl_row(right, grantee) for right in rights] if shown else []
        plan = asyncio.run(with_door(settings, _planner(settings, consumers)))
        _show_plan(_rows(plan), allowed, output)
        _remark(plan)
        if not shown:
            return
    if consumers and not consumer_topics:
        click.echo(
            "Note: for rights on the topics they read, name them by --consumer-topic", err=True
        )
    elif not consumers and not targets:
        click.echo("Note: for rights on target topics, name them by --target", err=True)
    if grantee == UNKNOWN_PRINCIPAL:
        click.echo("Note: name the Kafka principal of this login by --principal", err=True)


@command.command("apply")
@setting_options(TOPIC_SETTINGS)
@consumer_option
@yes_option
@object_output_option
def apply_command(
    config: Path | None, output: str, yes: bool, consumers: tuple[str, ...], **options: Any
) -> None:
    """Create missing topics and correct settings that differ."""
    require_terminal(yes)
    settings = settings_from(config, options)
    plan = asyncio.run(with_door(settings, _planner(settings, consumers)))
    if plan.empty:
        show_rows([], COLUMNS, output, "All topics are as planned.")
    elif yes:
        _apply(settings, plan)
        show_rows(_rows(plan), COLUMNS, output, "")
    else:
        show_rows(_rows(plan), COLUMNS, output, "")
        confirm(f"Make these changes on {settings.kafka}?", yes)
        _apply(settings, plan)
        click.echo("Done.", err=True)
    _remark(plan)


async def with_door(settings: Settings, act: Callable[[KafkaDoor], Awaitable[T]]) -> T:
    """Return the result of `act` with a connection to Kafka."""
    door = KafkaDoor.from_configuration(settings)
    try:
        return await act(door)
    finally:
        await door.close()


def _planner(
    settings: Settings, consumers: Sequence[str]
) -> Callable[[KafkaDoor], Awaitable[Plan]]:
    """Return the function that plans txbroker's topics, or those of groups of consumers."""
    if not consumers:
        return KafkaDoor.plan
    wanted = [topic for group in consumers for topic in _topics_of(settings, group)]
    return lambda door: plan_for(door.admin, wanted)


def _topics_of(settings: Settings, group: str) -> list[TopicSpec]:
    if not GROUP_NAME.fullmatch(group):
        raise click.UsageError(
            f"--consumer {group!r} makes no topic names: use 1 to 200 letters, digits, dots, "
            "dashes and underscores"
        )
    return group_topics(settings.topic_prefix, group, aside=True)


def _apply(settings: Settings, plan: Plan) -> None:
    async def apply(door: KafkaDoor) -> None:
        await door.admin.topics(())  # connects to the brokers
        await door.apply(plan)

    asyncio.run(with_door(settings, apply))


def _show_plan(planned: list[Row], allowed: list[Row], output: str) -> None:
    if output in ("json", "yaml"):
        show_data(planned + allowed, output)
        return
    show_rows(planned, COLUMNS, output, "All topics are as planned.")
    if planned and allowed:
        click.echo()
    if allowed:
        show_rows(allowed, ACL_COLUMNS, output, "")


def _rights(settings: Settings, roles: tuple[str, ...], targets: tuple[str, ...]) -> list[Right]:
    needed = rights_needed(
        KafkaSettings.from_configuration(settings),
        targets,
        create_targets=settings.create_target_topics,
    )
    return [right for right in needed if not roles or right.role in roles]


def _rights_of(
    settings: Settings,
    roles: tuple[str, ...],
    consumers: Sequence[str],
    topics: Sequence[str],
    outputs: Sequence[str],
) -> list[Right]:
    needed = [
        right
        for group in consumers
        for own in [[topic.name for topic in _topics_of(settings, group)]]
        for right in consumer_rights(group, own, topics, outputs)
    ]
    wanted = roles or tuple(AclRole)
    by_role = [right for role in AclRole for right in needed if right.role is role]
    return [right for right in by_role if right.role in wanted]


def _principal(settings: Settings) -> str:
    """Return our Kafka principal, if the settings contain its name."""
    name = settings.kafka_sasl_username
    return f"User:{name}" if name else UNKNOWN_PRINCIPAL


def _acl_row(right: Right, principal: str) -> Row:
    return {
        "action": "allow",
        "for": right.role.value,
        "principal": principal,
        "resource": right.resource.value,
        "name": right.name,
        "pattern": "prefixed" if right.prefixed else "literal",
        "operations": list(right.operations),
        "why": right.why,
    }


def _commands(rights: list[Right], principal: str, settings: Settings) -> Iterator[str]:
    previous_role = None
    for right in rights:
        if right.role != previous_role:
            yield f"# {right.role.value}"
        previous_role = right.role
        yield kafka_acls_command(right, principal, settings.kafka)


def _rows(plan: Plan) -> list[Row]:
    created: list[Row] = [
        {
            "action": "create",
            "topic": topic.name,
            "what": f"{topic.partitions} partitions, {_copies(topic.replication)} copies",
            "settings": " ".join(f"{name}={value}" for name, value in topic.configs.items()),
        }
        for topic in plan.create
    ]
    changed: list[Row] = [
        {
            "action": "change",
            "topic": change.topic,
            "what": f"{change.name}: {change.found} to {change.wanted}",
        }
        for change in plan.change
    ]
    return created + changed


def _copies(replication: int) -> str:
    return "default" if replication < 0 else str(replication)


def _remark(plan: Plan) -> None:
    for remark in plan.remarks:
        click.echo(f"Note: {remark}", err=True)
