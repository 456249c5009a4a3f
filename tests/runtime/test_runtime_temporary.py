"""Temporary folders of killed owners, and files without a name."""

import os
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


def test_the_temporary_folder_is_pythons_choice_and_nothing_is_written_to_find_it(tmp_path: Path) -> None:
    code = (
        "import tempfile, sys; from tandem.runtime.process.temporary import choose_temporary_folder\n"
        "class Names:\n    def __next__(self): sys.exit('a file was written')\n"
        "choose_temporary_folder(); tempfile._get_candidate_names = Names; print(tempfile.gettempdir())"
    )
    for given in (str(tmp_path), "", str(tmp_path / "missing")):
        environment = {name: value for name, value in os.environ.items() if name not in ("TEMP", "TMP")} | {"TMPDIR": given}
        python = subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], env=environment, capture_output=True, text=True)
        ours = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (ours.stdout, ours.stderr) == (python.stdout, "")
