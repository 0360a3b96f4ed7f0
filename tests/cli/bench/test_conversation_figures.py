"""Figures of conversations, from times worked by hand."""

from __future__ import annotations

import pytest

from tests.server.conftest import running
from weft.cli.bench.conversation import HeldConversation
from weft.cli.bench.conversation_figures import conversation_figures, normalized_s, recomputed_tokens
from weft.cli.bench.measure import Failure, Outcome, Timing
from weft.cli.bench.server_counts import COUNTS, counted, read_counts
from weft.core.wire import EngineStats
from weft.testing.fake_engine import FakeEngine


def turn(due_s: float, first_s: float, end_s: float, prompt: int, output: int, cached: int | None) -> Timing:
    return Timing(due_s, due_s, [due_s + first_s, end_s], output, prompt, cached)


def held(*outcomes: Outcome, end_s: float, waited_s: float) -> HeldConversation:
    return HeldConversation("qa", 10.0, end_s, waited_s, list(outcomes))


LONG = held(
    turn(10.0, 1.0, 12.0, 100, 8, 0),  # 107 tokens have KV
    turn(17.0, 0.5, 18.0, 120, 4, 64),  # 43 of them are computed again; 123 have KV
    turn(18.0, 1.5, 20.0, 130, 8, 123),
    end_s=20.5,
    waited_s=5.0,
)
SHORT = held(turn(10.0, 3.0, 14.0, 50, 10, 16), end_s=14.0, waited_s=0.0)
BROKEN = held(turn(10.0, 2.0, 15.0, 40, 5, 0), Failure("http_500", "broken"), end_s=16.0, waited_s=0.0)


def test_normalized_latency_leaves_pauses_out() -> None:
    assert normalized_s(LONG) == (10.5 - 5.0) / 20
    assert normalized_s(SHORT) == 0.4
    assert normalized_s(BROKEN) is None


def test_latencies_leave_out_what_stands_for_the_time_before_a_window() -> None:
    assert normalized_s(LONG._replace(num_before=1)) == (10.5 - 5.0 - 2.0) / 12
    alone = SHORT._replace(num_before=1)
    assert normalized_s(alone) is None
    assert conversation_figures([alone])["completed_conversations"] == 1


def test_figures_of_a_run() -> None:
    found = conversation_figures([LONG, SHORT, BROKEN])
    assert (found["completed_conversations"], found["conversations"]) == (2, 3)
    assert found["normalized_ms_per_token_p50"] == pytest.approx((275 + 400) / 2)
    assert found["normalized_ms_per_token_p90"] == pytest.approx(275 + 0.9 * 125)
    assert found["return_ttft_ms_p50"] == pytest.approx(1000)  # 0.5 and 1.5 s
    assert found["return_ms_per_token_p50"] == pytest.approx(1000 * (1.0 / 4 + 2.0 / 8) / 2)
    assert found["recomputed_tokens"] == 43
    # KV in tokens: 107 for 7 s, 123 for 1, 137 for 2; 59 for 4; 44 for 5. All over 10 s.
    assert found["live_tokens"] == pytest.approx((107 * 7 + 123 + 137 * 2 + 59 * 4 + 44 * 5) / 10)
    assert found["peak_live_tokens"] == 107 + 59 + 44


def test_nothing_is_said_of_recomputation_where_the_server_does_not_report_what_was_cached() -> None:
    silent = held(turn(10.0, 1.0, 12.0, 9, 1, None), turn(12.0, 1.0, 14.0, 19, 1, None), end_s=14.0, waited_s=0.0)
    assert recomputed_tokens([silent]) is None
    assert "recomputed_tokens" not in conversation_figures([silent])
    assert recomputed_tokens([SHORT]) == 0  # nothing returned
    assert recomputed_tokens([LONG, silent]) == 43 + 9  # it found nothing


def test_an_edited_history_is_not_recomputed_beyond_its_prompt() -> None:
    edited = held(turn(10.0, 1.0, 12.0, 100, 8, 0), turn(12.0, 1.0, 14.0, 30, 1, 0), end_s=14.0, waited_s=0.0)
    assert recomputed_tokens([edited]) == 30


def test_a_run_in_which_all_fails_has_counts_alone() -> None:
    none = held(Failure("connect", "nobody"), end_s=10.0, waited_s=0.0)
    assert conversation_figures([none]) == {"completed_conversations": 0, "conversations": 1}


def test_counts_are_of_the_run_alone_and_of_all_models() -> None:
    text = """# TYPE weft:recomputed_tokens_total counter
weft:recomputed_tokens_total{model_name="a"} 5
weft:recomputed_tokens_total{model_name="b"} 7
# TYPE weft:num_requests_running gauge
weft:num_requests_running{model_name="a"} 3
"""
    before = read_counts(text)
    assert before == {"server_recomputed_tokens": 12}
    after = before | {"server_recomputed_tokens": 20.0, "server_preemptions": 2.0}
    assert counted(before, after) == {"server_recomputed_tokens": 8, "server_preemptions": 2}
    by_label = """# TYPE weft:wait_returns_total counter
weft:wait_returns_total{model_name="a",kind="chat",kv="kept"} 4
weft:wait_returns_total{model_name="a",kind="sleep",kv="kept"} 1
weft:wait_returns_total{model_name="a",kind="chat",kv="recomputed"} 2
"""
    assert read_counts(by_label) == {"server_decisions_kept": 5, "server_decisions_recomputed": 2}
    with pytest.raises(ValueError, match="many"):
        read_counts("weft:recomputed_tokens_total many\n")


def test_all_counts_are_in_metrics_with_their_labels() -> None:
    import httpx

    stats = EngineStats(
        recomputed_tokens=10,
        prefill_tokens=11,
        preemptions=12,
        evictions=13,
        swapped_out_pages=14,
        swapped_in_pages=15,
        steps=16,
        step_device_s=17.0,
        step_host_s=18.0,
        wait_returns={"chat": {"kept": 3, "host": 2}, "http": {"kept": 1, "recomputed": 4}},
        pages_given_up={"prefix": {"nowhere": 7, "host": 5}, "chat": {"nowhere": 1}},
        waste={"preserve": 5.0, "stalled": 1.5},
    )

    class CountedEngine(FakeEngine):
        async def stats(self) -> EngineStats:
            return stats

    with running(engine=CountedEngine()) as server:
        text = httpx.get(f"{server.url}/metrics").text
    assert read_counts(text) == {
        **dict(zip(COUNTS.values(), range(10, 19), strict=True)),
        "server_decisions_kept": 4,
        "server_decisions_host": 2,
        "server_decisions_recomputed": 4,
        "server_pages_given_up_nowhere": 8,
        "server_pages_given_up_host": 5,
        "server_waste_token_s_preserve": 5.0,
        "server_waste_token_s_stalled": 1.5,
    }
