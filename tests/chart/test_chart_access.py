"""Principals, peer identity, TLS and a port for operators, as the chart sets them up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_pods import (
    POD,
    Object,
    Render,
    environment,
    of_kind,
    one,
    pod_of,
    settings_of,
    settings_of_commands,
)
from tests.chart.chart_values import PEER_NAMES, PRINCIPALS, SECURED, SETS
from txbroker.config.settings import Settings
from txbroker.principals import read_principals

pytestmark = pytest.mark.needs_tool("helm")
MANUAL = Path(__file__).parents[2] / "docs/operate/kubernetes.md"
OWN = f"{POD}.shop-txbroker-peers.pay.svc.cluster.local"


def volume(objects: list[Object], name: str) -> dict[str, Any]:
    """Return a volume of the proxies."""
    (found,) = (v for v in pod_of(objects, "StatefulSet").spec["volumes"] if v["name"] == name)
    return dict(found)


@pytest.mark.parametrize(
    ("values", "kind", "field", "key"),
    [
        (PRINCIPALS, "secret", "secretName", "who.toml"),
        (PEER_NAMES, "configMap", "name", "principals.toml"),
    ],
)
def test_the_proxies_are_given_their_principals(
    render: Render, tmp_path: Path, values: Mapping[str, Any], kind: str, field: str, key: str
) -> None:
    objects = render(values)
    mounted = volume(objects, "principals")[kind]
    assert mounted[field] == "our-principals"
    assert mounted["items"] == [{"key": key, "path": key}]
    assert mounted["defaultMode"] == 0o440
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path)
    assert settings.principals_file == tmp_path / "etc/txbroker/principals" / key
    assert [each.name for each in read_principals(settings.principals_file)] == ["shop"]
    mounts = pod_of(objects, "StatefulSet").container["volumeMounts"]
    assert [m["readOnly"] for m in mounts if m["name"] == "principals"] == [True]


def test_command_tokens_are_never_shared_with_callers(render: Render, tmp_path: Path) -> None:
    """TXBROKER_TOKEN_FILE is the setting `token_file` and the commands' option."""
    for number, values in enumerate((PRINCIPALS, PEER_NAMES)):
        objects = render(values)
        pod = pod_of(objects, "StatefulSet")
        assert "TXBROKER_TOKEN_FILE" not in environment(pod)
        assert settings_of(pod, objects, tmp_path / str(number)).token_file is None


def test_proxies_recognize_each_other_at_the_peer_port(render: Render, tmp_path: Path) -> None:
    objects = render(PRINCIPALS)
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path)
    assert settings.peer_secret_file == tmp_path / "etc/txbroker/peer-secret/shared"
    assert volume(objects, "peer-secret")["secret"]["secretName"] == "our-peers"
    assert settings.peer_listen == "0.0.0.0:8472"
    assert settings.peer_advertise == f"http://{OWN}:8472"
    ports = {
        p["name"]: p["containerPort"] for p in pod_of(objects, "StatefulSet").container["ports"]
    }
    assert ports == {"http": 8470, "peers": 8472}
    shown = {s["metadata"]["name"]: [p["name"] for p in s["spec"]["ports"]]
             for s in of_kind(objects, "Service")}  # fmt: skip
    assert shown == {"shop-txbroker": ["http"], "shop-txbroker-peers": ["http", "peers"]}


def test_proxies_recognize_each_other_by_certificates(render: Render, tmp_path: Path) -> None:
    objects = render(PEER_NAMES)
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path)
    assert settings.peer_names == tuple(PEER_NAMES["peerNames"])
    assert settings.peer_secret_file is None
    assert settings.peer_advertise == f"https://{OWN}:8472"


@pytest.mark.parametrize("name", ["principals", "peer names"])
def test_only_proxies_reach_the_port_of_proxies(render: Render, name: str) -> None:
    policy = one(render(SETS[name]), "NetworkPolicy")["spec"]
    by_port = {rule["ports"][0]["port"]: rule for rule in policy["ingress"]}
    assert by_port["peers"] == {
        "from": [{"podSelector": policy["podSelector"]}],
        "ports": [{"protocol": "TCP", "port": "peers"}],
    }
    # The others follow the values, and egress is unrestricted by default.
    scheme = "https" if name == "peer names" else "http"
    clients = SETS[name]["networkPolicy"].get("clients", [{"podSelector": {}}])
    assert by_port[scheme]["from"][1:] == clients
    assert ("Egress" in policy["policyTypes"]) is (name == "peer names")
    if name == "peer names":
        _, peers, *_ = policy["egress"]
        assert [port["port"] for port in peers["ports"]] == ["https", "admin", "peers"]


