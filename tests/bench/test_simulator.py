from __future__ import annotations

from bench import simulator


def test_all_sequences_decode_in_every_measured_step() -> None:
    simulation = simulator.decoding(5, 20)
    before = simulation.scheduler.stats().generated_tokens
    for _ in range(20):
        simulation.step()
    assert simulation.scheduler.stats().generated_tokens - before == 100


def test_calls_of_a_step_are_bounded() -> None:
    # Of all sequences: what a step of 64 calls more than one of 1 is what each of them costs.
    one, many = (simulator.calls_per_step(sequences, 64) for sequences in (1, 64))
    assert one < 250
    assert (many - one) / 63 < 8
