"""Errors about TOML files name the file, the line, the key, what was found and what is allowed."""

import tempfile
from pathlib import Path

import pytest
from helpers.processes import unprivileged
from hypothesis import given
from hypothesis import strategies as st

from envbuild.catalog import toml
from envbuild.catalog.base import Base
from envbuild.catalog.data import data_root
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.site import SiteFile
from envbuild.catalog.stack import Stack
from envbuild.core.errors import ConfigurationError

STACK = (data_root() / "envs/stacks/mcore.toml").read_text()
BASE = (data_root() / "envs/bases/debian12.toml").read_text()
MATRIX = (data_root() / "envs/matrices/certify-quick.toml").read_text()
# Up to the second case: with one, `[[cases]]` may become `[cases]` and the text is still TOML.
ONE_CASE = MATRIX[: MATRIX.index("[[cases]]", MATRIX.index("[[cases]]") + 1)]


def refused(text: str, model: type) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        toml.parse(text, model, "file.toml")
    assert caught.value.fix
    return caught.value


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("model", "text", "old", "new", "expected"),
    [
        (Stack, STACK, "driver =", "drivr =",
         "drivr: unknown key; did you mean 'driver'? Allowed here: summary, driver, "),
        (Base, BASE, 'build = "cpu"', 'build = "cpu"\nzzz = 1', "torch.zzz: unknown key. Allowed here: build"),
        (Matrix, MATRIX, "router_topk = 2", "router_topk = 2, topk = 2",
         "models.moe.moe.topk: unknown key. Allowed here: num_experts, router_topk, "),
        (Stack, STACK, 'modules = ["torch"', 'module = ["torch"',
         "components.torch.module: unknown key; did you mean 'modules'? Allowed here: version, "),
        (Matrix, MATRIX, "virtual_pipeline = 2", "virtual_pipelines = 2",
         "cases[4].virtual_pipelines: unknown key; did you mean 'virtual_pipeline'? Allowed here: model, "),
        (Stack, STACK, 'driver = "mcore"', 'driver = "other"', "found 'other'; allowed: 'mcore'"),
        (Base, BASE, '"debian"', '"arch"', "distribution: found 'arch'; allowed: 'debian' or 'ubuntu'"),
        (Matrix, MATRIX, "[tolerance.fp32]", "[tolerance.fp9]", "tolerance.fp9: found 'fp9'"),
        (Base, BASE, '"3.11"', '"3"', "python.version: found '3'; must match"),
        (Base, BASE, 'release = "12"', "release = 12", "valid string; found 12"),
        (Base, BASE, 'release = "12"', "release = 2026-01-01", "valid string"),
        (Matrix, MATRIX, "steps = 5", 'steps = "5"', "valid integer; found '5'"),
        (Matrix, MATRIX, "steps = 5", "steps = true", "valid integer"),
        (Matrix, MATRIX, "tensor = 2", "tensor = 0", "cases[2].tensor: "),
        (Matrix, MATRIX, "loss_relative = 1e-5", "loss_relative = nan", "loss_relative"),
        (Matrix, MATRIX, "clip_grad_norm = 1.0", "clip_grad_norm = inf", "finite number"),
        (Stack, STACK, '"==2.13.0"', '"2.13"', "'2.13' is not a version specifier"),
        (Stack, STACK, '"==2.13.0"', '"==="', "'===' is not a version specifier"),
        (Matrix, ONE_CASE, "[[cases]]", "[cases]", "cases: input should be a valid array"),
    ],
)  # fmt: skip
def test_wrong_value_names_line_key_found_and_allowed(model, text, old, new, expected):
    text = changed(text, old, new)
    error = refused(text, model)
    line = line_of(text, new.splitlines()[-1])
    assert error.what.startswith(f"file.toml:{line}: ") or f"\nline {line}, " in error.why
    assert f"line {line}, " in error.why
    assert expected in error.why


