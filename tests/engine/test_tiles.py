"""Tiles that are read ahead are the tiles that are asked for, whatever the copies' speed, and nothing hangs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.conftest import Bench
from trt_redknot import Artifact, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.engine.tiles import DirectReads, Piece, Read, ReadAhead, TileOptions, Tiles, TileTier
from trt_redknot.engine.tiles.lanes import Mark, ThreadLane
from trt_redknot.errors import ConfigError, StoreError
from trt_redknot.observability.events import Tier

CPU = torch.device("cpu")
WIDTHS = {Part.LATENTS: 64, Part.LOCAL: 128, Part.INDEX_KEYS: 32}


class Reader:
    """An artifact of random values; every tensor of it is another."""

    def __init__(self, rows: int, form: ArtifactFormat, *, content: str = "a") -> None:
        self.content_digest = content
        self._rows = rows
        self._form = form
        self._stored: dict[tuple[Part, int | None], torch.Tensor] = {}
        self.counted: Counter[Tier] = Counter()
        self.broken: set[tuple[Part, int | None]] = set()

    @property
    def count_of_rows(self) -> int:
        return self._rows

    def codec(self, part: Part) -> TensorCodec:
        return TensorCodec(part=part, format=self._form, width=WIDTHS[part], rope_dim=16)

    def count(self, tier: Tier, bytes: int) -> None:
        self.counted[tier] += bytes

    def raw(self, part: Part, layer: int | None) -> torch.Tensor:
        if (part, layer) in self.broken:
            raise StoreError("the disk is gone")
        if (part, layer) not in self._stored:
            self._stored[part, layer] = self.codec(part).encode(torch.randn(self._rows, WIDTHS[part]))
        return self._stored[part, layer]

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype) -> torch.Tensor:
        return self.codec(part).decode(self.raw(part, layer), dtype)

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.codec(part).decode(self.raw(part, layer).index_select(0, index), dtype)


class SlowLane(ThreadLane):
    """Copies take their time; the marks of the computation are checked against the slots that are written."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.copies = 0

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        time.sleep(self.seconds)
        # What is half written is seen.
        for target in targets:
            target.view(torch.uint8).fill_(0xFF)
        super().copy(targets, sources)
        self.copies += 1


@dataclass(frozen=True)
class Begun:
    """A mark: so many copies were begun before it."""

    copies: int


class DeferringLane(ThreadLane):
    """A device: copies are done only where something waits for them or for later ones, in the order they were begun."""

    def __init__(self) -> None:
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._done = 0
        self._guard = threading.Lock()

    @property
    def pending(self) -> int:
        return len(self._queue)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._guard:
            self._queue += zip(targets, sources, strict=True)

    def mark_copied(self) -> Mark:
        with self._guard:
            return Begun(self._done + len(self._queue))

    def mark_computed(self) -> Mark:
        return object()

    def wait(self, mark: Mark) -> None:
        self.finish(mark)

    def finish(self, mark: Mark) -> None:
        assert isinstance(mark, Begun)
        with self._guard:
            while self._done < mark.copies:
                target, source = self._queue.popleft()
                target.copy_(source)
                self._done += 1

    def late_s(self, asked: Mark, copied: Mark) -> float:
        return 0.0


def whole(readers: Sequence[Reader], part: Part, layer: int) -> Read:
    return Read(part=part, layer=layer, pieces=wholes(readers))


def wholes(readers: Sequence[Reader]) -> tuple[Piece, ...]:
    return tuple(Piece(reader=reader, rows=reader.count_of_rows) for reader in readers)


def make_layers(draw: random.Random, readers: Sequence[Reader], layers: int) -> list[list[Read]]:
    """Layers that read alike share their pieces, as those of a request do; others have their own."""

    def pieces() -> tuple[Piece, ...]:
        chosen = draw.sample(list(readers), draw.randrange(1, len(readers) + 1))
        if draw.random() < 0.5:
            return wholes(chosen)
        found = []
        for reader in chosen:
            count = draw.randrange(2 * reader.count_of_rows)
            index = torch.tensor([draw.randrange(reader.count_of_rows) for _ in range(count)], dtype=torch.int64)
            found.append(Piece(reader=reader, rows=count, index=index))
        return tuple(found)

    shared = {part: pieces() for part in WIDTHS}
    announced = []
    for layer in range(layers):
        own = {part: pieces() if draw.random() < 0.3 else shared[part] for part in WIDTHS}
        chosen = [part for part in WIDTHS if draw.random() < 0.7]
        announced.append([Read(part=part, layer=layer, pieces=own[part]) for part in chosen])
    return announced


