"""Tenants as the control plane shows them: what each is granted, and what it uses of that. Keys are not among it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gateway.exchange import QUEUED
from gateway.meters import Meter
from gateway.tenants import Tenant
from gateway.trials import Policies

if TYPE_CHECKING:
    from gateway.app import Gateway


def activity(gateway: Gateway) -> dict[str, dict[str, int]]:
    """Tenant -> its requests that run, and that wait; tenants without any are absent."""
    running: Counter[str] = Counter()
    queued: Counter[str] = Counter()
    for exchange in gateway.exchanges:
        (queued if exchange.phase == QUEUED else running)[exchange.ask.tenant.name] += 1
    return {name: {"running": running[name], "queued": queued[name]} for name in running | queued}


def rows(gateway: Gateway) -> list[dict[str, Any]]:
    """All tenants, by name."""
    busy = activity(gateway)
    named = {tenant.name: tenant for tenant in gateway.tenants.all()}
    return [_row(gateway, named[name], busy.get(name)) for name in sorted(named)]


def _row(gateway: Gateway, tenant: Tenant, busy: dict[str, int] | None) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "policy": _policy(tenant.policies),
        "policies": {model: _policy(policies) for model, policies in tenant.by_model.items()},
        "priority": tenant.priority or gateway.admission.options.priorities[0].name,
        "weight": tenant.weight,
        "isolation": "isolated" if tenant.isolated else "shared",
        "models": None if tenant.models is None else sorted(tenant.models),
        "aliases": dict(tenant.aliases),
        "canonical": sorted(tenant.canonical),
        "limits": _limits(tenant.meter, gateway.clock()),
        "running": busy["running"] if busy else 0,
        "queued": busy["queued"] if busy else 0,
    }


def _policy(policies: Policies | None) -> str | None:
    return None if policies is None else policies.main.name


def _limits(meter: Meter | None, now: float) -> dict[str, dict[str, float]]:
    """Limit -> how much is granted, and how much of it is used; what is not limited is absent."""
    if meter is None:
        return {}
    used = {
        "requests_per_minute": meter.requests.now(now),
        "prompt_tokens_per_minute": meter.prompt.now(now),
        "computed_tokens_per_minute": meter.computed.now(now),
        "concurrency": meter.running,
    }
    granted = {name: getattr(meter.limits, name) for name in used}
    return {
        name: {"granted": granted[name], "used": round(value)}
        for name, value in used.items()
        if granted[name] is not None
    }
