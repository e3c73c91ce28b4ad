"""Decode's side of SGLang's staging buffer: its DecodeStagingHandler with the two scheduler objects that it reads."""
from types import SimpleNamespace

FAILED, TRANSFERRING, SUCCESS = 0, 3, 4


class Staging:
    def __init__(self, peer, rooms):
        import torch
        import sglang.srt.disaggregation.common.staging_handler as sh

        a, b = peer.a, peer.buffers
        _accept_cpu_buffers(sh.DecodeStagingHandler)
        self.page_size = a.page_size
        table = torch.zeros((len(a.rooms), a.pages * a.page_size), dtype=torch.int64)
        for i, _ in rooms:
            pages = torch.from_numpy(b.pages_of(i).astype("int64"))
            table[i] = (pages[:, None] * a.page_size + torch.arange(a.page_size)[None, :]).reshape(-1)
        scheduler = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), schedule_stream=None)
        self.handler = peer.mgr._staging_handler = sh.DecodeStagingHandler.create(peer.mgr, scheduler, a.tp_rank)

    def register(self, r, prefix_pages):
        kv = SimpleNamespace(cache_protected_len=prefix_pages * self.page_size, req_pool_idx=r.i)
        r.staged = SimpleNamespace(kv_receiver=r.receiver, req=SimpleNamespace(bootstrap_room=r.room, kv=kv))
        self.handler.register_decode_req(r.room, r.staged)

    def advance(self, r, status):
        """Scatter what has arrived; a room succeeds when its last scatter is done."""
        self.handler.advance_scatter(r.staged)
        if status != SUCCESS or self.handler.is_done(r.staged):
            return status
        return FAILED if self.handler.is_failed(r.staged) else TRANSFERRING

    def unregister(self, r):
        self.handler.unregister_decode_req(r.room)


def _accept_cpu_buffers(cls):
    """CPU tensors have no device index, of which the handler only asserts that it is there."""
    import torch

    original = cls.__init__

    def __init__(self, *args, **kw):
        info = kw.get("kv_buffer_info") or args[2]
        device = SimpleNamespace(type="cpu", index=0)
        kw["kv_buffer_info"] = dict(info, k_buffers=[SimpleNamespace(device=device)])
        get_device_module = torch.get_device_module
        torch.get_device_module = lambda d=None: torch.cpu
        try:
            original(self, *args, **kw)
        finally:
            torch.get_device_module = get_device_module
        self.kv_buffer_info, self.device = info, torch.device("cpu")

    cls.__init__ = __init__
