"""Check over the wire protocol whether a broker is ready.

Sends ApiVersions 0 and Metadata 2 (https://kafka.apache.org/protocol). Unlike a client library it
needs no event loop and cannot hang.
"""

from __future__ import annotations

import socket
import struct

_API_VERSIONS = 18
_METADATA = 3
_NO_TOPICS = struct.pack(">i", 0)


def is_ready(port: int, cluster_id: str, timeout_s: float) -> bool:
    """Return whether the broker at 127.0.0.1:`port` answers and is in service.

    False for a broker of another cluster, which may have taken the port first.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            (error_code,) = struct.unpack_from(">h", _ask(connection, _API_VERSIONS, 0, b""))
            if error_code != 0:
                return False
            return _is_served(_ask(connection, _METADATA, 2, _NO_TOPICS), port, cluster_id)
    except (OSError, struct.error, EOFError):
        return False


def _ask(connection: socket.socket, api_key: int, api_version: int, body: bytes) -> bytes:
    client_id = b"txbroker-embedded"
    header = struct.pack(">hhih", api_key, api_version, 1, len(client_id)) + client_id
    connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
    (size,) = struct.unpack(">i", _read(connection, 4))
    return _read(connection, size)[4:]  # after the correlation id


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    content = b""
    while len(content) < n_bytes:
        chunk = connection.recv(n_bytes - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content


def _is_served(metadata: bytes, port: int, cluster_id: str) -> bool:
    (brokers,) = struct.unpack_from(">i", metadata)
    at = 4
    ports = []
    for _ in range(brokers):
        (host_size,) = struct.unpack_from(">h", metadata, at + 4)
        at += 6 + host_size
        (broker_port, rack_size) = struct.unpack_from(">ih", metadata, at)
        ports.append(broker_port)
        at += 6 + max(rack_size, 0)
    (id_size,) = struct.unpack_from(">h", metadata, at)
    at += 2
    answered_id = metadata[at : at + max(id_size, 0)].decode("ascii", "replace")
    (controller_id,) = struct.unpack_from(">i", metadata, at + max(id_size, 0))
    return port in ports and answered_id == cluster_id and controller_id >= 0
