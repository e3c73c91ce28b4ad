"""Which rooms to poll in a sweep.

A scheduler of SGLang polls every room in flight in each of its steps.  Doing
that 5,000 times a second from Python would add CPU time that SGLang's own code
does not need, so a sweep looks at the manager's status table first and polls
the rooms whose status moved; every FULL_S all of them, since poll() also looks
at clocks (waiting and bootstrap timeouts, in whole seconds).
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
        """The rooms to poll now.  A room has `room` (its number) and `seen` (see `polled`)."""
        now = time.perf_counter()
        if self._always_all or now >= self._next_full:
            self._next_full = now + FULL_S
            return list(rooms)
        get = self._status.get
        return [r for r in rooms if r.seen is None or get(r.room) != r.seen]

    def polled(self, r, status, restless):
        """Remember what a poll said; `restless`: poll again in the next sweep whatever the status."""
        r.seen = None if restless or status in FINAL else status

    def pause(self):
        time.sleep(self._poll_s)
