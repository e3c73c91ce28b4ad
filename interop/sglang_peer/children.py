"""Forked copies of this process that each run one command line of the program.

Used by `serve`, `bench` and --all-ranks: SGLang is imported once, before the
forks.  The parent stays single-threaded (a selector, no threads), so that a
fork never copies a lock that another thread holds.
"""
import ctypes
import os
import selectors
import signal
import sys

from sglang_peer import events

PR_SET_PDEATHSIG = 1


class Child:
    def __init__(self, name, pid, stdin, stdout, own_group):
        self.name, self.pid, self.stdin, self.stdout, self.own_group = name, pid, stdin, stdout, own_group
        self.pidfd = os.pidfd_open(pid)
        self.partial = b""
        self.code = None  # exit code; negative: the signal


class Children:
    """`on_line(child, line)` for each line a child prints, `on_exit(child)` after its last one."""

    def __init__(self, on_line=None, on_exit=None):
        self.on_line, self.on_exit = on_line, on_exit
        self.selector = selectors.DefaultSelector()
        self.alive = {}

    def start(self, name, argv, env=(), log=None, own_group=True, own_stdout=True):
        """Fork a child that does what `python -m sglang_peer ARGV` does.  It dies with this process."""
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else None
        in_r, in_w = os.pipe()
        out_r, out_w = os.pipe() if own_stdout else (None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                self._become(argv, env, parent, in_r, out_w, log_fd, own_group, (in_w, out_r))
            finally:
                os._exit(70)
        if own_group:
            _set_group(pid)
        for fd in (in_r, out_w, log_fd):
            if fd is not None:
                os.close(fd)
        os.set_blocking(in_w, False)
        child = self.alive[name] = Child(name, pid, in_w, out_r, own_group)
        self.selector.register(child.pidfd, selectors.EVENT_READ, (self._ended, child))
        if out_r is not None:
            self.selector.register(out_r, selectors.EVENT_READ, (self._readable, child))
        return child

    def _become(self, argv, env, parent, in_r, out_w, log_fd, own_group, not_mine):
        """In the child: only its own pipes stay open, and nothing of the parent's state stays in use."""
        if own_group:
            _set_group(0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.selector.close()
        for child in self.alive.values():
            for fd in (child.stdin, child.stdout, child.pidfd):
                if fd is not None:
                    os.close(fd)
        os.dup2(in_r, 0)
        if out_w is not None:
            events.redirect(out_w)
        if log_fd is not None:
            os.dup2(log_fd, 2)
        os.dup2(2, 1)
        for fd in (in_r, out_w, log_fd, *not_mine):
            if fd is not None:
                os.close(fd)
        os.environ.update(env)
        from sglang_peer import cli

        cli.main(argv)

    def write(self, child, data):
        """Put bytes on a child's standard input; whether it takes them."""
        try:
            return child.stdin is not None and os.write(child.stdin, data) == len(data)
        except (BrokenPipeError, BlockingIOError):
            return False

    def close_stdin(self, child):
        if child.stdin is not None:
            os.close(child.stdin)
            child.stdin = None

    def kill(self, child, number):
        """Signal the whole group of a child (start: own_group)."""
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            pass

    def turn(self, timeout=None):
        """Wait for something to happen and handle it."""
        for key, _ in self.selector.select(timeout):
            action, child = key.data
            action(child)

    def watch(self, fd, action):
        """Call `action(None)` when `fd` is readable."""
        self.selector.register(fd, selectors.EVENT_READ, (action, None))

    def _readable(self, child):
        data = os.read(child.stdout, 1 << 16)
        if not data:
            self.selector.unregister(child.stdout)
            os.close(child.stdout)
            child.stdout = None
            if child.partial:  # killed in the middle of a line
                self.on_line(child, child.partial)
            self._maybe_gone(child)
            return
        *lines, child.partial = (child.partial + data).split(b"\n")
        for line in lines:
            self.on_line(child, line)

    def _ended(self, child):
        self.selector.unregister(child.pidfd)
        if child.own_group:
            self.kill(child, signal.SIGKILL)  # ranks that outlived the process that started them
        child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        os.close(child.pidfd)
        self.close_stdin(child)
        self._maybe_gone(child)

    def _maybe_gone(self, child):
        if child.code is not None and child.stdout is None:
            del self.alive[child.name]
            if self.on_exit:
                self.on_exit(child)


def _set_group(pid):
    """In parent and child, whichever comes first."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass
