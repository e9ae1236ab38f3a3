"""The configuration of a proxy: one frozen object, validated as a whole before anything starts.

Command line options override the environment (`TXBROKER_` and the setting's name in capitals), the
environment overrides the config file (TOML, one key per setting), the file overrides the defaults.
Secrets are in files that settings name, or in the environment, and never in a repr, log line or
error.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import SettingsConfigDict

from txbroker.config.access import KafkaAccess, ListenerAccess, secret_settings
from txbroker.config.addresses import PORT_MAX, Address, with_later_port
from txbroker.contract.frames import FRAME_BYTES_MAX
from txbroker.core.encoding import DEFAULT_PREFIX
from txbroker.core.segment import ROW_BYTES
from txbroker.core.settled import share_max
from txbroker.errors import ConfigurationError

ENV_PREFIX = "TXBROKER_"
CONFIG_VARIABLE = "TXBROKER_CONFIG"

_URI = re.compile("[A-Za-z][A-Za-z0-9+.-]*:/")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
KIB, MIB = 1024, 1024 * 1024

PREPARES_SHARE = 0.75
"""The part of the bytes in flight, in all and per session, that prepares may take. The rest is for
decisions and checks, which complete transactions: otherwise a flood of prepares that wait for Kafka
would block the calls that free memory."""
RECEIVING_SHARE = 0.5
"""The further part for frames that are not received completely yet."""
STUCK_MIN_S = 10.0
"""Below this an owner would leave while Kafka still ends its predecessor's last transaction."""
SESSION_MIN_S, SESSION_MAX_S = 6.0, 1800.0
"""The defaults of the brokers' limits."""
DEDUP_WINDOW_MIN_S = 10.0
"""Below this, a client that waits for one request timeout could not retry its prepare."""
WORKERS_MAX = 64
PORT_SETTINGS = ("listen", "admin_listen", "peer_listen", "advertise", "peer_advertise")
"""Settings with ports, which differ for each worker."""
SETTLED_BYTES = ROW_BYTES + 1
"""The memory of a settled transaction, with its part of a segment's header."""
FRAME_ROOM_BYTES = 64 * KIB
"""The overhead of a frame or a record batch."""


RENAMED = {"settled_max": "settled_bytes_max"}
"""Old names, accepted for one release, and the settings that replace them."""


_PARTITIONS_THEN = 4
"""The default of `partitions`, and so of topics, in releases with `settled_max`."""


def _settled_bytes(settled_max: int | None, partitions: int) -> int:
    """Return the bytes for the old setting: that many in each half partition, all at one proxy."""
    if settled_max is None:
        return 512 * MIB
    return settled_max * max(partitions, _PARTITIONS_THEN) * SETTLED_BYTES


def _folder(given: object) -> object:
    """Keep a URI as it is: a path would lose one of its slashes."""
    return Path(given) if isinstance(given, str) and not _URI.match(given) else given


