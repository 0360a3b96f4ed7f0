"""Handles, shares and waits of explicit pages, command by command, on a worker whose tokens tell what was read."""

from __future__ import annotations

import struct

import pytest

from tests.engine.driver import Driver
from tests.engine.test_spaces_and_steps import answers, u32
from weft.core import wire
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams
from weft.core.step import Step
from weft.testing.fake_worker import expected_tokens, most_likely

MAX_PAGES = 8
EMBEDS = 150
STEP_TOKENS = 100
WAIT_S = 5.0


class Client:
    """Spaces with one queue each. Methods return the operation."""

    def __init__(self) -> None:
        self.most_tokens = self.most_heads = 0
        """Of a step."""

        def device_s(step: Step) -> float:
            if step.head is not None:
                self.most_heads = max(self.most_heads, len(step.head.embed_slots))
            if step.forward is not None:
                self.most_tokens = max(self.most_tokens, step.forward.num_tokens)
            return 0.0

        self.driver = Driver(
            lenient=True,
            device_s=device_s,
            num_embed_slots=EMBEDS,
            max_step_tokens=STEP_TOKENS,
            num_device_pages=2 * MAX_PAGES,
            max_context=240,
            max_running=28,
            num_device_slots=32,
            alloc_wait_s=WAIT_S,
        )

    def say(self, kind: type, space: int, **fields: object) -> int:
        op = next(self.driver.numbers)
        self.driver.send(kind(space=space, queue=1, op=op, **fields))
        return op

    def open(self, space: int, *, namespace: str = "", reserve: int = 0, priority: int = 0, share: int = 0) -> int:
        """Open a space of the tenant of the same name as its namespace, which may hold `share` pages; 0: all."""
        op = next(self.driver.numbers)
        self.driver.send(
            wire.OpenSpace(
                space=space,
                op=op,
                tenant=namespace,
                namespace=namespace,
                reserve_pages=reserve,
                priority=priority,
                tenant_pages=share or None,
            )
        )
        self.say(wire.OpenQueue, space)
        return op

    def alloc(self, space: int, first: int, count: int = 1) -> int:
        return self.say(wire.AllocPages, space, first=first, count=count)

    def sample(
        self, space: int, read: bytes, tokens: list[int], position: int, write: bytes = b"", mask: bytes = b""
    ) -> int:
        positions = struct.pack(f"<{len(tokens)}i", *range(position, position + len(tokens)))
        return self.say(
            wire.ForwardSample,
            space,
            read=read,
            tokens=pack_tokens(tokens),
            positions=positions,
            write=write,
            mask=mask,
            sampling=SamplingParams(seed=3),
        )

    def end(self, op: int) -> wire.Finished | wire.Failed:
        self.driver.run()
        [event] = answers(self.driver, op)
        assert isinstance(event, wire.Finished | wire.Failed)
        return event

    def fine(self, op: int) -> wire.Finished:
        event = self.end(op)
        assert isinstance(event, wire.Finished), event
        return event

    def kind(self, op: int) -> str:
        event = self.end(op)
        assert isinstance(event, wire.Failed), event
        return event.error.kind

    def waits(self, op: int) -> bool:
        self.driver.run()
        self.driver.engine.publish(0)
        return all(getattr(event, "op", None) != op for event in self.driver.others)

    def saw(self, op: int, tokens: list[int]) -> bool:
        """Whether a sample followed exactly these."""
        return list(unpack_tokens(self.fine(op).tokens)) == expected_tokens(tokens, 3, 1, self.driver.vocab)

    def pass_time(self, seconds: float) -> None:
        self.driver.clock.advance(seconds)
        self.driver.engine.advance()


@pytest.fixture
def client() -> Client:
    return Client()


def exported(client: Client, space: int = 1, name: str = "x", namespace: str = "") -> None:
    """A page with two tokens in a space of its own, under a name."""
    client.open(space, namespace=namespace)
    client.alloc(space, 1)
    client.sample(space, b"", [5, 6], 0, u32(1))
    client.fine(client.say(wire.ExportPages, space, pages=u32(1), name=name))


