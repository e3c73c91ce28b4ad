"""Which rooms to poll in a sweep.

A scheduler of SGLang polls every room in flight in each of its steps.  Doing
that thousands of times a second from Python would add CPU time that SGLang's own
code does not need, so a sweep looks at the manager's status table first and polls
the rooms whose status moved; every FULL_S all of them, since poll() also looks
at clocks (waiting and bootstrap timeouts, in whole seconds).

Measured with cProfile (2 cores, NIXL on one host, 3,000 rooms of one page of 32
layers, 64 in flight, about 1,200 rooms/s): the main thread takes 10 % of the
prefill process's CPU and 20 % of decode's, and the files of this package 40 % and
25 % of that: 4-5 % of either process.  The rest is SGLang, ZMQ and NIXL.
"""
import time

FULL_S = 0.02
FINAL = (0, 4)  # Failed, Success


class Sweep:
    def __init__(self, mgr, always_all, poll_us):
        """`always_all`: poll() itself moves things (pipeline consensus, staging), so no room is left out."""
        self._status = mgr.request_status
        self._always_all, self._poll_s = always_all, poll_us / 1e6
        self._next_full = 0.0

    def due(self, rooms):
        """Those of `rooms` (number -> room with a `seen`, see `polled`) to poll now."""
        now = time.perf_counter()
        if self._always_all or now >= self._next_full:
            self._next_full = now + FULL_S
            return list(rooms.values())
        return [r for r, status in zip(rooms.values(), map(self._status.get, rooms)) if status != r.seen or r.seen is None]

    def polled(self, r, status, restless):
        """Remember what a poll said; `restless`: poll again in the next sweep whatever the status."""
        r.seen = None if restless or status in FINAL else status

    def pause(self):
        time.sleep(self._poll_s)
