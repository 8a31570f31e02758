"""``/v1/models``, merged over the fleet: from what probes read, so that no dead engine is asked."""

from typing import Any

import msgspec

from gateway.fleet import Fleet
from gateway.workers import State


def models(fleet: Fleet, aliases: dict[str, str], allowed: frozenset[str] | None) -> dict[str, dict[str, Any]]:
    """Name -> its entry: one a model, aliases included, only what ready workers serve and ``allowed`` names.

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
    for alias, name in aliases.items():
        if name in entries and alias not in entries:
            entries[alias] = {**entries[name], "id": alias, "root": name}
    return {name: entry for name, entry in sorted(entries.items()) if allowed is None or name in allowed}


def models_body(entries: dict[str, dict[str, Any]]) -> bytes:
    """The OpenAI list object."""
    return msgspec.json.encode({"object": "list", "data": list(entries.values())})
