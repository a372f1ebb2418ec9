"""Prometheus metrics of the server. Names follow vLLM's, with the prefix ``volley:``."""

from collections import Counter as Counts
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from volley.decode.work import Proposal, Verdict
from volley.engine.engine import Engine
from volley.engine.memory import graph_bytes
from volley.procedures.request import Request

disable_created_metrics()  # type: ignore[no-untyped-call]  # counters would export a creation time each

_LATENCIES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2)
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

_VLLMS_TOO = tuple(
    f"volley:spec_decode_num_{name}"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
"""Metrics also exported under vLLM's own names: ``vllm bench serve`` reads the acceptance from them."""


class Metrics:
    """Metrics of one engine, written by its worker's thread."""

    def __init__(self, num_pages: int, memory: Mapping[str, int]) -> None:
        """Create the metrics. ``memory`` holds the bytes of each part of the engine."""
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"volley:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"volley:{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"volley:{name}", text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Requests being decoded or prefilled.")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self.pages_used = gauge("kv_pages_used", "Pages of K/V held by requests.")
        gauge("kv_pages", "Pages of K/V in the pool.").set(num_pages)
        self.memory = Gauge("volley:memory_bytes", "Bytes of weights, pools and graphs.", ["part"], registry=registry)
        self.holds(memory)
        self.reloads = counter("drafter_reloads", "Drafters that were to be replaced, by what came of it.", "result")
        self.usage = gauge("kv_cache_usage_perc", "Share of the pages held by requests; 1 is all.")
        self.states = gauge("recurrent_states", "Slots for the recurrent states of a hybrid target.")
        self.states_used = gauge("recurrent_states_used", "Slots of recurrent states held by requests.")
        self.states_cached = gauge("recurrent_states_cached", "Slots of recurrent states that hold those of prefixes.")
        self.state_bytes = gauge("recurrent_state_bytes", "Memory of all slots of recurrent states.")
        self.preemptions = counter("num_preemptions", "Requests that lost their pages to others.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = counter("prefix_cache_hits", "Prompt tokens of finished requests that were cached.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.success = counter("request_success", "Requests that are over, by how they ended.", "finished_reason")
        self.errors = counter("request_errors", "Requests that raised inside the engine.")
        self.not_finite = counter("request_not_finite", "Requests that ended because their logits were not finite.")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _LATENCIES)
        self.inter_token = histogram("inter_token_latency_seconds", "Mean time per later token.", _BETWEEN)
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCIES)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self.steps = counter("iterations", "Steps of the engine.")
        self.step_seconds = counter("iteration_seconds", "Wall time of all steps.")
        self.draft_seconds = counter("draft_seconds", "Wall time of drafting and injection.")
        self.verify_seconds = counter("verify_seconds", "Wall time of the target's passes and of judging.")
        self.cycles = counter("decoding_cycles", "Decoding cycles; generated tokens per cycle is tau.")
        self.cycle_tokens = counter("decoding_cycle_tokens", "Tokens gained by decoding cycles, bonus token included.")
        self.drafts = counter("spec_decode_num_drafts", "Blocks drafted.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in the block.", "position"
        )
        self.drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos", "Drafts that reached so far, by place in the block.", "position"
        )
        self.block_sizes = counter("spec_decode_block_size", "Decoding cycles, by tokens verified.", "size")
        self.denoising_steps = counter("denoising_steps", "Passes over canvases, of finished requests.", "mode")
        self.commit_passes = counter("commit_passes", "Their other passes behind the prompt.", "mode")
        self.denoised_tokens = counter("denoised_tokens", "Output tokens of the same requests.", "mode")
        self.canvas_steps = histogram("denoising_steps_per_canvas", "Passes over a canvas put out.", _STEPS)
        self._other_tokens = 0  # tokens of this step from outside decoding cycles: first tokens, and canvases'
        self._cycles: Counts[tuple[int, int, int, int]] = Counts()
        """Decoding cycles of this step, counted by drafted tokens, draft depth, accepted and gained tokens."""

    def holds(self, memory: Mapping[str, int]) -> None:
        """Set the bytes of each part of the engine."""
        for part, size in memory.items():
            self.memory.labels(part).set(size)

    # -- called by the worker ------------------------------------------------------------------------------------------
    def verified(self, request: Request, proposal: Proposal, verdict: Verdict) -> None:
        """Record one request's part of a step. :meth:`stepped` updates the counters, because each update costs microseconds."""
        stats, lengths = request.stats, request.stats.accepted_lengths
        if stats.canvas_steps:
            self.canvas_steps.observe(stats.canvas_steps[-1])
        if not lengths:  # a canvas or the prompt's last chunk
            self._other_tokens += stats.last_tokens
        else:
            accepted = min(verdict.accepted, lengths[-1])
            self._cycles[len(proposal.token_ids), _depth(proposal), accepted, lengths[-1]] += 1

    def stepped(self, engine: Engine, seconds: float) -> None:
        self.steps.inc()
        self.step_seconds.inc(seconds)
        now = engine.snapshot()
        self.draft_seconds.inc(now.draft_seconds)
        self.verify_seconds.inc(now.verify_seconds)
        self._count_cycles()

    def _count_cycles(self) -> None:
        drafted_at: Counts[int] = Counts()
        accepted_at: Counts[int] = Counts()
        for (drafted, depth, accepted, gained), times in self._cycles.items():
            self.cycles.inc(times)
            self.cycle_tokens.inc(gained * times)
            self.generation_tokens.inc(gained * times)
            self.block_sizes.labels(1 + drafted).inc(times)
            self.drafts.inc(times if drafted else 0)
            self.draft_tokens.inc(drafted * times)
            self.accepted_tokens.inc(accepted * times)
            drafted_at.update(dict.fromkeys(range(depth), times))
            accepted_at.update(dict.fromkeys(range(accepted), times))
        for counter, counts in ((self.drafted_at, drafted_at), (self.accepted_at, accepted_at)):
            for position, times in counts.items():
                counter.labels(position).inc(times)
        self.generation_tokens.inc(self._other_tokens)
        self._cycles.clear()
        self._other_tokens = 0

    def state(self, engine: Engine) -> None:
        now = engine.snapshot()
        self.running.set(now.running)
        self.waiting.set(now.waiting)
        self.pages_used.set(now.pages_used)
        self.usage.set(now.pages_used / now.num_pages)
        if size := graph_bytes(engine.core):  # a graph may have been captured
            self.memory.labels("graphs").set(size)
        if engine.core.recurrent is not None:
            self.states.set(engine.core.recurrent.store.num_slots)
            self.states_used.set(engine.core.recurrent.num_held)
            self.states_cached.set(len(engine.core.recurrent.snapshots))
            self.state_bytes.set(engine.core.recurrent.store.nbytes)

    def finished(self, request: Request, reason: str) -> None:
        stats = request.stats
        self.success.labels(reason).inc()
        self.preemptions.inc(stats.preemptions)
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        own = request.params.diffusion
        if own is not None and own.mode != "autoregressive":
            self.denoising_steps.labels(own.mode).inc(stats.denoising_steps)
            self.commit_passes.labels(own.mode).inc(stats.commit_passes)
            self.denoised_tokens.labels(own.mode).inc(stats.output_tokens)
        if reason == "error":
            self.not_finite.inc()
        if reason in ("abort", "error"):
            return
        self.prompt_length.observe(stats.prompt_tokens)
        self.output_length.observe(stats.output_tokens)
        self.first_token.observe(stats.time_to_first_token)
        self.latency.observe(stats.total_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self.inter_token.observe((stats.total_seconds - stats.time_to_first_token) / later)


def _depth(proposal: Proposal) -> int:
    """Return the number of tokens on the longest path from the anchor."""
    if proposal.parents is None:
        return len(proposal.token_ids)
    depths = [0]
    for parent in proposal.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


class HttpMetrics:
    """Metrics of the HTTP side, independent of the model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "volley:http_requests", "HTTP requests answered.", ["path", "status"], registry=self.registry
        )


def render(http: HttpMetrics, model: str, metrics: Metrics) -> bytes:
    """Return Prometheus' text format. The engine's metrics carry the model's name as the label ``model_name``."""
    families: dict[str, Metric] = {}
    for family in metrics.registry.collect():
        named = Metric(family.name, family.documentation, family.type)
        named.samples = [own._replace(labels={"model_name": model, **own.labels}) for own in family.samples]
        families[family.name] = named
    copies = [_as_vllms(families[name]) for name in _VLLMS_TOO if name in families]
    return generate_latest(_Collected([*families.values(), *copies, *http.registry.collect()]))


def _as_vllms(family: Metric) -> Metric:
    copy = Metric(family.name.replace("volley:", "vllm:"), family.documentation, family.type)
    copy.samples = [own._replace(name=own.name.replace("volley:", "vllm:")) for own in family.samples]
    return copy


class _Collected(CollectorRegistry):
    """Registry of metrics that have already been collected."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