def test_missing_key_of_a_table_names_the_line_of_the_table():
    text = changed(BASE, 'executable = "/usr/bin/python3.11"\n', "")
    assert (
        refused(text, Base).why
        == f"line {line_of(text, '[python]')}, python.executable: this key is required and missing"
    )


def test_all_problems_are_reported_at_once():
    error = refused(changed(changed(BASE, 'release = "12"', "release = 1"), "glibc", "glib"), Base)
    assert "3 things to correct" in error.what
    assert len(error.why.splitlines()) == 3


def test_list_item_that_contradicts_itself_names_the_line_of_its_header():
    error = refused(changed(STACK, '"host"', '"mars"'), Stack)
    line = line_of(STACK, "[[builds]]")
    assert error.what == f"file.toml:{line}: 1 thing to correct"
    assert error.why.startswith(f"line {line}, builds[0]: default_base 'mars' is not among bases ['debian12'")


def test_empty_list_where_something_is_needed():
    error = refused(changed(STACK, '["debian12", "ubuntu2204", "ubuntu2404"]', "[]"), Stack)
    assert "builds[0].bases: needs at least 1 item; has 0" in error.why


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("a = 1\nb = \nc = 2\n", 2, "b = "),
        ("a = 1\n[table\n", 2, "[table"),
        ("a = 1\na = 2\n", 2, "a = 2"),
        ('a = 1\nb = """\nnever closed\n', 3, "never closed"),
        ("= 1", 1, "= 1"),
    ],
)
def test_syntax_error_names_and_shows_the_line(text, line, shown):
    error = refused(text, Stack)
    assert error.what == f"file.toml:{line}: no valid TOML"
    assert error.why.endswith(shown)


WANTED = toml.Wanted("the file of stack x", why="Somebody named it.", fix="Write it.")


def unread(path):
    with pytest.raises(ConfigurationError) as caught:
        toml.load(path, Stack, WANTED)
    assert "[Errno" not in caught.value.why
    assert caught.value.why.endswith("Somebody named it.")
    return caught.value


def test_load_of_a_file_that_is_no_utf8_names_the_line(tmp_path):
    (tmp_path / "file.toml").write_bytes(b'# one\nsummary = "\xff"')
    error = unread(tmp_path / "file.toml")
    assert error.what == f"cannot read the file of stack x {tmp_path}/file.toml"
    assert error.why.startswith("Line 2 has a byte that is not UTF-8 (0xff).")
    assert "UTF-8" in error.fix


def test_load_of_a_folder(tmp_path):
    error = unread(tmp_path)
    assert error.what == f"the file of stack x {tmp_path} is not a file"
    assert error.why.startswith("It is a directory.")
    assert error.fix == "Write it."


def test_load_of_a_file_that_is_missing(tmp_path):
    error = unread(tmp_path / "file.toml")
    assert error.what == f"the file of stack x {tmp_path}/file.toml does not exist"
    assert error.fix == "Write it."
    (tmp_path / "link.toml").symlink_to("nowhere.toml")
    assert unread(tmp_path / "link.toml").why.startswith("It is a symbolic link to nowhere.toml, where no file is.")


def test_load_of_a_file_that_this_account_may_not_read():
    # pytest's folders are closed to others as a whole.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.toml"
        path.write_text("")
        path.chmod(0)
        path.parent.chmod(0o755)

        def action():
            error = unread(path)
            assert error.what == f"cannot read the file of stack x {path}"
            assert error.why.startswith("Permission denied.")
            assert "readable" in error.fix

        assert unprivileged(action) == 0


TEXT = '''\
top = 1
"quoted key" = 2
dotted.key = 3
text = """
[not a table]
key = "in a string"
"""
one_line = """x"""
raw = \'\'\'
[[neither]]
\'\'\'
after = 1
list = [
    "a = b",
]

[table] # comment
key = 1
[ table . "sub.table" ]
key = 1

[[items]]
name = "first"
[[items.inner]]
x = 1
[[items.inner]]
x = 2
[[items]]
name = "second"
[items.table]
key = 1
[[items.inner]]
x = 3
'''


