"""One rank: SGLang's configuration, its classes, KVArgs and its KVManager."""
import logging
import socket
import time

from sglang_peer import capture, environment, shims
from sglang_peer.buffers import Buffers

POLL_NAMES = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success"}


class BootstrapTrouble(Exception):
    """The bootstrap server cannot be started or used."""


def address(host, port):
    """HOST:PORT as a client writes it; an IPv6 host in brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Peer:
    """`role` is prefill or decode; the constructor imports SGLang and publishes its configuration."""

    def __init__(self, a, role):
        self.a, self.role = a, role
        self.rank = dict(tp=a.tp_rank, pp=a.pp_rank, cp=a.cp_rank, dp=a.dp_rank)
        self.bootstrap_addr = address(a.bootstrap_host, a.bootstrap_port)
        name = f"{role}[tp{a.tp_rank}pp{a.pp_rank}cp{a.cp_rank}dp{a.dp_rank}]"
        environment.set_role(a)
        environment.log_to_stderr(a.log_level, name)
        if a.capture:
            capture.start(a.capture, name)
        environment.import_sglang([a.backend])
        self.mem_kind = "VRAM" if a.mem_kind == "auto" else a.mem_kind
        if a.backend == "nixl" and (self.mem_kind == "VRAM" or a.state != "none" or a.staging):
            shims.nixl_vram_as_dram()
        from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class

        self.mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
        self.kinds = KVClassType
        self.cls = {k: get_kv_class(TransferBackend(a.backend), k) for k in KVClassType}
        if a.staging:
            shims.staging_on_cpu()
        self._publish()

    def _publish(self):
        """SGLang's process-wide configuration, through its own publish()."""
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        from sglang_peer.pp_group import PPGroup

        a = self.a
        attn_dp, attn_dp_rank = (1, 0) if a.system_dp else (a.dp_size, a.dp_rank)
        tp_total = a.tp_size * a.cp_size * attn_dp
        self.tp_rank_total = (attn_dp_rank * a.cp_size + a.cp_rank) * a.tp_size + a.tp_rank
        chunk = a.chunked_prefill_size or (getattr(a, "chunk_pages", 0) or a.pages or 1) * a.page_size
        self.server_args = ServerArgs(
            model_path="dummy", device="cpu",
            tp_size=tp_total, pp_size=a.pp_size, attn_cp_size=a.cp_size, attn_dp_size=attn_dp,
            dp_size=a.dp_size if a.system_dp else 1,
            load_balance_method=a.load_balance_method,
            host=a.bootstrap_host, port=a.http_port,
            page_size=a.page_size, chunked_prefill_size=chunk,
            disaggregation_mode=self.role, disaggregation_transfer_backend=a.backend,
            disaggregation_bootstrap_port=a.bootstrap_port,
            disaggregation_decode_allocation_policy=a.allocation_policy,
        )
        publish(self.server_args, role="scheduler", ranks=SpawnRanks(
            world_rank=a.pp_rank * tp_total + self.tp_rank_total,
            dp_rank=a.dp_rank if a.system_dp else None, gpu_id=0))
        pp_group = PPGroup(a) if a.pp_size > 1 and self.role == "prefill" else None
        get_parallel().override_permanently(pp_group=pp_group)

    def start_bootstrap_server(self):
        """SGLang's bootstrap server in a thread of this process; returns once it answers."""
        host, port = self.a.bootstrap_host, self.a.bootstrap_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as e:
            raise BootstrapTrouble(f"the bootstrap server cannot listen on {address(host, port)}: {e.strerror}") from e
        self.server = self.cls[self.kinds.BOOTSTRAP_SERVER](host=host, port=port)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                socket.create_connection((self.bootstrap_addr.rsplit(":", 1)[0].strip("[]"), port), 1).close()
                return
            except OSError:
                time.sleep(0.01)
        raise BootstrapTrouble(f"SGLang's bootstrap server did not come up on {address(host, port)} within 10 s")

    def allocate(self):
        """This rank's memory."""
        self.buffers = Buffers(self.a, self.role)
        return self.buffers

    def start_manager(self):
        """SGLang's KVManager over the memory; prefill registers with the bootstrap server in there."""
        a, b = self.a, self.buffers
        if a.backend == "mooncake":
            from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine
            from sglang.srt.utils.network import get_local_ip_auto

            init_mooncake_transfer_engine(hostname=get_local_ip_auto(), gpu_id=0, ib_device=None)
        failed = _watch_registration()
        self.mgr = self.cls[self.kinds.MANAGER](self._kv_args(), self.mode, self.server_args, a.attn == "mla")
        if failed:
            raise BootstrapTrouble(f"SGLang could not register with the bootstrap server at {self.bootstrap_addr}")
        if a.staging:
            self.mgr.set_kv_buffer_tensors(b.kv[: b.nlayers], b.kv[b.nlayers:], a.page_size,
                                           slot_layer_ids=[b.layer0 + l for _ in range(2) for l in range(b.nlayers)])
        return self.mgr

    def identity(self):
        """Fields of the `ready` event."""
        mgr = self.mgr
        return dict(role=self.role, rank=self.rank, rank_ip=mgr.local_ip, rank_port=mgr.rank_port, backend=self.a.backend,
                    session=getattr(getattr(mgr, "engine", None), "session_id", None),
                    agent=getattr(getattr(mgr, "agent", None), "name", None))

    def _kv_args(self):
        from sglang.srt.disaggregation.base.conn import StateType

        a, b = self.a, self.buffers
        per_kind = list(zip(b.state_types, b.state))
        k = self.cls[self.kinds.KVARGS]()
        k.engine_rank = self.tp_rank_total if self.role == "prefill" else self.tp_rank_total % a.tp_size
        k.pp_rank = a.pp_rank
        k.system_dp_rank = a.dp_rank if a.system_dp else None
        k.rust_http_port = None
        k.kv_cache_dtype_str = a.dtype_str
        k.kv_layout = None
        k.prefill_start_layer, k.prefill_end_layer = b.layer0, b.layer0 + b.nlayers
        k.kv_data_ptrs = [t.data_ptr() for t in b.kv]
        k.kv_data_lens = [t.nbytes for t in b.kv]
        k.kv_item_lens = [a.item_len] * len(b.kv)
        k.num_draft_entries = 0
        k.kv_layer_ids = [b.layer0 + l for _ in range(b.nkv) for l in range(b.nlayers)] if a.layer_ids == "force" else []
        k.kv_data_mem_kinds = [self.mem_kind] * len(b.kv)
        k.kv_head_num = len(b.head_ids)
        k.total_kv_head_num = a.heads if a.attn == "mha" else 1
        k.page_size = a.page_size
        k.aux_data_ptrs, k.aux_data_lens, k.aux_item_lens = b.meta.get_buf_infos()
        k.ib_device, k.gpu_id = None, 0
        k.state_types = [StateType(s) for s in b.state_types]
        k.state_data_ptrs = [[t.data_ptr() for t in pool] for pool in b.state]
        k.state_data_lens = [[t.nbytes for t in pool] for pool in b.state]
        k.state_item_lens = [[a.state_item_len] * len(pool) for pool in b.state]
        k.state_layer_ids = [[] for _ in b.state]
        k.state_dim_per_tensor = [[a.state_dim] * len(pool) if s == "mamba" else [] for s, pool in per_kind]
        k.state_slice_outer_counts = [[1] * len(pool) if s == "mamba" else [] for s, pool in per_kind]
        k.state_conv_shard_groups = [[None] * len(pool) if s == "mamba" else [] for s, pool in per_kind]
        k.is_hybrid_mla_backend = False
        k.swa_kv_cache_layout = "nhd" if "swa" in b.state_types and a.attn == "mha" else None
        k.mla_compression_ratios = None
        return k


def _watch_registration():
    """SGLang only logs that it gave up on registering; the returned list is then not empty."""
    failures = []

    class Watch(logging.Handler):
        def emit(self, record):
            if "failed to register to bootstrap server" in record.getMessage():
                failures.append(record)

    logging.getLogger("sglang.srt.disaggregation.common.conn").addHandler(Watch(logging.ERROR))
    return failures
