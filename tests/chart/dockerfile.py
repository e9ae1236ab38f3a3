"""Run the steps of a Dockerfile in plain folders, so that they are tested without Docker.

Only what our Dockerfile uses is understood; anything else is refused. Needs root, and a folder that
holds what the first `FROM` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

STEP_S = 900
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ_ONLY = """
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
for folder in $WRITABLE; do mount --bind "$root$folder" "$root$folder"; done
mount -o remount,ro,bind "$root"
exec "$@"
"""
_WRITABLE = 'mount -t proc proc "$1/proc"; shift; exec "$@"'


@dataclass
class Stage:
    """One stage: its folder, and what its instructions set."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile: name and rest."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n", "", lines).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def call(
    stage: Stage, words: list[str], *, writable: tuple[str, ...] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Call a program in a stage as its user. With `writable`, nothing but these and /tmp is."""
    given = {"PATH": PATH, "HOME": "/tmp"} | stage.variables | variables
    enter = ["chroot", f"--userspec={stage.user}", str(stage.folder)]
    inside = ["/usr/bin/env", "-i", f"--chdir={stage.workdir}"]
    inside += [f"{name}={value}" for name, value in given.items()]
    script = _WRITABLE if writable is None else _READ_ONLY
    apart = ["unshare", "--mount", "sh", "-euc", script, "sh", str(stage.folder)]
    return subprocess.run(
        [*apart, *enter, *inside, *words],
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
        env={"PATH": os.environ["PATH"], "WRITABLE": " ".join(writable or ())},
    )


class Builder:
    """Builds stages in folders below one folder.

    Args:
        dockerfile: its text.
        context: the folder that COPY takes from.
        base: a folder that stands for the image from outside.
        work: where the stages' folders are made.
        surroundings: variables for RUN that this machine's network needs.
    """

    def __init__(
        self, dockerfile: str, context: Path, base: Path, work: Path,
        surroundings: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._steps: dict[str, list[tuple[str, str]]] = {}
        self.images: set[str] = set()
        self._context, self._base, self._work = context, base, work
        self._surroundings = dict(surroundings)
        self._built: dict[str, Stage] = {}
        for name, rest in instructions(dockerfile):
            if name == "FROM":
                stage = rest.split(" AS ")[1]
                self._steps[stage] = []
            self._steps[stage].append((name, rest))

    def build(self, name: str) -> Stage:
        """Build a stage, and those that it needs, once."""
        if name not in self._built:
            stage = Stage(self._work / name)
            for instruction, rest in self._steps[name]:
                getattr(self, f"_{instruction.lower()}")(stage, rest)
            self._built[name] = stage
        return self._built[name]

    def _from(self, stage: Stage, rest: str) -> None:
        source = rest.split(" AS ")[0]
        if source in self._steps:
            before = self.build(source)
            stage.variables = dict(before.variables)
            stage.workdir, stage.user = before.workdir, before.user
            folder = before.folder
        else:
            self.images.add(source)
            folder = self._base
        subprocess.run(["cp", "-a", "--reflink=auto", folder, stage.folder], check=True)

    def _env(self, stage: Stage, rest: str) -> None:
        for word in rest.split():
            name, _, value = word.partition("=")
            path = stage.variables.get("PATH", PATH)
            stage.variables[name] = value.replace("$PATH", path)
            assert "$" not in stage.variables[name]

    def _arg(self, _stage: Stage, rest: str) -> None:
        """A build's argument is one of the surroundings, or unset."""
        assert rest.isidentifier()

    def _workdir(self, stage: Stage, rest: str) -> None:
        stage.workdir = rest
        (stage.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, stage: Stage, rest: str) -> None:
        stage.user = rest

    def _run(self, stage: Stage, rest: str) -> None:
        done = call(stage, ["/bin/sh", "-c", rest], **self._surroundings)
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout}{done.stderr}"

    def _copy(self, stage: Stage, rest: str) -> None:
        origin = self._context
        words = rest.split()
        if words[0].startswith("--from="):
            origin = self.build(words.pop(0).removeprefix("--from=")).folder
        *sources, target = words
        into = stage.folder / Path(stage.workdir, target).as_posix().lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, into)

    def _entrypoint(self, stage: Stage, rest: str) -> None:
        stage.entrypoint = json.loads(rest)

    def _cmd(self, stage: Stage, rest: str) -> None:
        assert json.loads(rest)

    def _expose(self, stage: Stage, rest: str) -> None:
        assert int(rest)
