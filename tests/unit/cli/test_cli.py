"""The command line as a user meets it: its output and its exit codes; real processes for streams and signals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from helpers.locks import make_lock
from helpers.stack_files import write_stack
from helpers.stores import keep_wheel
from unit.wheels.test_key import PARTS

from envbuild import __version__
from envbuild.catalog.data import data_root
from envbuild.catalog.models import KINDS
from envbuild.cli.commands import COMMANDS, help_text
from envbuild.cli.main import run
from envbuild.cli.report import as_json
from envbuild.cli.schema import ALL
from envbuild.core import process
from envbuild.core.errors import ERROR_CLASSES, BuildError, CertificationFailedError
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore

ENVBUILD = [sys.executable, "-m", "envbuild"]


def imported_by(*commands: str) -> set[str]:
    """The modules that a new interpreter has after some command lines."""
    code = "import sys; from envbuild.cli.main import run; [run(line.split()) for line in sys.argv[1:]]; "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_and_version_import_nothing_heavy():
    heavy = {"click", "pydantic", "rich", "tomlkit", "packaging", "uv", "urllib.request", "json", "asyncio"}
    assert heavy.isdisjoint(imported_by("--help", "-h", "", "--version"))


def test_commands_import_only_the_libraries_they_use(project):
    """No display without a terminal, and no store, daemon or ELF library where none is used."""
    heavy = {"rich", "uv", "obstore", "urllib3", "docker", "elftools", "auditwheel", "boto3"}
    lines = ["list stacks", "wheels list", "wheels push --help", "sync --help", "lock --help", "image --help"]
    record = next(data_root().glob("benchmarks/records/*/certificate.intoto.jsonl"))
    verify = f"certificate verify {record} --trust {record.with_name('trust.toml')}"
    assert not heavy & imported_by(*lines, verify)
    assert run(verify.split()) == 0


def test_empty_wheelhouse_names_the_commands_that_fill_it(project, capsys):
    assert run(["wheels", "list"]) == 0
    shown, message = capsys.readouterr()
    assert (message, shown.startswith("no wheels here: `envbuild wheels` builds")) == ("", True)
    assert run(["wheels", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"wheels": []}


def test_second_push_reports_there_already_and_reads_no_wheel(project, tmp_path, capsys):
    kept = keep_wheel(LocalStore(tmp_path / "cache", SilentReporter()), PARTS, tmp_path)
    (tmp_path / "share").mkdir()
    push = ["wheels", "push", "--all", "--store", f"file://{tmp_path}/share"]
    assert run(push) == 0
    assert "  pushed\n" in capsys.readouterr().out
    kept.wheel.unlink()
    kept.wheel.mkdir()
    assert run(push) == 0
    shown, message = capsys.readouterr()
    assert (message, f"{kept.record.file}  there already\n" in shown) == ("", True)


def test_push_of_nothing_to_a_missing_store_is_refused(project, tmp_path, capsys):
    push = ["wheels", "push", "--all", "--store", f"file://{tmp_path}/share"]
    assert run(push) == 10
    assert f"the store file://{tmp_path}/share cannot be reached" in capsys.readouterr().err
    (tmp_path / "share").mkdir()
    assert run(push) == 0
    assert capsys.readouterr().out == f"0 wheels, file://{tmp_path}/share\n"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--stack", "mcore", "--target", "h200", "--against", ""], 2, "--against belongs to --explain"),
        (["--stack", "k", "list"], 2, "options of `wheels list` come after its name"),
        (["show", ""], 3, "no wheel is named"),
        (["push"], 2, "which wheels are meant"),
        (["pull"], 2, "which wheels are meant"),
        (["push", PARTS.key, "--all"], 2, "which wheels are meant"),
        (["pull", PARTS.key, "--all"], 2, "which wheels are meant"),
    ],
)
def test_wheels_that_are_not_named_clearly_are_refused(project, capsys, arguments, code, expected):
    assert run(["wheels", *arguments]) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_names_every_command_and_exit_code(arguments, capsys):
    assert run(arguments) == 0
    shown, message = capsys.readouterr()
    assert message == ""
    assert shown == help_text()
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE)
    codes = {int(code) for code in re.findall(r"(?:^|[;:] |\n)(\d+) [a-z]", shown.split("Exit codes", 1)[1])}
    assert codes == {0, *(cls.exit_code for cls in ERROR_CLASSES)}
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_json_and_quiet(name, capsys):
    assert run([name, "--help"]) == 0
    shown, message = capsys.readouterr()
    assert message == ""
    assert f"Usage: envbuild {name} [OPTIONS]" in shown
    assert "--json" in shown
    assert "--quiet" in shown


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"envbuild {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["lokc"],
            ["no such command 'lokc'. Did you mean 'lock'?", f"Commands: {', '.join(COMMANDS)}", "envbuild --help"],
        ),
        (["zzz"], ["no such command 'zzz'. Commands: lock"]),
        (["--no-such"], ["No such option", "--no-such"]),
        (["lock", "--stak", "mcore"], ["No such option", "--stack", "envbuild lock --help"]),
        (["publish", "--output", "out"], ["No such option", "'--output'", "Did you mean '--out-dir'?"]),
        (["pull", "--out-dir", "out", "h/r:t"], ["Did you mean '--output'?"]),
        (["publish", "--polcy", "x"], ["Did you mean '--policy'?"]),
        (["gc", "--trust", "x"], ["No such option '--trust'.\n"]),
        (["lock", "extra"], ["unexpected extra argument", "envbuild lock --help"]),
        (["lock", "--stack"], ["'--stack' requires an argument"]),
        (["list"], ["Missing argument", "stacks"]),
        (["list", "stack"], ["'stack' is not one of 'stacks'"]),
        (["image", "--format", "tar"], ["'tar'", "oci, sqsh"]),
        (["image", "--target", "cpu", "--sqsh-compression", "xz"], ["'xz'", "zstd, lz4, lzo, gzip"]),
        (["image", "--target", "cpu", "--allow", "nonsense"], ["'nonsense' is not one of", "'world-writable'"]),
        (["certify", "--runtime", "docker"], ["'docker' is not one of"]),
        (["image", "--stack", "mcore"], ["no target was named", "--target cpu"]),
        (["image", "--target", "cpu", "--out-dir", ""], ["'--out-dir': it is empty"]),
        (["certify", "--target", "cpu", "--out-dir="], ["'--out-dir': it is empty"]),
        (["lock", "--out", ""], ["'--out': it is empty"]),
        (["sync", "--into", ""], ["'--into': it is empty"]),
        (["export", "--format", "pylock", "--output", ""], ["'--output': it is empty"]),
        (["schema", "--into", ""], ["'--into': it is empty"]),
    ],
)
def test_usage_error_names_what_is_allowed(project, arguments, expected, capsys):
    assert run(arguments) == 2
    shown, message = capsys.readouterr()
    assert shown == ""
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["lock", "--stack", "mcor", "--target", "cpu"], 3, "Did you mean 'mcore'?"),
        (["lock", "--stack", "mcore", "--target", "h900"], 3, "there is no target 'h900'"),
        (["lock", "--stack", "mcore", "--target", "cpu", "--base", "debian13"], 3, "there is no base 'debian13'"),
        (["image", "--stack", "mcore", "--target", "cpu", "--base", "../x"], 3, "there is no base '../x'"),
        (["certify", "--stack", "mcore", "--target", "cpu", "--matrix", "no", "--print-cases"], 3, "no matrix 'no'"),
        (["certify", "--stack", "mcore", "--target", "cpu", "--only", "no", "--print-cases"], 2, "no case 'no'"),
    ],
)
def test_unknown_names(project, arguments, code, expected, capsys):
    assert run(arguments) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["list", "no", "--json"], ["lock", "--stack", "no", "--json", "--target", "cpu"], ["no", "--json"]]
)
def test_json_error_is_one_object_on_stdout(project, arguments, capsys):
    code = run(arguments)
    shown, message = capsys.readouterr()
    error = json.loads(shown)["error"]
    assert set(error) == {"kind", "exit_code", "what", "why", "fix", "log", "known"}
    assert error["exit_code"] == code != 0
    assert error["what"]
    assert error["known"] == []
    assert message.startswith("error: ")


def test_known_failure_is_named_with_its_cure(project, capsys):
    """The signature is found in the explanation of a user's own broken file."""
    stack = project / "envs" / "stacks" / "mine.toml"
    stack.parent.mkdir(parents=True)
    stack.write_text("x = \"ModuleNotFoundError: No module named 'torch'\" y\n")
    assert run(["lock", "--stack", "mine", "--target", "cpu", "--json"]) == 3
    shown, message = capsys.readouterr()
    assert [known["id"] for known in json.loads(shown)["error"]["known"]] == ["BI01"]
    assert "known failure BI01" in message


