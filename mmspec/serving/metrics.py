"""Prometheus metrics of a server, under vLLM's names.

"Draft tokens" are nodes of the draft trees. A choice's draft tokens are counted when it ends, unless it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from mmspec.engine.stats import Stats

_PER_REQUEST = (
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
    "lossless",
    "num_rejected_outputs",
    "drafter_error",
)
_SPECULATION = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Metrics of one server.

    Args:
        threads: returns the current number of threads for decode steps on a CPU.

    Attributes:
        first_token: seconds from a request's arrival to a choice's first token.
        next_tokens: seconds between two pieces of a choice; a piece has the tokens of one or several steps.
    """

    def __init__(
        self,
        model: str,
        running: Callable[[], float],
        waiting: Callable[[], float],
        threads: Callable[[], float],
        drafters: Collection[str],
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", what, ["model_name", *more], registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(f"vllm:{name}", what, ["model_name"], buckets=buckets, registry=self.registry)
            return found.labels(**self._labels)

        def gauge(name: str, what: str, value: Callable[[], float]) -> None:
            Gauge(f"vllm:{name}", what, ["model_name"], registry=self.registry).labels(model).set_function(value)

        self._counters = [
            (field, counter(name, what, *["drafter"] * (field in _SPECULATION)))
            for field, name, what in (
                ("num_spec_steps", "spec_decode_num_drafts", "Verify steps."),
                ("num_draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens: nodes of the trees."),
                ("num_accepted_draft_tokens", "spec_decode_num_accepted_tokens", "Accepted draft tokens."),
                ("num_prompt_tokens", "prompt_tokens", "Prompt tokens."),
                ("num_prompt_tokens", "prefix_cache_queries", "Prompt tokens that were looked up."),
                ("num_cached_tokens", "prefix_cache_hits", "Prompt tokens whose states were cached."),
                ("num_generated_tokens", "generation_tokens", "Generated tokens."),
            )
        ]
        for drafter in drafters:
            for field, one in self._counters:
                self._of(field, one, drafter)  # creates the counter at zero
        per_position = "Accepted draft tokens by their depth in the tree, from 0."
        self._accepted = counter("spec_decode_num_accepted_tokens_per_pos", per_position, "drafter", "position")
        self._ignored = counter("ignored_fields", "Fields of requests that change no answer and are ignored.", "field")
        self._ended = counter("request_success", "Choices that have ended.", "finished_reason")
        self.first_token = histogram("time_to_first_token_seconds", "Time from arrival to the first token.", _FIRST)
        steps = "Time between a choice's decode steps."
        self.next_tokens = histogram("inter_token_latency_seconds", steps, _BETWEEN)
        gauge("num_requests_running", "Choices that decode.", running)
        gauge("num_requests_waiting", "Choices that wait for a slot.", waiting)
        gauge("num_torch_threads", "Threads of torch: fewer beside other programs.", threads)

    def ended(self, stats: Stats, reason: str, drafter: str) -> None:
        """Record a choice that has ended; the drafter's name is a label of the speculation counters."""
        for field, counter in self._counters:
            self._of(field, counter, drafter).inc(getattr(stats, field))
        for position in range(len(stats.acceptance_histogram) - 1):
            accepted = sum(stats.acceptance_histogram[position + 1 :])
            self._accepted.labels(**self._labels, drafter=drafter, position=str(position)).inc(accepted)
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def ignored(self, field: str) -> None:
        self._ignored.labels(**self._labels, field=field).inc()

    def _of(self, field: str, counter: Counter, drafter: str) -> Counter:
        return counter.labels(**self._labels, **({"drafter": drafter} if field in _SPECULATION else {}))


class ReplicaMetrics(Collector):
    """Merges the metrics of several server replicas; the name of a replica is added as a label."""

    def __init__(self, found: Mapping[str, Iterable[Metric]]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, metrics in self._found.items():
            for one in metrics:
                whole = merged.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                whole.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in one.samples
                ]
        return merged.values()


def per_request(stats: Stats, drafter: str) -> dict[str, object]:
    """``metrics`` of a response."""
    return {"speculative_decoding": {"drafter": drafter, **{name: getattr(stats, name) for name in _PER_REQUEST}}}
