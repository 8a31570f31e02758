"""llama.cpp's own HTTP server as a process: ``python server.py MODEL.gguf PORT CONTEXT SLOTS``.

It ends when its standard input does.
"""

import sys

import xllamacpp


def main(model: str, port: str, context: str, slots: str) -> None:
    """Serve on loopback until standard input is closed, so that it never outlives whoever started it."""
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.model_alias = {"tiny"}
    settings.hostnames = ["127.0.0.1"]
    settings.port = int(port)
    settings.n_ctx = int(context) * int(slots)
    settings.n_parallel = int(slots)
    settings.n_gpu_layers = 0
    settings.endpoint_metrics = True
    settings.endpoint_slots = True
    settings.use_jinja = True
    settings.warmup = False
    settings.cpuparams.n_threads = 1
    settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
