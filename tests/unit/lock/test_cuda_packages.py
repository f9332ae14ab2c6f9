"""Which packages are for which CUDA, by their names."""

from helpers.locks import resolved_package

from envbuild.lock.uv.cuda_packages import cuda_packages

PACKAGES = [
    {"name": "torch", "version": "2.8.0", "dependencies": [{"name": "nvidia-cudnn-cu12"}, {"name": "sympy"}]},
    {"name": "nvidia-cudnn-cu12", "version": "9.10"},
    {"name": "numba-cuda", "version": "0.20", "optional-dependencies": {"cu13": [{"name": "nvidia-cublas"}]}},
    {"name": "nvidia-cublas", "version": "13.1.0.3"},
    {"name": "nemo-run", "version": "0.4.0", "dependencies": [{"name": "torch"}]},
    {"name": "nvidia-cutlass-dsl-libs-cu12", "version": "4.6"},
    {"name": "sympy", "version": "1.13"},
]


def test_packages_by_the_cuda_that_they_are_for():
    assert cuda_packages(map(resolved_package, PACKAGES)) == {"12": ["nvidia-cudnn-cu12"], "13": ["nvidia-cublas"]}
