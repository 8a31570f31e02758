"""The order of one rank's batches against a model of what can happen on the way."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from gateway.engines.feed import RECENT, Feed, Step


class Process:
    """One engine process: its batches in order."""

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.batches: list[bytes] = []

    def publish(self) -> tuple[int, bytes]:
        number = len(self.batches)
        payload = b"%d/%d" % (self.boot, number)
        self.batches.append(payload)
        return number, payload


class Reader:
    """What a listener does with a feed, and what it applied since it last had to forget."""

    def __init__(self) -> None:
        self.feed = Feed()
        self.applied: list[bytes] = []
        self.skipped = False

    def take(self, number: int, payload: bytes, replay: Sequence[tuple[int, bytes]]) -> None:
        step = self.show(number, payload)
        if step is Step.REPLAY:
            for each in replay:
                if self.show(*each) is Step.REPLAY:
                    break
            step = self.show(number, payload)
            if step is Step.REPLAY:
                self.forget()
                self.feed.skip_to(number)
                self.skipped = number > 0
                step = self.show(number, payload)
        assert step in (Step.APPLY, Step.SKIP)

    def show(self, number: int, payload: bytes) -> Step:
        step = self.feed.show(number, payload)
        if step is Step.RESTARTED:
            self.forget()
            step = self.feed.show(number, payload)
        if step is Step.APPLY:
            self.applied.append(payload)
        return step

    def forget(self) -> None:
        self.feed.restart()
        self.applied.clear()
        self.skipped = False


WHAT = st.lists(
    st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "old again", "restart", "evicted"]), max_size=60
)


@given(happens=WHAT)
def test_whatever_happens_each_batch_counts_once_and_in_order(happens: list[str]) -> None:
    process, reader, boots, kept = Process(0), Reader(), 0, 0
    arrived: list[tuple[int, bytes]] = []
    for what in happens:
        if what == "restart":
            boots += 1
            process, kept = Process(boots), 0
            arrived = []
            continue
        if what == "evicted":
            kept = len(process.batches)
            continue
        if what == "old again":
            if arrived:
                reader.take(*arrived[-1], list(enumerate(process.batches))[kept:])
            continue
        number, payload = process.publish()
        if what == "lost":
            continue
        replay = list(enumerate(process.batches))[kept:]
        for _ in range(2 if what == "twice" else 1):
            reader.take(number, payload, replay)
            arrived.append((number, payload))
        # What was applied is a run of this process's batches that ends here.
        run = process.batches[len(process.batches) - len(reader.applied) :]
        mine = [each for each in reader.applied if each in process.batches]
        assert mine == run[-len(mine) :]
        assert len(set(reader.applied)) == len(reader.applied)
        assert reader.feed.last == number
        assert reader.feed.wanted == number + 1
        if reader.feed.complete and reader.applied[0] == process.batches[0]:
            assert reader.applied == process.batches
        if reader.skipped:
            assert not reader.feed.complete


@given(lost=st.sets(st.integers(0, 30)), twice=st.sets(st.integers(0, 30)), count=st.integers(1, 31))
def test_with_a_replay_nothing_is_ever_missing(lost: set[int], twice: set[int], count: int) -> None:
    process, reader = Process(0), Reader()
    for at in range(count):
        number, payload = process.publish()
        if at in lost and at != count - 1:
            continue
        for _ in range(1 + (at in twice)):
            reader.take(number, payload, list(enumerate(process.batches)))
    assert reader.applied == process.batches
    assert reader.feed.complete


def test_numbers_that_begin_again_are_another_process() -> None:
    feed = Feed()
    for at in range(5):
        assert feed.show(at, b"old %d" % at) is Step.APPLY
    assert feed.show(0, b"new 0") is Step.RESTARTED
    feed.restart()
    assert not feed.complete
    assert feed.show(0, b"new 0") is Step.APPLY
    assert feed.complete
    assert feed.show(0, b"new 0") is Step.SKIP


def test_the_same_number_with_other_bytes_is_another_process() -> None:
    feed = Feed()
    for at in range(5):
        feed.show(at, b"old %d" % at)
    assert feed.show(4, b"new 4") is Step.RESTARTED
    assert feed.show(4, b"old 4") is Step.SKIP, "nothing was changed by asking"


def test_the_first_batch_of_a_late_listener_is_a_gap() -> None:
    feed = Feed()
    assert feed.show(7, b"x") is Step.REPLAY
    assert feed.wanted == 0
    feed.skip_to(7)
    assert feed.show(7, b"x") is Step.APPLY
    assert not feed.complete
    assert feed.show(8, b"y") is Step.APPLY
    assert not feed.complete, "a gap is not healed by going on"
    feed.cleared()
    assert feed.complete


def test_what_is_remembered_of_batches_is_bounded() -> None:
    feed = Feed()
    for at in range(RECENT + 100):
        assert feed.show(at, b"%d" % at) is Step.APPLY
    assert feed.show(RECENT + 99, b"%d" % (RECENT + 99)) is Step.SKIP
    assert feed.show(100, b"100") is Step.SKIP
    assert len(feed._recent) == RECENT
    assert feed.show(99, b"99") is Step.RESTARTED, "it cannot be told from another one"