@pytest.mark.parametrize(
    ("location", "part"),
    [
        (("top",), "top ="),
        (("quoted key",), "quoted key"),
        (("dotted", "key"), "dotted.key"),
        (("one_line",), "one_line"),
        (("after",), "after"),
        (("list",), "list ="),
        (("table",), "[table] #"),
        (("table", "sub.table"), '"sub.table"'),
        (("items", 0, "name"), '"first"'),
        (("items", 0, "inner", 0, "x"), "x = 1"),
        (("items", 0, "inner", 1, "x"), "x = 2"),
        (("items", 1, "name"), '"second"'),
        (("items", 1, "table", "key"), None),
        (("items", 1, "inner", 0, "x"), "x = 3"),
    ],
)
def test_line_numbers(location, part):
    actual = toml.line_numbers(TEXT)
    assert actual[location] == (line_of(TEXT, part) if part else line_of(TEXT, "[items.table]") + 1)


def test_line_numbers_take_nothing_from_inside_strings():
    actual = toml.line_numbers(TEXT)
    assert ("not a table",) not in actual
    assert ("neither", 0) not in actual
    assert ("key",) not in actual


@given(st.text())
def test_any_text_gives_a_model_or_our_error(text):
    try:
        toml.parse(text, SiteFile, "file.toml")
    except ConfigurationError as error:
        assert error.what.startswith("file.toml:")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PATH", "/bin", "may not set PATH"),
        ("PYTHONPATH", "{site_packages}", "may not set PYTHONPATH"),
        ("LD_PRELOAD", "/lib/x.so", "may not set LD_PRELOAD"),
        ("A-B", "x", "A-B"),
        ("A", "$HOME/x", "'$HOME/x'"),
        ("A", "{home}/x", "'{home}/x'"),
        ("A", "two words", "'two words'"),
        ("A", "", "''"),
    ],
)
def test_variables_that_may_not_be_set_are_refused(name, value, expected):
    error = refused(f"{STACK}\n[environment.{name}]\nvalue = {value!r}\nreason = 'why'\n", Stack)
    assert expected in error.what + error.why


def test_a_variable_has_a_reason():
    good = f"{STACK}\n[environment.CUDA_HOME]\nvalue = '{{site_packages}}/nvidia/cu13:{{venv}}'\nreason = 'why'\n"
    assert toml.parse(good, Stack, "file.toml").environment["CUDA_HOME"].reason == "why"
    for text in (good.replace("reason = 'why'\n", ""), good.replace("'why'", "''")):
        assert "reason" in refused(text, Stack).why


TAKEOVER = """
[takeover]
without = "a/b"
driver = "bridge"
lead = "lead"
reason = "why"

[takeover.components.lead]
uses = ["torch", "zzz"]  # one of them
"""


@pytest.mark.parametrize(
    ("old", "new", "marked", "expected"),
    [
        ("[components.torch]", '[components.torch]\nuses = ["megatron-core", "zzz"]  # here', "# here",
         "components.torch.uses: 'zzz': no component of the stack; components: torch, megatron-core"),
        ('target = "h200"', 'target = "cpu"  # again', "# again",
         "builds[2].target: target 'cpu' has an entry already"),
        ('bases = ["debian12"', 'bases = ["debian12", "debian12"', '"debian12", "debian12"',
         "builds[0].bases: 'debian12' is there twice"),
        ("[[builds]]", 'anchor = "torch"\n' + TAKEOVER + "[[builds]]", "# one of them",
         "takeover.components.lead.uses: 'zzz': no component of the stack"),
    ],
)  # fmt: skip
def test_value_that_does_not_belong_is_refused_where_it_is(old, new, marked, expected):
    text = changed(STACK, old, new)
    error = refused(text, Stack)
    line = line_of(text, marked)
    assert error.what.startswith(f"file.toml:{line}: 1 thing")
    assert error.why.startswith(f"line {line}, {expected}")
