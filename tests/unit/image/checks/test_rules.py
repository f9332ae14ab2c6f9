"""Each check finds what it is for, planted in a layer, and nothing in one without it."""

from types import SimpleNamespace

import pytest
from helpers.errors import error_of
from helpers.layer_tars import file, folder, symlink
from helpers.notes import Notes
from helpers.scans import AWS_KEY, PRIVATE_KEY, SITE, package, scanned

from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.image.checks.contents import ImageContents
from envbuild.image.checks.rules import RULES, check_image, secrets
from envbuild.image.scan.models import GpuFile
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.prebuilt import FileCode

ELF = b"\x7fELF" + bytes(60)
VENV = "/opt/envbuild/venv"
CLEAN = [
    file("var/lib/dpkg/info/passwd.list", b"/.\n/bin/su\n"),
    file("usr/bin/su", b"x", mode=0o4755),
    folder("tmp", 0o1777),
    folder("var/mail", 0o2775),
    file("var/lib/apt/lists/lock"),
    file("etc/hosts", b"127.0.0.1 localhost\n"),
    file(f"{SITE}/torch/lib/libtorch.so", ELF),
    file(f"{SITE}/torch/lib/libtorch_cpu.so", ELF),
    file(f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9", ELF),
    file(f"{SITE}/nvidia/cudnn/lib/libcudnn_ops.so.9", ELF),
    symlink("usr/lib/libnccl.so", "libnccl.so.2"),
    file("usr/lib/libtorchaudio.so", ELF),
]


def facts(tmp_path, *items, **more):
    kept = scanned(tmp_path, *CLEAN, *items)
    return ImageContents(layers=(kept,), variables=more.pop("variables", {}), labels=more.pop("labels", {}), **more)


def found(given: ImageContents) -> dict[str, list[str]]:
    return {code: texts for code, rule in RULES.items() if (texts := [item.text for item in rule(given)])}


def test_clean_image_passes_every_check(tmp_path):
    given = facts(tmp_path, loaded=(f"{VENV}/lib/libtorch.so", "/usr/lib/libc.so.6"), environment=VENV)
    assert found(given) == {}
    records = check_image(given, (), SilentReporter())
    assert set(records) == set(RULES)
    assert not any(record.findings or record.allowed for record in records.values())


@pytest.mark.parametrize(
    ("item", "code", "words"),
    [
        (file("usr/bin/mine", b"x", mode=0o4755), "setuid", "/usr/bin/mine has mode 4755"),
        (file("usr/bin/mine", b"x", mode=0o2755), "setuid", "/usr/bin/mine has mode 2755"),
        (file("etc/open", b"x", mode=0o666), "world-writable", "/etc/open has mode 666"),
        (folder("srv/open", 0o777), "world-writable", "/srv/open has mode 777"),
        (file("srv/notes", AWS_KEY), "secrets", "/srv/notes holds an AWS access key"),
        (file("srv/u/.ssh/id_ed25519", PRIVATE_KEY), "secrets", "/srv/u/.ssh/id_ed25519 holds a private key"),
        (file("var/lib/apt/lists/deb_Packages", b"x"), "caches", "/var/lib/apt/lists/deb_Packages"),
        (file("var/cache/apt/archives/x_1_amd64.deb", b"x"), "caches", "/var/cache/apt/archives/x_1_amd64.deb"),
        (file("home/u/.cache/pip/x", b"x"), "caches", "/home/u/.cache/pip/x"),
        (file("tmp/left", b"x"), "caches", "/tmp/left"),
        (file("var/log/dpkg.log", b"x"), "caches", "/var/log/dpkg.log"),
        (file(f"{SITE}/x-1.dist-info/uv_cache.json", b"x"), "caches", "uv_cache.json"),
        (file(f"{SITE}/x.pyc", b"\0/data/build/store/y\0"), "builder-paths", "/data/build/store is named in"),
        (file("opt/envbuild/venv/bin/x", b"#!/run/envbuild/uv\n"), "builder-paths", "/run/envbuild is named in"),
        (file("usr/lib/libcudnn.so.8", ELF), "duplicates", "cuDNN is there more than once"),
        (file("usr/lib/libtorch_cuda.so", ELF), "duplicates", "torch is there more than once"),
    ],
)
def test_planted(tmp_path, item, code, words):
    given = facts(tmp_path, item)
    [(only, texts)] = found(given).items()
    assert (only, len(texts)) == (code, 1)
    assert words in texts[0]
    error = error_of(
        CheckRefusedError, check_image, given, [other for other in RULES if other != code], SilentReporter()
    )
    assert error.codes == {code}
    assert words in error.why
    assert f"--allow {code}" in error.fix
    records = check_image(given, [code], SilentReporter())
    assert (records[code].findings, records[code].allowed) == (tuple(texts), True)


def test_two_copies_of_nccl_in_two_layers(tmp_path):
    layers = [
        scanned(tmp_path / name, file(f"{place}/{library}", ELF))
        for name, place, library in (("a", "usr/lib", "libnccl.so.2"), ("b", f"{SITE}/x.libs", "libnccl-0a1b2c3d.so.2"))
    ]
    given = ImageContents(layers=tuple(layers), variables={}, labels={})
    assert list(found(given)) == ["duplicates"]
    assert found(ImageContents(layers=(layers[0], layers[0]), variables={}, labels={})) == {}


def test_bytecode_of_a_published_file_is_no_secret():
    """transformers 4.57 ships a token of its own tests: RECORD vouches for the source, and has no bytecode."""

    def hit(path: str, *, vouched: bool = False) -> SimpleNamespace:
        return SimpleNamespace(path=f"{SITE}/{path}", what="a token", vouched=vouched)

    hits = [
        hit("lib/testing.py", vouched=True),
        hit("lib/__pycache__/testing.cpython-311.pyc"),
        hit("lib/__pycache__/own.cpython-311.pyc"),
        hit("lib/testing.pyc"),
    ]
    image = SimpleNamespace(scans=lambda: [(SimpleNamespace(secrets=hits), False)], variables={}, labels={})
    assert [finding.text for finding in secrets(image)] == [
        f"/{SITE}/lib/__pycache__/own.cpython-311.pyc holds a token",
        f"/{SITE}/lib/testing.pyc holds a token",
    ]


def test_credentials_in_the_configuration(tmp_path):
    given = facts(tmp_path, variables={"HF_TOKEN": "x"}, labels={"index": "https://u:p@h/simple"})
    assert found(given) == {
        "secrets": ["the variable HF_TOKEN holds a credential", "the label index holds a credential"]
    }


def test_upper_layer_may_not_make_a_debian_program_run_as_root(tmp_path):
    lower = scanned(tmp_path / "a", file("var/lib/dpkg/info/x.list", b"/usr/bin/x\n"), file("usr/bin/x", b"x"))
    upper = scanned(tmp_path / "b", file("usr/bin/x", b"x", mode=0o4755))
    given = ImageContents(layers=(lower, upper), variables={}, labels={})
    assert list(found(given)) == ["setuid"]


def test_finding_in_the_layer_of_an_imported_base_is_reported_and_not_refused(tmp_path):
    given = facts(tmp_path, file("tmp/left", b"x"))
    theirs = ImageContents(layers=given.layers, variables={}, labels={}, of_base=frozenset({given.layers[0].digest}))
    reporter = Notes()
    records = check_image(theirs, (), reporter)
    assert records["caches"].findings == ("layer planted has /tmp/left (in the base)",)
    assert reporter.lines == ["note: caches: layer planted has /tmp/left (in the base)"]


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ((f"{VENV}/a/libtorch.so", "/usr/lib/libcudnn.so.9"), "cuDNN from /usr/lib/libcudnn.so.9"),
        ((f"{VENV}/a/libnccl.so.2", f"{VENV}/b/libnccl.so.2"), "libnccl more than once"),
    ],
)
def test_what_torch_loads(tmp_path, loaded, words):
    given = facts(tmp_path, loaded=loaded, environment=VENV)
    assert list(found(given)) == ["loaded"]
    assert words in found(given)["loaded"][0]