@pytest.mark.parametrize(("order", "known"), [("21", []), ("12", ["BI01"]), ("2", ["BI01"])])
def test_commands_before_in_the_same_log_do_not_explain_a_failure(tmp_path, order, known):
    """Found so: uv met another hash, and the glibc of the run before was named, whose command had succeeded since."""
    log = tmp_path / "install-main.log"
    text = {"1": "echo no hash was computed", "2": "echo \"ModuleNotFoundError: No module named 'torch'\""}
    for name in order:
        process.run(["sh", "-c", f"{text[name]}; false"], what="install", log=log, check=False)
    assert [failure["id"] for failure in as_json(BuildError("it", why="", log=log))["known"]] == known


def test_failures_of_earlier_stages_do_not_explain_a_failed_certification():
    why = "ModuleNotFoundError: No module named 'torch'"
    assert "BI01" in [known["id"] for known in as_json(BuildError("it", why=why))["known"]]
    assert "BI01" not in [known["id"] for known in as_json(CertificationFailedError("it", why=why))["known"]]


@pytest.mark.parametrize("kind", list(KINDS))
def test_list(project, kind, capsys):
    assert run(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[kind]
    assert rows
    for row in rows:
        assert Path(row["path"]).is_file()
        assert Path(row["path"]).stem == row["name"]
        assert row["summary"]
        assert ("targets" in row) == (kind == "stacks")
    assert run(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [row["name"] for row in rows]


def test_list_shows_own_definitions_and_reports_broken_ones(project, capsys):
    own = project / "envs" / "targets" / "mine.toml"
    own.parent.mkdir(parents=True)
    own.write_text('summary = "my target"\ndevice = "cpu"\nplatform = "linux/amd64"\n')
    assert run(["list", "targets"]) == 0
    assert re.search(r"^mine +my target  \[envs/targets/mine.toml\]$", capsys.readouterr().out, re.MULTILINE)
    own.write_text("sumary = 1\n")
    assert run(["list", "targets"]) == 3
    shown, message = capsys.readouterr()
    assert "mine.toml:1" in message
    assert {"cpu", "h200"} <= {line.split()[0] for line in shown.splitlines()}
    (own.parent / "folder.toml").mkdir()
    (own.parent / "link.toml").symlink_to("nowhere")
    assert run(["list", "targets", "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert {"cpu", "h200"} <= {row["name"] for row in result["targets"]}
    assert result["error"]["exit_code"] == 3
    for part in (
        "mine.toml:1",
        "folder.toml is not a file\nIt is a directory",
        "link.toml is not a file",
        "to nowhere",
    ):
        assert part in result["error"]["why"]


def test_misspelled_folder_is_noted(project, capsys):
    (project / "envs" / "stakcs").mkdir(parents=True)
    (project / "envs" / "stakcs" / "mine.toml").write_text("")
    assert run(["lock", "--stack", "mine"]) == 3
    message = capsys.readouterr().err
    assert f"note: {project / 'envs' / 'stakcs'} is not read. Did you mean 'stacks'?" in message
    assert run(["list", "stacks", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_current_directory_that_was_removed(project, capsys):
    gone = project / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    for arguments in (["list", "stacks"], ["lock", "--stack", "mcore"], ["schema", "--into", "here"]):
        assert run(arguments) == 11
        assert "the current directory does not exist any more" in capsys.readouterr().err


def test_schema_of_one_kind_and_of_all(project, capsys):
    assert run(["schema", "--json"]) == 0
    schemas = json.loads(capsys.readouterr().out)
    assert set(schemas) == set(ALL)
    for kind, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert run(["schema", kind]) == 0
        assert json.loads(capsys.readouterr().out) == schema


def test_schema_into_files(project, capsys):
    assert run(["schema", "--into", "schemas", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert sorted(Path(name).name for name in written) == sorted(f"{kind}.schema.json" for kind in ALL)
    assert all(json.loads(Path(name).read_text())["additionalProperties"] is False for name in written)


def test_image_for_a_cluster_that_cannot_read_it_is_refused_at_once(project, capsys):
    cluster = project / "envs/clusters/old.toml"
    cluster.parent.mkdir(parents=True)
    cluster.write_text('summary = "old tools"\nsqsh_compression = ["gzip"]\n')
    assert run(["image", "--stack", "mcore", "--target", "cpu", "--cluster", "old"]) == 3
    message = capsys.readouterr().err
    assert "nodes of cluster old cannot read a .sqsh compressed with zstd" in message
    assert "--sqsh-compression gzip" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("image --target cpu --format oci --sqsh-compression zstd", "--sqsh-compression has no effect without a .sqsh"),
        ("export --format dockerfile", "--format dockerfile needs --output DIR"),
        ("export --format dockerfile --output d --phases main", "--phases has no effect"),
        ("export --format requirements --output .", "--output . is a folder"),
        ("export --format pylock --output lock.toml", "is not a name of a pylock.toml"),
    ],
)
def test_options_that_do_not_fit_the_format_are_refused(project, capsys, arguments, words):
    assert run([*arguments.split(), "--stack", "mcore"]) == 2
    assert words in capsys.readouterr().err


def test_out_dir_that_cannot_be_written_is_refused_before_work_starts(project, capsys):
    make_lock(project / "lockfiles" / "mcore" / "debian12")
    (project / "file").write_text("")
    arguments = ["image", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--out-dir"]
    assert run([*arguments, "file/out"]) == 11
    assert "cannot write" in capsys.readouterr().err
    mine = project / "out/images/mcore-debian12-cpu/results.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert run([*arguments, "out"]) == 3
    assert "results.txt" in capsys.readouterr().err


def test_missing_image_names_the_command_that_puts_it_there(project, capsys):
    make_lock(project / "lockfiles" / "mcore" / "debian12")
    arguments = ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12"]
    command = "envbuild image --stack mcore --base debian12 --target cpu"
    assert run([*arguments, "--out-dir", "some where"]) == 3
    assert f"{command} --out-dir 'some where' --format oci,sqsh" in capsys.readouterr().err
    assert run(arguments) == 3
    assert f"{command} --format oci,sqsh" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["image", "certify"])
def test_command_without_a_lock_names_the_command_that_makes_it(project, name, capsys):
    write_stack(project, "mine", {"torch": {"version": "==2.13.0"}}, base="debian12")
    assert run([name, "--stack", "mine", "--target", "cpu", "--base", "debian12"]) == 3
    message = capsys.readouterr().err
    assert "there is no lock of stack mine on base debian12" in message
    assert "envbuild lock --stack mine --base debian12" in message


def test_tampered_lock_is_refused_with_the_way_out(project, capsys):
    make_lock(project / "lockfiles" / "mcore" / "debian12")
    (project / "lockfiles" / "mcore" / "debian12" / "main.txt").write_text("evil==1\n")
    for command in ("lock", "image", "certify"):
        assert run([command, "--stack", "mcore", "--target", "cpu", "--base", "debian12"]) == 5
        message = capsys.readouterr().err
        assert "was changed after it was made" in message
        assert "--upgrade" in message


@pytest.mark.parametrize(
    "arguments",
    [["lock"], ["lock", "--diff"], ["lock", "--check"], ["image"], ["certify"], ["export", "--format", "cyclonedx"]],
)
@pytest.mark.parametrize(("newer", "expected"), [(False, "is damaged"), (True, "written by a newer envbuild")])
def test_damaged_lock_is_refused_by_every_command(project, arguments, newer, expected, capsys):
    record = project / "lockfiles" / "mcore" / "debian12" / "stack.lock.toml"
    make_lock(record.parent)
    record.write_text(record.read_text().replace("envbuild.lock/1", "envbuild.lock/2") if newer else "")
    target = [] if "--check" in arguments else ["--target", "cpu"]
    assert run([*arguments, "--stack", "mcore", "--base", "debian12", *target]) == 5
    message = capsys.readouterr().err
    assert expected in message
    assert ("Update envbuild" in message) == (newer and "--check" not in arguments)


def test_fault_of_envbuild_shows_the_traceback(project, monkeypatch, capsys):
    import envbuild.catalog.catalog

    monkeypatch.setattr(envbuild.catalog.catalog.Catalog, "open", lambda _: 1 // 0)
    assert run(["list", "stacks"]) == 1
    message = capsys.readouterr().err
    assert "envbuild has a fault: ZeroDivisionError" in message
    assert "Traceback" in message
    assert "report" in message


def test_uncaught_os_error_has_no_traceback(project, monkeypatch, capsys):
    import envbuild.catalog.catalog

    def refuse(_):
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(envbuild.catalog.catalog.Catalog, "open", refuse)
    assert run(["list", "stacks"]) == 11
    message = capsys.readouterr().err
    assert "/some/file" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("arguments", [["list", "targets"], ["--help"]])
def test_reader_that_leaves_makes_no_noise(project, arguments):
    """As `envbuild schema | head -1` does, only sooner: nobody reads at all."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*ENVBUILD, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 0)


def test_reader_that_leaves_does_not_turn_a_failure_into_success(project):
    arguments = ["lock", "--stack", "no", "--target", "cpu", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*ENVBUILD, *arguments], stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == run(arguments) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_with_130_and_no_traceback(project, number):
    done = interrupt(project, number, "--json")
    assert done.returncode == 130
    assert json.loads(done.stdout)["error"]["kind"] == "InterruptedByUserError"
    assert "error: interrupted" in done.stderr
    assert "Run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "lockfiles").exists()


def interrupt(project: Path, number: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Send a signal while `lock` waits for the lock that another process holds."""
    from envbuild.core.digests import sha256_bytes, short
    from envbuild.core.locks import exclusive

    place = project / "lockfiles" / "mcore" / "debian12"
    key = short(sha256_bytes(str(place.resolve()).encode()))
    command = [*ENVBUILD, "lock", "--stack", "mcore", "--target", "cpu", "--base", "debian12", *arguments]
    with exclusive(project.parent / "cache" / "locks" / f"lockfiles-{key}.lock"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = []
        assert process.stderr is not None
        while not lines or "waiting" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1]
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