def test_what_a_handle_hides_is_hidden_from_it_alone(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1)
    client.sample(1, b"", [5, 6], 0, u32(1))
    client.say(wire.MaskPage, 1, page=1, hidden=0b01)
    client.say(wire.ExportPages, 1, pages=u32(1), name="x")
    assert client.saw(client.sample(1, u32(1), [8], 2), [6, 8])
    client.open(2)
    client.say(wire.ImportPages, 2, first=4, name="x")
    assert client.saw(client.sample(2, u32(4), [8], 2), [5, 6, 8])


def test_a_shared_page_is_copied_before_tokens_are_copied_into_it(client: Client) -> None:
    exported(client)
    client.driver.send(wire.CloseSpace(space=1))
    for space, token in ((2, 7), (3, 9)):
        client.open(space)
        client.say(wire.ImportPages, space, first=1, name="x")
        client.alloc(space, 2)
        client.sample(space, b"", [token], 2, u32(2))
        client.say(wire.CopyTokens, space, source=2, source_offset=0, target=1, target_offset=2, count=1)
        client.fine(client.say(wire.Sync, space))
    assert client.saw(client.sample(2, u32(1), [8], 3), [5, 6, 7, 8])
    assert client.saw(client.sample(3, u32(1), [8], 3), [5, 6, 9, 8])


def test_copied_tokens_keep_their_positions_and_take_no_one_s_place(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1, 2)
    for token, position in ((4, 3), (5, 5), (6, 7)):
        client.sample(1, b"", [token], position, u32(1))
    client.say(wire.CopyTokens, 1, source=1, source_offset=1, target=2, target_offset=7, count=2)
    assert client.saw(client.sample(1, u32(2), [8], 6), [5, 8])
    assert client.saw(client.sample(1, u32(2), [8], 8), [5, 6, 8])
    onto = client.say(wire.CopyTokens, 1, source=1, source_offset=0, target=2, target_offset=8, count=1)
    assert client.kind(onto) == "invalid_request"


def test_programs_hold_so_many_pages_and_no_more(client: Client) -> None:
    client.open(1)
    client.fine(client.alloc(1, 1, MAX_PAGES - 1))
    client.open(2)
    client.fine(client.alloc(2, 1))
    assert client.waits(client.alloc(2, 2))


def test_who_waits_is_served_when_another_closes(client: Client) -> None:
    client.open(1)
    client.fine(client.alloc(1, 1, MAX_PAGES))
    client.open(2)
    waiting = client.alloc(2, 1)
    assert client.waits(waiting)
    client.driver.send(wire.CloseSpace(space=1))
    assert client.waits(waiting) is False
    client.fine(waiting)


def test_a_wait_is_bounded_from_its_beginning(client: Client) -> None:
    client.open(1)
    client.fine(client.alloc(1, 1, MAX_PAGES))
    client.open(2)
    waiting = client.alloc(2, 1)
    for _ in range(2):  # each look at it finds no room again
        client.pass_time(0.45 * WAIT_S)
        assert client.waits(waiting)
    client.pass_time(0.2 * WAIT_S)
    assert client.kind(waiting) == "out_of_pages"


def test_exports_of_the_same_namespace_make_room_first(client: Client) -> None:
    exported(client, 1, "theirs", "other")
    exported(client, 2, "ours", "mine")
    for space in (1, 2):
        client.driver.send(wire.CloseSpace(space=space))
    client.open(3, namespace="mine")
    client.fine(client.alloc(3, 1, MAX_PAGES - 1))
    client.open(4, namespace="other")
    assert client.fine(client.say(wire.ImportPages, 4, first=1, name="theirs")).count == 1
    assert client.kind(client.say(wire.ImportPages, 3, first=50, name="ours")) == "unknown_handle"


def test_exports_are_of_the_tenant_s_share_also_when_their_run_has_ended(client: Client) -> None:
    client.open(1, namespace="mine", share=4)
    client.fine(client.alloc(1, 1, 2))
    client.fine(client.say(wire.ExportPages, 1, pages=u32(1, 2), name="x"))
    client.driver.send(wire.CloseSpace(space=1))
    client.open(2, namespace="mine", share=4)
    client.fine(client.say(wire.ImportPages, 2, first=50, name="x"))
    refused = client.end(client.alloc(2, 1, 3))
    assert isinstance(refused, wire.Failed)
    assert refused.error.kind == "out_of_pages"
    assert "share of 4 (programs.tenant_pages_fraction)" in refused.error.message
    # Its own exports have made room, and another tenant has its share all the same.
    assert client.kind(client.say(wire.ImportPages, 2, first=60, name="x")) == "unknown_handle"
    client.fine(client.alloc(2, 1, 2))
    client.open(3, namespace="other", share=4)
    client.fine(client.alloc(3, 1, 4))


