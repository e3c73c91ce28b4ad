"""`serve`: a fork server.  SGLang is imported once; each command starts a role in about a second.

Commands are JSON lines on standard input, events JSON lines on standard output
(README.md, "The fork server").
"""
import json
import os
import signal

from sglang_peer import environment
from sglang_peer.children import Children
from sglang_peer.events import emit, write_line, write_raw


def run(a):
    environment.log_to_stderr(a.log_level, "serve")
    environment.import_sglang(a.backend or ["nixl"])
    others = environment.other_threads()
    if others:
        emit("error", where="serve", reason=f"the import of SGLang left threads ({', '.join(others)}): forking is not safe")
        return 1
    server = Server()
    emit("serving", pid=os.getpid())
    return server.run()


class Trouble(Exception):
    """A command that cannot be carried out."""


class Server:
    def __init__(self):
        self.children = Children(self.on_line, self.on_exit)
        self.children.watch(0, self.readable)
        self.partial, self.open = b"", True

    def run(self):
        while self.open:
            self.children.turn()
        for child in list(self.children.alive.values()):
            self.children.kill(child, signal.SIGKILL)
        while self.children.alive:
            self.children.turn()
        return 0

    def on_line(self, child, line):
        """An event of a child, with `id` put in front of its fields."""
        if line.startswith(b"{"):
            write_raw(b'{"id": %s, %s\n' % (json.dumps(child.name).encode(), line[1:]))
        else:
            write_line({"id": child.name, "event": "output", "text": line.decode(errors="replace")})

    def on_exit(self, child):
        emit("exit", id=child.name, rc=child.code)

    def readable(self, _):
        data = os.read(0, 1 << 16)
        if not data:
            self.open = False
            return
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in filter(None, (l.strip() for l in lines)):
            command = None
            try:
                command = json.loads(line)
                self.command(command)
            except Trouble as e:
                emit("error", where="serve", reason=str(e), command=command)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as e:
                emit("error", where="serve", reason=f"{type(e).__name__}: {e}", command=command or line.decode(errors="replace"))

    def command(self, c):
        if "start" in c:
            if c["start"] in self.children.alive:
                raise Trouble(f"{c['start']} is still running")
            argv, env = [str(x) for x in c["argv"]], {k: str(v) for k, v in c.get("env", {}).items()}
            child = self.children.start(c["start"], argv, env, c.get("log"))
            emit("started", id=child.name, pid=child.pid)
        elif "line" in c:
            if not self.children.write(self.child(c["line"]), c.get("text", "").encode() + b"\n"):
                raise Trouble(f"{c['line']} does not take input")
        elif "close" in c:
            self.children.close_stdin(self.child(c["close"]))
        elif "kill" in c:
            self.children.kill(self.child(c["kill"]), int(c.get("signal", signal.SIGKILL)))
        else:
            raise Trouble("a command has one of start, line, close, kill")

    def child(self, name):
        if name not in self.children.alive:
            raise Trouble(f"{name} is not running")
        return self.children.alive[name]
