"""What the gateway knows of a model, and what it gathers of one request on its way to a choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from gateway.dialects import Reading
from gateway.prompt import Prompt, Thinking
from gateway.sessions import Session
from gateway.slots import Slots
from gateway.tenants import Tenant
from gateway.trials import Policies
from kv_index.checkpoints import Rule
from kv_index.pages import EMPTY, Pages
from kv_index.radix import Node
from policies.base import Policy, Request
from policies.demand import Demand

BY_IDS = b"\x00ids"
"""End of the namespaces of prompts whose symbols stand for token ids."""
BYTES_PER_TOKEN = 4.0
"""Prior of text bytes a token, until usage reports teach better."""


@dataclass(slots=True, eq=False)
class Model:
    """What the gateway knows of one model."""

    name: str
    policies: Policies
    thinking: Thinking = Thinking.STRIP
    rule: Rule | None = None
    """Where its engines can resume a prompt, if not anywhere."""
    fine: bool = False
    """Whether some of its engines cache in blocks smaller than a page of ours."""
    adapter: str | None = None
    """Its name, if it is an adapter: engines tell it in their events."""
    by_ids: float = 0.0
    """The share of its prompts that are routed by token ids."""
    fitted: float = 0.0
    """The same when capacities were last told to the index."""
    told: bool = False
    """Whether it was said that its engines' events are of no use without token ids."""
    ordinal: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    taught: int = 0
    demand: Demand = field(default_factory=Demand)
    """How much is asked of it."""
    label: str = ""
    """For metrics: its name, unless only a client says that it exists."""
    space: bytes = b""
    """Its part of a namespace."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name
        self.space = self.name.encode("utf-8", "surrogatepass")


def never() -> bool:
    """Of a request that does not run."""
    return False


class Ask:
    """One request on its way to a choice, and what must be undone or learned at its end."""

    __slots__ = (
        "asked",
        "before",
        "body",
        "ceiling",
        "committed",
        "context",
        "depth",
        "exact",
        "found",
        "ids",
        "model",
        "namespace",
        "new_session",
        "over",
        "own",
        "page",
        "pages",
        "partnered",
        "pin",
        "policy",
        "predicted",
        "prefixed",
        "prompt",
        "reading",
        "request",
        "returns",
        "routed",
        "salt",
        "scope",
        "second",
        "session",
        "shadow",
        "shadowed",
        "shared",
        "size",
        "slot",
        "start",
        "stored",
        "takes",
        "tenant",
        "told",
        "turn",
        "used",
    )

    def __init__(self, tenant: Tenant, model: Model | None, policy: Policy, reading: Reading) -> None:
        self.tenant = tenant
        self.model = model
        self.policy = policy
        self.prefixed = policy.needs_prefix
        """Whether what targets hold of its prompt is wanted."""
        self.shadowed: Policy | None = None
        """What is asked beside its policy, to be compared."""
        self.reading = reading
        self.session: Session | None = None
        self.new_session = False
        self.turn = 0
        self.found: str | None = None
        self.prompt: Prompt | None = None
        """``None`` again once the answer has begun."""
        self.size: int | None = None
        """Bytes of the prompt."""
        self.pages: Pages = EMPTY
        self.depth: Mapping[int, int] = {}
        """target -> leading pages that it was sent."""
        self.own: Mapping[int, int] = {}
        """The same without what other gateways say that they sent, for targets where that is more."""
        self.page = 0.0
        """Tokens in one of its pages."""
        self.ids: bytes | None = None
        """Token ids of the prompt, little-endian u32 each; ``None`` in text mode. Empty again once the answer has begun and
        nothing more can be learned with them."""
        self.returns = False
        """The answer may tell the ids that were generated."""
        self.start = 0
        """Where the chain of its ids begins: adapter and salt."""
        self.salt: str | None = None
        """The cache salt that its engine will see."""
        self.exact: Mapping[int, int] = {}
        """target id -> what its events say that it holds."""
        self.routed = 0
        """What routing alone would have predicted of the chosen target."""
        self.shadow: int | None = None
        """What events alone would have predicted of it; ``None`` where they are not asked."""
        self.stored: int | None = None
        """Blocks that the chosen target's events had told of before; ``None`` where they are not asked."""
        self.used: float | None = None
        """When the session's last prompt was sent to the chosen target; ``None`` if that was elsewhere."""
        self.namespace = b""
        self.scope = 0
        self.request = Request()
        self.predicted: int | None = None
        """Tokens that the chosen target was predicted to hold; ``None`` when nothing was predicted."""
        self.ceiling = 0
        """Tokens of the prompt that were ever seen: of meaning where something was predicted."""
        self.context = 0
        self.pin: tuple[Node, int] | None = None
        self.committed = 0.0
        self.takes: Callable[[str], bool] | None = None
        """Whether a pool's protocol can split this request; ``None``: nobody can."""
        self.partnered: tuple[int | None, int] | None = None
        """The session's prefill target before, and the one that this request bound it to."""
        self.second: tuple[Node, int] | None = None
        """The pin of the target that computes the prompt for another."""
        self.told: list[str] = []
        """Workers that keep a reference of its session for it."""
        self.slot: tuple[Slots, int] | None = None
        """The slot that it has on its target."""
        self.body: bytes | None = None
        """As its client sent it, where the doctor wants to see it."""
        self.before: int | None = None
        """Tokens of the session's previous prompt with what was generated; ``None``: not known, or there is none."""
        self.shared: int | None = None
        """Leading tokens that it shares with that; ``None``: it extends it."""
        self.over: Callable[[], bool] = never
        """Whether all of its answer's content has come."""
        self.asked = False
        """Whether it was sent to anybody yet."""

    @property
    def model_name(self) -> str:
        """For metrics."""
        return self.model.label if self.model is not None else "any"


@dataclass(slots=True)
class Options:
    """How models are named and routed."""

    default: Callable[[], Policies]
    policies: dict[str, Policies] = field(default_factory=dict)
    """Model -> how it is routed, where that is not the default."""
    aliases: dict[str, str] = field(default_factory=dict)
    configured: frozenset[str] = frozenset()
    """Models that the configuration names: known even when nobody serves them."""
    thinking: dict[str, Thinking] = field(default_factory=dict)
    """Model -> what its template does with thinking; models that are not in it: by their name."""
    hybrid: frozenset[str] = frozenset()
    """Models that can be resumed at checkpoints only, whatever their engine says."""
    rules: dict[str, Rule] = field(default_factory=dict)
    """Hybrid models -> where their engines keep states; models that are not in it: by the engine's kind."""
    anywhere: frozenset[str] = frozenset()
    """Models that can be resumed anywhere, whatever their engine says."""
    restore: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Model -> seconds to bring back one token from host, disk, shared store."""
    kv_bytes: dict[str, int] = field(default_factory=dict)
    """Model -> bytes of one token's KV, where the configuration tells."""
    by_ids: frozenset[str] = frozenset()
    """Models whose prompts are routed by token ids."""
    most_models: int = 1024

    def real(self, name: str) -> str:
        """The model that goes by ``name``."""
        return self.aliases.get(name, name)

    def become(self, other: "Options") -> None:
        """Say what ``other`` says from here on, to all who have this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))
