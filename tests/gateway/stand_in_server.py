"""Stands in for ``tandem serve`` where a test asks how servers are started, watched and ended: it starts in a tenth of a second and says its address as that
does. What is to happen follows from the model.

    python stand_in_server.py NAME MODEL SERVED_NAME WEIGHTS
"""

import asyncio
import sys
import time

import fault_backend


async def serve(name: str, model: str, served: str, weights: str) -> None:
    if "missing" in model:
        print(f"tandem: '{model}' does not exist; name a folder", flush=True)
        sys.exit(2)
    if "broken" in model:
        print("some line\nRuntimeError: out of memory", flush=True)
        sys.exit(1)
    if "deaf" in model:
        time.sleep(3600)
    backend = fault_backend.Backend(name, [served], weights)
    if model == "sick" or (model.startswith("sick but ") and model != f"sick but {name}"):
        backend.mode = "500"
    server = await asyncio.start_server(backend.connection, "127.0.0.1", 0, limit=2**24)
    print(f"tandem: loading '{model}'; http://127.0.0.1:{server.sockets[0].getsockname()[1]} answers probes meanwhile", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
