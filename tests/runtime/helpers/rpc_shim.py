"""The shim process of the tests of calls: ``python -m rpc_shim tcp|http`` reads its credential from standard input and prints its port."""

import os
import sys
import threading
import time

from tandem.runtime.rpc.http_server import HttpServer
from tandem.runtime.rpc.rpc_server import RpcServer

if __name__ == "__main__":

    def wait(meta, blobs, progress):
        progress({"pid": os.getpid()})
        time.sleep(meta["seconds"])
        return {"slept": meta["seconds"]}, {}

    kind = {"tcp": RpcServer, "http": HttpServer}[sys.argv[1]]
    server = kind({"wait": wait}, sys.stdin.readline().strip(), name="trainer shim", heartbeat_s=0.1)
    server.start()
    print(server.port, flush=True)
    threading.Event().wait()
