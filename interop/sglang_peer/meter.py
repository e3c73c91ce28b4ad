"""What a run cost: the measured window, CPU seconds, latencies."""
import os
import resource
import time


def cpu_now():
    """User and system CPU seconds of this process."""
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime


def machine_busy():
    """Busy CPU seconds of the whole machine, so that other processes' load shows."""
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:9]]
    return (sum(v) - v[3] - v[4]) / os.sysconf("SC_CLK_TCK")


class Meter:
    """The window goes from the start of the first measured room to the end of the last one."""

    def __init__(self):
        self._first = self._last = None
        self._latencies, self._bytes = [], 0

    def start(self):
        """A measured room starts."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, cpu_now(), machine_busy()
        return now

    def end(self, started=None, nbytes=0):
        """A measured room ended; `started` if it succeeded."""
        now = time.perf_counter()
        self._last = now, cpu_now()
        if started is not None:
            self._latencies.append(now - started)
            self._bytes += nbytes

    def close(self):
        """Nothing more is measured (verification comes after it)."""
        self._busy_end = machine_busy()

    def fields(self):
        """Fields of the `summary` event."""
        xs = sorted(self._latencies)

        def ms(share):
            return round(xs[min(len(xs) - 1, int(share * len(xs)))] * 1e3, 3) if xs else None

        whole = self._first is not None and self._last is not None
        window = self._last[0] - self._first[0] if whole else 0
        cpu = self._last[1] - self._first[1] if whole else 0
        return dict(measured=len(xs), window_s=round(window, 6), cpu_s=round(cpu, 4), bytes=self._bytes,
                    rooms_per_s=round(len(xs) / window, 3) if window else None,
                    GB_per_s=round(self._bytes / window / 1e9, 4) if window else None,
                    p50_ms=ms(0.5), p99_ms=ms(0.99), max_ms=ms(1.0), min_ms=ms(0.0),
                    machine_busy_s=round(self._busy_end - self._first[2], 2) if self._first else 0)