@torch.inference_mode()
def take_all(
    source: ReadAhead, layers: Sequence[Sequence[Read]], dtype: torch.dtype, draw: random.Random, *, most: int | None
) -> None:
    direct = DirectReads(dtype, CPU)
    for reads in layers:
        held = []
        for read in draw.sample(list(reads), len(reads)):
            held.append((source.take(read), direct.take(read)))
        # All of a layer's tensors stay valid until the next layer is entered.
        for found, expected in held:
            assert most is None or len(found) <= most
            assert torch.equal(torch.cat(found), torch.cat(expected))


@given(
    seed=st.integers(0, 2**31),
    depth=st.integers(2, 5),
    forms=st.sampled_from(
        [[ArtifactFormat.FLOAT32], [ArtifactFormat.FP8], [ArtifactFormat.FLOAT32, ArtifactFormat.FP8]]
    ),
    lane=st.sampled_from([ThreadLane, DeferringLane, lambda: SlowLane(0.0005)]),
    tiers=st.sampled_from(["none", "host", "small host", "device"]),
)
@settings(max_examples=40, deadline=None)
def test_what_is_taken_is_what_is_stored(
    seed: int, depth: int, forms: list[ArtifactFormat], lane: Any, tiers: str
) -> None:
    draw = random.Random(seed)
    readers = [
        Reader(draw.randrange(1, 9), draw.choice(forms), content=str(name)) for name in range(draw.randrange(1, 5))
    ]
    # What is stored alike and lies in the ring is one tensor, of however many artifacts.
    most = 1 if len(forms) == 1 and tiers != "device" else None
    host = TileTier(1 << 20 if tiers == "host" else 700, torch.ByteTensor) if "host" in tiers else None
    nearest = TileTier(1 << 20, torch.ByteTensor) if tiers == "device" else None
    source = ReadAhead(torch.float32, CPU, lane(), depth=depth, host=host, nearest=nearest)
    with contextlib.closing(source):
        taken = 0
        for _ in range(draw.randrange(1, 4)):
            layers = make_layers(draw, readers, draw.randrange(1, 9))
            if nearest is not None:
                for read in [read for reads in layers for read in reads]:
                    for piece in [piece for piece in read.pieces if draw.random() < 0.5]:
                        stored = piece.reader.raw(read.part, read.layer)
                        nearest.keep(piece.reader, read.part, read.layer, stored)
            source.announce(layers)
            take_all(source, layers, torch.float32, draw, most=most)
            taken += sum(len(reads) > 0 for reads in layers)
        assert len(source.lateness()) == taken
        assert all(late >= 0 for late in source.lateness())
    assert not [thread for thread in threading.enumerate() if thread.name == "redknot-read-ahead"]


def test_slow_copies_are_late_and_right() -> None:
    reader = Reader(5, ArtifactFormat.FLOAT32)
    lane = SlowLane(0.02)
    source = ReadAhead(torch.float32, CPU, lane, depth=2)
    layers = [[whole([reader], Part.LATENTS, layer)] for layer in range(5)]
    source.announce(layers)
    take_all(source, layers, torch.float32, random.Random(0), most=1)
    assert lane.copies == 5
    assert max(source.lateness()) > 0.01
    assert source.moved == reader.counted == {Tier.HOST: 5 * 5 * 64 * 4}
    source.close()


def test_a_slow_computation_holds_the_copies_back() -> None:
    """The ring has two layers: the third is not copied before the first is left."""
    reader = Reader(3, ArtifactFormat.FLOAT32)
    lane = SlowLane(0.0)
    source = ReadAhead(torch.float32, CPU, lane, depth=2)
    layers = [[whole([reader], Part.LATENTS, layer)] for layer in range(4)]
    source.announce(layers)
    first = source.take(layers[0][0])[0]
    before = first.clone()
    deadline = time.monotonic() + 10
    while lane.copies < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert lane.copies == 2
    assert torch.equal(first, before)
    source.take(layers[1][0])
    source.take(layers[2][0])
    source.close()


