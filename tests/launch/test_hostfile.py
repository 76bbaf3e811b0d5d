"""The hostfile: DeepSpeed's grammar, read strictly."""

import socket
from collections import OrderedDict
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from ds_pretrain.core.errors import InputError
from ds_pretrain.launch.hostfile import Host, count_ranks, describe_hosts, find_host_of_rank, read_hostfile

REPOSITORY = Path(__file__).parents[2]

ACCEPTED = {
    "two hosts": ("a slots=8\nb slots=4\n", {"a": 8, "b": 4}),
    "blank lines and full-line comments": ("\n# hosts\n  # indented\n\na slots=8\n \t \n", {"a": 8}),
    "a trailing comment after a blank": ("a slots=8 # the new one\nb slots=2\t#x\n", {"a": 8, "b": 2}),
    "CRLF": ("a slots=8\r\n\r\nb slots=8\r\n", {"a": 8, "b": 8}),
    "tabs and extra blanks": ("  a\t \tslots=8  \nb   slots=1\t\n", {"a": 8, "b": 1}),
    "user@host": ("trainer@node-1.cluster slots=8\n", {"trainer@node-1.cluster": 8}),
    "addresses": ("10.0.0.1 slots=8\n10.0.0.2 slots=8", {"10.0.0.1": 8, "10.0.0.2": 8}),
    "no newline at the end": ("node_1 slots=16", {"node_1": 16}),
}

REJECTED = {
    "a slots=8\na slots=4": "line 2: 'a slots=4': 'a' is already on line 1; keep one",
    "x@a slots=8\ny@a slots=4": "line 2: 'y@a slots=4': 'a' is already on line 1; keep one",
    "a": "line 1: 'a': not understood; expected `name slots=N`, as in `node-0 slots=8`; the number of slots",
    "a 8": "line 1: 'a 8': not understood",
    "a slots=": "'' is not a whole number",
    "a slots=0": "line 1: 'a slots=0': a host without slots; give slots=1 or more, or remove the line",
    "a slots=eight": "line 1: 'a slots=eight': not understood",
    "a slots=2.5": "'2.5' is not a whole number",
    "a slots=-1": "'-1' is not a whole number",
    "a lots=8": "line 1: 'a lots=8': not understood; expected `name slots=N`, as in `node-0 slots=8`; no `",
    "a slots = 8": "no blanks around `=`",
    "a slots= 8": "no blanks around `=`",
    "a slots=8 max_slots=8": "only a comment may follow, after a blank",
    "a slots=8#x": "'8#x' is not a whole number",
    "a, slots=8": "'a,' is not a host name",
    "node[1-4] slots=8": "line 1: 'node[1-4] slots=8': 'node[1-4]' is not a host name",
    "@a slots=8": "'@a' is not a host name",
    "-oProxyCommand=x slots=8": "is not a host name",
    "fe80::1 slots=8": "'fe80::1' is not a host name",
    "\ufeffa slots=8": "is not a host name",
    "a\u00a0slots=8": "not understood",
    "a slots=8\nlocalhost slots=8": "'localhost' means another machine on each host",
    "127.0.0.1 slots=8\na slots=8": "'127.0.0.1' means another machine on each host",
    "": "has no host; expected `name slots=N`",
    "# only a comment\n\n": "has no host; expected `name slots=N`",
}


def write(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("case", ACCEPTED)
def test_p45_what_is_accepted_means_the_same_to_deepspeed(case: str, tmp_path: Path) -> None:
    text, expected = ACCEPTED[case]
    path = write(tmp_path, text)
    hosts = read_hostfile(path)
    assert [(host.name, host.slots) for host in hosts] == list(expected.items())
    assert fetch_hostfile(str(path)) == OrderedDict(expected)


@pytest.mark.parametrize("text", REJECTED)
def test_p45_what_is_rejected_is_quoted_with_its_line(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_hostfile(path)
    assert REJECTED[text] in str(caught.value)
    assert str(path) in str(caught.value)


def test_p45_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_hostfile(write(tmp_path, "a lots=8\nb slots=8\nc slots=0\nb slots=1\n"))
    numbers = [problem.split("line ")[1].split(":")[0] for problem in caught.value.problems]
    assert numbers == ["1", "3", "4"]


def test_p45_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_bytes(b"a slots=8 # \xff\n")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_hostfile(path)


def test_p46_a_missing_hostfile_is_an_error_where_deepspeed_goes_on_alone(tmp_path: Path) -> None:
    missing = tmp_path / "hostfiel"
    assert fetch_hostfile(str(missing)) is None
    with pytest.raises(InputError, match=r"hostfiel: cannot be read \(No such file or directory\); give an"):
        read_hostfile(missing)
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        read_hostfile(tmp_path)


def test_p46_the_description_lists_every_host_with_its_ranks() -> None:
    hosts = (Host("node-0", 8), Host("x@b", 1), Host("c", 2))
    expected = ["3 hosts, 11 ranks", "  node-0  ranks 0-7", "  x@b     rank 8", "  c       ranks 9-10"]
    assert describe_hosts(hosts).split("\n") == expected
    assert describe_hosts((Host("a", 1),)).startswith("1 host, 1 rank\n")


def test_ranks_are_counted_through_the_hosts_in_order() -> None:
    hosts = (Host("a", 2), Host("b", 3))
    assert count_ranks(hosts) == 5
    names = [host.name if (host := find_host_of_rank(hosts, rank)) else None for rank in range(6)]
    assert names == ["a", "a", "b", "b", "b", None]


def test_this_host_is_known_by_its_own_names_only() -> None:
    own = socket.gethostname()
    assert [Host(name, 1).is_here for name in ("localhost", "127.0.0.1", own)] == [True] * 3
    assert [Host(name, 1).is_here for name in (f"x@{own}", "elsewhere", "10.0.0.1")] == [False] * 3


@pytest.mark.parametrize("path", sorted((REPOSITORY / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_hostfiles_in_the_repository_can_be_read(path: Path) -> None:
    hosts = read_hostfile(path)
    assert fetch_hostfile(str(path)) == OrderedDict((host.name, host.slots) for host in hosts)
