"""Check URLs that lead where no check should go, in every spelling, registered and called."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.checkers import check_server
from tests.kit.http_answers import COMMIT, LOOPBACK, Serve, answering, ask, response
from tests.kit.http_api import Api, running_api
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.checkers.base import Answered, CheckCall, Unreached
from txbroker.checkers.http import HttpChecks, HttpLimits
from txbroker.checkers.url_guard import UrlGuard, forms, is_local
from txbroker.config.addresses import Address, parse_host_rules
from txbroker.contract.policy import GroupPolicy, encode_policy
from txbroker.errors import BadRequest
from txbroker.testing.door import MemoryDoor

CLASS = 7
call, checks, serve = check_server.call, check_server.checks, check_server.serve

SPELLINGS = {
    "loopback": "127.0.0.1",
    "loopback, short": "127.1",
    "loopback, hexadecimal": "0x7f000001",
    "loopback, decimal": "2130706433",
    "loopback, octal": "017700000001",
    "loopback, octal parts": "0177.0.0.1",
    "loopback, mixed parts": "0x7f.1",
    "loopback, another one": "127.8.9.10",
    "loopback, by name": "localhost",
    "loopback, by name in capitals": "LOCALHOST",
    "loopback, by name with the root's dot": "localhost.",
    "loopback, by a foreign name": "rebound.example",
    "loopback among public addresses": "mixed.example",
    "loopback IPv6": "[::1]",
    "loopback IPv6, in full": "[0:0:0:0:0:0:0:1]",
    "loopback IPv6, with a zone": "[::1%25lo]",
    "loopback, mapped": "[::ffff:127.0.0.1]",
    "loopback, mapped in hexadecimal": "[0:0:0:0:0:ffff:7f00:0001]",
    "loopback, IPv4-compatible": "[::127.0.0.1]",
    "loopback, 6to4": "[2002:7f00:1::]",
    "loopback, NAT64": "[64:ff9b::127.0.0.1]",
    "loopback, local NAT64": "[64:ff9b:1::7f00:1]",
    "loopback, SIIT": "[::ffff:0:127.0.0.1]",
    "loopback, ISATAP": "[2001:db8::5efe:127.0.0.1]",
    "loopback, Teredo": "[2001:0:5db8:d822:0:0:80ff:fffe]",
    "unspecified": "0.0.0.0",
    "unspecified, as a number": "0",
    "unspecified IPv6": "[::]",
    "this network": "0.1.2.3",
    "metadata": "169.254.169.254",
    "metadata, hexadecimal": "0xa9fea9fe",
    "metadata, mapped": "[::ffff:169.254.169.254]",
    "metadata IPv6": "[fd00:ec2::254]",
    "metadata of Alibaba": "100.100.100.200",
    "metadata of Azure": "168.63.129.16",
    "metadata by name": "metadata.example",
    "link-local": "169.254.1.1",
    "link-local IPv6": "[fe80::1]",
    "link-local IPv6, with a zone": "[fe80::1%25lo]",
    "multicast": "224.0.0.1",
    "multicast IPv6": "[ff02::1]",
    "broadcast": "255.255.255.255",
    "reserved": "240.0.0.1",
}
NAMES = {
    "rebound.example": ["127.0.0.1"],
    "mixed.example": ["93.184.216.34", "127.0.0.1"],
    "metadata.example": ["169.254.169.254"],
    "public.example": ["93.184.216.34"],
}

Resolver = dict[str, Any]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """What names stand for: addresses, or a function that returns them; others as ever."""
    names: Resolver = dict(NAMES)
    known = socket.getaddrinfo

    def look_up(host: Any, port: Any, *more: Any, **options: Any) -> Any:
        if host not in names:
            return known(host, port, *more, **options)
        found = names[host]
        addresses = found() if callable(found) else found
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names


@pytest.fixture
async def trap() -> AsyncIterator[Callable[[str], list[str]]]:
    """A listener at every address of this machine: returns the clients of its port."""
    seen: list[str] = []

    async def taken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(str(writer.get_extra_info("sockname")))
        writer.close()

    server = await asyncio.start_server(taken, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield lambda what: [str(port)] if what == "port" else seen
    finally:
        server.close()


async def register(api: Api, url: str, group: str = "orders") -> tuple[int, str]:
    status, answer = await api.call("PUT", f"/v1/groups/{group}", {"check_url": url})
    return status, answer.get("error", {}).get("message", "")


async def store(api: Api, url: str, group: str = "orders") -> None:
    """Put a group into the groups topic, as an older version or another writer does."""
    await api.store.put(group, encode_policy(GroupPolicy(check_url=url)))


@pytest.mark.parametrize("case", SPELLINGS)
async def test_forbidden_address_is_refused_at_registration(case: str, resolver: Resolver) -> None:
    """400 bad_request, naming check_url_allow."""
    async with running_api(public=True) as api:
        status, why = await register(api, f"http://{SPELLINGS[case]}:8080/check")
        assert (status, api.store.stored) == (400, {})
        assert "check_url_allow can allow it" in why


@pytest.mark.parametrize("case", SPELLINGS)
async def test_forbidden_address_is_refused_at_the_call(
    case: str, resolver: Resolver, trap: Callable[[str], list[str]]
) -> None:
    """The test of the group names check_url_allow; nothing is sent."""
    (port,) = trap("port")
    async with running_api(public=True) as api:
        await store(api, f"http://{SPELLINGS[case]}:{port}/check")
        status, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert (status, tried["answered"]) == (200, False)
        assert "check_url_allow can allow it" in tried["why"]
        assert trap("seen") == []
        if case in ("loopback", "metadata IPv6"):  # without a look-up
            _, shown = await api.call("GET", "/v1/groups/orders")
            assert "check_url_allow can allow it" in shown["problem"]


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example@127.0.0.1/",
        "http://good.example:80@127.0.0.1/",
        "http://good.example\\@127.0.0.1/",
        "http://127。0。0。1/",
        "http://127.0.0.1 .example/",
        "http://good.example\r\nhost: 127.0.0.1/",
        "http://[::1/",
        "http://[::1].example/",
        "//127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "http:///check",
        "http://:80/check",
        "http://orders.example:0/",
    ],
)
async def test_ambiguous_url_is_refused(url: str) -> None:
    """400 bad_request."""
    async with running_api() as api:
        status, why = await register(api, url)
        assert (status, "check_url" in why) == (400, True)


# --- names whose answer changes --------------------------------------------------------------


async def test_rebound_name_reaches_no_other_address(
    resolver: Resolver, serve: Serve, call: CheckCall
) -> None:
    """Each look-up answers with another address: allowed, forbidden, allowed …"""
    answers = itertools.cycle(["127.0.0.1", "127.0.0.2"])
    resolver["rebinding.example"] = lambda: [next(answers)]
    server = await serve(answering(response(COMMIT), then_close=True))
    taken: list[str] = []

    async def forbidden(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append("forbidden")
        writer.close()

    other = await asyncio.start_server(forbidden, "127.0.0.2", server.port)
    allow = parse_host_rules("check_url_allow", ["127.0.0.1"])
    checks = HttpChecks(guard=UrlGuard(allow=allow))
    url = f"http://rebinding.example:{server.port}/check"
    for _ in range(3):
        assert isinstance(await ask(checks, url, call), Answered)
        refused = await checks.acquire("orders", url)
        assert isinstance(refused, Unreached)
        assert "127.0.0.2 is a loopback address" in refused.detail
    assert (server.connections, taken) == (3, [])
    other.close()
    await checks.close()


async def test_name_registered_first_and_bound_later(resolver: Resolver) -> None:
    """A name without an address may be registered; its address is verified at each call."""
    resolver["later.example"] = lambda: (_ for _ in ()).throw(
        socket.gaierror(socket.EAI_NONAME, "no")
    )
    async with running_api(public=True) as api:
        assert await register(api, "http://later.example/check") == (200, "")
        resolver["later.example"] = ["169.254.169.254"]
        _, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert "169.254.169.254 is the address of a cloud metadata service" in tried["why"]


async def test_kept_connection_is_verified_before_each_use(serve: Serve, call: CheckCall) -> None:
    """Closed and not used once its address is refused."""
    own: list[Address] = []
    server = await serve(answering(response(COMMIT)))
    checks = HttpChecks(guard=LOOPBACK, own=lambda: own, limits=HttpLimits(idle_s=60.0))
    for _ in range(2):
        assert isinstance(await ask(checks, server.url, call), Answered)
    assert (server.connections, checks.idle_connections) == (1, 1)
    own.append(Address("127.0.0.1", server.port))  # another proxy has begun to listen there
    assert isinstance(await checks.acquire("orders", server.url), Unreached)
    assert (server.connections, checks.idle_connections) == (1, 0)
    await checks.close()


@pytest.fixture
def hanging(resolver: Resolver) -> Iterator[Callable[[int], str]]:
    """Names whose servers do not answer."""
    go_on = threading.Event()

    def answer() -> list[str]:
        go_on.wait(60)
        return []

    def name(number: int) -> str:
        host = f"hanging-{number}.example"
        resolver[host] = answer
        return host

    yield name
    go_on.set()


async def test_hanging_names_delay_no_other_group(
    hanging: Callable[[int], str], serve: Serve
) -> None:
    """Given up after 3 s; others go on."""
    server = await serve(answering(response(b""), then_close=True))
    async with running_api() as api:
        assert await register(api, server.url, "good") == (200, "")
        flood = [
            asyncio.create_task(register(api, f"http://{hanging(n)}/", f"bad-{n % 20}"))
            for n in range(60)
        ]
        for _ in range(3):
            async with asyncio.timeout(10):
                _, tried = await api.call("POST", "/v1/groups/good/test", {})
            assert tried["answered"]
        async with asyncio.timeout(20):
            assert {status for status, _ in await asyncio.gather(*flood)} == {200}


async def test_one_group_cannot_take_all_look_ups(hanging: Callable[[int], str]) -> None:
    """However often a group is registered again with a name that hangs."""
    checks = HttpChecks(
        limits=HttpLimits(connect_timeout_s=0.5), look_up=lambda host: socket.getaddrinfo(host, 80)
    )
    tries = [checks.acquire("bad", f"http://{hanging(n)}/") for n in range(10)]
    results = [str(result) for result in await asyncio.gather(*tries)]
    assert sum("no look-up of the name within" in result for result in results) == 2
    assert sum("too many" in result for result in results) == 8
    await checks.close()


async def test_groups_whose_names_hang_cannot_take_all_look_ups(
    resolver: Resolver, hanging: Callable[[int], str], serve: Serve
) -> None:
    """However many they are: the first look-ups of all of them, and those after."""
    server = await serve(answering(response(COMMIT), then_close=True))
    checks = HttpChecks(guard=LOOPBACK, limits=HttpLimits(connect_timeout_s=20.0))
    for turn in range(2):
        resolver[f"good-{turn}.example"] = ["127.0.0.1"]
        tries = [
            asyncio.create_task(checks.acquire(f"bad-{n}", f"http://{hanging(n)}/"))
            for n in range(60)
        ]
        await asyncio.sleep(0)
        reached = await checks.acquire("good", f"http://good-{turn}.example:{server.port}/check")
        assert not isinstance(reached, Unreached), reached
        reached.release()
        assert not any(task.done() for task in tries)
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    await checks.close()


# --- the installation's own addresses --------------------------------------------------------

OWN = {
    "the API": "127.0.0.1:{port}",
    "the API, by name": "localhost:{port}",
    "the API, mapped": "[::ffff:127.0.0.1]:{port}",
    "the API, by a foreign name": "rebound.example:{port}",
    "the API, at another loopback address": "127.0.0.9:{port}",
    "Kafka": "127.0.0.1:9092",
    "Kafka, by name": "localhost.:9092",
}


@pytest.mark.parametrize("case", OWN)
async def test_the_installation_itself_cannot_be_called(case: str, resolver: Resolver) -> None:
    """Not even where loopback is allowed and listed."""
    async with running_api(check_url_allow=("127.0.0.0/8",)) as api:
        url = f"http://{OWN[case].format(port=api.port)}/v1/groups"
        status, why = await register(api, url)
        assert (status, "an address of txbroker or its Kafka" in why) == (400, True), why
        await store(api, url)
        _, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert "an address of txbroker or its Kafka" in tried["why"]
        # Another port of the same machine is another service.
        assert await register(api, "http://127.0.0.1:9/check") == (200, "")


@pytest.mark.parametrize(
    ("own", "url", "refused"),
    [
        (Address("proxy-2", 8470), "http://proxy-2:8470/", True),
        (Address("proxy-2", 8470), "http://PROXY-2.:8470/", True),
        (Address("proxy-2", 8470), "http://10.0.0.2:8470/", True),
        (Address("proxy-2", 8470), "http://alias:8470/", True),
        (Address("proxy-2", 8470), "http://proxy-2:8471/", False),
        (Address("proxy-2", 8470), "http://10.0.0.3:8470/", False),
        (Address("proxy-2", 80), "http://alias/", True),
        (Address("proxy-2", 443), "https://alias/", True),
        (Address("::", 8470), "http://127.0.0.1:8470/", True),
        (Address("0.0.0.0", 8470), "http://10.0.0.2:8470/", False),
        (Address("unknown", 8470), "http://10.0.0.2:8470/", False),
        (Address("10.0.0.2", 8470), "http://[::ffff:10.0.0.2]:8470/", True),
        (Address("10.0.0.2", 8470), "http://[64:ff9b::10.0.0.2]:8470/", True),
    ],
)
async def test_other_proxies_are_known_by_their_addresses(
    own: Address, url: str, refused: bool
) -> None:
    """Refused at their address and port, allowed at others."""
    known = {"proxy-2": ["10.0.0.2"], "alias": ["10.0.0.2"], "proxy-2.": ["10.0.0.2"]}

    def look_up(host: str) -> list[str]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return known[host]

    checks = HttpChecks(guard=LOOPBACK, own=lambda: [own], look_up=look_up)
    why = await checks.refuse("orders", GroupPolicy(check_url=url))
    assert (why is not None and "an address of txbroker" in why) == refused
    await checks.close()


async def test_failed_look_up_keeps_the_last_addresses() -> None:
    """A name server that fails, or is made to, opens nothing."""
    fails = [True]

    def look_up(host: str) -> list[str]:
        if fails[0]:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return ["10.0.0.2"]

    checks = HttpChecks(own=lambda: [Address("proxy-2", 8470)], look_up=look_up)
    first = await checks.acquire("orders", "http://10.0.0.2:8470/")
    fails[0] = False
    second = await checks.acquire("orders", "http://10.0.0.2:8470/")
    fails[0] = True
    third = await checks.acquire("orders", "http://10.0.0.2:8470/")
    assert isinstance(first, Unreached)
    assert second == third
    assert "an address of txbroker" in str(third)
    await checks.close()


async def test_running_proxies_refuse_one_anothers_addresses() -> None:
    """Those that they listen at, operators' included, and those by which they are known."""
    world, desk = MemoryHarness(), FakeEndpoint()
    async with desk.serve(), AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        one = Service(world, desk, "one", admin_listen="127.0.0.1:0")
        two = Service(world, desk, "two", admin_listen="127.0.0.1:0", peer_listen="127.0.0.1:0")
        for service in (one, two):
            await stack.enter_async_context(service)

        async def both_known() -> bool:
            return all(
                len(service.proxy.broker.partitions.proxies()) == 2 for service in (one, two)
            )

        await until(both_known)
        urls = {url for each in (one, two) for url in (each.proxy.url, each.proxy.admin_url)}
        urls.add(one.proxy.broker.partitions.peer_url(two.proxy.url))
        assert len(urls) == 5
        for service in (one, two):
            for url in urls:
                with pytest.raises(BadRequest, match="an address of txbroker"):
                    await service.call("PUT", "/v1/groups/orders", {"check_url": f"{url}/v1"})
            fine = {"check_url": f"{desk.url}/check/orders"}
            assert (await service.call("PUT", "/v1/groups/orders", fine))[0] == 200


