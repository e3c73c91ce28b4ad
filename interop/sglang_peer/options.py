"""The options of the roles.  `kvt peer` takes the same ones (README.md, "Options")."""
import argparse
import sys
from typing import NamedTuple

from sglang_peer.events import emit

EXIT_OPTIONS = 2


class Fault(NamedTuple):
    """--abort-at / --d-abort-at: what to do to a room, and at which chunk or after how many ms."""

    mode: str
    arg: float


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options on both streams and exits with code 2."""

    def __init__(self, *args, **kw):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kw)

    def error(self, message):
        emit("error", where="options", reason=message)
        sys.stderr.write(f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")
        sys.exit(EXIT_OPTIONS)


def rooms(text):
    """'100:4' -> 100..103, '7,9,12' -> those."""
    out = []
    for part in text.split(","):
        first, _, count = part.partition(":")
        out += range(int(first), int(first) + int(count or 1))
    if len(set(out)) != len(out):
        raise argparse.ArgumentTypeError("a room is named twice")
    return out


def key_value(text):
    key, sep, value = text.partition("=")
    if not key or not sep:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return key, value


def fault(**modes):
    """A parser of MODE[:ARG]; `modes` names the default ARG of each mode, None where ARG must be given."""

    def parse(text):
        mode, _, arg = text.partition(":")
        if mode not in modes:
            raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(modes)}")
        if not arg and modes[mode] is None:
            raise argparse.ArgumentTypeError(f"{text!r}: {mode} needs a number, as in {mode}:2")
        return Fault(mode, float(arg) if arg else modes[mode])

    modes = {k.replace("_", "-"): v for k, v in modes.items()}
    return parse


def add_common(p):
    g = p.add_argument_group("peer")
    g.add_argument("--backend", choices=["nixl", "mooncake"], default="nixl")
    g.add_argument("--bootstrap-host", default="127.0.0.1")
    g.add_argument("--bootstrap-port", type=int, default=8998)
    g.add_argument("--host-ip", default="127.0.0.1", help="the address this rank advertises (SGLANG_HOST_IP)")
    g.add_argument("--http-port", type=int, default=30000, help="prefill_http_port in the bootstrap registration")
    g.add_argument("--rooms", type=rooms, default="1000:1", help="A:N (N rooms from A on) or a,b,c")
    g.add_argument("--gate", type=int, default=0, metavar="N",
                   help="rooms beyond the first N start when a line comes on standard input; 0: no gate")
    g.add_argument("--warmup", type=int, default=0, help="the first N rooms run before, and outside, the measured window")
    g.add_argument("--concurrency", type=int, default=0, help="rooms in flight at a time, in order; 0: all")
    g.add_argument("--quiet", action="store_true", help="no `room` event for rooms that succeeded and were verified")
    g.add_argument("--timeout", type=float, default=120.0, help="give up on all rooms after this many seconds")
    g.add_argument("--poll-us", type=int, default=200, help="sleep between poll() sweeps")
    g.add_argument("--log-level", default="WARNING")
    g.add_argument("--capture", metavar="FILE", help="append every control message to this file, a JSON line each")
    g.add_argument("--env", type=key_value, action="append", default=[], metavar="K=V",
                   help="environment of SGLang and the transports (repeatable)")
    g = p.add_argument_group("topology (of this role)")
    g.add_argument("--tp-size", type=int, default=1, help="attention TP size")
    g.add_argument("--tp-rank", type=int, default=0)
    g.add_argument("--pp-size", type=int, default=1)
    g.add_argument("--pp-rank", type=int, default=0)
    g.add_argument("--cp-size", type=int, default=1)
    g.add_argument("--cp-rank", type=int, default=0)
    g.add_argument("--dp-size", type=int, default=1)
    g.add_argument("--dp-rank", type=int, default=0)
    g.add_argument("--system-dp", action="store_true", help="--dp-size counts replicas (dp_size), not attention DP")
    g.add_argument("--all-ranks", action="store_true", help="start one process per rank of this role")
    g.add_argument("--pp-store", help="host:port of the PP rendezvous store (set by --all-ranks)")
    g.add_argument("--load-balance-method", default="follow_bootstrap_room")
    g.add_argument("--allocation-policy", default="early", choices=["early", "prefill_complete"])
    add_geometry(p)


def add_geometry(p):
    g = p.add_argument_group("KV geometry")
    g.add_argument("--attn", choices=["mha", "mla"], default="mla")
    g.add_argument("--layers", type=int, default=32, help="layers of the whole model")
    g.add_argument("--pages", type=int, default=256, help="pages per room")
    g.add_argument("--pool-pages", type=int, default=0,
                   help="pages in the pool; 0: just enough for all rooms; fewer: rooms take turns (needs --share-src)")
    g.add_argument("--page-size", type=int, default=64, help="tokens per page")
    g.add_argument("--item-len", type=int, default=16384, help="bytes of one page of one region on this rank")
    g.add_argument("--heads", type=int, default=8, help="KV heads of the whole model (mha)")
    g.add_argument("--dtype-str", default="bfloat16", help="kv_cache_dtype_str")
    g.add_argument("--page-order", choices=["contiguous", "reversed", "shuffled", "strided"], default="contiguous")
    g.add_argument("--share-src", action="store_true",
                   help="all rooms carry the same KV bytes (room salt 0); the prefill keeps one copy")
    g.add_argument("--layer-ids", choices=["none", "force"], default="none",
                   help="none: [] as SGLang sends for plain pools; force: explicit ids")
    g.add_argument("--mem-kind", choices=["auto", "DRAM", "VRAM"], default="auto",
                   help="nixl kv_data_mem_kinds; auto is VRAM, SGLang's default, mapped to DRAM inside the nixl agent")
    g = p.add_argument_group("aux and state")
    g.add_argument("--aux", choices=["sglang", "checksum"], default="sglang", help="checksum: one more buffer (kv checksum)")
    g.add_argument("--hidden-size", type=int, default=4096)
    g.add_argument("--state", choices=["none", "mamba", "swa", "mamba+swa"], default="none")
    g.add_argument("--state-layers", type=int, default=4)
    g.add_argument("--state-item-len", type=int, default=8192, help="bytes per slot (mamba) or per page (swa) on this rank")
    g.add_argument("--state-dim", type=int, default=64, help="mamba: TP-sharded dim on this rank")
    g.add_argument("--swa-pages", type=int, default=4, help="swa pages per room")
    g.add_argument("--staging", action="store_true", help="SGLang's staging buffer, with a CPU shim")
    g.add_argument("--chunked-prefill-size", type=int, default=0, help="staging grid in tokens; 0: chunk-pages*page-size")


def add_prefill(p):
    g = p.add_argument_group("prefill")
    g.add_argument("--no-bootstrap", action="store_true", help="use a bootstrap server that is already running")
    g.add_argument("--chunk-pages", type=int, default=0, help="pages per send(); 0: one chunk")
    g.add_argument("--chunk-delay-ms", type=float, default=0)
    g.add_argument("--abort-at", default="none", type=fault(none=0, before_send=0, after_chunk=None, hang=None, kill=None),
                   help="none | before-send | after-chunk:K | hang:K (stop sending after K chunks) | kill:K (SIGKILL itself)")
    g.add_argument("--abort-rooms", type=rooms, help="rooms --abort-at applies to; all if not given")
    g.add_argument("--boot-timeout", type=float, help="seconds SGLang waits for a room's metadata (SGLang: 300)")
    g.add_argument("--linger", type=float, default=1.0, help="stay up this long after the last room")
    g.add_argument("--serve", action="store_true", help="keep running until standard input ends or SIGTERM")


def add_decode(p):
    g = p.add_argument_group("decode")
    g.add_argument("--chunk-pages", type=int, default=0, help=argparse.SUPPRESS)  # the staging grid, if nothing else names it
    g.add_argument("--decode-prefix-pages", type=int, default=0, help="pages decode says it already holds")
    g.add_argument("--verify", choices=["end", "none"], default="end")
    g.add_argument("--hold", type=float, default=0, help="seconds a room stays in WaitingForInput before send_metadata")
    g.add_argument("--d-abort-at", default="none", type=fault(none=0, before_metadata=0, after_metadata=0, kill=0),
                   help="none | before-metadata (after --hold) | after-metadata[:MS] | kill[:MS] (SIGKILL itself MS after it)")
    g.add_argument("--d-abort-rooms", type=rooms, help="rooms --d-abort-at applies to; all if not given")
    g.add_argument("--wait-timeout", type=float, help="seconds SGLang waits for a room's KV (SGLang: 300)")
    g.add_argument("--heartbeat", type=float, help="seconds between heartbeats to the bootstrap server (SGLang: 5, at least 2)")
    g.add_argument("--release-timeout", type=float,
                   help="seconds a failed room's pages are held for ABORT_ACKs (SGLang: 30)")
    g.add_argument("--connect-timeout", type=float, default=60.0,
                   help="seconds to wait for the bootstrap server, and for a room's DP rank")
    g.add_argument("--d-linger", type=float, default=1.0,
                   help="stay up this long after the last room: metadata for a dummy rank, which no Success waits for, may still be queued")
    g.add_argument("--self-test-corrupt", choices=["none", "kv", "aux", "state", "stray"], default="none",
                   help="flip one byte before verifying (negative control of the verifier)")


def add_bench(p):
    g = p.add_argument_group("bench")
    g.add_argument("--p", default="", help="more options of the prefill only, in one string")
    g.add_argument("--d", default="", help="more options of the decode only, in one string")
    g.add_argument("--note", default="", help="copied into the `bench` event")
    g.add_argument("--expect-fail", action="store_true", help="suite: the bench is meant to end with exit code 3")
    g.add_argument("--expect-ok", type=int, metavar="N", help="suite: N rooms succeed and are verified, no more")
    g.add_argument("--expect-corrupt", type=int, metavar="N", help="suite: the verifier objects N times")
    g.add_argument("--expect-reason", action="append", default=[], metavar="TEXT",
                   help="suite: TEXT is in the reason of a failed room or error (repeatable)")
    g.add_argument("-v", "--verbose", action="store_true", help="print the events of both roles too")


def build_parser():
    """The options of every command.  `bench` takes those of both roles."""
    p = Parser(prog="sglang_peer", description=__import__("sglang_peer").__doc__)
    sub = p.add_subparsers(dest="cmd", required=True, parser_class=Parser)
    add_common(sub.add_parser("bootstrap", help="SGLang's bootstrap server alone, until standard input ends"))
    s = sub.add_parser("prefill", help="prefill ranks, with their bootstrap server")
    add_common(s), add_prefill(s)
    s = sub.add_parser("decode", help="decode ranks")
    add_common(s), add_decode(s)
    s = sub.add_parser("bench", help="prefill and decode on loopback, one `bench` event", conflict_handler="resolve")
    add_common(s), add_decode(s), add_prefill(s), add_bench(s)
    s.set_defaults(bootstrap_port=0)
    s = sub.add_parser("suite", help="many benches: each line of a file has the options of one")
    s.add_argument("file", nargs="+")
    s = sub.add_parser("serve", help="fork roles on command; imports SGLang once")
    s.add_argument("--backend", action="append", choices=["nixl", "mooncake"], help="imported before the first fork; repeatable (nixl)")
    s.add_argument("--log-level", default="WARNING")
    return p


def check(parser, a):
    """What argparse cannot see; `parser.error` does not return."""
    if a.cmd not in ("prefill", "decode"):
        return
    per = a.layers // a.pp_size if a.pp_size else 0
    heads = max(1, a.heads // a.tp_size) if a.attn == "mha" and a.tp_size else 1
    if min(a.tp_size, a.pp_size, a.cp_size, a.dp_size) < 1:
        parser.error("--tp-size, --pp-size, --cp-size and --dp-size are at least 1")
    if per * a.pp_size != a.layers:
        parser.error(f"--layers {a.layers} does not divide by --pp-size {a.pp_size}")
    if a.page_size < 1 or a.item_len % (a.page_size * heads * 4):
        parser.error(f"--item-len {a.item_len} is not a multiple of --page-size {a.page_size} x {heads} local heads x 4 bytes")
    pool_rooms = 1 if a.share_src and a.cmd == "prefill" else len(a.rooms)
    low = 0 if a.cmd == "prefill" else 2
    if a.pool_pages and a.pool_pages - low < a.pages:
        parser.error(f"--pool-pages {a.pool_pages} has no space for one room of {a.pages} pages (and {low} kept free)")
    if a.pool_pages and not a.share_src and a.pool_pages - low < a.pages * pool_rooms:
        parser.error(f"--pool-pages {a.pool_pages} is too small for {pool_rooms} rooms of {a.pages} pages: "
                     "rooms can share pages with --share-src only")
    if a.cmd == "decode" and a.decode_prefix_pages > a.pages:
        parser.error(f"--decode-prefix-pages {a.decode_prefix_pages} is more than --pages {a.pages}")
    if a.cmd == "decode" and a.self_test_corrupt == "state" and a.state == "none":
        parser.error("--self-test-corrupt state needs --state")
