"""What reaches a running role from outside: standard input and SIGTERM; and which rooms may start."""
import os
import signal
import threading
from collections import deque

from sglang_peer.events import emit


class Control:
    """`stop` is set by SIGTERM, and with --serve by the end of input.  A line, or the end, opens the gate."""

    def __init__(self, gate, serve):
        self.stop = threading.Event()
        self._gate_open = threading.Event()
        self._serve = serve
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        if gate or serve:
            threading.Thread(target=self._read, daemon=True).start()

    @property
    def gate_open(self):
        return self._gate_open.is_set()

    def _read(self):
        while data := os.read(0, 4096):
            if b"\n" in data:
                self._gate_open.set()
        self._gate_open.set()
        if self._serve:
            self.stop.set()


class Queue:
    """The rooms of this rank in order: --warmup, --gate and --concurrency decide when the next one may start."""

    def __init__(self, a, role, rank, control, wait_for_warmup):
        self.role, self.rank, self.control = role, rank, control
        # (index in --rooms, room) that this DP rank serves
        mine = [(i, r) for i, r in enumerate(a.rooms) if a.dp_size == 1 or r % a.dp_size == a.dp_rank]
        self.rooms, self._pending = mine, deque(mine)
        self.warm = {room for _, room in mine[: a.warmup]}
        self._warm_left = len(self.warm) if wait_for_warmup else 0
        self._limit = a.concurrency or len(mine)
        self._gate = a.gate if 0 < a.gate < len(a.rooms) else None
        self._gate_room = a.rooms[a.gate - 1] if self._gate else None
        self._before_gate = {room for i, room in mine if self._gate and i < self._gate}
        self._in_flight = 0
        self._tell_gate()

    def __bool__(self):
        """Whether a room is pending or in flight."""
        return bool(self._pending or self._in_flight)

    def take(self):
        """The next (index, room) if it may start now, else None."""
        if not self._pending or self._in_flight >= self._limit:
            return None
        i, room = self._pending[0]
        if self._gate is not None and i >= self._gate and not self.control.gate_open:
            return None
        if self._warm_left and room not in self.warm:
            return None
        self._in_flight += 1
        return self._pending.popleft()

    def end(self, room):
        """A room that was taken has ended."""
        self._in_flight -= 1
        if room in self.warm and self._warm_left:
            self._warm_left -= 1
        if room in self._before_gate:
            self._before_gate.discard(room)
            self._tell_gate()

    def rest(self):
        """Rooms that never started."""
        return list(self._pending)

    def _tell_gate(self):
        if self._gate is not None and not self._before_gate:
            emit("gate", role=self.role, rank=self.rank, room=self._gate_room)
