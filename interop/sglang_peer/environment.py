"""What SGLang and the transports read from the environment, and their import."""
import logging
import math
import os
import sys
import time
import warnings

from sglang_peer import stubs

TIMEOUTS = {  # option -> SGLang's variable; the two timeouts are whole seconds in SGLang
    "wait_timeout": "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "boot_timeout": "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "heartbeat": "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
    "release_timeout": "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
}


class ImportTrouble(Exception):
    """SGLang or a backend is not installed as it should be."""


def set_defaults():
    """For a host without RDMA and GPU; all of them variables of SGLang, Mooncake, UCX and OpenMP."""
    for key, value in dict(MC_FORCE_TCP="1", MOONCAKE_PROTOCOL="tcp", NIXL_LOG_LEVEL="WARN", UCX_LOG_LEVEL="error",
                           OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1").items():
        os.environ.setdefault(key, value)


def set_role(a):
    """The variables that the options of one role stand for.  SGLang reads each when it needs it."""
    os.environ["SGLANG_HOST_IP"] = a.host_ip
    for option, variable in TIMEOUTS.items():
        value = getattr(a, option, None)
        if value is not None:
            os.environ[variable] = str(math.ceil(value)) if option in ("wait_timeout", "boot_timeout") else str(value)
    if a.staging:
        os.environ["SGLANG_DISAGG_STAGING_BUFFER"] = "1"
        os.environ["SGLANG_STAGING_USE_TORCH"] = "1"
        os.environ.setdefault("SGLANG_DISAGG_STAGING_POOL_SIZE_MB", "256")
    os.environ.update(a.env)


def log_to_stderr(level, who=""):
    logging.basicConfig(level=level.upper(), stream=sys.stderr, force=True,
                        format=f"%(asctime)s {who} %(levelname)s %(name)s: %(message)s")
    warnings.simplefilter("ignore")


def import_sglang(backends):
    """Import SGLang and the transports.  Starts nothing: a process may fork after it (see `other_threads`)."""
    set_defaults()
    stubs.install()
    try:
        import sglang.srt.disaggregation.common.staging_handler  # noqa: F401
        import sglang.srt.server_args  # noqa: F401
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        for backend in backends:
            get_kv_class(TransferBackend(backend), KVClassType.MANAGER)
            if backend == "nixl":
                import nixl._api  # noqa: F401
            if backend == "mooncake":
                import mooncake.engine  # noqa: F401
    except ImportError as e:
        raise ImportTrouble(f"cannot import SGLang 0.5.23 with {', '.join(backends)}: {e}. Install requirements.txt, "
                            "requirements-nodeps.txt and the packages of apt.txt (README.md), and use that Python") from e


def other_threads():
    """Names of the threads besides this one, after a moment for those that are ending.  Forking is safe with none."""
    end = time.monotonic() + 5
    while True:
        ids = [t for t in os.listdir("/proc/self/task") if t != str(os.getpid())]
        if not ids or time.monotonic() > end:
            return [_thread_name(t) for t in ids]
        time.sleep(0.01)


def _thread_name(thread):
    try:
        with open(f"/proc/self/task/{thread}/comm") as f:
            return f.read().strip()
    except OSError:
        return "ended"