@pytest.mark.parametrize("how", ["alloc", "reserve", "export"])
def test_every_way_to_hold_pages_is_within_the_tenant_s_share(client: Client, how: str) -> None:
    client.open(1, namespace="mine", share=4)
    client.fine(client.alloc(1, 1, 2))
    if how == "export":
        client.fine(client.alloc(1, 3, 1))
        refused = client.say(wire.ExportPages, 1, pages=u32(1, 2), name="x")
    elif how == "reserve":
        refused = client.open(2, namespace="mine", share=4, reserve=3)
    else:
        refused = client.alloc(1, 3, 3)
    event = client.end(refused)
    assert isinstance(event, wire.Failed)
    assert "tenant_pages_fraction" in event.error.message
    client.driver.send(wire.CloseSpace(space=1))
    client.open(4, namespace="mine", share=4)
    client.fine(client.alloc(4, 1, 4))


def test_an_export_under_a_name_in_use_needs_no_room_for_both(client: Client) -> None:
    client.open(1, namespace="mine", share=4)
    client.fine(client.alloc(1, 1, 2))
    for _ in range(2):
        client.fine(client.say(wire.ExportPages, 1, pages=u32(1, 2), name="x"))


def test_a_reservation_takes_back_only_what_nobody_shares(client: Client) -> None:
    client.open(1, reserve=1)
    client.alloc(1, 1)
    client.sample(1, b"", [5, 6], 0, u32(1))
    client.fine(client.say(wire.ExportPages, 1, pages=u32(1), name="x"))
    client.say(wire.FreePages, 1, pages=u32(1))
    client.alloc(1, 2)
    client.sample(1, b"", [9, 9], 0, u32(2))
    client.open(2)
    client.say(wire.ImportPages, 2, first=1, name="x")
    assert client.saw(client.sample(2, u32(1), [8], 2), [5, 6, 8])


def test_a_name_is_given_anew(client: Client) -> None:
    exported(client)
    client.alloc(1, 2)
    client.sample(1, b"", [7], 0, u32(2))
    client.fine(client.say(wire.ExportPages, 1, pages=u32(2), name="x"))
    client.driver.send(wire.CloseSpace(space=1))
    assert client.driver.engine.scheduler.spaces.num_pages == 1, "what was there before is given back"


def test_the_better_priority_comes_first_in_a_step(client: Client) -> None:
    for space, priority in ((1, 1), (2, 0)):
        client.open(space, priority=priority)
    late, early = (client.sample(space, b"", [5], 0) for space in (1, 2))
    client.driver.run()
    ops = [event.op for event in client.driver.others if isinstance(event, wire.Finished)]
    assert ops.index(early) < ops.index(late)


def test_sync_ends_with_what_came_before_it(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1)
    sample = client.sample(1, b"", [5], 0, u32(1))
    sync = client.say(wire.Sync, 1)
    client.driver.run()
    ops = [event.op for event in client.driver.others if isinstance(event, wire.Finished)]
    assert ops.index(sample) < ops.index(sync)


def test_a_space_that_closes_ends_what_waits_and_keeps_nothing(client: Client) -> None:
    client.open(1, reserve=2)
    client.fine(client.say(wire.AllocEmbeds, 1, first=1, count=EMBEDS))
    client.fine(client.alloc(1, 1, MAX_PAGES - 1))
    waiting = client.alloc(1, 50, 5)
    assert client.waits(waiting)
    client.driver.send(wire.CloseSpace(space=1))
    client.driver.run()
    client.driver.engine.publish(0)
    assert [event for event in client.driver.others if isinstance(event, wire.Cancelled)] == [
        wire.Cancelled(op=waiting)
    ]
    client.open(2)
    client.fine(client.say(wire.AllocEmbeds, 2, first=1, count=EMBEDS))
    client.fine(client.alloc(2, 1, MAX_PAGES))


