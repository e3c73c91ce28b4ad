"""SGLang 0.5.23's own disaggregation classes as a test peer on host memory.

``python -m sglang_peer prefill|decode|bootstrap|bench|suite|serve``: see
README.md next to this package.  No SGLang file is edited; ``shims`` and
``stubs`` hold everything that differs from a host with a GPU.
"""