def test_torch_of_the_base_may_load_libraries_of_the_base(tmp_path):
    given = facts(tmp_path, loaded=("/usr/lib/libcudnn.so.9",), environment=VENV, provided=frozenset({"torch"}))
    assert found(given) == {}


def gpu(tmp_path, *codes: tuple[str, tuple[str, ...]], sm=("90",), compiled=None, names=("torch",)):
    given = facts(tmp_path, *[item for name in names for item in package(name, "1.0")], sm=sm, compiled=compiled or {})
    files = tuple(
        GpuFile(package=name, version="1.0", code=FileCode(file=f"{name}.so", sm=has, size_bytes=1))
        for name, has in codes
    )
    scan = given.layers[0].scan.model_copy(update={"gpu": files})
    kept = type(given.layers[0])(name="x", digest="x", scan=scan, listing=given.layers[0].listing)
    return ImageContents(layers=(kept,), variables={}, labels={}, sm=given.sm, compiled=given.compiled)


FOR_90 = Architectures.named(["90"])


def test_prebuilt_code_must_contain_the_target(tmp_path):
    assert found(gpu(tmp_path / "a", ("torch", ("80", "90", "100")))) == {}
    findings = found(gpu(tmp_path / "b", ("torch", ("80",)), sm=("100",)))["architectures"]
    assert findings == ["torch 1.0 has nothing for sm_100, but sm_80"]
    assert found(gpu(tmp_path / "c"))["architectures"] == ["torch 1.0 has nothing for sm_90, but no GPU code"]
    assert found(gpu(tmp_path / "d", ("torch", ("80",)), sm=())) == {}


