"""The composed `deepspeed` command."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher.runner import parse_args

from ds_pretrain.core.errors import InputError
from ds_pretrain.launch import command as command_module
from ds_pretrain.launch.command import Command, compose, count_gpus, find_free_port
from ds_pretrain.launch.hostfile import Host

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated virtual environment
CPU = {"PATH": PATH, "DS_ACCELERATOR": "cpu", "HOME": "/nonexistent"}
TWO_GPUS = {"PATH": PATH, "CUDA_VISIBLE_DEVICES": "2,5", "HOME": "/nonexistent"}


def understood(command: Command) -> Any:
    """The command as DeepSpeed's own parser reads it."""
    return parse_args(list(command.argv[1:]))


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


@pytest.fixture
def pdsh(tmp_path: Path) -> dict[str, str]:
    """An environment in which pdsh can be found."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/pdsh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {**CPU, "PATH": f"{tmp_path / 'bin'}:{PATH}"}


def test_one_host_gets_its_ranks_the_module_the_run_file_and_the_overrides_last() -> None:
    command = compose("run.toml", ["schedule.peak_lr=2e-4", "name=a b"], ranks=2, environment=CPU)
    assert command.argv[0].endswith("/deepspeed")
    assert Path(command.argv[0]).parent == Path(sys.executable).parent
    assert command.argv[-4:] == ("ds_pretrain.train", "run.toml", "schedule.peak_lr=2e-4", "name=a b")
    args = understood(command)
    assert (args.module, args.user_script, args.num_gpus) == (True, "ds_pretrain.train", 2)
    assert args.user_args == ["run.toml", "schedule.peak_lr=2e-4", "name=a b"]
    assert command.hosts == (Host("localhost", 2),)
    assert not command.over_ssh


def test_flags_reach_the_ranks_behind_the_overrides() -> None:
    command = compose("run.toml", ["seed=1"], flags=["--stop-after", "6", "--trust-pickle"], environment=CPU)
    assert understood(command).user_args == ["run.toml", "seed=1", "--stop-after", "6", "--trust-pickle"]


def test_a_host_without_gpus_trains_one_cpu_rank_and_says_so_to_deepspeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_module, "count_gpus", lambda environment: 0)
    command = compose("run.toml", environment={"PATH": PATH})
    assert understood(command).num_gpus == 1
    cores = len(os.sched_getaffinity(0))
    assert command.environment == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(cores)}
    many = compose("run.toml", ranks=10 * cores, environment={"PATH": PATH})
    assert many.environment["OMP_NUM_THREADS"] == "1"


def test_settings_that_a_person_made_are_kept() -> None:
    assert compose("run.toml", environment={**CPU, "OMP_NUM_THREADS": "7"}).environment == {}


def test_the_tools_of_this_python_come_first_on_the_path(tmp_path: Path, pdsh: dict[str, str]) -> None:
    own = str(Path(sys.executable).parent)
    expected = f"{own}:/usr/bin:/bin"
    assert compose("run.toml", environment={**CPU, "PATH": "/usr/bin:/bin"}).environment["PATH"] == expected
    assert "PATH" not in compose("run.toml", environment={**CPU, "PATH": expected}).environment
    several = compose("run.toml", hostfile=hostfile(tmp_path, "a slots=1\nb slots=1\n"), environment=pdsh)
    assert several.forwarded["PATH"] == f"{own}:{pdsh['PATH']}"


def test_all_visible_gpus_are_used_and_exactly_those() -> None:
    assert understood(compose("run.toml", environment=TWO_GPUS)).include == "localhost:2,5"
    one = compose("run.toml", ranks=1, environment=TWO_GPUS)
    assert understood(one).include == "localhost:2"
    assert one.environment == {}
    assert one.hosts == (Host("localhost", 1),)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InputError, match=r"--ranks 3, but this host offers 2 GPU\(s\); give at most 2"):
        compose("run.toml", ranks=3, environment=TWO_GPUS)


def test_device_names_that_the_launcher_cannot_read_are_refused() -> None:
    with pytest.raises(InputError, match="the launcher takes device numbers only, not 'GPU-8a2f'"):
        compose("run.toml", environment={**TWO_GPUS, "CUDA_VISIBLE_DEVICES": "GPU-8a2f"})


def test_gpus_are_counted_without_torch() -> None:
    assert count_gpus({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0"}) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert count_gpus({"DS_ACCELERATOR": "hpu"}) is None


def test_gpus_without_device_files_are_counted_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: x)'\necho 'GPU 1: H100 (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert count_gpus({"PATH": os.environ["PATH"]}) == 2
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0"), Path("/dev/nvidiactl")])
    )
    assert count_gpus({"PATH": os.environ["PATH"]}) == 1


def test_no_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="--ranks 0: give 1 or more"):
        compose("run.toml", ranks=0, environment=CPU)


def test_several_hosts_get_the_hostfile_and_quoted_overrides(tmp_path: Path, pdsh: dict[str, str]) -> None:
    path = hostfile(tmp_path, "a slots=2\nb slots=2\n")
    command = compose(
        "run.toml",
        ['sources.web="x y"', "name='q'"],
        hostfile=path,
        ranks=4,
        master_addr="10.0.0.1",
        master_port=2345,
        ssh_port=2222,
        environment={**pdsh, "GLOO_SOCKET_IFNAME": "eth0", "WANDB_API_KEY": "secret"},
    )
    args = understood(command)
    assert (args.hostfile, args.master_addr, args.master_port, args.ssh_port) == (
        str(path),
        "10.0.0.1",
        2345,
        2222,
    )
    assert (args.num_gpus, args.force_multi, args.log_level) == (-1, False, "critical")
    assert args.user_args == ["run.toml", 'sources.web="x y"', "'name='\"'\"'q'\"'\"''"]
    assert command.hosts == (Host("a", 2), Host("b", 2))
    assert command.over_ssh
    assert command.forwarded["GLOO_SOCKET_IFNAME"] == "eth0"
    cores = len(os.sched_getaffinity(0))
    assert command.forwarded["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert command.withheld == ("WANDB_API_KEY",)
    assert "secret" not in repr(command)


def test_p46_ranks_that_differ_from_the_hostfile_are_refused(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=1\nb slots=1\n")
    with pytest.raises(InputError, match=r"--ranks 16, but hostfile .* has 2 slots on 2 host\(s\)"):
        compose("run.toml", ranks=16, hostfile=path, environment=CPU)


def test_p46_a_missing_hostfile_ends_the_launch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        compose("run.toml", hostfile=tmp_path / "absent", environment=CPU)


def test_p46_a_hostfile_that_deepspeed_would_take_unasked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "_IMPLICIT_HOSTFILE", hostfile(tmp_path, "a slots=1\n"))
    with pytest.raises(InputError, match="`deepspeed` would use it unasked; give --hostfile"):
        compose("run.toml", environment=CPU)


def test_a_single_remote_host_is_not_mistaken_for_this_one(tmp_path: Path, pdsh: dict[str, str]) -> None:
    command = compose("run.toml", hostfile=hostfile(tmp_path, "far slots=2\n"), environment=pdsh)
    assert understood(command).force_multi
    assert command.over_ssh


@pytest.mark.parametrize("name", ["localhost", socket.gethostname()])
def test_a_hostfile_of_this_host_alone_needs_no_ssh(name: str, tmp_path: Path) -> None:
    path = hostfile(tmp_path, f"{name} slots=2\n")
    args = understood(command := compose("run.toml", hostfile=path, environment=CPU))
    assert (args.hostfile, args.no_ssh_check, args.master_addr) == (str(path), True, "127.0.0.1")
    assert not command.over_ssh
    with pytest.raises(InputError, match=r"slots=2, but this host offers 1 GPU\(s\)"):
        compose("run.toml", hostfile=path, environment={**TWO_GPUS, "CUDA_VISIBLE_DEVICES": "0"})


def test_all_that_keeps_other_hosts_from_starting_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with blank"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = hostfile(tmp_path, "a slots=1\nb slots=1\n")
    with pytest.raises(InputError) as caught:
        compose("r.toml", hostfile=path, master_addr="127.0.0.1", environment={**CPU, "PATH": str(tmp_path)})
    folder_problem, address_problem, pdsh_problem = caught.value.problems
    assert "current folder" in folder_problem
    assert "other hosts cannot reach it" in address_problem
    assert "pdsh is not installed" in pdsh_problem


def test_a_missing_launcher_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InputError, match=r"`deepspeed` is neither beside .* nor on PATH; install it"):
        compose("run.toml", environment={**CPU, "PATH": str(tmp_path)})
    (tmp_path / "deepspeed").write_text("#!/bin/sh\n")
    (tmp_path / "deepspeed").chmod(0o755)
    monkeypatch.setattr(command_module.sys, "executable", "/elsewhere/python")
    found = compose("run.toml", environment={**CPU, "PATH": str(tmp_path)}).argv[0]
    assert found == shutil.which("deepspeed", path=str(tmp_path))


def test_p48_a_busy_port_is_passed_over_or_refused_with_a_free_one() -> None:
    with socket.create_server(("", 0)) as server:
        busy = server.getsockname()[1]
        free = find_free_port(None, busy)
        assert free > busy
        with pytest.raises(InputError, match=rf"master port {busy} is in use on this host.*; \d+ is free"):
            compose("run.toml", master_port=busy, environment=CPU)
    assert find_free_port(busy, 1) == busy
    assert understood(compose("run.toml", master_port=busy, environment=CPU)).master_port == busy


def test_composing_imports_neither_torch_nor_deepspeed() -> None:
    code = "import sys, ds_pretrain.launch.run; print(sorted({'torch', 'deepspeed'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
