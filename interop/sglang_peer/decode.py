"""The decode role: one SGLang KVReceiver a room, polled as SGLang's scheduler does."""
import os
import signal
import time

from sglang_peer.connect import Connector
from sglang_peer.content import Content
from sglang_peer.control import Control, Queue
from sglang_peer.events import emit
from sglang_peer.meter import Meter
from sglang_peer.peer import POLL_NAMES, BootstrapTrouble, Peer
from sglang_peer.release import Releases
from sglang_peer.sweep import Sweep

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


class Room:
    def __init__(self, i, room, receiver):
        self.i, self.room, self.receiver = i, room, receiver
        self.phase = "find"  # the prefill -> init -> meta (metadata is out) -> aborted (--d-abort-at)
        self.seen = None
        self.opened = time.perf_counter()
        self.waiting = self.announced = self.aborted = None
        self.staged = None  # staging: what the handler knows the room by


class Decode:
    def __init__(self, a):
        self.a = a
        self.peer = Peer(a, "decode")
        self.buffers = self.peer.allocate()
        self.control = Control(a.gate, serve=False)
        self.mgr = self.peer.start_manager()
        emit("ready", **self.peer.identity())
        self.connector = Connector(a, self.peer)
        try:
            info = self.connector.wait(self.control.stop)
        except (RuntimeError, AssertionError) as e:  # SGLang's word for a prefill that does not fit
            raise BootstrapTrouble(str(e)) from e
        if info is None:
            raise BootstrapTrouble(f"no prefill at {self.peer.bootstrap_addr}")
        emit("prefill_info", role="decode", rank=self.peer.rank, info=vars(info))
        self.queue = Queue(a, "decode", self.peer.rank, self.control, wait_for_warmup=True)
        self.staging = None
        if a.staging:
            from sglang_peer.staging import Staging

            self.staging = Staging(self.peer, self.queue.rooms)
        self.sweep = Sweep(self.mgr, a.staging, a.poll_us)
        self.releases = Releases(self.mgr)
        self.meter = Meter()
        self.prefix = a.decode_prefix_pages
        self.rooms, self.results = {}, {}
        self.finding = {}  # rooms in phase "find"
        self.succeeded = []  # (index, room, fields of its event), verified after the window
        self.published = []  # indices of rooms whose pages were announced

    def run(self):
        """Exit code: 0 if every room succeeded with the right bytes, else 3."""
        deadline = time.monotonic() + self.a.timeout
        while self.queue and time.monotonic() < deadline and not self.control.stop.is_set():
            moved = self.open_rooms()
            for r in list(self.finding.values()):
                moved |= self.find(r)
            for r in self.sweep.due(self.rooms):
                moved |= self.step(r)
            if self.releases.held:
                moved |= self.release()
            if not moved:
                self.sweep.pause()
        self.meter.close()
        self.release(final=True)
        self.give_up()
        corrupt, stray = self.verify()
        done = list(self.results.values())
        emit("summary", role="decode", rank=self.peer.rank, rooms=len(done), success=done.count("Success"),
             failed=len(done) - done.count("Success"), corrupt=corrupt, stray=stray, verify=self.a.verify, **self.meter.fields())
        self.control.stop.wait(self.a.d_linger)
        return 0 if done.count("Success") == len(done) and not corrupt else 3

    def open_rooms(self):
        opened = False
        while (taken := self.queue.take()) is not None:
            i, room = taken
            receiver = self.connector.receiver_class(self.mgr, self.peer.bootstrap_addr, room)
            r = self.rooms[room] = Room(i, room, receiver)
            if not self.find(r):
                self.finding[room] = r
            opened = True
        return opened

    def find(self, r):
        """receiver.init() once the prefill and its DP rank are known; whether it was called."""
        missing = f"no prefill at {self.peer.bootstrap_addr}"
        rank = None
        try:
            info = self.connector.info()
            if info is not None:
                missing = f"no DP rank registered for room {r.room} at {self.peer.bootstrap_addr}"
                rank = self.connector.dp_rank(info, r.room, self.finding)
        except (RuntimeError, AssertionError) as e:
            missing = str(e)
            r.opened -= self.a.connect_timeout
        if rank is None and time.perf_counter() - r.opened < self.a.connect_timeout:
            return False
        self.finding.pop(r.room, None)
        r.phase = "init"
        if rank is None:
            emit("error", role="decode", rank=self.peer.rank, room=r.room, where="bootstrap", reason=missing)
            r.receiver.abort()
        else:
            r.receiver.init(rank)
        return True

    def step(self, r):
        """Poll one room and do what its status asks for; whether anything moved."""
        status = r.receiver.poll()
        if r.staged is not None:
            status = self.staging.advance(r, status)
        if status in (FAILED, SUCCESS):
            self.end(r, status)
            return True
        now, moved = time.perf_counter(), False
        if r.phase == "init" and status == WAITING:
            r.waiting = r.waiting or now
            if now - r.waiting >= self.a.hold:
                moved = True
                self.announce(r)
        mode, delay = self.a.d_abort_at
        armed = r.phase == "meta" and mode in ("after-metadata", "kill") and self.targeted(r)
        if armed and time.perf_counter() - r.announced >= delay / 1e3:
            if mode == "kill":
                emit("kill", role="decode", rank=self.peer.rank, room=r.room)
                os.kill(os.getpid(), signal.SIGKILL)
            self.abort(r)
            moved = True
        holding = r.phase == "init" and r.waiting is not None
        self.sweep.polled(r, status, restless=holding or armed or r.phase == "aborted")
        return moved

    def announce(self, r):
        """Tell prefill where the room's pages go."""
        if self.a.d_abort_at.mode == "before-metadata" and self.targeted(r):
            self.abort(r)
            return
        if self.staging is not None and r.receiver.require_staging:
            self.staging.register(r, self.prefix)
        b = self.buffers
        self.published.append(r.i)
        r.announced = time.perf_counter() if r.room in self.queue.warm else self.meter.start()
        r.receiver.send_metadata(b.pages_of(r.i)[self.prefix:], b.aux_slot(r.i), b.state_indices(r.i),
                                 decode_prefix_len=self.prefix * self.a.page_size)
        r.phase = "meta"

    def targeted(self, r):
        return self.a.d_abort_rooms is None or r.room in self.a.d_abort_rooms

    def abort(self, r):
        r.phase, r.aborted = "aborted", time.perf_counter()
        r.receiver.abort()

    def end(self, r, status):
        """A room succeeded, or failed: then its pages may have to be held."""
        now = time.perf_counter()
        measured = r.room not in self.queue.warm
        if status == SUCCESS and measured:
            self.meter.end(r.announced, self.buffers.room_bytes(self.prefix))
        elif measured:
            self.meter.end()
        if r.staged is not None:
            self.staging.unregister(r)
        del self.rooms[r.room]
        self.results[r.room] = POLL_NAMES[status]
        fields = dict(role="decode", rank=self.peer.rank, room=r.room, status=POLL_NAMES[status], reason=None, phase=r.phase,
                      latency_ms=round((now - r.announced) * 1e3, 3) if r.announced else None)
        if status == SUCCESS:
            r.receiver.clear()
            self.succeeded.append((r.i, r.room, fields))
            self.queue.end(r.room)
            return
        held = self.releases.notify(r.receiver, published=r.announced is not None)
        try:
            r.receiver.failure_exception()
        except Exception as e:  # SGLang raises the reason
            fields["reason"] = str(e)
        if held:
            self.releases.hold(r, fields, r.aborted or now)
        else:
            r.receiver.clear()
            self.tell_failed(r, dict(fields, abort_ack=None, abort_ack_ms=None, required_acks=0))

    def release(self, final=False):
        due = self.releases.due(final)
        for r, fields in due:
            self.tell_failed(r, fields)
        return bool(due)

    def tell_failed(self, r, fields):
        emit("room", **fields)
        self.queue.end(r.room)

    def give_up(self):
        """Rooms that did not end by --timeout or SIGTERM."""
        for r in self.rooms.values():
            self.results[r.room] = "Timeout"
            emit("room", role="decode", rank=self.peer.rank, room=r.room, status="Timeout", phase=r.phase,
                 poll=POLL_NAMES[r.receiver.poll()])
        for _, room in self.queue.rooms:
            if room not in self.results:
                self.results[room] = "Timeout"
                emit("room", role="decode", rank=self.peer.rank, room=room, status="Timeout", phase="pending")

    def verify(self):
        """Number of corrupt rooms (one more if anything else was written to), and where that was."""
        if self.a.verify == "none":
            for _, _, fields in self.succeeded:
                if not self.a.quiet:
                    emit("room", **fields)
            return 0, []
        content = Content(self.buffers)
        if self.a.self_test_corrupt != "none":
            content.corrupt(self.a.self_test_corrupt, self.queue.rooms[0][0])
        corrupt = 0
        for i, room, fields in self.succeeded:
            bad, where = content.check(i, room, self.prefix)
            corrupt += bool(bad)
            if bad or not self.a.quiet:
                emit("room", **fields, verified=not bad, bad=bad, where=where)
        stray = content.check_untouched(self.published, self.prefix)
        return corrupt + bool(stray), stray
