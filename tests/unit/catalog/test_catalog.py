"""Names are looked up in the user's envs/ first, then in the shipped one; commands get their defaults."""

from pathlib import Path

import pytest
from helpers.processes import unprivileged

from envbuild.catalog.catalog import Catalog, HostDistribution, definition_digest, select, stacks_like
from envbuild.catalog.data import data_root
from envbuild.core.digests import digest_of
from envbuild.core.errors import ConfigurationError, MachineError, UsageError

DEBIAN12 = HostDistribution(distribution="debian", release="12")
UBUNTU2404 = HostDistribution(distribution="ubuntu", release="24.04")
FEDORA = HostDistribution(distribution="fedora", release="42")


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    return Catalog.open(tmp_path)


def write(project: Path, kind: str, name: str, text: str) -> Path:
    path = project / "envs" / kind / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shipped(kind: str, name: str) -> str:
    return (data_root() / "envs" / kind / f"{name}.toml").read_text()


def test_own_definition_overrides(tmp_path):
    path = write(tmp_path, "targets", "cpu", shipped("targets", "cpu").replace("any x86-64 machine", "mine"))
    catalog = Catalog.open(tmp_path)
    assert catalog.path("targets", "cpu") == path
    assert catalog.target("cpu").summary.startswith("mine")
    assert catalog.names("targets").count("cpu") == 1


def test_open_in_the_checkout_lists_its_envs_once():
    assert Catalog.open(data_root()).folders == (data_root() / "envs",)


def test_unknown_name_suggests_and_lists(catalog):
    with pytest.raises(ConfigurationError, match="there is no base 'debian11'") as caught:
        catalog.base("debian11")
    assert "Did you mean 'debian12'?" in caught.value.why
    assert "ubuntu2204" in caught.value.why
    assert "envs/bases/debian11.toml" in caught.value.fix


@pytest.mark.parametrize("name", ["../stacks/mcore", "./cpu", "/cpu", "..", ".", "", "cpu/", "cpu.toml", "*", "cp?"])
def test_name_that_is_a_path_or_pattern_is_refused(catalog, name):
    with pytest.raises(ConfigurationError, match="there is no target"):
        catalog.target(name)


def test_file_whose_name_is_no_name_is_refused(tmp_path):
    write(tmp_path, "targets", "My CPU", shipped("targets", "cpu"))
    with pytest.raises(ConfigurationError, match="'My CPU' cannot be the name of a target") as caught:
        Catalog.open(tmp_path).target("My CPU")
    assert "Rename" in caught.value.fix


def test_names_leave_out_hidden_files(tmp_path):
    write(tmp_path, "targets", ".#cpu", "")
    assert ".#cpu" not in Catalog.open(tmp_path).names("targets")


def test_definition_digest_ignores_comments_order_and_defaults(tmp_path):
    text = 'platform = "linux/amd64"\ndevice = "cpu" # comment\nsummary = "x"\n'
    write(tmp_path, "targets", "one", text)
    write(tmp_path, "targets", "two", "".join(reversed(text.splitlines(keepends=True))))
    write(tmp_path, "targets", "three", text.replace('"x"', '"y"'))
    one, two, three = (definition_digest(Catalog.open(tmp_path).target(name)) for name in ("one", "two", "three"))
    assert one == two != three
    assert one == digest_of({"summary": "x", "device": "cpu", "platform": "linux/amd64"})


@pytest.mark.parametrize(
    ("machine", "base"), [(DEBIAN12, "debian12"), (UBUNTU2404, "ubuntu2404"), (FEDORA, "debian12")]
)
def test_select_default_base_is_this_machines_else_the_first(catalog, machine, base):
    assert select(catalog, "mcore", "cpu", None, machine).base_name == base


def test_select_default_base_of_the_stack(tmp_path):
    text = shipped("stacks", "mcore").replace('default_base = "host"', 'default_base = "ubuntu2204"')
    write(tmp_path, "stacks", "mine", text)
    assert select(Catalog.open(tmp_path), "mine", "cpu", None, DEBIAN12).base_name == "ubuntu2204"


