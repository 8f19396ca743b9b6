"""One gRPC call on one HTTP/2 stream. Assembles the client's messages, calls the method, and queues the responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, ResourceExhausted, Unsupported
from penstock.online.server import to_thread
from penstock.online.server.access.gate import Gate
from penstock.online.server.grpc.call import Receiver
from penstock.online.server.h2.call_gate import CallGate
from penstock.online.server.h2.call_queue import CallQueue
from penstock.online.server.h2.grpc_messages import PREFIX, MessageReader, window_bits
from penstock.online.server.h2.headers import OK_TRAILERS, CallHead, trailers
from penstock.online.server.inflating import inflate, inflate_small
from penstock.online.server.network.unread import FLOOR_BYTES, Unread
from penstock.protocol.h2_frames import ErrorCode, StreamFault
from penstock.request import Deadline
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)

_MESSAGE_OVERHEAD = 256


class Carrier(Protocol):
    """The part of a connection's interface that its streams use."""

    max_unsent_bytes: int

    @property
    def ready(self) -> Callable[[H2Stream], None]:
        """Queues a stream that has frames to send."""

    @property
    def calls(self) -> CallQueue:
        """Admits the stream's messages."""

    @property
    def gate(self) -> Gate:
        """Limits the memory of large requests."""

    @property
    def unread(self) -> Unread:
        """Counts the bytes of messages until they are sent. ``released`` subtracts these bytes."""

    def delivered(self, size: int) -> None:
        """Record that a stream has received a message of ``size`` bytes."""

    def released(self, size: int) -> None:
        """Record that a message of ``size`` counted bytes has been sent or dropped."""

    def charge(self, stream: H2Stream, size: int) -> None:
        """Charge ``size`` bytes to the budget until ``stream`` ends. A negative ``size`` returns bytes. Raises Unavailable."""

    def count(self, stream: H2Stream) -> None:
        """Update the budget when the number of received but undelivered bytes of ``stream`` has changed."""

    def grant(self, stream: H2Stream) -> None:
        """Let the client send more on ``stream``."""

    def reset(self, stream: H2Stream, code: ErrorCode) -> None:
        """End ``stream`` with RST_STREAM."""


