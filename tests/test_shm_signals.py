"""Doorbells, descriptors over a socket pair, and the deaths of processes."""

import array
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from outrider.shm.descriptors import PER_MESSAGE, DescriptorChannel, pair
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import ChannelClosedError, DescriptorError

pytestmark = pytest.mark.fast
LONG = 60  # seconds until a test that hangs fails


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


# Doorbells


def test_rings_are_kept_and_taken_together():
    bell = Doorbell()
    assert not os.get_inheritable(bell.fileno())
    assert bell.wait(0) is False
    bell.ring()
    bell.ring()
    assert bell.wait() is True
    assert bell.wait(0) is False and bell.wait(0.001) is False
    bell.ring()
    assert bell.wait(LONG) is True
    bell.close()


def test_closing_twice_is_fine_and_leaves_nothing():
    before = open_descriptors()
    bell = Doorbell()
    other = Doorbell(os.dup(bell.fileno()))
    other.ring()
    assert bell.wait(0) is True
    bell.close()
    bell.close()
    assert bell.fileno() == -1
    other.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("timeout", [None, LONG])
def test_handled_signals_do_not_end_the_wait(timeout):
    """A thread sends signals until 50 were handled; the handler of the 50th rings."""
    bell, seen, handled = Doorbell(), [], threading.Semaphore(0)
    waiter = threading.get_ident()

    def handle(number, frame):
        seen.append(number)
        if len(seen) == 50:
            bell.ring()
        handled.release()

    def send():
        # Not one for one: a signal just before the system call is handled only after the next one.
        while len(seen) < 50:
            signal.pthread_kill(waiter, signal.SIGUSR1)
            handled.acquire(timeout=0.001)

    previous = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send, daemon=True)
    try:
        sender.start()
        assert bell.wait(timeout) is True
        sender.join()
    finally:
        seen.extend([0] * 50)
        sender.join()
        signal.signal(signal.SIGUSR1, previous)
    bell.close()


INTERRUPT = """
import os, signal, sys
sys.stdin.read()
os.kill(int(sys.argv[1]), signal.SIGINT)
"""


def test_keyboard_interrupt_passes():
    bell = Doorbell()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = subprocess.Popen([sys.executable, "-c", INTERRUPT, str(os.getpid())], stdin=subprocess.PIPE)
    assert sender.stdin is not None
    try:
        with pytest.raises(KeyboardInterrupt):
            sender.stdin.close()
            bell.wait(LONG)
    finally:
        sender.wait()
        signal.signal(signal.SIGINT, previous)
    bell.close()


# Descriptors


@pytest.fixture
def channels():
    ends = [DescriptorChannel(end) for end in pair()]
    yield ends
    for end in ends:
        end.close()


def memfd(text):
    fd = os.memfd_create("numbered")
    os.write(fd, text.encode())
    return fd


def read(fd):
    text = os.pread(fd, 100, 0).decode()
    os.close(fd)
    return text


def test_descriptors_arrive_under_their_ids_in_any_order_and_not_inheritable(channels):
    left, right = channels
    before = open_descriptors()
    sent = {(1 << 63) + index: memfd(f"number {index}") for index in range(PER_MESSAGE + 50)}
    left.send({})
    left.send(sent)
    for fd in sent.values():
        os.close(fd)
    for index in (PER_MESSAGE + 49, 0, PER_MESSAGE):
        fd = right.take((1 << 63) + index, timeout=LONG)
        assert not os.get_inheritable(fd)
        assert read(fd) == f"number {index}"
    assert open_descriptors() == before + len(sent) - 3
    right.close()
    right.close()
    assert open_descriptors() == before - 1


def test_waiting_ends_by_arrival_or_by_time(channels):
    left, right = channels
    assert right.receive(wait=False) == ()
    with pytest.raises(DescriptorError, match="did not arrive") as late:
        right.take(5, timeout=0.01)
    assert late.value.descriptor == 5
    fd = memfd("late")
    sender = threading.Thread(target=left.send, args=({5: fd},))
    sender.start()
    assert read(right.take(5, timeout=LONG)) == "late"
    sender.join()
    os.close(fd)


