"""The command line: one role, or several."""
import os
import signal
import sys
import threading
import traceback

from sglang_peer import events, options
from sglang_peer.environment import ImportTrouble
from sglang_peer.peer import BootstrapTrouble, Peer

EXIT_UNEXPECTED, EXIT_BOOTSTRAP = 1, 4


def main(argv=None):
    """Run ARGV and end the process: SGLang's threads are not waited for."""
    argv = sys.argv[1:] if argv is None else argv
    events.claim_stdout()
    try:
        code = dispatch(argv)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else EXIT_UNEXPECTED
    except BootstrapTrouble as e:
        events.emit("error", role=argv[0], where="bootstrap", reason=str(e))
        code = EXIT_BOOTSTRAP
    except ImportTrouble as e:
        events.emit("error", role=argv[0], where="import", reason=str(e))
        code = EXIT_UNEXPECTED
    except BrokenPipeError:  # nobody reads the events any more
        code = EXIT_UNEXPECTED
    except BaseException as e:
        traceback.print_exc()
        events.emit("error", role=" ".join(argv[:1]), where="peer", reason=f"{type(e).__name__}: {e}")
        code = EXIT_UNEXPECTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def dispatch(argv):
    """The exit code of the command."""
    parser = options.build_parser()
    a = parser.parse_args(argv)
    options.check(parser, a)
    if a.cmd in ("prefill", "decode"):
        if a.all_ranks and a.tp_size * a.pp_size * a.cp_size * a.dp_size > 1:
            from sglang_peer import ranks

            return ranks.run(a, argv)
        return run_rank(a)
    if a.cmd == "bootstrap":
        return run_bootstrap(a)
    if a.cmd == "serve":
        from sglang_peer import serve

        return serve.run(a)
    from sglang_peer import bench

    if a.cmd == "bench":
        return bench.run(a, argv[1:])
    return bench.run_suite(a)


def run_rank(a):
    """One rank in this process."""
    if a.cmd == "prefill":
        from sglang_peer.prefill import Prefill as Role
    else:
        from sglang_peer.decode import Decode as Role
    return Role(a).run()


def run_bootstrap(a):
    """SGLang's bootstrap server alone, until standard input ends or SIGTERM."""
    peer = Peer(a, "prefill")
    peer.start_bootstrap_server()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    events.emit("ready", role="bootstrap", addr=peer.bootstrap_addr)

    def watch_input():
        while os.read(0, 4096):
            pass
        stop.set()

    threading.Thread(target=watch_input, daemon=True).start()
    stop.wait()
    return 0
