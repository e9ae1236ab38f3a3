"""Errors of the embedded Kafka. Every message names the next step."""

from __future__ import annotations

from txbroker.errors import TxbrokerError


class EmbeddedKafkaError(TxbrokerError):
    """The embedded Kafka cannot be used."""


class JavaNotFoundError(EmbeddedKafkaError):
    """No Java 17 or newer was found: install one, or pip install 'txbroker[embedded]'."""


class UnknownVersionError(EmbeddedKafkaError):
    """There is no lock file for this version of Kafka: create one with txbroker.embedded.lock."""


class DownloadError(EmbeddedKafkaError):
    """The jars of Kafka could not be downloaded: check the network or TXBROKER_MAVEN_REPOSITORY."""


class WrongHashError(DownloadError):
    """A downloaded jar is not the one in the lock file: the repository serves something else."""


class DiskFullError(DownloadError):
    """The disk is full: free space, or set XDG_CACHE_HOME to another disk."""


class DataDirInUseError(EmbeddedKafkaError):
    """Another process runs Kafka on this data directory: stop it or choose another directory."""


class DataDirError(EmbeddedKafkaError):
    """The data directory cannot be used: check that it is a writable folder."""


class StartCancelledError(EmbeddedKafkaError):
    """The start was cancelled by stop() or kill()."""


class KafkaStartError(EmbeddedKafkaError):
    """Kafka did not start: see its log."""
