"""What SGLang needs to run on host memory.  Neither shim edits an SGLang file."""
import contextlib


def nixl_vram_as_dram():
    """SGLang's NIXL backend registers KV (by default) and state (always) as VRAM.

    UCX refuses host memory under that name, so the nixl Python agent is told
    that the word means DRAM.  What SGLang writes on its own ZMQ wire stays.
    """
    from nixl import _api

    cls = _api.nixl_agent
    if getattr(cls, "vram_is_dram", False):
        return
    original = cls.__init__

    def __init__(self, *args, **kw):
        original(self, *args, **kw)
        self.nixl_mems = {**self.nixl_mems, "VRAM": self.nixl_mems["DRAM"], "cuda": self.nixl_mems["DRAM"]}

    cls.__init__, cls.vram_is_dram = __init__, True


def staging_on_cpu():
    """Let the staging path (CUDA and XPU only in SGLang) run on CPU tensors.

    Allows the device type, takes SGLang's own torch gather/scatter, and gives
    torch.cpu the streams and events it lacks: no-ops, since CPU work is synchronous.
    """
    import torch
    import sglang.srt.disaggregation.common.staging_buffer as buffer
    import sglang.srt.disaggregation.common.staging_handler as handler

    class Stream:
        device = torch.device("cpu")

        def synchronize(self):
            pass

        def wait_stream(self, other):
            pass

        def wait_event(self, event):
            pass

    class Event:
        def record(self, stream=None):
            pass

        def query(self):
            return True

        def synchronize(self):
            pass

    buffer._USE_TRITON_STAGING = False
    buffer._check_kv_on_staging_device = lambda *a: None  # "cpu" against "cpu:0"
    buffer._STAGING_SUPPORTED_DEVICE_TYPES = (*buffer._STAGING_SUPPORTED_DEVICE_TYPES, "cpu")
    for module in (buffer, handler):
        module.create_device_stream = lambda device: Stream()
        module.device_stream_context = lambda stream: contextlib.nullcontext()
    handler.create_device_event = lambda device: Event()
    torch.cpu.current_stream = lambda device=None: Stream()
