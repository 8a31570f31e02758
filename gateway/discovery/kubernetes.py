"""Pods, or endpoints of Services, of a Kubernetes cluster.

``selector`` takes pods by their labels, ``service`` the endpoints of one Service, ``services`` those of all Services with such
labels, each in ``namespaces`` (by default the gateway's own; ``"*"``: all). What workers say of themselves by labels and
annotations is told in `gateway.kube.workers`. A pod that is not ready yet is not listed as serving, nor is one that ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.discovery.base import BadOption, Found, Source, listed, one_of, port as port_number, seconds, text
from gateway.kube.access import Reach
from gateway.kube.api import Api, Collection
from gateway.kube.mirror import Mirror, Mirrors
from gateway.kube.objects import EndpointSlice, Pod
from gateway.kube.workers import SERVICE, Maker

SLICES = "discovery.k8s.io/v1"


class Kubernetes(Source):
    """``port``: by number or by name; if not given, the only one that there is, or the one called ``http``."""

    def __init__(
        self,
        selector: Any = None,
        service: Any = None,
        services: Any = None,
        namespace: Any = None,
        namespaces: Any = None,
        port: Any = None,
        scheme: Any = "http",
        kubeconfig: Any = None,
        context: Any = None,
        api: Any = None,
        token_file: Any = None,
        ca: Any = None,
        relist: Any = "3m",
    ) -> None:
        given = {"selector": selector, "service": service, "services": services}
        told = [option for option, value in given.items() if value is not None]
        if len(told) != 1:
            raise BadOption(
                "one of selector (of pods), service and services is needed", told[-1] if told else "selector"
            )
        text(told[0], given[told[0]])
        self.pods = selector is not None
        self.labels = f"{SERVICE}={service}" if service is not None else selector or services
        self.namespaces = spaces(namespace, namespaces)
        self.port = port if port is None or isinstance(port, str) else port_number("port", port)
        self.scheme = one_of("scheme", scheme, ("http", "https"))
        self.reach = Reach(kubeconfig, context, api, token_file, ca)
        self.relist = seconds("relist", relist, 1, 3600)

    async def watch(self) -> AsyncIterator[list[Found]]:
        """See the module's head."""
        access = self.reach.access()
        spaces = self.namespaces or [access.namespace or "default"]
        group, resource = ("v1", "pods") if self.pods else (SLICES, "endpointslices")
        async with Api(access) as api, Mirrors(self.contact) as mirrors:
            copies: list[Mirror[Any]] = []
            for space in spaces:
                collection = Collection(group, resource, None if space == "*" else space, self.labels)
                kind = Pod if self.pods else EndpointSlice
                copies.append(Mirror(api, collection, kind, mirrors.changed, self.contact, self.relist))
                mirrors.begin(copies[-1])
            maker = Maker(self.template, [self.port], self.scheme, self.contact)
            before: list[Found] | None = None
            while True:
                await mirrors.turn()
                if any(copy.objects is None for copy in copies):
                    # Of a namespace that was never listed nothing is known: no list would be complete.
                    continue
                objects = [each for copy in copies for each in (copy.objects or {}).values()]
                found = listed(maker.of_pods(objects) if self.pods else maker.of_slices(objects))
                if found != before:
                    before = found
                    yield found


def spaces(namespace: Any, namespaces: Any) -> list[str]:
    """Those that are told; none: the gateway's own. Raises `BadOption`."""
    if namespace is not None and namespaces is not None:
        raise BadOption("namespace and namespaces both say where: take one of them out", "namespace")
    if namespaces is None:
        return [] if namespace is None else [text("namespace", namespace)]
    if not isinstance(namespaces, list) or not namespaces:
        raise BadOption("namespaces must be a list of names; leave it out for the gateway's own", "namespaces")
    return list(dict.fromkeys(text("namespaces", each) for each in namespaces))


SOURCE = Kubernetes
