"""SGLang's bootstrap: both engines get the same body at the same time and meet in a room.

The room decides the prefill engine's rank (``room % dp_size``), so it is chosen for the rank. Of several prompts each has a
room of its own. The decode engine's answer is the client's; the prefill engine's has the logprobs of the prompt, which the
other never computed. A prefill engine without its partner, and a decode engine without KV, wait for minutes: whichever fails,
the other is aborted by its request id. Engines abort by prefix of that id, so all ids are of one length.

Source: sglang/srt/disaggregation, managers/io_struct.py (0.5.23).
"""

import re

import msgspec
from msgspec import Raw

from gateway.dialects.fields import splice
from gateway.disagg import Pair, Send, Steps, answers_to, prompts_in, several
from gateway.errors import ServerError
from policies.base import Role

ROOMS = 1 << 62
KINDS = frozenset(("chat", "completions", "generate", "messages", "responses"))

_PREFILL = re.compile(r"prefill (instance|bootstrap|transfer|parallel)|KVBootstrap", re.IGNORECASE)
_DECODE = re.compile(r"decode (transfer|memory)", re.IGNORECASE)
_mapping = msgspec.json.Decoder(dict[str, Raw])


class Bootstrap:
    """See the module's head."""

    name = "sglang"
    lease: float | None = None
    tells_cached = True
    answers_params = False

    def takes(self, kind: str, body: bytes) -> bool:
        """Everything that generates."""
        return kind in KINDS

    def steps(self, pair: Pair) -> Steps:
        """Both at once."""
        body = splice(pair.body, (), members(pair))
        yield [Send(Role.PREFILL, body), Send(Role.DECODE, body)]

    def blames(self, message: str) -> Role | None:
        """Errors name the side on which they happened; a handshake that failed may be either's."""
        if _PREFILL.search(message):
            return Role.PREFILL
        return Role.DECODE if _DECODE.search(message) else None

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """By request id, if that is ours: the client's own may be the beginning of others'."""
        if _names_itself(pair.body):
            return None
        return "/abort_request", msgspec.json.encode({"rid": rid(pair)})


def members(pair: Pair) -> dict[str, bytes]:
    """What is put into the body, name -> JSON. Raises `ServerError` where no bootstrap server is known."""
    end = pair.prefill
    if end.bootstrap is None:
        raise ServerError("the prefill worker's bootstrap server is not known")
    host, port = end.bootstrap
    ranks = max(1, end.ranks)
    room = (pair.draw % ROOMS) // ranks * ranks + end.rank % ranks
    asked = several(pair.body)
    prompts = 1 if asked is None else prompts_in(asked)
    told: dict[str, object] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    if prompts > 1 and ranks > 1 and asked is not None and answers_to(asked) == 1:
        # One number for all of them means room, room + 1, ...: other ranks.
        told = {
            "bootstrap_host": [host] * prompts,
            "bootstrap_port": [port] * prompts,
            "bootstrap_room": [room + at * ranks for at in range(prompts)],
        }
    if prompts == 1 and not _names_itself(pair.body):
        told["rid"] = rid(pair)
    return {name: msgspec.json.encode(value) for name, value in told.items()}


def rid(pair: Pair) -> str:
    """The request id that engines know this attempt by: of one length, so that none is the beginning of another."""
    return f"wr-{pair.draw & (2**64 - 1):016x}"


def _names_itself(body: bytes) -> bool:
    if b'"rid"' not in body:
        return False
    try:
        return "rid" in _mapping.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


PROTOCOL = Bootstrap()
