"""What the runs of workflows of a server have done since it started, for its metrics."""

from __future__ import annotations

from weft.metrics import REQUEST_BUCKETS_S, Counters, Histogram
from weft.workflow.run.calls import ModelAnswer


class WorkflowTotals:
    """Counters and histograms of all runs. Used from one event loop."""

    def __init__(self) -> None:
        self.runs = Counters()
        """By how they ended; a run that goes on later ends once more."""
        self.rows = Counters()
        """Whose results can be read, by how they ended."""
        self.calls = Counters()
        """By what answered: `model`, or `cache`, the prompt cache."""
        self.tokens = Counters()
        """Of calls, by kind: `prompt`; of these `cached`, of which `continued`, and `prefill`; `output`."""
        self.queue_time = Histogram(REQUEST_BUCKETS_S)
        """Of calls, from sending to the model's beginning."""
        self.run_time = Histogram(REQUEST_BUCKETS_S)
        """Of calls, from there to the answer."""

    def answered(self, answer: ModelAnswer) -> None:
        """A call has its answer."""
        self.calls.add("cache" if answer.is_cached else "model")
        if answer.is_cached:
            return
        used, times = answer.usage, answer.times
        for kind, count in (
            ("prompt", used.prompt_tokens),
            ("cached", used.cached_tokens),
            ("continued", used.continued_tokens),
            ("prefill", used.prefill_tokens),
            ("output", used.output_tokens),
        ):
            self.tokens.add(kind, amount=count)
        self.queue_time.observe(times.started_s - times.sent_s)
        self.run_time.observe(times.ended_s - times.started_s)
