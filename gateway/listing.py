"""``/v1/models``, merged over the fleet: from what probes read, so that no dead engine is asked."""

from typing import Any

import msgspec

from gateway.asks import Options
from gateway.fleet import Fleet
from gateway.tenants import Tenant
from gateway.workers import State


def models(fleet: Fleet, options: Options, tenant: Tenant) -> dict[str, dict[str, Any]]:
    """Name -> its entry: one a model, aliases included, only what ready workers serve and ``tenant`` may use.

    Where workers differ the shortest ``max_model_len`` is told, for a request may go to any of them.
    """
    entries: dict[str, dict[str, Any]] = {}
    for worker in fleet.workers.values():
        if worker.state is not State.READY:
            continue
        for model in worker.facts.models:
            known = entries.get(model.name)
            if known is None:
                listing = {"id": model.name, "object": "model", "created": 0, "owned_by": "warmroute", **model.listing}
                entries[model.name] = {**listing, "id": model.name}
            elif model.max_length is not None:
                known["max_model_len"] = min(known.get("max_model_len") or model.max_length, model.max_length)
    served = dict(entries)
    own = {alias: options.real(name) for alias, name in tenant.aliases.items()}
    for alias, name in {**options.aliases, **own}.items():
        if name in served and (alias not in served or alias in own):
            entries[alias] = {**served[name], "id": alias, "root": name}
    return {name: entry for name, entry in sorted(entries.items()) if tenant.may_use(name)}


def models_body(entries: dict[str, dict[str, Any]]) -> bytes:
    """The OpenAI list object."""
    return msgspec.json.encode({"object": "list", "data": list(entries.values())})
