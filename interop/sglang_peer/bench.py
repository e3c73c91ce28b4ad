"""`bench`: SGLang to SGLang on loopback, one `bench` event.  `suite`: many of them from a file."""
import json
import os
import shlex
import signal
import sys
import time

from sglang_peer import environment, options
from sglang_peer.children import Children
from sglang_peer.events import emit, write_raw
from sglang_peer.ranks import free_port

EXIT_OK, EXIT_ROOMS = 0, 3


def run(a, argv):
    environment.log_to_stderr(a.log_level)
    environment.import_sglang([a.backend])
    return bench(a, argv)[0]


def bench(a, argv):
    """Start both roles, wait for them, put their summaries together: exit code and fields of the `bench` event."""
    port = a.bootstrap_port or free_port()
    roles, found = {}, {"prefill": [], "decode": []}

    def on_line(child, line):
        try:
            event = json.loads(line)
        except ValueError:
            sys.stderr.write(f"[{child.name}] {line.decode(errors='replace')}\n")
            return
        found[child.name].append(event)
        if a.verbose:
            write_raw(line + b"\n")

    codes = {}
    children = Children(on_line, lambda child: codes.update({child.name: child.code}))
    for role, more in (("prefill", a.p), ("decode", a.d)):
        roles[role] = [role, "--all-ranks", *of_role(role, argv), "--bootstrap-port", str(port), *shlex.split(more)]
        children.close_stdin(children.start(role, roles[role]))
    end = time.monotonic() + a.timeout + a.linger + 65
    while children.alive:
        children.turn(1)
        if time.monotonic() > end:
            for child in list(children.alive.values()):
                children.kill(child, signal.SIGKILL)
    summary = summarize(a, found)
    emit("bench", **summary, rc=[codes["prefill"], codes["decode"]], note=a.note)
    good = summary["ok"] == len(a.rooms) and not summary["corrupt"] and not any(codes.values())
    return EXIT_OK if good else EXIT_ROOMS, summary


def of_role(role, argv):
    """Those of a bench's options that `role` knows."""
    subparsers = options.build_parser()._subparsers._group_actions[0].choices
    known, mine = subparsers["bench"]._option_string_actions, subparsers[role]._option_string_actions
    out, it = [], iter(argv)
    for token in it:
        name = token.split("=", 1)[0]
        tokens = [token]
        if known[name].nargs != 0 and "=" not in token:
            tokens.append(next(it))
        if name in mine and name != "--bootstrap-port":
            out += tokens
    return out


def summarize(a, found):
    """The fields of the `bench` event: a room counts when every decode rank has it, verified."""
    summaries = {role: [e for e in evs if e["event"] == "summary"] for role, evs in found.items()}
    decodes, prefills = summaries["decode"], summaries["prefill"]
    rooms, failures, errors = {}, set(), []
    for role, evs in found.items():
        for e in evs:
            if e["event"] == "room" and role == "decode":
                rooms.setdefault(e["room"], []).append(e)
            if e["event"] == "room" and e["status"] != "Success":
                failures.add(f"{role}: {e['status']}: {e.get('reason')}")
            if e["event"] == "error":
                errors.append(f"{role}: {e['reason']}")
    ok = {room: max(e["latency_ms"] for e in evs) for room, evs in rooms.items()
          if all(e["status"] == "Success" and e.get("verified", True) for e in evs)}
    if a.quiet and decodes:
        count = min(d["success"] - d["corrupt"] for d in decodes)
    else:
        count = len(ok)
    warm = set(a.rooms[: a.warmup])
    xs = sorted(v for room, v in ok.items() if room not in warm)
    window = max((d["window_s"] for d in decodes), default=0)
    nbytes = sum(d["bytes"] for d in decodes)
    measured = max((d["measured"] for d in decodes), default=0)

    def ms(share, name):
        return round(xs[min(len(xs) - 1, int(share * len(xs)))], 3) if xs else max((d[name] or 0 for d in decodes), default=None)

    cpu = {role: round(sum(s["cpu_s"] for s in summaries[role]), 3) for role in summaries}
    busy = max((d["machine_busy_s"] for d in decodes), default=0)
    return dict(backend=a.backend, attn=a.attn, layers=a.layers, pages=a.pages, item_len=a.item_len,
                rooms=len(a.rooms), ok=count, warmup=a.warmup, concurrency=a.concurrency or len(a.rooms),
                window_s=round(window, 4), bytes=nbytes,
                rooms_per_s=round(measured / window, 3) if window else None,
                GB_per_s=round(nbytes / window / 1e9, 4) if window else None,
                p50_ms=ms(0.5, "p50_ms"), p99_ms=ms(0.99, "p99_ms"), max_ms=ms(1.0, "max_ms"),
                prefill_cpu_s=cpu["prefill"], decode_cpu_s=cpu["decode"], other_cpu_s=round(busy - sum(cpu.values()), 2),
                corrupt=sum(d["corrupt"] for d in decodes), not_ok=sorted(failures)[:6], errors=errors[:3],
                prefill_rooms=sum(p["success"] for p in prefills))


def run_suite(a):
    """Each line of the files: the options of one bench.  0 if all came out as they should, else 1."""
    parser, failed, imported, cases = options.build_parser(), 0, set(), []
    for path in a.file:
        with open(path) as f:
            lines = [line.split("#")[0].strip() for line in f]
        for line in filter(None, lines):
            argv = ["bench", *shlex.split(line)]
            cases.append((line, argv, parser.parse_args(argv)))
    environment.log_to_stderr("WARNING", "suite")
    keep = dict(os.environ)
    for line, argv, case in cases:
        if case.backend not in imported:
            imported.add(case.backend)
            environment.import_sglang([case.backend])
        began = time.monotonic()
        wrong = judge(case, *bench(case, argv[1:]))
        failed += bool(wrong)
        emit("case", args=line, as_expected=not wrong, wrong=wrong, wall_s=round(time.monotonic() - began, 2), load=os.getloadavg()[0])
        os.environ.clear()
        os.environ.update(keep)
    emit("suite", cases=len(cases), as_expected=len(cases) - failed)
    return int(failed > 0)


def judge(case, code, summary):
    """What is not as the case expects."""
    wrong = []
    if code != (EXIT_ROOMS if case.expect_fail else EXIT_OK):
        wrong.append(f"exit code {code}")
    for name, expected in (("ok", case.expect_ok), ("corrupt", case.expect_corrupt)):
        if expected is not None and summary[name] != expected:
            wrong.append(f"{name} {summary[name]}, not {expected}")
    reasons = "\n".join(summary["not_ok"] + summary["errors"])
    return wrong + [f"no reason has {text!r}" for text in case.expect_reason if text not in reasons]
