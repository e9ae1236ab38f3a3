"""Help and wrong usage: always an exit code and a sentence, never a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.cli.cli_stub import Stub
from tests.kit.cli import TXBROKER, Call
from txbroker import __version__
from txbroker.cli.main import COMMANDS, cli
from txbroker.cli.reference import commands, page
from txbroker.cli.run import run
from txbroker.config.settings import SECRET_SETTINGS, Settings

PATHS = [context.command_path for _, context in commands()]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("path", PATHS)
def test_every_command_explains_itself(call: Call, path: str) -> None:
    help_text = call(*path.split()[1:], "--help")
    assert (help_text.code, help_text.err) == (0, "")
    assert help_text.out.startswith(f"Usage: {path} ")
    assert call(*path.split()[1:], "-h") == help_text
    assert len(help_text.out.splitlines()) <= 60
    assert not re.search(r"^  [A-Z]+$", help_text.out, re.M)  # no argument among the options
    shown_in_full = call(*path.split()[1:], "--help-all").out
    if "--help-all" in help_text.out:
        assert len(shown_in_full.splitlines()) > len(help_text.out.splitlines())
    else:
        assert shown_in_full == ""


def test_help_lists_command_summaries(call: Call) -> None:
    assert [command.name for command in COMMANDS] == cli.list_commands(click.Context(cli))
    listed = call("--help").out
    assert all(f"{command.name} " in listed and command.summary in listed for command in COMMANDS)


def test_version(call: Call) -> None:
    assert call("--version").out == f"txbroker, version {__version__}\n"


def test_the_reference_is_current() -> None:
    assert (DOCS / "reference" / "cli.md").read_text() == page()


def test_every_setting_is_an_option_of_the_proxy(call: Call) -> None:
    listed = call("proxy", "--help-all").out
    missing = [
        name for name in Settings.model_fields if f"--{name.replace('_', '-')} " not in listed
    ]
    assert set(missing) == SECRET_SETTINGS


def test_help_names_each_environment_variable() -> None:
    """An option has one if and only if its help names it, and a setting has its own."""
    for command, context in commands():
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            named = re.findall(r"\[env: (\w+)", option.help or "")
            setting = "TXBROKER_" + str(option.name).upper()
            known = option.envvar or (setting if option.name in Settings.model_fields else None)
            variables = [known] if known and (option.envvar or named) else []
            assert named == variables, (context.command_path, option.opts)


def test_list_has_an_alias(call: Call, tmp_path: Path) -> None:
    for path in PATHS:
        if path.endswith(" list"):
            words = path.split()[1:-1]
            assert call(*words, "ls", "--help").out.startswith(f"Usage: txbroker {' '.join(words)}")


def test_help_imports_nothing_of_a_proxy() -> None:
    code = (
        "import sys; from txbroker.cli.main import cli; from txbroker.cli.run import run;"
        "run(cli, ['--help']); run(cli, ['tx', 'list', '--help']);"
        "print([m for m in ('aiokafka', 'aiohttp', 'pydantic', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demmo"], "There is no command 'demmo'. Did you mean 'demo'?"),
        (["xyzzy"], f"There are {', '.join(command.name for command in COMMANDS)}."),
        (["tx", "lst"], "There is no command 'lst'. Did you mean 'list'?"),
        (["tx", "rolback", "x"], "Did you mean 'rollback'?"),
        ([], "Usage: txbroker"),
        (["tx"], "Usage: txbroker tx"),
        (["tx", "show"], "Missing argument 'ID...'"),
        (["tx", "list", "--state", "lost"], "'lost' is not one of 'pending'"),
        (["tx", "list", "--limit", "0"], "0 is not in the range"),
        (["tx", "list", "--older-than-s", "-1"], "-1.0 is not in the range"),
        (["tx", "list", "--stat", "parked"], "Did you mean '--state'?"),
        (["tx", "list", "--grop", "x"], "No such option '--grop'. Did you mean '--group'?"),
        (["tx", "commit", "--reson", "x"], "Did you mean '--reason'?"),
        (["tx", "commit", "--yes", "--tokenfile", "x"], "Did you mean '--token-file'?"),
        (["tx", "list", "--xyzzy"], "No such option '--xyzzy'.\n"),
        (["tx", "list", "-q"], "No such option '-q'"),
        (["--url", "http://x", "tx", "list"], "Options follow their command."),
        (["tx", "--state", "parked", "list"], "Options follow their command."),
        (["commit", "ID"], "There is no command 'commit'. Did you mean 'tx commit'?"),
        (
            ["list"],
            "Did you mean 'tx list' or 'groups list' or 'consumers list' or 'principals list'",
        ),
        (["context", "usse", "x"], "There is no command 'usse'. Did you mean 'use'?"),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (["top", "--evry-s", "3"], "Did you mean '--every-s'?"),
        (["tx", "list", "-o", "xml"], "'xml' is not one of 'table', 'wide', 'json', 'yaml'"),
        (["tx", "list", "--url", "ftp://x"], "is no URL like http://127.0.0.1:8470"),
        (["tx", "list", "--url", "http://x:y"], "is no URL"),
        (["tx", "list", "--token-file", "/dev/zero"], "/dev/zero holds no token"),
        (["tx", "show", "\udcff"], "arguments have to be UTF-8"),
        (["tx", "list", "--group", "\udcff"], "arguments have to be UTF-8"),
        (["send", "t", "\udcff"], "arguments have to be UTF-8; --file sends any bytes"),
        (["send", "t", "v", "--check-after-s", "nan"], "a number has to be finite"),
        (["tx", "list", "--token-file", "/no/such"], "/no/such: No such file or directory"),
        (["tx", "commit", "x"], "stdin is no terminal, so you cannot confirm"),
        (["groups", "remove", "x"], "stdin is no terminal, so you cannot confirm"),
        (["topics", "apply"], "stdin is no terminal, so you cannot confirm"),
        (["send", "t", "v", "--header", "a"], "--header 'a': expected NAME=TEXT"),
        (["send", "t", "--file", "/no/such"], "--file /no/such: No such file or directory"),
        (["send", "t", "--file", "/dev/null", "--lines"], "there is no value to send"),
        (["dev", "--kafka", "x:1"], "No such option '--kafka'"),
        (["dev", "--listen", "nowhere"], "'nowhere' is not an address: expected host:port"),
        (
            ["proxy", "--listen", "0.0.0.0:1"],
            "set token_file, principals_file or tls_client_ca_file",
        ),
        (["proxy", "--partitions", "many"], "partitions (option --partitions)"),
        (["proxy", "--check-interval-s", "1e9"], "longer than half of half_retention_s"),
        (["proxy", "--config", "/no/such"], "the config file /no/such: No such file"),
        (["proxy", "--log-level", "loud"], "'loud' is not one of 'debug'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(call: Call, arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_misspelt_setting_in_config_is_named(call: Call, tmp_path: Path) -> None:
    config = tmp_path / "txbroker.toml"
    config.write_text("partitons = 3\n")
    result = call("topics", "plan", "--config", config)
    assert result.code == 2
    assert "there is no setting 'partitons'; did you mean 'partitions'?" in result.err


@pytest.mark.parametrize("command", ["tx list", "tx show x", "groups list", "send t v"])
def test_missing_proxy_is_reported(call: Call, command: str) -> None:
    result = call(*command.split(), "--url", "http://127.0.0.1:9")
    assert (result.code, result.out) == (1, "")
    assert "nothing listens at http://127.0.0.1:9. Start a proxy" in result.err


def test_missing_kafka_is_reported(call: Call) -> None:
    result = call("topics", "plan", "--kafka", "127.0.0.1:9")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: no connection to Kafka at 127.0.0.1:9")
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["tx list", "groups list"])
def test_server_that_is_no_proxy_is_reported(call: Call, stub: Stub, command: str) -> None:
    stub.answer = lambda asked: (404, [] if "groups" in asked.path else b"<html>")
    result = call(*command.split(), "--url", stub.url)
    assert (result.code, result.out) == (1, "")
    assert "is it a txbroker proxy?" in result.err


def test_unexpected_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--debug", is_flag=True)
    def broken(debug: bool) -> None:
        raise RuntimeError("the flux is off\nby two")

    assert run(broken, []) == 1
    assert re.fullmatch(
        r"Error: the flux is off \(RuntimeError\); `txbroker --debug \.\.\.` .*\n",
        capsys.readouterr().err,
    )
    assert run(broken, ["--debug"]) == 1
    assert "raise RuntimeError" in capsys.readouterr().err


def test_exit_code_is_the_commands() -> None:
    @click.command()
    @click.pass_context
    def drifted(context: click.Context) -> None:
        context.exit(4)

    assert run(drifted, []) == 4


def test_ctrl_c_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run(interrupted, []) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def test_closed_pipe_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [TXBROKER, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
