"""vLLM's MooncakeConnector: both engines at the same time, under a transfer id; the decode engine is told where the prefill
engine's bootstrap server is and which process it talks to.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake.
"""

import msgspec

from gateway.dialects.fields import splice
from gateway.disagg import Pair, Send, Steps
from gateway.disagg.nixl import PROTOCOL as NIXL, one_token
from gateway.errors import ServerError
from policies.base import Role


class _Engine(msgspec.Struct):
    engine_id: str


_engines = msgspec.json.Decoder(dict[str, _Engine])


def engine_ids(answer: bytes) -> list[str] | None:
    """Of each rank of a prefill engine, out of its bootstrap server's ``GET /query``; ``None`` if that is none."""
    try:
        told = _engines.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    ids = [told[str(rank)].engine_id for rank in range(len(told)) if str(rank) in told]
    return ids if ids and len(ids) == len(told) else None


class Mooncake:
    """See the module's head."""

    name = "mooncake"
    lease: float | None = None
    tells_cached = False
    answers_params = False

    def takes(self, kind: str, body: bytes) -> bool:
        """One prompt with one answer, for one transfer id."""
        return NIXL.takes(kind, body)

    def steps(self, pair: Pair) -> Steps:
        """Both at once."""
        end = pair.prefill
        if end.bootstrap is None or end.engine_id is None:
            raise ServerError("the prefill worker's bootstrap server did not tell its engine id")
        transfer = f"xfer-{pair.draw & (2**64 - 1):016x}"
        first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        host, port = end.bootstrap
        host = f"[{host}]" if ":" in host else host
        second = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{host}:{port}",
            "remote_engine_id": end.engine_id,
            "transfer_id": transfer,
        }
        yield [
            Send(Role.PREFILL, one_token(pair, {"kv_transfer_params": msgspec.json.encode(first)})),
            Send(Role.DECODE, splice(pair.body, (), {"kv_transfer_params": msgspec.json.encode(second)})),
        ]

    def blames(self, message: str) -> Role | None:
        """It does not tell."""
        return None

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """A closed connection is an abort."""
        return None


PROTOCOL = Mooncake()
