"""The few fields that are read of Kubernetes objects."""

from __future__ import annotations

from typing import Any

import msgspec


class Meta(msgspec.Struct, rename="camel", kw_only=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class ContainerPort(msgspec.Struct, rename="camel", kw_only=True):
    name: str | None = None
    container_port: int = 0
    protocol: str | None = None


class Container(msgspec.Struct):
    ports: list[ContainerPort] | None = None


class Gate(msgspec.Struct, rename="camel"):
    condition_type: str = ""


class PodSpec(msgspec.Struct, rename="camel", kw_only=True):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    readiness_gates: list[Gate] | None = None


class PodStatus(msgspec.Struct):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    metadata: Meta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class EndpointConditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(msgspec.Struct):
    kind: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel", kw_only=True):
    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    target_ref: Reference | None = None


class EndpointPort(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, rename="camel", kw_only=True):
    metadata: Meta
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class TargetPort(msgspec.Struct):
    number: int = 0


class PoolSpec(msgspec.Struct, rename="camel", kw_only=True):
    selector: dict[str, Any] | None = None
    target_ports: list[TargetPort] | None = None
    target_port_number: int | None = None


class InferencePool(msgspec.Struct):
    metadata: Meta
    spec: PoolSpec = msgspec.field(default_factory=PoolSpec)
