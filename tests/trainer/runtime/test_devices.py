"""Devices and the compilation cache, each in a process of its own: JAX starts once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that has `prepare` and `jax`."""
    head = """
    import jax
    from meshwright.trainer.config import Config, DeviceConfig, TrainConfig
    from meshwright.trainer.runtime.devices import prepare_devices

    def prepare(**settings):
        try:
            prepare_devices(
                Config(device=DeviceConfig(**settings), train=TrainConfig(batch_size=120))
            )
        except ValueError as error:
            print(error)
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_compilation_cache_is_in_the_user_s_cache_folder(tmp_path):
    """Four devices are simulated, and what they compile is kept; JAX keeps it if it took long."""
    code = """
    prepare(cpu_devices=4)
    print(jax.device_count(), jax.default_backend(), jax.config.jax_compilation_cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.jit(lambda x: x + 1)(1).block_until_ready()
    """
    folder = tmp_path / "meshwright" / "xla"
    assert run(code, XDG_CACHE_HOME=str(tmp_path)) == f"4 cpu {folder}\n"
    assert list(folder.iterdir())


@pytest.mark.parametrize("choice", ["'here'", "None"])
def test_the_compilation_cache_is_elsewhere_or_off(choice):
    code = f"""
    prepare(platform="cpu", compile_cache={choice})
    print(jax.config.jax_compilation_cache_dir)
    """
    assert run(code) == choice.strip("'") + "\n"


def test_what_jax_started_differently_cannot_be_changed():
    code = """
    prepare(cpu_devices=2)
    prepare(cpu_devices=2)
    prepare(cpu_devices=3)
    prepare(platform="tpu")
    prepare(platform="cpu")
    print(jax.device_count())
    """
    assert run(code).splitlines() == [
        "device.cpu_devices=3: JAX has already started in this process with 2 cpu device(s); "
        "simulate before first use, or restart",
        "device.platform=tpu: JAX has already started on cpu",
        "2",
    ]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="there may be a TPU")
def test_a_platform_that_is_not_there():
    (line,) = run('prepare(platform="tpu")').splitlines()
    assert line.startswith("device.platform=tpu: ")
    assert "tpu" in line.removeprefix("device.platform=tpu: ")


def test_a_gpu_that_is_not_there_is_one_line():
    code = (
        "from meshwright.trainer.cli import main; import sys; sys.exit(main(['train', 'tiny', "
        "'device.cpu_devices=null', 'device.platform=gpu', 'mesh.data=-1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("jax_enable_x64", "1", False),
        ("jax_disable_jit", "1", False),
        ("jax_numpy_dtype_promotion", "strict", "standard"),
        ("jax_default_prng_impl", "rbg", "threefry2x32"),
        ("jax_threefry_partitionable", "0", True),
        ("jax_random_seed_offset", "5", 0),
    ],
)
def test_settings_of_jax_that_change_a_run_are_refused(name, value, needed):
    code = "prepare(platform='cpu'); print(jax.config.jax_platforms)"
    line, platforms = run(code, **{name.upper(): value}).splitlines()
    assert line.startswith(f"{name}=")
    assert f"needs {name}={needed}; unset the variable {name.upper()}" in line
    assert platforms == "None"  # nothing has started


def test_without_any_home_the_user_is_told_what_to_set():
    code = """
    import os, pwd
    del os.environ["HOME"]
    def unknown(uid):
        raise KeyError(uid)
    pwd.getpwuid = unknown
    os.environ.pop("XDG_CACHE_HOME", None)
    prepare(platform="cpu")
    prepare(platform="cpu", compile_cache=None)
    print("started")
    """
    said, started = run(code).splitlines()
    assert said.startswith("HOME is not set and the system knows no home folder of this user: set")
    assert started == "started"


def test_fewer_devices_than_stated_say_how_to_simulate_them():
    lines = run("prepare(cpu_devices=2, count=4)")
    assert lines == (
        "device.count=4, but JAX finds 2 device(s) in 1 process(es); device.cpu_devices=4 "
        "simulates 4 in one process, and meshwright plan with --target needs none\n"
    )
