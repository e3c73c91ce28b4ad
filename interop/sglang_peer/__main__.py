from sglang_peer import environment

environment.set_defaults()  # before numpy is imported: its BLAS starts threads, and a process with threads cannot fork safely

from sglang_peer.cli import main  # noqa: E402

main()
