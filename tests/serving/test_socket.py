"""The frames between a front end and its ranks: whole or refused, whatever the other end does."""

from __future__ import annotations

import json
import socket
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.serving.socket import MAX_FRAME_BYTES, Channel, ChannelError, Listener, connect

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def pair(limit: int = MAX_FRAME_BYTES) -> tuple[Channel, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(left, limit=limit), Channel(right, limit=limit)


def raw_pair(limit: int = MAX_FRAME_BYTES) -> tuple[socket.socket, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    right.settimeout(10.0)
    return left, Channel(right, limit=limit)


@given(messages=st.lists(st.dictionaries(st.text(), VALUES, max_size=5), max_size=6))
@settings(max_examples=60, deadline=None)
def test_objects_arrive_as_they_were_sent_and_in_order(messages: list[dict[str, object]]) -> None:
    left, right = pair()
    for message in messages:
        left.send(message)
    left.close()
    assert [right.receive() for _ in messages] == messages
    assert right.receive() is None
    right.close()


def test_large_objects_pass_while_the_other_end_reads() -> None:
    left, right = pair()
    message = {"tokens": list(range(200_000)), "text": "ä" * 500_000}
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.receive() == message
    sender.join(10)
    assert not sender.is_alive()


def test_many_senders_do_not_mix_their_frames() -> None:
    left, right = pair()

    def send(number: int) -> None:
        for _ in range(20):
            left.send({"number": number, "filling": "x" * 3000})

    senders = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for sender in senders:
        sender.start()
    found = [right.receive() for _ in range(160)]
    assert sorted(message["number"] for message in found if message) == sorted(list(range(8)) * 20)
    assert all(message == {"number": message["number"], "filling": "x" * 3000} for message in found if message)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (struct.pack(">I", 0), "ill-formed"),
        (struct.pack(">I", 0xFFFFFFFF), "too large"),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "too large"),
        (struct.pack(">I", 4) + b"{}", "inside a frame"),
        (struct.pack(">I", 2), "inside a frame"),
        (b"\x00\x00", "inside a frame"),
        (struct.pack(">I", 2) + b"[]", "ill-formed"),
        (struct.pack(">I", 3) + b"\xff\xfe\xfd", "ill-formed"),
        (struct.pack(">I", 15) + b'{"a":1,"a":2,  ', "ill-formed"),
        (struct.pack(">I", 5) + b"NaN!!", "ill-formed"),
    ],
)
def test_what_is_no_frame_is_refused(content: bytes, fault: str) -> None:
    left, right = raw_pair()
    left.sendall(content)
    left.close()
    with pytest.raises(ChannelError, match=fault):
        right.receive()


def test_a_length_over_the_limit_is_refused_before_its_content_comes() -> None:
    left, right = raw_pair(limit=100)
    left.sendall(struct.pack(">I", 101))
    with pytest.raises(ChannelError, match=r"at most 100 bytes, found 101"):
        right.receive()
    left.close()


def test_too_large_an_object_is_not_sent_and_the_channel_goes_on() -> None:
    left, right = pair(limit=100)
    with pytest.raises(ChannelError, match="too large"):
        left.send({"text": "x" * 100})
    left.send({"text": "small"})
    assert right.receive() == {"text": "small"}


def test_sending_to_an_end_that_is_gone_is_an_error() -> None:
    left, right = pair()
    right.close()
    with pytest.raises(ChannelError, match="gone"):
        left.send({"text": "x" * 1000})


def test_closing_wakes_the_thread_that_receives() -> None:
    left, right = pair()
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.append(right.receive()))
    reader.start()
    right.close()
    reader.join(10)
    assert received == [None]
    left.close()


def test_the_socket_lies_in_a_private_folder_and_knows_its_peer() -> None:
    listener = Listener()
    folder = listener.path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    here = connect(listener.path)
    there = listener.accept(10.0)
    assert there is not None
    here.send({"who": "client"})
    assert there.receive() == {"who": "client"}
    assert there.peer == here.peer
    assert listener.accept(0.0) is None
    listener.close()
    assert not folder.exists()
    with pytest.raises(ChannelError, match="nobody listens"):
        connect(listener.path)
    with pytest.raises(ChannelError, match="closed"):
        listener.accept(0.0)


def test_too_long_a_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ChannelError, match="TMPDIR"):
        Listener()
    assert not list(deep.iterdir())


def test_frames_are_plain_json() -> None:
    left, right = raw_pair()
    right.send({"op": "hello", "rank": 3})
    content = left.recv(1000)
    assert int.from_bytes(content[:4], "big") == len(content) - 4
    assert json.loads(content[4:]) == {"op": "hello", "rank": 3}


def test_a_process_with_thousands_of_open_files_has_connections() -> None:
    program = """
import os, resource
from trt_redknot.serving.socket import Listener, connect
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
listener = Listener()
assert listener.accept(0) is None
connection = connect(listener.path)
accepted = listener.accept(10)
connection.send({"held": len(held)})
print(accepted.receive())
listener.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("{'held': 1024}\n", "")
