"""The environment that wheels are compiled in, where the machine's glibc is older than the base's."""

from types import SimpleNamespace

import pytest

from envbuild.core.errors import BuildError
from envbuild.core.progress import SilentReporter
from envbuild.sync import build_environment

# As uv 0.13.8 prints it.
NO_WHEEL = (
    "No solution found when resolving dependencies:\n"
    "Because {name}{{sys_platform == 'linux'}}==0.6.0 has no wheels with a matching platform tag (e.g., "
    "`manylinux_2_36_x86_64`) and you require {name}==0.6.0, we can conclude that your requirements are unsatisfiable."
)


def install(monkeypatch, unfit, base_glibc="9.99", why=NO_WHEEL):
    """What is left out once everything else installs."""
    tried = []

    def install_packages(_lock, _place, _arguments, _reporter, scope):
        tried.append(set(scope.leave_out))
        missing = [name for name in unfit if name not in scope.leave_out]
        if missing:
            raise BuildError("cannot install phase main", why=why.format(name=missing[0]), fix="")

    monkeypatch.setattr(build_environment, "install_packages", install_packages)
    monkeypatch.setattr(build_environment, "make_venv", lambda *_arguments, **_options: None)
    lock = SimpleNamespace(lock=SimpleNamespace(base=SimpleNamespace(platform="linux/amd64", glibc=base_glibc)))
    build_environment._install_what_fits(lock, SimpleNamespace(), (), SilentReporter())
    return tried[-1]


def test_what_needs_a_newer_glibc_is_left_out(monkeypatch):
    assert install(monkeypatch, ()) == set()
    assert install(monkeypatch, ("nvidia-resiliency-ext", "other.one")) == {"nvidia-resiliency-ext", "other.one"}


@pytest.mark.parametrize(
    ("unfit", "options"),
    [
        (("torch",), {}),
        # The machine is as new as the base: such a wheel is missing for the base, too.
        (("lib",), {"base_glibc": "2.17"}),
        (("lib",), {"why": "Hash mismatch for `{name}==0.6.0`"}),
    ],
)
def test_other_failures_stay(monkeypatch, unfit, options):
    with pytest.raises(BuildError):
        install(monkeypatch, unfit, **options)
