"""Processes that run the same pull at once: one asks, and nobody gets an answer that is older than their question."""

import json
import os
import threading
import time

import pytest

from envbuild.cli import follow as follow_module
from envbuild.cli.follow import follow, leave, place
from envbuild.core.errors import InternalError, InterruptedByUserError, PublicationRefusedError
from envbuild.core.files import clone_or_copy

WORDS = ["pull", "host/repo:tag"]


class Ranks:
    """Processes of a job, as far as `follow` knows them: each with the moment at which it began."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder = folder
        self.asked = 0
        self.began = None
        self.file = folder / "store"
        self.file.write_bytes(b"a squashfs file")
        monkeypatch.setattr(follow_module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() if self.began is None else self.began

    def ask(self) -> int:
        self.asked += 1
        found = {"path": str(self.file), "size_bytes": 15, "certificate": None, "number": self.asked}
        leave(time.monotonic(), found, [f"number {self.asked}"])
        return 0

    def run(self, *more, began=None, ask=None) -> int:
        self.began = began
        try:
            return follow([*WORDS, *more], ask or self.ask)
        finally:
            self.began = None


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Ranks:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Ranks(tmp_path, monkeypatch)


def test_answer_is_no_older_than_the_question(ranks, capsys):
    began = time.monotonic()
    ranks.run()
    ranks.run(began=began)
    assert ranks.asked == 1
    assert capsys.readouterr().out == f"number 1\n{ranks.file}\n"
    ranks.run()
    assert ranks.asked == 2


def test_each_process_has_its_own_output(ranks, capsys):
    began = time.monotonic()
    ranks.run()
    for form in (["--output", "{}/a"], ["--output={}/a"], ["--json", "--output", "{}/deep/b"], ["-q"], ["--json"]):
        ranks.run(*(word.format(ranks.folder) for word in form), began=began)
    assert ranks.asked == 1
    for name in ("a", "deep/b"):
        assert (ranks.folder / name).read_bytes() == b"a squashfs file"
        # Whoever owns an output can write into it, and that must not be into the store.
        assert not os.path.samefile(ranks.folder / name, ranks.file)
    lines = capsys.readouterr().out
    assert f"number 1\n{ranks.folder}/a\n" in lines
    assert json.loads(lines[lines.rindex("{") :])["path"] == str(ranks.file)


@pytest.fixture
def copies(monkeypatch):
    """The files that are copied out of the store."""
    copied = []

    def clone(source, destination):
        copied.append(destination.name)
        clone_or_copy(source, destination)

    monkeypatch.setattr("envbuild.core.files.clone_or_copy", clone)
    return copied


def placing(ranks):
    def ask() -> int:
        ranks.ask()
        place({"path": str(ranks.file), "certificate": None}, str(ranks.folder / "a"))
        return 0

    return ask


def test_ranks_of_one_output_copy_it_once(ranks, copies):
    began = time.monotonic()
    output = ("--output", str(ranks.folder / "a"))
    ranks.run(*output, ask=placing(ranks))
    for _ in range(3):
        ranks.run(*output, began=began)
    # Of a later job, too.
    ranks.run(*output, ask=placing(ranks))
    assert (ranks.asked, copies) == (2, ["a"])


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"another image.."),
        lambda file: (os.utime(file, (0, 0)), file.write_bytes(b"another image.."), os.utime(file, (0, 0))),
        lambda file: file.chmod(0o666),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), file.symlink_to("store")),
        lambda file: (file.with_name("c").write_bytes(b"another image.."), file.with_name("c").replace(file)),
    ],
)
def test_an_output_that_was_changed_is_copied_again(ranks, copies, change):
    began = time.monotonic()
    output = ("--output", str(ranks.folder / "a"))
    ranks.run(*output, ask=placing(ranks))
    change(ranks.folder / "a")
    ranks.run(*output, began=began)
    assert (ranks.asked, copies) == (1, ["a", "a"])
    assert (ranks.folder / "a").read_bytes() == b"a squashfs file"
    assert not (ranks.folder / "a").is_symlink()


def test_an_output_of_an_older_image_is_copied_anew(ranks, copies):
    output = ("--output", str(ranks.folder / "a"))
    ranks.run(*output, ask=placing(ranks))
    # In the store a name is a digest.
    ranks.file = ranks.folder / "newer"
    ranks.file.write_bytes(b"a newer  image.")
    ranks.run(*output, ask=placing(ranks))
    assert copies == ["a", "a"]
    assert (ranks.folder / "a").read_bytes() == b"a newer  image."


def test_certificate_is_put_next_to_the_output(ranks):
    certificate = ranks.folder / "certificate"
    certificate.write_text("signed")
    found = {"path": str(ranks.file), "size_bytes": 15, "certificate": str(certificate)}
    began = time.monotonic()
    ranks.run(ask=lambda: leave(time.monotonic(), found, []) or 0)
    ranks.run("--output", str(ranks.folder / "a"), began=began)
    assert (ranks.folder / "a.intoto.jsonl").read_text() == "signed"


def test_other_questions_have_other_answers(ranks, monkeypatch):
    began = time.monotonic()
    ranks.run()
    ranks.run("--target", "h200", began=began)
    assert ranks.asked == 2
    monkeypatch.setenv("SLURM_PROCID", "1")
    ranks.run(began=began)
    assert ranks.asked == 2
    monkeypatch.setenv("ENVBUILD_TRUST", "x")
    ranks.run(began=began)
    assert ranks.asked == 3


@pytest.mark.parametrize("word", ["--help", "--format=oci", "--"])
def test_what_is_not_shared(ranks, word):
    began = time.monotonic()
    for _ in range(2):
        ranks.run(word, began=began)
    assert ranks.asked == 2


def test_those_who_wait_take_one_answer(ranks, capsys):
    inside, let_go = threading.Event(), threading.Event()
    waiting = threading.Semaphore(0)

    class Stderr:
        def write(self, text):
            assert "waiting for it" in text
            waiting.release()

    def slow() -> int:
        inside.set()
        let_go.wait()
        return ranks.ask()

    first = threading.Thread(target=lambda: ranks.run(ask=slow))
    first.start()
    inside.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow_module.sys, "stderr", Stderr())
        others = [threading.Thread(target=ranks.run) for _ in range(8)]
        for thread in others:
            thread.start()
        for _ in others:
            waiting.acquire()
        let_go.set()
        for thread in [first, *others]:
            thread.join()
    assert ranks.asked == 1
    assert capsys.readouterr().out.count("number 1\n") == 8


def test_failure_is_shared_with_those_who_waited(ranks):
    def fail() -> int:
        ranks.asked += 1
        raise PublicationRefusedError("what", why="why", fix="fix", reason="revoked")

    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(PublicationRefusedError, match="what") as refused:
            ranks.run(began=began, ask=fail)
        assert (refused.value.why, refused.value.fix, refused.value.reason) == ("why", "fix", "revoked")
    assert ranks.asked == 1
    with pytest.raises(PublicationRefusedError):
        ranks.run(ask=fail)
    assert ranks.asked == 2


@pytest.mark.parametrize("error", [InterruptedByUserError(), InternalError("a bug"), KeyboardInterrupt(), ValueError()])
def test_what_happened_to_one_process_is_not_shared(ranks, error):
    def fail() -> int:
        raise error

    began = time.monotonic()
    with pytest.raises(type(error)):
        ranks.run(began=began, ask=fail)
    ranks.run(began=began)
    assert ranks.asked == 1


def test_usage_error_is_of_one_process(ranks):
    began = time.monotonic()
    assert ranks.run(began=began, ask=lambda: 2) == 2
    ranks.run(began=began)
    assert ranks.asked == 1


def test_file_that_was_changed_since_is_asked_for(ranks):
    began = time.monotonic()
    ranks.run()
    ranks.file.write_bytes(b"another file...")
    ranks.run(began=began)
    assert ranks.asked == 2
    ranks.file.unlink()
    ranks.file.write_bytes(b"a third")
    ranks.run(began=began)
    assert ranks.asked == 3
    before = ranks.file.stat()
    ranks.file.write_bytes(b"another")
    os.utime(ranks.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    ranks.run(began=began)
    assert ranks.asked == 4


def test_answer_of_another_clock_or_version_does_not_count(ranks, monkeypatch):
    began = time.monotonic()
    ranks.run()
    with monkeypatch.context() as patch:
        patch.setattr(follow_module, "_clock", lambda: "after a reboot")
        ranks.run(began=began)
    (file,) = ranks.folder.rglob("pulls/*.json")
    for content in ("{", "[]", '{"clock": 1}'):
        file.write_text(content)
        ranks.run(began=began)
    assert ranks.asked == 5


def test_place_of_another_account_is_not_used(ranks):
    folder = ranks.folder / "elsewhere"
    folder.mkdir(0o700)
    place = ranks.folder / f"envbuild-{os.geteuid()}"
    place.symlink_to(folder)
    ranks.run()
    assert not list(folder.iterdir())
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    ranks.run()
    assert ranks.asked == 2
    assert not list(place.iterdir())


def test_secrets_of_the_environment_are_not_written(ranks, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
    ranks.run()
    written = [path for path in ranks.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"open-sesame" in path.read_bytes() or "open-sesame" in str(path)]