async def test_all_brokers_are_the_installations_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Kafka's metadata name, as soon as they do."""
    brokers: list[tuple[str, int]] = []
    monkeypatch.setattr(MemoryDoor, "brokers", lambda _: brokers)
    world, desk = MemoryHarness(), FakeEndpoint()
    async with desk.serve(), AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        service = Service(world, desk)
        stack.push_async_callback(service.stop)
        await service.start()
        policy = {"check_url": "http://127.0.0.1:9094/check"}
        assert (await service.call("PUT", "/v1/groups/orders", policy))[0] == 200
        brokers.append(("localhost", 9094))
        with pytest.raises(BadRequest, match="an address of txbroker or its Kafka"):
            await service.call("PUT", "/v1/groups/orders", policy)


def test_own_addresses_are_known_without_a_list() -> None:
    """Refused at the ports of the proxy."""
    assert is_local(forms("127.0.0.3")[0])
    assert is_local(forms("::1")[0])
    assert not is_local(forms("203.0.113.7")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.7", 9))
        assert is_local(forms(probe.getsockname()[0])[0])


# --- allow and deny lists --------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "deny", "host", "address", "refused"),
    [
        ((), (), "orders.example", "93.184.216.34", False),
        ((), (), "orders", "10.1.2.3", False),
        ((), ("private",), "orders", "10.1.2.3", True),
        ((), ("private",), "orders", "172.31.0.1", True),
        ((), ("private",), "orders", "192.168.1.1", True),
        ((), ("private",), "orders", "100.64.0.1", True),
        ((), ("private",), "orders", "fd12::1", True),
        ((), ("private",), "orders", "64:ff9b::10.0.0.1", True),
        ((), ("private",), "orders", "93.184.216.34", False),
        ((), ("93.184.216.0/24",), "orders", "93.184.216.34", True),
        ((), ("93.184.216.0/24",), "orders", "::ffff:93.184.216.34", True),
        ((), ("orders.example",), "ORDERS.example.", "93.184.216.34", True),
        ((), ("*.example",), "orders.example", "93.184.216.34", True),
        ((), ("*.example",), "example", "93.184.216.34", False),
        ((), ("*.example",), "orders.badexample", "93.184.216.34", False),
        (("127.0.0.1",), (), "localhost", "127.0.0.1", False),
        (("127.0.0.1",), (), "localhost", "::ffff:127.0.0.1", False),
        (("127.0.0.1",), (), "localhost", "127.0.0.2", True),
        (("[::1]",), (), "localhost", "::1", False),
        (("localhost",), (), "localhost.", "127.0.0.1", False),
        (("*.example",), (), "sidecar.example", "127.0.0.1", False),
        (("*.example",), (), "evil.example", "169.254.169.254", True),
        (("*.example",), (), "evil.example", "::ffff:169.254.169.254", True),
        (("*.example",), (), "evil.example", "fd00:ec2::254", True),
        (("*.example",), (), "evil.example", "169.254.1.1", True),
        (("*.example",), (), "evil.example", "fe80::1", True),
        (("*.example", "169.254.1.1"), (), "printer.example", "169.254.1.1", False),
        (("*.example", "printer.example"), (), "printer.example", "169.254.1.1", False),
        (("169.254.0.0/16",), (), "x", "169.254.169.254", False),
        (("127.0.0.1",), ("127.0.0.0/8",), "localhost", "127.0.0.1", True),
        (("localhost",), ("localhost",), "localhost", "127.0.0.1", True),
        (("10.0.0.0/8",), ("private",), "orders", "10.1.2.3", True),
    ],
)
def test_deny_wins_over_allow_and_allow_over_the_defaults(
    allow: tuple[str, ...], deny: tuple[str, ...], host: str, address: str, refused: bool
) -> None:
    """Allowed or refused by the lists, deny first."""
    guard = UrlGuard(
        allow=parse_host_rules("check_url_allow", allow),
        deny=parse_host_rules("check_url_deny", deny, private=True),
    )
    assert (guard.refuse(host, address) is not None) == refused


