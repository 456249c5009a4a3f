"""A shim for the tests of the control channel: reads its credential from standard input and prints its port."""

import os
import sys
import time

from tandem.runtime.rpc_server import RpcServer

if __name__ == "__main__":

    def wait(meta, blobs, progress):
        progress({"pid": os.getpid()})
        time.sleep(meta["seconds"])
        return {"slept": meta["seconds"]}, {}

    server = RpcServer({"wait": wait}, sys.stdin.readline().strip(), name="trainer shim", heartbeat_s=0.1)
    print(server.port, flush=True)
    server.serve_forever()
