"""A server's metrics as Prometheus text, with the names of vLLM and the prefix of Redline."""

from dataclasses import dataclass, field

EDGES = (0.01, 0.05, 0.1, 0.5, 1.0)


@dataclass
class Metrics:
    running: int = 0
    waiting: int = 0
    cache: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)

    def text(self) -> str:
        label = '{engine="0",model_name="tiny"}'
        lines = [
            "# HELP redline:num_requests_running Requests in the batch.",
            "# TYPE redline:num_requests_running gauge",
            f"redline:num_requests_running{label} {self.running}.0",
            f"redline:num_requests_waiting{label} {self.waiting}.0",
            f"redline:kv_cache_usage_perc{label} {self.cache}",
            f"redline:generation_tokens_total{label} {float(self.tokens)}",
            f"redline:prompt_tokens_total{label} {self.tokens * 3.5}",
            f"redline:num_preemptions_total{label} 2.0",
            f"redline:prefix_cache_queries_total{label} 400.0",
            f"redline:prefix_cache_hits_total{label} 100.0",
            'redline:request_success_total{finished_reason="stop",model_name="tiny"} 12.0',
            'redline:request_success_total{finished_reason="length",model_name="tiny"} 3.0',
        ]
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
            for edge in (*EDGES, float("inf")):
                count = sum(value <= edge for value in self.first_s)
                le = "+Inf" if edge == float("inf") else edge
                lines.append(f'redline:{name}_bucket{{le="{le}",model_name="tiny"}} {float(count)}')
        return "\n".join(lines) + "\n"
