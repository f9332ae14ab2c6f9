# Written by `envbuild export --format dockerfile`: nemo on ngc for sm_90.
#   docker build --tag nemo:ngc-h200 .      (or docker buildx build, podman build, kaniko)
#   --build-arg INDEX_URL=https://...   the package index; without it, uv's default

# The base, by its digest.
FROM registry.example/pytorch@sha256:0123 AS base

# Phase main: an empty environment, and what installs without the packages before it.
FROM base AS main
USER 0
ARG INDEX_URL
ENV VIRTUAL_ENV=/opt/envbuild/venv \
    UV_PYTHON_DOWNLOADS=never \
    UV_NO_CACHE=1 \
    UV_NO_PROGRESS=1 \
    UV_COMPILE_BYTECODE=1 \
    PYC_INVALIDATION_MODE=UNCHECKED_HASH
COPY tools/uv /usr/local/bin/uv
RUN uv venv --python /usr/bin/python3.12 --no-project --system-site-packages /opt/envbuild/venv
COPY lock/main.txt /build/lock/
RUN uv pip install --no-deps --require-hashes \
    ${INDEX_URL:+--index-url "$INDEX_URL"} --requirements /build/lock/main.txt
RUN uv pip install --no-deps --require-hashes --reinstall-package nvidia-cutlass-dsl-libs-cu13 \
    ${INDEX_URL:+--index-url "$INDEX_URL"} --requirements /build/lock/main.txt

# Compiles the wheels that are not in the context. Only /wheels leaves this stage.
FROM main AS wheels
RUN apt-get -q install gcc
ENV CC=gcc
ADD sources/te.tar.gz /build/sources/
RUN FLAGS='a '"'"'b'"'"'' \
    TORCH_CUDA_ARCH_LIST=9.0 \
    uv build --wheel --no-build-isolation --no-config --offline --out-dir /wheels /build/sources/te/pytorch

# Phases compile and git.
FROM main AS environment
ARG INDEX_URL
COPY wheels/ /build/wheels/
COPY --from=wheels /wheels/ /build/wheels/
RUN uv pip install --no-deps --no-index --find-links /build/wheels flash-attn te
COPY lock/compile.txt /build/lock/
RUN uv pip install --no-deps --require-hashes --no-build-isolation \
    ${INDEX_URL:+--index-url "$INDEX_URL"} --requirements /build/lock/compile.txt
ADD sources/megatron-core.tar.gz /build/sources/
RUN SETUPTOOLS_SCM_PRETEND_VERSION=1.0 \
    uv build --wheel --no-build-isolation --no-config --offline --out-dir /build/wheels /build/sources/megatron-core
RUN uv pip install --no-deps --no-index --find-links /build/wheels megatron-core
COPY lock/git.txt /build/lock/
RUN uv pip install --no-deps --no-build-isolation --requirements /build/lock/git.txt

# The image: the base, the environment, and envbuild's own files.
FROM base
COPY --from=environment /opt/envbuild/ /opt/envbuild/
ADD configuration.tar.gz /
ENV PYTHONPATH="" \
    PATH="/opt/envbuild/venv/bin:/usr/local/cuda/bin:/bin" \
    NVIDIA_REQUIRE_CUDA="cuda>=13.0"
LABEL "envbuild.stack"="nemo"
ENTRYPOINT []
HEALTHCHECK NONE
VOLUME ["/data"]
EXPOSE 8888/tcp
STOPSIGNAL SIGINT
WORKDIR /workspace
USER 1000
CMD ["/bin/bash"]
