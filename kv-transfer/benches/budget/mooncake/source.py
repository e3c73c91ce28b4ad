"""The source of the benchmark's Python rows: writes lists of pieces to a target, in batches, with mooncake.engine."""

import concurrent.futures
import ctypes
import importlib.metadata
import json
import sys
import time

from mooncake.engine import TransferEngine

target, size = sys.argv[1], int(sys.argv[2])
engine = TransferEngine()
if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
    sys.exit("mooncake.engine does not start")
memory = (ctypes.c_char * size)()
base = ctypes.addressof(memory)
ctypes.memset(base, 7, size)
if engine.register_memory(base, size):
    sys.exit("mooncake.engine does not register")
names = [d.metadata["Name"] for d in importlib.metadata.distributions() if "mooncake" in (d.metadata["Name"] or "")]
version = " ".join(f"{n} {importlib.metadata.version(n)}" for n in names)


def say(what):
    print("reply " + json.dumps(what), flush=True)


def write(batch):
    source, there, length = batch
    if len(source) == 1:
        code = engine.transfer_sync_write(target, source[0], there[0], length[0])
    else:
        code = engine.batch_transfer_sync_write(target, source, there, length)
    if code:
        raise SystemExit(f"mooncake.engine: {len(source)} pieces: {code}")


say({"base": base, "version": version})
for line in sys.stdin:
    request = json.loads(line)
    cut, threads = request["cut"], request["threads"]
    batches = []
    for columns in request["lists"]:
        batches += [[c[i : i + cut] for c in columns] for i in range(0, len(columns[0]), cut)]
    cpu, start = time.process_time_ns(), time.monotonic_ns()
    if threads == 1:
        for batch in batches:
            write(batch)
    else:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, batches))
    say({"ns": time.monotonic_ns() - start, "cpu": time.process_time_ns() - cpu})
