# Written by `envbuild export --format dockerfile`: mini on debian12 for CPUs.
#   docker build --tag mini:debian12-cpu .      (or docker buildx build, podman build, kaniko)
#   --build-arg INDEX_URL=https://...   the package index; without it, uv's default
#   --build-arg TORCH_INDEX_URL=https://...   an index with torch's build cpu, where the package index lacks it

# The base, a root file system.
FROM scratch AS base
ADD base.tar.gz /

# Phase main: an empty environment, and what installs without the packages before it.
FROM base AS main
USER 0
ARG INDEX_URL
ARG TORCH_INDEX_URL
ENV VIRTUAL_ENV=/opt/envbuild/venv \
    UV_PYTHON_DOWNLOADS=never \
    UV_NO_CACHE=1 \
    UV_NO_PROGRESS=1 \
    UV_COMPILE_BYTECODE=1 \
    PYC_INVALIDATION_MODE=UNCHECKED_HASH
COPY tools/uv /usr/local/bin/uv
RUN uv venv --python /usr/bin/python3.11 --no-project /opt/envbuild/venv
COPY lock/main.txt /build/lock/
RUN uv pip install --no-deps --require-hashes \
    ${INDEX_URL:+--index-url "$INDEX_URL"} ${TORCH_INDEX_URL:+--index "$TORCH_INDEX_URL" --index-strategy unsafe-best-match} --requirements /build/lock/main.txt

# Phases compile and git.
FROM main AS environment
ARG INDEX_URL
ARG TORCH_INDEX_URL
# The environment has the locked packages and no others.
COPY lock/packages.txt /build/lock/
RUN uv pip list --format freeze | diff /build/lock/packages.txt -

# The image: the base, the environment, and envbuild's own files.
FROM base
COPY --from=environment /opt/envbuild/ /opt/envbuild/
ADD configuration.tar.gz /
ENV PATH="/opt/envbuild/venv/bin:/bin" \
    LANG="C.UTF-8"
LABEL "a"="b\"c" \
    "envbuild.stack"="mini"
CMD ["/bin/bash"]
