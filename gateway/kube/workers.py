"""Workers of Kubernetes objects.

What a pod (or, where endpoints are followed, the slice of its Service) says of itself by labels and annotations
``warmroute.io/<key>`` goes before what the configuration says of all: ``port``, ``scheme``, ``engine``, ``role``, ``models``
(separated by commas), ``pool``, ``protocol``. Labels cannot hold commas; an annotation goes before a label. An object of which
no worker can be made any more, because somebody wrote nonsense on it, stays the worker that it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from gateway.config import WorkerConfig
from gateway.config_check import check_worker
from gateway.discovery.base import Contact, Found, Lost, Template
from gateway.kube.objects import EndpointConditions, EndpointSlice, Meta, Pod
from gateway.workers import WorkerSpec

PREFIX = "warmroute.io/"
KEYS = ("engine", "role", "models", "pool", "protocol")
SERVICE = "kubernetes.io/service-name"
"""Label of a slice: whose it is."""
TRUE = "True"
HIGHEST = 65535

Key = tuple[str, str]


@dataclass(slots=True)
class Made:
    """What was made of one version of an object; ``wrong``: why no more could be."""

    version: tuple[str, ...]
    found: list[Found]
    wrong: str | None = None


NOTHING = Made((), [])


class Maker:
    """Makes workers at ``ports``, by number or name (``None``: the only one that there is, or the one called ``http``), and
    remembers what it made of each object."""

    def __init__(self, template: Template, ports: list[int | str | None], scheme: str, contact: Contact) -> None:
        self.template = template
        self.ports = ports
        self.scheme = scheme
        self.contact = contact
        self._made: dict[Key, Made] = {}

    def of_pods(self, pods: Iterable[Pod]) -> list[Found]:
        """A worker for each port of each."""
        made: dict[Key, Made] = {}
        for pod in pods:
            key, version = (pod.metadata.namespace, pod.metadata.uid), (pod.metadata.resource_version,)
            known = self._made.get(key, NOTHING)
            if known.version == version:
                made[key] = known
                continue
            try:
                told = [of_pod(pod, self.template, port, self.scheme) for port in self.ports]
                made[key] = Made(version, [found for found in told if found is not None])
            except ValueError as error:
                stays = [replace(found, serving=ready(pod)) for found in known.found]
                made[key] = Made(version, stays, str(error))
        return self._told(made)

    def of_slices(self, slices: Iterable[EndpointSlice]) -> list[Found]:
        """A worker for each endpoint, Service by Service."""
        made: dict[Key, Made] = {}
        services: dict[Key, list[EndpointSlice]] = {}
        for each in slices:
            name = (each.metadata.labels or {}).get(SERVICE, each.metadata.name)
            services.setdefault((each.metadata.namespace, name), []).append(each)
        for key, some in services.items():
            version = tuple(f"{each.metadata.name} {each.metadata.resource_version}" for each in some)
            known = self._made.get(key, NOTHING)
            if known.version == version:
                made[key] = known
                continue
            try:
                made[key] = Made(version, of_slices(some, self.template, self.ports[0], self.scheme))
            except ValueError as error:
                there = {host for each in some for one in each.endpoints or () for host in one.addresses or ()}
                stays = [found for found in known.found if urlsplit(found.spec.url).hostname in there]
                made[key] = Made(version, stays, str(error))
        return self._told(made)

    def _told(self, made: dict[Key, Made]) -> list[Found]:
        self._made = made
        wrong = [each.wrong for each in made.values() if each.wrong is not None]
        if wrong:
            self.contact.lost(Lost("unclear", wrong[-1]), "objects")
        else:
            self.contact.well("objects")
        return [found for each in made.values() for found in each.found]


class Unclear(ValueError):
    """An object that cannot be made a worker of; the message names it and the cure."""


def ready(pod: Pod) -> bool:
    """Whether it is to get traffic: it does not end, is Ready, and so say its readiness gates."""
    states = {condition.type: condition.status for condition in pod.status.conditions or ()}
    gates = [gate.condition_type for gate in pod.spec.readiness_gates or ()]
    return pod.metadata.deletion_timestamp is None and all(states.get(name) == TRUE for name in ("Ready", *gates))


def of_pod(pod: Pod, template: Template, port: int | str | None, scheme: str) -> Found | None:
    """The worker that ``pod`` is; ``None``: it has no address yet, or is over. Raises `Unclear`."""
    if not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed"):
        return None
    name = f"pod {pod.metadata.namespace}/{pod.metadata.name}"
    said = _said(pod.metadata)
    told = _port(name, said.pop("port", port), _named_ports(pod))
    spec = _spec(name, template, said.pop("scheme", scheme), pod.status.pod_ip, told, said)
    return Found(spec, ready(pod), pod.metadata.uid or None)


def of_slices(slices: list[EndpointSlice], template: Template, port: int | str | None, scheme: str) -> list[Found]:
    """The workers that endpoints are. A pod that has addresses of two families is one worker. Raises `Unclear`."""
    found: dict[str, Found] = {}
    for each in sorted(slices, key=lambda each: each.address_type):
        if each.address_type not in ("IPv4", "IPv6") or each.metadata.deletion_timestamp is not None:
            continue
        name = f"endpoint slice {each.metadata.namespace}/{each.metadata.name}"
        ports = {one.name or "": one.port for one in each.ports or () if one.port and one.protocol in (None, "TCP")}
        if not each.endpoints:
            continue
        said = _said(each.metadata)
        told = _port(name, said.pop("port", port), ports)
        scheme_told = said.pop("scheme", scheme)
        for endpoint in each.endpoints:
            if not endpoint.addresses:
                continue
            states = endpoint.conditions or EndpointConditions()
            # Not said means ready. Services may have those that end called ready too.
            serving = states.ready is not False and not states.terminating
            who = endpoint.target_ref.uid if endpoint.target_ref is not None else ""
            spec = _spec(name, template, scheme_told, endpoint.addresses[0], told, dict(said))
            made = Found(spec, serving, who or None)
            key = who or made.id
            if key not in found or (serving and not found[key].serving):
                found[key] = made
    return list(found.values())


def _said(meta: Meta) -> dict[str, str]:
    told = {**(meta.labels or {}), **(meta.annotations or {})}
    keys = ("port", "scheme", *KEYS)
    return {key: told[PREFIX + key].strip() for key in keys if told.get(PREFIX + key, "").strip()}


def _named_ports(pod: Pod) -> dict[str, int | None]:
    containers = [*(pod.spec.containers or ()), *(pod.spec.init_containers or ())]
    ports = [port for container in containers for port in container.ports or () if port.protocol in (None, "TCP")]
    return {port.name or str(port.container_port): port.container_port for port in ports}


def _port(name: str, told: int | str | None, ports: Mapping[str, int | None]) -> int:
    """The number of the port that was told, by number or name, or of the only one that there is."""
    if isinstance(told, str) and told.isascii() and told.isdigit():
        told = int(told)
    if told is None:
        known = [port for port in ports.values() if port]
        found = ports.get("http") or (known[0] if len(known) == 1 else None)
        if found is None:
            raise Unclear(f"{name} has {len(known)} ports: say which by the option port, or by {PREFIX}port")
        return found
    number = ports.get(told) if isinstance(told, str) else told
    if number is None or not 0 < number <= HIGHEST:
        raise Unclear(f"{name} has no port {told!r}; its ports: {', '.join(map(str, ports)) or 'none'}")
    return number


def _spec(name: str, template: Template, scheme: str, host: str, port: int, said: dict[str, str]) -> WorkerSpec:
    """Raises `Unclear`."""
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    wrong = _wrong(tuple(said.items()))
    if wrong:
        raise Unclear("; ".join(name + each for each in wrong))
    try:
        return template.spec(url, **_options(said))
    except ValueError as error:
        raise Unclear(f"{name}: {error}") from None


@lru_cache(maxsize=256)
def _wrong(said: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """What is wrong with what workers say of themselves: most say the same."""
    worker = WorkerConfig("http://found", **_options(dict(said)))
    return tuple(f"{problem.key}: {problem.message}" for problem in check_worker(worker, ""))


def _options(said: dict[str, str]) -> dict[str, Any]:
    models = said.get("models")
    told = {} if models is None else {"models": [each.strip() for each in models.split(",") if each.strip()]}
    return {**said, **told}