def test_without_peer_port_there_is_no_peer_rule(render: Render) -> None:
    policy = one(render({"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == ["http"] * 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (PRINCIPALS, {"name": "viewer-token", "key": "token"}),
        (
            {**PRINCIPALS, "serviceMonitor": {"enabled": True}},
            {"name": "operator-token", "key": "bearer"},
        ),
    ],
)
def test_prometheus_may_be_a_viewer(
    render: Render, values: Mapping[str, Any], expected: Mapping[str, str]
) -> None:
    (endpoint,) = one(render(values), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == expected


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 1, "peerSecret": {"existingSecret": ""}},
        {"insecure": True, "token": {"existingSecret": ""}, "peerSecret": {"existingSecret": ""}},
    ],
)
def test_one_proxy_or_open_ones_need_no_peer_secret(
    render: Render, tmp_path: Path, values: Mapping[str, Any]
) -> None:
    objects = render(values)
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path)
    assert not settings.peer_identity


@pytest.mark.parametrize("name", SETS)
def test_the_doctor_in_a_pod_sees_how_the_proxy_is_called(
    render: Render, name: str, tmp_path: Path
) -> None:
    """Options of the proxy's command line are not there for other commands, variables are."""
    objects = render(SETS[name])
    pod = pod_of(objects, "StatefulSet")
    proxy = settings_of(pod, objects, tmp_path / "pod")
    doctor = settings_of_commands(pod, objects, tmp_path / "other")
    # Tokens are the commands' own, and the name has no meaning for them.
    of_the_proxy = {"token_file", "admin_token_file", "instance"}
    for setting in set(Settings.model_fields) - of_the_proxy:
        seen = str(getattr(doctor, setting)).replace(str(tmp_path / "other"), "")
        assert seen == str(getattr(proxy, setting)).replace(str(tmp_path / "pod"), ""), setting


def test_the_worked_example_renders(render: Render, tmp_path: Path) -> None:
    text = MANUAL.read_text().partition("## Principals and peers")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    objects = render(yaml.safe_load(block))
    pod = pod_of(objects, "StatefulSet")
    settings = settings_of(pod, objects, tmp_path)
    assert (settings.token_file, settings.admin_token_file) == (None, None)
    assert settings.principals_file is not None
    assert settings.peer_secret_file is not None
    policy = one(objects, "NetworkPolicy")["spec"]
    ports = [rule["ports"][0]["port"] for rule in policy["ingress"]]
    assert ports == ["admin", "https", "admin", "peers"]  # the first is that of `helm test`
    # Every Secret that it names is created by a command above or in another section.
    made = set(re.findall(r"create secret generic (\S+)", text)) | {"txbroker-tls"}
    named = {v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v}
    (endpoint,) = one(objects, "ServiceMonitor")["spec"]["endpoints"]
    named.add(endpoint["authorization"]["credentials"]["name"])
    assert named <= made
    (path,) = re.findall(r"txbroker doctor --token-file (\S+)", text)
    assert (tmp_path / path.removeprefix("/")).is_file()


NAMED = SECURED["networkPolicy"]


@pytest.fixture(scope="module")
def secured(render: Render) -> list[Object]:
    return render(SECURED)


def secrets(objects: list[Object]) -> dict[str, tuple[str, set[str]]]:
    """Return name and keys of each Secret that the proxies have, by the volume's name."""
    volumes = pod_of(objects, "StatefulSet").spec["volumes"]
    return {
        v["name"]: (v["secret"]["secretName"], {item["key"] for item in v["secret"]["items"]})
        for v in volumes
        if "secret" in v
    }


def test_the_proxies_are_given_their_certificate(secured: list[Object], tmp_path: Path) -> None:
    settings = settings_of(pod_of(secured, "StatefulSet"), secured, tmp_path)
    folder = tmp_path / "etc/txbroker"
    assert settings.tls_cert_file == folder / "tls/tls.crt"
    assert settings.tls_key_file == folder / "tls/tls.key"
    assert settings.peers_ca_file == folder / "tls/ca.crt"
    assert settings.tls_client_ca_file == folder / "tls-clients/ca.pem"
    assert settings.token_file == folder / "token/token"
    assert settings.admin_token_file == folder / "admin-token/bearer"
    assert settings.admin_listen == "0.0.0.0:8471"
    for path in (settings.tls_cert_file, settings.tls_client_ca_file, settings.admin_token_file):
        assert path is not None
        assert path.is_file()
    assert secrets(secured) == {
        "token": ("txbroker-token", {"token"}),
        "admin-token": ("operators-token", {"bearer"}),
        "tls": ("txbroker-tls", {"tls.crt", "tls.key", "ca.crt"}),
        "tls-clients": ("callers-ca", {"ca.pem"}),
        "peer-secret": ("txbroker-peers", {"secret"}),
    }


