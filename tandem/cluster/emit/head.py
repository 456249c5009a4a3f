"""What the head node of a training topology runs, beside the job scheduler: etcd for the cluster manager, and what watches over runs."""

import shlex
from pathlib import Path

from tandem.cluster.emit.scripts import script

ETCD_PORT, ETCD_USER = 2379, "tandem"
PASSWORD = "etcd.password"


def head_script(head: str, shared: Path) -> str:
    """Returns ``head.sh``, which runs until it is ended. ``head``: the name under which other nodes reach it. ``shared``: the folder that all nodes have."""
    place = shlex.quote(str(shared))
    return script(
        f"# Runs on the head node '{head}' beside the job scheduler, until it is ended: etcd (cluster manager), and Prometheus with the alerts.",
        "set -eu", f"shared={place}", 'mkdir -p "$shared/runs" "$shared/targets" "$shared/logs" "$shared/observability"',
        '[ -d "$shared/head" ] || mkdir -m 700 "$shared/head"',
        "# Data of etcd is on a disk of this node: it flushes every write.",
        'data=${TANDEM_ETCD_DATA:-/var/lib/tandem/etcd}', 'mkdir -p "$data"',
        f'etcd --name=head --data-dir="$data" --listen-client-urls=http://0.0.0.0:{ETCD_PORT} --advertise-client-urls=http://{head}:{ETCD_PORT} \\',
        '    --listen-peer-urls=http://127.0.0.1:2380 --log-level=warn > "$shared/logs/etcd.out" 2>&1 &',
        "etcd=$!", "up=", 'end() { trap "" TERM INT; trap - EXIT; kill -TERM "$etcd" $up 2>/dev/null || true; wait; exit "$1"; }',
        'trap "end 0" TERM INT', 'trap "end 1" EXIT',
        f'ask() {{ etcdctl --endpoints=http://127.0.0.1:{ETCD_PORT} "$@"; }}',
        "# Any host on the network can reach it, so it asks for a password, which runs read from the shared folder.",
        f'if [ ! -e "$shared/head/{PASSWORD}" ]; then',
        '    until ask endpoint health > /dev/null 2>&1; do kill -0 "$etcd" || exit 1; sleep 0.2; done',
        f'    (umask 077; head -c 32 /dev/urandom | base64 | tr -d "+/=\\n" > "$shared/head/{PASSWORD}.new")',
        f'    for user in root {ETCD_USER}; do ask user add "$user:$(cat "$shared/head/{PASSWORD}.new")" > /dev/null; done',
        f"    ask user grant-role root root > /dev/null && ask role add {ETCD_USER} > /dev/null",
        f"    ask role grant-permission {ETCD_USER} readwrite --prefix=true /tandem/ > /dev/null",
        f"    ask user grant-role {ETCD_USER} {ETCD_USER} > /dev/null && ask auth enable > /dev/null",
        f'    mv "$shared/head/{PASSWORD}.new" "$shared/head/{PASSWORD}"',
        "fi",
        'tandem up observability --folder "$shared/observability" --targets-folder "$shared/targets" --runs-folder "$shared/runs" \\',
        '    --log-folder "$shared/logs" ${UP_OPTIONS:-} > "$shared/logs/observability.out" 2>&1 &', "up=$!",
        f'echo "etcd at http://{head}:{ETCD_PORT}; \'tandem dashboard {shared}/runs\' shows the runs"',
        # The first of them that ends: the administrator's service manager starts this script again.
        "wait -n || true", 'echo "a part of the head node has ended; see $shared/logs" >&2',
    )  # fmt: skip
