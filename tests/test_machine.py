"""The questions of the doctor really reach the libraries, ports, commands and packages of a machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from config import load_config
from plan import machine
from plan.machine import Machine

ROOT = Path(__file__).parents[1]


def test_library_and_port_are_really_tried() -> None:
    assert "no_such_library" in machine.library_error("no_such_library.so")
    with socket.socket() as server:
        # Nobody else gets a bound port, and whoever sets this option too, as port_is_free does, can listen on it.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 0))
        port = server.getsockname()[1]
        assert machine.port_is_free(port)
        server.listen(1)
        assert not machine.port_is_free(port)


def test_a_command_that_is_not_there_or_hangs_is_an_answer() -> None:
    assert machine.run_command(["no-such-command"])[0] == 127
    assert machine.run_command([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2)[0] == 124
    assert machine.run_command([sys.executable, "-c", "print(1)"]) == (0, "1\n")
    assert machine.installed_version("torch").endswith("+cpu") and machine.installed_version("no-such-package") is None


def test_file_of_a_package_is_read_without_importing_it(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "vllm_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('libhccl.so')")
    (folder / "_build_info.py").write_text("__device_type__ = 'A3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.package_file("vllm_of_a_test", "_build_info.py") == "__device_type__ = 'A3'\n"
    assert machine.package_file("vllm_of_a_test", "other.py") is None
    assert machine.package_file("no_such_package", "_build_info.py") is None


@pytest.mark.parametrize(
    ("node", "variable", "device", "kind"),
    [
        ("davinci0", {}, "auto", "npu"),
        ("nvidia0", {}, "auto", "cuda"),
        ("null", {}, "auto", "cpu"),
        ("davinci0", {}, "cpu", "cpu"),
    ],
)
def test_kind_of_machine(node, variable, device, kind, tmp_path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / node).touch()
    cfg = load_config(ROOT / "configs" / "tiny_cpu.yaml", [f"device={device}"])
    assert Machine(run=cfg, root=tmp_path, env=variable).kind == kind
