"""A store that both engines share (LMCache, vLLM's ExampleConnector, Mooncake's store): the prefill engine writes the prompt's
KV there, the decode engine finds it. Sequential; no parameters."""

from gateway.disagg import Pair, Send, Steps
from gateway.disagg.nixl import LENGTHS, one_token
from policies.base import Role


class Shared:
    """See the module's head."""

    name = "shared"
    lease: float | None = None
    tells_cached = False
    answers_params = False

    def takes(self, kind: str, body: bytes) -> bool:
        """Whatever can be asked for a single token: engines find KV by its content, however many prompts there are."""
        return kind in LENGTHS

    def steps(self, pair: Pair) -> Steps:
        """The prompt with one token to generate, then the whole."""
        yield [Send(Role.PREFILL, one_token(pair, {}))]
        yield [Send(Role.DECODE, pair.body)]

    def blames(self, message: str) -> Role | None:
        """What is not in the store is computed: errors are the decode engine's own."""
        return Role.DECODE

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """A closed connection is an abort."""
        return None


PROTOCOL = Shared()
