"""Reading ahead: a thread copies the tiles of coming layers into a ring while the current layer computes.

Order of calls: `announce` the reads of some layers, `take` each of them, layers in order; announce again once all were
taken; `close` once. The copying thread and the computing one meet in two places: a layer's slot is filled only after
the computation that read the slot's last layer (`after`), and is read only after its copies (`wait`). On a GPU both are
events on the device; the host waits only until the other thread has queued its part.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.engine.tiles.lanes import CopyLane, Mark
from trt_redknot.engine.tiles.places import LayerPlaces, Placing, ReadPlace
from trt_redknot.engine.tiles.reads import DirectReads, Piece, Read, ReadKey
from trt_redknot.engine.tiles.tier import TileTier
from trt_redknot.errors import StoreError
from trt_redknot.observability.events import Tier


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Stored rows on the device, and how to decode them.

    Attributes:
        whole: the piece of which they are the whole tensor, whatever rows it asks for; None: they are the rows.
    """

    stored: torch.Tensor
    codec: TensorCodec
    whole: Piece | None = None

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode(self.stored if self.whole is None else self.whole.rows_of(self.stored), dtype)


@dataclass(kw_only=True, eq=False)
class _Layer:
    """The announced reads of one layer, and how far they are.

    Attributes:
        places: where in its slot they go.
        tiles: by read, what of it is on the device, in the order of its pieces.
        asked, copied: marks of the computation that waits for the copies, and of the copies.
        queued: the copying thread has begun all copies, or given up.
        left: mark of the computation after which the slot is free.
    """

    reads: tuple[Read, ...]
    places: LayerPlaces
    tiles: dict[ReadKey, list[_Tile]] = field(default_factory=dict)
    asked: Mark | None = None
    copied: Mark | None = None
    queued: threading.Event = field(default_factory=threading.Event)
    left: Mark | None = None


