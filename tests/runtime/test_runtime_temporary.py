"""Temporary folders of killed owners, and files without a name."""

import signal
import subprocess
import sys
from pathlib import Path

from tandem.runtime.process.temporary import UnnamedFile, sweep_temporary, temporary_folder

OWNER = """
import sys, time
from pathlib import Path
from tandem.runtime.process.temporary import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_folder_of_an_owner_that_was_killed_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        (tmp_path / "tandem-of-somebody").mkdir()
        assert sweep_temporary(tmp_path) == [] and all((folder / "file").exists() for folder in folders)
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        with temporary_folder(tmp_path) as own:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folders[1].name, own.name, "tandem-of-somebody"])
        assert not own.exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()


def test_unnamed_file_is_written_and_read_by_other_processes_and_has_no_name(tmp_path: Path) -> None:
    file = UnnamedFile("output")
    for text in ("a", "b"):
        subprocess.run([sys.executable, "-c", f"open({str(file.path)!r}, 'a').write({text!r})"], check=True)
    assert file.read_text() == "ab" and "memfd" in str(file.path.readlink())
    file.close()
    assert not file.path.exists()
