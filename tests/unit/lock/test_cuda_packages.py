"""Which packages are for which CUDA, by their names."""

from envbuild.lock.uv.cuda_packages import cuda_packages, of_another_cuda

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
    assert cuda_packages(PACKAGES) == {"12": ["nvidia-cudnn-cu12"], "13": ["nvidia-cublas"]}


def test_packages_of_another_cuda_and_who_needs_them():
    assert of_another_cuda(PACKAGES, "13") == {"nvidia-cudnn-cu12", "torch"}
    assert of_another_cuda(PACKAGES, "12") == {"nvidia-cublas", "numba-cuda"}
    assert of_another_cuda(PACKAGES[-1:], "13") == set()