def test_without_an_authority_the_systems_are_trusted(render: Render, tmp_path: Path) -> None:
    objects = render({"tls": {"existingSecret": "a", "caKey": ""}})
    assert secrets(objects)["tls"] == ("a", {"tls.crt", "tls.key"})
    pod = pod_of(objects, "StatefulSet")
    assert settings_of(pod, objects, tmp_path).peers_ca_file is None
    assert "TXBROKER_CA_FILE" not in environment(pod)


def test_commands_in_the_pod_are_operators(secured: list[Object]) -> None:
    variables = environment(pod_of(secured, "StatefulSet"))
    assert variables["TXBROKER_TOKEN_FILE"] == "/etc/txbroker/admin-token/bearer"
    assert variables["TXBROKER_CA_FILE"] == "/etc/txbroker/tls/ca.crt"
    assert variables["TXBROKER_CLIENT_CERT_FILE"] == "/etc/txbroker/tls/tls.crt"
    assert variables["TXBROKER_CLIENT_KEY_FILE"] == "/etc/txbroker/tls/tls.key"


@pytest.mark.parametrize(("name", "scheme"), [("defaults", "http"), ("secured", "https")])
def test_probes_speak_what_the_port_speaks(render: Render, name: str, scheme: str) -> None:
    container = pod_of(render(SETS[name]), "StatefulSet").container
    for probe in ("startup", "liveness", "readiness"):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert (asked["port"], asked["scheme"]) == (scheme, scheme.upper())


def test_operators_have_a_port_that_no_load_balancer_shows(secured: list[Object]) -> None:
    by_name = {s["metadata"]["name"]: s["spec"] for s in of_kind(secured, "Service")}
    shown = {
        name: (spec.get("type", ""), [port["name"] for port in spec["ports"]])
        for name, spec in by_name.items()
    }
    assert shown == {
        "shop-txbroker": ("LoadBalancer", ["https"]),
        "shop-txbroker-admin": ("ClusterIP", ["admin"]),
        "shop-txbroker-peers": ("", ["https", "admin"]),
    }
    listed = pod_of(secured, "StatefulSet").container["ports"]
    ports = {port["name"]: port["containerPort"] for port in listed}
    assert ports == {"https": 8470, "admin": 8471}


def test_the_service_for_operators_is_a_name_of_the_proxies(
    secured: list[Object], tmp_path: Path
) -> None:
    settings = settings_of(pod_of(secured, "StatefulSet"), secured, tmp_path)
    name = "shop-txbroker-admin"
    assert {name, f"{name}.pay", f"{name}.pay.svc"} <= set(settings.allowed_hosts)


def test_producers_do_not_reach_the_port_of_operators(secured: list[Object]) -> None:
    policy = one(secured, "NetworkPolicy")["spec"]
    _, calls, admin = policy["ingress"]
    own = {"podSelector": policy["podSelector"]}
    assert calls == {
        "from": [own, *NAMED["clients"]],
        "ports": [{"protocol": "TCP", "port": "https"}],
    }
    assert admin == {
        "from": [own, *NAMED["operators"], *NAMED["prometheus"]],
        "ports": [{"protocol": "TCP", "port": "admin"}],
    }
    _, peers, _ = policy["egress"]
    assert [port["port"] for port in peers["ports"]] == ["https", "admin"]


def test_prometheus_uses_admin_port_with_its_certificate(secured: list[Object]) -> None:
    (endpoint,) = one(secured, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("admin", "https")
    assert endpoint["authorization"]["credentials"] == {"name": "operators-token", "key": "bearer"}
    assert endpoint["tlsConfig"] == {
        "serverName": "shop-txbroker.pay.svc",
        "ca": {"secret": {"name": "txbroker-tls", "key": "ca.crt"}},
        "cert": {"secret": {"name": "prometheus-tls", "key": "tls.crt"}},
        "keySecret": {"name": "prometheus-tls", "key": "tls.key"},
    }


def test_prometheus_shows_no_certificate_where_none_is_asked_for(render: Render) -> None:
    (endpoint,) = one(render(SETS["tls"]), "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("https", "https")
    assert set(endpoint["tlsConfig"]) == {"serverName", "ca"}
    assert endpoint["authorization"]["credentials"]["name"] == "txbroker-token"


def test_certificates_do_without_a_token(render: Render, tmp_path: Path) -> None:
    objects = render(
        {
            "token": {"existingSecret": ""},
            "tls": {"existingSecret": "a", "clients": {"caSecret": "b"}},
        }
    )
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path)
    assert (settings.token_file, settings.insecure) == (None, False)
