"""The prefill role: one SGLang KVSender a room, polled as SGLang's scheduler does."""
import os
import signal
import time

from sglang_peer.content import Content
from sglang_peer.control import Control, Queue
from sglang_peer.events import emit
from sglang_peer.meter import Meter
from sglang_peer.peer import POLL_NAMES, Peer
from sglang_peer.sweep import Sweep

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


class Room:
    def __init__(self, i, room, sender):
        self.i, self.room, self.sender = i, room, sender
        self.phase = "boot"  # -> send -> wait, or stopped (--abort-at)
        self.seen = None
        self.pages, self.sent, self.chunks = (), 0, 0
        self.opened, self.announced, self.last_chunk = time.perf_counter(), None, 0.0
        self.completed = False  # mark_prefill_complete was called


class Prefill:
    def __init__(self, a):
        self.a = a
        self.peer = Peer(a, "prefill")
        if not a.no_bootstrap:
            self.peer.start_bootstrap_server()
        self.buffers = self.peer.allocate()
        self.control = Control(a.gate, a.serve)
        content, began = Content(self.buffers), time.perf_counter()
        for i, room in enumerate(a.rooms):
            content.fill(i, room)
        fill_s = time.perf_counter() - began
        self.mgr = self.peer.start_manager()
        emit("ready", **self.peer.identity(), bootstrap=self.peer.bootstrap_addr, fill_s=round(fill_s, 3),
             regions=len(self.buffers.kv), item_len=a.item_len)
        self.queue = Queue(a, "prefill", self.peer.rank, self.control, wait_for_warmup=False)
        self.sweep = Sweep(self.mgr, a.pp_size > 1 or a.staging, a.poll_us)
        self.meter = Meter()
        self.sender_class = self.peer.cls[self.peer.kinds.SENDER]
        self.rooms, self.results = {}, {}

    def run(self):
        """Exit code: 0 if every room succeeded, else 3."""
        deadline = time.monotonic() + self.a.timeout
        while self.queue and time.monotonic() < deadline and not self.control.stop.is_set():
            moved = self.open_rooms()
            for r in self.sweep.due(self.rooms):
                moved |= self.step(r)
            if not moved:
                self.sweep.pause()
        self.meter.close()
        self.give_up()
        done = list(self.results.values())
        emit("summary", role="prefill", rank=self.peer.rank, rooms=len(done), success=done.count("Success"),
             failed=len(done) - done.count("Success"), **self.meter.fields())
        self.control.stop.wait(None if self.a.serve else self.a.linger)
        return 0 if done.count("Success") == len(done) else 3

    def open_rooms(self):
        opened = False
        while (taken := self.queue.take()) is not None:
            i, room = taken
            sender = self.sender_class(mgr=self.mgr, bootstrap_addr=self.peer.bootstrap_addr, bootstrap_room=room)
            self.rooms[room] = Room(i, room, sender)
            opened = True
        return opened

    def step(self, r):
        """Poll one room and do what its status asks for; whether anything moved."""
        status = r.sender.poll()
        if status in (FAILED, SUCCESS):
            self.end(r, status)
            return True
        moved = False
        if r.phase == "boot":
            if status == WAITING:
                moved = True
                self.announced(r)
            elif self.a.allocation_policy == "prefill_complete" and not r.completed:
                r.completed = True
                r.sender.mark_prefill_complete()
        if r.phase == "send":
            moved |= self.send(r)
        self.sweep.polled(r, status, restless=r.phase == "send" or r.sender.conclude_state is not None)
        return moved

    def announced(self, r):
        """Decode's metadata is here: the pages it lacks can be sent."""
        r.announced = time.perf_counter() if r.room in self.queue.warm else self.meter.start()
        prefix = r.sender.pop_decode_prefix_len() // self.a.page_size
        r.pages = self.buffers.pages_of(r.i)[prefix:]
        if self.targeted(r, "before-send"):
            r.phase = "stopped"
            r.sender.abort()
            return
        r.sender.init(len(r.pages), self.buffers.aux_slot(r.i))
        r.phase = "send"
        if self.a.allocation_policy == "prefill_complete":
            r.sender.mark_prefill_complete()
        if self.a.staging:
            self.mgr._prefetch_staging_reqs(r.room)  # the scheduler does it when it forms a batch

    def send(self, r):
        """Send the chunks that are due, all of them unless --chunk-delay-ms or --abort-at says otherwise."""
        a, n, moved = self.a, len(r.pages), False
        step = a.chunk_pages or max(1, n)
        while r.phase == "send":
            if a.chunk_delay_ms and r.chunks and time.perf_counter() - r.last_chunk < a.chunk_delay_ms / 1e3:
                break
            if self.stop_here(r):
                return True
            low, high = r.sent, min(n, r.sent + step)
            last = high == n
            r.sent, r.chunks, r.last_chunk = high, r.chunks + 1, time.perf_counter()
            state = self.buffers.state_indices(r.i) if last else None
            r.sender.send(r.pages[low:high], state, (high - low) * a.page_size)
            moved = True
            if last:
                r.phase = "wait"
        return moved

    def stop_here(self, r):
        """--abort-at after-chunk, hang and kill."""
        if r.chunks != self.a.abort_at.arg:
            return False
        if self.targeted(r, "kill"):
            emit("kill", role="prefill", rank=self.peer.rank, room=r.room, chunks_sent=r.chunks)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.targeted(r, "after-chunk"):
            r.sender.abort()
        elif not self.targeted(r, "hang"):
            return False
        r.phase = "stopped"
        return True

    def targeted(self, r, mode):
        return self.a.abort_at.mode == mode and (self.a.abort_rooms is None or r.room in self.a.abort_rooms)

    def end(self, r, status):
        now = time.perf_counter()
        fields = dict(role="prefill", rank=self.peer.rank, room=r.room, status=POLL_NAMES[status], reason=None,
                      phase=r.phase, chunks_sent=r.chunks)
        measured = r.room not in self.queue.warm
        if status == SUCCESS:
            metric = r.sender.get_transfer_metric()
            if measured:
                self.meter.end(r.announced, metric.transfer_total_bytes)
            fields.update(transfer_latency_s=metric.transfer_latency_s, transfer_bytes=metric.transfer_total_bytes,
                          latency_ms=round((now - r.announced) * 1e3, 3) if r.announced else None)
        else:
            if measured:
                self.meter.end()
            try:
                r.sender.failure_exception()
            except Exception as e:  # SGLang raises the reason
                fields["reason"] = str(e)
            fields["ms"] = round((now - r.opened) * 1e3, 3)
        r.sender.clear()
        del self.rooms[r.room]
        self.results[r.room] = POLL_NAMES[status]
        if status == FAILED or not self.a.quiet:
            emit("room", **fields)
        self.queue.end(r.room)

    def give_up(self):
        """Rooms that did not end by --timeout or SIGTERM."""
        for r in self.rooms.values():
            self.results[r.room] = "Timeout"
            emit("room", role="prefill", rank=self.peer.rank, room=r.room, status="Timeout", phase=r.phase,
                 chunks_sent=r.chunks, poll=POLL_NAMES[r.sender.poll()])
        for _, room in self.queue.rooms:
            if room not in self.results:
                self.results[room] = "Timeout"
                emit("room", role="prefill", rank=self.peer.rank, room=room, status="Timeout", phase="pending")
