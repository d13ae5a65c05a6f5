"""The control plane's two transports, ZeroMQ and a socket pair: the same tests over both, and what a peer may do to one
that it speaks without our code."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pickle
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from outrider.providers.control import connect
from outrider.providers.dealer import DealerChannel
from outrider.scheduler.control_socket import ControlSocket
from outrider.shm.channel import INLINE_BYTES, Channel, PairChannel
from outrider.shm.errors import ChannelClosedError, ChannelFullError, LayoutError, OutriderError

pytestmark = pytest.mark.fast
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
MOST = 1 << 24
ME = b"0/1"


@dataclass
class Ends:
    """The worker's end of a channel, and the coordinator's."""

    worker: Channel
    send: Callable[[bytes, float], None]
    receive: Callable[[], bytes | None]
    fd: int  # ready when the coordinator may receive


def over_zeromq() -> Iterator[Ends]:
    ours = ControlSocket()
    worker = DealerChannel(f"ipc:///proc/self/fd/{ours.endpoint}", ME)
    try:
        worker.send(b"hello")  # before that, nobody knows it
        assert ours.receive() == (ME, b"hello")

        def receive() -> bytes | None:
            return ours.receive()[1] if ours.router.poll(0) else None

        yield Ends(worker, lambda body, patience: ours.send(ME, body, patience), receive, ours.router.fd)
    finally:
        worker.close()
        ours.close()


def over_a_pair() -> Iterator[Ends]:
    near, far = (PairChannel(one, MOST) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        yield Ends(far, near.send, near.receive, near.fileno())
    finally:
        near.close()
        far.close()


@pytest.fixture(params=[over_zeromq, over_a_pair], ids=["zeromq", "pair"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    yield from request.param()


def bodies(rng: random.Random, count: int) -> list[bytes]:
    sizes = [1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 212_000, 1_000_000]
    return [rng.randbytes(rng.choice([*sizes, rng.randint(1, 200), rng.randint(1, 200)])) for _ in range(count)]


def wait_for(fd: int, events: int = select.POLLIN) -> None:
    poll = select.poll()
    poll.register(fd, events)
    assert poll.poll(ENOUGH * 1000)


def received(receive: Callable[[], bytes | None], fd: int, count: int) -> list[bytes]:
    """So many messages, as a channel is to be read: take all that are there, then wait."""
    got: list[bytes] = []
    while True:
        while (body := receive()) is not None:
            got.append(body)
        if len(got) >= count:
            return got
        wait_for(fd)


def test_messages_arrive_whole_in_order_and_once(ends: Ends) -> None:
    rng = random.Random(1)
    for to_worker in (True, False):
        sent = bodies(rng, 40)
        got: list[bytes] = []
        target = (ends.worker.receive, ends.worker.fileno()) if to_worker else (ends.receive, ends.fd)
        reader = threading.Thread(target=lambda target=target, got=got: got.extend(received(*target, 40)))
        reader.start()
        for body in sent:
            ends.send(body, ENOUGH) if to_worker else ends.worker.send(body, ENOUGH)
        reader.join(ENOUGH)
        assert got == sent
        assert ends.worker.receive() is None and ends.receive() is None


def test_no_sign_of_a_message_is_missed(ends: Ends) -> None:
    """An echo from one thread that waits, takes what is there, and sends: what was said while it sent is not lost."""

    def echo() -> None:
        for count in range(300):
            (body,) = received(ends.worker.receive, ends.worker.fileno(), 1)
            ends.worker.send(body + bytes([count % 7]), ENOUGH)

    worker = threading.Thread(target=echo)
    worker.start()
    for count in range(300):
        body = b"x" * (count % 13 + 1)
        ends.send(body, ENOUGH)
        assert received(ends.receive, ends.fd, 1) == [body + bytes([count % 7])]
    worker.join(ENOUGH)


@pytest.mark.parametrize("size", [10_000, 2 * INLINE_BYTES], ids=["inline", "large"])
def test_a_channel_is_bounded_and_goes_on_when_it_is_read(ends: Ends, size: int) -> None:
    def fill(send: Callable[[bytes, float], None]) -> int:
        for count in range(100_000):
            try:
                send(struct.pack("<Q", count) + bytes(size), 0.0)
            except ChannelFullError as error:
                assert error.seconds == 0
                return count
        pytest.fail("it takes anything")

    for send, receive, fd in (
        (ends.send, ends.worker.receive, ends.worker.fileno()),
        (ends.worker.send, ends.receive, ends.fd),
    ):
        count = fill(send)
        got = received(receive, fd, count)
        assert [struct.unpack_from("<Q", body)[0] for body in got] == list(range(count))
        send(b"again", ENOUGH)
        assert received(receive, fd, 1) == [b"again"]


def test_who_waits_to_send_is_told_of_room(ends: Ends) -> None:
    """By the descriptor of the channel, polled for `FULL`, or by the patience of `send`."""
    sent = 0
    while True:
        try:
            ends.worker.send(bytes(20_000))
            sent += 1
        except ChannelFullError:
            break
    reader = threading.Thread(target=received, args=(ends.receive, ends.fd, sent + 2))
    reader.start()
    ends.worker.send(b"patient", ENOUGH)
    while True:
        try:
            ends.worker.send(b"told")
            break
        except ChannelFullError:
            wait_for(ends.worker.fileno(), ends.worker.FULL)
            assert ends.worker.receive() is None
    reader.join(ENOUGH)
    assert not reader.is_alive()


def test_what_was_sent_before_the_end_arrives(ends: Ends) -> None:
    sent = [bytes([count]) * 1000 for count in range(50)]
    for body in sent:
        ends.worker.send(body)
    ends.worker.close(ENOUGH)
    got = []
    while len(got) < 50:
        body = ends.receive()
        if body is None:
            wait_for(ends.fd)
        else:
            got.append(body)
    assert got == sent


def test_a_worker_that_is_gone_cannot_be_reached(ends: Ends) -> None:
    ends.worker.close()
    deadline = time.monotonic() + ENOUGH
    with pytest.raises(ChannelClosedError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ChannelFullError):  # while the connection ends
                ends.send(b"are you there", 0.0)


# The pair, spoken by somebody else ------------------------------------------------------------------------------------
@pytest.fixture
def wild() -> Iterator[tuple[PairChannel, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        channel = PairChannel(near, 1000)
        yield channel, far
        channel.close()


def memfd(content: bytes, seals: bool = True) -> int:
    fd = os.memfd_create("wild", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 15)
    return fd


LENGTH = struct.Struct("<Q")
PACKETS: dict[str, tuple[bytes, list[Callable[[], int]]]] = {
    "a packet has more than": (bytes(INLINE_BYTES + 1), []),
    "with 2 descriptors": (LENGTH.pack(5), [lambda: memfd(b"hello"), lambda: memfd(b"hello")]),
    "cut short|descriptors": (LENGTH.pack(5), [lambda: memfd(b"hello")] * 40),
    "no sealed memfd": (LENGTH.pack(5), [lambda: memfd(b"hello", seals=False)]),
    "is no sealed memfd": (LENGTH.pack(5), [lambda: os.open("/dev/zero", os.O_RDONLY)]),
    "not as announced": (LENGTH.pack(6), [lambda: memfd(b"hello")]),
    "5 bytes is not as announced": (b"hello", [lambda: memfd(b"hello")]),
    "of 0 bytes": (LENGTH.pack(0), [lambda: memfd(b"")]),
    "over 1000 bytes": (LENGTH.pack(1001), [lambda: memfd(bytes(1001))]),
}


@pytest.mark.parametrize("words", PACKETS)
def test_a_packet_that_is_no_message_is_refused_and_its_descriptors_closed(
    wild: tuple[PairChannel, socket.socket], words: str
) -> None:
    channel, far = wild
    packet, makers = PACKETS[words]
    before = len(os.listdir("/proc/self/fd"))
    fds = [make() for make in makers]
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    far.sendmsg([packet], control)
    for fd in fds:
        os.close(fd)
    with pytest.raises(LayoutError, match=words):
        channel.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    far.send(b"a message")
    assert channel.receive() == b"a message"


def test_the_end_of_the_pair_comes_after_what_was_sent(wild: tuple[PairChannel, socket.socket]) -> None:
    channel, far = wild
    far.send(b"last words")
    far.close()
    with pytest.raises(ChannelClosedError):
        channel.send(b"hello")
    assert channel.receive() == b"last words"
    with pytest.raises(ChannelClosedError):
        channel.receive()


def test_the_errors_of_a_channel_pickle_and_are_built_in_ones() -> None:
    error = ChannelFullError("full", seconds=5.0)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, (OutriderError, TimeoutError)) and copy.seconds == 5.0


def test_without_a_pair_the_worker_must_have_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.providers.dealer", None)
    with pytest.raises(ImportError):
        connect("ipc:///nowhere", ME, -1)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        channel, version = connect("ipc:///nowhere", ME, far.detach())
        assert isinstance(channel, PairChannel) and version is None
        channel.send(b"hello")
        assert near.recv(100) == b"hello"
        channel.close()
