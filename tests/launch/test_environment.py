"""Variables for the ranks on other hosts arrive byte for byte, or are refused by name."""

import re
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.redact import is_secret
from ds_pretrain.launch.environment import (
    format_environment_file,
    is_unsafe_path,
    quote_for_remote_shell,
    read_environment_file,
    select_variables,
)

HARD = [
    "plain",
    "",
    "two words",
    "a=b=c",
    "[1,2]",
    '{"a": "b"}',
    "it's",
    "$HOME ${HOME} $(id) `id`",
    "$HOME",
    "back\\slash \\\\ \\n \\",
    'quote"d',
    '\\" \\',
    "100% %n %h %%",
    "%n",
    "a;b&c|d>e<f",
    "*?~!#",
    "~/x",
    "größe",
    "tab\tinside",
]


def runner(*user_args: str) -> PDSHRunner:
    return PDSHRunner(Namespace(user_args=list(user_args), user_script="module", launcher="pdsh"), "")


def through_pdsh_and_ssh(line: str) -> bytes:
    """What the shell of another host prints for a command line that pdsh was given."""
    replaced = re.sub("%(.)", lambda found: "%" if found[1] == "%" else "REPLACED", line)
    return subprocess.run(["bash", "-c", replaced], check=True, capture_output=True).stdout


@pytest.mark.parametrize("value", HARD)
def test_p47_values_arrive_byte_for_byte_through_deepspeeds_own_quoting(value: str, tmp_path: Path) -> None:
    line = format_environment_file({"HARD": value})
    deepspeed = runner()
    for entry in line.splitlines():  # as deepspeed/launcher/runner.py reads the file
        deepspeed.add_export(*entry.split("=", maxsplit=1))
    exports = "".join(f"export {name}={text}; " for name, text in deepspeed.exports.items())
    assert through_pdsh_and_ssh(exports + 'printf %%s "$HARD"') == value.encode()


@pytest.mark.parametrize("word", HARD)
def test_p47_overrides_arrive_byte_for_byte_through_deepspeeds_own_quoting(word: str) -> None:
    arguments = runner(quote_for_remote_shell(word)).user_arguments
    assert through_pdsh_and_ssh(" ".join(["printf '%%s|'", *arguments, "end"])) == f"{word}|end|".encode()


@pytest.mark.parametrize("value", ["two\nlines", "carriage\rreturn", " blank before", "blank after "])
def test_p47_a_value_that_cannot_arrive_unchanged_is_refused_by_name_alone(value: str) -> None:
    with pytest.raises(InputError, match="environment variable HF_HOME cannot be sent") as caught:
        select_variables({"HF_HOME": value}, Path("/nowhere"))
    assert value.strip() not in str(caught.value)


def test_p47_an_override_with_a_line_break_is_refused() -> None:
    with pytest.raises(InputError, match="a line break cannot be sent to other hosts"):
        quote_for_remote_shell("name=a\nb")


def test_only_what_ranks_need_leaves_this_host(tmp_path: Path) -> None:
    needed = {
        "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
    }
    kept = {"HOME": str(tmp_path), "LANG": "C", "CUDA_VISIBLE_DEVICES": "0", "WANDB_SERVICE": "2-1-tcp-0"}
    shipped, withheld = select_variables({**needed, **kept}, tmp_path)
    assert shipped == {**needed, "PYTHONPATH": str(tmp_path)}
    assert withheld == ()


def test_the_current_folder_comes_first_on_the_python_path_of_the_hosts(tmp_path: Path) -> None:
    shipped, _ = select_variables({"PYTHONPATH": "/a b:/c"}, tmp_path)
    assert shipped == {"PYTHONPATH": f"{tmp_path}:/a b:/c"}


def test_p47_secrets_stay_here_unless_a_person_put_them_into_the_environment_file(tmp_path: Path) -> None:
    environment = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "MLFLOW_TRACKING_PASSWORD": "p", "HOME": "/nowhere"}
    shipped, withheld = select_variables(environment, tmp_path)
    assert withheld == ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY")
    assert not shipped.keys() & environment.keys()
    (tmp_path / ".deepspeed_env").write_text("WANDB_API_KEY=from file\n")
    shipped, withheld = select_variables(environment, tmp_path)
    assert shipped["WANDB_API_KEY"] == "from file"
    assert withheld == ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD")


def test_how_a_store_is_reached_goes_to_the_other_hosts_and_its_secrets_do_not(tmp_path: Path) -> None:
    plain = {
        "AWS_ENDPOINT_URL": "http://store:9000",
        "AWS_PROFILE": "train",
        "GOOGLE_CLOUD_PROJECT": "llama",
        "AZURE_STORAGE_ACCOUNT_NAME": "vault",
        "FSSPEC_S3_ENDPOINT_URL": "http://store:9000",
    }
    secret = {
        "AWS_SECRET_ACCESS_KEY": "a",
        "AWS_SESSION_TOKEN": "b",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountKey=c",
        "FSSPEC_S3": '{"secret": "d"}',
        "GOOGLE_APPLICATION_CREDENTIALS": "e",
    }
    shipped, withheld = select_variables(plain | secret, tmp_path)
    assert shipped.items() >= plain.items()
    assert withheld == tuple(sorted(secret))


def test_secrets_are_known_by_their_names() -> None:
    assert all(
        map(is_secret, ["WANDB_API_KEY", "HF_TOKEN", "X_SECRET", "aws_secret_access_key", "DB_PASSWORD"])
    )
    assert not any(map(is_secret, ["TOKENIZERS_PARALLELISM", "PATH", "HF_HOME", "NCCL_KEYRING"]))


def test_p47_environment_files_may_hold_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text('# cluster\n\nA=1\n  \nB = "x" $Y=z  \nC=\n')
    assert read_environment_file(path) == {"A": "1", "B": '"x" $Y=z', "C": ""}


def test_p47_bad_lines_of_an_environment_file_are_named_by_number_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("A=1\nsecretword\n2B=x\n")
    with pytest.raises(InputError) as caught:
        read_environment_file(path)
    assert len(caught.value.problems) == 2
    assert "line 2: expected KEY=VALUE" in str(caught.value)
    assert "secretword" not in str(caught.value)


def test_home_and_current_folder_and_ds_env_file_are_read_the_current_one_winning(tmp_path: Path) -> None:
    home, current = tmp_path / "home", tmp_path / "current"
    for folder, text in ((home, "A=home\nB=home\n"), (current, "B=current\n")):
        folder.mkdir()
        (folder / "my_env").write_text(text)
    shipped, _ = select_variables({"HOME": str(home), "DS_ENV_FILE": "my_env"}, current)
    assert (shipped["A"], shipped["B"]) == ("home", "current")


def test_paths_that_the_launcher_does_not_quote_must_be_plain() -> None:
    assert not is_unsafe_path("/home/me/ds_pretrain-1.0")
    assert all(map(is_unsafe_path, ["/a b", "/a'b", "/a$b", "/50%n", "/größe"]))
