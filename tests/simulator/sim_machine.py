"""What txbroker takes from the machine that it runs on, taken from the simulation instead:
clocks, random numbers, and names that are unique by chance."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import structlog

from tests.simulator.sim_loop import PROCESS

START_S = 1_700_000_000.0
"""When each run begins, by a clock that is right, seconds since 1970."""


def wall_s() -> float:
    """Return the wall clock of the calling process's machine, seconds since 1970."""
    loop = asyncio.get_running_loop()
    return START_S + loop.time() + PROCESS.get().wall_ahead_s


def wall_ms() -> int:
    return int(wall_s() * 1000)


class _Time:
    """In place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        """The monotonic clock. It begins somewhere, as everywhere."""
        return 5000.0 + asyncio.get_running_loop().time()

    time = staticmethod(wall_s)


class _Random:
    """In place of the module `random`: every process has its own numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(PROCESS.get().random, name)


class _Uuid:
    """In place of the module `uuid`."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        """A name that is unique within the run."""
        return uuid.UUID(int=PROCESS.get().random.getrandbits(128), version=4)


class _Secrets:
    """In place of the module `secrets`."""

    @staticmethod
    def randbits(bits: int) -> int:
        return PROCESS.get().random.getrandbits(bits)


_time, _random = _Time(), _Random()
_MODULES: dict[Any, Any] = {time: _time, random: _random, uuid: _Uuid(), secrets: _Secrets()}
_FUNCTIONS: dict[Any, Any] = {
    time.monotonic: _time.monotonic,
    time.time: _time.time,
    random.random: lambda: PROCESS.get().random.random(),
}


def _replaced(value: Any, by: dict[Any, Any]) -> Any:
    """Return what stands for a value; the value itself for a foreign one."""
    kinds = (ModuleType, type, FunctionType, type(time.time), type(random.random))
    return by.get(value, value) if isinstance(value, kinds) else value


def _ours() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "txbroker" and isinstance(module, ModuleType)
    ]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType):
            yield value
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (each for each in vars(value).values() if isinstance(each, FunctionType))


@contextmanager
def simulated_machine(heard: Callable[[str], None] | None = None) -> Iterator[None]:
    """Let every module of txbroker that is imported by now take all of this from the simulation.

    Args:
        heard: called with every line that txbroker logs, if given.
    """
    undo: list[Callable[[], None]] = []
    for module in _ours():
        for name, value in list(vars(module).items()):
            instead = _replaced(value, _MODULES)
            if instead is not value:
                setattr(module, name, instead)
                undo.append(partial(setattr, module, name, value))
        for function in _functions(module):
            undo.extend(_replace_defaults(function))
    settings, disabled = structlog.get_config(), logging.root.manager.disable
    _listen(heard)
    collects = gc.isenabled()
    # Garbage of a run is collected between runs: it is faster, and happens at no other
    # moment when the same run comes again.
    gc.disable()
    gc.freeze()
    unraisable = sys.unraisablehook
    # Objects collected in the middle of their work may raise.
    sys.unraisablehook = _ignore
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = unraisable
        gc.unfreeze()
        if collects:
            gc.enable()
        for each in undo:
            each()
        structlog.configure(**settings)
        logging.disable(disabled)


def _replace_defaults(function: FunctionType) -> Iterator[Callable[[], None]]:
    plain, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    new_plain = tuple(_replaced(value, _FUNCTIONS) for value in plain)
    new_named = {name: _replaced(value, _FUNCTIONS) for name, value in named.items()}
    for name, old, new in (
        ("__defaults__", plain, new_plain),
        ("__kwdefaults__", named, new_named),
    ):
        if new != old:
            setattr(function, name, new)
            yield partial(setattr, function, name, old)


class _Silent(structlog.BoundLoggerBase):
    """A logger that drops everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None


def _listen(heard: Callable[[str], None] | None) -> None:
    logging.disable(logging.CRITICAL)
    if heard is None:
        structlog.configure(wrapper_class=_Silent, cache_logger_on_first_use=False)
        return

    def record(_: Any, level: str, event: dict[str, Any]) -> Any:
        fields = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
        at_s, who = asyncio.get_running_loop().time(), PROCESS.get().name
        heard(f"{at_s:10.4f} {who}: {level}: {event.get('event')} {fields}")
        raise structlog.DropEvent

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        processors=[record],
        cache_logger_on_first_use=False,
    )