def test_a_reservation_is_kept_through_use_and_return(client: Client) -> None:
    client.open(1, reserve=2)
    client.fine(client.alloc(1, 1, 2))
    client.say(wire.FreePages, 1, pages=u32(1, 2))
    client.open(2)
    client.fine(client.alloc(2, 1, MAX_PAGES - 2))
    assert client.waits(client.alloc(2, 50))
    client.fine(client.alloc(1, 3, 2))


def test_who_reads_what_was_not_written_hears_why(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1)
    client.fine(client.say(wire.AllocEmbeds, 1, first=1, count=2))
    positions = struct.pack("<1i", 0)
    client.say(wire.EmbedText, 1, tokens=pack_tokens([5]), positions=positions, embeds=u32(1))
    client.say(wire.Forward, 1, read=b"", inputs=u32(1), outputs=u32(2))
    client.say(wire.Forward, 1, read=u32(9), inputs=u32(1), outputs=u32(2))
    told = client.end(client.say(wire.NextDist, 1, k=1, embeds=u32(2)))
    assert isinstance(told, wire.Failed)
    assert (told.error.kind, "no page 9" in told.error.message) == ("unknown_handle", True)


def test_scores_and_distributions_go_to_who_asked(client: Client) -> None:
    """All in one step: one with scores alone, one with both, one with a distribution alone."""
    client.open(1)
    client.fine(client.say(wire.AllocEmbeds, 1, first=1, count=6))
    positions = struct.pack("<3i", 0, 0, 0)
    for number in (1, 2, 3):
        client.say(wire.EmbedText, 1, tokens=pack_tokens([number]), positions=positions[:4], embeds=u32(number))
        client.say(wire.Forward, 1, read=b"", inputs=u32(number), outputs=u32(number + 3))
    client.fine(client.say(wire.Sync, 1))
    alone = client.say(wire.NextDist, 1, k=0, embeds=u32(4), targets=pack_tokens([11, 12]))
    both = client.say(wire.NextDist, 1, k=2, embeds=u32(5), targets=pack_tokens([21]))
    dist = client.say(wire.NextDist, 1, k=1, embeds=u32(6))
    dists = {op: client.fine(op).dists for op in (alone, both, dist)}
    found = {op: ([*told.targets], told.ids[:1]) for op, told in dists.items() if told is not None}
    first = {number: most_likely([number], client.driver.vocab) for number in (2, 3)}
    # The fake worker's score of a token is minus the token.
    assert found == {alone: ([-11.0, -12.0], []), both: ([-21.0], [first[2]]), dist: ([], [first[3]])}


