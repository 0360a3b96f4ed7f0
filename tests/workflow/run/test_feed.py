"""What runs tell while they go on: each piece once, at its place, for readers that are slow, late or come back."""

from __future__ import annotations

import random

from weft.workflow.run.calls import PromptFound
from weft.workflow.run.feed import MAX_STARTS, CallStarted, FeedReader, RunFeed, TextDelta

A = (("answer",), {"a": ("answer",)})


class Screen:
    """What a reader has of each text."""

    def __init__(self, feed: RunFeed, after: int = 0, texts: dict[tuple[int, str], str] | None = None):
        self.reader: FeedReader = feed.reader(after)
        self.texts = dict(texts or {})
        self.position = after
        self.num_replaced = 0

    def read(self) -> list[TextDelta]:
        news = self.reader.read()
        self.position = news.position
        self.take(news.texts)
        return news.texts

    def take(self, deltas: list[TextDelta]) -> None:
        for row, output, start, text in deltas:
            known = self.texts.get((row, output), "")
            assert start <= len(known)
            self.num_replaced += start < len(known)
            self.texts[row, output] = known[:start] + text


def test_pieces_come_once_and_in_order() -> None:
    feed = RunFeed(*A)
    screen = Screen(feed)
    feed.piece([(0, "a")], "one ")
    assert screen.read() == [TextDelta(0, "answer", 0, "one ")]
    assert not screen.reader.has_news
    feed.piece([(0, "a")], "two ")
    feed.piece([(1, "a")], "other")
    feed.piece([(0, "a")], "three")
    assert screen.read() == [TextDelta(0, "answer", 4, "two three"), TextDelta(1, "answer", 0, "other")]
    feed.piece([(0, "b")], "nobody asked for this")
    assert screen.read() == []


def test_signs_of_news_come_with_every_piece_and_cost_nothing_to_leave() -> None:
    feed, signs = RunFeed(*A), []
    reader = feed.reader(on_news=lambda: signs.append(1))
    for _ in range(1000):
        feed.piece([(0, "a")], "x")
    assert len(signs) == 1000
    assert len(reader.read().texts) == 1, "a slow reader has one piece, not a thousand"


def test_a_reader_that_comes_back_goes_on_where_it_was() -> None:
    feed = RunFeed(*A, position=50)
    first = Screen(feed)
    feed.piece([(0, "a")], "one ")
    feed.piece([(1, "a")], "uno ")
    first.read()
    first.reader.close()
    feed.piece([(0, "a")], "two")
    again = Screen(feed, first.position, first.texts)
    assert again.read() == [TextDelta(0, "answer", 4, "two")]
    assert again.texts == {(0, "answer"): "one two", (1, "answer"): "uno "}
    late = Screen(feed)
    late.read()
    assert late.texts == again.texts
    before = Screen(feed, 49, {(0, "answer"): "one tw", (1, "answer"): "something else"})
    before.read()  # its position is of an execution of which nothing is known here
    assert before.texts == again.texts


def test_another_try_with_the_same_text_tells_only_what_is_new() -> None:
    feed = RunFeed(*A)
    screen = Screen(feed)
    feed.begin(0, "a")
    feed.piece([(0, "a")], "one two")
    screen.read()
    feed.begin(0, "a")
    feed.piece([(0, "a")], "one ")
    assert screen.read() == []
    feed.piece([(0, "a")], "two three")
    assert screen.read() == [TextDelta(0, "answer", 7, " three")]
    feed.finish([(0, "a")], "one two three")
    assert screen.read() == []
    assert screen.num_replaced == 0


def test_another_try_with_another_text_replaces_what_differs() -> None:
    feed = RunFeed(*A)
    slow, fast = Screen(feed), Screen(feed)
    feed.piece([(0, "a")], "one two")
    fast.read()
    feed.begin(0, "a")
    feed.piece([(0, "a")], "one six")
    assert fast.read() == [TextDelta(0, "answer", 4, "six")]
    assert slow.read() == [TextDelta(0, "answer", 0, "one six")]
    feed.finish([(0, "a")], "one")
    feed.piece([(1, "a")], "x")
    assert [delta.row for delta in fast.read()] == [1]
    assert fast.reader.sent[0, "answer"] == 3


def test_equal_calls_have_one_text_also_one_that_comes_late() -> None:
    feed = RunFeed(*A)
    screen = Screen(feed)
    feed.piece([(0, "a")], "one ")
    screen.read()
    feed.piece([(0, "a"), (1, "a")], "two")
    screen.read()
    assert screen.texts == {(0, "answer"): "one two", (1, "answer"): "one two"}


def test_the_rest_of_a_row_that_has_ended_comes_from_its_result() -> None:
    feed = RunFeed(*A)
    screen = Screen(feed)
    feed.piece([(0, "a")], "one ")
    screen.read()
    feed.piece([(0, "a")], "two")
    feed.end_row(0)
    assert screen.read() == []
    assert screen.reader.rest(0, {"answer": "one two"}) == [TextDelta(0, "answer", 4, "two")]
    assert screen.reader.sent == {}
    feed.piece([(1, "a")], "unread")
    feed.end_row(1)
    assert screen.reader.sent == {}, "a reader that never comes keeps nothing of rows that have ended"
    assert screen.reader.rest(1, {"answer": "unread"}) == [TextDelta(1, "answer", 0, "unread")]
    assert screen.reader.rest(2, {}) == []
    assert (screen.reader.num_ended_before, feed.reader().num_ended_before) == (0, 2)


def test_starts_are_bounded_and_what_is_lost_is_counted() -> None:
    feed = RunFeed(starts=True)
    reader = feed.reader()
    feed.started(3, "notes[1].x", PromptFound(10, 4, 2), 5.0)
    assert reader.read().starts == [CallStarted(3, "notes[1].x", 5.0, 10, 4, 2)]
    for row in range(MAX_STARTS + 7):
        feed.started(row, "a", PromptFound(), 0.0)
    news = reader.read()
    assert (len(news.starts), news.num_lost, news.starts[0].row) == (MAX_STARTS, 7, 7)
    assert not reader.has_news
    position = news.position
    feed.started(1, "a", PromptFound(), 0.0)
    assert [start.row for start in feed.reader(position).read().starts] == [1]
    RunFeed().started(0, "a", PromptFound(), 0.0)  # nobody asked


def test_random_tries_pieces_and_readers_end_with_the_text() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        feed = RunFeed(("answer", "twice"), {"a": ("answer", "twice")}, position=draw.randrange(100))
        screens = [Screen(feed)]
        for _ in range(draw.randrange(1, 4)):  # tries
            feed.begin(0, "a")
            text = "".join(draw.choice("ab") for _ in range(draw.randrange(12)))
            at = 0
            while at < len(text):
                size = draw.randrange(1, 5)
                feed.piece([(0, "a")], text[at : at + size])
                at += size
                if draw.random() < 0.5:
                    screen = draw.choice(screens)
                    screen.read()
                    if draw.random() < 0.4:
                        screens.append(Screen(feed, screen.position, screen.texts))
        feed.finish([(0, "a")], text)
        for screen in screens:
            screen.read()
            for output in ("answer", "twice"):
                # Where a text became shorter and nothing followed, the reader's own text is longer.
                assert screen.texts.get((0, output), "").startswith(text) or text == "", seed
