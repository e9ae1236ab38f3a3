"""What runs in the Pods of a rendered chart, and what txbroker itself makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.kit.command_lines import parsed
from tests.kit.secret_files import secret_file
from txbroker.config.settings import CONFIG_VARIABLE, Settings, load_settings

Object = dict[str, Any]
Render = Callable[..., list[Object]]
Helm = Callable[..., tuple[int, str]]
FOLDER = "/etc/txbroker"
POD, POD_IP = "shop-txbroker-0", "10.0.0.7"
SECRET = "a secret of the cluster"
PRINCIPALS = f"""\
[principals.shop]
role = "producer"
token_sha256 = "{"0" * 64}"
groups = ["shop"]
topics = ["orders"]
"""


class Pod(NamedTuple):
    """The template of a Pod: its owner, its labels and its content."""

    owner: Object
    labels: dict[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        """The only container."""
        (found,) = self.spec["containers"]
        return dict(found)


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [found for found in objects if found["kind"] == kind]


def one(objects: list[Object], kind: str, end: str = "") -> Object:
    """Return the only object of a kind whose name ends so."""
    (found,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"].endswith(end))
    return found


def pods(objects: list[Object]) -> Iterator[Pod]:
    """Yield the template of every Pod."""
    for found in objects:
        spec = found.get("spec", {})
        if found["kind"] == "Pod":
            yield Pod(found, found["metadata"]["labels"], spec)
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            yield Pod(found, template["metadata"]["labels"], template["spec"])


def pod_of(objects: list[Object], kind: str) -> Pod:
    """Return the template of the Pods of the only object of a kind."""
    (found,) = (pod for pod in pods(objects) if pod.owner["kind"] == kind)
    return found


def environment(pod: Pod) -> dict[str, str]:
    """Return the variables of the container, as Kubernetes would fill them in."""
    found: dict[str, str] = {}
    for variable in pod.container["env"]:
        if "value" in variable:
            value = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            field = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = {"metadata.name": POD, "status.podIP": POD_IP}[field]
        else:
            value = "of a secret"
        found[variable["name"]] = expanded(value, found)
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return a text with `$(NAME)` filled in, which must have been named before."""
    return re.sub(r"\$\(([A-Z_]+)\)", lambda match: variables[match[1]], text)


def mounted(pod: Pod, objects: list[Object], root: Path) -> None:
    """Make the files below /etc/txbroker that the container would find, below `root`."""
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for mount in pod.container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if not mount["mountPath"].startswith(FOLDER):
            continue
        folder = root / mount["mountPath"].removeprefix("/")
        folder.mkdir(parents=True)
        if volume["name"] == "principals":
            (item,) = volume.get("secret", volume.get("configMap"))["items"]
            (folder / item["path"]).write_text(PRINCIPALS)
        elif "configMap" in volume:
            name = volume["configMap"]["name"]
            (maps,) = (m for m in of_kind(objects, "ConfigMap") if m["metadata"]["name"] == name)
            for file, text in maps["data"].items():
                (folder / file).write_text(text.replace(FOLDER, f"{root}{FOLDER}"))
        elif "projected" in volume:
            for source in volume["projected"]["sources"]:
                path = folder / source["serviceAccountToken"]["path"]
                secret_file(path, SECRET, volume["projected"]["defaultMode"])
        else:
            for item in volume["secret"].get("items", []):
                secret = f"{SECRET}, {volume['name']}"  # two Secrets are never the same
                secret_file(folder / item["path"], secret, volume["secret"]["defaultMode"])


def called(pod: Pod) -> tuple[str, click.Context]:
    """Return the command that the container calls, and its context with all options read."""
    assert pod.container["command"] == ["txbroker"]
    return parsed(expanded(word, environment(pod)) for word in pod.container["args"])


def settings_of(pod: Pod, objects: list[Object], root: Path) -> Settings:
    """Return the settings that txbroker has in the container, with its files below `root`."""
    mounted(pod, objects, root)
    _, context = called(pod)
    given = {
        name: value.replace(FOLDER, f"{root}{FOLDER}") if isinstance(value, str) else value
        for name, value in context.params.items()
        if name in Settings.model_fields and value not in (None, ())
    }
    return _loaded(pod, root, given)


def settings_of_commands(pod: Pod, objects: list[Object], root: Path) -> Settings:
    """Return the settings that another command has that is called in the container."""
    mounted(pod, objects, root)
    return _loaded(pod, root, {})


def _loaded(pod: Pod, root: Path, given: dict[str, Any]) -> Settings:
    environ = {
        name: value.replace(FOLDER, f"{root}{FOLDER}") for name, value in environment(pod).items()
    }
    return load_settings(given, config=Path(environ[CONFIG_VARIABLE]), environ=environ)
