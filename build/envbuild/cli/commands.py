"""The commands by name, and the text of ``envbuild --help``, which is made from them without importing anything."""

from __future__ import annotations

# name: (module, one-line help). A command's module is imported when the command runs.
COMMANDS: dict[str, tuple[str, str]] = {
    "lock": ("envbuild.cli.lock", "Resolve a stack on a base into a hash-pinned lock."),
    "wheels": ("envbuild.cli.wheels", "Compile the wheels of a lock for a target's architectures only."),
    "sync": ("envbuild.cli.sync", "Install a lock into a virtual environment, phase by phase."),
    "export": ("envbuild.cli.export", "Write a lock as requirements, pylock.toml, CycloneDX SBOM or Dockerfile."),
    "image": ("envbuild.cli.image", "Build the image of a lock for a target: OCI layout and enroot .sqsh."),
    "certify": ("envbuild.cli.certify", "Train inside the image in every parallel layout and judge the numbers."),
    "render": ("envbuild.cli.render", "Print the batch script that runs a certification plan on a cluster."),
    "certificate": (
        "envbuild.cli.certificate",
        "Make signing keys; show and verify certificates.",
    ),
    "bisect": (
        "envbuild.cli.bisect",
        "Find the package or commit that breaks a lock, starting from a lock that works.",
    ),
    "ci": ("envbuild.cli.ci", "Write files for GitHub, systemd or Slurm that run `envbuild nightly`."),
    "publish": ("envbuild.cli.publish", "Publish certified images to a registry, or revoke them."),
    "nightly": ("envbuild.cli.nightly", "Lock, build, certify and publish what is new for each target."),
    "status": ("envbuild.cli.status", "Print the newest certified image of each stack and target, and its age."),
    "gc": ("envbuild.cli.gc", "Remove images that no tag, lock or recent nightly run needs."),
    "ledger": ("envbuild.cli.ledger", "Export the record of locks, images and nightly runs, or rebuild it."),
    "pull": ("envbuild.cli.pull", "Fetch a published image, after verifying its certificate and digest."),
    "importer": ("envbuild.cli.importer", "Serve certified images to pyxis."),
    "report": (
        "envbuild.cli.site",
        "Write a static site: certified images, how to pull them, results of nightly runs.",
    ),
    "list": ("envbuild.cli.list", "List stacks, bases, targets and other definitions."),
    "schema": ("envbuild.cli.schema", "Write the JSON schemas of the TOML files."),
}


def help_text() -> str:
    """The text of ``envbuild --help``."""
    # By hand: click would have to import every command for its first line.
    commands = "\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())
    return f"""\
Usage: envbuild COMMAND [OPTIONS]

  Reproducible, certified NeMo and Megatron training environments.

  envbuild lock    --stack mcore --target cpu
  envbuild image   --stack mcore --target cpu --format oci,sqsh
  envbuild certify --stack mcore --target cpu

Commands (each has its own --help; each takes --json and --quiet):
{commands}

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Exit codes: 0 done; 1 a fault of envbuild; 2 usage; 3 configuration; 4 resolution; 5 a check refused; 6 a build
failed; 7 a case failed; 8 certification could not run; 9 publication refused; 10 network, registry or store;
11 a tool, permission or disk space is missing; 12 certificate refused;
13 results refused; 14 the newest certified image is older than the policy allows; 130 interrupted.
"""