def test_commands_that_wait_are_counted_down(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sched.spaces.spaces.MAX_PENDING", 4)
    client.open(1)
    for number in range(8):
        client.fine(client.alloc(1, number + 1))
    waiting = [client.alloc(1, 20 + number) for number in range(4)]
    assert client.kind(client.alloc(1, 30)) == "overloaded"
    assert client.waits(waiting[0])


def test_a_queue_that_is_closed_may_be_opened_again(client: Client) -> None:
    client.open(1)
    client.say(wire.CloseQueue, 1)
    assert client.kind(client.alloc(1, 1)) == "unknown_handle"
    client.say(wire.OpenQueue, 1)
    client.fine(client.alloc(1, 1))


def test_long_prompts_in_pieces_read_their_own_pieces(client: Client) -> None:
    """More than a step takes, into pages that it does not read: each piece sees those before it, and nothing else."""
    client.open(1)
    client.alloc(1, 1, 8)
    client.sample(1, b"", [900], 127, u32(8))
    prompt = [token % 800 for token in range(127)]
    other = client.driver.open([token % 700 for token in range(200)])
    client.driver.generate(other, 2, eos=False)
    assert client.saw(client.sample(1, b"", prompt, 0, u32(1, 2, 3, 4, 5, 6, 7, 8)), prompt)


def test_a_page_that_is_only_written_to_is_not_read(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1)
    client.sample(1, b"", [5, 6], 0, u32(1))
    assert client.saw(client.sample(1, b"", [7], 2, u32(1)), [7])
    assert client.saw(client.sample(1, u32(1), [8], 3), [5, 6, 7, 8])


def test_a_forward_that_fails_has_taken_no_places(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1)
    blind = client.sample(1, b"", [5, 6], 0, u32(1), mask=b"\0\0")
    assert client.kind(blind) == "invalid_request"
    client.sample(1, b"", [7], 0, u32(1))
    assert client.saw(client.sample(1, u32(1), [8], 1), [7, 8])


def test_more_samples_than_a_step_has_slots_for(client: Client) -> None:
    ops = []
    for space in range(1, 8):
        client.open(space)
        ops.append(client.sample(space, b"", [space], 0))
    for space, op in enumerate(ops, start=1):
        assert client.saw(op, [space])


def test_a_step_takes_so_many_inputs_of_all_programs(client: Client) -> None:
    each = 16  # as urgent as decoding sequences, so that only the step's budget bounds them
    embeds = u32(*range(1, each + 1))
    for space in range(1, MAX_PAGES + 1):
        client.open(space)
        client.alloc(space, 1)
        client.fine(client.say(wire.AllocEmbeds, space, first=1, count=each))
        positions = struct.pack(f"<{each}i", *range(each))
        client.say(wire.EmbedText, space, tokens=pack_tokens(range(each)), positions=positions, embeds=embeds)
        client.fine(client.say(wire.Sync, space))
    for space in range(1, MAX_PAGES + 1):
        client.say(wire.Forward, space, read=b"", inputs=embeds, write=u32(1))
    client.driver.run()
    assert STEP_TOKENS - each < client.most_tokens <= STEP_TOKENS
    client.driver.send(*[wire.CloseSpace(space=space) for space in range(2, MAX_PAGES + 1)])
    assert client.saw(client.sample(1, u32(1), [8], each), [*range(each), 8])


def test_inputs_with_outputs_stay_together(client: Client) -> None:
    """The prompt is longer than a step by less than it has outputs."""
    count, outputs = STEP_TOKENS + 2, 3
    client.open(1)
    client.fine(client.alloc(1, 1, 7))
    client.fine(client.say(wire.AllocEmbeds, 1, first=1, count=count + outputs))
    inputs, found = u32(*range(1, count + 1)), u32(*range(count + 1, count + outputs + 1))
    positions = struct.pack(f"<{count}i", *range(count))
    client.say(wire.EmbedText, 1, tokens=pack_tokens(range(count)), positions=positions, embeds=inputs)
    client.say(wire.Forward, 1, read=b"", inputs=inputs, write=u32(*range(1, 8)), outputs=found)
    told = client.fine(client.say(wire.NextDist, 1, k=1, embeds=found))
    assert told.dists is not None
    prefixes = [list(range(count - outputs + 1 + index)) for index in range(outputs)]
    assert told.dists.ids == [most_likely(prefix, client.driver.vocab) for prefix in prefixes]


def test_a_step_takes_so_many_distributions_of_all_programs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sched.spaces.place.MAX_HEAD_ROWS", 2)
    for space in (1, 2, 3):
        client.open(space)
        client.fine(client.say(wire.AllocEmbeds, space, first=1, count=2))
        positions = struct.pack("<1i", 0)
        client.say(wire.EmbedText, space, tokens=pack_tokens([space]), positions=positions, embeds=u32(1))
        client.say(wire.Forward, space, read=b"", inputs=u32(1), outputs=u32(2))
        client.fine(client.say(wire.Sync, space))
    ops = [client.say(wire.NextDist, space, k=1, embeds=u32(2)) for space in (1, 2, 3)]
    for space, op in enumerate(ops, start=1):
        dists = client.fine(op).dists
        assert dists is not None
        assert dists.ids == [most_likely([space], client.driver.vocab)]
    assert client.most_heads == 2


def test_a_page_that_is_exported_as_it_is_filled_is_copied_with_what_was_put_there(client: Client) -> None:
    client.open(1)
    client.alloc(1, 1, 2)
    client.fine(client.sample(1, b"", [5], 0, u32(1)))
    client.say(wire.CopyTokens, 1, source=1, source_offset=0, target=2, target_offset=0, count=1)
    client.say(wire.ExportPages, 1, pages=u32(2), name="x")
    assert client.saw(client.sample(1, u32(2), [8], 1, u32(2)), [5, 8])


def test_an_unused_reservation_goes_with_its_space(client: Client) -> None:
    client.open(1, reserve=3)
    client.driver.send(wire.CloseSpace(space=1))
    assert client.driver.engine.scheduler.spaces.num_pages == 0
    client.open(2)
    client.fine(client.alloc(2, 1, MAX_PAGES))