def test_a_failing_disk_is_the_computation_s_error() -> None:
    reader = Reader(3, ArtifactFormat.FLOAT32)
    layers = [[whole([reader], Part.LATENTS, layer)] for layer in range(4)]
    source = ReadAhead(torch.float32, CPU, ThreadLane(), depth=2)
    source.announce(layers)
    # The sizes are known by now; the copying thread has at most two layers.
    reader.broken.add((Part.LATENTS, 3))
    for reads in layers[:3]:
        source.take(reads[0])
    with pytest.raises(StoreError, match="the disk is gone"):
        source.take(layers[3][0])
    source.close()


def test_a_tensor_of_another_length_than_its_document_is_refused() -> None:
    reader = Reader(3, ArtifactFormat.FLOAT32)
    read = Read(part=Part.LATENTS, layer=0, pieces=(Piece(reader=reader, rows=4),))
    with contextlib.closing(ReadAhead(torch.float32, CPU, ThreadLane())) as source:
        source.announce([[read]])
        with pytest.raises(StoreError, match="another length than its document") as caught:
            source.take(read)
        assert (caught.value.expected, caught.value.found) == ("4 rows", "3 rows")


def test_a_layer_s_tiles_of_all_documents_are_one_call_and_one_tensor_a_kind() -> None:
    """Whole tensors are copied one by one to places side by side; rows that are asked for are gathered first."""

    class Noting(ThreadLane):
        def __init__(self) -> None:
            self.calls: list[int] = []

        def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            self.calls.append(len(targets))
            super().copy(targets, sources)

    readers = [Reader(rows, ArtifactFormat.FP8) for rows in (5, 3, 8)]
    asked = tuple(Piece(reader=reader, rows=2, index=torch.tensor([2, 0])) for reader in readers)
    pieces = wholes(readers)
    layers = [
        [Read(part=Part.LATENTS, layer=layer, pieces=pieces), Read(part=Part.LOCAL, layer=layer, pieces=asked)]
        for layer in range(4)
    ]
    lane = Noting()
    with contextlib.closing(ReadAhead(torch.float32, CPU, lane, depth=2)) as source:
        source.announce(layers)
        for latents, local in layers:
            assert [tuple(tensor.shape) for tensor in source.take(latents)] == [(16, 64)]
            assert [tuple(tensor.shape) for tensor in source.take(local)] == [(6, 128)]
    assert lane.calls == [3 + 1] * 4


def test_layers_without_reads_hold_nobody_up() -> None:
    """More of them than the ring is deep, after the last that is taken."""
    reader = Reader(3, ArtifactFormat.FLOAT32)
    source = ReadAhead(torch.float32, CPU, ThreadLane(), depth=2)
    first = whole([reader], Part.LATENTS, 0)
    with contextlib.closing(source):
        for _ in range(3):
            source.announce([[first], [], [], [], []])
            assert torch.equal(source.take(first)[0], DirectReads(torch.float32, CPU).take(first)[0])


def test_closing_half_way_leaves_no_copy_behind_the_computation() -> None:
    """What was begun is waited for before the ring's memory goes back."""
    reader = Reader(3, ArtifactFormat.FLOAT32)
    layers = [[whole([reader], Part.LATENTS, layer)] for layer in range(6)]
    lane = DeferringLane()
    source = ReadAhead(torch.float32, CPU, lane, depth=3)
    source.announce(layers)
    with torch.inference_mode():
        source.take(layers[0][0])
        deadline = time.monotonic() + 10
        while not lane.pending and time.monotonic() < deadline:
            time.sleep(0.001)
        assert lane.pending
        source.close()
    assert not lane.pending


def test_closing_wakes_the_copying_thread() -> None:
    reader = Reader(3, ArtifactFormat.FLOAT32)
    layers = [[whole([reader], Part.LATENTS, layer)] for layer in range(6)]
    source = ReadAhead(torch.float32, CPU, ThreadLane(), depth=2)
    source.announce(layers)
    source.take(layers[0][0])
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        source.take(layers[5][0])


