"""Events: one JSON object a line on the standard output the process was started with.

C libraries write to descriptor 1 as they like, so the program takes that
descriptor for itself and points 1 at standard error.
"""
import fcntl
import json
import os
import sys
import threading
import time

_fd = 1
_lock = threading.Lock()
_ranks_lock = None  # a memfd that the ranks of one role lock while they write


def claim_stdout():
    """Keep the real standard output for events; whatever prints to 1 goes to standard error."""
    global _fd
    if _fd != 1:
        return
    sys.stdout.flush()
    _fd = os.dup(1)
    os.dup2(2, 1)


def redirect(fd):
    """Send this process's events to `fd` from now on (in a child, after fork)."""
    global _fd, _ranks_lock
    if _fd == 1:
        _fd = os.dup(fd)
    else:
        os.dup2(fd, _fd, inheritable=False)
    _ranks_lock = None


def share_between_ranks():
    """Several processes are about to write to one pipe: lines must stay whole at any length."""
    global _ranks_lock
    _ranks_lock = os.memfd_create("events")


def emit(event, **fields):
    """Print one event."""
    write_line({"event": event, "t": round(time.time(), 6), **fields})


def write_line(fields):
    """Print one JSON object as one line."""
    write_raw((json.dumps(fields, default=_plain) + "\n").encode())


def write_raw(data):
    """Print a whole line, in one piece."""
    with _lock:
        if _ranks_lock is not None:
            fcntl.lockf(_ranks_lock, fcntl.LOCK_EX)
        try:
            while data:
                data = data[os.write(_fd, data):]
        finally:
            if _ranks_lock is not None:
                fcntl.lockf(_ranks_lock, fcntl.LOCK_UN)


def _plain(value):
    """What json does not know: numpy scalars become numbers, anything else its text."""
    return value.item() if hasattr(value, "item") else str(value)