class Settings(ListenerAccess, KafkaAccess):
    """All settings of a proxy. Built by `load_settings`, or directly in tests."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    # --- the process ---
    data_dir: Annotated[Path | str, BeforeValidator(_folder)] = Path(".txbroker")
    """The folder of names of proxies, and of audits, which take a URI, too. Proxies with different
    names may share it; `txbroker dev` has its Kafka there."""
    instance: str = ""
    """The name of this proxy among the others, the same after a restart, and of one process at a
    time. Empty: made once for each `listen` address, and kept in `data_dir`."""
    workers: Annotated[int, Field(ge=1, le=WORKERS_MAX)] = 1
    """How many proxies `txbroker proxy` runs, each in a separate process: one for each core. The
    first has the ports of `listen`, `admin_listen`, `peer_listen`, `advertise` and
    `peer_advertise`, the second those after them, and so on; limits count for each."""
    wait_for_kafka_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """How long `txbroker proxy` waits at its start for a Kafka that does not answer, seconds,
    before it exits. 0: not at all. If Kafka refuses, such as a login, it exits at once."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How log lines look; `auto` is `console` on a terminal, else `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important log lines that are shown."""

    # --- topics ---
    topic_prefix: str = DEFAULT_PREFIX
    """What the names of txbroker's own topics begin with: `PREFIX.half`, `PREFIX.op`,
    `PREFIX.checkpoint`, `PREFIX.parked`, `PREFIX.groups`, `PREFIX.audit` and `PREFIX.audit.drift`.
    Promoted messages of any other than `txbroker` begin with the header `txb-installation:
    PREFIX`."""
    partitions: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many half partitions there are when the topics are made, and so how many proxies can
    share the work. One proxy does more with few of them."""
    half_retention_s: Seconds = 14 * DAY_S
    """How long half messages are kept, seconds. Checks must be over within half of it."""
    create_target_topics: bool = False
    """Create target topics that do not exist when a transaction for them is prepared. Otherwise
    such a prepare is refused (`unknown_topic`)."""

    reserved_topics: tuple[str, ...] = ()
    """Topics that are never targets: names, or patterns with `*` and `?`. A prepare for one is
    refused (`bad_target`). Kafka's own topics, and those of every txbroker installation on this
    Kafka, are refused without this."""

    # --- checks ---
    check_after_s: Seconds = 6.0
    """A pending transaction is checked first after this time, seconds."""
    check_interval_s: Seconds = 30.0
    """The time between two checks of a transaction, seconds."""
    check_attempts_max: Annotated[int, Field(ge=1, le=1000)] = 15
    """A transaction is parked after this number of attempts without a decision."""
    check_timeout_s: Seconds = 5.0
    """How long a check waits for its answer, seconds."""
    checks_parallel_max: Count = 256
    """Checks in flight at once, all groups together; one share takes four fifths at most."""
    dedup_window_s: Seconds = 120.0
    """For how long the same prepare may be repeated and counts once, seconds."""

    # --- limits: each bounds what the process can be made to hold or do ---
    pending_max: Count = Field(
        default_factory=lambda given: max(250_000, 1_000_000 // given["partitions"])
    )
    """Transactions that one half partition holds and that are not settled: undecided, waiting to be
    promoted, or refused; more prepares are `overloaded`. Each costs the owner some 700 bytes beside
    its body. Not given: a million in all `partitions` together, which take 700 MB, but 250,000 in
    each at least."""
    pending_group_max: Count = Field(default_factory=lambda given: share_max(given["pending_max"]))
    """The same for one share: one group, or all groups of one principal, so that one that never
    decides leaves room for others; more prepares of it are `overloaded`. Not given: four fifths of
    `pending_max`."""
    bodies_bytes_max: Count = 128 * MIB
    """Bodies of transactions that are not settled, kept in memory by the whole proxy, bytes.
    Others, the oldest first, are read again from Kafka when they are needed."""
    snapshot_records_min: Count = 10_000
    """A partition writes a snapshot when this number of records has come since the last one, or a
    quarter as many as it has entries, if that is more; after a minute the quarter is enough, after
    an hour, or a quarter of half_retention_s, a single record. Fewer: a restart reads less, Kafka
    is written to more."""
    session_timeout_s: Seconds = 10.0
    """A proxy without a heartbeat for this time loses its partitions to the others, seconds: 6 to
    1800, and within the brokers' `group.min.session.timeout.ms` and
    `group.max.session.timeout.ms`."""
    stuck_after_s: Seconds = 30.0
    """A proxy that cannot claim a partition or end a promotion transaction for this time leaves the
    group, so that another one takes over, seconds."""
    settled_max: Count | None = None
    """The old name of `settled_bytes_max`, for one release: the number of settled transactions of
    one half partition. Counts as 37 bytes for each, in all `partitions`, 4 at least; the proxy
    warns at its start."""
    settled_bytes_max: Count = Field(
        default_factory=lambda given: _settled_bytes(given["settled_max"], given["partitions"])
    )
    """Settled transactions of the dedup window, remembered to answer repeats by the whole proxy,
    bytes: some 37 for each, more with a `dedup_key`. Its half partitions have equal parts; full,
    prepares are `overloaded`, those of one share with four fifths of a part. Not given: 512 MiB, or
    the value of `settled_max`."""
    in_flight_bytes_max: Count = 128 * MIB
    """Bytes of requests that are being carried out, all callers together; more are `overloaded`.
    Prepares may take three quarters of it, so that decisions and checks always find room; one
    principal takes four fifths of either at most. Half as much again may be on its way in, in
    frames of sessions; further ones wait to be read."""
    session_in_flight_bytes_max: Count = 32 * MIB
    """The same for one SDK session, so that none takes all; also the limit of answers that wait for
    it to be read."""
    session_answers_max: Count = 20_000
    """Answers and checks that wait for one SDK session to read them; a session that does not read
    is cut off there."""
    sessions_max: Count = 10_000
    """Open SDK sessions; more are turned away. One principal has four fifths of them at most."""
    session_heartbeat_s: Seconds = 15.0
    """How often a silent SDK session is asked for a sign of life, seconds. One that gives none
    within half of it is cut off."""
    message_bytes_max: Count = 4 * MIB
    """The largest message: key, value and headers together, bytes."""
    transaction_bytes_max: Count = 7 * MIB
    """The largest transaction, bytes. It is stored as one batch, so it must stay below
    `max.message.bytes` of the half topic (8 MiB)."""
    messages_per_transaction_max: Count = 1000
    """The most messages in one transaction."""
    frame_bytes_max: Count = FRAME_BYTES_MAX
    """The largest frame that an SDK session may send, bytes."""
    request_bytes_max: Count = 16 * MIB
    """The largest body of an HTTP request, bytes. JSON and base64 make messages larger, so it lies
    above `transaction_bytes_max`."""
    request_timeout_s: Seconds = 30.0
    """How long a client may take to send the head of a request, its body, or a TLS handshake, and
    to take in an answer or a frame of its session, seconds."""
    group_labels_max: Count = 200
    """Groups with separate metrics, at most four fifths of them of one share; further ones count as
    `other`."""

    @property
    def local_dir(self) -> Path:
        """`data_dir` as a folder of this machine.

        Raises:
            ConfigurationError: it is a URI.
        """
        if isinstance(self.data_dir, str):
            raise ConfigurationError(
                f"data_dir {self.data_dir} is a URI, which only audits can use: name a folder"
            )
        return self.data_dir

    @property
    def check_window_s(self) -> float:
        """The time from a prepare until the transaction is parked, seconds."""
        asked_s = self.check_after_s + (self.check_attempts_max - 1) * self.check_interval_s
        return asked_s + self.check_timeout_s

    @property
    def renamed(self) -> dict[str, str]:
        """Old names of settings that are given, and the new ones."""
        return {old: new for old, new in RENAMED.items() if getattr(self, old) is not None}

    def topic(self, name: str) -> str:
        """Return the full name of one of txbroker's own topics, such as `half`."""
        return f"{self.topic_prefix}.{name}"

    def of_worker(self, number: int) -> "Settings":
        """Return the settings of one of the `workers`, counted from 1: of one process."""
        later = number - 1
        changes: dict[str, Any] = {"workers": 1}
        if later:
            named = {name: getattr(self, name) for name in PORT_SETTINGS}
            changes |= {name: with_later_port(at, later) for name, at in named.items() if at}
            changes["instance"] = self.instance and f"{self.instance}-{number}"
        return self.model_copy(update=changes)

    def validate_whole(self) -> None:
        """Refuse contradictory or impossible settings."""
        self.check_kafka()
        self.check_access()
        _check_workers(self)
        _check_times(self)
        _check_sizes(self)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", self.topic_prefix):
            raise ConfigurationError(
                f"topic_prefix {self.topic_prefix!r} cannot begin a topic's name: use letters, "
                "digits, '.', '_' and '-' only"
            )


