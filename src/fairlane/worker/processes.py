"""Child processes that run jobs for a worker, as it sees them: how they start, how they end, and what they exchange.

The worker keeps the claims: it renews leases, learns of cancellations and settles. A child process runs handlers, with
the app, its middleware and its database (see `Runner`): several jobs at a time or, for a job that may have killed its
process, one job alone. They exchange messages over a socket, several jobs per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from enum import IntEnum
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from fairlane.job import Claim
from fairlane.scheduler.settlement import Settlement
from fairlane.store.stats_values import BlockedLoop
from fairlane.task import Task
from fairlane.waits import first_of
from fairlane.worker.runs import Stop

if TYPE_CHECKING:
    from fairlane.worker.execution import Run

STOPS = (signal.SIGTERM, signal.SIGINT)
EXIT_ORPHANED = 4
ORPHANED_LOOK = 0.1
"""Seconds between two checks whether a process that should end by itself has begun something."""
PR_SET_PDEATHSIG = 1


def die_with(descriptor: int, is_busy: Callable[[], bool] = lambda: True) -> None:
    """End this process at once when the holder of the other end of this pipe or socket is gone: nobody else would stop
    it, and its jobs will soon run elsewhere. A process that is not busy ends by itself."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)

    def watch() -> None:
        hung_up.poll()
        while not is_busy():
            time.sleep(ORPHANED_LOOK)  # something may still be on its way to it
        os._exit(EXIT_ORPHANED)

    # A thread: the event loop may be blocked by a handler.
    threading.Thread(target=watch, name="fairlane-lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Let the system kill this process when its parent dies, even if no thread of ours can run: C code of a handler may
    hold the interpreter. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_worker() -> None:
    """A Ctrl-C at the terminal reaches child processes too, and so does the SIGTERM that a supervisor sends to all
    processes of a service. Whether they go on is the worker's decision."""
    for each in STOPS:
        signal.signal(each, lambda *_: None)  # not ignored: what a task starts would ignore them as well


def command_of_worker(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "fairlane.cli", "worker", *arguments]


def how(code: int | None) -> str:
    """How a process ended, for people."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"


ENDS_WITHIN = 2.0
"""Seconds for an idle child to end by itself."""


class ProcessDied(BaseException):
    """The process that ran a task is gone. Not an `Exception`: the attempt failed, whatever the task's `retry_on`."""


class Child:
    """One process, and our end of the pipe to it."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs,), name="fairlane-task", daemon=True)
        # A signal to the whole group, such as Ctrl-C, must not end it while it is being imported: it is blocked until
        # there is a handler for it. The tracker comes first, as starting it unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Only the child holds its end now: when it dies, we read the end of the pipe.
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(
        self, task: Task[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """Run a call there and wait, in a thread. An error is returned, not raised."""
        try:
            function = task.function
            self._pipe.send_bytes(pickle.dumps((function.__module__, function.__qualname__, tuple(args), kwargs)))
            answer: tuple[Any, BaseException | None] = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(ENDS_WITHIN)
            code = self._process.exitcode
            return None, ProcessDied(f"the process that ran the task died ({how(code)}); the worker goes on")
        except Exception as error:
            # Its arguments cannot be sent, or what it sent cannot be read: this child may be in the middle of it.
            self.kill()
            return None, error
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(ENDS_WITHIN)
        self._process.kill()
        self._process.join()


class ProcessPool:
    """As many children as are needed at once, up to the number of CPUs."""

    def __init__(self) -> None:
        # Processors that this process may use: a container may have fewer than the machine.
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._places = asyncio.Semaphore(usable)
        self._idle: list[Child] = []

    @contextlib.asynccontextmanager
    async def child(self) -> AsyncIterator[Child]:
        """A child for one call, once one is free."""
        async with self._places:
            child = self._idle.pop() if self._idle else None
            if child is None or not child.is_alive:
                child = await asyncio.to_thread(Child)
            try:
                yield child
            except BaseException:
                child.kill()
                raise
            if child.is_alive:
                self._idle.append(child)

    def close(self) -> None:
        for child in self._idle:
            child.close()
        self._idle.clear()


# In the child.


def _serve(pipe: Connection) -> None:
    leave_signals_to_the_worker()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    is_busy = False
    die_with(pipe.fileno(), lambda: is_busy)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return  # the worker has closed its end, or is gone
        is_busy = True
        answer = _answer(request)
        is_busy = False
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def _answer(request: bytes) -> bytes:
    try:
        module, name, args, kwargs = pickle.loads(request)
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        function = found.function if isinstance(found, Task) else found
        return pickle.dumps((function(*args, **kwargs), None))
    except BaseException as error:
        # What was raised, with where it was raised: a traceback does not travel.
        error.add_note(f"in the process of the task:\n{''.join(traceback.format_tb(error.__traceback__)[1:]).rstrip()}")
        try:
            pickled = pickle.dumps((None, error))
            pickle.loads(pickled)  # an error whose constructor takes other arguments can be written, and not be read
        except Exception:
            lines = "".join(traceback.format_exception_only(error)).strip()
            return pickle.dumps((None, RuntimeError(f"the task raised what cannot be sent: {lines}")))
        return pickled


LENGTH = 4
AT_ONCE = 1 << 18
"""Bytes to read at once."""


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """A job to run if it can begin by then (by the monotonic clock, which all processes of a machine share)."""

    claim: Claim
    begin_by: int
    is_paced: bool = False
    """Report its start at once: another job waits for it."""
    trace: dict[str, str] | None = None
    """Where it was enqueued."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    jobs: list[Handed]
    offset: int
    """How far queue time is ahead of the monotonic clock."""
    ahead: int
    """And of the store's clock."""


class Interrupt(msgspec.Struct, frozen=True, array_like=True, tag="interrupt"):
    """Stop this job."""

    job: UUID
    reason: Stop


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """There is nothing more to run."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The process has started, and waits for jobs."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The handler of a paced job is called."""

    job: UUID
    at: int
    """By the monotonic clock."""


class End(msgspec.Struct, frozen=True, array_like=True):
    """What became of one job. Without a settlement, its claim was lost, or it did not begin."""

    job: UUID
    settlement: Settlement | None = None
    may_be_settled: bool = False
    is_unbegun: bool = False
    """It could not begin in time, and will not."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """These have ended."""

    jobs: list[End]


class Blocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A handler blocks the event loop there, or has done so."""

    block: BlockedLoop


Order = Begin | Interrupt | Leave
News = Ready | Began | Ended | Blocked

_encode = msgspec.msgpack.Encoder().encode
_decode_news: Callable[[bytes], News] = msgspec.msgpack.Decoder(News).decode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode


class Line:
    """One end of a socket that carries messages. When `send` returns, the system has the message if there was room, so
    it arrives even if the sender dies in the next moment."""

    def __init__(self, connection: socket.socket, hear: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._hear = hear
        self._on_end = on_end
        self._received = b""
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def is_sent(self) -> bool:
        """Whether nothing waits for room."""
        return not self._unsent

    def send(self, message: Order | News) -> None:
        """From any thread: a blocked event loop sends nothing."""
        body = _encode(message)
        data = len(body).to_bytes(LENGTH, "big") + body
        with self._sending:
            if not self._unsent:
                sent = self._try(data)
                if sent == len(data):
                    return
                data = data[sent:]
                self._loop.call_soon_threadsafe(self._await_room)
            self._unsent += data

    def _await_room(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # nobody is there any more, which is found out elsewhere

    def _write(self) -> None:
        with self._sending:
            del self._unsent[: self._try(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> bool:
        """Take what has arrived. Returns whether there was anything."""
        try:
            data = self._socket.recv(AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self._on_end()
            return False
        self._take(self._received + data if self._received else data)
        return True

    def _take(self, data: bytes) -> None:
        at = 0
        while len(data) - at >= LENGTH:
            end = at + LENGTH + int.from_bytes(data[at : at + LENGTH], "big")
            if end > len(data):
                break
            self._hear(data[at + LENGTH : end])
            at = end
        self._received = data[at:]

    def drain(self) -> None:
        while self._socket.fileno() >= 0 and self._read():
            pass

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()


class Mate:
    """The worker's end: one process, and what was handed to it."""

    def __init__(
        self,
        command: Sequence[str],
        slots: int,
        hear: Callable[[Mate, Began | Ended | Blocked], None],
        *,
        is_spare: bool = False,
    ) -> None:
        self.slots = slots
        self.is_spare = is_spare
        """It only runs jobs that must run alone."""
        self.runs: dict[UUID, Run] = {}
        """What it was handed and has not ended, by job."""
        self.revoked: dict[UUID, int] = {}
        """Jobs that were taken back and when they were handed over, until it confirms that. It gets no jobs
        meanwhile."""
        self.unseen: deque[tuple[int, Run]] = deque()
        """What it was handed and may not have begun, with the time by which it must begin."""
        self.is_alone = False
        """It runs a job that must run alone."""
        self.block: BlockedLoop | None = None
        """What blocks its event loop, or last blocked it."""
        self._command = list(command)
        self._hear_news = hear
        self._box: BlackBox | None = None
        self._line: Line | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether a job could begin there at once."""
        return self._ready.is_set() and self._process is not None and self._process.returncode is None

    @property
    def is_blocked(self) -> bool:
        """Whether a known handler blocks its event loop."""
        return self.block is not None and self.block.until is None

    @property
    def free(self) -> int:
        """How many more jobs it may be handed."""
        return self.capacity - len(self.runs)

    @property
    def capacity(self) -> int:
        """How many jobs it can hold now."""
        return len(self.runs) if self.revoked or self.is_alone or self.is_spare else self.slots

    async def start(self) -> None:
        """Start the process and wait until it is ready for jobs. Raises `OSError` if it cannot be started."""
        ours, theirs = socket.socketpair()
        box = self._box = BlackBox.empty(self.slots)
        self._line = Line(ours, self._hear, self.kill)
        given = {"--concurrency": self.slots, "--mate": theirs.fileno(), "--black-box": box.descriptor}
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self._command,
                *(str(part) for option in given.items() for part in option),
                pass_fds=[theirs.fileno(), box.descriptor],
                # A group of its own: a Ctrl-C at the terminal reaches the worker alone.
                start_new_session=True,
            )
        )
        spawning.add_done_callback(lambda _: theirs.close())
        try:
            self._process = await asyncio.shield(spawning)
            await first_of(self._ready.wait(), self._process.wait())
        except OSError:
            self.close()
            raise
        except asyncio.CancelledError:
            self._process = await spawning
            self.kill()
            await self.gone()
            self.close()
            raise
        if not self._ready.is_set():
            ending = await self.gone()
            self.close()
            raise ChildProcessError(f"it died while it started ({ending})")

    def _hear(self, body: bytes) -> None:
        news = _decode_news(body)
        if isinstance(news, Blocked):
            self.block = msgspec.structs.replace(news.block, pid=self.pid)
        if isinstance(news, Ready):
            self._ready.set()
        else:
            self._hear_news(self, news)

    def send(self, order: Order) -> None:
        if self._line is not None:
            self._line.send(order)

    def begun(self) -> dict[UUID, Noted]:
        """Which of its jobs have begun. Everything that it has sent so far is read first."""
        if self._line is not None:
            self._line.drain()
        return {} if self._box is None else self._box.read()

    def kill(self) -> None:
        # The process's own `kill` asks first whether it has ended, and takes the answer from asyncio, which then
        # reports code 255.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def gone(self) -> str:
        """Wait until it has ended. Returns how; what it sent before that is read."""
        assert self._process is not None
        code = await self._process.wait()
        if self._line is not None:
            self._line.drain()
            self._line.close()
        return how(code)

    async def leave(self, within: float) -> None:
        """Let it end by itself within so many seconds; then kill it."""
        if self._process is None:
            return
        self.send(Leave())
        try:
            async with asyncio.timeout(within):
                await self.gone()
        except TimeoutError:
            self.kill()
            await self.gone()
        self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._box is not None:
            self._box.close()
            self._box = None


ENTRY = 17
"""A job's id and what it does."""
NOTHING = bytes(ENTRY)


class Noted(IntEnum):
    """What a job does."""

    RUNS = 1
    ENDED = 2
    """It has ended, and the worker does not know it yet."""
    RUNS_IN_A_PROCESS = 3
    """In a process of its own: whatever kills this one, it was not this job."""


class BlackBox:
    """One process's notes, for up to so many jobs at once."""

    def __init__(self, descriptor: int, jobs: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, ENTRY * jobs)
        self._free = [ENTRY * place for place in range(jobs)]
        self._taken: dict[UUID, int] = {}

    @classmethod
    def empty(cls, jobs: int) -> BlackBox:
        """A new one, whose descriptor a child is to inherit."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("fairlane-black-box")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, ENTRY * jobs)
        return cls(descriptor, jobs)

    def read(self) -> dict[UUID, Noted]:
        """What has begun, as whoever looks from outside sees it."""
        written = self._memory[:]
        entries = (written[at : at + ENTRY] for at in range(0, len(written), ENTRY))
        return {UUID(bytes=each[:-1]): Noted(each[-1]) for each in entries if each[-1]}

    def note(self, job: UUID, what: Noted = Noted.RUNS) -> None:
        """This job begins, unless it is too late for that."""
        place = self._taken[job] = self._free.pop()
        self._memory[place : place + ENTRY] = job.bytes + bytes((what,))

    def note_end(self, job: UUID) -> None:
        """It has ended."""
        if (place := self._taken.get(job)) is not None:
            self._memory[place + ENTRY - 1] = Noted.ENDED

    def erase(self, job: UUID) -> None:
        """It has not begun, or the worker knows how it ended."""
        if (place := self._taken.pop(job, None)) is not None:
            self._memory[place : place + ENTRY] = NOTHING
            self._free.append(place)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
