"""Values that the chart accepts, and its errors for others."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_pods import Helm, Object
from tests.chart.chart_values import (
    EVERYTHING,
    FETCHED,
    LOGIN,
    NEEDED,
    PRINCIPALS,
    SECURED,
    SETS,
    TOKENS,
)
from tests.kit.command_lines import parsed
from txbroker.config.settings import SECRET_SETTINGS, Settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/txbroker"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
MADE_BY_TEMPLATES = {
    "listen", "advertise", "data_dir", "instance", "allowed_hosts", "token_file", "insecure",
    "principals_file", "peer_secret_file", "peer_names", "peer_listen", "peer_advertise",
    "admin_listen", "admin_token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file",
    "peers_ca_file", "secrets_dir", "workers",
}  # fmt: skip


needs_helm = pytest.mark.needs_tool("helm")


def closed_objects(schema: Object, at: str = "") -> Iterator[tuple[str, Object]]:
    """Yield every object of the schema whose properties are listed."""
    if "properties" in schema:
        yield at, schema
        for name, inner in schema["properties"].items():
            yield from closed_objects(inner, f"{at}.{name}".lstrip("."))


@pytest.mark.parametrize(
    ("script", "file"), [("schema.py", "values.schema.json"), ("readme.py", "README.md")]
)
def test_schema_and_table_of_values_are_those_that_are_made(script: str, file: str) -> None:
    made = subprocess.run(
        [sys.executable, f"charts/{script}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (CHART / file).read_text() == made.stdout, "renew it: make docs"


def leaves(values: Object, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no block, by its path."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{at}{name}.")
        else:
            yield at + name, value


def test_table_of_values_has_every_value_and_its_default() -> None:
    table = (CHART / "README.md").read_text().partition("\n| --- ")[2]
    found = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| ", table, re.M))
    assert {name: yaml.safe_load(text) for name, text in found.items()} == dict(leaves(VALUES))


def test_unlisted_values_are_refused() -> None:
    found = dict(closed_objects(SCHEMA))
    assert len(found) > 20
    assert [at for at, schema in found.items() if schema["additionalProperties"] is not False] == []


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    for at, schema in closed_objects(SCHEMA):
        there = VALUES
        for part in filter(None, at.split(".")):
            there = there.get(part, {})
        if at in ("settings", "resources") or at.endswith(".resources"):
            continue  # free-form: txbroker's defaults, Kubernetes' names
        assert set(there) == set(schema["properties"]) - {"global"}, at


def test_every_value_is_explained() -> None:
    """A comment stands above each value, above its row of neighbours, or above its block."""
    unexplained = []
    above: list[tuple[int, bool]] = []  # the keys that this one is in, and the one before it
    comment = False
    for line in (CHART / "values.yaml").read_text().splitlines():
        if not line:
            above = []
            continue
        if line.lstrip().startswith("#"):
            comment = not line.startswith("# ---")
            above = [(at, known and at < indent_of(line)) for at, known in above]
            continue
        indent = indent_of(line)
        # A neighbour with a block ends the row.
        row = indent + (not above or above[-1][0] <= indent)
        above = [(at, known) for at, known in above if at < row]
        known = comment or any(known for _, known in above)
        if not known and not line.endswith(":"):
            unexplained.append(line)
        above = [(at, reported) for at, reported in above if at < indent] + [(indent, known)]
        comment = False
    assert unexplained == []


def indent_of(line: str) -> int:
    """Return how far a line stands to the right."""
    return len(line) - len(line.lstrip())


def test_every_setting_of_txbroker_can_be_given() -> None:
    listed = set(SCHEMA["properties"]["settings"]["properties"])
    made = {n for n in Settings.model_fields if n.startswith("kafka")} | MADE_BY_TEMPLATES
    assert listed | made == set(Settings.model_fields)
    assert listed & made == set()


def test_every_setting_that_templates_make_is_one() -> None:
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    written = set(re.findall(r"^([a-z_]+) = ", helpers, re.M))
    kafka = {name for name in Settings.model_fields if name.startswith("kafka")} - SECRET_SETTINGS
    by_variable = {"kafka_sasl_username"}
    assert written - {"insecure"} == kafka
    assert by_variable <= kafka


WITHOUT_SECRET = {**LOGIN, "sasl": {**LOGIN["sasl"], "existingSecret": ""}}
BOTH_NAMES = {**LOGIN, "sasl": {**LOGIN["sasl"], "username": "a"}}
NO_NAME = {**LOGIN, "sasl": {**LOGIN["sasl"], "usernameKey": ""}}
REFUSED: dict[str, tuple[Object, str]] = {
    "unknown": ({"replica": 3}, "Additional property replica is not allowed"),
    "unknown below": ({"audit": {"cron": "x"}}, "audit: Additional property cron is not allowed"),
    "unknown setting": (
        {"settings": {"check_afer_s": 6}},
        "settings: Additional property check_afer_s is not allowed",
    ),
    "setting of the chart": (
        {"settings": {"listen": "0.0.0.0:1"}},
        "settings: Additional property listen is not allowed",
    ),
    "kind": ({"replicas": "three"}, "replicas: Invalid type. Expected: integer, given: string"),
    "no proxies": ({"replicas": 0}, "replicas: Must be greater than or equal to 1"),
    "kind of a setting": (
        {"settings": {"partitions": "8"}},
        "settings.partitions: Invalid type. Expected: integer, given: string",
    ),
    "range of a setting": (
        {"settings": {"check_after_s": 0}},
        "settings.check_after_s: Must be greater than 0",
    ),
    "choice": (
        {"kafka": {"securityProtocol": "TLS"}},
        "kafka.securityProtocol must be one of the following",
    ),
    "servers": ({"kafka": {"bootstrapServers": "kafka"}}, "kafka.bootstrapServers: Does not match"),
    "secret's name": ({"token": {"existingSecret": "A B"}}, "token.existingSecret: Does not match"),
    "root": ({"runAsUser": 0}, "runAsUser: Must be greater than or equal to 1"),
    "size": ({"audit": {"scratchSize": "much"}}, "audit.scratchSize: Does not match"),
    "schedule": ({"audit": {"schedule": "daily"}}, "audit.schedule: Does not match"),
    "spark": (
        {"audit": {"sparkConf": {"driver.memory": "2g"}}},
        "audit.sparkConf: Additional property driver.memory is not allowed",
    ),
    "no caller is asked for a certificate": (
        {"token": {"existingSecret": ""}},
        "set token.existingSecret, principals or tls.clients.caSecret, or insecure if the network",
    ),
    "several proxies without a peer identity": (
        {"peerSecret": {"existingSecret": ""}},
        "3 proxies must prove to one another that they are proxies",
    ),
    "several proxies with principals": (
        {**PRINCIPALS, "peerSecret": {"existingSecret": ""}, "peerPort": 0},
        "name it with peerSecret.existingSecret, or set peerNames",
    ),
    "a port for proxies without peer identity": (
        {"replicas": 1, "peerSecret": {"existingSecret": ""}, "peerPort": 8472},
        "peerPort needs peerSecret.existingSecret or peerNames",
    ),
    "one port for producers and proxies": (
        {"peerPort": 8470},
        "peerPort must be another one than port and admin.port",
    ),
    "ports of workers that meet": (
        {"workers": 2, "admin": {"port": 8471}},
        "each of the 2 workers of a Pod has the ports after those of the one before",
    ),
    "ports of workers beyond the last": (
        {"workers": 4, "port": 65534},
        "the 4 workers of a Pod would have the port 65536 (http-3), which does not exist",
    ),
    "several workers without a peer identity": (
        {"replicas": 1, "workers": 2, "peerSecret": {"existingSecret": ""}},
        "2 proxies must prove to one another that they are proxies",
    ),
    "one port for operators and proxies": (
        {"admin": {"port": 8471}, "peerPort": 8471},
        "peerPort must be another one than port and admin.port",
    ),
    "peers' names without certificates": (
        {"peerNames": ["proxy-*"]},
        "peerNames needs tls.clients.caSecret",
    ),
    "a list in a name": ({"peerNames": ["a,b"]}, "peerNames.0: Does not match pattern"),
    "two files of principals": (
        {"principals": {"existingSecret": "a", "existingConfigMap": "b"}},
        "principals.existingSecret and principals.existingConfigMap exclude one another",
    ),
    "a principal's token without principals": (
        {"principals": {"operatorToken": {"existingSecret": "a"}}},
        "principals.operatorToken needs principals.existingSecret or principals.existingConfigMap",
    ),
    "callers' certificates without TLS": (
        {"tls": {"clients": {"caSecret": "ca"}}},
        "tls.clients.caSecret needs tls.existingSecret",
    ),
    "Prometheus without a certificate": (
        {**SECURED, "serviceMonitor": {"enabled": True}},
        "set serviceMonitor.clientSecret",
    ),
    "operators' token without a port": (
        {"admin": {"token": {"existingSecret": "a"}}},
        "admin.token.existingSecret needs admin.port",
    ),
    "an ingress without a name": (
        {"ingress": {"enabled": True}},
        "ingress.enabled needs ingress.hosts",
    ),
    "an ingress to a port that is not there": (
        {"ingress": {"enabled": True, "hosts": ["a.example.org"], "admin": True}},
        "ingress.admin needs admin.port",
    ),
    "a setting as a variable": (
        {"extraEnv": [{"name": "TXBROKER_KAFKA", "value": "a:1"}]},
        "extraEnv.0.name: Must not validate the schema",
    ),
    "one port for both": ({"admin": {"port": 8470}}, "admin.port must be another one than port"),
    "a port of root's": ({"admin": {"port": 443}}, "admin.port"),
    "a setting of TLS": (
        {"settings": {"tls_cert_file": "/tmp/a"}},
        "settings: Additional property tls_cert_file is not allowed",
    ),
    "no password": ({"kafka": WITHOUT_SECRET}, "SASL_SSL needs kafka.sasl.existingSecret"),
    "no user": ({"kafka": NO_NAME}, "needs kafka.sasl.username or kafka.sasl.usernameKey"),
    "two users": ({"kafka": BOTH_NAMES}, "exclude one another"),
    "login in the clear": (
        {"kafka": {"sasl": {"existingSecret": "a"}}},
        "kafka.sasl needs kafka.securityProtocol SASL_SSL or SASL_PLAINTEXT",
    ),
    "token and user": (
        {"kafka": {**FETCHED, "sasl": {**FETCHED["sasl"], "username": "a"}}},
        "are not for OAUTHBEARER, which logs in by token",
    ),
    "no token": ({"kafka": TOKENS}, "needs one of kafka.oauth.tokenUrl"),
    "two tokens": (
        {"kafka": {**FETCHED, "oauth": {**FETCHED["oauth"], "audience": "a"}}},
        "needs one of kafka.oauth.tokenUrl",
    ),
    "a token without use": (
        {"kafka": {**FETCHED, "oauth": {**FETCHED["oauth"], "clientId": ""}}},
        "kafka.oauth.tokenUrl needs kafka.oauth.clientId",
    ),
    "no client secret": (
        {"kafka": {**TOKENS, "oauth": FETCHED["oauth"]}},
        "SASL_SSL needs kafka.sasl.existingSecret",
    ),
    "token with a password": (
        {"kafka": {**LOGIN, "oauth": {"audience": "a"}}},
        "kafka.oauth needs",
    ),
    "token in the clear": (
        {"kafka": {**FETCHED, "oauth": {**FETCHED["oauth"], "tokenUrl": "http://a/token"}}},
        "kafka.oauth.tokenUrl",
    ),
    "key of nothing": (
        {"kafka": {"securityProtocol": "SSL", "tls": {"keyPasswordKey": "a"}}},
        "kafka.tls.keyPasswordKey needs kafka.tls.clientSecret",
    ),
    "certificates without TLS": (
        {"kafka": {"tls": {"caSecret": "ca"}}},
        "kafka.tls needs kafka.securityProtocol SSL or SASL_SSL",
    ),
    "no time to hand over": (
        {"stop": {"delaySeconds": 50, "graceSeconds": 60}},
        "stop.graceSeconds must be at least 20 more than stop.delaySeconds",
    ),
    "late after lost": (
        {"audit": {"lateAfterSeconds": 700}},
        "audit.lateAfterSeconds must not be more than audit.lostAfterSeconds",
    ),
    "tables on a volume of one Pod": (
        {"audit": {"executors": {"instances": 2}, "options": ["--out=/var/lib/txbroker/audit"]}},
        "audit.executors needs --out=URI in audit.options",
    ),
    "two masters": (
        {
            "audit": {
                "executors": {"instances": 2},
                "options": ["--full", "--out=s3a://a/b"],
                "master": "yarn",
            }
        },
        "audit.executors and audit.master exclude one another",
    ),
}


@needs_helm
@pytest.mark.parametrize("name", REFUSED)
def test_contradictory_values_are_refused_in_a_sentence(helm: Helm, name: str) -> None:
    values, sentence = REFUSED[name]
    values = {**NEEDED, **values}
    code, output = helm("template", "shop", str(CHART), "--kube-version", "1.31.0", values=values)
    assert code != 0
    assert sentence in output
    assert "kind: StatefulSet" not in output


@needs_helm
def test_a_cluster_that_is_too_old_is_refused(helm: Helm) -> None:
    code, output = helm("template", "shop", str(CHART), "--kube-version", "1.26.0")
    assert code != 0
    assert "kubeVersion" in output


# --- notes after an install ----------------------------------------------------------------


@pytest.fixture(scope="module")
def notes(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Render the notes, which helm itself shows only when it talks to a cluster."""
    chart = tmp_path_factory.mktemp("notes") / "txbroker"
    shutil.copytree(CHART, chart)
    (chart / "templates/NOTES.txt").rename(chart / "notes.txt")
    (chart / "templates/shown.yaml").write_text(
        'kind: Shown\ntext: {{ tpl (.Files.Get "notes.txt") . | toJson }}\n'
    )

    def shown(name: str) -> str:
        words = ("--show-only", "templates/shown.yaml", "--kube-version", "1.31.0")
        code, output = helm(
            "template", "shop", str(chart), "--namespace", "pay", *words, values=SETS[name]
        )
        assert code == 0, output
        return str(yaml.safe_load(output)["text"])

    return shown


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_the_notes_name_commands_that_are_there(notes: Callable[[str], str], name: str) -> None:
    text = notes(name)
    service = "half" if name == "spare" else "shop-txbroker"
    assert f"rollout status statefulset/{service}\n" in text
    admin = SETS[name].get("admin", {}).get("port")
    console = f"{service}-admin {admin}" if admin else f"{service} 8470"
    assert f"port-forward service/{console}\n" in text
    scheme = "https" if "tls" in SETS[name] else "http"
    assert f"console at {scheme}://127.0.0.1:{admin or 8470}/" in text
    assert f"{scheme}://{service}-0.{service}-peers.pay.svc.cluster.local:8470" in text
    calls = re.findall(r"exec (\S+) -- txbroker (.*)$", text, re.M)
    # Only the token of callers is one that the proxy's own settings name, too.
    token = {
        "principals": " --token-file /etc/txbroker/operator-token/bearer",
        "peer names": " --token-file /etc/txbroker/admin-token/token",
    }.get(name, "")
    expected = [f"doctor{token}", f"tx list --state parked{token}"]
    assert [call for _, call in calls] == expected
    for pod, call in calls:
        assert pod == f"{service}-0"
        parsed(shlex.split(call))[1].close()
    assert ("There is no token" in text) is (name == "spare")
    assert ("create job --from=cronjob/" in text) is ("audit" in SETS[name])


@needs_helm
def test_the_notes_show_how_to_read_the_token(notes: Callable[[str], str]) -> None:
    key = EVERYTHING["token"]["key"]
    expected = (
        f"""get secret our-token -o go-template='{{{{index .data "{key}" | base64decode}}}}'"""
    )
    assert expected in notes("everything")
