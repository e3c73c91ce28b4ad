"""Fake modules for packages that SGLang imports at module level and that its
transfer classes never call on a CPU host.

A finder at the end of ``sys.meta_path``: no SGLang file is edited, an installed
package wins, and only `import` statements in SGLang's own files are answered
(transformers and others probe for the same packages and must not find them).
"""
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

STUBS = {"compressed_tensors", "tvm_ffi"}


class _Placeholder(type):
    """Attribute access, calls, subscripts and `|` give another placeholder; it
    can be a base class and a decorator."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _make(name)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __bool__(cls):
        return False

    def __call__(cls, *args, **kw):
        # used as a decorator: the decorated thing stays as it is
        if len(args) == 1 and not kw and isinstance(args[0], (types.FunctionType, type)):
            return args[0]
        if cls.__dict__.get("_stub"):
            return _make(cls.__name__ + "()")
        return super().__call__(*args, **kw)


def _make(name):
    return _Placeholder(name, (), {"_stub": True, "__module__": __name__})


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _make(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, sglang_dir):
        self.ours = (sglang_dir + os.sep, __file__)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in STUBS or not self._asked_by_sglang():
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def _asked_by_sglang(self):
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if "importlib" not in name:
                return name.startswith(self.ours)
            if "frozen" not in name:
                return False  # importlib.util.find_spec() or a metadata probe
            frame = frame.f_back
        return False

    def create_module(self, spec):
        module = _StubModule(spec.name)
        module.__version__ = "0.0.0"
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def install():
    """Idempotent; does nothing without SGLang (its import then says what is missing)."""
    if any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    sglang = importlib.util.find_spec("sglang")
    if sglang is not None and sglang.submodule_search_locations:
        sys.meta_path.append(_Finder(list(sglang.submodule_search_locations)[0]))