@pytest.mark.parametrize("machine", [DEBIAN12, UBUNTU2404, FEDORA])
@pytest.mark.parametrize(("stack", "base"), [("nemo-2.7", "debian12-cu130"), ("bridge-0.6", "debian13-cu130")])
def test_default_base_of_a_shipped_lock_is_the_one_that_was_built(catalog, stack, base, machine):
    for entry in catalog.stack(stack).builds:
        assert select(catalog, stack, entry.target, None, machine).base_name == base
    assert not catalog.base(base).never_built


def test_neither_the_default_base_nor_what_was_built_makes_a_lock_old(tmp_path):
    """Both may change without a new lock: what is locked on a base is the same."""
    stack = shipped("stacks", "nemo-2.7")
    write(
        tmp_path,
        "stacks",
        "other",
        stack.replace('default_base = "debian12-cu130"', 'default_base = "ubuntu2204-cu130"'),
    )
    write(tmp_path, "stacks", "fewer", stack.replace('"ubuntu2204-cu130", ', ""))
    write(tmp_path, "bases", "mine", shipped("bases", "ubuntu2404-cu130").replace("never_built = true\n", ""))
    catalog = Catalog.open(tmp_path)
    digests = {name: definition_digest(catalog.stack(name)) for name in ("nemo-2.7", "other", "fewer")}
    assert digests["nemo-2.7"] == digests["other"] != digests["fewer"]
    bases = catalog.base("ubuntu2404-cu130"), catalog.base("mine")
    assert [base.never_built for base in bases] == [True, False]
    assert definition_digest(bases[0]) == definition_digest(bases[1])


def test_select_without_target_asks_and_lists(catalog):
    with pytest.raises(UsageError, match="no target") as caught:
        select(catalog, "mcore", None, None, DEBIAN12)
    assert "cpu" in caught.value.why
    assert "--target cpu" in caught.value.fix


GPU = 'summary = ""\ndevice = "cuda"\nsm = ["90"]\nplatform = "linux/amd64"\n'


def test_select_target_the_stack_is_not_for(tmp_path):
    write(tmp_path, "targets", "g9", GPU)
    with pytest.raises(ConfigurationError, match="stack mcore is not for target g9") as caught:
        select(Catalog.open(tmp_path), "mcore", "g9", None, DEBIAN12)
    assert "cpu" in caught.value.why


def test_select_base_the_stack_is_not_for(tmp_path):
    write(tmp_path, "bases", "mine", shipped("bases", "debian12"))
    with pytest.raises(ConfigurationError, match="not meant for base mine") as caught:
        select(Catalog.open(tmp_path), "mcore", "cpu", "mine", DEBIAN12)
    assert "debian12" in caught.value.why


def test_stacks_with_the_same_anchor_come_newest_first(tmp_path):
    for name in ("nemo-2.10", "nemo-10.1"):
        write(tmp_path, "stacks", name, shipped("stacks", "nemo-2.7"))
    assert stacks_like(Catalog.open(tmp_path), "nemo") == ["nemo-10.1", "nemo-2.10", "nemo-2.7", "nemo-2.3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=debian\nVERSION_ID="12"\n', ("debian", "12")),
        ("ID='ubuntu'\nVERSION_ID='24.04'\n", ("ubuntu", "24.04")),
        ('# comment\n\nPRETTY_NAME="a = b"\nID=arch\n', ("arch", "unknown")),
        ("", ("unknown", "unknown")),
    ],
)
def test_machine_reads_os_release(tmp_path, text, expected):
    (tmp_path / "os-release").write_text(text)
    machine = HostDistribution.here(tmp_path / "os-release")
    assert (machine.distribution, machine.release) == expected


