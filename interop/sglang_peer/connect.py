"""Decode's way to a room's prefill: the bootstrap server's answer and the DP rank, as SGLang's scheduler asks for them."""
import time

RETRY_S = 0.1
QUERY_S = 0.02


class Connector:
    def __init__(self, a, peer):
        self.a, self.mgr, self.addr = a, peer.mgr, peer.bootstrap_addr
        self.receiver_class = peer.cls[peer.kinds.RECEIVER]
        self._next_try = self._next_query = 0.0
        self._ranks = {}

    def info(self):
        """SGLang's PrefillServerInfo, or None while there is none.  RuntimeError: the two sides do not fit."""
        known = self.mgr.prefill_info_table.get(self.addr)
        if known is not None or time.perf_counter() < self._next_try:
            return known
        found = self.mgr.try_ensure_parallel_info(self.addr)
        self._next_try = time.perf_counter() + RETRY_S
        return self.mgr.prefill_info_table.get(self.addr) if found else None

    def wait(self, stop):
        """`info` once it is there, or None after --connect-timeout."""
        end = time.perf_counter() + self.a.connect_timeout
        while not stop.is_set() and time.perf_counter() < end:
            if (info := self.info()) is not None:
                return info
            time.sleep(0.02)
        return None

    def dp_rank(self, info, room, others):
        """The prefill DP rank of `room`; None: ask again later.  `others`: rooms that wait too, for one query."""
        from sglang.srt.environ import envs

        if info.dp_size == 1:
            return 0
        if info.follow_bootstrap_room and not envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get():
            return room % info.dp_size
        if room not in self._ranks and time.perf_counter() >= self._next_query:
            found = self.receiver_class.query_prefill_dp_ranks(self.addr, sorted({room, *others}))
            self._ranks.update((int(k), int(v)) for k, v in found.items())
            self._next_query = time.perf_counter() + QUERY_S
        return self._ranks.pop(room, None)