def test_the_installations_own_is_allowed_by_name_only() -> None:
    """With a shared load balancer its address and port are those of other hosts too."""
    network = UrlGuard(allow=parse_host_rules("check_url_allow", ["10.0.0.0/8"]))
    name = UrlGuard(allow=parse_host_rules("check_url_allow", ["orders.example"]))
    assert network.refuse("orders.example", "10.0.0.2", own=True)
    suffix = UrlGuard(allow=parse_host_rules("check_url_allow", ["*.example"]))
    assert name.refuse("other.example", "10.0.0.2", own=True)
    assert suffix.refuse("orders.example", "10.0.0.2", own=True)
    assert name.refuse("orders.example", "10.0.0.2", own=True) is None


async def test_a_proxy_on_loopback_only_calls_loopback(serve: Serve) -> None:
    """Called: no other host reaches such a proxy."""
    server = await serve(answering(response(b""), then_close=True))
    async with running_api() as api:
        assert await register(api, server.url) == (200, "")
        _, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert tried["answered"]
    for more in ({"admin_listen": "0.0.0.0:0"}, {"check_url_deny": ("127.0.0.0/8",)}):
        async with running_api(**more) as api:  # type: ignore[arg-type]
            assert (await register(api, server.url))[0] == 400


async def test_redirect_is_not_followed(
    serve: Serve, checks: HttpChecks, call: CheckCall, trap: Callable[[str], list[str]]
) -> None:
    """Unclear: redirects are not followed."""
    (port,) = trap("port")
    moved = f"location: http://127.0.0.1:{port}/\r\n"
    server = await serve(answering(response(b"", "307 Temporary Redirect", moved)))
    assert "redirects are not followed" in str(await ask(checks, server.url, call))
    assert trap("seen") == []
