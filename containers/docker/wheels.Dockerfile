
# Wheels of what comes as sources and is not in the wheelhouse. Only the wheels leave this stage.
FROM base AS wheels
RUN @APT_MOUNTS@ \
    . @TOOLS@/steps.sh && . @INSIDE@/apt/proxies.sh && \
    export APT_CONFIG=@INSIDE@/apt/apt.conf DEBIAN_FRONTEND=noninteractive && \
    apt-get -q update && apt-get -q install --yes --no-install-recommends @COMPILERS@
RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && \
    @TOOLS@/uv venv --python @PYTHON@ --no-project @VENV@@INSTALL@
