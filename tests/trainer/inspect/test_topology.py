"""The topology that plan compiles for: --target, and simulated devices."""

from __future__ import annotations

import pytest

from meshwright.trainer.cli import main
from meshwright.trainer.config.load import load
from meshwright.trainer.inspect.topology import on_simulated_devices


def test_an_unknown_target_is_one_line(capsys):
    assert main(["plan", "tiny", "--target", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("meshwright: --target nowhere")


def test_the_target_cpu_simulates_the_mesh_that_is_meant():
    pod = load("llama3-8b", "mesh.fsdp=4")
    assert on_simulated_devices(pod).device.cpu_devices == 16
    assert on_simulated_devices(load("llama3-8b", "device.count=64")).device.cpu_devices == 64
    with pytest.raises(ValueError, match=r"^mesh.fsdp=-1: plan needs the number of devices"):
        on_simulated_devices(load("llama3-8b"))
