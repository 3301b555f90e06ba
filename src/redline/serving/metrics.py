"""Collects Prometheus metrics, which have the names of vLLM's metrics with the prefix `redline:`.

The histograms of durations have buckets from 1 ms.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from redline.generation.request import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = tuple(float(2**power) for power in range(0, 21))


class Metrics:
    """Holds the metrics of one server in a separate registry."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Time to the first token.", _SECONDS)
        self.between_tokens_s = self._histogram(
            "inter_token_latency_seconds", "Time between two chunks of tokens of a request.", _STEP_SECONDS
        )
        self.end_to_end_s = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", _SECONDS)
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "Time of admission and tokenization before the engine.", _SECONDS
        )
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_size = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._finished = Counter(
            "redline:request_success",
            "Finished requests by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "redline:request_refused",
            "Refused requests by HTTP status.",
            ["model_name", "status"],
            registry=self.registry,
        )

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def watch(self, read: Callable[[], "ServerState"]) -> None:
        """Adds metrics of the current state, for which `read` is called each time that metrics are requested."""
        self.registry.register(_StateCollector(read, self._model))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"redline:{name}", about, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)


class ServerState:
    """Holds the state of the server and its engine at one time. `stats` is None if the engine has sent none."""

    def __init__(self, stats: EngineStats | None, waiting: int, running: int, restarts: int) -> None:
        self.stats, self.waiting, self.running, self.restarts = stats, waiting, running, restarts


class _StateCollector(Collector):
    def __init__(self, read: Callable[[], ServerState], model: str) -> None:
        self._read, self._model = read, model

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        state = self._read()
        stats = state.stats
        # Without statistics, as when another server generates the texts, the HTTP requests are counted instead.
        running = stats.running if stats else max(0, state.running - state.waiting)
        waiting = stats.waiting if stats else state.waiting
        usage = stats.blocks_used / stats.blocks if stats and stats.blocks else 0.0
        yield self._gauge("num_requests_running", "Requests that the engine generates for.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait in the engine.", waiting)
        yield self._gauge("http_requests_waiting", "HTTP requests that wait for their first token.", state.waiting)
        yield self._gauge("http_requests_running", "HTTP requests that are being answered.", state.running)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", usage)
        yield self._counter("engine_restarts", "Restarts of the engine after a crash.", state.restarts)
        if stats is None:
            return
        for name, about, value in (
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prompt_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("num_preemptions", "Preempted requests.", stats.preemptions),
            ("recomputed_tokens", "Tokens computed again after a preemption.", stats.recomputed_tokens),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted_tokens),
        ):
            yield self._counter(name, about, value)

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"redline:{name}", about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"redline:{name}", about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