def test_the_end_of_the_channel_is_typed(channels):
    left, right = channels
    fd = memfd("kept")
    left.send({1: fd})
    left.close()
    assert read(right.take(1)) == "kept"
    with pytest.raises(ChannelClosedError):
        right.take(2)
    with pytest.raises(ChannelClosedError):
        right.receive(wait=False)
    with pytest.raises(ChannelClosedError):
        right.send({3: fd})
    os.close(fd)


@pytest.mark.parametrize("ids", [(), (7,), (7, 8, 9), (7, 7), (4, 7)])
def test_malformed_messages_are_refused_and_their_descriptors_closed(ids):
    """Two descriptors each time; id 4 has arrived before."""
    raw, sock = pair()
    right = DescriptorChannel(sock)
    fds = [memfd("a"), memfd("b")]

    def send(identifiers, count):
        body = b"".join(number.to_bytes(8, "little") for number in identifiers) or b"\0"
        raw.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[:count]))])

    send((4,), 1)
    assert right.receive() == (4,)
    before = open_descriptors()
    send(ids, 2)
    with pytest.raises(DescriptorError):
        right.receive()
    assert open_descriptors() == before
    send((10, 11), 2)
    assert right.receive() == (10, 11)
    right.close()
    raw.close()
    for fd in fds:
        os.close(fd)


def test_too_long_a_message_is_refused(channels):
    raw, sock = pair()
    right = DescriptorChannel(sock)
    raw.send(bytes(8 * PER_MESSAGE + 8))
    with pytest.raises(DescriptorError, match="cut short"):
        right.receive()
    raw.close()
    right.close()


ECHO = """
import os, resource, socket, sys
from outrider.shm.descriptors import DescriptorChannel
from outrider.shm.errors import ChannelClosedError, DescriptorError
channel = DescriptorChannel(socket.socket(fileno=int(sys.argv[1])))
fd = channel.take(1, timeout=60)
os.write(fd, b", written elsewhere")
reply = os.memfd_create("reply")
os.write(reply, b"reply")
channel.send({2: reply})
os.close(reply)
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 5, before + 5))
try:
    channel.take(100, timeout=60)
except DescriptorError as error:
    print("ulimit" in str(error), len(os.listdir("/proc/self/fd")) == before)
try:
    channel.take(3)
except ChannelClosedError:
    print("closed")
"""


def test_between_two_processes_also_past_the_limit_on_open_files():
    mine, theirs = pair()
    fd = memfd("text")
    child = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    channel = DescriptorChannel(mine)
    channel.send({1: fd})
    assert read(channel.take(2, timeout=LONG)) == "reply"
    assert read(fd) == "text, written elsewhere"
    many = {100 + index: memfd("") for index in range(20)}
    channel.send(many)
    channel.close()
    for each in many.values():
        os.close(each)
    assert child.communicate(timeout=LONG)[0].split() == ["True", "True", "closed"]
    assert child.returncode == 0


# Processes


def ended(pidfd):
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(LONG * 1000))


# A worker that says its pid and then sleeps in native code without giving up the interpreter lock.
SLEEPER = """
import ctypes, os, sys
from outrider.shm.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
ctypes.PyDLL(None).sleep(600)
"""
PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", '''{SLEEPER}''', str(os.getpid())], start_new_session=True).wait()
"""


def test_a_worker_dies_with_its_parent_though_native_code_holds_the_lock():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = os.pidfd_open(int(parent.stdout.readline()))
    assert not os.get_inheritable(worker)
    parent.kill()
    parent.wait()
    try:
        assert ended(worker)
    finally:
        os.close(worker)
        parent.stdout.close()


def test_a_parent_that_is_gone_already_is_reported():
    done = subprocess.run(
        [sys.executable, "-c", SLEEPER, "1"], start_new_session=True, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 1 and "ProcessLookupError: the parent process 1 is gone" in done.stderr
