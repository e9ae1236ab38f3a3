"""TLS and a port for operators, as the chart sets them up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chart.chart_pods import Object, environment, of_kind, one, pod_of, settings_of
from tests.chart.chart_values import SECURED, SETS

Render = Callable[..., list[Object]]

pytestmark = pytest.mark.needs_tool("helm")
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
    calls, admin = policy["ingress"]
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
