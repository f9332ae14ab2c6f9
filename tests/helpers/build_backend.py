"""A build backend (PEP 517) for tests: a file of a project, or what an index has for setuptools."""

from __future__ import annotations

# A wheel of every module of the project, named by [project] or by what setup.py hands to setup().
BACKEND = """\
import pathlib
import runpy
import tomllib
import zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text()).get("project", {})
    if pathlib.Path("setup.py").exists():
        import setuptools

        runpy.run_path("setup.py")
        project = setuptools.stated
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    with zipfile.ZipFile(f"{folder}/{stem}-py3-none-any.whl", "w") as wheel:
        for file in pathlib.Path().rglob("*.py"):
            if file.name not in ("backend.py", "setup.py"):
                wheel.write(file)
        info = f"{stem}.dist-info"
        metadata = f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{stem}-py3-none-any.whl"
"""
SETUPTOOLS_MODULE = "stated = {}\n\n\ndef setup(**words):\n    stated.update(words)\n"


def pyproject(name: str, version: str) -> str:
    """A project with the backend in its file ``backend.py``."""
    return (
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
    )