def test_order_is_checked() -> None:
    reader = Reader(3, ArtifactFormat.FLOAT32)
    layers = [[whole([reader], part, layer) for part in WIDTHS] for layer in range(2)]
    source = ReadAhead(torch.float32, CPU, ThreadLane())
    source.announce(layers)
    source.take(layers[0][0])
    with pytest.raises(RuntimeError, match="nobody took"):
        source.announce(layers)
    source.take(layers[1][0])
    with pytest.raises(RuntimeError, match="after a later layer"):
        source.take(layers[0][1])
    source.close()
    with pytest.raises(ValueError, match="at least 2 layers"):
        ReadAhead(torch.float32, CPU, ThreadLane(), depth=1)


def test_a_tier_keeps_what_was_used_last() -> None:
    reader = Reader(4, ArtifactFormat.FLOAT32)
    size = reader.raw(Part.LATENTS, 0).nbytes
    tier = TileTier(2 * size, torch.ByteTensor)
    for layer in (0, 1):
        assert tier.find(reader, Part.LATENTS, layer) is None
        tier.keep(reader, Part.LATENTS, layer, reader.raw(Part.LATENTS, layer))
    kept = tier.find(reader, Part.LATENTS, 0)
    tier.keep(reader, Part.LATENTS, 2, reader.raw(Part.LATENTS, 2))
    assert tier.find(reader, Part.LATENTS, 1) is None
    assert kept is not None
    assert torch.equal(kept, reader.raw(Part.LATENTS, 0))
    assert tier.use.bytes == 2 * size
    assert (tier.use.hits, tier.use.misses) == (1, 3)
    newer = Reader(4, ArtifactFormat.FLOAT32, content="another")
    assert tier.find(newer, Part.LATENTS, 0) is None
    large = torch.zeros(3 * size, dtype=torch.uint8)
    assert tier.keep(newer, Part.LATENTS, 0, large) is large
    assert tier.use.bytes == 2 * size


def test_options_that_make_no_sense() -> None:
    for options in ({"depth": 1}, {"depth": -1}, {"depth": 0, "host_bytes": 1}, {"depth": 2, "device_bytes": -1}):
        with pytest.raises(ConfigError):
            TileOptions(**options)
    with pytest.raises(ConfigError, match="keeps no artifacts"):
        Tiles(torch.float32, CPU, TileOptions(depth=3)).warm(Reader(1, ArtifactFormat.FLOAT32), [])


@pytest.mark.parametrize("tier", ["none", "host", "device"])
def test_an_engine_answers_the_same_with_tiles_read_ahead(bench: Bench, tier: str) -> None:
    """Every path of the prefill: a prefix, relocated documents, one of them twice, active and omitted rows."""
    documents = [bench.tokens(count) for count in (130, 61, 97)]
    ids = [bench.engine.build_artifact(bench.store, document) for document in documents]
    segments = [*(Artifact(each) for each in (*ids, ids[1])), Tokens(bench.tokens(7))]
    options = TileOptions(depth=2, **({} if tier == "none" else {f"{tier}_bytes": 1 << 30}))
    before = bench.engine.tiles
    for policy in (
        ReusePolicy(boundary=4, tail=8, top_entries=2, budget=0.2),
        ReusePolicy(boundary=4, tail=8, top_entries=2, budget=0.5, epilogue="active"),
        ReusePolicy(protect="all"),
    ):
        wanted = _ask(bench, segments, policy)
        bench.engine.tiles = Tiles(before.dtype, CPU, options)
        try:
            if tier == "device":
                for each in ids:
                    assert bench.engine.warm(bench.store, each) > 0
            found = [_ask(bench, segments, policy) for _ in range(2)]
            use = bench.engine.tiles.use
        finally:
            bench.engine.tiles = before
        for answer in found:
            assert answer.report.arm == "reuse"
            assert answer.tokens == wanted.tokens
            assert torch.equal(answer.first_logits, wanted.first_logits)
        by_tier = found[1].report.bytes_by_tier
        # Where every row runs there is nothing to read.
        name = {"none": "host", "host": "pinned", "device": "device"}[tier]
        assert (by_tier.get(name, 0) > 0) == (policy.protect != "all")
        if tier != "none" and policy.protect != "all":
            assert use[name].hits > 0


def _ask(bench: Bench, segments: list[Any], policy: ReusePolicy) -> Response:
    request = Request(segments=segments, max_new_tokens=2, stop_tokens=[], reuse=policy)
    return bench.engine.generate(request, store=bench.store)
