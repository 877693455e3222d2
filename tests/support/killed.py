"""Do work in a forked process that is killed at one of its file operations, and repeat it after each such kill."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process, and return its exit status (-9: killed)."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_me_at(moment: int, folder: Path | None = None) -> None:
    """SIGKILL this process at its n-th file operation from now on (open, rename, make, remove).

    With ``folder``, only operations on what lies in it count.
    """
    left = [moment]

    def count(event: str, arguments: tuple) -> None:
        if event not in OPERATIONS:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else ""
        if folder is None or path.startswith(str(folder)) or not os.path.isabs(path):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, hidden ones too, and every empty folder."""
    inside = folder.rglob("*")
    return {str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes() for path in inside}


def must_succeed(command: Callable[[], int]) -> None:
    assert command() == 0


def after_each_kill(
    command: Callable[[], int], folder: Path, same: Callable[[Path], object] = contents, every: int = 1
) -> tuple[int, list[int]]:
    """The number of file operations of ``command`` in ``folder``, and those after whose kill a repeat is not the same.

    The same: exit code 0, and the result of ``same``, by default all files of ``folder``, is that of a command without
    a kill. Only each ``every``-th operation is tried. The folder is left as the last command left it.
    """
    start = shutil.copytree(folder, folder.with_name(f"{folder.name}-start"), symlinks=True)
    assert in_child(lambda: must_succeed(command)) == 0
    whole, wrong = same(folder), []
    for moment in range(1, 500, every):
        shutil.rmtree(folder)
        shutil.copytree(start, folder, symlinks=True)
        killed = in_child(lambda moment=moment: (kill_me_at(moment, folder), command()))
        if killed == 0:
            return moment - 1, wrong
        assert killed == -signal.SIGKILL
        if in_child(lambda: must_succeed(command)) != 0 or same(folder) != whole:
            wrong.append(moment)
    raise AssertionError("more than 500 file operations")
