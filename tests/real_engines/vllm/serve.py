"""vLLM's own HTTP server: ``python serve.py ARGUMENTS``. It and all its processes end when its standard input does.

So it never outlives whoever started it. It must be the first of its process group.
"""

import os
import runpy
import signal
import sys
from threading import Thread


def watch() -> None:
    """End the whole group when standard input is closed."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    assert os.getpgid(0) == os.getpid()
    Thread(target=watch, daemon=True).start()
    sys.path.pop(0)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
