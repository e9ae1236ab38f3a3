"""`txbroker topics plan` on a Kafka with an authorizer: changes and rights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.secure.secret_proxy import words_of
from tests.secure.secure_world import USER, SecureKafka
from txbroker.cli.main import cli
from txbroker.cli.run import run

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