class H2Stream(msgspec.Struct, eq=False):
    """A ``GrpcCall``. The outbox writes the frames, and also uses the fields from ``credit`` to ``is_ready``."""

    carrier: Carrier
    id: int
    head: CallHead
    allowance: int
    """Bytes that the client may send."""
    is_untouched: bool
    """True if the method is unary and no byte of the request has arrived yet."""
    client: str
    """See ``GrpcCall``."""
    limit: int
    """Maximum bytes of a message."""
    deadline: Deadline | None = None
    on_cancel: Callable[[], object] | None = None
    timer: asyncio.TimerHandle | None = None

    half_closed: bool = False
    """True if the client has sent the whole request."""
    received: int = 0
    charged: int = 0
    """Bytes that this stream has taken from the server's budget. Only the carrier changes this number."""
    delivered: int = 0
    reader: MessageReader | None = None
    receiver: Receiver | None = None
    message: tuple[int, Buffer] | None = None
    paused: bool = False
    delivering: bool = False
    inflating: asyncio.Task[None] | None = None
    """The task that decompresses ``message``. Later messages wait for it."""
    content: Buffer | None = None
    """The decompressed message, to be delivered next."""
    reserved: int = 0
    """Bytes in ``charged`` that ``reserve`` has taken."""
    passage: CallGate | None = None
    """Makes the request wait at the gate if the request is large, or needs more memory than its message."""

    credit: int = 0
    """The stream's send window minus the initial window of the client's settings. Sending decreases the credit."""
    started: bool = False
    """True once the headers of the response have been sent."""
    finished: bool = False
    """True once the call has its status. Queued messages are still sent."""
    gone: bool = False
    """True once no further frames are sent."""
    unsent: list[tuple[int, list[Buffer]]] = []
    """Messages, each with its size and parts. The size counts until all parts are sent, because a part keeps the message in memory."""
    first: int = 0
    """The index of the first message in ``unsent`` that has not been sent."""
    unsent_bytes: int = 0
    kept: int = 0
    """The total size of the messages in ``unsent`` that the carrier counts."""
    is_cut: bool = False
    """True if a part of the first unsent message has been sent."""
    trailers: bytes = OK_TRAILERS
    is_ready: bool = False
    """True while the stream is in the outbox's queue."""
    sent_bytes: int = 0
    seen: tuple[int, int, bool] | None = None
    since: float = 0.0

    # The service's side

    @property
    def metadata(self) -> Mapping[str, str | bytes]:
        """See ``GrpcCall``, which also describes the methods up to ``resume``."""
        return self.head.metadata

    def reserve(self, size: int) -> None:
        self.carrier.charge(self, size)
        self.reserved += size

    async def hold(self, size: int) -> None:
        await self._hold(self.reserved + size)

    async def _hold(self, size: int) -> None:
        """Wait until a total of ``size`` bytes may be reserved, and reserve them."""
        try:
            await self._passage().hold(size)
        finally:
            if has_ended := self.finished or self.gone:
                self.leave()
        if has_ended:  # the gate may have admitted the call just before its end
            raise Cancelled("the call has ended")
        self.reserve(size - self.reserved)

    def _passage(self) -> CallGate:
        if self.passage is None:
            self.passage = CallGate(self.carrier.gate)
        return self.passage

    def park(self) -> None:
        if self.passage is not None:
            self.passage.park(self.reserved)

    def occupy(self, size: int) -> None:
        self.carrier.calls.occupy(size)
        if size < 0 and self.gone:
            self.leave()

    def spend(self, units: int) -> None:
        self.carrier.calls.units -= units

    def send(self, *parts: Buffer) -> None:
        if self.finished or self.gone:
            return
        message: list[Buffer]
        if len(parts) == 1 and type(part := parts[0]) is bytes and part:
            size = len(part)
            message = [PREFIX.pack(0, size), part]
        else:
            # A view's length must be in bytes, and an empty part would never be taken from the queue.
            views = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts if len(part)]
            size = sum(map(len, views))
            message = [PREFIX.pack(0, size), *views]
        carrier = self.carrier
        if self.unsent:
            overhead = (len(self.unsent) - self.first) * _MESSAGE_OVERHEAD
            if self.unsent_bytes + overhead + size > (limit := carrier.max_unsent_bytes):
                self.abandon(ResourceExhausted(f"the client has left more than {limit} bytes of responses unread"))
                return
        kept, unread = size + _MESSAGE_OVERHEAD, carrier.unread
        if (count := unread.count + kept) <= FLOOR_BYTES:
            unread.count = count
        elif not unread.add(kept):
            self.abandon(ResourceExhausted("the server's limit for unread responses is reached", "read the responses"))
            return
        self.unsent.append((kept, message))
        self.kept += kept
        self.unsent_bytes += size + PREFIX.size
        if not self.is_ready:
            carrier.ready(self)

    def finish(self, error: PenstockError | None = None) -> None:
        if self.finished or self.gone:
            return
        if error is not None:
            self.trailers = trailers(error)
        self.finished = True
        self.is_untouched = False
        self.on_cancel = None
        if self.reader is not None or self.receiver is not None or self.timer is not None or self.inflating is not None:
            self._clear()
        if self.passage is not None:
            self.passage.park(self.reserved)
        if not self.is_ready:
            self.carrier.ready(self)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            if self.receiver is not None and not self.delivering:
                self.go_on()

    # The client's side

    def may_receive(self) -> bool:
        """True if the client's window may be enlarged. If not, the stream calls the carrier's ``grant`` later."""
        reader = self.reader
        if reader is None or not reader.missing:
            return True
        if reader.missing <= self.allowance:
            return False  # the window suffices for this message; ``grant`` is called after it
        return self._passage().admits(reader.message_bytes, partial(self.carrier.grant, self))

    def begin(self, timeout_s: float | None) -> None:
        """Start the deadline. Start a streaming method; a unary method is called later, with the complete message."""
        if timeout_s is not None:
            self.timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        method = self.head.method
        assert method is not None
        if method.stream is not None:
            try:
                receiver = method.stream(self)
                self.receiver = None if self.finished else receiver
            except Exception:  # noqa: BLE001 - a bug must not end other calls
                self._fail()

    def go_on(self) -> None:
        """Deliver messages that the carrier did not admit earlier."""
        if not self.paused:
            self._deliver()
            self.carrier.grant(self)

    def receive(self, data: Buffer) -> None:
        """Receive the next bytes of the request."""
        self.is_untouched = False
        self.received += len(data)
        if self.finished:
            return
        if self.reader is None:
            self.reader = MessageReader(self.limit)
        self.reader.feed(data)
        if not self.paused:
            self._deliver()

    def written(self, count: int) -> None:
        """Process ``count`` bytes of the request that were written to the reader's memory."""
        self.received += count
        if self.reader is not None:
            self.reader.written(count)
            if not self.paused:
                self._deliver()

    def half_close(self) -> None:
        """End the request. Raises StreamFault if the length of its body differs from content-length."""
        self.half_closed = True
        length = self.head.content_length
        if length is not None and length != self.received:
            raise StreamFault(self.id, ErrorCode.PROTOCOL_ERROR)
        if not self.paused:
            self._deliver()

    def call(self, flag: int, message: Buffer) -> None:
        """Call the unary method."""
        method = self.head.method
        assert method is not None
        assert method.unary is not None
        try:
            if not flag:
                method.unary(self, message)
            elif (content := self._inflate(flag, message)) is not None:
                self.reserve(len(content))
                self.park()
                method.unary(self, content)
        except PenstockError as error:
            self.abandon(error)
        except Exception:  # noqa: BLE001 - a bug must not end other calls
            self._fail()

    def lose(self) -> None:
        """End the call without a status, because the client has reset the stream or the connection is lost."""
        self.gone = True
        self._drop(0)
        self._cancel()
        self._clear()
        self.leave()

    def abandon(self, error: PenstockError) -> None:
        """End the call with ``error`` on behalf of the service, and drop unsent messages."""
        if self.gone:
            return
        if self.finished:
            self.carrier.reset(self, ErrorCode.CANCEL)
            return
        # Trailers in the middle of a message would violate the protocol.
        self._drop(1 if self.is_cut else 0)
        self._cancel()
        self.finish(error)

    # Sending

    def take(self, size: int) -> list[Buffer]:
        """Remove and return the next ``size`` bytes of messages, in parts. ``size`` is at most ``unsent_bytes``."""
        self.unsent_bytes -= size
        self.sent_bytes += size
        taken: list[Buffer] = []
        while size:
            message = self.unsent[self.first][1]
            part = message[0]
            if len(part) <= size:
                taken.append(part)
                size -= len(part)
                del message[0]
                self.is_cut = bool(message)
                if not message:
                    self._sent_first()
            else:
                view = memoryview(part)
                taken.append(view[:size])
                message[0] = view[size:]
                self.is_cut = True
                break
        return taken

    def _sent_first(self) -> None:
        kept, _ = self.unsent[self.first]
        self.kept -= kept
        self.carrier.released(kept)
        self.first += 1
        if 2 * self.first >= len(self.unsent):  # deleting after each message would take quadratic time
            del self.unsent[: self.first]
            self.first = 0

    def _drop(self, count: int) -> None:
        """Drop all unsent messages except the first ``count``."""
        del self.unsent[: self.first]
        self.first = dropped = 0
        while len(self.unsent) > count:
            dropped += self.unsent.pop()[0]
        self.kept -= dropped
        self.carrier.unread.remove(dropped)
        self.unsent_bytes = sum(len(part) for _, parts in self.unsent for part in parts)

    def _deliver(self) -> None:
        """Deliver complete messages."""
        if self.delivering or self.inflating is not None or self.finished or self.gone:
            return
        self.delivering = True
        try:
            if self.receiver is not None:
                self._deliver_each(self.receiver)
            elif self.head.method is not None and self.head.method.stream is None:
                self._deliver_only()
        except PenstockError as error:
            self.abandon(error)
        except Exception:  # noqa: BLE001 - a bug must not end other calls
            self._fail()
        finally:
            self.delivering = False

    def _deliver_only(self) -> None:
        while self.reader is not None and (message := self.reader.next()) is not None:
            if self.message is not None:
                raise Unsupported("this method takes one message, but the client sent several")
            self.message = message
        if not self.half_closed:
            return
        if self.message is None or (self.reader is not None and not self.reader.is_between):
            raise Unsupported("this method takes one message, but the client sent no complete message")
        if not self.carrier.calls.admits(self):
            return
        message, self.message, self.reader = self.message, None, None
        self.call(*message)

    def _deliver_each(self, receiver: Receiver) -> None:
        while not (self.paused or self.finished or self.gone):
            content, self.content = self.content, None
            if content is None:
                reader = self.reader
                if reader is not None and not reader.is_between and not self.carrier.calls.admits(self):
                    return
                message = None if reader is None else reader.next()
                if message is None:
                    self._deliver_end(receiver)
                    return
                content = self._open(receiver, *message)
                if self.inflating is not None or self.finished:
                    return
            if content is not None:
                receiver.message(content)

    def _deliver_end(self, receiver: Receiver) -> None:
        """Notify ``receiver`` if the client has sent its last message."""
        if self.half_closed:
            if self.reader is not None and not self.reader.is_between:
                raise PenstockError("the request ends within a message")
            self.receiver = None
            receiver.half_close()

    def _open(self, receiver: Receiver, flag: int, message: Buffer) -> Buffer | None:
        """The content of a message; None if it is not admitted, or if it is delivered later, after decompression."""
        self.delivered += 1
        # From here on, the receiver counts the message, unless it needs decompression.
        self.message = (flag, message) if flag else None
        if self.passage is not None and not flag:
            self.passage.leave()
        self.carrier.count(self)
        self.carrier.delivered(len(message))
        is_admitted = not self.finished and receiver.admit(None if flag else message)
        content = None if not is_admitted else self._inflate(flag, message) if flag else message
        if self.inflating is None:
            self.message = None
        return content

    def _inflate(self, flag: int, message: Buffer) -> Buffer | None:
        """The content of a compressed message; None if another thread decompresses it and it is delivered later."""
        bits = window_bits(flag, self.head.encoding)
        content = inflate_small(message, bits)
        if content is None or len(content) > self.limit:
            self.occupy(len(message))
            self.inflating = asyncio.get_running_loop().create_task(self._inflate_later(message, bits))
            # In a callback, because the task may be cancelled before it starts.
            self.inflating.add_done_callback(lambda _: self.occupy(-len(message)))
            return None
        return content

    async def _inflate_later(self, message: Buffer, bits: int) -> None:
        try:
            content = await to_thread.in_steps(inflate(message, bits, self.limit), self._hold)
        except PenstockError as error:
            self.abandon(error)
        except Exception:  # noqa: BLE001 - a bug must not end other calls
            self._fail()
        else:
            self.inflating = None
            self.reserve(len(content) - self.reserved)
            self.park()
            if self.receiver is None:
                self.call(0, content)
            else:
                # The passage remains until the next message is decompressed, or the call ends.
                self.message, self.content = None, content
                self.reserve(-self.reserved)
                self.carrier.count(self)
                self._deliver()
                self.carrier.grant(self)

    def leave(self) -> None:
        """Leave the gate, because the response has been sent or dropped."""
        if self.passage is not None:
            self.passage.leave()

    def _fail(self) -> None:
        _log.exception("a call failed")
        self.abandon(PenstockError("internal error"))

    def _expire(self) -> None:
        self.abandon(DeadlineExceeded("the deadline of the call passed"))

    def _cancel(self) -> None:
        """Notify the service in the next event-loop iteration, because the service may be the caller."""
        if self.on_cancel is not None and not self.finished:
            asyncio.get_running_loop().call_soon(self.on_cancel)
        self.on_cancel = None

    def _clear(self) -> None:
        """Release the fields that only a call in progress needs."""
        self.on_cancel = self.receiver = self.reader = self.message = self.content = None
        if self.inflating is not None:
            self.inflating.cancel()
            self.inflating = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
