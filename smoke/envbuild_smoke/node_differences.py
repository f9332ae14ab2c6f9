"""In what a node of a run differs from node 0: both must run the same on the same."""

from collections.abc import Iterator

from envbuild_smoke.results import NodeState


def node_differences(node: NodeState, first: NodeState) -> Iterator[str]:
    """Give, in words, each thing that is another one on a node than on node 0."""
    for what, there, here in _compared(node, first):
        if there != here:
            yield f"{what}: {there}, and {here} on node 0"
    versions, expected = node.environment.versions, first.environment.versions
    for name in sorted({*versions, *expected}):
        there, here = versions.get(name), expected.get(name)
        if there != here:
            yield f"{name} {there or 'is missing'}, and {here or 'none'} on node 0"
    for module, file in node.environment.files.items():
        if file != (here := first.environment.files.get(module)):
            yield f"{module} is imported from {file}, and from {here} on node 0"
    if set(node.environment_findings) != set(first.environment_findings):
        for finding in node.environment_findings:
            if finding not in first.environment_findings:
                text = f"expected {finding.expected or 'none'}, found {finding.found or 'none'}"
                yield f"{finding.code}: {finding.package or 'the environment'}: {text}, and not so on node 0"


def _compared(node: NodeState, first: NodeState) -> Iterator[tuple[str, object, object]]:
    yield "image", node.image and node.image.file_digest, first.image and first.image.file_digest
    yield "lock of the image", _lock_of(node), _lock_of(first)
    yield "GPUs", _gpus(node), _gpus(first)
    yield "driver", _drivers(node), _drivers(first)
    yield "NCCL", node.machine.nccl, first.machine.nccl
    yield "Python", node.environment.python, first.environment.python


def _lock_of(node: NodeState) -> object:
    fingerprint = node.image and node.image.fingerprint
    return fingerprint and fingerprint.get("lock_digest")


def _gpus(node: NodeState) -> str:
    names = [gpu.name for gpu in node.machine.gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _drivers(node: NodeState) -> str:
    return ", ".join(sorted({gpu.driver for gpu in node.machine.gpus})) or "none"
