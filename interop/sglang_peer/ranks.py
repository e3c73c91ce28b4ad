"""--all-ranks: one process for each rank of a role, forked after one import of SGLang."""
import datetime
import os
import signal
import socket

from sglang_peer import environment, events
from sglang_peer.children import Children


def run(a, argv):
    """The worst exit code of the ranks.  Standard input goes to each of them."""
    environment.set_role(a)
    environment.log_to_stderr(a.log_level)
    environment.import_sglang([a.backend])
    events.share_between_ranks()
    codes = []
    children = Children(on_exit=lambda child: codes.append(child.code))
    port = free_port() if a.pp_size > 1 and a.cmd == "prefill" else None
    for n, rank_argv in enumerate(rank_argvs(a, argv, port)):
        children.start(n, rank_argv, own_group=False, own_stdout=False)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(c.pid, signal.SIGTERM) for c in children.alive.values()])
    store = rendezvous(port) if port else None  # its thread must not be there when the ranks are forked
    _forward_input(a, children)
    while children.alive:
        children.turn()
    del store
    return max(abs(code) for code in codes)


def rank_argvs(a, argv, port):
    """The command line of each rank; the first prefill rank has the bootstrap server."""
    base = [x for x in argv if x != "--all-ranks"]
    if port:
        base += ["--pp-store", f"127.0.0.1:{port}"]
    out = []
    for pp in range(a.pp_size):
        for dp in range(a.dp_size):
            for cp in range(a.cp_size):
                for tp in range(a.tp_size):
                    rank = ["--tp-rank", str(tp), "--pp-rank", str(pp), "--cp-rank", str(cp), "--dp-rank", str(dp)]
                    joins = ["--no-bootstrap"] if out and a.cmd == "prefill" else []
                    out.append(base + rank + joins)
    return out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rendezvous(port):
    """The store through which SGLang's PP ranks find each other."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


def _forward_input(a, children):
    def readable(_):
        data = os.read(0, 4096)
        for child in list(children.alive.values()):
            if data:
                children.write(child, data)
            else:
                children.close_stdin(child)
        if not data:
            children.selector.unregister(0)

    if a.gate or getattr(a, "serve", False):
        children.watch(0, readable)
    else:
        for child in children.alive.values():
            children.close_stdin(child)
