"""The pods of an InferencePool of the Gateway API Inference Extension: the object says which, and at which ports.

Both the pool and its pods are followed. ``inference.networking.k8s.io/v1`` is asked for first and, where a cluster does not
have it, the older ``inference.networking.x-k8s.io/v1alpha2``. A pool that is deleted has no workers; one that was never there
tells nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.discovery.base import Found, Lost, Source, listed, one_of, seconds, text
from gateway.kube.access import Reach
from gateway.kube.api import Api, Collection
from gateway.kube.mirror import Mirror, Mirrors
from gateway.kube.objects import InferencePool as Object, Pod
from gateway.kube.workers import Maker

V1, OLDER = "inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2"
RESOURCE = "inferencepools"

Told = tuple[str, tuple[int | str | None, ...]]
"""Selector of pods, and their ports."""


class InferencePool(Source):
    """``pool`` is its name."""

    def __init__(
        self,
        pool: Any,
        namespace: Any = None,
        scheme: Any = "http",
        kubeconfig: Any = None,
        context: Any = None,
        api: Any = None,
        token_file: Any = None,
        ca: Any = None,
        relist: Any = "3m",
    ) -> None:
        self.pool = text("pool", pool)
        self.namespace = None if namespace is None else text("namespace", namespace)
        self.scheme = one_of("scheme", scheme, ("http", "https"))
        self.reach = Reach(kubeconfig, context, api, token_file, ca)
        self.relist = seconds("relist", relist, 1, 3600)

    async def watch(self) -> AsyncIterator[list[Found]]:
        """See the module's head."""
        access = self.reach.access()
        space = self.namespace or access.namespace or "default"
        async with Api(access) as api, Mirrors(self.contact) as mirrors:
            wanted = Collection(await self._group(api, space), RESOURCE, space, fields=f"metadata.name={self.pool}")
            pool = Mirror(api, wanted, Object, mirrors.changed, self.contact, self.relist)
            mirrors.begin(pool)
            told: Told | None = None
            pods: Mirror[Pod] | None = None
            maker = Maker(self.template, [], self.scheme, self.contact)
            before: list[Found] | None = None
            while True:
                await mirrors.turn()
                now = self._told(pool, told)
                if now != told:
                    if pods is not None:
                        await mirrors.end(pods)
                        pods = None
                    told = now
                    if told is not None:
                        maker = Maker(self.template, list(told[1]), self.scheme, self.contact)
                        of_pods = Collection("v1", "pods", space, told[0])
                        pods = Mirror(api, of_pods, Pod, mirrors.changed, self.contact, self.relist)
                        mirrors.begin(pods)
                if pods is not None and pods.objects is not None:
                    found = listed(maker.of_pods(pods.objects.values()))
                elif pods is None and before is not None and pool.objects == {}:
                    found = []
                else:
                    continue
                if found != before:
                    before = found
                    yield found

    async def _group(self, api: Api, space: str) -> str:
        """The one that the cluster has. Raises `Lost`."""
        for group in (V1, OLDER):
            try:
                await api.page(Collection(group, RESOURCE, space), {"limit": "1"})
                return group
            except Lost as lost:
                if lost.reason != "not_found" or group == OLDER:
                    raise
        raise AssertionError

    def _told(self, pool: Mirror[Object], before: Told | None) -> Told | None:
        """What the pool says, or said ``before`` if that cannot be used any more; ``None``: there is none."""
        objects = [each for (_, name), each in (pool.objects or {}).items() if name == self.pool]
        if not objects:
            if pool.objects is not None:
                self.contact.lost(Lost("no_pool", f"there is no InferencePool called {self.pool!r}"), "pool")
            return None
        spec = objects[0].spec
        labels = spec.selector or {}
        if "matchLabels" in labels:
            labels = labels["matchLabels"]
        ports: list[int | None] = [port.number for port in spec.target_ports or ()]
        ports = ports or [spec.target_port_number]
        if not isinstance(labels, dict) or not labels or not all(isinstance(port, int) for port in ports):
            wrong = f"the InferencePool {self.pool!r} has no selector or no target port"
            self.contact.lost(Lost("unclear", wrong), "pool")
            return before
        self.contact.well("pool")
        return ",".join(f"{name}={value}" for name, value in sorted(labels.items())), tuple(ports)


SOURCE = InferencePool