class ReadAhead:
    """A :class:`TileSource` with a ring of `depth` layers.

    Args:
        dtype: what stored tensors are decoded to, on the device.
        lane: where copies run.
        depth: layers in the ring; 2 or more, else nothing is read ahead.
        host: tier of stored tensors in the lane's host memory; filled by what is read.
        nearest: tier of stored tensors on the device; looked into first, and never filled from here.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        lane: CopyLane,
        *,
        depth: int = 3,
        host: TileTier | None = None,
        nearest: TileTier | None = None,
    ) -> None:
        if depth < 2:
            raise ValueError(f"depth of the ring: expected at least 2 layers, found {depth}")
        self._dtype = dtype
        self._device = device
        self._lane = lane
        self._depth = depth
        self._host = host
        self._nearest = nearest
        self._direct = DirectReads(dtype, device)
        self._layers: list[_Layer] = []
        self._past: list[_Layer] = []
        self._by_key: dict[ReadKey, int] = {}
        self._current = -1
        self._ring: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        # Guards `_released` and `_stopped`, and wakes the copying thread.
        self._turn = threading.Condition()
        self._released = 0
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._last: Mark | None = None
        self._moved: Counter[Tier] = Counter()

    @property
    def moved(self) -> Mapping[Tier, int]:
        """Stored bytes taken so far, by where they were found; decoded ones of what was not announced."""
        return self._moved + Counter(self._direct.moved)

    def lateness(self) -> list[float]:
        layers = [*self._past, *self._layers]
        return [
            self._lane.late_s(each.asked, each.copied)
            for each in layers
            if each.asked is not None and each.copied is not None
        ]

    def announce(self, layers: Sequence[Sequence[Read]]) -> None:
        """Begin to copy what the next layers will take.

        Raises:
            RuntimeError: reads that were announced before have not all been taken.
        """
        if any(each.reads for each in self._layers[self._current + 1 :]):
            raise RuntimeError("reads were announced that nobody took")
        self._leave(len(self._layers))
        self._join()
        finished = [each.copied for each in self._layers if each.copied is not None]
        for layer in self._layers:
            layer.tiles.clear()
        self._past += self._layers
        placing = Placing()
        self._layers = [_Layer(reads=tuple(reads), places=placing.of(reads)) for reads in layers]
        self._by_key = {read.key: at for at, each in enumerate(self._layers) for read in each.reads}
        self._current, self._released = -1, 0
        if not self._by_key:
            return
        self._make_ring()
        self._thread = threading.Thread(target=self._copy_all, args=(finished,), name="redknot-read-ahead", daemon=True)
        self._thread.start()

    def take(self, read: Read) -> list[torch.Tensor]:
        """The decoded rows on the device: one tensor where the ring has all of them.

        Raises:
            StoreError: or whatever else the copying thread met.
            RuntimeError: out of order, or the source was closed.
        """
        at = self._by_key.get(read.key)
        if at is None:
            return self._direct.take(read)
        if at < self._current:
            raise RuntimeError(f"a read of {read.part} in layer {read.layer} was taken after a later layer's")
        if at > self._current:
            self._enter(at)
        return [tile.decoded(self._dtype) for tile in self._layers[at].tiles[read.key]]

    def close(self) -> None:
        """End the copying thread. What was taken stays valid until the caller's computation is done with it."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        self._join()
        if self._last is not None:
            # The ring goes back to the computation's memory: what is written to it next comes after these copies.
            self._lane.wait(self._last)

    def _enter(self, at: int) -> None:
        """Leave the current layer's slot to the copies, and wait for the next layer's."""
        layer = self._layers[at]
        layer.asked = self._leave(at)
        self._current = at
        layer.queued.wait()
        if layer.copied is None:
            assert self._failure is not None
            raise self._failure
        self._lane.wait(layer.copied)

    def _leave(self, at: int) -> Mark:
        """The slots of the layers before `at` are free after what is computed by now."""
        mark = self._lane.mark_computed()
        with self._turn:
            for behind in self._layers[max(0, self._current) : at]:
                behind.left = mark
            self._released = at
            self._turn.notify_all()
        return mark

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _make_ring(self) -> None:
        size = max(layer.places.bytes for layer in self._layers)
        staged = max(layer.places.staged_bytes for layer in self._layers)
        if not self._ring or self._ring[0].numel() < size:
            self._ring = [self._lane.empty(size) for _ in range(self._depth)]
        if not self._staging or self._staging[0].numel() < staged:
            self._staging = [self._lane.staging(staged) for _ in range(self._depth)]
        # The ring may still be read by what is queued: by layers announced before, or by the memory's last owner.
        self._lane.after(self._lane.mark_computed())

    @torch.inference_mode()
    def _copy_all(self, finished: Sequence[Mark]) -> None:
        try:
            # Staging memory is written by this thread, which no event on the device holds back.
            for mark in finished:
                self._lane.finish(mark)
            for at, layer in enumerate(self._layers):
                self._await_slot(at)
                self._copy(at, layer)
                layer.copied = self._lane.mark_copied()
                layer.queued.set()
        except BaseException as failure:  # noqa: BLE001 - it belongs to the computing thread, which raises it
            self._failure = failure
        finally:
            # Also of a copy that was begun before something failed.
            self._last = self._lane.mark_copied()
            for layer in self._layers:
                layer.queued.set()

    def _await_slot(self, at: int) -> None:
        """Wait until the slot's last layer was left behind. Raises RuntimeError where the source was closed."""
        previous = at - self._depth
        with self._turn:
            while not self._stopped and self._released <= previous:
                self._turn.wait()
            if self._stopped:
                raise RuntimeError("the source of artifact tiles was closed")
        if previous >= 0:
            behind = self._layers[previous]
            assert behind.left is not None
            assert behind.copied is not None
            self._lane.after(behind.left)
            self._lane.finish(behind.copied)

    def _copy(self, at: int, layer: _Layer) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for read, place in zip(layer.reads, layer.places.reads, strict=True):
            if read.key not in layer.tiles:
                layer.tiles[read.key] = self._gather(at % self._depth, read, place, targets, sources)
        self._lane.copy(targets, sources)

    def _gather(
        self, slot: int, read: Read, place: ReadPlace, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[_Tile]:
        """Find the pieces of a read, and list what is to be copied: rows as they lie in staging memory, in one copy;
        whole tensors one by one, to places side by side."""
        tiles: list[_Tile] = []
        first = 0
        for index, piece in enumerate(read.pieces):
            found = None if self._nearest is None else self._nearest.find(piece.reader, read.part, read.layer)
            if found is not None:
                tiles += self._ringed(slot, read, place, range(first, index), targets, sources)
                tiles.append(_Tile(stored=found, codec=piece.reader.codec(read.part), whole=piece))
                self._count(piece, Tier.DEVICE, piece.rows * found[:1].nbytes)
                first = index + 1
                continue
            tier, stored = self._in_host_memory(piece, read)
            if piece.index is not None:
                rows = place.view(self._staging, slot, index, index, staged=True)
                torch.index_select(stored, 0, piece.index, out=rows)
                self._count(piece, tier, rows.nbytes)
                continue
            if stored.shape[0] != piece.rows:
                raise StoreError(
                    f"an artifact's {read.part} has another length than its document", expected=f"{piece.rows} rows",
                    found=f"{stored.shape[0]} rows",
                )  # fmt: skip
            targets.append(place.view(self._ring, slot, index, index, staged=False))
            sources.append(stored)
            self._count(piece, tier, stored.nbytes)
        return tiles + self._ringed(slot, read, place, range(first, len(read.pieces)), targets, sources)

    def _ringed(
        self, slot: int, read: Read, place: ReadPlace, pieces: range, targets: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> list[_Tile]:  # fmt: skip
        """The tiles of consecutive pieces that the ring has."""
        tiles = []
        first = pieces.start
        while first < pieces.stop:
            last = first
            while last + 1 < pieces.stop and place.run_of[last + 1][0] == place.run_of[first][0]:
                last += 1
            tile = place.view(self._ring, slot, first, last, staged=False)
            if read.pieces[first].index is not None:
                targets.append(tile)
                sources.append(place.view(self._staging, slot, first, last, staged=True))
            tiles.append(_Tile(stored=tile, codec=place.runs[place.run_of[first][0]].codec))
            first = last + 1
        return tiles

    def _count(self, piece: Piece, tier: Tier, size: int) -> None:
        self._moved[tier] += size
        piece.reader.count(tier, size)

    def _in_host_memory(self, piece: Piece, read: Read) -> tuple[Tier, torch.Tensor]:
        if self._host is None:
            return Tier.HOST, piece.reader.raw(read.part, read.layer)
        found = self._host.find(piece.reader, read.part, read.layer)
        if found is not None:
            return Tier.PINNED, found
        stored = piece.reader.raw(read.part, read.layer)
        return Tier.HOST, self._host.keep(piece.reader, read.part, read.layer, stored)
