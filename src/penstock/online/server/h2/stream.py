"""One gRPC call on one HTTP/2 stream.

It puts the client's messages together, hands them to the method, and keeps the answers until they can be sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unsupported
from penstock.online.server.grpc.call import Receiver
from penstock.online.server.h2.grpc_messages import PREFIX, MessageReader, content_of
from penstock.online.server.h2.headers import OK_TRAILERS, CallHead, trailers
from penstock.protocol.h2_frames import ErrorCode, StreamFault
from penstock.request import Deadline
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)

_MESSAGE_OVERHEAD = 256
_PROGRESS_BYTES = 1 << 16


class Carrier(Protocol):
    """What a stream needs of its connection."""

    max_message_bytes: int
    max_unsent_bytes: int

    @property
    def ready(self) -> Callable[[H2Stream], None]:
        """To be called with a stream that has something to send."""

    def charge(self, stream: H2Stream, size: int) -> None:
        """``stream`` holds ``size`` bytes more than it received, until it ends. Raises Unavailable."""

    def count(self, stream: H2Stream) -> None:
        """What ``stream`` has received and not handed on has changed."""

    def grant(self, stream: H2Stream) -> None:
        """The client may send more on ``stream``."""

    def reset(self, stream: H2Stream, code: ErrorCode) -> None:
        """End ``stream`` with nothing more to say."""


class H2Stream(msgspec.Struct, eq=False):
    """A ``GrpcCall``. Only the outbox, which writes frames, reads and sets the fields for sending."""

    carrier: Carrier
    id: int
    head: CallHead
    window: int
    """Bytes that the client lets us send; negative after it took some back."""
    allowance: int
    """Bytes that we let the client send."""
    is_untouched: bool
    """Whether the method takes one message, of which nothing has come yet."""
    deadline: Deadline | None = None
    on_cancel: Callable[[], object] | None = None
    timer: asyncio.TimerHandle | None = None

    half_closed: bool = False
    """Whether the client has sent all that it will."""
    received: int = 0
    charged: int = 0
    """Bytes of the server's budget that it holds; its carrier takes them and gives them back."""
    delivered: int = 0
    reader: MessageReader | None = None
    receiver: Receiver | None = None
    message: tuple[int, Buffer] | None = None
    paused: bool = False
    delivering: bool = False

    started: bool = False
    """Whether the headers of the answer have been sent."""
    finished: bool = False
    """Whether the call has its status; what is unsent is still sent."""
    gone: bool = False
    """Whether no frame is sent any more."""
    unsent: list[list[Buffer]] = []
    """Messages, each in parts. Of the first one some may have been sent already: then ``is_cut``."""
    unsent_bytes: int = 0
    is_cut: bool = False
    trailers: bytes = OK_TRAILERS
    is_ready: bool = False
    """Whether the connection knows that there is something to send."""
    sent_bytes: int = 0
    seen: tuple[int, int, bool] | None = None
    since: float = 0.0

    # The service's side

    @property
    def metadata(self) -> Mapping[str, str | bytes]:
        """See ``GrpcCall``; as everything below up to ``resume``."""
        return self.head.metadata

    def send(self, *parts: Buffer) -> None:
        if self.finished or self.gone:
            return
        message: list[Buffer]
        if len(parts) == 1 and type(parts[0]) is bytes and parts[0]:
            size = len(parts[0])
            message = [PREFIX.pack(0, size), parts[0]]
        else:
            # Counted in bytes, whatever is viewed; an empty part would be sent over and over.
            views = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts if len(part)]
            size = sum(map(len, views))
            message = [PREFIX.pack(0, size), *views]
        if self.unsent:
            kept = self.unsent_bytes + len(self.unsent) * _MESSAGE_OVERHEAD
            if kept + size > self.carrier.max_unsent_bytes:
                self.abandon(ResourceExhausted(f"over {self.carrier.max_unsent_bytes} bytes of answers are unread"))
                return
        self.unsent.append(message)
        self.unsent_bytes += size + PREFIX.size
        if not self.is_ready:
            self.carrier.ready(self)

    def finish(self, error: PenstockError | None = None) -> None:
        if self.finished or self.gone:
            return
        if error is not None:
            self.trailers = trailers(error)
        self.finished = True
        self.is_untouched = False
        self.on_cancel = None
        if self.reader is not None or self.receiver is not None or self.timer is not None:
            self._let_go()
        if not self.is_ready:
            self.carrier.ready(self)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            if self.receiver is not None and not self.delivering:
                self._deliver()
                self.carrier.grant(self)

    # The client's side

    def begin(self, timeout_s: float | None) -> None:
        """The headers are there. A method for streams is called now; one for a single message when it is complete."""
        if timeout_s is not None:
            self.timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        method = self.head.method
        assert method is not None
        if method.stream is not None:
            try:
                receiver = method.stream(self)
                self.receiver = None if self.finished else receiver
            except Exception:  # noqa: BLE001 - a bug of ours must not take the other calls with it
                self._fail()

    def receive(self, data: Buffer) -> None:
        """What comes next of the request."""
        self.is_untouched = False
        self.received += len(data)
        if self.finished:
            return
        if self.reader is None:
            self.reader = MessageReader(self.carrier.max_message_bytes)
        self.reader.feed(data)
        if not self.paused:
            self._deliver()

    def written(self, count: int) -> None:
        """``count`` bytes of what comes next are where the reader wanted them."""
        self.received += count
        if self.reader is not None:
            self.reader.written(count)
            if not self.paused:
                self._deliver()

    def half_close(self) -> None:
        """The request is complete. Raises StreamFault if it is not as long as its headers said."""
        self.half_closed = True
        length = self.head.content_length
        if length is not None and length != self.received:
            raise StreamFault(self.id, ErrorCode.PROTOCOL_ERROR)
        if not self.paused:
            self._deliver()

    def call(self, flag: int, message: Buffer) -> None:
        """Call the method with the only message."""
        method = self.head.method
        assert method is not None
        assert method.unary is not None
        try:
            if flag:
                message = content_of(flag, message, self.head.encoding, self.carrier.max_message_bytes)
                self.carrier.charge(self, len(message))
            method.unary(self, message)
        except PenstockError as error:
            self.abandon(error)
        except Exception:  # noqa: BLE001 - a bug of ours must not take the other calls with it
            self._fail()

    def lose(self) -> None:
        """The client, or the whole connection, is gone."""
        self.gone = True
        self.unsent.clear()
        self.unsent_bytes = 0
        self._cancel()
        self._let_go()

    def abandon(self, error: PenstockError) -> None:
        """End the call with ``error`` before the service does; what is unsent by then is dropped."""
        if self.gone:
            return
        if self.finished:
            self.carrier.reset(self, ErrorCode.CANCEL)
            return
        rest = self.unsent[0] if self.is_cut else None
        self.unsent.clear()
        self.unsent_bytes = 0
        if rest is not None:
            # The client waits for the rest of this message, and would take trailers in its middle for a fault of ours.
            self.unsent.append(rest)
            self.unsent_bytes = sum(map(len, rest))
        self._cancel()
        self.finish(error)

    def check_time(self, now: float, request_timeout_s: float, idle_timeout_s: float) -> None:
        """End the call if its client takes too long to send its request, or to read its answers."""
        method = self.head.method
        assert method is not None
        unread = not (self.half_closed or self.paused or self.finished)
        asking = unread and (method.unary is not None or not (self.reader is None or self.reader.is_between))
        read = 0 if method.stream is None else self.received // _PROGRESS_BYTES + self.delivered
        seen = (self.sent_bytes // _PROGRESS_BYTES, read, asking)
        if seen != self.seen or not (self.unsent_bytes or asking):
            self.seen, self.since = seen, now
            return
        waited = now - self.since
        if self.unsent_bytes and waited >= idle_timeout_s:
            self.carrier.reset(self, ErrorCode.CANCEL)
        elif asking and waited >= request_timeout_s:
            self.abandon(DeadlineExceeded(f"the request took longer than {request_timeout_s:g} s to arrive"))

    # Sending

    def take(self, size: int) -> list[Buffer]:
        """The next ``size`` bytes of messages, at most all, in parts."""
        self.unsent_bytes -= size
        self.sent_bytes += size
        taken: list[Buffer] = []
        while size:
            message = self.unsent[0]
            part = message[0]
            if len(part) <= size:
                taken.append(part)
                size -= len(part)
                del message[0]
                self.is_cut = bool(message)
                if not message:
                    del self.unsent[0]
            else:
                view = memoryview(part)
                taken.append(view[:size])
                message[0] = view[size:]
                self.is_cut = True
                break
        return taken

    def _deliver(self) -> None:
        """Hand on what is complete."""
        if self.delivering or self.finished or self.gone:
            return
        self.delivering = True
        try:
            if self.receiver is not None:
                self._deliver_each(self.receiver)
            elif self.head.method is not None and self.head.method.stream is None:
                self._deliver_only()
        except PenstockError as error:
            self.abandon(error)
        except Exception:  # noqa: BLE001 - a bug of ours must not take the other calls with it
            self._fail()
        finally:
            self.delivering = False

    def _deliver_only(self) -> None:
        while self.reader is not None and (message := self.reader.next()) is not None:
            if self.message is not None:
                raise Unsupported("this method takes one message, and was sent more")
            self.message = message
        if not self.half_closed:
            return
        if self.message is None or (self.reader is not None and not self.reader.is_between):
            raise Unsupported("this method takes one message, and was sent none that is complete")
        message, self.message, self.reader = self.message, None, None
        self.call(*message)

    def _deliver_each(self, receiver: Receiver) -> None:
        reader = self.reader
        while not (self.paused or self.finished or self.gone):
            message = None if reader is None else reader.next()
            if message is None:
                if self.half_closed:
                    if reader is not None and not reader.is_between:
                        raise PenstockError("the request ends within a message")
                    self.receiver = None
                    receiver.half_close()
                return
            self.delivered += 1
            # From here on it is the receiver's, which counts it itself.
            self.carrier.count(self)
            if self.finished:
                return
            receiver.message(content_of(*message, self.head.encoding, self.carrier.max_message_bytes))

    def _fail(self) -> None:
        _log.exception("a call failed")
        self.abandon(PenstockError("internal error"))

    def _expire(self) -> None:
        self.abandon(DeadlineExceeded("the deadline of the call passed"))

    def _cancel(self) -> None:
        """Tell the service, once the present turn is over: it may be calling us."""
        if self.on_cancel is not None and not self.finished:
            asyncio.get_running_loop().call_soon(self.on_cancel)
        self.on_cancel = None

    def _let_go(self) -> None:
        """Drop what belongs to a call that runs."""
        self.on_cancel = self.receiver = self.reader = self.message = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