def test_compiled_code_must_be_exactly_the_target(tmp_path):
    good = ("torch", ("90",))
    compiled = {"kernels": FOR_90}
    assert found(gpu(tmp_path / "a", good, ("kernels", ("90",)), compiled=compiled)) == {}
    assert found(gpu(tmp_path / "b", good, compiled=compiled)) == {}
    findings = found(gpu(tmp_path / "c", good, ("kernels", ("80", "90")), compiled=compiled))["architectures"]
    assert findings == ["kernels contains sm_80, sm_90; compiled for the target is sm_90"]


def test_a_variable_names_what_is_there(tmp_path):
    inside = VENV.lstrip("/")
    items = [file(f"{inside}/lib/python3.11/site-packages/nvidia/nccl/lib/libx.so", b"x")]
    folder = f"{VENV}/lib/python3.11/site-packages/nvidia"
    there = {"A": f"{folder}/nccl/lib:/usr/lib", "B": f"{folder}/nccl", "C": "/elsewhere", "D": "x"}
    assert "variables" not in found(facts(tmp_path / "a", *items, variables=there, environment=VENV))
    wrong = there | {"E": f"{folder}/nccl/lib:{folder}/cu13/lib"}
    (text,) = found(facts(tmp_path / "b", *items, variables=wrong, environment=VENV))["variables"]
    assert text == f"the variable E names {folder}/cu13/lib, which is not there"


SITE_HEADERS = f"{SITE}/nvidia/cu13/include"
COMPILES = [
    file("usr/bin/gcc-12", b"x"),
    symlink("usr/bin/gcc", "gcc-12"),
    file("usr/include/python3.11/Python.h", b"x"),
    file(f"{SITE_HEADERS}/cuda_runtime.h", b"x"),
]
HEADERS = {"NVTE_CUDA_INCLUDE_DIR": f"/{SITE_HEADERS}"}


def on_gpus(tmp_path, items, variables, *names):
    packages = [item for name in names for item in package(name, "1")]
    found_by = found(facts(tmp_path, *items, *packages, variables=variables, sm=("90",)))
    return {code: texts for code, texts in found_by.items() if code in ("compiler", "cuda-headers")}


def test_kernels_compiled_at_run_time_need_a_compiler_and_headers(tmp_path):
    assert on_gpus(tmp_path, COMPILES, HEADERS, "triton", "transformer_engine_cu13") == {}


@pytest.mark.parametrize(
    ("left_out", "variables", "code", "words"),
    [
        ("gcc", HEADERS, "compiler", "finds no C compiler"),
        ("Python.h", HEADERS, "compiler", "finds no Python's headers"),
        ("cuda_runtime.h", HEADERS, "cuda-headers", "finds no cuda_runtime.h"),
        ("", {}, "cuda-headers", "finds no cuda_runtime.h"),
        ("", {"CUDA_HOME": "/elsewhere"}, "cuda-headers", "finds no cuda_runtime.h"),
    ],
)
def test_what_would_fail_on_gpu_machines_alone_is_refused_here(tmp_path, left_out, variables, code, words):
    members = [(item[0] if isinstance(item, tuple) else item, item) for item in COMPILES]
    items = [item for member, item in members if not (left_out and member.name.endswith(left_out))]
    assert len(items) == len(COMPILES) - bool(left_out)
    [(only, [text])] = on_gpus(tmp_path, items, variables, "triton", "transformer_engine_cu13").items()
    assert only == code
    assert words in text


def test_where_nothing_is_compiled_nothing_is_needed(tmp_path):
    assert on_gpus(tmp_path, [], {}, "torch") == {}


def test_a_compiler_that_is_named_and_a_toolkit_count(tmp_path):
    items = [
        file("opt/python/include/python3.12/Python.h", b"x"),
        file("usr/local/cuda-13.0/targets/x86_64-linux/include/cuda_runtime.h", b"x"),
    ]
    assert on_gpus(tmp_path, items, {"CC": "/opt/gcc"}, "triton", "transformer_engine_cu13") == {}
    home = [*items[:1], file(f"{SITE_HEADERS}/cuda_runtime.h", b"x")]
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    variables = {"CC": "/opt/gcc", "CUDA_HOME": f"/{SITE}/nvidia/cu13"}
    assert on_gpus(elsewhere, home, variables, "triton", "transformer_engine_cu13") == {}