@pytest.mark.parametrize("closed", ["", "envs/stacks"])
def test_folder_that_may_not_be_searched_is_named(open_dir, closed):
    folder = open_dir / "project" / closed
    folder.mkdir(parents=True)
    folder.chmod(0o000)
    data_root()

    def look() -> None:
        with pytest.raises(MachineError, match="no permission to read") as caught:
            Catalog.open(open_dir / "project").path("stacks", "mine")
        assert str(folder) in caught.value.what
        assert "ENVBUILD_CACHE_DIR" not in caught.value.fix

    assert unprivileged(look) == 0
    folder.chmod(0o700)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('matrix = "certify-quick"', 'matrix = "certify-quik"', "there is no matrix 'certify-quik'"),
        ('target = "cpu"', 'target = "cpus"', "there is no target 'cpus'"),
        ('"debian12"', '"debian21"', "there is no base 'debian21'"),
    ],
)
def test_names_in_a_stack_are_checked_when_it_is_selected(tmp_path, old, new, expected):
    text = shipped("stacks", "mcore")
    assert old in text
    path = write(tmp_path, "stacks", "mine", text.replace(old, new))
    line = next(number for number, line in enumerate(path.read_text().splitlines(), 1) if new in line)
    with pytest.raises(ConfigurationError) as caught:
        select(Catalog.open(tmp_path), "mine", "cpu", "ubuntu2404", DEBIAN12)
    assert caught.value.what == f"{path}:{line}: {expected}"
    assert f"Did you mean {old.split()[-1].strip(chr(34))!r}?" in caught.value.why
    assert "Known: " in caught.value.why


def test_strays_are_named_with_what_is_meant(tmp_path):
    for name in ("stakcs/mine.toml", "zzz/mine.toml", "mine.toml", "stacks/mine.toml", "venv/bin/x", ".git/x.toml"):
        (tmp_path / "envs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "envs" / name).write_text("")
    message = Catalog.open(tmp_path).strays()
    assert [line.split(" is not read. ")[0] for line in message] == [
        str(tmp_path / "envs" / name) for name in ("mine.toml", "stakcs", "zzz")
    ]
    assert "Did you mean 'stacks'? Definitions are in the folders stacks, bases, " in message[1]
    assert "Did you mean" not in message[2]
    assert Catalog.open(data_root()).strays() == []


POLICY = 'summary = "mine"\nmatrices = ["certify-quick"]\nmax_age_days = 3650\nwhole_matrix = false\n'


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("policies", "default", POLICY),
        # About versions that nobody locks, so that certificates would no longer name what trains wrongly.
        ("conflicts", "gathered-logits", shipped("conflicts", "gathered-logits").replace("0.14.0", "99")),
        # On a CPU no case for GPUs is left, and an A100 is no H200.
        ("targets", "h200", 'summary = "s"\ndevice = "cpu"\nplatform = "linux/amd64"\n'),
        ("targets", "h200", shipped("targets", "h200").replace('"90"', '"80"')),
    ],
)
def test_what_certificates_are_judged_by_is_not_replaced_by_a_file_of_a_shipped_name(tmp_path, kind, name, text):
    assert text != shipped(kind, name)
    path = write(tmp_path, kind, name, text)
    catalog = Catalog.open(tmp_path)
    read = {"policies": catalog.policy, "targets": catalog.target, "conflicts": lambda _: catalog.conflicts}[kind]
    with pytest.raises(ConfigurationError, match="envbuild ships a") as caught:
        read(name)
    assert str(path) in caught.value.what
    assert "Give the file another name." in caught.value.fix
    path.write_text(shipped(kind, name))
    assert read(name)
    path.write_text(text)
    path.rename(path.with_name("mine.toml"))
    assert read("mine")


def test_a_shipped_targets_driver_is_the_projects_to_change(tmp_path):
    write(tmp_path, "targets", "h200", shipped("targets", "h200") + '\ndriver = "1"\n')
    assert Catalog.open(tmp_path).target("h200").driver == "1"
