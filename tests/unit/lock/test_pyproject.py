"""The uv project of a lock, against files that show all of it."""

from pathlib import Path

import pytest

from envbuild.catalog import toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Component, Stack
from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError
from envbuild.lock.components.models import Chosen, CompileMetadata, DecidedBy
from envbuild.lock.project.pyproject import Project, render_project, torch_specifier
from envbuild.lock.uv.torch_builds import TorchSource

GOLDEN = Path(__file__).with_name("golden")
STACK = """\
summary = "every kind of line"
driver = "mcore"
matrix = "certify-quick"
[[builds]]
target = "cpu"
bases = ["debian12"]
[components.torch]
version = "==2.13.0"
[components.megatron-core]
version = ">=0.16,<0.17"
extras = ["dev", "mlm"]
[components.flash-attn]
version = "==2.8.3"
phase = "compile"
[requirements.psutil]
reason = "undeclared"
[requirements.numpy]
version = "<3"
reason = "held back"
"""
PINS = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "megatron-core": "0.16.1"}
INDEX = TorchSource("torch-index", "https://torch.example/whl/cpu")
FOLDER = TorchSource("find-links", "/some/wheels")


def render(*, pins: dict | None = None, source: TorchSource | None = None, **changes: object) -> str:
    stack = toml.parse(STACK, Stack, "stack")
    arguments: dict = {
        "name": "everything",
        "base": Catalog.open(Path("/nonexistent")).base("debian12"),
        "torch_build": "cpu",
        "as_of": "2026-01-02T03:04:05Z",
        "chosen": {name: chosen(name, spec) for name, spec in stack.components.items()},
        "requirements": {name: requirement.version for name, requirement in stack.requirements.items()},
    }
    return render_project(Project(**(arguments | changes)), pins=pins, source=source)


def chosen(name: str, spec: Component, **changes: object) -> Chosen:
    arguments: dict = {"asked": spec.version, "origin": DecidedBy.STACK, "because": "a test", "specifier": spec.version}
    return Chosen(name=name, spec=spec, **(arguments | changes))


@pytest.mark.parametrize(
    ("golden", "changes"),
    [
        ("locked", {"pins": PINS}),
        ("working-torch-index", {"source": INDEX}),
        ("index-build", {"torch_build": "index", "pins": {"torch": "2.13.0"}}),
    ],
)
def test_render_project_golden(golden, changes):
    assert render(**changes) == (GOLDEN / f"{golden}.toml").read_text()


def test_metadata_of_the_compile_phase_is_of_one_version():
    # uv takes metadata without a version for every version, also for one that requires something else.
    metadata = CompileMetadata(
        name="flash-attn", version="2.8.3", sdist_digest="sha256:aa", requires_dist=("torch", "x ; extra == 'more'"),
        provides_extra=("more",), build_requires=(), rewritten=(),
    )  # fmt: skip
    assert tomlread.loads(render(metadata=(metadata,)))["tool"]["uv"]["dependency-metadata"] == [
        {
            "name": "flash-attn",
            "version": "2.8.3",
            "requires-dist": ["torch", "x ; extra == 'more'"],
            "provides-extra": ["more"],
        }
    ]


def test_no_place_is_written_and_pins_are_sorted():
    assert render(source=FOLDER) == render()
    assert "://" not in render(pins=PINS)
    assert render(pins=PINS) == render(pins=dict(reversed(PINS.items())))


def test_platform_of_the_base_decides_the_marker():
    base = Catalog.open(Path("/nonexistent")).base("debian12")
    arm = base.model_copy(update={"platform": "linux/arm64"})
    assert "platform_machine == 'aarch64'" in tomlread.loads(render(base=arm))["tool"]["uv"]["environments"][0]


@pytest.mark.parametrize("version", ["", ">=2.13", "==2.13.*", ">=2.12,<3", "==2.13.0,!=2", "==2.13.0+cu130", "~=2.13"])
def test_torch_specifier_of_a_range_has_no_build(version):
    with pytest.raises(ConfigurationError, match="asks for torch") as caught:
        torch_specifier(version, "cpu")
    assert "'==2.13.0'" in caught.value.fix
    assert torch_specifier(version, "index") == version