for _field in Settings.model_fields.values():
    _field.description = " ".join((_field.description or "").split())
SECRET_SETTINGS = frozenset(secret_settings(Settings))
"""Settings that are secrets: they are allowed in the environment only."""


# --- loading ---------------------------------------------------------------------------------


def load_settings(
    options: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings from options, environment, config file and defaults.

    Args:
        options: by the setting's name; None as a value means that the option was not given.
        config: the file; None takes the one that `TXBROKER_CONFIG` names, if any.
        environ: the environment; None takes the process's.

    Raises:
        ConfigurationError: a setting is unknown, malformed or contradicts another.
    """
    environ = os.environ if environ is None else environ
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    given: dict[str, tuple[Any, str]] = {}
    if config is not None:
        given.update(_from_file(config))
    given.update(_from_environment(environ))
    for name, value in (options or {}).items():
        if value is not None:
            _known(name, f"option --{name.replace('_', '-')}")
            given[name] = (value, f"option --{name.replace('_', '-')}")
    try:
        settings = Settings(**{name: value for name, (value, _) in given.items()})
    except ValidationError as error:
        raise ConfigurationError(_in_words(error, given)) from None
    settings.validate_whole()
    return settings


def load_kafka_access(
    kafka: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> KafkaAccess:
    """Return how a client of Kafka that is no proxy connects: from options, the environment and the
    config file that `TXBROKER_CONFIG` names; other settings of a proxy are ignored.

    Args:
        kafka: bootstrap servers; None takes those of the environment.
        options: settings of `KafkaAccess` by name; None as a value means that it was not given.
        environ: the environment; None takes the process's.

    Raises:
        ConfigurationError: a setting is unknown, malformed or contradicts another.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, tuple[Any, str]] = {}
    if path := environ.get(CONFIG_VARIABLE):
        given.update(_from_file(Path(path)))
    given.update(_from_environment(environ))
    known = KafkaAccess.model_fields
    given = {name: found for name, found in given.items() if name in known}
    for name, value in {"kafka": kafka, **(options or {})}.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"{name!r} is no setting of the connection to Kafka{hint}")
        if value is not None:
            given[name] = (value, f"argument {name}")
    try:
        access = KafkaAccess(**{name: value for name, (value, _) in given.items()})
    except ValidationError as error:
        raise ConfigurationError(_in_words(error, given)) from None
    access.check_kafka()
    return access


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the config file {path} is not TOML: {error}") from None
    for name in content:
        _known(name, f"config file {path}")
        if name in SECRET_SETTINGS:
            raise ConfigurationError(
                f"config file {path}: {name} is a secret, which config files do not keep: name a "
                f"file by {name}_file, or set {ENV_PREFIX}{name.upper()}"
            )
    return {name: (value, f"config file {path}") for name, value in content.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if name in SECRET_SETTINGS and not text:
            continue  # as a Secret leaves it that has no such key
        if name in Settings.model_fields:
            found[name] = (_split(name, text), f"environment {variable}")
        elif near := difflib.get_close_matches(name, Settings.model_fields, 1, cutoff=0.85):
            # Options of single commands have variables too, so only a likely slip is refused.
            raise ConfigurationError(
                f"environment {variable} is no setting; did you mean {ENV_PREFIX}{near[0].upper()}?"
            )
    return found


def _split(name: str, text: str) -> Any:
    if Settings.model_fields[name].annotation == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _known(name: str, where: str) -> None:
    if name in Settings.model_fields:
        return
    near = difflib.get_close_matches(name, Settings.model_fields, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigurationError(f"{where}: there is no setting {name!r}{hint}")


def _in_words(error: ValidationError, given: Mapping[str, tuple[Any, str]]) -> str:
    sentences = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        value, where = given.get(name, (problem["input"], "default"))
        reason = problem["msg"].replace("Input should be", "must be", 1)
        reason = reason.replace("Input is not", "is not", 1)
        if problem["type"] == "default_factory_not_called":
            continue  # its source setting is invalid, and reported
        sentences.append(f"{name} ({where}) {reason[0].lower()}{reason[1:]}, not {value!r}")
    return "; ".join(dict.fromkeys(sentences))


# --- contradictions --------------------------------------------------------------------------


def _check_workers(settings: Settings) -> None:
    if settings.workers == 1:
        return
    if settings.guarded and not settings.peer_identity:
        raise ConfigurationError(
            f"workers {settings.workers} call one another, and callers need a credential: set "
            "peer_secret_file or peer_names, by which proxies authenticate"
        )
    given_ports = {name: getattr(settings, name) for name in PORT_SETTINGS}
    for name, given in given_ports.items():
        if given and not re.search(r":\d+$", given):
            raise ConfigurationError(
                f"{name} {given} names no port, and each of the {settings.workers} workers has "
                "the next one: give that of the first"
            )
    taken: dict[Address, str] = {}
    for name, given in given_ports.items():
        for number in range(1, settings.workers + 1 if given else 1):
            address = _server(getattr(settings.of_worker(number), name))
            holder = name if "advertise" in name else taken.setdefault(address, name)
            if address.port and (holder != name or address.port > PORT_MAX):
                why = f"is one of {holder}" if holder != name else "does not exist"
                raise ConfigurationError(
                    f"{name} {given}: worker {number} has the port {address.port}, which {why}. "
                    f"Leave room for {settings.workers} ports"
                )


def _server(address_or_url: str) -> Address:
    host, _, port = address_or_url.rpartition("/")[2].rpartition(":")
    return Address(host, int(port))


def _check_times(settings: Settings) -> None:
    half_s = settings.half_retention_s / 2
    if settings.check_window_s > half_s:
        raise ConfigurationError(
            f"checks take up to {settings.check_window_s:g} s (check_after_s "
            f"{settings.check_after_s:g} + {settings.check_attempts_max - 1} times "
            f"check_interval_s {settings.check_interval_s:g} + check_timeout_s "
            f"{settings.check_timeout_s:g}), longer than half of half_retention_s ({half_s:g} s): "
            "check less often or keep half messages longer"
        )
    if settings.dedup_window_s < DEDUP_WINDOW_MIN_S:
        raise ConfigurationError(
            f"dedup_window_s {settings.dedup_window_s:g} is too short for a client to repeat a "
            f"prepare: at least {DEDUP_WINDOW_MIN_S:g} s"
        )
    if not SESSION_MIN_S <= settings.session_timeout_s <= SESSION_MAX_S:
        raise ConfigurationError(
            f"session_timeout_s {settings.session_timeout_s:g} is not between {SESSION_MIN_S:g} "
            f"and {SESSION_MAX_S:g}, what brokers allow by their group.min.session.timeout.ms and "
            "group.max.session.timeout.ms"
        )
    if settings.stuck_after_s < STUCK_MIN_S:
        raise ConfigurationError(
            f"stuck_after_s {settings.stuck_after_s:g} is too short: a partition is taken over "
            f"only after Kafka has ended the last owner's transaction; at least {STUCK_MIN_S:g} s"
        )
    if settings.dedup_window_s > half_s:
        raise ConfigurationError(
            f"dedup_window_s {settings.dedup_window_s:g} is longer than half of half_retention_s "
            f"({half_s:g} s): a repeated prepare could not be compared with the first any more"
        )


def _check_sizes(settings: Settings) -> None:
    room = settings.transaction_bytes_max + FRAME_ROOM_BYTES
    prepares = "what prepares may take (three quarters) of "
    in_flight = int(settings.in_flight_bytes_max * PREPARES_SHARE)
    # Only where callers have identities has each a part.
    known = settings.principals_file or settings.tls_client_ca_file
    part = "four fifths of " if known else ""
    ordered = (
        ("message_bytes_max", "transaction_bytes_max", settings.message_bytes_max,
         settings.transaction_bytes_max),
        ("transaction_bytes_max and 64 KiB", "frame_bytes_max", room, settings.frame_bytes_max),
        ("transaction_bytes_max and 64 KiB", "request_bytes_max", room,
         settings.request_bytes_max),
        ("frame_bytes_max", f"{prepares}session_in_flight_bytes_max", settings.frame_bytes_max,
         int(settings.session_in_flight_bytes_max * PREPARES_SHARE)),
        ("session_in_flight_bytes_max", "in_flight_bytes_max",
         settings.session_in_flight_bytes_max, settings.in_flight_bytes_max),
        ("request_bytes_max", f"{part}{prepares}in_flight_bytes_max", settings.request_bytes_max,
         share_max(in_flight) if part else in_flight),
        ("frame_bytes_max", "half of in_flight_bytes_max", settings.frame_bytes_max,
         int(settings.in_flight_bytes_max * RECEIVING_SHARE)),
        ("transaction_bytes_max", "bodies_bytes_max", settings.transaction_bytes_max,
         settings.bodies_bytes_max),
    )  # fmt: skip
    for inner, outer, inner_bytes, outer_bytes in ordered:
        if inner_bytes > outer_bytes:
            raise ConfigurationError(
                f"{inner} ({inner_bytes} bytes) must fit into {outer} ({outer_bytes} bytes)"
            )
    if settings.pending_group_max > settings.pending_max:
        raise ConfigurationError(
            f"pending_group_max {settings.pending_group_max} is more than pending_max "
            f"{settings.pending_max}: one group cannot hold more than all together"
        )
    if settings.frame_bytes_max > FRAME_BYTES_MAX:
        raise ConfigurationError(
            f"frame_bytes_max {settings.frame_bytes_max} is more than the {FRAME_BYTES_MAX} bytes "
            "that SDKs and proxies agree on"
        )
