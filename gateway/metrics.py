"""What is counted, and how it reaches Prometheus.

The hot path adds to plain dictionaries; prometheus-client's own metric objects take a lock and a look-up for each label
set and would cost more than the rest of a small request. `Registry` shows them to prometheus-client at scrape time, which
writes the exposition.

Labels are bounded: tenants, models, policies, targets and reasons are all from the configuration, the fleet or a fixed
set, never from a client.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]

TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
INTER_TOKEN = (0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096, 0.128, 0.256, 0.512, 1.0)
OVERHEAD = (0.00005, 0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.05, 0.2)
SHARE = (-0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Counter:
    """A monotonic sum for each label set."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        """Add ``amount``."""
        values = self.values
        values[labels] = values.get(labels, 0) + amount

    def family(self) -> Metric:
        """For prometheus-client."""
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        return family

    def drop(self, position: int, value: str) -> None:
        """Remove the series whose label at ``position`` is ``value``."""
        for labels in [labels for labels in self.values if labels[position] == value]:
            del self.values[labels]


class Histogram:
    """Cumulative buckets for each label set."""

    __slots__ = ("bounds", "help", "labels", "name", "values")

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.bounds = tuple(bounds)
        self.values: dict[Labels, list[float]] = {}
        """Counts of each bucket (not cumulative), the last for +Inf, then the sum."""

    def observe(self, labels: Labels, value: float) -> None:
        """Count one observation."""
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def family(self) -> Metric:
        """For prometheus-client."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        names = [str(float(bound)) for bound in self.bounds] + ["+Inf"]
        for labels, row in list(self.values.items()):
            total, buckets = 0.0, []
            for name, count in zip(names, row[:-1], strict=True):
                total += count
                buckets.append((name, total))
            family.add_metric(labels, buckets, row[-1])
        return family


class Gauge:
    """Read when scraped."""

    __slots__ = ("help", "labels", "name", "read")

    def __init__(
        self, name: str, help: str, read: Callable[[], Iterable[tuple[Labels, float]]], labels: Sequence[str] = ()
    ) -> None:
        self.name, self.help, self.labels, self.read = name, help, tuple(labels), read

    def family(self) -> Metric:
        """For prometheus-client."""
        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self.read():
            family.add_metric(labels, value)
        return family


class Metrics:
    """Every metric of the gateway. Names begin with ``warmroute_``; prometheus-client adds ``_total`` to counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.gauges: list[Gauge] = []
        who = ("tenant", "model", "policy")
        self.requests = Counter(
            "warmroute_requests", "Requests ended, by how.", ("tenant", "model", "kind", "policy", "outcome")
        )
        self.refused = Counter("warmroute_refused_requests", "Requests refused before routing, by status.", ("status",))
        self.duration = Histogram(
            "warmroute_request_duration_seconds", "From the request's last byte to the answer's.", DURATION, who
        )
        self.ttft = Histogram(
            "warmroute_time_to_first_token_seconds",
            "From the request's last byte to the first event of a streamed answer, by turn of its session.",
            TTFT,
            (*who, "turn"),
        )
        self.inter_token = Histogram(
            "warmroute_inter_token_seconds", "Mean time between two tokens of one streamed answer.", INTER_TOKEN, who
        )
        self.prompt_tokens = Counter(
            "warmroute_prompt_tokens", "Prompt tokens, as engines report them.", (*who, "target")
        )
        self.completion_tokens = Counter(
            "warmroute_completion_tokens", "Generated tokens, as engines report them.", (*who, "target")
        )
        self.cached_tokens = Counter(
            "warmroute_cached_tokens", "Prompt tokens that engines report as found in their cache.", (*who, "target")
        )
        self.reported_prompt_tokens = Counter(
            "warmroute_cache_reported_prompt_tokens",
            "Prompt tokens of those requests whose engine reports cached tokens: the base of the reported hit rate.",
            (*who, "target"),
        )
        self.predicted_tokens = Counter(
            "warmroute_predicted_cached_tokens",
            "Prompt tokens predicted to be cached where they were sent.",
            (*who, "target"),
        )
        self.predicted_prompt_tokens = Counter(
            "warmroute_predicted_prompt_tokens",
            "Estimated prompt tokens of requests that were routed by prefix: the base of the predicted hit rate.",
            (*who, "target"),
        )
        self.prediction_error = Histogram(
            "warmroute_prediction_error_ratio",
            "(reported - predicted) cached tokens over prompt tokens; below 0: the engine held less than believed.",
            SHARE,
            ("model",),
        )
        self.decisions = Counter("warmroute_decisions", "Routing decisions.", (*who, "reason"))
        self.routed = Counter("warmroute_routed_requests", "Requests sent, by target.", ("model", "target"))
        self.sessions = Counter(
            "warmroute_session_outcomes",
            "What a request meant for its session.",
            ("tenant", "model", "outcome", "reason"),
        )
        self.session_sources = Counter("warmroute_session_sources", "How sessions were recognised.", ("source",))
        self.retries = Counter("warmroute_retries", "Attempts after the first.", ("model", "reason"))
        self.worker_faults = Counter("warmroute_worker_faults", "What workers did wrong.", ("target", "kind"))
        self.backpressure = Counter("warmroute_backpressure", "Workers that said they are full.", ("target",))
        self.resends = Counter(
            "warmroute_resends", "Requests sent again because a reused connection was dead.", ("target",)
        )
        self.aborts = Counter("warmroute_client_aborts", "Clients that left, by phase.", ("phase",))
        self.breakers = Counter("warmroute_breaker_openings", "Circuit breakers opened.", ("target",))
        self.overhead = Histogram(
            "warmroute_overhead_seconds",
            "From the request's last byte to its being sent to a worker.",
            OVERHEAD,
            ("policy",),
        )
        self.lag = Histogram("warmroute_event_loop_lag_seconds", "How late the event loop woke up.", OVERHEAD)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        for value in vars(self).values():
            if isinstance(value, Counter | Histogram):
                yield value.family()
        for gauge in self.gauges:
            yield gauge.family()

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def drop_target(self, target: str) -> None:
        """A target left the fleet: its series go too."""
        for value in vars(self).values():
            if isinstance(value, Counter) and "target" in value.labels:
                value.drop(value.labels.index("target"), target)
